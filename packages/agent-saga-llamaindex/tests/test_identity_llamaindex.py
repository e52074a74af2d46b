"""Which calls are the same call: steps that run again, equal calls, runs inside of runs, other processes."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent, ToolCall
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
from llamaindex_fakes import BY_RESULT, Till, agent, bounded, model, react, reasoning, saying

from agent_saga_core import (
    BoundaryRequired,
    DeclarationError,
    IdempotencyConflict,
    MemoryLog,
    NotApplied,
    SagaAborted,
    SagaStatus,
    current_saga,
    read_saga,
    saga_scope,
    saga_tool,
)
from agent_saga_llamaindex import SuspendedRun, asaga_run, asaga_stream, dump_state, sites, wrap_tool
from agent_saga_llamaindex import inside as internals

YES = HumanResponseEvent(response="yes")
HERE = Path(__file__).parent


def call(tool: str, **args: Any) -> list[tuple[str, str, dict[str, Any]]]:
    return [("call_0", tool, args)]


def tool_of(till: Till, is_async: bool = False) -> FunctionTool:
    return wrap_tool(FunctionTool.from_defaults(till.afunction() if is_async else till.function()), **BY_RESULT)


def identities(log: MemoryLog, saga_id: str = "s") -> list[list[Any]]:
    found = [record.data["identity"] for record in log.read(saga_id) if record.type == "INTENT"]
    return [json.loads(identity.partition("#")[0]) for identity in found]


async def wait(ctx: Context) -> None:
    await ctx.wait_for_event(HumanResponseEvent, waiter_event=InputRequiredEvent(prefix="?"))


class OneStep(Workflow):
    """One step, whose body is given."""

    def __init__(self, body: Callable[[Context], Any]) -> None:
        super().__init__(timeout=None)
        self.body = body

    @step
    async def only(self, ctx: Context, ev: StartEvent) -> StopEvent:
        return StopEvent(result=await self.body(ctx))


async def answered(workflow: Workflow, **scope: Any) -> Any:
    """The result of a run that is answered whenever it asks."""
    stream = asaga_stream(workflow, **scope)
    async for event in stream:
        if isinstance(event, InputRequiredEvent):
            stream.send_event(YES)
    return stream.result


# --- the facts of LlamaIndex that identity rests on


@bounded
async def test_a_step_that_runs_again_has_the_same_work_item_and_another_context() -> None:
    seen: list[Any] = []

    async def body(ctx: Context) -> str:
        seen.append(internals.step_here())
        await wait(ctx)
        return "done"

    running = OneStep(body)
    handler = running.run()
    async for event in handler.stream_events():
        if isinstance(event, InputRequiredEvent):
            handler.ctx.send_event(YES)
    assert await handler == "done"
    first, again = seen
    assert first is not again and first.state.step_name == again.state.step_name == "only"
    assert first.state.work_item_id == again.state.work_item_id is not None
    assert internals.names_work() and internals.INTERRUPTS and internals.step_here() is None


@bounded
async def test_a_tool_can_tell_its_step_and_its_run() -> None:
    seen: list[Any] = []

    def sync(x: int) -> None:
        seen.append((internals.step_here(), internals.run_here()))

    async def asynchronous(x: int) -> None:
        sync(x)

    said = saying([("c1", "sync", {"x": 1}), ("c2", "asynchronous", {"x": 1})])
    handler = agent([sync, asynchronous], said).run("go")
    await handler
    assert [run for _, run in seen] == [handler.run_id] * 2
    events = {found.event.tool_name: found.event for found, _ in seen}
    assert all(isinstance(event, ToolCall) for event in events.values())
    assert (events["sync"].tool_id, events["asynchronous"].tool_id) == ("c1", "c2")
    assert len({found.state.work_item_id for found, _ in seen}) == 2


@bounded
async def test_a_react_agent_draws_the_ids_of_its_calls_itself() -> None:
    ids: set[str] = set()
    for _ in range(2):
        running = react([booking()], reasoning(lambda heard: "done" if heard else call("book", x=1)))
        handler = running.run("go")
        ids.update([event.tool_id async for event in handler.stream_events() if type(event) is ToolCall])
        await handler
    assert len(ids) == 2, "the same text, and another id"


def booking() -> FunctionTool:
    def book(x: int) -> int:
        """Book."""
        return x

    return FunctionTool.from_defaults(book)


# --- agents


@bounded
async def test_a_run_made_again_from_its_top_meets_its_calls(till: Till, log: MemoryLog) -> None:
    """Also a ReAct agent's, whose ids are new."""
    for number, make in enumerate((agent, react)):
        for _ in range(2):
            turns = [call("charge", amount=1), call("charge", amount=1)]
            left = iter(turns)
            llm = saying(*turns) if make is agent else reasoning(lambda _heard, left=left: next(left, "done"))
            result = await asaga_run(make([tool_of(till)], llm), "go", saga_id=f"s{number}", log=log)
            assert str(result) == "done"
        assert till.charged == [1, 1] and len(read_saga(log, f"s{number}").steps) == 2
        till.acts.clear()


