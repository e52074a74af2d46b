"""What stands in one segment, for those who do not read it: which sagas are open there, and whether one is there.

An index is a cache. It is written when its segment is complete and durable, checked by its own digest and against the
segment, and believed only as long as every line found through it is the one that it was made from. `docs/log-format.md`
describes its bytes.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from agent_saga_core.log import osfile
from agent_saga_core.log.scan import MAX_SEGMENT_BYTES, Found, Page
from agent_saga_core.log.segments import Tail
from agent_saga_core.records import FINAL, MAX_LINE_BYTES

__all__ = [
    "INDEX_FROM",
    "Index",
    "Notes",
    "Places",
    "Stale",
    "Table",
    "index_path",
    "line_at",
    "line_check",
    "read_index",
    "saga_hash",
]

VERSION: Final = 1

INDEX_FROM: Final = 64 * 1024
"""Segments shorter than this have no index: reading them is as cheap."""

_MAX_BYTES: Final = 1 << 28
_FINAL = frozenset(kind.encode() for kind in FINAL)
_START: Final = b'{"digest":"'
_HEADER_AT: Final = len(_START) + 64 + 2


class Stale(Exception):
    """What an index said of its segment is not so.

    Attributes:
        path: The index.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def index_path(segment_path: str) -> str:
    """Where the index of a segment is."""
    return f"{segment_path.removesuffix('.jsonl')}.index"


def saga_hash(saga_id: str) -> int:
    """The 64 bits by which an index knows a saga that begins and ends in its segment."""
    return int.from_bytes(sha256(saga_id.encode()).digest()[:8], "big")


def line_check(line: bytes) -> int:
    """64 bits of a whole line, its newline aside. Never 0, which stands for a line that was checked by reading it."""
    return int.from_bytes(sha256(line).digest()[:8], "big") or 1


def line_at(descriptor: int, offset: int) -> bytes | None:
    """The line that begins at `offset`, without its newline; None if it does not end."""
    want = 4096
    while True:
        data = osfile.pread(descriptor, want, offset)
        end = data.find(b"\n")
        if end >= 0:
            return data[:end]
        if len(data) < want or want > MAX_LINE_BYTES:
            return None
        want *= 8


class Places:
    """Where some records of one saga stand in one segment."""

    __slots__ = ("ended", "places", "started")

    def __init__(self) -> None:
        self.started = 0.0
        self.ended = False
        self.places: array[int] = array("Q")  # number, offset, check; number, offset, check; ...

    def sorted(self) -> list[tuple[int, int, int]]:
        """Number, offset and check of each record in order; one that an interrupted read noted twice, once."""
        return sorted(set(zip(self.places[::3], self.places[1::3], self.places[2::3], strict=True)))

    def whole(self) -> bool:
        """Whether these are all records of a saga that ended, in their order."""
        before = 0
        for at, (n, offset, _) in enumerate(self.sorted() if self.ended else (), 1):
            if n != at or offset <= before:
                return False
            before = offset
        return self.ended


