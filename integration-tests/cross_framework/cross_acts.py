"""What the agents of every framework do here: one booking each, at the demo service.

Imports the core and the service's client and no framework: it is all that a recovering process needs.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

from agent_saga_core import compensator, current_step, undo
from agent_saga_core.demo.client import Client

BOUND = 60.0
"""Seconds that any single wait may last."""


def service() -> Client:
    """The service, whose URL the process was started with."""
    return Client(os.environ["CROSS_SERVICE"], timeout=BOUND)


@compensator("cross.cancel")
def cancel(booking_id: str, *, idempotency_key: str) -> None:
    """Cancel a booking."""
    service().cancel(booking_id, key=idempotency_key)


@compensator("cross.void")
def void(key: str, *, idempotency_key: str) -> None:
    """Undo what landed under a key, and see to it that nothing else does."""
    service().cancel_key(key, key=idempotency_key)


DECLARATION: dict[str, Any] = {
    "semantics": "COMPENSABLE",
    "compensate": undo("cross.void", if_absent="forbids", key="step.forward_key"),
}
BY_RESULT: dict[str, Any] = {
    "semantics": "COMPENSABLE",
    "compensate": undo("cross.cancel", booking_id="result.id"),
}


def act(
    name: str,
    *,
    is_async: bool = False,
    meeting: threading.Barrier | None = None,
    first: Callable[[], Any] | None = None,
) -> Callable[..., Any]:
    """A tool function `name(item)` that books; with `meeting`, it first waits there for others, or does `first`.

    The booking says by whom it was made, so that the service can be told to fail one of them.
    """

    def book(item: str) -> dict[str, Any]:
        """Book something."""
        if meeting is not None:
            meeting.wait(BOUND)
        if first is not None:
            first()
        step = current_step()
        assert step is not None, "the call is no step of any saga"
        made = service().book("hotel", key=step.idempotency_key, by=name, item=item, saga=step.saga_id)
        return {"id": made["id"]}

    async def abook(item: str) -> dict[str, Any]:
        """Book something."""
        return await asyncio.to_thread(book, item)

    fn: Callable[..., Any] = abook if is_async else book
    fn.__name__ = fn.__qualname__ = f"book_{name}"
    return fn
