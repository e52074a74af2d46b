"""The recordings: what processes do to a log, each in one fixed order."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from agent_saga_core import records
from agent_saga_core.log import FileLog, segments
from agent_saga_core.records import FINAL

from .disk import Disk
from .recording import WAIT, Killed, Process, Recording, StillClock, Tree
from .replay import lay_out

Workload = Callable[[Recording], None]


def creation(recording: Recording) -> None:
    """A log is made, two directories deep; nothing is written."""
    recording.log = "some/where/log"
    Process(recording).close()


def first_record(recording: Recording) -> None:
    """The first record of a new log, then its writer's death."""
    process = Process(recording)
    process.claim("a")
    process.record("a", "START")
    process.die()


def several_sagas(recording: Recording) -> None:
    """One writer, three sagas side by side: batches of one line and of several, one saga done, a clean close."""
    process = Process(recording)
    for saga in ("a", "b", "c"):
        process.claim(saga)
    process.append("a", "START")
    process.record("a", size=300)
    process.append("b", "START")
    process.append("a", "DONE", size=700)
    process.record("b")
    process.record("a", "COMMITTED")
    process.release("a")
    process.append("c", "START")
    process.append("b", "DONE", size=1200)
    process.record("b", "COMMITTED")
    process.close()


def killed(recording: Recording) -> None:
    """One writer is killed with a record in its buffer and one in the page cache."""
    process = Process(recording)
    process.claim("a")
    process.append("a", "START")
    process.record("a")
    process.write("a", "DONE", size=900)
    process.append("a")
    process.die()


def relaxed(recording: Recording) -> None:
    """Many records are only written, into the same sectors and beyond, before one is flushed; then again, and death."""
    process = Process(recording)
    process.claim("a")
    process.claim("b")
    process.write("a", "START")
    process.write("b", "START")
    process.write("a", size=200)
    process.record("a", "DONE")
    process.write("a")
    process.write("b", size=500)
    process.write("a", "DONE")
    process.die()


def rotation(recording: Recording) -> None:
    """Segments of 1,200 bytes: one record after the other, then a batch that spans several, then a clean close."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEGMENT_BYTES", 1200)
        process = Process(recording)
        process.claim("a")
        process.claim("b")
        process.record("a", "START", size=100)
        process.record("a", size=300)
        process.record("a", "DONE", size=300)
        process.append("b", "START")
        for _ in range(3):
            process.append("a", size=250)
            process.append("b", size=250)
        process.record("a", "DONE")
        process.write("b", size=400)
        process.write("b", size=400)
        process.release("b")
        process.close()


def group_commit(recording: Recording) -> None:
    """Six threads append while a first one syncs, and share the next sync; each flushes for itself."""
    process = Process(recording)
    sagas = [f"t{i}" for i in range(6)]
    for saga in ("lead", *sagas):
        process.claim(saga)
    process.record("lead", "START")
    syncing, gate = threading.Event(), threading.Event()

    def hold() -> None:
        syncing.set()
        assert gate.wait(WAIT)

    recording.before_sync = hold
    lead = threading.Thread(target=process.record, args=("lead",))
    lead.start()
    assert syncing.wait(WAIT)
    recording.before_sync = None
    threads: list[threading.Thread] = []
    for saga in sagas:
        appended = threading.Event()
        threads.append(threading.Thread(target=_start_saga, args=(process, saga, appended)))
        threads[-1].start()
        assert appended.wait(WAIT)  # one after the other, so that every recording is the same
    gate.set()
    for thread in (lead, *threads):
        thread.join(WAIT)
        assert not thread.is_alive()
    process.record("lead", "DONE")
    process.close()


def _start_saga(process: Process, saga: str, appended: threading.Event) -> None:
    ticket = process.append(saga, "START", size=120)
    appended.set()
    process.flush(ticket)


def handed_over(recording: Recording) -> None:
    """A killed writer's record is in the page cache alone; a second process reads it, claims and goes on."""
    first = Process(recording)
    first.claim("a")
    first.record("a", "START")
    first.write("a", size=600)
    first.die()
    second = Process(recording)
    second.claim("a")
    second.record("a", "DONE")
    second.release("a")
    second.close()


def handed_over_unflushed(recording: Recording) -> None:
    """The same, and nothing of the first writer was ever flushed: not even its directory's name."""
    first = Process(recording)
    first.claim("a")
    first.write("a", "START")
    first.write("a")
    first.die()
    second = Process(recording)
    second.claim("a")
    second.record("a", "DONE")
    second.die()


