"""What is read of a Redis log: one saga, its place in the lists, and the unfinished ones, with all damage named.

The records of a saga only grow, so that they may be read in pieces behind a row that was read first. What is compacted
meanwhile is seen by its row, which is read again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from redis.exceptions import ResponseError

from agent_saga_core.log.base import Damage, Unfinished
from agent_saga_core.log.lines import Lines
from agent_saga_core.log.redis.connection import Connection, Server
from agent_saga_core.log.redis.scripts import CENSUS, LOOK
from agent_saga_core.log.sql import Stated, damaged, distinct, history_of, lines_of, name_in
from agent_saga_core.records import Record

__all__ = [
    "FIRST_PIECE",
    "PAGE",
    "PIECE_BYTES",
    "Listed",
    "Row",
    "census",
    "history",
    "ids_of",
    "intact",
    "is_live",
    "lines",
    "name_within",
    "names_in",
    "row_of",
    "seen",
    "unfinished",
]

_TRIES: Final = 16
FIRST_PIECE: Final = 64  # records
PIECE_BYTES: Final = 4 * 2**20
PAGE: Final = 500  # sagas whose rows are read in one script
_MANY: Final = 5_000  # ids


class Row(NamedTuple):
    """What the store knows of a saga."""

    seq: int
    """0 while nothing is begun."""
    epoch: int
    next: int
    owner: str
    """The nonce of a writer, or nothing."""
    ended: bytes | None
    """The time of the final record, as it stands there."""
    length: int
    """How many records are there."""
    alive: bool
    """Whether its owner's lease runs."""


class Listed(NamedTuple):
    """The row of a saga and where it is listed; a fault in place of the row."""

    row: Row | str | None
    in_sagas: float | None
    in_open: float | None
    in_ended: float | None


def _row(saga_id: str, found: Sequence[Any]) -> Row | str | None:
    """A row as a script gave it; None if there is none, and what is wrong with it if that cannot be."""
    if found[0] != b"row":
        return "its keys are of another kind"
    seq, epoch, next_n, owner, ended, length, alive = found[1:8]
    if (seq, epoch, next_n, owner, ended) == (None,) * 5:
        return f"the store does not know it, but holds {length} records of it" if length else None
    at, under, following = _count(seq or b"0"), _count(epoch), _count(next_n)
    fits = isinstance(owner, bytes) and (ended is None or _time(ended))
    if at is None or under is None or following is None or not fits:
        return "its row is not what was written"
    return Row(at, under, following, str(owner, "latin-1"), ended, length, alive == 1)


def _count(text: object) -> int | None:
    return int(text) if isinstance(text, bytes) and text.isdigit() and len(text) < 16 else None


def _time(text: bytes) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _look(server: Server, saga_id: str) -> tuple[list[bytes], bytes]:
    key = server.address.key
    return [key("saga", saga_id.encode()), key("records", saga_id.encode())], key("writer", "")


def row_of(connection: Connection, server: Server, saga_id: str) -> Row | None:
    """What the store knows of the saga; None if it does not know it.

    Raises:
        LogCorrupted: That is not what was written.
    """
    keys, writer = _look(server, saga_id)
    found = _row(saga_id, connection.run(LOOK, keys, [writer]))
    if isinstance(found, str):
        raise damaged(saga_id, found)
    return found


def seen(connection: Connection, server: Server, saga_id: str) -> tuple[Row | None, list[bytes]]:
    """The saga's row and the lines of its records, as they were at one moment.

    Raises:
        LogCorrupted: They do not fit each other.
    """
    for _ in range(_TRIES):
        row = row_of(connection, server, saga_id)
        if row is None:
            return None, []
        bodies = list(_pieces(connection, server, saga_id, row.next - 1))
        if len(bodies) == row.next - 1 == row.length:
            return row, bodies
        again = row_of(connection, server, saga_id)
        if again is not None and again.seq == row.seq and again.next >= row.next:
            return row, bodies  # not compacted meanwhile: this is damage, and is found to be
    raise damaged(saga_id, "it changes faster than it can be read")


