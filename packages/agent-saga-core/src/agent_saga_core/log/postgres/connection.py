"""Connections to the server of a log: opened, used, tried again, kept over a fork, and what their errors mean.

Every statement is a transaction of its own and leaves nothing behind in its session: no SET, no prepared statement, no
cursor. So it does not matter which session a pooler in transaction mode gives it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from shlex import quote
from typing import Any, Final, TypeAlias, TypeVar

import psycopg

from agent_saga_core.errors import LogCorrupted, LogUnavailable, SagaError
from agent_saga_core.log.postgres.address import Address

__all__ = ["Connection", "Server"]

Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"
T = TypeVar("T")

_IDLE: Final = 8  # more than these are closed after use
_CORRUPT: Final = frozenset({"XX001", "XX002"})
_LOST: Final = ("08", "57P01", "57P02", "57P03", "53300", "40001", "40P01")
_STARTING: Final = "the database system is"  # starting up, shutting down: libpq gives no code for it

_inherited: list[object] = []  # connections of a parent: closing one in the child would end it for the parent


class _Connection(psycopg.Connection[tuple[Any, ...]]):
    """One that ends quietly where an interrupt has lost it, and never in a child of the process that made it."""

    made_by: int = -1

    def __del__(self, __warn: object = None) -> None:
        if self.made_by == os.getpid():
            with suppress(psycopg.Error, OSError):
                self.pgconn.finish()


class Server:
    """The server of a log, as seen by one process.

    Attributes:
        address: Where it is.
        timeout: Seconds for which a statement is tried again while the server is away.
    """

    def __init__(self, address: Address) -> None:
        self.address: Final = address
        self.timeout: Final = address.timeout
        self._idle: deque[Connection] = deque()
        self._all: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._closed = False

    def connect(self, **parameters: str) -> Connection:
        """A new connection, which the caller closes.

        Raises:
            psycopg.Error: There is none to be had.
        """
        given: dict[str, Any] = {**self.address.parameters, **parameters}
        made = _Connection.connect("", autocommit=True, prepare_threshold=None, **given)
        made.made_by = os.getpid()
        self._all.add(made)
        return made

    @contextmanager
    def using(self) -> Generator[Connection]:
        """A connection for one statement after the other. It is thrown away if anything is raised."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if self._closed or len(self._idle) >= _IDLE:
            connection.close()
        else:
            self._idle.append(connection)

    def run(self, do: Callable[[Connection], T], *, patient: bool = True) -> T:
        """Do something that may be done twice; again and again while the server is away, up to `timeout`.

        Args:
            do: What to do.
            patient: Whether to wait for a server that cannot be reached.

        Raises:
            LogUnavailable: It cannot be done, or the server stayed away.
            LogCorrupted: The server says that its data are damaged.
        """
        until = time.monotonic() + self.timeout
        pause = 0.02
        while True:
            try:
                with self.using() as connection:
                    return do(connection)
            except psycopg.Error as error:
                again = _passes(error) if patient else _STARTING in str(error)
                if not again or self._closed or time.monotonic() > until:
                    failure = self.translated(error)
                    break
            self.drop_idle()  # they are of the same server
            threading.Event().wait(pause)
            pause = min(2 * pause, 1.0)
        # Out here, where it is chained to nothing: an exception of the driver holds the password that it was given.
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

    def abandon(self) -> None:
        """In a forked child: forget every connection, without a word to the server."""
        self._closed = True
        for connection in list(self._all):
            _inherited.append(connection)
            _inherited.append(connection.pgconn)
            with suppress(psycopg.Error, OSError):
                os.close(connection.pgconn.socket)
        self._idle.clear()

    # --- errors

    def translated(self, error: psycopg.Error) -> SagaError:
        """What a log raises for what the driver raised: one line, without credentials."""
        said = self.line_of(error)
        state = error.sqlstate or ""
        url = self.address.url
        if state in _CORRUPT:
            return LogCorrupted(f"the log {url} is damaged ({said}); restore it from a copy", where=url)
        if state == "42501":
            return LogUnavailable(f"the log {url} may not be used by this role ({said}); grant it what it lacks")
        if state in ("42P01", "3F000", "42703"):
            return LogUnavailable(
                f"the log {url} lacks what was made for it ({said}); make it: agent-saga log init {quote(url)}"
            )
        return LogUnavailable(f"the log {url} cannot be used: {said}")

    def line_of(self, error: psycopg.Error) -> str:
        """What the driver said, on one line, without what must not be shown."""
        said = error.diag.message_primary or str(error) or type(error).__name__
        line = "; ".join(part.strip() for part in said.splitlines() if part.strip())
        for secret in self.address.secrets:
            line = line.replace(secret, "***")
        return line


def _passes(error: psycopg.Error) -> bool:
    """Whether another try may go better: the connection was lost or refused, or the transaction was in the way."""
    state = error.sqlstate
    if state is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return state.startswith(_LOST)
