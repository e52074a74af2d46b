"""A run that waits for a person: what is left of it here, and what another process needs to go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from workflows.events import Event

from agent_saga_core.errors import DeclarationError

__all__ = ["SuspendedRun", "dump_state", "state_of"]

_MEMBERS = ("saga_id", "run", "context", "works")


@dataclass(frozen=True, kw_only=True)
class SuspendedRun:
    """A run that stopped where only an answer from outside takes it on; its saga is suspended.

    Give it, or what `dump_state` makes of it, to `saga_run`, `asaga_run` or `asaga_stream` in the place of the input,
    with the answers behind it.

    Attributes:
        saga_id: The saga that waits.
        run: What the run is called in it.
        context: The run's context, as `Context.to_dict` gives it: plain data, if everything in it is.
        works: What the calls of its agents are called in the saga, by the work items in the context.
        waiting: The `InputRequiredEvent`s that the run has published here.
    """

    saga_id: str
    run: str
    context: dict[str, Any]
    works: dict[str, str] = field(default_factory=dict[str, str])
    waiting: tuple[Event, ...] = ()


def dump_state(suspended: SuspendedRun) -> dict[str, Any]:
    """What to store of a suspended run: a dict for `json.dumps`.

    It holds the whole context of the run, messages and all. Not redacted: store it where you store those.
    """
    return {name: getattr(suspended, name) for name in _MEMBERS}


def state_of(given: object) -> Mapping[str, Any] | None:
    """What a run is to go on from; None if it is an input of another kind.

    Raises:
        DeclarationError: It is a suspended run, and not whole: what it has done could be taken for what it is to do.
    """
    if isinstance(given, SuspendedRun):
        return dump_state(given)
    if isinstance(given, Mapping):
        state = cast("Mapping[str, Any]", given)
        missing = [name for name in _MEMBERS if name not in state]
        if not missing:
            return state
        if missing == ["works"]:
            raise DeclarationError("This suspended run lacks 'works'. Pass it on whole, as dump_state made it.")
    return None
