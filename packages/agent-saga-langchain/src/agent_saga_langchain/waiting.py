"""Whether a run waits for a person: as its result tells, or the state that LangGraph has kept of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from agent_saga_langchain.places import current_task

__all__ = ["has_interrupt", "reason_in", "thread_of"]

INTERRUPT: Final = "__interrupt__"


def has_interrupt(found: Any) -> bool:
    """Whether a result, or a piece of a stream, tells of an interrupt."""
    if isinstance(found, Mapping):
        return INTERRUPT in found
    return bool(getattr(found, "interrupts", ()))


def reason_in(state: Any) -> str | None:
    """Why a graph in this state waits; None if it has come to its end."""
    waiting: tuple[str, ...] = tuple(getattr(state, "next", ()) or ())
    return f"the run stopped before {', '.join(dict.fromkeys(waiting))}" if waiting else None


def thread_of(bound: Mapping[str, Any], config: RunnableConfig | None) -> RunnableConfig | None:
    """Where LangGraph kept the state of a run: as named for it, else bound to its graph, else by what surrounds it.

    None where it is kept as a part of the graph around, which an interrupt reaches as an exception.
    """
    own: dict[str, Any] = {**bound, **((config or {}).get("configurable") or {})}
    if "thread_id" not in own:
        if current_task() is not None:
            return None
        own = {**(ensure_config().get("configurable") or {}), **own}
    return {"configurable": own} if "thread_id" in own else None
