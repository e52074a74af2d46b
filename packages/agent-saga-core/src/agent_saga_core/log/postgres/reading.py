"""What is read of a PostgreSQL log: one saga, the unfinished ones, and everything, with all damage named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, Final, NamedTuple

from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log.base import Damage, Unfinished, Verification
from agent_saga_core.log.lines import Lines
from agent_saga_core.log.postgres.connection import Connection, Server, unhurried
from agent_saga_core.log.sql import Stated, distinct, history_of, lines_of, name_in, verified
from agent_saga_core.records import Record

__all__ = [
    "COLUMNS",
    "JOINED",
    "Row",
    "checked",
    "checked_lines",
    "history",
    "ids_of",
    "is_live",
    "rows_of",
    "rows_of_many",
    "unfinished",
    "verify",
]

COLUMNS: Final = (
    "s.next, s.epoch, s.owner, s.turn, s.ended, coalesce(NOT w.fenced AND w.lease_until >= now(), false), r.n,"
    " r.epoch, r.body"
)
JOINED: Final = "LEFT JOIN {s}.writer w ON w.nonce = s.owner LEFT JOIN {s}.record r ON r.saga = s.seq"
_ROWS: Final = f"SELECT {COLUMNS} FROM {{s}}.saga s {JOINED} WHERE s.id = %b ORDER BY r.n"
_ROWS_OF_MANY: Final = (
    f"SELECT s.id, coalesce(w.fenced, true), {COLUMNS} FROM {{s}}.saga s {JOINED} WHERE s.id = ANY(%b)"
    " ORDER BY s.seq, r.n"
)
_LIVE: Final = (
    "SELECT EXISTS (SELECT FROM {s}.saga s JOIN {s}.writer w ON w.nonce = s.owner"
    " WHERE s.id = %b AND NOT w.fenced AND w.lease_until >= now())"
)
_IDS: Final = "SELECT seq, id FROM {s}.saga WHERE seq > %b AND next > 1 ORDER BY seq LIMIT %b"
_OPEN: Final = (
    "SELECT s.seq, s.id, s.next, r.counted, r.most, coalesce(NOT w.fenced AND w.lease_until >= now(), false)"
    " FROM (SELECT * FROM {s}.saga WHERE seq > %b AND ended IS NULL ORDER BY seq LIMIT %b) s"
    " LEFT JOIN {s}.writer w ON w.nonce = s.owner,"
    " LATERAL (SELECT count(*) AS counted, max(n) AS most FROM {s}.record WHERE saga = s.seq) r ORDER BY s.seq"
)
_FIRST: Final = "SELECT body FROM {s}.record WHERE saga = %b ORDER BY n LIMIT 1"
_PAGE: Final = (
    f"SELECT s.seq, s.id, {COLUMNS} FROM (SELECT * FROM {{s}}.saga WHERE seq > %b ORDER BY seq LIMIT %b) s {JOINED}"
    " ORDER BY s.seq, r.n"
)
_STRAYS: Final = (
    "SELECT DISTINCT r.saga FROM {s}.record r WHERE NOT EXISTS (SELECT FROM {s}.saga s WHERE s.seq = r.saga)"
    " ORDER BY r.saga LIMIT 100"
)
_PAGE_SAGAS: Final = 64  # with all their records
_PAGE_ROWS: Final = 10_000
PROGRESS_EVERY: Final = 10_000


class Row(NamedTuple):
    """The row of a saga, and one of its records."""

    next: int
    epoch: int
    owner: object
    turn: int
    ended: float | None
    alive: bool
    """Whether its owner's lease runs."""
    n: int | None
    record_epoch: int | None
    body: bytes | None


def _query(text: str, schema: str) -> Any:
    return text.format(s=schema)


def rows_of(connection: Connection, schema: str, saga_id: str) -> list[Row]:
    """The saga's row with each of its records, in order; one with none; nothing if the saga is not there."""
    found = connection.execute(_query(_ROWS, schema), (saga_id,), binary=True).fetchall()
    return [Row(*row) for row in found]


def rows_of_many(connection: Connection, schema: str, saga_ids: Sequence[str]) -> dict[str, tuple[bool, list[Row]]]:
    """What `rows_of` gives, for several sagas, and whether nobody can renew the lease of the owner any more."""
    found: dict[str, tuple[bool, list[Row]]] = {}
    for saga_id, free, *row in connection.execute(_query(_ROWS_OF_MANY, schema), (list(saga_ids),), binary=True):
        found.setdefault(saga_id, (free, []))[1].append(Row(*row))
    return found


def checked(saga_id: str, rows: Sequence[Row], log_id: bytes, *, erased: bool = False) -> list[Record]:
    """The records of a saga, in order, held against its row; see `history_of`.

    Raises:
        LogCorrupted: They are not what was written.
    """
    return history_of(saga_id, _stored(rows), log_id, _stated(rows), erased=erased) if rows else []


def checked_lines(saga_id: str, rows: Sequence[Row], log_id: bytes) -> Lines:
    """The same, as they are stored.

    Raises:
        LogCorrupted: They are not what was written.
    """
    return lines_of(saga_id, _stored(rows), log_id, _stated(rows)) if rows else ()


