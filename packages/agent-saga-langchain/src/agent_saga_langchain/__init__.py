"""Transactions for LangChain: tools that are steps of a saga, and runs that are one saga each.

Nothing of LangChain is imported before one of these names is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_saga_core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_saga_langchain.middleware import SagaMiddleware
    from agent_saga_langchain.run import asaga_run, asaga_stream, saga_run, saga_stream
    from agent_saga_langchain.tools import wrap_tool
    from agent_saga_langchain.walk import coverage

__all__ = [
    "SagaMiddleware",
    "asaga_run",
    "asaga_stream",
    "coverage",
    "saga_run",
    "saga_stream",
    "wrap_tool",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "SagaMiddleware": "middleware",
        "asaga_run": "run",
        "asaga_stream": "run",
        "coverage": "walk",
        "saga_run": "run",
        "saga_stream": "run",
        "wrap_tool": "tools",
    },
)
