"""Runs that are one saga: what they bind, how they suspend, how they end when the model does not stop."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, closing
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphBubbleUp, GraphInterrupt, ParentCommand
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from agent_saga_core import (
    ActionSemantics,
    BoundaryRequired,
    RollbackIncomplete,
    SagaAborted,
    SagaStatus,
    current_saga,
    list_sagas,
    read_saga,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.wrapping import REFUSALS
from agent_saga_langchain import asaga_run, asaga_stream, saga_run, saga_stream, wrap_tool
from agent_saga_langchain.pauses import GraphPause, run_ended

C, R, IRREVERSIBLE = ActionSemantics.COMPENSABLE, ActionSemantics.READ_ONLY, ActionSemantics.IRREVERSIBLE
BY_RESULT = {"semantics": C, "compensate": undo("world.undo", item="result")}
GO = {"messages": [HumanMessage("go")]}
THREAD: Any = {"configurable": {"thread_id": "t"}}


@pytest.fixture
def pay(world):
    @tool
    def pay(item: str) -> str:
        """Pay for an item."""
        world.done.append(item)
        return item

    return wrap_tool(pay, **BY_RESULT)


@pytest.fixture
def fail(world):
    @tool
    def fail(item: str) -> str:
        """Fail, and say nothing of what happened."""
        raise RuntimeError("no idea")

    return wrap_tool(fail, **BY_RESULT)


class SwallowAll(AgentMiddleware):
    """Takes even LangGraph's own exceptions for answers."""

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        try:
            return handler(request)
        except Exception as error:
            return ToolMessage(str(error), tool_call_id=request.tool_call["id"], status="error")

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        try:
            return await handler(request)
        except Exception as error:
            return ToolMessage(str(error), tool_call_id=request.tool_call["id"], status="error")


def endless(say: Any) -> Any:
    turns = [("fail", {"item": "x"}, "c0"), *(("pay", {"item": str(n)}, f"c{n}") for n in range(1, 40))]
    return say(*turns)


# --- any runnable


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
def test_a_chain_of_ones_own_is_one_saga(way, world, log, pay):
    seen: list[Any] = []

    def act(item: str) -> str:
        seen.append(current_saga())
        return pay.invoke({"item": item})

    chain = RunnableLambda(act) | RunnableParallel(same=lambda x: x)

    async def main(kind: str) -> Any:
        if kind == "ainvoke":
            return await asaga_run(chain, "a", log=log, saga_id="s", metadata={"order": 7})
        pieces = [piece async for piece in asaga_stream(chain, "a", log=log, saga_id="s", metadata={"order": 7})]
        return pieces[-1]

    if way == "invoke":
        result = saga_run(chain, "a", log=log, saga_id="s", metadata={"order": 7})
    elif way == "stream":
        result = [*saga_stream(chain, "a", log=log, saga_id="s", metadata={"order": 7})][-1]
    else:
        result = asyncio.run(main(way))
    assert result == {"same": "a"} and world.done == ["a"] and seen[0].id == "s" and current_saga() is None
    state = read_saga(log, "s")
    assert (state.status, state.name, state.metadata) == (SagaStatus.COMMITTED, "RunnableSequence", {"order": 7})


def test_what_the_run_takes_is_handed_on_and_what_it_is_given_is_unchanged(log, pay, say):
    class Heard(BaseCallbackHandler):
        def __init__(self) -> None:
            self.tools: list[Any] = []

        def on_tool_start(self, serialized: Any, text: str, **more: Any) -> None:
            self.tools.append((serialized["name"], more["tool_call_id"]))

    heard = Heard()
    config: Any = {"callbacks": [heard], "tags": ["mine"], "configurable": {"thread_id": "t"}}
    before = {**config, "callbacks": [heard]}
    agent = create_agent(say(("pay", {"item": "a"}, "c1"), "done"), [pay])
    result = saga_run(agent, GO, config, log=log, stream_mode="updates")
    assert [list(piece) for piece in result] == [["model"], ["tools"], ["model"]]
    assert config == before and heard.tools == [("pay", "c1")], "callbacks hear of each call once"


