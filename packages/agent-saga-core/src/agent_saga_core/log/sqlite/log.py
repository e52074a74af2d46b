"""`SqliteLog`: the store itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Final

from agent_saga_core.clock import SYSTEM_CLOCK, Clock
from agent_saga_core.errors import LogCorrupted, LogUnavailable
from agent_saga_core.log.base import KEEP_DAYS, Compaction, Unfinished, Verification, cutoff, readable_history
from agent_saga_core.log.commit import Entry, GroupCommitLog
from agent_saga_core.log.lines import Adopted, Lines, Whole, adopt_owned, wholes_of
from agent_saga_core.log.locks import FileLocks, RangeLocks, SagaLocks
from agent_saga_core.log.sql import Refusals
from agent_saga_core.log.sqlite.compaction import compact
from agent_saga_core.log.sqlite.connection import PATIENCE, Connections, translated
from agent_saga_core.log.sqlite.place import Place
from agent_saga_core.log.sqlite.reading import history, ids_of, lines, unfinished, verify
from agent_saga_core.log.sqlite.schema import open_meta
from agent_saga_core.log.sqlite.writing import RowBatch, put, put_whole
from agent_saga_core.records import Encoded, Record

__all__ = ["SqliteLog"]


class SqliteLog(GroupCommitLog[RowBatch]):
    """A log in a SQLite database of one machine, shared by the processes of that machine.

    What `flush` or `write` returned for survives the death of the process and, as far as the disk keeps its word, of
    the machine; not the loss of the disk. A saga belongs to its owner as long as that process lives, even stopped, and
    to nobody from the moment it dies; beneath that, a record is only accepted behind the one that its writer has seen.

    It does not protect against: a database shared between machines or between kernels; other programs that write to
    it; a child that C code forked, which keeps what its parent owned for as long as it lives; a write-ahead file that
    is removed or left behind when the database is copied.

    Args:
        path: The database. Its locks are in a directory beside it, `<path>-locks`.
        create: Whether to make it if there is none.
        clock: What records are stamped with and waits are measured by.
        max_result_bytes: Results longer than this are stored as digest and length.
        force: Use a file system whose locks and syncs are not known to hold.
        busy_timeout: Seconds to wait for another writer before the log gives up.

    Raises:
        LogUnavailable: There is no log and none may or can be made, or it is of another version.
        LogCorrupted: What is there is no log any more.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        clock: Clock = SYSTEM_CLOCK,
        max_result_bytes: int = 1_048_576,
        force: bool = False,
        busy_timeout: float = PATIENCE,
    ) -> None:
        super().__init__(clock)
        self._max_result_bytes = max_result_bytes
        self._place: Final = Place(path, force=force)
        self._connections: Final = Connections(self._place, patience=busy_timeout)
        try:
            self._meta, self._version = open_meta(self._connections, create=create)
        except BaseException:
            self._closed = "it could not be opened"
            self._connections.close()
            raise
        locks = self._place.locks
        ofd = self._meta.lock == "ofd"
        self._locks: SagaLocks = RangeLocks(locks, self._meta.locks) if ofd else FileLocks(locks)
        self._refusals: Final = Refusals()
        self._writable = False

    @property
    def url(self) -> str:
        """See `Log.url`."""
        return self._place.url

    @property
    def max_result_bytes(self) -> int:
        """See `Log.max_result_bytes`."""
        return self._max_result_bytes

    @property
    def path(self) -> str:
        """Where the database is, as an absolute path."""
        return self._place.path

    def read(self, saga_id: str) -> tuple[Record, ...]:
        """See `Log.read`."""
        self._check_readable()
        return readable_history(saga_id, history(self._connections, saga_id, self._meta.log_id))

    def is_live(self, saga_id: str) -> bool:
        """See `Log.is_live`."""
        self._check_readable()
        with translated(self._place.path):
            return self._locks.is_held(saga_id)

    def saga_ids(self) -> tuple[str, ...]:
        """See `Log.saga_ids`."""
        self._check_readable()
        return tuple(ids_of(self._connections))

    def unfinished(self) -> Unfinished:
        """See `Log.unfinished`."""
        self._check_readable()
        return unfinished(self._connections, self._meta.log_id)

    def verify(self, progress: Callable[[int], None] | None = None) -> Verification:
        """See `Log.verify`."""
        self._check_readable()
        return verify(self._connections, self._meta.log_id, progress)

    def compact(
        self,
        progress: Callable[[int], None] | None = None,
        *,
        keep_days: float = KEEP_DAYS,
        dry_run: bool = False,
    ) -> Compaction:
        """See `Log.compact`. What counts as a segment here is a saga."""
        self._check_readable()
        until = cutoff(self._clock, keep_days)
        with closing(self._connections.beside()) as connections:
            return compact(
                connections,
                self._locks,
                self._meta.lock,
                self._meta.log_id,
                cutoff=until,
                dry_run=dry_run,
                progress=progress,
            )

    # --- moving

    def lines(self, saga_id: str) -> Lines:
        """See `Log.lines`."""
        self._check_readable()
        self._connections.settle()
        return lines(self._connections, saga_id, self._meta.log_id)

    def adopt(self, histories: Mapping[str, Sequence[Encoded]]) -> Adopted:
        """See `Log.adopt`. One call is one transaction."""
        self._check(appending=True)
        wholes = wholes_of(histories)
        with closing(self._connections.beside()) as connections:

            def put(fresh: Sequence[Whole]) -> None:
                self._locks.check(whole.saga_id for whole in fresh)
                with connections.writing() as connection:
                    put_whole(connection, fresh, self._meta.log_id)

            return adopt_owned(
                wholes,
                take=self._locks.acquire,
                look=self.lines,
                put=put,
                give_up=self._locks.release,
                at_once=self._locks.at_once,
            )

    # --- the store's part of group commit

    def take(self, saga_id: str, token: object) -> None:
        """See `GroupCommitLog.take`."""
        if not self._writable:
            with closing(self._connections.beside()) as connections, connections.writing():
                self._writable = True  # where that is refused, no effect must start
        self._locks.acquire(saga_id, token)

    def give_up(self, saga_id: str, token: object) -> None:
        """See `GroupCommitLog.give_up`."""
        self._locks.release(saga_id, token)
        self._refusals.forget(token)

    def durable_history(self, saga_id: str) -> tuple[tuple[Record, ...], int]:
        """See `GroupCommitLog.durable_history`."""
        self._connections.settle()
        records = history(self._connections, saga_id, self._meta.log_id)
        return readable_history(saga_id, records), records[-1].n if records else 0

    def prepare(self, entries: Sequence[Entry]) -> RowBatch:
        """See `GroupCommitLog.prepare`."""
        return RowBatch(entries, self._meta.log_id)

    def write_batch(self, batch: RowBatch) -> None:
        """See `GroupCommitLog.write_batch`. What it has written is durable."""
        self._locks.check(batch.sagas)
        with self._connections.writing() as connection:
            put(connection, batch, self._refusals)

    def accept(self, batch: RowBatch) -> None:
        """See `GroupCommitLog.accept`."""

    def sync(self) -> None:
        """See `GroupCommitLog.sync`: nothing is left to do."""

    def shut(self, *, clean: bool) -> None:
        """See `GroupCommitLog.shut`."""
        try:
            with translated(self._place.path):
                self._connections.close()
        except LogCorrupted as error:  # found while the write-ahead file was carried over: nothing is lost by closing
            raise LogUnavailable(str(error)) from error
        finally:
            self._locks.abandon()

    def abandon(self) -> None:
        """See `GroupCommitLog.abandon`."""
        self._locks.abandon()
        self._connections.abandon()

    def _check_readable(self) -> None:
        if self._closed is not None:
            self._check()
