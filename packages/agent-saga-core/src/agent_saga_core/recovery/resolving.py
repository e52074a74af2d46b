"""`resolve`: how a person says what became of a step."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from agent_saga_core import values
from agent_saga_core.drive import drive
from agent_saga_core.engine.effects import Append, Blocking, Flow, Flush, Outcome, Transition
from agent_saga_core.engine.inverse import from_result
from agent_saga_core.engine.reopen import claim
from agent_saga_core.engine.run import Options, Run
from agent_saga_core.engine.unwind import roll_back, start_rollback
from agent_saga_core.errors import DeclarationError, SagaNotFound, SagaNotRunning
from agent_saga_core.log.base import Log
from agent_saga_core.records import RecordType
from agent_saga_core.recovery.handlers import missing
from agent_saga_core.recovery.report import check_known, log_of, read_saga
from agent_saga_core.state import Attempt, SagaFold, SagaState, SagaStatus, Step, StepStatus, fold

__all__ = ["resolve"]

Resolution = Literal["landed", "not-applied", "compensated", "accepted"]


def resolve(
    log: Log | str,
    saga_id: str,
    step: int | str,
    *,
    outcome: Resolution,
    by: str,
    note: str,
    result: Any = None,
) -> SagaState:
    """Record what a person found out about a step, and go on with the rollback if one is under way.

    When this returns, who said what and why is durable. Nothing is undone here that the person did not speak of,
    except what the rollback still owes and this process has the compensators for; the rest is left to `recover`.

    Args:
        log: A log, or the URL of one that exists.
        saga_id: The saga.
        step: The step's number, or its tool's name if only one step has it.
        outcome: `"landed"`: the effect happened (`result` is what the call returned; the undo may need it).
            `"not-applied"`: it did not. `"compensated"`: it was undone by hand. `"accepted"`: it stays.
        by: Who says so.
        note: Why.
        result: With `"landed"`: the call's result, as plain data.

    Returns:
        The saga as it stands afterwards.

    Raises:
        SagaNotFound: There is no such saga, or no such step in it.
        SagaBusy: A running process owns it.
        SagaNotRunning: It has ended, or that step is not open.
        DeclarationError: `by` or `note` is empty, the outcome is unknown, or `result` does not go with it.
    """
    if outcome not in ("landed", "not-applied", "compensated", "accepted"):
        raise DeclarationError('outcome is one of "landed", "not-applied", "compensated" and "accepted".')
    if not by.strip() or not note.strip():
        raise DeclarationError("A resolution is signed and explained. Pass by= and note=.")
    if result is not None and outcome != "landed":
        raise DeclarationError('Only a step that landed has a result. Leave result= out, or pass outcome="landed".')
    opened, ours = log_of(log)
    try:
        check_known(opened, saga_id)
        run = Run(saga_id, opened, Options(), recovering=True)
        said = {"outcome": outcome, "by": values.legible(by), "note": values.legible(note)}
        try:
            drive(_resolving(run, step, said, result), run)
            return read_saga(opened, saga_id)
        finally:
            if run.claimed and opened.owned(saga_id):
                opened.release(saga_id)
    finally:
        if ours:
            opened.close()


def _resolving(run: Run, named: int | str, said: dict[str, Any], result: Any) -> Flow[None]:
    looked: Outcome = yield Blocking(partial(run.log.read, run.saga_id))
    if looked.error is not None:
        raise looked.error
    before = fold(looked.value, run.saga_id)
    _named_step(before, named)  # before claiming: a misspelt step leaves no trace
    _refuse_moving(run.saga_id, before)
    records = yield from claim(run, fresh=False, busy_timeout=0.0)
    run.load(records)
    status = run.fold.status
    _refuse_moving(run.saga_id, run.fold)
    step = _named_step(run.fold, named)
    attempt = next((a for a in reversed(step.attempts) if a.open), None)
    if status.final or attempt is None:
        raise SagaNotRunning(
            f"saga {run.saga_id!r} is {status} and step {step.number} {step.tool!r} is {step.last.status}: "
            "there is nothing to resolve.",
            saga_id=run.saga_id,
            status=status,
        )
    yield Append(partial(_resolved, run, step, attempt, said, result))
    yield Flush()
    if status not in (SagaStatus.ROLLING_BACK, SagaStatus.NEEDS_ATTENTION):
        return
    yield from start_rollback(run, f"resolved by {said['by']}", retry=False)
    if any(not a.accepted for s, a in run.fold.open_attempts() if any(missing(s, a))):
        yield Flush()  # it is rolling back, and a recovery that has the compensators goes on
        return
    yield from roll_back(run, patient_until=run.clock.monotonic(), reason="resolved")


def _refuse_moving(saga_id: str, folded: SagaFold) -> None:
    if folded.moves_to is not None:
        said = "was moved to" if folded.status.final else "is being moved to"
        raise SagaNotRunning(
            f"saga {saga_id!r} {said} the log {folded.moves_to}. Resolve it there, once it has arrived.",
            saga_id=saga_id,
            status=folded.status,
        )


def _named_step(folded: SagaFold, named: int | str) -> Step:
    if isinstance(named, int) or (named.isascii() and named.isdecimal()):
        if 1 <= int(named) <= len(folded.steps):
            return folded.step(int(named))
    else:
        found = [step for step in folded.steps if step.tool == named]
        if len(found) == 1:
            return found[0]
        if found:
            numbers = ", ".join(str(step.number) for step in found)
            raise SagaNotFound(
                f"saga {folded.saga_id!r} has several steps {named!r} ({numbers}). Name one by its number.",
                saga_id=folded.saga_id,
            )
    raise SagaNotFound(f"saga {folded.saga_id!r} has no step {named!r}. See `agent-saga show`.", saga_id=folded.saga_id)


def _resolved(run: Run, step: Step, attempt: Attempt, said: dict[str, Any], result: Any) -> Transition:
    data: dict[str, Any] = {"step": step.number, "attempt": attempt.number, **said}
    if said["outcome"] == "landed" and (attempt.status is not StepStatus.DONE or attempt.undo_error is not None):
        if result is not None:
            data["result"] = values.encode(result, where="result").data
        undo, _, undo_error = from_result(run, None, step, attempt, _args(attempt), result)
        if undo is not None:
            data["undo"] = undo
        if undo_error is not None:
            data["undo_error"] = undo_error
    return [(RecordType.RESOLVED, data)], None


def _args(attempt: Attempt) -> dict[str, Any]:
    return values.decode_args(attempt.args, {}, strict=False)
