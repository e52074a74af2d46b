"""What a recoverer has seen and done, in numbers. It holds no log: whoever reads it touches none."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from agent_saga_core.recovery.job import Job, Seen, Standing
from agent_saga_core.recovery.report import Verdict

__all__ = ["Numbers", "Tally"]


class Numbers(NamedTuple):
    """A `Tally` at one moment."""

    backlog: dict[Standing, int]
    """Sagas that have not ended, by how they stand."""
    oldest: float | None
    """When the oldest of them began, by the wall clock; None if there is none."""
    compensations: dict[tuple[str, str], int]
    """By handler and outcome: compensated, failed (and tried again), given_up."""
    recovered: int
    """Sagas that were rolled back to their end here."""
    rounds: int
    """Rounds that came to their end."""


_AFTER: dict[Verdict, Standing] = {"attention": "attention", "damaged": "damaged", "live": "live"}


class Tally:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._backlog: dict[str, tuple[Standing, float]] = {}
        self._compensations: Counter[tuple[str, str]] = Counter()
        self._recovered = 0
        self._rounds = 0

    def looked(self, jobs: Iterable[Job], now: float, *, all_of_them: bool) -> None:
        """These sagas have not ended; `all_of_them`: and no others.

        Of one that was never read, because it was live whenever this process looked, the begin is when it was first
        seen.
        """
        with self._lock:
            found: dict[str, tuple[Standing, float]] = {} if all_of_them else dict(self._backlog)
            for job in jobs:
                if job.gone:
                    continue
                known = self._backlog.get(job.saga_id)
                started = job.started if job.started is not None else known[1] if known is not None else now
                found[job.saga_id] = job.standing, started
            self._backlog = found

    def stands(self, saga_id: str, standing: Standing) -> None:
        """A saga of the backlog stands otherwise."""
        with self._lock:
            known = self._backlog.get(saga_id)
            if known is not None:
                self._backlog[saga_id] = standing, known[1]

    def ended(self, job: Job) -> None:
        """A saga that was begun has its verdict."""
        with self._lock:
            self._recovered += job.verdict == "recovered"
            known = self._backlog.get(job.saga_id)
            if job.verdict == "recovered" or job.gone:
                self._backlog.pop(job.saga_id, None)
            elif known is not None:
                self._backlog[job.saga_id] = _AFTER.get(job.verdict or "untouched", job.standing), known[1]

    def compensated(self, seen: Seen) -> None:
        """A compensation was recorded."""
        with self._lock:
            self._compensations[seen.handler, seen.outcome] += 1

    def round_over(self) -> None:
        """A round came to its end."""
        with self._lock:
            self._rounds += 1

    def numbers(self) -> Numbers:
        """All of it, now."""
        with self._lock:
            backlog: Counter[Standing] = Counter(standing for standing, _ in self._backlog.values())
            oldest = min((started for _, started in self._backlog.values()), default=None)
            return Numbers(dict(backlog), oldest, dict(self._compensations), self._recovered, self._rounds)
