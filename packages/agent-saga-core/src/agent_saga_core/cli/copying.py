"""The verb `log copy`: sagas go from one log to another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Annotated

import typer

from agent_saga_core.cli.failures import ATTENTION, DAMAGED, DONE, Complaint, complain
from agent_saga_core.cli.leases import owner_on
from agent_saga_core.cli.options import AsJson, opened
from agent_saga_core.cli.screen import console_on, counted, ink, plain, print_json, put
from agent_saga_core.log.moving import Copied, copy_log

__all__ = ["copy_verb"]

SHOWN = 20
"""So many sagas that were left are named for each reason; `--json` names all."""


def copy_verb(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The log to copy from.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="The log to copy to. It exists: agent-saga log init.")],
    live: Annotated[
        bool, typer.Option("--live", help="Copy although running processes own sagas of SRC; those stay there.")
    ] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Move the sagas that have not ended; they end in SRC.")
    ] = False,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", min=0.0, help="Wait so long for processes to end, or their leases to run out."
        ),
    ] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, and tell what would be done.")] = False,
    as_json: AsJson = False,
) -> int:
    """Copy sagas to another log, of whatever kind, exactly as they are.

    What arrived is compared. Interrupted, it is simply called again. A saga that has not ended stays in SRC, or is
    moved: it is never in both.
    """
    with opened(source) as here, opened(target) as there, _shown(quiet=as_json) as progress:
        try:
            done = copy_log(
                here, there, live=live, unfinished=unfinished, dry_run=dry_run, patience=wait, progress=progress
            )
        except ValueError as error:
            raise Complaint(plain(str(error))) from error
        owner = owner_on(here).said
    if as_json:
        print_json(done)
    else:
        _print(done, dry_run=dry_run, owner=owner)
    return exit_code(done)


def exit_code(done: Copied) -> int:
    """3 if damage left something behind, 1 if anything else was left, else 0."""
    if done.damaged:
        return DAMAGED
    return ATTENTION if done.unfinished or done.live or done.refused else DONE


@contextmanager
def _shown(*, quiet: bool) -> Generator[Callable[[int, int], None] | None]:
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("copying"), BarColumn(), MofNCompleteColumn(), TextColumn("sagas"), TimeRemainingColumn())
    with Progress(*columns, console=console_on(sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda seen, of: progress.update(task, completed=seen, total=of)


def _print(done: Copied, *, dry_run: bool, owner: str) -> None:
    console = console_on(sys.stdout)
    said = [f"{'would copy' if dry_run else 'copied'} {counted(done.copied, 'saga')}"]
    if done.moved:
        said.append(f"{'would move' if dry_run else 'moved'} {counted(len(done.moved), 'saga')}")
    if done.there:
        said.append(f"{done.there:,} there already")
    if done.away:
        said.append(f"{done.away:,} moved away earlier")
    checked = "" if dry_run else f"; {counted(done.records, 'record')} read back equal"
    put(console, ink(", ".join(said) + checked))
    for word, style, why, sagas in (
        ("unfinished", "yellow", "recover it in SRC, or move it with --unfinished", dict.fromkeys(done.unfinished, "")),
        ("live", "blue", f"{owner[0].lower()}{owner[1:]}; copy again when it is done", dict.fromkeys(done.live, "")),
        ("refused", "bold red", "", done.refused),
        ("damaged", "bold red", "agent-saga verify names the damaged places", done.damaged),
    ):
        for saga_id, reason in list(sagas.items())[:SHOWN]:
            line = ink(f"{word:<11}", style).append_text(ink(saga_id, "bold"))
            put(console, line.append_text(ink(f"  {reason}" if reason else "", "dim")))
        if len(sagas) > SHOWN:
            put(console, ink(f"{word:<11}").append_text(ink(f"and {len(sagas) - SHOWN:,} more; --json names all")))
        if sagas and why:
            complain(f"{counted(len(sagas), 'saga')} left, {word}: {why}")
