"""Every kind of tool that LangChain has, wrapped: it looks, takes, gives, fails and copies as before."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
from contextlib import nullcontext
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.tools import InjectedState, InjectedStore, ToolRuntime
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import (
    BaseTool,
    InjectedToolArg,
    InjectedToolCallId,
    StructuredTool,
    Tool,
    ToolException,
    tool,
)
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.prebuilt import ToolNode
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command
from pydantic import BaseModel, Field

from agent_saga_core import (
    ActionSemantics,
    DeclarationError,
    NotApplied,
    SagaAborted,
    SagaStatus,
    Secret,
    StepStatus,
    call_with,
    current_step,
    read_saga,
    recover,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.wrapping import covered, runner_of
from agent_saga_langchain import wrap_tool

C, R, IRREVERSIBLE = ActionSemantics.COMPENSABLE, ActionSemantics.READ_ONLY, ActionSemantics.IRREVERSIBLE
BY_RESULT = undo("world.undo", item="result")
SEEN: list[Any] = []
GO = {"messages": [HumanMessage("go")]}


@pytest.fixture(autouse=True)
def seen():
    SEEN.clear()
    yield SEEN


# Module-level, with string annotations: LangChain resolves them by the globals of the function.


@tool
def everything(
    x: int,
    state: Annotated[dict, InjectedState],
    store: Annotated[BaseStore, InjectedStore()],
    runtime: ToolRuntime,
    tool_call_id: Annotated[str, InjectedToolCallId],
    config: RunnableConfig,
    y: int = 7,
) -> str:
    """Be given everything."""
    SEEN.append((x, y, len(state["messages"]), store, runtime.tool_call_id, tool_call_id, sorted(config)))
    return f"got {x}"


@tool
async def aeverything(
    x: int,
    state: Annotated[dict, InjectedState],
    runtime: ToolRuntime,
    tool_call_id: Annotated[str, InjectedToolCallId],
) -> str:
    """Be given everything."""
    SEEN.append((x, len(state["messages"]), runtime.tool_call_id, tool_call_id))
    return f"got {x}"


class Item(BaseModel):
    """What is booked."""

    item: str
    count: int = Field(default=1, ge=1)


class Booker(BaseTool):
    """A tool of a class, with no schema of its own."""

    name: str = "booker"
    description: str = "books"
    prefix: str = "b"

    def _run(
        self,
        item: str,
        runtime: ToolRuntime = None,
        tool_call_id: Annotated[str, InjectedToolCallId] = "",
        run_manager: Any = None,
    ) -> str:
        SEEN.append((self.prefix, item, tool_call_id, runtime is not None, run_manager is not None))
        return f"{self.prefix}{item}"


class AsyncBooker(Booker):
    name: str = "abooker"

    def _run(self, item: str) -> str:
        raise NotImplementedError("abooker does not run synchronously")

    async def _arun(self, item: str, run_manager: Any = None) -> str:
        SEEN.append((self.prefix, item, run_manager is not None))
        return f"{self.prefix}{item}"


class Falls(Booker):
    name: str = "falls"

    async def _arun(self, item: str, **more: Any) -> str:
        SEEN.append("async")
        return await super()._arun(item, **more)


class KeyedTool(BaseTool):
    name: str = "keyed"
    description: str = "is given the key"

    def _run(self, item: str, idempotency_key: str) -> str:
        SEEN.append(idempotency_key)
        return item


def book(item: str) -> str:
    """Book."""
    SEEN.append(item)
    return item


def pay(item: str, idempotency_key: str, amount: int = 3) -> str:
    """Pay."""
    SEEN.append((item, idempotency_key, amount))
    return item


BOOK_JSON = {"title": "book", "type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}


def kinds() -> list[tuple[BaseTool, Any, dict[str, Any]]]:
    """Tools of every kind, with an input, and the arguments that are to be recorded."""
    one = {"item": "a"}
    return [
        (tool(book), one, one),
        (StructuredTool.from_function(book, name="s", description="d", return_direct=True, tags=["t"]), one, one),
        (StructuredTool(name="j", description="d", args_schema=BOOK_JSON, func=lambda **k: book(**k)), one, one),
        (StructuredTool(name="m", description="d", args_schema=Item, func=lambda item, count: book(item)), one,
         {"item": "a", "count": 1}),
        (Tool(name="single", description="d", func=lambda query: book(query)), "a", {"query": "a"}),
        (Tool(name="schema", description="d", func=book, args_schema=_Only), one, one),
        (Booker(), one, one),
        (Booker(prefix="z", tags=["x"], metadata={"k": 1}), "a", one),
    ]  # fmt: skip


class _Only(BaseModel):
    item: str


# --- drop-in


@pytest.mark.promise("drop-in")
@pytest.mark.parametrize("at", range(8))
def test_each_kind_of_tool_is_a_step_that_records_its_arguments_by_name(at, world, log, intents):
    original, given, recorded = kinds()[at]
    fields = {name: getattr(original, name) for name in type(original).model_fields}
    shown = convert_to_openai_tool(original)
    wrapped = wrap_tool(original, semantics=R)
    assert isinstance(wrapped, type(original)) and wrapped is not original
    assert {n for n, v in fields.items() if getattr(wrapped, n) is not v} <= {"func"}
    assert convert_to_openai_tool(wrapped) == shown and wrapped.args == original.args
    assert wrapped.args_schema is original.args_schema
    assert type(wrapped).__module__ == type(original).__module__
    assert type(wrapped).__qualname__ == type(original).__qualname__
    expected = original.invoke(given)
    outside = wrapped.invoke(given)
    with saga_scope("s", log=log) as saga:
        inside = wrapped.invoke(given)
        again = asyncio.run(wrapped.ainvoke(given))
        assert [step.tool for step in saga.steps] == [original.name] * 2
    assert expected == outside == inside == again
    assert [intent["args"] for intent in intents("s")] == [recorded] * 2
    assert all(getattr(original, name) is value for name, value in fields.items()) and runner_of(original) is None


@pytest.mark.promise("drop-in")
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_a_tools_own_callbacks_tags_and_metadata_are_heard_as_before(way, world, log, say):
    class Heard(BaseCallbackHandler):
        def on_tool_start(self, serialized: Any, input_str: str, *, tags: Any, metadata: Any, **more: Any) -> None:
            told.append((serialized["name"], input_str, sorted(tags), metadata["mine"], more["tool_call_id"]))

        def on_tool_end(self, output: Any, **_: Any) -> None:
            told.append(output.content)

    told: list[Any] = []
    plain = StructuredTool.from_function(book, tags=["t"], metadata={"mine": 1}, callbacks=[Heard()])
    heard = []
    for one in (plain, wrap_tool(plain, semantics=R)):
        assert (one.tags, one.metadata, one.callbacks) == (plain.tags, plain.metadata, plain.callbacks)
        told.clear()
        agent = create_agent(say(("book", {"item": "a"}, "c1"), "done"), [one])
        with saga_scope(log=log) as saga:
            agent.invoke(GO) if way == "invoke" else asyncio.run(agent.ainvoke(GO))
        assert len(saga.steps) == (one is not plain)
        heard.append(list(told))
    assert heard[0] == heard[1] == [("book", "{'item': 'a'}", heard[0][0][2], 1, "c1"), "a"] and "t" in heard[0][0][2]


@pytest.mark.promise("drop-in", "secrets-stay-out")
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_injected_arguments_with_string_annotations_are_injected_and_not_logged(way, world, log, say, intents):
    store, seen = InMemoryStore(), []
    for one in (everything, wrap_tool(everything, semantics=R)):
        SEEN.clear()
        assert set(convert_to_openai_tool(one)["function"]["parameters"]["properties"]) == {"x", "y"}
        agent = create_agent(say(("everything", {"x": 5}, "c7"), "done"), [one], store=store)
        with saga_scope(log=log) as saga:
            result = agent.invoke(GO) if way == "invoke" else asyncio.run(agent.ainvoke(GO))
        assert result["messages"][-2].content == "got 5"
        seen.append(SEEN.pop())
    assert seen[0] == seen[1] and seen[0][:3] == (5, 7, 2) and seen[0][3] is store and seen[0][4:6] == ("c7", "c7")
    (intent,) = intents(saga.id)
    assert intent["args"] == {"x": 5, "y": 7}


@pytest.mark.promise("drop-in")
def test_injected_arguments_of_async_tools_and_of_classes(world, log, say, intents):
    calls = [("aeverything", {"x": 1}, "c1"), ("booker", {"item": "a"}, "c2")]
    asyncio.run(create_agent(say(*calls, "done"), [aeverything, Booker()]).ainvoke(GO))
    unwrapped = list(SEEN)
    SEEN.clear()
    tools = [wrap_tool(aeverything, semantics=R), wrap_tool(Booker(), semantics=R)]
    with saga_scope("s", log=log):
        asyncio.run(create_agent(say(*calls, "done"), tools).ainvoke(GO))
    # LangChain itself gives no call id to a class without a schema of its own.
    assert SEEN == unwrapped == [(1, 2, "c1", "c1"), ("b", "a", "", True, True)]
    assert [intent["args"] for intent in intents("s")] == [{"x": 1}, {"item": "a"}]


def test_an_injected_argument_that_only_the_schema_names_is_not_logged(world, log, intents):
    class Schema(BaseModel):
        item: str
        owner: Annotated[str, InjectedToolArg()]

    one = StructuredTool(name="t", description="d", args_schema=Schema, func=lambda **k: SEEN.append(k) or "ok")
    with saga_scope("s", log=log):
        wrap_tool(one, semantics=R).invoke({"item": "a", "owner": "someone"})
    assert SEEN == [{"item": "a", "owner": "someone"}]
    assert intents("s")[0]["args"] == {"item": "a"}


def test_three_partials_of_one_function_are_three_tools(world, log, intents):
    def act(kind: str, item: str) -> str:
        SEEN.append((kind, item))
        return f"{kind} {item}"

    plain = [
        StructuredTool.from_function(functools.partial(act, kind), name=kind, description="d", args_schema=_Only)
        for kind in ("a", "b", "c")
    ]
    tools = [wrap_tool(one, semantics=C, compensate=BY_RESULT) for one in plain]
    with pytest.raises(SagaAborted), saga_scope("s", log=log) as saga:
        assert [one.invoke({"item": "x"}) for one in tools] == ["a x", "b x", "c x"]
        saga.abort("no")
    assert [(i["tool"], i["args"]) for i in intents("s")] == [(kind, {"item": "x"}) for kind in "abc"]
    assert len({i["identity"] for i in intents("s")}) == 3
    assert world.undone == ["c x", "b x", "a x"]
    assert len({id(runner_of(one)) for one in tools}) == 3


# --- what fails before the function


@pytest.mark.promise("drop-in")
def test_what_fails_before_the_function_makes_no_step_and_fails_as_unwrapped(world, log):
    async def acoro(item: str) -> str:
        """Book."""
        raise AssertionError

    coroutine_only = StructuredTool.from_function(coroutine=acoro)
    cases: list[tuple[BaseTool, Any]] = [
        (coroutine_only, {"item": "a"}),
        (AsyncBooker(), {"item": "a"}),
        (Tool(name="t", description="d", func=None, coroutine=acoro), "a"),
        (tool(book), {"item": [1]}),
        (tool(book), {}),
        (StructuredTool(name="j", description="d", args_schema=BOOK_JSON, func=book), {"thing": 1}),
        (Tool(name="single", description="d", func=book), {"a": 1, "b": 2}),
        (everything, {"x": 1}),
    ]
    for original, given in cases:
        wrapped = wrap_tool(original, semantics=C, compensate=BY_RESULT)
        with saga_scope(log=log) as saga:
            raised = []
            for one in (original, wrapped):
                with pytest.raises((NotImplementedError, TypeError, ToolException, ValueError)) as found:
                    one.invoke(given)
                raised.append((type(found.value), str(found.value)))
            assert raised[0] == raised[1]
            assert saga.steps == () and SEEN == []


def test_a_coroutine_only_tool_under_a_sync_agent_fails_as_unwrapped(world, log, say):
    async def abook(item: str) -> str:
        """Book."""
        raise AssertionError

    plain, raised = StructuredTool.from_function(coroutine=abook), []
    for one in (plain, wrap_tool(plain, semantics=C, compensate=BY_RESULT)):
        agent = create_agent(say(("abook", {"item": "a"}, "c1"), "done"), [one])
        with (
            pytest.raises(NotImplementedError) as found,
            saga_scope("s", log=log) if one is not plain else nullcontext(),
        ):
            agent.invoke(GO)
        raised.append(str(found.value))
    assert raised[0] == raised[1]
    state = read_saga(log, "s")
    assert state.status is SagaStatus.ROLLED_BACK and state.steps == () and world.undone == []


def test_a_validation_error_that_the_tool_handles_is_no_step(world, log, say):
    wrapped = wrap_tool(
        StructuredTool.from_function(book, handle_validation_error="not like this"), semantics=C, compensate=BY_RESULT
    )
    with saga_scope(log=log) as saga:
        assert wrapped.invoke({"item": [1]}) == "not like this"
        result = create_agent(say(("book", {"item": [1]}, "c"), "done"), [wrapped]).invoke(GO)
        assert result["messages"][-2].content == "not like this" and saga.steps == ()


def test_coroutine_only_tools_and_classes_run_on_the_loop(world, log, intents):
    async def main() -> None:
        async with saga_scope("s", log=log) as saga:
            assert await wrap_tool(AsyncBooker(), semantics=R).ainvoke({"item": "a"}) == "ba"
            assert len(saga.steps) == 1

    asyncio.run(main())
    assert SEEN == [("b", "a", True)] and intents("s")[0]["args"] == {"item": "a"}


def test_an_async_side_that_falls_back_on_the_sync_one_is_one_step(world, log):
    async def main() -> None:
        async with saga_scope(log=log) as saga:
            assert await wrap_tool(Falls(), semantics=R).ainvoke({"item": "a"}) == "ba"
            assert [step.tool for step in saga.steps] == ["falls"]

    asyncio.run(main())
    assert SEEN == ["async", ("b", "a", "", False, False)]


# --- results and exceptions


@pytest.mark.promise("drop-in")
def test_the_saga_sees_what_the_function_returned_and_not_the_message_made_of_it(world, log, say):
    def draw(item: str) -> tuple[str, dict[str, str]]:
        """Draw."""
        world.done.append(f"p-{item}")
        return f"a picture of {item}", {"id": f"p-{item}"}

    made = StructuredTool.from_function(draw, response_format="content_and_artifact")
    wrapped = wrap_tool(made, semantics=C, compensate=undo("world.undo", item="result[1].id"))
    with pytest.raises(SagaAborted), saga_scope(log=log) as saga:
        message = create_agent(say(("draw", {"item": "x"}, "c"), "done"), [wrapped]).invoke(GO)["messages"][-2]
        assert (message.content, message.artifact) == ("a picture of x", {"id": "p-x"})
        saga.abort("no")
    assert world.undone == ["p-x"]


def test_a_command_passes_and_is_given_back_within_the_saga(world, log):
    def go_on(item: str) -> Command:
        """Go on."""
        SEEN.append(item)
        return Command(update={"item": item}, goto="next")

    wrapped = wrap_tool(StructuredTool.from_function(go_on), semantics=C, compensate=call_with("world.undo", item="x"),
                        key="args.item")  # fmt: skip
    with saga_scope(log=log):
        first, again = wrapped.invoke({"item": "a"}), wrapped.invoke({"item": "a"})
    assert first == again == Command(update={"item": "a"}, goto="next") and SEEN == ["a"]


@pytest.mark.promise("no-silent-commit")
@pytest.mark.parametrize("handled", [True, "handled text", lambda error: f"handled {error}"])
def test_a_tool_exception_that_the_tool_handles_is_known_to_the_saga(handled, world, log):
    def fail(item: str) -> str:
        """Fail."""
        world.done.append(item)
        raise ToolException("no such item")

    made = StructuredTool.from_function(fail, handle_tool_error=handled)
    wrapped = wrap_tool(made, semantics=C, compensate=undo("world.undo", if_absent="forbids", item="args.item"))
    with saga_scope(log=log) as saga:
        assert wrapped.invoke({"item": "a"}) == made.invoke({"item": "a"})
        (step,) = saga.steps
        assert step.status is StepStatus.COMPENSATED and world.undone == ["a"]


@pytest.mark.promise("no-silent-commit")
def test_under_a_tool_node_that_handles_errors_the_saga_knows_the_real_exception(world, log, say):
    class Gone(Exception):
        pass

    def fail(item: str) -> str:
        """Fail."""
        raise Gone("gone")

    wrapped = wrap_tool(
        StructuredTool.from_function(fail), semantics=C, compensate=BY_RESULT, not_applied=lambda e: isinstance(e, Gone)
    )
    from langgraph.graph import END, START, MessagesState, StateGraph

    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode([wrapped], handle_tool_errors=True))
    graph.add_edge(START, "tools")
    graph.add_edge("tools", END)
    call = {"messages": [say(("fail", {"item": "a"}, "c1")).invoke("go")]}
    with saga_scope("s", log=log) as saga:
        message = graph.compile().invoke(call)["messages"][-1]
        assert message.status == "error" and "gone" in message.content
        (step,) = saga.steps
        assert step.status is StepStatus.NOT_APPLIED
    (failed,) = [record for record in log.read("s") if record.type == "NOT_APPLIED"]
    assert "Gone" in str(failed.data["error"])


def test_return_direct_ends_the_agent_as_before(world, log, say):
    made = StructuredTool.from_function(book, return_direct=True)
    with saga_scope(log=log):
        result = create_agent(say(("book", {"item": "a"}, "c"), "never"), [wrap_tool(made, semantics=R)]).invoke(GO)
    assert isinstance(result["messages"][-1], ToolMessage)


# --- the idempotency key


@pytest.mark.promise("drop-in")
@pytest.mark.parametrize("made", [
    lambda: StructuredTool.from_function(pay),
    lambda: StructuredTool(name="pay", description="d", func=pay, args_schema={
        "title": "pay", "type": "object", "required": ["item", "idempotency_key"],
        "properties": {"item": {"type": "string"}, "idempotency_key": {"type": "string"}}}),
])  # fmt: skip
def test_the_key_is_ours_to_give(made, world, log, say, intents):
    original = made()
    assert "idempotency_key" in convert_to_openai_tool(original)["function"]["parameters"]["properties"]
    wrapped = wrap_tool(original, semantics=R)
    shown = convert_to_openai_tool(wrapped)
    assert "idempotency_key" not in str(shown) and shown["function"]["name"] == "pay"
    assert shown["function"]["description"] == convert_to_openai_tool(original)["function"]["description"]
    with saga_scope("s", log=log) as saga:
        wrapped.invoke({"item": "a"})
        wrapped.invoke({"item": "b", "idempotency_key": "forged"})
        create_agent(say(("pay", {"item": "c", "idempotency_key": "forged"}, "c"), "done"), [wrapped]).invoke(GO)
        keys = [step.forward_key for step in saga.steps]
    assert SEEN == [("a", keys[0], 3), ("b", keys[1], 3), ("c", keys[2], 3)]
    assert [intent["args"] for intent in intents("s")] == [{"item": item, "amount": 3} for item in "abc"]
    SEEN.clear()
    wrapped.invoke({"item": "d"})
    wrapped.invoke({"item": "d"})
    assert len({key for _, key, _ in SEEN}) == 2 and all(key for _, key, _ in SEEN)
    assert "idempotency_key" in original.args, "the original is as it was"


def test_the_key_of_a_class_whose_schema_is_its_signature(world, log):
    wrapped = wrap_tool(KeyedTool(), semantics=R)
    assert set(wrapped.args) == {"item"} and set(KeyedTool().args) == {"item", "idempotency_key"}
    with saga_scope(log=log) as saga:
        assert wrapped.invoke({"item": "a"}) == "a"
        assert SEEN == [saga.steps[0].forward_key]


def test_current_step_is_known_in_the_function(world, log):
    def look(item: str) -> str:
        """Look."""
        step = current_step()
        return step.tool if step is not None else "none"

    wrapped = wrap_tool(StructuredTool.from_function(look), semantics=R)
    with saga_scope(log=log):
        assert wrapped.invoke({"item": "a"}) == "look"
    assert wrapped.invoke({"item": "a"}) == "none"


# --- wrapping once, copies


def test_what_cannot_be_wrapped_is_refused_and_left_alone(world):
    wrapped = wrap_tool(tool(book), semantics=R)
    inside = [StructuredTool.from_function(fn) for fn in (saga_tool(semantics=R)(book), wrapped.func)]
    for bad in (wrapped, *inside, book, Booker):
        with pytest.raises(DeclarationError):
            wrap_tool(bad, semantics=R)
    with pytest.raises(DeclarationError, match="has no inverse"):
        wrap_tool(tool(book), semantics=C)


@pytest.mark.promise("drop-in", "no-unprotected-call")
def test_copies_and_changed_copies_stay_wrapped(world, log):
    for original in (tool(book), Booker()):
        wrapped = wrap_tool(original, semantics=R)
        copies = [
            copy.copy(wrapped), copy.deepcopy(wrapped), wrapped.model_copy(), wrapped.model_copy(deep=True),
            wrapped.model_copy(update={"description": "other"}),
        ]  # fmt: skip
        for one in copies:
            assert runner_of(one) is runner_of(wrapped) and isinstance(one, type(original))
            with saga_scope(log=log) as saga:
                one.invoke({"item": "a"})
                assert len(saga.steps) == 1
        with saga_scope(log=log) as saga, covered(saga, [wrapped]):
            assert runner_of(copies[1]).bound, "bound to a saga, all copies are"


def test_a_function_put_into_a_wrapped_tool_is_wrapped_too(world, log):
    wrapped = wrap_tool(tool(book), semantics=R)
    other = wrapped.model_copy(update={"func": lambda item: f"other {item}"})
    changed = copy.copy(wrapped)
    changed.func = lambda item: f"changed {item}"
    with saga_scope(log=log) as saga:
        assert [one.invoke({"item": "a"}) for one in (other, changed)] == ["other a", "changed a"]
        assert wrapped.func("b") == "b", "who takes the function out of the tool has a step as well"
        assert len(saga.steps) == 3


PICKLED = StructuredTool(name="book", description="d", args_schema=_Only, func=book)


@pytest.mark.promise("drop-in")
def test_pickled_tools_stay_wrapped_here_and_in_a_process_that_knows_nothing_of_them(world, log, monkeypatch):
    for original in (PICKLED, Booker(prefix="z")):
        pickle.loads(pickle.dumps(original))
        wrapped = wrap_tool(original, semantics=C, compensate=BY_RESULT)
        data = pickle.dumps(wrapped)
        here = pickle.loads(data)
        assert runner_of(here) is runner_of(wrapped) and isinstance(here, type(original))
        monkeypatch.setattr("agent_saga_langchain.tools._live", {})
        there = pickle.loads(data)
        assert runner_of(there) is not runner_of(wrapped)
        with pytest.raises(SagaAborted), saga_scope(log=log) as saga:
            for one in (here, there):
                world.done.append(one.invoke({"item": "a"}))
            assert len(saga.steps) == 2
            saga.abort("no")
        assert world.standing == []
    with pytest.raises(Exception, match="[Pp]ickle"):
        pickle.dumps(tool(book))  # what cannot be pickled unwrapped cannot be wrapped
    with pytest.raises(Exception, match="[Pp]ickle"):
        pickle.dumps(wrap_tool(tool(book), semantics=R))


def test_a_class_that_reads_one_sync_method_only_is_told_from_one_that_says_so():
    from agent_saga_langchain.tools import _is_missing

    class Real(Booker):
        def _run(self, item: str) -> str:
            SEEN.append(item)
            raise NotImplementedError

    assert _is_missing(AsyncBooker._run) and not _is_missing(Real._run) and not _is_missing(Booker._run)


# --- calling one another, refusals, recovery


def test_a_tool_that_calls_another_one_and_itself_makes_a_step_of_each(world, log):
    @tool
    def inner(item: str) -> str:
        """Inner."""
        return item

    held: dict[str, Any] = {"inner": wrap_tool(inner, semantics=R)}

    @tool
    def outer(depth: int) -> str:
        """Outer."""
        held["inner"].invoke({"item": str(depth)})
        return held["outer"].invoke({"depth": depth - 1}) if depth else "bottom"

    held["outer"] = wrap_tool(outer, semantics=R)
    with saga_scope(log=log) as saga:
        assert held["outer"].invoke({"depth": 1}) == "bottom"
        assert [step.tool for step in saga.steps] == ["outer", "inner", "outer", "inner"]


@pytest.mark.promise("closed-means-closed")
def test_a_refused_call_says_so_to_its_caller(world, log):
    wrapped = wrap_tool(tool(book), semantics=R)
    with pytest.raises(SagaAborted), saga_scope(log=log) as saga:
        saga.abort("no")
        with pytest.raises(SagaAborted, match="being rolled back"):
            wrapped.invoke({"item": "a"})
        assert SEEN == []


def test_a_call_that_did_nothing_may_be_made_again(world, log):
    left = [NotApplied("not yet")]

    def once(item: str) -> str:
        """Once."""
        if left:
            raise left.pop()
        return item

    wrapped = wrap_tool(StructuredTool.from_function(once), semantics=C, compensate=BY_RESULT)
    with saga_scope(log=log) as saga:
        with pytest.raises(NotApplied):
            wrapped.invoke({"item": "a"})
        assert wrapped.invoke({"item": "a"}) == "a"
        (step,) = saga.steps
        assert step.attempts == 2
    assert saga.status is SagaStatus.COMMITTED


@pytest.mark.promise("in-flight-is-unknown", "shielded")
def test_a_cancelled_agent_undoes_what_is_done_and_what_still_runs(world, log, say):
    async def done(item: str) -> str:
        """Be done at once."""
        world.done.append(item)
        finished.set()
        return item

    async def running(item: str) -> str:
        """Be in the middle of it."""
        world.done.append(item)
        started.set()
        await asyncio.Event().wait()
        return item

    by_item = {"semantics": C, "compensate": undo("world.undo", if_absent="forbids", item="args.item")}
    tools = [wrap_tool(StructuredTool.from_function(coroutine=fn), **by_item) for fn in (done, running)]

    async def main() -> None:
        async def run() -> None:
            async with saga_scope("s", log=log):
                agent = create_agent(say([("done", {"item": "a"}, "c1"), ("running", {"item": "b"}, "c2")]), tools)
                await agent.ainvoke(GO)

        task = asyncio.create_task(run())
        await asyncio.wait_for(asyncio.gather(finished.wait(), started.wait()), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)

    finished, started = asyncio.Event(), asyncio.Event()
    asyncio.run(main())
    state = read_saga(log, "s")
    assert state.status is SagaStatus.ROLLED_BACK and world.standing == []
    assert {(step.tool, step.status) for step in state.steps} == {
        ("done", StepStatus.COMPENSATED), ("running", StepStatus.COMPENSATED),
    }  # fmt: skip
    assert recover(log).attention == ()


class Twice(StructuredTool):
    """A subclass that decides itself what a call is."""

    def _run(self, *args: Any, config: RunnableConfig, **kwargs: Any) -> Any:
        run = super()._run
        return [run(*args, config=config, **kwargs) for _ in range(2)]


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_a_subclass_that_calls_its_function_twice_is_one_step(way, world, log, intents):
    wrapped = wrap_tool(Twice.from_function(book, name="twice"), semantics=R)

    async def main() -> Any:
        async with saga_scope("s", log=log):
            return await wrapped.ainvoke({"item": "a"})

    if way == "invoke":
        with saga_scope("s", log=log):
            result = wrapped.invoke({"item": "a"})
    else:
        result = asyncio.run(main())
    assert result == ["a", "a"] and SEEN == ["a", "a"]
    assert [(i["tool"], i["args"]) for i in intents("s")] == [("twice", {"item": "a"})]


@tool
def secretly(item: str, pin: Secret[str]) -> str:
    """Take a secret."""
    SEEN.append(pin)
    return item


@pytest.mark.promise("secrets-stay-out")
def test_a_secret_mark_on_a_parameter_counts(world, log, intents):
    with saga_scope("s", log=log):
        wrap_tool(secretly, semantics=R).invoke({"item": "a", "pin": "4711"})
    assert SEEN == ["4711"] and "4711" not in str(intents("s"))


def test_a_remote_tool_with_a_json_schema_and_an_artifact(world, log, intents, say):
    async def remote(**arguments: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        world.done.append("r1")
        return [{"type": "text", "text": "done"}], {"id": "r1", **arguments}

    made = StructuredTool(
        name="remote", description="d", args_schema=BOOK_JSON, coroutine=remote, response_format="content_and_artifact"
    )
    wrapped = wrap_tool(made, semantics=C, compensate=undo("world.undo", item="result[1].id"))

    async def main() -> None:
        async with saga_scope("s", log=log) as saga:
            result = await create_agent(say(("remote", {"item": "a"}, "c"), "done"), [wrapped]).ainvoke(GO)
            assert result["messages"][-2].artifact == {"id": "r1", "item": "a"}
            saga.abort("no")

    with pytest.raises(SagaAborted):
        asyncio.run(main())
    assert world.standing == [] and intents("s")[0]["args"] == {"item": "a"}


def test_a_batch_makes_a_step_of_each_input(world, log):
    with saga_scope(log=log) as saga:
        assert wrap_tool(tool(book), semantics=R).batch([{"item": item} for item in "abc"]) == ["a", "b", "c"]
        assert len(saga.steps) == 3


@pytest.mark.promise("no-false-clean", "lifo")
@pytest.mark.parametrize("way", ["func", "invoke", "method", "acall"])
def test_a_tool_that_calls_itself_makes_a_step_of_each_call(way, world, log):
    class Dig(BaseTool):
        name: str = "dig"
        description: str = "Dig."

        def _run(self, item: str) -> str:
            world.done.append(item)
            if len(item) < 3:
                self.invoke({"item": item + "x"})
            return item

    @tool("dig")
    def dig(item: str) -> str:
        """Dig."""
        world.done.append(item)
        if len(item) < 3:
            held[0].func(item + "x") if way == "func" else held[0].invoke({"item": item + "x"})
        return item

    @tool("dig")
    async def adig(item: str) -> str:
        """Dig."""
        world.done.append(item)
        if len(item) < 3:
            await held[0].coroutine(item + "x")
        return item

    plain: Any = {"method": Dig(), "acall": adig}.get(way, dig)
    held = [wrap_tool(plain, semantics=C, compensate=BY_RESULT)]

    async def main() -> None:
        async with saga_scope("s", log=log):
            await held[0].ainvoke({"item": "a"})
            raise KeyError

    with pytest.raises(KeyError):
        if way == "acall":
            asyncio.run(main())
        else:
            with saga_scope("s", log=log):
                held[0].invoke({"item": "a"})
                raise KeyError
    assert world.done == ["a", "ax", "axx"] and world.standing == []
