"""A step: from the lookup of its call identity to what the framework hears of its outcome."""

from __future__ import annotations

import inspect
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec

from agent_saga_core import values
from agent_saga_core.declare import ActionSemantics
from agent_saga_core.engine.effects import (
    Append,
    Call,
    CurrentStep,
    Draft,
    Flow,
    Flush,
    Outcome,
    Transition,
    Wait,
    Write,
)
from agent_saga_core.engine.finish import abort
from agent_saga_core.engine.inverse import from_result, stored_at_intent
from agent_saga_core.engine.keys import derive_key
from agent_saga_core.engine.run import LocalUndo, Run, Running, StepCall
from agent_saga_core.engine.settle import Settled, done_data, in_transit, recorded, settle
from agent_saga_core.engine.unwind import after_scope
from agent_saga_core.errors import (
    ApprovalRequired,
    DeclarationError,
    IdempotencyConflict,
    ReplayDiverged,
    SagaAborted,
    SagaNotRunning,
    StepUnknown,
)
from agent_saga_core.records import RecordType
from agent_saga_core.state import SETTLED_ABSENT, Attempt, SagaStatus, Step, StepStatus, within

__all__ = ["StepRequest", "abandon", "step"]

Derived = tuple[dict[str, Any] | None, LocalUndo | None, str | None]


class _Found:
    """What the lookup of a call came to."""

    __slots__ = ("error", "kind", "running", "step")

    def __init__(
        self,
        kind: str,
        step: Step | None = None,
        *,
        running: Running | None = None,
        error: BaseException | None = None,
    ) -> None:
        self.kind = kind
        self.step = step
        self.running = running
        self.error = error


def step(run: Run, call: StepCall, token: object) -> Flow[Outcome]:
    """Run one call as a step; returns the `Outcome` that its caller returns or raises.

    `token` is the caller's: whatever happens to the driver in between, `abandon` finds the call by it. From its first
    record to its last the step stands in `run.flows`: so long the scope's end waits for it, and the saga stays owned.
    """
    try:
        outcome = yield from _step(run, call, token)
        if token in run.flows:
            yield from after_scope(run, token)
            if outcome.error is None and run.over and run.fold.status is not SagaStatus.COMMITTED:
                outcome = Outcome(error=_too_late(run, call.spec.tool))
    finally:
        if token in run.flows:
            run.leave(token)
    if outcome.error is not None and run.exit_by is not None and not run.closing:
        outcome, run.exit_by = Outcome(error=run.exit_by), None  # it struck while the step was being settled
    return outcome


def _step(run: Run, call: StepCall, token: object) -> Flow[Outcome]:
    approved = call.spec.semantics is not ActionSemantics.IRREVERSIBLE or call.refused is not None
    while True:
        found: _Found = yield Append(partial(_begin, run, call, token, approved))
        if found.running is not None:
            return (yield from _run(run, call, token, found.running))
        if found.error is not None:
            return Outcome(error=found.error)
        if found.kind == "approve":
            call.refused = yield from _approve(run, call)
            if isinstance(call.refused, call.spec.interrupts):  # its framework asks a person, and will call again
                _give_back(run, call)
                return Outcome(error=call.refused)
            approved = True
            continue
        if found.kind == "settle-others":
            yield from _settle_others(run)
            continue
        assert found.step is not None
        if found.kind == "replay":
            return (yield from _replay(run, call, found.step))
        if found.kind == "reenter":
            attempt = found.step.last
            inner = partial(call.invoke, attempt.forward_key)
            return (yield Call("forward", inner, current=_current(run, found.step, attempt)))
        if found.kind == "wait":
            heard = yield Wait(partial(_idle, run, found.step), None)
            if isinstance(heard, BaseException):
                _give_back(run, call)
                return Outcome(error=heard)
        else:
            failed = yield from _settle_known(run, found.step)
            if failed is not None:
                return Outcome(error=failed)


def _run(run: Run, call: StepCall, token: object, running: Running) -> Flow[Outcome]:
    """The INTENT is appended: make it durable, look again, call."""
    here = run.fold.step(running.step)
    attempt = here.attempts[running.attempt - 1]
    if call.spec.semantics.durable:
        interrupted = yield Flush(heed=True)
        refused: BaseException | None = yield Append(partial(_launch, run, token, running, interrupted))
        if refused is not None:
            return Outcome(error=refused)
    outcome: Outcome = yield Call(
        "forward",
        partial(call.invoke, attempt.forward_key),
        current=_current(run, here, attempt),
        timeout=call.spec.timeout,
        offload=call.spec.offload,
        token=token,
        late=partial(_late, run, call, token, here, attempt),
    )
    return (yield from _conclude(run, call, token, here, attempt, outcome))


