"""The lease of a writer process: one thread that keeps it, one clock that says when it ends. For every shared store.

A lease says when somebody else may claim. What keeps two owners apart is that every append is refused unless the saga
is still at the record and under the owner that its writer knows. The lease guards what the log cannot refuse: an effect
that its owner is about to start.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeVar

from agent_saga_core.errors import Fenced
from agent_saga_core.lazy import LazyModule

if TYPE_CHECKING:
    import asyncio
else:
    asyncio = LazyModule("asyncio")

__all__ = ["LEASE", "Heart", "Writer", "now"]

LEASE: Final = 30.0
"""Seconds for which a process owns its sagas after it has last been heard of, unless told otherwise."""

_MARGIN: Final = 0.1
"""The part of a lease that its owner leaves unused: two clocks do not run at quite the same rate."""

_LOOK_EVERY: Final = 0.01


def _clock() -> Callable[[], float]:
    """A clock that goes on while the machine is suspended: the server's does."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    if boottime is not None:
        return lambda: time.clock_gettime(boottime)
    if sys.platform == "darwin":
        return lambda: time.clock_gettime(time.CLOCK_MONOTONIC)  # there, unlike `time.monotonic`, it goes on
    return time.monotonic


now: Final = _clock()


def _end(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


class Writer:
    """One ownership of the lease, from registering to losing it. Its nonce is half of every fence token."""

    __slots__ = ("acknowledged", "lost", "nonce", "until")

    def __init__(self) -> None:
        self.nonce: Final = uuid.uuid4()
        self.until = 0.0
        self.lost: str | None = None
        self.acknowledged = 0  # how many of its writes were, on a store that counts them

    def good(self) -> bool:
        """Whether an effect may start at this moment."""
        return self.lost is None and now() < self.until


C = TypeVar("C")


class Heart(ABC, Generic[C]):
    """Keeps the lease of this process alive, on a connection and a thread of its own.

    A store supplies `register`, `renew` and `retire_all`, which wait for a server that is away, and what the thread
    does on its own connection: `connect`, `renew_on`, `disconnect`.

    Args:
        lease: Seconds from one renewal to the moment at which others may take over.
        timeout: Seconds for which an effect waits for a lease that could not be renewed.
    """

    passing: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """What the store's driver raises where the next beat may go better."""

    def __init__(self, lease: float, timeout: float) -> None:
        self._lease = lease
        self._timeout = timeout
        self._writers: dict[uuid.UUID, Writer] = {}
        self._current: Writer | None = None
        self._own = threading.local()  # its connection; two threads that claim at once may start two that beat
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stopped = False
        self._chores: dict[object, Callable[[C], object]] = {}

    # --- what a store supplies

    @abstractmethod
    def register(self, writer: Writer) -> None:
        """Begin the lease of a new writer. May be called again for one whose answer was lost.

        Raises:
            LogUnavailable: The server does not take it.
        """

    @abstractmethod
    def renew(self, writers: Sequence[Writer]) -> Collection[uuid.UUID]:
        """Begin the leases of these writers anew, except of those that were fenced; who was not.

        Raises:
            LogUnavailable: The server does not say.
        """

    @abstractmethod
    def retire_all(self, nonces: Sequence[uuid.UUID]) -> None:
        """End these writers, if the server is there: their sagas are free.

        Raises:
            LogUnavailable: It is not.
        """

    @abstractmethod
    def connect(self) -> C:
        """A connection for the thread, which does not hang for longer than a third of the lease, or a second or two."""

    @abstractmethod
    def renew_on(self, connection: C, writers: Sequence[Writer]) -> Collection[uuid.UUID]:
        """`renew`, at once and on this connection."""

    @abstractmethod
    def disconnect(self, connection: C) -> None:
        """End such a connection."""

    # --- what the log asks

    def writer(self) -> Writer:
        """The writer of what is claimed now; a new one if there was none or it lost its lease.

        Raises:
            LogUnavailable: The server does not take it.
        """
        current = self._current
        if current is not None and current.lost is None:
            return current
        new = Writer()
        sent = now()
        self.register(new)
        new.until = sent + self._lease * (1 - _MARGIN)
        # Two threads may come here at once: then both are kept alive.
        self._writers[new.nonce] = new
        self._current = new
        thread = self._thread
        if thread is None or not thread.is_alive():
            # Of two that are started at once the earlier one ends when it sees that it is not this one.
            self._thread = thread = threading.Thread(target=self._beat_on, name="agent-saga lease", daemon=True)
            thread.start()
        return new

    def mine(self, nonce: object) -> bool:
        """Whether this is a writer of this process that has not lost its lease."""
        writer = self._writers.get(nonce) if isinstance(nonce, uuid.UUID) else None
        return writer is not None and writer.lost is None

    def still(self, writer: Writer) -> bool:
        """Ask the server whether this writer has its lease, and renew it if so.

        Raises:
            LogUnavailable: The server does not say.
        """
        sent = now()
        self._renewed([writer], self.renew([writer]), sent)
        return writer.lost is None

    def hold(self, writer: Writer) -> None:
        """Return if an effect may start now; otherwise wait, up to the server's timeout, until the lease is renewed.

        Raises:
            Fenced: The lease is lost, or could not be renewed.
        """
        pause = threading.Event()
        for _ in self._tries(writer):
            pause.wait(_LOOK_EVERY)

    async def ahold(self, writer: Writer) -> None:
        """Like `hold`, without blocking the running loop, and without a thread: there may be none to spare."""
        loop = asyncio.get_running_loop()
        for _ in self._tries(writer):
            pause: asyncio.Future[None] = loop.create_future()
            timer = loop.call_later(_LOOK_EVERY, _end, pause)
            try:
                await pause
            finally:
                timer.cancel()

    def _tries(self, writer: Writer) -> Iterator[None]:
        """As many as it takes until an effect may start; between two of them some time is to pass."""
        until = time.monotonic() + self._timeout
        kick = 0.0
        while not writer.good():
            if writer.lost is not None:
                raise Fenced(f"this process lost its sagas: {writer.lost}")
            if self._stopped or time.monotonic() > until:
                raise Fenced("the lease of this process ran out, and the server did not renew it; no effect is started")
            if time.monotonic() >= kick:
                kick = time.monotonic() + 0.25
                self._wake.set()
            yield

    def ask(self) -> None:
        """Have the lease renewed now, or learn that it is lost."""
        self._wake.set()

    def later(self, key: object, chore: Callable[[C], object]) -> None:
        """Have something done as soon as the server is there again."""
        self._chores[key] = chore
        self._wake.set()

    def called_off(self, key: object) -> None:
        """Take back what was to be done later."""
        self._chores.pop(key, None)

    def stop(self) -> None:
        """Keep nothing alive any more."""
        self._stopped = True
        self._wake.set()

    def abandon(self) -> None:
        """In a forked child: be still. What a thread of the parent held at that moment is held here for ever."""
        self._stopped = True
        self._wake = threading.Event()
        self._writers = {}
        self._chores = {}

    def retire(self) -> None:
        """Give everything back at once: the sagas of a writer that is not there are free.

        If the server cannot be reached, they are free when the lease has run out.

        Raises:
            LogUnavailable: That is so.
        """
        self.stop()
        nonces = [nonce for nonce, writer in self._writers.copy().items() if writer.lost is None]
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        if nonces:
            self.retire_all(nonces)

    # --- the thread

    def _beat_on(self) -> None:
        period = self._lease / 3
        wait = period
        while not self._stopped and self._thread is threading.current_thread():
            self._wake.wait(wait)
            self._wake.clear()
            if self._stopped:
                break
            wait = period if self._beat() else min(period, 0.25)
        self._disconnect()

    def _beat(self) -> bool:
        """Renew, and do what is to be done; False if that must be tried again soon."""
        try:
            connection: C | None = getattr(self._own, "connection", None)
            if connection is None:
                connection = self._own.connection = self.connect()
            writers = [writer for writer in self._writers.copy().values() if writer.lost is None]
            if writers:
                sent = now()
                self._renewed(writers, self.renew_on(connection, writers), sent)
            for key, chore in self._chores.copy().items():
                chore(connection)
                if self._chores.get(key) is chore:
                    self._chores.pop(key, None)
        except self.passing:
            self._disconnect()
            return False
        return True

    def _renewed(self, writers: Sequence[Writer], renewed: Collection[uuid.UUID], sent: float) -> None:
        for writer in writers:
            if writer.nonce in renewed:
                writer.until = sent + self._lease * (1 - _MARGIN)
            else:
                writer.lost = writer.lost or "its lease ran out and another process took over"
                self._writers.pop(writer.nonce, None)

    def _disconnect(self) -> None:
        connection: C | None = getattr(self._own, "connection", None)
        self._own.connection = None
        if connection is not None:
            with suppress(OSError, *self.passing):
                self.disconnect(connection)
