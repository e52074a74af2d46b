"""The verb `compact`: finished sagas leave the log."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from agent_saga_core.cli.failures import DONE
from agent_saga_core.cli.options import AsJson, LogUrl, opened
from agent_saga_core.cli.screen import console_on, counted, ink, print_json, put
from agent_saga_core.log.base import KEEP_DAYS, Compaction

__all__ = ["compact_verb"]


def compact_verb(
    log_url: LogUrl = None,
    keep_days: Annotated[
        float, typer.Option("--keep-days", metavar="N", min=0.0, help="How long a finished saga stays at least.")
    ] = KEEP_DAYS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: AsJson = False,
) -> int:
    """Forget sagas that ended long ago, and give back their space.

    Merges what dead processes left; safe beside running agents.
    """
    with opened(log_url) as log:
        done = log.compact(keep_days=keep_days, dry_run=dry_run)
    if as_json:
        print_json(done)
    else:
        put(console_on(sys.stdout), ink(_told(done, dry_run=dry_run)))
    return DONE


def _told(done: Compaction, *, dry_run: bool) -> str:
    if not done.retired:
        return f"nothing to compact in {counted(done.kept, done.unit)}"
    did = [f"{'would forget' if dry_run else 'forgot'} {counted(done.sagas, 'finished saga')}"]
    if done.unit != "saga":  # where sagas leave one by one, that is all there is to say
        did[0] += f": {counted(done.retired, done.unit)} less"
        did.append(f"{counted(done.carried, 'record')} carried over")
    did.append(f"{'about ' if dry_run else ''}{done.freed:,} bytes freed")
    return f"{', '.join(did)}; left alone: {counted(done.kept, done.unit)}"
