"""What this adapter says of itself before LangGraph is imported."""

from agent_saga_core.fleet import Adapter

__all__ = ["ADAPTER"]

ADAPTER = Adapter(name="langgraph", package="agent_saga_langgraph", roots=("langgraph",))
