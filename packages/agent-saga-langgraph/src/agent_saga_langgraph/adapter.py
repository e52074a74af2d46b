"""What this adapter says of itself before LangGraph is imported."""

from typing import Final

from agent_saga_core.fleet import Adapter

__all__ = ["ADAPTER", "NAME"]

NAME: Final = "langgraph"

ADAPTER: Final = Adapter(name=NAME, package="agent_saga_langgraph", roots=("langgraph",))
