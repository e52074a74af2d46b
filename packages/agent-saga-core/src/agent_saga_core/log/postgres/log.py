"""`PostgresLog`: the store itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from agent_saga_core.clock import SYSTEM_CLOCK, Clock
from agent_saga_core.errors import LogCorrupted, SagaBusy, SagaError
from agent_saga_core.log.base import KEEP_DAYS, Compaction, Unfinished, Verification, cutoff, readable_history
from agent_saga_core.log.commit import Entry, GroupCommitLog, Owned
from agent_saga_core.log.postgres.address import address_of
from agent_saga_core.log.postgres.compaction import compact
from agent_saga_core.log.postgres.connection import Server
from agent_saga_core.log.postgres.lease import Heart
from agent_saga_core.log.postgres.owning import Ownership
from agent_saga_core.log.postgres.reading import history, ids_of, is_live, unfinished, verify
from agent_saga_core.log.postgres.schema import check_rights, open_meta
from agent_saga_core.log.postgres.writing import Holding, RowBatch, Statements, put
from agent_saga_core.log.sql import Refusals
from agent_saga_core.records import FINAL, Record

__all__ = ["PostgresLog"]


class PostgresLog(GroupCommitLog[RowBatch]):
    """A log in a PostgreSQL database, shared by any number of processes on any number of machines.

    What `flush` or `write` returned for is committed: it survives whatever the server survives. A saga belongs to its
    owner as long as the owner's lease runs, which a thread renews; a process that stays away longer may lose all its
    sagas. A record is only accepted under the claim, and behind the record, that its writer knows. `flush` also makes
    sure that the lease runs when it returns, so that no effect starts after another process may have taken over.

    It does not protect against: a server that acknowledges what it loses, such as an asynchronous replica that takes
    over (a saga that lost acknowledged records is refused with `LogCorrupted`, by the owner that meets it); a process
    that is stopped between `flush` and its effect for longer than the lease; a server that is stopped and keeps its
    connections: calls wait for it.

    Args:
        url: The address; `docs/log-postgres.md` has its options.
        clock: What records are stamped with. Leases go by the server's clock and by the machine's own.

    Raises:
        ValueError: It is no address.
        LogUnavailable: There is no log, it is of another version, or the server cannot be reached or is not fit.
        LogCorrupted: What is there is no log any more.
    """

    def __init__(self, url: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._address: Final = address_of(url)
        self._server: Final = Server(self._address)
        self._heart: Final = Heart(self._server, self._address.lease)
        self._statements: Final = Statements.of(self._address.schema)
        self._refusals: Final = Refusals()
        self._holdings: dict[Owned, Holding] = {}
        self._held: dict[str, object] = {}
        self._writable = False
        super().__init__(clock)
        try:
            self._meta: Final = open_meta(self._server)
        except BaseException:
            self._closed = "it could not be opened"
            self._server.close()
            raise
        self._ownership: Final = Ownership(self._server, self._heart, self._meta.log_id)
        weakref.finalize(self, self._heart.stop)

    @property
    def url(self) -> str:
        """See `Log.url`."""
        return self._address.url

    @property
    def max_result_bytes(self) -> int:
        """See `Log.max_result_bytes`."""
        return self._address.max_result_bytes

    @property
    def closed(self) -> bool:
        """Whether this log was closed, or belongs to the parent of this process."""
        return self._closed is not None

    @property
    def poisoned(self) -> BaseException | None:
        """Why this log takes no more records; None if it does. Opening its address again may help."""
        return self._broken

    def read(self, saga_id: str) -> tuple[Record, ...]:
        """See `Log.read`."""
        self._check_readable()
        return readable_history(saga_id, history(self._server, _fit(saga_id), self._meta.log_id))

    def is_live(self, saga_id: str) -> bool:
        """See `Log.is_live`: whether the lease of its owner runs."""
        self._check_readable()
        owner = self._owned.get(saga_id)
        holding = None if owner is None else self._holdings.get(owner)
        return (holding is not None and holding.writer.good()) or is_live(self._server, _fit(saga_id))

    def saga_ids(self) -> tuple[str, ...]:
        """See `Log.saga_ids`."""
        self._check_readable()
        return tuple(ids_of(self._server))

    def unfinished(self) -> Unfinished:
        """See `Log.unfinished`."""
        self._check_readable()
        return unfinished(self._server, self._meta.log_id)

    def verify(self, progress: Callable[[int], None] | None = None) -> Verification:
        """See `Log.verify`."""
        self._check_readable()
        return verify(self._server, self._meta.log_id, progress)

    def compact(
        self,
        progress: Callable[[int], None] | None = None,
        *,
        keep_days: float = KEEP_DAYS,
        dry_run: bool = False,
    ) -> Compaction:
        """See `Log.compact`. What counts as a segment here is a saga; the server's vacuum makes the room usable."""
        self._check_readable()
        until = cutoff(self._clock, keep_days)
        return compact(self._server, self._meta.log_id, cutoff=until, dry_run=dry_run, progress=progress)

    # --- owning

    def claim(self, saga_id: str, *, fresh: bool = False) -> tuple[Record, ...]:
        """See `Log.claim`. When this returns, the CLAIM is durable and whoever owned the saga before is fenced."""
        self._check(appending=True)
        owner = Owned()
        try:
            self.take(saga_id, owner)
            records = () if fresh else self._take_over(saga_id, owner)
            self._owned[saga_id] = owner
            return records
        except BaseException:
            if self._owned.get(saga_id) is owner:
                self.release(saga_id)
            else:
                self.give_up(saga_id, owner)
            raise

    def claim_some(self, saga_ids: Sequence[str]) -> dict[str, tuple[Record, ...] | LogCorrupted]:
        """See `BatchClaims.claim_some`."""
        self._check(appending=True)
        owners: dict[str, Owned] = {}
        try:
            for saga_id in dict.fromkeys(saga_ids):
                owners[saga_id] = owner = Owned()
                with suppress(SagaBusy):
                    self.take(saga_id, owner)
            claimed = {saga_id: owner for saga_id, owner in owners.items() if owner in self._holdings}
            results = self._take_some(claimed)
        except BaseException:
            for saga_id, owner in owners.items():
                self.release(saga_id) if self._owned.get(saga_id) is owner else self.give_up(saga_id, owner)
            raise
        for saga_id, owner in owners.items():
            if self._owned.get(saga_id) is not owner:
                self.give_up(saga_id, owner)
        return self._one_by_one(saga_ids) if results is None else results

    def _take_some(self, owners: Mapping[str, Owned]) -> dict[str, tuple[Record, ...] | LogCorrupted] | None:
        holdings = {saga_id: self._holdings[owner] for saga_id, owner in owners.items()}
        writer = self._heart.writer()
        for holding in holdings.values():
            holding.fresh, holding.writer = False, writer
        taken = self._ownership.take_some(holdings, writer, self._clock.time) if holdings else {}
        if taken == {} and holdings and not self._heart.still(writer):
            return self._take_some(owners)  # it had lost its lease, without having heard of it
        results: dict[str, tuple[Record, ...] | LogCorrupted] = {}
        for saga_id, found in (taken or {}).items():
            if isinstance(found, LogCorrupted):
                results[saga_id] = found
                continue
            owner = owners[saga_id]
            owner.base_n = found.last_n
            owner.base_ended = any(record.type in FINAL for record in found.records)
            self._owned[saga_id] = owner
            results[saga_id] = found.records
        return None if taken is None else results

    def _one_by_one(self, saga_ids: Sequence[str]) -> dict[str, tuple[Record, ...] | LogCorrupted]:
        results: dict[str, tuple[Record, ...] | LogCorrupted] = {}
        try:
            for saga_id in dict.fromkeys(saga_ids):
                try:
                    results[saga_id] = self.claim(saga_id)
                except LogCorrupted as error:
                    results[saga_id] = error
                except SagaBusy:
                    continue
        except BaseException:
            for saga_id, records in results.items():
                if not isinstance(records, LogCorrupted):
                    self.release(saga_id)
            raise
        return results

    def take(self, saga_id: str, token: object) -> None:
        """See `GroupCommitLog.take`. This excludes the other scopes of this process; a fresh id needs no more."""
        _fit(saga_id)
        if not self._writable:
            check_rights(self._server)  # where that is refused, no effect must start
            self._writable = True
        writer = self._heart.writer()
        if self._held.setdefault(saga_id, token) is not token:
            raise SagaBusy(f"saga {saga_id!r} is owned by another scope of this process", saga_id=saga_id)
        if isinstance(token, Owned):
            self._holdings[token] = Holding(writer, 1, fresh=True)

    def _take_over(self, saga_id: str, owner: Owned) -> tuple[Record, ...]:
        holding = self._holdings[owner]
        holding.fresh = False
        taken = self._ownership.take(saga_id, holding, self._clock.time)
        while taken is None:
            holding.writer = self._heart.writer()
            taken = self._ownership.take(saga_id, holding, self._clock.time)
        owner.base_n = taken.last_n
        owner.base_ended = any(record.type in FINAL for record in taken.records)
        return taken.records

    def durable_history(self, saga_id: str) -> tuple[tuple[Record, ...], int]:
        """See `GroupCommitLog.durable_history`. What can be read is durable."""
        records = history(self._server, saga_id, self._meta.log_id)
        return readable_history(saga_id, records), len(records)

    def give_up(self, saga_id: str, token: object) -> None:
        """See `GroupCommitLog.give_up`. If the server is away, it is told when it is back."""
        if self._held.get(saga_id) is token:
            holding = self._holdings.get(token) if isinstance(token, Owned) else None
            # The end of this log frees everything at once, and the final record of a saga freed that.
            if holding is not None and holding.asked and not self._closing and not _is_over(token):
                self._ownership.release(saga_id, holding)
            self._held.pop(saga_id, None)
        if isinstance(token, Owned):
            self._holdings.pop(token, None)
        self._refusals.forget(token)

    # --- the store's part of group commit

    def flush(self, ticket: int) -> None:
        """See `Log.flush`. When this returns, the lease runs.

        Raises:
            Fenced: Another process has taken over, or may have: the lease ran out, and could not be renewed.
            LogUnavailable: The server stayed away. The log takes no more records; open it again.
        """
        self._flush(ticket)
        holding = self._in_doubt(ticket)
        if holding is not None:
            self._heart.hold(holding.writer)

    async def aflush(self, ticket: int) -> None:
        """See `flush`."""
        await super().aflush(ticket)
        holding = self._in_doubt(ticket)
        if holding is not None:
            await self._heart.ahold(holding.writer)

    def _in_doubt(self, ticket: int) -> Holding | None:
        """Under what the record was written, if nobody may act on its being durable before the lease is renewed.

        Nothing is done after a final record that another owner could do as well.
        """
        if not isinstance(ticket, Entry):
            return next((one for one in list(self._holdings.values()) if not one.writer.good()), None)
        if ticket.final:
            return None
        holding = self._holdings.get(ticket.owner)
        return None if holding is None or holding.writer.good() else holding

    def prepare(self, entries: Sequence[Entry]) -> RowBatch:
        """See `GroupCommitLog.prepare`."""
        return RowBatch(entries, self._meta.log_id)

    def write_batch(self, batch: RowBatch) -> None:
        """See `GroupCommitLog.write_batch`. What it has written is durable."""
        self._server.run(lambda connection: put(connection, batch, self._statements, self._holdings, self._refusals))
        if any(entry.error is not None for entry in batch.entries):
            self._heart.ask()  # who lost one saga may have lost all

    def accept(self, batch: RowBatch) -> None:
        """See `GroupCommitLog.accept`."""

    def sync(self) -> None:
        """See `GroupCommitLog.sync`: nothing is left to do."""

    def shut(self, *, clean: bool) -> None:
        """See `GroupCommitLog.shut`."""
        try:
            self._heart.retire()
        except SagaError:
            return  # the lease runs out by itself
        finally:
            self._server.close()

    def abandon(self) -> None:
        """See `GroupCommitLog.abandon`."""
        self._heart.abandon()
        self._held.clear()
        self._holdings.clear()
        self._server.abandon()

    def _check_readable(self) -> None:
        if self._closed is not None:
            self._check()


def _is_over(token: object) -> bool:
    """Whether the saga has certainly ended: its row then names no owner."""
    if not isinstance(token, Owned):
        return False
    last = token.last
    return token.base_ended if last is None else last.final and last.durable and last.error is None


def _fit(saga_id: str) -> str:
    """The id, if the database can hold it.

    Raises:
        ValueError: It cannot.
    """
    try:
        saga_id.encode()
    except UnicodeEncodeError:
        raise ValueError("A saga id is UTF-8. Choose another id.") from None
    if "\0" in saga_id:
        raise ValueError("A saga id has no control characters. Choose another id.")
    return saga_id
