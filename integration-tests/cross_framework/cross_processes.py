"""The process with all the frameworks in it, as the tests see it; every wait is bounded."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cross_acts import BOUND

from agent_saga_core.demo.client import Client

HERE = Path(__file__).parent
Json = dict[str, Any]


class Worker:
    """A process that runs jobs of `cross_worker.py`; every wait is bounded."""

    def __init__(self, service: Client) -> None:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        env |= {"CROSS_SERVICE": service.url}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "cross_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=env,
        )

    def begin(self, job: str, **options: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([job, options]) + "\n")
        self._process.stdin.flush()

    def outcome(self, seconds: float = BOUND) -> Json:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            pytest.fail(f"the worker does not answer: {self.said()}")
        answer = json.loads(line)
        if "error" in answer:
            pytest.fail(answer["error"])
        found: Json = answer["ok"]
        return found

    def run(self, job: str, **options: Any) -> Json:
        self.begin(job, **options)
        return self.outcome()

    def said(self) -> str:
        """The end of what the process has printed."""
        self._said.seek(0)
        return self._said.read()[-4000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(BOUND)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(BOUND)  # CrewAI leaves threads, which end on their own
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()
        self._said.close()


def bookings(world: Client, saga_id: str) -> list[dict[str, Any]]:
    """What was booked in a saga, in order."""
    return [one for one in world.ledger()["bookings"] if one["saga"] == saga_id]


def undone(world: Client, made: list[dict[str, Any]]) -> list[str]:
    """By whom those bookings were made that have been cancelled, in the order of their cancellations."""
    ledger, by = world.ledger(), {one["id"]: one["by"] for one in made}
    return [by[one["booking_id"]] for one in ledger["cancellations"] if one["booking_id"] in by]
