"""A clock that only moves when a test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from agent_saga_core.clock import Timer

__all__ = ["ManualClock"]

_LOOK_AGAIN = 0.002
"""Seconds of real time after which a waiting thread looks at the manual time: a `threading.Event` can be waited for,
and nothing can be waited for beside it."""

_PATIENCE = 30.0
"""Seconds of real time after which a thread that does not run is a broken test, not a slow machine."""


class _Waiter:
    """One timed wait: a thread in `wait`, or a callback that a loop will run."""

    def __init__(self, due: float, order: int) -> None:
        self.due = due
        self.order = order
        self.gone = threading.Event()


class _LoopTimer(_Waiter):
    def __init__(
        self, clock: ManualClock, due: float, order: int, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]
    ) -> None:
        super().__init__(due, order)
        self._clock = clock
        self._loop = loop
        self._callback = callback
        self._cancelled = False

    def cancel(self) -> None:
        """See `Timer.cancel`."""
        self._cancelled = True
        self._clock._leave(self)  # pyright: ignore[reportPrivateUsage]

    def fire(self) -> None:
        """From any thread: run the callback on its loop, unless it is called off before that."""
        self._clock._leave(self)  # pyright: ignore[reportPrivateUsage]
        try:
            self._loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            return  # the loop is closed, and what waited on it is gone

    def _run(self) -> None:
        if not self._cancelled:
            self._callback()


class ManualClock:
    """A `Clock` whose time stands still until `advance`.

    Waits without a timeout are real waits; every other wait ends when its event is set or `advance` passes its
    moment. Both `time` and `monotonic` move by the same amount; `set_wall` moves only the first, as an operator or
    a time server would. Clocks of two processes are two `ManualClock`.

    With `auto=True` a wait with a timeout ends at once, as if its time had passed and nothing had set its event
    meanwhile, and time moves to its end. A callback runs as soon as its loop comes to it. This is deterministic for
    what only lets time pass (the pauses between compensations, the wait for what is in doubt), and wrong for what
    waits for somebody: every step with a timeout would time out. Use `advance` there.

    Args:
        wall: What `time` says first, in seconds since the epoch.
        monotonic: What `monotonic` says first.
        auto: Whether time passes by itself.
    """

    def __init__(self, *, wall: float = 1_700_000_000.0, monotonic: float = 1_000.0, auto: bool = False) -> None:
        self._now = monotonic
        self._ahead = wall - monotonic
        self._auto = auto
        self._changed = threading.Condition()
        self._waiters: list[_Waiter] = []
        self._count = 0

    def time(self) -> float:
        """See `Clock.time`."""
        return self._now + self._ahead

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._now

    def set_wall(self, seconds: float) -> None:
        """Set what `time` says; `monotonic`, and every wait, stays as it is."""
        with self._changed:
            self._ahead = seconds - self._now

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """See `Clock.wait`."""
        if timeout is None:
            return event.wait()
        if event.is_set():
            return True
        with self._changed:
            if self._auto or timeout <= 0:
                self._now += max(0.0, timeout)
                return event.is_set()
            waiter = _Waiter(self._now + timeout, self._next())
            self._enter(waiter)
        try:
            while not event.wait(_LOOK_AGAIN):
                if self._now >= waiter.due:
                    return event.is_set()
            return True
        finally:
            self._leave(waiter)

    def call_later(self, loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[[], None]) -> Timer:
        """See `Clock.call_later`."""
        with self._changed:
            timer = _LoopTimer(self, self._now + max(0.0, delay), self._next(), loop, callback)
            if self._auto:
                self._now = timer.due
            elif delay > 0:
                self._enter(timer)
                return timer
        loop.call_soon(timer._run)  # pyright: ignore[reportPrivateUsage]
        return timer

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass: whoever waits is woken in the order of the moments waited for.

        When this returns, `wait` has returned in every thread whose moment came, and every callback that was due is
        scheduled on its loop. A wait that begins because an earlier one ended counts from the moment at which it
        begins: call `wait_until_waiting` in between where that matters.
        """
        target = self._now + seconds
        while True:
            with self._changed:
                due = min(
                    (waiter for waiter in self._waiters if waiter.due <= target),
                    key=lambda waiter: (waiter.due, waiter.order),
                    default=None,
                )
                self._now = target if due is None else max(self._now, due.due)
            if due is None:
                return
            if isinstance(due, _LoopTimer):
                due.fire()
            elif not due.gone.wait(_PATIENCE):
                raise AssertionError("a thread that was woken by the clock did not return from its wait")

    @property
    def waiters(self) -> int:
        """How many waits with a timeout are under way: threads in `wait`, and callbacks not yet due."""
        with self._changed:
            return len(self._waiters)

    def wait_until_waiting(self, count: int = 1, *, due_in: float = 0.0, timeout: float = 10.0) -> None:
        """Block, in real time, until at least `count` waits are under way, so that `advance` will meet them.

        Args:
            count: How many.
            due_in: Count only waits with at least this many seconds to go; leaves out short ones of the log's own.
            timeout: Seconds of real time after which the test is broken.

        Raises:
            AssertionError: Nobody came to wait.
        """

        def waiting() -> bool:
            return sum(waiter.due - self._now >= due_in for waiter in self._waiters) >= count

        with self._changed:
            if not self._changed.wait_for(waiting, timeout):
                raise AssertionError(f"{len(self._waiters)} waits are under way, {count} were expected")

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _enter(self, waiter: _Waiter) -> None:
        self._waiters.append(waiter)
        self._changed.notify_all()

    def _leave(self, waiter: _Waiter) -> None:
        with self._changed:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._changed.notify_all()
        waiter.gone.set()
