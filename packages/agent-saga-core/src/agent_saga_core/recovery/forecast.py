"""What a dry run can know: which steps a rollback leaves to a person, by what is recorded and what is registered here.

It mirrors the rules of `engine.unwind`, `engine.settle` and `engine.compensate`, and calls nothing. Where the end lies
with a call (a compensator that may fail, a probe that may see anything), it does not guess that it goes badly.
"""

from __future__ import annotations

import msgspec

from agent_saga_core.declare import ActionSemantics
from agent_saga_core.engine.compensate import DELAYS
from agent_saga_core.registry import compensator_named
from agent_saga_core.state import Attempt, SagaFold, Step, StepState, StepStatus

__all__ = ["left_for_sure", "told_by_probes"]

_UNSETTLED = (StepStatus.INTENDED, StepStatus.UNKNOWN, StepStatus.PAUSED)


def left_for_sure(folded: SagaFold, now: float, *, retry: bool) -> tuple[StepState, ...]:
    """The steps that no rollback of this process can undo, each with why, in their order.

    Args:
        folded: The saga; every handler that it names is registered here.
        now: The wall clock of its log.
        retry: Whether what failed gets new tries.
    """
    left: dict[int, StepState] = {}
    for step, attempt in folded.open_attempts():
        why = _why_left(step, attempt, now, retry)
        if why:
            left[step.number] = msgspec.structs.replace(step.view(), detail=why)
    return tuple(left[number] for number in sorted(left))


def told_by_probes(folded: SagaFold) -> tuple[str, ...]:
    """The steps of which only a probe can say whether there is something to undo."""
    asked = (
        f"step {step.number} {step.tool}"
        for step, attempt in folded.open_attempts()
        if step.probe is not None
        and attempt.status in _UNSETTLED
        and not attempt.accepted
        and step.semantics is not ActionSemantics.REVERSIBLE
    )
    return tuple(dict.fromkeys(asked))


def _why_left(step: Step, attempt: Attempt, now: float, retry: bool) -> str:
    """Why an open attempt will be left as it is; empty if that cannot be known."""
    if attempt.accepted or step.semantics is ActionSemantics.REVERSIBLE:
        return ""
    unsettled = attempt.status in _UNSETTLED
    if unsettled and step.probe is not None:
        return ""  # it may see that nothing happened
    if step.semantics is ActionSemantics.IRREVERSIBLE:
        return "irreversible: it cannot be undone, only accepted by a person"
    if attempt.undo_error is not None:
        return f"no undo could be derived: {attempt.undo_error}"
    undo = attempt.undo
    if unsettled and (undo is None or "paths" in undo or undo.get("if_absent") not in ("noop", "forbids")):
        return "nobody knows whether it happened, and its undo is not safe if it did not"
    if undo is None or "paths" in undo:
        return "it has no undo"
    if undo.get("local") or "handler" not in undo:
        return "its undo lived in the process that made the call"
    if attempt.tries >= len(DELAYS) and not retry:
        return attempt.error or "its compensation did not end"
    entry = compensator_named(str(undo["handler"]))
    if entry is not None and entry.probe is None and attempt.started and now - attempt.first_started > entry.key_ttl:
        return "its compensation was started longer ago than its key lives, and may have landed"
    return ""
