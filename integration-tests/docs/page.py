"""Runs what a page of documentation shows: `python page.py README.md`, in an empty working directory.

All ```python blocks share one namespace and run in their order on the page; a ```console block runs, between
them, those of its `$ ` lines that start with `agent-saga` or `uv run agent-saga`. A command must exit with 0,
or with what a comment behind it says: `$ agent-saga verify  # exit 1`.

What is shown of the output is compared with what is printed:

- A ```text block is what the ```python block before it prints on stdout, itself or through a child process, if
  nothing stands between the two but empty lines or one paragraph that ends in a colon. Other ```text blocks (shell
  commands, trees) are not compared.
- Lines below a command in a ```console block are what it prints, on stdout and stderr. Where there are none,
  nothing is compared.
- `<!-- not compared: reason -->` just before a ```text or ```console block: its output is not compared.

What differs from run to run is replaced in both, as `VARYING` says, and then line is compared with line, without
spaces at their ends. `…` on the page stands for anything in its line, or, alone on a line, for any number of lines.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>.*)$")
COMMAND = re.compile(r"^\$ (?:uv run )?(?P<command>agent-saga\b.*?)(?:\s*# exit (?P<code>\d+))?$")
FENCED = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
EXCUSE = re.compile(r"^ *<!--\s*not compared\b", re.MULTILINE)
NOT_COMPARED = re.compile(r"<!--\s*not compared: (?P<reason>\S.*?)-->\s*\Z", re.DOTALL)

TEMP = re.escape(tempfile.gettempdir())
VARYING = (
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z\b| UTC\b|[+-]\d\d:\d\d)?)?"), "<time>"),
    (re.compile(r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?"), "<time>"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{8,}\b"), "<id>"),
    (re.compile(rf"(?<![\w/])(?:/private)?(?:{TEMP}|/tmp|/var/folders)/[^\s'\"]*"), "<temp>"),
    (re.compile(r"\b((?i:process|processes|pid|pids)[ =:]{1,2})\d+(?:(?:, | and )\d+)*\b"), r"\1<pid>"),
    (re.compile(r"((?:127\.0\.0\.1|localhost|\[::1\]):)\d+\b"), r"\1<port>"),
    (re.compile(r"\b\d+(?:\.\d+)? ?(?:ns|us|µs|ms|s|seconds?)\b"), "<duration>"),
)


class Block(NamedTuple):
    info: str
    line: int
    """The line of the page on which the text starts, from 1."""
    text: str
    lead: str = ""
    """What stands between the block before this one, or the page's beginning, and this one."""


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page. A block that is never closed is an error, not the end of the page."""
    lines = iter(enumerate(page.splitlines(), start=1))
    lead: list[str] = []
    for number, line in lines:
        if not (fence := FENCE.match(line)):
            lead.append(line)
            continue
        body: list[str] = []
        for _, inner in lines:
            if inner.strip() == fence["ticks"]:
                break
            body.append(inner.removeprefix(fence["indent"]))
        else:
            raise ValueError(f"line {number}: this block is not closed")
        yield Block(fence["info"].strip(), number + 1, "\n".join(body), "\n".join(lead))
        lead = []


class Command(NamedTuple):
    command: str
    code: int
    """What it must exit with."""
    shown: str
    """The lines below it."""


def commands(block: Block) -> Iterator[Command]:
    """Those of a console block that are ours to run."""
    for part in re.split(r"^(?=\$ )", block.text, flags=re.MULTILINE):
        line, _, shown = part.partition("\n")
        if match := COMMAND.match(line):
            yield Command(match["command"], int(match["code"] or 0), shown)


def is_output(block: Block) -> bool:
    """Whether this is what the python block before it prints, if it is a python block."""
    lead = NOT_COMPARED.sub("", block.lead).strip()
    a_paragraph = "\n\n" not in lead and not lead.startswith("#") and lead.endswith(":")
    return block.info == "text" and (not lead or a_paragraph)


def steady(text: str) -> list[str]:
    """The lines of an output, a placeholder in each place that differs from run to run."""
    for varying, placeholder in VARYING:
        text = varying.sub(placeholder, text)
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def difference(shown: str, printed: str) -> str:
    """What the page shows and what was printed, line against line; empty if the page tells the truth."""
    expected, found = steady(shown), steady(printed)
    any_lines, in_line = r"(?:.*\n)*?", ".*?"
    pattern = "".join(
        any_lines if line.strip() == "…" else in_line.join(map(re.escape, line.split("…"))) + r"\n" for line in expected
    )
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in found)):
        return ""
    return "\n".join(difflib.unified_diff(expected, found, "the page shows", "it prints", n=99, lineterm=""))


class Output:
    text = ""


@contextmanager
def stdout_kept() -> Generator[Output]:
    """Keep what is written to stdout, by child processes as well, and write it there when the block ends."""
    output = Output()
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield output
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
            os.close(stdout)
            written = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
            os.write(1, written)
            output.text = written.decode("utf-8")


class Page:
    """One run of one page. `wrong` fills up with the outputs that the page shows and that are not printed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wrong: list[str] = []
        self._module = types.ModuleType("page")
        sys.modules["page"] = self._module  # annotations are looked up through the module

    def run(self) -> None:
        text = self.path.read_text("utf-8")
        excuses = 0
        printed: str | None = None  # by the python block just before
        for block in blocks(text):
            excused = NOT_COMPARED.search(block.lead) is not None
            excuses += excused and block.info in {"text", "console"}
            if printed is not None and is_output(block) and not excused:
                self._compare(block, block.text, printed)
            printed = None
            if block.info == "python":
                printed = self._execute(block)
            elif block.info == "console":
                self._command(block, compared=not excused)
        if len(EXCUSE.findall(FENCED.sub("", text))) != excuses:
            self.wrong.append(f"{self.path}: a `not compared` without a reason, or not just before an output")

    def _execute(self, block: Block) -> str:
        # The empty lines put tracebacks on the page's own line numbers.
        # This file's own `from __future__` is not the page's.
        code = compile("\n" * (block.line - 1) + block.text, str(self.path), "exec", dont_inherit=True)
        with stdout_kept() as output:
            exec(code, vars(self._module))
        return output.text

    def _command(self, block: Block, *, compared: bool) -> None:
        # What is shown is what a pipe gets: no width of a terminal, and the symbols rather than ASCII.
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        environment["PYTHONIOENCODING"] = "utf-8"
        for command, expected, shown in commands(block):
            done = subprocess.run(
                command,
                shell=True,
                check=False,
                encoding="utf-8",
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            sys.stdout.write(done.stdout)
            if done.returncode != expected:
                sys.exit(f"{self.path}:{block.line}: `{command}` exited with {done.returncode}, not {expected}")
            if compared and shown.strip():
                self._compare(block, shown, done.stdout)

    def _compare(self, block: Block, shown: str, printed: str) -> None:
        if differs := difference(shown, printed):
            self._is_wrong(block, differs)

    def _is_wrong(self, block: Block, why: str) -> None:
        self.wrong.append(f"{self.path}:{block.line}: {why}")


if __name__ == "__main__":
    page = Page(Path(sys.argv[1]))
    page.run()
    if page.wrong:
        sys.exit("\n\n".join(page.wrong))
