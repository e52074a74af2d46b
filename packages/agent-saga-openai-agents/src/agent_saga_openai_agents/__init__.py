"""Transactions for the tools of OpenAI Agents agents: wrap the tools, run the agent, and the run is one saga.

What is exported here is loaded when it is first asked for: announcing the adapter imports no framework.
"""

from typing import TYPE_CHECKING

from agent_saga_core.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "StreamedSaga": "stream",
        "aload_state": "states",
        "asaga_run": "run",
        "asaga_stream": "stream",
        "coverage": "walk",
        "dump_state": "states",
        "load_state": "states",
        "saga_run": "run",
        "wrap_tool": "tools",
    },
)
