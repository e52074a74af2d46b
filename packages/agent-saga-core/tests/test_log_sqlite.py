"""The SQLite log: the suite of all stores, and what is special about it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from agent_saga_core.log import osfile
from agent_saga_core.log.sqlite import SqliteLog, connection
from agent_saga_core.records import Record
from agent_saga_core.testing import LogConformance


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one: for tests of many commits that are not about the disk."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    made = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


class TestSqliteLog(LogConformance):
    @pytest.fixture
    def open_log_again(self, tmp_path):
        return lambda: SqliteLog(tmp_path / "log.db")


def record(saga: str, n: int, kind: str = "INTENT", *, epoch: int = 1, time: float = 1000.0, **data: object) -> Record:
    return Record(saga=saga, n=n, epoch=epoch, type=kind, time=time, data=data)


# --- interrupts


def interrupted_at(step: int, work: Callable[[], None], *, opcodes: bool) -> bool:
    """Run `work`, raising KeyboardInterrupt at the given step inside the log; whether it came to that."""
    inside = os.path.dirname(osfile.__file__)
    left = step
    fired = False

    def local(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left, fired
        if event == ("opcode" if opcodes else "line") and not fired:
            left -= 1
            if left < 0:
                fired = True
                raise KeyboardInterrupt
        return local

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if fired or not frame.f_code.co_filename.startswith(inside):
            return None
        frame.f_trace_opcodes = opcodes
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return fired


def insist(call: Callable[[], Any]) -> Any:
    """What a caller does that loops over an idempotent step."""
    for _ in range(3):
        try:
            return call()
        except KeyboardInterrupt:
            continue
    raise AssertionError("interrupted more than once")


def test_an_interrupt_anywhere_in_append_and_flush_does_no_harm(fast: Path) -> None:
    log = SqliteLog(fast / "log.db", busy_timeout=5.0)
    other = SqliteLog(fast / "log.db", busy_timeout=5.0)
    other.claim("other", fresh=True)
    log.claim("own", fresh=True)
    expected = step = 0
    while True:
        saga = f"s{step}"
        log.claim(saga, fresh=True)

        def work(saga: str = saga) -> None:
            first = record(saga, 1, "START")
            ticket = insist(lambda: log.append(first))
            insist(lambda: log.write(ticket))
            ticket = insist(lambda: log.append(record(saga, 2)))
            insist(lambda: log.flush(ticket))
            insist(lambda: log.release(saga))

        fired = interrupted_at(step, work, opcodes=True)
        expected += 4
        assert [entry.n for entry in log.read(saga)] == [1, 2], step
        for one, name in ((other, "other"), (log, "own")):  # nothing is held
            one.flush(one.append(record(name, expected // 4, "START" if expected == 4 else "INTENT")))
        if not fired:
            break
        # Every step at first, then strides that share no factor with the length of a loop.
        step += 1 if step < 300 else 13
    assert step > 1000
    found = log.verify()
    assert found.intact and found.records == expected
    assert not log._buffer and not log._unsynced and not log._leader and not log._batch  # pyright: ignore[reportPrivateUsage]
    assert not connection._using  # pyright: ignore[reportPrivateUsage]
    log.close()
    other.close()


def test_an_interrupt_anywhere_in_a_claim_leaves_the_saga_free_or_owned(fast: Path) -> None:
    log = SqliteLog(fast / "log.db", busy_timeout=5.0)
    other = SqliteLog(fast / "log.db", busy_timeout=5.0)
    for step in range(100_000):
        saga = f"s{step}"
        other.claim(saga)
        other.append(record(saga, 1, "START"))
        other.release(saga)
        owned = False

        def work(saga: str = saga) -> None:
            nonlocal owned
            try:
                log.claim(saga)
                owned = True
            except KeyboardInterrupt:
                owned = log.owned(saga)

        fired = interrupted_at(step, work, opcodes=False)
        assert step > 0 or fired
        assert log.owned(saga) == owned
        if owned:
            log.release(saga)
        numbers = [entry.n for entry in other.claim(saga)]  # nobody else has it
        assert numbers in ([1, 2], [1, 2, 3]), step
        other.release(saga)
        if not fired:
            break
    assert step > 100
    assert other.verify().intact
    log.close()
    other.close()
