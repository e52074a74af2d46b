"""Which log a scope writes to: the one it is given, or one shared by everything in this process that names its URL."""

from __future__ import annotations

import os
import threading

from agent_saga_core.log import open_log
from agent_saga_core.log.base import Log

__all__ = ["STAND_INS", "default_url", "shared_log"]

_open: dict[tuple[int, str, str], Log] = {}
_lock = threading.Lock()

STAND_INS: list[Log] = []
"""The test kit's seam: the last one here is the log of every scope that is opened. Empty in production."""


def default_url() -> str:
    """`$AGENT_SAGA_LOG`, else a file log in the working directory. Memory is never a silent default."""
    return os.environ.get("AGENT_SAGA_LOG") or "file:./.agent-saga"


def shared_log(log: Log | str | None) -> Log:
    """The log itself, or the one of that URL, opened once in this process and kept open until it ends."""
    if STAND_INS:
        return STAND_INS[-1]
    if log is not None and not isinstance(log, str):
        return log
    url = log if log is not None else default_url()
    key = (os.getpid(), os.getcwd(), url)
    with _lock:
        found = _open.get(key)
        if found is None or not _usable(found):
            found = _open[key] = open_log(url)
        return found


def _usable(log: Log) -> bool:
    return not getattr(log, "closed", False) and getattr(log, "poisoned", None) is None
