"""Make a failing run small: a plan with less in it, a schedule with fewer events, the same promise broken."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.plan import Plan, drawn, focused, simpler
from simulation.simulation import Result, Simulation

__all__ = ["run_seed", "shrunk"]

MOST_TRIES = 1500


def run_seed(seed: int, focus: Mapping[str, Any] | None = None) -> Result:
    """The run of one seed: the same one every time."""
    chance = random.Random(seed)
    return Simulation(focused(drawn(chance), focus or {}), chance).run()


class _Tries:
    def __init__(self, result: Result) -> None:
        assert result.failure is not None
        self.promise = result.failure.promise
        self.best = result
        self.left = MOST_TRIES

    def better(self, plan: Plan, schedule: list[str]) -> bool:
        """Whether this breaks the same promise; then it is the one to go on with."""
        if self.left <= 0:
            return False
        self.left -= 1
        result = Simulation(plan, None, schedule).run()
        if result.failure is None or result.failure.promise != self.promise:
            return False
        self.best = result
        return True


def shrunk(result: Result) -> Result:
    """The smallest run found that breaks the promise that `result` breaks."""
    tries = _Tries(result)
    before: tuple[int, int] | None = None
    while tries.left > 0 and before != _size(tries.best):
        before = _size(tries.best)
        _less_plan(tries)
        _less_schedule(tries)
    return tries.best


def _size(result: Result) -> tuple[int, int]:
    return len(list(result.plan.lines())) + sum(map(len, result.plan.lanes)), len(result.schedule)


def _less_plan(tries: _Tries) -> None:
    again = True
    while again:
        again = any(tries.better(plan, tries.best.schedule) for plan in simpler(tries.best.plan))


def _less_schedule(tries: _Tries) -> None:
    size = max(1, len(tries.best.schedule) // 2)
    while size:
        at = 0
        while at < len(tries.best.schedule):
            schedule = tries.best.schedule
            if len(schedule) > at and not (
                tries.better(tries.best.plan, schedule[:at] + schedule[at + size :])
                and len(tries.best.schedule) < len(schedule)
            ):
                at += size
        size //= 2
