"""Standard modules that are imported when something of them is first used: `import agent_saga_core` stays quick."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["LazyModule"]


class LazyModule:
    """Stands for a module until one of its names is needed; each name is looked up once."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module(self._module), name)
        setattr(self, name, found)
        return found
