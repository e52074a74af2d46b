"""How a saga changes hands in a NATS log.

Three things have to change, and each has its own subject: the writer that had it is fenced by a message on its subject,
the saga's entry names the new owner, and the CLAIM is the new owner's first record. In that order; `docs/log-nats.md`
says why every moment between them is safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from agent_saga_core.errors import Fenced
from agent_saga_core.log.leased import TRIES, Claim, Holding, Taken, busy, claim_of, contested
from agent_saga_core.log.nats.connection import Away, Conflict, Refused, Server
from agent_saga_core.log.nats.index import Index, Leased, Seen
from agent_saga_core.log.nats.lease import Heart, State, Watch
from agent_saga_core.log.nats.messages import AFTER, KIND, TABLE, Entry, Kind, Lease, Tail
from agent_saga_core.log.nats.reading import Found, Reader
from agent_saga_core.log.nats.writing import Group, Pen, new_token, payload_of

__all__ = ["Kept", "Ownership"]


class Kept:
    """The entry under which this process owns a saga."""

    __slots__ = ("entry", "marked", "revision", "surely")

    def __init__(self, entry: Entry, revision: int, *, marked: bool, surely: bool = False) -> None:
        self.entry = entry
        self.revision = revision
        self.marked = marked
        """Whether there may be a mark of it."""
        self.surely = surely
        """Whether there is one."""


class Ownership:
    """Claims and releases, for one process. What begins with `async` is for the loop of the connection."""

    def __init__(self, server: Server, index: Index, reader: Reader, log_id: bytes) -> None:
        self.watch: Final = Watch(index)
        self.kept: dict[Holding, Kept] = {}
        self._server = server
        self._index = index
        self._reader = reader
        self._log_id = log_id
        self._turns: dict[Holding, asyncio.Lock] = {}
        self._ends: dict[str, tuple[Pen, Kept, float]] = {}
        self._noting: asyncio.Task[None] | None = None

    # --- claiming

    async def take(self, saga_id: str, holding: Holding, heart: Heart, clock: Callable[[], float]) -> Taken | None:
        """Own the saga, whatever there is of it; every record that is returned is durable.

        None says that the writer itself has lost its lease, without having heard of it: another may try.

        Raises:
            SagaBusy: A live process has it.
            LogCorrupted: Damage concerns it. It is not owned.
        """
        # Who was interrupted gives the saga up while this still goes on: then that waits for it.
        turn = self._turns.setdefault(holding, asyncio.Lock())
        try:
            async with turn:
                return await self._try(saga_id, holding, heart, clock)
        finally:
            self._turns.pop(holding, None)

    async def _try(self, saga_id: str, holding: Holding, heart: Heart, clock: Callable[[], float]) -> Taken | None:
        pen = heart.pen(holding.writer)
        if holding.writer.lost is not None:
            return None
        for _ in range(TRIES):
            seen = await self._index.get(saga_id)
            if seen is None:
                taken = await self._appear(saga_id, holding, pen)
            else:
                taken = await self._take(seen, holding, pen, heart, clock)
            if taken is not None:
                return taken
            if holding.writer.lost is not None:
                return None
        raise contested(saga_id)

    async def _appear(self, saga_id: str, holding: Holding, pen: Pen) -> Taken | None:
        entry = Entry(saga=saga_id, life=new_token(), owner=pen.nonce)
        holding.epoch = 1
        try:
            revision = await self._index.change(entry, 0)
        except Conflict:
            return None
        self.kept[holding] = Kept(entry, revision, marked=False)
        return Taken((), 0)

    async def _take(
        self, seen: Seen, holding: Holding, pen: Pen, heart: Heart, clock: Callable[[], float]
    ) -> Taken | None:
        """One try; None if the saga is not any more what was read of it, or this writer has lost its lease."""
        saga_id = seen.entry.saga
        if not await self._free(seen, pen, heart):
            raise busy(saga_id)
        found = await self._reader.find(saga_id)
        if found is None or found.seen.revision != seen.revision:
            return None
        records = self._reader.checked(found)
        if not records:
            return await self._take_empty(found, holding, pen)
        claim = claim_of(saga_id, records, self._log_id, clock())
        return claim if isinstance(claim, Taken) else await self._claim(found, claim, holding, pen, heart)

    async def _free(self, seen: Seen, pen: Pen, heart: Heart) -> bool:
        """Whether nobody owns a saga; whoever did is fenced then."""
        owner = seen.entry.owner
        if owner is None or seen.entry.ended is not None:
            return True
        mine = pen if owner == pen.nonce else heart.mine_named(owner)
        if mine is not None:
            # Given up without having been given back: what was sent for it must not come in behind what is read now.
            with suppress(Fenced):
                async with mine.lock:
                    await mine.settle()
            return True
        state, leased = await self.watch.judge(owner)
        if state is State.LIVE:
            # Its owner may have ended it, and not have noted that yet: then nobody has to give it up.
            tail = await self._reader.tail(seen)
            return tail is not None and tail.final
        return await self.fence(owner, leased)

    async def _take_empty(self, found: Found, holding: Holding, pen: Pen) -> Taken | None:
        """Somebody claimed the id, and is gone or lets go of it, and nothing is begun."""
        before = found.seen.entry
        entry = Entry(saga=before.saga, life=new_token(), owner=pen.nonce, epoch=before.epoch, born=found.seen.born)
        holding.epoch = entry.epoch
        try:
            revision = await self._index.change(entry, found.seen.revision)
        except Conflict:
            return None
        self.kept[holding] = Kept(entry, revision, marked=False)
        return Taken((), 0)

    async def _claim(self, found: Found, claim: Claim, holding: Holding, pen: Pen, heart: Heart) -> Taken | None:
        before, n = found.seen.entry, found.next
        entry = Entry(
            saga=before.saga,
            life=before.life,
            owner=pen.nonce,
            epoch=n,
            next=n,
            tail=found.recent[0],
            born=found.seen.born,
        )
        holding.epoch = n
        try:
            revision = await self._index.change(entry, found.seen.revision)
        except Conflict:
            return None
        surely = before.owner is None or (before.owner != pen.nonce and heart.mine_named(before.owner) is None)
        self.kept[holding] = Kept(entry, revision, marked=True, surely=surely)
        pen.open[before.saga] = Tail(before.life, n - 1, found.recent)
        try:
            await pen.write([Group(before.saga, before.life, n, [claim.body], final=False)])
        except Fenced:
            return None
        return claim.taken

    # --- fencing

    async def fence(self, nonce: str, leased: Leased | None) -> bool:
        """End a writer whose lease ran out, or is gone; False if it has renewed it in this moment.

        When this returns True, nothing that it has not written yet will ever be stored, and its sagas can be found
        without it.
        """
        if leased is None:
            if await self._is_stopped(nonce):
                return True
            # A server that lags behind may not know a lease that is there: then this is refused.
            leased = Leased(nonce, Lease(seconds=0.0, beat=0), 0)
        if not leased.lease.fenced:
            # First the lease, so that no effect starts on one that is renewed later; then what it writes.
            marked = Lease(seconds=leased.lease.seconds, beat=leased.lease.beat, fenced=True)
            try:
                await self._index.put_lease(nonce, marked, leased.revision)
            except Conflict:
                there = await self._index.get_lease(nonce)
                if there is not None and not there.lease.fenced:
                    return False
        await self._stop(nonce)
        await self.bury(nonce)
        return True

    async def _is_stopped(self, nonce: str) -> bool:
        """Whether nothing of a writer can be stored any more: it is fenced, or all it wrote is forgotten."""
        server = self._server
        last = await server.insist(lambda: server.last(server.stream, f"{server.address.name}.w.{nonce}"))
        return last is None or last.headers.get(KIND) == Kind.FENCE

    async def _stop(self, nonce: str) -> None:
        server = self._server
        subject = f"{server.address.name}.w.{nonce}"
        while True:
            last = await server.insist(lambda: server.last(server.stream, subject))
            if last is not None and last.headers.get(KIND) == Kind.FENCE:
                return
            after = 0 if last is None else last.seq
            table = "0" if last is None else last.headers.get(TABLE, "0")
            headers = {
                KIND: str(Kind.FENCE),
                TABLE: str(after) if table == "self" else table,
                AFTER: str(after),
            }
            try:
                await server.write(subject, payload_of((), {}), expected=after, token=new_token(), headers=headers)
            except Conflict:
                continue
            return

    async def bury(self, nonce: str) -> None:
        """Let the sagas of a fenced writer be found without it: those that have not ended are marked."""
        await self._settle(nonce, await self._reader.tails(nonce))
        await self._index.drop_lease(nonce)

    async def bury_idle(self, leased: Leased) -> None:
        """End a writer that has been gone for long, if it has left nothing that anybody would have to recover."""
        tails = await self._reader.tails(leased.nonce)
        entries, _ = await self._index.some(saga for saga, tail in tails.items() if not tail.final)
        if not any(seen.entry.owner == leased.nonce and seen.entry.ended is None for seen in entries.values()):
            await self.fence(leased.nonce, leased)

    async def _settle(self, nonce: str, tails: dict[str, Tail]) -> None:
        entries, _ = await self._index.some(tails)
        theirs = {
            saga: seen
            for saga, seen in entries.items()
            if seen.entry.owner == nonce and seen.entry.ended is None and seen.entry.life == tails[saga].life
        }
        await self._index.put_marks([saga for saga in theirs if not tails[saga].final])
        ended = [saga for saga in theirs if tails[saga].final]
        await self.note_ended([(theirs[saga], tails[saga]) for saga in ended])

    async def note_ended(self, found: Sequence[tuple[Seen, Tail]]) -> None:
        """Have the index say that sagas have ended, of which their final record does."""
        changes: list[tuple[Entry, int]] = []
        for seen, tail in found:
            time = await self._time_of_end(seen, tail)
            changes.append((_ended(seen.entry, seen.born, tail, time), seen.revision))
        await self._index.change_all(changes)
        for seen, _ in found:
            await self._index.drop_mark(seen.entry.saga)

    async def _time_of_end(self, seen: Seen, tail: Tail) -> float:
        part = await self._reader.part(tail.tail, seen.entry.saga, seen.entry.life)
        if part is None or not part[1]:
            return 0.0
        head = part[1][-1][1].partition(b',"digest":')[0].rpartition(b":")[2]
        try:
            return float(head)
        except ValueError:
            return 0.0

    # --- beginning, giving back, ending

    async def begin(self, fresh: Sequence[tuple[str, Holding, Pen]]) -> set[str]:
        """Enter sagas whose ids were drawn into the index; those that it has already, by another, are returned."""
        changes: list[tuple[Entry, int]] = []
        for saga_id, holding, pen in fresh:
            holding.asked = True
            changes.append((Entry(saga=saga_id, life=new_token(), owner=pen.nonce), 0))
        refused: set[str] = set()
        for (saga_id, holding, _), (entry, _), revision in zip(
            fresh, changes, await self._index.change_all(changes), strict=True
        ):
            if revision is None:
                refused.add(saga_id)
            else:
                self.kept[holding] = Kept(entry, revision, marked=False)
                holding.fresh = False
        return refused

    async def release(self, saga_id: str, holding: Holding, pen: Pen) -> None:
        """Give a saga back."""
        turn = self._turns.get(holding)
        if turn is not None:
            async with turn:
                pass
        kept = self.kept.get(holding)
        if kept is None or pen.writer.lost is not None or pen.fenced:
            self.kept.pop(holding, None)
            return
        try:
            async with pen.lock:
                await pen.settle()
        except Fenced:
            self.kept.pop(holding, None)
            return
        tail = pen.open.get(saga_id)
        if tail is None or tail.life != kept.entry.life or not tail.recent:
            await self._index.forget(Seen(kept.entry, kept.revision))
        elif not tail.final:
            if not kept.surely:
                await self._index.put_marks([saga_id])
            entry = Entry(
                saga=saga_id,
                life=kept.entry.life,
                epoch=kept.entry.epoch,
                next=tail.last + 1,
                tail=tail.tail,
                born=kept.entry.born or kept.revision,
            )
            with suppress(Conflict):  # then somebody has changed it: it is not this process's any more
                await self._index.change(entry, kept.revision)
        if self.kept.pop(holding, None) is not None and tail is not None and not tail.final:
            if pen.open.get(saga_id) is tail:
                pen.open.pop(saga_id)

    def ended(self, ends: Sequence[tuple[str, float, Holding, Pen]]) -> None:
        """Have the index say, soon, that the final records of these sagas, of those times, are stored. On the loop."""
        for saga, time, holding, pen in ends:
            kept = self.kept.pop(holding, None)
            if kept is not None:
                self._ends[saga] = pen, kept, time
        if self._ends and (self._noting is None or self._noting.done()):
            self._noting = asyncio.get_running_loop().create_task(self._note())

    async def _note(self) -> None:
        try:
            await self.note()
        except (Away, Refused):
            return  # whoever reads finds the final record, and it is tried again

    async def note(self) -> None:
        """Note what has ended here.

        Raises:
            Away: The servers stayed away; it is kept for another try.
        """
        while self._ends:
            some = dict(list(self._ends.items())[:500])
            changes: list[tuple[Entry, int]] = []
            for saga, (pen, kept, time) in some.items():
                tail = pen.open.get(saga)
                if tail is not None and tail.final:
                    changes.append((_ended(kept.entry, kept.entry.born or kept.revision, tail, time), kept.revision))
            await self._index.change_all(changes)
            for saga, (_, kept, _) in some.items():
                if kept.marked:
                    await self._index.drop_mark(saga)
            for saga, (pen, kept, _) in some.items():
                self._ends.pop(saga, None)
                tail = pen.open.get(saga)
                if tail is not None and tail.final and tail.life == kept.entry.life:
                    pen.open.pop(saga, None)

    async def leave(self, pen: Pen) -> None:
        """End a writer of this process: what it has is free."""
        await self.note()
        async with pen.lock:
            await pen.end()
        if pen.writer.lost is not None:
            return
        for kept in [kept for kept in self.kept.values() if kept.entry.owner == pen.nonce]:
            if kept.entry.next == 1 and kept.entry.saga not in pen.open:
                await self._index.forget(Seen(kept.entry, kept.revision))
        await self._settle(pen.nonce, dict(pen.open))
        await self._index.drop_lease(pen.nonce)


def _ended(entry: Entry, born: int, tail: Tail, time: float) -> Entry:
    return Entry(
        saga=entry.saga,
        life=entry.life,
        epoch=entry.epoch,
        next=tail.last + 1,
        tail=tail.tail,
        born=born,
        ended=time,
    )
