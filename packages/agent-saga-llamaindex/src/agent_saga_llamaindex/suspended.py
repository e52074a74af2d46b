"""A run that waits for a person: what is left of it here, and what another process needs to go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from workflows.events import Event

__all__ = ["SuspendedRun", "dump_state", "state_of"]

_MEMBERS = ("saga_id", "run", "context")


@dataclass(frozen=True, kw_only=True)
class SuspendedRun:
    """A run that stopped where only an answer from outside takes it on; its saga is suspended.

    Give it, or what `dump_state` makes of it, to `saga_run`, `asaga_run` or `asaga_stream` in the place of the input,
    with the answers behind it.

    Attributes:
        saga_id: The saga that waits.
        run: What the run is called in it.
        context: The run's context, as `Context.to_dict` gives it: plain data, if everything in it is.
        waiting: The `InputRequiredEvent`s that the run has published here.
    """

    saga_id: str
    run: str
    context: dict[str, Any]
    waiting: tuple[Event, ...] = ()


def dump_state(suspended: SuspendedRun) -> dict[str, Any]:
    """What to store of a suspended run: a dict for `json.dumps`.

    It holds the whole context of the run, messages and all. Not redacted: store it where you store those.
    """
    return {name: getattr(suspended, name) for name in _MEMBERS}


def state_of(given: object) -> Mapping[str, Any] | None:
    """What a run is to go on from; None if it is an input of another kind."""
    if isinstance(given, SuspendedRun):
        return dump_state(given)
    if isinstance(given, Mapping):
        state = cast("Mapping[str, Any]", given)
        if all(name in state for name in _MEMBERS):
            return state
    return None
