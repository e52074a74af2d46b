"""`AdapterConformance`: what every adapter must do, as one pytest class with one fixture to override."""

from __future__ import annotations

from agent_saga_core.testing.adapters.harness import AdapterHarness, Call, Deferred, Entry, Ran, Script, Turn

__all__ = ["AdapterHarness", "Call", "Deferred", "Entry", "Ran", "Script", "Turn"]
