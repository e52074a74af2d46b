"""Group commit: who waits for whom, who shares a sync, and what an interrupt or a failing disk leaves."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from agent_saga_core.errors import Fenced, LogCorrupted, LogUnavailable, SagaBusy
from agent_saga_core.log import FileLog, Log, MemoryLog, MemoryStore, osfile, segments
from agent_saga_core.log.commit import GroupCommitLog
from agent_saga_core.records import Record

WAIT = 20.0


def record(saga: str, n: int, kind: str = "INTENT", **data: object) -> Record:
    return Record(saga=saga, n=n, epoch=1, type=kind, time=1000.0, data=data)


def die(log: FileLog) -> None:
    log.abandon()


class Disk:
    """Counts what reaches the disk; holds syncs back, or makes calls fail, on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.error = errno.EIO
        self.gate: threading.Event | None = None
        self.syncing = threading.Event()
        for name in ("pwrite", "fdatasync", "fsync", "open_file"):
            monkeypatch.setattr(osfile, name, self._wrap(name, getattr(osfile, name)))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            self.calls.append(name)
            if self.fail_at is not None and len(self.calls) > self.fail_at:
                raise OSError(self.error, os.strerror(self.error))
            if name == "fdatasync" and self.gate is not None:
                self.syncing.set()
                assert self.gate.wait(WAIT)
            return call(*args)

        return wrapped

    @property
    def syncs(self) -> int:
        return self.calls.count("fdatasync")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture(params=["memory", "file"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GroupCommitLog[Any]]:
    made: GroupCommitLog[Any] = MemoryLog() if request.param == "memory" else FileLog(tmp_path / "log")
    yield made
    made.close()


def run_threads(*works: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


# --- appending


def test_a_repeated_append_stores_nothing_and_succeeds(log: Log) -> None:
    log.claim("a")
    ticket = log.append(record("a", 1, "START"))
    assert log.append(record("a", 1, "START")) == ticket
    log.flush(ticket)
    assert log.append(record("a", 1, "START")) == ticket
    assert [entry.n for entry in log.read("a")] == [1]
    with pytest.raises(ValueError, match="cannot follow"):
        log.append(record("a", 1, "START", other=1))


def test_a_number_that_does_not_follow_is_refused_and_nothing_is_put(log: Log) -> None:
    log.claim("a")
    with pytest.raises(ValueError, match="is at record 0"):
        log.append(record("a", 2))
    log.flush(log.append(record("a", 1)))
    with pytest.raises(ValueError):
        log.append(record("a", 3))
    with pytest.raises(ValueError, match="cannot be encoded"):
        log.append(record("a", 2, bad=object()))
    log.flush(log.append(record("a", 2)))
    assert [entry.n for entry in log.read("a")] == [1, 2]


def test_nothing_follows_a_final_record(log: Log) -> None:
    log.claim("a")
    log.append(record("a", 1))
    final = log.append(record("a", 2, "COMMITTED"))
    assert log.append(record("a", 2, "COMMITTED")) == final
    with pytest.raises(ValueError, match="has ended"):
        log.append(record("a", 3))
    log.release("a")
    # It is given back whole, and no CLAIM is written.
    assert [entry.n for entry in log.claim("a")] == [1, 2]
    with pytest.raises(ValueError, match="has ended"):
        log.append(record("a", 3))


def test_only_the_owner_appends(log: Log) -> None:
    with pytest.raises(Fenced):
        log.append(record("a", 1))
    log.claim("a")
    log.append(record("a", 1))
    log.release("a")
    assert not log.owned("a")
    with pytest.raises(Fenced):
        log.append(record("a", 2))
    log.release("a")
    log.release("never met")


def test_a_claim_is_a_record_and_its_number_the_epoch(log: Log) -> None:
    assert log.claim("a") == ()
    log.append(record("a", 1, "START"))
    with pytest.raises(SagaBusy) as caught:
        log.claim("a")
    assert caught.value.saga_id == "a"
    assert log.owned("a") and log.is_live("a")
    log.release("a")
    assert not log.is_live("a")
    *_, claim = log.claim("a")
    assert (claim.type, claim.n, claim.epoch) == ("CLAIM", 2, 2)
    log.release("a")
    assert [entry.type for entry in log.read("a")] == ["START", "CLAIM"]


def test_the_data_are_a_copy(log: Log) -> None:
    data: dict[str, Any] = {"list": [1]}
    log.claim("a")
    ticket = log.append(Record(saga="a", n=1, epoch=1, type="START", time=1.0, data=data))
    data["list"].append(2)
    log.flush(ticket)
    assert log.read("a")[0].data == {"list": [1]}


def test_a_plain_number_up_to_a_ticket_flushes_as_well(log: Log) -> None:
    log.claim("a")
    log.append(record("a", 1))
    ticket = int(log.append(record("a", 2)))
    log.flush(ticket)
    assert [entry.n for entry in log.read("a")] == [1, 2]
    log.flush(ticket)


# --- sharing a sync


def test_one_record_costs_one_write_and_one_sync(tmp_path: Path, disk: Disk) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    log.flush(log.append(record("a", 1)))
    disk.calls.clear()
    log.flush(log.append(record("a", 2)))
    assert disk.calls == ["pwrite", "fdatasync"]
    log.close()


def test_what_is_appended_during_a_sync_shares_the_next(tmp_path: Path, disk: Disk) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("first")
    for i in range(32):
        log.claim(f"s{i}", fresh=True)
    disk.calls.clear()
    disk.gate = threading.Event()
    lead = threading.Thread(target=lambda: log.flush(log.append(record("first", 1))))
    lead.start()
    assert disk.syncing.wait(WAIT)
    started = threading.Barrier(33)

    def one(i: int) -> None:
        ticket = log.append(record(f"s{i}", 1))
        started.wait(WAIT)
        log.flush(ticket)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    started.wait(WAIT)
    disk.gate.set()
    for thread in (lead, *threads):
        thread.join(WAIT)
        assert not thread.is_alive()
    assert disk.syncs == 2
    log.close()
    assert FileLog(tmp_path / "log").verify().records == 33


def test_threads_that_append_and_flush_lose_nothing(log: GroupCommitLog[Any]) -> None:
    def work(i: int) -> Callable[[], None]:
        def run() -> None:
            log.claim(f"t{i}")
            for n in range(1, 21):
                ticket = log.append(record(f"t{i}", n, i=i))
                if n % 5 == 0:
                    log.write(ticket)
                else:
                    log.flush(ticket)
            log.release(f"t{i}")

        return run

    run_threads(*(work(i) for i in range(32)))
    for i in range(32):
        assert [(entry.n, entry.data["i"]) for entry in log.read(f"t{i}")] == [(n, i) for n in range(1, 21)]
    verification = log.verify()
    assert verification.intact and verification.records == 640
    assert not log._buffer and not log._unsynced and not log._waiting  # pyright: ignore[reportPrivateUsage]


async def test_one_turn_of_a_loop_shares_a_batch() -> None:
    store = MemoryStore()
    log = MemoryLog(store=store)

    async def saga(i: int) -> None:
        log.claim(f"s{i}", fresh=True)
        for n in range(1, 11):
            await log.aflush(log.append(record(f"s{i}", n)))

    async with asyncio.timeout(WAIT):
        await asyncio.gather(*(saga(i) for i in range(256)))
    assert store.syncs <= 0.02 * 256 * 10 / 2
    assert all(len(log.read(f"s{i}")) == 10 for i in range(256))
    log.close()


def test_two_loops_in_two_threads_share_a_log(log: Log) -> None:
    def loop(name: str) -> Callable[[], None]:
        async def saga(i: int) -> None:
            log.claim(f"{name}{i}")
            for n in range(1, 6):
                await log.aflush(log.append(record(f"{name}{i}", n)))
            log.release(f"{name}{i}")

        async def main() -> None:
            async with asyncio.timeout(WAIT):
                await asyncio.gather(*(saga(i) for i in range(20)))

        return lambda: asyncio.run(main())

    run_threads(loop("x"), loop("y"))
    assert log.verify().records == 200


def test_a_loop_that_is_closed_while_it_waits_hurts_nobody_else(tmp_path: Path, disk: Disk) -> None:
    log = FileLog(tmp_path / "log")
    for saga in ("a", "b", "c"):
        log.claim(saga)
    disk.gate = threading.Event()
    loop = asyncio.new_event_loop()

    async def start() -> None:
        task = loop.create_task(log.aflush(log.append(record("a", 1))))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        assert await asyncio.to_thread(disk.syncing.wait, WAIT)
        task.cancel()

    loop.run_until_complete(asyncio.wait_for(start(), WAIT))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    disk.gate.set()
    disk.gate = None

    async def later() -> None:
        await asyncio.wait_for(log.aflush(log.append(record("b", 1))), WAIT)

    asyncio.run(later())
    assert len(log.read("a")) == 1  # cancelling the waiter left the flush alone
    assert len(log.read("b")) == 1
    log.close()


async def test_a_cancelled_waiter_leaves_the_others_waiting(tmp_path: Path, disk: Disk) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    log.claim("b")
    disk.gate = threading.Event()
    first = asyncio.create_task(log.aflush(log.append(record("a", 1))))
    second = asyncio.create_task(log.aflush(log.append(record("b", 1))))
    async with asyncio.timeout(WAIT):
        assert await asyncio.to_thread(disk.syncing.wait, WAIT)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not second.done()
        disk.gate.set()
        await second
    assert len(log.read("a")) == 1
    log.close()


class HeldClock:
    """A clock whose timed waits end when the test says so."""

    def __init__(self) -> None:
        self.timed = threading.Event()
        self.over = threading.Event()
        self.asked: float | None = None

    def time(self) -> float:
        return 1000.0

    def monotonic(self) -> float:
        return 0.0

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        if timeout is None:
            return event.wait(WAIT)
        self.asked = timeout
        self.timed.set()
        assert self.over.wait(WAIT)
        return event.is_set()

    def call_later(self, loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[[], None]) -> Any:
        raise NotImplementedError


def test_a_relaxed_record_is_written_at_once_and_synced_within_50_ms(tmp_path: Path, disk: Disk) -> None:
    clock = HeldClock()
    log = FileLog(tmp_path / "log", clock=clock)
    log.claim("a")
    log.flush(log.append(record("a", 1)))
    disk.calls.clear()
    ticket = log.append(record("a", 2))
    log.write(ticket)
    assert disk.calls == ["pwrite"]
    assert len(FileLog(tmp_path / "log").read("a")) == 2
    assert clock.timed.wait(WAIT)
    assert clock.asked is not None and clock.asked <= 0.05
    assert disk.syncs == 0
    synced = threading.Event()
    disk.gate = synced  # the flusher's sync shows itself by waiting here
    clock.over.set()
    assert disk.syncing.wait(WAIT)
    synced.set()
    log.flush(ticket)
    assert disk.calls.count("pwrite") == 1
    log.close()


def test_a_claim_makes_durable_what_a_dead_owner_only_wrote(tmp_path: Path, disk: Disk) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    log.claim("b")
    log.write(log.append(record("a", 1, "START")))
    die(log)
    heir = FileLog(tmp_path / "log")
    heir.claim("warm", fresh=True)
    disk.calls.clear()
    # Before it appends or acts: the segment, its directory, and the log's.
    assert [entry.n for entry in heir.claim("a")] == [1, 2]
    assert (disk.calls.count("fdatasync"), disk.calls.count("fsync")) == (1, 2)
    heir.release("a")
    disk.calls.clear()
    heir.claim("a")  # the dead writer's part needs no second sync, and our own was flushed
    assert disk.syncs == 0
    heir.close()


# --- a failing disk


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EFBIG])
def test_a_failed_sync_poisons_the_log_for_everybody(tmp_path: Path, disk: Disk, error: int) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    log.claim("b")
    log.flush(log.append(record("a", 1)))
    disk.error = error
    disk.fail_at = len(disk.calls) + 1  # the write succeeds, the sync does not
    waiting = log.append(record("b", 1))
    with pytest.raises(LogUnavailable) as caught:
        log.flush(log.append(record("a", 2)))
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == error
    disk.fail_at = None
    written = len(disk.calls)
    for call in (
        lambda: log.flush(waiting),
        lambda: log.write(waiting),
        lambda: log.append(record("a", 3)),
        lambda: log.claim("c"),
        lambda: asyncio.run(log.aflush(waiting)),
    ):
        with pytest.raises(LogUnavailable) as again:
            call()
        assert isinstance(again.value.__cause__, OSError)
    log.release("a")
    log.close()
    assert disk.calls[written:].count("pwrite") == 0
    fresh = FileLog(tmp_path / "log")
    assert fresh.verify().intact
    assert fresh.claim("a")[-1].type == "CLAIM"


