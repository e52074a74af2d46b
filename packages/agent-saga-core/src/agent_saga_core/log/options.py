"""What the options mean that the addresses of several stores have, and what of an address is never shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["flag", "one_line", "result_bytes", "seconds", "unknown"]

# No message repeats a value: it may be a piece of a password in which a character was not quoted.

_SECRET: Final = ("pas", "pw", "secr", "tok", "key", "auth", "cred", "login")
"""What the names of options that hold credentials have in them, also misspelt."""
LONGEST: Final = 30
"""A longer name than this of an option was never meant to be one."""


def unknown(name: str, query: str) -> str:
    """What to say of an option that no store of that kind has: its name, unless that may be a piece of a credential.

    A password whose `?` or `&` was not quoted leaves its rest where options are: then there is an `@` behind it, or an
    option before it that holds a credential, and nothing is repeated.

    Args:
        name: What stands where the name of an option does, as it was written.
        query: All options of the address, as they were written.
    """
    named = name.isascii() and name.isidentifier() and len(name) <= LONGEST and f"{name}=" in query
    names = [part.partition("=")[0].casefold() for part in query.split("&")]
    if not named or "@" in query or "%40" in query or any(word in one for one in names for word in _SECRET):
        return "this address has an option that is none"
    return f"there is no option {name!r}"


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
    """Yes or no: 1 or 0, or true or false.

    Raises:
        ValueError: It is neither.
    """
    value = own.get(name, default).lower()
    if value not in ("0", "1", "false", "true"):
        raise ValueError(f"the option {name} is 0 or 1")
    return value in ("1", "true")


def one_line(said: str, secrets: Iterable[str]) -> str:
    """What was said, on one line, without what must not be shown."""
    line = "; ".join(part.strip() for part in said.splitlines() if part.strip())
    for secret in secrets:
        line = line.replace(secret, "***")
    return line


def result_bytes(own: Mapping[str, str]) -> int:
    """How large a result may be.

    Raises:
        ValueError: It is no number of bytes.
    """
    size = own.get("max_result_bytes", "1048576")
    if not (size.isascii() and size.isdigit() and len(size) < 16):
        raise ValueError("the option max_result_bytes is a number of bytes")
    return int(size)
