"""A person's yes for an IRREVERSIBLE call: bound to the exact call, asked for through LangGraph's interrupt()."""

from __future__ import annotations

import json
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphInterrupt
from langgraph.pregel import _retry
from langgraph.types import Command, RetryPolicy, interrupt
from langgraph_fakes import CHARGE, PRICE, Till, call, chain, hand_built, model, thread, wrapped

from agent_saga_core import (
    ApprovalRequired,
    Log,
    SagaStatus,
    StepStatus,
    list_sagas,
    read_saga,
    saga_scope,
    saga_tool,
)
from agent_saga_core.wrapping import CallSite, runner_of
from agent_saga_langgraph import approve, reject, saga_run
from agent_saga_langgraph.approvals import question

GO: Any = {"messages": [("user", "go")]}
KINDS = ["langchain tool", "saga_tool"]


class Noted(TypedDict, total=False):
    noted: Annotated[list[Any], add]


EMPTY: Any = {"noted": []}


def pricing(kind: str, till: Till) -> Any:
    """`set_price(10)` as one call without an argument's name."""
    if kind == "saga_tool":
        return saga_tool(**PRICE)(till.set_price)
    tool = wrapped(till.set_price, PRICE)
    return lambda price: tool.invoke({"price": price})


def the(log: Log) -> Any:
    (head,) = list_sagas(log)
    return read_saga(log, head.saga_id)


@pytest.mark.parametrize("kind", KINDS)
def test_the_question_is_plain_data_and_the_answer_names_the_call(kind: str, till: Till, log: Log, saver: Any) -> None:
    set_price = pricing(kind, till)

    def node(state: Noted) -> Noted:
        return {"noted": [set_price(10)]}

    graph = chain(node, state=Noted, checkpointer=saver)
    (asked,) = saga_run(graph, EMPTY, thread(), log=log)["__interrupt__"]
    assert json.loads(json.dumps(asked.value)) == asked.value
    assert {**asked.value, "token": "", "saga_id": ""} == {
        "kind": "agent_saga.approval",
        "tool": "set_price",
        "args": {"price": 10},
        "semantics": "IRREVERSIBLE",
        "saga_id": "",
        "token": "",
    }
    for answer in (True, "yes", {"approved": True}, {"token": "x", "approved": True}, {"token": 1}):
        (again,) = saga_run(graph, Command(resume=answer), thread(), log=log)["__interrupt__"]
        assert again.value["token"] == asked.value["token"] and "another call" in again.value["note"]
        assert till.priced == []
    assert saga_run(graph, Command(resume=approve(again)), thread(), log=log)["noted"] == [10]
    assert till.priced == [10] and the(log).status is SagaStatus.COMMITTED


@pytest.mark.parametrize("kind", KINDS)
def test_a_no_does_nothing_and_says_so(kind: str, till: Till, log: Log, saver: Any) -> None:
    set_price = pricing(kind, till)

    def node(state: Noted) -> Noted:
        try:
            return {"noted": [set_price(10)]}
        except ApprovalRequired as refused:
            return {"noted": [str(refused)]}

    graph = chain(node, state=Noted, checkpointer=saver)
    (asked,) = saga_run(graph, EMPTY, thread(), log=log)["__interrupt__"]
    done = saga_run(graph, Command(resume=reject(asked.value, "too cheap")), thread(), log=log)
    assert "was not approved" in done["noted"][0] and till.priced == []
    assert the(log).status is SagaStatus.COMMITTED
    assert [step.status for step in the(log).steps] == [StepStatus.NOT_APPLIED]


def test_a_yes_to_other_arguments_is_no_yes(till: Till, log: Log, saver: Any) -> None:
    quotes = [10]
    tool = wrapped(till.set_price, PRICE)

    def node(state: Noted) -> Noted:
        return {"noted": [tool.invoke({"price": quotes[-1]})]}

    graph = chain(node, state=Noted, checkpointer=saver)
    (asked,) = saga_run(graph, EMPTY, thread(), log=log)["__interrupt__"]
    quotes.append(99)
    (again,) = saga_run(graph, Command(resume=approve(asked)), thread(), log=log)["__interrupt__"]
    assert again.value["args"] == {"price": 99} and again.value["token"] != asked.value["token"]
    assert till.priced == []
    saga_run(graph, Command(resume=approve(again)), thread(), log=log)
    assert till.priced == [99]


@pytest.mark.parametrize("kind", ["create_agent", "by hand"])
def test_a_yes_to_a_call_that_a_person_then_edited_is_no_yes(kind: str, till: Till, log: Log, saver: Any) -> None:
    llm = model(call("set_price", "c1", price=10), "done")
    graph: Any = (create_agent if kind == "create_agent" else hand_built)(
        llm, [wrapped(till.set_price, PRICE)], checkpointer=saver
    )
    (asked,) = saga_run(graph, GO, thread(), log=log)["__interrupt__"]
    assert asked.value["args"] == {"price": 10}
    message = graph.get_state(thread()).values["messages"][-1]
    edited = message.model_copy(update={"tool_calls": [{**message.tool_calls[0], "args": {"price": 99}}]})
    graph.update_state(thread(), {"messages": [edited]}, as_node="model")
    (again,) = saga_run(graph, Command(resume=approve(asked)), thread(), log=log)["__interrupt__"]
    assert again.value["args"] == {"price": 99} and again.value["token"] != asked.value["token"]
    assert till.priced == []
    saga_run(graph, Command(resume=approve(again)), thread(), log=log)
    assert till.priced == [99] and the(log).status is SagaStatus.COMMITTED