def handed_over_twice(recording: Recording) -> None:
    """Three writers of two sagas, the first two killed with nothing synced; the third finishes both."""
    first = Process(recording)
    first.claim("a")
    first.claim("b")
    first.write("a", "START")
    first.write("b", "START", size=500)
    first.die()
    second = Process(recording)
    second.claim("a")
    second.write("a", "INTENT", size=300)
    second.die()
    third = Process(recording)
    third.claim("b")
    third.record("b", "ROLLED_BACK")
    third.claim("a")
    third.record("a", "ROLLED_BACK")
    third.close()


def handed_over_between_segments(recording: Recording) -> None:
    """The first writer's records of the saga stand in three segments, the last of them unsynced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEGMENT_BYTES", 1000)
        first = Process(recording)
        first.claim("a")
        first.write("a", "START", size=300)
        first.write("a", size=300)
        first.write("a", "DONE", size=300)
        first.die()
        second = Process(recording)
        second.claim("a")
        second.record("a", size=300)
        second.die()


def released(recording: Recording) -> None:
    """Two live processes: one releases a saga of which it flushed nothing itself, the other takes it on."""
    first, second = Process(recording), Process(recording)
    first.claim("a")
    first.claim("b")
    first.write("b", "START")
    first.append("a", "START", size=700)
    first.release("a")
    second.claim("a")
    second.record("a", size=100)
    first.record("b")
    second.close()
    first.die()


def made_by_two(recording: Recording) -> None:
    """One process makes the log and says so; a second one opens it, writes and closes; both end."""
    first = Process(recording)
    second = Process(recording)
    second.claim("a")
    second.record("a", "START")
    first.claim("b")
    first.write("b", "START")
    first.die()
    second.close()


def killed_at(at: int) -> Workload:
    """A writer is killed before its operation of that place; a second process takes over what it finds."""

    def workload(recording: Recording) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "SEGMENT_BYTES", 1500)
            recording.kill_at = at
            first: Process | None = None
            try:
                first = Process(recording)
                first.claim("a")
                first.claim("b")
                first.write("a", "START")
                first.write("b", "START")
                first.record("a", size=300)
                first.write("b", size=600)
                first.append("a", "DONE", size=500)
                first.record("b", "DONE", size=500)
                first.close()
            except Killed:
                pass
            recording.kill_at = None
            if first is not None:
                first.die()
            second = Process(recording, makes=False)
            second.go_on("a")
            second.go_on("b")
            second.die()

    return workload


def compacted(recording: Recording) -> None:
    """Two dead writers with finished and unfinished sagas, some of it unsynced; a third process compacts, and goes on.

    Then the carry-over stream is compacted in turn.
    """
    _two_dead_writers(recording)
    third = Process(recording)
    assert third.compact() == 4
    third.go_on("b")
    third.record("b", "ROLLED_BACK")
    third.release("b")
    third.go_on("d")
    third.close()
    fourth = Process(recording)
    assert fourth.compact() == 2
    fourth.go_on("d")
    fourth.close()


def killed_while_compacting(at: int) -> Workload:
    """A compaction is killed before the operation of that place, counted from its first; another process takes over.

    It also uses ids again that were forgotten.
    """

    def workload(recording: Recording) -> None:
        _two_dead_writers(recording)
        recording.kill_at = len(recording.ops) + at
        third: Process | None = None
        try:
            third = Process(recording)
            third.compact()
            third.close()
        except Killed:
            pass
        recording.kill_at = None
        if third is not None:
            third.die()
        fourth = Process(recording)
        fourth.go_on("a")  # begins anew if it is forgotten
        fourth.go_on("b")
        fourth.compact()
        fourth.go_on("c")
        fourth.go_on("d")
        fourth.die()

    return workload


def _two_dead_writers(recording: Recording) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEGMENT_BYTES", 1500)
        first = Process(recording)
        for saga in ("a", "b", "c"):
            first.claim(saga)
        first.record("a", "START", size=200)
        first.write("b", "START", size=200)
        first.record("a", "COMMITTED", size=200)
        first.write("c", "START", size=400)
        first.write("b", size=200)
        first.die()
        second = Process(recording)
        second.claim("c")
        second.claim("d")
        second.record("d", "START")
        second.write("c", "ROLLED_BACK")
        second.die()


def killed_while_making(at: int) -> Workload:
    """A process is killed before its operation of that place, while it makes a log; a second one makes it, or opens it.

    A log that is found is not said to be durable before the first record in it is.
    """

    def workload(recording: Recording) -> None:
        recording.log = "some/where/log"
        recording.kill_at = at
        try:
            FileLog(recording.root / recording.log).close()
        except Killed:
            pass
        recording.kill_at = None
        found = (recording.root / recording.log / "log.json").exists()
        second = Process(recording, makes=not found)
        second.claim("a")
        second.record("a", "START")
        second.die()

    return workload


def recovered(recording: Recording) -> None:
    """What follows a loss of power: one process goes on with every saga and dies, a second one ends them."""
    for end in (False, True):
        process = Process(recording)
        for saga in recording.sagas:
            records = process.claim(saga)
            if records and records[-1].type in FINAL:
                continue
            process.write(saga, "INTENT" if records else "START", size=200)
            if end:
                process.record(saga, "ROLLED_BACK")
        if end:
            process.close()
        else:
            process.die()


def boundary_between_lines(shift: int, *, one_batch: bool) -> Workload:
    """Unsynced records of which one ends just so many bytes behind a sector's boundary."""

    def workload(recording: Recording) -> None:
        process = Process(recording)
        process.claim("a")
        process.record("a", "START")
        (path,) = recording.segments()
        before = path.stat().st_size
        process.write("a")
        length = path.stat().st_size - before
        fill = (shift - before - 2 * length) % 512
        if one_batch:
            process.append("a", size=fill)
            process.write("a", size=700)
        else:
            process.write("a", size=fill)
            process.write("a", size=700)
        whole = path.read_bytes()
        assert (len(b"".join(whole.splitlines(keepends=True)[:4])) - shift) % 512 == 0
        process.die()

    return workload


