"""How whole histories get into a NATS log: stored where nobody looks, and made to count by the saga's entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from agent_saga_core.errors import LogCorrupted, SagaBusy, SagaError
from agent_saga_core.log.leased import busy
from agent_saga_core.log.lines import Adopted, AnotherHistory, Lines, Whole, is_there
from agent_saga_core.log.nats.connection import Server
from agent_saga_core.log.nats.index import Index, Seen
from agent_saga_core.log.nats.lease import State
from agent_saga_core.log.nats.messages import BLOBS, KIND, Entry, Kind, Tail
from agent_saga_core.log.nats.owning import Ownership
from agent_saga_core.log.nats.reading import Reader
from agent_saga_core.log.nats.writing import Group, new_token, payload_of, put_blobs
from agent_saga_core.log.sql import body_of, lines_of

__all__ = ["Adoption", "lines_in"]

_HEADER_ROOM: Final = 64 * 1024


async def lines_in(reader: Reader, saga_id: str) -> Lines:
    """See `Log.lines`."""
    found = await reader.find(saga_id)
    return () if found is None else lines_of(saga_id, found.rows, reader.log_id, found.stated)


class _Subject:
    """Where the messages of one adoption go. Nothing on it counts before an entry names it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._token = new_token()
        self._last = 0
        self._groups: list[Group] = []
        self._size = 0
        self.tails: dict[str, Tail] = {}

    async def put(self, whole: Whole, life: str, log_id: bytes) -> None:
        """Store a history, in as many messages as it takes."""
        first, bodies = 1, list[bytes]()
        for n, encoded in zip(whole.numbers, whole.lines, strict=True):
            body = body_of(encoded, log_id)
            if self._size and self._size + len(body) > self._server.room() - _HEADER_ROOM:
                self._add(whole, life, first, bodies)
                await self.send()
                first, bodies = n, []
            bodies.append(body)
            self._size += len(body) + 1
        self._add(whole, life, first, bodies)

    def _add(self, whole: Whole, life: str, first: int, bodies: Sequence[bytes]) -> None:
        if bodies:
            final = whole.ended is not None and first + len(bodies) - 1 == whole.numbers[-1]
            self._groups.append(Group(whole.saga_id, life, first, bodies, final))

    async def send(self) -> None:
        """Store what was put so far."""
        if not self._groups:
            return
        payload = payload_of(self._groups, self.tails)
        token = new_token()
        headers = {KIND: str(Kind.BATCH)}
        if len(payload) > self._server.room():
            headers[BLOBS] = ",".join(map(str, await put_blobs(self._server, payload, token)))
            payload = b""
        self._last = await self._server.write(
            f"{self._server.address.name}.a.{self._token}", payload, expected=self._last, token=token, headers=headers
        )
        for group in self._groups:
            before = self.tails.get(group.saga) or Tail(group.life, group.first - 1)
            self.tails[group.saga] = before.after(self._last, group.last, final=group.final)
        self._groups, self._size = [], 0


class Adoption:
    """See `Log.adopt`; for the loop of the connection.

    Args:
        held: Whether a scope of this process has a saga.
    """

    def __init__(
        self, server: Server, index: Index, reader: Reader, ownership: Ownership, held: Callable[[str], bool]
    ) -> None:
        self._server = server
        self._index = index
        self._reader = reader
        self._ownership = ownership
        self._held = held

    async def adopt(self, wholes: Sequence[Whole]) -> Adopted:
        """Store those that are not there."""
        there: list[str] = []
        refused: dict[str, SagaError] = {}
        fresh: list[tuple[Whole, Seen | None]] = []
        for whole in wholes:
            try:
                seen = await self._look(whole)
            except (SagaBusy, AnotherHistory, LogCorrupted) as error:
                refused[whole.saga_id] = error
                continue
            if seen is True:
                there.append(whole.saga_id)
            else:
                fresh.append((whole, seen))
        stored: list[str] = []
        if fresh:
            for whole, done in zip([whole for whole, _ in fresh], await self._store(fresh), strict=True):
                if done:
                    stored.append(whole.saga_id)
                else:
                    refused[whole.saga_id] = busy(whole.saga_id)
        return Adopted(stored=tuple(stored), there=tuple(there), refused=refused)

    async def _look(self, whole: Whole) -> Seen | Literal[True] | None:
        """True if the history is there; the entry that it may replace, None if there is none."""
        saga_id = whole.saga_id
        if self._held(saga_id):
            raise busy(saga_id)
        seen = await self._index.get(saga_id)
        if seen is None:
            return None
        owner = seen.entry.owner
        if owner is not None and seen.entry.ended is None:
            tail = await self._reader.tail(seen)
            if tail is None or not tail.final:
                state, leased = await self._ownership.watch.judge(owner)
                if state is State.LIVE or not await self._ownership.fence(owner, leased):
                    raise busy(saga_id)
        if is_there(whole, await lines_in(self._reader, saga_id)):
            return True
        return await self._index.get(saga_id)

    async def _store(self, fresh: Sequence[tuple[Whole, Seen | None]]) -> list[bool]:
        subject = _Subject(self._server)
        lives = {whole.saga_id: new_token() for whole, _ in fresh}
        for whole, _ in fresh:
            await subject.put(whole, lives[whole.saga_id], self._reader.log_id)
        await subject.send()
        await self._index.put_marks([whole.saga_id for whole, _ in fresh if whole.ended is None])
        changes: list[tuple[Entry, int]] = []
        for whole, seen in fresh:
            tail = subject.tails[whole.saga_id]
            entry = Entry(
                saga=whole.saga_id,
                life=lives[whole.saga_id],
                epoch=whole.epoch,
                next=tail.last + 1,
                tail=tail.tail,
                born=0 if seen is None else seen.born,
                ended=whole.ended,
            )
            changes.append((entry, 0 if seen is None else seen.revision))
        return [revision is not None for revision in await self._index.change_all(changes)]
