"""Runs what a page of documentation shows: `python page.py README.md`, in an empty working directory.

All ```python blocks share one namespace and run in their order on the page; a ```console block runs, between
them, those of its `$ ` lines that start with `agent-saga` or `uv run agent-saga`. A command must exit with 0,
or with what a comment behind it says: `$ agent-saga verify  # exit 1`. What a command prints is not compared.
"""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>.*)$")
COMMAND = re.compile(r"^\$ (?:uv run )?(?P<command>agent-saga\b.*?)(?:\s*# exit (?P<code>\d+))?$")


class Block(NamedTuple):
    info: str
    line: int
    """The line of the page on which the text starts, from 1."""
    text: str


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page. A block that is never closed is an error, not the end of the page."""
    lines = iter(enumerate(page.splitlines(), start=1))
    for number, line in lines:
        if not (fence := FENCE.match(line)):
            continue
        body: list[str] = []
        for _, inner in lines:
            if inner.strip() == fence["ticks"]:
                break
            body.append(inner.removeprefix(fence["indent"]))
        else:
            raise ValueError(f"line {number}: this block is not closed")
        yield Block(fence["info"].strip(), number + 1, "\n".join(body))


def commands(block: Block) -> Iterator[tuple[str, int]]:
    """(command, the code it must exit with) of each line of a console block that is ours to run."""
    for line in block.text.splitlines():
        if match := COMMAND.match(line):
            yield match["command"], int(match["code"] or 0)


def run(path: Path) -> None:
    page = types.ModuleType("page")
    sys.modules["page"] = page  # annotations are looked up through the module
    for block in blocks(path.read_text("utf-8")):
        if block.info == "python":
            # The empty lines put tracebacks on the page's own line numbers.
            # This file's own `from __future__` is not the page's.
            code = compile("\n" * (block.line - 1) + block.text, str(path), "exec", dont_inherit=True)
            exec(code, vars(page))
        elif block.info == "console":
            for command, expected in commands(block):
                code = subprocess.run(command, shell=True, check=False).returncode
                if code != expected:
                    sys.exit(f"{path}:{block.line}: `{command}` exited with {code}, not {expected}")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