@pytest.mark.promise("no-silent-commit", "no-false-clean")
def test_a_run_that_raises_is_undone(world, log, pay, say):
    def act(item: str) -> str:
        pay.invoke({"item": item})
        raise KeyError(item)

    with pytest.raises(KeyError) as raised:
        saga_run(RunnableLambda(act), "a", log=log)
    assert world.done == world.undone == ["a"] and "ROLLED_BACK, clean" in raised.value.__notes__[-1]
    for leave in (lambda: closing(saga_stream(RunnableLambda(act), "b", log=log)),):
        with pytest.raises(KeyError), leave() as stream:
            next(stream)
    assert world.standing == []


@pytest.mark.promise("no-silent-commit")
def test_a_stream_that_is_left_is_undone(world, log, pay, say):
    turns = (("pay", {"item": "a"}, "c1"), ("pay", {"item": "b"}, "c2"), "done")
    with closing(saga_stream(create_agent(say(*turns), [pay]), GO, log=log)) as stream:
        assert [list(next(stream)) for _ in range(2)] == [["model"], ["tools"]]
        assert current_saga() is None and world.done == ["a"]
    assert world.standing == []

    async def main() -> None:
        async with aclosing(asaga_stream(create_agent(say(*turns), [pay]), GO, log=log)) as stream:
            await anext(stream)
            await anext(stream)
            assert current_saga() is None

    asyncio.run(main())
    assert world.done == ["a", "a"] and world.standing == []


@pytest.mark.promise("no-unprotected-call")
def test_tools_named_for_the_run_are_bound_to_it(world, log, pay):
    import threading

    raised: list[BaseException] = []

    def stray() -> None:
        try:
            pay.invoke({"item": "stray"})
        except BoundaryRequired as error:
            raised.append(error)

    def act(item: str) -> str:
        thread = threading.Thread(target=stray)
        thread.start()
        thread.join(30)
        return item

    hidden = [act]  # nothing that a scan of the function's own names would find

    assert saga_run(RunnableLambda(lambda x: hidden[0](x)), "a", log=log, tools=[pay]) == "a"
    assert len(raised) == 1 and world.done == []
    pay.invoke({"item": "later"})
    assert world.done == ["later"]


# --- a model that does not stop


@pytest.mark.promise("no-silent-commit", "closed-means-closed")
@pytest.mark.parametrize("way", ["saga_run", "asaga_run", "saga_scope"])
def test_after_three_refusals_the_run_ends_even_where_every_exception_is_swallowed(way, world, log, pay, fail, say):
    model = endless(say)
    handle: list[Any] = [SwallowAll()]
    if way == "saga_scope":  # without saga_run nothing watches the model: LangGraph's exception has to come through
        handle = []
    agent = create_agent(model, [pay, fail], middleware=handle)
    if way == "saga_scope":
        from langgraph.prebuilt import ToolNode, create_react_agent

        with pytest.warns(DeprecationWarning):
            agent = create_react_agent(model, ToolNode([pay, fail], handle_tool_errors=True))
    with pytest.raises(RollbackIncomplete) as raised:
        if way == "saga_run":
            saga_run(agent, GO, log=log, saga_id="s")
        elif way == "asaga_run":
            asyncio.run(asaga_run(agent, GO, log=log, saga_id="s"))
        else:
            with saga_scope("s", log=log):
                agent.invoke(GO)
    assert isinstance(raised.value.__cause__, SagaAborted)
    assert world.done == []
    left = sum(1 for _ in model.messages)
    assert 40 - left == 1 + REFUSALS, "one turn for the failure, one for each refusal"


def test_the_last_refusal_passes_through_langgraph_and_is_no_pause():
    ended = run_ended(SagaAborted("no"))
    assert isinstance(ended, SagaAborted) and isinstance(ended, GraphBubbleUp) and run_ended(ended) is ended
    assert not isinstance(ended, GraphPause)
    assert isinstance(GraphInterrupt(()), GraphPause) and not isinstance(ValueError(), GraphPause)


