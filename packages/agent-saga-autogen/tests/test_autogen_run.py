"""Runs that are one saga: whose step a call is, and how a run comes to its end whatever happens in it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import Response, TaskResult
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import TextMessage, ToolCallExecutionEvent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import (
    AgentId,
    CancellationToken,
    DefaultInterventionHandler,
    DropMessage,
    FunctionCall,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    message_handler,
)
from autogen_core.exceptions import MessageDroppedException
from autogen_core.models import FunctionExecutionResultMessage, LLMMessage, SystemMessage
from autogen_core.tool_agent import ToolAgent, ToolException, ToolExecutionException, tool_agent_caller_loop
from autogen_core.tools import FunctionTool

from agent_saga_autogen import asaga_run, asaga_stream, bind, saga_run, wrap_tool
from agent_saga_autogen.calls import AgentRun
from agent_saga_core import (
    BoundaryRequired,
    NotApplied,
    RollbackIncomplete,
    SagaAborted,
    SagaNotRunning,
    SagaStatus,
    StepStatus,
    current_saga,
    read_saga,
    saga_scope,
    saga_tool,
)

BOUND = 20.0


def books(world: Any, log: Any, saga_id: str) -> list[str]:
    """The items of a saga's intents."""
    return [record.data["args"]["item"] for record in log.read(saga_id) if record.type == "INTENT"]


def statuses(log: Any, saga_id: str) -> list[StepStatus]:
    return [step.status for step in read_saga(log, saga_id).steps]


# --- whose step a call is


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_team_on_a_runtime_started_in_another_saga_runs_in_its_own(
    is_async: bool, world: Any, log: Any, model: Any, by_item: Any
) -> None:
    tool = wrap_tool(world.tool(is_async=is_async), **by_item)
    runtime = SingleThreadedAgentRuntime()
    async with asyncio.timeout(BOUND), saga_scope("A", log=log):
        runtime.start()
        async with saga_scope("A2", log=log, independent=True):
            await tool.run_json({"item": "a"}, CancellationToken(), call_id="c")
        agent = model.agent("clerk", [tool], [("0", "book", {"item": "b"})], "booked")
        run = asyncio.create_task(_outside(asaga_run, model.team(agent, runtime=runtime), "go", saga_id="B", log=log))
        await run
        await runtime.stop()
    assert books(world, log, "A") == [] and books(world, log, "A2") == ["a"] and books(world, log, "B") == ["b"]
    assert world.acts == ["book a", "book b"]
    assert read_saga(log, "B").status is SagaStatus.COMMITTED


async def _outside(run: Any, *args: Any, **options: Any) -> Any:
    """Run where no saga is current."""
    from agent_saga_core.drive import CURRENT_SAGA

    CURRENT_SAGA.set(None)
    return await run(*args, **options)


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_runtime_started_before_any_saga_loses_no_call(
    is_async: bool, world: Any, log: Any, model: Any, by_item: Any
) -> None:
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    agent = model.agent("clerk", [wrap_tool(world.tool(is_async=is_async), **by_item)],
                        [("0", "book", {"item": "a"})], "booked")  # fmt: skip
    async with asyncio.timeout(BOUND):
        await asaga_run(model.team(agent, runtime=runtime), "go", saga_id="A", log=log)
        await runtime.stop()
    assert books(world, log, "A") == ["a"]


@pytest.mark.parametrize("is_async", [True, False])
async def test_two_teams_at_once_with_the_same_tool_are_two_sagas(
    is_async: bool, world: Any, log: Any, model: Any, by_item: Any
) -> None:
    tool = wrap_tool(world.tool(is_async=is_async), **by_item)
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    runs: list[Any] = []
    async with asyncio.timeout(BOUND):
        for saga_id, on in (("A", None), ("B", runtime), ("C", runtime)):
            calls = [[(str(n), "book", {"item": f"hold {saga_id}{n}"})] for n in range(2)]
            team = model.team(model.agent("clerk", [tool], *calls, "booked"), runtime=on)
            runs.append(asyncio.create_task(asaga_run(team, "go", saga_id=saga_id, log=log)))
        for saga_id in "ABC":
            await world.until_inside(f"hold {saga_id}0")
        world.released.set()
        await asyncio.gather(*runs)
        await runtime.stop()
    for saga_id in "ABC":
        assert books(world, log, saga_id) == [f"hold {saga_id}0", f"hold {saga_id}1"]
    assert sorted(world.acts) == [f"book hold {saga_id}{n}" for saga_id in "ABC" for n in range(2)]


