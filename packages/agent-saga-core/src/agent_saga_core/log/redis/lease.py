"""The lease of a writer process in a Redis log: one key, and the connection that keeps it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

from redis.exceptions import RedisError

from agent_saga_core.errors import LogCorrupted, SagaError
from agent_saga_core.log import lease
from agent_saga_core.log.lease import Writer
from agent_saga_core.log.redis.connection import Connection, NotNow, Server
from agent_saga_core.log.redis.scripts import REGISTER, RENEW, RETIRE

__all__ = ["Heart", "bereaved"]


def bereaved(server: Server, fault: str) -> LogCorrupted:
    """What to raise where the server lacks what it acknowledged to this process."""
    url = server.address.url
    facts = server.facts
    cause = "a replica took the place of the server" if facts and facts.replication_id_before.strip("0") else ""
    return LogCorrupted(
        f"the log {url} has lost records that were acknowledged to this process ({fault}"
        f"{'; ' + cause if cause else ''}): its sagas are to be settled by hand",
        where=url,
    )


class Heart(lease.Heart[Connection]):
    """Keeps the lease of this process alive, on a connection and a thread of its own.

    Args:
        server: The server.
        seconds: How long a lease is.
        on_loss: Called, from any thread, when the server turns out to lack what it acknowledged, or not to keep it.
    """

    passing: ClassVar[tuple[type[Exception], ...]] = (RedisError, OSError)

    def __init__(self, server: Server, seconds: float, on_loss: Callable[[SagaError], object]) -> None:
        super().__init__(seconds, server.timeout)
        self._server = server
        self._on_loss = on_loss
        self._wait = max(1.0, seconds / 3)  # one that hangs must be given up while there is time for another

    def register(self, writer: Writer) -> None:
        """See `lease.Heart.register`."""
        keys = [self._key("log"), self._key("writers"), self._key("writer", writer.nonce.hex)]
        arguments = (self._server.log_id or b"", writer.nonce.hex, self._milliseconds())
        if self._server.run(lambda connection: connection.run(REGISTER, keys, arguments)) != 1:
            raise self._server.gone()

    def renew(self, writers: Sequence[Writer]) -> Collection[uuid.UUID]:
        """See `lease.Heart.renew`."""
        return self._server.run(lambda connection: self.renew_on(connection, writers))

    def retire_all(self, nonces: Sequence[uuid.UUID]) -> None:
        """See `lease.Heart.retire_all`."""
        keys = [self._key("writers"), *(self._key("writer", nonce.hex) for nonce in nonces)]
        arguments = [nonce.hex for nonce in nonces]
        self._server.run(lambda connection: connection.run(RETIRE, keys, arguments), patient=False)

    def connect(self) -> Connection:
        """See `lease.Heart.connect`."""
        try:
            return self._server.connect(wait=self._wait)
        except SagaError as error:
            self._on_loss(error)
            raise NotNow("the log cannot be used there") from None

    def renew_on(self, connection: Connection, writers: Sequence[Writer]) -> Collection[uuid.UUID]:
        """See `lease.Heart.renew_on`."""
        if not self._server.current(connection):
            raise NotNow("another server answers in its place")
        try:
            self._server.meet(connection)  # its configuration can be changed while it runs
        except SagaError as error:
            self._on_loss(error)
            raise NotNow("the log cannot be used there") from None
        keys = [self._key("writers"), *(self._key("writer", writer.nonce.hex) for writer in writers)]
        arguments: list[Any] = [self._milliseconds()]
        for writer in writers:
            arguments += [writer.nonce.hex, writer.acknowledged]
        answers = connection.run(RENEW, keys, arguments)
        renewed: set[uuid.UUID] = set()
        for writer, answer in zip(writers, answers, strict=True):
            if answer == b"ok":
                renewed.add(writer.nonce)
            elif answer != b"fenced":
                error = bereaved(self._server, f"its writer is {answer.decode()}")
                writer.lost = str(error)
                self._on_loss(error)
        return renewed

    def disconnect(self, connection: Connection) -> None:
        """See `lease.Heart.disconnect`."""
        connection.close()

    def _key(self, *parts: str) -> bytes:
        return self._server.address.key(*parts)

    def _milliseconds(self) -> int:
        return int(self._lease * 1000)
