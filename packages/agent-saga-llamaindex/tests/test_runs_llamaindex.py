"""`asaga_run`, `saga_run` and `asaga_stream`: how runs begin, wait, go on and end."""

import asyncio
import json
import threading
import warnings
from contextlib import aclosing, closing
from typing import Any

import pytest
from llama_index.core.agent.workflow import ToolCallResult
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import (
    Context,
    Event,
    HumanResponseEvent,
    InputRequiredEvent,
    StartEvent,
    StopEvent,
    Workflow,
    step,
)
from llamaindex_fakes import BY_AMOUNT, BY_RESULT, Till, agent, bounded, model, saying
from workflows.errors import WorkflowCancelledByUser, WorkflowTimeoutError
from workflows.events import WorkflowIdleEvent, WorkflowTimedOutEvent
from workflows.runtime.types.ticks import TickTimeout

from agent_saga_core import (
    DeclarationError,
    MemoryLog,
    RollbackIncomplete,
    SagaAborted,
    SagaBusy,
    SagaNotFound,
    SagaNotRunning,
    SagaStatus,
    StepStatus,
    read_saga,
    saga_scope,
    saga_tool,
)
from agent_saga_core.testing import ManualClock
from agent_saga_core.wrapping import REFUSALS
from agent_saga_llamaindex import SuspendedRun, asaga_run, asaga_stream, dump_state, saga_run, wrap_tool

YES = HumanResponseEvent(response="yes")


def charge_tool(till: Till, is_async: bool = False, **declaration: Any) -> FunctionTool:
    fn = till.afunction() if is_async else till.function()
    return wrap_tool(FunctionTool.from_defaults(fn), **{**BY_RESULT, **declaration})


def asking_tool() -> FunctionTool:
    async def confirm(ctx: Context, question: str) -> str:
        """Ask a person."""
        asked = InputRequiredEvent(prefix=question)
        answer = await ctx.wait_for_event(HumanResponseEvent, waiter_event=asked)
        return str(answer.response)

    return wrap_tool(FunctionTool.from_defaults(confirm), semantics="READ_ONLY")


def call(tool: str, **args: Any) -> list[tuple[str, str, dict[str, Any]]]:
    return [("call_0", tool, args)]


def status(log: MemoryLog, saga_id: str = "s") -> SagaStatus:
    return read_saga(log, saga_id).status


async def time_out(handler: Any) -> None:
    """Let the run's time be over now, as its own clock would say it."""
    await handler._external_adapter.send_event(TickTimeout(timeout=0.0))


class Held:
    """Holds a tool inside of its call."""

    def __init__(self, till: Till) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        till.on = self.hold

    def hold(self, _amount: int) -> None:
        self.inside.set()
        assert self.go.wait(30)

    async def is_inside(self) -> None:
        assert await asyncio.to_thread(self.inside.wait, 30)


async def read(stream: Any, until: type[Any] | None = None) -> None:
    async for event in stream:
        if until is not None and isinstance(event, until):
            return


# --- the facts of LlamaIndex that the tests below rest on


@bounded
async def test_llamaindex_ends_a_run_at_its_timeout_and_lets_a_sync_tool_finish(till: Till) -> None:
    held = Held(till)
    running = agent([FunctionTool.from_defaults(till.function())], saying(call("charge", amount=1)), timeout=3600.0)
    handler = running.run("go")
    await held.is_inside()
    await time_out(handler)
    with pytest.raises(WorkflowTimeoutError):
        await handler
    assert till.charged == [1] and not held.go.is_set(), "it is still inside"
    held.go.set()


@bounded
async def test_llamaindex_says_when_a_run_has_come_to_rest(till: Till) -> None:
    handler = agent([asking_tool()], saying(call("confirm", question="ok?"))).run("go")
    async with aclosing(handler.stream_events(expose_internal=True)) as events:
        async for event in events:
            if isinstance(event, WorkflowIdleEvent):
                break
    workers = handler.ctx.to_dict()["workers"].values()
    assert not any(worker["queue"] or worker["in_progress"] for worker in workers)
    assert [waiter["has_requirements"] for worker in workers for waiter in worker["collected_waiters"]] == [False]
    await handler.cancel_run()
    with pytest.raises(WorkflowCancelledByUser):
        await handler


# --- ends


