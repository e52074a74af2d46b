"""A KeyboardInterrupt that strikes anywhere in the Redis log leaves nothing owned, lost or stored twice."""

from __future__ import annotations

from ..servers.interrupts import Interrupts


class TestRedisInterrupts(Interrupts):
    pass
