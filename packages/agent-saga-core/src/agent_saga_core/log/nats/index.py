"""The index of a NATS log: of everything in it only the last message of a subject counts, and each change names it.

One entry per saga; a mark per saga that has not ended and that no living writer lists; a lease per writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log.nats.connection import Conflict, Message, Server
from agent_saga_core.log.nats.messages import Entry, Lease, Life, saga_of, token_of
from agent_saga_core.log.nats.writing import new_token
from agent_saga_core.log.sql import damaged

__all__ = ["Index", "Leased", "Seen", "gathered"]

T = TypeVar("T")

_AT_ONCE: Final = 64
_TOGETHER: Final = 12
"""From how many changes on they are put as one batch of the server's: that costs as much as some ten messages."""
_BATCH: Final = 500

_entry = msgspec.json.Decoder(Entry)
_lease = msgspec.json.Decoder(Lease)
_life = msgspec.json.Decoder(Life)
_encode = msgspec.json.encode


class Seen(NamedTuple):
    """An entry as it was read."""

    entry: Entry
    revision: int

    @property
    def born(self) -> int:
        """What sagas are ordered by."""
        return self.entry.born or self.revision


class Leased(NamedTuple):
    """A lease as it was read."""

    nonce: str
    lease: Lease
    revision: int


