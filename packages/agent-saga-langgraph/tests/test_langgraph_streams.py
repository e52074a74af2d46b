"""Runs that are read piece by piece: interrupts are seen whatever is streamed, and the reader's context is its own."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, closing
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphDrained
from langgraph.runtime import RunControl
from langgraph.types import Command, interrupt
from langgraph_fakes import CHARGE, MAIL, Till, chain, thread, wrapped

from agent_saga_core import (
    DeclarationError,
    Log,
    SagaAborted,
    SagaBusy,
    SagaNotRunning,
    SagaStatus,
    current_saga,
    list_sagas,
)
from agent_saga_langgraph import asaga_stream, saga_run, saga_stream


class Noted(TypedDict, total=False):
    noted: Annotated[list[Any], add]


EMPTY: Any = {"noted": []}
MODES: list[Any] = ["values", "updates", "custom", "debug", ["updates", "values"], "messages", "tasks", "checkpoints"]


def graph_of(till: Till, saver: Any) -> Any:
    charge, mail = wrapped(till.charge, CHARGE), wrapped(till.mail, MAIL)

    def pay(state: Noted) -> None:
        charge.invoke({"amount": 10})

    def confirm(state: Noted) -> Noted:
        return {"noted": [interrupt("sure?")]}

    def tell(state: Noted) -> None:
        mail.invoke({"to": "you"})

    return chain(pay, confirm, tell, state=Noted, checkpointer=saver)


def statuses(log: Log) -> list[SagaStatus]:
    return [head.status for head in sorted(list_sagas(log), key=lambda head: head.started)]


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_interrupt_suspends_whatever_is_streamed(mode: Any, way: str, till: Till, log: Log) -> None:
    graph = graph_of(till, InMemorySaver())
    plain = graph_of(Till(), InMemorySaver())

    async def read(stream: Any) -> list[Any]:
        return [piece async for piece in stream]

    def run(given: Any) -> list[Any]:
        if way == "sync":
            return list(saga_stream(graph, given, thread(), log=log, stream_mode=mode))
        return asyncio.run(read(asaga_stream(graph, given, thread(), log=log, stream_mode=mode)))

    pieces = run(EMPTY)
    assert len(pieces) == len(list(plain.stream(EMPTY, thread(), stream_mode=mode))), "the stream itself was changed"
    assert statuses(log) == [SagaStatus.SUSPENDED] and till.charged == [10] and till.refunded == []
    run(Command(resume="yes"))
    assert statuses(log) == [SagaStatus.COMMITTED] and till.charged == [10] and till.mailed == ["you"]


def test_the_readers_context_is_its_own_between_two_pieces(till: Till, log: Log) -> None:
    for _ in saga_stream(graph_of(till, InMemorySaver()), EMPTY, thread(), log=log):
        assert current_saga() is None

    async def read() -> None:
        stream = asaga_stream(graph_of(till, InMemorySaver()), EMPTY, thread(), log=log)
        async for _ in stream:
            assert current_saga() is None

    asyncio.run(read())


def test_a_stream_left_early_is_rolled_back(till: Till, log: Log) -> None:
    with closing(saga_stream(graph_of(till, InMemorySaver()), EMPTY, thread(), log=log)) as stream:
        next(stream)
    assert statuses(log) == [SagaStatus.ROLLED_BACK] and till.refunded == ["ch-1"]

    async def leave() -> None:
        async with aclosing(asaga_stream(graph_of(till, InMemorySaver()), EMPTY, thread(), log=log)) as pieces:
            await anext(pieces)

    asyncio.run(leave())
    assert statuses(log) == [SagaStatus.ROLLED_BACK] * 2 and till.refunded == ["ch-1", "ch-2"]


def test_a_stream_that_is_never_read_does_nothing(till: Till, log: Log) -> None:
    stream = saga_stream(graph_of(till, InMemorySaver()), EMPTY, thread(), log=log)
    stream.close()

    async def close() -> None:
        await asaga_stream(graph_of(till, InMemorySaver()), EMPTY, thread(), log=log).aclose()

    asyncio.run(close())
    assert list_sagas(log) == [] and till.charged == []


def test_without_a_checkpointer_an_interrupted_stream_is_rolled_back(till: Till, log: Log) -> None:
    with pytest.raises(SagaAborted, match="without a checkpointer"):
        list(saga_stream(graph_of(till, None), EMPTY, log=log, stream_mode="custom"))
    assert till.refunded == ["ch-1"]


def test_a_drained_stream_is_suspended(till: Till, log: Log) -> None:
    control, charge = RunControl(), wrapped(till.charge, CHARGE)

    def pay(state: Noted) -> None:
        charge.invoke({"amount": 1})
        control.request_drain()

    graph = chain(pay, lambda_of(charge), state=Noted, checkpointer=InMemorySaver())
    with pytest.raises(GraphDrained):
        list(saga_stream(graph, EMPTY, thread(), log=log, control=control))
    assert statuses(log) == [SagaStatus.SUSPENDED] and till.refunded == []

    async def rest() -> list[Any]:
        return [piece async for piece in asaga_stream(graph, None, thread(), log=log)]

    asyncio.run(rest())
    assert statuses(log) == [SagaStatus.COMMITTED] and till.charged == [1, 2]


def lambda_of(charge: Any) -> Any:
    def more(state: Noted) -> None:
        charge.invoke({"amount": 2})

    return more


def test_nothing_runs_in_a_stream_that_is_refused(till: Till, log: Log) -> None:
    graph = graph_of(till, InMemorySaver())
    saga_run(graph, EMPTY, thread(), log=log)
    old = graph.get_state(thread()).config
    saga_run(graph, Command(resume="yes"), thread(), log=log)
    with pytest.raises(DeclarationError, match="Fork first"):
        saga_stream(graph, Command(resume="no"), old, log=log)

    async def read() -> None:
        with pytest.raises(DeclarationError, match="Fork first"):
            async for _ in asaga_stream(graph, Command(resume="no"), old, log=log):
                raise AssertionError

    asyncio.run(read())
    assert till.mailed == ["you"] and statuses(log) == [SagaStatus.COMMITTED]


def test_what_happens_between_look_up_and_first_piece_is_seen(till: Till, log: Log) -> None:
    graph = graph_of(till, InMemorySaver())
    saga_run(graph, EMPTY, thread(), log=log)
    stream = saga_stream(graph, Command(resume="late"), thread(), log=log)
    saga_run(graph, Command(resume="first"), thread(), log=log)
    with pytest.raises(SagaBusy):
        list(stream)
    assert graph.get_state(thread()).values["noted"] == ["first"] and till.mailed == ["you"]
    assert statuses(log) == [SagaStatus.COMMITTED]


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_rolled_back_saga_is_refused_with_the_way_out(way: str, till: Till, log: Log) -> None:
    graph = graph_of(till, InMemorySaver())
    with closing(saga_stream(graph, EMPTY, thread(), log=log)) as stream:
        next(stream)

    async def read() -> None:
        async for _ in asaga_stream(graph, None, thread(), log=log):
            raise AssertionError

    with pytest.raises(SagaNotRunning) as refused:
        list(saga_stream(graph, None, thread(), log=log)) if way == "sync" else asyncio.run(read())
    assert "new input" in "".join(refused.value.__notes__)


async def test_who_is_told_that_a_stream_is_being_read_has_changed_nothing(till: Till, log: Log) -> None:
    gate, inside = asyncio.Event(), asyncio.Event()
    charge = wrapped(till.charge, CHARGE)

    async def pay(state: Noted) -> None:
        await charge.ainvoke({"amount": 10})

    async def think(state: Noted) -> Noted:
        inside.set()
        await gate.wait()
        return {"noted": ["thought"]}

    stream = asaga_stream(chain(pay, think, state=Noted, checkpointer=InMemorySaver()), EMPTY, thread(), log=log)

    async def read() -> list[Any]:
        return [piece async for piece in stream]

    async with asyncio.timeout(20):
        first = asyncio.create_task(read())
        await inside.wait()
        with pytest.raises(RuntimeError, match="nothing was changed"):
            await stream.aclose()
        gate.set()
        assert (await first)[-1] == {"think": {"noted": ["thought"]}}
    assert statuses(log) == [SagaStatus.COMMITTED] and till.refunded == []


class Awaited(InMemorySaver):
    """A checkpointer that answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def aget_tuple(self, config: Any) -> Any:
        self.asked.set()
        await self.let.wait()
        return await super().aget_tuple(config)


@pytest.mark.parametrize("second", ["read", "close"])
async def test_while_the_thread_is_looked_up_no_second_run_begins_and_none_after_the_end(
    second: str, till: Till, log: Log
) -> None:
    saver = Awaited()
    stream = asaga_stream(graph_of(till, saver), EMPTY, thread(), log=log)
    async with asyncio.timeout(20):
        first = asyncio.ensure_future(anext(stream))
        await saver.asked.wait()
        other = asyncio.ensure_future(anext(stream) if second == "read" else stream.aclose())
        await asyncio.wait({other}, timeout=0)
        saver.let.set()
        heard = await asyncio.gather(first, other, return_exceptions=True)
        await stream.aclose()
    if second == "read":
        assert heard[0] == {"pay": None} and isinstance(heard[1], RuntimeError)
        assert till.charged == [10] and till.refunded == ["ch-1"] and statuses(log) == [SagaStatus.ROLLED_BACK]
    else:
        assert isinstance(heard[0], StopAsyncIteration) and heard[1] is None
        assert till.charged == [] and list_sagas(log) == []