@bounded
async def test_a_saga_tool_made_a_tool_of_an_agent_is_known_like_any(till: Till, log: MemoryLog) -> None:
    declared = saga_tool(**BY_RESULT)(till.function())
    for _ in range(2):
        said = saying(call("charge", amount=1), call("charge", amount=1))
        await asaga_run(agent([declared], said), "go", saga_id="s", log=log)
        assert till.charged == [1, 1]
    assert {identity[0] for identity in identities(log)} == {"body"}


@bounded
async def test_the_identity_of_a_models_call_is_its_work(till: Till, log: MemoryLog) -> None:
    await asaga_run(agent([tool_of(till)], saying(call("charge", amount=1))), "go", saga_id="s", log=log)
    ((kind, _, adapter, scope, tool),) = identities(log)
    assert (kind, adapter, tool) == ("body", "llamaindex", "charge")
    label, name, work = scope.split("/")
    digest, _, number = work.partition(":")
    assert (label, name, number) == ("1", "call_tool", "1") and len(digest) == 16


@pytest.mark.parametrize("is_async", [True, False])
@bounded
async def test_calls_of_one_message_are_met_again_whatever_ends_first(
    till: Till, log: MemoryLog, is_async: bool
) -> None:
    """Calls that give their records end at once, and LlamaIndex then numbers what comes behind them otherwise."""
    for _ in range(2):
        message = [(f"call_{n}", "charge", {"amount": amount}) for n, amount in enumerate((1, 2, 1))]
        heard: list[list[str]] = []
        left = iter([message, call("charge", amount=2)])

        def answer(told: list[str], left: Any = left, heard: Any = heard) -> Any:
            heard.append(told)
            return next(left, "done")

        assert str(await asaga_run(agent([tool_of(till, is_async)], model(answer)), "go", saga_id="s", log=log))
        assert sorted(till.charged) == [1, 1, 2, 2] and len(read_saga(log, "s").steps) == 4
        assert heard[-1] == [str({"amount": amount}) for amount in (1, 2, 1, 2)]


@bounded
async def test_a_call_behind_a_wait_is_not_taken_for_an_equal_one_before(till: Till, log: MemoryLog) -> None:
    """Nor is the second of two equal calls that wait taken for the first."""

    async def confirm(ctx: Context, question: str) -> str:
        """Ask a person."""
        answer = await ctx.wait_for_event(HumanResponseEvent, waiter_event=InputRequiredEvent(prefix=question))
        return str(answer.response)

    tools = [tool_of(till), wrap_tool(FunctionTool.from_defaults(confirm), semantics="READ_ONLY")]
    charging, asks = call("charge", amount=1), call("confirm", question="more?")

    async def goes_on(state: Any, answer: str, *turns: Any) -> Any:
        """Run on as another process would, which knows nothing but the state."""
        stored = json.loads(json.dumps(dump_state(state)))
        return await asaga_run(agent(tools, saying(*turns)), stored, HumanResponseEvent(response=answer), log=log)

    first = await asaga_run(agent(tools, saying(charging, asks)), "go", saga_id="s", log=log)
    second = await goes_on(first, "yes", charging, asks)
    assert till.charged == [1, 1]
    assert str(await goes_on(second, "no", charging)) == "done" and till.charged == [1, 1, 1]
    assert str(await goes_on(first, "yes", charging, asks, charging)) == "done" and till.charged == [1, 1, 1]
    tools_called = [step.tool for step in read_saga(log, "s").steps]
    assert tools_called == ["charge", "confirm", "charge", "confirm", "charge"]


