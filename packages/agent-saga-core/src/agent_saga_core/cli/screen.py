"""Paper and ink: consoles that degrade without a terminal, and text that cannot do anything to one.

Everything that comes from a log goes through `plain` and is printed as `Text`, never as markup: a log may be hostile.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from datetime import datetime
from io import TextIOWrapper
from typing import TYPE_CHECKING, Final, TextIO

import msgspec

from agent_saga_core.state import SagaStatus, StepStatus

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "SAGA_STYLES",
    "console_on",
    "counted",
    "fitted",
    "ink",
    "mark",
    "moment",
    "plain",
    "print_json",
    "put",
    "robust_streams",
    "step_mark",
    "step_style",
    "table",
]

UNLIMITED: Final = 65_536
"""Columns of what is no terminal and names no width: one row stays one line, for grep."""

SAGA_STYLES: Final = {
    SagaStatus.RUNNING: "blue",
    SagaStatus.SUSPENDED: "magenta",
    SagaStatus.COMMITTED: "green",
    SagaStatus.ROLLING_BACK: "yellow",
    SagaStatus.ROLLED_BACK: "cyan",
    SagaStatus.NEEDS_ATTENTION: "bold red",
    SagaStatus.MOVING: "bold red",
    SagaStatus.MOVED: "dim",
}
_STEP_MARKS: Final = {
    StepStatus.INTENDED: ("→", "yellow"),
    StepStatus.DONE: ("✓", "green"),
    StepStatus.NOT_APPLIED: ("○", "dim"),
    StepStatus.UNKNOWN: ("?", "bold yellow"),
    StepStatus.PAUSED: ("=", "magenta"),
    StepStatus.COMPENSATING: ("↻", "yellow"),
    StepStatus.COMPENSATED: ("↺", "cyan"),
    StepStatus.COMPENSATION_FAILED: ("✗", "bold red"),
}
_ASCII: Final = str.maketrans("→✓○↻↺✗●│├■⚑·—…", ">+o~<x*||#!--.")

# Control characters, and what turns the direction of a line or breaks it: escaped where it is shown.
_UNPRINTABLE: Final = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x061C, *range(0x200E, 0x2010), *range(0x2028, 0x202F),
                 *range(0x2066, 0x206A), 0xFEFF)
} | {0x09: " ", 0x0A: " ", 0x0D: " "}  # fmt: skip


def plain(text: object) -> str:
    """Text on one line that a terminal shows as it stands, whatever it was."""
    return str(text).translate(_UNPRINTABLE).encode("utf-8", "backslashreplace").decode()


def robust_streams() -> None:
    """Let stdout and stderr escape what their encoding lacks: a saga's name is no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            with suppress(OSError, ValueError):
                stream.reconfigure(errors="backslashreplace")


def console_on(stream: TextIO) -> Console:
    """A console that wraps and colors on a terminal only."""
    from rich.console import Console

    free = not stream.isatty() and "COLUMNS" not in os.environ
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=UNLIMITED if free else None)


def put(console: Console, *what: RenderableType) -> None:
    """Print; without a terminal also without the padding behind the last column."""
    if console.is_terminal:
        console.print(*what, sep="\n")
        return
    with console.capture() as captured:
        console.print(*what, sep="\n")
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    console.file.flush()


def ink(text: object, style: str = "") -> Text:
    """Text out of a log, made harmless."""
    from rich.text import Text

    return Text(plain(text), style=style)


def mark(console: Console, symbol: str) -> str:
    """A symbol, or its ASCII stand-in where the stream's encoding has none."""
    return symbol if console.encoding.lower().startswith("utf") else symbol.translate(_ASCII)


def step_mark(console: Console, status: str) -> Text:
    """The symbol of a step's status, in its color."""
    symbol, style = _STEP_MARKS.get(StepStatus(status), ("·", ""))
    return ink(mark(console, symbol), style)


def step_style(status: StepStatus) -> str:
    """The color of a step's status."""
    return _STEP_MARKS[status][1]


def table(*columns: tuple[str, bool], header: bool = True) -> Table:
    """A table without lines. Columns are (heading, whether it wraps before the others do)."""
    from rich.table import Table

    made = Table(box=None, show_header=header, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for heading, wraps in columns:
        made.add_column(heading, overflow="fold", no_wrap=not wraps)
    return made


def fitted(console: Console, made: Table) -> Table:
    """The table, folded in every column where it would not fit: rich would cut identifiers otherwise."""
    if made.__rich_measure__(console, console.options).minimum >= console.width:
        for column in made.columns:
            column.no_wrap = False
    return made


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`, `1,000 steps`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def moment(at: datetime) -> str:
    """A time for people: UTC, to the second."""
    return at.strftime("%Y-%m-%d %H:%M:%S UTC")


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
    sys.stdout.flush()
