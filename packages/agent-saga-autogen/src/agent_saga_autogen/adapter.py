"""What the adapter says of itself before AutoGen is imported."""

from __future__ import annotations

from typing import Final

from agent_saga_core.fleet import Adapter

__all__ = ["ADAPTER", "NAME"]

NAME: Final = "autogen"

ADAPTER: Final = Adapter(
    name=NAME,
    package="agent_saga_autogen",
    roots=("autogen_core", "autogen_agentchat", "autogen_ext"),
)
