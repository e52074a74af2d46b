"""What stands in the messages of a NATS log, and what they say together.

A message of a writer is one line of JSON (`Meta`) and then record lines, as `docs/log-format.md` describes them. It
names the earlier messages of each of its sagas, so that a history is read backwards from its last message; and now and
then it lists the sagas that its writer has open, so that the last message of each is found from the writer's last one.
Every byte may be hostile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

import msgspec

from agent_saga_core.log.nats.connection import Message

__all__ = [
    "AFTER",
    "BLOBS",
    "BODY",
    "FORMAT",
    "KIND",
    "REMEMBERED",
    "TABLE",
    "Entry",
    "Kind",
    "Lease",
    "Life",
    "Meta",
    "Open",
    "Part",
    "Tail",
    "fold",
    "meta_of",
    "saga_of",
    "token_of",
]

FORMAT: Final = 1
KIND: Final = "Saga-Kind"
TABLE: Final = "Saga-Table"
"""Header: the sequence of the writer's last message that lists what is open."""
BLOBS: Final = "Saga-Blobs"
"""Header: the sequences of the messages whose payloads together are the payload of this one."""
AFTER: Final = "Saga-After"
"""Header of a fence: the sequence of the message before it."""
REMEMBERED: Final = 8
"""How many earlier messages a message names for each of its sagas: they are fetched at once."""
_TOO_LONG: Final = 256 * 2**20


class Kind(StrEnum):
    """What a message on a writer's subject is."""

    BIRTH = "birth"
    BATCH = "batch"
    FENCE = "fence"
    BLOB = "blob"


class Part(msgspec.Struct, array_like=True, frozen=True):
    """The records of one saga in a message."""

    saga: str
    life: str
    """Drawn when the id was claimed first: an id that was forgotten and begins anew has another."""
    first: int
    last: int
    final: bool
    earlier: tuple[int, ...]
    """The last messages that hold records of it, newest first."""
    offset: int
    """Where in the payload, behind its first line, the saga's lines begin."""
    size: int


class Open(msgspec.Struct, array_like=True, frozen=True):
    """One saga that a writer has open."""

    saga: str
    life: str
    tail: int
    last: int
    final: bool


class Meta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of a payload."""

    format: int
    sagas: tuple[Part, ...] = ()
    open: tuple[Open, ...] | None = None
    """What was open before this message; None if it does not say."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the index says of a saga. Its owner's own messages may say more."""

    saga: str
    life: str
    owner: str | None = None
    epoch: int = 1
    next: int = 1
    tail: int = 0
    """The last message that holds records of it, as far as this knows; 0 if there is none."""
    born: int = 0
    """The sequence of the first entry of this life; 0 in that entry itself."""
    ended: float | None = None


class Lease(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a writer. Whether it lives shows in how long this has not changed."""

    seconds: float
    beat: int
    fenced: bool = False


class Life(msgspec.Struct, frozen=True):
    """Somebody has watched the revision of a lease for as long as the lease is: it ran out."""

    revision: int


class Tail:
    """Where the history of a saga ends, as far as one writer's messages say."""

    __slots__ = ("final", "last", "life", "recent")

    def __init__(self, life: str, last: int, recent: Iterable[int] = (), *, final: bool = False) -> None:
        self.life = life
        self.last = last
        self.recent = tuple(recent)
        self.final = final

    @property
    def tail(self) -> int:
        """The last message; 0 if there is none."""
        return self.recent[0] if self.recent else 0

    def after(self, seq: int, last: int, *, final: bool) -> Tail:
        """The same, one message later."""
        return Tail(self.life, last, (seq, *self.recent[: REMEMBERED - 1]), final=final)


_meta = msgspec.json.Decoder(Meta)


def meta_of(payload: bytes) -> tuple[Meta, int] | None:
    """The first line of a payload and where the lines of records begin; None if it is none of ours."""
    end = payload.find(b"\n")
    if end < 0 or len(payload) > _TOO_LONG:
        return None
    try:
        meta = _meta.decode(payload[:end])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return (meta, end + 1) if meta.format == FORMAT else None


BODY = tuple[int, bytes]
"""Number and line of a record."""


def fold(tails: dict[str, Tail], messages: Iterable[tuple[Message, Meta]]) -> dict[str, Tail]:
    """Where the sagas of a writer end after these messages of its, in order."""
    for message, meta in messages:
        if meta.open is not None:
            tails = {one.saga: Tail(one.life, one.last, (one.tail,), final=one.final) for one in meta.open}
        for part in meta.sagas:
            tails[part.saga] = Tail(part.life, part.last, (message.seq, *part.earlier)[:REMEMBERED], final=part.final)
    return tails


_SAFE: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_ESCAPES: Final[Mapping[int, str]] = {byte: chr(byte) if chr(byte) in _SAFE else f"={byte:02X}" for byte in range(256)}


def token_of(saga_id: str) -> str:
    """The id as one token of a subject: letters, digits, `_` and `-` as they are, any other byte as `=` and hex."""
    return "".join(map(_ESCAPES.__getitem__, saga_id.encode())) or "="


def saga_of(token: str) -> str | None:
    """The id that such a token stands for; None if it is none."""
    raw = bytearray()
    at = 0
    try:
        while at < len(token):
            if token[at] == "=":
                if len(token) > 1:
                    raw += bytes.fromhex(token[at + 1 : at + 3])
                at += 3
            else:
                raw += token[at].encode("ascii")
                at += 1
        saga_id = raw.decode()
    except ValueError:
        return None
    return saga_id if token_of(saga_id) == token else None
