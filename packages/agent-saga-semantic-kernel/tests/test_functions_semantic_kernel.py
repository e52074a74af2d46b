"""Wrapped functions: what is kept of them, what is recorded of their calls, and where they run.

No `from __future__ import annotations` here: `kernel_function` reads annotations as they are.
"""

import asyncio
import contextvars
import copy
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Annotated, Any

import pytest
import semantic_kernel_fakes as fakes
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.exceptions import KernelInvokeException
from semantic_kernel.functions import (
    FunctionResult,
    KernelArguments,
    KernelFunctionFromMethod,
    KernelFunctionFromPrompt,
    KernelPlugin,
    kernel_function,
)

from agent_saga_core import (
    BoundaryRequired,
    DeclarationError,
    SagaAborted,
    SagaNotRunning,
    compensator,
    inverse_of,
    read_saga,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.wrapping import runner_of
from agent_saga_semantic_kernel import asaga_run, asaga_stream, bind, coverage, wrap_function, wrap_plugin, wrap_tool

READ = {"semantics": "READ_ONLY"}


def function(fn: Callable[..., Any], **more: Any) -> KernelFunctionFromMethod:
    return KernelFunctionFromMethod(method=kernel_function(fn), **more)


def recorded(log: Any, saga_id: str = "s", kind: str = "INTENT", field: str = "args") -> list[Any]:
    return [record.data[field] for record in log.read(saga_id) if record.type == kind]


# --- what is kept


@pytest.mark.parametrize("hidden", [True, False])
async def test_a_kernel_and_its_arguments_are_injected_and_never_logged(hidden: bool, log: Any) -> None:
    seen: list[Any] = []
    if hidden:

        async def find(
            item: str,
            kernel: Annotated[Kernel | None, "", {"include_in_function_choices": False}] = None,
            arguments: Annotated[KernelArguments | None, "", {"include_in_function_choices": False}] = None,
        ) -> str:
            """Find."""
            seen.extend([kernel, arguments])
            return item
    else:

        async def find(item: str, kernel: Kernel = None, arguments: KernelArguments = None) -> str:  # type: ignore[assignment]
            """Find."""
            seen.extend([kernel, arguments])
            return item

    plain = function(find)
    wrapped = wrap_tool(plain, **READ)
    assert wrapped.metadata == plain.metadata and wrapped.metadata is not plain.metadata
    shown = set(fakes.schema(wrapped)["function"]["parameters"]["properties"])
    # Not ours to mend: what is annotated plainly, the framework itself shows to the model.
    assert shown == ({"item"} if hidden else {"item", "kernel", "arguments"})

    given = {"item": "x"} if hidden else {"item": "x", "kernel": "a model's", "arguments": "words"}
    agent = fakes.agent(wrapped, service=fakes.playing([("1", "find", given)]))
    await asaga_run(agent, "go", arguments=KernelArguments(token="t0ps3cret"), log=log, saga_id="s")
    assert seen[0] is agent.kernel and seen[1]["token"] == "t0ps3cret"
    assert recorded(log) == [{"item": "x"}]


async def test_what_the_application_hands_over_past_the_model_is_not_recorded(log: Any) -> None:
    async def find(
        item: str, tenant: Annotated[str, "", {"include_in_function_choices": False}], limit: int = 3
    ) -> str:
        """Find."""
        return f"{tenant} {item} {limit}"

    wrapped = wrap_tool(function(find), **READ)
    result = await asaga_run(fakes.kernel(wrapped), wrapped, item="x", tenant="acme", log=log, saga_id="s")
    assert result.value == "acme x 3"
    assert recorded(log) == [{"item": "x", "limit": 3}]


async def test_the_type_of_a_parameter_makes_it_injected_whatever_its_name(log: Any) -> None:
    async def find(item: str, using: Kernel) -> str:
        """Find."""
        return item

    kernel = fakes.kernel(wrapped := wrap_tool(function(find), **READ))
    assert (await asaga_run(kernel, wrapped, item="x", using=kernel, log=log, saga_id="s")).value == "x"
    assert recorded(log) == [{"item": "x"}]


class Seat(BaseModel):
    row: int
    letter: str = "A"


async def test_arguments_are_recorded_as_the_framework_parsed_them(log: Any) -> None:
    got: list[Any] = []

    async def reserve(seat: Seat) -> Seat:
        """Reserve."""
        got.append(seat)
        return seat

    wrapped = wrap_tool(function(reserve), **READ)
    calls = [("1", "reserve", {"seat": {"row": 4}})]
    heard: list[list[str]] = []
    for _ in range(2):
        agent = fakes.agent(wrapped, service=fakes.playing(calls, heard=heard))
        await asaga_run(agent, "go", log=log, saga_id="s")
    assert got == [Seat(row=4)], "the second time it is replayed"
    assert heard[1] == heard[3], "and the model hears the same, of a value of the same type"


def test_nothing_that_can_be_changed_is_shared_with_the_original() -> None:
    def find(item: str) -> str:
        """Find."""
        return item

    plain = function(find, additional_metadata={"a": 1})
    wrapped = wrap_tool(plain, **READ)
    wrapped.metadata.plugin_name = wrapped.metadata.description = "changed"
    wrapped.metadata.parameters[0].description = "changed"
    wrapped.metadata.additional_properties["a"] = 2  # type: ignore[index]
    wrapped.metadata.return_parameter.description = "changed"  # type: ignore[union-attr]
    assert plain.metadata == function(find, additional_metadata={"a": 1}).metadata
    assert plain.metadata.additional_properties == {"a": 1}


def test_a_decorated_function_becomes_a_kernel_function() -> None:
    @kernel_function(name="look", description="Look it up.")
    def find(item: str) -> str:
        return item

    before = dict(vars(find))
    wrapped = wrap_function(find, **READ)
    assert type(wrapped).__qualname__ == "KernelFunctionFromMethod" and isinstance(wrapped, KernelFunctionFromMethod)
    assert wrapped.metadata == KernelFunctionFromMethod(method=find).metadata
    assert vars(find) == before and runner_of(find) is None
    assert wrap_function is wrap_tool


async def test_a_method_whose_parameters_are_known_to_the_metadata_alone(log: Any) -> None:
    """As the plugins of MCP servers and OpenAPI documents make theirs."""

    async def call(tool: str, **arguments: Any) -> str:
        return f"{tool} {arguments}"

    remote: Any = kernel_function(functools.partial(call, "search"), name="search", description="Search.")
    remote.__kernel_function_parameters__ = [
        {"name": "query", "type_": "str", "is_required": True},
        {"name": "limit", "type_": "int", "is_required": False},
    ]
    plain = KernelFunctionFromMethod(method=remote)
    wrapped = wrap_tool(plain, **READ)
    assert wrapped.metadata == plain.metadata
    heard: list[list[str]] = []
    await asaga_run(
        fakes.agent(wrapped, service=fakes.playing([("1", "search", {"query": "x"})], heard=heard)),
        "go",
        log=log,
        saga_id="s",
    )
    assert heard[-1] == ["search {'query': 'x'}"] and recorded(log) == [{"query": "x"}]


async def test_a_deep_copy_acts_on_its_own_plugin_object(log: Any) -> None:
    class Desk:
        def __init__(self) -> None:
            self.booked: list[str] = []

        @kernel_function
        def book(
            self, item: str, kernel: Annotated[Kernel | None, "", {"include_in_function_choices": False}] = None
        ) -> str:
            self.booked.append(item)
            return item

    desk = Desk()
    wrapped = wrap_plugin(desk, {"book": READ}, plugin_name="desk")
    copied = copy.deepcopy(wrapped)
    assert runner_of(copied["book"]) is runner_of(wrapped["book"])
    kernel = Kernel(plugins=[copied])
    await asaga_run(
        kernel, plugin_name="desk", function_name="book", arguments=KernelArguments(item="x"), log=log, saga_id="s"
    )
    assert desk.booked == [] and recorded(log) == [{"item": "x"}]


@pytest.mark.promise("drop-in")
async def test_calls_that_never_come_to_the_function_leave_no_step(world: Any, log: Any, by_item: Any) -> None:
    async def book(item: str, count: int | None) -> dict[str, str]:
        """Book."""
        return world.book(item)

    plain = function(book)
    turns: list[Any] = [
        [("1", "book", {})],
        [("2", "book", {"item": "x", "extra": 1})],
        [("3", "nowhere-book", {"item": "x"})],
        [("4", "book", {"item": "x"})],  # not required, says the framework, and Python that it is
        [("5", "book", {"item": "x", "count": "many"})],
    ]
    told: list[list[list[str]]] = []
    for tool in (plain, wrap_tool(plain, **by_item)):
        heard: list[list[str]] = []
        agent = fakes.agent(tool, service=fakes.playing(*turns, heard=heard))
        await asaga_run(agent, "go", log=log, saga_id=f"s{len(told)}")
        told.append(heard)
    assert told[0] == told[1] and len(told[0][-1]) == 5
    assert world.acts == [] and "INTENT" not in {record.type for n in (0, 1) for record in _records(log, f"s{n}")}


def _records(log: Any, saga_id: str) -> list[Any]:
    try:
        return list(log.read(saga_id))
    except LookupError:
        return []


async def test_a_result_that_is_the_frameworks_own_passes_through(log: Any) -> None:
    def answer(item: str) -> Any:
        """Answer."""
        return FunctionResult(function=plain.metadata, value=item, metadata={"mine": 1})

    plain = function(answer)
    result = await asaga_run(Kernel(), wrap_tool(plain, **READ), item="x", log=log)
    assert (result.value, result.metadata) == ("x", {"mine": 1})


async def test_a_tool_shared_with_another_framework_is_two_tools_and_one_compensator(world: Any, log: Any) -> None:
    tools = pytest.importorskip("langchain_core.tools")
    langchain = pytest.importorskip("agent_saga_langchain")

    @kernel_function(description="Book an item.")
    def book(item: str) -> dict[str, str]:
        """Book an item."""
        return world.book(item)

    declaration: dict[str, Any] = {"semantics": "COMPENSABLE", "compensate": undo("test.unbook", id="result.id")}
    before = {name: copy.deepcopy(value) for name, value in vars(book).items()}
    one = wrap_tool(book, **declaration)
    other = langchain.wrap_tool(tools.StructuredTool.from_function(book), **declaration)
    assert vars(book) == before and runner_of(book) is None
    assert runner_of(one) is not runner_of(other)
    one.metadata.parameters[0].description = "changed"
    assert other.description == "Book an item." and vars(book) == before
    with pytest.raises(ZeroDivisionError):
        async with saga_scope("s", log=log):
            await Kernel().invoke(one, item="a")
            await other.ainvoke({"item": "b"})
            raise ZeroDivisionError
    assert world.booked == ["a", "b"] and world.standing == []
    compensations = recorded(log, kind="INTENT", field="undo")
    assert {undone["handler"] for undone in compensations} == {"test.unbook"}


# --- what is refused


def test_what_cannot_be_wrapped_is_refused() -> None:
    def find(item: str) -> str:
        """Find."""
        return item

    async def afind(item: str) -> str:
        """Find."""
        return item

    class Own(KernelFunctionFromMethod):
        async def _invoke_internal(self, context: Any) -> None:
            await super()._invoke_internal(context)

    wrapped = wrap_tool(function(find), **READ)
    tool = saga_tool(**READ)(afind)
    agent = ChatCompletionAgent(name="clerk", description="Books.")
    for one, why in [
        (wrapped, "already"),
        (wrapped.method, "already"),
        (function(tool), "saga tool"),
        (kernel_function(tool), "saga tool"),
        (KernelFunctionFromPrompt(function_name="p", plugin_name="q", prompt="x"), "prompt"),
        (fakes.team(agent)["clerk"], "an agent"),
        (Own(method=kernel_function(find)), "way of its own"),
        (lambda item: item, "@kernel_function"),
        (Kernel(), "wrap_plugin"),
    ]:
        with pytest.raises(DeclarationError, match=why):
            wrap_tool(one, **READ)
    with pytest.raises(DeclarationError, match="offload"):
        wrap_tool(function(afind), offload=True, **READ)
    with pytest.raises(DeclarationError, match="generator"):
        wrap_tool(function(find, stream_method=find), **READ)


def test_the_inverse_that_is_paired_with_a_method_is_found(world: Any) -> None:
    class Desk:
        @kernel_function
        def book(self, item: str) -> dict[str, str]:
            return world.book(item)

    @inverse_of(Desk.book, maps={"id": "result.id"})
    @compensator("test.paired")
    def cancel(id: str) -> None:
        world.unbook(id)

    plugin = wrap_plugin(Desk(), {"book": {"semantics": "COMPENSABLE"}})
    runner = runner_of(plugin["book"])
    assert runner is not None and runner.spec.undo is not None and runner.spec.undo.handler == "test.paired"


# --- plugins


class Desk:
    """Books."""

    description = "A desk."

    @kernel_function
    def book(self, item: str) -> str:
        return item

    @kernel_function(name="look")
    async def find(self, item: str) -> str:
        return item


def test_a_plugin_is_wrapped_function_by_function() -> None:
    plain = KernelPlugin.from_object("desk", Desk())
    for given, more in [(plain, {}), (Desk(), {"plugin_name": "desk"}), ({"b": Desk().book}, {"plugin_name": "desk"})]:
        names = {"book", "look"} if not isinstance(given, dict) else {"book"}
        wrapped = wrap_plugin(given, dict.fromkeys(names, READ), **more)
        assert wrapped.name == "desk" and set(wrapped.functions) == names
        assert all(runner_of(one) is not None for one in wrapped)
        assert all(one.metadata == plain[one.name].metadata for one in wrapped)
        assert wrapped.description == ("A desk." if not isinstance(given, dict) else None)
    assert all(runner_of(one) is None for one in plain)
    assert wrap_plugin(Desk(), dict.fromkeys(("book", "look"), READ)).name == "Desk"


async def test_the_functions_of_an_object_act_on_it_and_are_undone(world: Any, log: Any, by_result: Any) -> None:
    class Agency:
        """Has a state of its own, a sync and an async function, and one that only reads."""

        def __init__(self) -> None:
            self.asked: list[str] = []

        @kernel_function
        def book(self, item: str) -> dict[str, str]:
            """Book an item."""
            self.asked.append(item)
            return world.book(item)

        @kernel_function(name="pay")
        async def settle(self, item: str) -> dict[str, str]:
            """Pay for an item."""
            self.asked.append(item)
            return world.book(f"{item} paid")

        @kernel_function
        def look(self) -> str:
            """Look."""
            return f"asked for {len(self.asked)}"

    agency = Agency()
    plugin = wrap_plugin(agency, {"book": by_result, "pay": by_result, "look": READ}, plugin_name="desk")
    calls: list[Any] = [("1", "book", {"item": "a"})], [("2", "pay", {"item": "a"})], [("3", "look", {})]
    heard: list[list[str]] = []
    agent = ChatCompletionAgent(name="clerk", plugins=[plugin], service=fakes.playing(*calls, heard=heard))
    with pytest.raises(ZeroDivisionError):
        async with saga_scope("s", log=log):
            await asaga_run(agent, "go")
            assert world.standing == ["a", "a paid"]
            raise ZeroDivisionError
    assert heard[-1] == ["{'id': 'a'}", "{'id': 'a paid'}", "asked for 2"] and agency.asked == ["a", "a"]
    assert world.acts == [("book", "a"), ("book", "a paid"), ("undo", "a paid"), ("undo", "a")]
    assert recorded(log)[:3] == [{"item": "a"}, {"item": "a"}, {}], "the object itself is no argument"


def test_functions_that_nobody_declared_are_refused_or_allowed_by_name() -> None:
    plain = KernelPlugin.from_object("desk", Desk())
    with pytest.raises(DeclarationError, match="'look' would be called without steps"):
        wrap_plugin(plain, {"book": READ})
    allowed = wrap_plugin(plain, {"book": READ}, unknown="allow")
    assert runner_of(allowed["book"]) is not None and runner_of(allowed["look"]) is None
    assert allowed["look"] is not plain["look"]
    whole = wrap_plugin(allowed, {"look": READ})  # what is wrapped already is declared
    assert runner_of(whole["book"]) is runner_of(allowed["book"])
    with pytest.raises(DeclarationError, match="no function 'find'"):
        wrap_plugin(plain, {"find": READ}, unknown="allow")
    with pytest.raises(ValueError):
        wrap_plugin(plain, {}, unknown="ignore")  # type: ignore[arg-type]


def test_prompts_and_agents_in_a_plugin_need_no_declaration() -> None:
    agent = ChatCompletionAgent(name="clerk", description="Books.")
    prompt = KernelFunctionFromPrompt(function_name="plan", plugin_name="p", prompt="x")
    plugin = KernelPlugin(name="p", functions=[prompt, *fakes.team(agent)])
    assert set(wrap_plugin(plugin, {}).functions) == {"plan", "clerk"}


def test_what_is_no_plugin_is_refused() -> None:
    class Told(Desk):
        def added_to_kernel(self, kernel: Kernel) -> None: ...

    for given, why in [(Told(), "added_to_kernel"), ({"b": Desk().book}, "plugin_name="), (object(), "no functions")]:
        with pytest.raises(DeclarationError, match=why):
            wrap_plugin(given, {})


# --- where they run


async def test_a_sync_method_runs_on_the_loop_and_offloaded_on_a_thread(log: Any) -> None:
    threads: list[bool] = []

    def find(item: str) -> str:
        """Find."""
        threads.append(threading.current_thread() is loop_thread)
        return item

    loop_thread = threading.current_thread()
    for more in ({}, {"offload": True}, {"timeout": 30.0}):
        await asaga_run(Kernel(), wrap_tool(function(find), **READ, **more), item="x", log=log)
    offloaded = wrap_tool(function(find), offload=True, **READ)
    assert (await Kernel().invoke(offloaded, item="x")).value == "x"
    assert threads == [True, False, False, True], "outside of a saga everything is as the framework does it"


async def test_offloaded_methods_of_one_message_run_side_by_side(log: Any) -> None:
    together = threading.Barrier(2, timeout=30)

    def meet(item: str) -> str:
        """Meet."""
        together.wait()
        return item

    wrapped = wrap_tool(function(meet), offload=True, **READ)
    calls = [("1", "meet", {"item": "a"}), ("2", "meet", {"item": "b"})]
    heard: list[list[str]] = []
    await asaga_run(fakes.agent(wrapped, service=fakes.playing(calls, heard=heard)), "go", log=log)
    assert heard[-1] == ["a", "b"]


def test_a_method_called_by_hand_is_a_step(world: Any, log: Any, by_result: Any) -> None:
    def book(item: str) -> dict[str, str]:
        """Book."""
        return world.book(item)

    wrapped = wrap_tool(function(book), **by_result)
    with pytest.raises(ZeroDivisionError), saga_scope("s", log=log):
        assert wrapped.method("a") == {"id": "a"}
        raise ZeroDivisionError
    assert world.booked == ["a"] and world.standing == []


# --- generators


async def _pieces(stream: Any) -> list[Any]:
    return [piece async for piece in stream]


@pytest.mark.parametrize(("is_async", "offload"), [(True, False), (False, False), (False, True)])
async def test_a_generator_is_one_step_streamed_or_not(is_async: bool, offload: bool, world: Any, log: Any) -> None:
    async def acount(to: int) -> AsyncGenerator[int, None]:
        """Count."""
        for number in range(to):
            world.book(str(number))
            yield number

    def count(to: int) -> Iterator[int]:
        """Count."""
        for number in range(to):
            world.book(str(number))
            yield number

    plain = function(acount if is_async else count)
    wrapped = wrap_tool(plain, semantics="READ_ONLY", offload=offload)
    kernel = Kernel()
    expected = await _pieces(kernel.invoke_stream(plain, to=3))
    assert expected == [0, 1, 2]
    for _ in range(2):  # and given back from the record
        assert await _pieces(asaga_stream(kernel, wrapped, to=3, log=log, saga_id="s")) == expected
    assert (await asaga_run(kernel, wrapped, to=3, log=log, saga_id="w")).value == expected
    assert recorded(log, kind="DONE", field="result") == [[0, 1, 2]]
    assert world.booked == ["0", "1", "2"] * 3
    assert await _pieces(kernel.invoke_stream(wrapped, to=3)) == expected


async def test_the_end_of_a_stream_comes_when_its_step_is_on_record(world: Any, log: Any) -> None:
    async def book(item: str) -> AsyncGenerator[str, None]:
        """Book."""
        yield "asking"
        world.book(item)
        yield "booked"

    wrapped = wrap_tool(function(book), semantics="COMPENSABLE", compensate=undo("test.unbook", id="args.item"))
    with pytest.raises(ZeroDivisionError):
        async with saga_scope("s", log=log) as saga:
            async for piece in Kernel().invoke_stream(wrapped, item="a"):
                assert piece in ("asking", "booked")
            assert saga.steps[0].status == "DONE"
            raise ZeroDivisionError
    assert world.booked == ["a"] and world.standing == []


async def test_a_stream_that_fails_or_is_left_is_undone(world: Any, log: Any, by_item: Any) -> None:
    forever = asyncio.Event()

    async def book(item: str) -> AsyncGenerator[str, None]:
        """Book."""
        yield "asking"
        world.book(item)
        yield "booked"
        if item == "failing":
            raise ZeroDivisionError(item)
        await forever.wait()

    wrapped = wrap_tool(function(book), **by_item)
    with pytest.raises(ZeroDivisionError):
        await _pieces(asaga_stream(Kernel(), wrapped, item="failing", log=log))
    assert world.booked == ["failing"] and world.standing == []

    with pytest.raises(SagaAborted):
        async with saga_scope("s", log=log) as saga:
            async with aclosing(wrapped.stream_method(item="left")) as pieces:  # type: ignore[misc]
                assert [await anext(pieces), await anext(pieces)] == ["asking", "booked"]
            assert saga.steps[0].status == "UNKNOWN", "what still ran of it was cancelled"
            saga.abort("left")
    assert world.booked == ["failing", "left"] and world.standing == []


async def test_a_stream_method_of_its_own_is_a_step_bound_with_the_method(world: Any, log: Any, by_item: Any) -> None:
    async def book(item: str) -> dict[str, str]:
        """Book."""
        return world.book(item)

    async def book_streaming(item: str) -> AsyncGenerator[str, None]:
        world.book(item)
        yield item

    wrapped = wrap_tool(function(book, stream_method=book_streaming), **by_item)
    with pytest.raises(ZeroDivisionError):
        async with saga_scope("s", log=log) as saga:
            with bind(saga, wrapped):
                assert await _pieces(Kernel().invoke_stream(wrapped, item="a")) == ["a"]
                assert (await Kernel().invoke(wrapped, item="b")).value == {"id": "b"}
                stream: Any = wrapped.stream_method
                with pytest.raises(BoundaryRequired):
                    contextvars.Context().run(stream, item="stray")
            raise ZeroDivisionError
    assert world.booked == ["a", "b"] and world.standing == []
    strict = wrap_tool(function(book, stream_method=book_streaming), require_saga=True, **by_item)
    with pytest.raises(SagaNotRunning):
        await _pieces(Kernel().invoke_stream(strict, item="c"))


async def test_a_method_that_is_a_saga_tool_by_itself_is_a_step(world: Any, log: Any, by_result: Any) -> None:
    @kernel_function
    @saga_tool(**by_result)
    def book(item: str) -> dict[str, str]:
        """Book."""
        return world.book(item)

    agent = fakes.agent(service=fakes.playing([("1", "book", {"item": "a"})]))
    agent.kernel.add_function("desk", book)
    (entry,) = coverage(agent).entries
    assert entry.wrapped and entry.identity == "occurrence"
    await asaga_run(agent, "go", log=log, saga_id="s")
    assert [step.tool for step in read_saga(log, "s").steps] == ["book"]
    with pytest.raises(KernelInvokeException):
        await asaga_run(agent.kernel, plugin_name="desk", function_name="book", log=log)
