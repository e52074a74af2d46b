"""Which call is which, over interrupts, retries, parallel tasks and subgraphs: every intended call runs, once."""

from __future__ import annotations

import asyncio
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ToolRetryMiddleware
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt
from langgraph_fakes import CHARGE, MAIL, Receipt, ScriptedModel, Till, call, chain, hand_built, model, thread, wrapped

from agent_saga_core import (
    Log,
    NotApplied,
    RollbackIncomplete,
    SagaAborted,
    SagaStatus,
    StepStatus,
    list_sagas,
    read_saga,
    saga_tool,
)
from agent_saga_core.testing.adapters import Script
from agent_saga_langgraph import asaga_run, saga_run

GO: Any = {"messages": [("user", "go")]}


class Noted(TypedDict, total=False):
    noted: Annotated[list[Any], add]


EMPTY: Any = {"noted": []}


def state_of(log: Log) -> Any:
    """The only saga in the log."""
    (head,) = list_sagas(log)
    return read_saga(log, head.saga_id)


@tool
def ask(question: str) -> str:
    """Ask a person."""
    return f"they said {interrupt(question)}"


@pytest.mark.parametrize("kind", ["create_agent", "by hand"])
def test_a_finished_call_beside_one_that_waits_is_not_made_again(kind: str, till: Till, log: Log, saver: Any) -> None:
    llm = model((call("charge", amount=10), call("ask", question="sure?")), "paid")
    tools = [wrapped(till.charge, CHARGE), ask]
    if kind == "create_agent":
        graph: Any = create_agent(llm, tools, checkpointer=saver)
    else:
        graph = hand_built(llm, tools, checkpointer=saver)
    paused = saga_run(graph, GO, thread(), log=log)
    assert paused["__interrupt__"][0].value == "sure?"
    assert state_of(log).status is SagaStatus.SUSPENDED and till.charged == [10]
    done = saga_run(graph, Command(resume="yes"), thread(), log=log)
    assert till.charged == [10] and till.refunded == []
    told = [message.content for message in done["messages"] if isinstance(message, ToolMessage)]
    assert told == [str(Receipt(id="ch-1", amount=10)), "they said yes"], "the record has another type than the result"
    state = state_of(log)
    assert state.status is SagaStatus.COMMITTED
    assert [(step.tool, step.status, step.attempts) for step in state.steps] == [("charge", StepStatus.DONE, 1)]


@pytest.mark.parametrize("kind", ["langchain tool", "saga_tool", "execute"])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_calls_of_a_node_that_is_interrupted_twice_are_each_made_once(
    kind: str, way: str, till: Till, log: Log
) -> None:
    from agent_saga_core import current_saga

    mail = wrapped(till.mail, MAIL)
    plain = saga_tool(name="mail", **MAIL)(lambda to: till.mail(to))

    def send(to: str) -> str:
        if kind == "langchain tool":
            return mail.invoke({"to": to})
        if kind == "saga_tool":
            return plain(to)
        saga = current_saga()
        assert saga is not None
        return saga.execute("mail", till.mail, args={"to": to}, **MAIL)

    def node(state: Noted) -> Noted:
        noted = [send("a"), interrupt("first"), send("b"), interrupt("second"), send("c")]
        return {"noted": noted}

    graph = chain(node, state=Noted, checkpointer=InMemorySaver())

    def run(given: Any) -> Any:
        if way == "sync":
            return saga_run(graph, given, thread(), log=log)
        return asyncio.run(asaga_run(graph, given, thread(), log=log))

    assert run(EMPTY)["__interrupt__"][0].value == "first" and till.mailed == ["a"]
    assert run(Command(resume=1))["__interrupt__"][0].value == "second" and till.mailed == ["a", "b"]
    assert run(Command(resume=2))["noted"] == ["sent to a", 1, "sent to b", 2, "sent to c"]
    assert till.mailed == ["a", "b", "c"] and state_of(log).status is SagaStatus.COMMITTED
    assert [step.tool for step in state_of(log).steps] == ["mail"] * 3


