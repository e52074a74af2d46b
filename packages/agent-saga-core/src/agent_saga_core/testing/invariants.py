"""`verify_invariants`: every schedule, failure and crash of small sagas, on the engine itself."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing.simulate import (
    BODIES,
    KINDS,
    OUTCOMES,
    Choices,
    Simulation,
    SmallSaga,
    Violation,
    register,
)

__all__ = ["Invariants", "Violation", "verify_invariants"]


@dataclass(frozen=True, kw_only=True)
class Invariants:
    """What the search came to. `str()` of it says its bound, the number of runs, and every violation."""

    bound: str
    runs: int
    violations: tuple[Violation, ...]

    @property
    def hold(self) -> bool:
        """Whether no run broke a promise."""
        return not self.violations

    def __str__(self) -> str:
        verdict = "hold" if self.hold else f"are broken in {len(self.violations)} runs"
        return "\n".join([f"the invariants {verdict} in {self.runs} runs; {self.bound}", *map(str, self.violations)])


def verify_invariants(max_steps: int = 3, *, stop_at: int = 1, quiet: bool = False) -> Invariants:
    """Check the promises of the engine on every run of small sagas within a bound, and print the bound and the count.

    Sagas of up to `max_steps` steps one after another, and of two at once (from 2 on), with every kind of undo, every
    way in which a call may fail, every place at which the process may die, and every order in which steps at once may
    take their turns, as far as the bound goes, which is printed. Checks intent-first, no-false-clean, no-silent-commit,
    compensate-once, lifo and closed-means-closed.

    Within the bound the search is complete, so the same version always makes the same runs. It says nothing about what
    is beyond: more faults, more steps at once, savepoints, suspension, replay, real threads and real disks.

    Not to be called while another thread registers compensators or uses them.

    Args:
        max_steps: Steps of the longest saga. 2 takes some 15 s, 3 half a minute.
        stop_at: Violations after which the search ends.
        quiet: Print nothing.

    Raises:
        ValueError: `max_steps` is not positive.
    """
    if max_steps < 1:
        raise ValueError("max_steps counts from 1.")
    runs, violations = 0, list[Violation]()
    with isolated_registry(), _silent():
        register()
        for found in _search(max_steps):
            runs += 1
            violations += found
            if len(violations) >= stop_at:
                break
    at_once = "; 2 steps at once with 3 turns out of order, or 1 and a fault" if max_steps > 1 else ""
    bound = (
        f"bound: sagas of 1 to {max_steps} steps, with 2 faults where there is 1 step and 1 where there are more"
        f"{at_once}; {len(KINDS)} kinds of undo; a fault is one of {len(OUTCOMES)} ways to fail, "
        "or a crash at any effect, in recovery as well"
    )
    result = Invariants(bound=bound, runs=runs, violations=tuple(violations))
    if not quiet:
        sys.stdout.write(f"{result}\n")
    return result


@contextmanager
def _silent() -> Generator[None]:
    """What the engine tells about crashes that are on purpose is of no interest."""
    engine = logging.getLogger("agent_saga")
    engine.addFilter(_nothing)
    try:
        yield
    finally:
        engine.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False


# --- the search


def _sagas(max_steps: int) -> Iterator[SmallSaga]:
    for kind in KINDS:
        for body in BODIES:
            yield SmallSaga((kind,), body, False, faults=2)
    for length in range(2, max_steps + 1):
        for first in range(len(KINDS)):
            kinds = tuple(KINDS[(first + i * (1 + first % 2)) % len(KINDS)] for i in range(length))
            for body in BODIES:
                yield SmallSaga(kinds, body, False, faults=1)
    if max_steps > 1:
        for first in range(len(KINDS)):
            pair = (KINDS[first], KINDS[(first + 1) % len(KINDS)])
            for at, body in enumerate(BODIES[:2]):
                yield SmallSaga(pair, body, True, faults=0, switches=3)
                if max_steps > 2 or (first + at) % 2 == 0:  # every pair and every body, not every two of them
                    yield SmallSaga(pair, body, True, faults=1, switches=1)


def _search(max_steps: int) -> Iterator[list[Violation]]:
    for saga in _sagas(max_steps):
        path: list[tuple[int, int]] | None = []
        while path is not None:
            choices = Choices(path)
            yield Simulation(saga, choices).run()
            path = choices.next()