def test_threads_that_wait_hear_of_the_failure(tmp_path: Path, disk: Disk) -> None:
    log = FileLog(tmp_path / "log")
    for i in range(8):
        log.claim(f"s{i}")
    disk.gate = threading.Event()
    outcomes: list[str] = []

    def one(i: int) -> None:
        try:
            log.flush(log.append(record(f"s{i}", 1)))
            outcomes.append("durable")
        except LogUnavailable:
            outcomes.append("unavailable")

    first = threading.Thread(target=one, args=(0,))
    first.start()
    assert disk.syncing.wait(WAIT)
    rest = [threading.Thread(target=one, args=(i,)) for i in range(1, 8)]
    for thread in rest:
        thread.start()
    disk.fail_at = len(disk.calls)
    disk.gate.set()
    for thread in (first, *rest):
        thread.join(WAIT)
        assert not thread.is_alive()
    # The first sync had begun; its directory could not be synced, so nothing was durable.
    assert outcomes == ["unavailable"] * 8


def scenario(directory: Path) -> list[tuple[str, int]]:
    """A small life of a log; returns what it was told is durable. Only LogUnavailable may come out."""
    durable: list[tuple[str, int]] = []
    log = FileLog(directory)
    try:
        for saga in ("a", "b"):
            log.claim(saga)
        for n in range(1, 7):
            log.append(record("a", n, text="x" * 150))
            log.flush(log.append(record("b", n)))
            durable += [("a", n), ("b", n)]
            if n == 3:
                log.release("b")
                log.claim("b")
                break
        log.release("a")
    finally:
        try:
            log.close()
        finally:
            die(log)
    return durable


