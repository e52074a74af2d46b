"""Which calls are the same call: over retries, interrupts, copies of a task, subgraphs, and runs that are made again.

Each test that rests on something that LangGraph tells names it: a version that tells it differently breaks here.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ToolRetryMiddleware
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_config
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.runtime import get_runtime
from langgraph.types import Command, RetryPolicy, Send, interrupt
from typing_extensions import TypedDict

from agent_saga_core import (
    ActionSemantics,
    DeclarationError,
    IdempotencyConflict,
    NotApplied,
    SagaAborted,
    SagaStatus,
    read_saga,
    saga_scope,
    undo,
)
from agent_saga_langchain import wrap_tool
from agent_saga_langchain.places import current_task, numbered

C, R = ActionSemantics.COMPENSABLE, ActionSemantics.READ_ONLY
BY_RESULT = {"semantics": C, "compensate": undo("world.undo", item="result")}
GO = {"messages": [HumanMessage("go")]}
THREAD: Any = {"configurable": {"thread_id": "t"}}


class Names(TypedDict, total=False):
    names: Annotated[list[str], lambda old, new: [*old, *new]]
    name: str


@pytest.fixture
def pay(world):
    @tool
    def pay(item: str) -> str:
        """Pay for an item."""
        world.done.append(item)
        return item

    return wrap_tool(pay, **BY_RESULT)


def call(item: str, call_id: str | None = "call_0", name: str = "pay") -> Any:
    return {"name": name, "args": {"item": item}, "id": call_id, "type": "tool_call"}


def graph(node: Any, state: Any = Names, **more: Any) -> Any:
    built = StateGraph(state)
    built.add_node("node", node)
    built.add_edge(START, "node")
    built.add_edge("node", END)
    return built.compile(**more)


# --- what LangGraph tells


def test_langgraph_tells_the_execution_of_a_task_as_we_read_it():
    seen: list[Any] = []

    @tool
    def look(item: str) -> str:
        """Look."""
        seen.append(get_runtime())
        return item

    def node(state: Names) -> Names:
        runtime, config = get_runtime(), get_config()
        look.invoke(call("a", name="look"))
        assert seen[-1] is runtime is get_runtime(), "one object for one execution, seen in a tool as well"
        assert config["metadata"]["langgraph_step"] == 1
        assert config["metadata"]["langgraph_path"] == ("__pregel_pull", "node")
        if len(seen) < 3:
            raise ConnectionError
        interrupt("?")
        return {}

    retry = RetryPolicy(initial_interval=0, jitter=False, max_attempts=3)
    built = StateGraph(Names)
    built.add_node("node", node, retry_policy=retry)
    built.add_edge(START, "node")
    compiled = built.compile(checkpointer=InMemorySaver())
    compiled.invoke({}, THREAD)
    compiled.invoke(Command(resume="!"), THREAD)
    assert len(seen) == 4 and len({id(runtime) for runtime in seen}) == 4, "a new object for each execution"
    infos = [runtime.execution_info for runtime in seen]
    assert len({info.task_id for info in infos}) == 1, "one id over retries and resumes"
    assert [info.node_attempt for info in infos] == [1, 2, 3, 1]
    assert {info.thread_id for info in infos} == {"t"}
    assert {info.checkpoint_ns for info in infos} == {f"node:{infos[0].task_id}"}


def test_langgraph_tells_a_graph_that_is_kept_from_one_that_is_not():
    found: list[Any] = []

    def node(state: Names) -> Names:
        one = current_task()
        assert one is not None
        found.append((one.thread_id, get_config()["configurable"]["__pregel_checkpointer"] is None))
        return {}

    graph(node).invoke({})
    graph(node).invoke({}, THREAD)
    graph(node, checkpointer=InMemorySaver()).invoke({}, THREAD)
    assert found == [(None, True), (None, True), ("t", False)]


def test_outside_of_a_graph_there_is_no_task():
    assert current_task() is None
    seen: list[Any] = []

    @tool
    def look(item: str) -> str:
        """Look."""
        seen.append(current_task())
        return item

    look.invoke(call("a", name="look"))

    def node(state: Names) -> Names:
        thread = threading.Thread(target=lambda: seen.append(current_task()))
        thread.start()
        thread.join(30)
        return {}

    graph(node).invoke({})
    assert seen == [None, None]


def test_a_graph_whose_executions_cannot_be_told_apart_is_refused(monkeypatch, world, log, pay):
    def node(state: Names) -> Names:
        monkeypatch.setattr("langgraph.runtime.get_runtime", object)
        pay.invoke(call("a"))
        return {}

    with pytest.raises(DeclarationError, match="langgraph>=1.2"), saga_scope(log=log):
        graph(node).invoke({})
    assert world.done == []


# --- the same call


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_a_retry_policy_makes_one_step_with_attempts_and_reruns_no_finished_sibling(way, world, log, pay, say):
    left = [NotApplied("not yet"), NotApplied("not yet")]

    def flaky(item: str) -> str:
        """Fail twice."""
        if left:
            raise left.pop()
        world.done.append(item)
        return item

    @tool("flaky")
    def sync_flaky(item: str) -> str:
        """Fail twice."""
        return flaky(item)

    @tool("flaky")
    async def async_flaky(item: str) -> str:
        """Fail twice."""
        return flaky(item)

    flaky_tool = wrap_tool(sync_flaky if way == "invoke" else async_flaky, **BY_RESULT)
    built = StateGraph(MessagesState)
    retry = RetryPolicy(initial_interval=0, jitter=False, max_attempts=4, retry_on=NotApplied)
    built.add_node("tools", ToolNode([pay, flaky_tool]), retry_policy=retry)
    built.add_edge(START, "tools")
    given = {"messages": [AIMessage("", tool_calls=[call("a", "c0"), call("b", "c9", "flaky")])]}
    with saga_scope("s", log=log):
        run = built.compile()
        result = run.invoke(given) if way == "invoke" else asyncio.run(run.ainvoke(given))
    assert sorted(world.done) == ["a", "b"] and [m.content for m in result["messages"][1:]] == ["a", "b"]
    state = read_saga(log, "s")
    assert {step.tool: step.attempts for step in state.steps} == {"pay": 1, "flaky": 3}
    assert state.status is SagaStatus.COMMITTED


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_tool_retry_middleware_makes_one_step_with_attempts(way, world, log, say):
    left = [NotApplied("not yet"), NotApplied("not yet")]

    @tool
    def flaky(item: str) -> str:
        """Fail twice."""
        if left:
            raise left.pop()
        world.done.append(item)
        return item

    retry = ToolRetryMiddleware(max_retries=3, initial_delay=0, jitter=False)
    wrapped = wrap_tool(flaky, **BY_RESULT)
    agent = create_agent(say(("flaky", {"item": "a"}, "c"), "done"), [wrapped], middleware=[retry])
    with saga_scope("s", log=log) as saga:
        agent.invoke(GO) if way == "invoke" else asyncio.run(agent.ainvoke(GO))
        (step,) = saga.steps
    assert step.attempts == 3 and world.done == ["a"]


@pytest.mark.promise("replay-not-rerun")
def test_over_two_interrupts_each_effect_is_made_once(world, log, pay):
    def node(state: Names) -> Names:
        pay.invoke(call("one"))
        pay.invoke({"item": "counted"})
        interrupt("first?")
        pay.invoke({"item": "counted again"})
        pay.invoke(call("two", "call_1"))
        interrupt("second?")
        pay.invoke({"item": "counted", })  # fmt: skip
        return {"names": ["done"]}

    saver = InMemorySaver()

    def go(given: Any) -> Any:  # each time as another process would: a new graph, a new opening of the saga
        with saga_scope("s", log=log, resume="continue") as saga:
            result = graph(node, checkpointer=saver).invoke(given, THREAD)
            if "__interrupt__" in result:
                saga.suspend("asked")
            return result

    go({})
    assert world.done == ["one", "counted"]
    go(Command(resume="yes"))
    assert world.done == ["one", "counted", "counted again", "two"]
    assert go(Command(resume="yes"))["names"] == ["done"]
    assert world.done == ["one", "counted", "counted again", "two", "counted"]
    assert read_saga(log, "s").status is SagaStatus.COMMITTED and len(read_saga(log, "s").steps) == 5


@pytest.mark.promise("replay-not-rerun")
def test_a_tool_that_pauses_goes_on_under_the_same_key(world, log):
    keys: list[str] = []

    @tool
    def asks(item: str, idempotency_key: str) -> str:
        """Ask in the middle."""
        keys.append(idempotency_key)
        answer = interrupt("go on?")
        world.done.append(f"{item} {answer}")
        return item

    wrapped = wrap_tool(asks, **BY_RESULT)
    saver = InMemorySaver()

    def node(state: Names) -> Names:
        wrapped.invoke(call("a", name="asks"))
        return {}

    with saga_scope("s", log=log) as saga:
        assert "__interrupt__" in graph(node, checkpointer=saver).invoke({}, THREAD)
        assert [step.status for step in saga.steps] == ["PAUSED"]
        saga.suspend("asked")
    with saga_scope("s", log=log) as saga:
        graph(node, checkpointer=saver).invoke(Command(resume="yes"), THREAD)
        (step,) = saga.steps
        assert step.attempts == 1 and step.status == "DONE"
    assert world.done == ["a yes"] and len(set(keys)) == 1 and len(keys) == 2


def test_a_call_with_a_config_of_its_own_is_still_a_call_of_its_task(world, log, pay, intents):
    def node(state: Names) -> Names:
        pay.invoke(call("a"), {"configurable": {"mine": 1}, "metadata": {}})
        pay.invoke({"item": "b"}, {"configurable": {"mine": 1}})
        return {}

    with saga_scope("s", log=log):
        graph(node, checkpointer=InMemorySaver()).invoke({}, THREAD)
    assert all("langgraph" in intent["identity"] and '"t/' in intent["identity"] for intent in intents("s"))


def test_a_counted_call_met_again_with_other_arguments_is_a_conflict(world, log, pay):
    items = ["a", "b"]

    def node(state: Names) -> Names:
        pay.invoke({"item": items.pop(0)})
        interrupt("?")
        return {}

    run = graph(node, checkpointer=InMemorySaver())
    with pytest.raises(IdempotencyConflict), saga_scope("s", log=log):
        run.invoke({}, THREAD)
        run.invoke(Command(resume="yes"), THREAD)
    assert world.done == ["a"] and world.undone == ["a"]


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("why", ["callback", "format"])
def test_a_call_whose_caller_hears_an_error_after_it_has_returned_is_retried_without_its_effect(
    why, way, world, log, say
):
    """The function has returned; then a callback fails, or LangChain does not like what it returned."""

    @tool(response_format="content_and_artifact" if why == "format" else "content")
    def pay(item: str) -> Any:
        """Pay for an item."""
        world.done.append(item)
        return item

    class Broken(BaseCallbackHandler):
        raise_error = True

        def on_tool_end(self, output: Any, **more: Any) -> None:
            raise ConnectionError("the trace is down")

    retry = ToolRetryMiddleware(max_retries=2, initial_delay=0, jitter=False, on_failure="continue")
    turns = (("pay", {"item": "a"}, "call_0"), ("pay", {"item": "a"}, "call_0"), "done")
    agent = create_agent(say(*turns), [wrap_tool(pay, **BY_RESULT)], middleware=[retry])
    config: Any = {"callbacks": [Broken()] if why == "callback" else []}
    with saga_scope("s", log=log) as saga:
        agent.invoke(GO, config) if way == "invoke" else asyncio.run(agent.ainvoke(GO, config))
        assert [step.attempts for step in saga.steps] == [1, 1], "one for each message, whatever became of it"
    assert world.done == ["a", "a"]


@pytest.mark.promise("replay-not-rerun")
def test_a_tool_that_has_called_itself_is_retried_without_its_effects(world, log, say):
    @tool(response_format="content_and_artifact")
    def dig(item: str) -> Any:
        """Dig, deeper too."""
        world.done.append(item)
        if len(item) < 2:
            wrapped.func(item + "x"), wrapped.func(item + "y")
        return item

    wrapped = wrap_tool(dig, **BY_RESULT)
    retry = ToolRetryMiddleware(max_retries=2, initial_delay=0, jitter=False, on_failure="continue")
    agent = create_agent(say(("dig", {"item": "a"}, "call_0"), "done"), [wrapped], middleware=[retry])
    with saga_scope("s", log=log) as saga:
        agent.invoke(GO)
        assert len(saga.steps) == 3
    assert world.done == ["a", "ax", "ay"]


@pytest.mark.promise("replay-not-rerun")
def test_after_an_error_behind_its_end_a_call_with_other_arguments_is_another_one(world, log):
    @tool(response_format="content_and_artifact")
    def pay(item: str) -> Any:
        """Pay for an item."""
        world.done.append(item)
        return item

    wrapped = wrap_tool(pay, **BY_RESULT)

    def node(state: Names) -> Names:
        for item in ("a", "a", "b"):
            with pytest.raises(ValueError, match="two-tuple"):
                wrapped.invoke(call(item))
        return {}

    with saga_scope("s", log=log) as saga:
        graph(node).invoke({})
        assert len(saga.steps) == 2
    assert world.done == ["a", "b"]


# --- different calls


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("kept", [True, False])
def test_equal_ids_in_two_messages_two_copies_and_two_runs_are_different_calls(kept, world, log, pay, say):
    more: dict[str, Any] = {"checkpointer": InMemorySaver()} if kept else {}
    turn = ("pay", {"item": "a"}, "call_0")
    with saga_scope(log=log) as saga:
        create_agent(say(turn, turn, "done"), [pay], **more).invoke(GO, THREAD)
        create_agent(say(turn, "done"), [pay], **more).invoke(GO, {"configurable": {"thread_id": "other"}})
        assert len(saga.steps) == 3

        def copied(state: Names) -> Names:
            pay.invoke(call("a"))
            return {}

        built = StateGraph(Names)
        built.add_node("copied", copied)
        built.add_conditional_edges(START, lambda _: [Send("copied", {"name": n}) for n in "xyz"], ["copied"])
        built.compile(**more).invoke({}, {"configurable": {"thread_id": "third"}})
        assert len(saga.steps) == 6
    assert world.done == ["a"] * 6


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("kept", [True, False])
def test_subgraphs_and_tasks_of_the_functional_api_have_places_of_their_own(kept, world, log, pay, say, intents):
    more: dict[str, Any] = {"checkpointer": InMemorySaver()} if kept else {}
    turn = ("pay", {"item": "a"}, "call_0")

    def node(state: Names) -> Names:
        for _ in range(2):
            create_agent(say(turn, "done"), [pay]).invoke(GO)
        pay.invoke(call("a"))
        return {}

    @task
    def paying(item: str) -> str:
        return pay.invoke(call(item)).content

    @entrypoint(**more)
    def flow(items: list[str]) -> list[str]:
        return [future.result() for future in [paying(item) for item in items]]

    with saga_scope("s", log=log):
        graph(node, **more).invoke({}, THREAD)
        assert flow.invoke(["b", "b"], {"configurable": {"thread_id": "other"}}) == ["b", "b"]
    assert world.done == ["a", "a", "a", "b", "b"]
    assert len({intent["identity"] for intent in intents("s")}) == 5


@pytest.mark.promise("replay-not-rerun")
def test_one_id_for_several_calls_of_one_task_hides_none_of_them(world, log, pay):
    rounds: list[int] = []

    def node(state: Names) -> Names:
        rounds.append(len(world.done))
        for item in ("a", "a", "b"):  # a loop over three messages, each of which begins its ids anew
            pay.invoke(call(item))
        interrupt("?")
        pay.invoke(call("c"))
        return {}

    run = graph(node, checkpointer=InMemorySaver())
    with saga_scope("s", log=log) as saga:
        run.invoke({}, THREAD)
        assert world.done == ["a", "a", "b"]
        run.invoke(Command(resume="yes"), THREAD)
        assert world.done == ["a", "a", "b", "c"] and rounds == [0, 3] and len(saga.steps) == 4


@pytest.mark.promise("replay-not-rerun")
def test_one_id_for_two_calls_of_one_message_hides_none_of_them(world, log):
    together = threading.Barrier(2)

    @tool
    def pay(item: str) -> str:
        """Pay."""
        together.wait(30)
        world.done.append(item)
        return item

    built = StateGraph(MessagesState)
    built.add_node("tools", ToolNode([wrap_tool(pay, **BY_RESULT)]))
    built.add_edge(START, "tools")
    with saga_scope(log=log) as saga:
        built.compile().invoke({"messages": [AIMessage("", tool_calls=[call("a"), call("a")])]})
        assert len(saga.steps) == 2 and world.done == ["a", "a"]


# --- a run that is made again from its top


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_without_a_checkpointer_a_run_made_again_gives_back_what_was_done(way, world, log, pay, say):
    def body(die: bool) -> None:
        turns = [[("pay", {"item": "a"}, "c1"), ("pay", {"item": "b"}, "c2")], ("pay", {"item": "a"}, "c1"), "done"]
        for _ in range(2):  # two runs of one saga
            agent = create_agent(say(*turns), [pay])
            agent.invoke(GO) if way == "invoke" else asyncio.run(agent.ainvoke(GO))
        if die:
            raise SystemExit

    saga = saga_scope("s", log=log)
    with pytest.raises(SystemExit), saga:
        body(die=False)
        saga.suspend("as if the process had died")
        raise SystemExit
    assert len(world.done) == 6
    with saga_scope("s", log=log) as again:
        body(die=False)
        assert len(again.steps) == 6
    assert len(world.done) == 6 and again.status is SagaStatus.COMMITTED and world.undone == []


@pytest.mark.promise("replay-not-rerun")
def test_parallel_calls_are_met_again_in_whatever_order_they_come(world, log, pay, say):
    class InOrder(AgentMiddleware):
        """Lets the calls of a turn through in this order of their arguments, each when the one before has ended."""

        def __init__(self, *items: str) -> None:
            super().__init__()
            self.before = dict(zip(items[1:], items, strict=False))
            self.ended = {item: threading.Event() for item in items}

        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            item = request.tool_call["args"]["item"]
            if item in self.before:
                assert self.ended[self.before[item]].wait(30)
            result = handler(request)
            self.ended[item].set()
            return result

    turn = [("pay", {"item": "a"}, "call_0"), ("pay", {"item": "b"}, "call_0")]
    for order in ("ab", "ba"):
        with saga_scope("s", log=log) as saga:
            create_agent(say(turn, "done"), [pay], middleware=[InOrder(*order)]).invoke(GO)
            assert world.done == ["a", "b"] and len(saga.steps) == 2
            if order == "ab":
                saga.suspend("as if the process had died")
    assert saga.status is SagaStatus.COMMITTED


@pytest.mark.promise("replay-not-rerun")
def test_a_saga_that_goes_on_without_a_checkpointer_makes_calls_that_look_like_former_ones(world, log, pay, say):
    for n in range(3):
        with saga_scope("s", log=log, resume="continue") as saga:
            create_agent(say(("pay", {"item": "a"}, "call_0"), "done"), [pay]).invoke(GO)
            assert len(saga.steps) == n + 1 and world.done == ["a"] * (n + 1)
            saga.suspend("more to come")


def test_numbers_begin_anew_when_a_saga_is_opened_again(log):
    for _ in range(2):
        with saga_scope("s", log=log) as saga:
            assert [numbered(saga, key, "x") for key in ("k", "l", "k")] == [0, 1, 0]
            with saga.savepoint() as inner:
                assert numbered(inner, "m", "x") == 2, "a savepoint counts with its saga"
            saga.suspend("again")


@pytest.mark.promise("replay-not-rerun")
def test_outside_of_a_graph_ids_are_not_read_and_equal_calls_are_counted(world, log, pay):
    with pytest.raises(SagaAborted), saga_scope(log=log) as saga:
        messages = [pay.invoke(call("a")) for _ in range(2)]  # two messages of a model, each with its call_0
        assert [m.tool_call_id for m in messages] == ["call_0", "call_0"]
        assert len(saga.steps) == 2
        saga.abort("no")
    assert world.done == ["a", "a"] and world.standing == []
