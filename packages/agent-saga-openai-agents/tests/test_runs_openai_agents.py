"""Runs as sagas: refusals, nesting, late landings, streams."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    RunConfig,
    RunContextWrapper,
    RunHooks,
    Runner,
    RunResultStreaming,
    SQLiteSession,
    ToolTimeoutError,
    UserError,
    function_tool,
)
from agents.tool_context import ToolContext

from agent_saga_core import (
    ActionSemantics,
    MemoryLog,
    SagaAborted,
    SagaBusy,
    SagaStatus,
    StepStatus,
    current_saga,
    current_step,
    read_saga,
    saga_scope,
)
from agent_saga_core.registry import isolated_registry
from agent_saga_openai_agents import asaga_run, asaga_stream, saga_run, wrap_tool
from agent_saga_openai_agents.sites import TABLES

sys.path.insert(0, str(Path(__file__).parent))
from openai_agents_fakes import BOUND, REFUND, RELEASE, Scripted, Till, agent, call, own_loop

LOOK: dict[str, Any] = {"semantics": "READ_ONLY"}


@pytest.fixture
def till(tmp_path: Path) -> Iterator[Till]:
    with isolated_registry():
        found = Till(tmp_path / "till")
        found.register()
        yield found


@pytest.fixture
def log() -> Iterator[MemoryLog]:
    with closing(MemoryLog()) as found:
        yield found


class NoMoney(Exception):
    pass


def charge_of(till: Till, **declaration: Any) -> Any:
    return wrap_tool(function_tool(till.charge), **(declaration or REFUND))


def statuses(log: MemoryLog, saga_id: str = "s") -> list[tuple[str, StepStatus]]:
    return [(step.tool, step.status) for step in read_saga(log, saga_id).steps]


def give_up() -> str:
    """Make the saga rollback-only."""
    saga = current_saga()
    assert saga is not None
    saga.abort("enough")
    return "given up"


# --- a model that does not listen


@pytest.mark.parametrize("is_async", [False, True])
def test_a_model_that_never_stops_calling_is_stopped_after_three_refusals(
    is_async: bool, till: Till, log: MemoryLog
) -> None:
    async def acharge(what: str) -> str:
        """Charge for something."""
        return till.charge(what)

    tools = [
        wrap_tool(function_tool(acharge if is_async else till.charge, name_override="charge"), **REFUND),
        wrap_tool(function_tool(give_up), **LOOK),
    ]

    def turns(heard: list[str]) -> Any:
        number = len(heard)
        return [call("c1", "give_up") if number == 1 else call(f"c{number}", "charge", what=str(number))]

    model = Scripted(turns)
    bot = Agent(name="Trip", model=model, tools=tools)
    with pytest.raises(UserError) as raised:
        asyncio.run(asaga_run(bot, "go", max_turns=None, saga_id="s", log=log))
    assert isinstance(raised.value.__cause__, SagaAborted)
    assert model.asked == 5, "one call, one that gives up, and three refusals"
    assert till.lines() == ["charge 0", "refund 0"], "a call was made in a saga that rolls back"


def test_a_refusal_reaches_the_model_as_an_error_of_the_tool(till: Till, log: MemoryLog) -> None:
    async def body() -> str:
        async with saga_scope("s", log=log) as saga:
            bot = agent([charge_of(till)], [call("c1", "charge", what="x")])
            saga.abort("enough")
            result = await Runner.run(bot, "go")
            heard.extend(bot.model.heard)
            return str(result.final_output)

    heard: list[str] = []
    with pytest.raises(SagaAborted):
        asyncio.run(body())
    assert len(heard) == 1 and "rolled back" in heard[0] and "Stop calling tools" in heard[0]
    assert till.lines() == []


def test_a_nested_agent_that_never_stops_is_stopped_too(till: Till, log: MemoryLog) -> None:
    asked = [0]

    def inner_turns(heard: list[str]) -> Any:
        asked[0] += 1
        return [call(f"i{asked[0]}", "charge", what="x")]

    inner = Agent(name="Till", model=Scripted(inner_turns), tools=[charge_of(till)])
    outer_asked = [0]

    def outer_turns(heard: list[str]) -> Any:
        outer_asked[0] += 1
        number = outer_asked[0]
        return [call("o1", "give_up") if number == 1 else call(f"o{number}", "ask", input="x")]

    tools = [wrap_tool(function_tool(give_up), **LOOK), inner.as_tool("ask", "Ask.", max_turns=None)]
    bot = Agent(name="Trip", model=Scripted(outer_turns), tools=tools)
    with pytest.raises(MaxTurnsExceeded):
        asyncio.run(asaga_run(bot, "go", max_turns=6, saga_id="s", log=log))
    assert asked[0] <= 3 + 4, "each further run of the inner agent ends with its first refusal"
    assert till.lines() == []


# --- where a call was made


def test_the_tables_that_tell_runs_apart_are_those_of_the_framework() -> None:
    context = RunContextWrapper(context=None)
    call_context = ToolContext.from_agent_context(context, "c1", call("c1", "charge"))
    for name in TABLES:
        assert getattr(call_context, name) is getattr(context, name), f"{name} is no longer shared within a run"
        assert getattr(RunContextWrapper(context=None), name) is not getattr(context, name)


def test_an_id_that_an_outer_and_an_inner_agent_use_is_two_steps(till: Till, log: MemoryLog) -> None:
    tool = charge_of(till)
    inner = agent([tool], [call("call_0", "charge", what="inner")], name="Inner")
    turns = [[call("o1", "ask", input="x")], [call("call_0", "charge", what="outer")]]
    bot = agent([inner.as_tool("ask", "Ask."), tool], *turns)
    asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    assert till.lines() == ["charge inner", "charge outer"]
    assert statuses(log) == [("charge", StepStatus.DONE)] * 2


def test_two_runs_of_one_inner_agent_are_told_apart(till: Till, log: MemoryLog) -> None:
    """Equal ids, tools and arguments, in two runs at the same time."""

    def once(heard: list[str]) -> Any:
        return "paid" if heard else [call("call_0", "charge", what="x")]

    inner = Agent(name="Inner", model=Scripted(once), tools=[charge_of(till)])
    bot = agent([inner.as_tool("ask", "Ask.")], [call("o1", "ask", input="x"), call("o2", "ask", input="x")])
    asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    assert till.lines() == ["charge x"] * 2 and len(statuses(log)) == 2


def test_an_id_that_outer_call_and_inner_call_share_ends_as_without_a_saga(till: Till, log: MemoryLog) -> None:
    inner = agent([charge_of(till)], [call("call_0", "charge", what="x")], name="Inner")
    bot = agent([inner.as_tool("ask", "Ask.")], [call("call_0", "ask", input="x")])
    asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    assert till.lines() == ["charge x"]


def test_what_the_framework_refuses_behind_an_inner_effect_is_rolled_back(till: Till, log: MemoryLog) -> None:
    other = agent([charge_of(till)], [call("call_0", "charge", what="second")], name="Other")
    bot = agent([charge_of(till)], [call("call_0", "charge", what="first")], [call("c1", "transfer_to_other")])
    bot.handoffs = [other]
    with pytest.raises(ModelBehaviorError):
        asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    assert till.lines() == ["charge first", "refund first"]
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


def test_a_handoff_stays_in_the_saga(till: Till, log: MemoryLog) -> None:
    other = agent([charge_of(till)], [call("c9", "charge", what="second")], name="Other")
    bot = agent([charge_of(till)], [call("c1", "charge", what="first")], [call("c2", "transfer_to_other")])
    bot.handoffs = [other]
    result = asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    assert result.last_agent is other and till.lines() == ["charge first", "charge second"]
    assert len(statuses(log)) == 2


def test_runs_are_numbered_in_their_saga_and_a_body_made_again_numbers_them_alike(till: Till, log: MemoryLog) -> None:
    async def body() -> None:
        async with saga_scope("s", log=log):
            for what in ("x", "y"):
                await asaga_run(agent([charge_of(till)], [call("call_0", "charge", what=what)]), "go")

    asyncio.run(body())
    asyncio.run(body())
    assert till.lines() == ["charge x", "charge y"] and len(statuses(log)) == 2


def test_a_run_by_the_frameworks_own_runner_is_told_apart_too(till: Till, log: MemoryLog) -> None:
    async def body() -> None:
        async with saga_scope("s", log=log):
            for what in ("x", "y"):
                await Runner.run(agent([charge_of(till)], [call("call_0", "charge", what=what)]), "go")

    asyncio.run(body())
    assert till.lines() == ["charge x", "charge y"] and len(statuses(log)) == 2


def test_where_runs_cannot_be_told_apart_calls_are_counted(
    till: Till, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_saga_openai_agents.sites.TABLES", ())
    turns = [[call("c1", "charge", what="x")], [call("c2", "charge", what="x")]]
    asyncio.run(asaga_run(agent([charge_of(till)], *turns), "go", saga_id="s", log=log))
    assert till.lines() == ["charge x"] * 2
    identities = [record.data["identity"] for record in log.read("s") if record.type == "INTENT"]
    assert not any("c1" in identity or "c2" in identity for identity in identities)


def test_runs_in_savepoints_that_are_over_are_told_apart(till: Till, log: MemoryLog) -> None:
    async def body() -> None:
        async with saga_scope("s", log=log) as saga:
            for number in range(4):
                bot = agent([charge_of(till)], [call("call_0", "charge", what="x")])
                if number < 2:
                    await asaga_run(bot, "go")
                else:
                    async with saga.savepoint():
                        await Runner.run(bot, "go")
                gc.collect()

    asyncio.run(body())
    assert till.lines() == ["charge x"] * 4 and len(statuses(log)) == 4


@pytest.mark.parametrize("by_hand", [False, True])
def test_runs_of_a_saga_that_goes_on_are_told_from_those_before(by_hand: bool, till: Till, log: MemoryLog) -> None:
    async def body(last: bool) -> None:
        async with saga_scope("s", log=log, resume="continue") as saga:
            bot = agent([charge_of(till)], [call("call_0", "charge", what="x")])
            await (Runner.run(bot, "go") if by_hand else asaga_run(bot, "go"))
            if not last:
                await saga.asuspend("more to come")

    for number in range(3):
        asyncio.run(body(number == 2))
    assert till.lines() == ["charge x"] * 3 and len(statuses(log)) == 3
    assert read_saga(log, "s").status is SagaStatus.COMMITTED


# --- what lands late


class Gate:
    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.inside.set()
        assert self.go_on.wait(BOUND)


class Watching(MemoryLog):
    """Opens a gate once a call has been given up."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def append(self, record: Any) -> int:
        ticket = super().append(record)
        if record.type == "UNKNOWN":
            self.gate.go_on.set()
        return ticket