def _pieces(connection: Connection, server: Server, saga_id: str, most: int) -> Iterator[bytes]:
    key = server.address.key("records", saga_id.encode())
    at, many = 0, FIRST_PIECE
    while at < most:
        piece: list[bytes] = connection.call("LRANGE", key, at, min(at + many, most) - 1)
        yield from piece
        if not piece:
            return
        at += len(piece)
        size = sum(map(len, piece))
        many = max(1, min(1_000, many * 4, len(piece) * PIECE_BYTES // max(size, 1)))


def _stated(saga_id: str, row: Row) -> Stated:
    if row.length != row.next - 1:
        raise damaged(saga_id, f"{row.length} records are there, and {row.next - 1} were written")
    return Stated(next=row.next, ended=row.ended is not None, epoch=row.epoch)


def intact(
    saga_id: str, row: Row | str | None, bodies: Sequence[bytes], log_id: bytes, *, erased: bool = False
) -> list[Record]:
    """The records of a saga, in order, held against its row; see `history_of`.

    Raises:
        LogCorrupted: They are not what was written.
    """
    if isinstance(row, str):
        raise damaged(saga_id, row)
    if row is None:
        return []
    return history_of(saga_id, enumerate(bodies, 1), log_id, _stated(saga_id, row), erased=erased)


def history(server: Server, saga_id: str, log_id: bytes) -> list[Record]:
    """Every record of the saga, in order, whatever its type.

    Raises:
        LogCorrupted: Damage concerns this saga.
    """
    row, bodies = server.run(lambda connection: seen(connection, server, saga_id))
    return intact(saga_id, row, bodies, log_id)


def lines(server: Server, saga_id: str, log_id: bytes) -> Lines:
    """Every record of the saga, in order, as it is stored.

    Raises:
        LogCorrupted: Damage concerns this saga.
    """
    row, bodies = server.run(lambda connection: seen(connection, server, saga_id))
    if row is None:
        return ()
    return lines_of(saga_id, enumerate(bodies, 1), log_id, _stated(saga_id, row))


def is_live(server: Server, saga_id: str) -> bool:
    """Whether the lease of its owner runs."""
    keys, writer = _look(server, saga_id)
    row = _row(saga_id, server.run(lambda connection: connection.run(LOOK, keys, [writer])))
    return isinstance(row, Row) and row.alive


def names_in(server: Server, index: str, *, most: int = _MANY) -> Iterator[list[bytes]]:
    """The ids in `sagas` or `open`, oldest first, some at a time."""
    key = server.address.key(index)
    after = b"-inf"
    while True:
        found: list[bytes] = server.run(
            lambda connection, after=after: connection.call(
                "ZRANGEBYSCORE", key, after, "+inf", "WITHSCORES", "LIMIT", 0, most
            )
        )
        if not found:
            return
        yield found[::2]
        after = b"(" + found[-1]  # no two sagas have the same place


def ids_of(server: Server) -> list[str]:
    """Every saga, oldest first."""
    return [name.decode("utf-8", "replace") for page in names_in(server, "sagas") for name in page]


def census(server: Server, names: Sequence[bytes]) -> list[Listed]:
    """The rows of some sagas, as they are at one moment."""
    key = server.address.key
    keys = [*map(key, ("sagas", "open", "ended"))]
    for name in names:
        keys += [key("saga", name), key("records", name)]
    found: list[Any] = server.run(lambda connection: connection.run(CENSUS, keys, names))
    return [
        Listed(
            _row(name.decode("utf-8", "replace"), one), *(_score(score) for score in [*one[8:11], None, None, None][:3])
        )
        for name, one in zip(names, found, strict=True)
    ]


def _score(score: object) -> float | None:
    return float(score) if isinstance(score, bytes) else None


def unfinished(server: Server, log_id: bytes) -> Unfinished:
    """The sagas without a final record, oldest first, each held against the number of its records."""
    ids: list[str] = []
    damage: list[Damage] = []
    for names in names_in(server, "open", most=PAGE):
        for name, listed in zip(names, census(server, names), strict=True):
            row = listed.row
            saga_id = name.decode("utf-8", "replace")
            if isinstance(row, Row) and row.ended is not None and listed.in_open is None:
                continue  # it has ended since
            if row is None and listed.in_sagas is None:
                continue  # it was forgotten since
            ids.append(saga_id)
            fault = _fault(row)
            if fault is not None:
                meant = server.run(lambda connection, name=name: name_within(connection, server, name, log_id))
                named = distinct(saga_id, meant)
                ids += [one for one in named if one != saga_id]
                damage.append(Damage(where=f"saga {saga_id!r}", reason=fault, saga_ids=named))
    return Unfinished(saga_ids=tuple(ids), damage=tuple(damage))


def _fault(row: Row | str | None) -> str | None:
    """What is wrong with the row of a saga that has not ended."""
    if not isinstance(row, Row):
        return row or "its row is missing"
    if row.ended is not None:
        return "it is among those that have not ended, and has"
    if row.length != row.next - 1 or not row.length:
        return f"{row.length} records are there, and {row.next - 1} were written"
    return None


def name_within(connection: Connection, server: Server, name: bytes, log_id: bytes) -> str | None:
    """The saga that the records themselves name, where the first of them is intact."""
    try:
        body = connection.call("LINDEX", server.address.key("records", name), 0)
    except ResponseError:
        return None
    return name_in(body, log_id)
