"""What the adapter announces through the entry point group `agent_saga.adapters`. Imports no framework."""

from agent_saga_core.fleet import Adapter

__all__ = ["ADAPTER"]

ADAPTER = Adapter(name="llamaindex", package="agent_saga_llamaindex", roots=("llama_index", "workflows"))
