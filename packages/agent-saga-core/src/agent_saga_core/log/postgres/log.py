"""`PostgresLog`: the store itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from agent_saga_core.clock import SYSTEM_CLOCK, Clock
from agent_saga_core.errors import LogCorrupted, SagaBusy
from agent_saga_core.log.base import KEEP_DAYS, Compaction, Unfinished, Verification, cutoff
from agent_saga_core.log.commit import Entry, Owned
from agent_saga_core.log.leased import Holding, LeasedLog, Taken, fit
from agent_saga_core.log.lines import Adopted, Lines, wholes_of
from agent_saga_core.log.postgres.address import address_of
from agent_saga_core.log.postgres.adopting import adopt, lines
from agent_saga_core.log.postgres.compaction import compact
from agent_saga_core.log.postgres.connection import Server
from agent_saga_core.log.postgres.lease import Heart
from agent_saga_core.log.postgres.owning import Ownership
from agent_saga_core.log.postgres.reading import history, ids_of, is_live, unfinished, verify
from agent_saga_core.log.postgres.schema import check_rights, open_meta
from agent_saga_core.log.postgres.writing import MOST_BYTES, MOST_RECORDS, Statements, put
from agent_saga_core.log.sql import SagaBatch
from agent_saga_core.records import FINAL, Encoded, Record

__all__ = ["PostgresLog"]


class PostgresLog(LeasedLog[SagaBatch]):
    """A log in a PostgreSQL database, shared by any number of processes on any number of machines.

    What `flush` or `write` returned for is committed: it survives whatever the server survives. A saga belongs to its
    owner as long as the owner's lease runs, which a thread renews; a process that stays away longer may lose all its
    sagas. A record is only accepted under the claim, and behind the record, that its writer knows. `flush` also makes
    sure that the lease runs when it returns, so that no effect starts after another process may have taken over.

    It does not protect against: a server that acknowledges what it loses, such as an asynchronous replica that takes
    over (a saga that lost acknowledged records is refused with `LogCorrupted`, by the owner that meets it); a process
    that is stopped between `flush` and its effect for longer than the lease.

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
        self._statements: Final = Statements.of(self._address.schema)
        super().__init__(self._server, clock)
        self._meta: Final = self.found(lambda: open_meta(self._server))
        heart = Heart(self._server, self._address.lease)
        self._ownership: Final = Ownership(self._server, heart, self._meta.log_id)
        self.begin(heart)

    def is_live(self, saga_id: str) -> bool:
        """See `Log.is_live`: whether the lease of its owner runs."""
        self.check_readable()
        return self.holds(saga_id) or is_live(self._server, fit(saga_id))

    def saga_ids(self) -> tuple[str, ...]:
        """See `Log.saga_ids`."""
        self.check_readable()
        return tuple(ids_of(self._server))

    def unfinished(self) -> Unfinished:
        """See `Log.unfinished`."""
        self.check_readable()
        return unfinished(self._server, self._meta.log_id)

    def verify(self, progress: Callable[[int], None] | None = None) -> Verification:
        """See `Log.verify`."""
        self.check_readable()
        return verify(self._server, self._meta.log_id, progress)

    def compact(
        self,
        progress: Callable[[int], None] | None = None,
        *,
        keep_days: float = KEEP_DAYS,
        dry_run: bool = False,
    ) -> Compaction:
        """See `Log.compact`. What counts as a segment here is a saga; the server's vacuum makes the room usable."""
        self.check_readable()
        until = cutoff(self._clock, keep_days)
        return compact(self._server, self._meta.log_id, cutoff=until, dry_run=dry_run, progress=progress)

    # --- owning

    def admit(self) -> None:
        """See `LeasedLog.admit`."""
        check_rights(self._server)

    def take_over(self, saga_id: str, holding: Holding) -> Taken | None:
        """See `LeasedLog.take_over`."""
        return self._ownership.take(saga_id, holding, self._clock.time)

    def hand_back(self, saga_id: str, holding: Holding) -> None:
        """See `LeasedLog.hand_back`."""
        self._ownership.release(saga_id, holding)

    def history_there(self, saga_id: str) -> list[Record]:
        """See `LeasedLog.history_there`."""
        return history(self._server, saga_id, self._meta.log_id)

    # --- moving

    def lines(self, saga_id: str) -> Lines:
        """See `Log.lines`. What can be read is durable."""
        self.check_readable()
        return lines(self._server, fit(saga_id), self._meta.log_id)

    def adopt(self, histories: Mapping[str, Sequence[Encoded]]) -> Adopted:
        """See `Log.adopt`. Some 16 MiB go in one transaction; a longer history in one of its own."""
        self._check(appending=True)
        wholes = wholes_of(histories)
        for whole in wholes:
            fit(whole.saga_id)
        self.check_writable()
        return adopt(self._server, self._meta.log_id, wholes, self._is_ours)

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

    def _is_ours(self, saga_id: str, owner: object) -> bool:
        return saga_id in self._held or self._heart.mine(owner)

    # --- the store's part of group commit

    def prepare(self, entries: Sequence[Entry]) -> SagaBatch:
        """See `GroupCommitLog.prepare`."""
        return SagaBatch(entries, self._meta.log_id, records=MOST_RECORDS, size=MOST_BYTES)

    def write_batch(self, batch: SagaBatch) -> None:
        """See `GroupCommitLog.write_batch`. What it has written is durable."""
        self._server.run(lambda connection: put(connection, self.asked(batch), self._statements, self._refusals))
