"""Retiring: finished sagas leave, unfinished ones stay, whatever dies in between and whoever looks meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from agent_saga_core.errors import LogCorrupted, LogUnavailable, SagaBusy
from agent_saga_core.log import FileLog, MemoryLog, osfile, retire, segments
from agent_saga_core.log import file as file_module
from agent_saga_core.log import history as history_module
from agent_saga_core.records import Record

DAY = 86400.0
NOW = 100 * DAY


class FixedClock:
    """A clock that stands still; nothing here waits on it."""

    def time(self) -> float:
        return NOW

    def __getattr__(self, name: str) -> Any:
        from agent_saga_core.clock import SYSTEM_CLOCK

        return getattr(SYSTEM_CLOCK, name)


CLOCK: Any = FixedClock()


def record(saga: str, n: int, kind: str = "INTENT", *, days_ago: float = 90.0, **data: object) -> Record:
    return Record(saga=saga, n=n, epoch=1, type=kind, time=NOW - days_ago * DAY, data=data)


def opened(directory: Path) -> FileLog:
    return FileLog(directory, clock=CLOCK)


def die(log: FileLog) -> None:
    log.abandon()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of eight records, each of them worth an index."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 2500)
    monkeypatch.setattr(retire, "SMALL", 1200)
    monkeypatch.setattr(retire, "CARRY_AT_MOST", 2)  # of eight records, two are often in the next segment as well
    monkeypatch.setattr(file_module, "INDEX_FROM", 1)
    monkeypatch.setattr(history_module, "INDEX_FROM", 1)


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    directory = memory / f"agent-saga-{tmp_path.name}-{id(tmp_path)}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def finish(log: FileLog, saga: str, *, days_ago: float = 90.0, claimed: bool = False) -> None:
    if not claimed:
        log.claim(saga)
    for n, kind in enumerate(("START", "INTENT", "DONE", "COMMITTED"), 1):
        log.append(record(saga, n, kind, days_ago=days_ago, of=saga))
    log.release(saga)


OLD = [f"old-{i}" for i in range(12)] + ["across"]
YOUNG = ["young-1", "young-2"]
OPEN = ["long", "handed-on", "live"]


def furnish(directory: Path) -> FileLog:
    """A log of three dead writers and a live one, which is returned. Every saga is old but the young ones.

    `long` has records in each segment of the first writer, `handed-on` went from the first writer to the second, `live`
    is owned by the live one, whose first segment is complete; `across` lies in two segments.
    """
    first = opened(directory)
    first.claim("long")
    first.append(record("long", 1, "START"))
    first.claim("handed-on")
    first.append(record("handed-on", 1, "START"))
    first.claim("across")
    first.append(record("across", 1, "START"))
    for n, saga in enumerate(OLD[:6]):
        finish(first, saga)
        if n % 2:
            first.append(record("long", 2 + n // 2))
    first.flush(first.append(record("across", 2, "ROLLED_BACK")))
    die(first)
    second = opened(directory)
    second.claim("handed-on")
    second.flush(second.append(record("handed-on", 3)))
    die(second)
    third = opened(directory)
    for saga in YOUNG:
        finish(third, saga, days_ago=3)
    third.close()
    live = opened(directory)
    live.claim("live")
    live.append(record("live", 1, "START"))
    for saga in OLD[6:12]:
        finish(live, saga)
    live.flush(live.append(record("live", 2)))
    return live


def contents(directory: Path) -> dict[str, tuple[Record, ...]]:
    log = FileLog(directory, create=False, clock=CLOCK)
    return {saga: log.read(saga) for saga in (*OLD, *YOUNG, *OPEN)}


def check(directory: Path, before: dict[str, tuple[Record, ...]], *, forgotten: bool | None = None) -> None:
    """No saga lost, none resurrected, nothing damaged.

    Args:
        directory: The log.
        before: What the sagas were.
        forgotten: Whether those that may leave must have left; None if it is all one, saga by saga.
    """
    log = FileLog(directory, create=False, clock=CLOCK)
    unfinished = log.unfinished()
    assert (set(unfinished.saga_ids), unfinished.damage) == (set(OPEN), ())
    listed = set(log.saga_ids())
    for saga, records in before.items():
        found = log.read(saga)
        if saga in OLD and not found:
            assert forgotten is not False and saga not in listed, saga
        else:
            assert found == records and saga in listed, saga
            assert saga not in OLD or not forgotten, saga
    verification = log.verify()
    assert verification.intact, verification
    assert verification.records == sum(len(log.read(saga)) for saga in listed)


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if "locks/" not in str(path)}


# --- what leaves and what stays


def test_what_is_finished_and_old_leaves_and_nothing_else(tmp_path: Path) -> None:
    live = furnish(tmp_path)
    before = contents(tmp_path)
    planned = opened(tmp_path).compact(dry_run=True)
    check(tmp_path, before, forgotten=False)
    done = opened(tmp_path).compact()
    assert (planned.retired, planned.sagas, planned.carried) == (done.retired, done.sagas, done.carried)
    check(tmp_path, before)
    gone = [saga for saga in OLD if not live.read(saga)]
    assert len(gone) == done.sagas > 8
    # Two dead writers are gone with all their files; a carry-over stream holds what they left.
    assert [path.name[:10] for path in sorted(tmp_path.glob("[cw]-*"))] == ["c-00000005", "w-00000003", "w-00000004"]
    # The live one goes on, in the same segment, and so does its saga.
    live.flush(live.append(record("live", 3)))
    assert [entry.n for entry in opened(tmp_path).read("live")] == [1, 2, 3]
    assert opened(tmp_path).compact().retired == 0
    live.close()


def test_a_saga_goes_on_from_records_that_were_carried_over(tmp_path: Path) -> None:
    live = furnish(tmp_path)
    opened(tmp_path).compact()
    recoverer = opened(tmp_path)
    claimed = recoverer.claim("handed-on")
    assert [entry.type for entry in claimed] == ["START", "CLAIM", "INTENT", "CLAIM"]
    assert recoverer.claim("long")[-1].type == "CLAIM"
    for saga, n in (("handed-on", 5), ("long", 6)):
        recoverer.append(record(saga, n, "COMMITTED"))
        recoverer.release(saga)
    recoverer.close()
    live.append(record("live", 3, "COMMITTED"))
    live.close()
    last = opened(tmp_path)
    assert last.unfinished().saga_ids == ()
    done = last.compact(keep_days=0)
    assert done.kept == 0 and last.saga_ids() == () and last.verify().records == 0
    # No writer and no carry-over stream is left, and the log goes on.
    assert not list(tmp_path.glob("[cw]-*"))
    finish(last, "new")
    last.close()
    assert opened(tmp_path).saga_ids() == ("new",)


def test_a_forgotten_id_is_free_and_begins_anew(tmp_path: Path) -> None:
    log = opened(tmp_path)
    finish(log, "order-1")
    log.close()
    assert opened(tmp_path).compact(keep_days=89).sagas == 1
    again = opened(tmp_path)
    assert again.claim("order-1") == ()
    again.flush(again.append(record("order-1", 1, "START")))
    die(again)
    assert opened(tmp_path).unfinished().saga_ids == ("order-1",)
    assert opened(tmp_path).verify().intact


def test_retention_is_by_the_last_record(tmp_path: Path) -> None:
    log = opened(tmp_path)
    finish(log, "order-1", days_ago=10)
    log.close()
    for days in (30, 11, 10.5):
        assert opened(tmp_path).compact(keep_days=days).sagas == 0
    assert len(opened(tmp_path).read("order-1")) == 4
    for days in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="keep_days"):
            opened(tmp_path).compact(keep_days=days)
    assert opened(tmp_path).compact(keep_days=9.5).sagas == 1


def test_small_segments_of_dead_writers_become_one(tmp_path: Path) -> None:
    sagas = [f"s{i}" for i in range(20)]
    for saga in sagas:
        log = opened(tmp_path)
        log.claim(saga)
        log.append(record(saga, 1, "START", days_ago=1))
        log.release(saga)
        die(log)
    before = {saga: opened(tmp_path).read(saga) for saga in sagas}
    done = opened(tmp_path).compact()
    assert (done.retired, done.sagas, done.carried) == (20, 0, 20)
    assert len(list(tmp_path.glob("[cw]-*/*.jsonl"))) <= 5
    log = opened(tmp_path)
    assert {saga: log.read(saga) for saga in sagas} == before
    assert log.unfinished().saga_ids == tuple(sagas) and log.verify().intact
    assert [log.claim(saga)[-1].type for saga in sagas] == ["CLAIM"] * 20


@pytest.mark.parametrize("saga", ["old-0", "long"])
def test_streams_in_which_damage_is_met_are_left_as_they_are(tmp_path: Path, saga: str) -> None:
    live = furnish(tmp_path)
    victim = min(tmp_path.glob("w-*/00000001.jsonl"))
    if saga == "long":
        opened(tmp_path)._history.seal()  # pyright: ignore[reportPrivateUsage]
        assert victim.with_suffix(".index").exists()  # then only what is carried over is looked at
    else:
        for index in victim.parent.glob("*.index"):
            index.unlink()
    raw = bytearray(victim.read_bytes())
    raw[raw.index(b'"saga":"%b"' % saga.encode()) + 150] ^= 1
    victim.write_bytes(raw)
    first = {path: path.read_bytes() for path in victim.parent.glob("*.jsonl")}
    before = opened(tmp_path).verify()
    assert not before.intact and before.damage[0].saga_ids == (saga,)
    opened(tmp_path).compact()
    assert {path: path.read_bytes() for path in victim.parent.glob("*.jsonl")} == first
    after = opened(tmp_path).verify()
    assert after.damage == before.damage
    live.close()


def test_payloads_that_were_erased_stay_so_when_they_are_carried_over(tmp_path: Path) -> None:
    log = opened(tmp_path)
    finish(log, "done")
    log.claim("open")
    log.append(record("open", 1, "START", secret="4111"))
    log.release("open")
    log.close()
    (path,) = tmp_path.glob("w-*/*.jsonl")
    raw = path.read_bytes()
    line = next(line for line in raw.splitlines() if b"4111" in line)
    at = line.index(b',"salt"')
    path.write_bytes(raw.replace(line, line[:at] + b" " * (len(line) - at - 1) + b"}"))
    next(tmp_path.glob("w-*/*.index")).unlink()
    assert opened(tmp_path).compact().carried == 1
    reader = opened(tmp_path)
    assert reader.verify().intact and reader.unfinished().saga_ids == ("open",)
    with pytest.raises(LogCorrupted, match="erased"):
        reader.read("open")


def test_one_compaction_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path).close()
    inside: list[str] = []
    real = osfile.rename

    def rename(source: str, target: str) -> None:
        real(source, target)
        if target.endswith("manifest.json"):
            with pytest.raises(SagaBusy, match="another compaction"):
                opened(tmp_path).compact()
            assert opened(tmp_path).compact(dry_run=True).retired >= 0
            inside.append(target)

    monkeypatch.setattr(osfile, "rename", rename)
    opened(tmp_path).compact()
    assert inside
    opened(tmp_path).compact()


def test_a_damaged_or_missing_manifest_stops_everything(tmp_path: Path) -> None:
    furnish(tmp_path).close()
    opened(tmp_path).compact()
    manifest = tmp_path / "manifest.json"
    good = manifest.read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        manifest.write_bytes(bad)
        with pytest.raises((LogCorrupted, LogUnavailable)):
            opened(tmp_path)
        manifest.write_bytes(good[:at])
        with pytest.raises(LogCorrupted):
            opened(tmp_path)
    manifest.unlink()
    with pytest.raises(LogCorrupted, match="is missing"):
        opened(tmp_path)
    manifest.write_bytes(good)
    assert opened(tmp_path).verify().intact


def test_a_log_in_memory_forgets_as_well() -> None:
    log = MemoryLog(CLOCK)
    for saga, days in (("old", 90.0), ("young", 3.0)):
        log.claim(saga)
        log.append(record(saga, 1, "START", days_ago=days))
        log.append(record(saga, 2, "COMMITTED", days_ago=days))
        log.release(saga)
    log.claim("open")
    log.append(record("open", 1, "START"))
    log.release("open")
    assert log.compact(dry_run=True).sagas == 1 and log.read("old")
    assert log.compact().sagas == 1
    assert log.saga_ids() == ("young", "open")
    assert log.claim("old") == ()
    log.close()


# --- killed between any two file operations


class Killed(BaseException):
    """The process is dead: nothing that it still tries happens."""


CHANGES = ("pwrite", "fdatasync", "fsync", "rename", "unlink", "rmdir", "create_file", "make_directory")


def killed_at(patch: pytest.MonkeyPatch, at: int, between: Callable[[], None] | None = None) -> Callable[[], int]:
    """Let the process that calls the file system die before its change of that number."""
    done = 0
    busy = False
    me = threading.get_ident()  # the others' threads write indexes meanwhile

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            nonlocal done, busy
            if busy or threading.get_ident() != me:
                return call(*args)
            if done >= at:
                raise Killed
            done += 1
            if between is not None:
                busy = True
                between()
                busy = False
            return call(*args)

        return wrapped

    for name in CHANGES:
        patch.setattr(osfile, name, wrap(getattr(osfile, name)))
    return lambda: done


def each_death(place: Path, act: Callable[[Path], None]) -> Iterator[tuple[Path, bool]]:
    """Let `act` die before each of its changes, each time on a fresh copy of `place`; at last, let it live."""
    for at in count():
        directory = place.parent / f"{place.name}-{at}"
        shutil.copytree(place, directory)
        with pytest.MonkeyPatch.context() as patch:
            changes = killed_at(patch, at)
            try:
                act(directory)
                survived = True
            except Killed:
                survived = False
            assert changes() == at or survived
        yield directory, survived
        shutil.rmtree(directory)
        if survived:
            return


def test_a_compaction_killed_anywhere_loses_and_resurrects_nothing(fast_path: Path) -> None:
    place = fast_path / "log"
    live = furnish(place)
    before = contents(place)
    die(live)  # its copies have no living owner
    deaths = 0
    for directory, _ in each_death(place, lambda directory: opened(directory).compact() and None):
        check(directory, before)
        # Another one finishes what it left, and then nothing of it is left.
        opened(directory).compact()
        check(directory, before, forgotten=True)
        assert opened(directory).compact().retired == 0
        assert len([name for name in files(directory) if name.endswith("lock")]) == 1  # of the writer of the young
        recoverer = opened(directory)
        for saga in OPEN:
            assert recoverer.claim(saga)[:-1] == before[saga]
        recoverer.close()
        deaths += 1
    assert deaths > 30


def test_two_compactions_killed_one_after_the_other(fast_path: Path) -> None:
    place = fast_path / "log"
    die(furnish(place))
    before = contents(place)
    for number, (directory, _) in enumerate(each_death(place, lambda directory: opened(directory).compact() and None)):
        for second, _ in each_death(directory, lambda directory: opened(directory).compact() and None):
            check(second, before)
            if number % 7:
                break


def test_sealing_killed_anywhere_changes_no_answer(fast_path: Path) -> None:
    place = fast_path / "log"
    die(furnish(place))
    for index in place.glob("*/*.index"):
        index.unlink()
    before = contents(place)

    def seal(directory: Path) -> None:
        opened(directory)._history.seal()  # pyright: ignore[reportPrivateUsage]

    for directory, survived in each_death(place, seal):
        check(directory, before, forgotten=False)
        if survived:
            assert len(list(directory.glob("*/*.index"))) == len(list(directory.glob("*/*.jsonl")))


def test_a_live_writer_and_a_reader_at_every_change_of_a_compaction(fast_path: Path) -> None:
    live = furnish(fast_path)
    before = contents(fast_path)
    reader = opened(fast_path)
    reader.unfinished()
    expected = dict(before)
    numbers = iter(range(1, 10_000))

    def meanwhile() -> None:
        n = len(expected["live"]) + 1
        live.flush(live.append(record("live", n)))
        expected["live"] = (*expected["live"], record("live", n))
        finish(live, f"new-{next(numbers)}")
        assert set(reader.unfinished().saga_ids) == set(OPEN)
        for saga in OPEN:
            assert reader.read(saga) == expected[saga]
        for saga in YOUNG:
            assert reader.read(saga) == expected[saga]
        for saga in OLD:
            assert reader.read(saga) in (expected[saga], ())

    with pytest.MonkeyPatch.context() as patch:
        changes = killed_at(patch, 10_000, meanwhile)
        opened(fast_path).compact()
        assert changes() > 20
    check(fast_path, expected)
    live.close()
    assert opened(fast_path).verify().intact


def test_a_reader_in_the_middle_of_whose_reading_a_compaction_happens(fast_path: Path) -> None:
    place = fast_path / "log"
    die(furnish(place))
    for index in list(place.glob("*/*.index"))[::2]:
        index.unlink()
    before = contents(place)
    points = 0
    for warm in (False, True):
        for at in count():
            directory = fast_path / f"log-{warm}-{at}"
            shutil.copytree(place, directory)
            reader = opened(directory)
            if warm:
                reader.unfinished()
            with pytest.MonkeyPatch.context() as patch:
                happened = compacting_at(patch, at, directory)
                unfinished = reader.unfinished()
                found = {saga: reader.read(saga) for saga in before}
                listed = set(reader.saga_ids())
                verification = reader.verify()
            assert (set(unfinished.saga_ids), unfinished.damage) == (set(OPEN), ())
            for saga, records in before.items():
                assert found[saga] == records or (saga in OLD and not found[saga]), (at, saga)
            assert {*OPEN, *YOUNG} <= listed <= set(before)
            assert verification.intact, (at, verification)
            shutil.rmtree(directory)
            if not happened():
                break
            points += 1
    assert points > 100


def compacting_at(patch: pytest.MonkeyPatch, at: int, directory: Path) -> Callable[[], bool]:
    """Let a whole compaction happen before the read of that number."""
    reads, done, busy = 0, False, False

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            nonlocal reads, done, busy
            if not busy:
                if reads == at:
                    busy = True
                    assert opened(directory).compact().retired
                    busy, done = False, True
                reads += 1
            return call(*args)

        return wrapped

    for name in ("open_file", "pread"):
        patch.setattr(osfile, name, wrap(getattr(osfile, name)))
    return lambda: done


# --- beside live writers in other processes

WRITER = """
import os, sys
from agent_saga_core.log import FileLog, segments
from agent_saga_core.records import Record
from agent_saga_core.log import file as file_module, history as history_module
segments.SEGMENT_BYTES = 3000
file_module.INDEX_FROM = history_module.INDEX_FROM = 1

