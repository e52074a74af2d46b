"""Transactions for LangChain: tools that are steps of a saga, and runs that are one saga each.

Nothing of LangChain is imported before one of these names is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_HOMES = {
    "SagaMiddleware": "middleware",
    "asaga_run": "run",
    "asaga_stream": "run",
    "coverage": "walk",
    "saga_run": "run",
    "saga_stream": "run",
    "wrap_tool": "tools",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
