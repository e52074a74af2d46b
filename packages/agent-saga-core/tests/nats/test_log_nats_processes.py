"""The NATS log between real processes: stopped past a lease, stealing from each other, killed."""

from __future__ import annotations

from typing import ClassVar

from ..servers.processes import Processes

RUN_OUT = """
async def _run_out():
    # Each has been watched running out.
    for leased in await log._index.leases():
        await log._index.put_expired(leased.nonce, leased.revision)
def run_out():
    log._server.run(_run_out)
"""


class TestNatsProcesses(Processes):
    run_out: ClassVar[str] = RUN_OUT
    steals: ClassVar[int] = 120
    run_outs: ClassVar[float] = 0.2
    least: ClassVar[dict[str, int]] = {"fenced": 20, "stored": 100, "claimed": 40}
    killed_by: ClassVar[int] = 150
    heard: ClassVar[int] = 40