def _current(run: Run, step: Step, attempt: Attempt) -> CurrentStep:
    return CurrentStep(
        saga_id=run.saga_id,
        number=step.number,
        tool=step.tool,
        attempt=attempt.number,
        direction="forward",
        idempotency_key=attempt.forward_key,
    )


def _idle(run: Run, step: Step) -> bool:
    return run.running_on(step.number) is None and (step.number, step.last.number) not in run.busy


# --- the lookup


def _begin(run: Run, call: StepCall, token: object, approved: bool) -> Transition:
    """Find the call's step, or start it. The replay lookup comes before the status check."""
    if not call.identity:
        _count(run, call)
    step = run.fold.by_identity.get(call.identity)
    if step is not None:
        known = _known(run, call, step)
        if known is not None:
            if known.kind == "settle":
                run.flows[token] = call.scope
            return [], known
    closed = _closed(run, call.scope)
    if closed is not None:
        run.refusals += 1
        _give_back(run, call)
        return [], _Found("refused", error=closed)
    run.flows[token] = call.scope
    if call.spec.semantics.durable and _loose(run):
        _give_back(run, call)  # counted again when they are settled: this may be one of them, made again
        return [], _Found("settle-others")
    if not approved:
        return [], _Found("approve")
    return _start(run, call, token, step)


def _count(run: Run, call: StepCall) -> None:
    """Give a call without a key or id the first free number among equal calls of this execution of the body.

    A call that left nothing gives its number back: made again, it is a new attempt of the same step, so that a replay
    of the body meets the attempt that succeeded.
    """
    taken = run.taken.setdefault((call.base, call.body), set())
    number = len(taken)
    if number and max(taken) >= number:
        number = next(n for n in range(number) if n not in taken)
    taken.add(number)
    call.occurrence = number
    call.identity = f"{call.base}#{number}"


def _known(run: Run, call: StepCall, step: Step) -> _Found | None:
    """What a step that the saga already has means for this call; None if a new attempt may start."""
    attempt = step.last
    live = run.running_on(step.number)
    if live is not None and live[0] in call.enclosing:
        return _Found("reenter", step)
    held = live is not None or (step.number, attempt.number) in run.busy
    same = attempt.fingerprint == call.fingerprint
    if not held and (attempt.status in SETTLED_ABSENT or (attempt.status is StepStatus.PAUSED and same)):
        return None
    if call.explicit and not same and attempt.status is not StepStatus.PAUSED:
        _give_back(run, call)  # made again with the recorded arguments, it is the recorded call
        conflict = IdempotencyConflict(
            f"step {step.number} {step.tool!r} was already called under this identity with other arguments. "
            "Use another key for another effect."
        )
        return _Found("refused", error=conflict)
    if held:
        return _Found("wait", step)
    if attempt.status is StepStatus.DONE:
        run.meet(step, call)
        return _Found("replay", step)
    closed = _closed(run, call.scope)
    if closed is None:
        return _Found("settle", step)
    _give_back(run, call)
    return _Found("refused", error=closed)


def _closed(run: Run, scope: str) -> SagaAborted | SagaNotRunning | None:
    """Why no new step may start; None if one may."""
    fold = run.fold
    runs = fold.status is SagaStatus.RUNNING or (fold.status is SagaStatus.SUSPENDED and not run.suspended)
    if run.replay_only or run.over or run.suspended or not runs:
        return SagaNotRunning(
            f"saga {run.saga_id!r} is {fold.status} and takes no new step. Open a new saga.",
            saga_id=run.saga_id,
            status=fold.status,
        )
    if fold.rollback_only is not None:
        return SagaAborted(
            f"This run is being rolled back ({fold.rollback_only}); no further tool calls are accepted. "
            "Stop calling tools and end the run."
        )
    if run.closing:
        return SagaNotRunning(
            f"saga {run.saga_id!r} is ending and takes no new step. Start steps before the scope's end.",
            saga_id=run.saga_id,
            status=fold.status,
        )
    if run.ended and any(within(scope, ended) for ended in run.ended):
        return SagaNotRunning(
            f"savepoint {scope!r} of saga {run.saga_id!r} has ended and takes no new step. "
            "Call the tool in the scope around it.",
            saga_id=run.saga_id,
            status=fold.status,
        )
    return None