def test_callbacks_of_the_run_around_are_heard_and_nothing_else_is_handed_on_for_it(log, pay, say):
    """A config that names one callback more must not silence those that the runnable would have inherited."""

    class Heard(BaseCallbackHandler):
        def __init__(self) -> None:
            self.tools: list[Any] = []

        def on_tool_start(self, serialized: Any, text: str, **more: Any) -> None:
            self.tools.append((serialized["name"], more["tags"], more["metadata"]))

    inner = RunnableLambda(lambda x: pay.invoke({"item": x}))
    own = Heard()
    manager = CallbackManager([], inheritable_handlers=[own])
    for config in (None, {}, {"callbacks": [own]}, {"callbacks": manager}):
        heard: list[Any] = []
        for run in (inner.invoke, lambda x, config: saga_run(inner, x, config, log=log)):
            around = Heard()
            outer = RunnableLambda(lambda x, run=run, config=config: run(x, config))
            outer.invoke("a", {"callbacks": [around], "tags": ["mine"], "metadata": {"m": 1}})
            heard.append((around.tools, [*own.tools]))
            own.tools.clear()
        assert heard[0] == heard[1] and len(heard[0][0]) + len(heard[0][1]) == 1
    assert manager.handlers == [] and manager.inheritable_handlers == [own], "what is the caller's stays as it was"


def test_the_last_refusal_of_a_plain_function_passes_through_langgraph_too(world, log):
    @saga_tool(**BY_RESULT)
    def pay(item: str) -> str:
        world.done.append(item)
        return item

    heard: list[bool] = []

    def act(item: str) -> None:
        saga = current_saga()
        assert saga is not None
        saga.abort("no")
        for _ in range(REFUSALS):
            with pytest.raises(SagaAborted) as refused:
                pay(item)
            heard.append(isinstance(refused.value, GraphBubbleUp))

    with pytest.raises(SagaAborted):
        saga_run(RunnableLambda(act), "a", log=log)
    assert heard == [False] * (REFUSALS - 1) + [True] and world.done == []


# --- interrupts


def gate_tool(world: Any) -> Any:
    @tool
    def gate(item: str) -> str:
        """Ask a person."""
        world.done.append(f"{item} {interrupt('?')}")
        return item

    return wrap_tool(gate, **BY_RESULT)


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream", "custom"])
def test_an_interrupted_run_is_suspended_and_goes_on(way, world, log, pay, say):
    saver, gate = InMemorySaver(), gate_tool(world)
    turns = (("pay", {"item": "a"}, "c1"), ("gate", {"item": "b"}, "c2"), "done")
    agent = create_agent(say(*turns), [pay, gate], checkpointer=saver)

    def go(given: Any, **scope: Any) -> Any:
        if way == "invoke":
            return saga_run(agent, given, THREAD, log=log, saga_id="s", **scope)
        if way == "ainvoke":
            return asyncio.run(asaga_run(agent, given, THREAD, log=log, saga_id="s", **scope))
        if way == "stream":
            return list(saga_stream(agent, given, THREAD, log=log, saga_id="s", **scope))
        if way == "custom":  # a mode in which no piece tells of the interrupt
            return list(saga_stream(agent, given, THREAD, log=log, saga_id="s", stream_mode="custom", **scope))

        async def read() -> list[Any]:
            return [piece async for piece in asaga_stream(agent, given, THREAD, log=log, saga_id="s", **scope)]

        return asyncio.run(read())

    go(GO, deadline=60.0)
    state = read_saga(log, "s")
    assert state.status is SagaStatus.SUSPENDED
    assert [(step.tool, step.status) for step in state.steps] == [("pay", "DONE"), ("gate", "PAUSED")]
    go(Command(resume="yes"), resume="continue")
    state = read_saga(log, "s")
    assert state.status is SagaStatus.COMMITTED and world.done == ["a", "b yes"] and world.undone == []
    assert [step.attempts for step in state.steps] == [1, 1]


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("way", ["run", "savepoint"])
def test_plain_functions_in_a_node_are_met_again_and_may_be_paused(way, world, log):
    """They bring no place of their own, and are counted in their task like the tools beside them."""

    @saga_tool(**BY_RESULT)
    def pay(item: str) -> str:
        world.done.append(item)
        return item

    @saga_tool(**BY_RESULT)
    def ask(item: str) -> str:
        world.done.append(f"{item} {interrupt('?')}")
        return item

    def node(state: Any) -> Any:
        pay("a"), pay("a")
        ask("b")
        pay("c")
        return {}

    built = StateGraph(MessagesState)
    built.add_node("node", node)
    built.add_edge(START, "node")
    graph = built.compile(checkpointer=InMemorySaver())

    def go(given: Any) -> None:
        if way == "run":
            saga_run(graph, given, THREAD, log=log, saga_id="s", resume="continue")
            return
        with saga_scope("s", log=log, resume="continue") as saga:
            if "__interrupt__" in saga_run(graph, given, THREAD):
                saga.suspend("the caller's")

    go({"messages": []})
    assert [step.status for step in read_saga(log, "s").steps] == ["DONE", "DONE", "PAUSED"]
    go(Command(resume="yes"))
    assert world.done == ["a", "a", "b yes", "c"] and world.undone == []
    state = read_saga(log, "s")
    assert state.status is SagaStatus.COMMITTED and [step.attempts for step in state.steps] == [1, 1, 1, 1]


