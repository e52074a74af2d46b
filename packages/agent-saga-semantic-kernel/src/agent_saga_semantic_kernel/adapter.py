"""What this adapter says of itself before Semantic Kernel is imported."""

from typing import Final

from agent_saga_core.fleet import Adapter

__all__ = ["ADAPTER", "NAME"]

NAME: Final = "semantic-kernel"

ADAPTER: Final = Adapter(name=NAME, package="agent_saga_semantic_kernel", roots=("semantic_kernel",))