def _loose(run: Run) -> list[tuple[Step, Attempt]]:
    """Attempts left UNKNOWN by a cancellation, or landed after an error was reported, that are free to be settled."""
    found: list[tuple[Step, Attempt]] = []
    for number, attempt in sorted(run.unsettled | run.must_undo):
        if not run.is_running(number, attempt) and (number, attempt) not in run.busy:
            step = run.fold.step(number)
            found.append((step, step.attempts[attempt - 1]))
    return found


def _start(run: Run, call: StepCall, token: object, step: Step | None) -> Transition:
    """Append the INTENT of a new attempt."""
    fold, spec = run.fold, call.spec
    number = step.number if step is not None else len(fold.steps) + 1
    attempt = len(step.attempts) + 1 if step is not None else 1
    if step is not None and step.last.status is StepStatus.PAUSED:  # the same try goes on, under the same key
        attempt = step.last.number
    data: dict[str, Any] = {
        "step": number,
        "attempt": attempt,
        "tool": spec.tool,
        "semantics": spec.semantics.value,
        "identity": call.identity,
        "fingerprint": call.fingerprint,
        "args": call.encoded.data,
        "key": derive_key(fold.nonce, call.identity, attempt, "forward"),
    }
    if step is not None and attempt == step.last.number:
        data["resumed"] = True
    if call.scope:
        data["scope"] = call.scope
    if call.parent is not None:
        data["parent"] = call.parent
    if call.refused is not None:
        _give_back(run, call)
        if step is not None and attempt == step.last.number:
            return [], _Found("refused", error=call.refused)  # what it did before it paused is still unknown
        refusal = {"step": number, "attempt": attempt, "reason": f"refused: {type(call.refused).__name__}"}
        return [(RecordType.INTENT, data), (RecordType.NOT_APPLIED, refusal)], _Found("refused", error=call.refused)
    if spec.semantics is not ActionSemantics.READ_ONLY:
        _say_undo(run, call, data)
    run.born[number, attempt] = run.clock.monotonic()
    run.specs[number] = spec
    if call.encoded.secrets:
        run.secrets[number] = call.encoded.secrets
    run.begin(number, call)
    goes_on = "resumed" in data
    running = run.running[token] = Running(call, number, attempt, goes_on=goes_on)
    running.started = not spec.semantics.durable
    return [(RecordType.INTENT, data)], _Found("started", running=running)


def _say_undo(run: Run, call: StepCall, data: dict[str, Any]) -> None:
    """Put into an INTENT what is known of the undo before the call."""
    data["undo_key"] = derive_key(run.fold.nonce, call.identity, data["attempt"], "compensation")
    data["in_doubt"] = call.spec.in_doubt
    stored, local = stored_at_intent(run, call, data)
    if stored is not None:
        data["undo"] = stored
    if local is not None:
        run.local[data["step"], data["attempt"]] = local
    if call.spec.probe_name is not None:
        data["probe"] = call.spec.probe_name


def _launch(run: Run, token: object, running: Running, interrupted: BaseException | None) -> Transition:
    """The INTENT is durable: look again before the call. Answers why it must not be made, or None."""
    refused = interrupted
    if run.closing or run.over or run.ended or run.fold.rollback_only is not None:
        refused = refused or _closed(run, running.call.scope)
    if refused is None:
        running.started = True
        return [], None
    del run.running[token]
    if running.goes_on:
        _give_back(run, running.call)  # it stays paused; one that left nothing gives its number back by its record
    return [_not_called(running)], refused


def _not_called(running: Running) -> Draft:
    """The record of an attempt that was not called: it left nothing, unless it was called before it paused."""
    kind = RecordType.PAUSED if running.goes_on else RecordType.NOT_APPLIED
    return kind, {"step": running.step, "attempt": running.attempt, "reason": "never started"}


def _give_back(run: Run, call: StepCall) -> None:
    """Take back the number of a call that came to nothing: it has none, and another call may have it."""
    if call.occurrence >= 0:
        run.taken[call.base, call.body].discard(call.occurrence)
        call.identity, call.occurrence = "", -1


