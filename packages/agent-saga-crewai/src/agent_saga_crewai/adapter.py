"""What this package says of itself before CrewAI is imported."""

from typing import Final

from agent_saga_core.fleet import Adapter

__all__ = ["ADAPTER", "NAME"]

NAME: Final = "crewai"

ADAPTER: Final = Adapter(name=NAME, package="agent_saga_crewai", roots=("crewai", "crewai_tools"))