def test_a_failure_at_any_system_call_leaves_a_log_that_can_be_read(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1200)
    disk.error = errno.ENOSPC
    for fail_at in range(10_000):
        directory = tmp_path / f"log{fail_at}"
        disk.calls.clear()
        disk.fail_at = fail_at
        durable: list[tuple[str, int]] = []
        failed = False
        try:
            durable = scenario(directory)
        except LogUnavailable:
            failed = True
        disk.fail_at = None
        disk.calls.clear()
        fresh = FileLog(directory)
        verification = fresh.verify()
        assert verification.intact, (fail_at, verification)
        for saga in ("a", "b"):
            numbers = [entry.n for entry in fresh.claim(saga)]
            assert numbers == list(range(1, len(numbers) + 1))
            assert all(n in numbers for name, n in durable if name == saga)
        fresh.close()
        if not failed:
            assert fail_at > 20
            return
    raise AssertionError("the scenario never succeeded")


@pytest.mark.parametrize("step", [1, 7])
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    whole = osfile.pwrite

    def short(descriptor: int, data: bytes, offset: int) -> int:
        return whole(descriptor, data[:step], offset)

    monkeypatch.setattr(osfile, "pwrite", short)
    durable = scenario(tmp_path / "log")
    fresh = FileLog(tmp_path / "log")
    assert fresh.verify().intact
    assert [entry.n for entry in fresh.read("a")] == [n for saga, n in durable if saga == "a"]