def test_a_call_that_did_nothing_is_told_to_the_model_which_may_try_another(till: Till, log: Log) -> None:
    def refuse(amount: int) -> None:
        if amount > 50:
            till.charged.pop()
            raise NotApplied("the card takes no more than 50")

    till.after = refuse
    llm = model(call("charge", amount=99), call("charge", amount=50), "paid")
    graph = hand_built(llm, [wrapped(till.charge, CHARGE)], handle_tool_errors=True)
    saga_run(graph, GO, log=log)
    assert "no more than 50" in llm.script.heard[0] and till.charged == [50]
    state = state_of(log)
    assert state.status is SagaStatus.COMMITTED
    assert [step.status for step in state.steps] == [StepStatus.NOT_APPLIED, StepStatus.DONE]


def test_after_a_call_that_may_have_landed_nothing_more_is_done_whatever_the_agent_says(till: Till, log: Log) -> None:
    def lose(amount: int) -> None:
        if amount == 20:
            raise RuntimeError("no answer")

    till.after = lose
    llm = model(call("charge", amount=10), call("charge", amount=20), call("mail", to="a"), "all is well, done")
    tools = [wrapped(till.charge, CHARGE), wrapped(till.mail, MAIL)]
    graph = hand_built(llm, tools, handle_tool_errors=True)
    with pytest.raises(RollbackIncomplete) as incomplete:
        saga_run(graph, GO, log=log)
    assert [step.tool for step in incomplete.value.report.remaining] == ["charge"]
    assert till.mailed == [] and till.refunded == ["ch-1"]
    assert "no answer" in llm.script.heard[1] and "no further tool calls are accepted" in llm.script.heard[2]
    assert llm.script.played == 4, "the agent was stopped before it said that it was done"


def test_a_model_that_does_not_listen_is_stopped_after_three_refusals(till: Till, log: Log) -> None:
    def lose(amount: int) -> None:
        raise RuntimeError("no answer")

    def on_and_on() -> Any:
        yield call("charge", amount=20)
        while True:
            yield call("mail", to="a")

    till.after = lose
    llm = ScriptedModel(script=Script(on_and_on()))
    graph = hand_built(llm, [wrapped(till.charge, CHARGE), wrapped(till.mail, MAIL)], handle_tool_errors=True)
    with pytest.raises(RollbackIncomplete) as incomplete:
        saga_run(graph, GO, log=log)
    assert isinstance(incomplete.value.__cause__, SagaAborted)
    assert till.mailed == [] and llm.script.played == 4


def test_a_model_that_does_not_listen_is_stopped_where_saga_functions_are_called_in_tools_too(
    till: Till, log: Log
) -> None:
    plain = saga_tool(**MAIL)(till.mail)

    @tool
    def send(to: str) -> str:
        """Send a mail."""
        return plain(to)

    def on_and_on() -> Any:
        yield call("charge", amount=20)
        while True:
            yield call("send", to="a")

    def lose(amount: int) -> None:
        raise RuntimeError("no answer")

    till.after = lose
    llm = ScriptedModel(script=Script(on_and_on()))
    graph = hand_built(llm, [wrapped(till.charge, CHARGE), send], handle_tool_errors=True)
    with pytest.raises(RollbackIncomplete) as incomplete:
        saga_run(graph, GO, log=log)
    assert isinstance(incomplete.value.__cause__, SagaAborted)
    assert till.mailed == [] and llm.script.played == 4


def test_a_refusal_ends_a_run_whose_nodes_swallow_nothing_at_once(till: Till, log: Log) -> None:
    plain = saga_tool(**MAIL)(till.mail)

    def first(state: Noted) -> None:
        from agent_saga_core import current_saga

        saga = current_saga()
        assert saga is not None
        saga.abort("changed our mind")

    def second(state: Noted) -> None:
        plain("a")

    with pytest.raises(SagaAborted, match="changed our mind"):
        saga_run(chain(first, second, state=Noted), EMPTY, log=log)
    assert till.mailed == [] and state_of(log).status is SagaStatus.ROLLED_BACK


@pytest.mark.parametrize("kind", ["create_agent", "by hand"])
def test_two_agents_in_one_saga_may_number_their_calls_alike(kind: str, till: Till, log: Log) -> None:
    charge = wrapped(till.charge, CHARGE)

    def agent() -> Any:
        llm = model(call("charge", "call_0", amount=10), call("charge", "call_0", amount=10), "paid")
        return create_agent(llm, [charge]) if kind == "create_agent" else hand_built(llm, [charge])

    graph = StateGraph(MessagesState).add_node("one", agent()).add_node("two", agent())
    graph.add_edge(START, "one").add_edge("one", "two")
    saga_run(graph.compile(checkpointer=InMemorySaver()), GO, thread(), log=log)
    assert till.charged == [10] * 4 and till.refunded == []
    assert state_of(log).status is SagaStatus.COMMITTED and len(state_of(log).steps) == 4


