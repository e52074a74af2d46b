"""LangGraph's exceptions, for those who have it: resolved when they are met, so that nobody has to import it."""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

from agent_saga_core import Saga, SagaAborted, SagaError
from agent_saga_core.wrapping import refused_too_often

__all__ = ["GraphPause", "Handover", "end_refused_run", "handover_of", "heard", "run_ended"]


class _Pauses(type):
    def __instancecheck__(cls, instance: object) -> bool:
        bubble = _errors("GraphBubbleUp")
        return bubble is not None and isinstance(instance, bubble) and not isinstance(instance, SagaError)


class GraphPause(BaseException, metaclass=_Pauses):
    """Stands for all by which LangGraph takes a call out of a node, to come back to it: `isinstance` knows them."""


class Handover:
    """What a call came to that ended by handing control to the graph around its own.

    The call is done, and the graph goes on elsewhere. It is no plain data, so a replay is refused instead of giving
    back a result that the call never had.
    """

    def __init__(self, command: BaseException) -> None:
        self.command = command


def handover_of(error: BaseException) -> Handover | None:
    """The handover that an exception of the tool means, if it does."""
    command = _errors("ParentCommand")
    return Handover(error) if command is not None and isinstance(error, command) else None


def heard(saga: Saga, refusal: SagaAborted) -> SagaAborted:
    """The refusal that a run hears: from the third on, one that no ToolNode turns into a message."""
    return run_ended(refusal) if refused_too_often(saga) else refusal


def end_refused_run(saga: Saga) -> None:
    """End the run of a model that calls on although it is refused, before it is asked again.

    Raises:
        SagaAborted: The saga has refused three calls.
    """
    if refused_too_often(saga):
        raise SagaAborted(f"saga {saga.id!r} is being rolled back and refused {saga.refusals} calls: the run ends.")


def run_ended(refusal: SagaAborted) -> SagaAborted:
    """The refusal as an exception that no ToolNode turns into a message; without LangGraph, or if it is one, itself."""
    bubble = _errors("GraphBubbleUp")
    return refusal if bubble is None or isinstance(refusal, bubble) else _ending(bubble)(str(refusal))


@functools.cache
def _ending(bubble: type[Exception]) -> type[SagaAborted]:
    return cast("type[SagaAborted]", type("RunEnded", (SagaAborted, bubble), {"__module__": __name__}))


def _errors(name: str) -> type[Any] | None:
    module = sys.modules.get("langgraph.errors")
    return getattr(module, name, None) if module is not None else None
