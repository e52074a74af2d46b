"""Which saga a run of a thread belongs to: resume, fork, human edits, and what may not be resumed."""

from __future__ import annotations

import asyncio
import inspect
import logging
from contextlib import suppress
from operator import add
from typing import Annotated, Any, TypedDict

import aiosqlite
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.errors import GraphDrained
from langgraph.graph import START, StateGraph
from langgraph.runtime import RunControl
from langgraph.types import Command, interrupt
from langgraph_fakes import CHARGE, MAIL, Till, call, chain, hand_built, model, thread, wrapped
from pydantic import BaseModel, ValidationError

from agent_saga_core import (
    DeclarationError,
    IdempotencyConflict,
    Log,
    RollbackIncomplete,
    SagaAborted,
    SagaBusy,
    SagaNotFound,
    SagaNotRunning,
    SagaStatus,
    current_saga,
    list_sagas,
    open_log,
    read_saga,
    recover,
    saga_scope,
    saga_tool,
)
from agent_saga_langgraph import asaga_run, asaga_stream, saga_run, saga_stream

GO: Any = {"messages": [("user", "go")]}


class Noted(TypedDict, total=False):
    noted: Annotated[list[Any], add]


EMPTY: Any = {"noted": []}


def charge_then_ask(till: Till, saver: Any, **compile_args: Any) -> Any:
    """Charges, then asks, then mails; `till.charged` and `till.mailed` say what was done."""
    charge, mail = wrapped(till.charge, CHARGE), wrapped(till.mail, MAIL)

    def pay(state: Noted) -> None:
        charge.invoke({"amount": 10})

    def confirm(state: Noted) -> Noted:
        return {"noted": [interrupt("sure?")]}

    def tell(state: Noted) -> None:
        mail.invoke({"to": "you"})

    graph = StateGraph(Noted)
    before = START
    for fn in (pay, confirm, tell):
        graph.add_node(fn.__name__, fn)
        graph.add_edge(before, fn.__name__)
        before = fn.__name__
    return graph.compile(checkpointer=saver, **compile_args)


def sagas(log: Log) -> list[SagaStatus]:
    """The status of each saga, in the order in which they began."""
    return [head.status for head in sorted(list_sagas(log), key=lambda head: head.started)]


def at(graph: Any, name: str, config: Any | None = None) -> Any:
    """The config of the oldest checkpoint that has this node next."""
    return [state for state in graph.get_state_history(config or thread()) if name in state.next][-1].config


def the_saga(graph: Any) -> str:
    """The saga's id, as a new process finds it."""
    return graph.get_state(thread()).metadata["saga_id"]


# --- the saga of a thread


def test_the_id_stands_in_the_thread_and_the_callers_config_is_untouched(till: Till, log: Log, saver: Any) -> None:
    graph, config = charge_then_ask(till, saver), {**thread(), "metadata": {"mine": 1}}
    before = repr(config)
    saga_run(graph, EMPTY, config, log=log, metadata={"for": "you"})
    assert repr(config) == before
    metadata = graph.get_state(thread()).metadata
    assert metadata["saga_id"] == list_sagas(log)[0].saga_id and metadata["mine"] == 1
    state = read_saga(log, metadata["saga_id"])
    assert state.metadata == {"for": "you", "thread_id": "t"} and state.status is SagaStatus.SUSPENDED


def test_new_input_is_a_new_saga_and_none_or_an_answer_goes_on(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log, saga_id="first")
    saga_run(graph, None, thread(), log=log)  # asks again
    assert sagas(log) == [SagaStatus.SUSPENDED] and till.charged == [10]
    saga_run(graph, Command(resume="yes"), thread(), log=log)
    assert sagas(log) == [SagaStatus.COMMITTED]
    saga_run(graph, EMPTY, thread(), log=log, saga_id="second")
    assert sagas(log) == [SagaStatus.COMMITTED, SagaStatus.SUSPENDED]
    assert till.charged == [10, 10] and till.mailed == ["you"] and till.refunded == []


def test_the_async_entries_find_it_too(till: Till, log: Log) -> None:
    async def both() -> None:
        graph = charge_then_ask(till, InMemorySaver())
        await asaga_run(graph, EMPTY, thread(), log=log)
        assert sagas(log) == [SagaStatus.SUSPENDED]
        await asaga_run(graph, Command(resume="yes"), thread(), log=log)

    asyncio.run(both())
    assert sagas(log) == [SagaStatus.COMMITTED] and till.charged == [10] and till.mailed == ["you"]