def test_copies_of_a_node_are_told_apart_and_found_again(till: Till, log: Log, saver: Any) -> None:
    mail = wrapped(till.mail, MAIL)

    def plan(state: Noted) -> None:
        return None

    def work(state: Any) -> Noted:
        sent = mail.invoke({"to": "all"})
        return {"noted": [sent, interrupt("next?")] if state["n"] == 2 else [sent]}

    graph = StateGraph(Noted).add_node(plan).add_node(work).add_edge(START, "plan")
    graph.add_conditional_edges("plan", lambda _: [Send("work", {"n": n}) for n in range(3)], ["work"])
    compiled = graph.compile(checkpointer=saver)
    saga_run(compiled, EMPTY, thread(), log=log)
    assert till.mailed == ["all"] * 3
    saga_run(compiled, Command(resume="yes"), thread(), log=log)
    assert till.mailed == ["all"] * 3 and state_of(log).status is SagaStatus.COMMITTED


def test_calls_in_a_subgraph_that_waits_are_found_again(till: Till, log: Log, saver: Any) -> None:
    mail = wrapped(till.mail, MAIL)

    def before(state: Noted) -> None:
        mail.invoke({"to": "before"})

    def inside(state: Noted) -> Noted:
        mail.invoke({"to": "inside"})
        return {"noted": [interrupt("go on?")]}

    def outside(state: Noted) -> None:
        mail.invoke({"to": "outside"})

    graph = StateGraph(Noted).add_node("sub", chain(before, inside, state=Noted)).add_node(outside)
    graph.add_edge(START, "sub").add_edge("sub", "outside")
    compiled = graph.compile(checkpointer=saver)
    saga_run(compiled, EMPTY, thread(), log=log)
    saga_run(compiled, Command(resume="yes"), thread(), log=log)
    assert till.mailed == ["before", "inside", "outside"] and state_of(log).status is SagaStatus.COMMITTED


def test_calls_in_tasks_of_an_entrypoint_are_found_again(till: Till, log: Log, saver: Any) -> None:
    mail = wrapped(till.mail, MAIL)

    @task
    def send(to: str) -> str:
        return mail.invoke({"to": to})

    @task
    def send_and_ask(to: str) -> Any:
        mail.invoke({"to": to})
        return interrupt("ok?")

    @entrypoint(checkpointer=saver)
    def flow(names: list[str]) -> list[Any]:
        first = [send(name) for name in names]
        sent = [one.result() for one in first]
        mail.invoke({"to": "flow"})
        return [*sent, send_and_ask("asked").result()]

    saga_run(flow, ["a", "a"], thread(), log=log)
    assert sorted(till.mailed) == ["a", "a", "asked", "flow"]
    assert saga_run(flow, Command(resume="yes"), thread(), log=log) == ["sent to a", "sent to a", "yes"]
    assert sorted(till.mailed) == ["a", "a", "asked", "flow"] and state_of(log).status is SagaStatus.COMMITTED


def test_a_node_that_is_retried_meets_its_finished_calls_again(till: Till, log: Log) -> None:
    mail = wrapped(till.mail, MAIL)
    left = [ValueError("once")]

    def node(state: Noted) -> None:
        for to in "ab":
            mail.invoke({"to": to})
        if left:
            raise left.pop()

    policy = RetryPolicy(max_attempts=2, retry_on=ValueError, initial_interval=0, jitter=False)
    saga_run(chain(node, state=Noted, retry_policy=policy), EMPTY, log=log)
    assert till.mailed == ["a", "b"] and state_of(log).status is SagaStatus.COMMITTED


