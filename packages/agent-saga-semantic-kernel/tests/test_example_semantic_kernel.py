"""The example, against a service whose ledger the test reads."""

import os
import subprocess
import sys
from pathlib import Path

from agent_saga_core.demo.client import Service

EXAMPLE = Path(__file__).parents[3] / "examples" / "semantic_kernel_trip.py"


def run(service: Service) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env={**os.environ, "AGENT_SAGA_DEMO_URL": service.url},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_trip_fails_at_its_last_step_and_leaves_nothing() -> None:
    with Service.start() as service:
        done = run(service)
        assert done.returncode == 0, done.stderr
        ledger = service.client().ledger()
        assert [booking["kind"] for booking in ledger["bookings"]] == ["hotel", "flight", "flight"]
        assert len(ledger["charges"]) == 1, "it had booked and paid"
        assert service.client().summary()["left"] == []
        assert "ROLLED_BACK, clean" in done.stdout and "Traceback" not in done.stderr


def test_what_is_left_shows_in_the_exit_code() -> None:
    with Service.start() as service:
        service.client().book("hotel", customer="eve", what="not of the example")
        assert run(service).returncode == 1
