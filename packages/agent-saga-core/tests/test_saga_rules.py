"""Rules of `docs/design.md` that nothing else would miss: each test fails without its rule."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from agent_saga_core import (
    ActionSemantics,
    FileLog,
    LogUnavailable,
    MemoryLog,
    NotApplied,
    RollbackIncomplete,
    SagaStatus,
    StepStatus,
    compensator,
    current_saga,
    delete_by,
    read_saga,
    recover,
    saga_scope,
    undo,
)
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing import ManualClock

C = ActionSemantics.COMPENSABLE
DAY = 86_400.0


class Died(BaseException):
    """Ends a body as the death of its process does."""


class Lost(Exception):
    pass


@pytest.fixture(autouse=True)
def names():
    with isolated_registry():
        yield


@pytest.fixture
def clock():
    return ManualClock(auto=True)


@pytest.fixture
def log(clock):
    return MemoryLog(clock)


def _pay(saga, how, forward=lambda idempotency_key: {"id": idempotency_key}, **more):
    return saga.execute("pay", forward, semantics=C, compensate=how, **more)


def test_the_keys_of_one_id_are_not_those_of_another_saga(clock):
    """Rule 2: the nonce is drawn at START. An id used again, in another log or after compaction, is another saga."""

    @compensator("back")
    def back(key: str) -> None: ...

    keys = set()
    for log in (MemoryLog(clock), MemoryLog(clock)):
        with saga_scope("order-7", log=log) as saga:
            _pay(saga, undo(back, key="result.id"))
        keys |= {saga.steps[0].forward_key, saga.steps[0].compensation_key}
    assert len(keys) == 4


def test_a_refused_key_is_as_old_as_itself(log, clock):
    """Rule 6: what was refused under one key says nothing about the age of the next one."""
    tried = []

    @compensator("back")
    def back(*, idempotency_key: str) -> None:
        tried.append(idempotency_key)
        if len(tried) == 1:
            clock.advance(2 * DAY)  # the answer is long in coming: nothing was done
            raise NotApplied
        if len(tried) == 2:
            log.crash()
            raise Died

    with pytest.raises(BaseException), saga_scope("s", log=log) as saga:  # noqa: B017
        _pay(saga, undo(back))
        raise Lost
    assert len(tried) == 2
    after = MemoryLog(clock, store=log.store)
    assert recover(after).recovered == ("s",)
    assert tried[2] == tried[1] != tried[0]


def test_a_moment_that_another_process_stored_is_not_waited_for(clock, log):
    """Rule 6: clocks are not compared. The pause before the next try is two seconds, whatever hour it was there."""
    tried = []

    @compensator("back")
    def back(key: str) -> None:
        tried.append(key)
        if len(tried) == 1:
            raise Lost
        if len(tried) == 2:
            log.crash()
            raise Died

    clock.set_wall(clock.time() + 3600)
    with pytest.raises(BaseException), saga_scope("s", log=log) as saga:  # noqa: B017
        _pay(saga, undo(back, key="result.id"))
        raise Lost
    assert len(tried) == 2
    clock.set_wall(clock.time() - 3600)
    began = clock.monotonic()
    assert recover(MemoryLog(clock, store=log.store)).recovered == ("s",)
    assert clock.monotonic() - began <= 2.0


def test_what_a_tool_made_of_a_timeout_is_still_no_answer(clock, log):
    """Rule 5: the causes of an error count. A tool that wraps a lost connection has heard nothing either."""
    undone_at = []

    @compensator("remove")
    def remove(key: str) -> None:
        undone_at.append(clock.monotonic())

    def lose(idempotency_key):
        try:
            raise TimeoutError
        except TimeoutError as error:
            raise Lost from error

    began = clock.monotonic()
    with saga_scope("s", log=log) as saga:
        with pytest.raises(Lost):
            _pay(saga, delete_by(remove, key="step.forward_key"), lose, in_doubt=10.0)
    assert undone_at == [began + 10.0]


@pytest.mark.parametrize("answer", [True, None, {"landed": True}, Lost()], ids=repr)
def test_a_probe_that_answers_with_something_else_has_seen_nothing(log, answer):
    """Rule 5: only an `Observation` is one."""

    @compensator("back")
    def back(key: str) -> None:
        raise AssertionError("undone, although nobody knows whether it happened")

    def look(args, key):
        if isinstance(answer, Exception):
            raise answer
        return answer

    def fail(idempotency_key):
        raise Lost

    with pytest.raises(RollbackIncomplete), saga_scope("s", log=log) as saga:
        with pytest.raises(Lost):
            _pay(saga, undo(back, key="step.forward_key"), fail, probe=look)
    assert saga.steps[0].status is StepStatus.UNKNOWN


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_compensator_whose_body_never_ran_has_undone_nothing(log, asynchronous):
    """Rule 6: one written with `yield` returns a generator, and nothing else happens."""
    ran = []

    def back(key: str):
        ran.append(key)
        yield

    async def aback(key: str):
        ran.append(key)
        yield

    how = undo(compensator("back")(aback if asynchronous else back), key="result.id")
    with pytest.raises(RollbackIncomplete), saga_scope("s", log=log) as saga:
        _pay(saga, how)
        raise Lost
    assert ran == [] and saga.steps[0].status is StepStatus.COMPENSATION_FAILED


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_scope_that_is_cancelled_while_it_opens_is_given_up(log, resumed):
    """Rule 8: nobody is inside who could ever end it. What it had begun before is left as it was."""

    @compensator("back")
    def back(key: str) -> None: ...

    if resumed:
        saga = saga_scope("s", log=log)
        saga.__enter__()
        _pay(saga, undo(back, key="result.id"))
        log.crash()
        with pytest.raises(LogUnavailable):
            saga.__exit__(None, None, None)
    claiming, go = threading.Event(), threading.Event()

    class Slow(MemoryLog):
        def claim(self, saga_id, *, fresh=False):
            claiming.set()
            assert go.wait(20)
            return super().claim(saga_id, fresh=fresh)

    slow = Slow(log.clock, store=log.store)

    async def body():
        async with saga_scope("s", log=slow):
            raise AssertionError("it was cancelled before")

    task = asyncio.create_task(body())
    assert await asyncio.to_thread(claiming.wait, 20)
    task.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not slow.owned("s")
    assert read_saga(slow, "s").status is (SagaStatus.RUNNING if resumed else SagaStatus.ROLLED_BACK)


def test_a_saga_that_only_waits_is_come_back_to_and_another_one_is_not(clock, log):
    """Rule 7: a verdict that only waits for time says so, and a daemon comes back to it."""
    undone = []

    @compensator("remove")
    def remove(key: str) -> None:
        undone.append(key)

    def lose(idempotency_key):
        raise TimeoutError

    for name, how in (("waits", delete_by(remove, key="step.forward_key")), ("stays", undo(remove, key="result.id"))):
        with pytest.raises(Exception, match="not complete"), saga_scope(name, log=log, drain_timeout=1.0) as saga:
            _pay(saga, how, lose, in_doubt=60.0)
    assert undone == []
    watched = recover(log, retry=False)
    assert watched.recovered == ("waits",) and watched.attention == ("stays",)
    assert len(undone) == 1


def test_a_committed_saga_is_not_claimed_to_be_read(log):
    """Rule 4: it opens for replay only; nothing is owned or written, and the body's exceptions pass through."""

    @compensator("back")
    def back(key: str) -> None: ...

    with saga_scope("s", log=log) as saga:
        _pay(saga, undo(back, key="result.id"), key="once")
    before = log.read("s")

    class Reading(MemoryLog):
        def claim(self, saga_id, *, fresh=False):
            raise AssertionError("claimed")

    with pytest.raises(Lost), saga_scope("s", log=Reading(log.clock, store=log.store)) as again:
        assert _pay(again, undo(back, key="result.id"), key="once") == {"id": before[1].data["key"]}
        raise Lost
    assert log.read("s") == before


