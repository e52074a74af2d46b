"""The engine under a driver of its own: every crash point of a saga, and schedules chosen by hypothesis.

The driver performs the engine's effects one at a time and may stop for good before any of them, which is the death of
the process: what was not flushed is lost, and so is the ownership. Another process then recovers. The world outside
remembers answers by key, and a request that was sent may arrive after its sender has died.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_saga_core import (
    ActionSemantics,
    MemoryLog,
    SagaStatus,
    StepStatus,
    compensator,
    probe,
    recover,
    undo,
)
from agent_saga_core.declare import StepSpec
from agent_saga_core.engine.calls import prepare
from agent_saga_core.engine.effects import Append, Blocking, Call, CancelRunning, Flush, Outcome, Sleep, Wait, Write
from agent_saga_core.engine.finish import finish
from agent_saga_core.engine.reopen import opening
from agent_saga_core.engine.run import Options, Run
from agent_saga_core.engine.step import step
from agent_saga_core.engine.unwind import release
from agent_saga_core.log.memory import MemoryStore
from agent_saga_core.recovery.job import Job, begin, go_on
from agent_saga_core.registry import isolated_registry
from agent_saga_core.state import fold
from agent_saga_core.testing import ManualClock
from agent_saga_core.testing.world import World

START = {"name": "t", "nonce": "00" * 16}
DRAIN = 100.0


class OutOfStock(Exception):
    pass


class Failed(Exception):
    """The tool's answer was an error, although its effect had happened."""


class _Clock(ManualClock):
    """Time passes by itself, and what was sent arrives as soon as any does."""

    def __init__(self, world, **more):
        super().__init__(auto=True, **more)
        self.world = world

    def wait(self, event, timeout):
        if timeout is not None and timeout > 0:
            self.world.deliver()
        return super().wait(event, timeout)


class _Process:
    """One process: a log on the shared store, and the flows that it runs."""

    def __init__(self, store, world, saga_id="s"):
        self.world = world
        self.log = MemoryLog(_Clock(world, monotonic=1000.0 * (1 + len(world.calls))), store=store)
        self.saga_id = saga_id
        self.run = Run(saga_id, self.log, Options(drain_timeout=DRAIN))

    def perform(self, effect, run=None):
        run = run or self.run
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
            case Blocking() | Call():
                try:
                    return Outcome(effect.fn())
                except Exception as error:
                    return Outcome(error=error)
            case CancelRunning() | Wait():
                pass
            case _:
                raise AssertionError(effect)
        return None

    def spec(self, kind):
        # Looked up by name, as a process does that has imported the same modules.
        how = {
            "result": {"compensate": undo("refund", charge_id="result.id")},
            "noop": {"compensate": undo("soft void", if_absent="noop", key="step.forward_key"), "in_doubt": 20.0},
            "forbids": {"compensate": undo("void", if_absent="forbids", key="step.forward_key")},
            "unsafe": {"compensate": undo("reverse", key="step.forward_key")},
            "probe": {"compensate": undo("refund", charge_id="result.id"), "probe": "look", "in_doubt": 20.0},
        }[kind]
        return StepSpec.declared(kind, semantics=ActionSemantics.COMPENSABLE, **how)

    def call(self, kind, amount, key=None):
        return prepare(
            self.run,
            self.spec(kind),
            {"amount": amount},
            lambda key: self.world.charge(amount, key),
            scope="",
            key=key,
            call_id=None,
            parent=None,
            enclosing=(),
        )

    def opened(self):
        return opening(self.run, dict(START), fresh=False, busy_timeout=0.0)

    def ended(self, error):
        report = yield from finish(self.run, error)
        yield from release(self.run)
        return report


def _register(world):
    world.harm = []

    @compensator("refund")
    def refund(charge_id, *, idempotency_key):
        world.refund(charge_id, idempotency_key)

    @compensator("void")
    def void(key, *, idempotency_key):
        world.void(key, idempotency_key)

    @compensator("soft void")
    def soft(key, *, idempotency_key):
        world.void(key, idempotency_key, forbid=False)

    @compensator("reverse")
    def reverse(key, *, idempotency_key):
        if all(charge.key != key for charge in world.charges.values()):
            world.harm.append(key)
        world.void(key, idempotency_key, forbid=False)

    @probe("look")
    def look(args, key):
        return world.look(key)


