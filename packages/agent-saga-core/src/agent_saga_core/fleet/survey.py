"""Coverage of whatever it is: the object's adapter walks it, lists are walked one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from agent_saga_core.coverage import CoverageManifest, entry_for
from agent_saga_core.errors import DeclarationError
from agent_saga_core.fleet.adapters import adapter_for, adapters, described
from agent_saga_core.wrapping import runner_of

__all__ = ["PYTHON", "coverage_of", "name_of"]

PYTHON = "python"
"""What stands for the framework where there is none: plain functions."""


def coverage_of(found: object) -> CoverageManifest:
    """What can be seen of an agent, a tool, a fleet, a manifest, or a list, tuple or dict of them.

    The object's own adapter looks into it, found by `adapter_for`. A function is a tool of its own, wrapped or not.
    Elements of a list that are no tools have their position before their paths, those of a dict their key.

    Raises:
        DeclarationError: No installed adapter knows the object.
    """
    from agent_saga_core.fleet.fleet import SagaFleet  # which asks us in turn

    if isinstance(found, CoverageManifest):
        return found
    if isinstance(found, SagaFleet):
        return found.coverage()
    adapter = adapter_for(found)
    if adapter is not None:
        # Every adapter takes a list of tools, and only it knows how their calls are told apart.
        return cast(CoverageManifest, adapter.load().coverage([found] if runner_of(found) is not None else found))
    if isinstance(found, Mapping):
        named = cast("Mapping[object, object]", found)
        return CoverageManifest.merged(_element(item, str(key)) for key, item in named.items())
    if isinstance(found, list | tuple | set | frozenset):
        items = cast("list[object]", found)
        return CoverageManifest.merged(_element(item, f"[{n}]") for n, item in enumerate(items))
    if _is_tool(found):
        entry = entry_for(found, path=f"tools/{name_of(found)}", framework=PYTHON)
        return CoverageManifest(framework=PYTHON, entries=(entry,))
    known = ", ".join(adapter.name for adapter in adapters()) or "none"
    raise DeclarationError(
        f"No adapter knows {described(found)}. Name an agent or a list of tools, and install the adapter of its "
        f"framework; installed: {known}."
    )


def name_of(tool: object) -> str:
    """The name of a tool: what it was declared with, else its own."""
    return entry_for(tool, path="", framework="").tool


def _element(found: object, prefix: str) -> CoverageManifest:
    manifest = coverage_of(found)
    # A tool's path says what it is already; of an agent it has to be said which one.
    return manifest if _is_tool(found) else manifest.under(prefix)


def _is_tool(found: Any) -> bool:
    """Whether it is certainly a tool: wrapped, or something of no framework that can be called."""
    if runner_of(found) is not None:
        return True
    return callable(found) and not isinstance(found, type) and adapter_for(found) is None