@bounded
async def test_a_sync_tool_that_lands_after_the_workflow_timed_out_is_undone_once(till: Till) -> None:
    clock = ManualClock()
    log = MemoryLog(clock=clock)
    held = Held(till)
    running = agent([charge_tool(till)], saying(call("charge", amount=1)), timeout=3600.0)
    stream = asaga_stream(running, "go", saga_id="s", log=log)
    reading = asyncio.create_task(read(stream, WorkflowTimedOutEvent))
    await held.is_inside()
    await time_out(stream.handler)
    await reading
    end = asyncio.create_task(anext(stream))
    await asyncio.to_thread(clock.wait_until_waiting, due_in=30.0)
    assert not end.done() and till.acts == [("charge", 1)], "the saga did not wait for a call that still runs"
    held.go.set()
    with pytest.raises(WorkflowTimeoutError) as raised:
        await end
    assert any("ROLLED_BACK" in note for note in raised.value.__notes__)
    assert till.acts == [("charge", 1), ("refund", 1)]
    assert [step.status for step in read_saga(log, "s").steps] == [StepStatus.COMPENSATED]


@bounded
async def test_a_sync_tool_that_lands_after_the_saga_gave_up_waiting_is_undone_once(till: Till) -> None:
    clock = ManualClock()
    held, released = Held(till), threading.Event()

    class Watched(MemoryLog):
        """Says when the saga is owned no more."""

        def release(self, saga_id: str) -> None:
            super().release(saga_id)
            released.set()

    log = Watched(clock=clock)
    running = agent([charge_tool(till)], saying(call("charge", amount=1)), timeout=3600.0)
    stream = asaga_stream(running, "go", saga_id="s", log=log, drain_timeout=5.0)
    reading = asyncio.create_task(read(stream))
    await held.is_inside()
    await time_out(stream.handler)
    await asyncio.to_thread(clock.wait_until_waiting, due_in=5.0)
    clock.advance(5.0)
    with pytest.raises(RollbackIncomplete, match="charge"):
        await reading
    assert status(log) is SagaStatus.NEEDS_ATTENTION and till.refunded == [] and not released.is_set()
    held.go.set()
    assert await asyncio.to_thread(released.wait, 30)
    assert status(log) is SagaStatus.ROLLED_BACK and till.acts == [("charge", 1), ("refund", 1)]


@bounded
async def test_an_async_tool_that_the_timeout_cancels_is_settled(till: Till, log: MemoryLog) -> None:
    inside = asyncio.Event()

    async def hold(_amount: int) -> None:
        inside.set()
        await asyncio.Event().wait()

    till.on = hold
    running = agent([charge_tool(till, True, **BY_AMOUNT)], saying(call("charge", amount=1)), timeout=3600.0)
    stream = asaga_stream(running, "go", saga_id="s", log=log)
    reading = asyncio.create_task(read(stream))
    await inside.wait()
    await time_out(stream.handler)
    with pytest.raises(WorkflowTimeoutError):
        await reading
    assert till.acts == [("charge", 1), ("refund", 1)] and status(log) is SagaStatus.ROLLED_BACK


@pytest.mark.parametrize("error", [asyncio.CancelledError, type("Own", (BaseException,), {})])
@bounded
async def test_a_run_that_its_tool_hangs_is_rolled_back_when_it_is_given_up(
    till: Till, log: MemoryLog, error: type[BaseException]
) -> None:
    """LlamaIndex waits for ever for a step that ended in one of these; so does a saga's run, until it is cancelled."""
    raised = asyncio.Event()

    async def fail(_amount: int) -> None:
        raised.set()
        raise error

    till.on = fail
    running = agent([charge_tool(till, True, **BY_AMOUNT)], saying(call("charge", amount=1)))
    task = asyncio.create_task(asaga_run(running, "go", saga_id="s", log=log))
    await raised.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert till.acts == [("charge", 1), ("refund", 1)] and status(log) is SagaStatus.ROLLED_BACK


@pytest.mark.parametrize("streams", [False, True])
@bounded
async def test_a_run_that_does_not_listen_is_ended(till: Till, log: MemoryLog, streams: bool) -> None:
    def lose(amount: int) -> None:
        if amount == 2:
            raise RuntimeError("the connection broke after the charge")

    till.on = lose
    asked: list[int] = []

    def never_stops(_heard: list[str]) -> Any:
        asked.append(1)
        return call("charge", amount=len(asked))

    running = agent([charge_tool(till)], model(never_stops))
    with pytest.raises(RollbackIncomplete) as raised:
        if streams:
            async for _ in asaga_stream(running, "go", saga_id="s", log=log):
                pass
        else:
            await asaga_run(running, "go", saga_id="s", log=log)
    assert [step.tool for step in raised.value.report.remaining] == ["charge"]
    assert till.acts == [("charge", 1), ("charge", 2), ("refund", 1)]
    assert 2 + REFUSALS <= len(asked) <= 2 + REFUSALS + 1