def test_after_a_time_travel_the_old_yes_is_not_taken(till: Till, log: Log, saver: Any) -> None:
    tool = wrapped(till.set_price, PRICE)

    def node(state: Noted) -> Noted:
        return {"noted": [tool.invoke({"price": 10})]}

    graph = chain(node, state=Noted, checkpointer=saver)
    (asked,) = saga_run(graph, EMPTY, thread(), log=log)["__interrupt__"]
    old = graph.get_state(thread()).config
    saga_run(graph, Command(resume=approve(asked)), thread(), log=log)
    assert till.priced == [10]
    (fork,) = saga_run(graph, None, old, log=log)["__interrupt__"]
    assert fork.value["token"] != asked.value["token"]
    (still,) = saga_run(graph, Command(resume=approve(asked)), thread(), log=log)["__interrupt__"]
    assert still.value["token"] == fork.value["token"] and till.priced == [10]


def test_calls_that_wait_side_by_side_are_answered_by_interrupt_id(till: Till, log: Log, saver: Any) -> None:
    llm = model((call("set_price", price=1), call("set_price", price=2), call("charge", amount=5)), "done")
    graph: Any = create_agent(llm, [wrapped(till.set_price, PRICE), wrapped(till.charge, CHARGE)], checkpointer=saver)
    asked = saga_run(graph, GO, thread(), log=log)["__interrupt__"]
    assert sorted(one.value["args"]["price"] for one in asked) == [1, 2] and till.charged == [5]
    saga_run(graph, Command(resume={one.id: approve(one) for one in asked}), thread(), log=log)
    assert sorted(till.priced) == [1, 2] and till.charged == [5] and the(log).status is SagaStatus.COMMITTED


def test_calls_that_wait_in_one_task_are_asked_for_one_after_the_other(till: Till, log: Log, saver: Any) -> None:
    llm = model((call("set_price", price=1), call("set_price", price=2), call("set_price", price=3)), "done")
    graph = hand_built(llm, [wrapped(till.set_price, PRICE)], checkpointer=saver)
    found = saga_run(graph, GO, thread(), log=log)
    prices: list[int] = []
    for _ in range(3):
        (asked,) = found["__interrupt__"]
        prices.append(asked.value["args"]["price"])
        found = saga_run(graph, Command(resume=approve(asked)), thread(), log=log)
    assert "__interrupt__" not in found and sorted(prices) == sorted(till.priced) == [1, 2, 3]


def test_an_answer_that_another_call_of_the_task_came_upon_is_kept_for_its_own(
    till: Till, log: Log, saver: Any
) -> None:
    tool, order = wrapped(till.set_price, PRICE), [1, 2]

    def node(state: Noted) -> None:
        waiting: GraphInterrupt | None = None
        for price in order:  # as the parallel calls of a ToolNode, whose order nobody knows
            try:
                tool.invoke({"name": "set_price", "args": {"price": price}, "id": f"c{price}", "type": "tool_call"})
            except GraphInterrupt as pause:
                waiting = waiting or pause
        if waiting is not None:
            raise waiting

    graph = chain(node, state=Noted, checkpointer=saver)
    (asked,) = saga_run(graph, EMPTY, thread(), log=log)["__interrupt__"]
    assert asked.value["args"] == {"price": 1}
    order.reverse()
    (other,) = saga_run(graph, Command(resume=approve(asked)), thread(), log=log)["__interrupt__"]
    assert other.value["args"] == {"price": 2} and till.priced == [1]
    saga_run(graph, Command(resume=approve(other)), thread(), log=log)
    assert till.priced == [1, 2] and the(log).status is SagaStatus.COMMITTED


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_stays_with_its_question_when_the_task_asks_more(kind: str, till: Till, log: Log, saver: Any) -> None:
    set_price = pricing(kind, till)

    def node(state: Noted) -> Noted:
        return {"noted": [set_price(1), interrupt("name?"), set_price(2), interrupt("last?")]}

    graph = chain(node, state=Noted, checkpointer=saver)
    (one,) = saga_run(graph, EMPTY, thread(), log=log)["__interrupt__"]
    (name,) = saga_run(graph, Command(resume=approve(one)), thread(), log=log)["__interrupt__"]
    assert name.value == "name?" and till.priced == [1]
    (two,) = saga_run(graph, Command(resume="Ann"), thread(), log=log)["__interrupt__"]
    assert two.value["args"] == {"price": 2}
    (last,) = saga_run(graph, Command(resume=approve(two)), thread(), log=log)["__interrupt__"]
    assert last.value == "last?"
    assert saga_run(graph, Command(resume="end"), thread(), log=log)["noted"] == [1, "Ann", 2, "end"]
    assert till.priced == [1, 2]


