"""A saga that goes on at a checkpoint which another run wrote is found there again, by what resumes the thread."""

import logging
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from langgraph_fakes import CHARGE, Till, chain, thread, wrapped

from agent_saga_core import (
    DeclarationError,
    Log,
    SagaBusy,
    SagaNotRunning,
    SagaStatus,
    list_sagas,
    read_saga,
    undo,
)
from agent_saga_langgraph import asaga_run, saga_run, saga_stream


class Noted(TypedDict, total=False):
    noted: Annotated[list[Any], add]


EMPTY: Any = {"noted": []}
COMMITTED, SUSPENDED, ROLLED_BACK = SagaStatus.COMMITTED, SagaStatus.SUSPENDED, SagaStatus.ROLLED_BACK


class Desk:
    """A graph that begins, and then charges and asks; and what the log and the thread say of it."""

    def __init__(self, till: Till, log: Log, saver: Any) -> None:
        charge = wrapped(till.charge, CHARGE)
        self.till, self.log = till, log
        self.fails = False

        def begin(state: Noted) -> Noted:
            return {"noted": ["begun"]}

        def pay(state: Noted) -> Noted:
            charge.invoke({"amount": 10})
            if self.fails:
                raise LookupError("no")
            return {"noted": [interrupt("sure?")]}

        self.graph = chain(begin, pay, state=Noted, checkpointer=saver)
        more = StateGraph(Noted)
        more.add_node("begin", begin)
        more.add_node("pay", pay)
        more.add_edge(START, "begin")
        self.ended = more.compile(checkpointer=saver)
        """The same, in which only a `Command` comes to `pay`."""

    def run(self, given: Any, config: Any = None, *, graph: Any = None, **more: Any) -> Any:
        where = thread() if config is None else config
        return saga_run(graph or self.graph, given, where, log=self.log, **more)

    def sagas(self) -> list[SagaStatus]:
        return [head.status for head in sorted(list_sagas(self.log), key=lambda head: head.started)]

    def before(self, node: str) -> Any:
        """The config of the newest checkpoint that has this node next."""
        return next(state for state in self.graph.get_state_history(thread()) if state.next == (node,)).config


@pytest.fixture
def desk(till: Till, log: Log, saver: Any) -> Desk:
    """A desk of its own."""
    return Desk(till, log, saver)


def test_on_a_thread_that_no_saga_has_run_on(desk: Desk) -> None:
    list(desk.graph.stream(EMPTY, thread(), interrupt_before=["pay"]))
    desk.run(None)
    assert desk.sagas() == [SUSPENDED]
    assert desk.run(Command(resume="yes"))["noted"] == ["begun", "yes"]
    assert desk.sagas() == [COMMITTED] and desk.till.charged == [10]


def test_on_a_finished_thread_that_is_given_more_to_do(desk: Desk) -> None:
    desk.run(EMPTY, graph=desk.ended)
    desk.run(Command(goto="pay"), graph=desk.ended)
    assert desk.sagas() == [COMMITTED, SUSPENDED]
    assert desk.run(Command(resume="yes"), graph=desk.ended)["noted"] == ["begun", "yes"]
    assert desk.sagas() == [COMMITTED, COMMITTED] and desk.till.charged == [10]


def test_an_answer_is_not_taken_for_the_next_question_there(till: Till, log: Log, saver: Any) -> None:
    price = wrapped(till.set_price, {"semantics": "COMPENSABLE", "compensate": undo("till.unsend", to="args.price")})

    def begin(state: Noted) -> Noted:
        return {"noted": ["begun"]}

    def ask(state: Noted) -> Noted:
        first = interrupt("charge?")
        second = interrupt("really change the price?")
        return {"noted": [first, second, price.invoke({"price": 1})]}

    graph = StateGraph(Noted).add_node(begin).add_node(ask).add_edge(START, "begin").compile(checkpointer=saver)
    saga_run(graph, EMPTY, thread(), log=log)
    saga_run(graph, Command(goto="ask"), thread(), log=log)
    one, other = (saga_stream(graph, Command(resume="yes"), thread(), log=log) for _ in range(2))  # both have looked
    list(one)
    with pytest.raises(SagaBusy):
        list(other)
    assert till.priced == []
    assert saga_run(graph, Command(resume="no"), thread(), log=log)["noted"] == ["begun", "yes", "no", 1]


@pytest.mark.parametrize("edits", [1, 2])
def test_on_an_edit_of_a_finished_run(edits: int, desk: Desk) -> None:
    desk.run(EMPTY)
    desk.run(Command(resume="yes"))
    desk.graph.update_state(thread(), {"noted": ["edited"]}, as_node="begin")
    desk.run(None)
    if edits == 2:  # while the saga of the first one waits
        desk.graph.update_state(thread(), {"noted": ["again"]}, as_node="begin")
        desk.run(None)
    assert desk.run(Command(resume="yes"))["noted"][-1] == "yes"
    assert desk.sagas() == [COMMITTED, COMMITTED] and desk.till.charged == [10, 10]


