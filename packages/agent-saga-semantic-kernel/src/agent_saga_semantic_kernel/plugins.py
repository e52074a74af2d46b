"""`wrap_plugin`: all functions of a plugin at once, each by its own declaration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from semantic_kernel.functions import KernelFunction, KernelPlugin

from agent_saga_core import DeclarationError
from agent_saga_core.wrapping import Declaration, runner_of
from agent_saga_semantic_kernel.tools import agent_in, method_of, wrap_tool

__all__ = ["wrap_plugin"]


def wrap_plugin(
    plugin: Any,
    declarations: Mapping[str, Declaration],
    *,
    unknown: Literal["refuse", "allow"] = "refuse",
    plugin_name: str | None = None,
    description: str | None = None,
) -> KernelPlugin:
    """A copy of a plugin whose functions are wrapped; the original is untouched.

    Functions that are wrapped already stay as they are, and so do prompts and agents, whose effects are the calls of
    other functions.

    Args:
        plugin: A `KernelPlugin`, an object with `@kernel_function` methods, or a dict of such functions.
        declarations: What is declared about each function, by its name.
        unknown: What to do about functions that are not declared: `"refuse"` the plugin, or `"allow"` them to be called
            without steps.
        plugin_name: Of an object: the plugin's name. Default: as `kernel.add_plugin` names it.
        description: Of an object: what the plugin is for.

    Raises:
        DeclarationError: A function is declared and not there, or there and not declared; or one cannot be wrapped.
    """
    if unknown not in ("refuse", "allow"):
        raise ValueError('unknown is "refuse" or "allow".')
    found = plugin if isinstance(plugin, KernelPlugin) else _from_object(plugin, plugin_name, description)
    absent = sorted(declarations.keys() - found.functions.keys())
    if absent:
        raise DeclarationError(
            f"Plugin {found.name!r} has no function {', '.join(map(repr, absent))}. Correct the name."
        )
    undeclared = [name for name, function in found.functions.items() if name not in declarations and _acts(function)]
    if undeclared and unknown == "refuse":
        raise DeclarationError(
            f"Plugin {found.name!r}: {', '.join(map(repr, undeclared))} would be called without steps. "
            'Declare them, or pass unknown="allow".'
        )
    functions: dict[str, KernelFunction] = {
        name: wrap_tool(function, **declarations[name]) if name in declarations else function.function_copy()
        for name, function in found.functions.items()
    }
    return found.model_copy(update={"functions": functions})


def _from_object(plugin: Any, name: str | None, description: str | None) -> KernelPlugin:
    if hasattr(plugin, "added_to_kernel"):
        raise DeclarationError(
            f"An object of type {type(plugin).__qualname__} wants to hear of its kernel, which a wrapped plugin cannot "
            "tell it. Wrap KernelPlugin.from_object(name, it), and call its added_to_kernel(kernel) yourself."
        )
    if name is None and isinstance(plugin, dict):
        raise DeclarationError("A dict of functions has no name. Pass plugin_name=.")
    found = name if name is not None else getattr(plugin, "name", type(plugin).__name__)
    made = KernelPlugin.from_object(str(found), plugin, description)
    if not made.functions:
        raise DeclarationError(f"{found!r} has no functions. Decorate its methods with @kernel_function.")
    return made


def _acts(function: KernelFunction) -> bool:
    """Whether a call of it would be an effect that no step records."""
    method = method_of(function)
    wrapped = runner_of(function) is not None or runner_of(method) is not None
    return not (wrapped or function.is_prompt or agent_in(method) is not None)
