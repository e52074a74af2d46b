"""The streams of a NATS log, its versions, and how a log is made, checked and migrated."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec

from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log.nats.address import address_of
from agent_saga_core.log.nats.connection import Conflict, NoStream, Refused, Server
from agent_saga_core.log.nats.fitness import check_streams, look
from agent_saga_core.log.nats.writing import new_token
from agent_saga_core.log.sql import SCHEMA, Prepared, Version, check_version, missing

__all__ = ["init", "migrate", "open_log_id"]

_OPENING: Final = 8.0
"""Seconds for which opening waits for a cluster that elects a leader: that took 5."""
_DEDUPLICATED: Final = 120 * 10**9
_TAKEN: Final = frozenset({10058, 10065})  # such a stream is there, with another configuration or other subjects
_logger: Final = logging.getLogger("agent_saga")
_warned: set[tuple[str, str]] = set()


class _Meta(msgspec.Struct, frozen=True):
    log: str
    major: int
    minor: int


_decode = msgspec.json.Decoder(_Meta)


class _There(NamedTuple):
    log_id: bytes
    version: Version
    warnings: tuple[str, ...]


def _subject(server: Server) -> str:
    return f"{server.address.name}.i.m"


def _streams(server: Server) -> list[dict[str, Any]]:
    name = server.address.name
    both = {
        "retention": "limits",
        "storage": "file",
        "num_replicas": server.address.replicas,
        "max_age": 0,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_msg_size": -1,
        "discard": "old",
        "allow_direct": True,
        "duplicate_window": _DEDUPLICATED,
    }
    return [
        {**both, "name": server.stream, "subjects": [f"{name}.w.*", f"{name}.a.*"], "max_msgs_per_subject": -1},
        {
            **both,
            "name": server.index,
            "subjects": [f"{name}.i.>"],
            "max_msgs_per_subject": 1,
            "allow_atomic": True,
        },
    ]


async def _there(server: Server) -> _There | None:
    """What is there; None if nobody has made a log."""
    try:
        log = (await server.insist(lambda: server.api(f"STREAM.INFO.{server.stream}")))["config"]
        index = (await server.insist(lambda: server.api(f"STREAM.INFO.{server.index}")))["config"]
    except NoStream:
        return None
    found = await server.insist(lambda: server.last(server.index, _subject(server)))
    if found is None:
        return None
    url = server.address.url
    try:
        meta = _decode.decode(found.data)
    except (msgspec.MsgspecError, ValueError):
        meta = _Meta("", 0, 0)
    if re.fullmatch("[0-9a-f]{32}", meta.log) is None:
        raise LogCorrupted(f"the log {url} is damaged: it does not say what log it is", where=url)
    version = Version(meta.major, meta.minor)
    check_version(version, url, known=SCHEMA)
    return _There(meta.log.encode(), version, await look(server, check_streams(log, index)))


def open_log_id(server: Server) -> bytes:
    """The id of the log at an address, if this program may use it.

    Raises:
        LogUnavailable: There is none, or it is of another version, or the servers cannot be reached or are not fit.
        LogCorrupted: It is damaged.
    """
    found = server.run(lambda: _at_once(server, lambda: _there(server)))
    url = server.address.url
    if found is None:
        raise missing(url)
    for warning in found.warnings:
        if (url, warning) not in _warned:
            _warned.add((url, warning))
            _logger.warning("the log %s: %s", url, warning)
    return found.log_id


async def _at_once(server: Server, work: Callable[[], Awaitable[Any]]) -> Any:
    """Do something, if the servers are there; a cluster that elects a leader is waited for, and a dead one is not."""
    await server.greet()
    return await server.patient(min(server.timeout, _OPENING), work)


def init(url: str) -> Prepared:
    """Make a log, or find it made.

    Raises:
        ValueError: It is no address.
        LogUnavailable: It cannot be made, or is of another version.
        LogCorrupted: What is there is damaged.
    """

    async def make(server: Server) -> Prepared:
        found = await _there(server)
        made = found is None
        if found is None:
            for config in _streams(server):
                await _create(server, config)
            meta = msgspec.json.encode(_Meta(os.urandom(16).hex(), *SCHEMA))
            try:
                await server.write(_subject(server), meta, expected=0, token=new_token())
            except Conflict:
                made = False
            found = await _there(server)
        if found is None:
            raise LogCorrupted(f"the log {url} vanished while it was made", where=url)
        return Prepared(url=server.address.url, version=str(found.version), made=made, warnings=found.warnings)

    return _opened(url, make)


async def _create(server: Server, config: dict[str, Any]) -> None:
    try:
        await server.insist(lambda: server.api(f"STREAM.CREATE.{config['name']}", config))
    except Refused as error:
        if error.code not in _TAKEN:
            raise
        try:
            there = (await server.insist(lambda: server.api(f"STREAM.INFO.{config['name']}")))["config"]
        except NoStream:
            raise Refused(f"its subjects are those of another stream ({error})", error.code) from None
        if there.get("subjects") != config["subjects"]:
            raise Refused(f"a stream {config['name']} is there already, and is something else") from None


def migrate(url: str) -> Prepared:
    """Bring an existing log to the schema of this program. There has been one so far.

    Raises:
        ValueError: It is no address.
        LogUnavailable: There is no log, or it is of a newer major version.
        LogCorrupted: It is damaged.
    """

    async def bring(server: Server) -> Prepared:
        found = await _there(server)
        if found is None:
            raise missing(server.address.url)
        return Prepared(url=server.address.url, version=str(found.version), made=False, warnings=found.warnings)

    return _opened(url, bring)


def _opened(url: str, then: Callable[[Server], Awaitable[Prepared]]) -> Prepared:
    server = Server(address_of(url))
    try:
        return server.run(lambda: _at_once(server, lambda: then(server)))
    finally:
        server.close()
