"""What the options mean that the addresses of several stores have."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["flag", "result_bytes", "seconds"]

# No message repeats a value: it may be a piece of a password in which a character was not quoted.


def seconds(own: Mapping[str, str], name: str, default: float, *, least: float) -> float:
    """A length of time, at most a day.

    Raises:
        ValueError: It is none, or shorter than `least`.
    """
    try:
        value = float(own.get(name, default))
    except ValueError:
        value = math.nan
    if not least <= value <= 86_400:
        raise ValueError(f"the option {name} is a number of seconds from {least:g} to a day")
    return value


def flag(own: Mapping[str, str], name: str, default: str = "0") -> bool:
    """Yes or no.

    Raises:
        ValueError: It is neither.
    """
    value = own.get(name, default)
    if value not in ("0", "1"):
        raise ValueError(f"the option {name} is 0 or 1")
    return value == "1"


def result_bytes(own: Mapping[str, str]) -> int:
    """How large a result may be.

    Raises:
        ValueError: It is no number of bytes.
    """
    size = own.get("max_result_bytes", "1048576")
    if not (size.isascii() and size.isdigit() and len(size) < 16):
        raise ValueError("the option max_result_bytes is a number of bytes")
    return int(size)
