"""The tools of the simulation: one for every way in which an effect can be declared."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from agent_saga_core import ActionSemantics, Compensation, compensator, probe, registry, undo
from agent_saga_core.declare import StepSpec
from simulation.world import Ask, Declined, Paused

__all__ = ["IN_DOUBT", "KINDS", "KEY_TTL", "all_names", "names_without", "spec_of", "using"]

IN_DOUBT = 20.0
KEY_TTL = 300.0

Names = registry._Names  # the tables of one simulated process


def _fill() -> None:
    @compensator("refund", key_ttl=KEY_TTL)
    def refund(effect: str, *, idempotency_key: str) -> Ask:
        return Ask(what="refund", of=effect, key=idempotency_key)

    @compensator(
        "traced refund",
        key_ttl=KEY_TTL,
        probe=lambda kwargs, key: Ask(what="look undo", key=key),
    )
    def traced(effect: str, *, idempotency_key: str) -> Ask:
        return Ask(what="refund", of=effect, key=idempotency_key)

    @compensator("delete", key_ttl=KEY_TTL)
    def delete(key: str, *, idempotency_key: str) -> Ask:
        return Ask(what="delete", of=key, key=idempotency_key)

    @compensator("void", key_ttl=KEY_TTL)
    def void(key: str, *, idempotency_key: str) -> Ask:
        return Ask(what="void", of=key, key=idempotency_key)

    @compensator("reverse", key_ttl=KEY_TTL)
    def reverse(key: str, *, idempotency_key: str) -> Ask:
        return Ask(what="reverse", of=key, key=idempotency_key)

    @probe("look")
    def look(args: dict[str, Any], key: str) -> Ask:
        return Ask(what="look", key=key)

    @probe("glimpse")
    def glimpse(args: dict[str, Any], key: str) -> Ask:
        return Ask(what="glimpse", key=key)

    @probe("seal")
    def seal(args: dict[str, Any], key: str) -> Ask:
        return Ask(what="seal", key=key)


@contextmanager
def using(names: Names) -> Generator[None]:
    """Make these the registered names of the process that runs now."""
    former = registry._names
    registry._names = names
    try:
        yield
    finally:
        registry._names = former


def _made() -> Names:
    names = Names()
    names.entry_points_loaded = True
    with using(names):
        _fill()
    return names


all_names: Names = _made()


def names_without(*missing: str) -> Names:
    """The names of a process that has not imported everything."""
    names = Names()
    names.entry_points_loaded = True
    names.compensators = {name: entry for name, entry in all_names.compensators.items() if name not in missing}
    names.probes = dict(all_names.probes)
    return names


def _by_factory(result: dict[str, Any]) -> Compensation:
    return Compensation(handler="refund", kwargs={"effect": result["id"]})


def _in_this_process(result: dict[str, Any]) -> Compensation:
    def give_back(effect: str, *, idempotency_key: str) -> Ask:
        return Ask(what="refund", of=effect, key=idempotency_key)

    return Compensation(fn=give_back, kwargs={"effect": result["id"]})


def _raising(result: dict[str, Any]) -> Compensation:
    raise LookupError("no undo for this one")


_COMPENSABLE: dict[str, dict[str, Any]] = {
    "pay": {"compensate": lambda: undo("refund", effect="result.id")},
    "pay by factory": {"compensate": lambda: _by_factory},
    "pay, traced": {"compensate": lambda: undo("traced refund", effect="result.id")},
    "pay, looked": {"compensate": lambda: undo("refund", effect="result.id"), "probe": "look"},
    "pay, sealed": {"compensate": lambda: undo("refund", effect="result.id"), "probe": "seal"},
    "book": {"compensate": lambda: undo("delete", if_absent="noop", key="step.forward_key")},
    "book, glimpsed": {
        "compensate": lambda: undo("delete", if_absent="noop", key="step.forward_key"),
        "probe": "glimpse",
    },
    "hold": {"compensate": lambda: undo("void", if_absent="forbids", key="step.forward_key")},
    "transfer": {"compensate": lambda: undo("reverse", key="step.forward_key")},
    "transfer, looked": {"compensate": lambda: undo("reverse", key="step.forward_key"), "probe": "look"},
    "transfer, glimpsed": {"compensate": lambda: undo("reverse", key="step.forward_key"), "probe": "glimpse"},
    "pay, here": {"compensate": lambda: _in_this_process},
    "pay, no undo": {"compensate": lambda: _raising},
}
KINDS = (*_COMPENSABLE, "cache", "mail", "quote")
_specs: dict[str, StepSpec] = {}


def spec_of(kind: str) -> StepSpec:
    """The declaration of a tool, as every process makes it."""
    if kind not in _specs:
        with using(all_names):
            _specs[kind] = _declared(kind)
    return _specs[kind]


def _declared(kind: str) -> StepSpec:
    more: dict[str, Any] = {"in_doubt": IN_DOUBT, "not_applied": (Declined,), "interrupts": (Paused,)}
    if kind == "quote":
        return StepSpec.declared(kind, semantics=ActionSemantics.READ_ONLY, **more)
    if kind == "mail":
        return StepSpec.declared(kind, semantics=ActionSemantics.IRREVERSIBLE, **more)
    if kind == "cache":
        return StepSpec.declared(kind, semantics=ActionSemantics.REVERSIBLE, compensate=_in_this_process, **more)
    how: dict[str, Any] = dict(_COMPENSABLE[kind])
    make: Callable[[], Any] = how.pop("compensate")
    return StepSpec.declared(kind, semantics=ActionSemantics.COMPENSABLE, compensate=make(), **how, **more)