@pytest.mark.skipif(
    "is_alive" in inspect.getsource(AsyncSqliteSaver.setup) and not hasattr(aiosqlite.Connection, "is_alive"),
    reason="this langgraph-checkpoint-sqlite does not work with this aiosqlite",
)
async def test_an_async_checkpointer_is_all_that_the_async_entries_need(till: Till, log: Log) -> None:
    charge, mail = wrapped(till.charge, CHARGE), wrapped(till.mail, MAIL)

    async def pay(state: Noted) -> None:
        await charge.ainvoke({"amount": 10})

    async def confirm(state: Noted) -> Noted:
        await mail.ainvoke({"to": "you"})
        return {"noted": [interrupt("sure?")]}

    async with AsyncSqliteSaver.from_conn_string(":memory:") as saver:
        graph = StateGraph(Noted).add_node(pay).add_node(confirm).add_edge(START, "pay").add_edge(START, "confirm")
        compiled = graph.compile(checkpointer=saver)
        await asaga_run(compiled, EMPTY, thread(), log=log)
        await compiled.aupdate_state(thread(), {"noted": ["edit"]}, as_node=START)
        async for _ in asaga_stream(compiled, None, thread(), log=log):
            pass
        assert sagas(log) == [SagaStatus.SUSPENDED]
        await asaga_run(compiled, Command(resume="yes"), thread(), log=log)
    assert sagas(log) == [SagaStatus.COMMITTED] and till.charged == [10] and till.mailed == ["you"]


def test_breakpoints_suspend_as_interrupts_do(till: Till, log: Log, saver: Any) -> None:
    mail = wrapped(till.mail, MAIL)

    def first(state: Noted) -> None:
        mail.invoke({"to": "a"})

    def second(state: Noted) -> None:
        mail.invoke({"to": "b"})

    graph = StateGraph(Noted).add_node(first).add_node(second).add_edge(START, "first").add_edge("first", "second")
    compiled = graph.compile(checkpointer=saver, interrupt_before=["second"])
    assert "__interrupt__" not in saga_run(compiled, EMPTY, thread(), log=log)
    assert sagas(log) == [SagaStatus.SUSPENDED] and till.mailed == ["a"]
    saga_run(compiled, None, thread(), log=log)
    assert sagas(log) == [SagaStatus.COMMITTED] and till.mailed == ["a", "b"]


def test_without_a_checkpointer_an_interrupt_is_rolled_back_since_nobody_can_resume_it(till: Till, log: Log) -> None:
    with pytest.raises(SagaAborted, match="without a checkpointer"):
        saga_run(charge_then_ask(till, None), EMPTY, log=log)
    assert till.refunded == ["ch-1"] and sagas(log) == [SagaStatus.ROLLED_BACK]


def test_a_drained_run_is_suspended_and_goes_on(till: Till, log: Log, saver: Any) -> None:
    charge, control = wrapped(till.charge, CHARGE), RunControl()

    def pay(state: Noted) -> None:
        charge.invoke({"amount": 10})
        control.request_drain("maintenance")

    def more(state: Noted) -> None:
        charge.invoke({"amount": 20})

    graph = chain(pay, more, state=Noted, checkpointer=saver)
    with pytest.raises(GraphDrained):
        saga_run(graph, EMPTY, thread(), log=log, control=control)
    assert sagas(log) == [SagaStatus.SUSPENDED] and till.refunded == []
    saga_run(graph, None, thread(), log=log)
    assert sagas(log) == [SagaStatus.COMMITTED] and till.charged == [10, 20]


def test_a_failed_run_is_undone_and_its_thread_cannot_be_resumed(till: Till, log: Log, saver: Any) -> None:
    charge = wrapped(till.charge, CHARGE)

    def pay(state: Noted) -> None:
        charge.invoke({"amount": 10})

    def fail(state: Noted) -> None:
        raise LookupError("sold out")

    graph = chain(pay, fail, state=Noted, checkpointer=saver)
    with pytest.raises(LookupError, match="sold out"):
        saga_run(graph, EMPTY, thread(), log=log)
    assert till.refunded == ["ch-1"] and sagas(log) == [SagaStatus.ROLLED_BACK]
    with pytest.raises(SagaNotRunning) as refused:
        saga_run(graph, None, thread(), log=log)
    assert "new input" in "".join(refused.value.__notes__)
    assert till.charged == [10]
    with pytest.raises(LookupError):  # knowingly, as a saga of its own
        saga_run(graph, None, thread(), log=log, saga_id="again")
    assert read_saga(log, "again").metadata["forked_from"] != "again"


def test_a_finished_thread_has_nothing_to_resume(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log)
    done = saga_run(graph, Command(resume="yes"), thread(), log=log)
    assert saga_run(graph, None, thread(), log=log) == done
    assert sagas(log) == [SagaStatus.COMMITTED] and till.charged == [10] and till.mailed == ["you"]


def test_a_saga_that_is_in_no_log_here_is_not_begun_again(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log)
    other = open_log("memory:")
    with pytest.raises(SagaNotFound, match="begun with"):
        saga_run(graph, Command(resume="yes"), thread(), log=other)
    assert list_sagas(other) == [] and till.mailed == []


