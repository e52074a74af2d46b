"""Transactions for the tools of AutoGen agents and teams.

`wrap_tool` makes each call of a tool a step, `SagaWorkbench` each call through a workbench; `asaga_run`, `saga_run` and
`asaga_stream` make a run one saga. `docs/frameworks/autogen.md` says where AutoGen runs tools and what cannot be kept.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_saga_autogen.calls import ToolCallStopped
    from agent_saga_autogen.coverage import coverage
    from agent_saga_autogen.run import asaga_run, asaga_stream, bind, saga_run
    from agent_saga_autogen.tools import wrap_tool
    from agent_saga_autogen.workbench import SagaWorkbench, WorkbenchToolFailed

__all__ = [
    "SagaWorkbench",
    "ToolCallStopped",
    "WorkbenchToolFailed",
    "asaga_run",
    "asaga_stream",
    "bind",
    "coverage",
    "saga_run",
    "wrap_tool",
]

_PLACES = {
    "SagaWorkbench": "workbench",
    "ToolCallStopped": "calls",
    "WorkbenchToolFailed": "workbench",
    "asaga_run": "run",
    "asaga_stream": "run",
    "bind": "run",
    "coverage": "coverage",
    "saga_run": "run",
    "wrap_tool": "tools",
}


def __getattr__(name: str) -> Any:
    # Lazily: the entry point loads this package to learn whose objects it knows, and that must not import AutoGen.
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{place}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
