"""The test kit: a manual clock, and what stores and adapters are measured against."""

from agent_saga_core.testing.clock import ManualClock

__all__ = ["ManualClock"]
