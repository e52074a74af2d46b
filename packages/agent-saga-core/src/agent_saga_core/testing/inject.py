"""Makes one step fail in one way: wraps the calls of a scenario, from outside, on a clock that nobody waits for."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from agent_saga_core.clock import Timer
from agent_saga_core.drive import drive
from agent_saga_core.engine.effects import Call
from agent_saga_core.engine.finish import abort
from agent_saga_core.log.memory import MemoryLog

if TYPE_CHECKING:
    from agent_saga_core.engine.run import Run

__all__ = ["WAYS", "InjectedFailure", "InjectedInterrupt", "Injector", "Label", "Plan", "ProofClock", "Seen", "Way"]

Way = Literal[
    "before",
    "after",
    "timeout-absent",
    "timeout-landed",
    "timeout-late",
    "cancelled-before",
    "cancelled-after",
    "aborted",
    "killed-before",
    "killed-after",
    "killed-undoing",
]
WAYS: Final[dict[Way, str]] = {
    "before": "an error, and nothing happened",
    "after": "the effect happened, and an error came instead of the answer",
    "timeout-absent": "a timeout, and nothing happened",
    "timeout-landed": "a timeout, and the effect had happened",
    "timeout-late": "a timeout, and the effect happens afterwards",
    "cancelled-before": "cancelled (sync: interrupted), and nothing happened",
    "cancelled-after": "cancelled (sync: interrupted) after the effect",
    "aborted": "the step succeeds, and the saga is aborted meanwhile",
    "killed-before": "SIGKILL before the effect",
    "killed-after": "SIGKILL after the effect",
    "killed-undoing": "the saga is aborted, and SIGKILL after the effect of its first compensation",
}
PATIENCE = 5.0
"""Seconds of real time for which something that another thread or task must do is waited for."""
OVERLAP = 0.02
"""Seconds of real time that a call gives others to begin, in the run that finds out which steps run at once."""
LOOK = 0.001
"""Seconds of real time between two looks at what no event tells."""


class InjectedFailure(Exception):
    """What a step raises in a probe. Nothing of it says whether the effect happened."""


class InjectedInterrupt(KeyboardInterrupt):
    """The cancellation of a synchronous step."""


class Label(NamedTuple):
    """A step of the scenario, the same in every run of it."""

    saga: int
    """The how-manieth saga of the run it belongs to, from 1."""
    tool: str
    occurrence: int
    """The how-manieth call of that tool in its saga, from 1."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to fail in one run; without a step, nothing."""

    step: Label | None = None
    way: Way = "before"
    partners: frozenset[Label] = frozenset()
    """Steps that run at the same time, and where they stand when the step fails."""
    beside: Literal["", "held", "done"] = ""
    also_abort: bool = False
    simulate_death: bool = False
    own_before: bool = False
    """Whether the world is to be compared with what it was when the step's saga began."""
    watch: bool = False
    """Whether to look at the world around every call."""


class Seen(NamedTuple):
    """What one call did to the world; None: it could not be looked at."""

    kind: Literal["forward", "compensation"]
    tool: str
    number: int
    changed: bool | None
    failed: bool
    restored: bool | None
    """For a compensation: whether the world is what it was before the step's forward call."""


class ProofClock:
    """A clock on which waiting for time takes none, and waiting for somebody takes as long as that takes.

    `land` is called whenever time passes: what was sent and is still under way arrives then.
    """

    def __init__(self) -> None:
        self._wall = time.time()
        self._passed = 0.0
        self._lock = threading.Lock()
        self.runs: dict[int, Run] = {}
        self.land: Callable[[], list[Any]] = list

    def time(self) -> float:
        """See `Clock.time`."""
        return self._wall + self._passed

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._passed

    def let_pass(self, seconds: float) -> None:
        """Move on."""
        with self._lock:
            self._passed += max(0.0, seconds)

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """See `Clock.wait`."""
        if timeout is None:
            return event.wait()
        if event.is_set():
            return True
        if timeout > 0 and self._awaits_somebody(event) and event.wait(min(timeout, PATIENCE)):
            return True
        for late in self.land() if timeout > 0 else ():
            _run_apart(late)
        self.let_pass(timeout)
        return event.is_set()

    def _awaits_somebody(self, event: threading.Event) -> bool:
        wake = event.set
        return any(wake == waiter for run in list(self.runs.values()) for waiter in list(run.waiters))

    def call_later(self, loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[[], None]) -> Timer:
        """See `Clock.call_later`."""
        timer = _Timer(self, delay, callback)
        # Two seconds is the longest pause between two tries; what waits longer may wait for a call that is under way.
        if delay > 2.0 and any(run.running or run.flows for run in list(self.runs.values())):
            timer.handle = loop.call_later(min(delay, PATIENCE), timer.fire)
            return timer
        late = [loop.create_task(_quietly(awaitable)) for awaitable in (self.land() if delay > 0 else ())]
        if late:
            landed = asyncio.gather(*late)
            landed.add_done_callback(lambda _: timer.fire())
        else:
            timer.handle = loop.call_soon(timer.fire)
        return timer


