"""The saga of a run: it knows, of every call made in a step of a workflow, where that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

from agent_saga_core.declare import StepSpec
from agent_saga_core.errors import SagaAborted
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping import CallSite
from agent_saga_llamaindex.inside import INTERRUPTS
from agent_saga_llamaindex.sites import HERE, site_of

__all__ = ["SitedSaga"]


class SitedSaga(Saga):
    """A saga whose calls have a site, also those of functions declared with `@saga_tool` and of `saga.execute`.

    Such a call may wait for an event like any tool, and a refused one counts towards the end of its run.
    """

    @classmethod
    def of(cls, saga: Saga) -> SitedSaga:
        """The same saga, not opened yet, as one of this class."""
        sited = cast(Any, saga)
        sited.__class__ = cls
        return sited

    def savepoint(self) -> Saga:  # noqa: D102 - as inherited
        return SitedSaga.of(super().savepoint())

    def run_step(  # noqa: D102 - as inherited
        self,
        spec: StepSpec,
        args: Mapping[str, Any],
        invoke: Callable[[str], Any],
        *,
        key: str | None = None,
        call_id: str | None = None,
        site: CallSite | None = None,
        approve: Callable[..., Any] | None = None,
    ) -> Any:
        spec, site = self._sited(spec, site, key, call_id)
        try:
            return super().run_step(spec, args, invoke, key=key, call_id=call_id, site=site, approve=approve)
        except SagaAborted as refusal:
            self._refused(refusal)
            raise

    async def arun_step(  # noqa: D102 - as inherited
        self,
        spec: StepSpec,
        args: Mapping[str, Any],
        invoke: Callable[[str], Any],
        *,
        key: str | None = None,
        call_id: str | None = None,
        site: CallSite | None = None,
        approve: Callable[..., Any] | None = None,
    ) -> Any:
        spec, site = self._sited(spec, site, key, call_id)
        try:
            return await super().arun_step(spec, args, invoke, key=key, call_id=call_id, site=site, approve=approve)
        except SagaAborted as refusal:
            self._refused(refusal)
            raise

    def _sited(
        self, spec: StepSpec, site: CallSite | None, key: str | None, call_id: str | None
    ) -> tuple[StepSpec, CallSite | None]:
        if site is None and key is None and call_id is None:
            site = site_of(self, spec.tool)
        if INTERRUPTS and not spec.interrupts:
            spec = dataclasses.replace(spec, interrupts=INTERRUPTS)
        return spec, site

    def _refused(self, refusal: SagaAborted) -> None:
        around = HERE.get()
        if around is not None and around.saga.same_as(self):
            around.hear(refusal)
