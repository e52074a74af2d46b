"""The Redis log between real processes: stopped past a lease, stealing from each other, killed."""

from __future__ import annotations

from typing import ClassVar

from ..servers.processes import Processes

RUN_OUT = """
import redis
from agent_saga_core.log.redis.address import address_of
address = address_of(url)
server = redis.Redis(**address.parameters, protocol=2)
def run_out():
    for writer in server.zrange(address.key("writers"), 0, -1):
        if server.exists(address.key("writer", writer)):
            server.hset(address.key("writer", writer), "until", "1")
"""


class TestRedisProcesses(Processes):
    run_out: ClassVar[str] = RUN_OUT
    steals: ClassVar[int] = 100
    least: ClassVar[dict[str, int]] = {"fenced": 10, "stored": 40, "claimed": 20}