async def test_where_the_run_of_a_call_cannot_be_told_between_two_sagas_it_is_refused(
    world: Any, log: Any, model: Any, by_item: Any, told: Any
) -> None:
    shared = wrap_tool(world.tool(), **by_item)
    declared = saga_tool(**by_item)(world.tool("plain", is_async=False))  # AutoGen runs it without context or token

    def agent(saga_id: str) -> Any:
        calls = [("0", "book", {"item": f"hold {saga_id}"})], [("1", "plain", {"item": f"plain {saga_id}"})]
        return model.agent("clerk", [shared, declared], *calls, "booked")

    async with asyncio.timeout(BOUND):
        runs = [asyncio.create_task(asaga_run(agent(s), "go", saga_id=s, log=log)) for s in "AB"]
        for saga_id in "AB":
            await world.until_inside(f"hold {saga_id}")
        with pytest.raises(BoundaryRequired):
            await shared.run_json({"item": "stray"}, CancellationToken(), call_id="s")
        world.released.set()
        results = await asyncio.gather(*runs)
    assert "book stray" not in world.acts
    # The first of the two to end frees the tools for the other one.
    refused = [text for result in results for text, is_error in told(result) if is_error]
    assert all("two running sagas" in text for text in refused)
    for saga_id in "AB":
        assert set(books(world, log, saga_id)) <= {f"hold {saga_id}", f"plain {saga_id}"}


async def test_a_saga_tool_made_into_an_autogen_tool_is_a_step_of_the_run(
    world: Any, log: Any, model: Any, by_item: Any
) -> None:
    declared = saga_tool(**by_item)(world.tool(is_async=False))
    agent = model.agent("clerk", [declared], [("0", "book", {"item": "a"})], "booked")
    async with asyncio.timeout(BOUND):
        await asaga_run(model.team(agent), "go", saga_id="A", log=log)
    assert books(world, log, "A") == ["a"]


async def test_the_tools_of_an_agent_with_code_of_its_own_are_bound(world: Any, log: Any, by_item: Any) -> None:
    class Careless(BaseChatAgent):
        """Hands no token on."""

        produced_message_types = (TextMessage,)

        def __init__(self, tools: list[Any]) -> None:
            super().__init__("careless", "d")
            self.mine = tools

        async def on_messages(self, messages: Any, cancellation_token: CancellationToken) -> Response:
            await self.mine[0].run_json({"item": "a"}, CancellationToken(), call_id="0")
            return Response(chat_message=TextMessage(content="so", source=self.name))

        async def on_reset(self, cancellation_token: CancellationToken) -> None: ...

    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    agent = Careless([wrap_tool(world.tool(), **by_item)])
    async with asyncio.timeout(BOUND):
        await asaga_run(RoundRobinGroupChat([agent], runtime=runtime, max_turns=1), "go", saga_id="A", log=log)
        await runtime.stop()
    assert books(world, log, "A") == ["a"]


async def test_a_run_in_a_saga_on_a_runtime_of_that_saga_is_a_savepoint(
    world: Any, log: Any, model: Any, by_item: Any
) -> None:
    tool = wrap_tool(world.tool(), **by_item)
    runtime = SingleThreadedAgentRuntime()
    async with asyncio.timeout(BOUND), saga_scope("A", log=log) as saga:
        runtime.start()
        agent = model.agent("clerk", [tool], [("0", "book", {"item": "a"})], "booked")
        await asaga_run(model.team(agent, runtime=runtime), "go")
        assert [step.scope for step in saga.steps] == ["1"], "a step of the scope around it would outlive the run"
        await runtime.stop()


async def test_a_call_in_a_savepoint_of_a_tool_is_undone_with_that_savepoint(
    world: Any, log: Any, model: Any, by_item: Any
) -> None:
    book = wrap_tool(world.tool(), **by_item)

    async def attempt(item: str, cancellation_token: CancellationToken) -> str:
        saga = current_saga()
        assert saga is not None
        try:
            async with saga.savepoint():
                await book.run_json({"item": item}, cancellation_token)
                raise LookupError(item)
        except LookupError:
            return "undone"

    tools = [book, wrap_tool(attempt, semantics="READ_ONLY")]
    agent = model.agent("clerk", tools, [("0", "book", {"item": "a"})], [("1", "attempt", {"item": "b"})], "done")
    await asaga_run(agent, "go", saga_id="A", log=log)
    assert world.standing == ["a"]


