"""The verbs `log init` and `log migrate`: a log is made, and brought to the schema of this version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from agent_saga_core.cli.credentials import note
from agent_saga_core.cli.failures import DONE, Complaint, complain
from agent_saga_core.cli.options import LOG_HELP, AsJson
from agent_saga_core.cli.screen import plain, print_json
from agent_saga_core.log.open import init_log, migrate_log
from agent_saga_core.log.sql import Prepared
from agent_saga_core.logs import default_url

__all__ = ["log_verbs"]

log_verbs = typer.Typer(
    help="Make a log, migrate its schema, copy it to another.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
)

_Url = Annotated[str | None, typer.Argument(metavar="URL", help=LOG_HELP, show_default=False)]


@log_verbs.command("init")
def init_verb(url: _Url = None, as_json: AsJson = False) -> int:
    """Make the log of that address: its tables, its locks. Harmless where it is there."""
    done = _prepared(init_log, url)
    if as_json:
        print_json(done)
    else:
        print(plain(f"made {done.url}" if done.made else f"{done.url} is a log already") + f" (version {done.version})")
    return DONE


@log_verbs.command("migrate")
def migrate_verb(url: _Url = None, as_json: AsJson = False) -> int:
    """Bring an existing log to the schema of this version. Stop what uses the log first."""
    done = _prepared(migrate_log, url)
    if as_json:
        print_json(done)
    elif done.applied:
        print(plain(f"{done.url} is at version {done.version}; applied {', '.join(done.applied)}"))
    else:
        print(plain(f"{done.url} is at version {done.version}: nothing to migrate"))
    return DONE


def _prepared(do: Callable[[str], Prepared], url: str | None) -> Prepared:
    note(url or default_url())
    try:
        done = do(url or default_url())
    except (ValueError, ModuleNotFoundError) as error:
        raise Complaint(plain(str(error))) from error
    for warning in done.warnings:
        complain(f"warning: {plain(warning)}")
    return done
