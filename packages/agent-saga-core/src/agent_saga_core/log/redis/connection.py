"""Connections to the server of a log: opened, looked at, used, tried again, and what their errors mean.

Every connection asks first what server it leads to, and whether that keeps what it acknowledges. A server that is not
the one that was there before is found by its run id, before anything is said to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from agent_saga_core.errors import LogCorrupted, LogUnavailable, SagaError
from agent_saga_core.log.options import one_line
from agent_saga_core.log.pool import Pool
from agent_saga_core.log.redis.address import Address
from agent_saga_core.log.redis.fitness import Facts, facts_of, unfit
from agent_saga_core.log.redis.scripts import Script

__all__ = ["Connection", "NotNow", "Server"]


_CONNECT: Final = 10.0
_LEAST_WAIT: Final = (
    5.0  # a disk may be slow; below this, a server that is only slow would be taken for one that is gone
)
_PASSING: Final = ("BUSY ", "NOREPLICAS", "MASTERDOWN", "TRYAGAIN", "OOM ", "MISCONF", "ERR max number of clients")
_TLS_LINK: Any = redis.SSLConnection
_SOCKET_LINK: Any = redis.UnixDomainSocketConnection
_LINK: Any = redis.Connection


class NotNow(redis.ConnectionError):
    """The server that answered is not one to talk to at this moment: it follows another, or took another's place."""


class Rewriting(NotNow):
    """The server does not keep yet what it acknowledges, or cannot be told from one that does not."""


class Connection:
    """A connection, used by one thread at a time."""

    __slots__ = ("__weakref__", "_link", "run_id")

    def __init__(self, link: Any) -> None:
        self._link = link
        self.run_id = ""
        """Of the server that it leads to; each start of a server has its own."""

    def call(self, *command: str | bytes | int) -> Any:
        """Give a command.

        Raises:
            redis.RedisError: The server refused it, or nobody knows whether it was done.
        """
        self._link.send_packed_command([_packed(command)], check_health=False)
        return self._link.read_response()

    def calls(self, commands: Iterable[Sequence[str | bytes | int]]) -> list[Any]:
        """Give some commands at once. Where the server refuses one, its error stands in the place of its answer."""
        packed = [_packed(command) for command in commands]
        self._link.send_packed_command(packed, check_health=False)
        answers: list[Any] = []
        for _ in packed:
            try:
                answers.append(self._link.read_response())
            except ResponseError as error:
                answers.append(error)
        return answers

    def run(self, script: Script, keys: Sequence[bytes], arguments: Sequence[str | bytes | int] = ()) -> Any:
        """Run a script, which the server may have to be told first."""
        try:
            return self.call("EVALSHA", script.sha, len(keys), *keys, *arguments)
        except NoScriptError:
            return self.call("EVAL", script.text, len(keys), *keys, *arguments)

    def close(self) -> None:
        """End it. In a forked child that says nothing to the server."""
        with suppress(RedisError, OSError):
            self._link.disconnect()


class Server(Pool[Connection, Exception]):
    """The server of a log, as seen by one process.

    Attributes:
        address: Where it is.
        timeout: Seconds for which a command is tried again while the server is away.
        log_id: Which log is there; nothing else is used once that is known.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address.timeout, (RedisError, OSError))
        self.address: Final = address
        self.log_id: bytes | None = None
        self.facts: Facts | None = None
        self.on_change: Callable[[], object] = _nothing

    def connect(self, *, wait: float | None = None) -> Connection:
        """A new connection, which the caller closes.

        Args:
            wait: Seconds for which an answer is waited for at most.

        Raises:
            redis.RedisError: There is none to be had, now.
            LogUnavailable: The server is not fit.
            LogCorrupted: The log is not there any more.
        """
        address = self.address
        longest = max(self.timeout, _LEAST_WAIT) if wait is None else wait
        kind = _TLS_LINK if address.tls else _SOCKET_LINK if "path" in address.parameters else _LINK
        link = kind(
            **address.parameters,
            protocol=2,
            socket_timeout=longest,
            socket_connect_timeout=min(longest, _CONNECT),
        )
        made = Connection(link)
        self._all.add(made)
        try:
            link.connect()
            self.meet(made)
        except BaseException:
            made.close()
            raise
        return made

    def meet(self, made: Connection) -> None:
        """Look at where a connection leads.

        Raises:
            redis.RedisError: It leads to a server that takes no records now.
            LogUnavailable: The server is not fit.
            LogCorrupted: The log is not there any more.
        """
        facts = facts_of(made, self.address)
        made.run_id = facts.run_id
        before = self.facts
        new = before is None or before.run_id != facts.run_id
        if before is not None and facts.follows:
            raise NotNow("it is a replica now, and takes no records")
        fault = unfit(facts, self.address)
        if fault is not None:
            raise LogUnavailable(fault)
        # It says the same where the file is made for the first time and where it is written anew. In the first case
        # nothing counts before it is complete: after `CONFIG SET appendonly yes`, and on a replica that was just made.
        if new and facts.rewriting and not self.address.accept_data_loss:
            raise Rewriting("its append-only file is being written, and may not count before that is done")
        if self.log_id is not None and made.call("HGET", self.address.key("log"), "id") != self.log_id:
            raise self.gone()
        self.facts = facts
        if before is not None and new:
            self.drop_idle()
            self.on_change()

    def gone(self) -> LogCorrupted:
        """What to raise where the log is not on its server any more."""
        url = self.address.url
        return LogCorrupted(
            f"the log {url} is not what it was: its server has lost it, or another took its place; restore it, or find "
            "the server that has it",
            where=url,
        )

    def current(self, connection: Connection) -> bool:
        """Whether a connection leads to the server that answered last."""
        return self.facts is not None and connection.run_id == self.facts.run_id

    def check(self, connection: Connection) -> None:
        """See `Pool.check`: meanwhile another server may have answered in this one's place."""
        if not self.current(connection):
            raise NotNow("another server answers in its place")

    def abandon(self) -> None:
        """In a forked child: forget every connection, without a word to the server."""
        self._closed = True
        for connection in list(self._all):
            connection.close()
        self._idle.clear()

    # --- errors

    def passes(self, error: Exception, *, patient: bool) -> bool:
        """See `Pool.passes`."""
        return _passes(error) if patient else isinstance(error, BusyLoadingError | Rewriting)

    def translated(self, error: Exception) -> SagaError:
        """See `Pool.translated`."""
        said = self.line_of(error)
        url = self.address.url
        if said.startswith("WRONGTYPE"):
            return LogCorrupted(f"the log {url} is damaged ({said}); restore it from a copy", where=url)
        if isinstance(error, NoPermissionError) or said.startswith("NOPERM"):
            return LogUnavailable(f"the log {url} may not be used by this user ({said}); grant it what it lacks")
        return LogUnavailable(f"the log {url} cannot be used: {said}")

    def line_of(self, error: Exception) -> str:
        """What the client said, on one line, without what must not be shown."""
        return one_line(str(error) or type(error).__name__, self.address.secrets)[:300]


def _packed(command: Sequence[str | bytes | int]) -> bytes:
    """A command as it is sent: in a third of the time that the client takes for thousands of arguments."""
    parts = [b"*%d\r\n" % len(command)]
    for word in command:
        text = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)


def _nothing() -> None:
    pass


def _passes(error: Exception) -> bool:
    """Whether another try may go better: the server was lost, is starting, or is changing its role."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        return False
    if isinstance(error, redis.ConnectionError | redis.TimeoutError | ReadOnlyError | OSError):
        return True
    return isinstance(error, redis.OutOfMemoryError) or str(error).startswith(_PASSING)
