"""Finished sagas leave a PostgreSQL log, some at a time, beside everything else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, Final

from agent_saga_core.errors import LogCorrupted, SagaBusy
from agent_saga_core.log.base import Compaction
from agent_saga_core.log.postgres.connection import Connection, Server, unhurried
from agent_saga_core.log.postgres.reading import COLUMNS, JOINED, Row, checked
from agent_saga_core.records import FINAL

__all__ = ["compact"]

_CHUNK: Final = 100  # sagas

# One compaction at a time, as far as a lock that ends with its transaction can say: each chunk is one.
_LOCK: Final = "SELECT pg_try_advisory_xact_lock(hashtextextended('agent-saga compact {s}', 0))"
_OLD: Final = (
    f"SELECT s.seq, s.id, {COLUMNS} FROM (SELECT * FROM {{s}}.saga WHERE seq > %b AND ended <= %b"
    f" ORDER BY seq LIMIT %b) s {JOINED} ORDER BY s.seq, r.n"
)
_FORGET: Final = (
    "WITH gone AS (DELETE FROM {s}.saga WHERE seq = ANY(%b::int8[]) AND ended <= %b RETURNING seq)"
    " DELETE FROM {s}.record WHERE saga IN (SELECT seq FROM gone)"
)
# Ids that were claimed by a process that died before it began anything, and the processes that died long ago.
_EMPTY: Final = (
    "DELETE FROM {s}.saga s WHERE s.ended IS NULL AND s.next = 1 AND NOT EXISTS (SELECT FROM {s}.record r WHERE"
    " r.saga = s.seq) AND NOT EXISTS (SELECT FROM {s}.writer w WHERE w.nonce = s.owner AND NOT w.fenced AND"
    " w.lease_until >= now() - interval '1 day')"
)
_DEAD: Final = "DELETE FROM {s}.writer WHERE lease_until < now() - interval '1 day'"
_KEPT: Final = "SELECT count(*) FROM {s}.saga WHERE next > 1"


def compact(
    server: Server, log_id: bytes, *, cutoff: float, dry_run: bool, progress: Callable[[int], None] | None
) -> Compaction:
    """See `Log.compact`. Each chunk is one transaction, so a kill at any moment leaves whole sagas."""
    passage = _Passage(server, log_id, cutoff)
    while passage.chunk(delete=not dry_run):
        if progress is not None:
            progress(passage.records)
    if not dry_run:
        server.run(unhurried(lambda connection: connection.execute(passage.sql(_EMPTY))))
        server.run(unhurried(lambda connection: connection.execute(passage.sql(_DEAD))))
    row = server.run(unhurried(lambda connection: connection.execute(passage.sql(_KEPT)).fetchone()))
    kept = 0 if row is None else int(row[0])
    left = kept - passage.sagas if dry_run else kept
    return Compaction(retired=passage.sagas, sagas=passage.sagas, carried=0, freed=passage.bytes, kept=left)


class _Passage:
    """One way through the sagas that ended, oldest first."""

    def __init__(self, server: Server, log_id: bytes, cutoff: float) -> None:
        self._server = server
        self._log_id = log_id
        self._cutoff = cutoff
        self._last = -(2**63)
        self.sagas = self.records = self.bytes = 0

    def sql(self, text: str) -> Any:
        return text.format(s=self._server.address.schema)

    def chunk(self, *, delete: bool) -> bool:
        """Forget some; False if there were none left to look at."""
        last, sagas, records, size = self._server.run(
            unhurried(lambda connection: self._chunk(connection, delete=delete))
        )
        if last is None:
            return False
        self._last = last
        self.sagas += sagas
        self.records += records
        self.bytes += size
        return True

    def _chunk(self, connection: Connection, *, delete: bool) -> tuple[int | None, int, int, int]:
        with connection.transaction():
            if delete:
                row = connection.execute(self.sql(_LOCK)).fetchone()
                if row is None or not row[0]:
                    url = self._server.address.url
                    raise SagaBusy(f"another compaction of {url} is running; wait until it is done")
            rows = connection.execute(self.sql(_OLD), (self._last, self._cutoff, _CHUNK), binary=True).fetchall()
            gone: list[int] = []
            records = size = 0
            for seq, one in groupby(rows, key=lambda row: row[0]):
                sizes = self._may_go(list(one))
                if sizes:
                    gone.append(seq)
                    records += len(sizes)
                    size += sum(sizes)
            if gone and delete:
                connection.execute(self.sql(_FORGET), (gone, self._cutoff))
        return (rows[-1][0] if rows else None), len(gone), records, size

    def _may_go(self, rows: list[tuple[Any, ...]]) -> list[int]:
        """The sizes of its records, if a saga is whole and has really ended that long ago.

        Damage is left to be found: a row that says "ended" of a saga that did not is no reason to forget it.
        """
        found = [Row(*row[2:]) for row in rows]
        try:
            records = checked(rows[0][1], found, self._log_id, erased=True)
        except LogCorrupted:
            return []
        if not records or records[-1].type not in FINAL or records[-1].time > self._cutoff:
            return []
        return [len(row.body) for row in found if row.body is not None]