def test_an_id_that_is_not_the_threads_is_refused(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log, saga_id="mine")
    with pytest.raises(DeclarationError, match="'mine'"):
        saga_run(graph, Command(resume="yes"), thread(), log=log, saga_id="other")
    assert till.mailed == [] and sagas(log) == [SagaStatus.SUSPENDED]


def test_a_saga_whose_deadline_passed_was_rolled_back_and_takes_no_answer(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log, deadline=0.0)
    assert len(recover(log).recovered) == 1 and till.refunded == ["ch-1"]
    with pytest.raises(SagaNotRunning):
        saga_run(graph, Command(resume="yes"), thread(), log=log)
    assert till.mailed == [] and till.charged == [10]


def test_new_input_to_a_thread_that_waits_leaves_the_old_saga_and_says_so(
    till: Till, log: Log, saver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log, saga_id="left")
    with caplog.at_level(logging.WARNING, "agent_saga"):
        saga_run(graph, EMPTY, thread(), log=log, saga_id="new")
    assert [record.args for record in caplog.records] == [("left",)]
    assert sagas(log) == [SagaStatus.SUSPENDED] * 2 and the_saga(graph) == "new"


def test_an_orphan_is_left_to_its_thread_for_an_hour(till: Till, log: Log, saver: Any) -> None:
    saga_run(charge_then_ask(till, saver), EMPTY, thread(), log=log)
    start = log.read(list_sagas(log)[0].saga_id)[0]
    assert start.type == "START" and start.data["orphan_after"] == 3600.0


# --- two at once


