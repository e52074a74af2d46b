"""How whole histories get to the server: each in one step, also where it is too long for one script."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from agent_saga_core.errors import LogCorrupted, SagaBusy, SagaError
from agent_saga_core.log.lines import AnotherHistory, Lines, Whole, is_there
from agent_saga_core.log.redis.connection import Connection, Server
from agent_saga_core.log.redis.scripts import ADOPT, STAGE
from agent_saga_core.log.redis.writing import MOST_BYTES, MOST_RECORDS
from agent_saga_core.log.sql import body_of, damaged

__all__ = ["put_whole"]

_STAGED: Final = 3_600_000
"""Milliseconds after which what was put aside and not used goes."""


class _Parcel:
    """Histories that go into one script."""

    def __init__(self) -> None:
        self.wholes: list[Whole] = []
        self.bodies: list[list[bytes]] = []
        self.records = self.bytes = 0

    def fits(self, bodies: Sequence[bytes]) -> bool:
        """Whether those records go in as well."""
        return self.records + len(bodies) <= MOST_RECORDS and self.bytes + sum(map(len, bodies)) <= MOST_BYTES

    def add(self, whole: Whole, bodies: list[bytes]) -> None:
        """Put a history in."""
        self.wholes.append(whole)
        self.bodies.append(bodies)
        self.records += len(bodies)
        self.bytes += sum(map(len, bodies))


def put_whole(server: Server, wholes: Sequence[Whole], look: Callable[[str], Lines]) -> dict[str, SagaError]:
    """Store histories of sagas that are not there; those that somebody has begun meanwhile are refused.

    Raises:
        LogCorrupted: The log is gone.
        LogUnavailable: They cannot be stored.
    """
    refused: dict[str, SagaError] = {}
    parcel = _Parcel()
    for whole in wholes:
        bodies = [body_of(line, server.log_id or b"") for line in whole.lines]
        if not parcel.fits(bodies):
            refused |= _send(server, parcel, look)
            parcel = _Parcel()
        if parcel.fits(bodies):
            parcel.add(whole, bodies)
        else:
            refused |= _send_staged(server, whole, bodies, look)
    return refused | _send(server, parcel, look)


def _send_staged(
    server: Server, whole: Whole, bodies: Sequence[bytes], look: Callable[[str], Lines]
) -> dict[str, SagaError]:
    staged = server.address.key("staged", uuid.uuid4().hex)
    parcel = _Parcel()
    parcel.add(whole, [])
    try:
        for at, piece in _pieces(bodies):
            length = server.run(
                lambda connection, at=at, piece=piece: connection.run(STAGE, [staged], [_STAGED, at, *piece])
            )
            if length != at + len(piece):
                return {whole.saga_id: _vanished(whole.saga_id)}
        return _send(server, parcel, look, staged=staged)
    finally:
        with suppress(SagaError):  # it goes by itself
            server.run(lambda connection: connection.call("UNLINK", staged), patient=False)


def _vanished(saga_id: str) -> SagaError:
    return SagaBusy(f"the history of saga {saga_id!r} vanished while it was put there; try again", saga_id=saga_id)


def _pieces(bodies: Sequence[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    piece: list[bytes] = []
    size = at = 0
    for n, body in enumerate(bodies):
        if piece and (len(piece) == MOST_RECORDS or size + len(body) > MOST_BYTES):
            yield at, piece
            piece, size, at = [], 0, n
        piece.append(body)
        size += len(body)
    yield at, piece


def _send(
    server: Server, parcel: _Parcel, look: Callable[[str], Lines], *, staged: bytes | None = None
) -> dict[str, SagaError]:
    if not parcel.wholes:
        return {}
    key = server.address.key
    keys = [*map(key, ("log", "sagas", "open", "ended", "empty"))]
    arguments: list[Any] = [server.log_id or b"", key("writer", "")]
    for whole, bodies in zip(parcel.wholes, parcel.bodies, strict=True):
        name = whole.saga_id.encode()
        keys += [key("saga", name), key("records", name), staged or key("records", name)]
        # The time is the last thing in the head of a line.
        ended = b"" if whole.ended is None else whole.lines[-1].head.rpartition(b":")[2]
        arguments += [name, whole.epoch, len(whole.lines) + 1, ended, len(bodies), *bodies]

    def send(connection: Connection) -> Any:
        return connection.run(ADOPT, keys, arguments)

    answer = server.run(send)
    if answer[0] != b"ok":
        raise server.gone()
    refused: dict[str, SagaError] = {}
    for whole, letter in zip(parcel.wholes, answer[1].decode(), strict=True):
        error = None if letter == "y" else _late(whole, letter, look)
        if error is not None:
            refused[whole.saga_id] = error
    return refused


def _late(whole: Whole, letter: str, look: Callable[[str], Lines]) -> SagaError | None:
    """Why a history was not stored; None if it is there, because the answer to an earlier try was lost."""
    saga_id = whole.saga_id
    if letter == "b":
        return SagaBusy(f"saga {saga_id!r} is owned by another process; wait until it is done", saga_id=saga_id)
    if letter == "s":
        return _vanished(saga_id)
    try:
        if letter == "n" and is_there(whole, look(saga_id)):
            return None
    except (AnotherHistory, LogCorrupted) as error:
        return error
    return damaged(saga_id, "its keys are not what was written")
