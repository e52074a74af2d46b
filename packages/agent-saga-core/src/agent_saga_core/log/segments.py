"""One process's own stream in a log directory: its sub-directory, its segments, and what stands around the records.

`docs/log-format.md` describes the bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Final, NamedTuple

import msgspec

from agent_saga_core.log import osfile
from agent_saga_core.log.commit import Batch, Entry
from agent_saga_core.log.locks import is_locked, lock_whole, opening
from agent_saga_core.records import FORMAT_VERSION, NUMBER, STRING, finish_line

__all__ = [
    "END_LINE",
    "HEAD_LINE",
    "SEGMENT_BYTES",
    "WRITER_NAME",
    "SegmentBatch",
    "SegmentWriter",
    "Tail",
    "born_after",
    "first_tail",
    "prev_field",
    "segment_name",
    "stream_line",
    "stream_names",
    "writer_names",
]

SEGMENT_BYTES: Final = 8 * 1024 * 1024
"""A segment ends before the line that would make it longer, so that finished sagas can leave piece by piece."""

WRITER_NAME: Final = re.compile(r"[cw]-([0-9]{8})-[0-9a-f]{16}")
"""`w-` is a process, `c-` a stream that a compaction wrote."""

_PREV = rb'(?:,"prev":\[(?P<prev_saga>' + STRING + rb"),(?P<prev_n>" + NUMBER + rb")\])?"
HEAD_LINE: Final = re.compile(
    rb'\{"hash":"(?P<hash>[0-9a-f]{64})",'
    rb'(?P<header>"format":(?P<format>' + NUMBER + rb'),"log":"(?P<log>[0-9a-f]{32})",'
    rb'"writer":"(?P<writer>[cw]-[0-9]{8}-[0-9a-f]{16})","segment":(?P<segment>' + NUMBER + rb"),"
    rb'"base":(?P<base>0|' + NUMBER + rb")"
    rb'(?:,"peers":\[(?P<peers>(?:"w-[0-9]{8}-[0-9a-f]{16}",?)*)\])?' + _PREV + rb")\}"
)
"""The first line of a segment, its newline aside."""

END_LINE: Final = re.compile(
    rb'\{"hash":"(?P<hash>[0-9a-f]{64})",'
    rb'(?P<header>"end":true,"synced":(?P<synced>' + NUMBER + rb")" + _PREV + rb")\}"
)
"""The last line of a stream that was closed cleanly, its newline aside."""


def segment_name(number: int) -> str:
    """The file name of a writer's segment; they count from 1."""
    return f"{number:08d}.jsonl"


def writer_names(directory: str) -> list[str]:
    """The writers of a log, in the order of their birth as far as that can be told; carry-over streams aside."""
    return [name for name in stream_names(directory) if name[0] == "w"]


def stream_names(directory: str) -> list[str]:
    """The streams of a log, carry-over streams first."""
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if WRITER_NAME.fullmatch(entry.name))


def born_after(writer: str, other: str) -> bool:
    """Whether `writer` was certainly born after `other`."""
    return writer[2:10] > other[2:10]


class Tail(NamedTuple):
    """The end of a stream: where the next line goes, and what it continues."""

    segment: int
    """Number of the last segment; 0 if there is none yet."""
    offset: int
    """Bytes in it."""
    base: int
    """Bytes of the stream in the segments before it."""
    chain: bytes
    """Hash of the line before, or the writer's id."""
    name: bytes
    """Saga of the record line before, as it stands there; empty if there is none."""
    n: int
    """Number of that record."""

    @property
    def position(self) -> int:
        """Bytes of the stream so far."""
        return self.base + self.offset


def first_tail(writer: str) -> Tail:
    """The end of a stream that has not begun."""
    return Tail(0, 0, 0, writer.encode(), b"", 0)


class SegmentBatch(Batch):
    """Lines for one segment, at one place."""

    __slots__ = ("after", "data", "offset", "segment")

    def __init__(self, entries: Sequence[Entry], segment: int, offset: int, data: bytes, after: Tail) -> None:
        super().__init__(entries)
        self.segment = segment
        self.offset = offset
        self.data = data
        self.after = after


