"""Transactions for the tools of OpenAI Agents agents: wrap the tools, run the agent, and the run is one saga.

What is exported here is loaded when it is first asked for: announcing the adapter imports no framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_saga_openai_agents.run import asaga_run, saga_run
    from agent_saga_openai_agents.states import aload_state, dump_state, load_state
    from agent_saga_openai_agents.stream import StreamedSaga, asaga_stream
    from agent_saga_openai_agents.tools import wrap_tool
    from agent_saga_openai_agents.walk import coverage

__all__ = [
    "StreamedSaga",
    "aload_state",
    "asaga_run",
    "asaga_stream",
    "coverage",
    "dump_state",
    "load_state",
    "saga_run",
    "wrap_tool",
]

_HOMES = {
    "StreamedSaga": "stream",
    "aload_state": "states",
    "asaga_run": "run",
    "asaga_stream": "stream",
    "coverage": "walk",
    "dump_state": "states",
    "load_state": "states",
    "saga_run": "run",
    "wrap_tool": "tools",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
