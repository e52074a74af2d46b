"""The rollback: compensations in reverse order of outcome, and what the saga comes to."""

from __future__ import annotations

from functools import partial
from typing import Any

from agent_saga_core.declare import ActionSemantics
from agent_saga_core.engine.effects import Append, Blocking, Draft, Flow, Flush, Sleep, Transition
from agent_saga_core.engine.run import Run
from agent_saga_core.engine.settle import Settled, settle
from agent_saga_core.records import RecordType
from agent_saga_core.state import Attempt, Report, SagaStatus, Step, StepStatus

__all__ = ["after_scope", "in_doubt_until", "release", "roll_back", "start_rollback", "unwind"]


def roll_back(run: Run, *, patient_until: float, reason: str, retry: bool = False) -> Flow[Report]:
    """Undo everything that may exist, record the verdict, make it durable.

    Waits for what is in doubt until `patient_until` (monotonic, of the log's clock).
    """
    yield from start_rollback(run, reason, retry=retry)
    while True:
        yield from unwind(run, "", patient_until)
        report: Report | None = yield Append(partial(_verdict, run))
        if report is not None:
            break
    yield Flush()
    return report


def start_rollback(run: Run, reason: str, *, retry: bool) -> Flow[None]:
    """Record that the saga rolls back; it rides with the first compensation. `retry` gives three new tries to all."""
    yield Append(partial(_rolling_back, run, reason, retry))


def in_doubt_until(run: Run) -> float | None:
    """When the next open attempt that only time can settle is due (monotonic); None if there is none."""
    due = [
        run.settle_at(step, attempt)
        for step, attempt in run.fold.open_attempts()
        if attempt.status is StepStatus.UNKNOWN and not attempt.accepted and run.has_means(step, attempt)
    ]
    now = run.clock.monotonic()
    return min((at for at in due if at > now), default=None)


def unwind(run: Run, scope: str, patient_until: float) -> Flow[bool]:
    """Undo what `scope` may have left; returns whether nothing of it is open.

    DONE steps are compensated at once; for those in doubt it waits, as far as `patient_until` allows. One that
    cannot be undone does not stop the others.
    """
    tried: set[tuple[int, int]] = set()
    while True:
        wake: float | None = None
        progress = False
        for step, attempt in (yield Append(lambda: ([], run.open_attempts(scope)))):
            key = (step.number, attempt.number)
            if key in tried or attempt.accepted or not attempt.open:
                continue
            settled = yield from _undo_one(run, step, attempt)
            if settled is Settled.WAITING:
                at = run.settle_at(step, attempt)
                wake = at if wake is None else min(wake, at)
            elif settled is not Settled.ELSEWHERE:
                tried.add(key)
                progress = True
        if wake is not None and wake <= patient_until:
            yield Sleep(max(0.0, wake - run.clock.monotonic()), "a call that was given up may still land")
        elif not progress:
            break
    return (yield Append(lambda: ([], not any(not a.accepted for _, a in run.open_attempts(scope)))))


def _undo_one(run: Run, step: Step, attempt: Attempt) -> Flow[Settled]:
    if step.semantics is ActionSemantics.REVERSIBLE and (step.number, attempt.number) not in run.born:
        yield Append(partial(_gone, step, attempt))
        return Settled.ABSENT
    if step.semantics is ActionSemantics.IRREVERSIBLE and attempt.status is StepStatus.DONE:
        return Settled.OPEN
    return (yield from settle(run, step, attempt, keep=False))


def _gone(step: Step, attempt: Attempt) -> Transition:
    """State of a process that is no more: nothing to restore."""
    return [(RecordType.COMPENSATED, {"step": step.number, "attempt": attempt.number, "gone": True})], None


def _rolling_back(run: Run, reason: str, retry: bool) -> Transition:
    status = run.fold.status
    if status.final or (status is SagaStatus.ROLLING_BACK and not retry):
        return [], None
    data: dict[str, Any] = {"reason": reason}
    if retry:
        data["retry"] = True
    return [(RecordType.ROLLING_BACK, data)], None


def _verdict(run: Run) -> Transition:
    """What is left, and the record that says so; None if something can still be undone here and now."""
    if run.fold.status.final:  # another thread, with a late result of its own, was faster
        return [], run.fold.report()
    remaining: dict[int, str] = {}
    accepted: list[int] = []
    waiting = True
    for step, attempt in run.fold.open_attempts():
        key = (step.number, attempt.number)
        if attempt.accepted:
            accepted.append(step.number)
        elif run.is_running(*key):
            remaining[step.number] = "still running"
            waiting = False
        elif (
            attempt.status is StepStatus.DONE
            and attempt.tries == 0
            and _undoable(step, attempt)
            and key not in run.busy
        ):
            return [], None
        else:
            in_doubt = attempt.status is StepStatus.UNKNOWN and run.has_means(step, attempt)
            in_doubt = in_doubt and run.clock.monotonic() < run.settle_at(step, attempt)
            waiting = waiting and in_doubt
            remaining[step.number] = "in doubt: it may still land" if in_doubt else _why(step, attempt)
    if remaining:
        numbers = sorted(remaining)
        data: dict[str, Any] = {"remaining": numbers, "reasons": [remaining[n] for n in numbers]}
        if waiting:
            data["waiting"] = True
        records: list[Draft] = [(RecordType.NEEDS_ATTENTION, data)]
    else:
        records = [(RecordType.ROLLED_BACK, {"clean": not accepted, "remaining": sorted(set(accepted))})]
    run.over = True
    return _and_report(run, records)


def _and_report(run: Run, records: list[Draft]) -> Transition:
    """Append now, so that the report tells of the state after the verdict."""
    run.append(records)
    run.stale = False
    return [], run.fold.report()


def _undoable(step: Step, attempt: Attempt) -> bool:
    return step.semantics is not ActionSemantics.IRREVERSIBLE and attempt.undo_error is None


def _why(step: Step, attempt: Attempt) -> str:
    if step.semantics is ActionSemantics.IRREVERSIBLE:
        return "irreversible: it cannot be undone, only accepted by a person"
    if attempt.undo_error is not None:
        return f"no undo could be derived: {attempt.undo_error}"
    if attempt.status is StepStatus.UNKNOWN:
        return "nobody knows whether it happened, and its undo is not safe if it did not"
    return attempt.error or "its compensation did not end"


def release(run: Run) -> Flow[None]:
    """Give up ownership once no call of the saga runs, and no step is being settled, in this process any more."""
    idle: bool = yield Append(lambda: ([], run.idle()))
    if idle:
        yield Blocking(lambda: run.log.release(run.saga_id))


def after_scope(run: Run, token: object) -> Flow[None]:
    """A flow ends. If its scope did before it: undo what is left, and give up ownership if nobody else is left."""
    while (yield Append(partial(_outdated, run, token))):
        patient_until = run.clock.monotonic() + run.options.drain_timeout
        yield from roll_back(run, patient_until=patient_until, reason="a late result")
    yield from release(run)


def _outdated(run: Run, token: object) -> Transition:
    """Whether records followed the verdict, so that there is something to do; if not, the flow is over."""
    if run.over and run.stale and not run.fold.status.final:
        return [], True
    run.flows.pop(token, None)
    return [], False