def test_a_thread_that_was_taken_further_meanwhile_is_not_resumed(till: Till, log: Log, saver: Any) -> None:
    asked = list[str]()

    def node(state: Noted) -> Noted:
        first, second = interrupt("first?"), interrupt("second?")
        return {"noted": [first, second]}

    graph = chain(node, state=Noted, checkpointer=saver)
    saga_run(graph, EMPTY, thread(), log=log)

    class Late:
        """The graph, as a run sees it that looks before the other one, and resumes after it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(graph, name)

        def get_state(self, config: Any, *, subgraphs: bool = False) -> Any:
            state = graph.get_state(config, subgraphs=subgraphs)
            if not asked:
                asked.append("looked")
                saga_run(graph, Command(resume="one"), thread(), log=log)
            return state

    with pytest.raises(SagaBusy, match="further"):
        saga_run(Late(), Command(resume="one"), thread(), log=log)
    assert sagas(log) == [SagaStatus.SUSPENDED]
    assert saga_run(graph, Command(resume="two"), thread(), log=log)["noted"] == ["one", "two"]
    assert sagas(log) == [SagaStatus.COMMITTED]


def test_two_resumes_at_once_are_one(till: Till, log: Log, saver: Any) -> None:
    inner: list[BaseException] = []
    graph: Any = None

    def again(amount: int) -> None:
        if amount == 20:
            try:
                saga_run(graph, Command(resume="yes"), thread(), log=log)
            except SagaBusy as busy:
                inner.append(busy)

    charge = wrapped(till.charge, CHARGE)

    def node(state: Noted) -> None:
        interrupt("sure?")
        import threading

        runner = threading.Thread(target=again, args=(20,))
        runner.start()
        runner.join(30)
        charge.invoke({"amount": 20})

    graph = chain(node, state=Noted, checkpointer=saver)
    saga_run(graph, EMPTY, thread(), log=log)
    saga_run(graph, Command(resume="yes"), thread(), log=log)
    assert len(inner) == 1 and till.charged == [20] and sagas(log) == [SagaStatus.COMMITTED]


# --- time travel


def test_an_answer_for_the_past_is_refused_and_a_fork_asks_again(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log)
    saga_run(graph, Command(resume="yes"), thread(), log=log)
    first, old = the_saga(graph), at(graph, "confirm")
    assert till.mailed == ["you"]
    with pytest.raises(DeclarationError, match=r"Fork first: saga_run\(graph, None, old_config\)"):
        saga_run(graph, Command(resume="no"), old, log=log)
    assert sagas(log) == [SagaStatus.COMMITTED] and till.mailed == ["you"] and till.charged == [10]
    asked = saga_run(graph, None, old, log=log)
    assert asked["__interrupt__"][0].value == "sure?" and till.mailed == ["you"] and till.charged == [10]
    fork = the_saga(graph)
    state = read_saga(log, fork)
    assert fork != first and state.status is SagaStatus.SUSPENDED
    assert state.metadata["forked_from"] == first
    assert state.metadata["forked_at"] == old["configurable"]["checkpoint_id"]
    done = saga_run(graph, Command(resume="no"), thread(), log=log)
    assert done["noted"] == ["no"], "the answer of the past was taken"
    assert read_saga(log, fork).status is SagaStatus.COMMITTED


def test_a_no_where_there_once_was_a_yes_charges_nothing(till: Till, log: Log, saver: Any) -> None:
    charge = wrapped(till.charge, CHARGE)

    def pay(state: Noted) -> Noted:
        answer = interrupt("pay?")
        return {"noted": [charge.invoke({"amount": 10}).id if answer == "yes" else "declined"]}

    graph = chain(pay, state=Noted, checkpointer=saver)
    saga_run(graph, EMPTY, thread(), log=log)
    assert saga_run(graph, Command(resume="yes"), thread(), log=log)["noted"] == ["ch-1"]
    old = at(graph, "pay")
    with pytest.raises(DeclarationError, match="Fork first"):
        saga_run(graph, Command(resume="no"), old, log=log)
    assert till.charged == [10]
    assert saga_run(graph, None, old, log=log)["__interrupt__"][0].value == "pay?", "the stored yes was taken"
    assert till.charged == [10]
    assert saga_run(graph, Command(resume="no"), thread(), log=log)["noted"] == ["declined"]
    assert till.charged == [10] and till.refunded == [] and sagas(log) == [SagaStatus.COMMITTED] * 2


def test_the_heads_own_checkpoint_is_resumed_and_finished_tasks_are_not_repeated(
    till: Till, log: Log, saver: Any
) -> None:
    charge = wrapped(till.charge, CHARGE)
    ask = wrapped(till.mail, MAIL)

    def pay(state: Noted) -> None:
        charge.invoke({"amount": 10})

    def confirm(state: Noted) -> None:
        interrupt("sure?")
        ask.invoke({"to": "you"})

    graph = StateGraph(Noted).add_node(pay).add_node(confirm).add_edge(START, "pay").add_edge(START, "confirm")
    compiled = graph.compile(checkpointer=saver)
    saga_run(compiled, EMPTY, thread(), log=log)
    head = compiled.get_state(thread()).config
    saga_run(compiled, None, head, log=log)
    assert till.charged == [10]
    saga_run(compiled, Command(resume="yes"), head, log=log)
    assert till.charged == [10] and till.mailed == ["you"] and sagas(log) == [SagaStatus.COMMITTED]


def test_input_for_an_old_checkpoint_is_a_saga_that_says_where_it_was_forked(
    till: Till, log: Log, saver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log, saga_id="first")
    with caplog.at_level(logging.WARNING, "agent_saga"):
        saga_run(graph, EMPTY, at(graph, "pay"), log=log, saga_id="fork")
    assert [record.args for record in caplog.records] == [("first",)]
    assert read_saga(log, "fork").metadata["forked_from"] == "first"


def test_a_committed_saga_takes_no_new_call_whatever_its_thread_says(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log, saga_id="first")
    saga_run(graph, Command(resume="yes"), thread(), log=log)
    # As after a checkpointer that has lost the end of the run, and its log has not.
    graph.invoke(EMPTY, {**thread(), "metadata": {"saga_id": "first"}}, interrupt_before=["pay"])
    with pytest.raises(SagaNotRunning, match="COMMITTED") as refused:
        saga_run(graph, None, thread(), log=log)
    assert "undone" not in "".join(refused.value.__notes__)
    assert till.charged == [10] and sagas(log) == [SagaStatus.COMMITTED]


# --- human edits


def _asking(graph: Any) -> AIMessage:
    """The message whose calls wait."""
    return [one for one in graph.get_state(thread()).values["messages"] if isinstance(one, AIMessage)][-1]


@pytest.mark.parametrize("kind", ["create_agent", "by hand"])
def test_an_edit_goes_on_in_the_same_saga_and_repeats_nothing(kind: str, till: Till, log: Log, saver: Any) -> None:
    from langchain_core.tools import tool

    @tool
    def ask(question: str) -> str:
        """Ask a person."""
        return str(interrupt(question))

    llm = model((call("charge", amount=10), call("ask", question="sure?")), call("mail", to="you"), "paid")
    tools = [wrapped(till.charge, CHARGE), ask, wrapped(till.mail, MAIL)]
    graph: Any = (create_agent if kind == "create_agent" else hand_built)(llm, tools, checkpointer=saver)
    saga_run(graph, GO, thread(), log=log)
    for word in ("make haste", "please"):
        message = _asking(graph).model_copy(update={"content": word})
        graph.update_state(thread(), {"messages": [message]}, as_node="model")
        assert "saga_id" not in graph.get_state(thread()).metadata
    saga_run(graph, None, thread(), log=log)  # asks again
    assert till.charged == [10]
    saga_run(graph, Command(resume="yes"), thread(), log=log)
    assert till.charged == [10] and till.mailed == ["you"] and till.refunded == []
    assert sagas(log) == [SagaStatus.COMMITTED]


def test_an_edit_of_a_call_that_was_made_is_a_conflict(till: Till, log: Log, saver: Any) -> None:
    from langchain_core.tools import tool

    @tool
    def ask(question: str) -> str:
        """Ask a person."""
        return str(interrupt(question))

    llm = model((call("charge", "c", amount=10), call("ask", "a", question="sure?")), "paid")
    graph: Any = create_agent(llm, [wrapped(till.charge, CHARGE), ask], checkpointer=saver)
    saga_run(graph, GO, thread(), log=log)
    message = _asking(graph)
    calls = [{**made, "args": {"amount": 99}} if made["name"] == "charge" else made for made in message.tool_calls]
    edited = message.model_copy(update={"tool_calls": calls})
    graph.update_state(thread(), {"messages": [edited]}, as_node="model")
    with pytest.raises(IdempotencyConflict):
        saga_run(graph, Command(resume="yes"), thread(), log=log)
    assert till.charged == [10] and till.refunded == ["ch-1"]


def test_an_edit_of_a_finished_run_is_the_beginning_of_another_saga(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log, saga_id="first")
    saga_run(graph, Command(resume="yes"), thread(), log=log)
    graph.update_state(thread(), {"noted": ["again"]}, as_node="confirm")
    saga_run(graph, None, thread(), log=log)
    assert sagas(log) == [SagaStatus.COMMITTED] * 2 and till.mailed == ["you", "you"] and till.charged == [10]
    assert read_saga(log, the_saga(graph)).metadata["forked_from"] == "first"


def test_an_edit_of_an_old_checkpoint_is_a_fork(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log, saga_id="first")
    saga_run(graph, Command(resume="yes"), thread(), log=log)
    graph.update_state(at(graph, "confirm"), {"noted": ["otherwise"]})
    saga_run(graph, None, thread(), log=log, saga_id="fork")
    assert sagas(log) == [SagaStatus.COMMITTED, SagaStatus.SUSPENDED]
    assert read_saga(log, "fork").metadata["forked_from"] == "first" and till.charged == [10]


def test_an_edit_of_an_old_checkpoint_of_a_saga_that_waits_is_a_fork_too(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log, saga_id="first")
    graph.update_state(at(graph, "pay"), {"noted": ["otherwise"]}, as_node=START)
    saga_run(graph, None, thread(), log=log)
    assert sagas(log) == [SagaStatus.SUSPENDED] * 2 and till.charged == [10, 10]
    assert [len(read_saga(log, saga_id).steps) for saga_id in ("first", the_saga(graph))] == [1, 1]


def test_an_edit_around_a_subgraph_that_has_run_is_refused(till: Till, log: Log, saver: Any) -> None:
    mail = wrapped(till.mail, MAIL)

    def inside(state: Noted) -> None:
        mail.invoke({"to": "inside"})

    def confirm(state: Noted) -> Noted:
        return {"noted": [interrupt("sure?")]}

    graph = StateGraph(Noted).add_node("sub", chain(inside, confirm, state=Noted)).add_edge(START, "sub")
    compiled = graph.compile(checkpointer=saver)
    saga_run(compiled, EMPTY, thread(), log=log)
    compiled.update_state(thread(), {"noted": ["edit"]})
    with pytest.raises(DeclarationError, match="subgraph"):
        saga_run(compiled, Command(resume="yes"), thread(), log=log)
    assert till.mailed == ["inside"] and sagas(log) == [SagaStatus.SUSPENDED]


def test_an_edit_inside_a_subgraph_repeats_nothing(till: Till, log: Log, saver: Any) -> None:
    mail = wrapped(till.mail, MAIL)

    def inside(state: Noted) -> None:
        mail.invoke({"to": "inside"})

    def confirm(state: Noted) -> Noted:
        mail.invoke({"to": "confirm"})
        return {"noted": [interrupt("sure?")]}

    graph = StateGraph(Noted).add_node("sub", chain(inside, confirm, state=Noted)).add_edge(START, "sub")
    compiled = graph.compile(checkpointer=saver)
    saga_run(compiled, EMPTY, thread(), log=log)
    inner: Any = compiled.get_state(thread(), subgraphs=True).tasks[0].state
    compiled.update_state(inner.config, {"noted": ["edit"]})
    saga_run(compiled, Command(resume="yes"), thread(), log=log)
    assert till.mailed == ["inside", "confirm"] and sagas(log) == [SagaStatus.COMMITTED]


# --- inside of other sagas and graphs


@pytest.mark.parametrize("way", ["listed", "inferred"])
@pytest.mark.parametrize("more", [{}, {"key": "args.amount"}])
def test_effects_in_a_subgraph_that_keeps_nothing_are_refused_unless_their_key_finds_them(
    way: str, more: dict[str, Any], till: Till, log: Log, saver: Any
) -> None:
    charge = wrapped(till.charge, CHARGE, **more)

    def pay(state: Noted) -> None:
        charge.invoke({"amount": 10})

    sub = chain(pay, state=Noted, checkpointer=False)

    def around(state: Noted) -> Noted:
        sub.invoke(EMPTY)
        return {"noted": [interrupt("sure?")]}

    def first(state: Noted) -> Noted:
        return {"noted": [interrupt("sure?")]}

    if way == "inferred":
        graph = chain(around, state=Noted, checkpointer=saver)
    else:
        graph = StateGraph(Noted).add_node("sub", sub).add_node(first).add_edge(START, "sub").add_edge("sub", "first")
        graph = graph.compile(checkpointer=saver)
    if not more:
        with pytest.raises(DeclarationError, match="checkpointer=False"):
            saga_run(graph, EMPTY, thread(), log=log)
        assert till.charged == [] and sagas(log) == []
        return
    saga_run(graph, EMPTY, thread(), log=log)
    assert saga_run(graph, Command(resume="yes"), thread(), log=log)["noted"] == ["yes"]
    assert till.charged == [10] and sagas(log) == [SagaStatus.COMMITTED]


def test_inside_of_a_saga_a_run_is_part_of_it(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    with saga_scope("order", log=log):
        saga_run(graph, EMPTY, thread())
    assert sagas(log) == [SagaStatus.SUSPENDED] and the_saga(graph) == "order"
    with pytest.raises(SagaAborted, match="after all not"), saga_scope("order", log=log, resume="continue") as saga:
        saga_run(graph, Command(resume="yes"), thread())
        with pytest.raises(DeclarationError, match="another one"):
            saga_run(graph, EMPTY, thread(), saga_id="other")
        saga.abort("after all not")
    assert till.charged == [10] and till.refunded == ["ch-1"] and till.unsent == ["you"]


def test_a_run_inside_of_a_node_belongs_to_the_run_around_it(till: Till, log: Log, saver: Any) -> None:
    inner = charge_then_ask(till, None)

    def outer(state: Noted) -> Noted:
        return {"noted": saga_run(inner, EMPTY)["noted"]}

    graph = chain(outer, state=Noted, checkpointer=saver)
    saga_run(graph, EMPTY, thread(), log=log)
    assert sagas(log) == [SagaStatus.SUSPENDED] and till.refunded == []
    assert saga_run(graph, Command(resume="yes"), thread(), log=log)["noted"] == ["yes"]
    assert sagas(log) == [SagaStatus.COMMITTED] and till.charged == [10] and till.mailed == ["you"]


@pytest.mark.promise("no-false-clean")
@pytest.mark.parametrize("own", ["nothing", "its checkpointer", True])
def test_a_run_that_would_be_a_part_of_a_graph_without_a_saga_is_refused(
    own: Any, till: Till, log: Log, saver: Any
) -> None:
    inner = charge_then_ask(till, {"nothing": None, "its checkpointer": InMemorySaver()}.get(own, own))

    def outer(state: Noted) -> Noted:
        return {"noted": saga_run(inner, EMPTY, log=log)["noted"]}

    def streaming(state: Noted) -> Noted:
        return {"noted": [*saga_stream(inner, EMPTY, log=log)]}

    async def aouter(state: Noted) -> Noted:
        return {"noted": (await asaga_run(inner, EMPTY, log=log))["noted"]}

    async def astreaming(state: Noted) -> Noted:
        return {"noted": [piece async for piece in asaga_stream(inner, EMPTY, log=log)]}

    for node in (outer, streaming):
        with pytest.raises(DeclarationError, match="part of the graph around it"):
            chain(node, state=Noted, checkpointer=saver).invoke(EMPTY, thread())
    for anode in (aouter, astreaming):
        with pytest.raises(DeclarationError, match="part of the graph around it"):
            asyncio.run(chain(anode, state=Noted, checkpointer=InMemorySaver()).ainvoke(EMPTY, thread()))
    assert till.charged == [] and sagas(log) == []


def test_a_run_in_a_node_of_a_graph_without_a_saga_has_a_thread_of_its_own(till: Till, log: Log, saver: Any) -> None:
    inner = charge_then_ask(till, InMemorySaver())

    def outer(state: Noted) -> Noted:
        result = saga_run(inner, EMPTY, thread("own"), log=log)
        return {"noted": [result["__interrupt__"][0].value]}

    graph = chain(outer, state=Noted, checkpointer=saver)
    assert graph.invoke(EMPTY, thread()) == {"noted": ["sure?"]} and sagas(log) == [SagaStatus.SUSPENDED]
    assert saga_run(inner, Command(resume="yes"), thread("own"), log=log)["noted"] == ["yes"]
    assert sagas(log) == [SagaStatus.COMMITTED] and till.charged == [10] and till.mailed == ["you"]


@pytest.mark.parametrize("around", ["kept", "not kept"])
def test_a_run_that_keeps_nothing_in_a_node_of_a_graph_without_a_saga_is_a_saga_each_time(
    around: str, till: Till, log: Log, saver: Any
) -> None:
    inner = charge_then_ask(till, False if around == "kept" else None)

    def outer(state: Noted) -> Noted:
        return {"noted": saga_run(inner, EMPTY, log=log)["noted"]}

    graph = chain(outer, state=Noted, checkpointer=saver if around == "kept" else None)
    graph.invoke(EMPTY, thread())
    assert sagas(log) == [SagaStatus.ROLLED_BACK] and till.charged == [10] and till.refunded == ["ch-1"]
    if around == "kept":
        assert graph.invoke(Command(resume="yes"), thread())["noted"] == ["yes"]
        assert sorted(sagas(log)) == sorted([SagaStatus.ROLLED_BACK, SagaStatus.COMMITTED])
        assert till.charged == [10, 10] and till.refunded == ["ch-1"] and till.mailed == ["you"]


@pytest.mark.parametrize("kind", ["savepoint", "saga_scope"])
def test_a_savepoint_in_a_node_is_told_by_its_task_too(till: Till, log: Log, saver: Any, kind: str) -> None:
    mail, left = saga_tool(**MAIL)(till.mail), [LookupError("once")]

    def node(state: Noted) -> Noted:
        saga = current_saga()
        assert saga is not None
        opened = saga.savepoint if kind == "savepoint" else saga_scope
        with opened():
            mail("kept")
        with suppress(LookupError), opened():
            mail("undone")
            if left:
                raise left.pop()
        return {"noted": [interrupt("sure?")]}

    graph = chain(node, state=Noted, checkpointer=saver)
    saga_run(graph, EMPTY, thread(), log=log)
    assert till.mailed == ["kept", "undone"] and till.unsent == ["undone"]
    saga_run(graph, Command(resume="yes"), thread(), log=log)
    assert till.mailed == ["kept", "undone", "undone"] and till.unsent == ["undone"]
    assert sagas(log) == [SagaStatus.COMMITTED]


def test_nobody_is_asked_about_a_run_that_is_lost(till: Till, log: Log, saver: Any) -> None:
    def lose(amount: int) -> None:
        raise RuntimeError("no answer")

    till.after = lose
    heard = list[SagaAborted]()
    charge, price = wrapped(till.charge, CHARGE), wrapped(till.set_price, {"semantics": "IRREVERSIBLE"})

    def pay(state: Noted) -> None:
        with suppress(RuntimeError):
            charge.invoke({"amount": 1})

    def confirm(state: Noted) -> Noted:
        try:
            price.invoke({"price": 1})
        except SagaAborted as refused:
            heard.append(refused)
        return {"noted": [interrupt("sure?")]}

    with pytest.raises(RollbackIncomplete):
        saga_run(chain(pay, confirm, state=Noted, checkpointer=saver), EMPTY, thread(), log=log)
    assert len(heard) == 1 and till.priced == [] and sagas(log) == [SagaStatus.NEEDS_ATTENTION]


@pytest.mark.parametrize(("given", "used"), [({}, "sync"), ({"durability": "exit"}, "exit")])
def test_messages_are_stored_before_their_calls_are_made(
    given: Any, used: str, till: Till, log: Log, saver: Any
) -> None:
    graph, seen = charge_then_ask(till, saver), list[Any]()

    class Seen:
        def __getattr__(self, name: str) -> Any:
            return getattr(graph, name)

        def invoke(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs)
            return graph.invoke(*args, **kwargs)

    saga_run(Seen(), EMPTY, thread(), log=log, **given)
    assert seen == [{"durability": used}]
    saga_run(graph, Command(resume="yes"), thread(), log=log, **given)
    assert till.charged == [10] and sagas(log) == [SagaStatus.COMMITTED]


def test_a_run_that_is_made_again_under_its_id_gives_back_what_its_key_finds(till: Till, log: Log, saver: Any) -> None:
    charge = wrapped(till.charge, CHARGE, key="args.amount")

    def pay(state: Noted) -> Noted:
        return {"noted": [charge.invoke({"amount": 10}).id]}

    graph = chain(pay, state=Noted, checkpointer=saver)
    first = saga_run(graph, EMPTY, thread(), log=log, saga_id="order")
    assert saga_run(graph, EMPTY, thread("other"), log=log, saga_id="order") == first
    assert till.charged == [10] and sagas(log) == [SagaStatus.COMMITTED]


class Point(BaseModel):
    x: int


HAS_SCHEMAS = "response_schema" in inspect.signature(interrupt).parameters
SCHEMA: Any = {"response_schema": Point} if HAS_SCHEMAS else {}


@pytest.mark.parametrize("way", ["run", "async run", "stream", "async stream"])
@pytest.mark.parametrize("answer", ["which?", "what?"] if HAS_SCHEMAS else ["which?"])
def test_an_answer_that_the_graph_does_not_take_undoes_nothing(way: str, answer: str, till: Till, log: Log) -> None:
    charge, mail = wrapped(till.charge, CHARGE), wrapped(till.mail, MAIL)

    def pay(state: Noted) -> None:
        charge.invoke({"amount": 10})

    def one(state: Noted) -> Noted:
        mail.invoke({"to": "one"})
        said = interrupt("one?", **SCHEMA)
        return {"noted": [said.x if SCHEMA else said["x"]]}

    def two(state: Noted) -> Noted:
        return {"noted": [interrupt("two?")]}

    graph = StateGraph(Noted).add_node(pay).add_node(one).add_node(two)
    graph.add_edge(START, "pay").add_edge("pay", "one").add_edge("pay", "two")
    compiled = graph.compile(checkpointer=InMemorySaver())
    asked = {one.value: one.id for one in saga_run(compiled, EMPTY, thread(), log=log)["__interrupt__"]}
    # Either which question is answered is not said, or the answer does not fit the question's schema.
    given: Any = Command(resume="yes" if answer == "which?" else {asked["one?"]: "no point"})
    expected: type[Exception] = RuntimeError if answer == "which?" else ValidationError

    async def read() -> None:
        async for _ in asaga_stream(compiled, given, thread(), log=log):
            pass

    with pytest.raises(expected):
        if way == "run":
            saga_run(compiled, given, thread(), log=log)
        elif way == "async run":
            asyncio.run(asaga_run(compiled, given, thread(), log=log))
        elif way == "stream":
            list(saga_stream(compiled, given, thread(), log=log))
        else:
            asyncio.run(read())
    assert sagas(log) == [SagaStatus.SUSPENDED] and till.refunded == [] and till.unsent == []
    right: Any = Command(resume={asked["one?"]: {"x": 1}, asked["two?"]: 2})
    assert saga_run(compiled, right, thread(), log=log)["noted"] == [1, 2]
    assert sagas(log) == [SagaStatus.COMMITTED] and till.charged == [10] and till.mailed == ["one"]


def test_a_command_that_gives_a_finished_thread_more_to_do_is_a_new_saga(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log, saga_id="first")
    saga_run(graph, Command(goto="tell"), thread(), log=log)  # while it waits: the same saga
    assert [head.saga_id for head in list_sagas(log)] == ["first"] and till.mailed == ["you"]
    saga_run(graph, Command(resume="yes"), thread(), log=log)
    assert sagas(log) == [SagaStatus.COMMITTED] and till.mailed == ["you", "you"]
    saga_run(graph, Command(goto="tell"), thread(), log=log)
    assert sagas(log) == [SagaStatus.COMMITTED] * 2 and till.mailed == ["you"] * 3 and till.charged == [10]
    assert read_saga(log, the_saga(graph)).metadata["forked_from"] == "first"


def test_a_thread_that_cannot_be_read_a_second_time_undoes_nothing(till: Till, log: Log, saver: Any) -> None:
    graph, reads = charge_then_ask(till, saver), list[Any]()
    saga_run(graph, EMPTY, thread(), log=log)

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(graph, name)

        def get_state(self, config: Any, *, subgraphs: bool = False) -> Any:
            reads.append(sagas(log))
            if len(reads) > 2:
                raise ConnectionError("the database is away")
            return graph.get_state(config, subgraphs=subgraphs)

    with pytest.raises(ConnectionError):
        saga_run(Failing(), Command(resume="yes"), thread(), log=log)
    assert len(reads) == 3 and sagas(log) == [SagaStatus.SUSPENDED] and till.refunded == []
    saga_run(graph, Command(resume="yes"), thread(), log=log)
    assert sagas(log) == [SagaStatus.COMMITTED]


def test_a_graph_that_cannot_be_looked_into_undoes_nothing(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    saga_run(graph, EMPTY, thread(), log=log)
    with pytest.raises(DeclarationError, match="no graph and no tool"):
        saga_run(graph.with_retry(), Command(resume="yes"), thread(), log=log)
    assert sagas(log) == [SagaStatus.SUSPENDED] and till.refunded == []


def test_a_run_keeps_the_thread_that_it_is_given_whatever_surrounds_it(till: Till, log: Log, saver: Any) -> None:
    graph = charge_then_ask(till, saver)
    around = RunnableLambda(lambda given: saga_run(graph, EMPTY, thread("own"), log=log))
    around.invoke(None, thread("outer"))
    assert graph.get_state(thread("own")).next and not graph.get_state(thread("outer")).next
    assert saga_run(graph, Command(resume="yes"), thread("own"), log=log)["noted"] == ["yes"]
    assert sagas(log) == [SagaStatus.COMMITTED] and till.charged == [10]
