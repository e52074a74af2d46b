"""Workbenches whose calls are steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.tools import AgentTool
from autogen_core import CancellationToken
from autogen_core.tools import (
    FunctionTool,
    StaticStreamWorkbench,
    StaticWorkbench,
    TextResultContent,
    ToolOverride,
    ToolResult,
    Workbench,
)

from agent_saga_autogen import SagaWorkbench, WorkbenchToolFailed, asaga_run, asaga_stream, bind, wrap_tool
from agent_saga_core import DeclarationError, SagaStatus, StepStatus, read_saga, saga_scope, undo
from agent_saga_core.drive import CURRENT_SAGA

BOUND = 20.0


class Remote(Workbench):
    """Its tools are nobody's objects, and it raises."""

    component_type = "workbench"

    def __init__(self, world: Any) -> None:
        self.world = world
        self.running = False
        self.asked: list[str | None] = []

    async def list_tools(self) -> Any:
        return [{"name": name, "description": name} for name in ("book", "pay", "break", "drop")]

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        cancellation_token: CancellationToken | None = None,
        call_id: str | None = None,
    ) -> ToolResult:
        self.asked.append(call_id)
        item = (arguments or {}).get("item", "")
        if name == "drop":
            raise ConnectionError("the line is dead")
        found = self.world.book(item)
        if item == "hold":
            self.world.inside(item).set()
            assert await asyncio.to_thread(self.world.released.wait, BOUND)
        content: Any = [TextResultContent(content=found["id"])]
        return ToolResult(name=name, result=content, is_error=name == "break")

    async def start(self) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False

    async def reset(self) -> None:
        self.running = True

    async def save_state(self) -> Mapping[str, Any]:
        return {"asked": list(self.asked)}

    async def load_state(self, state: Mapping[str, Any]) -> None:
        self.asked = list(state["asked"])


class Streaming(Remote):
    async def call_tool_stream(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        cancellation_token: CancellationToken | None = None,
        call_id: str | None = None,
    ) -> AsyncGenerator[Any, None]:
        yield "on its way"
        yield await self.call_tool(name, arguments, cancellation_token, call_id)


@pytest.fixture
def declared(by_item: Any) -> dict[str, Any]:
    by_text = {**by_item, "compensate": undo("test.unbook", id="result.result[0].content")}
    return {"book": by_text, "break": by_item, "drop": by_item}


async def test_calls_are_steps_undone_from_their_result(world: Any, log: Any, declared: Any) -> None:
    workbench = SagaWorkbench(Remote(world), declared)
    with pytest.raises(KeyError):
        async with saga_scope("A", log=log):
            first = await workbench.call_tool("book", {"item": "a"}, CancellationToken(), "c1")
            again = await workbench.call_tool("book", {"item": "b"}, None, "c1")
            assert [first.to_text(), again.to_text()] == ["a", "b"] and not first.is_error
            raise KeyError("over")
    assert world.acts == ["book a", "book b", "undo b", "undo a"]


async def test_whatever_goes_wrong_is_an_error_result(world: Any, log: Any, declared: Any) -> None:
    remote = Remote(world)
    workbench = SagaWorkbench(remote, declared)
    async with saga_scope("A", log=log) as saga:
        broken = await workbench.call_tool("break", {"item": "a"}, None, "c1")
        assert broken.is_error and broken.to_text() == "a", "what the workbench answered"
        dropped = await workbench.call_tool("drop", {"item": "b"}, None, "c2")
        assert dropped.is_error and "the line is dead" in dropped.to_text()
        unknown = await workbench.call_tool("pay", {"item": "c"}, None, "c3")
        assert unknown.is_error and "'pay' is not declared" in unknown.to_text()
    assert [step.status for step in saga.steps] == [StepStatus.COMPENSATED] * 2 and saga.status is SagaStatus.COMMITTED
    assert remote.asked == ["c1", "c2"]


async def test_outside_of_a_saga_everything_is_the_other_workbench_s(world: Any, declared: Any) -> None:
    remote = Remote(world)
    async with SagaWorkbench(remote, declared) as workbench:
        assert remote.running
        assert (await workbench.call_tool("pay", {"item": "a"})).to_text() == "a"
        with pytest.raises(ConnectionError):
            await workbench.call_tool("drop", {"item": "a"})
        assert await workbench.list_tools() == await remote.list_tools()
        await workbench.load_state({"asked": ["x"]})
        assert await workbench.save_state() == {"asked": ["x"]}
    assert not remote.running


async def test_a_declaration_may_say_what_an_error_result_means(world: Any, log: Any, by_result: Any) -> None:
    def nothing(error: BaseException) -> bool:
        return isinstance(error, WorkbenchToolFailed) and error.result.to_text() == "a"

    by_text = {**by_result, "compensate": undo("test.unbook", id="result.result[0].content"), "not_applied": nothing}
    workbench = SagaWorkbench(Remote(world), {"break": by_text})
    async with saga_scope(log=log) as saga:
        assert (await workbench.call_tool("break", {"item": "a"})).is_error
    assert [step.status for step in saga.steps] == [StepStatus.NOT_APPLIED] and saga.status is SagaStatus.COMMITTED


