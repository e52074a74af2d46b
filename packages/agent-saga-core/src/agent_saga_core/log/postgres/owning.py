"""How a saga changes hands: claiming fences the writer that had it and appends CLAIM, in one statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import psycopg
from psycopg import errors

from agent_saga_core.errors import SagaBusy
from agent_saga_core.log.base import readable_history
from agent_saga_core.log.lease import Writer
from agent_saga_core.log.leased import Holding, Taken
from agent_saga_core.log.postgres.connection import Connection, Server
from agent_saga_core.log.postgres.lease import Heart
from agent_saga_core.log.postgres.reading import Row, checked, rows_of
from agent_saga_core.log.sql import body_of, damaged
from agent_saga_core.records import FINAL, Record, RecordType, encode

__all__ = ["Ownership"]

_TRIES: Final = 16
"""How often a saga may change under a claimer before it is called busy."""

_APPEAR: Final = (
    "INSERT INTO {s}.saga(id, epoch, next, owner) SELECT %b, 1, 1, nonce FROM {s}.writer"
    " WHERE nonce = %b AND NOT fenced ON CONFLICT (id) DO NOTHING"
)
# The row of the writer that had it is locked first, so that it cannot renew its lease in the same moment: then either
# it sees that it was fenced, or this finds the lease alive. The saga must be as it was read.
_TAKE: Final = (
    "WITH fence AS (UPDATE {s}.writer SET fenced = true WHERE nonce = %(old)s::uuid AND nonce <> %(me)s"
    " AND (fenced OR lease_until < now()) RETURNING nonce),"
    " taken AS (UPDATE {s}.saga SET owner = %(me)s, epoch = %(new)s, next = %(next)s"
    " WHERE id = %(id)s AND next = %(seen)s AND epoch = %(epoch)s AND owner IS NOT DISTINCT FROM %(old)s::uuid"
    " AND ended IS NULL AND EXISTS (SELECT FROM {s}.writer WHERE nonce = %(me)s AND NOT fenced)"
    " AND (%(old)s::uuid IS NULL OR %(mine)s OR EXISTS (SELECT FROM fence)"
    " OR NOT EXISTS (SELECT FROM {s}.writer WHERE nonce = %(old)s::uuid)) RETURNING seq)"
)
_CLAIM: Final = _TAKE + (
    " INSERT INTO {s}.record(saga, n, epoch, body) SELECT seq, %(seen)s, %(new)s, %(body)b FROM taken"
)
_TAKE_EMPTY: Final = _TAKE + " SELECT seq FROM taken"
_RELEASE: Final = (
    "WITH gone AS (DELETE FROM {s}.saga WHERE id = %(id)s AND owner = %(me)s AND epoch = %(epoch)s AND next = 1)"
    " UPDATE {s}.saga SET owner = NULL WHERE id = %(id)s AND owner = %(me)s AND epoch = %(epoch)s AND next > 1"
    " AND ended IS NULL"
)


class Ownership:
    """Claims and releases, for one process."""

    def __init__(self, server: Server, heart: Heart, log_id: bytes) -> None:
        self._server = server
        self._heart = heart
        self._log_id = log_id
        schema = server.address.schema
        texts = (_APPEAR, _CLAIM, _TAKE_EMPTY, _RELEASE)
        self._appear, self._claim, self._take_empty, self._release = (_query(text, schema) for text in texts)

    def take(self, saga_id: str, holding: Holding, clock: Callable[[], float]) -> Taken | None:
        """Own the saga, whatever there is of it; every record that is returned is durable.

        None says that the writer itself has lost its lease, without having heard of it: another may try.

        Args:
            saga_id: The saga.
            holding: Under which writer. Its epoch becomes what the claim made it.
            clock: What the CLAIM is stamped with.

        Raises:
            SagaBusy: A live process has it.
            LogCorrupted: Damage concerns it. It is not owned.
            LogUnavailable: The server cannot be reached, or refuses.
        """
        self._heart.called_off(saga_id)  # it was given up while the server was away, and must not be from now on
        for _ in range(_TRIES):
            rows = self._server.run(lambda connection: rows_of(connection, self._server.address.schema, saga_id))
            taken = self._take(saga_id, holding, rows, clock)
            if taken is not None:
                return taken
            if not self._heart.still(holding.writer):
                return None
        raise SagaBusy(f"saga {saga_id!r} goes from hand to hand; try again", saga_id=saga_id)

    def _take(self, saga_id: str, holding: Holding, rows: list[Row], clock: Callable[[], float]) -> Taken | None:
        """One try; None if the saga is not any more what was read of it."""
        writer = holding.writer
        if not rows:
            holding.asked, holding.epoch = True, 1
            appeared = self._server.run(lambda c: c.execute(self._appear, (saga_id, writer.nonce)).rowcount)
            return Taken((), 0) if appeared else None
        seen = rows[0]
        mine = self._heart.mine(seen.owner)
        if seen.owner is not None and not mine and seen.alive:
            raise SagaBusy(f"saga {saga_id!r} is owned by another process; wait until it is done", saga_id=saga_id)
        if seen.next == 1 and len(rows) == 1 and seen.n is None:
            holding.asked, holding.epoch = True, seen.epoch
            taken = self._change(self._take_empty, saga_id, writer, seen, mine=mine)
            return Taken((), 0) if taken else None
        records = checked(saga_id, rows, self._log_id)
        readable = readable_history(saga_id, records)
        n = len(records) + 1
        if seen.ended is not None or any(record.type in FINAL for record in readable):
            return Taken(readable, n - 1)
        claim = Record(saga=saga_id, n=n, epoch=n, type=RecordType.CLAIM, time=clock(), data={})
        body = body_of(encode(claim), self._log_id)
        holding.asked, holding.epoch = True, n
        taken = self._change(self._claim, saga_id, writer, seen, mine=mine, n=n, body=body)
        return Taken((*readable, claim), n) if taken else None

    def _change(
        self, statement: Any, saga_id: str, writer: Writer, seen: Row, *, mine: bool, n: int = 0, body: bytes = b""
    ) -> bool:
        parameters: dict[str, Any] = {
            "id": saga_id,
            "me": writer.nonce,
            "old": seen.owner,
            "mine": mine,
            "epoch": seen.epoch,
            "seen": seen.next,
            "new": n or seen.epoch,
            "next": n + 1 if n else seen.next,
            "body": body,
        }

        def change(connection: Connection) -> int | None:
            try:
                return connection.execute(statement, parameters).rowcount
            except errors.UniqueViolation:
                return None

        changed = self._server.run(change)
        if changed is None:
            raise damaged(saga_id, f"a record {n} is there already, and was not written")
        return changed == 1

    def release(self, saga_id: str, holding: Holding) -> None:
        """Give the saga back; as soon as the server is there again, if it is not there now."""
        parameters = {"id": saga_id, "me": holding.writer.nonce, "epoch": holding.epoch}

        def give_back(connection: Connection) -> object:
            return connection.execute(self._release, parameters)

        try:
            with self._server.using() as connection:
                give_back(connection)
        except psycopg.Error:
            self._heart.later(saga_id, give_back)


def _query(text: str, schema: str) -> Any:
    return text.format(s=schema)
