"""What is read of a NATS log: one saga, the unfinished ones, and everything, with all damage named."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, NamedTuple

from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log.base import Damage, Unfinished, Verification
from agent_saga_core.log.nats.connection import Message, Server
from agent_saga_core.log.nats.index import Index, Leased, Seen
from agent_saga_core.log.nats.messages import BLOBS, BODY, KIND, TABLE, Kind, Meta, Part, Tail, fold, meta_of
from agent_saga_core.log.sql import Stated, damaged, history_of, read_body, verified
from agent_saga_core.records import FINAL, Record, RecordType

__all__ = ["Found", "Reader", "unfinished", "verify"]

_TRIES: Final = 16
"""How often a saga may change while it is read before it is called damaged."""
_WRITERS: Final = 64
"""Of how many writers it is remembered where their sagas end."""
PROGRESS_EVERY: Final = 10_000


class Found(NamedTuple):
    """A saga as it was read."""

    seen: Seen
    rows: list[BODY]
    """Number and line of each record, in order."""
    next: int
    """The number that the next record has."""
    recent: tuple[int, ...]
    """The last messages that hold records of it, newest first."""
    final: bool
    """Whether its last record ends it, or the index says that it has ended."""

    @property
    def stated(self) -> Stated:
        """What its records must agree with."""
        epoch = self.seen.entry.epoch
        # A claim changes the entry first; if it comes to nothing, the next one has the same number.
        return Stated(next=self.next, ended=self.final, epoch=None if epoch == self.next else epoch)


class _Known(NamedTuple):
    last: int
    tails: dict[str, Tail]


class Reader:
    """Reads histories. Everything is for the loop of the connection."""

    def __init__(self, server: Server, index: Index, log_id: bytes) -> None:
        self.index: Final = index
        self.log_id: Final = log_id
        self._server = server
        self._known: OrderedDict[str, _Known] = OrderedDict()

    # --- messages

    async def payload(self, message: Message) -> bytes:
        """What a message holds, also where that is in several."""
        named = message.headers.get(BLOBS, "")
        if not named:
            return message.data
        seqs = [int(seq) for seq in named.split(",") if seq.isascii() and seq.isdigit()]
        blobs = [await self._at(seq) for seq in seqs]
        return b"".join(blob.data for blob in blobs if blob is not None)

    async def _at(self, seq: int) -> Message | None:
        return await self._server.insist(lambda: self._server.at(self._server.stream, seq)) if seq > 0 else None

    async def part(self, seq: int, saga_id: str, life: str) -> tuple[Part, list[BODY]] | None:
        """What the message of that sequence holds of a saga; None if nothing, or nothing that can be read."""
        message = await self._at(seq)
        if message is None:
            return None
        payload = await self.payload(message)
        read = meta_of(payload)
        if read is None:
            return None
        meta, start = read
        for part in meta.sagas:
            if part.saga == saga_id and part.life == life:
                return part, bodies_of(part, payload, start)
        return None

    # --- where sagas end

    async def tails(self, nonce: str) -> dict[str, Tail]:
        """Where the sagas of a writer end; of those that it gave up or ended lately too. Not to be changed."""
        server = self._server
        subject = f"{server.address.name}.w.{nonce}"
        last = await server.insist(lambda: server.last(server.stream, subject))
        if last is None:
            return {}
        known = self._known.get(nonce)
        if known is not None and known.last == last.seq:
            return known.tails
        listed = _listed(last)
        if known is not None and listed <= known.last < last.seq:
            messages = await self._between(subject, known.last + 1, last)
            tails = fold(dict(known.tails), messages)
        else:
            tails = fold({}, await self._between(subject, listed, last))
        self._known[nonce] = _Known(last.seq, tails)
        while len(self._known) > _WRITERS:
            self._known.popitem(last=False)
        return tails

    async def _between(self, subject: str, start: int, last: Message) -> list[tuple[Message, Meta]]:
        messages: list[Message] = []
        if start < last.seq:
            everything = self._server.scan(self._server.stream, subject, start)
            messages = [message async for message in everything if message.seq < last.seq]
        # A server that lags behind leaves out the newest.
        at = messages[-1].seq + 1 if messages else start
        while at < last.seq:
            more = await self._server.insist(lambda at=at: self._server.next(self._server.stream, subject, at))
            if more is None or more.seq >= last.seq:
                break
            messages.append(more)
            at = more.seq + 1
        found: list[tuple[Message, Meta]] = []
        for message in [*messages, last]:
            read = meta_of(await self.payload(message))
            if read is not None:
                found.append((message, read[0]))
        return found

    async def tail(self, seen: Seen) -> Tail | None:
        """Where a saga ends by the messages of the owner that its entry names; None if they do not say more."""
        if seen.entry.owner is None:
            return None
        tail = (await self.tails(seen.entry.owner)).get(seen.entry.saga)
        return tail if tail is not None and tail.life == seen.entry.life and tail.tail > seen.entry.tail else None

    # --- histories

    async def find(self, saga_id: str) -> Found | None:
        """A saga as it is; None if the log does not know it.

        Raises:
            LogCorrupted: Its records are not all there, or its entry cannot be read.
        """
        seen = await self.index.get(saga_id)
        for _ in range(_TRIES):
            if seen is None:
                return None
            found = await self._found(seen)
            again = await self.index.get(saga_id)
            whole = [n for n, _ in found.rows] == list(range(1, found.next))
            if whole and again is not None and again.revision == seen.revision:
                return found
            if again is not None and again.revision == seen.revision and not await self._moved(found):
                return found  # what is missing is missing
            seen = again
        raise damaged(saga_id, "it changes whenever it is read")

    async def _moved(self, found: Found) -> bool:
        """Whether the owner of a saga has written to it since it was read."""
        tail = await self.tail(found.seen)
        return tail is not None and tail.last + 1 != found.next

    async def _found(self, seen: Seen) -> Found:
        entry = seen.entry
        tail = await self.tail(seen)
        end = entry.tail if tail is None else tail.tail
        next_n = entry.next if tail is None else tail.last + 1
        final = entry.ended is not None or (tail is not None and tail.final)
        rows: list[BODY] = []
        met: list[int] = []
        ahead: dict[int, asyncio.Future[tuple[Part, list[BODY]] | None]] = {}
        while end:
            if end not in ahead:
                ahead[end] = asyncio.ensure_future(self.part(end, entry.saga, entry.life))
            part = await ahead.pop(end)
            if part is None:
                break
            met.append(end)
            rows[:0] = part[1]
            earlier = [seq for seq in part[0].earlier if 0 < seq < end]
            for seq in earlier:
                if seq not in ahead:
                    ahead[seq] = asyncio.ensure_future(self.part(seq, entry.saga, entry.life))
            end = max(earlier, default=0)
        for left in ahead.values():
            left.cancel()
        return Found(seen, rows, next_n, tuple(met[:8]), final)

    def checked(self, found: Found, *, erased: bool = False) -> list[Record]:
        """The records of a saga.

        Args:
            found: The saga.
            erased: Whether a record may be erased: it is intact then, without data, and nobody can act on it.

        Raises:
            LogCorrupted: They are not what was written.
        """
        return history_of(found.seen.entry.saga, found.rows, self.log_id, found.stated, erased=erased)

    async def history(self, saga_id: str) -> list[Record]:
        """Every record of a saga, in order, whatever its type.

        Raises:
            LogCorrupted: Damage concerns this saga.
        """
        found = await self.find(saga_id)
        return [] if found is None else self.checked(found)


def bodies_of(part: Part, payload: bytes, start: int) -> list[BODY]:
    """The lines of one saga in a payload."""
    begin = start + part.offset
    lines = payload[begin : begin + part.size].split(b"\n")[:-1] if part.offset >= 0 and part.size > 0 else []
    return list(enumerate(lines, part.first))


def _listed(last: Message) -> int:
    """From which message on those of a writer are to be read, given the last of them."""
    table = last.headers.get(TABLE, "")
    return min(int(table), last.seq) if table.isascii() and table.isdigit() else last.seq


# --- all sagas


async def unfinished(
    reader: Reader, own: Callable[[], Iterable[str]], leases: Callable[[], Awaitable[Sequence[Leased]]]
) -> Unfinished:
    """The sagas without a final record, oldest first.

    Every one that has a record is in the messages of a writer with a lease, or marked: a writer is settled, and a saga
    given up, only after the mark is there. So the writers are looked at first.

    Args:
        reader: What reads.
        own: The writers of this process.
        leases: The leases that are there.
    """
    index = reader.index
    tails: dict[str, dict[str, Tail]] = {}
    nonces = dict.fromkeys([*own(), *(leased.nonce for leased in await leases())])
    for nonce in nonces:
        tails[nonce] = await reader.tails(nonce)
    candidates = dict.fromkeys(
        [saga for some in tails.values() for saga, tail in some.items() if not tail.final] + await index.marks()
    )
    entries, faults = await index.some(candidates)
    damage = [_damage(fault) for fault in faults]
    found: list[tuple[int, str]] = []
    for saga_id, seen in entries.items():
        entry = seen.entry
        if entry.ended is not None:
            continue
        known = tails.get(entry.owner) if entry.owner is not None else None
        if known is None and entry.owner is not None:
            known = await reader.tails(entry.owner)
        tail = None if known is None else known.get(saga_id)
        if tail is not None and (tail.life != entry.life or tail.tail <= entry.tail):
            tail = None
        if tail is not None and tail.final:
            continue
        if entry.next > 1 or tail is not None:
            found.append((seen.born, saga_id))
    found += [(2**63, saga) for one in damage for saga in one.saga_ids or ()]
    return Unfinished(saga_ids=tuple(saga_id for _, saga_id in sorted(found)), damage=tuple(damage))


def _damage(fault: LogCorrupted) -> Damage:
    named = None if fault.saga_id is None else (fault.saga_id,)
    return Damage(where=fault.where or "the index", reason=str(fault), saga_ids=named)


class _Seen:
    """What the walk has met of one life of a saga."""

    __slots__ = ("counts", "epoch", "fault", "final", "last", "records", "tail")

    def __init__(self) -> None:
        self.last = self.tail = self.records = 0
        self.epoch = 1
        self.final = False
        self.counts = False  # whether a writer wrote of it: what was copied here counts only once an entry names it
        self.fault: str | None = None


class _Walk:
    """Every message of the log, in order."""

    def __init__(self, reader: Reader, server: Server, progress: Callable[[int], None] | None) -> None:
        self._reader = reader
        self._server = server
        self._progress = progress
        self._told = 0
        self.met = 0
        self.sagas: dict[tuple[str, str], _Seen] = {}
        self.damage: list[Damage] = []

    async def messages(self, start: int = 1) -> None:
        name = self._server.address.name
        async for message in self._server.scan(self._server.stream, f"{name}.>", start):
            if message.headers.get(KIND) == Kind.BLOB:
                continue
            read = meta_of(payload := await self._reader.payload(message))
            if read is None:
                if await self._reader._at(message.seq) is not None:  # pyright: ignore[reportPrivateUsage]
                    self._broken(message)
                continue
            for part in read[0].sagas:
                seen = self._part(message.seq, part, bodies_of(part, payload, read[1]))
                seen.counts = seen.counts or message.subject.startswith(f"{name}.w.")
            if self._progress is not None and self.met // PROGRESS_EVERY > self._told // PROGRESS_EVERY:
                self._told = self.met
                self._progress(self.met)

    def _broken(self, message: Message) -> None:
        where = f"message {message.seq} of {message.subject}"
        self.damage.append(Damage(where=where, reason="it is not what was written", saga_ids=None))

    def _part(self, seq: int, part: Part, rows: list[BODY]) -> _Seen:
        seen = self.sagas.get((part.saga, part.life))
        if seen is None:
            seen = self.sagas[part.saga, part.life] = _Seen()
        if seen.fault is None:
            seen.fault = self._fault(seen, part, rows)
        seen.last, seen.tail, seen.final = part.last, seq, part.final
        seen.records += len(rows)
        self.met += len(rows)
        return seen

    def _fault(self, seen: _Seen, part: Part, rows: list[BODY]) -> str | None:
        if part.first != seen.last + 1 or part.last != part.first + len(rows) - 1:
            return f"record {seen.last + 1} is missing, or there twice"
        if seen.final:
            return "records follow its final one"
        for n, body in rows:
            record = read_body(body, part.saga, n, self._reader.log_id, erased=True)
            if isinstance(record, str):
                return f"record {n}: {record}"
            if (record.type in FINAL) != (part.final and n == part.last):
                return f"record {n} is not what its message says of it"
            if record.type == RecordType.CLAIM:
                seen.epoch = n
        return None


async def verify(reader: Reader, server: Server, progress: Callable[[int], None] | None) -> Verification:
    """See `Log.verify`. The messages first, then the index: what does not fit is read once more by itself."""
    walk = _Walk(reader, server, progress)
    await walk.messages()
    entries, faults = await reader.index.all()
    damage = [*walk.damage, *map(_damage, faults)]
    suspects: dict[str, str] = {}
    unknown: dict[tuple[str, str], _Seen] = {}
    records = 0
    for (saga_id, life), seen in walk.sagas.items():
        there = entries.get(saga_id)
        if there is None or there.entry.life != life:
            if there is None and seen.counts and not seen.final:
                unknown[saga_id, life] = seen
            continue
        records += seen.records
        if seen.fault is not None or not _agrees(there, seen):
            suspects[saga_id] = seen.fault or "the index and its records do not agree"
    for saga_id, seen in entries.items():
        if (saga_id, seen.entry.life) not in walk.sagas and (seen.entry.next > 1 or seen.entry.ended is not None):
            suspects[saga_id] = "its records are missing"
    named = {saga_id for one in damage for saga_id in one.saga_ids or ()}
    for saga_id in suspects.keys() - named:
        damage += await _suspected(reader, saga_id)
    damage += await _lost(reader, server, {one: seen for one, seen in unknown.items() if one[0] not in named})
    if progress is not None:
        progress(records)
    return verified(records, damage)


def _agrees(there: Seen, seen: _Seen) -> bool:
    entry = there.entry
    if entry.epoch not in (seen.epoch, seen.last + 1):  # of a claim, the entry is changed first
        return False
    if entry.ended is not None:
        return seen.final and entry.tail == seen.tail and entry.next == seen.last + 1
    return entry.owner is not None or (entry.tail == seen.tail and entry.next == seen.last + 1 and not seen.final)


async def _lost(reader: Reader, server: Server, unknown: dict[tuple[str, str], _Seen]) -> list[Damage]:
    """What the index has lost of these: those sagas that it does not know, and that were not forgotten.

    As long as anything of a saga that ended is there, its final record is: compaction removes that last.
    """
    if not unknown:
        return []
    later = _Walk(reader, server, None)
    await later.messages(min(seen.tail for seen in unknown.values()))
    lost: list[Damage] = []
    for (saga_id, life), seen in unknown.items():
        now = later.sagas.get((saga_id, life))
        left = now is not None and not now.final and await reader.part(seen.tail, saga_id, life) is not None
        if left and not (await reader.index.some([saga_id]))[0]:
            reason = "the index does not know it"
            lost.append(Damage(where=f"saga {saga_id!r}", reason=reason, saga_ids=(saga_id,)))
    return lost


async def _suspected(reader: Reader, saga_id: str) -> list[Damage]:
    try:
        found = await reader.find(saga_id)
        if found is not None:
            reader.checked(found, erased=True)
    except LogCorrupted as error:
        return [Damage(where=f"saga {saga_id!r}", reason=str(error), saga_ids=(saga_id,))]
    return []


async def ids_of(index: Index, reader: Reader) -> list[str]:
    """Every saga of which there is a record, oldest first."""
    entries, _ = await index.all()
    empty = [seen for seen in entries.values() if seen.entry.next == 1 and seen.entry.ended is None]
    tails: dict[str, dict[str, Tail]] = {}
    begun: set[str] = set()
    for seen in empty:
        owner = seen.entry.owner
        if owner is not None:
            if owner not in tails:
                tails[owner] = await reader.tails(owner)
            tail = tails[owner].get(seen.entry.saga)
            if tail is not None and tail.life == seen.entry.life and tail.recent:
                begun.add(seen.entry.saga)
    left = {seen.entry.saga for seen in empty} - begun
    return sorted((saga for saga in entries if saga not in left), key=lambda saga: entries[saga].born)
