"""Fleets: tools of several frameworks in one saga, adapters found from the object, and coverage over all of it."""

from agent_saga_core.fleet.adapters import ADAPTER_GROUP, Adapter, adapter_for, adapters
from agent_saga_core.fleet.carrying import carry
from agent_saga_core.fleet.fleet import SagaFleet, ScopeOptions
from agent_saga_core.fleet.survey import coverage_of
from agent_saga_core.fleet.transaction import Transaction

__all__ = [
    "ADAPTER_GROUP",
    "Adapter",
    "SagaFleet",
    "ScopeOptions",
    "Transaction",
    "adapter_for",
    "adapters",
    "carry",
    "coverage_of",
]