def test_a_graph_that_stops_before_a_node_is_suspended(world, log, pay, say):
    agent = create_agent(
        say(("pay", {"item": "a"}, "c1"), "done"), [pay], checkpointer=InMemorySaver(), interrupt_before=["tools"]
    )
    saga_run(agent, GO, THREAD, log=log, saga_id="s")
    assert read_saga(log, "s").status is SagaStatus.SUSPENDED and world.done == []
    saga_run(agent, None, THREAD, log=log, saga_id="s", resume="continue")
    assert read_saga(log, "s").status is SagaStatus.COMMITTED and world.done == ["a"]


@pytest.mark.promise("replay-not-rerun", "no-silent-commit")
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
@pytest.mark.parametrize("around", [None, "saga"])
def test_an_interrupt_that_leaves_a_run_in_a_node_undoes_nothing(way, around, world, log, pay, say):
    """LangGraph raises it out of a graph without a checkpointer of its own, and goes on in it behind what was done."""
    turns = (("pay", {"item": "a"}, "c1"), ("gate", {"item": "b"}, "c2"), "done")
    inner = create_agent(say(*turns), [pay, gate_tool(world)])
    scope: dict[str, Any] = {} if around else {"log": log, "saga_id": "s", "resume": "continue"}

    def node(state: Any) -> Any:
        if way == "invoke":
            saga_run(inner, GO, **scope)
        else:
            list(saga_stream(inner, GO, **scope))
        return {}

    async def anode(state: Any) -> Any:
        if way == "ainvoke":
            await asaga_run(inner, GO, **scope)
        else:
            async with aclosing(asaga_stream(inner, GO, **scope)) as stream:
                async for _ in stream:
                    pass
        return {}

    built = StateGraph(MessagesState)
    built.add_node("node", node if way in ("invoke", "stream") else anode)
    built.add_edge(START, "node")
    graph = built.compile(checkpointer=InMemorySaver())

    def go(given: Any) -> Any:
        if around:
            outer: dict[str, Any] = {"log": log, "saga_id": "s", "resume": "continue"}
            if way in ("invoke", "stream"):
                return saga_run(graph, given, THREAD, **outer)
            return asyncio.run(asaga_run(graph, given, THREAD, **outer))
        return graph.invoke(given, THREAD) if way in ("invoke", "stream") else asyncio.run(graph.ainvoke(given, THREAD))

    assert "__interrupt__" in go({"messages": []})
    assert read_saga(log, "s").status is SagaStatus.SUSPENDED and world.standing == ["a"]
    go(Command(resume="yes"))
    state = read_saga(log, "s")
    assert state.status is SagaStatus.COMMITTED and world.done == ["a", "b yes"] and world.undone == []
    assert [(step.tool, step.status, step.attempts) for step in state.steps] == [
        ("pay", "DONE", 1),
        ("gate", "DONE", 1),
    ]


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_control_that_a_run_in_a_node_hands_to_the_graph_around_is_no_failure(way, world, log, pay):
    def act(state: Any) -> Any:
        pay.invoke({"item": "a"})
        return Command(graph=Command.PARENT, goto="elsewhere")

    built = StateGraph(MessagesState)
    built.add_node("act", act)
    built.add_edge(START, "act")
    inner = built.compile()

    def node(state: Any) -> Any:
        if way == "invoke":
            return saga_run(inner, {"messages": []}, log=log, saga_id="s")
        return list(saga_stream(inner, {"messages": []}, log=log, saga_id="s"))[-1]

    outer = StateGraph(MessagesState)
    outer.add_node("node", node, destinations=("elsewhere",))
    outer.add_node("elsewhere", lambda state: {"messages": [HumanMessage("went")]})
    outer.add_edge(START, "node")
    assert outer.compile().invoke({"messages": []})["messages"][-1].content == "went"
    assert read_saga(log, "s").status is SagaStatus.COMMITTED and world.standing == ["a"]


