"""One saga that comes to every kind of record that a rollback can hold, in as many processes as it takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from agent_saga_core import Log, Saga, SagaError, SagaNotFound, SagaState, read_saga, recover, resolve, saga_scope, undo
from agent_saga_core.wrapping.functions import Declaration
from agent_saga_core.wrapping.runner import ToolRunner

ROUNDS = 12
"""How often a process looks at the saga and does what is next."""
Tool = Callable[..., Any]


class Asking(Exception):
    """A framework's own interrupt: it asks a person, and makes the call again later."""


def live(log: Log, tools: dict[str, Tool], saga_id: str) -> str:
    """Do whatever comes next in the life of the saga, until it has ended; its status."""
    for _ in range(ROUNDS):
        state = _state(log, saga_id)
        if state is not None and state.status in ("COMMITTED", "ROLLED_BACK"):
            return state.status
        if state is None or state.status in ("RUNNING", "SUSPENDED"):
            _open(log, tools, saga_id, asked=state is not None and _has_asked(state))
        else:
            _settle(log, state)
    raise AssertionError(f"{saga_id} does not come to its end")


def _state(log: Log, saga_id: str) -> SagaState | None:
    try:
        return read_saga(log, saga_id)
    except SagaNotFound:
        return None


def _has_asked(state: SagaState) -> bool:
    return any(entry["type"] == "SUSPENDED" for entry in state.timeline)


def _open(log: Log, tools: dict[str, Tool], saga_id: str, *, asked: bool) -> None:
    # What comes out of the scope is in the log.
    with suppress(SagaError), saga_scope(saga_id, log=log, drain_timeout=300.0) as saga:
        tools["charge"](customer=saga_id, amount=1)
        with suppress(Exception):
            tools["charge"](customer=saga_id, amount=2)  # refused by the service
        try:
            _ask(saga_id, tools["charge_now"], asked=asked)
        except Asking:
            saga.suspend("a person is asked")
        else:
            _to_the_end(saga, tools)


def _ask(saga_id: str, charge_now: Tool, *, asked: bool) -> None:
    """A call that pauses until the saga has been suspended once."""
    inverse = undo("crash.void", forward_key="step.forward_key", if_absent="forbids")
    declared = Declaration(semantics="COMPENSABLE", compensate=inverse, in_doubt=0.0)
    runner = ToolRunner("ask", declared, adapter="life", interrupts=(Asking,))

    def call(key: str) -> object:
        if not asked:
            raise Asking
        return charge_now(saga_id, 3, key)

    runner.run({"customer": saga_id, "amount": 3}, call)


def _to_the_end(saga: Saga, tools: dict[str, Tool]) -> None:
    with suppress(Exception):
        tools["pay"](customer=saga.id, amount=4)  # lands, and is not heard of: undone by its key
    with suppress(Exception):
        tools["move"](customer=saga.id, amount=5)  # nobody can tell whether it happened, and no undo would be safe
    saga.abort("no more of this")


def _settle(log: Log, state: SagaState) -> None:
    recover(log, saga_id=state.saga_id)
    now = read_saga(log, state.saga_id)
    if now.status == "NEEDS_ATTENTION":
        for step in now.steps:
            if step.tool == "move" and step.status == "UNKNOWN":
                resolve(log, state.saga_id, step.number, outcome="not-applied", by="ann", note="the bank was asked")
