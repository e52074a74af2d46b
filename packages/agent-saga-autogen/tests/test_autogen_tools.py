"""Wrapped tools as objects: what they keep, where their step is, and what AutoGen does with their calls."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Annotated, Any, get_args

import pytest
from autogen_agentchat.tools import AgentTool
from autogen_core import CancellationToken, Component
from autogen_core.tools import (
    BaseStreamTool,
    BaseTool,
    BaseToolWithState,
    FunctionTool,
    StaticStreamWorkbench,
    StreamTool,
)
from pydantic import BaseModel

from agent_saga_autogen import ToolCallStopped, wrap_tool
from agent_saga_core import (
    DeclarationError,
    NotApplied,
    SagaStatus,
    Secret,
    StepStatus,
    current_saga,
    current_step,
    saga_scope,
    saga_tool,
)
from agent_saga_core.wrapping import runner_of

BOUND = 20.0
READ: dict[str, Any] = {"semantics": "READ_ONLY"}


def double(number: int, of: str = "x") -> str:
    """Double a number."""
    return f"{of} {2 * number}"


class Args(BaseModel):
    number: int
    token: Annotated[str, "a secret by its name"] = "t"


class Answer(BaseModel):
    twice: int


class PlainTool(BaseTool[Args, Answer]):
    def __init__(self) -> None:
        super().__init__(Args, Answer, "plain", "Double a number.")

    async def run(self, args: Args, cancellation_token: CancellationToken) -> Answer:
        return Answer(twice=2 * args.number)


class Config(BaseModel):
    step: int


class Count(BaseModel):
    count: int


class CountingTool(BaseToolWithState[Args, Answer, Count], Component[Config]):
    """Count.

    More about counting.
    """

    component_config_schema = Config
    component_type = "tool"

    def __init__(self, step: int = 1) -> None:
        super().__init__(Args, Answer, Count, "count", "Count.")
        self.step, self.count = step, 0

    async def run(self, args: Args, cancellation_token: CancellationToken) -> Answer:
        self.count += self.step
        return Answer(twice=self.count)

    def save_state(self) -> Count:
        return Count(count=self.count)

    def load_state(self, state: Count) -> None:
        self.count = state.count

    def _to_config(self) -> Config:
        return Config(step=self.step)

    @classmethod
    def _from_config(cls, config: Config) -> CountingTool:
        return cls(config.step)


class StreamingTool(BaseStreamTool[Args, Count, Answer]):
    def __init__(self) -> None:
        super().__init__(Args, Answer, "streams", "Count up to a number.")
        self.fails = False

    async def run(self, args: Args, cancellation_token: CancellationToken) -> Answer:
        return Answer(twice=2 * args.number)

    async def run_stream(
        self, args: Args, cancellation_token: CancellationToken
    ) -> AsyncGenerator[Count | Answer, None]:
        for number in range(args.number):
            yield Count(count=number)
        if self.fails:
            raise NotApplied("nothing was counted")
        yield await self.run(args, cancellation_token)


class OwnTool(PlainTool):
    """A tool whose `run_json` is its own, and never calls `run`."""

    async def run_json(
        self, args: Mapping[str, Any], cancellation_token: CancellationToken, call_id: str | None = None
    ) -> Any:
        step = current_step()
        return Answer(twice=-1 if step is None else step.number)


async def call(tool: Any, call_id: str | None = "c1", **args: Any) -> Any:
    return await tool.run_json(args, CancellationToken(), call_id=call_id)


@pytest.mark.parametrize("make", [lambda: FunctionTool(double, "d"), PlainTool, CountingTool, StreamingTool])
def test_the_wrapped_tool_is_the_same_tool(make: Callable[[], Any]) -> None:
    tool = make()
    wrapped = wrap_tool(tool, **READ)
    assert isinstance(wrapped, type(tool)) and type(wrapped).__qualname__ == type(tool).__qualname__
    assert wrapped.schema == tool.schema and wrapped.args_type() is tool.args_type()
    assert isinstance(wrapped, StreamTool) == isinstance(tool, StreamTool)
    assert runner_of(tool) is None and runner_of(wrapped) is runner_of(copy.copy(wrapped)) is not None
    assert runner_of(copy.deepcopy(wrapped)) is runner_of(wrapped), "a deep copy would not be bound with the others"


@pytest.mark.parametrize("make", [lambda: FunctionTool(double, "d"), CountingTool])
def test_the_component_is_the_same_and_loads_an_unwrapped_tool(make: Callable[[], Any]) -> None:
    tool = make()
    wrapped = wrap_tool(tool, **READ)
    assert wrapped.dump_component() == tool.dump_component()
    if isinstance(tool, FunctionTool):
        with pytest.warns(UserWarning, match="SECURITY WARNING"):
            loaded = FunctionTool.load_component(wrapped.dump_component())
        assert runner_of(loaded) is None


def test_a_plain_function_becomes_the_tool_that_an_agent_would_make_of_it() -> None:
    wrapped = wrap_tool(double, **READ)
    made = FunctionTool(double, description="Double a number.")
    assert type(wrapped).__mro__[1] is FunctionTool and wrapped.schema == made.schema
    assert wrapped.dump_component() == made.dump_component()


def test_what_is_a_saga_tool_already_is_not_wrapped_again() -> None:
    declared = saga_tool(semantics="READ_ONLY")(double)
    for tool in (declared, FunctionTool(declared, "d"), functools.partial(declared, 2), wrap_tool(double, **READ)):
        with pytest.raises(DeclarationError, match="already"):
            wrap_tool(tool, **READ)
    with pytest.raises(DeclarationError, match="SagaWorkbench"):
        wrap_tool(StaticStreamWorkbench([]), **READ)  # type: ignore[call-overload]


async def test_arguments_that_do_not_validate_leave_no_step(log: Any) -> None:
    for tool in (FunctionTool(double, "d"), PlainTool(), StreamingTool()):
        wrapped = wrap_tool(tool, **READ)
        async with saga_scope(log=log) as saga:
            with pytest.raises(ValueError) as plain:
                await call(tool, number="many")
            with pytest.raises(ValueError) as ours:
                await call(wrapped, number="many")
            assert str(ours.value) == str(plain.value) and saga.steps == ()


async def test_the_function_s_own_result_and_exception_are_the_step_s(world: Any, log: Any, by_result: Any) -> None:
    def pay(item: str) -> dict[str, str]:
        if item == "none":
            raise NotApplied("there is none")
        return world.book(item)

    for is_async in (False, True):

        async def apay(item: str) -> dict[str, str]:
            return pay(item)

        tool = wrap_tool(FunctionTool(apay if is_async else pay, "pay", name="pay"), **by_result)
        with pytest.raises(KeyError, match="over"):
            async with saga_scope(log=log) as saga:
                with pytest.raises(NotApplied):
                    await call(tool, item="none")
                assert await call(tool, "c2", item="x") == {"id": "x"}
                raise KeyError("over")
        assert [step.status for step in saga.steps] == [StepStatus.NOT_APPLIED, StepStatus.COMPENSATED]
        assert world.standing == []


async def test_a_sync_tool_has_its_saga_and_step_and_no_loop(log: Any) -> None:
    seen: list[Any] = []
    variable = contextvars.ContextVar("variable", default="nothing")

    def look(item: str) -> str:
        seen.append((current_saga(), current_step(), threading.current_thread(), variable.get()))
        return item

    variable.set("the caller's")
    plain, wrapped = FunctionTool(look, "look"), wrap_tool(look, **READ)
    async with saga_scope(log=log) as saga:
        await call(plain, item="a")
        await call(wrapped, item="b")
    (lost, no_step, _, nothing), (found, step, thread, value) = seen
    assert lost is None and no_step is None and nothing == "nothing", "AutoGen hands its context on now"
    assert found is saga and step.tool == "look" and value == "the caller's"
    assert thread is not threading.main_thread()


async def test_the_call_s_own_token_reaches_a_function_that_asks_for_it(log: Any) -> None:
    seen: list[Any] = []

    def look(item: str, cancellation_token: CancellationToken) -> str:
        seen.append(cancellation_token)
        return item

    token = CancellationToken()
    tool = wrap_tool(look, **READ)
    async with saga_scope(log=log) as saga:
        await tool.run_json({"item": "a"}, token, call_id="c")
    await tool.run_json({"item": "a"}, token)
    assert seen == [token, token] and saga.steps[0].status is StepStatus.DONE


async def test_a_tool_with_state_keeps_it(log: Any) -> None:
    tool = CountingTool()
    wrapped = wrap_tool(tool, **READ)
    async with saga_scope(log=log):
        await call(wrapped, "c1", number=1)
        assert (await call(wrapped, "c2", number=1)).twice == 2
    assert await wrapped.save_state_json() == {"count": 2} and tool.count == 0


async def test_models_are_recorded_by_field_and_secrets_are_not(log: Any) -> None:
    class Marked(BaseModel):
        number: int
        word: Secret[str]

    class MarkedTool(BaseTool[Marked, Answer]):
        def __init__(self) -> None:
            super().__init__(Marked, Answer, "marked", "Take a secret.")

        async def run(self, args: Marked, cancellation_token: CancellationToken) -> Answer:
            return Answer(twice=len(args.word))

    def spell(word: Annotated[str, "the word", get_args(Secret[str])[1]]) -> int:
        return len(word)

    async with saga_scope("s", log=log):
        assert await call(wrap_tool(spell, **READ), word="open sesame") == 11
        assert (await call(wrap_tool(PlainTool(), **READ), number=3, token="open sesame")).twice == 6
        assert (await call(wrap_tool(MarkedTool(), **READ), number=3, word="open sesame")).twice == 11
    assert "open sesame" not in repr([record.data for record in log.read("s")])


def test_autogen_takes_no_secret_in_the_signature_of_a_function() -> None:
    def spell(word: Secret[str]) -> int:
        return len(word)

    with pytest.raises(ValueError, match="Invalid description"):
        FunctionTool(spell, "d")


async def test_a_step_is_around_a_run_json_that_never_calls_run(log: Any) -> None:
    tool = wrap_tool(OwnTool(), **READ)
    async with saga_scope(log=log) as saga:
        assert (await call(tool, number=2)).twice == 1
        assert len(saga.steps) == 1


async def test_a_streamed_call_is_one_step_and_its_result_comes_last(world: Any, log: Any) -> None:
    tool = wrap_tool(StreamingTool(), **READ)
    async with saga_scope(log=log) as saga:
        stream = tool.run_json_stream({"number": 2}, CancellationToken(), call_id="c1")
        seen = [(piece, saga.steps[-1].status if isinstance(piece, Answer) else None) async for piece in stream]
        assert [piece for piece, _ in seen] == [Count(count=0), Count(count=1), Answer(twice=4)]
        assert seen[-1][1] is StepStatus.DONE, "the result is given before it is on record"
        assert len(saga.steps) == 1, "run() inside of run_stream() is part of it"
        plain = [piece async for piece in StreamingTool().run_json_stream({"number": 2}, CancellationToken())]
        assert plain == [piece for piece, _ in seen]


async def test_a_run_that_reads_the_tool_s_own_stream_is_one_step(log: Any) -> None:
    class Reading(StreamingTool):
        async def run(self, args: Args, cancellation_token: CancellationToken) -> Answer:
            pieces = [piece async for piece in self.run_stream(args, cancellation_token)]
            return Answer(twice=len(pieces))

        async def run_stream(
            self, args: Args, cancellation_token: CancellationToken
        ) -> AsyncGenerator[Count | Answer, None]:
            yield Count(count=1)
            yield Answer(twice=1)

    async with saga_scope(log=log) as saga:
        assert (await call(wrap_tool(Reading(), **READ), number=1)).twice == 2
        assert len(saga.steps) == 1


@pytest.mark.parametrize("streams", [True, False])
async def test_a_tool_whose_two_entries_are_its_own_is_one_step_and_one_more_where_it_is_called_again(
    streams: bool, log: Any
) -> None:
    class Both(StreamingTool):
        """Each entry reads the other; the tool calls itself with another number, as an agent that it runs may."""

        async def run_json(
            self, args: Mapping[str, Any], cancellation_token: CancellationToken, call_id: str | None = None
        ) -> Any:
            if streams:
                return await count(args["number"])
            return [piece async for piece in self.run_json_stream(args, cancellation_token, call_id)][-1]

        async def run_json_stream(
            self, args: Mapping[str, Any], cancellation_token: CancellationToken, call_id: str | None = None
        ) -> AsyncGenerator[Any, None]:
            yield await self.run_json(args, cancellation_token) if streams else await count(args["number"])

    async def count(number: int) -> Answer:
        return await ask(number - 1) if number else Answer(twice=0)

    async def ask(number: int) -> Answer:
        args, token = {"number": number}, CancellationToken()
        if streams:
            return [piece async for piece in tool.run_json_stream(args, token, call_id="c")][-1]
        return await tool.run_json(args, token, call_id="c")

    tool = wrap_tool(Both(), **READ)
    async with saga_scope(log=log) as saga:
        assert await ask(2) == Answer(twice=0)
        assert [step.status for step in saga.steps] == [StepStatus.DONE] * 3


async def test_a_stream_that_fails_yields_what_it_had_and_raises(log: Any) -> None:
    tool = wrap_tool(StreamingTool(), semantics="COMPENSABLE", compensate=lambda result: None)
    tool.fails = True
    pieces: list[Any] = []
    async with saga_scope(log=log) as saga:
        with pytest.raises(NotApplied):
            async for piece in tool.run_json_stream({"number": 2}, CancellationToken(), call_id="c1"):
                pieces += [piece]
    assert pieces == [Count(count=0), Count(count=1)]
    assert [step.status for step in saga.steps] == [StepStatus.NOT_APPLIED]


async def test_a_stream_left_early_leaves_an_unknown_step(world: Any, log: Any, by_item: Any) -> None:
    class Item(BaseModel):
        item: str

    class Slow(BaseStreamTool[Item, Count, Answer]):
        def __init__(self) -> None:
            super().__init__(Item, Answer, "slow", "Book slowly.")

        async def run(self, args: Item, cancellation_token: CancellationToken) -> Answer:
            raise NotImplementedError

        async def run_stream(
            self, args: Item, cancellation_token: CancellationToken
        ) -> AsyncGenerator[Count | Answer, None]:
            world.book(args.item)
            yield Count(count=1)
            yield Count(count=2)
            await asyncio.Event().wait()

    tool = wrap_tool(Slow(), **by_item)
    async with asyncio.timeout(BOUND):
        async with saga_scope(log=log) as saga:
            stream = tool.run_json_stream({"item": "x"}, CancellationToken(), call_id="c")
            assert await anext(stream) == Count(count=1)
            await stream.aclose()
            assert saga.steps[0].status is StepStatus.UNKNOWN
    assert saga.steps[0].status is StepStatus.COMPENSATED and world.standing == []
    assert saga.status is SagaStatus.COMMITTED


async def test_what_is_no_exception_comes_out_as_one(log: Any, model: Any, told: Any) -> None:
    class Halt(BaseException):
        pass

    async def halt(item: str) -> str:
        raise Halt(item)

    async def cancelled(item: str) -> str:
        raise asyncio.CancelledError(item)

    async def closed(item: str) -> str:
        raise GeneratorExit(item)

    for fn in (halt, cancelled, closed):
        tool = wrap_tool(fn, **READ)
        async with saga_scope(log=log), asyncio.timeout(BOUND):
            with pytest.raises(ToolCallStopped):
                await call(tool, item="a")
            agent = model.agent("a", [tool], [("c2", fn.__name__, {"item": "a"})], "well")
            result = await agent.run(task="go")
        assert [is_error for _, is_error in told(result)] == [True]


async def test_a_call_that_is_closed_from_outside_waits_for_nothing(log: Any) -> None:
    async def wait(item: str) -> str:
        await asyncio.Event().wait()
        return item

    async with saga_scope(log=log) as saga:
        made = call(wrap_tool(wait, **READ), item="a")
        same = contextvars.copy_context()
        for act in (lambda: made.send(None), made.close):  # as a collector would, in whatever task

            async def task(act: Any = act) -> None:
                act()

            await asyncio.create_task(task(), context=same)
        assert len(saga.steps) == 1


@pytest.mark.parametrize("raises", [BaseException, asyncio.CancelledError, GeneratorExit])
async def test_autogen_itself_waits_for_ever_for_what_is_no_exception(raises: Any, model: Any) -> None:
    raised = asyncio.Event()

    async def halt(item: str) -> str:
        raised.set()
        raise raises(item)

    run = asyncio.ensure_future(model.agent("a", [halt], [("c", "halt", {"item": "a"})], "well").run(task="go"))
    async with asyncio.timeout(BOUND):
        await raised.wait()
        for _ in range(200):
            await asyncio.sleep(0)
    assert not run.done(), "AutoGen comes back now: ToolCallStopped may be needless"
    run.cancel()
    await asyncio.wait({run})


async def test_a_cancelled_caller_hears_its_own_cancellation(world: Any, log: Any, by_item: Any) -> None:
    for is_async in (True, False):
        world.inside("hold").clear()
        world.released.clear()
        tool = wrap_tool(world.tool(is_async=is_async), **by_item)
        async with asyncio.timeout(BOUND), saga_scope(log=log) as saga:
            task = asyncio.create_task(call(tool, item="hold"))
            await world.until_inside("hold")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert saga.steps[0].status in (StepStatus.UNKNOWN, StepStatus.INTENDED)
            world.released.set()
        assert saga.steps[0].status is StepStatus.COMPENSATED and world.standing == []


async def test_tools_that_run_agents_are_steps_around_the_steps_of_those(
    world: Any, log: Any, model: Any, by_item: Any, told: Any
) -> None:
    inner = model.agent("inner", [wrap_tool(world.tool(), **by_item)], [("0", "book", {"item": "x"})], "booked")
    tool = wrap_tool(AgentTool(inner), **READ)
    outer = model.agent("outer", [tool], [("0", "inner", {"task": "book"})], "all is booked")
    async with asyncio.timeout(BOUND), saga_scope(log=log) as saga:
        result = await outer.run(task="go")
    assert [step.tool for step in saga.steps] == ["inner", "book"]
    assert told(result)[-1] == ("inner: booked", False) or "booked" in told(result)[-1][0]
    assert saga.status is SagaStatus.COMMITTED