@pytest.mark.parametrize("behavior", ["error_as_result", "raise_exception"])
def test_a_sync_tool_that_lands_behind_its_timeout_is_undone_once(behavior: Any, till: Till) -> None:
    gate = Gate()

    def charge(what: str) -> str:
        """Charge for something."""
        gate.pass_through()
        return till.charge(what)

    tool = wrap_tool(function_tool(charge), **REFUND)
    tool.timeout_seconds, tool.timeout_behavior = 0.5, behavior  # long enough to begin
    bot = agent([tool], [call("c1", "charge", what="x")], "never mind")
    with closing(Watching(gate)) as log:
        if behavior == "error_as_result":
            asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
            assert "timed out" in bot.model.heard[0]
        else:
            with pytest.raises(ToolTimeoutError):
                asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
        assert till.lines() == ["charge x", "refund x"]
        assert statuses(log) == [("charge", StepStatus.COMPENSATED)]
        assert any(record.type == "DONE" and record.data.get("late") for record in log.read("s"))


def test_an_async_tool_that_its_timeout_cancels_is_settled(till: Till, log: MemoryLog) -> None:
    async def charge(what: str) -> str:
        """Charge for something."""
        till.charge(what)
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    tool = wrap_tool(function_tool(charge, timeout=0.5), **RELEASE)
    bot = agent([tool], [call("c1", "charge", what="x")], "never mind")
    asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    assert till.lines() == ["charge x", "refund x"] and "timed out" in bot.model.heard[0]
    assert read_saga(log, "s").status is SagaStatus.COMMITTED


