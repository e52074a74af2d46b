"""A log in memory, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from agent_saga_core.clock import SYSTEM_CLOCK, Clock
from agent_saga_core.errors import LogCorrupted, LogUnavailable, SagaBusy
from agent_saga_core.log.base import (
    KEEP_DAYS,
    Compaction,
    Damage,
    Unfinished,
    Verification,
    cutoff,
    history_fault,
    readable_history,
)
from agent_saga_core.log.commit import Batch, Entry, GroupCommitLog
from agent_saga_core.log.lines import Adopted, Lines, Whole, adopt_owned, is_erased, is_final, record_in, wholes_of
from agent_saga_core.log.sql import damaged
from agent_saga_core.records import FINAL, RECORD_LINE, Encoded, Record, encode, finish_line, record_of

__all__ = ["MemoryLog", "MemoryStore"]


class MemoryStore:
    """What several `MemoryLog` share: the storage of what would be one log directory.

    Attributes:
        records: Per saga, oldest first, what has been written, by number; an erased record has no data.
        encoded: The same as lines.
        volatile: Which of these are not synced yet, and by which log they were written.
        owners: Who owns which saga.
        syncs: How often a log has synced.
    """

    def __init__(self) -> None:
        self.records: dict[str, dict[int, Record]] = {}
        self.encoded: dict[tuple[str, int], Encoded] = {}
        self.volatile: dict[tuple[str, int], MemoryLog] = {}
        self.owners: dict[str, tuple[MemoryLog, object]] = {}
        self.syncs = 0


class MemoryLog(GroupCommitLog[Batch]):
    """A log for tests, gone with the process.

    It keeps the `Log` protocol, and nothing of it survives anything.

    Logs on one `MemoryStore` behave like processes on one directory: they exclude each other and read each
    other's records as soon as these are written. `crash` is the death of one of them and of its machine's
    memory.
    """

    def __init__(
        self,
        clock: Clock = SYSTEM_CLOCK,
        *,
        store: MemoryStore | None = None,
        max_result_bytes: int = 1_048_576,
    ) -> None:
        super().__init__(clock)
        self._store = MemoryStore() if store is None else store
        self._max_result_bytes = max_result_bytes

    @property
    def store(self) -> MemoryStore:
        """The storage, to open again with `MemoryLog(store=...)`."""
        return self._store

    @property
    def url(self) -> str:
        """See `Log.url`. Opening it gives another, empty log."""
        return "memory:"

    @property
    def max_result_bytes(self) -> int:
        """See `Log.max_result_bytes`."""
        return self._max_result_bytes

    def crash(self) -> None:
        """Die: lose what was not synced, and every ownership. This log takes and gives nothing any more."""
        self._closed = "it crashed"
        for (saga_id, n), writer in list(self._store.volatile.items()):
            if writer is self:
                self._store.volatile.pop((saga_id, n), None)
                history = self._store.records[saga_id]
                history.pop(n, None)
                if not history:
                    self._store.records.pop(saga_id, None)
        self._drop_ownerships()
        self._wake.set()

    def read(self, saga_id: str) -> tuple[Record, ...]:
        """See `Log.read`."""
        self._check()
        history = self._store.records.get(saga_id, {})
        for n in list(history):
            if is_erased(self._line(saga_id, n)):
                raise damaged(saga_id, f"record {n}: its payload was erased")
        return readable_history(saga_id, list(history.values()))

    def _line(self, saga_id: str, n: int) -> Encoded:
        """What is stored, also where a test put a record there by hand."""
        return self._store.encoded.get((saga_id, n)) or encode(self._store.records[saga_id][n])

    def is_live(self, saga_id: str) -> bool:
        """See `Log.is_live`."""
        return saga_id in self._store.owners

    def saga_ids(self) -> tuple[str, ...]:
        """See `Log.saga_ids`."""
        self._check()
        return tuple(self._store.records)

    def unfinished(self) -> Unfinished:
        """See `Log.unfinished`."""
        self._check()
        open_ids = [
            saga_id
            for saga_id, history in self._store.records.copy().items()
            if not any(record.type in FINAL for record in list(history.values()))
        ]
        return Unfinished(saga_ids=tuple(open_ids), damage=self._damage())

    def verify(self, progress: Callable[[int], None] | None = None) -> Verification:
        """See `Log.verify`."""
        self._check()
        damage = self._damage()
        records = sum(len(history) for history in self._store.records.copy().values())
        if progress is not None:
            progress(records)
        first = f"{damage[0].where}: {damage[0].reason}" if damage else None
        return Verification(intact=not damage, records=records, first_broken=first, damage=damage)

    def compact(
        self,
        progress: Callable[[int], None] | None = None,
        *,
        keep_days: float = KEEP_DAYS,
        dry_run: bool = False,
    ) -> Compaction:
        """See `Log.compact`. Here a saga leaves by itself, and what counts as a segment is a saga."""
        self._check()
        until = cutoff(self._clock, keep_days)
        records = sagas = 0
        for saga_id, history in list(self._store.records.items()):
            last = history[max(history)]
            durable = all((saga_id, n) not in self._store.volatile for n in list(history))
            sound = history_fault(sorted(history)) is None
            if last.type in FINAL and last.time <= until and durable and sound and saga_id not in self._store.owners:
                sagas += 1
                records += len(history)
                if not dry_run:
                    self._store.records.pop(saga_id, None)
        if progress is not None:
            progress(records)
        return Compaction(retired=sagas, sagas=sagas, carried=0, freed=0, kept=len(self._store.records))

    def _damage(self) -> tuple[Damage, ...]:
        found: list[Damage] = []
        for saga_id in list(self._store.records):
            try:
                if any(map(is_final, self.lines(saga_id)[:-1])):
                    raise damaged(saga_id, "records follow its final one")
            except LogCorrupted as error:
                found.append(Damage(where=f"memory, saga {saga_id!r}", reason=str(error), saga_ids=(saga_id,)))
        return tuple(found)

    # --- moving

    def lines(self, saga_id: str) -> Lines:
        """See `Log.lines`."""
        self._check()
        history = self._store.records.get(saga_id, {})
        fault = history_fault(sorted(history))
        if fault is not None:
            raise damaged(saga_id, fault)
        for n in list(history):
            self._store.volatile.pop((saga_id, n), None)
        return tuple(self._line(saga_id, n) for n in sorted(history))

    def adopt(self, histories: Mapping[str, Sequence[Encoded]]) -> Adopted:
        """See `Log.adopt`."""
        self._check(appending=True)
        return adopt_owned(wholes_of(histories), take=self.take, look=self.lines, put=self._put, give_up=self.give_up)

    def _put(self, wholes: Sequence[Whole]) -> None:
        for saga_id, lines, numbers, *_ in wholes:
            for n, encoded in zip(numbers, lines, strict=True):
                self._store.encoded[saga_id, n] = encoded
            # In one step: nobody sees a part.
            self._store.records[saga_id] = {n: record_in(saga_id, one) for n, one in zip(numbers, lines, strict=True)}
        self._store.syncs += 1

    # --- the store's part of group commit

    def prepare(self, entries: Sequence[Entry]) -> Batch:
        """See `GroupCommitLog.prepare`."""
        return Batch(entries)

    def write_batch(self, batch: Batch) -> None:
        """See `GroupCommitLog.write_batch`."""
        for entry in batch.entries:
            # Through the line format, so that what a test reads is what a file would give back.
            line = RECORD_LINE.fullmatch(finish_line(entry.encoded, b"", b"")[0][:-1])
            record = None if line is None else record_of(line, entry.saga)
            if record is None:
                raise LogUnavailable(f"record {entry.n} of saga {entry.saga!r} does not survive its own encoding")
            self._store.volatile[entry.saga, entry.n] = self
            self._store.encoded[entry.saga, entry.n] = entry.encoded
            self._store.records.setdefault(entry.saga, {})[entry.n] = record

    def accept(self, batch: Batch) -> None:
        """See `GroupCommitLog.accept`."""

    def sync(self) -> None:
        """See `GroupCommitLog.sync`."""
        self._store.syncs += 1
        for key, writer in list(self._store.volatile.items()):
            if writer is self:
                self._store.volatile.pop(key, None)

    def take(self, saga_id: str, token: object) -> None:
        """See `GroupCommitLog.take`."""
        if self._store.owners.setdefault(saga_id, (self, token))[1] is not token:
            raise SagaBusy(f"saga {saga_id!r} is owned; wait until its owner is done", saga_id=saga_id)

    def give_up(self, saga_id: str, token: object) -> None:
        """See `GroupCommitLog.give_up`."""
        owner = self._store.owners.get(saga_id)
        if owner is not None and owner[1] is token:
            self._store.owners.pop(saga_id, None)

    def durable_history(self, saga_id: str) -> tuple[tuple[Record, ...], int]:
        """See `GroupCommitLog.durable_history`."""
        history = self._store.records.get(saga_id, {})
        for n in list(history):
            self._store.volatile.pop((saga_id, n), None)
        return self.read(saga_id), max(history, default=0)

    def shut(self, *, clean: bool) -> None:
        """See `GroupCommitLog.shut`."""

    def abandon(self) -> None:
        """See `GroupCommitLog.abandon`."""
        self._drop_ownerships()

    def _drop_ownerships(self) -> None:
        for saga_id, owner in list(self._store.owners.items()):
            if owner[0] is self:
                self._store.owners.pop(saga_id, None)
