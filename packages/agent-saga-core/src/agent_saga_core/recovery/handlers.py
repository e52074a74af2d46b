"""What a saga asks of compensators: which are missing here, which it will call, and how the calls of them ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from agent_saga_core import registry, values
from agent_saga_core.declare import ActionSemantics
from agent_saga_core.engine.compensate import DELAYS
from agent_saga_core.engine.run import Attempted
from agent_saga_core.records import Record, RecordType
from agent_saga_core.state import Attempt, SagaFold, Step, StepStatus

__all__ = ["Tries", "Try", "missing", "needs_of", "tries_of"]

_UNKNOWN = (StepStatus.INTENDED, StepStatus.UNKNOWN, StepStatus.PAUSED)


class Try(NamedTuple):
    """One call of a compensator, as the log tells of its end."""

    saga_id: str
    n: int
    """The number of the record that tells it."""
    handler: str
    ok: bool
    time: float
    """By the wall clock of the process that wrote it."""


class Tries:
    """Follows the records of one saga, and says of each whether it ends a call of a compensator.

    A failure that no start came before (its arguments cannot be rebuilt, its key is too old) is no call. Neither is a
    compensation that a probe saw: it says nothing of whether the compensator works now.
    """

    def __init__(self) -> None:
        self._started: dict[Attempted, str] = {}

    def follow(self, kind: str, data: dict[str, Any]) -> tuple[str, bool] | None:
        """Take the next record; answers with handler and success if a call has ended."""
        if kind not in (RecordType.COMPENSATING, RecordType.COMPENSATED, RecordType.COMPENSATION_FAILED):
            return None
        at = (data["step"], data["attempt"])
        if kind == RecordType.COMPENSATING:
            if "handler" in data:
                self._started[at] = str(data["handler"])
            return None
        handler = self._started.pop(at, None)
        if handler is None or (kind == RecordType.COMPENSATED and "by" in data):
            return None
        return handler, kind == RecordType.COMPENSATED


def tries_of(saga_id: str, records: Iterable[Record]) -> Iterator[Try]:
    """Every call of a compensator that ended, in a saga that can be folded."""
    tries = Tries()
    for record in records:
        ended = tries.follow(record.type, record.data)
        if ended is not None:
            yield Try(saga_id, record.n, ended[0], ended[1], record.time)


def needs_of(folded: SagaFold, *, retry: bool = False) -> frozenset[str]:
    """The compensators that rolling the saga back may call, here and now or once its doubts have passed.

    `retry`: whether it gives new tries to what failed.
    """
    return frozenset(
        str(attempt.undo["handler"])
        for step, attempt in folded.open_attempts()
        if attempt.undo is not None and "handler" in attempt.undo and _is_called(step, attempt, retry)
    )


def _is_called(step: Step, attempt: Attempt, retry: bool) -> bool:
    undo = attempt.undo or {}
    if step.semantics in (ActionSemantics.REVERSIBLE, ActionSemantics.IRREVERSIBLE) or attempt.accepted:
        return False
    if undo.get("local") or attempt.undo_error is not None:
        return False
    if attempt.status in _UNKNOWN:
        return step.probe is not None or ("paths" not in undo and undo.get("if_absent") in ("noop", "forbids"))
    return retry or attempt.tries < len(DELAYS)


def missing(step: Step, attempt: Attempt) -> Iterator[str]:
    """Why an open attempt cannot be undone or settled here: a handler that is not registered, or does not fit."""
    if step.semantics is ActionSemantics.REVERSIBLE or attempt.accepted:
        return
    if step.probe is not None and attempt.status is not StepStatus.DONE and registry.probe_named(step.probe) is None:
        yield f"no probe {step.probe!r} is registered here"
    undo = attempt.undo
    if undo is None or undo.get("local") or "handler" not in undo:
        return
    handler = str(undo["handler"])
    entry = registry.compensator_named(handler)
    if entry is None:
        yield f"no compensator {handler!r} is registered here"
        return
    if "paths" in undo:
        return
    try:
        entry.check(values.decode_args(undo["kwargs"], entry.hints))
    except (values.Undecodable, TypeError, KeyError, ValueError) as error:
        yield f"the stored arguments of step {step.number} do not fit compensator {handler!r} ({type(error).__name__})"