# --- approval


class StepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a gate is asked about an IRREVERSIBLE call."""

    saga_id: str
    tool: str
    args: dict[str, Any]
    """The arguments by name, secrets replaced; plain data for people and policies."""
    semantics: ActionSemantics
    key: str | None = None
    """The declared key of the call, or None."""
    token: str = ""
    """Names exactly this call of this saga with these arguments, secrets aside: a yes to it says yes to no other."""


def _token(run: Run, call: StepCall) -> str:
    parts = (run.saga_id, call.identity, call.fingerprint)
    return sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def _approve(run: Run, call: StepCall) -> Flow[BaseException | None]:
    """Ask for a yes; returns why there is none."""
    tool, gate = call.spec.tool, call.approve if call.approve is not None else run.options.approve
    if gate is None:
        return ApprovalRequired(
            f"{tool!r} is IRREVERSIBLE and nobody was asked. Open the saga with approve=callable(StepRequest) -> bool."
        )
    request = StepRequest(
        saga_id=run.saga_id,
        tool=tool,
        args=values.display(call.encoded.data),
        semantics=call.spec.semantics,
        key=call.declared_key,
        token=_token(run, call),
    )
    outcome: Outcome = yield Call("approve", partial(gate, request))
    if isinstance(outcome.error, call.spec.interrupts) or not isinstance(outcome.error, Exception | None):
        return outcome.error
    if outcome.error is not None:
        refusal = ApprovalRequired(f"Asking for approval of {tool!r} failed. Nothing was done; correct approve=.")
        refusal.__cause__ = outcome.error
        return refusal
    if outcome.value is not True:
        return ApprovalRequired(f"{tool!r} was not approved. Nothing was done; try something else.")
    return None


# --- what a known step gives back


def _replay(run: Run, call: StepCall, step: Step) -> Flow[Outcome]:
    """The recorded result; or the reason why it cannot be given, and the effect is not rerun."""
    attempt = step.last
    if step.semantics.durable:  # whoever recorded it may still be flushing, or have failed to
        yield Flush() if run.options.durability == "strict" else Write()
    hint = call.spec.result_type if call.spec.result_type is not None else run.types.get(step.tool)
    why: str
    if not attempt.has_result:
        why = "its result was never known"
    else:
        try:
            return Outcome(values.decode(attempt.result, hint))
        except values.Undecodable as error:
            why = str(error)
    diverged = ReplayDiverged(
        f"the recorded result of step {step.number} {step.tool!r} cannot be given back ({why}). "
        "Declare result_type=, or return something that the log can carry."
    )
    if not run.replay_only:
        yield from abort(run, f"the recorded result of step {step.number} {step.tool!r} cannot be given back")
    return Outcome(error=diverged)


def _settle_known(run: Run, step: Step) -> Flow[BaseException | None]:
    """A call met again whose last attempt is unsettled: settle it first; returns why that failed."""
    settled = yield from settle(run, step, step.last, keep=True)
    if settled in (Settled.LANDED, Settled.ABSENT, Settled.ELSEWHERE):
        return None
    yield from abort(run, f"step {step.number} {step.tool!r} is not settled")
    return StepUnknown(
        f"step {step.number} {step.tool!r} may or may not have happened, and nothing here can tell. "
        "Give it a probe, or run `agent-saga resolve`."
    )


def _settle_others(run: Run) -> Flow[None]:
    for step, attempt in _loose(run):
        settled = yield from settle(run, step, attempt, keep=False)
        if settled in (Settled.OPEN, Settled.WAITING):
            yield from abort(run, f"step {step.number} {step.tool!r} is not settled")
            return


# --- the outcome


def _generator(value: object) -> bool:
    return inspect.isgenerator(value) or inspect.isasyncgen(value)


def _conclude(run: Run, call: StepCall, token: object, step: Step, attempt: Attempt, outcome: Outcome) -> Flow[Outcome]:
    """Record how the call ended, settle what can be settled, and say what the framework hears."""
    spec = call.spec
    if outcome.error is None and not _generator(outcome.value):
        result, hidden = recorded(run, outcome.value, spec.result_type, call.encoded.secrets)
        secrets = (*call.encoded.secrets, *hidden)
        derived = from_result(run, spec, step, attempt, call.args, outcome.value, secrets)
        data = done_data(step.number, attempt.number, result, derived)
        yield Append(partial(_done, run, token, data, derived[1], outcome.value))
        if spec.semantics.durable:
            interrupted = yield (Flush(heed=True) if run.options.durability == "strict" else Write())
            if interrupted is not None:
                return Outcome(error=interrupted)
    else:
        outcome = yield from _conclude_failed(run, call, token, step, attempt, outcome)
    return outcome


def _conclude_failed(
    run: Run, call: StepCall, token: object, step: Step, attempt: Attempt, outcome: Outcome
) -> Flow[Outcome]:
    spec = call.spec
    generator = outcome.error is None
    if generator:
        outcome = Outcome(error=_generator_refused(spec.tool))
    error = outcome.error
    assert error is not None
    absent = outcome.never_started or (not outcome.still_running and spec.says_not_applied(error))
    kind: str = yield Append(partial(_failed, run, token, step, attempt, outcome, absent, generator))
    if kind in ("abort", "paused"):
        yield Flush()
    elif kind == "settle":
        patience = run.options.drain_timeout if spec.doubt_declared else 0.0
        heard: list[BaseException] = []
        settled = yield from settle(run, step, attempt, keep=True, held=True, patience=patience, heard=heard)
        if heard:  # cancelled while it waited: like a cancelled call, it is settled before the next one or at the end
            yield Append(partial(_later, run, step, attempt))
            return Outcome(error=heard[0])
        if settled is Settled.LANDED:
            yield Flush()
            return (yield from _replay(run, call, step))
        if settled is not Settled.ABSENT:
            yield from abort(run, f"step {step.number} {step.tool!r} failed and is not settled")
    return outcome


def _too_late(run: Run, tool: str) -> SagaNotRunning:
    return SagaNotRunning(
        f"{tool!r} ended after saga {run.saga_id!r} had: what it did was recorded and undone. Start a new saga.",
        saga_id=run.saga_id,
        status=run.fold.status,
    )


def _generator_refused(tool: str) -> DeclarationError:
    return DeclarationError(
        f"{tool!r} returned a generator, whose effects would come after the step. "
        "Return a list, or wrap the calls inside."
    )


def _done(run: Run, token: object, data: dict[str, Any], local: LocalUndo | None, value: object) -> Transition:
    running = run.running.pop(token, None)
    if running is not None:
        run.types[running.call.spec.tool] = type(value)
    if local is not None:
        run.local[data["step"], data["attempt"]] = local
    if not run.over:
        run.flows.pop(token, None)  # nothing follows but a flush
    if run.fold.status.final:  # a READ_ONLY call that outlived its saga
        return [], None
    return [(RecordType.DONE, data)], None


def _failed(
    run: Run, token: object, step: Step, attempt: Attempt, outcome: Outcome, absent: bool, generator: bool
) -> Transition:
    """Record a call that raised; answers "absent", "paused", "later", "settle" or "abort"."""
    error = outcome.error
    assert error is not None
    running = run.running.get(token)
    if not outcome.still_running:
        run.running.pop(token, None)
    secrets = running.call.encoded.secrets if running is not None else ()
    data: dict[str, Any] = {
        "step": step.number,
        "attempt": attempt.number,
        "error": values.describe_error(error, secrets),
    }
    reason = f"step {step.number} {step.tool!r} failed with {type(error).__name__}"
    if run.fold.status.final:  # a READ_ONLY call that outlived its saga
        return [], "absent"
    if attempt.status is not StepStatus.INTENDED:  # it ended while it was being given up
        return [(RecordType.ABORT, {"reason": reason})], "abort"
    pauses = running is not None and not absent and isinstance(error, running.call.spec.interrupts)
    if pauses or (outcome.never_started and running is not None and running.goes_on):
        return [(RecordType.PAUSED, data)], "paused"
    if absent or (step.semantics is ActionSemantics.READ_ONLY and not generator):
        return [(RecordType.NOT_APPLIED, data)], "absent"
    data["in_transit"] = outcome.still_running or in_transit(error, outcome.around)
    if data["in_transit"]:
        run.born[step.number, attempt.number] = run.clock.monotonic()
        data["settle_not_before"] = run.clock.time() + max(0.0, run.settle_at(step, attempt) - run.clock.monotonic())
    records: list[Draft] = [(RecordType.UNKNOWN, data)]
    if not isinstance(error, Exception) or (running is not None and running.call.settle_later):
        run.unsettled.add((step.number, attempt.number))
        return records, "later"
    refused = isinstance(error, DeclarationError)
    aborts = run.options.on_failure == "abort" or (running is not None and running.call.aborts)
    if refused or outcome.still_running or aborts:
        return [*records, (RecordType.ABORT, {"reason": reason})], "abort"
    run.busy.add((step.number, attempt.number))
    return records, "settle"


def _later(run: Run, step: Step, attempt: Attempt) -> Transition:
    run.unsettled.add((step.number, attempt.number))
    return [], None


# --- calls that end after they were given up, and callers that never came back


def _late(run: Run, call: StepCall, token: object, step: Step, attempt: Attempt, outcome: Outcome) -> Flow[None]:
    """A call that was given up has ended: record it; undo it here if the scope is over, else the scope will."""
    derived: Derived = (None, None, None)
    landed = outcome.error is None and not _generator(outcome.value)
    data: dict[str, Any] = {}
    if landed:
        result, hidden = recorded(run, outcome.value, call.spec.result_type, call.encoded.secrets)
        secrets = (*call.encoded.secrets, *hidden)
        derived = from_result(run, call.spec, step, attempt, call.args, outcome.value, secrets)
        data = done_data(step.number, attempt.number, result, derived)
    absent = outcome.error is not None and call.spec.says_not_applied(outcome.error)
    tail = object()  # the caller's own flow may still be under way
    try:
        yield Append(partial(_ended_late, run, (token, tail), step, attempt, data, derived[1], absent))
        yield from after_scope(run, tail)
    finally:
        with run.lock:
            run.running.pop(token, None)
        run.leave(tail)


def _ended_late(
    run: Run,
    tokens: tuple[object, object],
    step: Step,
    attempt: Attempt,
    data: dict[str, Any],
    local: LocalUndo | None,
    absent: bool,
) -> Transition:
    running = run.running.pop(tokens[0], None)
    run.flows[tokens[1]] = running.call.scope if running is not None else ""
    key = (step.number, attempt.number)
    run.born[key] = run.clock.monotonic()
    records: list[Draft] = []
    open_ = attempt.status in (StepStatus.INTENDED, StepStatus.UNKNOWN) and not run.fold.status.final
    if data and open_:
        if local is not None:
            run.local[key] = local
        run.must_undo.add(key)  # an error was reported, or is about to be: a landed effect may not stand
        run.unsettled.discard(key)
        records.append((RecordType.DONE, {**data, "late": True}))
    elif absent and open_:
        run.unsettled.discard(key)
        records.append((RecordType.NOT_APPLIED, {"step": key[0], "attempt": key[1], "reason": "it said so, late"}))
    return records, None


def abandon(run: Run, token: object) -> Flow[None]:
    """The driver of a call was interrupted outside of the call itself (a signal, a full log): forget nothing."""
    try:
        yield Append(partial(_abandon, run, token))
        yield from after_scope(run, token)
    finally:
        with run.lock:
            running = run.running.get(token)
            if running is not None and not running.given_up:
                del run.running[token]
        run.leave(token)


def _abandon(run: Run, token: object) -> Transition:
    running = run.running.get(token)
    if running is None:
        return [], None
    run.flows[token] = running.call.scope
    if not running.given_up:  # else it still runs in its thread, and the saga stays owned until it ends
        del run.running[token]
    known = run.fold.steps[running.step - 1 : running.step]
    if not known or len(known[0].attempts) < running.attempt:
        _give_back(run, running.call)  # interrupted before its INTENT was so much as appended
        return [], None
    attempt = known[0].attempts[running.attempt - 1]
    if attempt.status is not StepStatus.INTENDED or run.fold.status.final:
        return [], None
    data: dict[str, Any] = {"step": running.step, "attempt": running.attempt}
    if not running.started:
        return [_not_called(running)], None
    if running.call.spec.semantics is ActionSemantics.READ_ONLY:
        return [(RecordType.NOT_APPLIED, {**data, "reason": "interrupted"})], None
    run.unsettled.add((running.step, running.attempt))
    run.born[running.step, running.attempt] = run.clock.monotonic()
    return [(RecordType.UNKNOWN, {**data, "error": "interrupted", "in_transit": True})], None
