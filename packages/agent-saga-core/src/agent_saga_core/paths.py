"""The one path language: `result.id`, `args.items[0].sku`, `saga.id`, `step.forward_key`.

A path starts at one of four roots. Each further segment is a mapping's key, or else an attribute; `[n]` is an
index, counted from the end if it is negative.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from agent_saga_core.errors import DeclarationError

if TYPE_CHECKING:
    from agent_saga_core.values.redaction import Redaction

__all__ = ["ROOTS", "Path", "PathMissing", "parse"]

ROOTS: Final = ("result", "args", "saga", "step")
"""Where a path can start."""

_SEGMENT: Final = re.compile(r"\.([^.\[\]\s\x00-\x1f]+)|\[(-?[0-9]{1,18})\]")
_ROOT: Final = re.compile(r"[^.\[]*")
_MISSING: Final = object()


class PathMissing(LookupError):
    """A path leads to nothing in the value at hand. The message holds no value.

    Attributes:
        path: The whole path.
        at_segment: The part of it that leads there, up to and including the segment that is missing.
    """

    def __init__(self, path: str, at_segment: str, reason: str = "is not there") -> None:
        super().__init__(f"path {path!r}: {at_segment!r} {reason}")
        self.path = path
        self.at_segment = at_segment


class Path(msgspec.Struct, frozen=True):
    """A parsed path. `str()` gives its text.

    Attributes:
        root: One of `ROOTS`.
        segments: What follows: names and indexes.
    """

    root: str
    segments: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        return self._upto(len(self.segments))

    def _upto(self, count: int) -> str:
        return self.root + "".join(
            [f"[{segment}]" if isinstance(segment, int) else f".{segment}" for segment in self.segments[:count]]
        )

    def get(self, roots: Mapping[str, object]) -> object:
        """Return what the path leads to, without copying it.

        Keys come before attributes. Properties and `__getattr__` of the value run, and what they raise, other
        than AttributeError, comes through. Attributes that begin with an underscore cannot be reached, keys
        can.

        Raises:
            PathMissing: There is no such root, key, attribute or index.
        """
        value: Any = roots.get(self.root, _MISSING)
        if value is _MISSING:
            raise PathMissing(str(self), self.root)
        for count, segment in enumerate(self.segments, 1):
            value = _index(value, segment) if isinstance(segment, int) else _member(value, segment)
            if value is _MISSING:
                raise PathMissing(str(self), self._upto(count), _reason(segment))
        return value

    def names_secret(self, redaction: Redaction) -> bool:
        """Whether some name on the way is one whose values are redacted."""
        return any(isinstance(segment, str) and redaction.matches(segment) for segment in self.segments)


def _index(value: Any, index: int) -> Any:
    if isinstance(value, (str, bytes, bytearray)) or isinstance(value, Mapping):
        return _MISSING  # a character of an id is never what was meant, and `[0]` on a mapping is no position
    try:
        return value[index]
    except (LookupError, TypeError):
        return _MISSING


def _member(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        found = cast("Mapping[str, Any]", value).get(name, _MISSING)
        if found is not _MISSING:
            return found
        if hasattr(dict, name):
            return _MISSING  # a method such as `items`, not data
    if name.startswith("_") or not name.isidentifier():
        return _MISSING
    return getattr(cast("Any", value), name, _MISSING)


def _reason(segment: str | int) -> str:
    if isinstance(segment, str) and segment.startswith("_"):
        return "is not reachable: no such key, and attributes that begin with an underscore are private"
    return "is not there"


def parse(text: object) -> Path:
    """Read a path.

    Raises:
        DeclarationError: It is none. The message names the position and what to write; it quotes only the
        path.
    """
    if not isinstance(text, str):
        raise DeclarationError(
            f"a path is a string, not {type(text).__name__}. Write a path such as 'result.id', "
            "or call_with(...) to pass a literal value."
        )
    return _parse(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")


@lru_cache(4096)
def _parse(text: str) -> Path:
    root = cast("re.Match[str]", _ROOT.match(text)).group()
    if root not in ROOTS:
        raise DeclarationError(
            f"{_shown(text)} is no path: position 0 is no root. "
            f"Start at one of {', '.join(ROOTS)}, such as 'result.id'; for a literal use call_with(...)."
        )
    segments: list[str | int] = []
    position = len(root)
    while position < len(text):
        match = _SEGMENT.match(text, position)
        if match is None:
            raise DeclarationError(
                f"{_shown(text)} is no path: position {position} is neither '.name' nor '[number]'. "
                "Write it like 'args.items[0].sku'."
            )
        name, index = match.groups()
        if name is not None and name.startswith("__") and name.endswith("__"):
            raise DeclarationError(
                f"{_shown(text)} is no path: {name!r} at position {position + 1} is not reachable. "
                "Name a key, or an attribute that does not begin with an underscore."
            )
        segments.append(int(index) if name is None else name)
        position = match.end()
    return Path(root, tuple(segments))
