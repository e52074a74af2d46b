"""Every way in which a verb fails: its exit code and its one line."""

from __future__ import annotations

import sys
from traceback import extract_tb

from agent_saga_core.cli.credentials import with_credentials
from agent_saga_core.cli.screen import plain
from agent_saga_core.errors import Fenced, LogCorrupted, SagaBusy, SagaError

__all__ = [
    "ATTENTION",
    "BUG",
    "BUSY",
    "DAMAGED",
    "DONE",
    "INTERRUPTED",
    "USAGE",
    "Complaint",
    "code_of",
    "complain",
    "line_of",
    "place_of",
]

DONE = 0
ATTENTION = 1
USAGE = 2
DAMAGED = 3
BUSY = 4
BUG = 70
"""Something failed that we did not foresee, here or in a module of the user's: `EX_SOFTWARE` of sysexits.h."""
INTERRUPTED = 130
"""What shells report of a process that SIGINT ended."""


class Complaint(Exception):
    """A failure that is already put into words: the line to print.

    Attributes:
        code: The exit code.
    """

    def __init__(self, line: str, code: int = USAGE) -> None:
        super().__init__(line)
        self.code = code


def code_of(error: BaseException) -> int:
    """The exit code that a failure means."""
    match error:
        case Complaint():
            return error.code
        case SagaBusy() | Fenced():
            return BUSY
        case LogCorrupted():
            return DAMAGED
        case SagaError() | OSError():
            return USAGE
        case _:
            return BUG


def line_of(error: BaseException) -> str:
    """What to say of a failure, on one line and without control characters."""
    if code_of(error) != BUG:
        return with_credentials(plain(str(error))) or type(error).__name__
    return f"{type(error).__name__} at {place_of(error)}: {plain(str(error))}. --traceback shows where it came from."


def place_of(error: BaseException) -> str:
    """File and line in which an exception was raised."""
    frames = extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


def complain(line: str) -> None:
    """Say on stderr, in one line, what went wrong."""
    print(f"agent-saga: {line}", file=sys.stderr)
