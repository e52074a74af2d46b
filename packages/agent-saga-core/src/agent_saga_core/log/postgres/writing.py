"""How a batch of records gets into the database: as one statement, with one compare-and-set per saga."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from psycopg import errors

from agent_saga_core.errors import Fenced, LogCorrupted
from agent_saga_core.log.leased import Holding
from agent_saga_core.log.postgres.connection import Connection
from agent_saga_core.log.sql import Refusals, Rows, damaged, lost, stored

__all__ = ["MOST_BYTES", "MOST_RECORDS", "Statements", "put"]

MOST_RECORDS: Final = 2_000
MOST_BYTES: Final = 16 * 2**20

_MOVE: Final = (
    "UPDATE {s}.saga SET next = %b, ended = nullif(%b::float8, 'NaN'),"
    " owner = CASE WHEN %b::float8 = 'NaN' THEN owner END"
    " WHERE id = %b AND owner = %b AND epoch = %b AND next = %b RETURNING seq"
)
# A saga whose id was just drawn has no row yet. A writer that was fenced must not make one.
_BEGIN: Final = (
    "INSERT INTO {s}.saga(next, ended, owner, id, epoch)"
    " SELECT %b, nullif(%b::float8, 'NaN'), CASE WHEN %b::float8 = 'NaN' THEN nonce END, %b::text, %b::int8"
    " FROM {s}.writer WHERE nonce = %b AND NOT fenced ON CONFLICT (id) DO NOTHING RETURNING seq"
)
_ONE: Final = " INSERT INTO {s}.record(saga, n, epoch, body) SELECT seq, %b, %b, %b FROM at"
_MANY: Final = (
    " INSERT INTO {s}.record(saga, n, epoch, body) SELECT seq, n, %b, body FROM at,"
    " unnest(%b::int8[], %b::bytea[]) AS given(n, body)"
)
_ALL: Final = (
    "WITH given AS (SELECT * FROM unnest(%b::text[], %b::uuid[], %b::int8[], %b::int8[], %b::int8[], %b::float8[],"
    " %b::bool[]) AS given(id, owner, epoch, first, next, ended, fresh)),"
    " moved AS (UPDATE {s}.saga t SET next = g.next, ended = nullif(g.ended, 'NaN'),"
    " owner = CASE WHEN g.ended = 'NaN' THEN t.owner END FROM given g"
    " WHERE NOT g.fresh AND t.id = g.id AND t.owner = g.owner AND t.epoch = g.epoch AND t.next = g.first"
    " RETURNING t.seq, t.id, t.epoch),"
    " begun AS (INSERT INTO {s}.saga(id, epoch, next, owner, ended) SELECT g.id, g.epoch, g.next,"
    " CASE WHEN g.ended = 'NaN' THEN g.owner END, nullif(g.ended, 'NaN') FROM given g"
    " JOIN {s}.writer w ON w.nonce = g.owner WHERE g.fresh AND NOT w.fenced ON CONFLICT (id) DO NOTHING"
    " RETURNING seq, id, epoch),"
    " at AS (SELECT * FROM moved UNION ALL SELECT * FROM begun),"
    " kept AS (INSERT INTO {s}.record(saga, n, epoch, body) SELECT at.seq, r.n, at.epoch, r.body"
    ' FROM unnest(%b::text[], %b::int8[], %b::bytea[]) AS r(id, n, body) JOIN at ON at.id = r.id COLLATE "C")'
    " SELECT id FROM at"
)
_LOOK: Final = (
    "SELECT s.next, s.owner, s.epoch, s.ended, r.n, r.body FROM {s}.saga s"
    " LEFT JOIN {s}.record r ON r.saga = s.seq AND r.n BETWEEN %b AND %b WHERE s.id = %b"
)


class Statements(NamedTuple):
    """The statements, for the schema of one log."""

    begin_one: str
    begin_many: str
    move_one: str
    move_many: str
    all: str
    look: str

    @classmethod
    def of(cls, schema: str) -> Statements:
        """For that schema."""
        begin, move = f"WITH at AS ({_BEGIN})", f"WITH at AS ({_MOVE})"
        texts = (begin + _ONE, begin + _MANY, move + _ONE, move + _MANY, _ALL, _LOOK)
        return cls(*(text.format(s=schema) for text in texts))


def put(
    connection: Connection, asked: Mapping[str, tuple[Rows, Holding]], statements: Statements, refusals: Refusals
) -> None:
    """Store what was asked for of a batch. What is refused has its `error` set, and the rest is durable.

    Put again, because nobody knows whether it was committed, it changes nothing.

    Raises:
        psycopg.Error: It cannot be stored.
    """
    if not asked:
        return
    done: set[str]
    try:
        done = _put_all(connection, asked, statements)
    except errors.UniqueViolation:
        done = set[str]()  # somebody put a record where none belongs; which saga that is, shows one by one
    for saga_id in done:
        asked[saga_id][1].fresh = False
    for saga_id in asked.keys() - done:
        _put_late(connection, *asked[saga_id], statements, refusals)


def _put_all(connection: Connection, asked: Mapping[str, tuple[Rows, Holding]], statements: Statements) -> set[str]:
    """Put what follows; the sagas of which it did."""
    if len(asked) == 1:
        ((saga_id, (rows, holding)),) = asked.items()
        return {saga_id} if _put_one(connection, rows, holding, statements) else set()
    parameters: list[Any] = [
        list(asked),
        [holding.writer.nonce for _, holding in asked.values()],
        [holding.epoch for _, holding in asked.values()],
        [rows.entries[0].n for rows, _ in asked.values()],
        [rows.entries[-1].n + 1 for rows, _ in asked.values()],
        [_ended(rows) for rows, _ in asked.values()],
        [holding.fresh for _, holding in asked.values()],
        [entry.saga for rows, _ in asked.values() for entry in rows.entries],
        [entry.n for rows, _ in asked.values() for entry in rows.entries],
        [body for rows, _ in asked.values() for body in rows.bodies],
    ]
    return {saga_id for (saga_id,) in connection.execute(_query(statements.all), parameters).fetchall()}


def _put_one(connection: Connection, rows: Rows, holding: Holding, statements: Statements) -> bool:
    first, last, ended = rows.entries[0], rows.entries[-1], _ended(rows)
    nonce, epoch = holding.writer.nonce, holding.epoch
    one = first is last
    if holding.fresh:
        statement = statements.begin_one if one else statements.begin_many
        head = [last.n + 1, ended, ended, first.saga, epoch, nonce]
    else:
        statement = statements.move_one if one else statements.move_many
        head = [last.n + 1, ended, ended, first.saga, nonce, epoch, first.n]
    tail: list[Any] = [first.n, epoch, rows.bodies[0]] if one else [epoch, [e.n for e in rows.entries], rows.bodies]
    return connection.execute(_query(statement), [*head, *tail]).rowcount == len(rows.entries)


def _ended(rows: Rows) -> float:
    """The time of the final record, NaN if there is none."""
    return float(rows.ended or math.nan)


def _query(statement: str) -> Any:
    return statement  # the driver wants a literal; the only thing put into ours is a checked name


def _put_late(connection: Connection, rows: Rows, holding: Holding, statements: Statements, refusals: Refusals) -> None:
    """What did not follow: it is stored already, because its acknowledgement was lost, or it is refused."""
    try:
        _settle(connection, rows, holding, statements)
    except (Fenced, LogCorrupted) as error:
        refusals.refuse(rows.entries, error)
    except errors.UniqueViolation:
        first = rows.entries[0]
        fault = f"a record {first.n} or later is there already, and was not written"
        refusals.refuse(rows.entries, damaged(first.saga, fault))


def _settle(connection: Connection, rows: Rows, holding: Holding, statements: Statements) -> None:
    first, last = rows.entries[0], rows.entries[-1]
    found = connection.execute(_query(statements.look), (first.n, last.n, first.saga), binary=True).fetchall()
    next_n, owner, epoch, ended = found[0][:4] if found else (1, None, 0, None)
    if next_n < first.n:
        raise lost(first.saga, first.n - 1, next_n)
    done = stored(rows.entries, rows.bodies, {n: body for *_, n, body in found if n is not None}, next_n)
    ours = owner == holding.writer.nonce and epoch == holding.epoch
    if done == len(rows.entries):
        if ours or (last.final and ended is not None):
            holding.fresh = False
            return
    elif done == 0 and ours and _put_one(connection, rows, holding, statements):
        return  # the statement that failed was about another saga of its batch
    elif (
        not found and holding.fresh and holding.writer.lost is None and _put_one(connection, rows, holding, statements)
    ):
        holding.fresh = False
        return
    why = "another owns it now" if found else "the lease of this process was taken, or the saga's row is gone"
    raise Fenced(f"this process lost saga {first.saga!r}: its record {first.n} was refused, because {why}")
