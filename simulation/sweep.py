"""Every crash point of a run: the same run again and again, each time with a death at another event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simulation.plan import Plan
from simulation.simulation import Result, Simulation

__all__ = ["crash_points"]

DEATHS = ("kill P1", "the power fails", "kill P1 in the flush of P1/main", "kill P1 in the flush of P1/lane0")


def crash_points(plan: Plan) -> Iterator[Result]:
    """What comes of a death of each kind before every event of the plan's plain run, where it can happen."""
    mortal = replace(plan, kills=1, faults={"kill": 1.0, "power": 1.0, "flush": 1.0}, visitors=())
    plain = Simulation(mortal, None).run()
    yield plain
    for at in range(len(plain.schedule)):
        for death in DEATHS:
            schedule = [*plain.schedule[:at], death]
            result = Simulation(mortal, None, schedule).run()
            if death in result.schedule:
                yield result