async def test_nested_teams_and_tools_that_run_agents_pass_their_run_on(
    world: Any, log: Any, model: Any, by_item: Any
) -> None:
    tool = wrap_tool(world.tool(), **by_item)

    def clerk(name: str) -> Any:
        return model.agent(name, [tool], [("0", "book", {"item": name})], "booked")

    first = RoundRobinGroupChat([clerk("inner")], name="nested", max_turns=1)
    tools = [AgentTool(clerk("tooled")), TeamTool(RoundRobinGroupChat([clerk("teamed")], max_turns=1), "team", "Book.")]
    calls = [("0", "tooled", {"task": "book"})], [("1", "team", {"task": "book"})]
    second = model.agent("second", tools, *calls, "all is booked")
    async with asyncio.timeout(BOUND):
        await asaga_run(RoundRobinGroupChat([first, second], max_turns=2), "go", saga_id="A", log=log)
    assert books(world, log, "A") == ["inner", "tooled", "teamed"]


async def test_agents_with_the_same_call_ids_and_two_runs_of_one_saga_hide_no_call(
    world: Any, log: Any, model: Any, by_item: Any
) -> None:
    tool = wrap_tool(world.tool(), **by_item)

    def clerk(name: str) -> Any:
        return model.agent(name, [tool], [("0", "book", {"item": "a"})], "booked")

    async with asyncio.timeout(BOUND), saga_scope("A", log=log) as saga:
        for _ in range(2):
            await asaga_run(RoundRobinGroupChat([clerk("x"), clerk("y")], max_turns=2), "go")
        assert len(saga.steps) == 4
    assert world.standing == ["a"] * 4
    identities = [record.data["identity"] for record in log.read("A") if record.type == "INTENT"]
    assert [identity.split('"')[5] for identity in identities] == ["1/x", "1/y", "2/x", "2/y"]


async def test_a_run_made_again_gives_back_what_is_recorded(world: Any, log: Any, model: Any, by_item: Any) -> None:
    tool = wrap_tool(world.tool(), **by_item)

    def team() -> Any:
        return model.team(model.agent("clerk", [tool], [("0", "book", {"item": "a"})] * 2, "booked"))

    async with asyncio.timeout(BOUND):
        for _ in range(2):
            await asaga_run(team(), "go", saga_id="A", log=log)
    assert world.acts == ["book a"] * 2


@pytest.mark.parametrize("under", ["asaga_run", "agent.run", "no id"])
async def test_a_saga_that_goes_on_takes_no_call_for_an_earlier_one(
    under: str, world: Any, log: Any, model: Any, by_item: Any
) -> None:
    tool = wrap_tool(world.tool(), **by_item)

    async def go(item: str) -> None:
        agent = model.agent("clerk", [tool], *[[("0", "book", {"item": item})]] * 2, "booked")
        if under == "asaga_run":
            await asaga_run(agent, "go")
        elif under == "agent.run":
            await agent.run(task="go")
        else:
            await tool.run_json({"item": item}, CancellationToken())

    async with asyncio.timeout(BOUND):
        async with saga_scope("A", log=log) as saga:
            await go("a")
            await saga.asuspend("a person is asked")
        for item in "ab":
            async with saga_scope("A", log=log, resume="continue") as saga:
                await go(item)
                if item == "a":
                    await saga.asuspend("another person is asked")
    times = 1 if under == "no id" else 2
    assert world.acts == [f"book {item}" for item in "aab" for _ in range(times)]


# --- how a run ends


async def test_the_saga_knows_a_failure_that_autogen_swallows(world: Any, log: Any, model: Any, by_result: Any) -> None:
    async def pay(item: str) -> dict[str, str]:
        world.book(item)
        raise ConnectionError("no answer")

    tools = [wrap_tool(world.tool(), **by_result), wrap_tool(pay, **by_result)]
    calls = [("0", "book", {"item": "a"})], [("1", "pay", {"item": "b"})]
    async with asyncio.timeout(BOUND):
        with pytest.raises(RollbackIncomplete) as error:
            await asaga_run(model.team(model.agent("clerk", tools, *calls, "all is paid")), "go", log=log)
    assert [step.tool for step in error.value.report.remaining] == ["pay"] and world.standing == ["b"]