def test_a_sibling_of_a_failed_call_is_waited_for_and_undone(till: Till) -> None:
    gate = Gate()

    def charge(what: str) -> str:
        """Charge for something."""
        gate.pass_through()
        return till.charge(what)

    async def lose(what: str) -> str:
        """Fail while the other call is inside."""
        await asyncio.to_thread(gate.inside.wait, BOUND)
        raise NoMoney(what)

    tools = [
        wrap_tool(function_tool(charge), **REFUND),
        wrap_tool(function_tool(lose, failure_error_function=None), **RELEASE),
    ]
    bot = agent(tools, [call("c1", "charge", what="x"), call("c2", "lose", what="y")])
    with closing(Watching(gate)) as log:
        with pytest.raises(UserError) as raised:
            asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
        assert isinstance(raised.value.__cause__, NoMoney)
        assert [line for line in till.lines() if line.endswith(" x")] == ["charge x", "refund x"]
        assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


@pytest.mark.parametrize("begun", [True, False])
def test_an_async_call_that_outlives_a_sync_run_ends_on_its_loop(begun: bool, till: Till, log: MemoryLog) -> None:
    """Its loop runs no more when the scope ends, which would wait for it in vain."""
    inside = asyncio.Event()

    async def slow(what: str) -> str:
        till.charge(what)
        inside.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # it puts away what it has begun
            for _ in range(200):
                await asyncio.sleep(0)
        return what

    async def fail(what: str) -> str:
        if begun:
            await inside.wait()
        raise LookupError(what)

    failing = wrap_tool(function_tool(fail, failure_error_function=None), semantics="READ_ONLY")
    made = agent(
        [wrap_tool(function_tool(slow), **REFUND), failing],
        [call("1", "slow", what="room"), call("2", "fail", what="")],
    )
    with own_loop(), pytest.raises(UserError):
        saga_run(made, "go", saga_id="s", log=log, drain_timeout=BOUND)
    assert till.lines() == (["charge room", "refund room"] if begun else [])
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


