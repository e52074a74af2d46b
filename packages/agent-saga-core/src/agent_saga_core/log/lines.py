"""Histories as they are stored: record lines without their place, which is all of them that a log of its own decides.

A record's line has the hash, `synced` and `prev` from the place where it stands (`docs/log-format.md`). All else, its
salt and digest included, and that it was erased, is the same wherever it stands: `Encoded`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from agent_saga_core.errors import LogCorrupted, SagaBusy, SagaError
from agent_saga_core.records import (
    FINAL,
    MAX_LINE_BYTES,
    RECORD_LINE,
    Encoded,
    Record,
    RecordType,
    critical_unknown,
    decode_data,
    digest_fits,
    finish_line,
)

__all__ = [
    "Adopted",
    "AnotherHistory",
    "Lines",
    "Whole",
    "adopt_owned",
    "encoded_of",
    "is_erased",
    "is_final",
    "is_there",
    "record_in",
    "whole_of",
    "wholes_of",
]

Lines = tuple[Encoded, ...]
"""The records of one saga, in order, from the first."""


class AnotherHistory(SagaError):
    """A log holds another saga under the id of one that it was to adopt."""

    def __init__(self, saga_id: str) -> None:
        super().__init__(f"the log holds another history of saga {saga_id!r}; nothing of it was stored")
        self.saga_id = saga_id


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the histories that a log was to adopt; each saga is in one of the three."""

    stored: tuple[str, ...] = ()
    """Those that were not there before."""
    there: tuple[str, ...] = ()
    """Those that were there already; they may have gone on since."""
    refused: dict[str, SagaError] = {}
    """Why: `SagaBusy`, `AnotherHistory` or `LogCorrupted`. Nothing of them was stored."""


class Whole(NamedTuple):
    """A history that was checked: what a store needs of it."""

    saga_id: str
    lines: Lines
    numbers: range
    """The record numbers, from 1."""
    epochs: tuple[int, ...]
    """Under which epoch each record was accepted; that of a CLAIM is its own number."""
    epoch: int
    """The number of the last CLAIM; 1 if there is none."""
    ended: float | None
    """The time of the final record; None if there is none."""
    unknown: tuple[int, str] | None
    """Number and type of the first record that is critical and of a type that this version does not know."""


_CLAIM: Final = RecordType.CLAIM.encode()
_FINAL: Final = frozenset(kind.encode() for kind in FINAL)


def encoded_of(line: re.Match[bytes]) -> Encoded:
    """What of a line that `RECORD_LINE` matched does not depend on its place."""
    header, start = line["header"], line.start("header")
    return Encoded(
        head=header[: line.end("time") - start],
        name=line["saga"],
        digest=b',"digest":"%b"' % line["digest"],
        rest=line.string[line.end("header") : line.end()] + b"\n",
    )


def _has_no_place(line: re.Match[bytes], encoded: Encoded) -> bool:
    """Whether the pieces of a line are what they are taken for, and `synced` and `prev` are not among them."""
    start, time, header = line.start("header"), line.end("time"), line.end("header")
    return time - start == len(encoded.head) and header - time == len(encoded.digest)


def whole_of(saga_id: str, lines: Sequence[Encoded]) -> Whole:
    """Check a history that is to be adopted: whoever gives it may be wrong, or hostile.

    Raises:
        ValueError: It is none that a log of ours could hold. The message shows nothing of what is in it.
    """
    name = msgspec.json.encode(saga_id)
    epoch, epochs, ended, unknown = 1, list[int](), None, None
    for n, encoded in enumerate(lines, 1):
        whole = finish_line(encoded, b"", b"")[0]
        line = RECORD_LINE.fullmatch(whole[:-1]) if len(whole) <= MAX_LINE_BYTES and whole[-1:] == b"\n" else None
        fits = line is not None and _has_no_place(line, encoded) and encoded.name == name == line["saga"]
        if line is None or not (fits and int(line["n"]) == n and digest_fits(line)):
            raise ValueError(f"record {n} of saga {saga_id!r} is not what a log would hold in this place")
        if ended is not None:
            raise ValueError(f"record {n} of saga {saga_id!r} follows its final one")
        if line["salt"] is not None and decode_data(line["data"]) is None:
            raise ValueError(f"record {n} of saga {saga_id!r} holds no JSON that we write")
        if unknown is None and critical_unknown(line["type"].decode(), line["optional"] is not None):
            unknown = n, line["type"].decode()
        if line["type"] == _CLAIM:
            epoch = n
        elif line["type"] in _FINAL:
            ended = float(line["time"])
        epochs.append(epoch)
    if not lines:
        raise ValueError(f"the history of saga {saga_id!r} is empty; there is nothing to adopt")
    return Whole(saga_id, tuple(lines), range(1, len(lines) + 1), tuple(epochs), epoch, ended, unknown)