async def test_a_failure_that_left_nothing_lets_the_run_go_on(
    world: Any, log: Any, model: Any, by_result: Any, told: Any
) -> None:
    async def pay(item: str) -> dict[str, str]:
        raise NotApplied("no funds")

    agent = model.agent("clerk", [wrap_tool(pay, **by_result)], [("0", "pay", {"item": "a"})], "not paid")
    async with asyncio.timeout(BOUND):
        result = await asaga_run(agent, "go", saga_id="A", log=log)
    assert told(result) == [("no funds", True)] and statuses(log, "A") == [StepStatus.NOT_APPLIED]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("in_team", [True, False])
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("by_token", [True, False])
async def test_a_cancelled_run_comes_out_rolled_back(
    is_async: bool, in_team: bool, streams: bool, by_token: bool, world: Any, log: Any, model: Any, by_item: Any
) -> None:
    tool = wrap_tool(world.tool(is_async=is_async), **by_item)
    calls = [("0", "book", {"item": "a"})], [("1", "book", {"item": "hold"})], [("2", "book", {"item": "late"})]
    agent = model.agent("clerk", [tool], *calls, "booked")
    runner = model.team(agent) if in_team else agent
    token = CancellationToken()
    options: dict[str, Any] = {"cancellation_token": token, "saga_id": "A", "log": log}

    async def read() -> None:
        async with aclosing(asaga_stream(runner, "go", **options)) as stream:
            async for _ in stream:
                pass

    async with asyncio.timeout(BOUND):
        run = asyncio.create_task(read() if streams else asaga_run(runner, "go", **options))
        await world.until_inside("hold")
        if by_token:
            token.cancel()
        else:
            run.cancel()
        world.released.set()  # a call that nobody can stop is waited for
        with pytest.raises(asyncio.CancelledError):
            await run
    assert statuses(log, "A") == [StepStatus.COMPENSATED] * 2 and world.standing == []
    assert read_saga(log, "A").status is SagaStatus.ROLLED_BACK
    if in_team:
        assert not runner._is_running, "the team believes that it still runs"
    await tool.run_json({"item": "free"}, CancellationToken())  # nobody's again
    assert world.standing == ["free"]


@pytest.mark.parametrize("how", ["token", "token and task", "task", "task twice", "refusals"])
async def test_a_team_that_was_stopped_can_run_again(
    how: str, world: Any, log: Any, model: Any, by_item: Any, by_result: Any
) -> None:
    """A team whose own runtime is left running waits for ever, and keeps its loop busy, in its next run."""

    async def fail(item: str) -> dict[str, str]:
        raise TimeoutError(item)

    declared = by_result if how == "refusals" else by_item
    tool, fails = wrap_tool(world.tool(), **by_item), wrap_tool(fail, **declared)
    calls = [("0", "fail", {"item": "a"})], *[[(f"r{n}", "book", {"item": "b"})] for n in range(3)]
    turns = calls if how == "refusals" else [[("1", "book", {"item": "hold"})]]
    agent = model.agent("clerk", [tool, fails], *turns, "well", "well", "well")
    team, token = model.team(agent), CancellationToken()
    before = asyncio.all_tasks()
    async with asyncio.timeout(BOUND):
        run = asyncio.create_task(asaga_run(team, "go", saga_id="A", log=log, cancellation_token=token))
        if how != "refusals":
            await world.until_inside("hold")
            if "token" in how:
                token.cancel()
            if "task" in how:
                run.cancel()
            if "twice" in how:
                await asyncio.sleep(0)
                run.cancel()
            world.released.set()
        with pytest.raises((asyncio.CancelledError, RollbackIncomplete)):
            await run
        while asyncio.all_tasks() - before:
            await asyncio.wait(asyncio.all_tasks() - before)
        assert (await asaga_run(team, "again", saga_id="B", log=log)).messages[-1].content == "well"
    assert world.standing == []


@pytest.mark.parametrize("in_team", [True, False])
async def test_autogen_itself_never_comes_back_from_a_cancelled_token(in_team: bool, world: Any, model: Any) -> None:
    agent = model.agent("clerk", [world.tool()], [("0", "book", {"item": "hold"})], "booked")
    token = CancellationToken()
    runner = model.team(agent) if in_team else agent
    run = asyncio.create_task(runner.run(task="go", cancellation_token=token))
    async with asyncio.timeout(BOUND):
        await world.until_inside("hold")
        token.cancel()
        world.released.set()
        for _ in range(200):
            await asyncio.sleep(0)
    assert not run.done(), "AutoGen comes back now: the watch over the token may be needless"
    run.cancel()
    if in_team:
        for task in tuple(runner._runtime._background_tasks):
            task.cancel()
    await asyncio.wait({run}, timeout=BOUND)
    assert run.done()


