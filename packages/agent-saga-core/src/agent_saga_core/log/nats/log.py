"""`NatsLog`: the store itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from agent_saga_core.clock import SYSTEM_CLOCK, Clock
from agent_saga_core.errors import Fenced, LogCorrupted, SagaError
from agent_saga_core.log.base import KEEP_DAYS, Compaction, Unfinished, Verification, cutoff
from agent_saga_core.log.commit import Entry
from agent_saga_core.log.leased import Holding, LeasedLog, Taken, fit
from agent_saga_core.log.lines import Adopted, Lines, wholes_of
from agent_saga_core.log.nats.address import address_of
from agent_saga_core.log.nats.adopting import Adoption, lines_in
from agent_saga_core.log.nats.compaction import Passage
from agent_saga_core.log.nats.connection import Away, Refused, Server
from agent_saga_core.log.nats.index import Index
from agent_saga_core.log.nats.lease import Heart, State
from agent_saga_core.log.nats.owning import Ownership
from agent_saga_core.log.nats.reading import Reader, ids_of, unfinished, verify
from agent_saga_core.log.nats.schema import open_log_id
from agent_saga_core.log.nats.writing import Group, LineBatch, Pen, error_of
from agent_saga_core.records import Encoded, Record

__all__ = ["NatsLog"]


class NatsLog(LeasedLog[LineBatch]):
    """A log in NATS JetStream, shared by any number of processes on any number of machines.

    What `flush` or `write` returned for was acknowledged by the server, or by a majority of the servers that hold the
    log. A saga belongs to its owner as long as the owner's lease runs, which a thread renews; a process that stays away
    longer may lose all its sagas. A record is only accepted behind the message that its writer knows, and a process
    that lost its lease can write nothing more. `flush` also makes sure that the lease runs when it returns, so that no
    effect starts after another process may have taken over.

    It does not protect against: a server that does not sync what it acknowledges, and whose machine crashes (that is
    the default of NATS; opening warns of it where it is so, or cannot be seen); a process that is stopped between
    `flush` and its effect for longer than the lease.

    Args:
        url: The address; `docs/log-nats.md` has its options.
        clock: What records are stamped with. Leases go by the machine's own.

    Raises:
        ValueError: It is no address.
        LogUnavailable: There is no log, it is of another version, or the servers cannot be reached or are not fit.
        LogCorrupted: What is there is no log any more.
    """

    def __init__(self, url: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._address: Final = address_of(url)
        self._server: Final = Server(self._address)
        super().__init__(self._server, clock)
        self._log_id: Final = self.found(lambda: open_log_id(self._server))
        self._index: Final = Index(self._server)
        self._reader: Final = Reader(self._server, self._index, self._log_id)
        self._ownership: Final = Ownership(self._server, self._index, self._reader, self._log_id)
        self._nats_heart: Final = Heart(
            self._server,
            self._index,
            self._ownership.watch,
            self._address.lease,
            leave=self._ownership.leave,
            bury=self._ownership.bury_idle,
        )
        self.begin(self._nats_heart)

    def is_live(self, saga_id: str) -> bool:
        """See `Log.is_live`: whether its owner may still hold a lease. One that was never seen may, for its length."""
        self.check_readable()
        fit(saga_id)
        return self.holds(saga_id) or self._server.run(lambda: self._is_live(saga_id))

    def undecided(self, saga_ids: Collection[str]) -> float:
        """See `WatchedLeases.undecided`."""
        self.check_readable()
        return self._server.run(lambda: self._undecided(saga_ids))

    async def _undecided(self, saga_ids: Collection[str]) -> float:
        entries, _ = await self._index.some(saga_ids)  # what is damaged is for others to say
        owners = {seen.entry.owner for seen in entries.values() if seen.entry.owner and seen.entry.ended is None}
        return await self._ownership.watch.undecided(owners.difference(self._nonces())) if owners else 0.0

    async def _is_live(self, saga_id: str) -> bool:
        try:
            seen = await self._index.get(saga_id)
        except LogCorrupted:
            return False  # whose it is cannot be read; who reads or claims it hears of that
        if seen is None or seen.entry.owner is None or seen.entry.ended is not None:
            return False
        state, _ = await self._ownership.watch.judge(seen.entry.owner)
        if state is not State.LIVE:
            return False
        tail = await self._reader.tail(seen)
        return tail is None or not tail.final

    def saga_ids(self) -> tuple[str, ...]:
        """See `Log.saga_ids`."""
        self.check_readable()
        return tuple(self._server.run(lambda: ids_of(self._index, self._reader)))

    def unfinished(self) -> Unfinished:
        """See `Log.unfinished`."""
        self.check_readable()
        return self._server.run(lambda: unfinished(self._reader, self._nonces, self._ownership.watch.look_around))

    def _nonces(self) -> list[str]:
        return [pen.nonce for pen in self._nats_heart.pens.copy().values()]

    def verify(self, progress: Callable[[int], None] | None = None) -> Verification:
        """See `Log.verify`."""
        self.check_readable()
        return self._server.run(lambda: verify(self._reader, self._server, progress))

    def compact(
        self,
        progress: Callable[[int], None] | None = None,
        *,
        keep_days: float = KEEP_DAYS,
        dry_run: bool = False,
    ) -> Compaction:
        """See `Log.compact`. What counts as a segment here is a saga."""
        self.check_readable()
        until = cutoff(self._clock, keep_days)
        passage = Passage(self._server, self._index, self._reader, self._ownership, until, progress)
        nonce = "" if dry_run else self._nats_heart.pen(self._nats_heart.writer()).nonce

        async def run() -> Compaction:
            await self._ownership.note()
            return await passage.run(nonce, dry_run=dry_run)

        return self._server.run(run)

    # --- moving

    def lines(self, saga_id: str) -> Lines:
        """See `Log.lines`."""
        self.check_readable()
        fit(saga_id)
        return self._server.run(lambda: lines_in(self._reader, saga_id))

    def adopt(self, histories: Mapping[str, Sequence[Encoded]]) -> Adopted:
        """See `Log.adopt`."""
        self._check(appending=True)
        wholes = wholes_of(histories)
        for whole in wholes:
            fit(whole.saga_id)
        adoption = Adoption(self._server, self._index, self._reader, self._ownership, self._held.__contains__)
        return self._server.run(lambda: adoption.adopt(wholes))

    # --- owning

    def admit(self) -> None:
        """See `LeasedLog.admit`. What this process may not do shows when its lease begins, before any effect."""

    def take_over(self, saga_id: str, holding: Holding) -> Taken | None:
        """See `LeasedLog.take_over`."""
        self._heart.called_off(saga_id)  # it was given up while the servers were away, and must not be from now on
        if not holding.writer.good() and not self._heart.still(holding.writer):
            return None
        holding.asked = True
        taken = self._server.run(lambda: self._ownership.take(saga_id, holding, self._nats_heart, self._clock.time))
        if taken is None:
            self._heart.ask()
        return taken

    def hand_back(self, saga_id: str, holding: Holding) -> None:
        """See `LeasedLog.hand_back`."""
        pen = self._nats_heart.pens.get(holding.writer.nonce)
        if pen is None:
            return

        async def give_back() -> None:
            await self._ownership.release(saga_id, holding, pen)

        def later(server: Server) -> None:
            server.wait_for(server.start(lambda: server.patient(0.0, give_back)))

        try:
            self._server.wait_for(self._server.start(lambda: self._server.patient(0.0, give_back)))
        except (Away, Refused, SagaError):
            self._heart.later(saga_id, later)

    def history_there(self, saga_id: str) -> list[Record]:
        """See `LeasedLog.history_there`."""
        return self._server.run(lambda: self._reader.history(saga_id))

    # --- the store's part of group commit

    def prepare(self, entries: Sequence[Entry]) -> LineBatch:
        """See `GroupCommitLog.prepare`."""
        # Whoever reads one of its sagas reads the whole message.
        return LineBatch(entries, self._log_id, self._server.room() * 3 // 4)

    def write_batch(self, batch: LineBatch) -> None:
        """See `GroupCommitLog.write_batch`. What it has written is durable."""
        future = batch.sending
        if future is None:
            future = batch.sending = self._server.start(lambda: self._write(batch))
        try:
            self._server.wait_for(future)
        except (Away, Refused) as error:
            raise self._server.translated(error) from None

    async def _write(self, batch: LineBatch) -> None:
        """Write a batch. Begun twice, because an interrupt came before that was noted, it is written once."""
        if batch.lock is None:
            batch.lock = asyncio.Lock()
        async with batch.lock:
            if batch.done:
                return
            asked = self._asked(batch)
            fresh = [(saga, holding, pen) for saga, (holding, pen) in asked.items() if holding.fresh]
            for saga_id in await self._ownership.begin(fresh) if fresh else ():
                del asked[saga_id]
                error = Fenced(f"saga {saga_id!r} is another's: its id was taken while nothing of it was stored")
                self._refusals.refuse(batch.sagas[saga_id].entries, error)
            pens: dict[Pen, list[str]] = {}
            for saga_id, (_, pen) in asked.items():
                pens.setdefault(pen, []).append(saga_id)
            for pen, saga_ids in pens.items():
                try:
                    await pen.write([self._group(batch, saga_id, asked[saga_id][0]) for saga_id in saga_ids])
                except (Fenced, LogCorrupted) as error:
                    for saga_id in saga_ids:
                        self._refusals.refuse(batch.sagas[saga_id].entries, error_of(saga_id, error))
                else:
                    ends = [(saga_id, batch.sagas[saga_id].ended) for saga_id in saga_ids]
                    self._ownership.ended([(saga, float(at), asked[saga][0], pen) for saga, at in ends if at])
            batch.done = True

    def _asked(self, batch: LineBatch) -> dict[str, tuple[Holding, Pen]]:
        """The sagas of a batch that this process may write to."""
        asked: dict[str, tuple[Holding, Pen]] = {}
        for saga_id, (rows, holding) in self.asked(batch).items():
            pen, lost = self._nats_heart.pens.get(holding.writer.nonce), holding.writer.lost
            if pen is None or not (holding.fresh or holding in self._ownership.kept):
                lost = "it was given up"
            if pen is None or lost is not None:
                self._refusals.refuse(rows.entries, Fenced(f"this process lost saga {saga_id!r}: {lost}"))
            else:
                asked[saga_id] = holding, pen
        return asked

    def _group(self, batch: LineBatch, saga_id: str, holding: Holding) -> Group:
        rows = batch.sagas[saga_id]
        life = self._ownership.kept[holding].entry.life
        return Group(saga_id, life, rows.entries[0].n, rows.bodies, rows.entries[-1].final)
