"""What writing and reading share: errors, places in a value, and the forms of plain JSON data."""

from __future__ import annotations

import binascii
import re
from functools import cache, lru_cache
from typing import Any, Final, TypeAlias, cast

import msgspec

__all__ = [
    "BY_TEXT",
    "CACHE",
    "EXACT",
    "MAX_DEPTH",
    "NUMPY",
    "At",
    "DigestedValue",
    "RedactedValue",
    "Undecodable",
    "Unstorable",
    "bytes_of",
    "class_name",
    "digits",
    "int_of",
    "is_utf8",
    "json_bytes",
    "json_text",
    "list_of",
    "place",
    "str_of",
    "to_base64",
    "zone_known",
]


MAX_DEPTH: Final = 100
"""Containers within containers.

One takes at most 3 levels of JSON and 4 frames; the JSON decoder and this package must get by with what a
framework has left of Python's 1000.
"""


EXACT: Final = 2**53  # beyond, readers that take JSON numbers for doubles would change the number


_DECIMAL_BITS: Final = 512  # longer ints go in hexadecimal: linear time, and Python limits decimal digits


CACHE: Final = 4096


# A place in the value: (parent, segment, the container that holds it). Links instead of texts, since a path
# is needed only when something is redacted or refused.
At: TypeAlias = "tuple[Any, object, object]"


class Unstorable(Exception):
    """A value has no plain-data form. The message names place and type and holds no value.

    Attributes:
        path: Where it is, such as `args.items[0].file`.
        type_name: The name of its type.
        reason: Why not, and what to pass instead.
    """

    def __init__(self, path: str, type_name: str, reason: str) -> None:
        super().__init__(f"{path} ({type_name}) cannot be stored: {reason}")
        self.path = path
        self.type_name = type_name
        self.reason = reason


class Undecodable(Exception):
    """Data cannot be turned back into the value. The message names the place and holds no value.

    Attributes:
        path: Where it is.
        reason: What is missing or wrong.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} cannot be read back: {reason}")
        self.path = path
        self.reason = reason


class RedactedValue(Undecodable):
    """The value was a secret and is not in the data."""


class DigestedValue(Undecodable):
    """Only a digest of the value was stored, because it was too large or unstorable."""


_PLAIN_NAME: Final = re.compile(r"[^\W\d][\w-]{0,63}")


def place(at: Any) -> str:
    """The path of a place, such as `args.items[0]`."""
    parts: list[str] = []
    while at is not None:
        at, segment, _ = at
        if isinstance(segment, int):
            parts.append(f"[{segment}]")
        elif segment is None:
            parts.append("[*]")
        elif isinstance(segment, str) and _PLAIN_NAME.fullmatch(segment):
            parts.append(f".{segment}" if at is not None else segment)
        else:
            parts.append("[…]")  # it may be somebody's address or account: not for messages
    return "".join(reversed(parts))


def class_name(kind: type) -> str:
    """What is recorded of a class, and compared when reading."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_utf8(text: str) -> bool:
    """Whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_text(text: str) -> Any:
    """A text, tagged if it is none that JSON can hold."""
    if is_utf8(text):
        return text
    return {"$str": to_base64(text.encode("utf-8", "surrogatepass"))}


def to_base64(raw: bytes) -> str:
    """Bytes as text."""
    return binascii.b2a_base64(raw, newline=False).decode("ascii")


def digits(value: int) -> str:
    """An int as text."""
    return str(value) if value.bit_length() <= _DECIMAL_BITS else hex(value)


def list_of(data: Any, length: int | None = None) -> list[Any]:
    """Insist on a list."""
    if type(data) is not list or (length is not None and len(cast("list[Any]", data)) != length):
        raise ValueError
    return cast("list[Any]", data)


def str_of(data: Any) -> str:
    """A text, possibly one with lone surrogates."""
    if type(data) is str:
        return data
    tagged = cast("dict[str, Any]", data)
    if type(data) is not dict or list(tagged) != ["$str"]:
        raise ValueError
    return bytes_of(tagged["$str"]).decode("utf-8", "surrogatepass")


def bytes_of(data: Any) -> bytes:
    """Insist on base64."""
    raw = binascii.a2b_base64(str_of(data), strict_mode=True)
    if to_base64(raw) != data:
        raise ValueError
    return raw


def int_of(data: Any) -> int:
    """Insist on an int."""
    if type(data) is not int:
        raise ValueError
    return data


_canonical_json: Final = msgspec.json.Encoder(order="deterministic")


def json_bytes(data: Any) -> bytes:
    """Encode plain data with its keys sorted, so that equal data gives equal bytes.

    For comparing and hashing. What is stored goes through an encoder that keeps the order of keys.
    """
    return _canonical_json.encode(data)


# Classes whose text says everything. They are looked up among the loaded modules, so that none is imported
# for values that do not occur.
BY_TEXT: Final = {
    "$decimal": ("decimal", "Decimal"),
    "$uuid": ("uuid", "UUID"),
    "$ipv4": ("ipaddress", "IPv4Address"),
    "$ipv6": ("ipaddress", "IPv6Address"),
    "$path": ("pathlib", "PosixPath"),
    "$windows_path": ("pathlib", "WindowsPath"),
    "$pure_path": ("pathlib", "PurePosixPath"),
    "$pure_windows_path": ("pathlib", "PureWindowsPath"),
}


NUMPY: Final = frozenset({
    "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "str_",
})  # fmt: skip


_ZONE_NAME: Final = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")


@lru_cache(CACHE)
def zone_known(key: str) -> bool:
    """Whether this system has a time zone of that name, without looking anywhere but where zones are kept."""
    import os
    import zoneinfo

    if not _ZONE_NAME.fullmatch(key):
        return False
    if any(os.path.isfile(os.path.join(folder, key)) for folder in zoneinfo.TZPATH):
        return True
    # The names that the tzdata distribution lists. Asking ZoneInfo for any other would import a package of that name.
    return key in _listed_zones()


@cache
def _listed_zones() -> frozenset[str]:
    import zoneinfo

    return frozenset(zoneinfo.available_timezones())
