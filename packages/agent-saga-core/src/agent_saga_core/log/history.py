"""What a log directory holds, saga by saga: a map that grows with the log and is never written anywhere."""

from __future__ import annotations

import os
import threading
from array import array

from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log import osfile
from agent_saga_core.log.base import Damage, history_fault
from agent_saga_core.log.locks import is_locked
from agent_saga_core.log.scan import Stream
from agent_saga_core.log.segments import born_after, segment_name, writer_names
from agent_saga_core.records import FINAL, MAX_LINE_BYTES, RECORD_LINE, Record, record_of

__all__ = ["History"]

_FINAL = frozenset(kind.encode() for kind in FINAL)

# A place in one number: 20 bits for the stream, 16 for the segment, 28 for the offset.
_OFFSET_BITS = 28
_SEGMENT_BITS = 16


class _Places:
    """Where the records of one saga stand."""

    __slots__ = ("ended", "pairs", "started")

    def __init__(self) -> None:
        self.started = 0.0
        self.ended = False
        self.pairs: array[int] = array("Q")  # number, place, number, place, ...

    def sorted(self) -> list[tuple[int, int]]:
        """Numbers and places in order; one that an interrupted read noted twice, once."""
        return sorted(set(zip(self.pairs[::2], self.pairs[1::2], strict=False)))


