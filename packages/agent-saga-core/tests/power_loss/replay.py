"""Opening what a loss of power left, and holding it against what was told before."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from agent_saga_core.errors import SagaError
from agent_saga_core.log import FileLog
from agent_saga_core.records import FINAL, Record

from .disk import Disk, Order, in_order
from .recording import ROOT, Promises, Recording, StillClock, Tree


class Lost(AssertionError):
    """A surviving disk does not hold what was told, or is taken for damaged."""


@dataclass
class Count:
    """How much was looked at."""

    crashes: int = 0
    """Operations after which the power failed."""
    exhausted: int = 0
    """How many of these were looked at in every possible outcome."""
    outcomes: int = 0
    """Outcomes that were composed."""
    opened: int = 0
    """Those that were opened: of equal ones, one."""
    seen: set[int] = field(default_factory=set[int])

    def __str__(self) -> str:
        return (
            f"{self.crashes} crash points, {self.exhausted} of them exhausted; "
            f"{self.outcomes} outcomes, {self.opened} different ones opened"
        )


def replay(
    recording: Recording,
    into: Path,
    *,
    at_most: int,
    order: Order = in_order,
    seed: str = "",
    since: int = 0,
    count: Count | None = None,
) -> Count:
    """Let the power fail after every operation of a recording, and open what is left.

    Args:
        recording: The recording.
        into: A directory, made if need be, in which one outcome after the other is laid out.
        at_most: How many outcomes of one crash are composed; see `Disk.survivors`.
        order: How names survive.
        seed: Chooses among more outcomes than that.
        since: After how many operations the power may fail for the first time.
        count: Of recordings before this one: what they left is not opened again.

    Raises:
        Lost: The first outcome that breaks a promise.
    """
    count = count or Count()
    disk = Disk(recording.start, order)
    for at, op in enumerate([None, *recording.ops]):
        if op is not None:
            disk.apply(op)
        if at < since:
            continue
        promises = recording.told(at)
        trees, all_of_them = disk.survivors(at_most, f"{seed}{at}")
        count.crashes += 1
        count.exhausted += all_of_them
        for tree in trees:
            count.outcomes += 1
            durable = tuple(sorted(promises.durable.items()))
            key = hash(
                (_frozen(tree, ROOT), durable, promises.made, promises.may_be_gone, tuple(promises.absent.items()))
            )
            if key in count.seen:
                continue
            count.seen.add(key)
            count.opened += 1
            lay_out(tree, into)
            try:
                look(recording, into, promises)
            except (SagaError, AssertionError) as error:
                raise Lost(f"power loss after operation {at} ({_named(op)}): {error}") from error
    return count


def _named(op: object) -> str:
    text = repr(op)
    return text if len(text) < 200 else f"{text[:200]}..."


def _frozen(tree: Tree, number: int) -> object:
    if number in tree.files:
        return tree.files[number]
    return tuple((name, _frozen(tree, entry)) for name, entry in sorted(tree.directories[number].items()))


def outcomes(recording: Recording, at_most: int, chance: random.Random) -> Iterator[tuple[int, Tree]]:
    """Some crashes of a recording with one outcome each: after how many operations, and what is left."""
    for at in sorted(chance.sample(range(len(recording.ops) + 1), min(at_most, len(recording.ops)))):
        disk = Disk(recording.start)
        for op in recording.ops[:at]:
            disk.apply(op)
        trees, _ = disk.survivors(64, str(chance.random()))
        yield at, chance.choice(list(trees))


def lay_out(tree: Tree, into: Path) -> None:
    """Make a real directory of a tree. What is there already and right, the many empty lock files, stays."""

    def lay(number: int, path: str) -> None:
        wanted = tree.directories[number]
        os.makedirs(path, exist_ok=True)
        with os.scandir(path) as entries:
            there = {entry.name: entry for entry in entries}
        for name, entry in there.items():
            number = wanted.get(name, -1)
            if entry.is_dir():
                if number not in tree.directories:
                    shutil.rmtree(entry.path)
            elif number not in tree.files or entry.stat().st_size or tree.files[number]:
                os.unlink(entry.path)
        for name, number in wanted.items():
            child = f"{path}/{name}"
            if number in tree.directories:
                lay(number, child)
            elif not os.path.exists(child):
                with open(child, "xb") as file:
                    file.write(tree.files[number])

    lay(ROOT, str(into))


def look(recording: Recording, root: Path, promises: Promises) -> None:
    """Open what survived, and go on from there: everything told is there, nothing is damaged, nothing is missing."""
    directory = root / recording.log
    logs: list[FileLog] = []

    def opened() -> FileLog:
        logs.append(FileLog(directory, create=not promises.made, clock=StillClock()))
        return logs[-1]

    try:
        log = opened()
        _intact(log)
        histories = {saga: log.read(saga) for saga in recording.sagas}
        assert set(log.saga_ids()) == {saga for saga, records in histories.items() if records}
        for saga, records in histories.items():
            for record in records:
                lives = [life for life, appended in recording.records.get((saga, record.n), ()) if appended == record]
                assert lives, f"record {record.n} of {saga!r} was never appended"
                assert lives[-1] >= promises.absent.get(saga, 0), f"record {record.n} of {saga!r} came back"
            assert [record.n for record in records] == list(range(1, len(records) + 1)), saga
            durable = promises.durable.get(saga, 0)
            if records or saga not in promises.may_be_gone:
                assert len(records) >= durable, f"{saga!r}: {durable} were durable, {len(records)} are"
        after = {saga: _go_on(log, saga, records) for saga, records in histories.items()}
        _intact(opened())
        for saga, records in after.items():
            assert logs[-1].read(saga) == records, saga
    finally:
        for log in logs:
            with suppress(SagaError):
                log.close()


def flipped(recording: Recording, tree: Tree, root: Path, chance: random.Random) -> bool:
    """Flip one bit of a whole line of what survived: it is found, torn end or not. False if there is no such line.

    Raises:
        Lost: It is not found.
    """
    lay_out(tree, root)
    lines = [(path, raw, end) for path in Recording(root, recording.log).segments() for path, raw, end in _whole(path)]
    if not lines:
        return False
    path, raw, end = chance.choice(lines)
    # The newline just before a lost block is left out: with its bit flipped, it and the block look like one lost line.
    at = chance.randrange(end - 1)
    bad = bytearray(raw)
    bad[at] ^= 1 << chance.randrange(8)
    path.write_bytes(bad)
    log = FileLog(root / recording.log, create=False, clock=StillClock())
    try:
        intact = log.verify().intact
    finally:
        log.close()
    path.write_bytes(raw)
    if intact:
        raise Lost(f"bit flipped at byte {at} of {path.name}, and nobody noticed")
    return True


def _whole(path: Path) -> Iterator[tuple[Path, bytes, int]]:
    """The file and the end of its last whole line before anything torn, if there is one."""
    raw = path.read_bytes()
    hole = raw.find(b"\0")
    end = raw.rfind(b"\n", 0, hole if hole >= 0 else len(raw)) + 1
    if end > 1:
        yield path, raw, end


def _go_on(log: FileLog, saga: str, records: tuple[Record, ...]) -> tuple[Record, ...]:
    claimed = log.claim(saga)
    over = bool(records) and records[-1].type in FINAL
    assert claimed[: len(records)] == records
    assert len(claimed) == len(records) + (bool(records) and not over)
    if over:
        return records
    n = len(claimed) + 1
    epoch = claimed[-1].epoch if claimed else 1
    record = Record(saga=saga, n=n, epoch=epoch, type="INTENT" if claimed else "START", time=1000.0, data={"after": 1})
    log.flush(log.append(record))
    return (*claimed, record)


def _intact(log: FileLog) -> None:
    verification = log.verify()
    assert verification.intact, f"taken for damaged: {verification.first_broken}"
    damage = log.unfinished().damage
    assert not damage, f"taken for damaged: {damage}"
