"""Finished sagas leave a Redis log, some at a time, beside everything else."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Final

from agent_saga_core.errors import LogCorrupted, SagaBusy
from agent_saga_core.log.base import Compaction
from agent_saga_core.log.redis.connection import Connection, Server
from agent_saga_core.log.redis.reading import Row, intact
from agent_saga_core.log.redis.scripts import FORGET, SWEEP
from agent_saga_core.log.redis.walking import Found, Histories
from agent_saga_core.records import FINAL

__all__ = ["compact"]

_CHUNK: Final = 50  # sagas
_HELD: Final = 30_000
"""Milliseconds after which a compaction that is not heard of does not hold up another."""
_REMEMBERED: Final = 30 * 86_400_000
"""Milliseconds after the end of its lease for which a writer is kept: until then one that is gone is a loss."""


def compact(
    server: Server, log_id: bytes, *, cutoff: float, dry_run: bool, progress: Callable[[int], None] | None
) -> Compaction:
    """See `Log.compact`. Each chunk is one script, so a kill at any moment leaves whole sagas."""
    passage = _Passage(server, log_id, cutoff)
    key = server.address.key
    if not dry_run:
        passage.begin()
    try:
        while passage.chunk(delete=not dry_run):
            if progress is not None:
                progress(passage.records)
        if not dry_run:
            passage.sweep()
    finally:
        if not dry_run:
            passage.end()
    kept = int(server.run(lambda connection: connection.call("ZCARD", key("sagas"))))
    left = kept - passage.sagas if dry_run else kept
    return Compaction(retired=passage.sagas, sagas=passage.sagas, carried=0, freed=passage.bytes, kept=left)


class _Passage:
    """One way through the sagas that ended, by the time at which they did."""

    def __init__(self, server: Server, log_id: bytes, cutoff: float) -> None:
        self._server = server
        self._log_id = log_id
        self._cutoff = cutoff
        self._token = uuid.uuid4().hex
        self._skipped = 0
        self._histories = Histories(server)
        self._left = -1  # not more than were there when it began: others may end as fast as this goes
        self.sagas = self.records = self.bytes = 0

    def begin(self) -> None:
        """Keep other compactions out.

        Raises:
            SagaBusy: One is running.
        """
        key = self._server.address.key("compact")

        def take(connection: Connection) -> bool:
            if connection.call("SET", key, self._token, "NX", "PX", _HELD) is not None:
                return True
            return connection.call("GET", key) == self._token.encode()  # by a try whose answer was lost

        if not self._server.run(take):
            raise self._busy()

    def end(self) -> None:
        """Let others in."""
        key = self._server.address.key

        def leave(connection: Connection) -> object:
            return connection.run(FORGET, [key("compact"), key("sagas"), key("ended")], [self._token, 0])

        self._server.run(leave)

    def _busy(self) -> SagaBusy:
        return SagaBusy(f"another compaction of {self._server.address.url} is running; wait until it is done")

    def chunk(self, *, delete: bool) -> bool:
        """Forget some; False if there were none left to look at."""
        key = self._server.address.key
        span = (key("ended"), "-inf", repr(self._cutoff))
        if self._left < 0:
            self._left = int(self._server.run(lambda connection: connection.call("ZCOUNT", *span)))
        many = min(_CHUNK, self._left)
        found: list[bytes] = self._server.run(
            lambda connection: connection.call("ZRANGEBYSCORE", *span, "LIMIT", self._skipped, many)
        )
        if not found:
            return False
        self._left -= len(found)
        keys = [key("compact"), key("sagas"), key("ended")]
        arguments: list[Any] = [self._token, _HELD]
        sizes: dict[bytes, list[int]] = {}
        for one in self._histories.of(found):
            name = one.name
            row, sizes[name] = self._may_go(one)
            if row is not None:
                keys += [key("saga", name), key("records", name)]
                arguments += [name, row.seq, row.ended or b"", row.length]
        gone = [name for name in found if sizes[name]]
        if delete:
            answer = self._server.run(lambda connection: connection.run(FORGET, keys, arguments))
            if answer[0] != b"ok":
                raise self._busy()
            # If that was a second try, the first has forgotten them.
            left = self._still_there([name for name in gone if name not in answer[1]])
            gone = [name for name in gone if name not in left]
        self._skipped += len(found) - (len(gone) if delete else 0)
        self.sagas += len(gone)
        self.records += sum(len(sizes[name]) for name in gone)
        self.bytes += sum(sum(sizes[name]) for name in gone)
        return True

    def _still_there(self, names: list[bytes]) -> set[bytes]:
        key = self._server.address.key("ended")
        scores = self._server.run(lambda connection: connection.calls(("ZSCORE", key, name) for name in names))
        return {name for name, score in zip(names, scores, strict=True) if score is not None}

    def _may_go(self, found: Found) -> tuple[Row | None, list[int]]:
        """The row of a saga and the sizes of its records, if it is whole and has really ended that long ago.

        Damage is left to be found: a list that says "ended" of a saga that did not is no reason to forget it.
        """
        row = found.listed.row
        if not isinstance(row, Row):
            return None, []
        try:
            records = intact(found.saga_id, row, found.bodies, self._log_id, erased=True)
        except LogCorrupted:
            return None, []
        if not records or records[-1].type not in FINAL or records[-1].time > self._cutoff:
            return None, []
        return row, [len(body) for body in found.bodies]

    def sweep(self) -> None:
        """Take away what processes left that died."""
        key = self._server.address.key
        after = 0
        while True:
            at = after
            names: list[bytes] = self._server.run(
                lambda connection, at=at: connection.call("ZRANGE", key("empty"), at, at + 499)
            )
            arguments = [key(""), _REMEMBERED, *names]
            self._server.run(
                lambda connection, given=arguments: connection.run(SWEEP, [key("empty"), key("writers")], given)
            )
            if len(names) < 500:
                return
            after += len(names)  # what left of these lets some others be overlooked, until the next time
