"""What tells adapters whether two executions, or the arguments of two calls, are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Same", "equal_args"]


class Same:
    """An object as a key that equals itself alone, whatever the object compares as: the body of a `CallSite`.

    It holds the object, so that no other one gets its place in memory.
    """

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held


def equal_args(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the arguments of two calls are equal; no, where they cannot be compared as one thing."""
    try:
        return bool(one == other)
    except Exception:  # arrays and their like
        return False
