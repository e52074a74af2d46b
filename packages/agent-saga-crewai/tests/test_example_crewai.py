"""The example leaves nothing behind, and says what happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from agent_saga_core.demo.client import Service

EXAMPLE = Path(__file__).parents[3] / "examples" / "crewai_trip.py"


def test_the_trip_fails_at_its_last_step_and_leaves_nothing() -> None:
    with Service.start() as service:
        ran = subprocess.run(
            [sys.executable, str(EXAMPLE)],
            env={**os.environ, "AGENT_SAGA_DEMO_URL": service.url, "HOME": os.environ["CREWAI_STORAGE_DIR"]},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        client = service.client()
        ledger, summary = client.ledger(), client.summary()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ROLLED_BACK, clean" in ran.stdout and ran.stdout.count("is asked for: OPO-FRA") == 1
    assert not summary["left"]
    assert [booking["status"] for booking in ledger["bookings"]] == ["cancelled"] * 3
    assert [charge["captured"] - charge["refunded"] for charge in ledger["charges"]] == [0]
