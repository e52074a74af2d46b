"""The test kit: prove that a scenario rolls back, check the engine, measure a log, and let time stand still.

Names are loaded when they are first used, so that a clock costs a clock, and nothing here needs pytest but
`LogConformance` and `AdapterConformance`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_saga_core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_saga_core.testing.adapters import (
        AdapterConformance,
        AdapterHarness,
        Call,
        Deferred,
        Entry,
        Ran,
        Script,
        Turn,
    )
    from agent_saga_core.testing.clock import ManualClock
    from agent_saga_core.testing.conformance import LogConformance
    from agent_saga_core.testing.faulty import Fault, FaultyLog
    from agent_saga_core.testing.invariants import Invariants, verify_invariants
    from agent_saga_core.testing.proof import Probe, Proof
    from agent_saga_core.testing.prove import aprove_rollback, prove_rollback

__all__ = [
    "AdapterConformance",
    "AdapterHarness",
    "Call",
    "Deferred",
    "Entry",
    "Fault",
    "FaultyLog",
    "Invariants",
    "LogConformance",
    "ManualClock",
    "Probe",
    "Proof",
    "Ran",
    "Script",
    "Turn",
    "aprove_rollback",
    "prove_rollback",
    "verify_invariants",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AdapterConformance": "adapters",
        "AdapterHarness": "adapters",
        "Call": "adapters",
        "Deferred": "adapters",
        "Entry": "adapters",
        "Fault": "faulty",
        "FaultyLog": "faulty",
        "Invariants": "invariants",
        "LogConformance": "conformance",
        "ManualClock": "clock",
        "Probe": "proof",
        "Proof": "proof",
        "Ran": "adapters",
        "Script": "adapters",
        "Turn": "adapters",
        "aprove_rollback": "prove",
        "prove_rollback": "prove",
        "verify_invariants": "invariants",
    },
)