class Notes:
    """What is read of a segment, saga by saga, until it is complete."""

    __slots__ = ("latest", "sagas")

    def __init__(self) -> None:
        self.latest = 0.0
        self.sagas: dict[str, Places] = {}

    def add(self, found: list[Found]) -> None:
        """Note some records. They may come twice."""
        sagas = self.sagas
        for saga_id, n, kind, time, offset in found:
            places = sagas.get(saga_id)
            if places is None:
                places = sagas.setdefault(saga_id, Places())
            moment = float(time)
            if n == 1 or not places.places:
                places.started = moment
            if moment > self.latest:
                self.latest = moment
            if kind in _FINAL:
                places.ended = True
            # One call for all three: an interrupt leaves all of them or none.
            places.places.extend((n, offset, 0))


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A saga that does not both begin and end in the segment."""

    saga: str
    started: float
    ended: bool
    places: list[int]


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    log: str
    writer: str
    segment: int
    size: int
    end: int
    last: int
    base: int
    chain_before: str
    saga_before: str
    n_before: int
    chain: str
    saga: str
    n: int
    synced: int
    ended: bool
    peers: list[str] | None
    records: int
    latest: float
    parts: list[_Part]
    whole: int


class Table(NamedTuple):
    """The whole sagas of a segment: hashes, rising, and where the first record of each stands."""

    hashes: array[int]
    offsets: array[int]


_decode_head = msgspec.json.Decoder(_Head).decode


class Index:
    """One complete segment: where it stands in its stream, and where its sagas' records stand in it.

    Attributes:
        page: Its place in the stream.
        records: How many records it holds.
        latest: The greatest time of any of them.
        parts: The sagas that do not both begin and end in it.
        whole: How many others it holds.
        path: The file it was read from or stored in; None if there is none.
        table: The whole ones, if that is in memory.
    """

    def __init__(self, page: Page, records: int, latest: float, parts: dict[str, Places], table: Table) -> None:
        self.page = page
        self.records = records
        self.latest = latest
        self.parts = parts
        self.whole = len(table.hashes)
        self.path: str | None = None
        self.table: Table | None = table
        self._digest = b""

    @classmethod
    def of(cls, page: Page, notes: Notes) -> Index:
        """Make the index of a segment that was read to its end."""
        parts: dict[str, Places] = {}
        whole: list[tuple[int, int]] = []
        records = 0
        for saga_id, places in notes.sagas.items():
            records += len(places.sorted())
            if places.whole():
                whole.append((saga_hash(saga_id), places.sorted()[0][1]))
            else:
                parts[saga_id] = places
        whole.sort()
        table = Table(array("Q", (key for key, _ in whole)), array("I", (at for _, at in whole)))
        return cls(page, records, notes.latest, parts, table)

    def unload(self) -> None:
        """Drop what can be read again."""
        if self.path is not None:
            self.table = None

    def entries(self) -> Iterator[tuple[int, int]]:
        """Hash and first offset of each whole saga, by hash."""
        return zip(*self.load(), strict=True)

    def hashes(self) -> array[int]:
        """The hashes of the whole sagas, sorted."""
        return self.load().hashes

    def load(self) -> Table:
        """The table, read again if need be.

        Raises:
            Stale: The file is not what it was.
        """
        table = self.table
        if table is None:
            again = read_index(self.path or "", None)
            if again is None or again._digest != self._digest or again.table is None:
                raise Stale(self.path or "")
            table = self.table = again.table
        return table

    # --- the file

    def store(self, path: str, log_id: str, writer: str) -> None:
        """Write the file, if the segment still is what was read. The segment must be durable.

        Raises:
            OSError: It cannot be written. Nothing depends on it.
        """
        data = self._encoded(path, log_id, writer)
        if data is not None:
            osfile.write_whole(index_path(path), data, sync=False)
            self._digest = data[len(_START) : len(_START) + 64]
            self.path = index_path(path)

    def _encoded(self, path: str, log_id: str, writer: str) -> bytes | None:
        page, table = self.page, self.load()
        descriptor = osfile.open_file(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != page.size:
                return None
            parts: list[_Part] = []
            for saga_id, places in self.parts.items():
                flat: list[int] = []
                for n, offset, _ in places.sorted():
                    line = line_at(descriptor, offset)
                    if line is None:
                        return None
                    flat += (n, offset, line_check(line))
                parts.append(_Part(saga_id, places.started, places.ended, flat))
            for part in parts:
                self.parts[part.saga].places = array("Q", part.places)  # with their checks from now on
            last = _last_line(descriptor, page.after.offset)
        finally:
            os.close(descriptor)
        before, after = page.before, page.after
        head = _Head(
            index=VERSION,
            log=log_id,
            writer=writer,
            segment=before.segment,
            size=page.size,
            end=after.offset,
            last=last,
            base=before.base,
            chain_before=before.chain.decode(),
            saga_before=_decoded(before.name),
            n_before=before.n,
            chain=after.chain.decode(),
            saga=_decoded(after.name),
            n=after.n,
            synced=page.synced,
            ended=page.ended,
            peers=None if page.peers is None else sorted(page.peers),
            records=self.records,
            latest=self.latest,
            parts=parts,
            whole=len(table.hashes),
        )
        body = msgspec.json.encode(head)[1:] + b"\n" + _little(table.hashes) + _little(table.offsets)
        return b'%b%b",%b' % (_START, sha256(body).hexdigest().encode(), body)


def read_index(path: str, expected: tuple[Tail, int, str, str, int] | None) -> Index | None:
    """Read an index; None if there is none, or it is no intact one, or not of that segment.

    Args:
        path: Its file.
        expected: The end of the stream before the segment, the size of the segment, the log's id, the writer, and the
            segment's descriptor. None: take it as it is.
    """
    try:
        data = osfile.read_whole(path, _MAX_BYTES)
    except OSError:
        return None
    cut = data.find(b"\n")
    body = data[_HEADER_AT:]
    stored = data[len(_START) : len(_START) + 64]
    if cut < 0 or data[: len(_START)] != _START or data[_HEADER_AT - 2 : _HEADER_AT] != b'",':
        return None
    if sha256(body).hexdigest().encode() != stored:
        return None
    try:
        head = _decode_head(b"{" + data[_HEADER_AT:cut])
        index = _index_of(head, data[cut + 1 :])
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return None
    if index is None or (expected is not None and not _fits(head, index.page, expected)):
        return None
    index.path = path
    index._digest = stored  # pyright: ignore[reportPrivateUsage]
    return index


def _index_of(head: _Head, tables: bytes) -> Index | None:
    sane = (
        head.index == VERSION
        and 0 < head.last < head.end <= head.size <= MAX_SEGMENT_BYTES
        and 0 < head.segment < 1 << 16
        and 0 <= head.base
        and 0 <= head.whole
        and len(tables) == 12 * head.whole
    )
    if not sane:
        return None
    hashes, offsets = array("Q", tables[: 8 * head.whole]), array("I", tables[8 * head.whole :])
    if sys.byteorder == "big":
        hashes.byteswap()
        offsets.byteswap()
    parts: dict[str, Places] = {}
    for part in head.parts:
        places = parts[part.saga] = Places()
        places.started, places.ended = part.started, part.ended
        places.places = array("Q", part.places)
        if len(part.places) % 3 or max(places.places[1::3], default=head.end) >= head.end:
            return None
    before = Tail(head.segment, 0, head.base, head.chain_before.encode(), _name(head.saga_before), head.n_before)
    after = Tail(head.segment, head.end, head.base, head.chain.encode(), _name(head.saga), head.n)
    peers = None if head.peers is None else frozenset(head.peers)
    page = Page(before, after, head.size, head.synced, head.ended, peers)
    return Index(page, head.records, head.latest, parts, Table(hashes, offsets))


def _fits(head: _Head, page: Page, expected: tuple[Tail, int, str, str, int]) -> bool:
    before, size, log_id, writer, descriptor = expected
    if (page.before, page.size, head.log, head.writer) != (before, size, log_id, writer):
        return False
    return osfile.pread(descriptor, 73, head.last)[9:] == page.after.chain and _is_last(descriptor, head)


def _is_last(descriptor: int, head: _Head) -> bool:
    return osfile.pread(descriptor, 1, head.end - 1) == b"\n" == osfile.pread(descriptor, 1, head.last - 1)


def _last_line(descriptor: int, end: int) -> int:
    want = 4096
    while True:
        start = max(end - want, 0)
        data = osfile.pread(descriptor, end - start, start)
        at = data.rfind(b"\n", 0, len(data) - 1)
        if at >= 0 or not start:
            return start + at + 1
        want *= 8


def _decoded(name: bytes) -> str:
    return msgspec.json.decode(name, type=str) if name else ""


def _name(saga_id: str) -> bytes:
    return msgspec.json.encode(saga_id) if saga_id else b""


def _little(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()
