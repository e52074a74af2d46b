"""Compensators that fail are given time: how long, and who tries them next.

The rule is in `docs/design.md` (11a). All that it needs stands in the log, in the sagas that have not ended: so every
recoverer comes to the same answer, and none has to tell another. Moments are of this process's monotonic clock; what
the log says in wall time only ever places a call in the past, and no further back than the log was looked at before.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from math import inf
from typing import Final

from agent_saga_core.clock import Clock
from agent_saga_core.recovery.handlers import Try
from agent_saga_core.state import moment

__all__ = ["FIRST_DELAY", "LONGEST_DELAY", "Backoff"]

FIRST_DELAY: Final = 2.0
"""Seconds after calls that failed; twice as long whenever the next one fails, too."""
LONGEST_DELAY: Final = 300.0
"""Seconds. A service that is away for an hour is tried about twenty times, and is missed for five minutes at most."""
_KEPT: Final = 256
"""Failed calls that are remembered of a handler."""


class _Handler:
    """One compensator, as far as this process knows."""

    def __init__(self) -> None:
        self.failed: list[tuple[float, str]] = []  # when, and in which saga, since it last worked; oldest first
        self.worked = -inf  # when it last worked
        self.until = -inf  # when it may be tried again
        self.said = ""  # that moment, for people
        self.tried_by: str | None = None  # the saga that tries it now

    def count(self, done: Try, at: float) -> None:
        """A call ended; of two at one moment, this one was the later."""
        if done.ok:
            self.worked = max(self.worked, at)
            self.failed = [failed for failed in self.failed if failed[0] > at]
        elif at >= self.worked:
            self.failed = sorted([*self.failed, (at, done.saga_id)])[-_KEPT:]

    def settle(self, clock: Clock) -> None:
        """See when it may be tried again.

        What fails before the delay is over belongs to what failed before it: when a service goes away, it fails in many
        sagas at once, and that is one failure.
        """
        until, delay = -inf, FIRST_DELAY / 2
        for at, _ in self.failed:
            if at >= until:
                delay = min(LONGEST_DELAY, 2 * delay)
            until = at + delay
        if until != self.until:
            self.until = until
            self.said = (
                f"{moment(clock.time() + until - clock.monotonic()):%Y-%m-%d %H:%M:%S} UTC" if self.failed else ""
            )

    def forget(self, now: float, everything: Collection[str]) -> None:
        """What failed, where that was long enough ago and all those sagas are over: a new process would not know it."""
        if now >= self.until and not any(saga_id in everything for _, saga_id in self.failed):
            self.failed = []


class Backoff:
    """What one process knows of compensators that fail, over all its rounds. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handlers: dict[str, _Handler] = {}
        self._known: dict[str, int] = {}  # by saga: the last record that was counted
        self._looked = -inf

    def heard(self, tries: Iterable[Try], clock: Clock, *, began: float, everything: Collection[str] | None) -> None:
        """A look at the log has found these calls.

        Args:
            tries: All of them, those that are known already included.
            clock: The log's.
            began: When the look began, on the clock's monotonic time.
            everything: The sagas that have not ended, if it was a look at all of them: the others are forgotten.
        """
        with self._lock:
            now, wall = clock.monotonic(), clock.time()
            longest = max(0.0, now - self._looked)  # what is new was not there then, whatever another clock says
            new = [each for each in tries if each.n > self._known.get(each.saga_id, 0)]
            for each in sorted(new, key=lambda each: each.time):
                age = min(max(0.0, wall - each.time), longest)
                self._count(each, now - age)
            for handler in {each.handler for each in new}:
                self._handlers[handler].settle(clock)
            if everything is not None:
                for handler in self._handlers.values():
                    handler.forget(now, everything)
                self._known = {saga_id: n for saga_id, n in self._known.items() if saga_id in everything}
                self._looked = max(self._looked, began)

    def ended(self, done: Try, clock: Clock) -> None:
        """A call has ended at this moment, or is known now to have ended well."""
        with self._lock:
            self._count(done, clock.monotonic())
            self._handlers[done.handler].settle(clock)

    def _count(self, done: Try, at: float) -> None:
        if done.n > self._known.get(done.saga_id, 0):
            self._known[done.saga_id] = done.n
        self._handlers.setdefault(done.handler, _Handler()).count(done, at)

    def state(self, clock: Clock) -> tuple[frozenset[str], frozenset[str]]:
        """Of the compensators that fail: those that nobody may call now, and those that one saga may try."""
        with self._lock:
            failing, now = self._failing(self._handlers), clock.monotonic()
            due = [name for name in failing if self._is_due(name, now)]
            return frozenset(failing).difference(due), frozenset(due)

    def enter(self, needs: Collection[str], saga_id: str, clock: Clock, *, mine: Collection[str] | None = None) -> bool:
        """Whether the saga may go on now; if so, nobody else tries what fails of its needs until it `leave`s.

        Args:
            needs: The compensators that it will call.
            saga_id: The saga.
            clock: The log's.
            mine: Of those that fail and are due, the ones that this saga is to try; None for all.
        """
        with self._lock:
            failing, now = self._failing(needs), clock.monotonic()
            if not all(self._is_due(name, now) and (mine is None or name in mine) for name in failing):
                return False
            for name in failing:
                self._handlers[name].tried_by = saga_id
            return True

    def reason(self, needs: Collection[str]) -> str:
        """Why a saga with these needs waits, for people."""
        with self._lock:
            names = sorted(self._failing(needs), key=lambda name: (-self._handlers[name].until, name))
            if not names:
                return "a compensator that it needs failed a moment ago"
            said = self._handlers[names[0]].said
            return f"compensator {names[0]!r} fails; it is tried again at {said}, by one saga at first"

    def leave(self, saga_id: str) -> None:
        """The saga tries nothing any more."""
        with self._lock:
            for handler in self._handlers.values():
                if handler.tried_by == saga_id:
                    handler.tried_by = None

    def failing(self) -> dict[str, int]:
        """The handlers that have failed since they last worked, and how often (as far as that matters)."""
        with self._lock:
            return {name: len(self._handlers[name].failed) for name in self._failing(self._handlers)}

    def known(self) -> tuple[str, ...]:
        """Every handler of which a call has ended."""
        with self._lock:
            return tuple(self._handlers)

    def _failing(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self._handlers and self._handlers[name].failed]

    def _is_due(self, name: str, now: float) -> bool:
        handler = self._handlers[name]
        return now >= handler.until and handler.tried_by is None
