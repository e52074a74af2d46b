"""What this adapter says of itself before LangChain is imported."""

from typing import Final

from agent_saga_core.fleet import Adapter

__all__ = ["ADAPTER", "NAME"]

NAME: Final = "langchain"

ADAPTER: Final = Adapter(name=NAME, package="agent_saga_langchain", roots=("langchain_core", "langchain"))
