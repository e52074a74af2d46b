"""Connections to the server of a log: opened, used, tried again, kept over a fork, and what their errors mean.

Every statement is a transaction of its own and leaves nothing behind in its session: no SET, no prepared statement, no
cursor. So it does not matter which session a pooler in transaction mode gives it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from shlex import quote
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import PQGen

from agent_saga_core.errors import LogCorrupted, LogUnavailable, SagaError
from agent_saga_core.log.options import one_line
from agent_saga_core.log.pool import Pool
from agent_saga_core.log.postgres.address import Address

__all__ = ["Connection", "Server", "unhurried"]

T = TypeVar("T")

_LEAST_SILENCE: Final = (
    5.0  # a disk may be slow; below this, a server that is only slow would be taken for one that is gone
)
_CORRUPT: Final = frozenset({"XX001", "XX002"})
_LOST: Final = ("08", "57P01", "57P02", "57P03", "53300", "40001", "40P01")
_STARTING: Final = "the database system is"  # starting up, shutting down: libpq gives no code for it

_inherited: list[object] = []  # connections of a parent: closing one in the child would end it for the parent


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """One that ends quietly where an interrupt has lost it, and never in a child of the process that made it.

    A server that says nothing for longer than it may is given up: what it was asked may be done, or done later.
    """

    made_by: int = -1
    silence: float | None = None
    """Seconds for which the server may say nothing while it is waited for; None: for ever."""

    def wait(self, gen: PQGen[T], *more: Any, **named: Any) -> T:
        """See `psycopg.Connection.wait`.

        Raises:
            psycopg.OperationalError: The server was silent for too long. The connection is closed.
        """
        return super().wait(gen if self.silence is None else self._heard(gen, self.silence), *more, **named)

    def _heard(self, gen: PQGen[T], silence: float) -> PQGen[T]:
        """The same, as long as something is heard of the server: the driver looks ten times a second."""
        until = time.monotonic() + silence
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if ready:
                    until = time.monotonic() + silence
                elif time.monotonic() > until:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"the server has said nothing for {silence:g} s")
                wanted = gen.send(ready)
        except StopIteration as done:
            return done.value

    def __del__(self, __warn: object = None) -> None:
        if self.made_by == os.getpid():
            with suppress(psycopg.Error, OSError):
                self.pgconn.finish()


def unhurried(do: Callable[[Connection], T]) -> Callable[[Connection], T]:
    """The same, for what takes the longer the larger the log is: the server may be silent for any time."""

    def at_leisure(connection: Connection) -> T:
        before, connection.silence = connection.silence, None
        try:
            return do(connection)
        finally:
            connection.silence = before

    return at_leisure


class Server(Pool[Connection, psycopg.Error]):
    """The server of a log, as seen by one process.

    Attributes:
        address: Where it is.
        timeout: Seconds for which a statement is tried again while the server is away.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address.timeout, (psycopg.Error,))
        self.address: Final = address

    def connect(self, *, silence: float | None = None, **parameters: str) -> Connection:
        """A new connection, which the caller closes.

        Args:
            silence: Seconds for which the server may say nothing. As long as a lease, unless told otherwise: an owner
                that has heard nothing for so long cannot act any more.
            **parameters: For libpq.

        Raises:
            psycopg.Error: There is none to be had.
        """
        given: dict[str, Any] = {**self.address.parameters, **parameters}
        made = Connection.connect("", autocommit=True, prepare_threshold=None, **given)
        made.made_by = os.getpid()
        made.silence = max(self.address.lease, _LEAST_SILENCE) if silence is None else silence
        self._all.add(made)
        return made

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

    def passes(self, error: psycopg.Error, *, patient: bool) -> bool:
        """See `Pool.passes`."""
        return _passes(error) if patient else _STARTING in str(error)

    def translated(self, error: psycopg.Error) -> SagaError:
        """See `Pool.translated`."""
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
        return one_line(error.diag.message_primary or str(error) or type(error).__name__, self.address.secrets)


def _passes(error: psycopg.Error) -> bool:
    """Whether another try may go better: the connection was lost or refused, or the transaction was in the way."""
    state = error.sqlstate
    if state is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return state.startswith(_LOST)
