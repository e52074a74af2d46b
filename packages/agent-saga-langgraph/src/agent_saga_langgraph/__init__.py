"""Transactions for LangGraph: tools that are steps of a saga, and runs of a graph that are one saga each.

Nothing of LangGraph is imported before one of these names is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_saga_langchain import wrap_tool
    from agent_saga_langgraph.approvals import approve, reject
    from agent_saga_langgraph.hooks import ToolCallHooks
    from agent_saga_langgraph.run import asaga_run, asaga_stream, saga_run, saga_stream
    from agent_saga_langgraph.walk import coverage

__all__ = [
    "ToolCallHooks",
    "approve",
    "asaga_run",
    "asaga_stream",
    "coverage",
    "reject",
    "saga_run",
    "saga_stream",
    "wrap_tool",
]

_HOMES = {
    "ToolCallHooks": "agent_saga_langgraph.hooks",
    "approve": "agent_saga_langgraph.approvals",
    "asaga_run": "agent_saga_langgraph.run",
    "asaga_stream": "agent_saga_langgraph.run",
    "coverage": "agent_saga_langgraph.walk",
    "reject": "agent_saga_langgraph.approvals",
    "saga_run": "agent_saga_langgraph.run",
    "saga_stream": "agent_saga_langgraph.run",
    "wrap_tool": "agent_saga_langchain",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