async def test_a_raising_workbench_hangs_an_agent_and_a_wrapped_one_does_not(
    world: Any, log: Any, model: Any, declared: Any, told: Any
) -> None:
    turns = [("0", "drop", {"item": "a"})], [("1", "pay", {"item": "b"})], [("2", "book", {"item": "c"})]
    workbench = SagaWorkbench(Remote(world), declared)
    async with asyncio.timeout(BOUND):
        agent = model.agent("clerk", [], *turns, "done", workbench=workbench)
        result = await asaga_run(agent, "go", saga_id="A", log=log)
        assert [is_error for _, is_error in told(result)] == [True, True, False]

        bare = model.agent("clerk", [], *turns, "done", workbench=Remote(world))
        run = asyncio.create_task(bare.run(task="go"))
        for _ in range(200):
            await asyncio.sleep(0)
        assert not run.done(), "AutoGen hears of a workbench that raises now"
        run.cancel()
        await asyncio.wait({run})


@pytest.mark.parametrize("by_token", [True, False])
async def test_a_cancelled_run_settles_a_call_through_a_workbench(
    by_token: bool, world: Any, log: Any, model: Any, by_item: Any
) -> None:
    workbench = SagaWorkbench(Remote(world), {"book": by_item})
    agent = model.agent("clerk", [], [("0", "book", {"item": "hold"})], "done", workbench=workbench)
    token = CancellationToken()
    async with asyncio.timeout(BOUND):
        run = asyncio.create_task(asaga_run(model.team(agent), "go", saga_id="A", log=log, cancellation_token=token))
        await world.until_inside("hold")
        if by_token:
            token.cancel()
        else:
            run.cancel()
        world.released.set()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert world.standing == [] and read_saga(log, "A").status is SagaStatus.ROLLED_BACK


async def test_a_workbench_on_a_runtime_of_nobody_s_saga_is_bound_to_its_run(
    world: Any, log: Any, model: Any, by_item: Any
) -> None:
    from autogen_core import SingleThreadedAgentRuntime

    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    workbench = SagaWorkbench(Remote(world), {"book": by_item})
    turns = [("0", "book", {"item": "a"})], [("1", "pay", {"item": "b"})]
    agent = model.agent("clerk", [], *turns, "done", workbench=workbench)
    async with asyncio.timeout(BOUND):
        await asaga_run(model.team(agent, runtime=runtime), "go", saga_id="A", log=log)
        await runtime.stop()
    assert [step.tool for step in read_saga(log, "A").steps] == ["book"] and world.standing == ["a"]


async def test_streams_of_a_workbench_are_passed_on_and_the_result_comes_last(
    world: Any, log: Any, by_item: Any
) -> None:
    for remote, pieces in ((Streaming(world), ["on its way"]), (Remote(world), [])):
        workbench = SagaWorkbench(remote, {"book": by_item})
        async with saga_scope(log=log) as saga:
            seen = [piece async for piece in workbench.call_tool_stream("book", {"item": "a"}, None, "c")]
            assert seen[:-1] == pieces and seen[-1].to_text() == "a"
            assert [step.status for step in saga.steps] == [StepStatus.DONE]


async def test_a_stream_of_a_workbench_that_is_left_early_leaves_no_call_running(
    world: Any, log: Any, by_item: Any
) -> None:
    class Slow(Streaming):
        async def call_tool(self, name: str, arguments: Any = None, *args: Any, **more: Any) -> ToolResult:
            world.book(arguments["item"])
            await asyncio.Event().wait()
            raise AssertionError

    async with asyncio.timeout(BOUND):
        async with saga_scope(log=log) as saga:
            stream = SagaWorkbench(Slow(world), {"book": by_item}).call_tool_stream("book", {"item": "a"}, None, "c")
            assert await anext(stream) == "on its way"
            await stream.aclose()
            assert saga.steps[0].status is StepStatus.UNKNOWN
    assert saga.steps[0].status in (StepStatus.COMPENSATED, StepStatus.NOT_APPLIED) and world.standing == []


async def test_a_static_workbench_stays_one_that_agents_stream(world: Any, log: Any, model: Any) -> None:
    inner = model.agent("inner", [], "well")
    plain = StaticStreamWorkbench([AgentTool(inner)])
    workbench = SagaWorkbench(plain, {"inner": {"semantics": "READ_ONLY"}})
    assert isinstance(workbench, StaticStreamWorkbench) and workbench.dump_component() == plain.dump_component()
    agent = model.agent("outer", [], [("0", "inner", {"task": "x"})], "done", workbench=workbench)
    async with asyncio.timeout(BOUND):
        pieces = [piece async for piece in asaga_stream(agent, "go", saga_id="A", log=log)]
    said = [piece.content for piece in pieces if isinstance(piece, TextMessage) and piece.source == "inner"]
    assert said == ["well"], "what the inner agent said is streamed"
    assert [step.status for step in read_saga(log, "A").steps] == [StepStatus.DONE]


