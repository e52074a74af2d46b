"""What the demo shows: lines, acts and tables, in colour on a terminal that wants it, else plain text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple, TextIO

__all__ = ["Cell", "Screen", "Style"]

Style = Literal["", "bold", "dim", "red", "green", "yellow", "cyan"]

_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "1;36"}
# For an output that cannot carry box drawing.
_PLAIN = str.maketrans("─│┌┬┐├┼┤└┴┘", "-|+++++++++")


class Cell(NamedTuple):
    """A piece of text and how it looks."""

    text: str
    style: Style = ""


class Screen:
    """Writes to one stream. No library: the demo has to work with the core alone.

    Args:
        out: Where to; colours only if it is a terminal and `$NO_COLOR` is not set.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._colours = out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
        try:
            "─│┌".encode(out.encoding or "ascii")
            self._draws = True
        except (UnicodeEncodeError, LookupError):
            self._draws = False

    def line(self, *parts: Cell | str) -> None:
        """Write one line, and let it be seen at once."""
        written = "".join(self._styled(*(part if isinstance(part, Cell) else Cell(part))) for part in parts)
        self._out.write((written if self._draws else written.translate(_PLAIN)) + "\n")
        self._out.flush()

    def act(self, title: str) -> None:
        """Write a heading with space around it."""
        self.line()
        self.line(Cell(f"── {title} ".ljust(78, "─"), "cyan"))
        self.line()

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[Cell | str]]) -> None:
        """Draw a table, each column as wide as its widest cell."""
        body = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
        widths = [max(len(text) for text in column) for column in zip(
            heads, *([cell.text for cell in row] for row in body), strict=True
        )]  # fmt: skip
        self._rule("┌┬┐", widths)
        self._row([Cell(head, "bold") for head in heads], widths)
        self._rule("├┼┤", widths)
        for row in body:
            self._row(row, widths)
        self._rule("└┴┘", widths)

    def _rule(self, joints: str, widths: Sequence[int]) -> None:
        left, middle, right = joints
        self.line("  ", Cell(left + middle.join("─" * (width + 2) for width in widths) + right, "dim"))

    def _row(self, cells: Sequence[Cell], widths: Sequence[int]) -> None:
        bar = Cell("│", "dim")
        parts: list[Cell | str] = ["  ", bar]
        for (text, style), width in zip(cells, widths, strict=True):
            parts += [Cell(f" {text.ljust(width)} ", style), bar]
        self.line(*parts)

    def _styled(self, text: str, style: Style = "") -> str:
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style and self._colours else text
