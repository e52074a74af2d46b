"""Runs that wait for a person: approved calls are made once, whoever goes on from their state, and how often."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, Runner, RunState, function_tool

from agent_saga_core import (
    FileLog,
    SagaAborted,
    SagaNotFound,
    SagaNotRunning,
    SagaStatus,
    StepStatus,
    current_saga,
    read_saga,
    recover,
    saga_scope,
)
from agent_saga_core.registry import isolated_registry
from agent_saga_openai_agents import (
    aload_state,
    asaga_run,
    asaga_stream,
    dump_state,
    load_state,
    saga_run,
    wrap_tool,
)

sys.path.insert(0, str(Path(__file__).parent))
from openai_agents_fakes import REFUND, Scripted, Till, agent, approving, call, own_loop, traveller

CHILD = Path(__file__).with_name("openai_agents_child.py")


@pytest.fixture
def till(tmp_path: Path) -> Iterator[Till]:
    with isolated_registry():
        found = Till(tmp_path / "till")
        found.register()
        yield found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FileLog]:
    with closing(FileLog(tmp_path / "log")) as found:
        yield found


def status(log: FileLog, saga_id: str = "s") -> SagaStatus:
    return read_saga(log, saga_id).status


def paused(till: Till, log: FileLog) -> dict[str, Any]:
    """An envelope as it comes back from where it was kept."""
    result = asyncio.run(asaga_run(traveller(till), "go", saga_id="s", log=log))
    assert [item.name for item in result.interruptions] == ["pay"]
    envelope = dump_state(result)
    assert set(envelope) == {"saga_id", "state"} and envelope["saga_id"] == "s"
    return json.loads(json.dumps(envelope))


def go_on(till: Till, log: FileLog, envelope: dict[str, Any]) -> Any:
    async def body() -> Any:
        agent = traveller(till)
        return await asaga_run(agent, approving(await aload_state(agent, envelope)), log=log)

    return asyncio.run(body())


def test_an_approved_call_is_made_once_also_after_the_commit_and_in_another_process(
    till: Till, log: FileLog, tmp_path: Path
) -> None:
    envelope = paused(till, log)
    assert status(log) is SagaStatus.SUSPENDED and till.lines() == ["charge room"]
    (tmp_path / "envelope").write_text(json.dumps(envelope), "utf-8")
    for _ in range(2):
        result = go_on(till, log, envelope)
        assert result.final_output == "done: room, bill" and status(log) is SagaStatus.COMMITTED
        assert till.lines() == ["charge room", "charge bill"]
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done: room, bill ['room', 'bill']\n"), done.stderr
    assert till.lines() == ["charge room", "charge bill"] and status(log) is SagaStatus.COMMITTED
    assert [step.status for step in read_saga(log, "s").steps] == [StepStatus.DONE] * 2


def test_a_suspended_run_goes_on_in_another_process(till: Till, log: FileLog, tmp_path: Path) -> None:
    (tmp_path / "envelope").write_text(json.dumps(paused(till, log)), "utf-8")
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done: room, bill ['room', 'bill']\n"), done.stderr
    assert till.lines() == ["charge room", "charge bill"] and status(log) is SagaStatus.COMMITTED


def test_an_envelope_alone_goes_on_with_what_is_decided_in_it(till: Till, log: FileLog) -> None:
    async def body() -> Any:
        agent = traveller(till)
        result = await asaga_run(agent, "go", saga_id="s", log=log)
        state = result.to_state()
        state.approve(result.interruptions[0])
        return dump_state(state)

    envelope = asyncio.run(body())
    with own_loop():
        result = saga_run(traveller(till), envelope, log=log)
    assert result.final_output == "done: room, bill" and status(log) is SagaStatus.COMMITTED


def test_the_state_of_a_result_goes_on_without_an_envelope(till: Till, log: FileLog) -> None:
    async def body() -> None:
        agent = traveller(till)
        result = await asaga_run(agent, "go", saga_id="s", log=log)
        await asaga_run(agent, approving(result.to_state()), log=log)

    asyncio.run(body())
    assert till.lines() == ["charge room", "charge bill"] and status(log) is SagaStatus.COMMITTED


def test_a_rejected_call_is_not_made_and_the_saga_goes_on(till: Till, log: FileLog) -> None:
    envelope = paused(till, log)

    async def body() -> Any:
        agent = traveller(till)
        state = await aload_state(agent, envelope)
        for item in state.get_interruptions():
            state.reject(item)
        return await asaga_run(agent, state, log=log)

    assert "rejected" in asyncio.run(body()).final_output or "not approved" in asyncio.run(body()).final_output
    assert till.lines() == ["charge room"] and status(log) is SagaStatus.COMMITTED
    assert len(read_saga(log, "s").steps) == 1


def test_an_undecided_state_waits_on(till: Till, log: FileLog) -> None:
    envelope = paused(till, log)

    async def body() -> Any:
        return await asaga_run(traveller(till), envelope, log=log)

    again = asyncio.run(body())
    assert len(again.interruptions) == 1 and status(log) is SagaStatus.SUSPENDED
    assert go_on(till, log, dump_state(again)).final_output == "done: room, bill"
    assert till.lines() == ["charge room", "charge bill"]


def test_a_stream_is_suspended_and_goes_on_as_a_stream(till: Till, log: FileLog) -> None:
    async def read(agent: Any, given: Any, **scope: Any) -> Any:
        run = asaga_stream(agent, given, log=log, **scope)
        async for _ in run.stream_events():
            pass
        return run

    async def body() -> None:
        agent = traveller(till)
        first = await read(agent, "go", saga_id="s")
        assert status(log) is SagaStatus.SUSPENDED
        envelope = json.loads(json.dumps(dump_state(first)))
        for _ in range(2):
            agent = traveller(till)
            run = await read(agent, approving(await aload_state(agent, envelope)))
            assert run.final_output == "done: room, bill" and status(log) is SagaStatus.COMMITTED

    asyncio.run(body())
    assert till.lines() == ["charge room", "charge bill"]


def test_a_saga_whose_time_is_over_is_rolled_back_and_nothing_goes_on(till: Till, log: FileLog) -> None:
    envelope = paused(till, log)
    assert recover(log).untouched == ("s",), "it waits for its person"

    async def expire() -> None:
        async with saga_scope("s", log=log, resume="continue") as saga:
            saga.abort("nobody came")

    with pytest.raises(SagaAborted):
        asyncio.run(expire())
    with pytest.raises(SagaNotRunning):
        go_on(till, log, envelope)
    assert till.lines() == ["charge room", "refund room"]


def test_a_replay_behind_the_commit_makes_no_new_call(till: Till, log: FileLog) -> None:
    envelope = paused(till, log)
    go_on(till, log, envelope)

    async def body() -> Any:
        agent = traveller(till)
        agent.model = Scripted(
            lambda heard: [call(f"n{len(heard)}", "book", what="more")] if len(heard) < 4 else "done"
        )
        return await asaga_run(agent, approving(await aload_state(agent, envelope)), log=log)

    assert asyncio.run(body()).final_output == "done"
    assert till.lines() == ["charge room", "charge bill"] and status(log) is SagaStatus.COMMITTED


def inner_with_approval(till: Till) -> tuple[Agent[Any], Agent[Any]]:
    pay = wrap_tool(function_tool(till.charge, name_override="pay", needs_approval=True), **REFUND)

    def once(heard: list[str]) -> Any:
        return f"paid {heard[-1]}" if heard else [call("call_0", "pay", what="bill")]

    inner = Agent(name="Till", model=Scripted(once), tools=[pay])
    book = wrap_tool(function_tool(till.charge, name_override="pay2"), **REFUND)
    turns: Any = lambda heard: [[call("c1", "pay2", what="room")], [call("c2", "ask", input="x")], "done"][len(heard)]  # noqa: E731
    return Agent(name="Trip", model=Scripted(turns), tools=[book, inner.as_tool("ask", "Ask.")]), inner


def test_a_call_of_an_inner_agent_that_a_person_approved_is_made_once(till: Till, log: FileLog) -> None:
    async def begin() -> Any:
        outer, _ = inner_with_approval(till)
        result = await asaga_run(outer, "go", saga_id="s", log=log)
        assert [item.name for item in result.interruptions] == ["pay"]
        return dump_state(result)

    envelope = json.loads(json.dumps(asyncio.run(begin())))

    async def resume() -> Any:
        outer, _ = inner_with_approval(till)
        return await asaga_run(outer, approving(await aload_state(outer, envelope)), log=log)

    for _ in range(2):
        assert asyncio.run(resume()).final_output == "done"
        assert till.lines() == ["charge room", "charge bill"] and status(log) is SagaStatus.COMMITTED


@pytest.mark.parametrize("known", ["in this process", "by its envelope", "by its saga alone"])
def test_what_an_inner_agent_did_before_an_interruption_is_not_what_it_does_behind_it(
    known: str, till: Till, log: FileLog
) -> None:
    """Two runs of an inner agent that begin alike are two, on either side; gone on from twice, they are one."""
    inner_turns: Any = lambda heard: "booked" if heard else [call("call_0", "book", what="room")]  # noqa: E731
    turns = [
        [call("c1", "ask", input="x")], [call("c2", "pay", what="a")],
        [call("c3", "ask", input="y")], [call("c4", "pay", what="b")],
        [call("c5", "ask", input="z")], "done",
    ]  # fmt: skip

    def outer() -> Agent[Any]:
        book = wrap_tool(function_tool(till.charge, name_override="book"), **REFUND)
        pay = wrap_tool(function_tool(till.charge, name_override="pay", needs_approval=True), **REFUND)
        inner = Agent(name="Inner", model=Scripted(inner_turns), tools=[book])
        return agent([pay, inner.as_tool("ask", "Ask.")], model=Scripted(lambda heard: turns[len(heard)]))

    async def next_state(made: Agent[Any], result: Any) -> tuple[Any, Any]:
        if known == "in this process":
            return result.to_state(), {}
        if known == "by its envelope":
            kept = json.loads(json.dumps(dump_state(result)))
            return await aload_state(made, json.loads(json.dumps(dump_state(await aload_state(made, kept))))), {}
        return await RunState.from_json(made, result.to_state().to_json()), {"saga_id": "s"}

    async def body() -> None:
        made = outer()
        result = await asaga_run(made, "go", saga_id="s", log=log)
        for _ in range(2):
            state, more = await next_state(made, result)
            kept = await next_state(made, result)
            result = await asaga_run(made, approving(state), log=log, **more)
        assert result.final_output == "done"
        if known != "in this process":  # there, states share what was said with the run that has gone on from them
            again = await asaga_run(made, approving(kept[0]), log=log, **kept[1])
            assert again.final_output == "done"

    asyncio.run(body())
    assert till.lines() == [f"charge {what}" for what in ("room", "a", "room", "b", "room")]
    assert status(log) is SagaStatus.COMMITTED


def test_interruptions_that_are_alike_are_told_apart(till: Till, log: FileLog) -> None:
    """Each run of the inner agent waits with the same call id, tool and arguments."""
    inner_turns = [[call("call_0", "book", what="room")], [call("call_1", "pay", what="bill")], "paid"]
    asked = [[call(f"c{n}", "ask", input="x")] for n in range(3)]

    def outer() -> Agent[Any]:
        book = wrap_tool(function_tool(till.charge, name_override="book"), **REFUND)
        pay = wrap_tool(function_tool(till.charge, name_override="pay", needs_approval=True), **REFUND)
        inner = agent([book, pay], name="Inner", model=Scripted(lambda heard: inner_turns[len(heard)]))
        return agent([inner.as_tool("ask", "Ask.")], model=Scripted(lambda heard: [*asked, "done"][len(heard)]))

    async def body() -> Any:
        made = outer()
        result = await asaga_run(made, "go", saga_id="s", log=log)
        while result.interruptions:
            state = await aload_state(made, json.loads(json.dumps(dump_state(result))))
            result = await asaga_run(made, approving(state), log=log)
        return result.final_output

    assert asyncio.run(body()) == "done"
    assert till.lines() == ["charge room", "charge bill"] * 3


# --- which saga a state belongs to


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("committed", [False, True])
def test_a_state_does_not_go_on_in_another_log(
    there: bool, committed: bool, till: Till, log: FileLog, tmp_path: Path
) -> None:
    """Where the calls that were made are not on record, they would be made once more."""
    envelope = paused(till, log)
    if committed:
        go_on(till, log, envelope)
    lines = till.lines()
    with closing(FileLog(tmp_path / "other")) as other:
        if there:  # another saga of the same name, which is left as it is
            asyncio.run(asaga_run(traveller(Till(tmp_path / "elsewhere")), "go", saga_id="s", log=other))
        with pytest.raises(SagaNotFound, match="not in this log"):
            go_on(till, other, envelope)
        with own_loop(), pytest.raises(SagaNotFound):
            saga_run(traveller(till), envelope, log=other)
        if there:
            assert status(other) is SagaStatus.SUSPENDED
        else:
            assert other.read("s") == ()
    assert till.lines() == lines
    assert status(log) is (SagaStatus.COMMITTED if committed else SagaStatus.SUSPENDED)


def test_a_state_whose_saga_is_not_known_is_refused(till: Till, log: FileLog) -> None:
    envelope = paused(till, log)

    async def body() -> None:
        agent = traveller(till)
        state = await RunState.from_json(agent, envelope["state"])  # our part of it is no matter to the framework
        with pytest.raises(ValueError, match="not known"):
            await asaga_run(agent, state, log=log)
        with pytest.raises(ValueError, match="names another"):
            await asaga_run(agent, envelope, saga_id="other", log=log)
        for broken in ({}, {"saga_id": "s"}, {"saga_id": "s", "state": {}}, {"saga_id": 1, "state": envelope["state"]}):
            with pytest.raises(ValueError, match="envelope"):
                await aload_state(agent, broken)
        with pytest.raises(ValueError, match="no result"):
            dump_state(await Runner.run(agent, "go"))
        with pytest.raises(RuntimeError, match="async"):
            load_state(agent, envelope)
        assert status(log) is SagaStatus.SUSPENDED
        result = await asaga_run(agent, approving(state), saga_id="s", log=log)
        assert result.final_output == "done: room, bill"

    asyncio.run(body())


def test_a_state_that_does_not_fit_leaves_the_saga_as_it_is(till: Till, log: FileLog) -> None:
    envelope = paused(till, log)
    with pytest.raises(Exception):  # noqa: B017 - whatever the framework says
        asyncio.run(asaga_run(agent([], name="Other"), envelope, log=log))
    assert status(log) is SagaStatus.SUSPENDED and till.lines() == ["charge room"]
    assert go_on(till, log, envelope).final_output == "done: room, bill"


def test_the_second_run_of_a_saga_knows_its_number_behind_a_resume(till: Till, log: FileLog) -> None:
    async def body() -> Any:
        async with saga_scope("s", log=log):
            await asaga_run(
                agent([wrap_tool(function_tool(till.charge), **REFUND)], [call("c2", "charge", what="w")]), "go"
            )
            return dump_state(await asaga_run(traveller(till), "go"))

    envelope = asyncio.run(body())
    assert envelope["state"]["agent_saga"]["run"] == 2 and status(log) is SagaStatus.SUSPENDED
    for _ in range(2):
        assert go_on(till, log, envelope).final_output == "done: room, bill"
    assert till.lines() == ["charge w", "charge room", "charge bill"]


# --- IRREVERSIBLE


def final(till: Till, **more: Any) -> Any:
    return wrap_tool(function_tool(till.charge, name_override="send", **more), semantics="IRREVERSIBLE")


def test_an_irreversible_tool_waits_for_a_persons_yes(till: Till, log: FileLog) -> None:
    tool = final(till)
    assert tool.needs_approval is True

    def bot() -> Agent[Any]:
        return Agent(
            name="Post", model=Scripted(lambda h: "done" if h else [call("c1", "send", what="x")]), tools=[tool]
        )

    async def body() -> None:
        result = await asaga_run(bot(), "go", saga_id="s", log=log, approve=lambda request: False)
        assert status(log) is SagaStatus.SUSPENDED and till.lines() == []
        for _ in range(2):
            again = bot()
            await asaga_run(again, approving(await aload_state(again, dump_state(result))), log=log)
            assert status(log) is SagaStatus.COMMITTED and till.lines() == ["charge x"]

    asyncio.run(body())


@pytest.mark.parametrize("answer", [True, False, None])
def test_where_the_tool_says_that_nobody_is_to_be_asked_the_sagas_gate_is(
    answer: bool | None, till: Till, log: FileLog
) -> None:
    async def nobody(context: Any, args: Any, call_id: str) -> bool:
        return False

    bot = agent([final(till, needs_approval=nobody)], [call("c1", "send", what="x")])
    gate = None if answer is None else lambda request: answer
    asyncio.run(asaga_run(bot, "go", saga_id="s", log=log, approve=gate))
    assert till.lines() == (["charge x"] if answer else []) and status(log) is SagaStatus.COMMITTED


def test_a_saga_that_can_no_longer_commit_does_not_wait_for_a_person(till: Till, log: FileLog) -> None:
    @function_tool
    def give_up() -> str:
        """Make the saga rollback-only."""
        saga = current_saga()
        assert saga is not None
        saga.abort("enough")
        return "given up"

    pay = function_tool(till.charge, name_override="pay", needs_approval=True)
    tools = [wrap_tool(pay, **REFUND), wrap_tool(give_up, semantics="READ_ONLY")]
    turns = [[call("c1", "give_up")], [call("c2", "pay", what="y")]]
    with pytest.raises(SagaAborted):
        asyncio.run(asaga_run(agent(tools, *turns), "go", saga_id="s", log=log))
    assert status(log) is SagaStatus.ROLLED_BACK and till.lines() == []
