"""The tables of a PostgreSQL log, their versions, and how a log is made, checked and migrated."""

from __future__ import annotations

import os
import re
from typing import Any, Final, NamedTuple

import psycopg

from agent_saga_core.errors import LogCorrupted, LogUnavailable
from agent_saga_core.log.postgres.address import Address, address_of
from agent_saga_core.log.postgres.connection import Connection, Server, unhurried
from agent_saga_core.log.sql import SCHEMA, Prepared, Version, check_version, missing

__all__ = ["MIGRATIONS", "init", "migrate", "open_meta"]

# One entry per version, each applied in one transaction. A released one never changes.
MIGRATIONS: tuple[tuple[Version, tuple[str, ...]], ...] = (
    (
        Version(1, 0),
        (
            "CREATE TABLE {s}.meta(name text PRIMARY KEY, value text NOT NULL)",
            "CREATE TABLE {s}.migration(major int NOT NULL, minor int NOT NULL,"
            " applied timestamptz NOT NULL DEFAULT now(), PRIMARY KEY(major, minor))",
            # A process that owns sagas. Where it is missing or fenced, they are free; else when its lease has run out.
            "CREATE TABLE {s}.writer(id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, nonce uuid NOT NULL UNIQUE,"
            " lease_until timestamptz NOT NULL, fenced boolean NOT NULL DEFAULT false)",
            # `next` is the number that the saga's next record must have, `epoch` that of its last CLAIM, `owner` the
            # nonce of its writer, `turn` what its last claim has drawn, `ended` the time of its final record. Nearly
            # every update touches no index and finds room in its page.
            'CREATE TABLE {s}.saga(seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text COLLATE "C" NOT NULL'
            " UNIQUE, epoch bigint NOT NULL, next bigint NOT NULL, owner uuid, turn bigint NOT NULL DEFAULT 0,"
            " ended double precision) WITH (fillfactor=50)",
            "CREATE INDEX saga_open ON {s}.saga(owner) WHERE ended IS NULL",
            "CREATE TABLE {s}.record(saga bigint NOT NULL, n bigint NOT NULL, epoch bigint NOT NULL, body bytea NOT"
            " NULL, PRIMARY KEY(saga, n))",
            # A line holds digests and salts, which no compression makes shorter.
            "ALTER TABLE {s}.record ALTER COLUMN body SET STORAGE EXTERNAL",
        ),
    ),
)

# From the tables of the catalog: what functions say of names may be older than what another session has just made.
_THERE: Final = (
    "SELECT EXISTS (SELECT FROM pg_class WHERE relnamespace = n.oid AND relname = 'meta'),"
    " EXISTS (SELECT FROM pg_class WHERE relnamespace = n.oid AND relname = 'migration'),"
    " n.oid IS NOT NULL, has_schema_privilege(n.oid, 'USAGE'),"
    " current_setting('server_encoding'), current_setting('synchronous_commit'), current_setting('fsync')"
    " FROM (VALUES ('{s}')) AS named(name) LEFT JOIN pg_namespace n ON n.nspname = named.name"
)
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtextextended('agent-saga log {s}', 0))"
_RIGHTS: Final = (
    "SELECT t || ' (' || p || ')' FROM (VALUES ('writer', 'SELECT'), ('writer', 'INSERT'), ('writer', 'UPDATE'),"
    " ('writer', 'DELETE'), ('saga', 'SELECT'), ('saga', 'INSERT'), ('saga', 'UPDATE'), ('saga', 'DELETE'),"
    " ('record', 'SELECT'), ('record', 'INSERT')) AS needed(t, p)"
    " WHERE NOT has_table_privilege('{s}.' || t, p)"
)


class Meta(NamedTuple):
    """What a log says of itself, and what its server is."""

    log_id: bytes
    version: Version


class _Found(NamedTuple):
    meta: bool
    migration: bool
    schema: bool
    usage: bool | None
    encoding: str
    synchronous: str
    fsync: str


def _found(connection: Connection, address: Address) -> _Found:
    row: Any = connection.execute(_sql(_THERE, address)).fetchone()
    return _Found(*row)


def _sql(statement: str, address: Address) -> Any:
    return statement.format(s=address.schema)


def _fit(found: _Found, address: Address) -> tuple[str, ...]:
    """What is to be known about this server.

    Raises:
        LogUnavailable: It does not keep what it acknowledges, or cannot hold every id.
    """
    if found.encoding != "UTF8":
        raise LogUnavailable(
            f"the log {address.url} would be in a database of encoding {found.encoding}, which cannot hold every saga "
            "id; use one of encoding UTF8"
        )
    weak = [
        f"{name} = {value}"
        for name, value, good in (
            ("synchronous_commit", found.synchronous, found.synchronous != "off"),
            ("fsync", found.fsync, found.fsync == "on"),
        )
        if not good
    ]
    if weak and not address.force:
        raise LogUnavailable(
            f"the server of {address.url} acknowledges what is not durable ({', '.join(weak)}); turn it on for this "
            "role, or add force=1 to the address where losing the log does not matter"
        )
    return tuple(f"this server acknowledges what is not durable: {one}" for one in weak)


