"""A KeyboardInterrupt that strikes anywhere in the NATS log leaves nothing owned, lost or stored twice."""

from __future__ import annotations

from ..servers.interrupts import Interrupts


class TestNatsInterrupts(Interrupts):
    pass