class ThreeTimes(FunctionAgent):
    """Calls a tool three times for one call of the model's."""

    async def _call_tool(self, ctx: Any, tool: Any, tool_input: dict[str, Any]) -> Any:
        await tool.acall(**tool_input)
        await tool.acall(amount=9)
        return await tool.acall(**tool_input)


@bounded
async def test_an_agent_that_calls_a_tool_again_for_the_same_call_of_the_models(till: Till, log: MemoryLog) -> None:
    for _ in range(2):  # the second time, all are found
        twice = ThreeTimes(tools=[tool_of(till)], llm=saying(call("charge", amount=1)), streaming=False)
        assert str(await asaga_run(twice, "go", saga_id="s", log=log)) == "done"
        assert till.charged == [1, 9, 1]


# --- steps written by hand


@pytest.mark.parametrize("kind", ["function", "wrapped", "wrapped async", "execute"])
@bounded
async def test_what_a_step_did_before_it_waited_is_not_done_again(till: Till, log: MemoryLog, kind: str) -> None:
    declared = saga_tool(**BY_RESULT)(till.function())
    wrapped = tool_of(till, kind == "wrapped async")

    async def charge(amount: int) -> Any:
        if kind == "function":
            return declared(amount)
        if kind == "execute":
            from agent_saga_core import current_saga

            saga = current_saga()
            assert saga is not None
            return await saga.aexecute("charge", till.function(), args={"amount": amount}, **BY_RESULT)
        return (await wrapped.acall(amount=amount)).raw_output

    async def body(ctx: Context) -> Any:
        first = [await charge(1), await charge(1)]
        await wait(ctx)
        return [*first, await charge(1)]

    result = await answered(OneStep(body), saga_id="s", log=log)
    assert result == [{"amount": 1}] * 3 and till.charged == [1, 1, 1]
    assert read_saga(log, "s").status is SagaStatus.COMMITTED and len(read_saga(log, "s").steps) == 3


@bounded
async def test_a_call_that_left_nothing_gives_its_place_back(till: Till, log: MemoryLog) -> None:
    left = [NotApplied("nothing was charged")]

    def fail(amount: int) -> None:
        if left:
            till.acts.pop()
            raise left.pop()

    till.on = fail
    charge = saga_tool(**BY_RESULT)(till.function())

    async def body(ctx: Context) -> Any:
        try:
            made = charge(1)
        except NotApplied:
            made = charge(1)
        await wait(ctx)
        return made

    assert await answered(OneStep(body), saga_id="s", log=log) == {"amount": 1}
    assert till.charged == [1], "run again, the first call is the one that succeeded"


@bounded
async def test_a_step_that_runs_again_otherwise_conflicts(till: Till, log: MemoryLog) -> None:
    amounts = iter((1, 2))
    charge = saga_tool(**BY_RESULT)(till.function())

    async def body(ctx: Context) -> Any:
        made = charge(next(amounts))
        await wait(ctx)
        return made

    with pytest.raises(IdempotencyConflict):
        await answered(OneStep(body), saga_id="s", log=log)
    assert till.acts == [("charge", 1), ("refund", 1)]


