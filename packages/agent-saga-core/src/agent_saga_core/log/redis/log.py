"""`RedisLog`: the store itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from agent_saga_core.clock import SYSTEM_CLOCK, Clock
from agent_saga_core.errors import LogCorrupted, SagaError
from agent_saga_core.log.base import KEEP_DAYS, Compaction, Unfinished, Verification, cutoff
from agent_saga_core.log.commit import Entry
from agent_saga_core.log.leased import Holding, LeasedLog, Taken, busy, fit
from agent_saga_core.log.lines import Adopted, Lines, adopt_owned, wholes_of
from agent_saga_core.log.redis.address import address_of
from agent_saga_core.log.redis.adopting import put_whole
from agent_saga_core.log.redis.compaction import compact
from agent_saga_core.log.redis.connection import Connection, Server
from agent_saga_core.log.redis.lease import Heart
from agent_saga_core.log.redis.owning import Ownership
from agent_saga_core.log.redis.reading import history, ids_of, is_live, lines, unfinished
from agent_saga_core.log.redis.schema import check_rights, open_log_id
from agent_saga_core.log.redis.walking import verify
from agent_saga_core.log.redis.writing import MOST_BYTES, MOST_RECORDS, lose, put
from agent_saga_core.log.sql import SagaBatch
from agent_saga_core.records import Encoded, Record

__all__ = ["RedisLog"]

_ENDED: Final = 1_024


class RedisLog(LeasedLog[SagaBatch]):
    """A log on a Redis or Valkey server, shared by any number of processes on any number of machines. Experimental.

    What `flush` or `write` returned for is in the server's append-only file, synced. A saga belongs to its owner as
    long as the owner's lease runs, which a thread renews; a process that stays away longer may lose all its sagas. A
    record is only accepted under the claim, and behind the record, that its writer knows. `flush` also makes sure that
    the lease runs when it returns, so that no effect starts after another process may have taken over.

    It does not protect against the loss of what a replica lacks that takes the server's place. A process that finds the
    server behind what was acknowledged to itself stops with `LogCorrupted`, and marks the sagas that it knows to have
    lost records; what was acknowledged to processes that are gone is lost without a trace.

    Args:
        url: The address; `docs/log-redis.md` has its options.
        clock: What records are stamped with. Leases go by the server's clock and by the machine's own.

    Raises:
        ValueError: It is no address.
        LogUnavailable: There is no log, it is of another version, or the server cannot be reached or is not fit.
        LogCorrupted: What is there is no log any more.
    """

    def __init__(self, url: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._address: Final = address_of(url)
        self._server: Final = Server(self._address)
        self._ended: deque[tuple[str, Holding]] = deque(maxlen=_ENDED)  # the sagas that ended here last
        super().__init__(self._server, clock)
        self._log_id: Final = self.found(lambda: open_log_id(self._server))
        self._server.log_id = self._log_id
        heart = Heart(self._server, self._address.lease, self._lost)
        self._server.on_change = heart.ask  # whether the new server has what the other acknowledged
        self._ownership: Final = Ownership(self._server, heart, self._log_id)
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
        return unfinished(self._server, self._log_id)

    def verify(self, progress: Callable[[int], None] | None = None) -> Verification:
        """See `Log.verify`. It also looks at every key of the server's database, for records that nothing names."""
        self.check_readable()
        return verify(self._server, self._log_id, progress)

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
        return compact(self._server, self._log_id, cutoff=until, dry_run=dry_run, progress=progress)

    # --- moving

    def lines(self, saga_id: str) -> Lines:
        """See `Log.lines`."""
        self.check_readable()
        return lines(self._server, fit(saga_id), self._log_id)

    def adopt(self, histories: Mapping[str, Sequence[Encoded]]) -> Adopted:
        """See `Log.adopt`."""
        self._check(appending=True)
        wholes = wholes_of(histories)
        self.check_writable()
        late: dict[str, SagaError] = {}
        done = adopt_owned(
            wholes,
            take=self._exclude,
            look=self.lines,
            put=lambda fresh: late.update(put_whole(self._server, fresh, self.lines)),
            give_up=self._include,
        )
        stored = tuple(saga_id for saga_id in done.stored if saga_id not in late)
        return Adopted(stored=stored, there=done.there, refused={**done.refused, **late})

    def _exclude(self, saga_id: str, token: object) -> None:
        if self._held.setdefault(fit(saga_id), token) is not token or is_live(self._server, saga_id):
            raise busy(saga_id)

    def _include(self, saga_id: str, token: object) -> None:
        if self._held.get(saga_id) is token:
            self._held.pop(saga_id, None)

    # --- owning

    def admit(self) -> None:
        """See `LeasedLog.admit`."""
        check_rights(self._server)

    def take_over(self, saga_id: str, holding: Holding) -> Taken | None:
        """See `LeasedLog.take_over`."""
        try:
            taken = self._ownership.take(saga_id, holding, self._clock.time)
        except LogCorrupted as error:
            if error.saga_id is None:
                self._lost(error)
            raise
        if taken is not None:
            holding.kept = taken.last_n
        return taken

    def hand_back(self, saga_id: str, holding: Holding) -> None:
        """See `LeasedLog.hand_back`."""
        self._ownership.release(saga_id, holding)

    def history_there(self, saga_id: str) -> list[Record]:
        """See `LeasedLog.history_there`."""
        return history(self._server, saga_id, self._log_id)

    # --- the store's part of group commit

    def prepare(self, entries: Sequence[Entry]) -> SagaBatch:
        """See `GroupCommitLog.prepare`."""
        return SagaBatch(entries, self._log_id, records=MOST_RECORDS, size=MOST_BYTES)

    def write_batch(self, batch: SagaBatch) -> None:
        """See `GroupCommitLog.write_batch`. What it has written is durable."""
        try:
            self._server.run(lambda connection: put(connection, self._server, self.asked(batch), self._refusals))
        except LogCorrupted as error:
            self._lost(error)
            raise

    def accept(self, batch: SagaBatch) -> None:
        """See `GroupCommitLog.accept`."""
        super().accept(batch)
        for entry in batch.entries:
            if entry.final and entry.error is None:
                holding = self._holdings.get(entry.owner)
                if holding is not None:
                    self._ended.append((entry.saga, holding))

    # --- a server that lost what it acknowledged

    def _lost(self, error: SagaError) -> None:
        """Take no more records. If some are gone, leave word for others of which sagas that is so."""
        if self._broken is None:
            self._broken = error
        if isinstance(error, LogCorrupted):
            owned = [(saga_id, self._holdings.get(owner)) for saga_id, owner in self._owned.copy().items()]
            known = [*self._ended.copy(), *owned]
            marks = [(saga_id, holding) for saga_id, holding in known if holding is not None and holding.kept]

            def leave_word(connection: Connection) -> None:
                for saga_id, holding in marks:
                    lose(connection, self._server, saga_id, holding, holding.kept + 1)

            try:
                self._server.run(leave_word, patient=False)  # before they are given back, and taken by somebody else
            except SagaError:
                self._heart.later("lost", leave_word)
