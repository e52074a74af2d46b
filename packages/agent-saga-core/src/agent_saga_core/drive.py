"""The two drivers: `drive` performs the engine's effects by blocking, `adrive` by awaiting. Nothing else has effects.

A driver never throws into a generator: a call's exception is an `Outcome`, a cancellation that comes during a flush
is the flush's answer. What the log raises leaves the driver and ends the generator.
"""

from __future__ import annotations

import contextvars
import inspect
import logging
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from agent_saga_core.clock import Clock
from agent_saga_core.engine.effects import (
    Append,
    Blocking,
    Call,
    CancelRunning,
    CurrentStep,
    Effect,
    Flow,
    Flush,
    Outcome,
    Sleep,
    Wait,
    Write,
)
from agent_saga_core.engine.run import Run
from agent_saga_core.errors import DeclarationError
from agent_saga_core.lazy import LazyModule
from agent_saga_core.state import within

if TYPE_CHECKING:
    import asyncio
else:
    asyncio = LazyModule("asyncio")

__all__ = ["CALLS", "CURRENT_SAGA", "CURRENT_STEP", "INSIDE", "STRAIGHT", "adrive", "asleep", "current_step", "drive"]

T = TypeVar("T")
log = logging.getLogger("agent_saga")

CURRENT_SAGA: contextvars.ContextVar[Any] = contextvars.ContextVar("agent_saga", default=None)
CURRENT_STEP: contextvars.ContextVar[CurrentStep | None] = contextvars.ContextVar("agent_saga_step", default=None)
INSIDE: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar("agent_saga_inside", default=())
"""The tokens of the forward calls that the current code runs in, outermost first."""
STRAIGHT: contextvars.ContextVar[bool] = contextvars.ContextVar("agent_saga_straight", default=False)
"""Whether this code runs for the engine itself (a probe, a compensation, a gate): tools in it call straight through."""

CALLS: list[Callable[[Call, Run, bool], Call]] = []
"""The test kit's seam: the last one here may replace a call before it is made. Empty in production. The third argument
says whether what the call returns is awaited on the running loop."""


def current_step() -> CurrentStep | None:
    """The step whose forward call or compensation is running here, or None.

    Gives a tool body its idempotency key without a parameter for it.
    """
    return CURRENT_STEP.get()


def drive(flow: Flow[T], run: Run) -> T:
    """Perform the effects of `flow` by blocking; returns what it returns.

    Raises:
        LogUnavailable: The log failed; the flow was ended where it stood.
    """
    answer: Any = None
    try:
        while True:
            try:
                effect = flow.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = _decide(effect, run) if isinstance(effect, Append) else _perform(effect, run)
    except BaseException:
        flow.close()  # now, not when the traceback is let go: what it holds must be free for the next try
        raise


async def adrive(flow: Flow[T], run: Run, held: list[asyncio.CancelledError], *, shield: bool = False) -> T:
    """Perform the effects of `flow` on the running loop; returns what it returns.

    Cancellation reaches a forward call, an approval, and the wait for another call; everywhere else it is put into
    `held`, and the caller raises it when the flow has ended. With `shield` no effect is cut short at all.
    """
    answer: Any = None
    try:
        while True:
            try:
                effect = flow.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(effect, Append):
                answer = _decide(effect, run)
            elif isinstance(effect, Flush):
                answer = await _aflush(run, None if effect.heed and not shield else held)
            elif isinstance(effect, Call):
                answer = await _acall(effect, run, held)
            elif isinstance(effect, CancelRunning | Write):
                answer = _perform(effect, run)
            else:
                answer = await _await_effect(effect, run, held, shield)
    except BaseException:
        flow.close()
        raise


def _decide(effect: Append, run: Run) -> Any:
    with run.lock:
        if run.pending:
            run.catch_up()
        records, answer = effect.decide()
        if records:
            run.append(records)
        if run.waiters:
            run.notify()
    return answer


