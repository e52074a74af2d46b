"""What is read of a Redis log: one saga, the unfinished ones, and everything, with all damage named.

The records of a saga only grow, so that they may be read in pieces behind a row that was read first. What is compacted
meanwhile is seen by its row, which is read again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

from redis.exceptions import ResponseError

from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log.base import Damage, Unfinished, Verification
from agent_saga_core.log.lines import Lines, is_final
from agent_saga_core.log.redis.connection import Connection, Server
from agent_saga_core.log.redis.scripts import CENSUS, LOOK
from agent_saga_core.log.scan import saga_name
from agent_saga_core.log.sql import damaged, history_of, lines_of, read_body
from agent_saga_core.records import FINAL, RECORD_LINE, Record, RecordType

__all__ = [
    "Listed",
    "Row",
    "census",
    "history",
    "ids_of",
    "intact",
    "is_live",
    "lines",
    "row_of",
    "seen",
    "unfinished",
    "verify",
]

_TRIES: Final = 16
_FIRST_PIECE: Final = 64  # records
_PIECE_BYTES: Final = 4 * 2**20
_PAGE: Final = 500  # sagas whose rows are read in one script
_MANY: Final = 5_000  # ids
PROGRESS_EVERY: Final = 10_000


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


class Found(NamedTuple):
    """A saga as it was at one moment."""

    saga_id: str
    name: bytes
    listed: Listed
    bodies: list[bytes]
    """The lines of its records; none where its row says nothing of any."""


class Histories:
    """Reads many sagas, with few round trips: a server that syncs for others answers each of them late."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._record_bytes = _PIECE_BYTES // _FIRST_PIECE  # what a record comes to, by what was seen

    def of(self, names: Sequence[bytes]) -> Iterator[Found]:
        """These sagas, in order.

        Raises:
            LogCorrupted: The log is gone. Damage of a saga is left to be found.
        """
        listed = census(self._server, names)
        at = 0
        while at < len(names):
            most, many, records = max(1, _PIECE_BYTES // self._record_bytes), 0, 0
            while at + many < len(names) and (not many or records + _length(listed[at + many]) <= most):
                records += _length(listed[at + many])
                many += 1
            yield from self._some(names[at : at + many], listed[at : at + many], at_once=records <= most)
            at += many

    def _some(self, names: Sequence[bytes], listed: Sequence[Listed], *, at_once: bool) -> Iterator[Found]:
        key = self._server.address.key
        asked: list[tuple[str | bytes | int, ...]] = []
        for name, one in zip(names, listed, strict=True):
            row = _whole(one)
            if at_once and row is not None:
                asked.append(("LRANGE", key("records", name), 0, row.length - 1))
        answers: Iterator[Any] = iter(self._server.run(lambda connection: connection.calls(asked)) if asked else ())
        for name, one in zip(names, listed, strict=True):
            found = Found(name.decode("utf-8", "replace"), name, one, [])
            if isinstance(one.row, Row):
                answer: Any = next(answers) if at_once and _whole(one) is not None else None
                if isinstance(answer, list) and len(cast("list[bytes]", answer)) == one.row.length:
                    found = found._replace(bodies=cast("list[bytes]", answer))
                else:
                    found = self._alone(found)  # it is long, or changed meanwhile, or is damaged
            if found.bodies:
                mean = sum(map(len, found.bodies)) // len(found.bodies)
                self._record_bytes = max(1, (self._record_bytes + mean) // 2)
            yield found

    def _alone(self, found: Found) -> Found:
        try:
            row, bodies = self._server.run(lambda connection: seen(connection, self._server, found.saga_id))
        except LogCorrupted as error:
            if error.saga_id is None:
                raise
            return found._replace(listed=found.listed._replace(row=str(error)))
        return found._replace(listed=found.listed._replace(row=row), bodies=bodies)


def _whole(listed: Listed) -> Row | None:
    row = listed.row
    return row if isinstance(row, Row) and 0 < row.length == row.next - 1 else None


def _length(listed: Listed) -> int:
    return listed.row.length if isinstance(listed.row, Row) else 0


def _pieces(connection: Connection, server: Server, saga_id: str, most: int) -> Iterator[bytes]:
    key = server.address.key("records", saga_id.encode())
    at, many = 0, _FIRST_PIECE
    while at < most:
        piece: list[bytes] = connection.call("LRANGE", key, at, min(at + many, most) - 1)
        yield from piece
        if not piece:
            return
        at += len(piece)
        size = sum(map(len, piece))
        many = max(1, min(1_000, many * 4, len(piece) * _PIECE_BYTES // max(size, 1)))


def _check_row(saga_id: str, row: Row, *, ended: bool) -> None:
    if row.length != row.next - 1:
        raise damaged(saga_id, f"{row.length} records are there, and {row.next - 1} were written")
    if (row.ended is not None) != ended:
        raise damaged(saga_id, "its row and its records do not agree on whether it has ended")


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
    records = history_of(saga_id, enumerate(bodies, 1), log_id, next_n=row.next, erased=erased)
    _check_row(saga_id, row, ended=bool(records) and records[-1].type in FINAL)
    claims = [record.n for record in records if record.type == RecordType.CLAIM]
    if row.epoch != (claims[-1] if claims else 1):
        raise damaged(saga_id, "its row and its records do not agree on who claimed it last")
    return records


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
    found = lines_of(saga_id, enumerate(bodies, 1), log_id, next_n=row.next)
    _check_row(saga_id, row, ended=bool(found) and is_final(found[-1]))
    return found


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
    for names in names_in(server, "open", most=_PAGE):
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
                meant = server.run(lambda connection, name=name: _name_within(connection, server, name, log_id))
                named = _distinct(saga_id, meant)
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


def _distinct(*names: str | None) -> tuple[str, ...]:
    return tuple({name: None for name in names if name is not None})


def _name_within(connection: Connection, server: Server, name: bytes, log_id: bytes) -> str | None:
    """The saga that the records themselves name, where the first of them is intact."""
    try:
        body = connection.call("LINDEX", server.address.key("records", name), 0)
    except ResponseError:
        return None
    line = RECORD_LINE.fullmatch(body) if isinstance(body, bytes) else None
    if line is None:
        return None
    meant = saga_name(line["saga"])
    whole = meant is not None and isinstance(read_body(body, meant, int(line["n"]), log_id), Record)
    return meant if whole else None


class _Walk:
    """Everything, saga by saga, each with all its records as they are at one moment."""

    def __init__(self, server: Server, log_id: bytes, progress: Callable[[int], None] | None) -> None:
        self._server = server
        self._log_id = log_id
        self._progress = progress
        self._histories = Histories(server)
        self.records = 0
        self.damage: list[Damage] = []

    def blame(self, name: bytes, fault: str) -> None:
        """Note damage of the saga of that name, and of the one that its records name."""
        saga_id = name.decode("utf-8", "replace")
        meant = self._server.run(lambda connection: _name_within(connection, self._server, name, self._log_id))
        self.damage.append(Damage(where=f"saga {saga_id!r}", reason=fault, saga_ids=_distinct(saga_id, meant)))

    def sagas(self) -> None:
        for names in names_in(self._server, "sagas", most=_PAGE):
            for found in self._histories.of(names):
                self._saga(found)

    def _saga(self, found: Found) -> None:
        saga_id, name, listed, bodies = found
        row = listed.row
        if row is None and (listed.in_sagas is None or census(self._server, [name])[0].in_sagas is None):
            return  # forgotten since
        fault = row if isinstance(row, str) else _misplaced(listed)
        if fault is not None:
            self.blame(name, fault)
            return
        before = self.records
        try:
            records = intact(saga_id, row, bodies, self._log_id, erased=True)
            if any(record.type in FINAL for record in records[:-1]):
                raise damaged(saga_id, "records follow its final one")
        except LogCorrupted as error:
            self.blame(name, str(error))
            return
        self.records += len(records)
        if self._progress is not None and self.records // PROGRESS_EVERY > before // PROGRESS_EVERY:
            self._progress(self.records)

    def strays(self) -> None:
        """The keys of sagas that no list names. This looks at every key of the server's database."""
        key = self._server.address.key
        for kind in ("saga", "records"):
            start = key(kind, b"")
            cursor = b"0"
            while True:
                cursor, found = self._server.run(
                    lambda connection, at=cursor, start=start: connection.call(
                        "SCAN", at, "MATCH", start + b"*", "COUNT", 1_000
                    )
                )
                names = [name.removeprefix(start) for name in found]
                for name, listed in zip(names, census(self._server, names) if names else [], strict=True):
                    self._stray(name, listed)
                if cursor == b"0":
                    break

    def _stray(self, name: bytes, listed: Listed) -> None:
        row = listed.row
        if listed.in_sagas is not None or row is None:
            return  # looked at, or gone since
        if isinstance(row, Row) and row.next == 1 and not row.length:
            return  # claimed, and nothing begun
        if not any(one.where == f"saga {name.decode('utf-8', 'replace')!r}" for one in self.damage):
            self.blame(name, row if isinstance(row, str) else "it is in no list of sagas")


def _misplaced(listed: Listed) -> str | None:
    """What is wrong with where a saga is listed."""
    row = listed.row
    if not isinstance(row, Row):
        return "its row is missing"
    if listed.in_sagas != row.seq:
        return "its row and the list of sagas do not agree"
    if row.ended is None and (listed.in_open != row.seq or listed.in_ended is not None):
        return "it has not ended, and is not listed so"
    if row.ended is not None and (listed.in_open is not None or listed.in_ended != float(row.ended)):
        return "it has ended, and is not listed so"
    return None


def verify(server: Server, log_id: bytes, progress: Callable[[int], None] | None) -> Verification:
    """See `Log.verify`."""
    walk = _Walk(server, log_id, progress)
    walk.sagas()
    walk.strays()
    damage = tuple(walk.damage)
    first = f"{damage[0].where}: {damage[0].reason}" if damage else None
    return Verification(intact=not damage, records=walk.records, first_broken=first, damage=damage)