@pytest.fixture(autouse=True)
def names():
    with isolated_registry():
        yield


# --- every crash point of a plain saga


class Died(Exception):
    pass


class _Until:
    """Performs effects, and dies before or after the k-th; a forward call may also have been sent and not arrived."""

    def __init__(self, process, k, how):
        self.process, self.left, self.how = process, k, how
        self.effects = 0
        self.struck = None

    def __call__(self, flow, run=None):
        answer = None
        while True:
            try:
                effect = flow.send(answer)
            except StopIteration as stop:
                return stop.value
            self.effects += 1
            last = self.left is not None and self.effects > self.left
            if last:
                self.struck = effect
                if self.how == "sent" and isinstance(effect, Call):
                    self.process.world.queue.append(effect.fn)
                if self.how == "after":
                    self.process.perform(effect, run)
                self.process.log.crash()
                flow.close()
                raise Died
            if isinstance(effect, Wait):
                answer = effect.ready()
                assert answer
            else:
                answer = self.process.perform(effect, run)


def _saga(process, driver, kinds, error):
    driver(process.opened())
    for n, kind in enumerate(kinds):
        outcome = driver(step(process.run, process.call(kind, n), object()))
        assert outcome.error is None
    return driver(process.ended(error))


def _asked(world):
    """The keys of all compensations that arrived, in order."""
    return [key for what, key in world.calls if what in ("refund", "void")]


def _check(store, world, *, deaths=0, repeatable=()):
    """The world against the log, after everything has been tried and everything sent has arrived."""
    world.deliver()
    records = store.records.get("s", {})
    if not records:
        assert world.charges == {}, "an effect without so much as an intent"
        return None
    folded = fold([records[n] for n in sorted(records)], "s")
    report = folded.report()
    assert report is not None, folded.status
    left = {charge.key for charge in world.left}
    if folded.status is SagaStatus.COMMITTED:
        done = {a.forward_key for s in folded.steps for a in s.attempts if a.status is StepStatus.DONE}
        assert left == done
    elif report.clean:
        assert folded.status is SagaStatus.ROLLED_BACK
        assert left == set(), "clean, and an effect is left"
    else:
        named = {a.forward_key for s in report.remaining for a in s.history}
        assert left <= named, "an effect is left, and not named"
    assert world.harm == [], "undid what never was"
    for charge in world.charges.values():
        assert len(charge.refunds) <= 1, "undone twice"
    asked = _asked(world)
    for key in set(asked):
        allowed = 1 + deaths if key in repeatable else 1
        assert asked.count(key) <= allowed, "a finished compensation ran again"
    return folded


KINDS = ("result", "noop", "forbids", "probe", "unsafe")


def _effects(kinds, error):
    world = World()
    with isolated_registry():
        _register(world)
        process = _Process(MemoryStore(), world)
        driver = _Until(process, None, "before")
        _saga(process, driver, kinds, error)
    return driver.effects


@pytest.mark.parametrize("how", ["before", "after", "sent"])
@pytest.mark.parametrize("error", [None, OutOfStock()], ids=["commit", "rollback"])
@pytest.mark.parametrize("kinds", [("result", "noop", "probe"), ("forbids", "unsafe", "noop")], ids="-".join)
def test_a_crash_before_and_after_every_effect(kinds, error, how):
    total = _effects(kinds, error)
    assert total > 20
    seen = set()
    for k in range(total):
        world = World()
        with isolated_registry():
            _register(world)
            store = MemoryStore()
            process = _Process(store, world)
            driver = _Until(process, k, how)
            with pytest.raises(Died):
                _saga(process, driver, kinds, error)
            seen.add(type(driver.struck).__name__)
            asked = _asked(world)  # of these, only the last can be without its record
            if isinstance(driver.struck, Call) and how == "sent":
                asked.append(driver.struck.current.idempotency_key if driver.struck.current else "")
            again = _Process(store, world)
            recover(again.log)
            recover(again.log)  # once more: what needed attention gets its tries, what is finished is left alone
            assert store.owners == {}
            folded = _check(store, world, deaths=1, repeatable=asked[-1:])
            if folded is not None:
                assert folded.status.final or {"result", "unsafe"} & set(kinds)
                unsettled = [s for s in folded.steps for a in s.attempts if a.unsettled]
                assert all(s.tool in ("result", "unsafe") for s in unsettled), "others need nobody to ask"
    assert {"Append", "Flush", "Call"} <= seen