def test_a_write_that_stops_half_way_leaves_a_torn_tail_and_nothing_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    log.flush(log.append(record("a", 1)))
    whole = osfile.pwrite
    calls: list[int] = []

    def full(descriptor: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "full")
        return whole(descriptor, data[:50], offset)

    monkeypatch.setattr(osfile, "pwrite", full)
    with pytest.raises(LogUnavailable):
        log.flush(log.append(record("a", 2)))
    log.close()
    assert len(calls) == 2
    monkeypatch.setattr(osfile, "pwrite", whole)
    fresh = FileLog(tmp_path / "log")
    assert fresh.verify().intact
    assert [entry.n for entry in fresh.claim("a")] == [1, 2]


def test_a_lock_file_that_vanished_stops_the_log(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    log.flush(log.append(record("a", 1)))
    for path in (tmp_path / "log" / "locks").iterdir():
        path.unlink()
    with pytest.raises(LogCorrupted, match="is missing"):
        log.flush(log.append(record("a", 2)))
    with pytest.raises(LogCorrupted, match="is missing"):
        log.append(record("a", 3))
    log.close()
    with pytest.raises(LogCorrupted, match="is missing"):
        FileLog(tmp_path / "log").claim("b")


def test_a_lock_file_that_was_replaced_stops_the_log(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    for path in (tmp_path / "log" / "locks").iterdir():
        path.unlink()
        path.touch()
    with pytest.raises(LogCorrupted, match="was replaced"):
        log.flush(log.append(record("a", 1)))
    log.close()


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


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_an_interrupt_at_any_bytecode_of_append_and_flush_does_no_harm(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 900)
    log: GroupCommitLog[Any] = MemoryLog() if kind == "memory" else FileLog(tmp_path / "log")
    expected = 0
    step = 0
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
        expected += 2
        assert [entry.n for entry in log.read(saga)] == [1, 2], step
        if not fired:
            break
        # Every step at first, then strides that share no factor with the length of a loop.
        step += 1 if step < 400 else 7
    assert step > 400
    verification = log.verify()
    assert verification.intact and verification.records == expected
    assert not log._buffer and not log._unsynced and not log._leader and not log._batch  # pyright: ignore[reportPrivateUsage]
    log.close()


def test_an_interrupt_at_any_line_of_a_claim_leaves_the_saga_free_or_owned(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    other = FileLog(tmp_path / "log")
    log.claim("warm")  # the log has its own stream now
    for step in range(100_000):
        saga = f"s{step}"
        other.claim(saga)
        other.append(record(saga, 1, "START"))
        other.release(saga)
        log.saga_ids()  # all but the claim's own part of the reading is done
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


def test_a_leader_that_is_interrupted_hands_its_place_on(tmp_path: Path, disk: Disk) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    log.claim("b")
    log.flush(log.append(record("a", 1)))
    real = osfile.fdatasync
    interrupts = [True]

    def interrupted(descriptor: int) -> None:
        if interrupts:
            interrupts.pop()
            follower.start()
            assert registered.wait(WAIT)
            raise KeyboardInterrupt
        real(descriptor)

    registered = threading.Event()
    done: list[int] = []

    def follow() -> None:
        ticket = log.append(record("b", 1))
        registered.set()
        log.flush(ticket)
        done.append(ticket)

    follower = threading.Thread(target=follow)
    osfile.fdatasync = interrupted  # `disk` puts it back
    ticket = log.append(record("a", 2))
    with pytest.raises(KeyboardInterrupt):
        log.flush(ticket)
    follower.join(WAIT)
    assert done
    log.flush(ticket)
    log.close()
    fresh = FileLog(tmp_path / "log")
    assert fresh.verify().intact
    assert [entry.n for entry in fresh.read("a")] == [1, 2]


# --- closing


def test_closing_flushes_releases_and_ends_the_stream(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    ticket = log.append(record("a", 1))
    log.close()
    log.close()
    log.flush(ticket)
    (path,) = (tmp_path / "log").glob("w-*/*.jsonl")
    assert b'"end":true' in path.read_bytes().splitlines()[-1]
    for call in (lambda: log.append(record("a", 2)), lambda: log.claim("b"), lambda: log.read("a"), log.unfinished):
        with pytest.raises(LogUnavailable, match="closed"):
            call()
    log.release("a")
    assert len(FileLog(tmp_path / "log").claim("a")) == 2


def test_a_memory_log_that_crashes_loses_what_was_not_synced() -> None:
    store = MemoryStore()
    log = MemoryLog(store=store)
    log.claim("a")
    log.flush(log.append(record("a", 1)))
    log.write(log.append(record("a", 2)))
    other = MemoryLog(store=store)
    assert len(other.read("a")) == 2
    with pytest.raises(SagaBusy):
        other.claim("a")
    log.crash()
    assert [entry.type for entry in other.claim("a")] == ["INTENT", "CLAIM"]
    with pytest.raises(LogUnavailable, match="crashed"):
        log.append(record("a", 2))
    other.release("a")
    other.crash()
    assert [entry.type for entry in MemoryLog(store=store).read("a")] == ["INTENT", "CLAIM"]