async def test_a_tool_of_a_cancelled_task_runs_on_in_autogen_and_is_waited_for_in_a_saga(
    world: Any, log: Any, model: Any, by_item: Any
) -> None:
    agent = model.agent("clerk", [world.tool()], [("0", "book", {"item": "hold"})], "booked")
    run = asyncio.create_task(agent.run(task="go"))
    async with asyncio.timeout(BOUND):
        await world.until_inside("hold")
        run.cancel()
        await asyncio.wait({run})
        orphans = [task for task in asyncio.all_tasks() if "_execute_tool_calls" in repr(task.get_coro())]
        assert len(orphans) == 1, "AutoGen cancels its calls now, or waits for them"
        world.released.set()
        await asyncio.wait(orphans)


async def test_a_tool_that_does_not_end_is_given_up_and_named(world: Any, log: Any, model: Any, by_result: Any) -> None:
    tool = wrap_tool(world.tool(is_async=False), **by_result)
    agent = model.agent("clerk", [tool], [("0", "book", {"item": "hold"})], "booked")
    async with asyncio.timeout(BOUND):
        run = asyncio.create_task(asaga_run(model.team(agent), "go", saga_id="A", log=log, drain_timeout=0.0))
        await world.until_inside("hold")
        run.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await run
        assert "book" in " ".join(cancelled.value.__notes__), "the report does not name it"
        assert read_saga(log, "A").status is SagaStatus.NEEDS_ATTENTION
        world.released.set()


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("shared_runtime", [True, False])
async def test_three_refusals_end_a_team_that_would_run_for_ever(
    streams: bool, shared_runtime: bool, world: Any, log: Any, model: Any, by_result: Any
) -> None:
    async def pay(item: str) -> dict[str, str]:
        world.book(item)
        raise ConnectionError("no answer")

    turns: list[Any] = [[("0", "pay", {"item": "a"})]]
    turns += [[(str(n), "book", {"item": f"again {n}"})] for n in range(1, 200)]
    tools = [wrap_tool(world.tool(), **by_result), wrap_tool(pay, **by_result)]
    agent = model.agent("clerk", tools, *turns, max_tool_iterations=2)
    client = agent._model_client
    runtime = SingleThreadedAgentRuntime() if shared_runtime else None
    if runtime is not None:
        runtime.start()
    team = RoundRobinGroupChat([agent], runtime=runtime)  # without a termination
    async with asyncio.timeout(BOUND):
        with pytest.raises(RollbackIncomplete):
            if streams:
                async with aclosing(asaga_stream(team, "go", log=log)) as stream:
                    async for _ in stream:
                        pass
            else:
                await asaga_run(team, "go", log=log)
        if runtime is not None:
            await runtime.stop_when_idle()
    assert world.standing == ["a"] and len(client.create_calls) <= 6


async def test_a_run_in_a_saga_that_stops_says_so(world: Any, log: Any, model: Any, by_result: Any) -> None:
    turns = [[(str(n), "book", {"item": str(n)})] for n in range(20)]
    agent = model.agent("clerk", [wrap_tool(world.tool(), **by_result)], *turns)
    async with asyncio.timeout(BOUND):
        with pytest.raises(SagaAborted):
            async with saga_scope(log=log) as saga:
                saga.abort("changed our mind")
                with pytest.raises(SagaAborted, match="stopped"):
                    await asaga_run(agent, "go")
                raise SagaAborted("as expected")
    assert world.acts == []


async def test_what_goes_on_in_a_runtime_of_the_user_s_is_refused_after_the_end(
    world: Any, log: Any, model: Any, by_item: Any
) -> None:
    class Stubborn(BaseChatAgent):
        """Pays no heed to cancellation, and calls its tool once more."""

        heard: BaseException | None = None

        @property
        def produced_message_types(self) -> Any:
            return (TextMessage,)

        async def on_messages(self, messages: Any, cancellation_token: CancellationToken) -> Response:
            for item in ("hold", "late"):
                try:
                    await tool.run_json({"item": item}, cancellation_token, call_id=item)
                except Exception as error:
                    self.heard = error
            return Response(chat_message=TextMessage(content="so", source=self.name))

        async def on_reset(self, cancellation_token: CancellationToken) -> None: ...

    tool = wrap_tool(world.tool(), **by_item)
    stubborn = Stubborn("stubborn", "d")
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    async with asyncio.timeout(BOUND):
        run = asyncio.create_task(
            asaga_run(RoundRobinGroupChat([stubborn], runtime=runtime, max_turns=1), "go", saga_id="A", log=log)
        )
        await world.until_inside("hold")
        run.cancel()
        world.released.set()
        with pytest.raises(asyncio.CancelledError):
            await run
        await runtime.stop_when_idle()
    assert isinstance(stubborn.heard, SagaNotRunning) and world.acts == ["book hold", "undo hold"]


