"""Finished sagas leave a SQLite log, some at a time, beside everything else."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from agent_saga_core.errors import LogCorrupted, SagaBusy
from agent_saga_core.log import osfile
from agent_saga_core.log.base import Compaction
from agent_saga_core.log.locks import SagaLocks, lock_whole, opening
from agent_saga_core.log.sqlite.connection import Connections, translated
from agent_saga_core.log.sqlite.place import COMPACT, gone
from agent_saga_core.log.sqlite.reading import intact, name_of
from agent_saga_core.records import FINAL

__all__ = ["compact"]

_CHUNK: Final = 200  # sagas: as long as a chunk takes, nobody else writes
_PAGES: Final = 512  # given back at a time, likewise

_OLD: Final = "SELECT seq, id, next, ended FROM saga WHERE seq > ? AND ended <= ? ORDER BY seq LIMIT ?"


def compact(
    connections: Connections,
    locks: SagaLocks,
    scheme: str,
    log_id: bytes,
    *,
    cutoff: float,
    dry_run: bool,
    progress: Callable[[int], None] | None,
) -> Compaction:
    """See `Log.compact`. Each chunk is one transaction, so a kill at any moment leaves whole sagas."""
    with _alone(connections, scheme):
        passage = _Passage(connections, locks, log_id, cutoff)
        while passage.chunk(delete=not dry_run):
            if progress is not None:
                progress(passage.records)
        freed = passage.bytes if dry_run else _give_back(connections)
        with connections.reading() as connection:
            (kept,) = connection.execute("SELECT count(*) FROM saga").fetchone()
    left = kept - passage.sagas if dry_run else kept
    return Compaction(retired=passage.sagas, sagas=passage.sagas, carried=0, freed=freed, kept=left)


@contextmanager
def _alone(connections: Connections, scheme: str) -> Generator[None]:
    path = f"{connections.place.locks}/{COMPACT}"
    with translated(connections.place.path):
        try:
            with opening:
                descriptor = osfile.open_file(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise gone(path, "is missing") from None
        try:
            if not lock_whole(descriptor, scheme):
                raise SagaBusy(f"another compaction of {connections.place.path} is running; wait until it is done")
            yield
        finally:
            os.close(descriptor)


class _Passage:
    """One way through the sagas that ended, oldest first."""

    def __init__(self, connections: Connections, locks: SagaLocks, log_id: bytes, cutoff: float) -> None:
        self._connections = connections
        self._locks = locks
        self._log_id = log_id
        self._cutoff = cutoff
        self._last = -(2**63)
        self.sagas = self.records = self.bytes = 0

    def chunk(self, *, delete: bool) -> bool:
        """Forget some; False if there were none left to look at."""
        with self._connections.writing() if delete else self._connections.reading() as connection:
            rows = connection.execute(_OLD, (self._last, self._cutoff, _CHUNK)).fetchall()
            gone = [row for row in rows if self._may_go(connection, *row)]
            if delete:
                connection.executemany("DELETE FROM record WHERE saga = ?", [(seq,) for seq, *_ in gone])
                connection.executemany("DELETE FROM saga WHERE seq = ?", [(seq,) for seq, *_ in gone])
        self.sagas += len(gone)
        if rows:
            self._last = rows[-1][0]
        return bool(rows)

    def _may_go(self, connection: sqlite3.Connection, seq: int, raw: object, next_n: object, ended: object) -> bool:
        """Whether a saga is whole, has really ended that long ago, and is nobody's.

        Damage is left to be found: a row that says "ended" of a saga that did not is no reason to forget it. One that
        is owned may be in the hands of a process that is not sure yet whether its last record was stored.
        """
        saga_id = name_of(raw)
        if saga_id is None or self._locks.is_held(saga_id):
            return False
        try:
            records = intact(connection, seq, saga_id, next_n, ended, self._log_id)
        except LogCorrupted:
            return False
        if not records or records[-1].type not in FINAL or records[-1].time > self._cutoff:
            return False
        self.records += len(records)
        (size,) = connection.execute("SELECT sum(length(body)) FROM record WHERE saga = ?", (seq,)).fetchone()
        self.bytes += size
        return True


def _give_back(connections: Connections) -> int:
    """Cut the free pages off the end of the database; how many bytes that makes."""
    with connections.reading() as connection:
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    pages = 0
    while True:
        with connections.writing() as connection:
            (before,) = connection.execute("PRAGMA page_count").fetchone()
            # A script, which commits what is open: `execute` takes one step of a statement, and here a step is a page.
            connection.executescript(f"BEGIN IMMEDIATE; PRAGMA incremental_vacuum({_PAGES})")
            (after,) = connection.execute("PRAGMA page_count").fetchone()
        if after >= before:
            return pages * size
        pages += before - after
