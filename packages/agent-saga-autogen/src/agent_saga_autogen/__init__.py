"""Transactions for the tools of AutoGen agents and teams.

`wrap_tool` makes each call of a tool a step, `SagaWorkbench` each call through a workbench; `asaga_run`, `saga_run` and
`asaga_stream` make a run one saga. `docs/frameworks/autogen.md` says where AutoGen runs tools and what cannot be kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_saga_core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_saga_autogen.calls import ToolCallStopped
    from agent_saga_autogen.manifest import coverage
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "SagaWorkbench": "workbench",
        "ToolCallStopped": "calls",
        "WorkbenchToolFailed": "workbench",
        "asaga_run": "run",
        "asaga_stream": "run",
        "bind": "run",
        "coverage": "manifest",
        "saga_run": "run",
        "wrap_tool": "tools",
    },
)