# --- streams


def test_a_stream_reads_like_the_frameworks_and_commits_with_its_last_event(till: Till, log: MemoryLog) -> None:
    async def body() -> None:
        run = asaga_stream(agent([charge_of(till)], [call("c1", "charge", what="x")]), "go", saga_id="s", log=log)
        with pytest.raises(AttributeError, match="first event"):
            _ = run.final_output
        kinds = [event.type async for event in run.stream_events()]
        assert "run_item_stream_event" in kinds and run.final_output == "done" and run.is_complete
        assert run.result is not None and run.interruptions == [] and current_saga() is None
        assert [event async for event in run.stream_events()] == []

    asyncio.run(body())
    assert read_saga(log, "s").status is SagaStatus.COMMITTED


@pytest.mark.parametrize("mode", ["immediate", "after_turn"])
def test_a_cancelled_stream_is_rolled_back_with_the_sync_tool_that_still_runs(mode: Any, till: Till) -> None:
    gate = Gate()

    def charge(what: str) -> str:
        """Charge for something."""
        gate.pass_through()
        return till.charge(what)

    bot = agent([wrap_tool(function_tool(charge), **REFUND)], [call("c1", "charge", what="x")])

    async def body() -> None:
        run = asaga_stream(bot, "go", saga_id="s", log=log)

        async def cancel() -> None:
            await asyncio.to_thread(gate.inside.wait, BOUND)
            run.cancel(mode)
            if mode == "after_turn":  # else the call goes on until it has been given up
                gate.go_on.set()

        cancelling = asyncio.create_task(cancel())
        async for _ in run.stream_events():
            pass
        await cancelling

    with closing(Watching(gate)) as log:
        with pytest.raises(SagaAborted, match="cancelled"):
            asyncio.run(body())
        assert till.lines() == ["charge x", "refund x"]
        assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


