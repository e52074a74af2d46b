"""The saga of a LangGraph run: what calls made in nodes learn from the graph that runs them.

A wrapped LangChain tool brings its own call site. A call of a plain saga function in a node does not, and the function
knows nothing of LangGraph: here it gets the site of its task, LangGraph's interrupts, and the gate that asks through
`interrupt()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Unpack

from langgraph.errors import GraphDrained, GraphInterrupt

from agent_saga_core import ActionSemantics, Saga, saga_scope
from agent_saga_core.declare import StepSpec
from agent_saga_core.errors import SagaAborted
from agent_saga_core.wrapping import CallSite, ScopeOptions
from agent_saga_langchain.pauses import heard
from agent_saga_langchain.places import current_task, site_of
from agent_saga_langgraph.approvals import Gate, question

__all__ = ["PAUSES", "GraphFrame", "graph_scope"]

PAUSES: tuple[type[BaseException], ...] = (GraphInterrupt, GraphDrained)
"""The exceptions by which LangGraph leaves a task that it will run again."""


class GraphFrame:
    """What calls in the saga of one run of a graph learn from the graph.

    Args:
        gate: Asks for a yes through `interrupt()`; None where nobody could answer.
        renamed: Tasks that a person's edit has given new ids, each with the id that its calls were recorded under.
    """

    def __init__(self, gate: Gate | None, renamed: Mapping[str, str]) -> None:
        self._gate = gate
        self._renamed = renamed

    pauses = PAUSES

    def place(  # noqa: D102 - as `Frame` has it
        self, saga: Saga, spec: StepSpec, args: Mapping[str, Any], site: CallSite | None, *, named: bool
    ) -> tuple[StepSpec, CallSite | None, Callable[..., Any] | None]:
        if not set(PAUSES) <= set(spec.interrupts):
            spec = replace(spec, interrupts=(*spec.interrupts, *PAUSES))
        if site is None:
            site = site_of(saga, current_task(), None)
        if site is not None:
            for now, was in self._renamed.items():
                if now in site.scope:
                    site = site._replace(scope=site.scope.replace(now, was))
        return spec, site, self._asked(saga, spec, args, site)

    def refuse(self, saga: Saga, refusal: SagaAborted) -> SagaAborted:
        """The refusal that the framework hears: from the third on, one that ends the run."""
        return heard(saga, refusal)

    def _asked(
        self, saga: Saga, spec: StepSpec, args: Mapping[str, Any], site: CallSite | None
    ) -> Callable[[Any], bool] | None:
        """Ask a person before an IRREVERSIBLE call, unless the scope has a gate of its own.

        Also before one that is done and will give back its record: LangGraph matches answers to questions by their
        number within the task, and a question left out would hand its answer to the next one.
        """
        if spec.semantics is not ActionSemantics.IRREVERSIBLE or self._gate is None or site is None:
            return None
        if saga.has_gate or not saga.takes_steps:
            return None
        request = question(spec, saga, args, site)
        if request is None:  # the step is refused for its arguments
            return None
        answer = self._gate(request)
        return lambda _: answer


def graph_scope(
    saga_id: str | None, *, gate: Gate | None, renamed: Mapping[str, str], **options: Unpack[ScopeOptions]
) -> Saga:
    """`saga_scope` for one run of a graph."""
    saga = saga_scope(saga_id, **options)
    saga.frame = GraphFrame(gate, renamed)
    return saga
