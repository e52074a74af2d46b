"""Which log a scope writes to: the one it is given, or one shared by everything in this process that names its URL."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from agent_saga_core.errors import SagaError
from agent_saga_core.log import open_log
from agent_saga_core.log.base import Log

__all__ = ["STAND_INS", "default_url", "shared_log"]

_open: dict[tuple[int, str, str], Log] = {}
_spent: list[Log] = []
_lock = threading.Lock()

STAND_INS: list[Log] = []
"""The test kit's seam: the last one here is the log of every scope that is opened. Empty in production."""


def default_url() -> str:
    """`$AGENT_SAGA_LOG`, else a file log in the working directory. Memory is never a silent default."""
    return os.environ.get("AGENT_SAGA_LOG") or "file:./.agent-saga"


def shared_log(log: Log | str | None) -> Log:
    """The log itself, or the one of that URL, opened once in this process and kept open until it ends.

    One that takes no more records (a disk was full) is replaced by the next scope: its cause may be mended by then.
    """
    if STAND_INS:
        return STAND_INS[-1]
    if log is not None and not isinstance(log, str):
        return log
    url = log if log is not None else default_url()
    key = (os.getpid(), os.getcwd(), url)
    with _lock:
        found = _open.get(key)
        if found is not None and not _usable(found):
            _spent.append(_open.pop(key))
            found = None
        if found is None:
            _close_spent()
            found = _open[key] = open_log(url)
        return found


def _usable(log: Log) -> bool:
    # Logs of other people's making need not say so.
    return not getattr(log, "closed", False) and getattr(log, "poisoned", None) is None


def _close_spent() -> None:
    """Close those that were replaced and own nothing any more; under the lock."""
    for log in _spent.copy():
        if not getattr(log, "owns_any", False):
            _spent.remove(log)
            with suppress(SagaError, OSError):
                log.close()


def _forget() -> None:
    """In a forked child: nothing that is open here is its own, and who held the lock may not be there."""
    global _lock
    _lock = threading.Lock()
    _open.clear()
    _spent.clear()


os.register_at_fork(after_in_child=_forget)
