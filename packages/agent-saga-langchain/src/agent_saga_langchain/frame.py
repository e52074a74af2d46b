"""What plain saga functions learn from the graph that they are called in; wrapped tools know it by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from agent_saga_core import Saga, SagaAborted
from agent_saga_core.declare import StepSpec
from agent_saga_core.wrapping import CallSite
from agent_saga_langchain.pauses import GraphPause, heard
from agent_saga_langchain.places import current_task, site_of

__all__ = ["RunFrame"]


class RunFrame:
    """The frame of one run: a function called in a task of a graph has its place there, and may be paused by it."""

    pauses: tuple[type[BaseException], ...] = (GraphPause,)

    def place(  # noqa: D102 - as `Frame` has it
        self, saga: Saga, spec: StepSpec, args: Mapping[str, Any], site: CallSite | None, *, named: bool
    ) -> tuple[StepSpec, CallSite | None, Callable[..., Any] | None]:
        if GraphPause not in spec.interrupts:
            spec = replace(spec, interrupts=(*spec.interrupts, GraphPause))
        if site is None and not named:
            site = site_of(saga, current_task(), None)
        return spec, site, None

    def refuse(self, saga: Saga, refusal: SagaAborted) -> SagaAborted:
        """The refusal that the run hears: from the third on, one that no ToolNode turns into a message."""
        return heard(saga, refusal)