async def gathered(works: Iterable[asyncio.Future[T]]) -> list[T]:
    """What all of them come to; if one raises, the others have ended all the same."""
    done = await asyncio.gather(*works, return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise one
    return [one for one in done if not isinstance(one, BaseException)]


class Index:
    """Reads and changes it. Everything is for the loop of the connection."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._name = server.address.name
        self._batches = True  # until the server says otherwise

    def saga(self, saga_id: str) -> str:
        """The subject of a saga's entry."""
        return f"{self._name}.i.s.{token_of(saga_id)}"

    def mark(self, saga_id: str) -> str:
        """The subject of the mark of a saga that has not ended."""
        return f"{self._name}.i.u.{token_of(saga_id)}"

    def lease(self, nonce: str) -> str:
        """The subject of a writer's lease."""
        return f"{self._name}.i.l.{nonce}"

    def watched(self, nonce: str) -> str:
        """The subject that says which revision of that lease was seen to run out."""
        return f"{self._name}.i.o.{nonce}"

    # --- entries

    async def get(self, saga_id: str) -> Seen | None:
        """The entry of a saga.

        Raises:
            LogCorrupted: It cannot be read.
        """
        found = await self._server.insist(lambda: self._server.last(self._server.index, self.saga(saga_id)))
        return None if found is None else self.seen(saga_id, found)

    def seen(self, saga_id: str, message: Message) -> Seen:
        """What a message says of a saga.

        Raises:
            LogCorrupted: It says nothing that one of ours would.
        """
        try:
            entry = _entry.decode(message.data)
        except (msgspec.MsgspecError, ValueError):
            raise damaged(saga_id, "its entry in the index is not what was written") from None
        if entry.saga != saga_id:
            raise damaged(saga_id, "its entry in the index is that of another saga")
        return Seen(entry, message.seq)

    async def change(self, entry: Entry, expected: int) -> int:
        """Put an entry in the place of the one with that revision, 0 for none; the new revision.

        Raises:
            Conflict: Another is there.
        """
        return await self._server.write(self.saga(entry.saga), _encode(entry), expected=expected, token=new_token())

    async def change_all(self, changes: Sequence[tuple[Entry, int]]) -> list[int | None]:
        """`change` for each of them; None where another is there."""
        done: list[int | None] = []
        for begin in range(0, len(changes), _BATCH):
            some = changes[begin : begin + _BATCH]
            made: list[int] | None = None
            if len(some) >= _TOGETHER and self._batches:
                items = [(self.saga(entry.saga), _encode(entry), expected) for entry, expected in some]
                made = await self._server.put_all(items)
            done += made if made is not None else await self._one_by_one(some)
        return done

    async def _one_by_one(self, changes: Sequence[tuple[Entry, int]]) -> list[int | None]:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(entry: Entry, expected: int) -> int | None:
            async with turns:
                try:
                    return await self.change(entry, expected)
                except Conflict:
                    # What was put together may be there, although nobody said so.
                    there = await self.get(entry.saga)
                    return there.revision if there is not None and there.entry == entry else None

        return await gathered([asyncio.ensure_future(one(*change)) for change in changes])

    async def forget(self, seen: Seen) -> bool:
        """Remove an entry, if it is still the one that was read."""
        return await self._server.insist(lambda: self._server.delete(self._server.index, seen.revision))

    async def all(self) -> tuple[dict[str, Seen], list[LogCorrupted]]:
        """Every entry that can be read, by saga."""
        found: dict[str, Seen] = {}
        faults: list[LogCorrupted] = []
        start = f"{self._name}.i.s."
        async for message in self._server.scan(self._server.index, f"{start}>"):
            saga_id = saga_of(message.subject.removeprefix(start))
            if saga_id is None:
                where = f"subject {message.subject}"
                faults.append(LogCorrupted(f"{where} of the index is that of no saga", where=where))
                continue
            try:
                found[saga_id] = self.seen(saga_id, message)
            except LogCorrupted as error:
                faults.append(error)
        return found, faults

    async def some(self, saga_ids: Iterable[str]) -> tuple[dict[str, Seen], list[LogCorrupted]]:
        """The entries of these sagas, as far as they have any that can be read."""
        subjects = {self.saga(saga_id): saga_id for saga_id in saga_ids}
        found: dict[str, Seen] = {}
        faults: list[LogCorrupted] = []
        for message in await self._server.latest(self._server.index, list(subjects)):
            saga_id = subjects.get(message.subject)
            if saga_id is not None:
                try:
                    found[saga_id] = self.seen(saga_id, message)
                except LogCorrupted as error:
                    faults.append(error)
        return found, faults

    # --- marks

    async def put_marks(self, saga_ids: Sequence[str]) -> None:
        """Mark sagas as not ended; a mark that is there stays."""
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(saga_id: str) -> None:
            async with turns:
                try:
                    await self._server.write(self.mark(saga_id), b"{}", expected=0, token=new_token())
                except Conflict:
                    return

        if len(saga_ids) >= _TOGETHER and self._batches:
            for begin in range(0, len(saga_ids), _BATCH):
                some = saga_ids[begin : begin + _BATCH]
                if await self._server.put_all([(self.mark(saga_id), b"{}", 0) for saga_id in some]) is None:
                    await gathered([asyncio.ensure_future(one(saga_id)) for saga_id in some])
            return
        await gathered([asyncio.ensure_future(one(saga_id)) for saga_id in saga_ids])

    async def drop_mark(self, saga_id: str) -> None:
        """The saga has ended, or is forgotten."""
        await self._server.insist(lambda: self._server.purge(self._server.index, self.mark(saga_id)))

    async def marks(self) -> list[str]:
        """The sagas that are marked."""
        start = f"{self._name}.i.u."
        found: list[str] = []
        async for message in self._server.scan(self._server.index, f"{start}>"):
            saga_id = saga_of(message.subject.removeprefix(start))
            if saga_id is not None:
                found.append(saga_id)
        return found

    # --- leases

    async def get_lease(self, nonce: str) -> Leased | None:
        """The lease of a writer."""
        found = await self._server.insist(lambda: self._server.last(self._server.index, self.lease(nonce)))
        return None if found is None else _leased(nonce, found)

    async def put_lease(self, nonce: str, lease: Lease, expected: int) -> int:
        """Put a lease in the place of the one with that revision, 0 for none; the new revision.

        Raises:
            Conflict: Another is there.
        """
        return await self._server.write(self.lease(nonce), _encode(lease), expected=expected, token=new_token())

    async def drop_lease(self, nonce: str) -> None:
        """That writer is settled: nobody needs to look at it any more."""
        for subject in (self.watched(nonce), self.lease(nonce)):
            await self._server.insist(lambda subject=subject: self._server.purge(self._server.index, subject))

    async def leases(self) -> list[Leased]:
        """The lease of every writer that is not settled."""
        start = f"{self._name}.i.l."
        found: list[Leased] = []
        async for message in self._server.scan(self._server.index, f"{start}*"):
            leased = _leased(message.subject.removeprefix(start), message)
            found.append(leased)
        return found

    async def expired(self, nonce: str) -> int:
        """The revision of that lease that somebody has watched running out; 0 if none was."""
        found = await self._server.insist(lambda: self._server.last(self._server.index, self.watched(nonce)))
        if found is None:
            return 0
        try:
            return _life.decode(found.data).revision
        except (msgspec.MsgspecError, ValueError):
            return 0

    async def put_expired(self, nonce: str, revision: int) -> None:
        """Let others know that this revision was watched running out. A hint: it may get lost."""
        found = await self._server.insist(lambda: self._server.last(self._server.index, self.watched(nonce)))
        try:
            await self._server.write(
                self.watched(nonce), _encode(Life(revision)), expected=found.seq if found else 0, token=new_token()
            )
        except Conflict:
            return


def _leased(nonce: str, message: Message) -> Leased:
    try:
        lease = _lease.decode(message.data)
    except (msgspec.MsgspecError, ValueError):
        # Whoever it was cannot renew it any more, and everybody can watch it.
        lease = Lease(seconds=30.0, beat=0)
    return Leased(nonce, lease, message.seq)
