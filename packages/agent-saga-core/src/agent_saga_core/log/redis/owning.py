"""How a saga changes hands: claiming fences the writer that had it and appends CLAIM, in one script."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from agent_saga_core.errors import LogCorrupted, SagaError
from agent_saga_core.log.lease import Heart
from agent_saga_core.log.leased import TRIES, Claim, Holding, Taken, busy, claim_of, contested
from agent_saga_core.log.redis.connection import Connection, Server
from agent_saga_core.log.redis.reading import Row, intact, seen
from agent_saga_core.log.redis.scripts import RELEASE, TAKE
from agent_saga_core.log.redis.writing import acknowledged, shared_keys
from agent_saga_core.log.sql import damaged

__all__ = ["Ownership"]


class Ownership:
    """Claims and releases, for one process."""

    def __init__(self, server: Server, heart: Heart[Connection], log_id: bytes) -> None:
        self._server = server
        self._heart = heart
        self._log_id = log_id

    def take(self, saga_id: str, holding: Holding, clock: Callable[[], float]) -> Taken | None:
        """See `LeasedLog.take_over`.

        Args:
            saga_id: The saga.
            holding: Under which writer. Its epoch becomes what the claim made it.
            clock: What the CLAIM is stamped with.

        Raises:
            SagaBusy: A live process has it.
            LogCorrupted: Damage concerns it, or the server lacks what it acknowledged. It is not owned.
            LogUnavailable: The server cannot be reached, or refuses.
        """
        self._heart.called_off(saga_id)  # it was given up while the server was away, and must not be from now on
        for _ in range(TRIES):
            row, bodies = self._server.run(lambda connection: seen(connection, self._server, saga_id))
            taken, fenced = self._take(saga_id, holding, row, bodies, clock)
            if taken is not None:
                return taken
            if fenced and not self._heart.still(holding.writer):
                return None
        raise contested(saga_id)

    def _take(
        self, saga_id: str, holding: Holding, row: Row | None, bodies: list[bytes], clock: Callable[[], float]
    ) -> tuple[Taken | None, bool]:
        """One try; None if the saga is not any more what was read of it. And whether the writer is fenced."""
        mine = row is not None and self._mine(row.owner)
        if row is not None and row.alive and not mine:
            raise busy(saga_id)
        records = intact(saga_id, row, bodies, self._log_id)
        claim = claim_of(saga_id, records, self._log_id, clock()) if records else None
        if isinstance(claim, Taken):
            return claim, False
        found, fenced = self._change(saga_id, holding, row, mine=mine, claim=claim)
        taken = Taken((), 0) if claim is None else claim.taken
        return (taken if found else None), fenced

    def _mine(self, owner: str) -> bool:
        try:
            return self._heart.mine(uuid.UUID(hex=owner))
        except ValueError:
            return False

    def _change(
        self, saga_id: str, holding: Holding, row: Row | None, *, mine: bool, claim: Claim | None
    ) -> tuple[bool, bool]:
        """Make the saga ours, if it is as it was seen. Whether it is, and whether our writer is fenced."""
        n, body = (0, b"") if claim is None else (claim.record.n, claim.body)
        key, writer, name = self._server.address.key, holding.writer, saga_id.encode()
        owner = "" if row is None else row.owner
        holding.asked, holding.epoch = True, n or (1 if row is None else row.epoch)
        old = owner or writer.nonce.hex
        keys = [*shared_keys(self._server, writer), key("saga", name), key("records", name), key("writer", old)]
        was: tuple[Any, Any] = ("", "") if row is None else (row.epoch, row.next)
        new = (holding.epoch, n + 1 if n else 1)
        head = (self._server.log_id or b"", writer.acknowledged, writer.nonce.hex)
        answer = self._server.run(
            lambda connection: connection.run(
                TAKE, keys, [*head, name, owner, *was, int(mine), *new, body, holding.turn]
            )
        )
        if not acknowledged(self._server, writer, answer):
            return False, True
        if answer[0] == b"busy":
            raise busy(saga_id)
        if answer[0] == b"damaged":
            raise damaged(saga_id, "its keys are of another kind")
        if answer[0] != b"taken":
            return False, False
        writer.acknowledged = max(writer.acknowledged, int(answer[1]))
        if answer[2] != b"%d" % new[1] or (body and answer[3] != body):
            raise damaged(saga_id, f"a record {n} was written, and another is there")
        return True, False

    def release(self, saga_id: str, holding: Holding) -> None:
        """Give the saga back; as soon as the server is there again, if it is not there now."""
        key, name = self._server.address.key, saga_id.encode()
        arguments = [name, holding.writer.nonce.hex, holding.epoch, holding.turn]

        def give_back(connection: Connection) -> object:
            return connection.run(RELEASE, [key("saga", name), key("empty")], arguments)

        try:
            with self._server.using() as connection:
                give_back(connection)
        except (RedisError, OSError):
            self._heart.later(saga_id, give_back)
        except SagaError as error:
            if not isinstance(error, LogCorrupted):
                self._heart.later(saga_id, give_back)
