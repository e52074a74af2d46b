"""Transactions for the functions of Semantic Kernel: wrap the functions, run the agent, and the run is one saga.

`wrap_tool` and `wrap_plugin` make the calls of kernel functions steps; `asaga_run`, `saga_run`, `asaga_invoke` and
`asaga_stream` make one saga of a run of an agent or a kernel, and `bind` does so for whatever else runs them.
What is exported here is loaded when it is first asked for: announcing the adapter imports no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_saga_semantic_kernel.plugins import wrap_plugin
    from agent_saga_semantic_kernel.run import asaga_invoke, asaga_run, asaga_stream, bind, saga_run
    from agent_saga_semantic_kernel.tools import wrap_function, wrap_tool
    from agent_saga_semantic_kernel.walk import coverage

__all__ = [
    "asaga_invoke",
    "asaga_run",
    "asaga_stream",
    "bind",
    "coverage",
    "saga_run",
    "wrap_function",
    "wrap_plugin",
    "wrap_tool",
]

_HOMES = {
    "asaga_invoke": "run",
    "asaga_run": "run",
    "asaga_stream": "run",
    "bind": "run",
    "coverage": "walk",
    "saga_run": "run",
    "wrap_function": "tools",
    "wrap_plugin": "plugins",
    "wrap_tool": "tools",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
