"""`examples/langgraph_trip.py` against a service of this test's, whose ledger says what is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_saga_core.demo.client import Service

EXAMPLE = Path(__file__).parents[3] / "examples" / "langgraph_trip.py"


@pytest.mark.promise("no-false-clean", "recover-anywhere")
def test_the_trip_that_fails_at_its_last_step_leaves_nothing() -> None:
    with Service.start() as service:
        env = {**os.environ, "AGENT_SAGA_DEMO_URL": service.url}
        done = subprocess.run(
            [sys.executable, str(EXAMPLE)], capture_output=True, text=True, env=env, timeout=90, check=False
        )
        ledger = service.client().ledger()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "42000 cents" in done.stdout and done.stdout.count("nothing") == 1
    assert [one["status"] for one in ledger["bookings"]] == ["cancelled"] * 2
    assert [(one["captured"], one["refunded"]) for one in ledger["charges"]] == [(42000, 42000)]
    assert ledger["mails"] == []
