"""What is read of a SQLite log: one saga, the unfinished ones, and everything, with all damage named."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from typing import Final

from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log.base import Damage, Unfinished, Verification
from agent_saga_core.log.lines import Lines
from agent_saga_core.log.sql import Stated, damaged, distinct, history_of, lines_of, name_in, verified
from agent_saga_core.log.sqlite.connection import Connections
from agent_saga_core.records import Record

__all__ = ["history", "ids_of", "intact", "lines", "unfinished", "verify"]

_HISTORY: Final = (
    "SELECT s.next, s.id, s.ended, r.n, r.body FROM saga s LEFT JOIN record r ON r.saga = s.seq"
    " WHERE s.id = ? ORDER BY r.n"
)
# What the row of a saga says, beside the index of its records and the index of ids: no record is read.
_CHECKED: Final = (
    "SELECT s.seq, s.id, s.next, s.ended, (SELECT count(*) FROM record r WHERE r.saga = s.seq),"
    " (SELECT max(n) FROM record r WHERE r.saga = s.seq), (SELECT seq FROM saga x WHERE x.id = s.id) FROM saga s"
)
_OPEN: Final = f"{_CHECKED} INDEXED BY saga_open WHERE s.ended IS NULL ORDER BY s.seq"
_OPEN_SEQS: Final = "SELECT seq FROM saga INDEXED BY saga_open WHERE ended IS NULL ORDER BY seq"
_FIRST: Final = "SELECT body FROM record WHERE saga = ? ORDER BY n LIMIT 1"
_CHUNK: Final = 500  # sagas: as long as a chunk is read, the write-ahead file cannot begin anew
PROGRESS_EVERY: Final = 10_000


def _malformed(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CORRUPT


def name_of(value: object) -> str | None:
    """A saga's id as the database gives it; None if it is none."""
    try:
        return value.decode() if isinstance(value, bytes) else None
    except UnicodeDecodeError:
        return None


def _rows(connections: Connections, saga_id: str) -> tuple[Stated | None, list[tuple[object, object]]]:
    """What the saga's row says, and its records; (None, nothing) if there is none.

    Raises:
        LogCorrupted: The row is not what was written.
    """
    with connections.reading() as connection:
        try:
            rows = connection.execute(_HISTORY, (saga_id,)).fetchall()
        except sqlite3.DatabaseError as error:
            if _malformed(error):
                raise damaged(saga_id, f"a page of the database is broken ({error})") from error
            raise
    if not rows:
        return None, []
    next_n, name, ended, *_ = rows[0]
    if name_of(name) != saga_id:
        raise _not_a_row(saga_id)
    return _stated(saga_id, next_n, ended), [(n, body) for *_, n, body in rows if n is not None]


def _stated(saga_id: str, next_n: object, ended: object) -> Stated:
    if not isinstance(next_n, int):
        raise _not_a_row(saga_id)
    return Stated(next_n, ended is not None, epoch=None)  # owners are told apart by locks


def _not_a_row(saga_id: str) -> LogCorrupted:
    return damaged(saga_id, "its row is not what was written")


def history(connections: Connections, saga_id: str, log_id: bytes) -> list[Record]:
    """Every record of the saga, in order, whatever its type.

    Raises:
        LogCorrupted: Damage concerns this saga.
    """
    stated, rows = _rows(connections, saga_id)
    return history_of(saga_id, rows, log_id, stated)


def lines(connections: Connections, saga_id: str, log_id: bytes) -> Lines:
    """Every record of the saga, in order, as it is stored.

    Raises:
        LogCorrupted: Damage concerns this saga.
    """
    stated, rows = _rows(connections, saga_id)
    return lines_of(saga_id, rows, log_id, stated)


def ids_of(connections: Connections) -> list[str]:
    """Every saga, oldest first.

    Raises:
        LogCorrupted: A name cannot be read.
    """
    with connections.reading() as connection:
        names = [name_of(name) for (name,) in connection.execute("SELECT id FROM saga ORDER BY seq")]
    found = [name for name in names if name is not None]
    if len(found) != len(names):
        raise LogCorrupted(
            f"the log at {connections.place.path} is damaged: the id of a saga cannot be read; restore it from a copy",
            where=connections.place.path,
        )
    return found


# --- what has not ended


def unfinished(connections: Connections, log_id: bytes) -> Unfinished:
    """The sagas without a final record, oldest first, each held against its records.

    Raises:
        LogCorrupted: The list itself is damaged.
    """
    ids: list[str] = []
    damage: list[Damage] = []
    with connections.reading() as connection:
        for seq, raw, fault in _open_rows(connection):
            name = name_of(raw)
            if name is not None:
                ids.append(name)
            if fault is not None or name is None:
                meant = _name_within(connection, seq, log_id)
                named = distinct(name, meant)
                ids += [one for one in named if one != name]
                reason = fault or "its id is no text"
                damage.append(Damage(where=f"row {seq} of saga", reason=reason, saga_ids=named or None))
    return Unfinished(saga_ids=tuple(ids), damage=tuple(damage))


