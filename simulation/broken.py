"""Deliberately broken engines: each takes one rule of `docs/design.md` away, and the simulation must notice.

A rule is removed from outside, for as long as `removed()` is open; nothing in the engine knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from agent_saga_core import Observation
from agent_saga_core.declare import ActionSemantics, StepSpec
from agent_saga_core.engine import compensate, finish, settle, unwind
from agent_saga_core.engine import step as stepping
from agent_saga_core.engine.effects import Append, Flush
from agent_saga_core.engine.run import Run
from agent_saga_core.log.memory import MemoryLog
from agent_saga_core.records import RecordType
from agent_saga_core.recovery import job as recovery
from agent_saga_core.state import _FOLDS, Attempt, SagaFold, SagaStatus, StepStatus
from simulation import process as processes
from simulation.plan import FAULTS, Call, Visitor
from simulation.shrink import run_seed
from simulation.simulation import Violation
from simulation.world import Paused

__all__ = ["BROKEN", "Broken"]


@dataclass(frozen=True, kw_only=True)
class Broken:
    """An engine without one rule."""

    rule: str
    """The rule of docs/design.md, and what is done instead."""
    removed: Callable[[], Any]
    """A context manager in which the rule does not hold."""
    focus: Mapping[str, Any]
    """Where the rule matters, if a drawn plan seldom comes there: what `plan.focused` makes of it."""

    def caught(self, seeds: Iterable[int]) -> tuple[int, Violation] | None:
        """The first of `seeds` that breaks a promise, and which one."""
        with self.removed():
            for seed in seeds:
                failure = run_seed(seed, self.focus).failure
                if failure is not None:
                    return seed, failure
        return None


BROKEN: dict[str, Broken] = {}


def _broken(name: str, rule: str, **focus: Any) -> Callable[[Callable[[], Any]], None]:
    """Enter a function that gives the patches in the table."""

    def enter(patches: Callable[[], Any]) -> None:
        @contextmanager
        def removed() -> Generator[None]:
            made = patches()
            with ExitStack() as stack:
                for patch in made if isinstance(made, list) else [made]:
                    stack.enter_context(patch)
                yield

        assert name not in BROKEN
        BROKEN[name] = Broken(rule=rule, removed=removed, focus=focus)

    return enter


def _put(where: Any, name: str, new: Any) -> Any:
    return mock.patch.object(where, name, new)


def _in_fold(kind: RecordType, new: Any) -> Any:
    return mock.patch.dict(_FOLDS, {kind: new})


def _without_flush(flow: Callable[..., Any], *, after_verdict: bool = False) -> Callable[..., Any]:
    """The same flow, whose flushes do nothing; or only those behind a verdict."""

    def quiet(*args: Any, **more: Any) -> Any:
        inner, answer = flow(*args, **more), None
        while True:
            try:
                effect = inner.send(answer)
            except StopIteration as stop:
                return stop.value
            left_out = isinstance(effect, Flush) and (not after_verdict or args[0].over)
            answer = None if left_out else (yield effect)

    return quiet


def _first_flush_left_out(flow: Callable[..., Any]) -> Callable[..., Any]:
    """The same flow without its first flush."""

    def quiet(*args: Any, **more: Any) -> Any:
        inner, answer, seen = flow(*args, **more), None, False
        while True:
            try:
                effect = inner.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(effect, Flush) and not seen:
                seen, answer = True, None
            else:
                answer = yield effect

    return quiet


# --- rule 1: one lock, and a second look


@_broken(
    "no second look", "1: after the INTENT is durable the engine looks again before it calls", faults={"early": 3.0}
)
def _() -> Any:
    look = stepping._launch

    def launch(run: Any, token: Any, running: Any, interrupted: Any) -> Any:
        if interrupted is not None:
            return look(run, token, running, interrupted)
        running.started = True
        return [], None

    return _put(stepping, "_launch", launch)


@_broken("closed takes new steps", "1: no new step starts in a saga that ends or is rollback-only")
def _() -> Any:
    return _put(stepping, "_closed", lambda run, scope: None)


@_broken("no pending record", "1: a record stands in `pending` until it is folded, whatever interrupts")
def _() -> Any:
    def catch_up(self: Run) -> None:
        records, self.pending = self.pending, []
        for record in records:
            self.ticket = self.log.append(record)
            self.fold.apply(record)

    return _put(Run, "catch_up", catch_up)


# --- rules 2 and 3: keys and attempts


@_broken("one compensation key per step", "2: every attempt has its own compensation key")
def _() -> Any:
    real = stepping.derive_key

    def derive(nonce: str, identity: str, attempt: int, direction: str, round_: int = 0) -> str:
        return real(nonce, identity, 1 if direction == "compensation" else attempt, direction, round_)

    return _put(stepping, "derive_key", derive)


@_broken("one forward key per step", "2: every attempt has its own forward key")
def _() -> Any:
    real = stepping.derive_key

    def derive(nonce: str, identity: str, attempt: int, direction: str, round_: int = 0) -> str:
        return real(nonce, identity, 1 if direction == "forward" else attempt, direction, round_)

    return [
        _put(stepping, "derive_key", derive),
        # Two attempts with one key would not even be folded as two.
        _in_fold(RecordType.INTENT, _every_intent_is_an_attempt),
    ]


def _every_intent_is_an_attempt(state: SagaFold, record: Any, data: Any) -> None:
    from agent_saga_core.state import Step

    if data["step"] == len(state.steps) + 1:
        step = Step(data)
        state.steps.append(step)
        state.by_identity[step.identity] = step
    state.step(data["step"]).attempts.append(Attempt(data["attempt"], data, record.epoch))


@_broken("a refused key is kept", "2: a compensation that was refused (NotApplied) is tried under a new key")
def _() -> Any:
    real = _FOLDS[RecordType.COMPENSATION_FAILED]

    def failed(state: SagaFold, record: Any, data: dict[str, Any]) -> None:
        real(state, record, {name: value for name, value in data.items() if name != "not_applied"})

    return _in_fold(RecordType.COMPENSATION_FAILED, failed)


@_broken("a key for every try", "2: a compensation's key changes only when it was refused")
def _() -> Any:
    real = compensate._starting

    def starting(run: Any, step: Any, attempt: Any, goal: Any) -> Any:
        attempt.key_round = attempt.total
        return real(run, step, attempt, goal)

    return _put(compensate, "_starting", starting)


@_broken(
    "the next attempt does not wait",
    "3: an attempt number rises only when the last attempt left nothing",
    is_async=True,
    faults={"cancel": 3.0},
)
def _() -> Any:
    real = stepping._known

    def known(run: Any, call: Any, step: Any) -> Any:
        found = real(run, call, step)
        return None if found is not None and found.kind == "settle" else found

    return [_put(stepping, "_known", known), _put(stepping, "_loose", lambda run: [])]


# --- rule 4: identity and replay


@_broken("finished calls run again", "4: a finished call met again gives back its record")
def _() -> Any:
    real = stepping._known

    def known(run: Any, call: Any, step: Any) -> Any:
        found = real(run, call, step)
        return None if found is not None and found.kind == "replay" else found

    return _put(stepping, "_known", known)


@_broken(
    "status before replay",
    "4: the replay lookup comes before the status check",
    visitors=(Visitor(role="open", body="same"), Visitor(role="open", body="same")),
    raises=False,
)
def _() -> Any:
    real = stepping._known

    def known(run: Any, call: Any, step: Any) -> Any:
        closed = stepping._closed(run, call.scope)
        return stepping._Found("refused", error=closed) if closed is not None else real(run, call, step)

    return _put(stepping, "_known", known)


@_broken(
    "a failed call keeps its count",
    "4: a call that left nothing gives its count back",
    lanes=((Call(kind="hold", amount=1, again=2), *(Call(kind="quote", amount=n, raises=False) for n in (2, 3, 4))),),
    visitors=5 * (Visitor(role="open"),),
    kills=1,
    raises=False,
    resume="replay",
    on_failure="settle",
    faults={
        "wrong": 4.0,
        "kill": 0.4,
        "flush": 0,
        "power": 0,
        "cut": 0,
        "lose": 0,
        "abort": 0,
        "cancel": 0,
        "interrupt": 0,
        "early": 0,
        "disk": 0,
        "hasty": 0,
    },
    suspends=False,
)
def _() -> Any:
    return _put(stepping, "_give_back", lambda run, call: None)


@_broken("equal calls are one", "4: two intended equal calls are two steps")
def _() -> Any:
    def count(run: Any, call: Any) -> None:
        run.taken.setdefault(call.base, set()).add(0)
        call.occurrence = 0
        call.identity = f"{call.base}#0"

    return _put(stepping, "_count", count)


@_broken(
    "skipped steps commit",
    "4: a resumed body that does not repeat every recorded step cannot commit",
    visitors=(Visitor(role="open", body="fewer"), Visitor(role="open", body="fewer")),
    kills=1,
    raises=False,
    faults={"kill": 2.0},
)
def _() -> Any:
    real = finish._commit

    def commit(run: Any) -> Any:
        run.recorded = set()
        return real(run)

    return _put(finish, "_commit", commit)


@_broken(
    "settling counts as met",
    "4: a step that was settled while the saga was opened still has to be repeated",
    visitors=(Visitor(role="open", body="fewer"), Visitor(role="open", body="fewer")),
    kinds=("pay, looked",),
    kills=1,
    raises=False,
    faults={"kill": 2.0},
)
def _() -> Any:
    real = settle._landed

    def landed(run: Any, step: Any, *more: Any) -> Any:
        run.met.add(step.number)
        return real(run, step, *more)

    return _put(settle, "_landed", landed)


@_broken("a replayed result may be lost", "9: a result that is given back is durable first", faults={"disk": 3.0})
def _() -> Any:
    return _put(stepping, "_replay", _first_flush_left_out(stepping._replay))


# --- rule 5: settling


@_broken("every error is absence", "5: only what says so is NOT_APPLIED; all else is UNKNOWN")
def _() -> Any:
    return _put(StepSpec, "says_not_applied", lambda self, error: True)


@_broken(
    "unsafe undo on UNKNOWN",
    "5: an unsafe undo never runs on UNKNOWN",
    kinds=("transfer", "transfer, looked"),
    faults={"cut": 3.0, "lose": 2.0},
)
def _() -> Any:
    real = settle._undo_if_absent

    def if_absent(attempt: Any) -> str:
        said = real(attempt)
        return "noop" if said == "unsafe" and attempt.undo is not None and "paths" not in attempt.undo else said

    return _put(settle, "_undo_if_absent", if_absent)


@_broken("a no of a probe is final", "5: a probe that saw nothing is conclusive only when nothing can be on its way")
def _() -> Any:
    real = settle._probe

    def probe(run: Any, step: Any, attempt: Any) -> Any:
        seen = yield from real(run, step, attempt)
        if seen is not None and seen.landed is False:
            return Observation(landed=False, final=True)
        return seen

    return _put(settle, "_probe", probe)


@_broken("in_doubt is ignored", "5: what is in transit is waited for")
def _() -> Any:
    return _put(Run, "settle_at", lambda self, step, attempt: 0.0)


@_broken("nothing is in transit", "5: a timeout, a broken connection or a cancellation may have sent a request")
def _() -> Any:
    return _put(stepping, "in_transit", lambda error, around: False)


@_broken(
    "a recoverer trusts the wall clock",
    "5: another process counts in_doubt from its own claim",
    kinds=("book", "pay, looked"),
    kills=2,
    visitors=(Visitor(),),
    faults={"kill": 2.0, "hasty": 10.0, "slow": 5.0},
)
def _() -> Any:
    real = Run.settle_at

    def settle_at(self: Run, step: Any, attempt: Any) -> float:
        if (step.number, attempt.number) in self.born:
            return real(self, step, attempt)
        for record in self.log.read(self.saga_id):
            if record.type == RecordType.INTENT and record.data["key"] == attempt.forward_key:
                return self.clock.monotonic() + record.time + attempt.in_doubt - self.clock.time()
        return real(self, step, attempt)

    return _put(Run, "settle_at", settle_at)


@_broken(
    "in_doubt counts from INTENT",
    "5: the process that made the call counts from the call's end",
    kinds=("book", "pay, looked"),
    faults={"cut": 3.0, "hasty": 3.0},
)
def _() -> Any:
    real = stepping._failed

    def failed(run: Any, token: Any, step: Any, attempt: Any, *rest: Any) -> Any:
        key = (step.number, attempt.number)
        born = run.born[key]
        answer = real(run, token, step, attempt, *rest)
        run.born[key] = born
        return answer

    return _put(stepping, "_failed", failed)


@_broken(
    "landed after its error is kept",
    "5: what landed after its caller heard an error is undone",
    kinds=("pay, looked",),
    is_async=True,
    raises=False,
    faults={"cancel": 3.0},
)
def _() -> Any:
    real = settle.settle

    def keeping(run: Any, step: Any, attempt: Any, **more: Any) -> Any:
        return (yield from real(run, step, attempt, **{**more, "keep": True}))

    return [_put(stepping, "settle", keeping), _put(finish, "settle", keeping)]


@_broken(
    "a late result is forgotten",
    "5: a call that was given up and ends is recorded",
    is_async=False,
    kinds=("pay",),
    faults={"cut": 3.0},
)
def _() -> Any:
    def late(run: Any, call: Any, token: Any, step: Any, attempt: Any, outcome: Any) -> Any:
        yield Append(lambda: ([], run.running.pop(token, None)))
        run.leave(token)
        yield from unwind.release(run)

    return _put(stepping, "_late", late)


@_broken(
    "an interrupted step forgets its thread",
    "8: a call that was given up and goes on keeps the saga owned, whatever interrupts its caller",
    is_async=False,
    kinds=("pay",),
    lanes=((Call(kind="pay", amount=1),),),
    kills=0,
    visitors=(),
    faults={"cut": 1.0, "interrupt": 2.0, "slow": 1.0, "hasty": 0.0},
)
def _() -> Any:
    real = stepping._abandon

    def abandon(run: Any, token: Any) -> Any:
        if token in run.running:
            run.running[token].given_up = False
        return real(run, token)

    return _put(stepping, "_abandon", abandon)


# --- rule 6: unwinding


@_broken("undo in order of intent", "6: compensations run in reverse order of outcomes")
def _() -> Any:
    real = SagaFold.open_attempts

    def open_attempts(self: SagaFold, scope: str = "") -> Any:
        return sorted(real(self, scope), key=lambda found: found[0].number, reverse=True)

    return _put(SagaFold, "open_attempts", open_attempts)


@_broken("undo from the oldest", "6: compensations run in reverse order of outcomes")
def _() -> Any:
    real = SagaFold.open_attempts
    return _put(SagaFold, "open_attempts", lambda self, scope="": real(self, scope)[::-1])


@_broken(
    "settling moves a step",
    "6: the first outcome counts, a later settle does not move a step",
    kinds=("pay, looked",),
    raises=True,
    on_failure="settle",
    faults={"cut": 2.0, "wrong": 3.0},
)
def _() -> Any:
    real = _FOLDS[RecordType.DONE]

    def done(state: SagaFold, record: Any, data: Any) -> None:
        real(state, record, data)
        state.step(data["step"]).attempts[data["attempt"] - 1].outcome = record.n

    return _in_fold(RecordType.DONE, done)


@_broken("one failure stops the rest", "6: a compensation that fails does not stop the others")
def _() -> Any:
    real = unwind._undo_one

    def undo_one(run: Any, step: Any, attempt: Any) -> Any:
        if any(a.status is StepStatus.COMPENSATION_FAILED for s in run.fold.steps for a in s.attempts):
            return settle.Settled.OPEN
        return (yield from real(run, step, attempt))

    return _put(unwind, "_undo_one", undo_one)


@_broken("no end to the tries", "6: a compensation is started three times, then left to a person")
def _() -> Any:
    return _put(compensate, "DELAYS", (0.0,) + 9 * (0.5,))


@_broken(
    "a start without an end does not count",
    "6: starts whose end is not on record count as tries",
    kills=8,
    raises=True,
    visitors=5 * (Visitor(),),
    faults={"kill": 3.0},
)
def _() -> Any:
    real = _FOLDS[RecordType.COMPENSATING]

    def compensating(state: SagaFold, record: Any, data: Any) -> None:
        attempt = state.step(data["step"]).attempts[data["attempt"] - 1]
        if attempt.status is StepStatus.COMPENSATING:
            attempt.tries -= 1
        real(state, record, data)

    return _in_fold(RecordType.COMPENSATING, compensating)


@_broken("key_ttl is ignored", "6: a compensation started longer ago than its key lives is not repeated blindly")
def _() -> Any:
    real = compensate.target

    def target(run: Any, step: Any, attempt: Any) -> Any:
        goal = real(run, step, attempt)
        if not isinstance(goal, str):
            goal.key_ttl = None
        return goal

    return _put(compensate, "target", target)


@_broken("what cannot be undone is skipped", "6: a step without a usable undo is reported, never skipped")
def _() -> Any:
    def cannot(step: Any, attempt: Any, reason: str) -> Any:
        return [(RecordType.COMPENSATED, {"step": step.number, "attempt": attempt.number})], None

    return _put(compensate, "_cannot", cannot)


@_broken(
    "irreversible passes for undone",
    "6: IRREVERSIBLE in a saga that rolls back needs a person",
    kinds=("mail", "pay"),
    raises=True,
)
def _() -> Any:
    real = unwind._undo_one

    def undo_one(run: Any, step: Any, attempt: Any) -> Any:
        if step.semantics is ActionSemantics.IRREVERSIBLE:
            yield Append(lambda: unwind._gone(step, attempt))
            return settle.Settled.ABSENT
        return (yield from real(run, step, attempt))

    return _put(unwind, "_undo_one", undo_one)


@_broken(
    "private state outlives its process",
    "6: REVERSIBLE state of a process that is gone is gone",
    kinds=("cache", "pay"),
    kills=2,
    faults={"kill": 2.0},
)
def _() -> Any:
    return _put(unwind, "_undo_one", lambda run, step, attempt: settle.settle(run, step, attempt, keep=False))


@_broken("UNKNOWN is nothing", "6: an attempt of which nobody knows may have to be undone")
def _() -> Any:
    return _put(
        Attempt,
        "open",
        property(lambda self: self.status not in (*stepping.SETTLED_ABSENT, StepStatus.UNKNOWN, StepStatus.INTENDED)),
    )


# --- rule 8: the end of a scope


@_broken(
    "commit with UNKNOWN",
    "8: a saga commits only when nothing is unsettled",
    kinds=("pay", "transfer"),
    is_async=True,
    raises=False,
    faults={"cancel": 4.0, "kill": 0.0},
)
def _() -> Any:
    real = finish._commit

    def commit(run: Any) -> Any:
        with _put(Attempt, "unsettled", property(lambda self: False)):
            return real(run)

    return _put(finish, "_commit", commit)


@_broken("rollback-only commits", "8: a saga that is rollback-only cannot commit")
def _() -> Any:
    real = finish._commit

    def commit(run: Any) -> Any:
        reason, run.fold.rollback_only = run.fold.rollback_only, None
        try:
            return real(run)
        finally:
            run.fold.rollback_only = reason

    return _put(finish, "_commit", commit)


@_broken("an error commits", "8: a body that raised does not commit")
def _() -> Any:
    real = finish.finish
    return _put(processes, "finish", lambda run, error: real(run, None))


@_broken(
    "ownership ends with the scope",
    "8: the saga stays owned while one of its calls runs in this process",
    is_async=False,
    drain=2.0,
    faults={"cut": 3.0, "hasty": 10.0, "slow": 5.0},
)
def _() -> Any:
    return _put(Run, "idle", lambda self: self.over)


@_broken(
    "the saga ends around a savepoint",
    "8: an open savepoint speaks against the commit",
    is_async=True,
    raises=False,
    faults={"early": 4.0},
)
def _() -> Any:
    real = finish._commit

    def commit(run: Any) -> Any:
        savepoints, run.savepoints = run.savepoints, set()
        try:
            return real(run)
        finally:
            run.savepoints = savepoints

    return _put(finish, "_commit", commit)


@_broken(
    "suspended sagas take records",
    "1: a decision looks at what holds now; a suspended saga is not this process's any more",
    suspends=True,
    raises=False,
    lanes=((Call(kind="book", amount=1),),),
    faults={"abort": 9.0},
)
def _() -> Any:
    def abandoned(run: Any, reason: str) -> Any:
        if run.fold.rollback_only is not None or run.fold.status.final:
            return [], None
        return [(RecordType.ABORT, {"reason": reason})], None

    return _put(finish, "_abort", abandoned)


# --- rule 9: what is durable before what


@_broken("INTENT is not flushed", "9: INTENT is durable before its call")
def _() -> Any:
    return _put(stepping, "_run", _first_flush_left_out(stepping._run))


@_broken("DONE is not flushed", "9: DONE is durable before its result is returned (strict)")
def _() -> Any:
    return _put(stepping, "_conclude", _without_flush(stepping._conclude))


@_broken("COMPENSATING is not flushed", "9: COMPENSATING is durable before the compensation")
def _() -> Any:
    return _put(settle, "compensate", _without_flush(compensate.compensate))


@_broken("verdicts are not flushed", "9: a verdict is durable before the scope returns")
def _() -> Any:
    return _put(processes, "finish", _without_flush(finish.finish, after_verdict=True))


@_broken("SUSPENDED is not flushed", "9: SUSPENDED is durable before suspend returns")
def _() -> Any:
    return _put(processes, "suspend", _without_flush(finish.suspend))


@_broken("ABORT is not flushed", "9: ABORT is durable before abort returns")
def _() -> Any:
    return _put(processes, "abort", _without_flush(finish.abort))


# --- rule 10: ownership


@_broken(
    "unlocked before it is flushed",
    "10: flush, then unlock, always",
    is_async=False,
    raises=True,
    kills=3,
    visitors=6 * (Visitor(asked=True),),
    faults={"kill": 0.5, "interrupt": 6.0, "undo": 1.0, "compact": 0.0},
)
def _() -> Any:
    def release(self: MemoryLog, saga_id: str) -> None:
        self._let_go(saga_id, self._owned.get(saga_id))

    return _put(MemoryLog, "release", release)


@_broken("everybody may own", "10: one owner at a time")
def _() -> Any:
    def take(self: MemoryLog, saga_id: str, token: object) -> None:
        self._store.owners[saga_id] = (self, token)

    return _put(MemoryLog, "take", take)


@_broken(
    "the claim is not durable",
    "10: what a dead owner only wrote is synced by who claims the saga",
    visitors=(Visitor(role="open", body="same"), Visitor(role="open", body="same")),
    kills=4,
    faults={"flush": 3.0, "power": 3.0},
)
def _() -> Any:
    def durable_history(self: MemoryLog, saga_id: str) -> Any:
        return self.read(saga_id), max(self._store.records.get(saga_id, {}), default=0)

    return _put(MemoryLog, "durable_history", durable_history)


@_broken(
    "a forked child keeps its log",
    "10: a forked child drops what it inherited, takes no step and ends no scope",
    faults={"fork": 2.0},
)
def _() -> Any:
    return _put(MemoryLog, "_abandon", lambda self: None)


# --- rule 11: recovery


@_broken(
    "handlers are not checked",
    "11: recovery resolves every handler before it claims",
    kinds=("pay", "book"),
    visitors=(Visitor(poor=True), Visitor(poor=True)),
    kills=2,
    faults={"kill": 1.0},
)
def _() -> Any:
    return _put(recovery, "_unable", lambda job, folded: False)


@_broken("the suspended are not left alone", "11: a suspended saga, or a young orphan, is left alone")
def _() -> Any:
    real = recovery._leave_alone

    def leave_alone(job: Any, folded: Any) -> bool:
        if folded.status in ("SUSPENDED", "RUNNING"):
            return False
        return real(job, folded)

    return _put(recovery, "_leave_alone", leave_alone)


@_broken(
    "no second look after the claim",
    "11: recovery reads again once it has claimed",
    suspends=True,
    raises=False,
    skew=0.0,
    lanes=((Call(kind="book", amount=1),),),
    visitors=6 * (Visitor(),),
    faults={"crowd": 0.5, "hasty": 0.0},
)
def _() -> Any:
    real = recovery._folded
    first: dict[int, Any] = {}

    def folded(job: Any, records: Any) -> Any:
        known = first.pop(id(job.run), None)
        if known is not None:
            known.next_n = records[-1].n + 1 if records else known.next_n
            return known
        first[id(job.run)] = real(job, records)
        return first[id(job.run)]

    return _put(recovery, "_folded", folded)


@_broken("being asked changes nothing", "7: an explicit recovery gives three new tries")
def _() -> Any:
    real = recovery.start_rollback
    return _put(recovery, "start_rollback", lambda run, reason, *, retry: real(run, reason, retry=False))


# --- rule 5a: pauses


@_broken(
    "a paused call goes on unannounced",
    "5a: a paused call goes on behind a second INTENT",
    lanes=((Call(kind="book", amount=1),),),
    # Nothing but the one kill, while the call that goes on is on its way.
    faults={**dict.fromkeys(FAULTS, 0.0), "pause": 3.0, "kill": 3.0, "slow": 3.0, "hasty": 0.0},
    visitors=(Visitor(role="open"), Visitor(asked=True)),
    kills=1,
    raises=False,
    suspends=False,
    heeds=True,
    resume="replay",
    durability="strict",
)
def _() -> Any:
    real = _FOLDS[RecordType.INTENT]

    def intent(state: SagaFold, record: Any, data: dict[str, Any]) -> None:
        if not data.get("resumed"):
            real(state, record, data)
        else:
            state.status = SagaStatus.RUNNING

    return _in_fold(RecordType.INTENT, intent)


@_broken("a pause leaves nothing", "5a: what a tool did before it paused is not known", faults={"pause": 3.0})
def _() -> Any:
    real = StepSpec.says_not_applied

    def says(self: StepSpec, error: BaseException) -> bool:
        return isinstance(error, Paused) or real(self, error)

    return _put(StepSpec, "says_not_applied", says)


@_broken("a pause does not stop the commit", "5a: a saga does not commit around a paused call", faults={"pause": 3.0})
def _() -> Any:
    real = Attempt.unsettled

    def unsettled(self: Attempt) -> bool:
        return self.status is not StepStatus.PAUSED and bool(real.fget and real.fget(self))

    return _put(Attempt, "unsettled", property(unsettled))


@_broken(
    "a pause is a new try", "5a: a paused call goes on as the same attempt, under the same key", faults={"pause": 3.0}
)
def _() -> Any:
    real = stepping.derive_key
    count = iter(range(1, 1_000_000))

    def derive(nonce: str, identity: str, attempt: int, direction: str, round_: int = 0) -> str:
        return real(nonce, identity, next(count) if direction == "forward" else attempt, direction, round_)

    return [_put(stepping, "derive_key", derive), _in_fold(RecordType.INTENT, _goes_on_anyhow)]


def _goes_on_anyhow(state: SagaFold, record: Any, data: Any) -> None:
    if data.get("resumed"):
        state.step(data["step"]).attempts[-1] = Attempt(data["attempt"], data, record.epoch)
    else:
        _INTENT(state, record, data)


_INTENT = _FOLDS[RecordType.INTENT]


@_broken(
    "a paused call that was not made again left nothing",
    "5a: an interrupt before a paused call goes on leaves it paused",
    lanes=((Call(kind="pay", amount=1),),),
    faults={"pause": 3.0, "interrupt": 9.0, "crowd": 0.0},
    visitors=(Visitor(role="open"), Visitor(role="open")),
    is_async=False,
    raises=False,
    heeds=True,
    resume="replay",
)
def _() -> Any:
    def not_called(running: Any) -> Any:
        return RecordType.NOT_APPLIED, {"step": running.step, "attempt": running.attempt, "reason": "never started"}

    return _put(stepping, "_not_called", not_called)