def _meta(connection: Connection, address: Address) -> tuple[Meta | None, tuple[str, ...]]:
    """What is there; None if nobody has made a log. With what is to be known about the server."""
    found = _found(connection, address)
    warnings = _fit(found, address)
    if found.schema and not found.usage:
        raise LogUnavailable(
            f"the log {address.url} may not be used by this role; grant it USAGE on schema {address.schema} and the "
            "rights on its tables"
        )
    if not found.meta:
        return None, warnings
    damage = LogCorrupted(f"the log {address.url} is damaged: it does not say what log it is", where=address.url)
    if not found.migration:
        raise damage
    versions = connection.execute(_sql("SELECT major, minor FROM {s}.migration", address)).fetchall()
    row = connection.execute(_sql("SELECT value FROM {s}.meta WHERE name = 'log'", address)).fetchone()
    log_id = "" if row is None else str(row[0])
    if not versions or re.fullmatch(r"[0-9a-f]{32}", log_id) is None:
        raise damage
    return Meta(log_id.encode(), max(Version(*version) for version in versions)), warnings


def open_meta(server: Server) -> Meta:
    """What the log says of itself.

    Raises:
        LogUnavailable: There is none, or it is of another version, or the server cannot be reached or is not fit.
        LogCorrupted: It is damaged.
    """
    address = server.address
    found, _ = server.run(lambda connection: _meta(connection, address), patient=False)
    if found is None:
        raise missing(address.url)
    check_version(found.version, address.url, known=SCHEMA)
    return found


def check_rights(server: Server) -> None:
    """Refuse a role that may not write, before anything depends on it.

    Raises:
        LogUnavailable: It lacks a right.
    """
    rows = server.run(lambda connection: connection.execute(_sql(_RIGHTS, server.address)).fetchall())
    if rows:
        lacking = ", ".join(name for (name,) in rows)
        raise LogUnavailable(
            f"the log {server.address.url} may not be written by this role; grant it on tables of schema "
            f"{server.address.schema}: {lacking}"
        )


# --- making and migrating


def init(url: str) -> Prepared:
    """Make a log, or find it made.

    Raises:
        ValueError: It is no address.
        LogUnavailable: It cannot be made, or is of another version.
        LogCorrupted: What is there is damaged.
    """

    def make(connection: Connection, address: Address) -> Prepared:
        found, warnings = _meta(connection, address)
        made = False
        if found is None:
            with connection.transaction():
                connection.execute(_sql(_LOCK, address))
                if not _found(connection, address).meta:
                    _create(connection, address)
                    made = True
            found, warnings = _meta(connection, address)
        if found is None:
            raise LogCorrupted(f"the log {address.url} vanished while it was made", where=address.url)
        check_version(found.version, address.url, known=SCHEMA)
        return Prepared(url=address.url, version=str(found.version), made=made, warnings=warnings)

    return _opened(url, make)


def _create(connection: Connection, address: Address) -> None:
    if not _found(connection, address).schema:
        connection.execute(_sql("CREATE SCHEMA {s}", address))
    _apply(connection, address, Version(0, 0))
    connection.execute(_sql("INSERT INTO {s}.meta VALUES('log', %s)", address), (os.urandom(16).hex(),))


def migrate(url: str) -> Prepared:
    """Bring an existing log to the schema of this program; each version is applied as a whole or not at all.

    Raises:
        ValueError: It is no address.
        LogUnavailable: There is no log, or it is of a newer major version, or cannot be written.
        LogCorrupted: It is damaged.
    """

    def bring(connection: Connection, address: Address) -> Prepared:
        applied: tuple[str, ...] = ()
        with connection.transaction():
            connection.execute(_sql(_LOCK, address))
            found, warnings = _meta(connection, address)
            if found is None:
                raise missing(address.url)
            if found.version < SCHEMA:
                applied = _apply(connection, address, found.version)
        now, _ = _meta(connection, address)
        version = SCHEMA if now is None else now.version
        check_version(version, address.url, known=SCHEMA)
        return Prepared(url=address.url, version=str(version), made=False, applied=applied, warnings=warnings)

    return _opened(url, bring)


def _apply(connection: Connection, address: Address, version: Version) -> tuple[str, ...]:
    applied: list[str] = []
    for to, statements in MIGRATIONS:
        if to > version:
            for statement in statements:
                connection.execute(_sql(statement, address))
            connection.execute(_sql("INSERT INTO {s}.migration VALUES(%s, %s)", address), (*to,))
            applied.append(str(to))
    return tuple(applied)


def _opened(url: str, then: Any) -> Prepared:
    server = Server(address_of(url))
    try:
        return server.run(unhurried(lambda connection: then(connection, server.address)), patient=False)
    except psycopg.Error as error:
        raise server.translated(error) from None
    finally:
        server.close()