@bounded
async def test_inside_of_a_saga_a_run_that_is_ended_says_so(till: Till, log: MemoryLog) -> None:
    with pytest.raises(SagaAborted, match="rolled back"):
        async with saga_scope("s", log=log) as saga:
            saga.abort("for a reason of its own")
            calls = [call("charge", amount=amount) for amount in range(10)]
            await asaga_run(agent([charge_tool(till)], saying(*calls)), "go")
            pytest.fail("it came back as if it had run")
    assert till.acts == []


@bounded
async def test_a_failed_run_inside_of_a_saga_is_undone_alone(till: Till, log: MemoryLog) -> None:
    async with saga_scope("s", log=log):
        await asaga_run(agent([charge_tool(till)], saying(call("charge", amount=1))), "go")
        with pytest.raises(WorkflowTimeoutError):
            stuck = saying(call("charge", amount=2), call("confirm", question="ok?"))
            stream = asaga_stream(agent([charge_tool(till), asking_tool()], stuck, timeout=3600.0), "go")
            await read(stream, InputRequiredEvent)
            await time_out(stream.handler)
            await read(stream)
    assert till.acts == [("charge", 1), ("charge", 2), ("refund", 2)] and status(log) is SagaStatus.COMMITTED


def test_saga_run_is_for_where_no_loop_runs(till: Till, log: MemoryLog) -> None:
    result = saga_run(agent([charge_tool(till)], saying(call("charge", amount=1), "bye")), "go", saga_id="s", log=log)
    assert str(result) == "bye" and status(log) is SagaStatus.COMMITTED
    assert read_saga(log, "s").name == "Agent"

    async def inside() -> None:
        saga_run(agent([], saying()), "go")

    with pytest.raises(RuntimeError, match="await asaga_run"):
        asyncio.run(inside())


# --- waiting


@pytest.mark.parametrize("is_async", [False, True])
@bounded
async def test_a_run_that_waits_is_suspended_and_goes_on_in_the_same_saga(
    till: Till, log: MemoryLog, is_async: bool
) -> None:
    tools = [charge_tool(till, is_async), asking_tool()]
    said = saying(call("charge", amount=1), call("confirm", question="more?"), call("charge", amount=1), "bye")
    waiting = await asaga_run(agent(tools, said), "go", saga_id="s", log=log)
    assert isinstance(waiting, SuspendedRun) and waiting.saga_id == "s"
    assert [event.prefix for event in waiting.waiting] == ["more?"]
    assert status(log) is SagaStatus.SUSPENDED and till.charged == [1]
    assert [step.status for step in read_saga(log, "s").steps] == [StepStatus.DONE, StepStatus.PAUSED]
    stored = json.loads(json.dumps(dump_state(waiting)))
    result = await asaga_run(agent(tools, said), stored, YES, log=log)
    assert str(result) == "bye" and status(log) is SagaStatus.COMMITTED
    assert till.acts == [("charge", 1), ("charge", 1)], "the first stands, and the second is another one"
    assert [step.attempts for step in read_saga(log, "s").steps] == [1, 1, 1]
    again = await asaga_run(agent(tools, saying(call("charge", amount=1), "bye again")), stored, YES, log=log)
    assert str(again) == "bye again" and till.charged == [1, 1], "an answer that comes twice has no effect"


@bounded
async def test_a_suspended_run_that_fails_later_is_undone_whole(till: Till, log: MemoryLog) -> None:
    tools = [charge_tool(till), asking_tool()]
    waiting = await asaga_run(
        agent(tools, saying(call("charge", amount=1), call("confirm", question="more?"))), "go", saga_id="s", log=log
    )

    def fail(_heard: list[str]) -> Any:
        raise ConnectionError("the model is gone")

    with pytest.raises(ConnectionError):
        await asaga_run(agent(tools, model(fail)), waiting, YES, log=log)
    assert till.acts == [("charge", 1), ("refund", 1)] and status(log) is SagaStatus.ROLLED_BACK


class Approving(Workflow):
    """Asks by ending a step, and goes on with another: no step waits."""

    def __init__(self, charge: Any) -> None:
        super().__init__(timeout=None)
        self.charge = charge

    @step
    async def begin(self, ev: StartEvent) -> InputRequiredEvent:
        self.charge(1)
        return InputRequiredEvent(prefix="more?")

    @step
    async def end(self, ev: HumanResponseEvent) -> StopEvent:
        self.charge(2)
        return StopEvent(result=ev.response)