@pytest.mark.parametrize("by_framework", [False, True])
def test_a_stream_that_is_cancelled_before_its_first_event_makes_no_call(
    by_framework: bool, till: Till, log: MemoryLog
) -> None:
    """By its own `cancel`, or by that of the framework's result, which it hands out."""
    made = agent([wrap_tool(function_tool(till.charge, name_override="book"), **REFUND)], [call("c", "book", what="x")])

    async def body() -> None:
        run = asaga_stream(made, "go", saga_id="s", log=log)
        if not by_framework:
            run.cancel()
        with pytest.raises(SagaAborted):
            async for _ in run.stream_events():
                if by_framework:
                    run.result.cancel()  # type: ignore[union-attr]

    asyncio.run(body())
    assert till.lines() == [] and read_saga(log, "s").status is SagaStatus.ROLLED_BACK


def test_a_stream_that_is_closed_while_a_tool_runs_makes_no_further_call(till: Till) -> None:
    gate = Gate()

    def charge(what: str) -> str:
        """Charge for something."""
        if what == "x":
            gate.pass_through()
        return till.charge(what)

    turns = [[call("c1", "charge", what="x")], [call("c2", "charge", what="y")]]
    bot = agent([wrap_tool(function_tool(charge), **REFUND)], *turns)

    async def body() -> None:
        async with asaga_stream(bot, "go", saga_id="s", log=log) as run:
            async for event in run.stream_events():
                if getattr(event, "name", None) == "tool_called":
                    await asyncio.to_thread(gate.inside.wait, BOUND)
                    break

    with closing(Watching(gate)) as log:
        asyncio.run(body())
        assert till.lines() == ["charge x", "refund x"] and bot.model.asked == 1
        assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