def put(saga, n, kind="INTENT"):
    log.append(Record(saga=saga, n=n, epoch=1, type=kind, time=1000.0, data={"n": n}))

directory, name = sys.argv[1:]
log = FileLog(directory)
log.claim(name)
put(name, 1, "START")
n, i = 1, 0
while True:
    saga = f"{name}-{i}"
    log.claim(saga)
    for step, kind in enumerate(("START", "INTENT", "DONE", "COMMITTED"), 1):
        put(saga, step, kind)
        if step == 2 and i % 3 == 0:
            n += 1
            put(name, n)
    log.release(saga)
    i += 1
    if i % 20 == 0:
        # What is told here is durable: the parent holds the log against it.
        os.write(1, f"{n}\\n".encode())
"""

COMPACTOR = """
import os, sys
from agent_saga_core.log import FileLog, osfile, retire, segments
from agent_saga_core.log import file as file_module, history as history_module
segments.SEGMENT_BYTES = 3000
retire.SMALL = 1500
file_module.INDEX_FROM = history_module.INDEX_FROM = 1
at, done = int(sys.argv[2]), 0

def wrap(call):
    def wrapped(*args):
        global done
        if done >= at:
            os.kill(os.getpid(), 9)
        done += 1
        return call(*args)
    return wrapped

