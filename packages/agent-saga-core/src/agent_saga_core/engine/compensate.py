"""One attempt's compensation: started at most three times, each start and end in the log, under one key."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, Final

from agent_saga_core import values
from agent_saga_core.declare import Observation
from agent_saga_core.engine.effects import Append, Call, CurrentStep, Flow, Flush, Outcome, Sleep, Transition
from agent_saga_core.engine.inverse import Target, target
from agent_saga_core.engine.keys import derive_key
from agent_saga_core.engine.run import Run
from agent_saga_core.errors import NotApplied
from agent_saga_core.records import RecordType
from agent_saga_core.state import Attempt, Step, StepStatus

__all__ = ["DELAYS", "compensate"]

DELAYS: Final = (0.0, 0.5, 2.0)
"""Seconds before each try. Three: enough for a hiccup, few enough that a person hears of the rest soon."""


def compensate(run: Run, step: Step, attempt: Attempt) -> Flow[bool]:
    """Undo one attempt; returns whether it is undone. The caller holds the attempt in `run.busy`."""
    goal = target(run, step, attempt)
    if isinstance(goal, str):
        yield Append(partial(_cannot, step, attempt, goal))
        return False
    while attempt.tries < len(DELAYS):
        due = attempt.not_before - run.clock.time()
        if due > 0:
            yield Sleep(min(due, DELAYS[-1]))  # never longer: the stored moment is another process's clock
        if attempt.started:
            known = yield from _look(run, step, attempt, goal)
            if known is not None:
                return known
        yield Append(partial(_starting, run, step, attempt, goal))
        yield Flush()
        secrets: list[str] = [*goal.secrets]
        outcome: Outcome = yield Call(
            "compensation",
            partial(_call, goal, attempt.compensation_key, secrets),
            current=CurrentStep(
                saga_id=run.saga_id,
                number=step.number,
                tool=step.tool,
                attempt=attempt.number,
                direction="compensation",
                idempotency_key=attempt.compensation_key,
            ),
        )
        ended: bool | None = yield Append(partial(_ended, run, step, attempt, outcome, secrets))
        if ended is not None:
            return ended
    return False


def _call(goal: Target, key: str, secrets: list[str]) -> Any:
    """The call itself; credentials are resolved only here, in the process that runs it, and never told."""
    try:
        secrets.extend(values.encode_args(goal.kwargs, goal.hints).secrets)
    except values.Unstorable:
        pass  # an inverse that lives in this process alone may hold anything
    kwargs = values.resolve_credentials(dict(goal.kwargs), secrets)
    if goal.takes_key:
        kwargs["idempotency_key"] = key
    return goal.fn(**kwargs)


def _look(run: Run, step: Step, attempt: Attempt, goal: Target) -> Flow[bool | None]:
    """A compensation was started and its end is not in the log: True if it has landed, None to start it again.

    False if its key may be forgotten by now and nobody can say: that is for a person.
    """
    aged = goal.key_ttl is not None and run.clock.time() - attempt.first_started > goal.key_ttl
    landed: bool | None = None
    if goal.probe is not None:
        outcome: Outcome = yield Call("probe", partial(goal.probe, dict(goal.kwargs), attempt.compensation_key))
        if outcome.error is None and isinstance(outcome.value, Observation):
            landed = outcome.value.landed
    if landed:
        yield Append(partial(_compensated, step, attempt, "probe"))
        return True
    if aged and landed is None:
        reason = "it was started longer ago than its key lives, and may have landed"
        yield Append(partial(_cannot, step, attempt, reason))
        return False
    return None


def _starting(run: Run, step: Step, attempt: Attempt, goal: Target) -> Transition:
    key = attempt.compensation_key
    if attempt.key_round:
        identity = step.identity
        key = derive_key(run.fold.nonce, identity, attempt.number, "compensation", attempt.key_round)
    data: dict[str, Any] = {"step": step.number, "attempt": attempt.number, "try": attempt.tries + 1, "key": key}
    if goal.handler is not None:
        data["handler"] = goal.handler
    return [(RecordType.COMPENSATING, data)], None


def _compensated(step: Step, attempt: Attempt, by: str | None) -> Transition:
    data: dict[str, Any] = {"step": step.number, "attempt": attempt.number}
    if by is not None:
        data["by"] = by
    return [(RecordType.COMPENSATED, data)], None


def _cannot(step: Step, attempt: Attempt, reason: str) -> Transition:
    """Say once why it cannot be undone here."""
    if attempt.status is StepStatus.COMPENSATION_FAILED and attempt.error == reason:
        return [], None
    data = {"step": step.number, "attempt": attempt.number, "error": reason}
    return [(RecordType.COMPENSATION_FAILED, data)], None


def _ended(run: Run, step: Step, attempt: Attempt, outcome: Outcome, secrets: list[str]) -> Transition:
    """Record how one try ended; answers True (undone), False (given up) or None (try again)."""
    error = outcome.error
    if error is None and (inspect.isgenerator(outcome.value) or inspect.isasyncgen(outcome.value)):
        error = TypeError("the compensator returned a generator, whose body never ran")
    if error is None:
        return _compensated(step, attempt, None)[0], True
    data: dict[str, Any] = {
        "step": step.number,
        "attempt": attempt.number,
        "error": values.describe_error(error, secrets),
    }
    if isinstance(error, NotApplied):
        data["not_applied"] = True
    interrupting = not isinstance(error, Exception) and not outcome.still_running
    if interrupting and isinstance(error, KeyboardInterrupt | SystemExit):
        run.exit_by = run.exit_by or error
        return [(RecordType.COMPENSATION_FAILED, data)], False
    if attempt.tries < len(DELAYS):
        data["not_before"] = run.clock.time() + DELAYS[attempt.tries]
        return [(RecordType.COMPENSATION_FAILED, data)], None
    return [(RecordType.COMPENSATION_FAILED, data)], False