async def test_a_call_that_begins_after_its_run_was_cancelled_is_not_made(
    world: Any, log: Any, model: Any, by_item: Any
) -> None:
    token = CancellationToken()

    async def give_up(item: str) -> str:
        token.cancel()
        return item

    tools = [wrap_tool(give_up, semantics="READ_ONLY"), wrap_tool(world.tool(), **by_item)]
    agent = model.agent("clerk", tools, [("0", "give_up", {"item": "a"}), ("1", "book", {"item": "b"})], "done")
    async with asyncio.timeout(BOUND):
        with pytest.raises(asyncio.CancelledError):
            await asaga_run(model.team(agent), "go", saga_id="A", log=log, cancellation_token=token)
    assert world.acts == [] and [step.tool for step in read_saga(log, "A").steps] == ["give_up"]


async def test_refusals_inside_of_a_step_end_the_run_without_waiting_for_that_step(
    world: Any, log: Any, model: Any, by_result: Any
) -> None:
    async def pay(item: str) -> dict[str, str]:
        raise ConnectionError("no answer")

    turns: list[Any] = [[("0", "pay", {"item": "a"})], *[[(str(n), "book", {"item": "b"})] for n in range(1, 9)]]
    inner = model.agent("inner", [wrap_tool(pay, **by_result), wrap_tool(world.tool(), **by_result)], *turns, "so")
    outer = model.agent("outer", [wrap_tool(AgentTool(inner), semantics="READ_ONLY")],
                        [("0", "inner", {"task": "pay"})], "done")  # fmt: skip
    async with asyncio.timeout(BOUND):
        with pytest.raises(RollbackIncomplete):
            await asaga_run(outer, "go", saga_id="A", log=log, drain_timeout=10 * BOUND)
    assert world.acts == []