for name in ("pwrite", "fdatasync", "fsync", "rename", "unlink", "rmdir", "create_file", "make_directory"):
    setattr(osfile, name, wrap(getattr(osfile, name)))
FileLog(sys.argv[1], create=False).compact(keep_days=1)
"""


def run_python(script: str, *args: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)


def test_compactors_killed_beside_live_writers_in_other_processes(tmp_path: Path) -> None:
    FileLog(tmp_path / "log").close()
    names = ["writer-a", "writer-b"]
    writers = [run_python(WRITER, tmp_path / "log", name) for name in names]
    try:
        told: list[int] = []
        for at in (*range(2, 60, 6), 10_000):
            told = [int(hear(writer)) for writer in writers]
            with run_python(COMPACTOR, tmp_path / "log", at) as compactor:
                assert compactor.wait(timeout=60) in (0, -signal.SIGKILL)
            log = FileLog(tmp_path / "log", create=False)
            for name, durable in zip(names, told, strict=True):
                assert name in log.unfinished().saga_ids
                assert len(log.read(name)) >= durable
            with pytest.raises(SagaBusy):
                log.claim(names[0])
            log.close()
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(timeout=20)
            assert writer.stdout is not None
            writer.stdout.close()
    log = FileLog(tmp_path / "log", create=False)
    assert log.verify().intact
    # Each killed writer leaves its long saga, and at most the one that it was in.
    unfinished = log.unfinished()
    assert set(names) <= set(unfinished.saga_ids) and len(unfinished.saga_ids) <= 4 and not unfinished.damage
    for name, durable in zip(names, told, strict=True):
        records = log.claim(name)
        assert [entry.n for entry in records] == list(range(1, len(records) + 1)) and len(records) > durable
    forgotten = log.compact(keep_days=1)
    assert forgotten.sagas > 0
    assert set(log.saga_ids()) >= set(names)
    log.close()
    assert FileLog(tmp_path / "log", create=False).verify().intact


def hear(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 1 << 20).splitlines()[-1]


# --- an index is a cache


def answers(directory: Path) -> tuple[Any, ...]:
    log = FileLog(directory, create=False, clock=CLOCK)
    unfinished = log.unfinished()
    return contents(directory), unfinished, sorted(log.saga_ids()), log.read("never-met"), log.verify()


def test_a_damaged_index_changes_no_answer(fast_path: Path) -> None:
    die(furnish(fast_path))
    opened(fast_path)._history.seal()  # pyright: ignore[reportPrivateUsage]
    expected = answers(fast_path)
    indexes = sorted(fast_path.glob("*/*.index"))
    assert len(indexes) > 3
    kept = {path: path.read_bytes() for path in indexes}
    for path, good in kept.items():
        for at in range(0, len(good), 61):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            for data in (bytes(bad), good[:at], good + b"\0"):
                path.write_bytes(data)
                assert answers(fast_path) == expected, (path.name, at)
        for other in kept.values():
            path.write_bytes(other)
            assert answers(fast_path) == expected, path.name
        path.unlink()
        assert answers(fast_path) == expected
        path.write_bytes(good)


HOSTILE: dict[str, list[Any]] = {
    "index": [0, 2, "1"],
    "segment": [0, -1, 7, 2**70],
    "size": [-1, 0, 2**62],
    "end": [-1, 0, 1, 10**9],
    "last": [-1, 0, 1, 10**9],
    "base": [-1, 5, 2**70],
    "chain": ["", "\u20ac", "0" * 64],
    "chain_before": ["", "\u20ac"],
    "saga": ["", "other", "\u0000"],
    "n": [-1, 0, 2**70],
    "n_before": [-1, 5],
    "synced": [-1, 2**63],
    "records": [-1, 2**63],
    "latest": [-1.0, 1e308],
    "peers": [["x"], [None], "x"],
    "whole": [-1, 0, 1, 2**40],
    "parts": [
        [["long", 1.0, False, [1]]],
        [["long", 1.0, False, [1, 2, 3]]],
        [["long", 1.0, False, [1, 10**12, 3]]],
        [["long", 1.0, False, [-1, 300, 3]]],
        [["long", 1.0, True, []]],
        [["never-met", 1.0, False, [1, 300, 3]]],
        [["long", 1.0, False, [2**64, 300, 3]]],
        [[]],
        None,
    ],
}


@pytest.mark.parametrize("field", HOSTILE)
def test_a_forged_index_gives_a_verdict_and_nothing_else(fast_path: Path, field: str) -> None:
    die(furnish(fast_path))
    opened(fast_path)._history.seal()  # pyright: ignore[reportPrivateUsage]
    good = contents(fast_path)
    for path in sorted(fast_path.glob("*/*.index"))[:3]:
        kept = path.read_bytes()
        head, newline, tables = kept.partition(b"\n")
        for value in HOSTILE[field]:
            fields = {name: old for name, old in json.loads(head).items() if name != "digest"}
            body = json.dumps({**fields, field: value}).encode()[1:] + newline + tables
            path.write_bytes(b'{"digest":"%b",%b' % (sha256(body).hexdigest().encode(), body))
            for saga, found in refusals(fast_path).items():
                # It may hide records, as whoever can forge it could; it makes none up.
                assert not found or found == good[saga][: len(found)], (value, saga)
            with suppress(LogCorrupted):
                opened(fast_path).compact(dry_run=True)
        path.write_bytes(kept)


def test_a_forged_table_gives_a_verdict_and_nothing_else(fast_path: Path) -> None:
    die(furnish(fast_path))
    opened(fast_path)._history.seal()  # pyright: ignore[reportPrivateUsage]
    good = contents(fast_path)
    for path in sorted(fast_path.glob("*/*.index")):
        head, newline, tables = path.read_bytes().partition(b"\n")
        for at in range(0, len(tables), 3):
            for value in (0, 255):
                changed = tables[:at] + bytes([value]) + tables[at + 1 :]
                body = head.partition(b'",')[2] + newline + changed
                path.write_bytes(b'{"digest":"%b",%b' % (sha256(body).hexdigest().encode(), body))
                for saga, found in refusals(fast_path).items():
                    assert not found or found == good[saga], (at, saga)
        body = head.partition(b'",')[2] + newline + tables
        path.write_bytes(b'{"digest":"%b",%b' % (sha256(body).hexdigest().encode(), body))
        assert refusals(fast_path) == good


def test_who_takes_a_saga_for_absent_first_makes_the_manifest_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(tmp_path)
    finish(log, "order-1")
    log.close()
    opened(tmp_path).compact()
    later = opened(tmp_path)
    later.claim("warm", fresh=True)
    synced: list[str] = []
    real = osfile.sync_directory

    def sync_directory(path: str) -> None:
        synced.append(path)
        real(path)

    monkeypatch.setattr(osfile, "sync_directory", sync_directory)
    assert later.claim("order-1") == () and synced == [str(tmp_path)]
    assert later.claim("order-2") == () and synced == [str(tmp_path)]
    later.close()


def test_a_segment_that_is_not_what_was_indexed_is_read_as_if_it_had_no_index(fast_path: Path) -> None:
    die(furnish(fast_path))
    opened(fast_path)._history.seal()  # pyright: ignore[reportPrivateUsage]
    good = contents(fast_path)
    for segment in sorted(fast_path.glob("*/*.jsonl")):
        raw = segment.read_bytes()
        for at in range(3, len(raw), 53):
            bad = bytearray(raw)
            bad[at] ^= 1 << at % 8
            segment.write_bytes(bad)
            indexed = refusals(fast_path)
            assert not FileLog(fast_path, create=False).verify().intact
            for saga, found in indexed.items():
                # What is read is what was written, though a damage elsewhere in the segment is not looked for.
                assert found in (good[saga], None), (segment.name, at, saga)
            index = segment.with_suffix(".index")
            kept = index.read_bytes()
            index.unlink()
            for saga, found in refusals(fast_path).items():
                assert found in (good[saga], None) and (found is not None or saga_concerned(raw, at, saga))
                assert found is None or indexed[saga] is not None or saga in OPEN
            index.write_bytes(kept)
        segment.write_bytes(raw)


def saga_concerned(raw: bytes, at: int, saga: str) -> bool:
    """Whether the line of that byte is the saga's, or one that could be anybody's."""
    line = raw[raw.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0]
    return b'"saga":"%b"' % saga.encode() in line or b'"saga"' not in line[:90] or raw.count(b"\n", at) <= 1


def refusals(directory: Path) -> dict[str, tuple[Record, ...] | None]:
    log = FileLog(directory, create=False, clock=CLOCK)
    found: dict[str, tuple[Record, ...] | None] = {}
    for saga in (*OLD, *YOUNG, *OPEN):
        try:
            found[saga] = log.read(saga)
        except LogCorrupted:
            found[saga] = None
    log.unfinished()
    log.saga_ids()
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks which file a descriptor is")
def test_opening_reads_no_segment_that_has_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    log.claim("open")
    log.append(record("open", 1, "START"))
    for n in range(200):
        finish(log, f"s{n}")
    log.release("open")
    log.close()
    opened(tmp_path)._history.seal()  # pyright: ignore[reportPrivateUsage]
    whole = sum(path.stat().st_size for path in tmp_path.glob("*/*.jsonl"))
    read: dict[bool, int] = {True: 0, False: 0}
    real = osfile.pread

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        data = real(descriptor, size, offset)
        read[os.readlink(f"/proc/self/fd/{descriptor}").endswith(".jsonl")] += len(data)
        return data

    monkeypatch.setattr(osfile, "pread", pread)
    reader = opened(tmp_path)
    assert reader.unfinished().saga_ids == ("open",)
    assert read[True] * 20 < whole < 20 * read[False]
    # A saga that ended long ago is found without a scan, and so is that one was never there.
    read[True] = 0
    assert len(reader.read("s77")) == 4 and reader.read("never-met") == ()
    assert read[True] < 4 * segments.SEGMENT_BYTES
    # What is kept in memory are the sagas that are open, and those that lie in two segments.
    view = reader._history.refresh()  # pyright: ignore[reportPrivateUsage]
    assert not view.notes and len(view.parts) <= 1 + len(view.indexes)


def test_tables_are_dropped_from_memory_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "LOADED_BYTES", 100)
    log = opened(tmp_path)
    for n in range(60):
        finish(log, f"s{n}")
    log.close()
    reader = opened(tmp_path)
    for _ in range(2):
        assert all(len(reader.read(f"s{n}")) == 4 for n in range(60)) and reader.read("never-met") == ()
        view = reader._history.refresh()  # pyright: ignore[reportPrivateUsage]
        assert len(view.indexes) > 5
        assert sum(index.table is not None for index in view.indexes.values()) < len(view.indexes)
    # One that is damaged by then is noticed.
    for path in tmp_path.glob("*/*.index"):
        path.write_bytes(b"")
    assert all(len(reader.read(f"s{n}")) == 4 for n in range(60)) and reader.read("never-met") == ()
    reader.close()