class _Timer:
    def __init__(self, clock: ProofClock, delay: float, callback: Callable[[], None]) -> None:
        self.clock, self.delay, self.callback = clock, delay, callback
        self.handle: asyncio.Handle | None = None
        self.off = False

    def fire(self) -> None:
        if not self.off:
            self.clock.let_pass(self.delay)
            self.callback()

    def cancel(self) -> None:
        self.off = True
        if self.handle is not None:
            self.handle.cancel()


async def _quietly(awaitable: Any) -> None:
    try:
        await awaitable
    except Exception:
        return  # the other side refused what came late


def _run_apart(awaitable: Any) -> None:
    """Run an awaitable to its end on a loop of its own, from a thread that may have one already."""
    thread = threading.Thread(target=lambda: asyncio.run(_quietly(awaitable)), name="agent-saga-late", daemon=True)
    thread.start()
    thread.join(PATIENCE)


# --- one call under way

_Until = Callable[[], bool]
_Flow = Generator[tuple[str, Any], Any, Any]
"""What a wrapped call does, one thing at a time, so that it is written once for sync and async calls:
("until", condition), ("call", callable), ("look", callable), ("cancel", None)."""


@dataclass(eq=False)
class _Tracked:
    label: Label
    token: object
    run: Run
    number: int
    landed: bool = False
    """Its forward call has done what it does."""

    def over(self) -> bool:
        """Whether its outcome is recorded."""
        return self.token not in self.run.running


