"""Values to plain JSON data."""

# Values here are anything at all, and `type()` of them is unknown to the checker by nature.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from functools import lru_cache
from itertools import chain
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, NoReturn, TypeAlias

import msgspec

from agent_saga_core.values.classes import own_class
from agent_saga_core.values.hints import Shape
from agent_saga_core.values.plain import (
    BY_TEXT,
    CACHE,
    EXACT,
    MAX_DEPTH,
    NUMPY,
    At,
    Unstorable,
    class_name,
    digits,
    is_utf8,
    json_bytes,
    json_text,
    place,
    to_base64,
    zone_known,
)
from agent_saga_core.values.redaction import Credential, Redacted, Redaction, is_secret_type, secret_forms

__all__ = ["Encoded", "Writer"]


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """A value as plain JSON data.

    Attributes:
        data: What to store.
        redacted: Where a marker stands instead of the value, such as `args.api_key`.
        secrets: The texts of the redacted values, to `scrub` messages with. Never store them.
    """

    data: Any
    redacted: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Encoded(data=..., redacted={self.redacted!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Encoded holds secrets and cannot be pickled; store its data")


class Writer:
    """One encoding: where it writes down what it redacted."""

    __slots__ = ("matches", "redacted", "secrets")

    def __init__(self, redaction: Redaction) -> None:
        self.matches = redaction.matches
        self.redacted: list[str] = []
        self.secrets: list[str] = []

    def finish(self, data: Any) -> Encoded:
        """Give the result."""
        return Encoded(data=data, redacted=tuple(self.redacted), secrets=tuple(self.secrets))

    def refuse(self, value: object, at: At, reason: str) -> NoReturn:
        """Raise `Unstorable`."""
        raise Unstorable(place(at), type(value).__name__, reason) from None

    def value(self, value: Any, shape: Shape | None, at: At, depth: int) -> Any:
        """Write any value."""
        if shape is not None and shape.secret:
            return self.redact(value, at)
        kind: type[Any] = type(value)
        if kind is str:
            return value if value.isascii() else json_text(value)
        if kind is bool or value is None:
            return value
        if kind is int:
            return value if -EXACT <= value <= EXACT else {"$int": digits(value)}
        if kind is float:
            return value if value - value == 0.0 else {"$float": repr(value)}
        if depth >= MAX_DEPTH:
            self.refuse(value, at, _too_deep(value, at))
        write = _WRITERS.get(kind) or _writer_of(kind)
        return write(self, value, shape, at, depth + 1)

    def redact(self, value: Any, at: At) -> Any:
        """Write a marker in place of the value."""
        if value is None:
            return None
        if type(value) is Credential:
            return _write_credential(self, value, None, at, 0)
        self.redacted.append(place(at))
        self.secrets.extend(secret_forms(value))
        return {"$redacted": True}

    def mapping(
        self,
        value: Mapping[Any, Any],
        shape: Shape | None,
        at: At,
        depth: int,
        aliases: Mapping[str, str] | None = None,
    ) -> Any:
        """The members of a mapping: as they are if every key can be a JSON key, else as `$map`."""
        data: dict[str, Any] = {}
        matches = self.matches
        if shape is not None and (keys := shape.key()) is not None and keys.secret:
            return self.redact(value, at)
        members = iter(value.items())
        for key, item in members:
            if type(key) is not str or key[:1] == "$" or not (key.isascii() or is_utf8(key)):
                rows: list[Any] = [[name, written] for name, written in data.items()]
                self.pairs(rows, chain(((key, item),), members), value, shape, at, depth)
                return {"$map": rows}
            kind = type(item)
            if matches(key) or (aliases and matches(aliases.get(key, ""))):
                data[key] = self.redact(item, (at, key, value))
            elif shape is None and (kind is str and item.isascii() or kind is bool or item is None):
                data[key] = item
            else:
                inner = None if shape is None else shape.value(key)
                data[key] = self.value(item, inner, (at, key, value), depth)
        return data

    def pairs(
        self,
        rows: list[Any],
        members: Iterable[tuple[Any, Any]],
        value: Mapping[Any, Any],
        shape: Shape | None,
        at: At,
        depth: int,
    ) -> None:
        """Write members whose keys may be anything."""
        for key, item in members:
            here = (at, key if isinstance(key, str) else ..., value)
            written = self.value(key, None if shape is None else shape.key(), (at, None, value), depth)
            if isinstance(key, str) and self.matches(str.__str__(key)):
                rows.append([written, self.redact(item, here)])
            else:
                inner = None if shape is None else shape.value(key)
                rows.append([written, self.value(item, inner, here, depth)])

    def items(self, value: Iterable[Any], shape: Shape | None, at: At, depth: int) -> list[Any]:
        """Write the elements of a list."""
        inner = None if shape is None else shape.item()
        write = self.value
        return [write(item, inner, (at, index, value), depth) for index, item in enumerate(value)]

    def positions(self, value: Iterable[Any], shape: Shape | None, at: At, depth: int) -> list[Any]:
        """Write the elements of a tuple."""
        if shape is None:
            return self.items(value, None, at, depth)
        return [self.value(item, shape.position(index), (at, index, value), depth) for index, item in enumerate(value)]

    def members(self, value: Iterable[Any], shape: Shape | None, at: At, depth: int) -> list[Any]:
        """The elements of a set, in an order that does not depend on the process."""
        inner = None if shape is None else shape.item()
        written = [self.value(item, inner, (at, None, value), depth) for item in value]
        return sorted(written, key=json_bytes)


_Write: TypeAlias = Callable[[Writer, Any, Shape | None, At, int], Any]


def _too_deep(value: object, at: Any) -> str:
    while at is not None:
        at, _, holder = at
        if holder is value:
            return "it contains itself. Pass data without cycles"
    return f"it is nested deeper than {MAX_DEPTH} levels, or contains itself"


def _write_credential(w: Writer, value: Credential, shape: Shape | None, at: At, depth: int) -> Any:
    return {"$credential": json_text(value.name)}


def _write_timedelta(w: Writer, value: timedelta, shape: Shape | None, at: At, depth: int) -> Any:
    return {"$timedelta": [value.days, value.seconds, value.microseconds]}


def _write_moment(w: Writer, value: datetime | time, shape: Shape | None, at: At, depth: int) -> Any:
    tag = "$datetime" if isinstance(value, datetime) else "$time"
    zone: Any = value.tzinfo
    text, key, name = value.isoformat(), None, None
    if type(zone) is timezone:
        name = (zone.__getinitargs__()[1:] or (None,))[0]  # pyright: ignore[reportAttributeAccessIssue]
    elif zone is not None and class_name(type(zone)) == "zoneinfo.ZoneInfo":
        key, text = zone.key, value.replace(tzinfo=None).isoformat()
        if key is None or not zone_known(key):
            w.refuse(value, at, "its time zone is not one of this system. Use a named zone or an offset")
    elif zone is not None and class_name(type(zone)) != "pydantic_core._pydantic_core.TzInfo":
        w.refuse(value, at, "its tzinfo is of a class that only it knows. Use zoneinfo or datetime.timezone")
    if not value.fold and key is None and name is None:
        return {tag: text}
    return {tag: [text, value.fold, key, None if name is None else json_text(name)]}


def _write_deque(w: Writer, value: deque[Any], shape: Shape | None, at: At, depth: int) -> Any:
    return {"$deque": [w.items(value, shape, at, depth), value.maxlen]}


_WRITERS: Final[dict[type, _Write]] = {
    dict: Writer.mapping,
    list: Writer.items,
    tuple: lambda w, value, shape, at, depth: {"$tuple": w.positions(value, shape, at, depth)},
    set: lambda w, value, shape, at, depth: {"$set": w.members(value, shape, at, depth)},
    frozenset: lambda w, value, shape, at, depth: {"$frozenset": w.members(value, shape, at, depth)},
    bytes: lambda w, value, shape, at, depth: {"$bytes": to_base64(value)},
    bytearray: lambda w, value, shape, at, depth: {"$bytearray": to_base64(value)},
    complex: lambda w, value, shape, at, depth: {"$complex": [repr(value.real), repr(value.imag)]},
    range: lambda w, value, shape, at, depth: {
        "$range": [w.value(part, None, at, depth) for part in (value.start, value.stop, value.step)]
    },
    date: lambda w, value, shape, at, depth: {"$date": value.isoformat()},
    datetime: _write_moment,
    time: _write_moment,
    timedelta: _write_timedelta,
    deque: _write_deque,
    OrderedDict: lambda w, value, shape, at, depth: {"$ordereddict": w.mapping(value, shape, at, depth)},
    Counter: lambda w, value, shape, at, depth: {"$counter": w.mapping(value, shape, at, depth)},
    MappingProxyType: lambda w, value, shape, at, depth: {"$mappingproxy": w.mapping(value, shape, at, depth)},
    SimpleNamespace: lambda w, value, shape, at, depth: {"$namespace": w.mapping(vars(value), None, at, depth)},
    type(msgspec.UNSET): lambda w, value, shape, at, depth: {"$unset": True},
    Credential: _write_credential,
    Redacted: lambda w, value, shape, at, depth: w.redact(value, at),
}


@lru_cache(CACHE)
def _writer_of(kind: type[Any]) -> _Write:
    """What to do with values of a class that is none of the fixed ones."""
    if is_secret_type(kind):
        return lambda w, value, shape, at, depth: w.redact(value, at)
    for tag, (module, name) in BY_TEXT.items():
        if getattr(sys.modules.get(module), name, None) is kind:
            return _writer_of_text(tag)
    if (name := _numpy_name(kind)) is not None:
        return _writer_of_numpy(name)
    plan = own_class(kind)
    return _refuse if plan is None else plan.write


def _numpy_name(kind: type[Any]) -> str | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not issubclass(kind, getattr(numpy, "generic", ())):
        return None
    return next((name for name in NUMPY if getattr(numpy, name, None) is kind), None)


def _writer_of_text(tag: str) -> _Write:
    return lambda w, value, shape, at, depth: {tag: json_text(str(value))}


def _writer_of_numpy(name: str) -> _Write:
    def write(w: Writer, value: Any, shape: Shape | None, at: At, depth: int) -> Any:
        plain = str.__str__(value) if name == "str_" else value.item()
        return {"$numpy": [name, w.value(plain, None, at, depth)]}

    return write


def _refuse(w: Writer, value: Any, shape: Shape | None, at: At, depth: int) -> Any:
    kind: type[Any] = type(value)
    if callable(value):
        reason = "code is not data. Pass a name, and look it up where it is used"
    elif hasattr(kind, "__next__") or hasattr(kind, "__anext__") or hasattr(kind, "__await__"):
        reason = "it can be consumed only once. Pass a list of what it gives"
    elif hasattr(kind, "tolist"):
        reason = "arrays have no form here. Pass value.tolist(), or the place where it is stored"
    elif kind.__name__ == "defaultdict":
        reason = "its default factory is code. Pass dict(value)"
    elif hasattr(kind, "fileno") or hasattr(kind, "read"):
        reason = "an open resource is not data. Pass its name or its contents"
    else:
        reason = (
            "its class has no plain-data form here. Pass plain data, a dataclass, a pydantic model or a msgspec Struct"
        )
    w.refuse(value, at, reason)