@bounded
async def test_a_function_that_waits_is_paused(till: Till, log: MemoryLog) -> None:
    @saga_tool(semantics="COMPENSABLE", compensate=BY_RESULT["compensate"])
    async def charge(amount: int) -> dict[str, Any]:
        await wait(Context.get_step_context())
        made: dict[str, Any] = till.function()(amount)
        return made

    waiting = await asaga_run(OneStep(lambda _ctx: charge(3)), saga_id="s", log=log)
    assert isinstance(waiting, SuspendedRun) and till.charged == []
    assert [record.type for record in log.read("s")] == ["START", "INTENT", "PAUSED", "SUSPENDED"]
    assert await asaga_run(OneStep(lambda _ctx: charge(3)), waiting, YES, log=log) == {"amount": 3}
    (only,) = read_saga(log, "s").steps
    assert only.attempts == 1 and till.charged == [3]


class Again:
    """A second try, at once."""

    def next(self, elapsed_time: float, attempts: int, error: Exception, **_: Any) -> float | None:
        return 0.0 if attempts < 2 else None


@bounded
async def test_what_a_step_did_before_it_failed_is_not_done_again(till: Till, log: MemoryLog) -> None:
    charge = saga_tool(**BY_RESULT)(till.function())
    left = [RuntimeError("something else went wrong")]

    class Failing(Workflow):
        """Charges, and fails once."""

        @step(retry_policy=Again())
        async def only(self, ev: StartEvent) -> StopEvent:
            made = charge(1)
            if left:
                raise left.pop()
            return StopEvent(result=made)

    assert await asaga_run(Failing(), saga_id="s", log=log) == {"amount": 1}
    assert till.charged == [1] and read_saga(log, "s").status is SagaStatus.COMMITTED


class Item(Event):
    """One of several pieces of work."""

    amount: int


class Fan(Workflow):
    """Several equal events to one step, at once."""

    def __init__(self, charge: Any) -> None:
        super().__init__(timeout=None)
        self.charge = charge

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> Item | None:
        for _ in range(3):
            ctx.send_event(Item(amount=4))
        return None

    @step(num_workers=3)
    async def work(self, ctx: Context, ev: Item) -> StopEvent | None:
        await asyncio.to_thread(self.charge, ev.amount)
        found = ctx.collect_events(ev, [Item] * 3)
        return StopEvent(result=len(found)) if found else None


@bounded
async def test_equal_events_are_work_of_their_own(till: Till, log: MemoryLog) -> None:
    charge = saga_tool(**BY_RESULT)(till.function())
    for _ in range(2):  # and a run from its top meets them
        assert await asaga_run(Fan(charge), saga_id="s", log=log) == 3
        assert till.charged == [4, 4, 4] and len(read_saga(log, "s").steps) == 3


# --- runs inside of runs


def delegating(till: Till, started: str, wraps: bool, waits: bool) -> FunctionTool:
    async def delegate(ctx: Context, amount: int) -> str:
        """Let another agent charge."""
        inner = agent([tool_of(till)], saying(call("charge", amount=amount)))
        result = await (asaga_run(inner, "go") if started == "asaga_run" else inner.run("go"))
        if waits:
            await wait(ctx)
        return str(result)

    tool = FunctionTool.from_defaults(delegate)
    return wrap_tool(tool, semantics="READ_ONLY") if wraps else tool


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("started", ["asaga_run", "by hand"])
@bounded
async def test_equal_calls_of_two_inner_runs_both_run(till: Till, log: MemoryLog, started: str, wraps: bool) -> None:
    said = saying(call("delegate", amount=1), call("delegate", amount=1))
    result = await asaga_run(agent([delegating(till, started, wraps, False)], said), "go", saga_id="s", log=log)
    assert str(result) == "done" and till.charged == [1, 1]
    assert read_saga(log, "s").status is SagaStatus.COMMITTED


