"""What a suggested command leaves out: addresses are shown without their credentials, and would not be let in so."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from agent_saga_core.log.open import shown_address

__all__ = ["forget", "note", "shown", "with_credentials"]

_LEFT_OUT: Final[dict[str, str]] = {}
"""By the address as it is shown: what supplies that which it was given with."""


def forget() -> None:
    """Begin anew: what was noted was another run's."""
    _LEFT_OUT.clear()


def note(url: str) -> None:
    """Remember what the address of a log that this run was given is shown without."""
    with suppress(ValueError, ModuleNotFoundError):  # whoever opens it says so
        address, words = shown_address(url)
        if words:
            _LEFT_OUT[address] = words


def shown(url: str) -> str:
    """An address as a command may name it: without credentials."""
    with suppress(ValueError, ModuleNotFoundError):
        note(url)
        return shown_address(url)[0]
    return "URL"


def with_credentials(line: str) -> str:
    """A line that ends with a command, and behind it what supplies the credentials that its addresses had."""
    _, found, command = line.partition("agent-saga ")
    words = dict.fromkeys(said for address, said in _LEFT_OUT.items() if found and address in command)
    return f"{line}  # {'; '.join(words)}" if words else line
