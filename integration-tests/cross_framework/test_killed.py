"""The whole process dies in one framework's turn; another one, which imports no framework, finishes its saga."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cross_acts import BOUND
from cross_processes import Worker, bookings, undone
from cross_teams import FRAMEWORKS

from agent_saga_core import read_saga
from agent_saga_core.demo.client import Service

NAMES = list(FRAMEWORKS)
HERE = Path(__file__).parent


@pytest.mark.promise("recover-anywhere", "in-flight-is-unknown", "compensate-once", "lifo")
@pytest.mark.parametrize(("last", "when"), [(name, ("after", "before")[at % 2]) for at, name in enumerate(NAMES)])
def test_killed_in_the_turn_of_one(service: Service, log: str, last: str, when: str) -> None:
    saga_id = f"killed-{when}-{last}"
    world = service.client(timeout=BOUND)
    rule = world.hold("/bookings", when=when, exact=True, field={"by": last, "saga": saga_id})  # type: ignore[arg-type]
    worker = Worker(world)
    try:
        worker.begin("upto", saga_id=saga_id, log=log, last=last)
        world.wait_held(timeout=120.0)
        worker.kill()
    finally:
        worker.close()
    recovered = subprocess.run(
        [sys.executable, "-m", "agent_saga_core", "recover", "--log", log, "--import", "cross_acts"],
        cwd=HERE,
        env={**os.environ, "CROSS_SERVICE": service.url},
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert recovered.returncode == 0, recovered.stdout + recovered.stderr
    world.release(rule=rule)
    world.wait_quiet()
    before = NAMES[: NAMES.index(last)]
    acted = [*before, last] if when == "after" else before
    made = bookings(world, saga_id)
    assert [one["by"] for one in made] == acted, "what was still on its way when it was voided does not land"
    assert undone(world, made) == acted[::-1]
    assert read_saga(log, saga_id).status == "ROLLED_BACK"
    attempts = [one for one in world.ledger()["key_cancel_attempts"] if one["key"] is not None]
    keys = [one["key"] for one in attempts]
    assert len(keys) == len(set(keys)), "each compensation was asked for once"


@pytest.mark.promise("recover-anywhere")
def test_recovering_needs_no_framework() -> None:
    code = "import cross_acts, sys; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, timeout=BOUND, check=True
    )
    frameworks = {"langchain_core", "langgraph", "agents", "crewai", "autogen_core", "llama_index", "semantic_kernel"}
    assert not frameworks & set(shown.stdout.split())
