"""What is run once must not go away before it knows who lives."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from agent_saga_core.cli.failures import complain
from agent_saga_core.log.base import Log, WatchedLeases

__all__ = ["await_leases"]

LOOK_EVERY = 0.5
"""Seconds between two looks at the leases: a process that lives renews its own before they are over."""


def await_leases(log: Log, saga_ids: Collection[str], pause: Callable[[float], bool], *, quiet: bool) -> None:
    """Return once it is known whether the owners of these sagas are live, as far as the log can tell by waiting.

    A process that is run once would otherwise call the dead live whenever it is run, and end. Bounded by the longest of
    their leases as they are now.

    Args:
        log: The log.
        saga_ids: The sagas.
        pause: Waits that many seconds; True to wait no longer.
        quiet: Whether to say nothing of the wait.
    """
    if not isinstance(log, WatchedLeases) or not saga_ids:
        return
    left = log.undecided(saga_ids)
    until = time.monotonic() + left + LOOK_EVERY
    if left > LOOK_EVERY and not quiet:
        complain(f"waiting up to {left:.0f} s to see whether the processes that own sagas live")
    while left and time.monotonic() < until and not pause(min(left, LOOK_EVERY)):
        left = log.undecided(saga_ids)
