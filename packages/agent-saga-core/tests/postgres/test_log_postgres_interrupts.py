"""A KeyboardInterrupt that strikes anywhere in the PostgreSQL log leaves nothing owned, lost or stored twice."""

from __future__ import annotations

from ..servers.interrupts import Interrupts


class TestPostgresInterrupts(Interrupts):
    pass