@pytest.mark.skipif(
    not hasattr(_retry, "_reset_interrupt_counter"),
    reason="this LangGraph does not begin anew with its answers when it retries a task, and asks again",
)
def test_a_retried_task_takes_its_answers_again(till: Till, log: Log) -> None:
    tool, left = wrapped(till.set_price, PRICE), [ValueError("once")]

    def node(state: Noted) -> Noted:
        noted = [tool.invoke({"price": 1}), interrupt("name?")]
        if left:
            raise left.pop()
        return {"noted": noted}

    policy = RetryPolicy(max_attempts=2, retry_on=ValueError, initial_interval=0, jitter=False)
    graph = chain(node, state=Noted, checkpointer=InMemorySaver(), retry_policy=policy)
    (asked,) = saga_run(graph, EMPTY, thread(), log=log)["__interrupt__"]
    saga_run(graph, Command(resume=approve(asked)), thread(), log=log)
    assert saga_run(graph, Command(resume="Ann"), thread(), log=log)["noted"] == [1, "Ann"]
    assert till.priced == [1]


@pytest.mark.promise("replay-not-rerun")
def test_a_question_is_asked_again_in_each_execution_with_the_same_token(till: Till, log: Log, saver: Any) -> None:
    tool = wrapped(till.set_price, PRICE)

    def node(state: Noted) -> Noted:
        by_id = {"name": tool.name, "args": {"price": 20}, "id": "c1", "type": "tool_call"}
        return {"noted": [tool.invoke({"price": 10}), tool.invoke({"price": 10}), tool.invoke(by_id).content]}

    graph = chain(node, state=Noted, checkpointer=saver)
    result = saga_run(graph, EMPTY, thread(), log=log)
    tokens: list[str] = []
    for n in range(3):
        assert len(till.priced) == n
        (asked,) = result["__interrupt__"]
        tokens.append(asked.value["token"])
        (again,) = saga_run(graph, Command(resume="what?"), thread(), log=log)["__interrupt__"]
        assert again.value["token"] == asked.value["token"]
        result = saga_run(graph, Command(resume=approve(again)), thread(), log=log)
    assert len(set(tokens)) == 3 and till.priced == [10, 10, 20] and result["noted"] == [10, 10, "20"]
    assert the(log).status is SagaStatus.COMMITTED


def test_a_question_about_arguments_that_the_step_refuses_is_not_asked(till: Till, log: Log) -> None:
    runner = runner_of(wrapped(till.set_price, PRICE))
    assert runner is not None
    here = CallSite("langgraph", "task")
    with saga_scope(log=log) as saga:
        assert question(runner.spec, saga, {"price": object()}, here) is None
        one, other = (question(runner.spec, saga, {"price": 1, "password": word}, here) for word in ("xyzzy", "plugh"))
    assert one is not None and "xyzzy" not in str(one.args) and other is not None and one.token != other.token


def test_a_gate_of_ones_own_is_asked_instead(till: Till, log: Log, saver: Any) -> None:
    asked: list[Any] = []

    def gate(request: Any) -> bool:
        asked.append(request.args)
        return True

    graph: Any = create_agent(
        model(call("set_price", price=7), "done"), [wrapped(till.set_price, PRICE)], checkpointer=saver
    )
    saga_run(graph, GO, thread(), log=log, approve=gate)
    assert asked == [{"price": 7}] and till.priced == [7]


def test_where_nobody_can_be_asked_the_call_is_refused(till: Till, log: Log) -> None:
    graph: Any = create_agent(model(call("set_price", price=7), "done"), [wrapped(till.set_price, PRICE)])
    with pytest.raises(ApprovalRequired, match="approve="):
        saga_run(graph, GO, log=log)
    assert till.priced == [] and the(log).status is SagaStatus.ROLLED_BACK


def test_secrets_are_not_shown_to_the_person_who_is_asked(till: Till, log: Log, saver: Any) -> None:
    def publish(text: str, api_key: str) -> str:
        """Publish a text."""
        till.mail(api_key)
        return text

    tool = wrapped(publish, PRICE)

    def node(state: Noted) -> Noted:
        return {"noted": [tool.invoke({"text": "hello", "api_key": "sk-5ecret"})]}

    graph = chain(node, state=Noted, checkpointer=saver)
    (asked,) = saga_run(graph, EMPTY, thread(), log=log)["__interrupt__"]
    assert "sk-5ecret" not in json.dumps(asked.value) and asked.value["args"]["text"] == "hello"
    saga_run(graph, Command(resume=approve(asked)), thread(), log=log)
    assert till.mailed == ["sk-5ecret"]


def test_what_asks_for_no_approval_is_answered_by_no_approval() -> None:
    for other in ("sure?", {"kind": "other", "token": "x"}, {"kind": "agent_saga.approval"}, None):
        with pytest.raises(ValueError, match="does not ask"):
            approve(other)
        with pytest.raises(ValueError, match="does not ask"):
            reject(question)
