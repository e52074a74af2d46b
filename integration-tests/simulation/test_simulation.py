"""A bounded slice of the simulation, every crash point of some runs, and every broken engine caught.

`just simulate` runs as many seeds as there is time for; docs/simulation.md says what is simulated and what is not.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from simulation.broken import BROKEN
from simulation.plan import Call, Plan, Savepoint
from simulation.shrink import run_seed, shrunk
from simulation.simulation import Result, Simulation
from simulation.sweep import crash_points

ROOT = Path(__file__).parents[2]
SEEDS = 1200
REMOVED_RULE_SEEDS = 1000
"""The rarest removed rule is noticed well before this; a run takes about 5 ms."""

pytestmark = pytest.mark.promise(
    "intent-first",
    "no-false-clean",
    "in-flight-is-unknown",
    "no-silent-commit",
    "closed-means-closed",
    "lifo",
    "compensate-once",
    "one-owner",
    "recover-anywhere",
    "replay-not-rerun",
)

TROUBLE = [
    "world: act",
    "world: act declined",
    "world: act fails",
    "world: act breaks",
    "world: refund refused",
    "world: delete stumbles",
    "given up: TimeoutError, sent",
    "given up: ConnectionResetError, landed",
    "given up: ConnectionResetError, lost",
    "given up: CancelledError, sent",
    "given up: KeyboardInterrupt, held",
    "left to its thread",
    "killed",
    "power lost",
    "interrupted",
    "compacted",
    "forked",
]


def told(result: Result) -> str:
    return "\n".join([*result.plan.lines(), *result.trace, str(result.failure)])


def test_every_promise_holds_for_every_seed():
    seen = Counter()
    for seed in range(SEEDS):
        result = run_seed(seed)
        seen.update(result.seen)
        assert result.failure is None, f"python -m simulation --seed {seed}\n{told(shrunk(result))}"
    assert [what for what in TROUBLE if not seen[what]] == [], "not a single seed came there"


CALLS = (
    Call(kind="pay", amount=1),
    Call(kind="book, glimpsed", amount=2),
    Call(kind="transfer, looked", amount=3, key="k3"),
    Call(kind="hold", amount=4),
)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(lanes=(CALLS,)),
        Plan(lanes=(CALLS,), raises=True),
        Plan(lanes=(CALLS,), raises=True, durability="relaxed"),
        Plan(lanes=(CALLS[:2], CALLS[2:]), is_async=True, raises=True),
        Plan(lanes=((CALLS[0], Savepoint(calls=CALLS[1:3], fails=True), CALLS[3]),)),
        Plan(lanes=((CALLS[0], Call(kind="mail", amount=5), Call(kind="cache", amount=6)),), raises=True),
        Plan(lanes=(CALLS[:2],), suspends=True),
    ],
    ids=["commit", "rollback", "relaxed", "parallel", "savepoint", "irreversible", "suspended"],
)
def test_every_crash_point(plan):
    deaths = 0
    for result in crash_points(plan):
        assert result.failure is None, told(result)
        deaths += 1
    assert deaths > 30


@pytest.mark.parametrize("name", BROKEN)
def test_a_removed_rule_is_noticed(name):
    assert BROKEN[name].caught(range(REMOVED_RULE_SEEDS)) is not None, BROKEN[name].rule


def test_rules_are_put_back():
    for entry in BROKEN.values():
        with entry.removed():
            pass
    assert all(run_seed(seed).failure is None for seed in range(20))


def test_a_seed_is_one_run_wherever_it_runs():
    """No order of a set, no address and no clock of this machine decides anything."""
    traces = {
        subprocess.run(
            [sys.executable, "-m", "simulation", "--first", "7", "--seeds", "1", "--trace"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(traces) == 1
    assert "\n".join(run_seed(7).trace) in traces.pop().replace("\n  ", "\n")


def test_a_failing_seed_is_replayed_and_made_small():
    broken = BROKEN["in_doubt counts from INTENT"]
    found = broken.caught(range(REMOVED_RULE_SEEDS))
    assert found is not None
    with broken.removed():
        failing = run_seed(found[0], broken.focus)
        again = Simulation(failing.plan, None, failing.schedule).run()
        assert again.trace[: len(failing.trace)] == failing.trace
        small = shrunk(failing)
    assert small.failure is not None
    assert small.failure.promise == failing.failure.promise
    assert len(small.trace) <= len(failing.trace)
    assert Simulation(small.plan, None, small.schedule).run().failure is None, "the engine itself keeps its promise"


@pytest.mark.parametrize("broken", [[], ["--broken", "INTENT is not flushed"]], ids=["whole", "broken"])
def test_the_command(broken):
    ran = subprocess.run(
        [sys.executable, "-m", "simulation", "--seeds", "20", *broken],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.stderr == ""
    assert ran.returncode == bool(broken)
    assert ("python -m simulation --seed " in ran.stdout) == bool(broken)
    assert ("=> intent-first: " in ran.stdout) == bool(broken)
