"""The `Log` protocol: what the engine, recovery and the views ask of a log."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from agent_saga_core.clock import Clock
from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log.lines import Adopted, Lines
from agent_saga_core.records import FINAL, Encoded, Record, critical_unknown

__all__ = [
    "KEEP_DAYS",
    "BatchClaims",
    "Compaction",
    "Damage",
    "Leased",
    "Log",
    "Unfinished",
    "Verification",
    "WatchedLeases",
    "cutoff",
    "history_fault",
    "readable_history",
]


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One damaged place of a log."""

    where: str
    """File and line, or the store's own address of the place."""
    reason: str
    saga_ids: tuple[str, ...] | None
    """The sagas that it may concern; None if that cannot be told, and then every unfinished saga is
    suspect."""


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """What a recoverer has to look at."""

    saga_ids: tuple[str, ...]
    """Sagas without a final record, oldest first, whoever owns them; damaged ones included."""
    damage: tuple[Damage, ...] = ()
    live: frozenset[str] | None = None
    """Those that some process owned when they were listed; a hint. None: this log does not say, ask `is_live`."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What a walk over a whole log found."""

    intact: bool
    records: int
    first_broken: str | None
    """The first damaged place and why, in the order of the walk."""
    damage: tuple[Damage, ...] = ()


class Compaction(msgspec.Struct, frozen=True, kw_only=True):
    """What a compaction did, or would do."""

    retired: int
    """Segments that left; in a store that has none, whatever `unit` says."""
    sagas: int
    """Finished sagas that the log has forgotten: their ids are unknown to it."""
    carried: int
    """Records that were copied, because their sagas must stay."""
    freed: int
    """Bytes that the log is shorter by; of a dry run, about."""
    kept: int
    """Segments that were left as they are."""
    unit: str = "saga"
    """What the store counts as `retired` and `kept`: a noun in the singular."""


KEEP_DAYS = 30.0
"""How long finished sagas stay in a log, unless told otherwise."""


@runtime_checkable
class Log(Protocol):
    """A write-ahead log of sagas.

    Every method may be called from any thread. A log belongs to the process that opened it.
    """

    @property
    def url(self) -> str:
        """The address that `open_log` takes to open the same log; without credentials."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock that everything on this log waits and stamps with."""
        ...

    @property
    def max_result_bytes(self) -> int:
        """Results whose encoding is longer are stored as digest and length."""
        ...

    def append(self, record: Record) -> int:
        """Put `record` behind everything appended before it; return a ticket for `flush`.

        Only the owner of `record.saga` may append to it. Buffered: when this returns, nothing is durable yet.
        Appending a record of the same saga and number again, with equal content, stores nothing and succeeds
        (so that an interrupted caller can simply repeat). When it raises, nothing was put anywhere.

        Raises:
            ValueError: The record cannot be encoded, or its number does not follow the saga's last.
            LogUnavailable: The log is poisoned or closed.
        """
        ...

    def flush(self, ticket: int) -> None:
        """Return once every record up to `ticket` is durable.

        When this returns, losing power cannot lose those records. When it raises, they may or may not be
        stored: read the log before acting again. Concurrent callers share one sync.

        Raises:
            LogUnavailable: A write or sync failed. The log takes no more records; open it again.
        """
        ...

    async def aflush(self, ticket: int) -> None:
        """Like `flush`, without blocking the running loop.

        Cancelling the waiter does not cancel the flush.
        """
        ...

    def write(self, ticket: int) -> None:
        """Return once every record up to `ticket` would survive the death of this process, not of the machine.

        They become durable with the next flush, or within 50 ms. This is `durability="relaxed"`.

        Raises:
            LogUnavailable: A write failed.
        """
        ...

    def claim(self, saga_id: str, *, fresh: bool = False) -> tuple[Record, ...]:
        """Own the saga in this process until `release`; return all its records, in order, every one durable.

        If the saga exists and has no final record, a CLAIM record has been appended (number = new epoch) and
        is the last one returned. If it is absent, nothing is appended and the result is empty. `fresh=True`
        says that the id was just drawn at random, so that looking for earlier records can be left out.

        Raises:
            SagaBusy: Another process, or another scope of this one, owns it (or an id that shares its lock).
            LogCorrupted: Damage may concern this saga. It is not owned.
            LogUnavailable: The log cannot be read or written.
        """
        ...

    def release(self, saga_id: str) -> None:
        """Flush, then give up ownership. Harmless for a saga that is not owned.

        A poisoned log gives up the ownership all the same: what was not durable is then for recovery to read.
        """
        ...

    def owned(self, saga_id: str) -> bool:
        """Whether this process owns the saga now."""
        ...

    def read(self, saga_id: str) -> tuple[Record, ...]:
        """All records of the saga in order, without owning it; empty if there is none. It may grow meanwhile.

        Raises:
            LogCorrupted: Damage may concern this saga.
        """
        ...

    def is_live(self, saga_id: str) -> bool:
        """Whether some process owns the saga at this moment. A hint: it may change at once."""
        ...

    def saga_ids(self) -> tuple[str, ...]:
        """Every saga in the log, oldest first. Costs what history costs; `unfinished` does not."""
        ...

    def unfinished(self) -> Unfinished:
        """The sagas without a final record, and the damage met while looking."""
        ...

    def verify(self, progress: Callable[[int], None] | None = None) -> Verification:
        """Walk the whole log, streaming; call `progress` with the number of records so far now and then."""
        ...

    def compact(
        self,
        progress: Callable[[int], None] | None = None,
        *,
        keep_days: float = KEEP_DAYS,
        dry_run: bool = False,
    ) -> Compaction:
        """Forget the sagas that ended more than `keep_days` ago, as far as that gives back space.

        Sagas that have not ended are never touched, live or not, and what they cost to find does not grow. An id that
        was forgotten is free: opened again, it begins anew. Safe beside every other use of the log, in any process,
        and safe to kill: no saga is lost by it and none comes back.

        Args:
            progress: Called with the number of records dealt with so far, now and then.
            keep_days: How long a finished saga stays at least, by the time of its last record.
            dry_run: Only say what would be done.

        Raises:
            ValueError: `keep_days` is negative or no number.
            SagaBusy: Another compaction of this log is running.
            LogUnavailable: The log cannot be read or written.
        """
        ...

    def lines(self, saga_id: str) -> Lines:
        """All records of the saga as they are stored, in order, every one durable; empty if there is none.

        Unlike `read`, it leaves nothing out: records of unknown types, critical or not, and erased ones are there, each
        with its salt and digest. Each was checked, and that none is missing. Needs no ownership.

        Raises:
            LogCorrupted: Damage may concern this saga.
            LogUnavailable: The log cannot be read.
        """
        ...

    def adopt(self, histories: Mapping[str, Sequence[Encoded]]) -> Adopted:
        """Store the whole histories of sagas exactly as they are given: as `lines` of another log gave them.

        When this returns, every history that is not refused is durable, and `lines` gives it back equal; nobody owns
        those sagas. All or nothing, saga by saga: at no moment, also not after a kill or a loss of power, does anybody
        see some records of a history without the others. Many sagas share a sync: give many at once. Given again, a
        history that is there is left as it is, also if it went on since. Given oldest first, they are listed so.

        Refused, each for itself and before anything of it is stored: one that somebody owns now in this log, in this
        process or another (`SagaBusy`), that is here with other records or with less of them (`AnotherHistory`), or
        that damage may concern (`LogCorrupted`). When this raises, some of the histories may be stored, each whole.

        Args:
            histories: By saga id, the records from number 1 on.

        Raises:
            ValueError: One of them is no history of that saga. Nothing was stored.
            SagaBusy: The log cannot take any now, because it is being compacted.
            LogUnavailable: The log cannot be read or written.
        """
        ...

    def close(self) -> None:
        """Flush, release what is owned, and close. A forked child closes without touching its parent's."""
        ...


