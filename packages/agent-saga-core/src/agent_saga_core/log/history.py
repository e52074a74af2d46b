"""What a log directory holds, saga by saga.

A `View` is what one manifest lets a reader see, read as far as `View.read` has come. `History` keeps the view up to
date while other processes write, compact and remove files.
"""

from __future__ import annotations

import os
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple, TypeVar

from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log import osfile
from agent_saga_core.log.base import Damage, history_fault
from agent_saga_core.log.index import (
    INDEX_FROM,
    Index,
    Notes,
    Places,
    Stale,
    index_path,
    line_at,
    line_check,
    read_index,
    saga_hash,
)
from agent_saga_core.log.lines import encoded_of
from agent_saga_core.log.locks import is_locked
from agent_saga_core.log.manifest import Manifest, counts, parse_manifest, read_manifest
from agent_saga_core.log.scan import MAX_SEGMENT_BYTES, Found, Page, Stream, saga_name
from agent_saga_core.log.segments import Tail, born_after, segment_name, stream_names
from agent_saga_core.records import FINAL, RECORD_LINE, Encoded, Record, digest_fits, header_fits, record_of

__all__ = ["History", "View"]

LOADED_BYTES: Final = 16 << 20
"""So much of the indexes' tables is kept in memory."""

COPIED_BYTES: Final = 16 * LOADED_BYTES
"""The same for who reads one saga after the other: for each of them, every table is asked. Enough for 22 M sagas."""

_NAMED = re.compile(rb'\{"hash":"[0-9a-f]{64}","saga":("[^\n]*?"),"n":1,"type":"[^\n]*?,"time":([0-9.e-]{1,45}),')

File = tuple[int, int]
"""One segment: number of its stream in the view, and its own."""

T = TypeVar("T")


class _Place(NamedTuple):
    n: int
    file: File
    offset: int
    check: int


class _Known(NamedTuple):
    """What is known of one saga."""

    places: list[_Place]
    started: float
    ended: bool


