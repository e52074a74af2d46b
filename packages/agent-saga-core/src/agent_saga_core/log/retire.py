"""Compaction: finished sagas leave by whole segments, what must stay is carried over, small segments are merged.

The rule that keeps every saga: what a manifest retires is, saga by saga, either finished with all its records in what
is retired, or copied to a carry-over stream that the same manifest makes count. `docs/log-format.md`, "Retiring".
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from heapq import merge
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from agent_saga_core.errors import SagaBusy
from agent_saga_core.log import osfile, segments
from agent_saga_core.log.base import Compaction, history_fault
from agent_saga_core.log.history import File, History, View
from agent_saga_core.log.index import Index, Stale, line_at, line_check
from agent_saga_core.log.lines import Whole, encoded_of
from agent_saga_core.log.locks import lock_whole, unlock_whole
from agent_saga_core.log.manifest import (
    MANIFEST,
    Manifest,
    Run,
    encode_manifest,
    parse_manifest,
    read_manifest,
)
from agent_saga_core.log.scan import MAX_SEGMENT_BYTES
from agent_saga_core.log.segments import (
    END_LINE,
    HEAD_LINE,
    Tail,
    first_tail,
    prev_field,
    segment_name,
    stream_line,
    stream_names,
)
from agent_saga_core.records import FORMAT_VERSION, RECORD_LINE, Encoded, digest_fits, finish_line, header_fits

__all__ = ["COMPACTING", "adopt", "compact"]

COMPACTING: Final = "compact"
"""Locked while a compaction runs."""

SMALL: Final = 1 << 20
"""Segments of dead writers below this are merged."""

CARRY_AT_MOST: Final = 4
"""A longer segment is carried over when no more than this fraction of its records, one in so many, must stay."""

_PIECE: Final = 1 << 20
_OWN_FILE = re.compile(r"lock|[0-9]{8}\.(?:jsonl|index)|new-[0-9a-f]{16}")


class _Plan(NamedTuple):
    retired: dict[File, Index]
    forgotten: frozenset[str]
    """Those of the forgotten sagas that no one segment holds whole."""
    kept: dict[File, int]
    """How many records of each retired segment must be carried over."""

    def sagas(self, cutoff: float) -> int:
        return len(self.forgotten) + sum(each.whole for each in self.retired.values() if each.latest <= cutoff)


def compact(
    history: History,
    directory: str,
    log_id: str,
    scheme: str,
    *,
    cutoff: float,
    dry_run: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Compaction:
    """Retire what is finished and no younger than `cutoff`, and merge what is small.

    Whatever ends this early, no saga is lost and none comes back; the next compaction removes what was left.

    Raises:
        SagaBusy: Another compaction is running.
        OSError: A file cannot be read or written.
    """
    if dry_run:
        view, plan = _planned(history, cutoff)
        carried = sum(plan.kept.values())
        sizes = [plan.kept[file] * index.page.size // (index.records or 1) for file, index in plan.retired.items()]
        return _result(view, plan, cutoff, carried, sum(sizes))
    with _alone(directory, scheme):
        manifest = _tidy(directory, log_id)
        while True:
            view, plan = _planned(history, cutoff)
            try:
                done = _carry_out(view, plan, directory, log_id, cutoff, manifest, progress)
                break
            except Stale as stale:
                history.distrust(stale)
        _tidy(directory, log_id)
        history.seal()
        return done


def _planned(history: History, cutoff: float) -> tuple[View, _Plan]:
    history.refresh()
    return history.ask(lambda view: (view, _plan(view, cutoff)))


@contextmanager
def _alone(directory: str, scheme: str) -> Generator[None]:
    descriptor = osfile.create_file(f"{directory}/{COMPACTING}")
    try:
        if not lock_whole(descriptor, scheme):
            raise SagaBusy(f"another compaction of the log at {directory} is running; wait until it is done")
        try:
            yield
        finally:
            unlock_whole(descriptor, scheme)  # a child that was forked meanwhile must not keep it
    finally:
        os.close(descriptor)


def _result(view: View, plan: _Plan, cutoff: float, carried: int, bytes_kept: int) -> Compaction:
    return Compaction(
        retired=len(plan.retired),
        sagas=plan.sagas(cutoff),
        carried=carried,
        freed=sum(index.page.size for index in plan.retired.values()) - bytes_kept,
        kept=len(view.indexes) + len(view.notes) - len(plan.retired),
        unit="segment",
    )


def adopt(directory: str, log_id: str, scheme: str, wholes: Sequence[Whole]) -> None:
    """Put the histories of sagas that are not there into a carry-over stream, and make it count: all of them at once.

    Whatever ends this early leaves a stream that no manifest names; the next compaction, or adoption, removes it.

    Raises:
        SagaBusy: A compaction is running.
        OSError: A file cannot be read or written.
    """
    with _alone(directory, scheme):
        manifest = _tidy(directory, log_id)
        if read_manifest(directory) is None:
            manifest = _publish(directory, msgspec.structs.replace(manifest, log=log_id))
        carry = _Carry(directory, log_id)
        try:
            for whole in wholes:
                for n, encoded in zip(whole.numbers, whole.lines, strict=True):
                    carry.put(encoded, n)
            carry.end()
        finally:
            carry.close()
        _publish(directory, msgspec.structs.replace(manifest, carried=[*manifest.carried, carry.name]))


# --- what may leave


def _plan(view: View, cutoff: float) -> _Plan:
    """Choose the segments to retire.

    It begins with every segment that nobody writes to and whose stream is intact. A saga may be forgotten if it ended,
    is old enough and has no record outside of them. A segment of which too much would then have to be carried over is
    taken out again, until nothing changes.
    """
    chosen = {file: index for file, index in view.indexes.items() if file[0] not in view.damage}
    for file in _twice(view):
        chosen.pop(file, None)
    closed = _closed(view, cutoff)
    while True:
        forgotten = frozenset(saga_id for saga_id, files in closed.items() if files <= chosen.keys())
        kept = {file: _to_keep(index, forgotten, cutoff) for file, index in chosen.items()}
        not_worth = _not_worth(view, chosen, kept)
        if not not_worth:
            return _Plan(chosen, forgotten, kept)
        for file in not_worth:
            del chosen[file]


def _twice(view: View) -> set[File]:
    """Segments that hold a saga whole of which there is more elsewhere, or another one of the same hash."""
    found: set[File] = set()
    tables = (_keys(file, index) for file, index in view.indexes.items())
    for (key, file), (next_key, next_file) in pairwise(merge(*tables)):
        if key == next_key:
            found |= {file, next_file}
    elsewhere = set(view.parts).union(*(notes.sagas for notes in view.notes.values()))
    for saga_id in elsewhere:
        found.update(file for file, _ in view.begun_at(saga_id))
    return found


def _keys(file: File, index: Index) -> Iterator[tuple[int, File]]:
    for key in index.hashes():
        yield key, file


def _closed(view: View, cutoff: float) -> dict[str, frozenset[File]]:
    """The sagas that ended, are old enough, and are in complete segments only, but in more than one; and which."""
    growing = {saga_id for notes in view.notes.values() for saga_id in notes.sagas}
    named = {saga_id for found in view.damage.values() for damage in found for saga_id in damage.saga_ids or ()}
    closed: dict[str, frozenset[File]] = {}
    for saga_id, pieces in view.parts.items():
        if saga_id in growing or saga_id in named or not any(places.ended for places in pieces.values()):
            continue
        numbers = sorted(n for places in pieces.values() for n, _, _ in places.sorted())
        if history_fault(numbers) is None and all(view.indexes[file].latest <= cutoff for file in pieces):
            closed[saga_id] = frozenset(pieces)
    return closed


def _to_keep(index: Index, forgotten: frozenset[str], cutoff: float) -> int:
    if index.latest > cutoff:
        return index.records
    return sum(len(places.sorted()) for saga_id, places in index.parts.items() if saga_id not in forgotten)


def _not_worth(view: View, chosen: dict[File, Index], kept: dict[File, int]) -> list[File]:
    costly = [file for file, index in chosen.items() if kept[file] * CARRY_AT_MOST > index.records]
    small = [file for file in costly if file[0] in view.finished and chosen[file].page.size < SMALL]
    carried = [file for file in chosen if kept[file] and file not in costly]
    return costly if len(small) + len(carried) < 2 else [file for file in costly if file not in small]


# --- carrying out


def _carry_out(
    view: View,
    plan: _Plan,
    directory: str,
    log_id: str,
    cutoff: float,
    manifest: Manifest,
    progress: Callable[[int], None] | None,
) -> Compaction:
    carry: _Carry | None = None
    if any(plan.kept.values()):
        if read_manifest(directory) is None:
            manifest = _publish(directory, msgspec.structs.replace(manifest, log=log_id))
        carry = _Carry(directory, log_id)
    walked = 0
    try:
        for file in sorted(plan.retired, key=lambda file: (view.streams[file[0]].writer[2:], file[1])):
            index = plan.retired[file]
            if carry is not None and plan.kept[file]:
                for line in _kept_lines(view.path(file), index, plan.forgotten, cutoff):
                    carry.add(line)
            walked += index.records
            if progress is not None:
                progress(walked)
        if carry is not None:
            carry.end()
    finally:
        if carry is not None:
            carry.close()
    gone = _gone(view, plan)
    if plan.retired or gone:
        _publish(directory, _next(view, plan, gone, log_id, manifest, () if carry is None else (carry.name,)))
    if carry is None:
        return _result(view, plan, cutoff, 0, 0)
    return _result(view, plan, cutoff, carry.records, carry.tail.position)


def _gone(view: View, plan: _Plan) -> set[int]:
    """The streams of which nothing is left."""
    left = {file[0] for file in [*view.indexes, *view.notes] if file not in plan.retired}
    return {number for number in view.finished if number not in left and number not in view.damage}


def _next(view: View, plan: _Plan, gone: set[int], log_id: str, manifest: Manifest, carried: Iterable[str]) -> Manifest:
    retired = {name: list(runs) for name, runs in manifest.retired.items()}
    for (number, _), index in sorted(plan.retired.items()):
        page = index.page
        after = page.after
        run = Run(
            first=after.segment,
            last=after.segment,
            base=after.base + page.size,
            chain=after.chain.decode(),
            saga=msgspec.json.decode(after.name, type=str) if after.name else "",
            n=after.n,
            synced=page.synced,
            peers=None if page.peers is None else sorted(page.peers),
        )
        retired[view.streams[number].writer] = _joined([*retired.get(view.streams[number].writer, ()), run])
    names = {view.streams[number].writer for number in gone}
    return Manifest(
        format=FORMAT_VERSION,
        log=log_id,
        number=manifest.number,
        carried=[*(name for name in manifest.carried if name not in names), *carried],
        retired={name: runs for name, runs in retired.items() if name not in names},
        gone=[*manifest.gone, *sorted(name for name in names if name[0] == "w")],
    )


def _joined(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for run in sorted(runs, key=lambda run: run.first):
        if joined and joined[-1].last + 1 == run.first:
            run = msgspec.structs.replace(run, first=joined.pop().first)
        joined.append(run)
    return joined


def _publish(directory: str, manifest: Manifest) -> Manifest:
    """Make a manifest count, durably. What it names is durable already."""
    manifest = msgspec.structs.replace(manifest, number=manifest.number + 1)
    osfile.sync_directory(directory)
    osfile.write_whole(f"{directory}/{MANIFEST}", encode_manifest(manifest), sync=True)
    osfile.sync_directory(directory)
    return manifest


def _tidy(directory: str, log_id: str) -> Manifest:
    """Remove what the manifest retired, and what a compaction left that was not finished; return what then counts.

    The names of writers that are gone leave the manifest with the next compaction, once their directories cannot come
    back.
    """
    manifest = parse_manifest(read_manifest(directory), directory, log_id)
    found = stream_names(directory)
    for name in found:
        path = f"{directory}/{name}"
        if name in manifest.gone or (name[0] == "c" and name not in manifest.carried):
            _remove(path)
        else:
            for run in manifest.retired.get(name, ()):
                for file in _retired_files(path, run):
                    osfile.remove_file(file)
    osfile.sync_directory(directory)
    left = stream_names(directory)
    return msgspec.structs.replace(manifest, gone=[name for name in manifest.gone if name in left])


def _retired_files(path: str, run: Run) -> Iterator[str]:
    for name in os.listdir(path):
        number = name.partition(".")[0]
        if _OWN_FILE.fullmatch(name) and number.isdigit() and run.first <= int(number) <= run.last:
            yield f"{path}/{name}"


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        for name in os.listdir(path):
            if _OWN_FILE.fullmatch(name):
                osfile.remove_file(f"{path}/{name}")
    with suppress(
        OSError
    ):  # somebody put something there, or writes an index there now: the next compaction tries again
        osfile.rmdir(path)


def _kept_lines(path: str, index: Index, forgotten: frozenset[str], cutoff: float) -> Iterator[re.Match[bytes]]:
    """The records of a segment that must be carried over, each checked.

    Raises:
        Stale: The segment is not what was indexed.
    """
    if index.latest <= cutoff:
        parts = [places for saga_id, places in index.parts.items() if saga_id not in forgotten]
        found = sorted((offset, check) for places in parts for _, offset, check in places.sorted())
        if all(check for _, check in found):
            yield from _lines_at(path, index, found)
            return
    for line in _lines_of(path, index):
        saga_id = msgspec.json.decode(line["saga"], type=str)
        if saga_id not in forgotten if saga_id in index.parts else index.latest > cutoff:
            yield line


def _lines_at(path: str, index: Index, found: list[tuple[int, int]]) -> Iterator[re.Match[bytes]]:
    descriptor = osfile.open_file(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for offset, check in found:
            raw = line_at(descriptor, offset) or b""
            line = RECORD_LINE.fullmatch(raw)
            if line is None or line_check(raw) != check:
                raise Stale(index.path or "")
            yield line
    finally:
        os.close(descriptor)


def _lines_of(path: str, index: Index) -> Iterator[re.Match[bytes]]:
    """The records of a segment, each checked.

    Raises:
        Stale: The segment is not what was indexed.
    """
    stale = Stale(index.path or "")
    data = osfile.read_whole(path, MAX_SEGMENT_BYTES)
    page = index.page
    chain = page.before.chain
    if len(data) != page.size:
        raise stale
    for raw in data[: page.after.offset].split(b"\n")[:-1]:
        line = RECORD_LINE.fullmatch(raw)
        if line is not None:
            if not (header_fits(line, chain) and digest_fits(line)):
                raise stale
            yield line
        else:
            about = HEAD_LINE.fullmatch(raw) or END_LINE.fullmatch(raw)
            if about is None or not header_fits(about, chain):
                raise stale
        chain = raw[9:73]
    if chain != page.after.chain:
        raise stale


class _Carry:
    """Writes a carry-over stream. It counts from the moment that a manifest names it."""

    def __init__(self, directory: str, log_id: str) -> None:
        self._log_id = log_id
        self._directory = directory
        last = max((int(name[2:10]) for name in stream_names(directory)), default=0)
        self.name = f"c-{last + 1:08d}-{os.urandom(8).hex()}"
        self.records = 0
        self.tail = first_tail(self.name)
        self._path = f"{directory}/{self.name}"
        self._file = -1
        self._written = 0  # bytes of the segment
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        osfile.make_directory(self._path)

    def add(self, line: re.Match[bytes]) -> None:
        """Put a record behind the others, as it was written but for its place."""
        self.put(encoded_of(line), int(line["n"]))

    def put(self, encoded: Encoded, n: int) -> None:
        """Put a record behind the others, as it is."""
        name = encoded.name
        tail = self.tail
        if not tail.segment or tail.offset + 256 + sum(map(len, encoded)) + len(tail.name) > segments.SEGMENT_BYTES:
            self._begin()
        tail = self.tail
        place = b"" if not tail.name or (tail.name == name and tail.n == n - 1) else prev_field(tail.name, tail.n)
        made, chain = finish_line(encoded, tail.chain, place)
        self._put(made, tail._replace(offset=tail.offset + len(made), chain=chain, name=name, n=n))
        self.records += 1

    def end(self) -> None:
        """Make everything durable, and the line that says that nothing follows."""
        if not self.tail.segment:
            self._begin()
        self._sync()
        tail = self.tail
        header = b'"end":true,"synced":%d' % tail.position + (prev_field(tail.name, tail.n) if tail.name else b"")
        made, chain = stream_line(header, tail.chain)
        self._put(made, tail._replace(offset=tail.offset + len(made), chain=chain))
        self._sync()
        osfile.sync_directory(self._path)

    def close(self) -> None:
        """Close what is open."""
        descriptor, self._file = self._file, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _begin(self) -> None:
        if self.tail.segment:
            self._sync()
            self.close()
        tail = self.tail
        segment, base = tail.segment + 1, tail.position
        self._file = osfile.create_file(f"{self._path}/{segment_name(segment)}")
        self._written = 0
        # No peers: what stands here was born before this stream was.
        header = (
            f'"format":{FORMAT_VERSION},"log":"{self._log_id}","writer":"{self.name}","segment":{segment},"base":{base}'
        ).encode() + (prev_field(tail.name, tail.n) if tail.name else b"")
        made, chain = stream_line(header, tail.chain)
        self._put(made, Tail(segment, len(made), base, chain, tail.name, tail.n))

    def _put(self, line: bytes, after: Tail) -> None:
        self._pending.append(line)
        self._pending_bytes += len(line)
        self.tail = after
        if self._pending_bytes >= _PIECE:
            self._write()

    def _write(self) -> None:
        osfile.write_at(self._file, b"".join(self._pending), self._written)
        self._written += self._pending_bytes
        self._pending, self._pending_bytes = [], 0

    def _sync(self) -> None:
        if self._pending:
            self._write()
        osfile.sync_file(self._file)
