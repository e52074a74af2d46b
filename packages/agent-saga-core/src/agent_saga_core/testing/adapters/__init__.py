"""`AdapterConformance`: what every adapter must do, as one pytest class with one fixture to override.

The harness needs no pytest and is imported by itself; the suite is loaded when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_saga_core.testing.adapters.harness import AdapterHarness, Call, Deferred, Entry, Ran, Script, Turn

if TYPE_CHECKING:
    from agent_saga_core.testing.adapters.suite import AdapterConformance

__all__ = ["AdapterConformance", "AdapterHarness", "Call", "Deferred", "Entry", "Ran", "Script", "Turn"]


def __getattr__(name: str) -> Any:
    if name != "AdapterConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agent_saga_core.testing.adapters.suite import AdapterConformance

    return AdapterConformance