def _perform(effect: Effect, run: Run) -> Any:
    match effect:
        case Call():
            return _call(effect, run)
        case Flush():
            run.log.flush(run.ticket)
        case Append():
            return _decide(effect, run)
        case Write():
            run.log.write(run.ticket)
        case Sleep():
            _say_why(effect, run)
            run.clock.wait(threading.Event(), effect.seconds)
        case Wait():
            return _wait(effect, run)
        case CancelRunning():
            _cancel_running(run, effect.scope)
        case Blocking():
            return _blocking(effect)
    return None


def _say_why(effect: Sleep, run: Run) -> None:
    if effect.why and effect.seconds > 0:
        log.info("saga %r: waiting %.1f s: %s", run.saga_id, effect.seconds, effect.why)


def _blocking(effect: Blocking) -> Outcome:
    try:
        return Outcome(effect.fn())
    except Exception as error:
        return Outcome(error=error)


def _cancel_running(run: Run, scope: str) -> None:
    with run.lock:
        cancels = [r.cancel for r in run.running.values() if r.cancel is not None and within(r.call.scope, scope)]
    for cancel in cancels:
        with suppress(RuntimeError):  # its loop is closed, and nothing of the call runs any more
            cancel()


def _wait(effect: Wait, run: Run) -> bool:
    changed = threading.Event()
    until = None if effect.timeout is None else run.clock.monotonic() + effect.timeout
    while True:
        with run.lock:
            if effect.ready():
                return True
            changed.clear()
            run.waiters.append(changed.set)
        left = None if until is None else until - run.clock.monotonic()
        if left is not None and left <= 0:
            return False
        run.clock.wait(changed, left)


# --- calling user code


class _Inside:
    """Gives the called code its step, and takes the saga from code that is no forward call.

    `leave` may be called again, after an interrupt in the middle of entering or leaving.
    """

    __slots__ = ("_effect", "_other", "_step", "_straight")

    def __init__(self, effect: Call) -> None:
        self._effect = effect
        self._step = CURRENT_STEP.get()
        self._other: Any = INSIDE.get() if effect.kind == "forward" else CURRENT_SAGA.get()
        self._straight = effect.kind != "forward" and STRAIGHT.get()

    def __enter__(self) -> None:
        effect = self._effect
        CURRENT_STEP.set(effect.current)
        if effect.kind == "forward":
            INSIDE.set((*self._other, effect.token))
        else:
            CURRENT_SAGA.set(None)
            STRAIGHT.set(True)

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        CURRENT_STEP.set(self._step)
        if self._effect.kind == "forward":
            INSIDE.set(self._other)
        else:
            CURRENT_SAGA.set(self._other)
            STRAIGHT.set(self._straight)


def _call(effect: Call, run: Run) -> Outcome:
    if CALLS:
        effect = CALLS[-1](effect, run, False)
    if effect.timeout is not None and effect.kind == "forward":
        return _call_in_thread(effect, run)
    return _call_here(effect)


def _call_here(effect: Call) -> Outcome:
    around = sys.exception()
    inside = _Inside(effect)
    try:
        with inside:
            value = effect.fn()
            if inspect.isawaitable(value):
                return _await_blocking(value)
            return Outcome(value)
    except BaseException as error:  # whatever it is, the engine decides what it means
        inside.leave()
        return Outcome(error=error, around=around)


def _await_blocking(value: Awaitable[Any]) -> Outcome:
    """Await on a loop of our own; refused under a running one, which this call blocks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner() as runner:
            return Outcome(runner.run(_awaited(value)))
    refusal = DeclarationError(
        "A synchronous call on a running event loop returned an awaitable. Use `await saga.aexecute(...)`, or "
        "`async with saga_scope(...)`."
    )
    if inspect.iscoroutine(value):
        value.close()  # its body has not begun
        return Outcome(error=refusal, never_started=True)
    return Outcome(error=refusal)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


class _Handover:
    """One outcome between a worker thread and the one who waits for it; whoever is first decides."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.given_up = False
        self.outcome: Outcome | None = None
        self.wake: Callable[[], None] = self.done.set

    def deliver(self, outcome: Outcome) -> bool:
        """From the worker: whether somebody still waits for the outcome."""
        with self.lock:
            if self.given_up:
                return False
            self.outcome = outcome
        self.wake()
        return True

    def give_up(self) -> bool:
        """From the one who waits: whether the worker is still at it."""
        with self.lock:
            self.given_up = self.outcome is None
            return self.given_up


