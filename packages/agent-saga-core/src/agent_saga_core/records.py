"""The record types: what a saga's history is made of. Their line format is the on-disk contract."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

__all__ = ["FINAL", "FORMAT_VERSION", "Record", "RecordType"]

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
    # Reserved in version 1, never written by it: a reader that meets one must leave the saga alone.
    PREPARED = "PREPARED"
    JOIN = "JOIN"
    COMMITTING = "COMMITTING"


FINAL: Final = frozenset({RecordType.COMMITTED, RecordType.ROLLED_BACK})
"""No record follows one of these in the same saga."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a saga's history.

    `data` is plain JSON (`dict`, `list`, `str`, `int`, `float`, `bool`, None); what it holds per type is described
    in `docs/log-format.md`. `n` counts from 1 without gaps within the saga, over all its writers. `epoch` is the
    number of the CLAIM (or START) under which the record was written. `time` is seconds since the epoch, for people.
    A reader that does not know `type` skips the record, unless it is `critical`.
    """

    saga: str
    n: int
    epoch: int
    type: str
    time: float
    data: dict[str, Any]
    critical: bool = True
