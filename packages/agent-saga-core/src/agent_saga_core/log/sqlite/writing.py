"""How a batch of records gets into the database: as one transaction, with one compare-and-set per saga."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from agent_saga_core.errors import Fenced
from agent_saga_core.log.commit import Batch, Entry
from agent_saga_core.log.lines import Whole
from agent_saga_core.log.sql import Refusals, body_of, damaged, stored

__all__ = ["RowBatch", "put", "put_whole"]

_BEGIN: Final = "INSERT OR IGNORE INTO saga(id, next, ended) VALUES(?, ?, ?)"
_ADVANCE: Final = "UPDATE saga SET next = ?, ended = ? WHERE id = ? AND next = ?"
_STORE: Final = "INSERT INTO record(saga, n, body) SELECT seq, ?, ? FROM saga WHERE id = ?"
_ADD: Final = "INSERT INTO saga(id, next, ended) VALUES(?, ?, ?)"
_FILL: Final = "INSERT INTO record(saga, n, body) VALUES(?, ?, ?)"
_NEXT: Final = "SELECT next FROM saga WHERE id = ?"
_STORED: Final = "SELECT r.n, r.body FROM saga s JOIN record r ON r.saga = s.seq WHERE s.id = ? AND r.n BETWEEN ? AND ?"


class Rows:
    """The records of one saga in a batch, in order, and their lines."""

    __slots__ = ("bodies", "entries")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.bodies: list[bytes] = []

    def advance(self) -> tuple[int, float | None, str, int]:
        """What the saga's row is to say, and what it has to say before."""
        first, last = self.entries[0], self.entries[-1]
        # The time is the last thing in the head of a line.
        ended = float(last.encoded.head.rpartition(b":")[2]) if last.final else None
        return last.n + 1, ended, first.saga, first.n

    def rest(self, done: int) -> Rows:
        """All but the first `done`."""
        left = Rows()
        left.entries, left.bodies = self.entries[done:], self.bodies[done:]
        return left


class RowBatch(Batch):
    """A batch, by saga."""

    __slots__ = ("sagas",)

    def __init__(self, entries: Sequence[Entry], log_id: bytes) -> None:
        super().__init__(entries)
        self.sagas: dict[str, Rows] = {}
        for entry in entries:
            rows = self.sagas.get(entry.saga)
            if rows is None:
                rows = self.sagas[entry.saga] = Rows()
            rows.entries.append(entry)
            rows.bodies.append(body_of(entry.encoded, log_id))


def put(connection: sqlite3.Connection, batch: RowBatch, refusals: Refusals) -> None:
    """Put a batch into the transaction at hand. What is refused has its `error` set, and is not in it.

    Put again, because nobody knows whether it was committed, a batch changes nothing.

    Raises:
        sqlite3.Error: It cannot be stored.
    """
    accepted: list[Rows] = []
    for rows in batch.sagas.values():
        error = refusals.of(rows.entries[0])
        if error is None:
            accepted.append(rows)
        else:
            refusals.refuse(rows.entries, error)
    connection.execute("SAVEPOINT batch")
    if not _put_all(connection, accepted):
        connection.execute("ROLLBACK TO batch")
        for rows in accepted:
            _put_one(connection, rows, refusals)


def _put_all(connection: sqlite3.Connection, accepted: Sequence[Rows]) -> bool:
    """Put what follows everywhere, which is what is nearly always asked; False if it does not."""
    begun = [rows.advance() for rows in accepted if rows.entries[0].n == 1]
    grown = [rows.advance() for rows in accepted if rows.entries[0].n > 1]
    try:
        if begun:
            changed = connection.executemany(_BEGIN, [(saga, last, ended) for last, ended, saga, _ in begun]).rowcount
            if changed != len(begun):
                return False
        if grown and connection.executemany(_ADVANCE, grown).rowcount != len(grown):
            return False
        records = [
            (entry.n, body, entry.saga)
            for rows in accepted
            for entry, body in zip(rows.entries, rows.bodies, strict=True)
        ]
        return not records or connection.executemany(_STORE, records).rowcount == len(records)
    except sqlite3.IntegrityError:
        return False


def _put_one(connection: sqlite3.Connection, rows: Rows, refusals: Refusals) -> None:
    """Put the records of one saga, after a look at what is there of it."""
    first, last = rows.entries[0], rows.entries[-1]
    row = connection.execute(_NEXT, (first.saga,)).fetchone()
    next_n: object = 1 if row is None else row[0]
    if not isinstance(next_n, int):
        refusals.refuse(rows.entries, damaged(first.saga, "its row is not what was written"))
        return
    found = dict(connection.execute(_STORED, (first.saga, first.n, last.n)).fetchall())
    try:
        done = stored(rows.entries, rows.bodies, found, next_n)
    except Fenced as error:
        refusals.refuse(rows.entries, error)
        return
    left = rows.rest(done)
    if not left.entries:
        return
    connection.execute("SAVEPOINT one")
    if _put_all(connection, [left]):
        connection.execute("RELEASE one")
    else:
        connection.execute("ROLLBACK TO one")
        connection.execute("RELEASE one")
        fault = f"record {left.entries[0].n} is there already, and was not written"
        refusals.refuse(left.entries, damaged(first.saga, fault))


def put_whole(connection: sqlite3.Connection, wholes: Sequence[Whole], log_id: bytes) -> None:
    """Put the histories of sagas that are not there into the transaction at hand.

    Raises:
        sqlite3.Error: They cannot be stored.
    """
    for whole in wholes:
        seq = connection.execute(_ADD, (whole.saga_id, len(whole.lines) + 1, whole.ended)).lastrowid
        bodies = zip(whole.numbers, whole.lines, strict=True)
        connection.executemany(_FILL, [(seq, n, body_of(line, log_id)) for n, line in bodies])
