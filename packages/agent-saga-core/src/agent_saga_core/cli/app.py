"""The verbs, and the one place where their failures become exit codes."""

from __future__ import annotations

import platform
import sys
import traceback
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agent_saga_core.cli.compacting import compact_verb
from agent_saga_core.cli.copying import copy_verb
from agent_saga_core.cli.covering import coverage_verb
from agent_saga_core.cli.credentials import forget
from agent_saga_core.cli.failures import BUG, DONE, INTERRUPTED, USAGE, Complaint, code_of, complain, line_of
from agent_saga_core.cli.options import AsJson
from agent_saga_core.cli.preparing import log_verbs
from agent_saga_core.cli.reading import list_verb, show_verb, verify_verb
from agent_saga_core.cli.recovering import recover_verb
from agent_saga_core.cli.resolving import resolve_verb
from agent_saga_core.cli.screen import plain, print_json, robust_streams
from agent_saga_core.records import FORMAT_VERSION

__all__ = ["app", "run"]

# Usage errors of every version of typer, whichever click it stands on: the common parent of what it raises.
_UsageFault: type[Exception] = typer.BadParameter.__mro__[2]


class Verbs(TyperGroup):
    """The group of verbs: each returns its exit code, and each failure is one line."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run one verb; exit with its code, or return it."""
        robust_streams()
        code = self._code(*args, **extra)
        if standalone_mode:
            sys.exit(code)
        return code

    def _code(self, *args: Any, **extra: Any) -> int:
        _choices.traceback = False
        forget()
        try:
            _refuse_odd((args[0] if args else extra.get("args")) or sys.argv[1:])
            code = super().main(*args, standalone_mode=False, **extra)
            return code if isinstance(code, int) else DONE
        except (KeyboardInterrupt, typer.Abort):
            complain("interrupted")
            return INTERRUPTED
        except _UsageFault as error:
            said: str = getattr(error, "format_message", error.__str__)()
            complain(f"{' '.join(plain(said).split())} See agent-saga --help.")
            return USAGE
        except Exception as error:
            if _choices.traceback:
                traceback.print_exception(error)
            complain(line_of(error))
            return code_of(error)


def _refuse_odd(words: Iterable[str]) -> None:
    """Bytes that are no UTF-8 come as lone surrogates, which no store, address or document can hold."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise Complaint(f"'{plain(word)}' is not UTF-8") from None


class _Choices:
    traceback = False


_choices = _Choices()

app = typer.Typer(
    name="agent-saga",
    cls=Verbs,
    add_completion=False,
    rich_markup_mode=None,  # usage errors are one line, and help is plain text
    pretty_exceptions_enable=False,
    help="Transactions for AI agents' tool calls: look into a log, and finish what dead processes left.",
    epilog="Exit codes: 0 done, 1 attention remains, damage found or coverage below the limit, "
    "2 usage or no such thing, 3 damage stopped it, 4 the saga is in use.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        version_verb(as_json=False)
        raise typer.Exit(DONE)


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction]
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the traceback of a failure as well.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    _choices.traceback = show_traceback


app.command("list")(list_verb)
# In the list of verbs a line has 64 characters and is cut otherwise: a short one where a verb's own first line is long.
app.command("show", short_help="Show one saga: its steps, what happened, what to do next.")(show_verb)
app.command("verify", short_help="Check every record of a log; exit 1 if it is damaged.")(verify_verb)
app.command("recover", short_help="Roll back every saga whose process is gone; --watch: as a daemon.")(recover_verb)
app.command("resolve", short_help="Record what a person found out about a step, and go on.")(resolve_verb)
app.command("compact")(compact_verb)
app.command("coverage")(coverage_verb)
log_verbs.command("copy")(copy_verb)
app.add_typer(log_verbs, name="log")


@app.command("demo")
def demo_verb(as_json: AsJson = False) -> int:
    """Play three acts: commit; fail and undo; die, and be finished.

    The agent of the third is killed, and another process undoes what it did.
    """
    from agent_saga_core.demo.acts import main as acts

    return acts(["--json"] if as_json else [])


@app.command("version")
def version_verb(as_json: AsJson = False) -> int:
    """Print the versions of this program, its log format and Python."""
    from importlib.metadata import version

    own, python = version("agent-saga-core"), platform.python_version()
    if as_json:
        print_json({"version": own, "format": FORMAT_VERSION, "python": python})
    else:
        print(f"agent-saga {own} (log format {FORMAT_VERSION}, Python {python})")
    return DONE


def run() -> int:
    """Run on `sys.argv` and return the exit code."""
    code = app(prog_name="agent-saga", standalone_mode=False)
    return code if isinstance(code, int) else BUG