class History:
    """The records of a log directory by saga, read as far as `refresh` has come.

    Every method may be called from any thread. `OSError` means that a file cannot be read.
    """

    def __init__(self, directory: str, log_id: str, scheme: str) -> None:
        self._directory = directory
        self._log_id = log_id
        self._scheme = scheme
        self._reading = threading.RLock()
        self._streams: dict[int, Stream] = {}
        self._numbers: dict[str, int] = {}
        self._finished: set[int] = set()  # streams to which nothing will be added
        self._damage: dict[int, tuple[Damage, ...]] = {}
        self._sagas: dict[str, _Places] = {}
        self._synced: dict[tuple[int, int], int] = {}  # (stream, segment) -> bytes that this process made durable

    def refresh(self) -> None:
        """Read what was added since the last call."""
        with self._reading:
            for name in writer_names(self._directory):
                # Each line may be repeated after an interrupt: a stream read under two numbers, or under none, would
                # look like damage.
                number = self._numbers.setdefault(name, len(self._numbers))
                stream = self._streams.get(number)
                if stream is None:
                    stream = self._streams.setdefault(number, Stream(self._directory, name, self._log_id))
                if number in self._finished:
                    continue
                changed = self._advance(number, stream)
                if stream.ended or not (changed or self._lives(stream)):
                    # Dead, and read again after that was known: nothing more will come.
                    self._advance(number, stream)
                    self._finished.add(number)

    def records(self, saga_id: str) -> list[Record]:
        """Every record of the saga that has been read, in order, whatever its type.

        Raises:
            LogCorrupted: Damage may concern this saga.
        """
        with self._reading:
            places = self._settled(saga_id)
            self._check(saga_id)
            records: list[Record] = []
            descriptors: dict[int, int] = {}
            try:
                for _, place in places:
                    file = place >> _OFFSET_BITS
                    if file not in descriptors:
                        descriptors[file] = osfile.open_file(self._path(place), os.O_RDONLY | os.O_CLOEXEC)
                    records.append(self._record_at(descriptors[file], place, saga_id))
            finally:
                for descriptor in descriptors.values():
                    os.close(descriptor)
            return records

    def make_durable(self, saga_id: str, own: str | None) -> bool:
        """Sync every segment and directory that holds a record of the saga; False if all was known to be durable.

        Args:
            saga_id: The saga.
            own: The writer whose records this process has flushed itself.
        """
        with self._reading:
            known = self._sagas.get(saga_id)
            files: dict[tuple[int, int], str] = {}
            for _, place in known.sorted() if known is not None else ():
                number, segment, offset = _unpack(place)
                stream = self._streams[number]
                durable = stream.is_durable(segment, offset) or offset < self._synced.get((number, segment), 0)
                if stream.writer != own and not durable:
                    files[number, segment] = self._path(place)
            for file, path in files.items():
                descriptor = osfile.open_file(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    size = os.fstat(descriptor).st_size
                    osfile.sync_file(descriptor)
                finally:
                    os.close(descriptor)
                osfile.sync_directory(os.path.dirname(path))
                osfile.sync_directory(self._directory)
                self._synced[file] = size
            return bool(files)

    def saga_ids(self) -> list[str]:
        """Every saga met so far, oldest first."""
        with self._reading:
            return sorted(self._sagas, key=lambda saga_id: self._sagas[saga_id].started)

    def unfinished(self) -> tuple[list[str], list[Damage]]:
        """The sagas without a final record, oldest first, and all damage met."""
        with self._reading:
            open_ids = [saga_id for saga_id in self.saga_ids() if not self._sagas[saga_id].ended]
            damage: list[Damage] = []
            for number, found in self._damage.items():
                for one in found:
                    named = one.saga_ids
                    if named is None:
                        named = tuple(saga_id for saga_id in open_ids if self._suspects(number, one, saga_id))
                        one = Damage(where=one.where, reason=one.reason, saga_ids=named)
                    damage.append(one)
                    open_ids += [saga_id for saga_id in named if saga_id not in self._sagas and saga_id not in open_ids]
            for saga_id in open_ids:
                places = self._settled(saga_id)
                fault = history_fault(n for n, _ in places)
                if fault is not None:
                    where = self._address(places[-1][1])
                    damage.append(Damage(where=where, reason=f"saga {saga_id!r}: {fault}", saga_ids=(saga_id,)))
            return open_ids, damage

    # --- reading

    def _lives(self, stream: Stream) -> bool:
        return is_locked(f"{self._directory}/{stream.writer}/lock", self._scheme)

    def _advance(self, number: int, stream: Stream) -> bool:
        sagas = self._sagas

        def note(saga_id: str, n: int, kind: bytes, time: bytes, segment: int, offset: int) -> None:
            places = sagas.get(saga_id)
            if places is None:
                places = sagas.setdefault(saga_id, _Places())
            if n == 1 or not places.pairs:
                places.started = float(time)
            if kind in _FINAL:
                places.ended = True
            # One call for both numbers: an interrupt leaves a whole pair or none.
            places.pairs.extend((n, _pack(number, segment, offset)))

        changed = stream.advance(note)
        if changed:
            damage = stream.damage()
            if damage or number in self._damage:
                self._damage[number] = damage
        return changed

    def _settled(self, saga_id: str) -> list[tuple[int, int]]:
        """The saga's numbers and places. Looks again where a number seems to be missing.

        One writer's records may have been read before the last of them was written, and another's after it claimed
        the saga: the second look finds what lies between.
        """
        while True:
            known = self._sagas.get(saga_id)
            places = [] if known is None else known.sorted()
            if history_fault(n for n, _ in places) is None:
                return places
            self.refresh()
            now = self._sagas[saga_id].sorted()
            if now == places:
                return places

    def _record_at(self, descriptor: int, place: int, saga_id: str) -> Record:
        _, _, offset = _unpack(place)
        want = 4096
        while True:
            data = osfile.pread(descriptor, want, offset)
            end = data.find(b"\n")
            if end >= 0 or len(data) < want or want > MAX_LINE_BYTES:
                break
            want *= 8
        line = RECORD_LINE.fullmatch(data, 0, max(end, 0))
        record = None if line is None else record_of(line, saga_id)
        if record is None:
            erased = line is not None and line["salt"] is None
            what = "its payload was erased" if erased else "its data are no JSON that we write"
            raise LogCorrupted(
                f"a record of saga {saga_id!r} cannot be read: {what}", saga_id=saga_id, where=self._address(place)
            )
        return record

    def _path(self, place: int) -> str:
        number, segment, _ = _unpack(place)
        return f"{self._directory}/{self._streams[number].writer}/{segment_name(segment)}"

    def _address(self, place: int) -> str:
        number, segment, offset = _unpack(place)
        return f"{self._streams[number].writer}/{segment_name(segment)}, byte {offset}"

    # --- damage

    def _check(self, saga_id: str) -> None:
        for number, found in self._damage.items():
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
        known = self._sagas.get(saga_id)
        if known is None:
            return True  # all its records may have been there
        if known.ended:
            return False
        n, place = known.sorted()[0]
        first, broken = self._streams[_unpack(place)[0]], self._streams[number].writer
        born_later = (
            n == 1 and born_after(first.writer, broken) and first.peers is not None and broken not in first.peers
        )
        return not born_later


def _pack(stream: int, segment: int, offset: int) -> int:
    return (stream << _SEGMENT_BITS | segment) << _OFFSET_BITS | offset


def _unpack(place: int) -> tuple[int, int, int]:
    file, offset = place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1)
    return file >> _SEGMENT_BITS, file & ((1 << _SEGMENT_BITS) - 1), offset
