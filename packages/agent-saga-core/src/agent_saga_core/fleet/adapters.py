"""Adapters: each installed one announces itself, and the object says whose it is. No framework is imported for that."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from agent_saga_core.errors import DeclarationError

__all__ = ["ADAPTER_GROUP", "Adapter", "adapter_for", "adapters"]

ADAPTER_GROUP = "agent_saga.adapters"
"""The entry point group through which adapters announce themselves: each entry is an `Adapter`."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What an adapter says of itself before its framework is imported.

    Its package has `wrap_tool(tool, **declaration)`, which returns a wrapped tool of the same type, and
    `coverage(found)`, which takes whatever the adapter owns (an agent, a tool) and lists of tools.

    Attributes:
        name: The framework's name, such as `"langgraph"`.
        package: The adapter's import package.
        roots: The framework's top-level modules.
    """

    name: str
    package: str
    roots: tuple[str, ...]

    def owns(self, found: object) -> bool:
        """Whether the object's class, or one that it derives from, is of this framework."""
        return any(root in self.roots for root in _roots_of(found))

    def load(self) -> Any:
        """The adapter's package, imported, and its framework with it."""
        loaded: ModuleType = import_module(self.package)
        return loaded


class _Announced(NamedTuple):
    adapters: tuple[Adapter, ...]
    broken: tuple[str, ...]


def adapters() -> tuple[Adapter, ...]:
    """The installed adapters, by name; looked up once in a process.

    One that cannot be loaded is left out here, and named by `adapter_for` when nobody else knows an object.
    """
    return _announced().adapters


def adapter_for(found: object) -> Adapter | None:
    """The adapter of an object's framework; None if no installed one knows it.

    The object's classes are asked from the most derived one on, and the first whose top-level module an adapter claims
    decides: a LangGraph graph is LangGraph's although it derives from LangChain's base.

    Raises:
        DeclarationError: Two adapters claim that module; or none does, and an installed one could not be loaded.
    """
    announced = _announced()
    for root in _roots_of(found):
        claiming = [adapter for adapter in announced.adapters if root in adapter.roots]
        if len(claiming) > 1:
            names = " and ".join(repr(adapter.name) for adapter in claiming)
            raise DeclarationError(f"The adapters {names} both claim the module {root!r}. Uninstall one of them.")
        if claiming:
            return claiming[0]
    if announced.broken and not _is_plain(found):
        raise DeclarationError(
            f"No adapter knows {described(found)}, and {'; '.join(announced.broken)}. Repair or uninstall it."
        )
    return None


def described(found: object) -> str:
    """An object for a message: by its class, as its `repr` is the user's."""
    kind = type(found)
    return f"an object of type {kind.__module__}.{kind.__qualname__}"


def _is_plain(found: object) -> bool:
    """Whether no framework can be behind it: functions, lists and the like of Python itself."""
    return all(root in sys.stdlib_module_names for root in _roots_of(found))


def _roots_of(found: object) -> Iterable[str]:
    return [kind.__module__.partition(".")[0] for kind in type(found).__mro__]


@functools.cache
def _announced() -> _Announced:
    from importlib.metadata import entry_points  # 20 ms that most processes never need

    good: list[Adapter] = []
    broken: list[str] = []
    for entry in sorted(entry_points(group=ADAPTER_GROUP), key=lambda entry: entry.name):
        try:
            adapter = entry.load()
            if not isinstance(adapter, Adapter):
                raise TypeError(f"it is a {type(adapter).__qualname__}, not an Adapter")
        except Exception as error:
            broken.append(
                f"the adapter {entry.name!r} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"
            )
        else:
            good.append(adapter)
    return _Announced(tuple(good), tuple(broken))
