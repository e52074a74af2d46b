"""Settling: bring an UNKNOWN attempt to a known end, by its probe or by an undo that is safe when nothing happened."""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import Any, Final

from agent_saga_core import values
from agent_saga_core.declare import ActionSemantics, Observation
from agent_saga_core.engine.compensate import compensate
from agent_saga_core.engine.effects import Append, Call, Flow, Outcome, Transition, Wait
from agent_saga_core.engine.inverse import from_result, tells
from agent_saga_core.engine.run import LocalUndo, Run
from agent_saga_core.records import RecordType
from agent_saga_core.registry import probe_named
from agent_saga_core.state import SETTLED_ABSENT, Attempt, Step, StepStatus

__all__ = ["Settled", "done_data", "in_transit", "recorded", "settle", "take"]


class Settled(Enum):
    """How far settling came."""

    LANDED = "landed"
    """The effect exists and its result is recorded."""
    ABSENT = "absent"
    """Nothing is left: it never happened, or was undone."""
    WAITING = "waiting"
    """It cannot be told before `Run.settle_at`."""
    OPEN = "open"
    """Nobody here can tell: a person must."""
    ELSEWHERE = "elsewhere"
    """Its call still runs, or another thread is settling it."""


_TRANSIT_WORDS: Final = ("timeout", "timedout", "connect", "transport", "network", "protocol", "disconnect", "cancel")


