"""`resolve`: a person says what became of a step."""

from __future__ import annotations

import sys
import threading
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer

from agent_saga_core.cli.advice import next_steps
from agent_saga_core.cli.failures import ATTENTION, BUSY, DONE, Complaint
from agent_saga_core.cli.leases import await_leases, owner_on
from agent_saga_core.cli.options import AsJson, Imports, LogUrl, import_modules, opened, stdout_kept
from agent_saga_core.cli.screen import SAGA_STYLES, console_on, ink, plain, print_json, put
from agent_saga_core.errors import SagaBusy
from agent_saga_core.recovery import resolve
from agent_saga_core.state import SagaState, SagaStatus

__all__ = ["resolve_verb"]


class Outcome(StrEnum):
    """What a person can say of a step."""

    LANDED = "landed"
    NOT_APPLIED = "not-applied"
    COMPENSATED = "compensated"
    ACCEPTED = "accepted"


def resolve_verb(
    saga_id: Annotated[str, typer.Argument(metavar="SAGA", help="The saga's id.")],
    step: Annotated[str, typer.Argument(metavar="STEP", help="The step's number, or its tool's name if unique.")],
    outcome: Annotated[Outcome, typer.Option("--as", help="What became of the step.")],
    by: Annotated[str, typer.Option("--by", metavar="NAME", help="Who says so.")],
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="Why.")],
    result: Annotated[
        str | None,
        typer.Option(
            "--result", metavar="JSON", help="With --as landed: what the call returned; the undo may need it."
        ),
    ] = None,
    modules: Imports = None,
    log_url: LogUrl = None,
    as_json: AsJson = False,
) -> int:
    """Record what a person found out about a step, and go on with the rollback if one is under way."""
    value = _parsed(result)
    import_modules(modules)
    with opened(log_url) as log, stdout_kept():
        await_leases(log, [saga_id], threading.Event().wait, quiet=as_json)
        try:
            state = resolve(log, saga_id, step, outcome=outcome.value, by=by, note=note, result=value)
        except SagaBusy as error:
            owner = owner_on(log)
            if not owner.todo:
                raise
            said = f"saga {plain(saga_id)!r} is owned. {owner.said}; resolve it when it is done, or its lease is over"
            raise Complaint(said, BUSY) from error
        url = log.url
    if as_json:
        print_json(state)
    else:
        _print_state(state, url if log_url is not None else None)
    return ATTENTION if state.status is SagaStatus.NEEDS_ATTENTION else DONE


def _parsed(result: str | None) -> Any:
    if result is None:
        return None
    try:
        return msgspec.json.decode(result)
    except msgspec.DecodeError as error:
        raise Complaint(f"--result is not JSON: {error}") from error


def _print_state(state: SagaState, log: str | None) -> None:
    console = console_on(sys.stdout)
    stands = f"saga {state.saga_id!r} {state.status}"
    if state.report is not None and state.report.status is state.status:  # an earlier verdict is no news
        stands = str(state.report)
    put(console, ink(f"recorded. {stands}", SAGA_STYLES[state.status]))
    for said, commands in next_steps(state, owner=None, log=log):
        put(console, ink(said), *(ink(f"  {command}", "bold") for command in commands))