class SegmentWriter:
    """Writes this process's stream. Only the leader of the group commit calls it, one call at a time.

    Every method may be repeated after an interrupt.
    """

    def __init__(self, directory: str, log_id: str, scheme: str) -> None:
        self._directory = directory
        self._log_id = log_id
        self.name, self._lock, self._peers = _birth(directory, scheme)
        self._path = f"{directory}/{self.name}"
        self.tail = first_tail(self.name)
        self._durable = 0  # bytes of the stream
        self._file: tuple[int, int] | None = None  # segment number, descriptor
        self._entries_unsynced = True
        self.full = 0
        """The last segment that is complete, because another was begun."""

    def prepare(self, entries: Sequence[Entry]) -> SegmentBatch:
        """Lay out the first of `entries`: one at least, and no more than fit in one segment."""
        segment, offset, base, chain, name, n = self.tail
        lines: list[bytes] = []
        if not segment or offset + _line_size(entries[0], name, n) > SEGMENT_BYTES:
            segment, offset, base = segment + 1, 0, base + offset
            head, chain = self._head(segment, base, chain, name, n)
            lines.append(head)
        start, offset = offset, offset + sum(map(len, lines))
        place = b',"synced":%d' % self._durable if self._durable else b""
        taken = 0
        for entry in entries:
            encoded = entry.encoded
            if name and (entry.n != n + 1 or encoded.name != name):
                place += prev_field(name, n)
            line, own = finish_line(encoded, chain, place)
            if taken and offset + len(line) > SEGMENT_BYTES:
                break
            lines.append(line)
            offset += len(line)
            chain, name, n, place = own, encoded.name, entry.n, b""
            taken += 1
        after = Tail(segment, offset, base, chain, name, n)
        return SegmentBatch(entries[:taken], segment, start, b"".join(lines), after)

    def write(self, batch: SegmentBatch) -> None:
        """Put the batch in its place, opening its segment if that is new.

        Raises:
            OSError: A part of it may be written, and no more of it can be.
        """
        osfile.write_at(self._descriptor(batch.segment), batch.data, batch.offset)

    def accept(self, batch: SegmentBatch) -> None:
        """Go on behind the batch. A batch that is behind the tail already changes nothing."""
        if batch.after.position > self.tail.position:
            self.tail = batch.after

    def sync(self) -> None:
        """Make everything accepted durable, and the way to it.

        Raises:
            OSError: It may not be durable, and the kernel may have dropped what it could not write.
        """
        if self._file is None:
            return
        position = self.tail.position
        osfile.sync_file(self._file[1])
        if self._entries_unsynced:
            osfile.sync_directory(self._path)
            osfile.sync_directory(self._directory)
            self._entries_unsynced = False
        if position > self._durable:
            self._durable = position

    def end(self) -> None:
        """Write the line that says that the stream ends here, and sync it. Nothing may be appended after it."""
        tail = self.tail
        if self._file is not None:
            header = b'"end":true,"synced":%d' % self._durable + (prev_field(tail.name, tail.n) if tail.name else b"")
            osfile.write_at(self._file[1], stream_line(header, tail.chain)[0], tail.offset)
            osfile.sync_file(self._file[1])

    def close(self) -> None:
        """Close what is open, and with it the proof that this writer lives. No write, no sync, no unlock."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file[1])
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _descriptor(self, segment: int) -> int:
        file = self._file
        if file is not None and file[0] == segment:
            return file[1]
        if file is not None:
            osfile.sync_file(file[1])  # a segment is whole and durable before the next one exists,
            if self._entries_unsynced:
                osfile.sync_directory(self._path)  # its name included: nothing promises that names last in their order
        self._entries_unsynced = True
        with opening:
            descriptor = osfile.create_file(f"{self._path}/{segment_name(segment)}")
            self._file = (segment, descriptor)
        if file is not None:
            os.close(file[1])
            self.full = file[0]
        return descriptor

    def _head(self, segment: int, base: int, chain: bytes, name: bytes, n: int) -> tuple[bytes, bytes]:
        header = (
            f'"format":{FORMAT_VERSION},"log":"{self._log_id}","writer":"{self.name}","segment":{segment},"base":{base}'
        ).encode()
        if segment == 1:
            header += b',"peers":' + msgspec.json.encode(self._peers)
        return stream_line(header + (prev_field(name, n) if name else b""), chain)


def _line_size(entry: Entry, name: bytes, n: int) -> int:
    """Length of the line, or a little more."""
    head, _, digest, rest = entry.encoded
    return 128 + len(head) + len(digest) + len(rest) + len(prev_field(name, n))


def prev_field(name: bytes, n: int) -> bytes:
    """The field that names the record line before."""
    return b',"prev":[%b,%d]' % (name, n)


def stream_line(header: bytes, chain: bytes) -> tuple[bytes, bytes]:
    """A line about the stream itself, and its hash."""
    own = sha256(chain + header).hexdigest().encode()
    return b'{"hash":"%b",%b}\n' % (own, header), own


def _birth(directory: str, scheme: str) -> tuple[str, int, list[str]]:
    """Create a writer's directory; return its name, the locked descriptor that proves it alive, and its peers.

    The directory appears under its name with the lock already held, so that nobody ever takes it for a dead writer's.
    The peers are the other writers that cannot be proved dead now: no writer missing from the list can have touched
    anything that begins in this stream.
    """
    with opening:
        unborn = f"{directory}/new-{os.urandom(8).hex()}"
        osfile.make_directory(unborn)
        name, lock = "", -1
        try:
            lock = osfile.create_file(f"{unborn}/lock")
            if not lock_whole(lock, scheme):
                raise BlockingIOError(f"{unborn}/lock is locked by somebody else")
            earlier = writer_names(directory)
            if not earlier:
                osfile.sync_directory(directory)  # whoever made the log may have died before its name was durable
            last = max((int(name[2:10]) for name in earlier), default=0)
            name = f"w-{last + 1:08d}-{os.urandom(8).hex()}"
            os.rename(unborn, f"{directory}/{name}")
            others = (other for other in writer_names(directory) if other != name)
            return name, lock, [other for other in others if is_locked(f"{directory}/{other}/lock", scheme)]
        except BaseException:
            if lock >= 0:
                os.close(lock)
            for path in (unborn, f"{directory}/{name}") if name else (unborn,):
                with suppress(OSError):
                    os.unlink(f"{path}/lock")
                    os.rmdir(path)
            raise