async def test_what_a_static_workbench_would_not_call_leaves_no_step(world: Any, log: Any, by_item: Any) -> None:
    tool = FunctionTool(world.tool(), "Book.", name="book")
    for plain in (StaticWorkbench([tool], {"book": ToolOverride(name="reserve")}), StaticStreamWorkbench([tool])):
        name = (await plain.list_tools())[0]["name"]
        workbench = SagaWorkbench(plain, {name: by_item, "none": by_item})
        async with saga_scope(log=log) as saga:
            for called, arguments in ((name, {"thing": 1}), ("none", {})):
                ours = await workbench.call_tool(called, arguments, None, "c")
                assert ours == await plain.call_tool(called, arguments, None, "c") and ours.is_error
            assert saga.steps == ()
            assert not (await workbench.call_tool(name, {"item": "a"}, None, "c")).is_error
            assert len(saga.steps) == 1


@pytest.mark.parametrize("streams", [True, False])
async def test_what_a_workbench_or_a_tool_calls_by_code_of_its_own_is_a_step(
    streams: bool, world: Any, log: Any, by_item: Any
) -> None:
    """Whether AutoGen would have called the tool says nothing where AutoGen does not decide it."""

    class Raw(FunctionTool):
        async def run_json(self, args: Any, cancellation_token: Any, call_id: str | None = None) -> Any:
            return world.book(str(args))

    class Finding(StaticStreamWorkbench):
        async def call_tool(self, name: str, *args: Any, **more: Any) -> ToolResult:
            world.book(name)
            return ToolResult(name=name, result=[])

        async def call_tool_stream(self, name: str, *args: Any, **more: Any) -> AsyncGenerator[Any, None]:
            yield await self.call_tool(name)

    raw, lists = Raw(world.tool(), "Book.", name="book"), {**by_item, "semantics": "READ_ONLY", "compensate": None}
    for plain in (StaticStreamWorkbench([raw]), StaticWorkbench([raw]), Finding([])):
        workbench = SagaWorkbench(plain, {"book": lists})
        async with saga_scope(log=log) as saga:
            if streams:
                [result] = [piece async for piece in workbench.call_tool_stream("book", {"thing": 1}, None, "c")]
            else:
                result = await workbench.call_tool("book", {"thing": 1}, None, "c")
            assert not result.is_error
            assert [step.status for step in saga.steps] == [StepStatus.DONE]
    assert len(world.standing) == 3


async def test_what_is_not_declared_is_refused_where_only_the_binding_tells_of_a_saga(
    world: Any, log: Any, by_item: Any
) -> None:
    workbench = SagaWorkbench(Remote(world), {"book": by_item})
    async with saga_scope(log=log) as saga:
        with bind(saga, workbench):

            async def lost(name: str) -> ToolResult:
                CURRENT_SAGA.set(None)
                return await workbench.call_tool(name, {"item": name})

            assert (await asyncio.create_task(lost("pay"))).is_error
            assert not (await asyncio.create_task(lost("book"))).is_error
        assert [step.tool for step in saga.steps] == ["book"] and world.acts == ["book book"]


async def test_undeclared_tools_are_called_straight_through_if_that_is_allowed(
    world: Any, log: Any, by_item: Any
) -> None:
    workbench = SagaWorkbench(Remote(world), {"book": by_item}, undeclared="allow")
    async with saga_scope(log=log) as saga:
        assert (await workbench.call_tool("pay", {"item": "a"})).to_text() == "a"
    assert saga.steps == ()


async def test_what_is_wrapped_is_not_wrapped_again(world: Any, by_item: Any) -> None:
    workbench = SagaWorkbench(Remote(world), {"book": by_item})
    with pytest.raises(DeclarationError, match="already"):
        SagaWorkbench(workbench, {"book": by_item})
    tools: list[Any] = [wrap_tool(world.tool(), **by_item)]
    with pytest.raises(DeclarationError, match="already"):
        SagaWorkbench(StaticWorkbench(tools), {"book": by_item})
    with pytest.raises(ValueError, match="undeclared"):
        SagaWorkbench(Remote(world), {}, undeclared="maybe")  # type: ignore[arg-type]


async def test_a_tool_that_needs_a_saga_is_refused_without_one_by_an_error_result(world: Any, by_item: Any) -> None:
    workbench = SagaWorkbench(Remote(world), {"book": {**by_item, "require_saga": True}})
    assert (await workbench.call_tool("book", {"item": "a"})).is_error and world.acts == []