@pytest.mark.parametrize("way", ["edited", "copied"])
def test_on_an_edit_or_a_copy_of_an_old_checkpoint(way: str, desk: Desk) -> None:
    desk.run(EMPTY)
    desk.run(Command(resume="yes"))
    if way == "edited":
        desk.graph.update_state(desk.before("pay"), {"noted": ["edited"]})
    else:
        desk.graph.update_state(desk.before("pay"), None, as_node="__copy__")
    desk.run(None)
    (fork,) = [head for head in list_sagas(desk.log) if head.status is SUSPENDED]
    assert read_saga(desk.log, fork.saga_id).metadata["forked_from"]
    desk.run(Command(resume="yes"))
    assert desk.sagas() == [COMMITTED, COMMITTED] and desk.till.charged == [10, 10]


def test_after_a_rollback_under_an_id_of_ones_own(desk: Desk) -> None:
    desk.fails = True
    with pytest.raises(LookupError):
        desk.run(EMPTY)
    desk.fails = False
    desk.run(None, saga_id="another")
    desk.run(Command(resume="yes"))  # which need not be named again
    assert desk.sagas() == [ROLLED_BACK, COMMITTED] and desk.till.charged == [10, 10]
    assert read_saga(desk.log, "another").status is COMMITTED and desk.till.refunded == ["ch-1"]


def test_what_was_rolled_back_there_is_not_gone_on_with(desk: Desk) -> None:
    desk.run(EMPTY, graph=desk.ended)
    desk.fails = True
    with pytest.raises(LookupError):
        desk.run(Command(goto="pay"), graph=desk.ended)
    desk.fails = False
    with pytest.raises(SagaNotRunning) as refused:  # the checkpoint holds writes of tasks whose effects were undone
        desk.run(None, graph=desk.ended)
    assert "Begin anew with new input" in refused.value.__notes__[0] and desk.till.charged == [10]


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_two_that_begin_there_at_once_are_one(desk: Desk) -> None:
    desk.run(EMPTY)
    desk.run(Command(resume="yes"))
    desk.graph.update_state(thread(), {"noted": ["edited"]}, as_node="begin")
    one, other = (saga_stream(desk.graph, None, thread(), log=desk.log) for _ in range(2))  # both have looked
    list(one)
    with pytest.raises(SagaBusy):
        list(other)
    assert desk.till.charged == [10, 10] and desk.sagas() == [COMMITTED, SUSPENDED, ROLLED_BACK]


@pytest.mark.parametrize("saver", ["memory"], indirect=True)
async def test_on_a_loop(desk: Desk) -> None:
    await desk.ended.ainvoke(EMPTY, thread())
    await asaga_run(desk.ended, Command(goto="pay"), thread(), log=desk.log)
    await asaga_run(desk.ended, Command(resume="yes"), thread(), log=desk.log)
    assert desk.sagas() == [COMMITTED] and desk.till.charged == [10]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_whenever_checkpoints_are_written(durability: str, desk: Desk) -> None:
    desk.run(EMPTY, graph=desk.ended, durability=durability)
    desk.run(Command(goto="pay"), graph=desk.ended, durability=durability)
    desk.run(Command(resume="yes"), graph=desk.ended, durability=durability)
    assert desk.sagas() == [COMMITTED, COMMITTED] and desk.till.charged == [10]


def test_a_checkpoint_that_the_graph_is_bound_to_is_no_other_than_one_in_the_config(desk: Desk) -> None:
    desk.run(EMPTY)
    waits = desk.graph.get_state(thread()).config
    bound = desk.graph.with_config(waits)
    desk.run(Command(resume="yes"), graph=bound, config={})  # it is the head: resumed
    assert desk.sagas() == [COMMITTED] and desk.till.charged == [10]
    with pytest.raises(DeclarationError, match="Fork first"):  # LangGraph would give it the old yes
        desk.run(Command(resume="no"), graph=bound, config={})
    desk.run(None, graph=bound, config={})
    assert desk.sagas() == [COMMITTED, SUSPENDED] and desk.till.charged == [10, 10]


def test_the_input_of_the_run_that_waits_goes_on_with_it(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    config: Any = {**thread(), "metadata": {"run_id": "run-1"}}
    desk.run(EMPTY, config)
    with caplog.at_level(logging.WARNING, "agent_saga"):
        desk.run(EMPTY, config)  # LangGraph resumes: it takes it for the same run, joined once more
    assert desk.sagas() == [SUSPENDED] and desk.till.charged == [10] and not caplog.records
    desk.run(EMPTY, {**thread(), "metadata": {"run_id": "run-2"}})
    assert desk.sagas() == [SUSPENDED, SUSPENDED] and desk.till.charged == [10, 10]
