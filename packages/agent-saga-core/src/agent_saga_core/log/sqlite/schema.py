"""The tables of a SQLite log, their versions, and how a log is made, checked and migrated."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from agent_saga_core.errors import LogCorrupted, LogUnavailable
from agent_saga_core.log.locks import LOCK_FILES, best_scheme
from agent_saga_core.log.sql import SCHEMA, Prepared, Version, check_version
from agent_saga_core.log.sqlite.connection import Connections, translated
from agent_saga_core.log.sqlite.place import Place

__all__ = ["AFFECTED", "MIGRATIONS", "Meta", "init", "meta_of", "migrate", "open_meta", "warnings_about"]

APPLICATION_ID: Final = 0x53414741
"""`SAGA`: what says that a database is a log."""

AFFECTED: Final = ((3, 7, 0), (3, 51, 2))
"""The first and the last SQLite with the WAL-reset bug: two connections that write and checkpoint at the same moment
may damage the database."""

# One entry per version, each applied in one transaction. A released one never changes.
MIGRATIONS: tuple[tuple[Version, tuple[str, ...]], ...] = (
    (
        Version(1, 0),
        (
            "CREATE TABLE meta(name TEXT PRIMARY KEY, value TEXT NOT NULL)",
            "CREATE TABLE migration(major INTEGER NOT NULL, minor INTEGER NOT NULL, applied REAL NOT NULL,"
            " UNIQUE(major, minor))",
            # `next` is the number that the saga's next record must have; `ended` the time of its final record.
            "CREATE TABLE saga(seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, next INTEGER NOT NULL, ended REAL)",
            # What has not ended is found without a look at what has.
            "CREATE INDEX saga_open ON saga(seq) WHERE ended IS NULL",
            # `saga` is the `seq` of its saga, so that what is written at one time stands in one place. `body` is its
            # line.
            "CREATE TABLE record(seq INTEGER PRIMARY KEY, saga INTEGER NOT NULL, n INTEGER NOT NULL,"
            " body BLOB NOT NULL, UNIQUE(saga, n))",
        ),
    ),
)


class Meta(NamedTuple):
    """What a log says of itself. It is written when the log is made, and never changes."""

    log_id: bytes
    locks: int
    lock: str


def warnings_about(version: tuple[int, ...] | None = None) -> tuple[str, ...]:
    """What is to be known about the SQLite of this program, or of another version."""
    found = sqlite3.sqlite_version_info if version is None else version
    if AFFECTED[0] <= found <= AFFECTED[1]:
        return (
            f"this is SQLite {'.'.join(map(str, found))}, which has the WAL-reset bug (3.7.0 to 3.51.2): agent-saga "
            "keeps clear of it, other programs that write to this database do not; let none, or use 3.51.3 or later",
        )
    return ()


# --- the log as it is found


def meta_of(connections: Connections) -> tuple[Meta, Version] | None:
    """What the database says of itself; None if nobody has made a log of it yet.

    Raises:
        LogUnavailable: It is something else, or cannot be read.
        LogCorrupted: It is a log, and damaged.
    """
    place = connections.place
    with connections.reading() as connection:
        objects = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        if application != APPLICATION_ID:
            if objects or application:
                raise LogUnavailable(f"{place.path} is a database of something else; name a file of its own")
            return None
        versions = _versions(connection, objects, place)
        meta = dict(connection.execute("SELECT name, value FROM meta"))
    fault = LogCorrupted(f"{place.path} is damaged: it does not say what log it is; restore it", where=place.path)
    if not versions:
        raise fault
    version = max(versions)
    if version > SCHEMA:
        check_version(version, place.url)
    try:
        found = Meta(meta[b"log"], int(meta[b"locks"]), meta[b"lock"].decode())
    except (KeyError, ValueError, TypeError, AttributeError):
        raise fault from None
    if len(found.log_id) != 32 or not 0 < found.locks <= 99 or found.lock not in ("ofd", "flock"):
        raise fault
    if found.lock == "ofd" != best_scheme():
        raise LogUnavailable(f"the log at {place.path} needs open-file-description locks, which this system lacks")
    return found, version


_Object = tuple[object, object, object]


def _versions(connection: sqlite3.Connection, objects: list[_Object], place: Place) -> list[Version]:
    """The versions that were applied; what is in the schema must be what they made.

    Anything else could run, or stand in for a table of ours, when we write.
    """
    tables = {name for kind, name, _ in objects if kind == b"table"}
    if not {b"meta", b"migration"} <= tables:
        raise _schema_damaged(place)
    versions = [
        Version(major, minor)
        for major, minor in connection.execute("SELECT major, minor FROM migration")
        if isinstance(major, int) and isinstance(minor, int)
    ]
    version = max(versions, default=Version(0, 0))
    # What a newer version has added is not known here; it is a table or an index, or not ours.
    strangers = [
        (kind, name, sql)
        for kind, name, sql in objects
        if kind not in (b"table", b"index") or (isinstance(sql, bytes) and b"VIRTUAL" in sql[:32].upper())
    ]
    if version.major == SCHEMA.major and version <= SCHEMA:
        made = _made_by(version)
        there = {one for one in objects if not (isinstance(one[1], bytes) and one[1].startswith(b"sqlite_"))}
        if not made <= there and not strangers:
            raise _schema_damaged(place)
        strangers += there - made
    if strangers:
        name = strangers[0][1]
        shown = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
        raise LogCorrupted(
            f"{place.path} holds something that agent-saga did not put there ({shown!r}); remove it, or restore the "
            "log from a copy",
            where=place.path,
        )
    return versions


def _schema_damaged(place: Place) -> LogCorrupted:
    return LogCorrupted(
        f"{place.path} is damaged: its tables are not what was made; restore it from a copy", where=place.path
    )


def _made_by(version: Version) -> set[_Object]:
    """What the schema of that version looks like."""
    fresh = sqlite3.connect(":memory:", isolation_level=None)
    try:
        fresh.text_factory = bytes
        _apply(fresh, Version(0, 0), up_to=version)
        found = fresh.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        return {one for one in found if not one[1].startswith(b"sqlite_")}
    finally:
        fresh.close()


def open_meta(connections: Connections, *, create: bool) -> tuple[Meta, Version]:
    """What the log at that place says of itself; it is made if there is none and that is wanted.

    Raises:
        LogUnavailable: There is no log and none may or can be made, or it is of another version.
        LogCorrupted: What is there is no log any more.
    """
    place = connections.place
    found = None if place.is_empty() else meta_of(connections)
    if found is None:
        if not create:
            there = "is no log yet" if os.path.exists(place.path) else "there is no log"
            raise LogUnavailable(f"{place.path}: {there}; check the path, or make one: agent-saga log init {place.url}")
        _make(connections)
        found = meta_of(connections)
    if found is None:
        raise LogCorrupted(f"{place.path} vanished while the log was made", where=place.path)
    check_version(found[1], place.url)
    if not os.path.isdir(place.locks):
        raise LogCorrupted(
            f"{place.locks} is missing, which holds the locks of the log: restore it; or, if no process uses this log, "
            f"make it anew: agent-saga log init {place.url}",
            where=place.locks,
        )
    return found


# --- making and migrating


def _make(connections: Connections) -> bool:
    """Make a log, unless another process does; whether this one did."""
    place = connections.place
    with translated(place.path):
        place.make(best_scheme())
        with connections.writing() as connection:
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                return False
            _apply(connection, Version(0, 0))
            meta = {"log": os.urandom(16).hex(), "locks": str(LOCK_FILES), "lock": best_scheme()}
            connection.executemany("INSERT INTO meta VALUES(?, ?)", meta.items())
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connections.settle()
        return True


def _apply(connection: sqlite3.Connection, version: Version, *, up_to: Version | None = None) -> tuple[str, ...]:
    applied: list[str] = []
    for to, statements in MIGRATIONS:
        if to > version and (up_to is None or to <= up_to):
            for statement in statements:
                connection.execute(statement)
            connection.execute("INSERT INTO migration VALUES(?, ?, ?)", (*to, time.time()))
            applied.append(str(to))
    return tuple(applied)


def _opened(path: str, *, force: bool, then: Callable[[Connections], Prepared]) -> Prepared:
    connections = Connections(Place(path, force=force))
    try:
        return then(connections)
    finally:
        connections.close()


def init(path: str, *, force: bool = False) -> Prepared:
    """Make a log, or the directory of its locks if only that is missing; harmless where all is there.

    Raises:
        LogUnavailable: It cannot be made, or what is there is something else or of another version.
        LogCorrupted: What is there is damaged.
    """

    def then(connections: Connections) -> Prepared:
        place = connections.place
        found = None if place.is_empty() else meta_of(connections)
        made = found is None and _make(connections)
        if found is not None and not os.path.isdir(place.locks):
            with translated(place.path):
                place.make(found[0].lock)
        _, version = open_meta(connections, create=False)
        return Prepared(url=place.url, version=str(version), made=made, warnings=warnings_about())

    return _opened(path, force=force, then=then)


def migrate(path: str, *, force: bool = False) -> Prepared:
    """Bring an existing log to the schema of this program; each version is applied as a whole or not at all.

    Raises:
        LogUnavailable: There is no log, or it is of a newer major version, or cannot be written.
        LogCorrupted: It is damaged.
    """

    def then(connections: Connections) -> Prepared:
        place = connections.place
        found = None if place.is_empty() else meta_of(connections)
        if found is None:
            raise LogUnavailable(f"there is no log at {place.path}; make one: agent-saga log init {place.url}")
        applied: tuple[str, ...] = ()
        if found[1] < SCHEMA:
            with connections.writing() as connection:
                major, minor = connection.execute(
                    "SELECT major, minor FROM migration ORDER BY major DESC, minor DESC LIMIT 1"
                ).fetchone()
                applied = _apply(connection, Version(major, minor))
        now = meta_of(connections)
        version = SCHEMA if now is None else now[1]
        return Prepared(url=place.url, version=str(version), made=False, applied=applied, warnings=warnings_about())

    return _opened(path, force=force, then=then)
