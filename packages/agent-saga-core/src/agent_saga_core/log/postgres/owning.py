"""How a saga changes hands: claiming fences the writer that had it and appends CLAIM, in one statement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import errors

from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log.lease import Writer
from agent_saga_core.log.leased import TRIES, Claim, Holding, Taken, busy, claim_of, contested
from agent_saga_core.log.postgres.connection import Connection, Server
from agent_saga_core.log.postgres.lease import Heart
from agent_saga_core.log.postgres.reading import Row, checked, rows_of, rows_of_many
from agent_saga_core.log.sql import damaged

__all__ = ["Ownership"]

_APPEAR: Final = (
    "INSERT INTO {s}.saga(id, epoch, next, owner, turn) SELECT %b, 1, 1, nonce, %b FROM {s}.writer"
    " WHERE nonce = %b AND NOT fenced ON CONFLICT (id) DO NOTHING"
)
# The row of the writer that had it is locked first, so that it cannot renew its lease in the same moment: then either
# it sees that it was fenced, or this finds the lease alive. The saga must be as it was read.
_TAKE: Final = (
    "WITH fence AS (UPDATE {s}.writer SET fenced = true WHERE nonce = %(old)s::uuid AND nonce <> %(me)s"
    " AND (fenced OR lease_until < now()) RETURNING nonce),"
    " taken AS (UPDATE {s}.saga SET owner = %(me)s, turn = %(turn)s, epoch = %(new)s, next = %(next)s"
    " WHERE id = %(id)s AND next = %(seen)s AND epoch = %(epoch)s AND owner IS NOT DISTINCT FROM %(old)s::uuid"
    " AND ended IS NULL AND EXISTS (SELECT FROM {s}.writer WHERE nonce = %(me)s AND NOT fenced)"
    " AND (%(old)s::uuid IS NULL OR %(mine)s OR EXISTS (SELECT FROM fence)"
    " OR NOT EXISTS (SELECT FROM {s}.writer WHERE nonce = %(old)s::uuid)) RETURNING seq)"
)
_CLAIM: Final = _TAKE + (
    " INSERT INTO {s}.record(saga, n, epoch, body) SELECT seq, %(seen)s, %(new)s, %(body)b FROM taken"
)
_TAKE_EMPTY: Final = _TAKE + " SELECT seq FROM taken"
# Several at once. First every writer is locked that has to be fenced, in one order; only then sagas, and those that
# another claimer has at hand are left to it. So no claimer waits for another that waits for it. A writer that was
# fenced before, or is gone, needs no lock: nobody makes it alive again.
_CLAIM_SOME: Final = (
    "WITH given AS (SELECT * FROM unnest(%(ids)s::text[], %(owners)s::uuid[], %(free)s::bool[], %(epochs)s::int8[],"
    " %(seen)s::int8[], %(bodies)b::bytea[]) AS g(id, owner, free, epoch, seen, body)),"
    " doomed AS (SELECT nonce FROM {s}.writer WHERE nonce = ANY(%(fence)s::uuid[])"
    " AND (fenced OR lease_until < now()) ORDER BY nonce FOR UPDATE),"
    " fence AS (UPDATE {s}.writer w SET fenced = true FROM doomed d WHERE w.nonce = d.nonce RETURNING w.nonce),"
    ' at AS (SELECT s.seq, g.id, g.seen, g.body FROM {s}.saga s JOIN given g ON s.id = g.id COLLATE "C"'
    " WHERE (SELECT count(*) FROM fence) >= 0 AND s.next = g.seen AND s.epoch = g.epoch"
    " AND s.owner IS NOT DISTINCT FROM g.owner AND s.ended IS NULL"
    " AND EXISTS (SELECT FROM {s}.writer WHERE nonce = %(me)s AND NOT fenced)"
    " AND (g.free OR g.owner IN (SELECT nonce FROM fence)) FOR UPDATE OF s SKIP LOCKED),"
    " taken AS (UPDATE {s}.saga s SET owner = %(me)s, turn = 0, epoch = at.seen, next = at.seen + 1 FROM at"
    " WHERE s.seq = at.seq RETURNING s.seq, at.id, at.seen, at.body),"
    " kept AS (INSERT INTO {s}.record(saga, n, epoch, body) SELECT seq, seen, seen, body FROM taken)"
    " SELECT id FROM taken"
)
_MINE: Final = "WHERE id = %(id)s AND owner = %(me)s AND turn = %(turn)s AND epoch = %(epoch)s"
_RELEASE: Final = (
    f"WITH gone AS (DELETE FROM {{s}}.saga {_MINE} AND next = 1)"
    f" UPDATE {{s}}.saga SET owner = NULL {_MINE} AND next > 1 AND ended IS NULL"
)


class _Asked(NamedTuple):
    """A saga that may be taken, as it was read."""

    saga_id: str
    seen: Row
    free: bool
    """Whether that needs nobody to be fenced."""
    claim: Claim


class Ownership:
    """Claims and releases, for one process."""

    def __init__(self, server: Server, heart: Heart, log_id: bytes) -> None:
        self._server = server
        self._heart = heart
        self._log_id = log_id
        schema = server.address.schema
        texts = (_APPEAR, _CLAIM, _TAKE_EMPTY, _RELEASE, _CLAIM_SOME)
        made = [_query(text, schema) for text in texts]
        self._appear, self._claim, self._take_empty, self._release, self._claim_some = made

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
        for _ in range(TRIES):
            rows = self._server.run(lambda connection: rows_of(connection, self._server.address.schema, saga_id))
            taken = self._take(saga_id, holding, rows, clock)
            if taken is not None:
                return taken
            if not self._heart.still(holding.writer):
                return None
        raise contested(saga_id)

    def _take(self, saga_id: str, holding: Holding, rows: list[Row], clock: Callable[[], float]) -> Taken | None:
        """One try; None if the saga is not any more what was read of it."""
        writer = holding.writer
        if not rows:
            holding.asked, holding.epoch = True, 1
            appeared = self._server.run(
                lambda c: c.execute(self._appear, (saga_id, holding.turn, writer.nonce)).rowcount
            )
            return Taken((), 0) if appeared else None
        seen = rows[0]
        mine = self._heart.mine(seen.owner)
        if seen.owner is not None and not mine and seen.alive:
            raise busy(saga_id)
        # By an earlier try of this claim, whose answer was lost.
        ours = seen.owner == writer.nonce and seen.turn == holding.turn
        records = checked(saga_id, rows, self._log_id)
        if not records:
            holding.asked, holding.epoch = True, seen.epoch
            taken = ours or self._change(self._take_empty, saga_id, holding, seen, mine=mine)
            return Taken((), 0) if taken else None
        claim = claim_of(saga_id, records, self._log_id, clock())
        if isinstance(claim, Taken):
            return claim
        if ours:
            holding.epoch = seen.epoch
            return Taken(claim.before, claim.record.n - 1)
        holding.asked, holding.epoch = True, claim.record.n
        taken = self._change(self._claim, saga_id, holding, seen, mine=mine, claim=claim)
        return claim.taken if taken else None

    def _change(
        self, statement: Any, saga_id: str, holding: Holding, seen: Row, *, mine: bool, claim: Claim | None = None
    ) -> bool:
        n, body = (0, b"") if claim is None else (claim.record.n, claim.body)
        parameters: dict[str, Any] = {
            "id": saga_id,
            "me": holding.writer.nonce,
            "turn": holding.turn,
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

    def take_some(
        self, holdings: Mapping[str, Holding], writer: Writer, clock: Callable[[], float]
    ) -> dict[str, Taken | LogCorrupted] | None:
        """Own those of the sagas that nobody owns or is about to own; all of them for one writer.

        What is left out is not owned, or was not there; what damage concerns is answered with that, and not owned.
        None, and nothing is owned, if one of them has a record that none of them was to have: one by one, it shows.

        Args:
            holdings: The sagas, and under what each will be owned.
            writer: The writer of all those.
            clock: What the CLAIMs are stamped with.

        Raises:
            LogUnavailable: The server cannot be reached, or refuses.
        """
        for saga_id in holdings:
            self._heart.called_off(saga_id)
        schema = self._server.address.schema
        found = self._server.run(lambda connection: rows_of_many(connection, schema, list(holdings)))
        results: dict[str, Taken | LogCorrupted] = {}
        asked: list[_Asked] = []
        for saga_id, (free, rows) in found.items():
            seen = rows[0]
            mine = self._heart.mine(seen.owner)
            if (seen.alive and not mine) or seen.n is None:
                continue  # it is owned; or nothing is begun under that id
            try:
                claim = claim_of(saga_id, checked(saga_id, rows, self._log_id), self._log_id, clock())
            except LogCorrupted as error:
                results[saga_id] = error
                continue
            if isinstance(claim, Taken):
                results[saga_id] = claim
            else:
                asked.append(_Asked(saga_id, seen, mine or free, claim))
        for one in asked:
            holdings[one.saga_id].asked, holdings[one.saga_id].epoch = True, one.claim.record.n
        taken, tries = self._take_all(asked, writer) if asked else (frozenset[str](), 1)
        if taken is None:
            return None
        for one in asked:
            if one.saga_id in taken:
                results[one.saga_id] = one.claim.taken
            else:
                # Said once and answered, it is not ours; said again, an answer that was lost may have made it so.
                holdings[one.saga_id].asked = tries > 1
        return results

    def _take_all(self, asked: Sequence[_Asked], writer: Writer) -> tuple[frozenset[str] | None, int]:
        """Which of them were taken, and how often the server was asked; None if a record was in the way."""
        parameters: dict[str, Any] = {
            "me": writer.nonce,
            "ids": [one.saga_id for one in asked],
            "owners": [one.seen.owner for one in asked],
            "free": [one.free for one in asked],
            "epochs": [one.seen.epoch for one in asked],
            "seen": [one.seen.next for one in asked],
            "bodies": [one.claim.body for one in asked],
            "fence": list({one.seen.owner for one in asked if not one.free}),
        }
        tries = 0

        def take(connection: Connection) -> frozenset[str] | None:
            nonlocal tries
            tries += 1
            try:
                return frozenset(saga_id for (saga_id,) in connection.execute(self._claim_some, parameters))
            except errors.UniqueViolation:
                return None

        return self._server.run(take), tries

    def release(self, saga_id: str, holding: Holding) -> None:
        """Give the saga back; as soon as the server is there again, if it is not there now."""
        parameters = {"id": saga_id, "me": holding.writer.nonce, "turn": holding.turn, "epoch": holding.epoch}

        def give_back(connection: Connection) -> object:
            return connection.execute(self._release, parameters)

        try:
            with self._server.using() as connection:
                give_back(connection)
        except psycopg.Error:
            self._heart.later(saga_id, give_back)


def _query(text: str, schema: str) -> Any:
    return text.format(s=schema)
