"""Stored data, for people."""

# Values here are anything at all, and `type()` of them is unknown to the checker by nature.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, cast

from agent_saga_core.values.classes import OWN_TAGS
from agent_saga_core.values.plain import MAX_DEPTH, bytes_of, json_bytes, str_of
from agent_saga_core.values.reading import READERS
from agent_saga_core.values.redaction import MASK

__all__ = ["display"]


def display(data: Any) -> Any:
    """Turn stored data into plain JSON data for people: values without types, gaps in words.

    Never raises, whatever the data is. It cannot be decoded again: a tuple shows as a list, a model as its
    fields, a secret as "[redacted]".
    """
    try:
        return _display(data, 0)
    except RecursionError:
        return "[nested too deeply]"


def _display(data: Any, depth: int) -> Any:
    if depth > 3 * MAX_DEPTH:
        return "[nested too deeply]"
    if type(data) is list:
        return [_display(item, depth + 1) for item in cast("list[Any]", data)]
    if type(data) is not dict:
        return data if isinstance(data, (str, int, float, bool, type(None))) else "[unreadable]"
    members = cast("dict[str, Any]", data)
    if len(members) == 1:
        (tag,) = members
        if tag[:1] == "$":
            try:
                return _display_tag(tag, members[tag], depth + 1)
            except RecursionError:
                raise
            except Exception:  # not what we write
                return "[unreadable]"
    return {str(key): _display(item, depth + 1) for key, item in members.items()}


def _display_tag(tag: str, data: Any, depth: int) -> Any:
    show = _DISPLAYS.get(tag)
    if show is not None:
        return show(data)
    if tag == "$map":
        return _display_pairs(data, depth)
    if tag in {"$deque", "$numpy"}:
        return _display(data[tag == "$numpy"], depth)
    if tag == "$enum" and len(data) > 2:
        return _display(data[2]["value"], depth)
    if tag in OWN_TAGS:
        fields = _display(data[1], depth)
        extra = data[2].get("extra") if len(data) > 2 else None
        return {**fields, **_display(extra, depth)} if extra else fields
    return _display(data, depth) if tag in READERS else "[unreadable]"


def _display_pairs(data: list[Any], depth: int) -> Any:
    rows = [(_display(key, depth), _display(item, depth)) for key, item in data]
    shown = {key if isinstance(key, str) else json_bytes(key).decode(): item for key, item in rows}
    return shown if len(shown) == len(rows) else [list(row) for row in rows]


def _display_digest(data: dict[str, Any]) -> str:
    length = data.get("length")
    size = f"{length} bytes, " if isinstance(length, int) else ""
    return f"[not stored: {size}{str(data.get('reason'))[:40]}]"


_DISPLAYS: Final[dict[str, Callable[[Any], Any]]] = {
    "$redacted": lambda data: MASK,
    "$digest": _display_digest,
    "$credential": lambda data: f"[credential {_shown(data)}]",
    "$str": lambda data: _shown({"$str": data}),
    "$int": lambda data: str_of(data) if "x" in data else int(data),
    "$bytes": lambda data: f"[{len(bytes_of(data))} bytes]",
    "$bytearray": lambda data: f"[{len(bytes_of(data))} bytes]",
    "$datetime": lambda data: (
        data if isinstance(data, str) else f"{data[0]} {data[2] or _shown(data[3] or '')}".strip()
    ),
    "$time": lambda data: data if isinstance(data, str) else f"{data[0]} {data[2] or _shown(data[3] or '')}".strip(),
    "$timedelta": lambda data: str(timedelta(*data)),
    "$unset": lambda data: None,
}


def _shown(data: Any) -> str:
    return str_of(data).encode("utf-8", "backslashreplace").decode()