class Choosing(Workflow):
    """Waits for one answer among several."""

    def __init__(self, charge: Any) -> None:
        super().__init__(timeout=None)
        self.charge = charge

    @step
    async def only(self, ctx: Context, ev: StartEvent) -> StopEvent:
        self.charge(1)
        answer = await ctx.wait_for_event(
            HumanResponseEvent, waiter_event=InputRequiredEvent(prefix="more?"), requirements={"to": "me"}
        )
        self.charge(2)
        return StopEvent(result=answer.response)


@pytest.mark.parametrize("kind", [Approving, Choosing])
@bounded
async def test_a_workflow_that_waits_is_suspended_and_goes_on(till: Till, log: MemoryLog, kind: Any) -> None:
    charge = saga_tool(**BY_RESULT)(till.function())
    waiting = await asaga_run(kind(charge), saga_id="s", log=log)
    assert isinstance(waiting, SuspendedRun) and status(log) is SagaStatus.SUSPENDED and till.charged == [1]
    stored = json.loads(json.dumps(dump_state(waiting)))
    answer = HumanResponseEvent(response="yes", to="me")
    assert await asaga_run(kind(charge), stored, answer, log=log) == "yes"
    assert till.charged == [1, 2] and status(log) is SagaStatus.COMMITTED
    assert [step.tool for step in read_saga(log, "s").steps] == ["charge", "charge"]


class Another(Event):
    """An event that no step of the tests takes."""


class Both(Workflow):
    """Asks two persons, and needs both answers."""

    def __init__(self, charge: Any) -> None:
        super().__init__(timeout=None)
        self.charge = charge

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> InputRequiredEvent:
        self.charge(1)
        ctx.write_event_to_stream(InputRequiredEvent(prefix="you?"))
        return InputRequiredEvent(prefix="and you?")

    @step
    async def end(self, ctx: Context, ev: HumanResponseEvent) -> StopEvent | None:
        both = ctx.collect_events(ev, [HumanResponseEvent] * 2)
        return StopEvent(result=[one.response for one in both]) if both else None


@pytest.mark.parametrize("kind", [Approving, Choosing])
@bounded
async def test_an_answer_that_nothing_takes_leaves_the_run_suspended(till: Till, log: MemoryLog, kind: Any) -> None:
    charge = saga_tool(**BY_RESULT)(till.function())
    waiting = await asaga_run(kind(charge), saga_id="s", log=log)
    waiting = await asaga_run(kind(charge), waiting, Another(), log=log)
    assert isinstance(waiting, SuspendedRun) and status(log) is SagaStatus.SUSPENDED
    answer = HumanResponseEvent(response="yes", to="me")
    assert await asaga_run(kind(charge), waiting, Another(), answer, log=log) == "yes"
    assert till.acts == [("charge", 1), ("charge", 2)] and status(log) is SagaStatus.COMMITTED


@bounded
async def test_a_run_that_needs_more_than_one_answer_is_suspended_until_it_has_them(till: Till, log: MemoryLog) -> None:
    charge = saga_tool(**BY_RESULT)(till.function())
    waiting = await asaga_run(Both(charge), saga_id="s", log=log)
    waiting = await asaga_run(Both(charge), waiting, YES, log=log)
    assert isinstance(waiting, SuspendedRun) and status(log) is SagaStatus.SUSPENDED
    assert await asaga_run(Both(charge), waiting, YES, log=log) == ["yes", "yes"]
    assert till.acts == [("charge", 1)] and status(log) is SagaStatus.COMMITTED


@bounded
async def test_a_run_inside_of_a_saga_suspends_that_saga(till: Till, log: MemoryLog) -> None:
    tools = [charge_tool(till), asking_tool()]
    said = saying(call("confirm", question="more?"), call("charge", amount=2), "bye")
    charge = saga_tool(**BY_RESULT)(till.function())
    async with saga_scope("s", log=log):
        charge(1)
        waiting = await asaga_run(agent(tools, said), "go")
    assert isinstance(waiting, SuspendedRun) and status(log) is SagaStatus.SUSPENDED
    async with saga_scope("s", log=log, resume="continue"):
        assert str(await asaga_run(agent(tools, said), waiting, YES)) == "bye"
    assert till.acts == [("charge", 1), ("charge", 2)] and status(log) is SagaStatus.COMMITTED