def test_a_tool_node_that_is_retried_does_not_make_finished_siblings_again(till: Till, log: Log) -> None:
    def refuse(amount: int) -> None:
        if len(till.charged) == 2:
            raise NotApplied("not now")

    till.after = refuse
    llm = model((call("charge", amount=1), call("charge", amount=2)), "paid")
    graph = StateGraph(MessagesState)
    from langgraph.prebuilt import ToolNode, tools_condition

    graph.add_node("model", lambda state: {"messages": [llm.invoke(state["messages"])]})
    policy = RetryPolicy(max_attempts=2, retry_on=NotApplied, initial_interval=0, jitter=False)
    graph.add_node("tools", ToolNode([wrapped(till.charge, CHARGE)]), retry_policy=policy)
    graph.add_edge(START, "model").add_conditional_edges("model", tools_condition).add_edge("tools", "model")
    saga_run(graph.compile(), GO, log=log)
    assert len(till.charged) == 3, "the one that had not happened was made again, and the other was not"
    state = state_of(log)
    assert state.status is SagaStatus.COMMITTED and sorted(step.attempts for step in state.steps) == [1, 2]


def test_a_call_that_middleware_retries_is_one_step(till: Till, log: Log) -> None:
    left = [NotApplied("busy"), NotApplied("busy")]

    def refuse(amount: int) -> None:
        if left:
            till.charged.pop()
            raise left.pop()

    till.after = refuse
    retry = ToolRetryMiddleware(max_retries=2, initial_delay=0, jitter=False)
    graph = create_agent(model(call("charge", amount=3), "paid"), [wrapped(till.charge, CHARGE)], middleware=[retry])
    saga_run(graph, GO, log=log)
    assert till.charged == [3]
    assert [(step.status, step.attempts) for step in state_of(log).steps] == [(StepStatus.DONE, 3)]


def test_a_saga_function_that_interrupts_itself_goes_on_under_its_key(till: Till, log: Log, saver: Any) -> None:
    keys: list[str] = []

    @saga_tool(**MAIL)
    def mail(to: str, *, idempotency_key: str) -> str:
        keys.append(idempotency_key)
        said = interrupt(f"send to {to}?")
        return till.mail(f"{to}: {said}")

    def node(state: Noted) -> Noted:
        return {"noted": [mail("a")]}

    graph = chain(node, state=Noted, checkpointer=saver)
    saga_run(graph, EMPTY, thread(), log=log)
    assert [step.status for step in state_of(log).steps] == [StepStatus.PAUSED] and till.mailed == []
    assert saga_run(graph, Command(resume="yes"), thread(), log=log)["noted"] == ["sent to a: yes"]
    assert len(keys) == 2 and len(set(keys)) == 1
    assert [(step.status, step.attempts) for step in state_of(log).steps] == [(StepStatus.DONE, 1)]


async def test_a_cancelled_run_undoes_what_finished_and_settles_what_ran(till: Till, log: Log) -> None:
    arrived = asyncio.Event()

    async def hold(to: str) -> str:
        """Send a mail that never ends."""
        till.mail(to)
        arrived.set()
        await asyncio.Event().wait()
        return "never"

    llm = model(call("charge", amount=10), call("hold", to="b"), "done")
    graph = create_agent(llm, [wrapped(till.charge, CHARGE), wrapped(hold, MAIL)])
    running = asyncio.create_task(asaga_run(graph, GO, log=log))
    await asyncio.wait_for(arrived.wait(), 30)
    running.cancel()
    await asyncio.wait({running}, timeout=30)
    assert running.cancelled()
    assert till.refunded == ["ch-1"] and till.unsent == ["b"]
    state = state_of(log)
    assert state.status is SagaStatus.ROLLED_BACK
    assert [step.history[0].status for step in state.steps] == [StepStatus.COMPENSATED] * 2


async def test_a_cancelled_call_that_cannot_be_settled_is_named(till: Till, log: Log) -> None:
    arrived = asyncio.Event()

    async def pay(amount: int) -> Receipt:
        """Pay, without an end."""
        till.charge(amount)
        arrived.set()
        await asyncio.Event().wait()
        raise AssertionError

    graph = create_agent(model((call("mail", to="a"), call("pay", amount=5)), "done"), [
        wrapped(till.mail, MAIL), wrapped(pay, CHARGE)
    ])  # fmt: skip
    running = asyncio.create_task(asaga_run(graph, GO, log=log, drain_timeout=0.0))
    await asyncio.wait_for(arrived.wait(), 30)
    running.cancel()
    await asyncio.wait({running}, timeout=30)
    assert running.cancelled()
    state = state_of(log)
    assert state.status is SagaStatus.NEEDS_ATTENTION and till.unsent == ["a"]
    assert [step.tool for step in state.report.remaining] == ["pay"]