def _start_worker(effect: Call, run: Run, handover: _Handover) -> Outcome | None:
    """Run the call in a thread of its own; an outcome only if it could not be started.

    A daemon: a call that never ends must not keep the process from ending, and recovery settles what it leaves.
    """
    context = contextvars.copy_context()

    def work() -> None:
        outcome = context.run(_call_here, effect)
        if not handover.deliver(outcome) and effect.late is not None:
            try:
                drive(effect.late(outcome), run)
            except Exception:
                log.exception("saga %r: a late result could not be recorded; recovery will settle it", run.saga_id)
                if run.idle():
                    run.log.release(run.saga_id)

    try:
        threading.Thread(target=work, daemon=True, name="agent-saga-call").start()
    except RuntimeError as error:
        return Outcome(error=error, never_started=True)
    return None


def _goes_on(effect: Call, run: Run) -> None:
    running = run.running.get(effect.token) if effect.token is not None else None
    if running is not None:
        running.given_up = True


def _timed_out(effect: Call) -> TimeoutError:
    tool = effect.current.tool if effect.current is not None else "the call"
    return TimeoutError(f"{tool!r} did not end within {effect.timeout} s")


def _call_in_thread(effect: Call, run: Run) -> Outcome:
    handover = _Handover()
    failed = _start_worker(effect, run, handover)
    if failed is not None:
        return failed
    try:
        run.clock.wait(handover.done, effect.timeout)
        error: BaseException = _timed_out(effect)
    except BaseException as interrupted:  # a signal: the call goes on in its thread
        error = interrupted
    if handover.give_up():
        _goes_on(effect, run)
        return Outcome(error=error, still_running=True)
    assert handover.outcome is not None
    return handover.outcome


# --- the same, awaiting


async def _aflush(run: Run, held: list[asyncio.CancelledError] | None) -> asyncio.CancelledError | None:
    """Flush; a cancellation is heard of once durability is known."""
    interrupted: asyncio.CancelledError | None = None
    ticket = run.ticket
    while True:
        try:
            await run.log.aflush(ticket)
            break
        except asyncio.CancelledError as cancelled:
            interrupted = cancelled
    if interrupted is not None and held is not None:
        held.append(interrupted)
        return None
    return interrupted


async def _await_effect(effect: Effect, run: Run, held: list[asyncio.CancelledError], shield: bool) -> Any:
    match effect:
        case Sleep():
            _say_why(effect, run)
            until = run.clock.monotonic() + effect.seconds
            while (left := until - run.clock.monotonic()) > 0:
                try:
                    await asleep(left, run.clock)
                except asyncio.CancelledError as cancelled:
                    held.append(cancelled)
        case Wait():
            until = None if effect.timeout is None else run.clock.monotonic() + effect.timeout
            while True:
                try:
                    return await _await_ready(effect, run, until)
                except asyncio.CancelledError as cancelled:
                    if not shield:
                        return cancelled
                    held.append(cancelled)
        case Blocking():
            return await _uncut(asyncio.get_running_loop().run_in_executor(None, _blocking, effect), held)
        case _:
            raise AssertionError(effect)
    return None


async def _uncut(awaitable: Awaitable[T], held: list[asyncio.CancelledError]) -> T:
    """Await to the end, whatever cancellation comes meanwhile; those are put into `held`.

    A coroutine runs in a task of its own. Where that task itself is cancelled (as `asyncio.run` does with every task
    when it ends), its CancelledError is its outcome and comes out.
    """
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as cancelled:
            held.append(cancelled)
    return task.result()


