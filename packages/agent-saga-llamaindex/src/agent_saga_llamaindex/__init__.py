"""Transactions for the tools of LlamaIndex agents and workflows.

`wrap_tool` makes a tool's calls steps of a saga, `saga_run`, `asaga_run` and `asaga_stream` make one saga of a run, and
`coverage` says what of an agent is wrapped. A run that waits for a person comes back as a `SuspendedRun`; `dump_state`
makes of it what another process goes on from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_saga_core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_saga_llamaindex.run import asaga_run, saga_run
    from agent_saga_llamaindex.stream import WorkflowStream, asaga_stream
    from agent_saga_llamaindex.suspended import SuspendedRun, dump_state
    from agent_saga_llamaindex.tools import wrap_tool
    from agent_saga_llamaindex.walk import coverage

__all__ = [
    "SuspendedRun",
    "WorkflowStream",
    "asaga_run",
    "asaga_stream",
    "coverage",
    "dump_state",
    "saga_run",
    "wrap_tool",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "SuspendedRun": "suspended",
        "WorkflowStream": "stream",
        "asaga_run": "run",
        "asaga_stream": "stream",
        "coverage": "walk",
        "dump_state": "suspended",
        "saga_run": "run",
        "wrap_tool": "tools",
    },
)
