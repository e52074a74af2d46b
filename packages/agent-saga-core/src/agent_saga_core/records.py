"""The record types: what a saga's history is made of. Their line format is the on-disk contract.

`docs/log-format.md` describes the lines byte by byte; what stands here is its only implementation.
"""

from __future__ import annotations

import os
import re
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from hashlib import sha256
from itertools import accumulate
from typing import Any, Final, NamedTuple, cast

import msgspec

__all__ = [
    "FINAL",
    "FORMAT_VERSION",
    "MAX_DATA_BYTES",
    "MAX_DEPTH",
    "MAX_LINE_BYTES",
    "NUMBER",
    "RECORD_LINE",
    "STRING",
    "Encoded",
    "Record",
    "RecordType",
    "critical_unknown",
    "decode_data",
    "digest_fits",
    "encode",
    "finish_line",
    "header_fits",
    "record_of",
]

FORMAT_VERSION: Final = 1


class RecordType(StrEnum):
    """What one record says. The value is what stands in the line."""

    START = "START"
    CLAIM = "CLAIM"
    INTENT = "INTENT"
    DONE = "DONE"
    NOT_APPLIED = "NOT_APPLIED"
    UNKNOWN = "UNKNOWN"
    PAUSED = "PAUSED"
    ABORT = "ABORT"
    SUSPENDED = "SUSPENDED"
    ROLLING_BACK = "ROLLING_BACK"
    COMPENSATING = "COMPENSATING"
    COMPENSATED = "COMPENSATED"
    COMPENSATION_FAILED = "COMPENSATION_FAILED"
    COMMITTED = "COMMITTED"
    ROLLED_BACK = "ROLLED_BACK"
    NEEDS_ATTENTION = "NEEDS_ATTENTION"
    RESOLVED = "RESOLVED"
    # The saga leaves this log: from MOVING on nobody recovers or opens it here, after MOVED it is elsewhere.
    MOVING = "MOVING"
    MOVED = "MOVED"
    # Reserved in version 1, never written by it: a reader that meets one must leave the saga alone.
    PREPARED = "PREPARED"
    JOIN = "JOIN"
    COMMITTING = "COMMITTING"


FINAL: Final = frozenset({RecordType.COMMITTED, RecordType.ROLLED_BACK, RecordType.MOVED})
"""No record follows one of these in the same saga."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a saga's history.

    `data` is plain JSON (`dict`, `list`, `str`, `int`, `float`, `bool`, None); what it holds per type is
    described in `docs/log-format.md`. `n` counts from 1 without gaps within the saga, over all its writers.
    `epoch` is the number of the CLAIM (or START) under which the record was written. `time` is seconds since
    the epoch, for people. A reader that does not know `type` skips the record, unless it is `critical`.
    """

    saga: str
    n: int
    epoch: int
    type: str
    time: float
    data: dict[str, Any]
    critical: bool = True


MAX_DATA_BYTES: Final = 64 * 1024 * 1024
"""A record's data may not be longer than this once encoded: readers hold one line in memory."""

MAX_LINE_BYTES: Final = MAX_DATA_BYTES + 16 * 1024
"""A line longer than this is damage."""

MAX_DEPTH: Final = 256
"""Deepest nesting of a record's data: well below what the JSON decoder takes on a stack that is already
deep."""

_MAX_NUMBER: Final = 10**15
_MAX_TIME: Final = 10**11  # every reader can make a date of what is below

