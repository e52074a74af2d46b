"""Whole histories out of another log, put into the database as they are: each in one transaction with its row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from agent_saga_core.errors import LogCorrupted, SagaBusy, SagaError
from agent_saga_core.log.leased import busy, contested
from agent_saga_core.log.lines import Adopted, AnotherHistory, Lines, Whole, is_there
from agent_saga_core.log.postgres.connection import Connection, Server
from agent_saga_core.log.postgres.reading import Row, checked_lines, rows_of, rows_of_many
from agent_saga_core.log.sql import body_of

__all__ = ["adopt", "lines"]

_MOST_BYTES: Final = 16 * 2**20  # in one transaction, unless one history is longer; and in one statement
_LOOK_AT: Final = 100  # sagas at a time: on a first copy nothing is there, on one that is repeated everything

# An id that a process claimed which died before it began anything. If it comes back, its first append is refused.
_DROP_EMPTY: Final = (
    "DELETE FROM {s}.saga s WHERE s.id = %b AND s.next = 1 AND s.owner IS NOT DISTINCT FROM %b::uuid AND NOT EXISTS"
    " (SELECT FROM {s}.record r WHERE r.saga = s.seq) AND NOT EXISTS (SELECT FROM {s}.writer w WHERE w.nonce = s.owner"
    " AND NOT w.fenced AND w.lease_until >= now())"
)
_ADD: Final = (
    "INSERT INTO {s}.saga(id, epoch, next, ended) SELECT g.id, g.epoch, g.next, nullif(g.ended, 'NaN')"
    " FROM unnest(%b::text[], %b::int8[], %b::int8[], %b::float8[]) WITH ORDINALITY AS g(id, epoch, next, ended, at)"
    " ORDER BY g.at ON CONFLICT (id) DO NOTHING RETURNING id, seq"
)
_FILL: Final = (
    "INSERT INTO {s}.record(saga, n, epoch, body) SELECT * FROM unnest(%b::int8[], %b::int8[], %b::int8[], %b::bytea[])"
)


def lines(server: Server, saga_id: str, log_id: bytes) -> Lines:
    """Every record of the saga, in order, as it is stored.

    Raises:
        LogCorrupted: Damage concerns this saga.
    """
    rows = server.run(lambda connection: rows_of(connection, server.address.schema, saga_id))
    return checked_lines(saga_id, rows, log_id)


def adopt(server: Server, log_id: bytes, wholes: Sequence[Whole], is_mine: Callable[[str, object], bool]) -> Adopted:
    """See `Log.adopt`.

    Args:
        server: The server.
        log_id: The id of the log.
        wholes: What to store.
        is_mine: Whether this process owns a saga, given its id and the owner that its row names.
    """
    stored: set[str] = set()
    there: set[str] = set()
    refused: dict[str, SagaError] = {}
    for some in _chunks(wholes):
        look = _Look(server, log_id, is_mine)
        look.at(some)
        if look.fresh:
            put = partial(_put, schema=server.address.schema, log_id=log_id, wholes=look.fresh, empty=look.empty)
            added = server.run(put)
            # The others came to be there meanwhile, perhaps by a try of ours whose answer was lost.
            late, look.fresh = [whole for whole in look.fresh if whole.saga_id not in added], []
            look.at(late)
            for whole in look.fresh:
                look.refused[whole.saga_id] = contested(whole.saga_id)
            stored |= added
        there |= look.there
        refused |= look.refused
    ids = [whole.saga_id for whole in wholes]
    return Adopted(
        stored=tuple(saga_id for saga_id in ids if saga_id in stored),
        there=tuple(saga_id for saga_id in ids if saga_id in there),
        refused=refused,
    )


def _chunks(wholes: Sequence[Whole]) -> Iterator[list[Whole]]:
    some: list[Whole] = []
    size = 0
    for whole in wholes:
        some.append(whole)
        size += sum(len(line.rest) + len(line.head) for line in whole.lines)
        if size > _MOST_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


class _Look:
    """What is there of sagas that are to be adopted."""

    def __init__(self, server: Server, log_id: bytes, is_mine: Callable[[str, object], bool]) -> None:
        self._server = server
        self._log_id = log_id
        self._is_mine = is_mine
        self.fresh: list[Whole] = []
        self.empty: list[tuple[str, object]] = []
        self.there: set[str] = set()
        self.refused: dict[str, SagaError] = {}

    def at(self, wholes: Sequence[Whole]) -> None:
        """Sort them by what is to be done."""
        schema = self._server.address.schema
        for start in range(0, len(wholes), _LOOK_AT):
            some = wholes[start : start + _LOOK_AT]
            ids = [whole.saga_id for whole in some]
            found = self._server.run(lambda connection, ids=ids: rows_of_many(connection, schema, ids))
            for whole in some:
                try:
                    self._one(whole, found.get(whole.saga_id, (True, []))[1])
                except (SagaBusy, AnotherHistory, LogCorrupted) as error:
                    self.refused[whole.saga_id] = error

    def _one(self, whole: Whole, rows: list[Row]) -> None:
        owner = rows[0].owner if rows else None
        if self._is_mine(whole.saga_id, owner) or (owner is not None and rows[0].alive):
            raise busy(whole.saga_id)
        if is_there(whole, checked_lines(whole.saga_id, rows, self._log_id)):
            self.there.add(whole.saga_id)
            return
        if rows:
            self.empty.append((whole.saga_id, owner))
        self.fresh.append(whole)


def _put(
    connection: Connection, *, schema: str, log_id: bytes, wholes: Sequence[Whole], empty: Sequence[tuple[str, object]]
) -> set[str]:
    """Store the histories of sagas that are not there, in one transaction; which. One that came meanwhile is left."""
    with connection.transaction():
        for one in empty:
            connection.execute(_sql(_DROP_EMPTY, schema), one)
        added = connection.execute(
            _sql(_ADD, schema),
            (
                [whole.saga_id for whole in wholes],
                [whole.epoch for whole in wholes],
                [len(whole.lines) + 1 for whole in wholes],
                [math.nan if whole.ended is None else whole.ended for whole in wholes],
            ),
        ).fetchall()
        seqs: dict[str, int] = dict(added)
        rows = (
            (seqs[whole.saga_id], n, epoch, body_of(line, log_id))
            for whole in wholes
            if whole.saga_id in seqs
            for n, epoch, line in zip(whole.numbers, whole.epochs, whole.lines, strict=True)
        )
        for some in _pieces(rows):
            connection.execute(_sql(_FILL, schema), [list(column) for column in zip(*some, strict=True)])
    return set(seqs)


def _pieces(rows: Iterator[tuple[int, int, int, bytes]]) -> Iterator[list[tuple[int, int, int, bytes]]]:
    some: list[tuple[int, int, int, bytes]] = []
    size = 0
    for row in rows:
        some.append(row)
        size += len(row[3])
        if size > _MOST_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _sql(text: str, schema: str) -> Any:
    return text.format(s=schema)
