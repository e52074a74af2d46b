"""Finished sagas leave a NATS log beside everything else: first their entries, then the messages that nobody needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from agent_saga_core.errors import LogCorrupted, SagaBusy
from agent_saga_core.log.base import Compaction
from agent_saga_core.log.nats.connection import Conflict, Message, Server
from agent_saga_core.log.nats.index import Index, Seen, gathered
from agent_saga_core.log.nats.lease import State
from agent_saga_core.log.nats.messages import BLOBS, KIND, TABLE, Entry, Kind, Tail, meta_of
from agent_saga_core.log.nats.owning import Ownership
from agent_saga_core.log.nats.reading import Reader
from agent_saga_core.log.nats.writing import new_token
from agent_saga_core.records import FINAL

__all__ = ["Passage"]

_AT_ONCE: Final = 32
_UNUSED_FOR: Final = 86_400.0
"""Seconds for which messages that no entry names stay: they may belong to a history that is being adopted."""


class _Writer(NamedTuple):
    last: int
    fenced: bool
    listed: int
    """From this message on, all are needed to find where its sagas end."""


class _Read(NamedTuple):
    """A message without its payload."""

    message: Message
    sagas: frozenset[tuple[str, str]]
    """The sagas that records in it are of, each with its life."""
    ended: frozenset[tuple[str, str]]
    """Those of them whose final record is in it."""


class Passage:
    """One way through the log."""

    def __init__(
        self,
        server: Server,
        index: Index,
        reader: Reader,
        ownership: Ownership,
        cutoff: float,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._server = server
        self._index = index
        self._reader = reader
        self._ownership = ownership
        self._cutoff = cutoff
        self._progress = progress
        self._writers: dict[str, _Writer] = {}
        self.sagas = self.records = self.bytes = 0

    async def run(self, nonce: str, *, dry_run: bool) -> Compaction:
        """See `Log.compact`.

        Args:
            nonce: The writer of this process: while it lives, no other compaction runs.
            dry_run: Whether to change nothing.

        Raises:
            SagaBusy: Another compaction is running.
        """
        lock = 0 if dry_run else await self._lock(nonce)
        try:
            return await self._run(dry_run=dry_run)
        finally:
            if lock:
                await self._server.insist(lambda: self._server.delete(self._server.index, lock))

    async def _lock(self, nonce: str) -> int:
        subject = f"{self._server.address.name}.i.c"
        there = await self._server.insist(lambda: self._server.last(self._server.index, subject))
        if there is not None:
            state, _ = await self._ownership.watch.judge(there.data.decode("ascii", "replace"))
            if state is State.LIVE:
                raise self._busy()
        try:
            return await self._server.write(
                subject, nonce.encode(), expected=0 if there is None else there.seq, token=new_token()
            )
        except Conflict:
            raise self._busy() from None

    def _busy(self) -> SagaBusy:
        return SagaBusy(f"another compaction of {self._server.address.url} is running; wait until it is done")

    async def _run(self, *, dry_run: bool) -> Compaction:
        entries, _ = await self._index.all()
        if not dry_run:
            await self._bury()
            await self._settle(list(entries.values()))
            entries, _ = await self._index.all()
        old = [seen for seen in entries.values() if seen.entry.ended is not None and seen.entry.ended <= self._cutoff]
        for begin in range(0, len(old), _AT_ONCE):
            some = old[begin : begin + _AT_ONCE]
            gone = await gathered([asyncio.ensure_future(self._forget(seen, dry_run=dry_run)) for seen in some])
            for seen, went in zip(some, gone, strict=True):
                if went:
                    entries.pop(seen.entry.saga, None)
            if self._progress is not None:
                self._progress(self.records)
        if not dry_run:
            await self._sweep()
            await self._unmark(entries)
        kept = sum(seen.entry.next > 1 or seen.entry.owner is not None for seen in entries.values())
        return Compaction(retired=self.sagas, sagas=self.sagas, carried=0, freed=self.bytes, kept=kept)

    async def _bury(self) -> None:
        for leased in await self._index.leases():
            state, now = await self._ownership.watch.judge(leased.nonce)
            if state is not State.LIVE and now is not None:
                await self._ownership.fence(leased.nonce, now)

    async def _settle(self, entries: Sequence[Seen]) -> None:
        """Have the entries say themselves what until now only their writers' messages do."""
        dead: dict[str, bool] = {}
        ended: list[tuple[Seen, Tail]] = []
        free: list[tuple[Entry, int]] = []
        for seen in entries:
            entry, owner = seen.entry, seen.entry.owner
            if owner is None or entry.ended is not None:
                continue
            tail = await self._reader.tail(seen)
            if tail is not None and tail.final:
                ended.append((seen, tail))
                continue
            if owner not in dead:
                dead[owner] = (await self._ownership.watch.judge(owner))[0] is not State.LIVE
                if dead[owner]:
                    await self._ownership.fence(owner, None)
            if not dead[owner]:
                continue
            if tail is None and entry.next == 1:
                await self._index.forget(seen)
            else:
                end, next_n = (entry.tail, entry.next) if tail is None else (tail.tail, tail.last + 1)
                freed = Entry(
                    saga=entry.saga, life=entry.life, epoch=entry.epoch, next=next_n, tail=end, born=seen.born
                )
                free.append((freed, seen.revision))
        await self._ownership.note_ended(ended)
        await self._index.put_marks([entry.saga for entry, _ in free])
        await self._index.change_all(free)

    async def _forget(self, seen: Seen, *, dry_run: bool) -> bool:
        """Forget a saga, if it is whole and has really ended that long ago. Damage is left to be found."""
        try:
            found = await self._reader.find(seen.entry.saga)
            if found is None or found.seen.revision != seen.revision:
                return False
            records = self._reader.checked(found, erased=True)
        except LogCorrupted:
            return False
        if not records or records[-1].type not in FINAL or records[-1].time > self._cutoff:
            return False
        if not dry_run and not await self._index.forget(seen):
            return False
        self.sagas += 1
        self.records += len(records)
        self.bytes += sum(len(body) for _, body in found.rows)
        return True

    # --- messages

    async def _sweep(self) -> None:
        """Remove the messages of which no saga is known any more."""
        messages, blobs, kept = await self._all()
        # The entries after the messages: what is not entered now was forgotten, or is not yet.
        entries, faults = await self._index.all()
        if faults:
            return
        lives = {(saga, seen.entry.life) for saga, seen in entries.items()}
        gone: set[tuple[str, str]] = set()
        left: set[tuple[str, str]] = set()
        needed: set[int] = set()
        spare: list[_Read] = []
        fences: list[Message] = []
        for read in messages:
            message, named, ended = read
            # The final record of a saga goes last: `verify` calls one without it, and without an entry, lost.
            needless = not named & lives and not ended & left and await self._are_gone(named, gone)
            if not needless or not await self._may_go(message):
                left |= named
                kept.add(message.subject)
                needed.update(int(seq) for seq in message.headers.get(BLOBS, "").split(",") if seq.isdigit())
            elif message.headers.get(KIND) == Kind.FENCE:
                fences.append(message)
            else:
                spare.append(read)
        for some in _together(spare):
            await self._remove(some)
        await self._remove([blob for blob in blobs if blob.seq not in needed and _old(blob)])
        # A fence goes last: while anything of its writer is there, that writer must not fit behind it.
        await self._remove([fence for fence in fences if fence.subject not in kept])

    async def _all(self) -> tuple[list[_Read], list[Message], set[str]]:
        """Every message that can be read, without its payload; parts of long payloads; the subjects of the others."""
        messages: list[_Read] = []
        blobs: list[Message] = []
        damaged: set[str] = set()
        async for message in self._server.scan(self._server.stream, f"{self._server.address.name}.>"):
            bare = message._replace(data=b"")
            if message.headers.get(KIND) == Kind.BLOB:
                blobs.append(bare)
                continue
            read = meta_of(await self._reader.payload(message))
            if read is None:
                damaged.add(message.subject)  # it is left to be found
                continue
            parts = read[0].sagas
            named = frozenset((part.saga, part.life) for part in parts)
            ended = frozenset((part.saga, part.life) for part in parts if part.final)
            messages.append(_Read(bare, named, ended))
        return messages, blobs, damaged

    async def _are_gone(self, named: frozenset[tuple[str, str]], gone: set[tuple[str, str]]) -> bool:
        """Whether the index does not know any of these; asked of its leader, because others lag behind."""
        for saga, life in named - gone:
            seen = await self._index.get(saga)
            if seen is not None and seen.entry.life == life:
                return False
            gone.add((saga, life))
        return True

    async def _may_go(self, message: Message) -> bool:
        """Whether a message of which no saga is known is not needed otherwise."""
        subject = message.subject
        if subject.split(".")[-2] == "a":
            return _old(message)
        writer = self._writers.get(subject)
        if writer is None:
            last = await self._server.insist(lambda: self._server.last(self._server.stream, subject))
            table = "" if last is None else last.headers.get(TABLE, "")
            writer = self._writers[subject] = _Writer(
                last=0 if last is None else last.seq,
                fenced=last is not None and last.headers.get(KIND) == Kind.FENCE,
                listed=int(table) if table.isdigit() else 0 if last is None else last.seq,
            )
        return writer.fenced or message.seq < writer.listed

    async def _remove(self, messages: Sequence[Message]) -> None:
        async def one(seq: int) -> bool:
            return await self._server.insist(lambda: self._server.delete(self._server.stream, seq))

        for begin in range(0, len(messages), _AT_ONCE):
            await gathered([asyncio.ensure_future(one(some.seq)) for some in messages[begin : begin + _AT_ONCE]])

    async def _unmark(self, entries: dict[str, Seen]) -> None:
        for saga_id in await self._index.marks():
            try:
                seen = entries.get(saga_id)
                if seen is None or seen.entry.ended is not None:
                    seen = await self._index.get(saga_id)
            except LogCorrupted:
                continue
            if seen is None or seen.entry.ended is not None:
                await self._index.drop_mark(saga_id)


def _together(messages: Sequence[_Read]) -> Iterator[list[Message]]:
    """The messages, as many at once as may go in any order: no final record goes with what stands before it."""
    some: list[Message] = []
    begun: set[tuple[str, str]] = set()
    for message, named, ended in messages:
        if ended & begun:
            yield some
            some, begun = [], set()
        some.append(message)
        begun |= named
    if some:
        yield some


def _old(message: Message) -> bool:
    """Whether a message has been there for a day, by the servers' clock and ours; in doubt it has not."""
    import time
    from datetime import datetime

    stamp = message.headers.get("Nats-Time-Stamp", "")
    try:
        moment = datetime.fromisoformat(stamp[:19] + "+00:00").timestamp()
    except ValueError:
        return False
    return time.time() - moment > _UNUSED_FOR
