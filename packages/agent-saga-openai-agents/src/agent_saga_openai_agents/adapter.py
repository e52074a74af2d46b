"""What this adapter says of itself before its framework is imported."""

from typing import Final

from agent_saga_core.fleet import Adapter

__all__ = ["ADAPTER", "NAME"]

NAME: Final = "openai-agents"

ADAPTER: Final = Adapter(name=NAME, package="agent_saga_openai_agents", roots=("agents",))
