"""What the adapter announces through the entry point group `agent_saga.adapters`. Imports no framework."""

from typing import Final

from agent_saga_core.fleet import Adapter

__all__ = ["ADAPTER", "NAME"]

NAME: Final = "llamaindex"

ADAPTER: Final = Adapter(name=NAME, package="agent_saga_llamaindex", roots=("llama_index", "workflows"))
