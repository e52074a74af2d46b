"""What the logs on servers and in databases have in common: rows that prove themselves, batches, fencing, versions.

No SQL and no driver here. A record's row holds the line that `docs/log-format.md` describes, without its newline: so
what is checked and read is the same on every store, and a flipped bit in a record names its saga.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import Final, NamedTuple

import msgspec

from agent_saga_core.errors import Fenced, LogCorrupted, LogUnavailable, SagaError
from agent_saga_core.log.base import Damage, Verification, history_fault
from agent_saga_core.log.commit import Batch, Entry, Owned
from agent_saga_core.log.lines import encoded_of, record_in
from agent_saga_core.log.scan import saga_name
from agent_saga_core.records import (
    FINAL,
    MAX_LINE_BYTES,
    RECORD_LINE,
    Encoded,
    Record,
    RecordType,
    digest_fits,
    finish_line,
    header_fits,
    record_of,
)

__all__ = [
    "SCHEMA",
    "Prepared",
    "Refusals",
    "Rows",
    "SagaBatch",
    "Stated",
    "Version",
    "body_of",
    "check_version",
    "damaged",
    "distinct",
    "history_of",
    "lines_of",
    "lost",
    "missing",
    "name_in",
    "read_body",
    "stored",
    "verified",
]


class Version(NamedTuple):
    """The version of a schema. A minor one only adds: programs that do not know it read and write on."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


SCHEMA: Final = Version(1, 0)
"""What this program makes."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What `agent-saga log init` or `migrate` found and did."""

    url: str
    """Without credentials."""
    version: str
    """The schema that is there now."""
    made: bool
    """Whether there was no log before."""
    applied: tuple[str, ...] = ()
    """The versions that were applied now, oldest first."""
    warnings: tuple[str, ...] = ()
    """What is to be known about this machine or server, a sentence each."""


def missing(url: str) -> LogUnavailable:
    """What to raise where nobody has made a log."""
    return LogUnavailable(
        f"there is no log at {url}: it was not initialised; make it: agent-saga log init {quote(url)}"
    )


def check_version(found: Version, url: str, *, known: Version = SCHEMA) -> None:
    """Refuse a schema that this program may not use.

    Raises:
        LogUnavailable: It is of a newer major version, or an older one.
    """
    if found.major > known.major:
        raise LogUnavailable(
            f"the log {url} has schema {found}, of a newer version of agent-saga than this one, which knows {known}; "
            "upgrade agent-saga to use it"
        )
    if found < known:
        raise LogUnavailable(
            f"the log {url} has schema {found}, of an older version of agent-saga; "
            f"bring it to {known} with: agent-saga log migrate {quote(url)}"
        )


def body_of(encoded: Encoded, log_id: bytes) -> bytes:
    """The line that is stored for a record: seeded with the log's id, complete but for its newline."""
    return finish_line(encoded, log_id, b"")[0][:-1]


def _line_in(body: object, saga_id: str, n: object, log_id: bytes) -> re.Match[bytes] | str:
    """A stored line, or what is wrong with it."""
    line = RECORD_LINE.fullmatch(body) if isinstance(body, bytes) and len(body) <= MAX_LINE_BYTES else None
    if line is None:
        return "it is no record line"
    if not header_fits(line, log_id):
        return "its header is not what was written"
    if saga_name(line["saga"]) != saga_id or int(line["n"]) != n:
        return "it stands in the place of another record"
    return line if digest_fits(line) else "its data are not what was written"


def read_body(body: object, saga_id: str, n: object, log_id: bytes, *, erased: bool = False) -> Record | str:
    """The record of a stored line, or what is wrong with it. Never raises: every byte may be hostile.

    Args:
        body: What the row holds.
        saga_id: The saga that the row says it belongs to.
        n: The number that the row says it has.
        log_id: The id of the log.
        erased: Whether it may be erased; it has no data then.
    """
    line = _line_in(body, saga_id, n, log_id)
    if isinstance(line, str):
        return line
    record = record_of(line, saga_id)
    if record is None and line["salt"] is None and erased:
        return record_in(saga_id, encoded_of(line))
    if record is None:
        return "its payload was erased" if line["salt"] is None else "its data are no JSON that we write"
    return record