@pytest.mark.parametrize(("started", "wraps"), [("asaga_run", False), ("asaga_run", True), ("by hand", True)])
@bounded
async def test_what_an_inner_run_did_before_the_outer_waited_is_not_done_again(
    till: Till, log: MemoryLog, started: str, wraps: bool
) -> None:
    tools = [delegating(till, started, wraps, True)]
    said = saying(call("delegate", amount=1), call("delegate", amount=1))
    waiting = await asaga_run(agent(tools, said), "go", saga_id="s", log=log)
    assert isinstance(waiting, SuspendedRun) and till.charged == [1]
    again = await asaga_run(agent(tools, said), waiting, YES, log=log)
    assert isinstance(again, SuspendedRun) and till.charged == [1, 1], "the second is another one, and asks as well"
    assert str(await asaga_run(agent(tools, said), again, YES, log=log)) == "done"
    assert till.acts == [("charge", 1)] * 2 and read_saga(log, "s").status is SagaStatus.COMMITTED


@bounded
async def test_an_inner_run_that_cannot_be_told_is_refused(till: Till, log: MemoryLog) -> None:
    async def confirm(ctx: Context, question: str) -> str:
        """Ask."""
        await wait(ctx)
        return "yes"

    tools = [delegating(till, "by hand", False, False), FunctionTool.from_defaults(confirm)]
    said = saying(call("delegate", amount=1), call("confirm", question="?"), call("delegate", amount=1), "bye")
    waiting = await asaga_run(agent(tools, said), "go", saga_id="s", log=log)
    assert till.charged == [1]
    assert str(await asaga_run(agent(tools, said), waiting, YES, log=log)) == "bye"
    assert till.charged == [1], "refused: whether it is the former process's call cannot be told"


@pytest.mark.parametrize("kind", ["savepoint", "saga_scope"])
@bounded
async def test_what_a_step_did_in_a_scope_of_its_own_before_it_waited_is_not_done_again(
    till: Till, log: MemoryLog, kind: str
) -> None:
    charge = saga_tool(**BY_RESULT)(till.afunction())

    async def body(ctx: Context) -> str:
        saga = current_saga()
        assert saga is not None
        async with saga.savepoint() if kind == "savepoint" else saga_scope():
            await charge(1)
        await wait(ctx)
        async with saga_scope():
            await charge(2)
        return "done"

    waiting = await asaga_run(OneStep(body), saga_id="s", log=log)
    assert isinstance(waiting, SuspendedRun) and till.charged == [1]
    assert str(await asaga_run(OneStep(body), waiting, YES, log=log)) == "done"
    assert till.charged == [1, 2] and read_saga(log, "s").status is SagaStatus.COMMITTED


# --- runs that nobody announced


@bounded
async def test_runs_by_hand_in_a_saga_are_told_apart(till: Till, log: MemoryLog) -> None:
    for _ in range(2):  # and a body that runs again meets them
        async with saga_scope("s", log=log) as saga:
            await agent([tool_of(till)], saying(call("charge", amount=1))).run("go")
            async with saga.savepoint():
                await agent([tool_of(till)], saying(call("charge", amount=1))).run("go")
        assert till.charged == [1, 1]
    assert read_saga(log, "s").status is SagaStatus.COMMITTED


@bounded
async def test_a_run_by_hand_in_a_saga_that_goes_on_is_refused(till: Till, log: MemoryLog) -> None:
    async with saga_scope("s", log=log) as saga:
        await agent([tool_of(till)], saying(call("charge", amount=1))).run("go")
        saga.suspend("for a while")
    charge = tool_of(till)

    async def body(_ctx: Context) -> Any:
        return await charge.acall(amount=1)

    with pytest.raises(BoundaryRequired, match="asaga_run"):
        async with saga_scope("s", log=log, resume="continue"):
            await OneStep(body).run()
    assert till.acts == [("charge", 1), ("refund", 1)]


@bounded
async def test_a_new_run_in_a_saga_that_goes_on_is_a_new_one(till: Till, log: MemoryLog) -> None:
    async with saga_scope("s", log=log) as saga:
        await asaga_run(agent([tool_of(till)], saying(call("charge", amount=1))), "go")
        saga.suspend("for a while")
    async with saga_scope("s", log=log, resume="continue"):
        await asaga_run(agent([tool_of(till)], saying(call("charge", amount=1))), "go")
    assert till.charged == [1, 1] and read_saga(log, "s").status is SagaStatus.COMMITTED