class View:
    """The records of a log under one manifest, by saga. Only `History` calls it, one call at a time."""

    def __init__(self, directory: str, log_id: str, scheme: str, manifest: Manifest, distrusted: set[str]) -> None:
        self._directory = directory
        self._log_id = log_id
        self._scheme = scheme
        self.manifest = manifest
        self._distrusted = distrusted
        self._numbers: dict[str, int] = {}
        self.streams: dict[int, Stream] = {}
        self.finished: set[int] = set()  # streams to which nothing will be added
        self.damage: dict[int, tuple[Damage, ...]] = {}
        self.notes: dict[File, Notes] = {}  # segments that may grow, and those of damaged streams
        self.indexes: dict[File, Index] = {}  # all others
        self.parts: dict[str, dict[File, Places]] = {}  # the sagas that no one segment holds whole
        self.room = LOADED_BYTES
        self._loaded = 0  # about so many bytes of tables are in memory
        self._synced: dict[File, int] = {}  # bytes that this process made durable

    # --- reading

    def read(self) -> None:
        """Read what was added since the last call."""
        for name in stream_names(self._directory):
            if not counts(self.manifest, name):
                continue
            # Each line may be repeated after an interrupt: a stream read under two numbers, or under none, would look
            # like damage.
            number = self._numbers.setdefault(name, len(self._numbers))
            stream = self.streams.get(number)
            if stream is None:
                stream = self.streams.setdefault(number, self._stream(name, number))
            if number in self.finished:
                continue
            self._advance(number, stream)
            if stream.ended or not self._lives(stream):
                # Dead, and read again after that was known: nothing more will come.
                self._advance(number, stream)
                page = stream.page()
                if page is not None:
                    self._complete(number, page)
                self.finished.add(number)

    def _stream(self, name: str, number: int) -> Stream:
        def known(before: Tail, size: int, descriptor: int) -> Page | None:
            if size < INDEX_FROM:
                return None
            path = index_path(f"{self._directory}/{name}/{segment_name(before.segment)}")
            if path in self._distrusted:
                return None
            index = read_index(path, (before, size, self._log_id, name, descriptor))
            if index is None:
                return None
            self._add((number, before.segment), index)
            return index.page

        return Stream(
            self._directory,
            name,
            self._log_id,
            skips=[run.skip() for run in self.manifest.retired.get(name, ())],
            known=known,
            turned=lambda page: self._complete(number, page),
        )

    def _lives(self, stream: Stream) -> bool:
        return is_locked(f"{self._directory}/{stream.writer}/lock", self._scheme)

    def _advance(self, number: int, stream: Stream) -> None:
        all_notes = self.notes

        def note(segment: int, found: list[Found]) -> None:
            notes = all_notes.get((number, segment))
            if notes is None:
                notes = all_notes.setdefault((number, segment), Notes())
            notes.add(found)

        if stream.advance(note):
            damage = stream.damage()
            if damage or number in self.damage:
                self.damage[number] = damage

    def _complete(self, number: int, page: Page) -> None:
        """Nothing will be added to this segment: keep of its sagas what is not in its index."""
        file = (number, page.before.segment)
        if file not in self.indexes:
            self._add(file, Index.of(page, self.notes.get(file) or Notes()))
        self.notes.pop(file, None)

    def _add(self, file: File, index: Index) -> None:
        for saga_id, places in index.parts.items():
            self.parts.setdefault(saga_id, {})[file] = places
        self._make_room(index)
        self.indexes[file] = index

    def _make_room(self, index: Index) -> None:
        """Keep the tables in memory below a bound that no number of finished sagas moves."""
        self._loaded += 12 * index.whole
        if self._loaded > self.room:
            self._loaded = 12 * index.whole
            for each in self.indexes.values():
                each.unload()

    # --- one saga

    def known(self, saga_id: str) -> _Known | None:
        """Everything that has been read of a saga.

        Raises:
            Stale: An index is not what it was made from.
        """
        found = list(self.parts.get(saga_id, {}).items())
        for file, notes in self.notes.items():
            places = notes.sagas.get(saga_id)
            if places is not None:
                found.append((file, places))
        for file, offset in self.begun_at(saga_id):
            places = self._whole(file, offset, saga_id)
            if places is not None:
                found.append((file, places))
        if not found:
            return None
        checks: dict[tuple[int, File, int], int] = {}
        for file, places in found:
            for n, offset, check in places.sorted():
                checks[n, file, offset] = check
        sorted_places = [_Place(n, file, offset, checks[n, file, offset]) for n, file, offset in sorted(checks)]
        started = min(places.started for _, places in found)
        return _Known(sorted_places, started, any(places.ended for _, places in found))

    def begun_at(self, saga_id: str) -> list[tuple[File, int]]:
        """Where whole sagas begin that share the hash of this one."""
        found: list[tuple[File, int]] = []
        key = saga_hash(saga_id)
        for file, index in self.indexes.items():
            table = index.table
            if table is None:
                self._make_room(index)
                table = index.load()
            hashes = table.hashes
            at = bisect_left(hashes, key)
            while at < len(hashes) and hashes[at] == key:  # two sagas of one hash: rarely
                found.append((file, table.offsets[at]))
                at += 1
        return found

    def settled(self, saga_id: str) -> _Known | None:
        """Like `known`. Looks again where a number seems to be missing.

        One writer's records may have been read before the last of them was written, and another's after it claimed the
        saga: the second look finds what lies between.
        """
        while True:
            known = self.known(saga_id)
            if known is None or history_fault(place.n for place in known.places) is None:
                return known
            self.read()
            now = self.known(saga_id)
            if now is not None and now.places == known.places:
                return known

    def records(self, saga_id: str) -> list[Record]:
        """Every record of the saga that has been read, in order, whatever its type.

        Raises:
            LogCorrupted: Damage may concern this saga.
            Stale: An index is not what it was made from.
        """
        return [self._record_in(line, place, saga_id) for line, place in self._lines(saga_id)]

    def lines(self, saga_id: str) -> tuple[list[Encoded], bool]:
        """Every record of the saga that has been read, in order, as it is stored; and whether all are durable.

        Raises:
            LogCorrupted: Damage may concern this saga.
            Stale: An index is not what it was made from.
        """
        found: list[Encoded] = []
        durable = True
        for line, place in self._lines(saga_id):
            if line is None:
                self._record_in(line, place, saga_id)
            else:
                found.append(encoded_of(line))
            durable = durable and self._is_durable(place.file, place.offset)
        return found, durable

    def _lines(self, saga_id: str) -> Iterator[tuple[re.Match[bytes] | None, _Place]]:
        known = self.settled(saga_id)
        self._check(saga_id, known)
        descriptors: dict[File, int] = {}
        try:
            for place in known.places if known is not None else ():
                if place.file not in descriptors:
                    flags = os.O_RDONLY | os.O_CLOEXEC
                    descriptors[place.file] = osfile.open_file(self.path(place.file), flags)
                raw = line_at(descriptors[place.file], place.offset) or b""
                if place.check and line_check(raw) != place.check:
                    raise Stale(self.indexes[place.file].path or "")
                yield RECORD_LINE.fullmatch(raw), place
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _record_in(self, line: re.Match[bytes] | None, place: _Place, saga_id: str) -> Record:
        record = None if line is None else record_of(line, saga_id)
        if record is None or record.n != place.n:
            erased = line is not None and line["salt"] is None
            what = "its payload was erased" if erased else "its data are no JSON that we write"
            where = self._address(place)
            raise LogCorrupted(f"a record of saga {saga_id!r} cannot be read: {what}", saga_id=saga_id, where=where)
        return record

    def _whole(self, file: File, offset: int, saga_id: str) -> Places | None:
        """Where the records of a saga stand that begins at `offset` and ends in that segment; None if it is another.

        Raises:
            Stale: It is not so.
        """
        index = self.indexes[file]
        end = index.page.after.offset
        if offset >= end:
            raise Stale(index.path or "")
        descriptor = osfile.open_file(self.path(file), os.O_RDONLY | os.O_CLOEXEC)
        try:
            want = 1 << 14
            while True:
                # From before the line, so that the hash before its own is in it, if that line is not a long one.
                start = max(offset - want, 0)
                data = osfile.pread(descriptor, min(offset + want, end) - start, start)
                places = _whole_in(data, start, offset - start, saga_id)
                if isinstance(places, Places):
                    return places
                if places is False:
                    return None
                if start == 0 and offset + want >= end:
                    raise Stale(index.path or "")
                want *= 8
        finally:
            os.close(descriptor)

    def make_durable(self, saga_id: str, own: str | None) -> bool:
        """Sync every segment and directory that holds a record of the saga; False if all was known to be durable.

        Args:
            saga_id: The saga.
            own: The writer whose records this process has flushed itself.
        """
        known = self.known(saga_id)
        files: set[File] = set()
        for place in known.places if known is not None else ():
            stream = self.streams[place.file[0]]
            if stream.writer != own and not self._is_durable(place.file, place.offset):
                files.add(place.file)
        for file in sorted(files):
            self._sync_segment(file)
        return bool(files)

    def _is_durable(self, file: File, offset: int) -> bool:
        index = self.indexes.get(file)
        if index is not None and index.path is not None:
            return True
        return self.streams[file[0]].is_durable(file[1], offset) or offset < self._synced.get(file, 0)

    def _sync_segment(self, file: File) -> None:
        path = self.path(file)
        descriptor = osfile.open_file(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            osfile.sync_file(descriptor)
        finally:
            os.close(descriptor)
        osfile.sync_directory(os.path.dirname(path))
        osfile.sync_directory(self._directory)
        self._synced[file] = size

    # --- all sagas

    def saga_ids(self) -> list[str]:
        """Every saga, oldest first. Reads a line of each that ended."""
        started: dict[str, float] = {}

        def note(saga_id: str, moment: float) -> None:
            started[saga_id] = min(moment, started.get(saga_id, moment))

        for saga_id, pieces in self.parts.items():
            for places in pieces.values():
                note(saga_id, places.started)
        for notes in self.notes.values():
            for saga_id, places in notes.sagas.items():
                note(saga_id, places.started)
        for file in self.indexes:
            for saga_id, moment in self._whole_ids(file):
                note(saga_id, moment)
        return sorted(started, key=lambda saga_id: started[saga_id])

    def _whole_ids(self, file: File) -> Iterator[tuple[str, float]]:
        index = self.indexes[file]
        if not index.whole:
            return
        raw = osfile.read_whole(self.path(file), MAX_SEGMENT_BYTES)
        for key, offset in index.entries():
            line = _NAMED.match(raw, offset)
            saga_id = None if line is None else saga_name(line[1])
            if line is None or saga_id is None or saga_hash(saga_id) != key:
                raise Stale(index.path or "")
            yield saga_id, float(line[2])

    def unfinished(self) -> tuple[list[str], list[Damage]]:
        """The sagas without a final record, oldest first, and all damage met."""
        started: dict[str, float] = {}
        ended: set[str] = set()
        pieces = [(saga_id, places) for saga_id, of in self.parts.items() for places in of.values()]
        pieces += [item for notes in self.notes.values() for item in notes.sagas.items()]
        for saga_id, places in pieces:
            if places.ended:
                ended.add(saga_id)
            started[saga_id] = min(places.started, started.get(saga_id, places.started))
        open_ids = [saga_id for saga_id in started if saga_id not in ended]
        open_ids = [saga_id for saga_id in open_ids if not (self.begun_at(saga_id) and self._is_ended(saga_id))]
        open_ids.sort(key=lambda saga_id: started[saga_id])
        damage: list[Damage] = []
        for number, found in self.damage.items():
            for one in found:
                named = one.saga_ids
                if named is None:
                    named = tuple(saga_id for saga_id in open_ids if self._suspects(number, one, saga_id))
                    one = Damage(where=one.where, reason=one.reason, saga_ids=named)
                damage.append(one)
                open_ids += [saga_id for saga_id in named if saga_id not in open_ids and self.known(saga_id) is None]
        for saga_id in open_ids:
            known = self.settled(saga_id)
            fault = None if known is None else history_fault(place.n for place in known.places)
            if known is not None and fault is not None:
                where = self._address(known.places[-1])
                damage.append(Damage(where=where, reason=f"saga {saga_id!r}: {fault}", saga_ids=(saga_id,)))
        return open_ids, damage

    def _is_ended(self, saga_id: str) -> bool:
        known = self.known(saga_id)
        return known is not None and known.ended

    # --- indexes

    def unstored(self) -> Iterator[File]:
        """The complete segments whose index is worth a file and has none."""
        for file, index in list(self.indexes.items()):
            if index.path is None and index.page.size >= INDEX_FROM:
                yield file

    def store(self, file: File) -> None:
        """Write the index of a segment, which is durable then."""
        self._sync_segment(file)
        writer = self.streams[file[0]].writer
        self.indexes[file].store(self.path(file), self._log_id, writer)

    def path(self, file: File) -> str:
        """Where a segment is."""
        return f"{self._directory}/{self.streams[file[0]].writer}/{segment_name(file[1])}"

    def _address(self, place: _Place) -> str:
        return f"{self.streams[place.file[0]].writer}/{segment_name(place.file[1])}, byte {place.offset}"

    # --- damage

    def _check(self, saga_id: str, known: _Known | None) -> None:
        for number, found in self.damage.items():
            for damage in found:
                if self._suspects(number, damage, saga_id):
                    raise LogCorrupted(
                        f"damage may concern saga {saga_id!r}: {damage.where}: {damage.reason}; "
                        "restore the log from a copy, or settle the saga by hand",
                        saga_id=saga_id,
                        where=damage.where,
                    )

    def _suspects(self, number: int, damage: Damage, saga_id: str) -> bool:
        """Whether the damage, in the stream of that number, may concern the saga."""
        if damage.saga_ids is not None:
            return saga_id in damage.saga_ids
        known = self.known(saga_id)
        if known is None:
            return True  # all its records may have been there
        if known.ended:
            return False
        place = known.places[0]
        first, broken = self.streams[place.file[0]], self.streams[number].writer
        born_later = (
            place.n == 1 and born_after(first.writer, broken) and first.peers is not None and broken not in first.peers
        )
        return not born_later


def _whole_in(data: bytes, base: int, at: int, saga_id: str) -> Places | Literal[False] | None:
    """Find a whole saga in a piece of a segment.

    Args:
        data: The piece.
        base: Its offset in the segment.
        at: Where in it the saga's first line begins.
        saga_id: The saga.

    Returns:
        Its places; False if the first line is another saga's; None if it is not all there, or not as it was written.
    """
    places = Places()
    n, before = 1, data.rfind(b"\n", 0, max(at - 1, 0)) + 1
    while True:
        end = data.find(b"\n", at)
        line = None if end < 0 else RECORD_LINE.fullmatch(data, at, end)
        if line is None or not (header_fits(line, data[before + 9 : before + 73]) and digest_fits(line)):
            return None
        if saga_name(line["saga"]) != saga_id:
            return False if n == 1 else None
        if int(line["n"]) != n:
            return None
        kind = line["type"]
        places.places.extend((n, base + at, line_check(data[at:end])))
        if n == 1:
            places.started = float(line["time"])
            mark = b'","saga":' + line["saga"] + b',"n":'
        if kind in _FINAL:
            places.ended = True
            return places
        n += 1
        while True:
            found = data.find(mark, end)  # pyright: ignore[reportPossiblyUnboundVariable]
            if found < 0:
                return None
            at = found - 73
            # Data never hold a newline, so what follows one is a line.
            if data[at - 1 : at + 9] == b'\n{"hash":"':
                break
            end = found + 1
        before = data.rfind(b"\n", 0, at - 1) + 1


_FINAL = frozenset(kind.encode() for kind in FINAL)


class History:
    """The records of a log directory by saga, up to date as of the last `refresh`.

    Every method may be called from any thread. `OSError` means that a file cannot be read.
    """

    def __init__(self, directory: str, log_id: str, scheme: str) -> None:
        self._directory = directory
        self._log_id = log_id
        self._scheme = scheme
        self._reading = threading.RLock()
        self._seen: bytes | None = None
        self._durable: bytes | None = None  # the manifest that is known to be durable
        self._distrusted: set[str] = set()
        self._view: View | None = None
        self._room = LOADED_BYTES

    def refresh(self) -> View:
        """Read what was added since the last call, under the manifest that counts now."""
        with self._reading:
            while True:
                seen = read_manifest(self._directory)
                view = self._view
                if view is None or seen != self._seen:
                    manifest = parse_manifest(seen, self._directory, self._log_id)
                    view = View(self._directory, self._log_id, self._scheme, manifest, self._distrusted)
                    view.room = self._room
                    self._view, self._seen = view, seen
                try:
                    view.read()
                except FileNotFoundError:
                    if self._is_current():
                        raise
                    continue
                # Files are removed only after a manifest says so: while it is the same, nothing was missing.
                if self._is_current():
                    return view

    def _is_current(self) -> bool:
        return read_manifest(self._directory) == self._seen

    def distrust(self, stale: Stale) -> None:
        """Read the segment of an index as if it had none.

        Raises:
            LogCorrupted: There is none, and what was read is read differently now.
        """
        if not stale.path and "" in self._distrusted:
            raise LogCorrupted(f"segments of {self._directory} change while they are read")
        self._distrusted.add(stale.path)
        self._view = None

    def ask(self, question: Callable[[View], T]) -> T:
        """The answer of the view as of the last `refresh`, or of a later one if that does not hold any more."""
        with self._reading:
            while True:
                view = self._view
                if view is None:
                    view = self.refresh()
                try:
                    answer = question(view)
                    if self._is_current():
                        return answer
                except Stale as stale:
                    self.distrust(stale)
                except (FileNotFoundError, LogCorrupted):
                    if self._is_current():
                        raise
                self.refresh()

    def records(self, saga_id: str) -> list[Record]:
        """Every record of the saga that has been read, in order, whatever its type.

        Raises:
            LogCorrupted: Damage may concern this saga.
        """
        return self.ask(lambda view: view.records(saga_id))

    def lines(self, saga_id: str) -> list[Encoded]:
        """Every record of the saga, in order, as it is stored; each is durable, and so is it that none is there.

        Raises:
            LogCorrupted: Damage may concern this saga.
        """
        with self._reading:
            self._room = COPIED_BYTES
            self.refresh().room = COPIED_BYTES
            found, durable = self.ask(lambda view: view.lines(saga_id))
            if not durable or self._seen != self._durable:
                # What this process wrote is synced as well: it may not be flushed.
                self.make_durable(saga_id, None)
                self.refresh()
                found, _ = self.ask(lambda view: view.lines(saga_id))
            return found

    def make_durable(self, saga_id: str, own: str | None) -> bool:
        """Sync every segment and directory that holds a record of the saga; False if all was known to be durable.

        The manifest as well: what it retired is gone for good, so that an id that it forgot may be used again.

        Args:
            saga_id: The saga.
            own: The writer whose records this process has flushed itself.
        """
        with self._reading:
            synced = self.ask(lambda view: view.make_durable(saga_id, own))
            if self._seen != self._durable:
                osfile.sync_directory(self._directory)
                self._durable = self._seen
            return synced

    def saga_ids(self) -> list[str]:
        """Every saga, oldest first."""
        return self.ask(lambda view: view.saga_ids())

    def unfinished(self) -> tuple[list[str], list[Damage]]:
        """The sagas without a final record, oldest first, and all damage met."""
        return self.ask(lambda view: view.unfinished())

    def seal(self, *, look: bool = True) -> None:
        """Write the indexes that are missing. They are a cache: where that fails, nothing is lost.

        Args:
            look: Whether to read what is new; otherwise it is about what was read.
        """
        with self._reading:
            view = self.refresh() if look else self._view
            if view is None:
                return
            for file in view.unstored():
                try:
                    view.store(file)
                except OSError:
                    return