def record_in(saga_id: str, encoded: Encoded) -> Record:
    """What a line of a history that was checked says; an erased one has no data."""
    line = RECORD_LINE.fullmatch(finish_line(encoded, b"", b"")[0][:-1])
    if line is None:
        raise ValueError(f"a record of saga {saga_id!r} is no line that a log would hold")
    return Record(
        saga=saga_id,
        n=int(line["n"]),
        epoch=int(line["epoch"] or 1),
        type=line["type"].decode(),
        time=float(line["time"]),
        data=decode_data(line["data"] or b"") or {},
        critical=line["optional"] is None,
    )


def is_final(encoded: Encoded) -> bool:
    """Whether no record can follow this one."""
    # No string in a head holds a quotation mark that is not escaped.
    return encoded.head.partition(b',"type":"')[2].partition(b'"')[0] in _FINAL


def is_erased(encoded: Encoded) -> bool:
    """Whether the payload of a record was erased."""
    return encoded.rest[:1] != b","


def wholes_of(histories: Mapping[str, Sequence[Encoded]]) -> list[Whole]:
    """Check histories that are to be adopted, in their order.

    Raises:
        ValueError: One is none that a log of ours could hold.
    """
    return [whole_of(saga_id, lines) for saga_id, lines in histories.items()]


def is_there(whole: Whole, stored: Sequence[Encoded]) -> bool:
    """Whether a history is stored already; False if nothing of the saga is.

    One that went on since it was stored is there as well: then a copy is made again whose first try was cut off before
    it could note that it had succeeded.

    Raises:
        AnotherHistory: What is stored is something else.
    """
    if not stored:
        return False
    if whole.lines != tuple(stored[: len(whole.lines)]):
        raise AnotherHistory(whole.saga_id)
    return True


def adopt_owned(
    wholes: Sequence[Whole],
    *,
    take: Callable[[str, object], None],
    look: Callable[[str], Sequence[Encoded]],
    put: Callable[[Sequence[Whole]], None],
    give_up: Callable[[str, object], None],
    at_once: int = 1_000_000,
) -> Adopted:
    """See `Log.adopt`; for a store on which a saga can be owned for as long as this takes.

    Args:
        wholes: What to store.
        take: Exclude everybody else from a saga, under a token; raises `SagaBusy`.
        look: What is stored of it; raises `LogCorrupted`.
        put: Store those that are new, each as a whole, and make them durable.
        give_up: End what `take` began, even if that was interrupted.
        at_once: How many can be owned at one time.
    """
    done = Adopted()
    for start in range(0, len(wholes), at_once):
        some = wholes[start : start + at_once]
        now = _adopt_some(some, take, look, put, give_up)
        stored, there = done.stored + now.stored, done.there + now.there
        done = Adopted(stored=stored, there=there, refused={**done.refused, **now.refused})
    return done


def _adopt_some(
    wholes: Sequence[Whole],
    take: Callable[[str, object], None],
    look: Callable[[str], Sequence[Encoded]],
    put: Callable[[Sequence[Whole]], None],
    give_up: Callable[[str, object], None],
) -> Adopted:
    tokens = {whole.saga_id: object() for whole in wholes}
    there: list[str] = []
    fresh: list[Whole] = []
    refused: dict[str, SagaError] = {}
    try:
        for whole in wholes:
            try:
                take(whole.saga_id, tokens[whole.saga_id])
                if is_there(whole, look(whole.saga_id)):
                    there.append(whole.saga_id)
                else:
                    fresh.append(whole)
            except (SagaBusy, AnotherHistory, LogCorrupted) as error:
                refused[whole.saga_id] = error
        if fresh:
            put(fresh)
    finally:
        for saga_id, token in tokens.items():
            give_up(saga_id, token)
    return Adopted(stored=tuple(whole.saga_id for whole in fresh), there=tuple(there), refused=refused)
