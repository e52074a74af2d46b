"""How records get into a NATS log: one message per flush and writer, each behind the one that its writer knows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

import msgspec

from agent_saga_core.errors import Fenced, LogCorrupted, SagaError
from agent_saga_core.log.commit import Entry
from agent_saga_core.log.lease import Writer
from agent_saga_core.log.nats.connection import Away, Conflict, Message, Server
from agent_saga_core.log.nats.messages import (
    AFTER,
    BLOBS,
    FORMAT,
    KIND,
    TABLE,
    Kind,
    Meta,
    Open,
    Part,
    Tail,
)
from agent_saga_core.log.sql import SagaBatch

__all__ = ["Group", "LineBatch", "Pen", "error_of", "new_token", "payload_of", "put_blobs"]

_MOST_RECORDS: Final = 2_000
_TABLE_AFTER: Final = 64
"""Records between two lists of what is open, beside twice as many as are open."""
_LOST: Final = "its lease ran out and another process took over"


def new_token() -> str:
    """The id of a message."""
    return os.urandom(12).hex()


class Group(NamedTuple):
    """The records of one saga that are to be written, in order."""

    saga: str
    life: str
    first: int
    bodies: Sequence[bytes]
    final: bool

    @property
    def last(self) -> int:
        """The number of the last of them."""
        return self.first + len(self.bodies) - 1


class LineBatch(SagaBatch):
    """A batch that is written once, also if that is begun twice."""

    __slots__ = ("done", "lock", "sending")

    def __init__(self, entries: Sequence[Entry], log_id: bytes, most: int) -> None:
        self.sending: Future[None] | None = None
        self.lock: asyncio.Lock | None = None
        self.done = False
        super().__init__(entries, log_id, records=_MOST_RECORDS, size=most)


class _Draft(NamedTuple):
    """A message that was, or may have been, sent."""

    token: str
    kind: Kind
    payload: bytes
    groups: tuple[Group, ...]
    lists: bool
    """Whether it lists what is open."""


class Pen:
    """What a writer writes with: its subject, the last message on it, and where its sagas end.

    Everything but `broken` is for the loop of the connection, under `lock`.
    """

    def __init__(self, server: Server, writer: Writer) -> None:
        self.writer: Final = writer
        self.nonce: Final = writer.nonce.hex
        self.subject: Final = f"{server.address.name}.w.{self.nonce}"
        self.lock: Final = asyncio.Lock()
        self.renewing: Final = asyncio.Lock()
        self.open: dict[str, Tail] = {}
        self.last = 0
        self.revision = 0  # of its lease
        self.beat = 0
        self.fenced = False
        self._server = server
        self._table = 0
        self._since = 0
        self._unsure: dict[str, _Draft] = {}

    async def birth(self) -> None:
        """Appear. From here on, whatever this writes follows a message that nobody but itself can have seen last."""
        async with self.lock:
            if not self.last:
                await self._send(Kind.BIRTH, ())

    async def write(self, groups: Sequence[Group]) -> int:
        """Store the records, all or none; the sequence of the message. Durable on return.

        Raises:
            Away: The servers stayed away, and nobody knows whether they are stored. Write again: it then shows.
            Fenced: Another process has taken over.
            LogCorrupted: The servers have lost what they acknowledged.
        """
        async with self.lock:
            return await self._send(Kind.BATCH, tuple(groups))

    async def settle(self) -> None:
        """Return once nothing that was sent before can be stored any more. The lock is held.

        Raises:
            Away: The servers stayed away.
            Fenced: Another process has taken over; then it is so as well.
        """
        if self._unsure:
            await self._send(Kind.BATCH, ())

    async def end(self) -> None:
        """Write nothing more: whoever looks finds a fence. The lock is held."""
        try:
            await self._send(Kind.FENCE, ())
        except Fenced:
            return

    def _draft(self, kind: Kind, groups: tuple[Group, ...]) -> _Draft:
        lists = kind is Kind.BIRTH or self._since > 2 * len(self.open) + _TABLE_AFTER
        payload = payload_of(groups, self.open, lists=lists)
        return _Draft(new_token(), kind, payload, groups, lists)

    async def _send(self, kind: Kind, groups: tuple[Group, ...]) -> int:
        while True:
            self._check()
            # Made anew each time: what was found to be stored meanwhile belongs into it.
            draft = self._draft(kind, groups)
            headers = {KIND: str(kind), TABLE: "self" if draft.lists else str(self._table)}
            if kind is Kind.FENCE:
                headers[AFTER] = str(self.last)
            payload = draft.payload
            if len(payload) > self._server.room():
                headers[BLOBS] = ",".join(map(str, await put_blobs(self._server, payload, draft.token)))
                payload = b""
            self._unsure[draft.token] = draft
            try:
                seq = await self._server.write(
                    self.subject, payload, expected=self.last, token=draft.token, headers=headers
                )
            except Conflict as conflict:
                self._unsure.pop(draft.token)  # that is certain, and so it is not what `_resolve` looks for
                found = await self._resolve(draft, conflict.last)
                if found is None:
                    continue
                seq = found
            else:
                self._stored(draft, seq)
            self._unsure.clear()  # nothing that was sent before this one fits any more
            return seq

    async def _resolve(self, draft: _Draft, last: Message | None) -> int | None:
        """What another last message means; the sequence if `draft` is stored before a fence, None to try again.

        Raises:
            Fenced: Another process has taken over.
            LogCorrupted: The servers have lost what they acknowledged, or somebody else writes here.
        """
        if last is None or last.seq < self.last:
            self.writer.lost = "the servers have lost what they acknowledged"
            raise LogCorrupted("the servers have lost messages that they acknowledged", where=self.subject)
        if last.headers.get(KIND) == Kind.FENCE and last.headers.get("Nats-Msg-Id") not in self._unsure:
            self.fenced = True
            self.writer.lost = self.writer.lost or _LOST
            after = last.headers.get(AFTER, "")
            before = await self._server.insist(
                lambda: self._server.at(self._server.stream, int(after) if after.isdigit() else 0)
            )
            if before is not None and before.subject == self.subject and before.seq > self.last:
                token = before.headers.get("Nats-Msg-Id", "")
                if token == draft.token:
                    self._stored(draft, before.seq)
                    return before.seq
                if token in self._unsure:
                    self._stored(self._unsure[token], before.seq)
            raise Fenced(f"this process lost its sagas: {self.writer.lost}")
        earlier = self._unsure.pop(last.headers.get("Nats-Msg-Id", ""), None)
        if earlier is None:
            self.writer.lost = "somebody else has written as this process"
            raise LogCorrupted("somebody else has written on the subject of this process", where=self.subject)
        self._stored(earlier, last.seq)
        return None

    def _stored(self, draft: _Draft, seq: int) -> None:
        if seq <= self.last:
            return
        self.last = seq
        if draft.lists:
            self._table, self._since = seq, 0
        for group in draft.groups:
            self._since += len(group.bodies)
            before = self.open.get(group.saga)
            if before is None or before.life != group.life:
                before = Tail(group.life, group.first - 1)
            self.open[group.saga] = before.after(seq, group.last, final=group.final)
        if draft.kind is Kind.FENCE:
            self.fenced = True

    def _check(self) -> None:
        if self.fenced or self.writer.lost is not None:
            raise Fenced(f"this process lost its sagas: {self.writer.lost or 'it gave them back'}")


def payload_of(groups: Iterable[Group], known: dict[str, Tail], *, lists: bool = False) -> bytes:
    """The payload that holds these records.

    Args:
        groups: The records.
        known: Where each of their sagas ends before them; a saga that is not there begins.
        lists: Whether to say what is open.
    """
    parts: list[Part] = []
    lines: list[bytes] = []
    offset = 0
    for group in groups:
        before = known.get(group.saga)
        earlier = before.recent if before is not None and before.life == group.life else ()
        size = sum(map(len, group.bodies)) + len(group.bodies)
        parts.append(Part(group.saga, group.life, group.first, group.last, group.final, earlier, offset, size))
        lines += group.bodies
        offset += size
    listed = (
        tuple(Open(saga, tail.life, tail.tail, tail.last, tail.final) for saga, tail in known.items() if tail.recent)
        if lists
        else None
    )
    meta = msgspec.json.encode(Meta(FORMAT, tuple(parts), listed))
    return b"\n".join([meta, *lines, b""])


async def put_blobs(server: Server, payload: bytes, token: str) -> list[int]:
    """Store a payload that is too long for one message, in several that mean nothing until one names them.

    Raises:
        Away: The servers stayed away.
    """
    subject = f"{server.address.name}.a.{token}"
    room = server.room()
    seqs: list[int] = []
    for at in range(0, len(payload), room):
        expected = seqs[-1] if seqs else 0
        try:
            seqs.append(
                await server.write(
                    subject,
                    payload[at : at + room],
                    expected=expected,
                    token=f"{token}.{at}",
                    headers={KIND: str(Kind.BLOB)},
                )
            )
        except Conflict:
            raise Away("the messages of a long record were disturbed") from None
    return seqs


def error_of(saga: str, error: SagaError) -> SagaError:
    """The same, of one saga."""
    if isinstance(error, LogCorrupted):
        return LogCorrupted(
            f"saga {saga!r} has lost records: {error}; the stream was restored, or replicas took over that lacked "
            "them: settle the saga by hand",
            saga_id=saga,
            where=f"saga {saga!r}",
        )
    return Fenced(f"this process lost saga {saga!r}: its records were refused, because {error}")
