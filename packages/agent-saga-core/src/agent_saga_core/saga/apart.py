"""The end of an async scope whose coroutine is closed: it can await nothing any more, and is ended elsewhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from agent_saga_core.lazy import LazyModule
from agent_saga_core.saga.steps import running_loop

if TYPE_CHECKING:
    import asyncio
else:
    asyncio = LazyModule("asyncio")

__all__ = ["DROPPED_WAIT", "end_apart"]

log = logging.getLogger("agent_saga")

DROPPED_WAIT = 1.0
"""Seconds for which whoever drops a scope or a stream waits for its rollback, which goes on without it afterwards."""

_ending: set[asyncio.Task[Any]] = set()  # a loop keeps no strong reference to its tasks


def end_apart(saga_id: str, on_loop: Callable[[], Coroutine[Any, Any, Any]], here: Callable[[], object]) -> None:
    """End a scope in a task of the running loop, else on a thread of its own.

    A thread, because the coroutine of a loop that is gone is closed by a garbage collection, which may come in the
    middle of anything, such as a commit of the log.

    Args:
        saga_id: For the message.
        on_loop: Ends the scope on the running loop.
        here: Ends the scope by blocking.
    """
    log.warning("saga %r: its coroutine was closed inside of the scope, which is rolled back", saga_id)
    loop = running_loop()
    if loop is not None:
        task = loop.create_task(on_loop())
        _ending.add(task)
        task.add_done_callback(_ending.discard)
        return
    try:
        apart = threading.Thread(target=here, name="agent-saga-scope")
        apart.start()
    except RuntimeError:
        log.error("saga %r: no thread could be started to roll it back; recovery does, when this process ends", saga_id)
    else:
        apart.join(DROPPED_WAIT)