class Stated(NamedTuple):
    """What a store says of a saga beside its records, which must agree with it."""

    next: int
    """The number that its next record must have."""
    ended: bool
    epoch: int | None
    """The number of its last CLAIM, 1 if there is none; None while that CLAIM may not be stored yet, or where the store
    keeps none."""
    epochs: Sequence[object] | None = None
    """Under which epoch each record was accepted, in order, where the store keeps that."""


def history_of(
    saga_id: str,
    rows: Iterable[tuple[object, object]],
    log_id: bytes,
    stated: Stated | None,
    *,
    erased: bool = False,
) -> list[Record]:
    """Every record of a saga, in order, whatever its type.

    Args:
        saga_id: The saga.
        rows: Number and stored line of each, in order.
        log_id: The id of the log.
        stated: What the store keeps of the saga; None if it does not know it.
        erased: Whether a record may be erased: it is intact then, without data, and nobody can act on it.

    Raises:
        LogCorrupted: A record is missing, there twice, behind a final one, or not what was written; or the store keeps
            something else of the saga.
    """
    records: list[Record] = []
    for n, body in rows:
        found = read_body(body, saga_id, n, log_id, erased=erased)
        if isinstance(found, str):
            raise damaged(saga_id, f"record {n!r}: {found}")
        records.append(found)
    _agree(saga_id, [(record.n, record.type) for record in records], stated)
    return records


def lines_of(
    saga_id: str, rows: Iterable[tuple[object, object]], log_id: bytes, stated: Stated | None
) -> tuple[Encoded, ...]:
    """Every record of a saga as it is stored, in order: like `history_of`, but an erased one is no damage.

    Raises:
        LogCorrupted: A record is missing, there twice, behind a final one, or not what was written; or the store keeps
            something else of the saga.
    """
    lines: list[Encoded] = []
    kinds: list[tuple[int, str]] = []
    for n, body in rows:
        found = _line_in(body, saga_id, n, log_id)
        if isinstance(found, str):
            raise damaged(saga_id, f"record {n!r}: {found}")
        lines.append(encoded_of(found))
        kinds.append((int(found["n"]), found["type"].decode()))
    _agree(saga_id, kinds, stated)
    return tuple(lines)


def _agree(saga_id: str, kinds: Sequence[tuple[int, str]], stated: Stated | None) -> None:
    """Refuse records, of which number and type are given, that are not all, or not what the store says of them."""
    fault = _numbers_fault([n for n, _ in kinds], None if stated is None else stated.next)
    if fault is None and any(kind in FINAL for _, kind in kinds[:-1]):
        fault = "records follow its final one"
    if fault is None and stated is not None:
        fault = _stated_fault(kinds, stated)
    if fault is not None:
        raise damaged(saga_id, fault)


def _numbers_fault(numbers: Sequence[int], next_n: int | None) -> str | None:
    fault = history_fault(numbers)
    if fault is None and next_n is None and numbers:
        return "the store does not know it, but holds records of it"
    if fault is None and next_n is not None and next_n != len(numbers) + 1:
        return f"{len(numbers)} records are there, and {next_n - 1} were written"
    return fault


def _stated_fault(kinds: Sequence[tuple[int, str]], stated: Stated) -> str | None:
    if stated.ended != (bool(kinds) and kinds[-1][1] in FINAL):
        return "the store and its records do not agree on whether it has ended"
    epochs: list[int] = []
    epoch = 1
    for n, kind in kinds:
        epoch = n if kind == RecordType.CLAIM else epoch
        epochs.append(epoch)
    # Half of what fences a former owner: with another number there, what that one sent might be accepted again.
    if stated.epoch is not None and stated.epoch != epoch:
        return "the store and its records do not agree on who claimed it last"
    if stated.epochs is not None and list(stated.epochs) != epochs:
        return "the store and its records do not agree on who wrote them"
    return None


def name_in(body: object, log_id: bytes) -> str | None:
    """The saga that a stored line says it belongs to, if it is intact."""
    line = RECORD_LINE.fullmatch(body) if isinstance(body, bytes) else None
    name = None if line is None else saga_name(line["saga"])
    if line is None or name is None:
        return None
    return name if isinstance(read_body(body, name, int(line["n"]), log_id), Record) else None


def distinct(*names: str | None) -> tuple[str, ...]:
    """Those that are known, each once."""
    return tuple({name: None for name in names if name is not None})


