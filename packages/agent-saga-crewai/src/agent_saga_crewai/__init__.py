"""Transactions for the tools of CrewAI agents: `wrap_tool` the tools, `saga_run` the crew.

Names are loaded when they are first used: CrewAI takes seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_saga_core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_saga_crewai.calls import ToolReportedFailure
    from agent_saga_crewai.run import asaga_kickoff, asaga_run, saga_kickoff, saga_run
    from agent_saga_crewai.stream import asaga_stream, saga_stream
    from agent_saga_crewai.tools import wrap_tool
    from agent_saga_crewai.walk import coverage

__all__ = [
    "ToolReportedFailure",
    "asaga_kickoff",
    "asaga_run",
    "asaga_stream",
    "coverage",
    "saga_kickoff",
    "saga_run",
    "saga_stream",
    "wrap_tool",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ToolReportedFailure": "calls",
        "asaga_kickoff": "run",
        "asaga_run": "run",
        "asaga_stream": "stream",
        "coverage": "walk",
        "saga_kickoff": "run",
        "saga_run": "run",
        "saga_stream": "stream",
        "wrap_tool": "tools",
    },
)
