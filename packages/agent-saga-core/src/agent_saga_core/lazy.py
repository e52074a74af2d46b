"""What is imported when it is first used: standard modules of the core, and what the packages of adapters export."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["LazyModule", "lazy_names"]


class LazyModule:
    """Stands for a module until one of its names is needed; each name is looked up once."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module(self._module), name)
        setattr(self, name, found)
        return found


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose names are loaded when they are first asked for.

    Announcing an adapter imports no framework: `__getattr__, __dir__ = lazy_names(__name__, {"wrap_tool": "tools"})`.
    No name may be that of a submodule, which would take its place as soon as it is imported.

    Args:
        package: The package's name.
        homes: For each public name the submodule that has it, or the full name of another package's module.
    """

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(home if "." in home else f"{package}.{home}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return load, lambda: sorted({*vars(sys.modules[package]), *homes})
