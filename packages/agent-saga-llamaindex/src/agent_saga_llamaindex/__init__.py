"""Transactions for the tools of LlamaIndex agents and workflows.

`wrap_tool` makes a tool's calls steps of a saga, `saga_run`, `asaga_run` and `asaga_stream` make one saga of a run, and
`coverage` says what of an agent is wrapped. A run that waits for a person comes back as a `SuspendedRun`; `dump_state`
makes of it what another process goes on from.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_PLACES = {
    "SuspendedRun": "suspended",
    "WorkflowStream": "stream",
    "asaga_run": "run",
    "asaga_stream": "stream",
    "coverage": "walk",
    "dump_state": "suspended",
    "saga_run": "run",
    "wrap_tool": "tools",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