# Pieces of patterns for lines: a JSON string, and a number that counts from 1.
STRING: Final = rb'"[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*"'
NUMBER: Final = rb"[1-9][0-9]{0,14}"
RECORD_LINE: Final = re.compile(
    rb'\{"hash":"(?P<hash>[0-9a-f]{64})",'
    rb'(?P<header>"saga":(?P<saga>' + STRING + rb'),"n":(?P<n>' + NUMBER + rb")"
    rb'(?:,"epoch":(?P<epoch>' + NUMBER + rb"))?"
    rb',"type":"(?P<type>[A-Z_]{1,64})"'
    rb'(?:,"critical":(?P<optional>false))?'
    rb',"time":(?P<time>[0-9]{1,11}(?:\.[0-9]{1,32})?(?:e-[0-9]{1,3})?)'
    rb'(?:,"synced":(?P<synced>' + NUMBER + rb"))?"
    rb'(?:,"prev":\[(?P<prev_saga>' + STRING + rb"),(?P<prev_n>" + NUMBER + rb")\])?"
    rb',"digest":"(?P<digest>[0-9a-f]{64})")'
    rb'(?:,"salt":"(?P<salt>[A-Za-z0-9_-]{22})","data":(?P<data>\{.*\})|[ ]*)\}',
    re.DOTALL,
)
"""The one shape of a record's line, its newline aside. Its groups are all that readers look at: a field given twice,
out of order or out of range is no record line. An erased record has spaces in place of salt and data."""

_TYPE = re.compile(r"[A-Z_]{1,64}")
_STRINGS = re.compile(STRING)
_DEPTHS = bytes.maketrans(b"[{]}", b"\x02\x02\x00\x00")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode


class Encoded(NamedTuple):
    """A record as the pieces of its line that do not depend on the lines before it."""

    head: bytes
    """The header without `synced`, `prev` and `digest`."""
    name: bytes
    """The saga's id as it stands in the line."""
    digest: bytes
    """`,"digest":"..."`."""
    rest: bytes
    """`,"salt":"...","data":{...}}` and the newline."""

    def same_content(self, other: Encoded) -> bool:
        """Whether both say the same, their salts aside."""
        return self.head == other.head and self.rest[_SALTED:] == other.rest[_SALTED:]

    def data(self) -> dict[str, Any]:
        """A fresh copy of the record's data."""
        return _decode_json(self.rest[_SALTED:-2])


_SALT_CHARS: Final = 22  # 132 bits in base64
_SALTED: Final = len(b',"salt":"","data":') + _SALT_CHARS
_salts: deque[bytes] = deque()

# Parent and child would otherwise go on with the same salts.
os.register_at_fork(after_in_child=_salts.clear)


# What the constructor of a named tuple comes to, a quarter of a microsecond sooner.
_make: Callable[[tuple[bytes, bytes, bytes, bytes]], Encoded] = partial(
    tuple.__new__,  # pyright: ignore[reportUnknownMemberType]
    Encoded,
)


def _salt() -> bytes:
    # Two threads that refill at once only leave more salts: `popleft` gives none out twice.
    while True:
        try:
            return _salts.popleft()
        except IndexError:
            pool = urlsafe_b64encode(os.urandom(3 * 11 * 128))
            _salts.extend(pool[i : i + _SALT_CHARS] for i in range(0, len(pool), _SALT_CHARS))


def encode(record: Record) -> Encoded:
    """Encode a record, up to what its place in a stream adds.

    When this returns, reading the finished line gives back an equal record.

    Raises:
        ValueError: The record cannot be encoded, or would not come back equal.
    """
    n, epoch, time = record.n, record.epoch, record.time
    if not (0 < n < _MAX_NUMBER and 0 < epoch < _MAX_NUMBER and 0 <= time < _MAX_TIME):
        raise ValueError(f"record {n!r} of saga {record.saga!r}: n and epoch count from 1, time from 0 to 1e11")
    try:
        kind = record.type.encode()
        name = _encode_json(record.saga)
        data = _encode_json(record.data)
        faithful = name[:1] == b'"' and data[:1] == b"{" and _decode_json(data) == record.data
    except Exception as error:
        # Not chained, and only the type is named: the text of some of these holds the value they choked on.
        raise ValueError(_unencodable(record, type(error).__name__)) from None
    if not faithful:
        raise ValueError(_unencodable(record, "it would not come back equal"))
    if kind not in _KNOWN_BYTES and _TYPE.fullmatch(record.type) is None:
        raise ValueError(f"a record type is 1 to 64 of A-Z and _, got {record.type!r}")
    if len(data) > MAX_DATA_BYTES or _too_deep(data):
        raise ValueError(
            f"record {n} of saga {record.saga!r} is longer than {MAX_DATA_BYTES} bytes or nested deeper than "
            f"{MAX_DEPTH}; store the value elsewhere and log its address"
        )
    try:
        salt = _salts.popleft()
    except IndexError:
        salt = _salt()
    moment = _encode_json(float(time))  # the shortest digits that give it back, as `repr` writes them, but sooner
    if epoch == 1 and record.critical:
        head = b'"saga":%b,"n":%d,"type":"%b","time":%b' % (name, n, kind, moment)
    else:
        head = b'"saga":%b,"n":%d%b,"type":"%b"%b,"time":%b' % (
            name,
            n,
            b"" if epoch == 1 else b',"epoch":%d' % epoch,
            kind,
            b"" if record.critical else b',"critical":false',
            moment,
        )
    digest = b',"digest":"%b"' % sha256(salt + data).hexdigest().encode()
    return _make((head, name, digest, b',"salt":"%b","data":%b}\n' % (salt, data)))