def test_a_run_that_failed_without_a_word_in_its_stream_is_rolled_back(
    till: Till, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework says that its stream may end normally although the run has failed."""
    assert isinstance(RunResultStreaming.run_loop_exception, property)
    monkeypatch.setattr(RunResultStreaming, "run_loop_exception", property(lambda self: NoMoney("silently")))

    async def body() -> None:
        run = asaga_stream(agent([charge_of(till)], [call("c1", "charge", what="x")]), "go", saga_id="s", log=log)
        async for _ in run.stream_events():
            pass

    with pytest.raises(NoMoney):
        asyncio.run(body())
    assert till.lines() == ["charge x", "refund x"]


def test_a_stream_that_is_dropped_halfway_is_rolled_back_by_its_loop(till: Till, log: MemoryLog) -> None:
    async def body() -> None:
        run = asaga_stream(agent([charge_of(till)], [call("c1", "charge", what="x")]), "go", saga_id="s", log=log)
        async for event in run.stream_events():
            if getattr(event, "name", None) == "tool_output":
                return

    asyncio.run(body())
    assert till.lines() == ["charge x", "refund x"]
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


def test_a_stream_inside_of_a_saga_ends_with_that_saga(till: Till, log: MemoryLog) -> None:
    async def body() -> None:
        async with saga_scope("s", log=log) as saga:
            run = asaga_stream(agent([charge_of(till)], [call("c1", "charge", what="x")]), "go")
            async for _ in run.stream_events():
                assert current_saga() is saga
            assert till.lines() == ["charge x"]
            saga.abort("changed our mind")

    with pytest.raises(SagaAborted):
        asyncio.run(body())
    assert till.lines() == ["charge x", "refund x"]


@pytest.mark.parametrize("mode", ["immediate", "after_turn"])
def test_a_stream_cancelled_inside_of_a_saga_is_undone_alone(mode: Any, till: Till, log: MemoryLog) -> None:
    charge = charge_of(till)

    async def body() -> None:
        async with saga_scope("s", log=log) as saga:
            turns = [[call(f"c{n}", "charge", what=str(n))] for n in range(9)]
            run = asaga_stream(agent([charge], *turns), "go")
            with pytest.raises(SagaAborted, match="cancelled"):
                async for _ in run.stream_events():
                    if till.lines():
                        run.cancel(mode)
            assert till.lines() == ["charge 0", "refund 0"] and saga.takes_steps

    asyncio.run(body())
    assert read_saga(log, "s").status is SagaStatus.COMMITTED


def test_a_stream_that_fails_is_rolled_back(till: Till, log: MemoryLog) -> None:
    async def body() -> None:
        turns = [[call(f"c{n}", "charge", what=str(n))] for n in range(9)]
        run = asaga_stream(agent([charge_of(till)], *turns), "go", max_turns=2, saga_id="s", log=log)
        async for _ in run.stream_events():
            pass

    with pytest.raises(MaxTurnsExceeded):
        asyncio.run(body())
    assert sorted(till.lines()) == ["charge 0", "charge 1", "refund 0", "refund 1"]


# --- what is passed through


def test_a_run_that_goes_on_for_too_long_is_rolled_back(till: Till, log: MemoryLog) -> None:
    turns = [[call(f"c{n}", "charge", what=str(n))] for n in range(9)]
    with pytest.raises(MaxTurnsExceeded), own_loop():
        saga_run(agent([charge_of(till)], *turns), "go", max_turns=2, saga_id="s", log=log)
    assert till.lines()[-2:] == ["refund 1", "refund 0"]


@pytest.mark.parametrize("wraps", [False, True])
def test_the_arguments_of_the_run_are_the_frameworks(wraps: bool, till: Till, log: MemoryLog, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Hooks(RunHooks[Any]):
        async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
            seen.append((context.context, tool.name, current_saga() is not None))

    session = SQLiteSession("one", str(tmp_path / "session"))
    context: Any = RunContextWrapper(context={"user": 7}) if wraps else {"user": 7}
    config = RunConfig(workflow_name="trip", tracing_disabled=True)
    bot = agent([charge_of(till)], [call("c1", "charge", what="x")])
    more: Any = {"hooks": Hooks(), "session": session, "context": context, "run_config": config}
    result = asyncio.run(asaga_run(bot, "go", saga_id="s", log=log, name="a trip", metadata={"for": "me"}, **more))
    assert seen == [({"user": 7}, "charge", True)]
    assert result.context_wrapper.context == {"user": 7}
    assert len(asyncio.run(session.get_items())) == 4
    session.close()
    state = read_saga(log, "s")
    assert (state.name, state.metadata) == ("a trip", {"for": "me"})


def test_sync_under_a_running_loop_is_refused_before_anything(till: Till, log: MemoryLog) -> None:
    async def body() -> None:
        saga_run(agent([charge_of(till)], [call("c1", "charge", what="x")]), "go", saga_id="s", log=log)

    with pytest.raises(RuntimeError):
        asyncio.run(body())
    assert till.lines() == []


def test_a_tool_knows_its_step(log: MemoryLog) -> None:
    seen: list[Any] = []

    @function_tool
    def look() -> str:
        """Look."""
        seen.append(current_step())
        return "seen"

    asyncio.run(asaga_run(agent([wrap_tool(look, **LOOK)], [call("c1", "look")]), "go", saga_id="s", log=log))
    assert [(step.saga_id, step.tool, step.direction) for step in seen] == [("s", "look", "forward")]
    assert read_saga(log, "s").steps[0].semantics is ActionSemantics.READ_ONLY


def test_two_runs_at_once_in_one_saga_are_refused(till: Till, log: MemoryLog) -> None:
    async def body() -> None:
        async with saga_scope("s", log=log):
            bots = [agent([charge_of(till)], [call("call_0", "charge", what=what)]) for what in "xy"]
            await asyncio.gather(*(asaga_run(bot, "go") for bot in bots))

    with pytest.raises(SagaBusy):
        asyncio.run(body())
    left = till.lines()
    assert left.count("charge x") == left.count("refund x") and "charge y" not in left
