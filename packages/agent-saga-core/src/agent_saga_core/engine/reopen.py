"""Opening a saga: a new one starts, an unowned one is claimed and settled, a committed one only replays."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import msgspec

from agent_saga_core.declare import ActionSemantics
from agent_saga_core.engine.effects import Append, Blocking, Draft, Flow, Flush, Outcome, Sleep, Transition
from agent_saga_core.engine.run import Run
from agent_saga_core.engine.settle import Settled, settle
from agent_saga_core.engine.unwind import release, roll_back
from agent_saga_core.errors import SagaBusy, SagaNotRunning, StepUnknown
from agent_saga_core.records import Record, RecordType
from agent_saga_core.state import Attempt, SagaFold, SagaStatus, Step, StepStatus, fold

__all__ = ["claim", "opening"]

_NUMBER = re.compile("[0-9]{1,9}")
BUSY_POLL = 0.05
"""Seconds between two tries to own a busy saga: the kernel's locks tell nobody that they were dropped."""


def opening(run: Run, start: dict[str, Any], *, fresh: bool, busy_timeout: float) -> Flow[None]:
    """Own the saga, or raise. `start` is what START would hold.

    Raises:
        SagaBusy: Somebody owns it.
        SagaNotRunning: It is rolling back or ended without committing.
        StepUnknown: A step could not be settled; the saga was rolled back.
    """
    if not fresh:
        outcome: Outcome = yield Blocking(partial(run.log.read, run.saga_id))
        if _ended(run, _value(outcome)):
            return
    records = yield from claim(run, fresh=fresh, busy_timeout=busy_timeout)
    if not records:
        yield Append(lambda: ([(RecordType.START, start)], None))
        if "orphan_after" in start:  # somebody else keeps the saga's id, and may look for it at once
            yield Flush()
        return
    run.load(records)
    status = run.fold.status
    if status is SagaStatus.COMMITTED:  # it committed while we were about to claim it
        run.replay_only = True
    if status not in (SagaStatus.RUNNING, SagaStatus.SUSPENDED):
        yield Blocking(partial(run.log.release, run.saga_id))
        if status is not SagaStatus.COMMITTED:
            raise _not_running(run.saga_id, run.fold)
        return
    yield from _resume(run)


def claim(run: Run, *, fresh: bool, busy_timeout: float) -> Flow[tuple[Record, ...]]:
    """Claim through the log, trying again for `busy_timeout` seconds."""
    until = run.clock.monotonic() + busy_timeout
    while True:
        outcome: Outcome = yield Blocking(partial(_claim, run, fresh))
        left = until - run.clock.monotonic()
        if not isinstance(outcome.error, SagaBusy) or left <= 0:
            break
        yield Sleep(min(BUSY_POLL, left))
    records = _value(outcome)
    run.claimed_at = run.clock.monotonic()
    return records


def _claim(run: Run, fresh: bool) -> tuple[Record, ...]:
    records = run.log.claim(run.saga_id, fresh=fresh)
    run.claimed = True
    return records


def _value(outcome: Outcome) -> Any:
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def _not_running(saga_id: str, folded: SagaFold) -> SagaNotRunning:
    status = folded.status
    if folded.moves_to is not None:
        said = "was moved to" if status.final else "is being moved to"
        return SagaNotRunning(
            f"saga {saga_id!r} {said} the log {folded.moves_to}. Open it there, once it has arrived.",
            saga_id=saga_id,
            status=status,
        )
    return SagaNotRunning(
        f"saga {saga_id!r} is {status}. Use another id; `agent-saga recover` finishes what is left of it.",
        saga_id=saga_id,
        status=status,
    )


def _ended(run: Run, records: tuple[Record, ...]) -> bool:
    """Whether the saga has ended: COMMITTED opens for replay only, everything else is refused."""
    if not records:
        return False
    folded = fold(records, run.saga_id)
    if folded.status is SagaStatus.COMMITTED:
        run.fold = folded
        run.replay_only = True
        return True
    if folded.status in (SagaStatus.RUNNING, SagaStatus.SUSPENDED):
        return False
    raise _not_running(run.saga_id, folded)


def _open_steps(run: Run) -> list[tuple[Step, Attempt]]:
    return [
        (step, attempt)
        for step in run.fold.steps
        if step.semantics is not ActionSemantics.READ_ONLY
        for attempt in step.attempts
        if attempt.unsettled and attempt.status is not StepStatus.PAUSED
        if step.semantics is not ActionSemantics.REVERSIBLE
    ]


def _resume(run: Run) -> Flow[None]:
    """Settle what the former owner left open, waiting for what is in doubt; else roll back."""
    yield Append(partial(_gone, run))
    patient_until = run.clock.monotonic() + run.options.drain_timeout
    unsettled: Step | None = None
    while run.fold.rollback_only is None:
        wake: float | None = None
        unsettled = None
        for step, attempt in _open_steps(run):
            settled = yield from settle(run, step, attempt, keep=True)
            if settled is Settled.WAITING:
                at = run.settle_at(step, attempt)
                wake = at if wake is None else min(wake, at)
            if settled in (Settled.WAITING, Settled.OPEN):
                unsettled = unsettled or step
        if wake is None or wake > patient_until:
            break
        yield Sleep(max(0.0, wake - run.clock.monotonic()), "a call that was given up may still land")
    if unsettled is not None or run.fold.rollback_only is not None:
        reason = run.fold.rollback_only or f"step {unsettled.number if unsettled else 0} is not settled"
        report = yield from roll_back(run, patient_until=patient_until, reason=reason)
        yield from release(run)
        if unsettled is None:
            raise _not_running(run.saga_id, run.fold)
        raise StepUnknown(
            f"saga {run.saga_id!r}: step {unsettled.number} {unsettled.tool!r} may or may not have happened, so the "
            f"saga was rolled back ({report}). Use another id; see `agent-saga show`."
        )
    run.recorded = {step.number for step in run.fold.steps if _must_be_met(step)}
    if run.options.resume == "continue":
        _continue_counts(run)
        run.detach()
        run.recorded = set()


def _gone(run: Run) -> Transition:
    """What went with the former process leaves nothing: private state, and reads in flight. Both run again."""
    records: list[Draft] = []
    for step in run.fold.steps:
        at = {"step": step.number, "attempt": step.last.number}
        if step.semantics is ActionSemantics.REVERSIBLE and step.last.open:
            records.append((RecordType.COMPENSATED, {**at, "gone": True}))
        elif step.semantics is ActionSemantics.READ_ONLY and step.last.status is StepStatus.INTENDED:
            records.append((RecordType.NOT_APPLIED, {**at, "reason": "the process that made the call is gone"}))
    return records, None


def _must_be_met(step: Step) -> bool:
    return step.semantics not in (ActionSemantics.READ_ONLY, ActionSemantics.REVERSIBLE) and (
        step.last.status is StepStatus.DONE
    )


def _continue_counts(run: Run) -> None:
    """The body goes on where it was: equal calls count on from those that the log holds."""
    for step in run.fold.steps:
        base, sign, number = step.identity.rpartition("#")
        if sign and _NUMBER.fullmatch(number) and step.last.open and _counted(base):
            run.taken.setdefault((base, None), set()).add(int(number))


def _counted(base: str) -> bool:
    try:
        parts = msgspec.json.decode(base)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(parts, list) and parts[:1] == ["n"]
