"""What this adapter says of itself before LangChain is imported."""

from agent_saga_core.fleet import Adapter

__all__ = ["ADAPTER"]

ADAPTER = Adapter(name="langchain", package="agent_saga_langchain", roots=("langchain_core", "langchain"))