@dataclass(eq=False)
class Injector:
    """The seam's other side for one run of the scenario: `drive.CALLS` gets its `replace`."""

    plan: Plan
    clock: ProofClock
    log: MemoryLog | None = None
    """The log that dies in a simulated death."""
    snapshot: Callable[[], Any] = lambda: None
    main: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
    """The scenario's own task, which is what gets cancelled."""
    order: list[Label] = field(default_factory=list[Label])
    partners: dict[Label, set[Label]] = field(default_factory=dict[Label, set[Label]])
    saga: str | None = None
    """The saga that was struck."""
    tell: Callable[[str], None] = lambda saga: None
    """Hears of the struck saga before anything is done to it."""
    missed: str = ""
    """Why the step was not struck as planned, although it was reached."""
    before: list[Any] = field(default_factory=list[Any])
    """The world when the struck saga began, if the plan asked for it."""
    seen: list[Seen] = field(default_factory=list[Seen])

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._sagas: dict[str, int] = {}
        self._calls: dict[Label, _Tracked] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._late: list[tuple[_Tracked, contextvars.Context, Callable[[], Any]]] = []
        self._before: dict[int, Any] = {}
        self._struck: _Tracked | None = None
        self.clock.land = self.land

    # --- the seam

    def replace(self, effect: Call, run: Run, awaited: bool) -> Call:
        """What `drive.CALLS` asks: the call to make instead."""
        self.clock.runs[id(run)] = run
        if effect.kind == "compensation" and (self.plan.watch or self._dies_undoing):
            return _with(effect, self._performed(effect, self._undo(effect), awaited))
        if effect.kind != "forward" or effect.token is None or effect.current is None:
            return effect
        call = self._track(effect, run)
        return _with(effect, self._performed(effect, self._forward(call, effect.fn), awaited))

    @property
    def _dies_undoing(self) -> bool:
        return self.plan.way == "killed-undoing" and self._struck is not None

    def _track(self, effect: Call, run: Run) -> _Tracked:
        assert effect.current is not None
        with self._lock:
            saga = self._sagas.setdefault(run.saga_id, len(self._sagas) + 1)
            counted = self._counts[saga, effect.current.tool] = self._counts.get((saga, effect.current.tool), 0) + 1
            label = Label(saga, effect.current.tool, counted)
            call = _Tracked(label, effect.token, run, effect.current.number)
            self.order.append(label)
            self._calls[label] = call
        with run.lock:
            mine = run.running.get(effect.token)
            others = [(token, running) for token, running in run.running.items() if token is not effect.token]
        for token, running in others:
            nested = mine is None or token in mine.call.enclosing or effect.token in running.call.enclosing
            other = next((c for c in list(self._calls.values()) if c.token is token), None)
            if not nested and other is not None:
                self.partners.setdefault(label, set()).add(other.label)
                self.partners.setdefault(other.label, set()).add(label)
        return call

    def _performed(self, effect: Call, flow: _Flow, awaited: bool) -> Callable[[], Any]:
        offloaded = effect.offload and not awaited
        return (lambda: self._aperform(flow)) if awaited else (lambda: self._perform(flow, offloaded))

    # --- what a call does instead

    def _forward(self, call: _Tracked, inner: Callable[[], Any]) -> _Flow:
        plan = self.plan
        if plan.own_before and plan.step is not None and call.label.saga == plan.step.saga and not self.before:
            self.before.append((yield "look", None))
        before = (yield "look", None) if plan.watch else None
        if plan.watch:
            self._before[call.number] = before
        if plan.step is None:
            yield "overlap", None
        if call.label == plan.step and self._struck is None:
            return (yield from self._strike(call, inner, before))
        value = yield from self._made(call, inner, before)
        if plan.beside == "held" and call.label in plan.partners:
            yield "until", self._may_return
            yield "overlap", None  # a cancellation that follows from the failure meets this call under way
        return value

    def _made(self, call: _Tracked, inner: Callable[[], Any], before: Any) -> _Flow:
        failed = True
        try:
            value = yield "call", inner
            failed = False
        finally:
            call.landed = True
        if self.plan.watch:
            after = yield "look", None
            self.seen.append(Seen("forward", call.label.tool, call.number, _differ(before, after), failed, None))
        return value

    def _may_return(self) -> bool:
        struck = self._struck
        return struck is not None and (struck.over() or struck.run.closing)

    def _strike(self, call: _Tracked, inner: Callable[[], Any], before: Any) -> _Flow:
        plan, way = self.plan, self.plan.way
        if plan.beside and not (yield "until", self._partners_ready):
            self.missed = "the steps beside it did not run at the same time in this run"
        if way in ("after", "timeout-landed", "cancelled-after", "aborted", "killed-after", "killed-undoing"):
            value = yield from self._made(call, inner, before)
        else:
            value = None
        self._struck, self.saga = call, call.run.saga_id
        self.tell(call.run.saga_id)
        if plan.also_abort or way in ("aborted", "killed-undoing"):
            drive(abort(call.run, "a failure was injected"), call.run)
        if way in ("aborted", "killed-undoing"):
            return value
        if way in ("killed-before", "killed-after"):
            self._die()
        if way in ("cancelled-before", "cancelled-after"):
            yield "cancel", call
            return value
        if way == "timeout-late":
            self._late.append((call, contextvars.copy_context(), inner))
        if way in ("before", "after"):
            raise InjectedFailure(f"{call.label.tool!r} was made to fail: {WAYS[way]}")
        raise TimeoutError(f"{call.label.tool!r} was made to fail: {WAYS[way]}")

    def _partners_ready(self) -> bool:
        done = self.plan.beside == "done"
        calls = [self._calls.get(label) for label in self.plan.partners]
        return all(call is not None and (call.over() if done else call.landed) for call in calls)

    def _undo(self, effect: Call) -> _Flow:
        before = (yield "look", None) if self.plan.watch else None
        failed = True
        try:
            value = yield "call", effect.fn
            failed = False
            if self._dies_undoing:
                self._die()
        finally:
            if failed and self.plan.watch and effect.current is not None:
                self.seen.append(Seen("compensation", effect.current.tool, effect.current.number, None, True, None))
        if self.plan.watch and effect.current is not None:
            after = yield "look", None
            origin = self._before.get(effect.current.number, _NOTHING)
            restored = None if origin is _NOTHING or _differ(origin, after) is None else not _differ(origin, after)
            tool, number = effect.current.tool, effect.current.number
            self.seen.append(Seen("compensation", tool, number, _differ(before, after), False, restored))
        return value

    def _die(self) -> None:
        """The process ends here; in a simulation its log does, which leaves the same in the log."""
        if not self.plan.simulate_death:
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()
        assert self.log is not None
        self.log.crash()

    def land(self) -> list[Any]:
        """Let what was sent late arrive; returns what of it must still be awaited."""
        with self._lock:
            late, self._late = self._late, []
        awaitables: list[Any] = []
        for call, context, inner in late:
            try:
                value = context.run(inner)
            except Exception:  # the other side refused what came late
                continue
            self.seen.append(Seen("forward", call.label.tool, call.number, True, False, None))
            if inspect.isawaitable(value):
                awaitables.append(value)
        return awaitables

    # --- the two ways to perform it

    def _perform(self, flow: _Flow, offloaded: bool) -> Any:
        answer: Any = None
        failure: BaseException | None = None
        blocked = _on_a_loop()
        while True:
            try:
                kind, subject = flow.throw(failure) if failure is not None else flow.send(answer)
            except StopIteration as stop:
                return stop.value
            answer, failure = None, None
            try:
                if kind == "until":
                    # Blocking the loop that the others need would only be waited for in vain.
                    answer = subject() if blocked else _until(subject)
                elif kind == "overlap" and not blocked:
                    threading.Event().wait(OVERLAP)
                elif kind == "call":
                    answer = subject()
                    if inspect.isawaitable(answer) and not blocked:
                        with asyncio.Runner() as runner:
                            answer = runner.run(_awaited(answer))
                elif kind == "look":
                    answer = self._look()
                elif kind == "cancel":
                    self._interrupt(subject, offloaded)
            except BaseException as error:
                failure = error

    async def _aperform(self, flow: _Flow) -> Any:
        answer: Any = None
        failure: BaseException | None = None
        while True:
            try:
                kind, subject = flow.throw(failure) if failure is not None else flow.send(answer)
            except StopIteration as stop:
                return stop.value
            answer, failure = None, None
            try:
                if kind == "until":
                    answer = await _auntil(subject)
                elif kind == "overlap":
                    await asyncio.sleep(OVERLAP)
                elif kind == "call":
                    answer = subject()
                    if inspect.isawaitable(answer):
                        answer = await answer
                elif kind == "look":
                    answer = self._look()
                    if inspect.isawaitable(answer):
                        answer = await answer
                elif kind == "cancel":
                    await self._cancel()
            except BaseException as error:
                failure = error

    def _look(self) -> Any:
        return self.snapshot()

    def _interrupt(self, call: _Tracked, offloaded: bool) -> None:
        if not offloaded or self.main is None or _on_a_loop():
            raise InjectedInterrupt("a step was interrupted")
        loop, task = self.main
        loop.call_soon_threadsafe(task.cancel)
        attempt = call.run.fold.step(call.number).last
        _until(lambda: attempt.status != "INTENDED")  # a call in a thread goes on, and ends late

    async def _cancel(self) -> None:
        current = asyncio.current_task()
        loop, task = self.main if self.main is not None else (asyncio.get_running_loop(), current)
        if task is not None:
            loop.call_soon_threadsafe(task.cancel)
        await asyncio.sleep(PATIENCE)
        raise asyncio.CancelledError  # the scenario shields its steps from its own cancellation


_NOTHING: Final = object()


def _with(effect: Call, fn: Callable[[], Any]) -> Call:
    """The same call with another callable. Without a timeout: the kit decides what takes too long."""
    return Call(effect.kind, fn, current=effect.current, offload=effect.offload, token=effect.token, late=effect.late)


def _differ(one: Any, other: Any) -> bool | None:
    if inspect.isawaitable(one) or inspect.isawaitable(other):
        return None  # an async snapshot cannot be taken in a synchronous call
    return bool(one != other)


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _awaited(value: Any) -> Any:
    return await value


def _until(condition: _Until) -> bool:
    for _ in range(int(PATIENCE / LOOK)):
        if condition():
            return True
        threading.Event().wait(LOOK)
    return condition()


async def _auntil(condition: _Until) -> bool:
    for _ in range(int(PATIENCE / LOOK)):
        if condition():
            return True
        await asyncio.sleep(LOOK)
    return condition()
