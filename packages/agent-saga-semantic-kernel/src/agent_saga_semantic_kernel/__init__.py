"""Transactions for the functions of Semantic Kernel: wrap the functions, run the agent, and the run is one saga.

`wrap_tool` and `wrap_plugin` make the calls of kernel functions steps; `asaga_run`, `saga_run`, `asaga_invoke` and
`asaga_stream` make one saga of a run of an agent or a kernel, and `bind` does so for whatever else runs them.
What is exported here is loaded when it is first asked for: announcing the adapter imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_saga_core.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "asaga_invoke": "run",
        "asaga_run": "run",
        "asaga_stream": "run",
        "bind": "run",
        "coverage": "walk",
        "saga_run": "run",
        "wrap_function": "tools",
        "wrap_plugin": "plugins",
        "wrap_tool": "tools",
    },
)
