"""The saga of a LangGraph run: what calls made in nodes learn from the graph that runs them.

A wrapped LangChain tool brings its own call site. A call of a plain saga function in a node does not, and the function
knows nothing of LangGraph: here it gets the site of its task, LangGraph's interrupts, and the gate that asks through
`interrupt()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from langgraph.errors import GraphBubbleUp, GraphDrained, GraphInterrupt

from agent_saga_core import ActionSemantics, Saga, saga_scope
from agent_saga_core.declare import StepSpec
from agent_saga_core.errors import SagaAborted
from agent_saga_core.wrapping import REFUSALS, CallSite
from agent_saga_langchain.approvals import question
from agent_saga_langchain.pauses import run_ended
from agent_saga_langchain.places import current_task, site_of
from agent_saga_langgraph.approvals import Gate

__all__ = ["PAUSES", "GraphSaga", "graph_scope"]

PAUSES: tuple[type[BaseException], ...] = (GraphInterrupt, GraphDrained)
"""The exceptions by which LangGraph leaves a task that it will run again."""


class GraphSaga(Saga):
    """The saga of one run of a graph."""

    gate: Gate | None = None
    renamed: Mapping[str, str] = {}

    @property
    def takes_steps(self) -> bool:
        """Whether new steps may start in it, and it may still commit."""
        run = self._run
        with run.lock:
            return run.fold.rollback_only is None and not (run.replay_only or run.over or run.suspended)

    def run_step(
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
        """`Saga.run_step`, in the terms of the task that makes the call."""
        spec, site = self._framed(spec, site)
        approve = approve or self._asked(spec, args, site)
        try:
            return super().run_step(spec, args, invoke, key=key, call_id=call_id, site=site, approve=approve)
        except SagaAborted as refused:
            raise self._heard(refused) from None

    async def arun_step(
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
        """`Saga.arun_step`, in the terms of the task that makes the call."""
        spec, site = self._framed(spec, site)
        approve = approve or self._asked(spec, args, site)
        try:
            return await super().arun_step(spec, args, invoke, key=key, call_id=call_id, site=site, approve=approve)
        except SagaAborted as refused:
            raise self._heard(refused) from None

    def savepoint(self) -> Saga:
        """A scope in this saga whose failure undoes only its own steps; calls in it are framed like those around it."""
        return _graphic(super().savepoint(), self.gate, self.renamed)

    def _framed(self, spec: StepSpec, site: CallSite | None) -> tuple[StepSpec, CallSite | None]:
        if not set(PAUSES) <= set(spec.interrupts):
            spec = replace(spec, interrupts=(*spec.interrupts, *PAUSES))
        if site is None:
            site = site_of(self, current_task(), None)
        if site is not None:
            for now, was in self.renamed.items():
                if now in site.scope:
                    site = site._replace(scope=site.scope.replace(now, was))
        return spec, site

    def _asked(self, spec: StepSpec, args: Mapping[str, Any], site: CallSite | None) -> Callable[[Any], bool] | None:
        """Ask a person before an IRREVERSIBLE call, unless the scope has a gate of its own.

        Also before one that is done and will give back its record: LangGraph matches answers to questions by their
        number within the task, and a question left out would hand its answer to the next one.
        """
        if spec.semantics is not ActionSemantics.IRREVERSIBLE or self.gate is None or site is None:
            return None
        if self._run.options.approve is not None or not self.takes_steps:
            return None
        request = question(spec, self, args, site)
        if request is None:  # the step is refused for its arguments
            return None
        answer = self.gate(request)
        return lambda _: answer

    def _heard(self, refused: SagaAborted) -> SagaAborted:
        """The refusal that the framework hears: from the third on, one that ends the run."""
        if self.refusals < REFUSALS or isinstance(refused, GraphBubbleUp):
            return refused
        return run_ended(refused)


def graph_scope(saga_id: str | None, *, gate: Gate | None, renamed: Mapping[str, str], **options: Any) -> GraphSaga:
    """`saga_scope` for one run of a graph."""
    return _graphic(saga_scope(saga_id, **options), gate, renamed)


def _graphic(saga: Saga, gate: Gate | None, renamed: Mapping[str, str]) -> GraphSaga:
    # The scope is made, and its arguments are checked, in one place: `saga_scope`.
    saga.__class__ = GraphSaga
    assert isinstance(saga, GraphSaga)
    saga.gate, saga.renamed = gate, renamed
    return saga