def verified(records: int, damage: Sequence[Damage]) -> Verification:
    """What a walk that met so many intact records and this damage has found."""
    first = f"{damage[0].where}: {damage[0].reason}" if damage else None
    return Verification(intact=not damage, records=records, first_broken=first, damage=tuple(damage))


def damaged(saga_id: str, fault: str) -> LogCorrupted:
    """What to raise about a damaged saga."""
    return LogCorrupted(
        f"saga {saga_id!r} is damaged: {fault}; restore the log from a copy or settle the saga by hand",
        saga_id=saga_id,
        where=f"saga {saga_id!r}",
    )


def lost(saga_id: str, acknowledged: int, next_n: int) -> LogCorrupted:
    """What to raise to the owner of a saga of which so many records were acknowledged, and are not all there."""
    return LogCorrupted(
        f"saga {saga_id!r} has lost records: {acknowledged} were acknowledged, and the log is at {next_n - 1}; "
        "the server was restored, or a replica took its place that lacked them: settle the saga by hand",
        saga_id=saga_id,
        where=f"saga {saga_id!r}",
    )


class Rows:
    """The records of one saga in a batch, in order, and the lines that are stored of them."""

    __slots__ = ("bodies", "entries")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.bodies: list[bytes] = []

    @property
    def ended(self) -> bytes:
        """The time of the final record, as text; nothing if there is none."""
        last = self.entries[-1]
        # The time is the last thing in the head of a line.
        return last.encoded.head.rpartition(b":")[2] if last.final else b""


class SagaBatch(Batch):
    """A batch, by saga.

    Args:
        entries: What is to be stored.
        log_id: The id of the log.
        records: How many it takes at most.
        size: How many bytes it takes at most, unless one record is longer.
    """

    __slots__ = ("sagas",)

    def __init__(self, entries: Sequence[Entry], log_id: bytes, *, records: int, size: int) -> None:
        taken: list[Entry] = []
        self.sagas: dict[str, Rows] = {}
        for entry in entries:
            body = body_of(entry.encoded, log_id)
            size -= len(body)
            if taken and (size < 0 or len(taken) == records):
                break
            taken.append(entry)
            rows = self.sagas.setdefault(entry.saga, Rows())
            rows.entries.append(entry)
            rows.bodies.append(body)
        super().__init__(taken)


def stored(entries: Sequence[Entry], bodies: Sequence[bytes], found: Mapping[int, object], next_n: int) -> int:
    """How many of one saga's `entries`, from the first, the store holds already; the others may follow.

    For when a conditional append was refused: an acknowledgement may have been lost, or the ownership.

    Args:
        entries: What was to be appended, in order.
        bodies: The stored line of each.
        found: What the store holds under those numbers.
        next_n: The number that the store expects next; 1 if it does not know the saga.

    Raises:
        Fenced: Somebody else has appended to the saga, or records of it are gone.
    """
    same = 0
    for entry, body in zip(entries, bodies, strict=True):
        if entry.n >= next_n:
            break
        if found.get(entry.n) != body:
            raise _fenced(entry, "another record of that number is stored")
        same += 1
    if same < len(entries) and entries[same].n != next_n:
        raise _fenced(entries[same], f"the log is at record {next_n - 1}")
    return same


def _fenced(entry: Entry, why: str) -> Fenced:
    return Fenced(f"this process lost saga {entry.saga!r}: its record {entry.n} was refused, because {why}")


class Refusals:
    """The ownerships that were lost. One refused append refuses all later ones under the same ownership.

    Otherwise a record could be accepted behind one of another owner that its writer has never seen.
    """

    def __init__(self) -> None:
        self._errors: dict[Owned, SagaError] = {}

    def refuse(self, entries: Iterable[Entry], error: SagaError) -> None:
        """Refuse these entries, all of one saga, and all later ones of their owner."""
        for entry in entries:
            entry.error = error
            self._errors.setdefault(entry.owner, error)

    def of(self, entry: Entry) -> SagaError | None:
        """Why this entry is refused; None if it is not."""
        return self._errors.get(entry.owner)

    def forget(self, owner: object) -> None:
        """The ownership is over."""
        if isinstance(owner, Owned):
            self._errors.pop(owner, None)