async def asleep(seconds: float, clock: Clock) -> None:
    """Let `seconds` pass on `clock` without blocking the running loop."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    timer = clock.call_later(loop, seconds, lambda: _set(over))
    try:
        await over
    finally:
        timer.cancel()


async def _await_ready(effect: Wait, run: Run, until: float | None) -> bool:
    loop = asyncio.get_running_loop()
    while True:
        changed = loop.create_future()
        with run.lock:
            if effect.ready():
                return True
            run.waiters.append(lambda changed=changed: _wake(loop, changed))
        left = None if until is None else until - run.clock.monotonic()
        if left is not None and left <= 0:
            return False
        timer = run.clock.call_later(loop, left, lambda changed=changed: _set(changed)) if left is not None else None
        try:
            await changed
        finally:
            if timer is not None:
                timer.cancel()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_set, future)
    except RuntimeError:
        return  # the loop is closed, and whoever waited on it is gone


async def _acall(effect: Call, run: Run, held: list[asyncio.CancelledError]) -> Outcome:
    if CALLS:
        effect = CALLS[-1](effect, run, not effect.offload or effect.kind != "forward")
    if effect.kind in ("compensation", "probe"):
        return await _acall_uncut(effect, held)
    if effect.offload:
        return await _acall_in_thread(effect, run)
    around = sys.exception()
    inside = _Inside(effect)
    try:
        with inside:
            value = effect.fn()
            if not inspect.isawaitable(value):
                return Outcome(value)
            return Outcome(await _cancellably(effect, run, value))
    except GeneratorExit:  # this coroutine is being closed: nothing can be awaited any more
        raise
    except BaseException as error:  # whatever it is, the engine decides what it means
        inside.leave()
        return Outcome(error=error, around=around)


async def _cancellably(effect: Call, run: Run, value: Awaitable[Any]) -> Any:
    """Await a forward call so that its timeout, its task and the scope's drain can each cancel it."""
    loop = asyncio.get_running_loop()
    running = run.running.get(effect.token) if effect.token is not None else None
    task = asyncio.current_task()
    if running is not None and task is not None:

        def stop() -> None:  # on the loop, where it can tell whether the call is still the one to stop
            if running.cancel is not None:
                task.cancel()

        running.cancel = lambda: loop.call_soon_threadsafe(stop)
    try:
        if effect.timeout is None:
            return await value
        async with asyncio.timeout(None) as limit:
            timer = run.clock.call_later(loop, effect.timeout, lambda: limit.reschedule(loop.time()))
            try:
                return await value
            finally:
                timer.cancel()
    finally:
        if running is not None:
            running.cancel = None


async def _acall_uncut(effect: Call, held: list[asyncio.CancelledError]) -> Outcome:
    around = sys.exception()
    inside = _Inside(effect)
    try:
        with inside:
            value = effect.fn()
            if not inspect.isawaitable(value):
                return Outcome(value)
            return Outcome(await _uncut(value, held))
    except GeneratorExit:
        raise
    except BaseException as error:
        inside.leave()
        return Outcome(error=error, around=around)


async def _acall_in_thread(effect: Call, run: Run) -> Outcome:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    handover = _Handover()
    handover.wake = lambda: _wake(loop, done)
    failed = _start_worker(effect, run, handover)
    if failed is not None:
        return failed
    timer = None
    if effect.timeout is not None:
        timer = run.clock.call_later(loop, effect.timeout, lambda: _set(done))
    try:
        await done
        error: BaseException = _timed_out(effect)
    except asyncio.CancelledError as cancelled:
        error = cancelled
    finally:
        if timer is not None:
            timer.cancel()
    if handover.give_up():
        _goes_on(effect, run)
        return Outcome(error=error, still_running=True)
    assert handover.outcome is not None
    return handover.outcome
