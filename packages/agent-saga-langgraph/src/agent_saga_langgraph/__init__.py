"""Transactions for LangGraph: tools that are steps of a saga, and runs of a graph that are one saga each.

Nothing of LangGraph is imported before one of these names is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_saga_core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_saga_langchain import wrap_tool
    from agent_saga_langgraph.approvals import approve, reject
    from agent_saga_langgraph.hooks import ToolCallHooks
    from agent_saga_langgraph.run import asaga_run, saga_run
    from agent_saga_langgraph.stream import asaga_stream, saga_stream
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ToolCallHooks": "hooks",
        "approve": "approvals",
        "asaga_run": "run",
        "asaga_stream": "stream",
        "coverage": "walk",
        "reject": "approvals",
        "saga_run": "run",
        "saga_stream": "stream",
        "wrap_tool": "agent_saga_langchain.tools",
    },
)
