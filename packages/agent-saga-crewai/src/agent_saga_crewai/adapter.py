"""What this package says of itself before CrewAI is imported."""

from agent_saga_core.fleet import Adapter

__all__ = ["ADAPTER"]

ADAPTER = Adapter(name="crewai", package="agent_saga_crewai", roots=("crewai", "crewai_tools"))
