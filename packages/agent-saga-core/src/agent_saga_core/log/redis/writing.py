"""How a batch of records gets to the server: as one script, with one compare-and-set per saga."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agent_saga_core.errors import Fenced, LogCorrupted
from agent_saga_core.log.lease import Writer
from agent_saga_core.log.leased import Holding
from agent_saga_core.log.redis.connection import Connection, Server
from agent_saga_core.log.redis.lease import bereaved
from agent_saga_core.log.redis.reading import row_of
from agent_saga_core.log.redis.scripts import APPEND, LOSE
from agent_saga_core.log.sql import Refusals, Rows, damaged, lost, stored

__all__ = ["MOST_BYTES", "MOST_RECORDS", "acknowledged", "lose", "put", "shared_keys"]

# What one script holds up the server for: a millisecond or two.
MOST_RECORDS: Final = 500
MOST_BYTES: Final = 4 * 2**20


_Asked = dict[str, tuple[Rows, Holding]]


def shared_keys(server: Server, writer: Writer) -> list[bytes]:
    """The keys that every script which writes begins with."""
    key = server.address.key
    return [*map(key, ("log", "sagas", "open", "ended", "empty")), key("writer", writer.nonce.hex)]


def acknowledged(server: Server, writer: Writer, answer: list[Any]) -> bool:
    """Whether a script that writes found its writer to be what it knows itself to be; False if it is fenced.

    Raises:
        LogCorrupted: The server lacks what it acknowledged, or the log is gone.
    """
    if answer[0] == b"another":
        raise server.gone()
    if answer[0] in (b"missing", b"behind"):
        raise bereaved(server, f"its writer is {answer[0].decode()}")
    return answer[0] != b"fenced"


def put(connection: Connection, server: Server, asked: Mapping[str, tuple[Rows, Holding]], refusals: Refusals) -> None:
    """Store what was asked for of a batch. What is refused has its `error` set, and the rest is durable.

    Put again, because nobody knows whether it was stored, it changes nothing.

    Raises:
        redis.RedisError: It cannot be stored.
        LogCorrupted: The server lacks what it acknowledged to this process.
    """
    writers: dict[Writer, _Asked] = {}
    for saga_id, (lines, holding) in asked.items():
        writers.setdefault(holding.writer, {})[saga_id] = lines, holding
    for writer, sagas in writers.items():
        done = _put_all(connection, server, writer, sagas)
        for saga_id, (lines, holding) in sagas.items():
            if saga_id in done:
                holding.fresh, holding.kept = False, lines.entries[-1].n
            else:
                _put_late(connection, server, lines, holding, refusals)


def _put_all(connection: Connection, server: Server, writer: Writer, sagas: _Asked) -> set[str]:
    """Put what follows; the sagas of which it did."""
    saga_key, records_key = server.address.key("saga", ""), server.address.key("records", "")
    keys = shared_keys(server, writer)
    arguments: list[Any] = [server.log_id or b"", writer.acknowledged, writer.nonce.hex]
    for saga_id, (lines, holding) in sagas.items():
        name = saga_id.encode()
        keys += [saga_key + name, records_key + name]
        first, last = lines.entries[0].n, lines.entries[-1].n
        arguments += [name, int(holding.fresh), holding.epoch, first, last + 1, lines.ended, len(lines.bodies)]
        arguments += lines.bodies
    answer = connection.run(APPEND, keys, arguments)
    server.check(connection)  # else the next server would be held to what this one stored, and nobody was told of
    if not acknowledged(server, writer, answer):
        return set()
    writer.acknowledged = max(writer.acknowledged, int(answer[1]))
    return {saga_id for saga_id, letter in zip(sagas, answer[2].decode(), strict=True) if letter == "y"}


def _put_late(connection: Connection, server: Server, lines: Rows, holding: Holding, refusals: Refusals) -> None:
    """What did not follow: it is stored already, because its acknowledgement was lost, or it is refused."""
    try:
        _settle(connection, server, lines, holding)
    except (Fenced, LogCorrupted) as error:
        if isinstance(error, LogCorrupted) and error.saga_id is None:
            raise  # it is about more than this saga
        refusals.refuse(lines.entries, error)


def _settle(connection: Connection, server: Server, lines: Rows, holding: Holding) -> None:
    first, last = lines.entries[0], lines.entries[-1]
    row = row_of(connection, server, first.saga)
    next_n = 1 if row is None else row.next
    if next_n < first.n:
        lose(connection, server, first.saga, holding, first.n)
        raise lost(first.saga, first.n - 1, next_n)
    if row is not None and row.length != row.next - 1:
        raise damaged(first.saga, f"{row.length} records are there, and {row.next - 1} were written")
    ours = row is not None and row.owner == holding.writer.nonce.hex and row.epoch == holding.epoch
    found: dict[int, object] = {}
    if row is not None and next_n > first.n:
        records = server.address.key("records", first.saga)
        there: list[bytes] = connection.call("LRANGE", records, first.n - 1, last.n - 1)
        found = dict(enumerate(there, first.n))
    done = stored(lines.entries, lines.bodies, found, next_n)
    if done == len(lines.entries) and row is not None and (ours or (last.final and row.ended is not None)):
        holding.fresh, holding.kept = False, last.n
        return
    why = "another owns it now" if row is not None and row.owner else "the lease of this process was taken"
    raise Fenced(f"this process lost saga {first.saga!r}: its record {first.n} was refused, because {why}")


def lose(connection: Connection, server: Server, saga_id: str, holding: Holding, next_n: int) -> None:
    """Leave word that the saga had records up to `next_n`, so that nobody takes what is left of it for all of it."""
    key = server.address.key
    keys = [*map(key, ("log", "sagas", "open", "empty")), key("saga", saga_id)]
    name = saga_id.encode()
    connection.run(LOSE, keys, [server.log_id or b"", holding.writer.nonce.hex, name, holding.epoch, next_n])
