"""The end of a scope: no new steps, wait for those in flight, settle, commit or roll back, verdict, flush."""

from __future__ import annotations

from functools import partial
from typing import Any

from agent_saga_core.declare import ActionSemantics
from agent_saga_core.engine.effects import Append, CancelRunning, Flow, Flush, Sleep, Transition, Wait
from agent_saga_core.engine.run import Run
from agent_saga_core.engine.settle import Settled, settle
from agent_saga_core.engine.unwind import after_scope, roll_back, unwind
from agent_saga_core.records import RecordType
from agent_saga_core.state import Report, SagaStatus, within

__all__ = ["abort", "drain", "finish", "finish_savepoint", "leave_savepoint", "suspend"]

CANCEL_GRACE = 5.0
"""Seconds for cancelled calls to hear of it. One that ignores its cancellation is then reported as still running."""


def finish(run: Run, error: BaseException | None) -> Flow[Report]:
    """End the scope; idempotent, so that an interrupted end can be driven again.

    Commits if the body ended normally and nothing is open; else rolls back. Returns the report, durable.
    """
    ended: Report | None = yield Append(partial(_close, run))
    if ended is not None:
        yield Flush()
        return ended
    patient_until = run.clock.monotonic() + run.options.drain_timeout
    yield from drain(run, "", run.options.drain_timeout)
    if error is None:
        yield from _settle_open(run, patient_until)
        report: Report | None = yield Append(partial(_commit, run))
        if report is not None:
            yield Flush()
            return report
        yield from drain(run, "", max(0.0, patient_until - run.clock.monotonic()))  # a savepoint may be ending
    reason = run.fold.rollback_only or (
        f"the body raised {type(error).__name__}" if error is not None else "not settled"
    )
    return (yield from roll_back(run, patient_until=patient_until, reason=reason))


def finish_savepoint(run: Run, scope: str) -> Flow[bool]:
    """Undo a savepoint's own steps; returns whether nothing of them is left. If not, the saga is rollback-only.

    Like a step, it stands in `run.flows` to its last record: the saga may end meanwhile, in another task.
    """
    token = object()
    patient_until = run.clock.monotonic() + run.options.drain_timeout
    try:
        yield Append(partial(_end_scope, run, scope, token))
        yield from drain(run, scope, run.options.drain_timeout)
        clean: bool = yield from unwind(run, scope, patient_until)
        if not clean:
            yield from abort(run, f"savepoint {scope!r} could not be undone")
        run.savepoints.discard(scope)
        yield from after_scope(run, token)
    finally:
        if token in run.flows:
            run.leave(token)
    return clean


def leave_savepoint(run: Run, scope: str) -> Flow[None]:
    """No step starts in `scope` any more, and those in flight have ended (or the drain time has)."""
    yield Append(partial(_end_scope, run, scope, None))
    yield from drain(run, scope, run.options.drain_timeout)
    run.savepoints.discard(scope)


def _end_scope(run: Run, scope: str, token: object) -> Transition:
    run.ended.add(scope)
    if token is not None:
        run.flows[token] = scope.rpartition("/")[0]  # in the scope around it, which its own drain does not wait for
    return [], None


def drain(run: Run, scope: str, seconds: float) -> Flow[bool]:
    """Wait for the steps of `scope`, their settling included; cancel async calls only when `seconds` are over."""
    idle: bool = yield Wait(partial(_idle, run, scope), seconds)
    if not idle:
        yield CancelRunning(scope)
        idle = yield Wait(partial(_uncancellable, run, scope), CANCEL_GRACE)
    return idle


def _idle(run: Run, scope: str) -> bool:
    scopes = [running.call.scope for running in run.running.values()]
    return not any(within(inner, scope) for inner in [*scopes, *run.flows.values()])


def _uncancellable(run: Run, scope: str) -> bool:
    return not any(within(r.call.scope, scope) and r.cancel is not None for r in run.running.values())


def _close(run: Run) -> Transition:
    run.closing = True
    status = run.fold.status
    if status.final or (status is SagaStatus.NEEDS_ATTENTION and run.over):
        return [], run.fold.report()
    return [], None


def _settle_open(run: Run, patient_until: float) -> Flow[None]:
    """Settle what was left UNKNOWN by a cancellation, waiting for what is in doubt as far as patience goes."""
    while run.fold.rollback_only is None:
        wake: float | None = None
        for number, attempt in sorted(run.unsettled | run.must_undo):
            step = run.fold.step(number)
            settled = yield from settle(run, step, step.attempts[attempt - 1], keep=False)
            if settled is Settled.WAITING:
                at = run.settle_at(step, step.attempts[attempt - 1])
                wake = at if wake is None else min(wake, at)
        if wake is None or wake > patient_until:
            return
        yield Sleep(max(0.0, wake - run.clock.monotonic()), "a call that was given up may still land")


def _commit(run: Run) -> Transition:
    """COMMITTED, if nothing speaks against it; else None, and the saga can no longer commit."""
    fold = run.fold
    if fold.rollback_only is not None or fold.status not in (SagaStatus.RUNNING, SagaStatus.SUSPENDED):
        return [], None
    missed = sorted(run.recorded - run.met)
    if missed:
        names = ", ".join(f"step {n} {fold.step(n).tool!r}" for n in missed)
        run.diverged = f"the resumed body ended without repeating {names}"
        return [(RecordType.ABORT, {"reason": run.diverged})], None
    if run.savepoints:
        still = min(run.savepoints)
        return [(RecordType.ABORT, {"reason": f"savepoint {still!r} was still open at the end of the saga"})], None
    for step in fold.steps:
        if step.semantics is ActionSemantics.READ_ONLY:
            continue
        for attempt in step.attempts:
            key = (step.number, attempt.number)
            if attempt.unsettled or run.is_running(*key) or key in run.must_undo or key in run.busy:
                return [(RecordType.ABORT, {"reason": f"step {step.number} {step.tool!r} is not settled"})], None
    run.over = True
    run.append([(RecordType.COMMITTED, {})])
    run.stale = False
    return [], fold.report()


def abort(run: Run, reason: str) -> Flow[None]:
    """Make the saga rollback-only, durably."""
    yield Append(partial(_abort, run, reason))
    yield Flush()


def _abort(run: Run, reason: str) -> Transition:
    if run.fold.rollback_only is not None or run.fold.status.final or run.suspended:
        return [], None
    return [(RecordType.ABORT, {"reason": reason})], None


def suspend(run: Run, reason: str, deadline: float) -> Flow[bool]:
    """Leave without commit or rollback; returns False, changing nothing, if a step still runs after the drain time."""
    idle: bool = yield Wait(lambda: not _working(run), run.options.drain_timeout)
    if not idle:
        return False
    suspended: bool = yield Append(partial(_suspend, run, reason, deadline))
    if suspended:
        yield Flush()
    return suspended


def _working(run: Run) -> bool:
    return bool(run.running or run.busy or run.flows)


def _suspend(run: Run, reason: str, deadline: float) -> Transition:
    if _working(run):
        return [], False
    run.suspended = True
    data: dict[str, Any] = {"reason": reason, "deadline": run.clock.time() + deadline}
    return [(RecordType.SUSPENDED, data)], True