@bounded
async def test_a_run_inside_of_a_tool_cannot_be_suspended(till: Till, log: MemoryLog) -> None:
    async def delegate(question: str) -> str:
        """Let another agent ask."""
        return str(await asaga_run(agent([asking_tool()], saying(call("confirm", question=question))), "go"))

    outer = agent(
        [wrap_tool(FunctionTool.from_defaults(delegate), semantics="READ_ONLY")],
        saying(call("delegate", question="ok?"), "bye"),
    )
    stream = asaga_stream(outer, "go", saga_id="s", log=log)
    results = [event.tool_output async for event in stream if isinstance(event, ToolCallResult)]
    assert [type(output.exception) for output in results] == [SagaBusy]
    assert status(log) is SagaStatus.COMMITTED


@bounded
async def test_who_passes_a_context_may_answer_through_it(till: Till, log: MemoryLog) -> None:
    running = agent(
        [charge_tool(till), asking_tool()], saying(call("confirm", question="more?"), call("charge", amount=1))
    )
    ctx = Context(running)
    task = asyncio.create_task(asaga_run(running, user_msg="go", ctx=ctx, saga_id="s", log=log, on_wait="wait"))
    async for event in _when_running(ctx, task):
        if isinstance(event, InputRequiredEvent):
            ctx.send_event(YES)
    assert str(await task) == "done" and status(log) is SagaStatus.COMMITTED and till.charged == [1]


async def _when_running(ctx: Context, task: asyncio.Task[Any]) -> Any:
    while not ctx.is_running:
        assert not task.done(), task
        await asyncio.sleep(0)
    async for event in ctx.stream_events():
        yield event


@bounded
async def test_an_answer_is_given_to_a_run_that_then_waits_in_process(till: Till, log: MemoryLog) -> None:
    charge = saga_tool(**BY_RESULT)(till.function())
    waiting = await asaga_run(Choosing(charge), saga_id="s", log=log)
    answer = HumanResponseEvent(response="yes", to="me")
    assert await asaga_run(Choosing(charge), waiting, answer, log=log, on_wait="wait") == "yes"
    assert till.charged == [1, 2]


@bounded
async def test_a_suspended_run_does_not_go_on_in_a_log_that_does_not_hold_it(till: Till, log: MemoryLog) -> None:
    tools = [charge_tool(till), asking_tool()]
    said = saying([("a", "charge", {"amount": 1}), ("b", "confirm", {"question": "?"})])
    waiting = await asaga_run(agent(tools, said), "go", saga_id="s", log=log)
    with closing(MemoryLog()) as other:
        with pytest.raises(SagaNotFound):
            await asaga_run(agent(tools, said), waiting, YES, log=other)
        with pytest.raises(SagaNotFound):
            await read(asaga_stream(agent(tools, said), waiting, YES, log=other))
        assert not other.read("s"), "and nothing was opened there"
    assert str(await asaga_run(agent(tools, said), waiting, YES, log=log)) == "done"
    assert till.acts == [("charge", 1)] and status(log) is SagaStatus.COMMITTED


@bounded
async def test_what_does_not_fit_a_suspended_run_is_refused(till: Till, log: MemoryLog) -> None:
    running = agent([asking_tool()], saying(call("confirm", question="ok?")))
    waiting = await asaga_run(running, "go", saga_id="s", log=log, deadline=3600.0)
    for args, kwargs in (((), {}), (("yes",), {}), ((YES,), {"saga_id": "t"}), ((YES,), {"user_msg": "go"})):
        with pytest.raises(DeclarationError):
            await asaga_run(running, waiting, *args, log=log, **kwargs)
    part = {name: value for name, value in dump_state(waiting).items() if name != "works"}
    with pytest.raises(DeclarationError, match="works"):
        await asaga_run(running, part, YES, log=log)
    with pytest.raises(ValueError, match="on_wait"):
        await asaga_run(running, waiting, YES, log=log, on_wait="stay")  # type: ignore[arg-type]
    assert status(log) is SagaStatus.SUSPENDED, "nothing was touched"
    (suspended,) = [record.data for record in log.read("s") if record.type == "SUSPENDED"]
    assert suspended["deadline"] - log.clock.time() <= 3600.0


# --- streams


