"""Connections to the server of a log: opened, used, tried again, kept over a fork, and what their errors mean.

Every statement is a transaction of its own and leaves nothing behind in its session: no SET, no prepared statement, no
cursor. So it does not matter which session a pooler in transaction mode gives it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from shlex import quote
from typing import Any, Final, TypeAlias

import psycopg

from agent_saga_core.errors import LogCorrupted, LogUnavailable, SagaError
from agent_saga_core.log.pool import Pool
from agent_saga_core.log.postgres.address import Address

__all__ = ["Connection", "Server"]

Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"

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


class Server(Pool[Connection, psycopg.Error]):
    """The server of a log, as seen by one process.

    Attributes:
        address: Where it is.
        timeout: Seconds for which a statement is tried again while the server is away.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address.timeout, (psycopg.Error,))
        self.address: Final = address

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