def _stored(rows: Sequence[Row]) -> list[tuple[object, object]]:
    return [(row.n, row.body) for row in rows if row.n is not None]


def _stated(rows: Sequence[Row]) -> Stated:
    row = rows[0]
    epochs = [one.record_epoch for one in rows if one.n is not None]
    return Stated(next=row.next, ended=row.ended is not None, epoch=row.epoch, epochs=epochs)


def history(server: Server, saga_id: str, log_id: bytes) -> list[Record]:
    """Every record of the saga, in order, whatever its type.

    Raises:
        LogCorrupted: Damage concerns this saga.
    """
    rows = server.run(lambda connection: rows_of(connection, server.address.schema, saga_id))
    return checked(saga_id, rows, log_id)


def is_live(server: Server, saga_id: str) -> bool:
    """Whether the lease of its owner runs."""
    live = _query(_LIVE, server.address.schema)
    row = server.run(lambda connection: connection.execute(live, (saga_id,)).fetchone())
    return row is not None and bool(row[0])


def _pages(server: Server, statement: str, most: int, *, large: bool = False) -> Iterator[list[tuple[Any, ...]]]:
    """What a statement finds of all sagas, oldest first, so many at a time; `large` if they come with all they have."""
    query = _query(statement, server.address.schema)
    last = -(2**63)
    while True:

        def page(connection: Connection, at: tuple[int, int] = (last, most)) -> list[tuple[Any, ...]]:
            return connection.execute(query, at, binary=True).fetchall()

        rows = server.run(unhurried(page) if large else page)
        if not rows:
            return
        yield rows
        last = rows[-1][0]


def ids_of(server: Server) -> list[str]:
    """Every saga, oldest first."""
    return [saga_id for page in _pages(server, _IDS, _PAGE_ROWS) for _, saga_id in page]


def unfinished(server: Server, log_id: bytes) -> Unfinished:
    """The sagas without a final record, oldest first, each held against the numbers of its records and its lease."""
    schema = server.address.schema
    ids: list[str] = []
    damage: list[Damage] = []
    live: set[str] = set()
    for seq, saga_id, next_n, counted, most, alive in chain.from_iterable(_pages(server, _OPEN, _PAGE_ROWS)):
        if next_n == 1 and not counted:
            continue  # somebody has claimed the id and begun nothing under it
        ids.append(saga_id)
        if alive:
            live.add(saga_id)
        if not counted or most != counted or next_n != counted + 1:
            meant = server.run(lambda connection, seq=seq: _name_within(connection, schema, seq, log_id))
            named = distinct(saga_id, meant)
            ids += [one for one in named if one != saga_id]
            reason = f"{counted} records are there, up to number {most!r}, and {next_n!r} is the next"
            damage.append(Damage(where=f"row {seq} of saga", reason=reason, saga_ids=named))
    return Unfinished(saga_ids=tuple(ids), damage=tuple(damage), live=frozenset(live))


def _name_within(connection: Connection, schema: str, seq: int, log_id: bytes) -> str | None:
    """The saga that the records themselves name, where the first of them is intact."""
    row = connection.execute(_query(_FIRST, schema), (seq,), binary=True).fetchone()
    return None if row is None else name_in(row[0], log_id)


class _Walk:
    """Everything, some sagas at a time, each with all its records as they are at one moment."""

    def __init__(self, server: Server, log_id: bytes, progress: Callable[[int], None] | None) -> None:
        self._server = server
        self._schema = server.address.schema
        self._log_id = log_id
        self._progress = progress
        self.records = 0
        self.damage: list[Damage] = []

    def sagas(self) -> None:
        for rows in _pages(self._server, _PAGE, _PAGE_SAGAS, large=True):
            for _, one in groupby(rows, key=lambda row: row[0]):
                self._saga(list(one))

    def _saga(self, rows: list[tuple[Any, ...]]) -> None:
        saga_id = rows[0][1]
        found = [Row(*row[2:]) for row in rows]
        before = self.records
        try:
            records = checked(saga_id, found, self._log_id, erased=True)
        except LogCorrupted as error:
            named = distinct(saga_id, name_in(found[0].body, self._log_id))
            self.damage.append(Damage(where=f"saga {saga_id!r}", reason=str(error), saga_ids=named))
            return
        self.records += len(records)
        if self._progress is not None and self.records // PROGRESS_EVERY > before // PROGRESS_EVERY:
            self._progress(self.records)

    def strays(self) -> None:
        """The records of which no saga is known: its row is gone."""
        strays = _query(_STRAYS, self._schema)
        for (seq,) in self._server.run(unhurried(lambda connection: connection.execute(strays).fetchall())):
            name = self._server.run(
                lambda connection, seq=seq: _name_within(connection, self._schema, seq, self._log_id)
            )
            reason = "the row is missing" if name is None else f"the row of saga {name!r} is missing"
            where = f"the records of saga row {seq!r}"
            self.damage.append(Damage(where=where, reason=reason, saga_ids=None if name is None else (name,)))


def verify(server: Server, log_id: bytes, progress: Callable[[int], None] | None) -> Verification:
    """See `Log.verify`."""
    walk = _Walk(server, log_id, progress)
    walk.sagas()
    walk.strays()
    return verified(walk.records, walk.damage)
