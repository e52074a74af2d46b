"""The PostgreSQL log between real processes: stopped past a lease, stealing from each other, killed."""

from __future__ import annotations

from typing import ClassVar

from ..servers.processes import Processes
from .server import sql

RUN_OUT = """
import psycopg
from agent_saga_core.log.postgres.address import address_of
address = address_of(url)
server = psycopg.connect("", autocommit=True, **address.parameters)
def run_out():
    server.execute(f"UPDATE {address.schema}.writer SET lease_until = now() - interval '1 hour'")
"""


class TestPostgresProcesses(Processes):
    run_out: ClassVar[str] = RUN_OUT
    steals: ClassVar[int] = 250
    least: ClassVar[dict[str, int]] = {"fenced": 20, "stored": 100, "claimed": 40}

    def check_stored(self, url: str) -> None:
        rows = sql(
            url,
            "SELECT count(*) FROM (SELECT epoch < lag(epoch) OVER (PARTITION BY saga ORDER BY n) AS falls"
            " FROM {s}.record) AS x WHERE falls",
        )
        assert rows == [(0,)]
