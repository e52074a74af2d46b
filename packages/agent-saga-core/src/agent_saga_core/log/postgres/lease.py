"""The lease of a writer process in a PostgreSQL log: one row, and the connection that keeps it."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Final

import psycopg

from agent_saga_core.log import lease
from agent_saga_core.log.lease import Writer
from agent_saga_core.log.postgres.connection import Connection, Server

__all__ = ["Heart"]

_REGISTER: Final = (
    "INSERT INTO {s}.writer(nonce, lease_until) VALUES(%s, now() + %s * interval '1 second') ON CONFLICT DO NOTHING"
)
_RENEW: Final = (
    "UPDATE {s}.writer SET lease_until = now() + %s * interval '1 second'"
    " WHERE nonce = ANY(%s::uuid[]) AND NOT fenced RETURNING nonce"
)
_RETIRE: Final = "DELETE FROM {s}.writer WHERE nonce = ANY(%s::uuid[])"


class Heart(lease.Heart[Connection]):
    """Keeps the lease of this process alive, on a connection and a thread of its own."""

    passing: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error,)

    def __init__(self, server: Server, seconds: float) -> None:
        super().__init__(seconds, server.timeout)
        self._server = server
        # The driver wants literals; the only thing put into these is a checked name.
        self._register: Any = _REGISTER.format(s=server.address.schema)
        self._renew: Any = _RENEW.format(s=server.address.schema)
        self._retire: Any = _RETIRE.format(s=server.address.schema)
        # A connection that hangs must be given up while there is time for another.
        self._third = max(2, int(seconds / 3))  # libpq counts no less

    def register(self, writer: Writer) -> None:
        """See `lease.Heart.register`."""
        self._server.run(lambda connection: connection.execute(self._register, (writer.nonce, self._lease)))

    def renew(self, writers: Sequence[Writer]) -> Collection[uuid.UUID]:
        """See `lease.Heart.renew`."""
        return self._server.run(lambda connection: self.renew_on(connection, writers))

    def retire_all(self, nonces: Sequence[uuid.UUID]) -> None:
        """See `lease.Heart.retire_all`."""
        self._server.run(lambda connection: connection.execute(self._retire, (list(nonces),)), patient=False)

    def connect(self) -> Connection:
        """See `lease.Heart.connect`."""
        third = str(self._third)
        return self._server.connect(silence=self._third, connect_timeout=third, tcp_user_timeout=third + "000")

    def renew_on(self, connection: Connection, writers: Sequence[Writer]) -> Collection[uuid.UUID]:
        """See `lease.Heart.renew_on`."""
        rows = connection.execute(self._renew, (self._lease, [writer.nonce for writer in writers])).fetchall()
        return {nonce for (nonce,) in rows}

    def disconnect(self, connection: Connection) -> None:
        """See `lease.Heart.disconnect`."""
        connection.close()