@pytest.mark.promise("no-silent-commit")
def test_an_interrupt_that_leaves_a_run_which_cannot_commit_is_rolled_back_at_once(world, log, pay, say):
    @tool
    def spoil(item: str) -> str:
        """Spoil the saga and ask."""
        saga = current_saga()
        assert saga is not None
        saga.abort("spoilt")
        return interrupt("?")

    inner = create_agent(say(("pay", {"item": "a"}, "c1"), ("spoil", {"item": "b"}, "c2"), "done"), [pay, spoil])

    def node(state: Any) -> Any:
        return saga_run(inner, GO, log=log, saga_id="s")

    built = StateGraph(MessagesState)
    built.add_node("node", node)
    built.add_edge(START, "node")
    with pytest.raises(SagaAborted):
        built.compile(checkpointer=InMemorySaver()).invoke({"messages": []}, THREAD)
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK and world.standing == []


@pytest.mark.promise("no-silent-commit")
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
def test_a_chain_in_which_a_graph_waits_is_suspended(way, world, log, pay, say):
    """What comes behind the agent takes its result, and with it the word of the interrupt, away."""
    turns = (("pay", {"item": "a"}, "c1"), ("gate", {"item": "b"}, "c2"), "done")
    agent = create_agent(say(*turns), [pay, gate_tool(world)], checkpointer=InMemorySaver())
    chain = RunnableLambda(lambda x: x) | agent | RunnableLambda(len)

    async def read(given: Any, **scope: Any) -> None:
        if way == "ainvoke":
            await asaga_run(chain, given, THREAD, log=log, saga_id="s", **scope)
            return
        async for _ in asaga_stream(chain, given, THREAD, log=log, saga_id="s", **scope):
            pass

    def go(given: Any, **scope: Any) -> None:
        if way == "invoke":
            saga_run(chain, given, THREAD, log=log, saga_id="s", **scope)
        elif way == "stream":
            list(saga_stream(chain, given, THREAD, log=log, saga_id="s", **scope))
        else:
            asyncio.run(read(given, **scope))

    go(GO)
    assert read_saga(log, "s").status is SagaStatus.SUSPENDED and world.standing == ["a"]
    go(Command(resume="yes"), resume="continue")
    assert read_saga(log, "s").status is SagaStatus.COMMITTED and world.standing == ["a", "b yes"]


NAMED = ["bound", "bound twice", "bound over surroundings", "surroundings", "retried", "given over bound"]


@pytest.mark.promise("no-silent-commit")
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("named", NAMED)
def test_where_the_state_of_a_run_is_kept_is_found_however_its_thread_is_named(named, stops, way, world, log, pay, say):
    """A run whose thread is not in the config that it is given is asked about all the same, and about no other."""
    saver, other = InMemorySaver(), {"configurable": {"thread_id": "other"}}
    turns = (("pay", {"item": "a"}, "c1"), "done")
    waiting = create_agent(say(*turns), [pay], checkpointer=saver, interrupt_before=["tools"])
    waiting.invoke(GO, other)  # in the same store, and none of this run's business
    stop: Any = {"interrupt_before": ["tools"]} if stops else {}
    agent: Any = create_agent(say(*turns), [pay], checkpointer=saver, **stop)
    config: Any = None
    around: Any = {}
    if named == "retried":
        agent, config = agent.with_retry(), THREAD
    elif named == "given over bound":
        agent, config = agent.with_config(other), THREAD
    elif named == "bound twice":
        agent = agent.with_config(other).bind().with_config(THREAD)
    elif named == "surroundings":
        around = THREAD
    else:
        agent = agent.with_config(THREAD)
        around = other if named == "bound over surroundings" else {}

    def go(_: Any) -> None:
        if way == "invoke":
            saga_run(agent, GO, config, log=log, saga_id="s")
        else:
            list(saga_stream(agent, GO, config, log=log, saga_id="s"))

    async def ago(_: Any) -> None:
        if way == "ainvoke":
            await asaga_run(agent, GO, config, log=log, saga_id="s")
        else:
            async for _ in asaga_stream(agent, GO, config, log=log, saga_id="s"):
                pass

    if way in ("invoke", "stream"):
        RunnableLambda(go).invoke(None, around)
    else:
        asyncio.run(RunnableLambda(ago).ainvoke(None, around))
    assert read_saga(log, "s").status is (SagaStatus.SUSPENDED if stops else SagaStatus.COMMITTED)
    assert world.done == ([] if stops else ["a"]) and world.undone == []