@bounded
async def test_two_runs_at_once_in_one_saga_are_told_apart(till: Till, log: MemoryLog) -> None:
    async with saga_scope("s", log=log):
        runs = [agent([tool_of(till, True)], saying(call("charge", amount=1))).run("go") for _ in range(3)]
        await asyncio.gather(*runs)
    assert till.charged == [1, 1, 1]


# --- where LlamaIndex tells less


@bounded
async def test_where_runs_or_their_work_cannot_be_told_apart_calls_are_refused(
    till: Till, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge = tool_of(till)

    async def body(_ctx: Context) -> Any:
        return await charge.acall(amount=1)

    def less() -> Any:
        found = internals.step_here()
        state = SimpleNamespace(step_name=found.state.step_name)
        return SimpleNamespace(event=found.event, state=state)

    for name, told in (("run_here", lambda: None), ("step_here", less)):
        with monkeypatch.context() as patched, pytest.raises(BoundaryRequired, match="llama-index-workflows"):
            patched.setattr(sites, name, told)
            async with saga_scope(log=log):
                await OneStep(body).run()
    monkeypatch.setattr(internals, "_found", lambda _name: None)
    assert not internals.names_work() and internals.step_here() is None
    for start in (asaga_run, asaga_stream):
        with pytest.raises(DeclarationError, match="llama-index-workflows"):
            running: Any = start(OneStep(body), log=log)
            await running
    assert till.charged == []


def test_a_thread_that_lost_everything_is_refused(till: Till, log: MemoryLog) -> None:
    wrapped = tool_of(till)

    async def body(_ctx: Context) -> Any:
        def elsewhere() -> Any:
            import threading

            caught: list[BaseException] = []

            def run() -> None:
                try:
                    wrapped.call(amount=1)
                except BaseException as error:
                    caught.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join(30)
            return caught

        return elsewhere()

    async def main() -> Any:
        return await asaga_run(OneStep(body), saga_id="s", log=log)

    (error,) = asyncio.run(main())
    assert isinstance(error, BoundaryRequired) and till.charged == []


# --- another process


@pytest.mark.parametrize(("kind", "killed"), [("agent", True), ("workflow", False)])
def test_a_charge_before_a_wait_is_made_once_over_two_processes(tmp_path: Path, kind: str, killed: bool) -> None:
    """Wait for a person after a charge, end the process, go on from the stored context in a new one."""
    program = HERE / "llamaindex_two_processes.py"

    def run(*verb: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(program), *verb, kind, str(tmp_path)],
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip

    first = run("begin-and-be-killed" if killed else "begin")
    assert first.returncode == (-9 if killed else 0), first.stderr
    assert (tmp_path / "charges").read_text() == "1\n"
    second = run("resume")
    assert second.returncode == 0, second.stderr
    assert second.stdout.splitlines() == ["yes, done", "COMMITTED", "charge DONE", "confirm DONE", "charge DONE"]
    assert (tmp_path / "charges").read_text() == "1\n2\n"


def test_a_suspended_saga_whose_deadline_has_passed_is_undone_by_recovery(tmp_path: Path) -> None:
    program = HERE / "llamaindex_two_processes.py"
    for verb, expected in (("begin-briefly", ""), ("recover", "ROLLED_BACK\n")):
        ran = subprocess.run(
            [sys.executable, str(program), verb, "agent", str(tmp_path)],
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        assert (ran.returncode, ran.stdout) == (0, expected), ran.stderr
    assert (tmp_path / "charges").read_text() == "1\n-1\n"


def test_an_aborted_saga_says_so(till: Till, log: MemoryLog) -> None:
    wrapped = tool_of(till)
    with pytest.raises(SagaAborted), saga_scope("s", log=log) as saga:
        saga.abort("no")
        with pytest.raises(SagaAborted, match="rolled back"):
            wrapped.call(amount=1)
    assert till.acts == []