@bounded
async def test_a_streamed_run_is_answered_in_process(till: Till, log: MemoryLog) -> None:
    running = agent(
        [charge_tool(till), asking_tool()], saying(call("charge", amount=1), call("confirm", question="ok?"))
    )
    stream = asaga_stream(running, "go", saga_id="s", log=log)
    with pytest.raises(DeclarationError):
        stream.send_event(YES)
    with pytest.raises(SagaNotRunning):
        _ = stream.result
    kinds: list[type[Any]] = []
    async for event in stream:
        kinds.append(type(event))
        if isinstance(event, InputRequiredEvent):
            assert stream.handler.ctx.is_running
            stream.send_event(YES)
    assert str(stream.result) == "done" and status(log) is SagaStatus.COMMITTED and till.acts == [("charge", 1)]
    assert kinds[-1] is StopEvent and WorkflowIdleEvent not in kinds and kinds.count(ToolCallResult) == 2


@bounded
async def test_a_stream_that_waits_is_suspended_and_goes_on_elsewhere(till: Till, log: MemoryLog) -> None:
    tools = [charge_tool(till), asking_tool()]
    said = saying(call("charge", amount=1), call("confirm", question="ok?"), "bye")
    stream = asaga_stream(agent(tools, said), "go", saga_id="s", log=log)
    async for event in stream:
        if isinstance(event, InputRequiredEvent):
            break
    waiting = await stream.suspend()
    assert status(log) is SagaStatus.SUSPENDED and stream.handler.is_done()
    resumed = asaga_stream(agent(tools, said), dump_state(waiting), YES, log=log)
    assert isinstance(waiting, SuspendedRun)
    rest = [event async for event in resumed]
    assert isinstance(rest[-1], StopEvent) and str(resumed.result) == "bye"
    assert till.acts == [("charge", 1)] and status(log) is SagaStatus.COMMITTED


@bounded
async def test_a_stream_is_closed_while_another_task_reads_it(till: Till, log: MemoryLog) -> None:
    started = asyncio.Event()

    async def hang(_amount: int) -> None:
        started.set()
        await asyncio.Event().wait()

    till.on = hang
    running = agent([charge_tool(till, is_async=True, **BY_AMOUNT)], saying(call("charge", amount=1)))
    stream = asaga_stream(running, "go", saga_id="s", log=log)
    reader = asyncio.create_task(read(stream))
    await started.wait()
    await stream.aclose()
    with pytest.raises(WorkflowCancelledByUser):
        await reader
    assert till.acts == [("charge", 1), ("refund", 1)] and status(log) is SagaStatus.ROLLED_BACK
    assert stream.handler.is_done() and asyncio.all_tasks() == {asyncio.current_task()}


@bounded
async def test_a_stream_that_has_ended_is_not_suspended(till: Till, log: MemoryLog) -> None:
    stream = asaga_stream(agent([charge_tool(till)], saying(call("charge", amount=1))), "go", saga_id="s", log=log)
    with pytest.raises(SagaNotRunning):
        await stream.suspend()
    assert isinstance(await anext(stream), object)
    with pytest.raises(SagaNotRunning, match="ended"):
        await stream.suspend()
    async for _ in stream:
        pass
    assert status(log) is SagaStatus.COMMITTED and str(stream.result) == "done"


@bounded
async def test_a_failed_stream_raises_what_the_run_raises(till: Till, log: MemoryLog) -> None:
    said = saying(call("charge", amount=1), call("confirm", question="?"))
    stream = asaga_stream(agent([charge_tool(till), asking_tool()], said, timeout=3600.0), "go", saga_id="s", log=log)
    await read(stream, InputRequiredEvent)
    await time_out(stream.handler)
    with pytest.raises(WorkflowTimeoutError):
        await read(stream)
    assert till.acts == [("charge", 1), ("refund", 1)] and status(log) is SagaStatus.ROLLED_BACK


@bounded
async def test_a_run_that_waits_and_cannot_be_stored_whole_is_not_suspended(
    till: Till, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UnserializableKeyWarning(Warning):
        pass

    whole = Context.to_dict

    def to_dict(self: Context, *args: Any, **kwargs: Any) -> Any:
        warnings.warn("skipping key: memory", UnserializableKeyWarning, stacklevel=2)
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(Context, "to_dict", to_dict)

    async def ask(ctx: Context, question: str) -> str:
        """Ask a person."""
        await ctx.wait_for_event(HumanResponseEvent, waiter_event=InputRequiredEvent(prefix=question))
        return "yes"

    tools = [FunctionTool.from_defaults(ask)]
    with pytest.raises(DeclarationError, match="memory"):
        await asaga_run(agent(tools, saying(call("ask", question="?"))), "go", saga_id="s", log=log)
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK
