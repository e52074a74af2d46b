"""One run of a small saga under a driver that decides at every effect what happens next.

The engine's generators say what is to be done, so a driver can be anything: this one performs their effects one at a
time and lets `Choices` decide whether another flow goes first, how a call ends, or whether the process dies. Recovery
is the real one, on the same store, and may die as well.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from agent_saga_core.declare import ActionSemantics, Observation, StepSpec, undo
from agent_saga_core.engine.calls import prepare
from agent_saga_core.engine.effects import Append, Blocking, Call, Effect, Flow, Flush, Outcome, Sleep, Wait, Write
from agent_saga_core.engine.finish import finish
from agent_saga_core.engine.reopen import opening
from agent_saga_core.engine.run import Options, Run
from agent_saga_core.engine.step import step
from agent_saga_core.engine.unwind import release
from agent_saga_core.errors import LogUnavailable, NotApplied
from agent_saga_core.log.memory import MemoryLog, MemoryStore
from agent_saga_core.recovery import recover
from agent_saga_core.registry import compensator, probe
from agent_saga_core.testing.clock import ManualClock
from agent_saga_core.testing.laws import broken_laws
from agent_saga_core.testing.world import World

__all__ = ["BODIES", "KINDS", "OUTCOMES", "Choices", "Simulation", "SmallSaga", "Violation", "register"]

KINDS: Final = ("result", "noop", "forbids", "probe")
"""How a step is undone or settled: from its result, by an undo that is harmless, by one that leaves a tombstone, by its
probe."""
OUTCOMES: Final = (
    "refused",
    "absent",
    "landed",
    "timeout-absent",
    "timeout-landed",
    "timeout-late",
    "cancelled-absent",
    "cancelled-landed",
    "outlived",
)
"""How a forward call may fail. `outlived`: it is given up, goes on in its thread, and ends when the schedule says."""
BODIES: Final = ("lets errors out", "raises at its end", "tries again")
SAGA: Final = "s"
DRAIN = 100.0
RECOVERIES = 4


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One run in which a promise did not hold.

    Attributes:
        promise: Its id in `docs/design.md`; `"error"` if the engine itself failed.
        what: What was seen.
        how: The saga and the decisions that differ from the plain course, in their order.
        records: The types of the saga's records, as the log holds them at the end.
    """

    promise: str
    what: str
    how: str
    records: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.promise}: {self.what}\n  in: {self.how}\n  log: {' '.join(self.records)}"


@dataclass(frozen=True)
class SmallSaga:
    """One small saga: its steps, and how its body takes failures."""

    kinds: tuple[str, ...]
    body: str
    at_once: bool
    faults: int
    switches: int = 0

    def __str__(self) -> str:
        steps = (" beside " if self.at_once else ", ").join(self.kinds)
        return f"a saga of {steps}, whose body {self.body}"


class Choices:
    """The decisions of one run: a given beginning, then always the first; `next` is the beginning of the next run."""

    def __init__(self, given: list[tuple[int, int]]) -> None:
        self._given = given
        self._made: list[tuple[int, int]] = []
        self.told: list[str] = []

    def choose(self, options: int) -> int:
        """One of so many options, from 0."""
        at = len(self._made)
        chosen = self._given[at][0] if at < len(self._given) else 0
        self._made.append((chosen, options))
        return chosen

    def next(self) -> list[tuple[int, int]] | None:
        """The decisions that begin the next run; None if every run was made."""
        made = self._made
        while made and made[-1][0] + 1 >= made[-1][1]:
            made.pop()
        if not made:
            return None
        chosen, options = made.pop()
        return [*made, (chosen + 1, options)]


# --- one run


class _Died(BaseException):
    """The process is gone."""


class _OutOfStock(Exception):
    """The body's own exception."""


class _Clock(ManualClock):
    """Time passes by itself, and what was sent arrives as soon as any does."""

    def __init__(self, world: World, monotonic: float) -> None:
        super().__init__(auto=True, monotonic=monotonic)
        self._world = world

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """See `Clock.wait`."""
        if timeout is not None and timeout > 0:
            self._world.deliver()
        return super().wait(event, timeout)


class _Flowing:
    """A flow and the effect it stands before."""

    def __init__(self, name: str, flow: Flow[Any]) -> None:
        self.name = name
        self.flow = flow
        self.effect: Effect | None = None
        self.result: Any = None
        self.over = False

    def go(self, answer: Any) -> None:
        try:
            self.effect = self.flow.send(answer)
        except StopIteration as stop:
            self.over, self.result, self.effect = True, stop.value, None


class _Log(MemoryLog):
    """A log whose process may die before and after each flush; for recovery, which has its own driver."""

    simulation: Simulation | None = None

    def point(self, where: str) -> None:
        """A place at which the process may die."""
        if self.simulation is not None:
            self.simulation.point(where)

    def flush(self, ticket: int) -> None:
        """See `Log.flush`."""
        self.point("before a flush")
        super().flush(ticket)
        self.point("after a flush")


class Simulation:
    """One run: the body's process, then recoveries until nothing is left to do."""

    def __init__(self, saga: SmallSaga, choices: Choices) -> None:
        self.saga = saga
        self.choices = choices
        self.faults = saga.faults
        self.switches = saga.switches
        self.world = World()
        self.store = MemoryStore()
        self.seen: list[tuple[str, str]] = []
        self.processes = 0
        self.recovering: _Log | None = None

    def run(self) -> list[Violation]:
        """Run it to its end; what it broke."""
        self._handle()
        self.log = self._process()
        self.run_ = Run(SAGA, self.log, Options(drain_timeout=DRAIN))
        try:
            self._alone(opening(self.run_, {"name": "t", "nonce": "00" * 16}, fresh=True, busy_timeout=0.0))
            self._at_once() if self.saga.at_once else self._one_by_one()
        except _Died:
            self.log.crash()
        except Exception as error:
            self.seen.append(("error", f"the engine raised {type(error).__name__}: {error}"))
            self.log.crash()
        for _ in range(RECOVERIES):
            if not self._recover():
                break
        self.world.deliver()
        broken = self.seen + broken_laws(self.store.records.get(SAGA, {}), self.world)
        records = tuple(record.type for _, record in sorted(self.store.records.get(SAGA, {}).items()))
        how = "; ".join([str(self.saga), *self.choices.told])
        return [Violation(promise=promise, what=what, how=how, records=records) for promise, what in broken]

    def _process(self) -> _Log:
        self.processes += 1
        return _Log(_Clock(self.world, 1000.0 * self.processes), store=self.store)

    # --- faults

    def _fault(self, options: tuple[str, ...], where: str) -> str | None:
        """A fault, or None for the plain course; only as many as the bound allows."""
        if not self.faults:
            return None
        chosen = self.choices.choose(len(options) + 1)
        if not chosen:
            return None
        self.faults -= 1
        self.choices.told.append(f"{options[chosen - 1]} {where}")
        return options[chosen - 1]

    # --- the body's process

    def _alone(self, flow: Flow[Any]) -> Any:
        flowing = _Flowing("", flow)
        flowing.go(None)
        self._turns([flowing])
        return flowing.result

    def _one_by_one(self) -> None:
        error: BaseException | None = None
        for number, kind in enumerate(self.saga.kinds, 1):
            outcome = self._alone(self._step(kind, number))
            if isinstance(outcome.error, Exception) and self.saga.body == "tries again":
                outcome = self._alone(self._step(kind, number))
            if outcome.error is not None and self.saga.body != "tries again":
                error = outcome.error
                break
            if outcome.error is not None and not isinstance(outcome.error, Exception):
                error = outcome.error
                break
        else:
            error = _OutOfStock() if self.saga.body == "raises at its end" else None
        self._alone(self._ended(error))

    def _at_once(self) -> None:
        error = _OutOfStock() if self.saga.body == "raises at its end" else None
        flows = [_Flowing(f"step {n}", self._step(kind, n)) for n, kind in enumerate(self.saga.kinds, 1)]
        flows.append(_Flowing("the end", self._ended(error)))
        for flowing in flows:
            flowing.go(None)
        self._turns(flows)

    def _step(self, kind: str, amount: int) -> Flow[Any]:
        call = prepare(
            self.run_,
            _SPECS[kind],
            {"amount": amount},
            partial(self.world.charge, amount),
            scope="",
            key=None,
            call_id=None,
            parent=None,
            enclosing=(),
        )
        return step(self.run_, call, object())

    def _ended(self, error: BaseException | None) -> Flow[Any]:
        report = yield from finish(self.run_, error)
        yield from release(self.run_)
        return report

    def _turns(self, flows: list[_Flowing]) -> None:
        """Perform effects until every flow is over. Calls that were given up join as flows of their own."""
        self.flows = flows
        current = flows[0]
        while any(not flowing.over for flowing in flows):
            current = self._whose_turn(flows, current)
            effect = current.effect
            assert effect is not None
            if self._fault(("a crash",), f"before {_named(effect)}"):
                raise _Died
            current.go(self._perform(effect))

    def _whose_turn(self, flows: list[_Flowing], current: _Flowing) -> _Flowing:
        ready = [flowing for flowing in flows if not flowing.over and self._ready(flowing.effect)]
        if not ready:
            return next(flowing for flowing in flows if not flowing.over)  # its wait times out
        if current in ready:
            if isinstance(current.effect, Flush | Write) or not self.switches:
                return current
            ready.remove(current)
            ready.insert(0, current)
        chosen = self.choices.choose(len(ready)) if len(ready) > 1 else 0
        if chosen and current in ready:
            self.switches -= 1
        if chosen:
            self.choices.told.append(f"{ready[chosen].name} goes on before {current.name or 'the body'}")
        return ready[chosen]

    @staticmethod
    def _ready(effect: Effect | None) -> bool:
        return not isinstance(effect, Wait) or effect.ready()

    def _perform(self, effect: Effect) -> Any:
        run = self.run_
        match effect:
            case Append():
                with run.lock:
                    if run.pending:
                        run.catch_up()
                    records, answer = effect.decide()
                    if records:
                        run.append(records)
                return answer
            case Flush():
                run.log.flush(run.ticket)
            case Write():
                run.log.write(run.ticket)
            case Sleep():
                run.clock.wait(threading.Event(), effect.seconds)
            case Wait():
                return self._wait(effect)
            case Call():
                return self._call(effect)
            case Blocking():
                return _outcome(effect.fn)
            case _:
                return None
        return None

    def _wait(self, effect: Wait) -> bool:
        if effect.ready():
            return True
        run = self.run_
        run.clock.wait(threading.Event(), effect.timeout or 0.0)
        return False

    def _call(self, effect: Call) -> Outcome:
        if effect.kind == "compensation":
            self._check_compensation(effect)
        if effect.kind != "forward":
            return _outcome(effect.fn)
        self._check_intent(effect)
        failure = self._fault((*OUTCOMES, "sent, and a crash after", "a crash right after"), f"at {_named(effect)}")
        match failure:
            case None:
                return _outcome(effect.fn)
            case "sent, and a crash after":
                self.world.queue.append(effect.fn)
                raise _Died
            case "a crash right after":
                effect.fn()
                raise _Died
            case "outlived":
                self.flows.append(self._outliving(effect))
                return Outcome(error=TimeoutError("given up"), still_running=True)
            case "timeout-late":
                self.world.queue.append(partial(_outcome, effect.fn))
            case "landed" | "timeout-landed" | "cancelled-landed":
                effect.fn()
            case _:
                pass
        errors = {"refused": NotApplied, "absent": ValueError, "landed": ValueError}
        kind = errors.get(failure, asyncio.CancelledError if failure.startswith("cancelled") else TimeoutError)
        return Outcome(error=kind(failure))

    def _outliving(self, effect: Call) -> _Flowing:
        def going_on() -> Generator[Effect, Any, None]:
            outcome = yield Blocking(effect.fn)
            assert effect.late is not None
            yield from effect.late(outcome)

        flowing = _Flowing("the call that was given up", going_on())
        flowing.go(None)
        self.switches += 1  # that it may end sooner or later is the point of it
        return flowing

    # --- what is seen while it happens

    def _durable(self, kind: str, field: str, key: str) -> bool:
        history = self.store.records.get(SAGA, {}).values()
        return any(
            record.type == kind and record.data.get(field) == key and (SAGA, record.n) not in self.store.volatile
            for record in history
        )

    def _check_intent(self, effect: Call) -> None:
        assert effect.current is not None
        if not self._durable("INTENT", "key", effect.current.idempotency_key):
            self.seen.append(("intent-first", f"{_named(effect)} is made before its INTENT is durable"))

    def _check_compensation(self, effect: Call) -> None:
        assert effect.current is not None
        self._check_key(effect.current.idempotency_key)

    def _check_key(self, key: str) -> None:
        if not self._durable("COMPENSATING", "key", key):
            self.seen.append(("compensate-once", "a compensation is made before its start is durable"))

    # --- recovery

    def _recover(self) -> bool:
        """One recovery by a process of its own; returns whether another one may have something to do."""
        log = self.recovering = self._process()
        log.simulation = self
        try:
            if not log.unfinished().saga_ids:
                return False
            report = recover(log)
            return bool(report.attention) and self.processes < RECOVERIES
        except (_Died, LogUnavailable):
            log.crash()
            return True
        finally:
            self.recovering = None

    def point(self, where: str) -> None:
        """A place at which a recovery may die."""
        if self.recovering is not None and self._fault(("a crash",), f"{where} of recovery {self.processes - 1}"):
            self.recovering.crash()
            raise _Died

    def _handle(self) -> None:
        """The handlers of this run, under the names that the log holds."""
        world = self.world
        _HANDLERS["refund"] = lambda charge_id, key: self._acted(key, lambda: world.refund(charge_id, key))
        _HANDLERS["void"] = lambda target, key: self._acted(key, lambda: world.void(target, key))
        _HANDLERS["soft"] = lambda target, key: self._acted(key, lambda: world.void(target, key, forbid=False))
        _HANDLERS["look"] = lambda args, key: world.look(key)

    def _acted(self, key: str, act: Callable[[], None]) -> None:
        self._check_key(key)
        if self.recovering is not None:
            self.point("before a compensation")
        act()
        if self.recovering is not None:
            self.point("after a compensation")


_HANDLERS: dict[str, Callable[[Any, str], Any]] = {}
_SPECS: dict[str, StepSpec] = {}


def register() -> None:
    """Register handlers whose work changes with each run, and declare the tools with them."""

    @compensator("invariants.refund")
    def refund(charge_id: str, *, idempotency_key: str) -> None:
        _HANDLERS["refund"](charge_id, idempotency_key)

    @compensator("invariants.void")
    def void(key: str, *, idempotency_key: str) -> None:
        _HANDLERS["void"](key, idempotency_key)

    @compensator("invariants.soft")
    def soft(key: str, *, idempotency_key: str) -> None:
        _HANDLERS["soft"](key, idempotency_key)

    @probe("invariants.look")
    def look(args: dict[str, Any], idempotency_key: str) -> Observation:
        return _HANDLERS["look"](args, idempotency_key)

    from_result = undo(refund, charge_id="result.id")
    _SPECS.update(
        result=_spec("result", compensate=from_result),
        noop=_spec("noop", compensate=undo(soft, if_absent="noop", key="step.forward_key"), in_doubt=20.0),
        forbids=_spec("forbids", compensate=undo(void, if_absent="forbids", key="step.forward_key")),
        probe=_spec("probe", compensate=from_result, probe=look, in_doubt=20.0),
    )


def _spec(tool: str, **how: Any) -> StepSpec:
    return StepSpec.declared(tool, semantics=ActionSemantics.COMPENSABLE, **how)


def _outcome(fn: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(fn())
    except Exception as error:
        return Outcome(error=error)


def _named(effect: Effect) -> str:
    if isinstance(effect, Call) and effect.current is not None:
        return f"the {effect.kind} call of step {effect.current.number}"
    if isinstance(effect, Append):
        decide = effect.decide
        name = getattr(decide.func if isinstance(decide, partial) else decide, "__name__", "append")
        return f"{name.strip('_<>')} (Append)"
    return type(effect).__name__
