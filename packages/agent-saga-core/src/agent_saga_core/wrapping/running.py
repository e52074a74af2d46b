"""What the runs of all frameworks have in common: the options of their scope, when one is ended, and how one blocks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from agent_saga_core.lazy import LazyModule
from agent_saga_core.log.base import Log
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping.runner import REFUSALS

if TYPE_CHECKING:
    import asyncio
else:
    asyncio = LazyModule("asyncio")

__all__ = ["RunOptions", "ScopeOptions", "on_a_loop", "refuse_on_a_loop", "refused_too_often", "run_blocking"]

T = TypeVar("T")


class RunOptions(TypedDict, total=False):
    """What whoever starts a run may say of its scope; `saga_scope` tells what each of them means."""

    name: str
    on_failure: Literal["settle", "abort"]
    approve: Callable[..., Any] | None
    drain_timeout: float
    durability: Literal["strict", "relaxed"]
    busy_timeout: float
    metadata: Mapping[str, Any] | None


class ScopeOptions(RunOptions, total=False):
    """What a run passes on to `saga_scope`, besides the id."""

    log: Log | str | None
    resume: Literal["replay", "continue"]
    orphan_after: float


def refused_too_often(saga: Saga) -> bool:
    """Whether the saga has refused so many calls that its run is to be ended: the model does not listen."""
    return saga.refusals >= REFUSALS


def on_a_loop() -> bool:
    """Whether an event loop runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def refuse_on_a_loop() -> None:
    """Refuse a `saga_run` that would block the event loop that runs here.

    Raises:
        RuntimeError: One does. Nothing has run.
    """
    if on_a_loop():
        raise RuntimeError("saga_run was called where an event loop runs. Write: await asaga_run(...).")


def run_blocking(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What `asaga_run` comes to, for the `saga_run` of a framework that has no way of its own to block.

    Args:
        start: Makes the coroutine; not called if a loop runs here.

    Raises:
        RuntimeError: An event loop runs here. Nothing has run.
    """
    refuse_on_a_loop()
    return asyncio.run(start())
