"""What several verbs take: the log, the modules to import, JSON."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import Annotated, Any

import typer

from agent_saga_core.cli.credentials import note
from agent_saga_core.cli.failures import Complaint, place_of
from agent_saga_core.cli.screen import plain
from agent_saga_core.errors import SagaError
from agent_saga_core.log import open_log
from agent_saga_core.log.base import Log
from agent_saga_core.log.open import ADDRESSES
from agent_saga_core.logs import default_url

__all__ = ["LOG_HELP", "AsJson", "Imports", "LogUrl", "import_modules", "open_existing", "opened", "stdout_kept"]

LOG_HELP = f"The log: {ADDRESSES}. Default: $AGENT_SAGA_LOG, else file:./.agent-saga."
LogUrl = Annotated[str | None, typer.Option("--log", metavar="URL", help=LOG_HELP, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import this dotted module first: it registers compensators and probes. Repeatable.",
        show_default=False,
    ),
]
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def open_existing(url: str | None) -> Log:
    """Open a log that exists; never creates one.

    Raises:
        Complaint: The URL is not that of a log that outlives its process, or its extra is missing.
        SagaError: The log cannot be opened.
        OSError: Likewise.
    """
    named = url or default_url()
    if named.startswith("memory:"):
        raise Complaint("a memory log ends with its process; name one that does not, such as file:./.agent-saga")
    note(named)
    try:
        return open_log(named, create=False)
    except (ValueError, ModuleNotFoundError) as error:
        raise Complaint(plain(str(error))) from error


@contextmanager
def opened(url: str | None) -> Generator[Log]:
    """`open_existing`, closed at the end."""
    log = open_existing(url)
    try:
        yield log
    finally:
        log.close()


def import_modules(names: Iterable[str] | None, *, option: str = "--import") -> None:
    """Import modules by their dotted names, with the working directory first on `sys.path`.

    What they print goes to stderr: stdout is the verb's. `option` is what the names were given to.

    Raises:
        Complaint: One of them cannot be imported; the line names it and the type of the exception.
    """
    for name in names or ():
        if not _MODULE.fullmatch(name) or name.endswith(".py"):
            raise Complaint(f"{option} takes a dotted module name such as shop.handlers, not {plain(name)!r}")
        here = os.getcwd()
        if sys.path[:1] != [here]:
            sys.path.insert(0, here)
        try:
            with stdout_kept():
                importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a module does, SystemExit included
            raise Complaint(f"{option} {name}: {_import_fault(error)}") from error


def _import_fault(error: BaseException) -> str:
    """Why an import failed. A message that is neither about importing nor ours might hold anything: left out."""
    if isinstance(error, ImportError | SyntaxError | SagaError):
        return f"{type(error).__name__}: {plain(error)}"
    return f"{type(error).__name__} at {place_of(error)}"


def stdout_kept() -> AbstractContextManager[Any]:
    """While code of the user's runs: what it prints goes to stderr, stdout is the verb's."""
    return redirect_stdout(sys.stderr)