def _unencodable(record: Record, why: str) -> str:
    return (
        f"record {record.n} of saga {record.saga!r} cannot be encoded ({why}): "
        "its data must be plain JSON (dict with str keys, list, str, int, finite float, bool, None)"
    )


def _too_deep(data: bytes) -> bool:
    # Each level takes two brackets.
    if len(data) <= 2 * MAX_DEPTH or data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    brackets = _STRINGS.sub(b"", data).translate(_DEPTHS, _NOT_BRACKETS)
    return max(accumulate(step - 1 for step in brackets), default=0) > MAX_DEPTH


def finish_line(encoded: Encoded, chain: bytes, place: bytes) -> tuple[bytes, bytes]:
    """Put a record behind the line whose hash is `chain`; return the line and its hash.

    Args:
        encoded: The record.
        chain: Hash of the line before, in hexadecimal; the writer's id before the first line.
        place: The `synced` and `prev` fields, each with its leading comma, or nothing.
    """
    head, _, digest, rest = encoded
    header = head + place + digest if place else head + digest
    own = sha256(chain + header).hexdigest().encode()
    return b'{"hash":"%b",%b%b' % (own, header, rest), own


def header_fits(line: re.Match[bytes], chain: bytes) -> bool:
    """Whether a line that `RECORD_LINE` matched was written behind the line whose hash is `chain`."""
    return sha256(chain + line["header"]).hexdigest().encode() == line["hash"]


def digest_fits(line: re.Match[bytes]) -> bool:
    """Whether the data of such a line are those that were written; so are erased ones."""
    salt = line["salt"]
    return salt is None or sha256(salt + line["data"]).hexdigest().encode() == line["digest"]


def critical_unknown(kind: str, optional: bool) -> bool:
    """Whether a record of this type makes its saga unreadable for this version."""
    return kind in _RESERVED or (kind not in _KNOWN and not optional)


_RESERVED: Final = frozenset({RecordType.PREPARED, RecordType.JOIN, RecordType.COMMITTING})
_KNOWN: Final = frozenset(RecordType) - _RESERVED
_KNOWN_BYTES: Final = frozenset(kind.encode() for kind in RecordType)


def decode_data(data: bytes) -> dict[str, Any] | None:
    """Decode a record's data; None if it is not the JSON object that a record holds. Never raises."""
    try:
        value = None if _too_deep(data) else _decode_json(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def record_of(line: re.Match[bytes], saga: str) -> Record | None:
    """The record of a line that `RECORD_LINE` matched; None if its data are erased or no JSON object."""
    data = decode_data(line["data"] or b"")
    if data is None:
        return None
    return Record(
        saga=saga,
        n=int(line["n"]),
        epoch=int(line["epoch"] or 1),
        type=line["type"].decode(),
        time=float(line["time"]),
        data=data,
        critical=line["optional"] is None,
    )
