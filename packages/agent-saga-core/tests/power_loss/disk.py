"""What may be left of a recording when the power fails: the model, and its limits.

A crash may come after any operation. What survives is composed of choices that are independent of each other:

- **Contents.** What an `fsync` or `fdatasync` covered is there, with the length that it had. Of what came later, each
  sector of 512 bytes is on its own, and holds what any of the writes since then left in it, or none of them: writes are
  lost, torn and reordered. A sector is never a mixture of two of these, which drives promise and which log records of
  PostgreSQL and SQLite rely on ("torn pages", "powersafe overwrite") for the bytes that a write does not change.
- **Length.** Kept apart from the contents: any length that the file had since the last sync, or any sector's boundary
  in between. What lies within and was not written reads as NUL, as ext4 (delayed allocation), xfs (unwritten extents)
  and btrfs give it; what lies beyond is cut.
- **Names.** An `fsync` of a directory makes its entries durable; that of a file does not make the file's name durable,
  as fsync(2) of Linux warns. Later changes of one directory survive up to some point, in their order (`in_order`: the
  metadata journals of ext4 and xfs), or each for itself (`any_order`: POSIX, which promises nothing; the ALICE study of
  Pillai et al., OSDI 2014, found applications that break on exactly this). Directories are independent of each other,
  so that a new directory may be there without what is in it. A change that touches two names, a rename, is one.

That is more than any one file system loses: their journals order much that is independent here. What it leaves out:

- a drive that lies about a flush, or gives up what was durable; a sector that reads as garbage or as an old file's data
  (ext4 with data=writeback could show some; a log that meets it sees damage, and stops);
- an `fsync` that fails and drops what it could not write, while the page cache still shows it (Rebello et al., ATC
  2020): the log takes no more records after one, which `test_log_commit` covers;
- a rename from one directory to another, which the log never does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from .recording import ROOT, Cut, Names, Op, SyncFile, SyncNames, Tree, Write

SECTOR = 512


class Order(NamedTuple):
    """How the names of one directory survive."""

    name: str
    choices: Callable[[int], int]
    """In how many ways so many changes survive."""
    survives: Callable[[int, int], bool]
    """Whether the change of that place survives in a way; the last way is that all do."""


in_order = Order("in order", lambda changes: changes + 1, lambda at, way: at < way)
any_order = Order("in any order", lambda changes: 1 << changes, lambda at, way: bool(way >> at & 1))


class _Contents:
    """A file: what is durable, and the lengths and sectors that it may have beyond that."""

    def __init__(self, durable: bytes) -> None:
        self.durable = durable
        self._later: list[tuple[int, Write | Cut]] = []

    def change(self, at: int, op: Write | Cut) -> None:
        self._later.append((at, op))

    def sync(self, covers: int) -> None:
        for at, op in self._later:
            if at < covers:
                self.durable = _apply(self.durable, op)
        self._later = [(at, op) for at, op in self._later if at >= covers]

    def whole(self) -> bytes:
        return self._steps()[-1]

    def _steps(self) -> list[bytes]:
        steps = [self.durable]
        for _, op in self._later:
            steps.append(_apply(steps[-1], op))
        return steps

    def sizes(self) -> list[int]:
        """The lengths that may have survived, the last one being the latest."""
        sizes = {len(step) for step in self._steps()}
        sizes.update(range(-(-min(sizes) // SECTOR) * SECTOR, max(sizes), SECTOR))
        latest = len(self.whole())
        return [*sorted(sizes - {latest}), latest]

    def sectors(self) -> dict[int, list[bytes]]:
        """What may have survived of each sector that is not certain, the latest version last."""
        steps = self._steps()
        longest = max(map(len, steps))
        padded = [step.ljust(longest, b"\0") for step in steps]
        found: dict[int, list[bytes]] = {}
        for start in range(0, longest, SECTOR):
            versions = [step[start : start + SECTOR] for step in padded]
            if any(old != new for old, new in pairwise(versions)):
                found[start] = [*dict.fromkeys(versions[:-1]), versions[-1]]
        return found


def _apply(content: bytes, op: Write | Cut) -> bytes:
    if isinstance(op, Cut):
        return content[: op.size].ljust(op.size, b"\0")
    content = content.ljust(op.offset, b"\0")
    return content[: op.offset] + op.data + content[op.offset + len(op.data) :]


class _Entries:
    """A directory: the names that are durable, and the changes that may be."""

    def __init__(self, durable: dict[str, int]) -> None:
        self.durable = durable
        self.later: list[tuple[int, Names]] = []

    def sync(self, covers: int) -> None:
        for at, op in self.later:
            if at < covers:
                self.durable = _renamed(self.durable, op)
        self.later = [(at, op) for at, op in self.later if at >= covers]


def _renamed(entries: dict[str, int], op: Names) -> dict[str, int]:
    entries = dict(entries)
    for name, number in op.after:
        if number is None:
            entries.pop(name, None)
        else:
            entries[name] = number
    return entries


class Disk:
    """A disk during a recording: `apply` one operation after the other, and ask what a loss of power leaves."""

    def __init__(self, start: Tree, order: Order = in_order) -> None:
        self._order = order
        self._files = {number: _Contents(content) for number, content in start.files.items()}
        self._directories = {number: _Entries(entries) for number, entries in start.directories.items()}
        self._at = 0

    def apply(self, op: Op) -> None:
        """The operation returned."""
        if isinstance(op, (Write, Cut)):
            self._contents(op.file).change(self._at, op)
        elif isinstance(op, SyncFile):
            self._contents(op.file).sync(op.covers)
        elif isinstance(op, Names):
            self._entries(op.directory).later.append((self._at, op))
            for _, number in op.after:
                if number is not None and op.new:
                    self._contents(number) if op.new == "file" else self._entries(number)
        elif isinstance(op, SyncNames):
            self._entries(op.directory).sync(op.covers)
        self._at += 1

    def _contents(self, number: int) -> _Contents:
        return self._files.setdefault(number, _Contents(b""))

    def _entries(self, number: int) -> _Entries:
        return self._directories.setdefault(number, _Entries({}))

    def whole(self) -> Tree:
        """What is there as long as the power is."""
        return _Choices(self._files, self._directories, self._order).latest()

    def survivors(self, at_most: int, seed: str) -> tuple[Iterator[Tree], bool]:
        """What may be left now, and whether that is all there is.

        More than `at_most` are not enumerated: then it is the extremes (all is lost, all survives; each single choice
        against all others, both ways) and as many at random as that leaves, the same for the same seed.
        """
        choices = _Choices(self._files, self._directories, self._order)
        if choices.count <= at_most:
            return map(choices.tree, choices.all()), True
        return map(choices.tree, choices.some(at_most, random.Random(seed))), False


class _Choices:
    """Everything that is not certain, as a row of numbers: the highest of each is that the latest survived."""

    def __init__(self, files: dict[int, _Contents], directories: dict[int, _Entries], order: Order) -> None:
        self._order = order
        self._directories = directories
        self._files = files
        self._names = [number for number, entries in directories.items() if entries.later]
        self._sizes = [(number, sizes) for number, one in files.items() if len(sizes := one.sizes()) > 1]
        self._sectors = [
            (number, start, versions) for number, one in files.items() for start, versions in one.sectors().items()
        ]
        self._ways = [
            *(order.choices(len(directories[number].later)) for number in self._names),
            *(len(sizes) for _, sizes in self._sizes),
            *(len(versions) for *_, versions in self._sectors),
        ]
        self.count = prod(self._ways)

    def all(self) -> Iterator[Sequence[int]]:
        return product(*map(range, self._ways))

    def some(self, at_most: int, chance: random.Random) -> Iterator[Sequence[int]]:
        most = [ways - 1 for ways in self._ways]
        rows = {tuple(most): None, tuple([0] * len(most)): None}
        for at in range(len(most)):
            for one, others in ((0, most), (most[at], [0] * len(most))):
                rows[*others[:at], one, *others[at + 1 :]] = None
        # Where the length is lost, little can be learned from the sectors: half of the rows keep lengths and names.
        kept = len(self._names) + len(self._sizes)
        tries = 4 * at_most  # a row may come twice
        while len(rows) < at_most and tries:
            tries -= 1
            row = [chance.randrange(ways) for ways in self._ways]
            if chance.random() < 0.5:
                row[:kept] = most[:kept]
            rows[tuple(row)] = None
        return iter(rows)

    def latest(self) -> Tree:
        return self.tree([ways - 1 for ways in self._ways])

    def tree(self, row: Sequence[int]) -> Tree:
        """The directories and files of one row; what no name leads to any more is left out."""
        rest = iter(row)
        entries = {number: one.durable for number, one in self._directories.items()}
        for number, way in zip(self._names, rest, strict=False):
            for at, (_, op) in enumerate(self._directories[number].later):
                if self._order.survives(at, way):
                    entries[number] = _renamed(entries[number], op)
        # `zip` takes from its first argument first, so that no number of the row is lost between the loops.
        sizes = {number: len(one.durable) for number, one in self._files.items()}
        for (number, options), way in zip(self._sizes, rest, strict=False):
            sizes[number] = options[way]
        contents = {number: bytearray(one.durable) for number, one in self._files.items()}
        for (number, start, versions), way in zip(self._sectors, rest, strict=False):
            content = contents[number]
            content.extend(bytes(max(0, start + len(versions[way]) - len(content))))
            content[start : start + len(versions[way])] = versions[way]
        found = Tree({}, {})
        left = [ROOT]
        while left:
            number = left.pop()
            if number in contents:
                content = contents[number]
                found.files[number] = bytes(content[: sizes[number]]).ljust(sizes[number], b"\0")
            else:
                found.directories[number] = entries.get(number, {})
                left += entries.get(number, {}).values()
        return found
