"""The keys of a Redis log, its versions, and how a log is made, checked and migrated.

All keys begin with the prefix and a colon:

    log             hash     id, major, minor; seq, the number of the saga that began last
    sagas           zset     every saga of which there are records, by seq
    open            zset     those that have not ended, by seq
    ended           zset     those that have, by the time of their final record
    empty           zset     ids that were claimed and nothing begun under, by the server's time in milliseconds
    saga:ID         hash     seq, epoch, next, owner (a nonce, or nothing), ended; turn, drawn by the last claim
    records:ID      list     the lines of its records, in order
    writers         zset     nonces, by the end of their lease
    writer:NONCE    hash     until, in milliseconds of the server's clock; fenced; count, of its writes
    compact         string   the compaction that is running
    staged:TOKEN    list     a history that is being adopted and does not fit into one script; it goes within the hour
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from redis.exceptions import RedisError

from agent_saga_core.errors import LogCorrupted, LogUnavailable
from agent_saga_core.log.redis.address import address_of
from agent_saga_core.log.redis.connection import Connection, Server
from agent_saga_core.log.redis.fitness import weaknesses
from agent_saga_core.log.redis.scripts import INIT, RIGHTS
from agent_saga_core.log.sql import SCHEMA, Prepared, Version, check_version, missing

__all__ = ["check_rights", "init", "migrate", "open_log_id"]

_NEEDED: Final = (
    "EVAL x 0",
    "TIME",
    "HGET KEY f",
    "HMGET KEY f",
    "HSET KEY f v",
    "HINCRBY KEY f 1",
    "LLEN KEY",
    "LINDEX KEY 0",
    "LRANGE KEY 0 1",
    "RPUSH KEY v",
    "ZADD KEY 1 v",
    "ZREM KEY v",
    "ZCARD KEY",
    "ZRANGEBYSCORE KEY 0 1",
    "DEL KEY",
    "RENAME KEY KEY",
    "PEXPIRE KEY 1",
    "PERSIST KEY",
)


class _Meta(NamedTuple):
    log_id: bytes
    version: Version


def _meta(connection: Connection, server: Server) -> _Meta | None:
    """What is there; None if nobody has made a log."""
    url = server.address.url
    log_id, major, minor = connection.call("HMGET", server.address.key("log"), "id", "major", "minor")
    if (log_id, major, minor) == (None, None, None):
        return None
    if not (re.fullmatch(rb"[0-9a-f]{32}", log_id or b"") and (major or b"").isdigit() and (minor or b"").isdigit()):
        raise LogCorrupted(f"the log {url} is damaged: it does not say what log it is", where=url)
    return _Meta(log_id, Version(int(major), int(minor)))


def open_log_id(server: Server) -> bytes:
    """Which log is there.

    Raises:
        LogUnavailable: There is none, or it is of another version, or the server cannot be reached or is not fit.
        LogCorrupted: It is damaged.
    """
    found = server.run(lambda connection: _meta(connection, server), patient=False)
    if found is None:
        raise missing(server.address.url)
    check_version(found.version, server.address.url, known=SCHEMA)
    return found.log_id


def check_rights(server: Server) -> None:
    """Refuse a user that may not write, before anything depends on it.

    A script whose user may give some of its commands and not all would stay half done.

    Raises:
        LogUnavailable: It lacks a right.
    """
    key = server.address.key("saga", "x")
    lacking: list[Any] = server.run(lambda connection: connection.run(RIGHTS, [key], _NEEDED))
    if lacking:
        names = ", ".join(sorted({name.decode() for name in lacking}))
        raise LogUnavailable(
            f"the log {server.address.url} may not be written by this user; grant it on keys "
            f"{server.address.prefix}:*: {names}"
        )


# --- making and migrating


def init(url: str) -> Prepared:
    """Make a log, or find it made.

    Raises:
        ValueError: It is no address.
        LogUnavailable: It cannot be made, or is of another version.
        LogCorrupted: What is there is damaged.
    """

    def make(connection: Connection, server: Server) -> Prepared:
        made = False
        found = _meta(connection, server)
        if found is None:
            arguments = (os.urandom(16).hex(), SCHEMA.major, SCHEMA.minor)
            made = connection.run(INIT, [server.address.key("log")], arguments) == 1
            found = _meta(connection, server)
        return _prepared(server, found, made=made)

    return _opened(url, make)


def migrate(url: str) -> Prepared:
    """Bring an existing log to the schema of this program. There has been one version only.

    Raises:
        ValueError: It is no address.
        LogUnavailable: There is no log, or it is of a newer major version, or cannot be written.
        LogCorrupted: It is damaged.
    """
    return _opened(url, lambda connection, server: _prepared(server, _meta(connection, server), made=False))


def _prepared(server: Server, found: _Meta | None, *, made: bool) -> Prepared:
    if found is None:
        raise missing(server.address.url)
    url = server.address.url
    check_version(found.version, url, known=SCHEMA)
    weak = [] if server.facts is None else weaknesses(server.facts)
    warnings = tuple(f"this server acknowledges what is not durable: {one}" for one in weak)
    return Prepared(url=url, version=str(found.version), made=made, warnings=warnings)


def _opened(url: str, then: Callable[[Connection, Server], Prepared]) -> Prepared:
    server = Server(address_of(url))
    try:
        return server.run(lambda connection: then(connection, server), patient=False)
    except RedisError as error:
        raise server.translated(error) from None
    finally:
        server.close()
