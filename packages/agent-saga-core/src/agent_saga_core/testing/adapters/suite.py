"""The suite as one class."""

from __future__ import annotations

from agent_saga_core.testing.adapters.calls import Calls
from agent_saga_core.testing.adapters.drop_in import DropIn
from agent_saga_core.testing.adapters.endings import Endings

__all__ = ["AdapterConformance"]


class AdapterConformance(DropIn, Calls, Endings):
    """The suite that every adapter passes. Override the fixture `harness`.

    Most tests run an agent through every entry of the framework, with sync and with async tools; each run has a file
    log and a world of its own. A test that the adapter cannot pass is listed with the reason in
    `AdapterHarness.deferred`: it is run and must fail, and pytest shows the reason at the end.
    """