@pytest.mark.parametrize("around", ["node", "chain"])
def test_a_thread_that_is_named_for_a_run_is_its_own_whatever_surrounds_it(around, world, log, pay, say):
    saver = InMemorySaver()
    inner = create_agent(say(("pay", {"item": "a"}, "c1"), "done"), [pay], checkpointer=saver)

    def act(given: Any) -> Any:
        saga_run(inner, GO, {"configurable": {"thread_id": "inner"}}, log=log)
        return {}

    built = StateGraph(MessagesState)
    built.add_node("node", act)
    built.add_edge(START, "node")
    outer: Any = built.compile(checkpointer=InMemorySaver()) if around == "node" else RunnableLambda(act)
    outer.invoke({"messages": []}, THREAD)
    threads = {found.config["configurable"]["thread_id"] for found in saver.list(None)}
    assert threads == {"inner"} and world.done == ["a"]


@pytest.mark.parametrize("own", [True, "saver", None])
@pytest.mark.parametrize("kept", [True, False])
def test_a_run_that_is_kept_as_a_part_of_the_graph_around_commits(kept, own, world, log, pay, say):
    if own is True and not kept:
        own = False
    checkpointer: Any = InMemorySaver() if own == "saver" else own
    inner = create_agent(say(("pay", {"item": "a"}, "c1"), "done"), [pay], checkpointer=checkpointer)

    def node(state: Any) -> Any:
        saga_run(inner, GO, log=log, saga_id="s")
        return {}

    built = StateGraph(MessagesState)
    built.add_node("node", node)
    built.add_edge(START, "node")
    built.compile(checkpointer=InMemorySaver() if kept else None).invoke({"messages": []}, THREAD)
    assert read_saga(log, "s").status is SagaStatus.COMMITTED and world.standing == ["a"]


def test_an_interrupt_inside_of_an_open_saga_is_its_callers(world, log, pay, say):
    agent = create_agent(say(("gate", {"item": "b"}, "c2"), "done"), [gate_tool(world)], checkpointer=InMemorySaver())
    with saga_scope("around", log=log) as saga:
        assert "__interrupt__" in saga_run(agent, GO, THREAD)
        assert saga.status is SagaStatus.RUNNING
        saga.suspend("the caller's")
    assert [head.id if hasattr(head, "id") else head.saga_id for head in list_sagas(log)] == ["around"]


@pytest.mark.promise("no-silent-commit")
def test_an_interrupted_run_that_cannot_commit_is_rolled_back_at_once(world, log, pay, say):
    @tool
    def spoil(item: str) -> str:
        """Spoil the saga and ask."""
        saga = current_saga()
        assert saga is not None
        saga.abort("spoilt")
        return interrupt("?")

    turns = (("pay", {"item": "a"}, "c1"), ("spoil", {"item": "b"}, "c2"), "done")
    agent = create_agent(say(*turns), [pay, spoil], checkpointer=InMemorySaver())
    with pytest.raises(SagaAborted):
        saga_run(agent, GO, THREAD, log=log, saga_id="s")
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK and world.standing == []


def test_control_handed_to_the_graph_around_is_no_failure_of_the_call(world, log):
    @tool
    def hand_over(item: str) -> str:
        """Hand over to the graph around this one."""
        world.done.append(item)
        raise ParentCommand(Command(graph=Command.PARENT, goto="elsewhere"))

    wrapped = wrap_tool(hand_over, semantics=C, compensate=undo("world.undo", item="args.item"))
    visited: list[str] = []
    inner = StateGraph(MessagesState)
    inner.add_node("call", lambda state: wrapped.invoke({"item": "a"}))
    inner.add_edge(START, "call")
    outer = StateGraph(MessagesState)
    outer.add_node("inner", inner.compile())
    outer.add_node("elsewhere", lambda state: visited.append("elsewhere"))
    outer.add_edge(START, "inner")
    saga_run(outer.compile(), {"messages": []}, log=log, saga_id="s")
    state = read_saga(log, "s")
    assert visited == ["elsewhere"] and state.status is SagaStatus.COMMITTED and state.steps[0].status == "DONE"
