"""Many sagas of a Redis log, one after the other: what is verified, and what compaction looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log.base import Damage, Verification
from agent_saga_core.log.redis.connection import Server
from agent_saga_core.log.redis.reading import (
    FIRST_PIECE,
    PAGE,
    PIECE_BYTES,
    Listed,
    Row,
    census,
    intact,
    name_within,
    names_in,
    seen,
)
from agent_saga_core.log.sql import distinct, verified

__all__ = ["Found", "Histories", "verify"]

PROGRESS_EVERY: Final = 10_000


class Found(NamedTuple):
    """A saga as it was at one moment."""

    saga_id: str
    name: bytes
    listed: Listed
    bodies: list[bytes]
    """The lines of its records; none where its row says nothing of any."""


class Histories:
    """Reads many sagas, with few round trips: a server that syncs for others answers each of them late."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._record_bytes = PIECE_BYTES // FIRST_PIECE  # what a record comes to, by what was seen

    def of(self, names: Sequence[bytes]) -> Iterator[Found]:
        """These sagas, in order.

        Raises:
            LogCorrupted: The log is gone. Damage of a saga is left to be found.
        """
        listed = census(self._server, names)
        at = 0
        while at < len(names):
            most, many, records = max(1, PIECE_BYTES // self._record_bytes), 0, 0
            while at + many < len(names) and (not many or records + _length(listed[at + many]) <= most):
                records += _length(listed[at + many])
                many += 1
            yield from self._some(names[at : at + many], listed[at : at + many], at_once=records <= most)
            at += many

    def _some(self, names: Sequence[bytes], listed: Sequence[Listed], *, at_once: bool) -> Iterator[Found]:
        key = self._server.address.key
        asked: list[tuple[str | bytes | int, ...]] = []
        for name, one in zip(names, listed, strict=True):
            row = _whole(one)
            if at_once and row is not None:
                asked.append(("LRANGE", key("records", name), 0, row.length - 1))
        answers: Iterator[Any] = iter(self._server.run(lambda connection: connection.calls(asked)) if asked else ())
        for name, one in zip(names, listed, strict=True):
            found = Found(name.decode("utf-8", "replace"), name, one, [])
            if isinstance(one.row, Row):
                answer: Any = next(answers) if at_once and _whole(one) is not None else None
                if isinstance(answer, list) and len(cast("list[bytes]", answer)) == one.row.length:
                    found = found._replace(bodies=cast("list[bytes]", answer))
                else:
                    found = self._alone(found)  # it is long, or changed meanwhile, or is damaged
            if found.bodies:
                mean = sum(map(len, found.bodies)) // len(found.bodies)
                self._record_bytes = max(1, (self._record_bytes + mean) // 2)
            yield found

    def _alone(self, found: Found) -> Found:
        try:
            row, bodies = self._server.run(lambda connection: seen(connection, self._server, found.saga_id))
        except LogCorrupted as error:
            if error.saga_id is None:
                raise
            return found._replace(listed=found.listed._replace(row=str(error)))
        return found._replace(listed=found.listed._replace(row=row), bodies=bodies)


def _whole(listed: Listed) -> Row | None:
    row = listed.row
    return row if isinstance(row, Row) and 0 < row.length == row.next - 1 else None


def _length(listed: Listed) -> int:
    return listed.row.length if isinstance(listed.row, Row) else 0


class _Walk:
    """Everything, saga by saga, each with all its records as they are at one moment."""

    def __init__(self, server: Server, log_id: bytes, progress: Callable[[int], None] | None) -> None:
        self._server = server
        self._log_id = log_id
        self._progress = progress
        self._histories = Histories(server)
        self.records = 0
        self.damage: list[Damage] = []

    def blame(self, name: bytes, fault: str) -> None:
        """Note damage of the saga of that name, and of the one that its records name."""
        saga_id = name.decode("utf-8", "replace")
        meant = self._server.run(lambda connection: name_within(connection, self._server, name, self._log_id))
        self.damage.append(Damage(where=f"saga {saga_id!r}", reason=fault, saga_ids=distinct(saga_id, meant)))

    def sagas(self) -> None:
        for names in names_in(self._server, "sagas", most=PAGE):
            for found in self._histories.of(names):
                self._saga(found)

    def _saga(self, found: Found) -> None:
        saga_id, name, listed, bodies = found
        row = listed.row
        if row is None and (listed.in_sagas is None or census(self._server, [name])[0].in_sagas is None):
            return  # forgotten since
        fault = row if isinstance(row, str) else _misplaced(listed)
        if fault is not None:
            self.blame(name, fault)
            return
        before = self.records
        try:
            records = intact(saga_id, row, bodies, self._log_id, erased=True)
        except LogCorrupted as error:
            self.blame(name, str(error))
            return
        self.records += len(records)
        if self._progress is not None and self.records // PROGRESS_EVERY > before // PROGRESS_EVERY:
            self._progress(self.records)

    def strays(self) -> None:
        """The keys of sagas that no list names. This looks at every key of the server's database."""
        key = self._server.address.key
        for kind in ("saga", "records"):
            start = key(kind, b"")
            cursor = b"0"
            while True:
                cursor, found = self._server.run(
                    lambda connection, at=cursor, start=start: connection.call(
                        "SCAN", at, "MATCH", start + b"*", "COUNT", 1_000
                    )
                )
                names = [name.removeprefix(start) for name in found]
                for name, listed in zip(names, census(self._server, names) if names else [], strict=True):
                    self._stray(name, listed)
                if cursor == b"0":
                    break

    def _stray(self, name: bytes, listed: Listed) -> None:
        row = listed.row
        if listed.in_sagas is not None or row is None:
            return  # looked at, or gone since
        if isinstance(row, Row) and row.next == 1 and not row.length:
            return  # claimed, and nothing begun
        if not any(one.where == f"saga {name.decode('utf-8', 'replace')!r}" for one in self.damage):
            self.blame(name, row if isinstance(row, str) else "it is in no list of sagas")


def _misplaced(listed: Listed) -> str | None:
    """What is wrong with where a saga is listed."""
    row = listed.row
    if not isinstance(row, Row):
        return "its row is missing"
    if listed.in_sagas != row.seq:
        return "its row and the list of sagas do not agree"
    if row.ended is None and (listed.in_open != row.seq or listed.in_ended is not None):
        return "it has not ended, and is not listed so"
    if row.ended is not None and (listed.in_open is not None or listed.in_ended != float(row.ended)):
        return "it has ended, and is not listed so"
    return None


def verify(server: Server, log_id: bytes, progress: Callable[[int], None] | None) -> Verification:
    """See `Log.verify`."""
    walk = _Walk(server, log_id, progress)
    walk.sagas()
    walk.strays()
    return verified(walk.records, walk.damage)