def _open_rows(connection: sqlite3.Connection) -> list[tuple[int, object, str | None]]:
    """Row, id and fault of every saga that has not ended, oldest first."""
    try:
        return [(row[0], row[1], _open_fault(*row)) for row in connection.execute(_OPEN)]
    except sqlite3.DatabaseError as error:
        if not _malformed(error):
            raise
    # A page is broken. One after the other, to learn whose.
    found: list[tuple[int, object, str | None]] = []
    for (seq,) in connection.execute(_OPEN_SEQS).fetchall():
        try:
            row = connection.execute(f"{_CHECKED} WHERE s.seq = ?", (seq,)).fetchone()
            found.append((seq, row[1], _open_fault(*row)) if row else (seq, None, "its row is missing"))
        except sqlite3.DatabaseError as error:
            if not _malformed(error):
                raise
            found.append((seq, None, f"a page of the database is broken ({error})"))
    return found


def _open_fault(
    seq: int, _: object, next_n: object, ended: object, counted: int, most: object, seq_by_id: object
) -> str | None:
    """What is wrong with an unfinished saga, as far as the indexes show."""
    if ended is not None:
        return "its row says that it has ended, the index that it has not"
    if seq_by_id != seq:
        return "its id is not what was written"
    if not counted or most != counted or next_n != counted + 1:
        return f"{counted} records are there, up to number {most!r}, and {next_n!r} is the next"
    return None


def _name_within(connection: sqlite3.Connection, seq: object, log_id: bytes) -> str | None:
    """The saga that the records themselves name, where the first of them is intact."""
    try:
        row = connection.execute(_FIRST, (seq,)).fetchone()
    except sqlite3.DatabaseError:
        return None
    return name_in(row[0], log_id) if row is not None else None


# --- everything


def intact(
    connection: sqlite3.Connection, seq: int, saga_id: str, next_n: object, ended: object, log_id: bytes
) -> list[Record]:
    """The records of a saga of which the row is known. Erased ones are intact, and have no data.

    Raises:
        LogCorrupted: One is damaged.
    """
    stated = _stated(saga_id, next_n, ended)
    try:
        rows = connection.execute("SELECT n, body FROM record WHERE saga = ? ORDER BY n", (seq,))
        return history_of(saga_id, rows, log_id, stated, erased=True)
    except sqlite3.DatabaseError as error:
        if not _malformed(error):
            raise
        raise damaged(saga_id, f"a page of the database is broken ({error})") from error


class _Walk:
    def __init__(self, connections: Connections, log_id: bytes, progress: Callable[[int], None] | None) -> None:
        self._connections = connections
        self._log_id = log_id
        self._progress = progress
        self.records = 0
        self.damage: list[Damage] = []

    def blame(self, where: str, reason: str, saga_ids: tuple[str, ...] | None) -> None:
        self.damage.append(Damage(where=where, reason=reason, saga_ids=saga_ids))

    def sagas(self) -> None:
        """Every saga, some at a time, each with all its records as they are at one moment."""
        last: int | None = -(2**63)
        while last is not None:
            with self._connections.reading() as connection:
                try:
                    rows = connection.execute(
                        "SELECT seq, id, next, ended FROM saga WHERE seq > ? ORDER BY seq LIMIT ?", (last, _CHUNK)
                    ).fetchall()
                except sqlite3.DatabaseError as error:
                    if not _malformed(error):
                        raise
                    self.blame("the table saga", f"a page of the database is broken ({error})", None)
                    return
                for row in rows:
                    self._saga(connection, *row)
            last = rows[-1][0] if rows else None

    def _saga(self, connection: sqlite3.Connection, seq: int, raw: object, next_n: object, ended: object) -> None:
        saga_id = name_of(raw)
        if saga_id is None:
            meant = _name_within(connection, seq, self._log_id)
            self.blame(f"row {seq} of saga", "its id is no text", None if meant is None else (meant,))
            return
        before = self.records
        try:
            self.records += len(intact(connection, seq, saga_id, next_n, ended, self._log_id))
        except LogCorrupted as error:
            meant = _name_within(connection, seq, self._log_id)
            self.blame(f"saga {saga_id!r}", str(error), distinct(saga_id, meant))
            return
        if self._progress is not None and self.records // PROGRESS_EVERY > before // PROGRESS_EVERY:
            self._progress(self.records)

    def strays(self) -> None:
        """The records of which no saga is known: its row is gone."""
        with self._connections.reading() as connection:
            try:
                seqs = connection.execute(
                    "SELECT DISTINCT saga FROM record WHERE saga NOT IN (SELECT seq FROM saga)"
                ).fetchall()
                for (seq,) in seqs:
                    name = _name_within(connection, seq, self._log_id)
                    self.blame(
                        f"the records of saga row {seq!r}",
                        "the row is missing" if name is None else f"the row of saga {name!r} is missing",
                        None if name is None else (name,),
                    )
            except sqlite3.DatabaseError as error:
                if not _malformed(error):
                    raise
                self.blame("the table record", f"a page of the database is broken ({error})", None)

    def pages(self) -> None:
        """What SQLite itself finds wrong with pages and indexes."""
        for line in self._checked():
            if line != "ok":
                self.blame("the database", line, None)

    def _checked(self) -> Iterator[str]:
        with self._connections.reading() as connection:
            try:
                for (line,) in connection.execute("PRAGMA integrity_check(20)").fetchall():
                    yield line.decode("utf-8", "replace") if isinstance(line, bytes) else repr(line)
            except sqlite3.DatabaseError as error:
                if not _malformed(error):
                    raise
                yield str(error)


def verify(connections: Connections, log_id: bytes, progress: Callable[[int], None] | None) -> Verification:
    """See `Log.verify`."""
    walk = _Walk(connections, log_id, progress)
    walk.sagas()
    walk.strays()
    walk.pages()
    return verified(walk.records, walk.damage)