async def test_a_team_whose_model_never_answers_is_ended(world: Any, log: Any, model: Any, by_item: Any) -> None:
    asked = asyncio.Event()

    class Deaf(type(model.client())):  # type: ignore[misc]
        """Answers nothing, and pays no heed to cancellation."""

        async def create(self, *_: Any, **__: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

    agent = model.agent("clerk", [wrap_tool(world.tool(), **by_item)], "x")
    agent._model_client = Deaf([], model_info=agent._model_client.model_info)
    team = model.team(agent)
    async with asyncio.timeout(BOUND):
        run = asyncio.create_task(asaga_run(team, "go", saga_id="A", log=log))
        await asked.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert not team._runtime._background_tasks and not team._is_running, "something of the team goes on"


async def test_a_runtime_belongs_to_one_run(log: Any) -> None:
    runtime = object()
    runs = [AgentRun() for _ in range(3)]
    async with saga_scope(log=log) as saga:
        runs[0].open(saga, [], [runtime])
        runs[1].open(saga, [], [runtime])
        assert (runs[0].runtimes, runs[1].runtimes) == ([runtime], []), "the second run would stop the first one's"
        runs[0].close()
        runs[2].open(saga, [], [runtime])
        assert runs[2].runtimes == [runtime]
        runs[1].close()
        runs[2].close()


async def test_a_second_run_of_a_running_team_is_refused_and_harms_nothing(
    world: Any, log: Any, model: Any, by_item: Any
) -> None:
    tool = wrap_tool(world.tool(), **by_item)
    team = model.team(model.agent("clerk", [tool], [("0", "book", {"item": "hold"})], "booked"))
    async with asyncio.timeout(BOUND):
        first = asyncio.create_task(asaga_run(team, "go", saga_id="A", log=log))
        second = asyncio.create_task(asaga_run(team, "go", saga_id="B", log=log))
        await world.until_inside("hold")
        with pytest.raises(ValueError, match="already running"):
            await second
        world.released.set()
        assert isinstance(await first, TaskResult)
    assert read_saga(log, "A").status is SagaStatus.COMMITTED and world.standing == ["hold"]


async def test_a_stream_is_what_run_stream_yields(world: Any, log: Any, model: Any, by_item: Any) -> None:
    def team(tool: Any) -> Any:
        return model.team(model.agent("clerk", [tool], [("0", "book", {"item": "a"})], "booked"))

    async with asyncio.timeout(BOUND):
        plain = [piece async for piece in team(world.tool()).run_stream(task="go")]
        stream = asaga_stream(team(wrap_tool(world.tool(), **by_item)), "go", saga_id="A", log=log)
        ours = [piece async for piece in stream]
    assert [type(piece) for piece in ours] == [type(piece) for piece in plain]
    assert ours[-1].stop_reason == plain[-1].stop_reason and stream.saga.status is SagaStatus.COMMITTED


async def test_a_stream_closed_early_stops_its_team(world: Any, log: Any, model: Any, by_item: Any) -> None:
    tool = wrap_tool(world.tool(), **by_item)
    turns = [[(str(n), "book", {"item": str(n)})] for n in range(200)]
    team = RoundRobinGroupChat([model.agent("clerk", [tool], *turns, max_tool_iterations=1)])
    async with asyncio.timeout(BOUND):
        async with aclosing(asaga_stream(team, "go", saga_id="A", log=log)) as stream:
            async for piece in stream:
                if isinstance(piece, ToolCallExecutionEvent):
                    break
    assert world.standing == [] and not team._is_running
    assert read_saga(log, "A").status is SagaStatus.ROLLED_BACK


@pytest.mark.parametrize("second", ["read", "close"])
async def test_who_is_told_that_a_stream_is_being_read_has_changed_nothing(
    second: str, world: Any, log: Any, model: Any, by_item: Any
) -> None:
    turns = [[("0", "book", {"item": "a"})], [("1", "book", {"item": "hold"})]]
    stream = asaga_stream(model.agent("clerk", [wrap_tool(world.tool(), **by_item)], *turns, "done"), "go", log=log)

    async def read() -> list[Any]:
        return [piece async for piece in stream]

    async with asyncio.timeout(BOUND):
        first = asyncio.create_task(read())
        await world.until_inside("hold")
        with pytest.raises(RuntimeError, match="nothing was changed"):
            await (anext(stream) if second == "read" else stream.aclose())
        world.released.set()
        assert isinstance((await first)[-1], TaskResult)
    assert world.standing == ["a", "hold"] and stream.saga.status is SagaStatus.COMMITTED


def test_saga_run_needs_a_thread_without_a_loop(world: Any, log: Any, model: Any, by_item: Any) -> None:
    agent = model.agent("clerk", [wrap_tool(world.tool(), **by_item)], [("0", "book", {"item": "a"})], "booked")
    result = saga_run(agent, task="go", saga_id="A", log=log, output_task_messages=False)
    assert [type(message).__name__ for message in result.messages][0] == "ToolCallRequestEvent"

    async def inside() -> None:
        with pytest.raises(RuntimeError, match="asaga_run"):
            saga_run(agent, "go")

    asyncio.run(inside())


async def test_a_run_that_ends_by_its_own_means_is_committed(world: Any, log: Any, model: Any, by_item: Any) -> None:
    tool = wrap_tool(world.tool(), **by_item)
    agent = model.agent("clerk", [tool], [("0", "book", {"item": "a"})], [("1", "book", {"item": "b"})],
                        max_tool_iterations=1)  # fmt: skip
    async with asyncio.timeout(BOUND):
        team = RoundRobinGroupChat([agent], termination_condition=MaxMessageTermination(2))
        result = await asaga_run(team, "go", saga_id="A", log=log)
    assert "Maximum number of messages" in str(result.stop_reason)
    assert read_saga(log, "A").status is SagaStatus.COMMITTED and world.standing == ["a"]


# --- the core runtime


class Gate(DefaultInterventionHandler):
    """Lets no call through that books `no`."""

    async def on_send(self, message: Any, *, message_context: Any, recipient: AgentId) -> Any:
        return DropMessage if isinstance(message, FunctionCall) and '"no"' in message.arguments else message


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_tool_agent_on_a_running_runtime(is_async: bool, world: Any, log: Any, by_item: Any) -> None:
    tool = wrap_tool(FunctionTool(world.tool(is_async=is_async), "Book."), **by_item)
    runtime = SingleThreadedAgentRuntime(intervention_handlers=[Gate()])
    await ToolAgent.register(runtime, "tools", lambda: ToolAgent("t", [tool]))
    runtime.start()

    async def send(item: str) -> Any:
        call = FunctionCall(id="0", name="book", arguments=f'{{"item": "{item}"}}')
        return await runtime.send_message(call, AgentId("tools", "default"))

    async with asyncio.timeout(BOUND):
        with pytest.raises(KeyError):
            async with saga_scope("A", log=log) as saga:
                with bind(saga, [tool]):
                    assert "a" in (await send("a")).content
                    assert "a" in (await send("a")).content
                    with pytest.raises(MessageDroppedException):
                        await send("no")
                    raise KeyError("over")
        await runtime.stop()
    assert books(world, log, "A") == ["a", "a"] and world.standing == []
    identities = [record.data["identity"] for record in log.read("A") if record.type == "INTENT"]
    assert all('"0/tools"' in identity for identity in identities)


class Person(DefaultInterventionHandler):
    """Asks before each call, as AutoGen's own documentation does it, and denies those that book `no`."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def on_send(self, message: Any, *, message_context: MessageContext, recipient: AgentId) -> Any:
        if isinstance(message, FunctionCall):
            self.asked.append(message.arguments)
            if '"no"' in message.arguments:
                raise ToolException(call_id=message.id, name=message.name, content="A person denied this call.")
        return message


class Clerk(RoutedAgent):
    """An agent of core that has its tools called by a tool agent, through the runtime."""

    def __init__(self, client: Any, tools: list[Any]) -> None:
        super().__init__("A clerk.")
        self.client, self.tools = client, tools

    @message_handler
    async def on_text(self, message: TextMessage, ctx: MessageContext) -> TextMessage:
        history: list[LLMMessage] = [SystemMessage(content=message.content)]
        said = await tool_agent_caller_loop(
            self, AgentId("tools", "default"), self.client, history, self.tools, ctx.cancellation_token
        )
        results = [
            (one.content, one.is_error)
            for turn in said
            if isinstance(turn, FunctionExecutionResultMessage)
            for one in turn.content
        ]
        return TextMessage(content=repr(results), source="clerk")


@pytest.mark.parametrize("started", ["before", "inside"])
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_core_agent_whose_calls_a_person_may_deny(
    is_async: bool, started: str, world: Any, log: Any, model: Any, by_item: Any
) -> None:
    person = Person()
    tool = wrap_tool(FunctionTool(world.tool(is_async=is_async), "Book."), **by_item)
    runtime = SingleThreadedAgentRuntime(intervention_handlers=[person])
    calls = [("0", "book", {"item": "a"}), ("1", "book", {"item": "no"})], [("0", "book", {"item": "b"})]
    client = model.client(*calls, "booked")
    await ToolAgent.register(runtime, "tools", lambda: ToolAgent("t", [tool]))
    await Clerk.register(runtime, "clerk", lambda: Clerk(client, [tool]))
    if started == "before":
        runtime.start()
    async with asyncio.timeout(BOUND):
        with pytest.raises(KeyError):
            async with saga_scope("A", log=log) as saga:
                if started == "inside":
                    runtime.start()
                with bind(saga, [tool]):
                    asked = TextMessage(content="go", source="user")
                    told = await runtime.send_message(asked, AgentId("clerk", "default"))
                assert world.standing == ["a", "b"]
                raise KeyError("over")
        await runtime.stop()
    assert told.content == repr(  # AutoGen itself shows nothing of what its ToolException says
        [(str({"id": "a"}), False), ("Error: ", True), (str({"id": "b"}), False)]
    )
    assert len(person.asked) == 3, "the handler hears of every call, as without a saga"
    assert world.acts == ["book a", "book b", "undo b", "undo a"]
    assert books(world, log, "A") == ["a", "b"], "a call that was denied is no step"
    assert read_saga(log, "A").status is SagaStatus.ROLLED_BACK


async def test_the_exceptions_of_a_tool_agent_come_out_as_they_are(world: Any, log: Any, by_result: Any) -> None:
    async def pay(item: str) -> dict[str, str]:
        raise NotApplied("no funds")

    tool_agent: list[ToolAgent] = []

    def make() -> ToolAgent:
        tool_agent.append(ToolAgent("t", [wrap_tool(pay, **by_result)]))
        return tool_agent[0]

    runtime = SingleThreadedAgentRuntime()
    await ToolAgent.register(runtime, "tools", make)
    runtime.start()
    async with asyncio.timeout(BOUND), saga_scope("A", log=log):
        call = FunctionCall(id="0", name="pay", arguments='{"item": "a"}')
        with pytest.raises(ToolExecutionException):
            await runtime.send_message(call, AgentId("tools", "default"))
        await runtime.stop()
    assert read_saga(log, "A").steps == (), "the runtime was started in no saga, and nothing was bound"