def in_transit(error: BaseException, around: BaseException | None = None) -> bool:
    """Whether a request may still be on its way after `error`: the other side's answer was not heard.

    Timeouts, every OSError (connection errors among them), cancellation and all that is no `Exception`; and whatever
    an HTTP client names so, since few of them derive theirs from the builtins. Causes count: a tool that wraps a
    read timeout in its own error has still heard no answer. Not `around`, in whose handling the call was made.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and link is not around and id(link) not in seen:
        seen.add(id(link))
        if not isinstance(link, Exception) or isinstance(link, OSError | TimeoutError):
            return True
        names = (cls.__name__.lower() for cls in type(link).__mro__[:-3])
        if any(word in name for name in names for word in _TRANSIT_WORDS):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def take(run: Run, step: Step, attempt: Attempt) -> Transition:
    """Reserve an attempt for settling or compensating; answers whether it was free."""
    key = (step.number, attempt.number)
    if key in run.busy or run.is_running(*key):
        return [], False
    run.busy.add(key)
    return [], True


def settle(
    run: Run,
    step: Step,
    attempt: Attempt,
    *,
    keep: bool,
    held: bool = False,
    patience: float = 0.0,
    heard: list[BaseException] | None = None,
) -> Flow[Settled]:
    """Settle one attempt.

    Args:
        run: The saga.
        step: The step.
        attempt: The attempt, UNKNOWN (or INTENDED by a process that is gone).
        keep: Whether an effect that has landed, with a result, may stand. Not if the caller has already heard of an
            error: then it is undone.
        held: Whether the caller has reserved the attempt already.
        patience: Seconds to wait at most for what only time can tell. The end of the scope cuts that short.
        heard: Where the cancellation is put that cuts it short.
    """
    key = (step.number, attempt.number)
    if not held and not (yield Append(partial(take, run, step, attempt))):
        return Settled.ELSEWHERE
    try:
        if attempt.status in (StepStatus.INTENDED, StepStatus.PAUSED):
            yield Append(partial(_lost, step, attempt))
        settled = yield from _settle(run, step, attempt, keep)
        patient_until = run.clock.monotonic() + patience
        while settled is Settled.WAITING and (at := run.settle_at(step, attempt)) <= patient_until:
            ending = yield Wait(lambda: run.closing, max(0.0, at - run.clock.monotonic()))
            if isinstance(ending, BaseException) and heard is not None:
                heard.append(ending)
            if ending is not False:
                break
            settled = yield from _settle(run, step, attempt, keep)
    finally:
        run.free(key)
    return settled


def _settle(run: Run, step: Step, attempt: Attempt, keep: bool) -> Flow[Settled]:
    if attempt.status in (StepStatus.COMPENSATING, StepStatus.COMPENSATION_FAILED, StepStatus.DONE):
        return (yield from _undo(run, step, attempt))
    if attempt.status in SETTLED_ABSENT:
        return Settled.ABSENT
    waited = run.clock.monotonic() >= run.settle_at(step, attempt)
    conclusive = waited or not attempt.in_transit
    seen = yield from _probe(run, step, attempt)
    if seen is not None and seen.landed:
        keep = keep and seen.result is not None
        yield Append(partial(_landed, run, step, attempt, seen, _derived(run, step, attempt, seen), keep))
        if keep:
            return Settled.LANDED
        return (yield from _undo(run, step, attempt))
    if seen is not None and seen.landed is False and (seen.final or conclusive):
        yield Append(partial(_absent, run, step, attempt, seen))
        return Settled.ABSENT
    if_absent = _undo_if_absent(step, attempt)
    if if_absent == "forbids" or (if_absent == "noop" and conclusive):
        return (yield from _undo(run, step, attempt))
    if not conclusive and run.has_means(step, attempt):
        return Settled.WAITING
    return Settled.OPEN


def _undo_if_absent(step: Step, attempt: Attempt) -> str:
    undo = attempt.undo
    if undo is None or "paths" in undo:
        return "unsafe"
    if step.semantics is ActionSemantics.REVERSIBLE:
        return "forbids"  # private state put back where it was, whatever became of the call: nothing can land later
    return str(undo.get("if_absent", "unsafe"))


def _undo(run: Run, step: Step, attempt: Attempt) -> Flow[Settled]:
    """Compensate; the attempt is held by the caller."""
    if attempt.undo_error is not None or step.semantics is ActionSemantics.IRREVERSIBLE:
        return Settled.OPEN
    undone: bool = yield from compensate(run, step, attempt)
    if undone:
        with run.lock:
            run.unsettled.discard((step.number, attempt.number))
            run.must_undo.discard((step.number, attempt.number))
    return Settled.ABSENT if undone else Settled.OPEN


def _probe(run: Run, step: Step, attempt: Attempt) -> Flow[Observation | None]:
    spec = run.specs.get(step.number)
    probe: Any = spec.probe if spec is not None else None
    if probe is None and step.probe is not None:
        found = probe_named(step.probe)
        probe = found.fn if found is not None else None
    if probe is None:
        return None
    args = values.decode_args(attempt.args, spec.hints if spec is not None else {}, strict=False)
    outcome: Outcome = yield Call("probe", partial(probe, args, attempt.forward_key))
    if isinstance(outcome.error, KeyboardInterrupt | SystemExit):
        run.exit_by = run.exit_by or outcome.error
    # A probe that fails, or answers with something else, has seen nothing.
    return outcome.value if outcome.error is None and isinstance(outcome.value, Observation) else None


def _derived(
    run: Run, step: Step, attempt: Attempt, seen: Observation
) -> tuple[dict[str, Any] | None, LocalUndo | None, str | None]:
    spec = run.specs.get(step.number)
    if attempt.undo is not None and "paths" not in attempt.undo:
        return None, None, None
    if seen.result is None:
        return None, None, "it landed, and its probe knows no result to derive the undo from"
    args = values.decode_args(attempt.args, spec.hints if spec is not None else {}, strict=False)
    hidden = recorded(run, seen.result, spec.result_type if spec is not None else None)[1]
    return from_result(run, spec, step, attempt, args, seen.result, (*run.secrets.get(step.number, ()), *hidden))


def done_data(
    step: int, attempt: int, recorded: Any, derived: tuple[dict[str, Any] | None, LocalUndo | None, str | None]
) -> dict[str, Any]:
    """What DONE holds: the result or its digest, and the inverse or why there is none."""
    data: dict[str, Any] = {"step": step, "attempt": attempt, "result": recorded}
    undo, _local, undo_error = derived
    if undo is not None:
        data["undo"] = undo
    if undo_error is not None:
        data["undo_error"] = undo_error
    return data


def recorded(run: Run, result: object, hint: Any, secrets: tuple[str, ...] = ()) -> tuple[Any, tuple[str, ...]]:
    """A result as the log holds it, and the texts that it hides there.

    What cannot be carried, is too large, or shows one of the `secrets` of its call, becomes a digest, never a failed
    step.
    """
    try:
        encoded = values.encode(result, where="result", hint=hint)
    except values.Unstorable as error:
        return values.digested(None, reason=str(error)), ()
    if tells(encoded.data, secrets):
        return values.digested(None, reason="it shows a secret that the call was given"), encoded.secrets
    limit = run.log.max_result_bytes
    if values.is_small(encoded.data, limit=limit):
        return encoded.data, encoded.secrets
    size = values.json_bytes(encoded.data)
    if len(size) <= limit:
        return encoded.data, encoded.secrets
    return values.digested(size, reason=f"larger than {limit} bytes"), encoded.secrets


def _lost(step: Step, attempt: Attempt) -> Transition:
    """A call of which nothing is known but its intent, by a process that is gone; or one that paused, for good."""
    paused = attempt.status is StepStatus.PAUSED
    data = {
        "step": step.number,
        "attempt": attempt.number,
        "error": "it paused and was not resumed" if paused else "the process that made the call is gone",
        "in_transit": not paused,
    }
    return [(RecordType.UNKNOWN, data)], None


def _landed(
    run: Run,
    step: Step,
    attempt: Attempt,
    seen: Observation,
    derived: tuple[dict[str, Any] | None, LocalUndo | None, str | None],
    keep: bool,
) -> Transition:
    spec = run.specs.get(step.number)
    result, _ = recorded(run, seen.result, spec.result_type if spec else None, run.secrets.get(step.number, ()))
    data = done_data(step.number, attempt.number, result, derived)
    if seen.result is None:
        del data["result"]
    data["by"] = "probe"
    key = (step.number, attempt.number)
    run.unsettled.discard(key)
    if not keep:
        run.must_undo.add(key)
    if derived[1] is not None:
        run.local[key] = derived[1]
    return [(RecordType.DONE, data)], None


def _absent(run: Run, step: Step, attempt: Attempt, seen: Observation) -> Transition:
    run.unsettled.discard((step.number, attempt.number))
    data = {"step": step.number, "attempt": attempt.number, "reason": "its probe saw nothing", "by": "probe"}
    return [(RecordType.NOT_APPLIED, data)], None
