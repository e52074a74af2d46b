"""What a recovery came to, and looking into a log without owning anything."""

from __future__ import annotations

from typing import Literal

import msgspec

from agent_saga_core.errors import LogCorrupted, SagaNotFound
from agent_saga_core.log import open_log
from agent_saga_core.log.base import Log
from agent_saga_core.state import SagaHead, SagaState, fold

__all__ = ["RecoveryReport", "Verdict", "check_known", "list_sagas", "log_of", "read_saga"]

Verdict = Literal["recovered", "attention", "untouched", "live", "damaged"]


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a recovery came to, as ids of sagas."""

    recovered: tuple[str, ...] = ()
    """Rolled back; with `dry_run`, those that would be, if nothing that is called fails."""
    attention: tuple[str, ...] = ()
    """Something is left that a person, or time, must settle; with `dry_run`, would be."""
    untouched: tuple[str, ...] = ()
    """Left as they are: suspended, left to their framework for a while, with a handler that is missing here, or one
    that fails and is given time."""
    live: tuple[str, ...] = ()
    """Owned by a running process."""
    damaged: tuple[str, ...] = ()
    """Damage in the log may concern them; nothing was done."""
    reasons: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Why, for those that are neither recovered nor live."""


def log_of(log: Log | str) -> tuple[Log, bool]:
    """A log, opened where its address is given, and whether the caller has to close it."""
    return (open_log(log, create=False), True) if isinstance(log, str) else (log, False)


def list_sagas(log: Log | str) -> list[SagaHead]:
    """Every saga of a log, oldest first. One that damage may concern is left out: `verify` names it."""
    opened, ours = log_of(log)
    try:
        heads: list[SagaHead] = []
        for saga_id in opened.saga_ids():
            try:
                folded = fold(opened.read(saga_id), saga_id)
            except LogCorrupted:
                continue
            if not folded.empty:
                heads.append(folded.head())
        return sorted(heads, key=lambda head: (head.started, head.saga_id))
    finally:
        if ours:
            opened.close()


def read_saga(log: Log | str, saga_id: str) -> SagaState:
    """One saga as its log tells it, with its timeline.

    Raises:
        SagaNotFound: The log holds none of that id.
        LogCorrupted: Damage may concern it.
    """
    opened, ours = log_of(log)
    try:
        records = opened.read(saga_id)
        if not records:
            raise SagaNotFound(f"no saga {saga_id!r} in {opened.url}. See `agent-saga list`.", saga_id=saga_id)
        return fold(records, saga_id).view(records)
    finally:
        if ours:
            opened.close()


def check_known(log: Log, saga_id: str) -> None:
    """Refuse an id that the log does not hold.

    Raises:
        SagaNotFound: It does not.
    """
    try:
        known = bool(log.read(saga_id))
    except LogCorrupted:
        return  # the recovery itself reports it
    if not known:
        raise SagaNotFound(f"no saga {saga_id!r} in {log.url}. See `agent-saga list`.", saga_id=saga_id)
