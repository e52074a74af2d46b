"""Time as an argument: everything that waits or stamps takes a `Clock`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

__all__ = ["SYSTEM_CLOCK", "Clock", "SystemClock", "Timer"]


class Timer(Protocol):
    """A callback that has been asked for and can still be called off."""

    def cancel(self) -> None:
        """Call it off; harmless when it has already run."""
        ...


class Clock(Protocol):
    """What the engine, recovery and the log need of time."""

    def time(self) -> float:
        """Seconds since the epoch. For people and for stored deadlines; never compared between processes."""
        ...

    def monotonic(self) -> float:
        """Seconds that only rise, with an arbitrary start. For every wait within this process."""
        ...

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """Block until `event` is set or `timeout` seconds have passed; return whether it is set."""
        ...

    def call_later(self, loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[[], None]) -> Timer:
        """Run `callback` on `loop` after `delay` seconds. Call from that loop's thread."""
        ...


class SystemClock:
    """The clock of this machine."""

    def time(self) -> float:
        """See `Clock.time`."""
        return time.time()

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.monotonic()

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """See `Clock.wait`."""
        return event.wait(timeout)

    def call_later(self, loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[[], None]) -> Timer:
        """See `Clock.call_later`."""
        return loop.call_later(delay, callback)


SYSTEM_CLOCK = SystemClock()
