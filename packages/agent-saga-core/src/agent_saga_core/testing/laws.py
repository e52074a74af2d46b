"""What must hold of a saga's records, and of the world beside them, when everything has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent_saga_core.records import Record, RecordType
from agent_saga_core.state import Attempt, SagaFold, SagaStatus, Step, StepStatus
from agent_saga_core.testing.world import World

__all__ = ["broken_laws"]

_CLOSING = (SagaStatus.ROLLING_BACK, SagaStatus.NEEDS_ATTENTION, SagaStatus.ROLLED_BACK, SagaStatus.COMMITTED)


def broken_laws(history: Mapping[int, Record], world: World) -> list[tuple[str, str]]:
    """The promises that these records and this world break: (id, what was seen). Everything late has arrived."""
    if not history:
        left = [charge.id for charge in world.charges.values()]
        return [("intent-first", f"the log knows of no saga, and there are {left}")] if left else []
    fold = SagaFold("")
    broken: list[tuple[str, str]] = []
    for _, record in sorted(history.items()):
        broken += _before(fold, record)
        fold.apply(record)
    return [*broken, *_after(fold, world)]


def _attempt(fold: SagaFold, data: dict[str, Any]) -> tuple[Step, Attempt]:
    number: int = data["attempt"]
    step = fold.step(data["step"])
    return step, step.attempts[number - 1]


def _before(fold: SagaFold, record: Record) -> Iterator[tuple[str, str]]:
    """What a record must not do to the state before it."""
    if record.type == RecordType.INTENT and fold.status in _CLOSING:
        yield "closed-means-closed", f"record {record.n} begins a step in a saga that is {fold.status}"
    if record.type == RecordType.COMMITTED:
        open_ = [step.number for step in fold.steps for attempt in step.attempts if attempt.unsettled]
        if open_:
            yield "no-silent-commit", f"it commits with steps {open_} unsettled"
    if record.type == RecordType.COMPENSATING:
        step, attempt = _attempt(fold, record.data)
        if attempt.status is StepStatus.COMPENSATED:
            yield "compensate-once", f"record {record.n} compensates step {step.number} again"
        if attempt.status is StepStatus.DONE and fold.status is SagaStatus.ROLLING_BACK:
            later = [
                other.number
                for other, its in fold.open_attempts()
                if its.status is StepStatus.DONE and its.outcome > attempt.outcome and its.undo_error is None
            ]
            if later:
                yield "lifo", f"record {record.n} compensates step {step.number} before steps {later}, done after it"


def _after(fold: SagaFold, world: World) -> Iterator[tuple[str, str]]:
    """What the last record says, against what the world has come to."""
    standing = {charge.key for charge in world.left}
    for charge in world.charges.values():
        if len(charge.refunds) > 1:
            yield "compensate-once", f"{charge.id} was undone under {len(charge.refunds)} keys"
    done = {
        attempt.forward_key for step in fold.steps for attempt in step.attempts if attempt.status is StepStatus.DONE
    }
    if fold.status is SagaStatus.COMMITTED:
        if standing != done:
            yield "no-silent-commit", f"it committed {len(done)} steps, and {len(standing)} effects stand"
    elif fold.status is SagaStatus.ROLLED_BACK:
        if standing:
            yield "no-false-clean", f"it says clean, and {len(standing)} effects stand"
    elif fold.status is SagaStatus.NEEDS_ATTENTION:
        report = fold.report()
        numbers = {step.number for step in report.remaining} if report is not None else set[int]()
        named = {a.forward_key for step in fold.steps if step.number in numbers for a in step.attempts}
        if standing - named:
            yield "no-false-clean", f"{len(standing - named)} effects stand that the report does not name"
        if not numbers:
            yield "no-false-clean", "it needs attention, and the report names no step"
    else:
        yield "recover-anywhere", f"the saga stays {fold.status} after recovery"