@runtime_checkable
class BatchClaims(Protocol):
    """What a log may offer beside `Log`: several claims at the price of one."""

    def claim_some(self, saga_ids: Sequence[str]) -> Mapping[str, tuple[Record, ...] | LogCorrupted]:
        """Claim those of the sagas that nobody owns; never wait for somebody who is about to.

        Each saga in the answer with its records is owned as after `claim`. With an error: damage may concern it, and it
        is not owned. One that is left out is somebody else's, or was just being claimed, or is not there.

        Raises:
            LogUnavailable: The log cannot be read or written. None of them is owned.
        """
        ...


@runtime_checkable
class Leased(Protocol):
    """What a log offers beside `Log` where sagas are owned under a lease: nobody sees at once that a process died.

    Until its lease has run out, `is_live` is true of its sagas.
    """

    @property
    def lease(self) -> float:
        """Seconds for which a process owns its sagas after it was last heard of."""
        ...


@runtime_checkable
class WatchedLeases(Protocol):
    """What a log offers beside `Log` where only who has watched a lease for its whole length knows that it ran out.

    There a process that has just opened the log calls every owner live, also one that died long ago.
    """

    def undecided(self, saga_ids: Collection[str]) -> float:
        """Seconds after which this process knows, if it asks again, whether the owners of these sagas are live; or 0.

        It knows that of an owner whose lease it has seen renewed or run out, or of which another process has noted so.

        Raises:
            LogUnavailable: The log cannot be read.
        """
        ...


def cutoff(clock: Clock, keep_days: float) -> float:
    """The time before which a finished saga may be forgotten.

    Raises:
        ValueError: `keep_days` is negative or no number.
    """
    if not keep_days >= 0:
        raise ValueError(f"keep_days is a number of days from 0 on, got {keep_days!r}")
    return clock.time() - keep_days * 86400


def history_fault(numbers: Iterable[int]) -> str | None:
    """Say what is wrong with the sorted record numbers of one saga; None if they are 1, 2, 3 and so on."""
    expected = 1
    for n in numbers:
        if n < expected:
            return f"record {n} is there twice: two processes owned the saga at once, or lines were copied"
        if n > expected:
            return f"record {expected} is missing"
        expected += 1
    return None


def readable_history(saga_id: str, records: Iterable[Record]) -> tuple[Record, ...]:
    """Order the records of one saga, and refuse damaged ones.

    Those of an unknown type that are not critical stay: whoever folds a history counts them, or a record would seem to
    be missing where they stand.

    Raises:
        LogCorrupted: A record is missing, there twice, behind a final one, or of a newer version and
        critical.
    """
    ordered = sorted(records, key=lambda record: record.n)
    fault = history_fault(record.n for record in ordered)
    for record in ordered:
        if record.type in FINAL and record is not ordered[-1]:
            fault = fault or f"records follow its {record.type}, which is record {record.n}"
        if critical_unknown(record.type, not record.critical):
            raise LogCorrupted(
                f"saga {saga_id!r} was written by a newer version: record {record.n} is of the unknown critical "
                f"type {record.type!r}; use that version to finish it",
                saga_id=saga_id,
            )
    if fault is not None:
        raise LogCorrupted(
            f"saga {saga_id!r} is damaged: {fault}; restore the log from a copy or settle the saga by hand",
            saga_id=saga_id,
        )
    return tuple(ordered)
