"""The verbs that only read: `list`, `show` and `verify`."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from agent_saga_core.cli.failures import ATTENTION, DONE, Complaint, complain
from agent_saga_core.cli.leases import owner_on
from agent_saga_core.cli.options import AsJson, LogUrl, open_existing, opened
from agent_saga_core.cli.screen import (
    SAGA_STYLES,
    console_on,
    counted,
    fitted,
    ink,
    moment,
    plain,
    print_json,
    put,
    table,
)
from agent_saga_core.cli.timeline import draw
from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log.base import Log, Verification
from agent_saga_core.recovery import list_sagas, read_saga
from agent_saga_core.state import SagaHead, SagaStatus

__all__ = ["list_verb", "show_verb", "verify_verb"]


def list_verb(
    log_url: LogUrl = None,
    needing_attention: Annotated[
        bool, typer.Option("--attention", help="Only dead letters: what a person or a recovery must settle.")
    ] = False,
    statuses: Annotated[
        list[str] | None,
        typer.Option("--status", metavar="STATUS", help="Only sagas of this status. Repeatable.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List the sagas of a log, oldest first."""
    wanted = {_status(name) for name in statuses or ()}
    with opened(log_url) as log:
        heads = list_sagas(log)
        unreadable = len(set(log.saga_ids()) - {head.saga_id for head in heads})
        url = log.url
    chosen = [
        head
        for head in heads
        if (not wanted or head.status in wanted) and (not needing_attention or _is_dead_letter(head))
    ]
    if as_json:
        print_json(chosen)
    elif chosen:
        _print_heads(chosen)
    else:
        print(plain(f"no sagas in {url}" if not heads else f"none of {counted(len(heads), 'saga')} in {url}"))
    if unreadable:
        complain(f"{counted(unreadable, 'saga')} cannot be read; agent-saga verify says why")
    return DONE


def _status(name: str) -> SagaStatus:
    try:
        return SagaStatus(name.upper().replace("-", "_"))
    except ValueError:
        raise Complaint(f"there is no status {plain(name)!r}, only {', '.join(SagaStatus)}") from None


def _is_dead_letter(head: SagaHead) -> bool:
    return head.attention > 0 or head.status in (SagaStatus.NEEDS_ATTENTION, SagaStatus.MOVING)


def _print_heads(heads: list[SagaHead]) -> None:
    console = console_on(sys.stdout)
    made = table(
        ("saga", False), ("name", True), ("status", False), ("started", False), ("steps", False), ("attention", False)
    )
    for column in made.columns[4:]:
        column.justify = "right"
    for head in heads:
        made.add_row(
            ink(head.saga_id, "bold"),
            ink(head.name),
            ink(head.status, SAGA_STYLES[head.status]),
            ink(moment(head.started), "dim"),
            ink(f"{head.steps:,}"),
            ink(f"{head.attention:,}", "bold red") if head.attention else ink("-", "dim"),
        )
    put(console, fitted(console, made))


def show_verb(
    saga_id: Annotated[str, typer.Argument(metavar="SAGA", help="The saga's id.")],
    log_url: LogUrl = None,
    as_json: AsJson = False,
) -> int:
    """Show one saga: its steps, everything that happened, what remains and what to do next."""
    with opened(log_url) as log:
        state = read_saga(log, saga_id)
        if as_json:
            print_json(state)
            return DONE
        owner = owner_on(log) if not state.status.final and log.is_live(saga_id) else None
        console = console_on(sys.stdout)
        put(console, *draw(console, state, owner=owner, log=log.url if log_url is not None else None))
    return DONE


class _Verified(msgspec.Struct):
    intact: bool
    records: int
    first_broken: str | None


def verify_verb(log_url: LogUrl = None, as_json: AsJson = False) -> int:
    """Check every record of a log; exit 1 and name the first broken one if it is damaged."""
    try:
        log = open_existing(log_url)
    except LogCorrupted as error:
        found = Verification(intact=False, records=0, first_broken=str(error))
    else:
        try:
            found = _walk(log, quiet=as_json)
        finally:
            log.close()
    if as_json:
        print_json(_Verified(found.intact, found.records, found.first_broken))
    else:
        _print_verification(found)
    return DONE if found.intact else ATTENTION


def _walk(log: Log, *, quiet: bool) -> Verification:
    if quiet or not sys.stderr.isatty():
        return log.verify()
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("verifying"),
        TextColumn("{task.completed:,.0f} records"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console_on(sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=None)
        return log.verify(lambda records: progress.update(task, completed=records))


def _print_verification(found: Verification) -> None:
    console = console_on(sys.stdout)
    records = counted(found.records, "record")
    if found.intact:
        put(console, ink(f"intact: {records}", "green"))
        return
    put(console, ink(f"damaged; {records} were read", "bold red"), ink(f"first broken: {found.first_broken}"))
    for damage in found.damage[1:]:
        put(console, ink(f"also: {damage.where}: {damage.reason}"))
    suspects = sorted({saga_id for damage in found.damage for saga_id in damage.saga_ids or ()})
    if any(damage.saga_ids is None for damage in found.damage):
        put(console, ink("may concern every saga that has not ended"))
    elif suspects:
        put(console, ink(f"may concern: {', '.join(suspects)}"))
