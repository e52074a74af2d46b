"""What the adapter says of itself before AutoGen is imported."""

from __future__ import annotations

from agent_saga_core.fleet import Adapter

__all__ = ["ADAPTER"]

ADAPTER = Adapter(
    name="autogen",
    package="agent_saga_autogen",
    roots=("autogen_core", "autogen_agentchat", "autogen_ext"),
)
