"""The lease of a writer process: one row, one thread and one connection that keep it, one clock that says when it ends.

A lease says when somebody else may claim. What keeps two owners apart is that every append is refused unless the saga
is still at the record and under the owner that its writer knows. The lease guards what the log cannot refuse: an effect
that its owner is about to start.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import psycopg

from agent_saga_core.errors import Fenced
from agent_saga_core.lazy import LazyModule
from agent_saga_core.log.postgres.connection import Connection, Server

if TYPE_CHECKING:
    import asyncio
else:
    asyncio = LazyModule("asyncio")

__all__ = ["Heart", "Writer", "now"]

_MARGIN: Final = 0.1
"""The part of a lease that its owner leaves unused: two clocks do not run at quite the same rate."""

_LOOK_EVERY: Final = 0.01

_REGISTER: Final = "INSERT INTO {s}.writer(nonce, lease_until) VALUES(%s, now() + %s * interval '1 second')"
_RENEW: Final = (
    "UPDATE {s}.writer SET lease_until = now() + %s * interval '1 second'"
    " WHERE nonce = ANY(%s::uuid[]) AND NOT fenced RETURNING nonce"
)
_RETIRE: Final = "DELETE FROM {s}.writer WHERE nonce = ANY(%s::uuid[])"


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

    __slots__ = ("lost", "nonce", "until")

    def __init__(self) -> None:
        self.nonce: Final = uuid.uuid4()
        self.until = 0.0
        self.lost: str | None = None

    def good(self) -> bool:
        """Whether an effect may start at this moment."""
        return self.lost is None and now() < self.until


class Heart:
    """Keeps the lease of this process alive, on a connection and a thread of its own."""

    def __init__(self, server: Server, lease: float) -> None:
        self._server = server
        self._lease = lease
        # The driver wants literals; the only thing put into these is a checked name.
        self._register: Any = _REGISTER.format(s=server.address.schema)
        self._renew: Any = _RENEW.format(s=server.address.schema)
        self._retire: Any = _RETIRE.format(s=server.address.schema)
        self._writers: dict[uuid.UUID, Writer] = {}
        self._current: Writer | None = None
        # A connection that hangs must be given up while there is time for another.
        third = max(2, int(lease / 3))
        self._hasty = {"connect_timeout": str(third), "tcp_user_timeout": str(third * 1000)}
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stopped = False
        self._chores: dict[object, Callable[[Connection], object]] = {}

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
        self._server.run(lambda connection: connection.execute(self._register, (new.nonce, self._lease)))
        new.until = sent + self._lease * (1 - _MARGIN)
        # Two threads may come here at once: then both are kept alive.
        self._writers[new.nonce] = new
        self._current = new
        thread = self._thread
        if thread is None or not thread.is_alive():
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
        self._server.run(lambda connection: self._renew_on(connection, [writer]))
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
        until = time.monotonic() + self._server.timeout
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

    def later(self, key: object, chore: Callable[[Connection], object]) -> None:
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
        """
        self.stop()
        nonces = [nonce for nonce, writer in self._writers.copy().items() if writer.lost is None]
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        if nonces:
            self._server.run(lambda connection: connection.execute(self._retire, (nonces,)), patient=False)

    # --- the thread

    def _beat_on(self) -> None:
        period = self._lease / 3
        wait = period
        while not self._stopped:
            self._wake.wait(wait)
            self._wake.clear()
            if self._stopped:
                break
            wait = period if self._beat() else min(period, 0.25)
        self._disconnect()

    def _beat(self) -> bool:
        """Renew, and do what is to be done; False if that must be tried again soon."""
        try:
            connection = self._connection
            if connection is None:
                connection = self._connection = self._server.connect(**self._hasty)
            writers = [writer for writer in self._writers.copy().values() if writer.lost is None]
            if writers:
                self._renew_on(connection, writers)
            for key, chore in self._chores.copy().items():
                chore(connection)
                if self._chores.get(key) is chore:
                    self._chores.pop(key, None)
        except psycopg.Error:
            self._disconnect()
            return False
        return True

    def _renew_on(self, connection: Connection, writers: Sequence[Writer]) -> None:
        sent = now()
        rows = connection.execute(self._renew, (self._lease, [writer.nonce for writer in writers])).fetchall()
        renewed = {nonce for (nonce,) in rows}
        for writer in writers:
            if writer.nonce in renewed:
                writer.until = sent + self._lease * (1 - _MARGIN)
            else:
                writer.lost = "its lease ran out and another process took over"
                self._writers.pop(writer.nonce, None)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                connection.close()
