"""The example does what it says, seen from the service."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from agent_saga_core.demo.client import Service

EXAMPLE = Path(__file__).parents[3] / "examples" / "langchain_create_agent.py"


# The example's agent waits for a person: the sister package runs it, and is not there where this one is tested alone.
@pytest.mark.skipif(find_spec("agent_saga_langgraph") is None, reason="the example needs agent-saga-langgraph")
def test_the_trip_that_a_person_stops_leaves_nothing_and_the_other_one_stays() -> None:
    with Service.start() as service:
        ran = subprocess.run(
            [sys.executable, str(EXAMPLE)],
            env={**os.environ, "AGENT_SAGA_DEMO_URL": service.url},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        ledger = service.client().ledger()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "trip-ben: ROLLED_BACK" in ran.stdout and "ben has: nothing" in ran.stdout
    assert {(one["customer"], one["status"]) for one in ledger["bookings"]} == {("ada", "booked"), ("ben", "cancelled")}
    assert {one["customer"]: one["captured"] - one["refunded"] for one in ledger["charges"]} == {"ada": 42000, "ben": 0}
    assert len(ledger["bookings"]) == 4 and len(ledger["charges"]) == 2, "each effect was made once"
    assert [one["to"] for one in ledger["mails"]] == ["ada"]
