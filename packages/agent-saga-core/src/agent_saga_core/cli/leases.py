"""Who lives, on a log that owns sagas under leases: what is run once waits to know it, and what is said of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from agent_saga_core.cli.failures import complain
from agent_saga_core.log.base import Leased, Log, WatchedLeases

__all__ = ["Owner", "await_leases", "owner_on"]

LOOK_EVERY = 0.5
"""Seconds between two looks at the leases: a process that lives renews its own before they are over."""


class Owner(NamedTuple):
    """What is known of the owner of a live saga, in words."""

    said: str
    """A sentence without its end: who it is."""
    word: str
    """The same, in one word."""
    todo: str
    """What to do about it; empty where there is nothing to do but to wait for its end."""


RUNNING: Final = Owner("A running process owns it", "live", "")


def owner_on(log: Log) -> Owner:
    """What it means that this log calls a saga live."""
    if not isinstance(log, Leased):
        return RUNNING
    lease = f"{log.lease:g} s"
    if isinstance(log, WatchedLeases):
        return Owner(
            f"Its owner runs, or died: that shows once some process has watched its lease ({lease}) run out",
            "owned",
            "If it has died, recover waits for that, and recover --watch takes it then.",
        )
    return Owner(
        f"Its owner runs, or died less than its lease ({lease}) ago",
        "owned",
        "If it has died, recover takes it once the lease is over, and recover --watch by itself.",
    )


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
