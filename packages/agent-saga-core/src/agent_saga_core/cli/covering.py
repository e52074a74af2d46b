"""The verb `coverage`: which tools of an agent are wrapped, and where nobody can look."""

from __future__ import annotations

import inspect
import sys
from typing import Annotated, Any

import typer

from agent_saga_core.cli.failures import ATTENTION, DONE, Complaint, place_of
from agent_saga_core.cli.options import AsJson, Imports, import_modules, stdout_kept
from agent_saga_core.cli.screen import console_on, fitted, ink, plain, print_json, put, table
from agent_saga_core.coverage import CoverageEntry, CoverageManifest
from agent_saga_core.coverage.manifest import HEADINGS, row_of, summary_of
from agent_saga_core.errors import SagaError
from agent_saga_core.fleet import coverage_of
from agent_saga_core.wrapping import runner_of

__all__ = ["coverage_verb"]


def coverage_verb(
    place: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:OBJECT",
            help="An agent, a fleet, or a list of tools, as shop.agents:graph; shop.agents:build() calls build first.",
        ),
    ],
    imports: Imports = None,
    acknowledge: Annotated[
        list[str] | None,
        typer.Option(
            "--acknowledge",
            metavar="PATH",
            help="Do not count this opaque entry: somebody has looked into it. Repeatable.",
            show_default=False,
        ),
    ] = None,
    fail_under: Annotated[
        float,
        typer.Option("--fail-under", metavar="PERCENT", min=0.0, max=100.0, help="Exit 1 below this coverage."),
    ] = 100.0,
    as_json: AsJson = False,
) -> int:
    """Say which tools of an agent are wrapped, and what is opaque.

    Exit 1 below the limit.
    """
    paths = tuple(dict.fromkeys(acknowledge or ()))
    import_modules(imports)
    with stdout_kept():
        found = _found(place)
        try:
            manifest = coverage_of(found)
        except (SagaError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise Complaint(f"{plain(place)} could not be looked into: {_fault(error)}") from error
    percent = manifest.percent_with(paths)
    enough = percent >= fail_under
    if as_json:
        shown = {"percent": percent, "fail_under": fail_under, "acknowledged": paths, "enough": enough}
        print_json({**manifest.to_json(), **shown})
    else:
        _print(manifest, paths, hint=_hint(place, found))
    stale = manifest.stale(paths)
    if stale:
        raise Complaint(f"nothing opaque has the path {', '.join(map(plain, stale))}; leave --acknowledge out for it")
    return DONE if enough else ATTENTION


def _found(place: str) -> Any:
    """The object that a place names.

    Raises:
        Complaint: It names none, or making it failed.
    """
    module, colon, attribute = place.partition(":")
    dotted = attribute.removesuffix("()")
    if not colon or not all(part.isidentifier() for part in dotted.split(".")):
        raise Complaint(f"coverage takes MODULE:OBJECT such as shop.agents:graph, not {plain(place)!r}")
    import_modules([module], option="coverage")
    found: Any = sys.modules[module]
    for part in dotted.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise Complaint(f"{plain(place)}: there is no {plain(part)!r}") from None
        except Exception as error:
            raise Complaint(f"{plain(place)}: {_fault(error)}") from error
    return found if dotted == attribute else _made(place, found)


def _made(place: str, factory: Any) -> Any:
    try:
        made = factory()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's code does, SystemExit included
        raise Complaint(f"{plain(place)}: {_fault(error)}") from error
    if inspect.iscoroutine(made):
        made.close()
        raise Complaint(f"{plain(place)} is async; name a plain function that makes the object")
    return made


def _fault(error: BaseException) -> str:
    # Not a message of the user's: it might hold anything.
    if isinstance(error, SagaError):
        return plain(error)
    return f"{type(error).__name__} at {place_of(error)}"


def _hint(place: str, found: object) -> str:
    """What to say where a function was named that may have been meant to be called."""
    if inspect.isroutine(found) and runner_of(found) is None:
        return f"this function was taken for a tool; if it makes the object, write {place}()"
    return ""


def _print(manifest: CoverageManifest, acknowledged: tuple[str, ...], *, hint: str) -> None:
    console = console_on(sys.stdout)
    if manifest.tools:
        made = table(*((heading, heading in ("path", "covers unknown")) for heading in HEADINGS))
        for entry in manifest.tools:
            made.add_row(*(ink(cell, style) for cell, style in zip(row_of(entry), _styles(entry), strict=True)))
        put(console, fitted(console, made))
        notes = table(("note", True), ("", True), header=False)
        for entry in manifest.tools:
            if entry.detail:
                notes.add_row(ink(entry.path, "dim"), ink(entry.detail))
        if notes.row_count:
            put(console, "", fitted(console, notes))
    if manifest.opaque:
        hidden = table(("opaque", True), ("why", True), ("", False))
        for entry in manifest.opaque:
            known = entry.path in acknowledged
            style = "dim" if known else "bold yellow"
            hidden.add_row(ink(entry.path, style), ink(entry.detail), ink("acknowledged" if known else "", "dim"))
        put(console, *([""] if manifest.tools else []), fitted(console, hidden))
    put(console, *([""] if manifest.entries else []), ink(summary_of(manifest, acknowledged), "bold"))
    if hint:
        put(console, ink(hint))


def _styles(entry: CoverageEntry) -> tuple[str, ...]:
    if not entry.wrapped:
        return ("bold red",) * 3 + ("dim",) * 4
    weak = "yellow" if entry.inverse == "closure" else ""
    return ("bold", "", "green", "", weak, "", "dim")
