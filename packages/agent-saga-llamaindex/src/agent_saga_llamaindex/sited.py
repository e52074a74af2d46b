"""What calls made in the steps of a workflow learn from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from agent_saga_core import Saga
from agent_saga_core.declare import StepSpec
from agent_saga_core.errors import SagaAborted
from agent_saga_core.wrapping import CallSite
from agent_saga_llamaindex.inside import INTERRUPTS
from agent_saga_llamaindex.sites import HERE, site_of

__all__ = ["WorkflowFrame"]


class WorkflowFrame:
    """Gives every call a site, also those of functions declared with `@saga_tool` and of `saga.execute`.

    Such a call may wait for an event like any tool, and a refused one counts towards the end of its run.
    """

    pauses = INTERRUPTS

    def place(  # noqa: D102 - as `Frame` has it
        self, saga: Saga, spec: StepSpec, args: Mapping[str, Any], site: CallSite | None, *, named: bool
    ) -> tuple[StepSpec, CallSite | None, Callable[..., Any] | None]:
        if site is None and not named:
            site = site_of(saga, spec, args)
        if INTERRUPTS and not spec.interrupts:
            spec = dataclasses.replace(spec, interrupts=INTERRUPTS)
        return spec, site, None

    def refuse(self, saga: Saga, refusal: SagaAborted) -> SagaAborted:
        """The refusal as it is; the run hears of it, and ends after the third."""
        around = HERE.get()
        if around is not None and around.saga.same_as(saga):
            around.hear(refusal)
        return refusal