def boundary_behind_head(shift: int) -> Workload:
    """A segment whose first line ends just so many bytes behind a sector's boundary, and a record behind it."""

    def workload(recording: Recording) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "SEGMENT_BYTES", 2200)
            process = Process(recording)
            process.claim("a")
            process.record("a", "START", size=1500)
            process.record("a", size=400)
            second = recording.segments()[1].read_bytes().splitlines(keepends=True)
            # The head of the third segment names the saga before it, by a longer name.
            saga = "b" * (1 + shift - len(second[0]) % 512 + 512 * (len(second[0]) % 512 > shift))
            process.claim(saga)
            process.record(saga, "START")
            process.write(saga, size=1100)
            third = recording.segments()[2].read_bytes().splitlines(keepends=True)
            assert (len(third[0]) - shift) % 512 == 0, (len(second[0]), len(third[0]), shift)
            process.die()

    return workload


@contextmanager
def _repeatable() -> Generator[None]:
    """Names, ids and salts are the same in every recording, and with them what equal recordings leave."""
    chance = random.Random(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", chance.randbytes)
        records._salts.clear()  # pyright: ignore[reportPrivateUsage]
        yield
    records._salts.clear()  # pyright: ignore[reportPrivateUsage]


def recorded_after(first: Recording, at: int, tree: Tree, place: Path) -> Recording:
    """Record how the sagas go on after a loss of power, on the disk that it left.

    Args:
        first: What led to it.
        at: After how many of its operations the power failed.
        tree: What was left.
        place: Where to record.
    """
    root = place / "again"
    lay_out(tree, root)
    promises = first.told(at)
    second = Recording(root, first.log)
    log = FileLog(root / first.log, clock=StillClock())
    for saga in first.sagas:
        # What is there now is durable: there is no page cache any more.
        records = log.read(saga)
        second.promised[saga] = len(records)
        assert len(records) >= promises.durable.get(saga, 0) or saga in promises.may_be_gone
        for record in records:
            second.records[saga, record.n] = [(0, record)]
        if not records:
            second.records[saga, 1] = []
    log.close()
    with _repeatable(), second.running():
        recovered(second)
    disk = Disk(second.start)
    for op in second.ops:
        disk.apply(op)
    second.check(disk.whole())
    return second


def recorded(
    workload: Workload,
    place: Path,
    broken: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    from_nothing: bool = False,
) -> Recording:
    """Record a workload below `place`, with something broken meanwhile if so asked."""
    root = place / "recorded"
    if root.exists():
        shutil.rmtree(root)
    root.mkdir()
    with _repeatable():
        if not from_nothing and workload not in FROM_NOTHING:
            FileLog(root / "log").close()
        recording = Recording(root)
        with recording.running(), broken():
            workload(recording)
    disk = Disk(recording.start)
    for op in recording.ops:
        disk.apply(op)
    recording.check(disk.whole())
    return recording


FROM_NOTHING = (creation, first_record, handed_over_unflushed, made_by_two)
"""These make the log that they use; the others find one that is durable."""

WORKLOADS: tuple[Workload, ...] = (
    creation,
    first_record,
    several_sagas,
    killed,
    relaxed,
    rotation,
    group_commit,
    handed_over,
    handed_over_unflushed,
    handed_over_twice,
    handed_over_between_segments,
    released,
    made_by_two,
    compacted,
)