def test_a_suspended_saga_waits_for_seven_days(clock, log):
    with saga_scope("s", log=log) as saga:
        saga.suspend("ask Anna")
    clock.advance(7 * DAY - 1)
    assert recover(log).untouched == ("s",)
    clock.advance(2)
    assert recover(log).recovered == ("s",)


def test_a_scope_that_is_left_out_of_order_takes_nobody_elses_place(log):
    """Rule 8: leaving restores what was current only if the scope itself is current."""
    first, second = saga_scope("first", log=log), saga_scope("second", log=log, independent=True)

    def crosswise():
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert current_saga() is second
        second.__exit__(None, None, None)

    contextvars.copy_context().run(crosswise)
    assert first.status is second.status is SagaStatus.COMMITTED


ENDING = """
import gc, os, sys
from agent_saga_core import *

@compensator("back")
def back(key: str) -> None: ...

class Leaves:
    def __del__(self, write=os.write, finalizing=sys.is_finalizing):
        write(1, b"finalizing" if finalizing() else b"alive")
        self.saga.__exit__(None, None, None)

leaves = Leaves()
leaves.saga = saga_scope("s", log=sys.argv[1])
leaves.saga.__enter__()
leaves.saga.execute("pay", lambda: {"id": "k"}, semantics="COMPENSABLE", compensate=undo(back, key="result.id"))
gc.disable()
leaves.itself = leaves  # for the last collection, which comes while everything can still be called
del leaves
"""


def test_an_interpreter_that_is_ending_leaves_its_sagas_to_recovery(tmp_path):
    """Rule 8: neither a commit nor an undo while modules are being taken apart."""
    log = FileLog(tmp_path / "log")
    done = subprocess.run(
        [sys.executable, "-c", ENDING, log.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("finalizing", "")
    assert read_saga(log, "s").status is SagaStatus.RUNNING

    @compensator("back")
    def back(key: str) -> None: ...

    assert recover(log).recovered == ("s",)
    log.close()


FORKING = """
import os, sys

seen = []

def look():
    seen.append(dict(sys.modules["agent_saga_core.log.locks"].opening._holder))

os.register_at_fork(before=look)  # what is registered first is called last
from agent_saga_core.log import locks

locks._owned[1, 2, 3] = "the parent's"
child = os.fork()
if child == 0:
    os._exit(bool(locks.opening._holder) + 2 * bool(locks._owned))
print(len(seen[0]), locks.opening._holder, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(locks._owned))
"""


def test_no_descriptor_is_opened_and_not_yet_noted_while_a_process_forks():
    """Rule 10: a child closes what the parent owns by; one that it did not know of would keep a saga owned."""
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("1 {} 0 1\n", "")