@pytest.mark.parametrize("how", ["before", "after", "sent"])
def test_a_recovery_that_dies_at_every_effect_is_finished_by_the_next(how):
    kinds = ("result", "noop", "probe")
    total = _effects(kinds, OutOfStock())
    deepest = 0
    for k in range(8, total, 3):
        j = 0
        while True:
            world = World()
            with isolated_registry():
                _register(world)
                store = MemoryStore()
                process = _Process(store, world)
                with pytest.raises(Died):
                    _saga(process, _Until(process, k, how), kinds, OutOfStock())
                if "s" not in store.records:
                    break
                second = _Process(store, world)
                driver = _Until(second, j, how)
                job = Job(second.log, "s", asked=False)
                second.run = job.run
                try:
                    driver(begin(job, dry_run=False), job.run)
                    while job.verdict is None:
                        job.run.clock.wait(threading.Event(), max(0.0, job.wake - job.run.clock.monotonic()))
                        driver(go_on(job), job.run)
                    died = False
                except Died:
                    died = True
                if died:
                    recover(_Process(store, world).log)
                recover(_Process(store, world).log)
                assert store.owners == {}
                _check(store, world, deaths=1 + died, repeatable=_asked(world))
            if not died:
                break
            j += 1
        deepest = max(deepest, j)
    assert deepest > 20


# --- schedules


class _Flowing:
    """A flow as a thread or task would run it, one effect at a time. A forward call takes several ticks."""

    def __init__(self, process, flow, amount=None):
        self.process, self.flow, self.amount = process, flow, amount
        self.done, self.result = False, None
        self.outcome = None
        self.spawned, self.pace = [], 1
        self._next(lambda: next(flow))

    def _next(self, go):
        self.phase, self.outcome = 0, None
        try:
            self.effect = go()
        except StopIteration as stop:
            self.done, self.result, self.effect = True, stop.value, None

    def answer(self, value):
        self._next(lambda: self.flow.send(value))

    @property
    def blocked(self):
        return isinstance(self.effect, Wait) and not self.effect.ready()

    def tick(self, choice):
        """One thing happens; `choice` (0..5) says which, where there is one. 0 is always the plain way."""
        effect = self.effect
        if isinstance(effect, Wait):
            if effect.ready():
                self.answer(True)
            elif effect.timeout is not None and choice == 5:
                self.process.world.deliver()
                self.process.log.clock.advance(effect.timeout)
                self.answer(False)
        elif isinstance(effect, Call) and effect.kind == "forward":
            self._forward(effect, choice)
        else:
            self.answer(self.process.perform(effect))

    def _forward(self, effect, choice):
        if self.phase == 0:
            if choice == 1:  # cancelled before anything left this process
                self.answer(Outcome(error=asyncio.CancelledError()))
            elif choice == 2:  # sent, cancelled; it arrives when time passes
                self.process.world.queue.append(effect.fn)
                self.answer(Outcome(error=asyncio.CancelledError()))
            elif choice >= 3:  # a call in a thread that was given up and goes on
                self._give_up(effect, choice)
            else:
                self.phase, self.outcome = 1, self.process.perform(effect)
        elif choice == 1:
            self.answer(Outcome(error=asyncio.CancelledError()))
        elif choice == 2:
            self.answer(Outcome(error=Failed()))
        elif choice >= 3:
            self._give_up(effect, choice)
        else:
            self.answer(self.outcome)

    def _give_up(self, effect, choice):
        error = TimeoutError() if choice == 3 else asyncio.CancelledError()
        self.spawned.append(_Late(self.process, effect, self.outcome))
        self.answer(Outcome(error=error, still_running=True))


