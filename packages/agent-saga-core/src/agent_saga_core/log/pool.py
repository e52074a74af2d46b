"""Connections to the server of a log, each used by one thread at a time, and tries that outlast its absence."""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Final, Generic, Protocol, TypeVar

from agent_saga_core.errors import SagaError

__all__ = ["Pool"]

IDLE = 8
"""More than these are closed after use."""


class _Closes(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closes)
E = TypeVar("E", bound=Exception)
T = TypeVar("T")


class Pool(ABC, Generic[C, E]):
    """The connections of one process to the server of a log.

    A store supplies `connect`, which notes what it makes in `_all`, `passes`, `translated` and `abandon`; and `check`
    where a connection may have led elsewhere.

    Args:
        timeout: Seconds for which something is tried again while the server is away.
        failing: What the store's driver raises.
    """

    def __init__(self, timeout: float, failing: tuple[type[E], ...]) -> None:
        self._failing: Final = failing
        self.timeout: Final = timeout
        self._idle: deque[C] = deque()
        self._all: weakref.WeakSet[C] = weakref.WeakSet()
        self._closed = False

    # --- what a store supplies

    @abstractmethod
    def connect(self) -> C:
        """A new connection, which the caller closes. Raises what fails if there is none to be had."""

    @abstractmethod
    def passes(self, error: E, *, patient: bool) -> bool:
        """Whether another try may go better; if not `patient`, with a server that is there."""

    @abstractmethod
    def translated(self, error: E) -> SagaError:
        """What a log raises for what the driver raised: one line, without credentials."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child: forget every connection, without a word to the server."""

    def check(self, connection: C) -> None:
        """Raise what fails where what was just said over that connection is worth nothing."""

    # --- for the log

    @contextmanager
    def using(self) -> Generator[C]:
        """A connection for one request after the other. It is thrown away if anything is raised."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.connect()
        try:
            yield connection
            self.check(connection)
        except BaseException:
            connection.close()
            raise
        if self._closed or len(self._idle) >= IDLE:
            connection.close()
        else:
            self._idle.append(connection)

    def run(self, do: Callable[[C], T], *, patient: bool = True) -> T:
        """Do something that may be done twice; again while the server is away, as long as `timeout` is not over.

        Args:
            do: What to do.
            patient: Whether to wait for a server that cannot be reached.

        Raises:
            LogUnavailable: It cannot be done, or the server stayed away.
            LogCorrupted: What is there is damaged, or is not a log any more.
        """
        until = time.monotonic() + self.timeout
        pause = 0.02
        while True:
            try:
                with self.using() as connection:
                    return do(connection)
            except self._failing as error:
                if not self.passes(error, patient=patient) or self._closed or time.monotonic() > until:
                    failure = self.translated(error)
                    break
            self.drop_idle()  # they are of the same server
            threading.Event().wait(pause)
            pause = min(2 * pause, 1.0)
        # Out here, where it is chained to nothing: an exception of a driver holds what it was given, the password too.
        raise failure

    def drop_idle(self) -> None:
        """Close what is not in use."""
        while self._idle:
            with suppress(IndexError):
                self._idle.popleft().close()

    def close(self) -> None:
        """Close everything; nothing is waited for any more."""
        self._closed = True
        self.drop_idle()