class _Late(_Flowing):
    """A call that was given up: it lands when its turn comes, then its late flow runs."""

    def __init__(self, process, effect, outcome=None):
        self.call, self.begun, self.landed = effect, False, outcome
        super().__init__(process, iter(()))
        self.done = False

    def tick(self, choice):
        if self.landed is None:
            self.landed = self.process.perform(self.call)
        elif not self.begun:
            self.begun, self.flow = True, self.call.late(self.landed)
            self._next(lambda: next(self.flow))
        else:
            super().tick(choice)

    @property
    def blocked(self):
        return self.begun and super().blocked


def _play(seed, kinds, error, crash):
    """Steps in parallel, some called again after an error, an end that may come at any time, perhaps a death."""
    chance = random.Random(seed)
    world = World()
    _register(world)
    store = MemoryStore()
    process = _Process(store, world)
    opened = _Flowing(process, process.opened())
    while not opened.done:
        opened.tick(0)

    def one(amount):
        call = process.call(kinds[amount], amount, key=str(amount))
        flow = _Flowing(process, step(process.run, call, object()), amount)
        flow.pace = chance.choice(paces)
        return flow

    paces, haste = (0.2, 2, 20), chance.choice((0.02, 0.2, 2))
    pending, flows, heard, ending = list(range(len(kinds))), [], {}, None
    for count in itertools.count():
        assert count < 3000, "it does not end"
        live = [flow for flow in flows if not flow.done]
        if not live and not pending and ending is not None:
            return store, world, heard, process
        if count == crash:
            process.log.crash()
            return store, world, heard, None
        moves = [(flow, flow.pace) for flow in live if not flow.blocked]
        moves += [(flow, 0.3) for flow in live if flow.blocked and flow.effect.timeout is not None]
        moves += [("start", 2)] * bool(pending) + [("end", haste)] * (ending is None)
        (move,) = chance.choices([m for m, _ in moves], [w for _, w in moves])
        if move == "start":
            flows.append(one(pending.pop(chance.randrange(len(pending)))))
        elif move == "end":
            ending = _Flowing(process, process.ended(error))
            ending.pace = chance.choice(paces)
            flows.append(ending)
        else:
            blocked = move.blocked
            move.tick(5 if blocked else 0 if chance.random() < 0.6 else chance.randrange(1, 5))
            for late in move.spawned:
                late.pace = chance.choice(paces)
            flows += move.spawned
            move.spawned = []
            if move.done and move.amount is not None:
                heard[move.amount] = move.result
                if isinstance(move.result.error, Exception) and chance.random() < 0.6:
                    pending.append(move.amount)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**64),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    error=st.sampled_from([None, None, OutOfStock()]),
    crash=st.one_of(st.none(), st.none(), st.integers(0, 120)),
)
@example(seed=196863129, kinds=["probe", "result"], error=None, crash=None)  # committed between landed and undone
@example(seed=1112926992156, kinds=["result"], error=None, crash=None)  # landed late, before its error was recorded
def test_any_schedule(seed, kinds, error, crash):
    with isolated_registry():
        store, world, heard, process = _play(seed, kinds, error, crash)
        if process is None:
            for _ in range(2):
                recover(_Process(store, world).log)
            _check(store, world, deaths=1, repeatable=_asked(world))
        else:
            folded = _check(store, world)
            left = [charge.amount for charge in world.left]
            for amount, outcome in heard.items():
                if folded.status is SagaStatus.COMMITTED and outcome.error is None:
                    assert left.count(amount) == 1, "a result was heard, and the effect is not there"
                elif folded.status is SagaStatus.COMMITTED and isinstance(outcome.error, Exception):
                    assert left.count(amount) == 0, "an error was heard, and the effect stays"
        assert store.owners == {}, "nothing runs any more, and the saga is still owned"
