"""Plain JSON data to values."""

# Values here are anything at all, and `type()` of them is unknown to the checker by nature.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, NoReturn, TypeAlias, cast

import msgspec

from agent_saga_core.values.classes import OWN_TAGS, reader_of
from agent_saga_core.values.hints import Shape
from agent_saga_core.values.plain import (
    BY_TEXT,
    MAX_DEPTH,
    NUMPY,
    At,
    DigestedValue,
    RedactedValue,
    Undecodable,
    bytes_of,
    digits,
    int_of,
    list_of,
    place,
    str_of,
    zone_known,
)
from agent_saga_core.values.redaction import Credential, Redacted

__all__ = ["Reader"]


class Reader:
    """One decoding."""

    __slots__ = ("strict",)

    def __init__(self, strict: bool) -> None:
        self.strict = strict

    def refuse(self, at: At, reason: str) -> NoReturn:
        """Raise `Undecodable`."""
        raise Undecodable(place(at), reason) from None

    def value(self, data: Any, shape: Shape | None, at: At, depth: int) -> Any:
        """Read any data."""
        kind: type[Any] = type(data)
        if kind is str or kind is int or kind is bool or kind is float or data is None:
            return data
        if depth >= MAX_DEPTH:
            self.refuse(at, f"it is nested deeper than {MAX_DEPTH} levels")
        if kind is dict:
            if len(data) == 1:
                (tag,) = data
                if tag[:1] == "$":
                    return self.tagged(tag, data[tag], shape, at, depth + 1)
            return self.members(data, shape, at, depth + 1)
        if kind is list:
            return self.items(data, shape, at, depth + 1)
        self.refuse(at, "it is not plain JSON data")

    def members(self, data: dict[str, Any], shape: Shape | None, at: At, depth: int) -> dict[str, Any]:
        """Read the members of an object that is no tag."""
        found: dict[str, Any] = {}
        for key, item in data.items():
            if key[:1] == "$":
                self.refuse(at, "a tag stands among other keys")
            kind = type(item)
            if kind is str or kind is int or kind is bool or item is None:
                found[key] = item
            else:
                found[key] = self.value(item, None if shape is None else shape.value(key), (at, key, None), depth)
        return found

    def items(self, data: Any, shape: Shape | None, at: At, depth: int) -> list[Any]:
        """Read a list."""
        inner = None if shape is None else shape.item()
        read = self.value
        return [read(item, inner, (at, index, None), depth) for index, item in enumerate(list_of(data))]

    def mapping(self, data: Any, shape: Shape | None, at: At, depth: int) -> dict[Any, Any]:
        """What `Writer.mapping` has written: members as they are, or `$map`."""
        if type(data) is not dict:
            raise ValueError
        members = cast("dict[str, Any]", data)
        if len(members) == 1 and "$map" in members:
            return self.pairs(members["$map"], shape, at, depth)
        if len(members) == 1 and "$redacted" in members:
            return cast("dict[Any, Any]", self.redacted(at))
        return self.members(members, shape, at, depth)

    def pairs(self, data: Any, shape: Shape | None, at: At, depth: int) -> dict[Any, Any]:
        """Read what stands under `$map`."""
        rows: list[Any] = []
        keys = None if shape is None else shape.key()
        for row in list_of(data):
            key, item = list_of(row, 2)
            key = self.value(key, keys, (at, None, None), depth)
            inner = None if shape is None else shape.value(key)
            here = (at, key if isinstance(key, str) else ..., None)
            rows.append((key, self.value(item, inner, here, depth)))
        try:
            found = dict(rows)
        except TypeError:
            if self.strict:
                raise
            return cast("dict[Any, Any]", rows)  # keys of a class that is not known, read as what they hold
        if len(found) != len(data):
            raise ValueError
        return found

    def redacted(self, at: At) -> Redacted:
        """Read a marker."""
        if not self.strict:
            return Redacted()
        raise RedactedValue(place(at), "the value is a secret and was not stored")

    def tagged(self, tag: str, data: Any, shape: Shape | None, at: At, depth: int) -> Any:
        """Read what stands under a tag."""
        if tag == "$redacted":
            return self.redacted(at)
        read = READERS.get(tag)
        if read is None:
            self.refuse(at, "it carries a tag that this version does not know")
        try:
            return read(self, data, shape, at, depth)
        except (Undecodable, RecursionError):
            raise
        except Exception:  # whatever a constructor says to hostile data; its text may hold values
            self.refuse(at, f"what stands under {tag} is not what this version writes")


def _read_int(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> int:
    text = str_of(data)
    number = int(text, 16 if "x" in text else 10)
    if digits(number) != text:
        raise ValueError
    return number


def _number(text: Any) -> float:
    number = float(str_of(text))
    if repr(number) != text:
        raise ValueError
    return number


def _read_complex(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> complex:
    real, imag = list_of(data, 2)
    return complex(_number(real), _number(imag))


def _read_tuple(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> tuple[Any, ...]:
    if shape is None:
        return tuple(r.items(data, None, at, depth))
    return tuple(
        [r.value(item, shape.position(index), (at, index, None), depth) for index, item in enumerate(list_of(data))]
    )


def _read_set(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> set[Any]:
    items = r.items(data, shape, at, depth)
    try:
        found = set(items)
    except TypeError:
        if r.strict:
            raise
        return cast("set[Any]", items)  # elements of a class that is not known, read as what they hold
    if len(found) != len(data):
        raise ValueError
    return found


def _read_frozenset(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> Any:
    found = _read_set(r, data, shape, at, depth)
    return frozenset(found) if type(found) is set else found


def _read_moment(kind: type[Any]) -> _Read:
    def read(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> Any:
        if type(data) is str:
            return _iso(kind, data)
        text, fold, key, name = list_of(data, 4)
        moment = _iso(kind, text)
        if int_of(fold) not in {0, 1}:
            raise ValueError
        zone = moment.tzinfo
        if key is not None:
            if not zone_known(str_of(key)):
                r.refuse(at, "its time zone is not one of this system")
            from zoneinfo import ZoneInfo

            zone = ZoneInfo(key)
        elif name is not None:
            zone = timezone(zone.utcoffset(None), str_of(name))
        return moment.replace(tzinfo=zone, fold=fold)

    return read


def _iso(kind: type[Any], text: Any) -> Any:
    moment = kind.fromisoformat(str_of(text))
    if moment.isoformat() != text:
        raise ValueError
    return moment


def _read_timedelta(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> timedelta:
    days, seconds, microseconds = map(int_of, list_of(data, 3))
    return timedelta(days, seconds, microseconds)


def _read_deque(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> deque[Any]:
    items, limit = list_of(data, 2)
    found = r.items(items, shape, at, depth)
    if limit is not None and int_of(limit) < len(found):
        raise ValueError
    return deque(found, limit)


def _read_range(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> range:
    start, stop, step = (int_of(r.value(part, None, at, depth)) for part in list_of(data, 3))
    return range(start, stop, step)


def _reader_of_text(tag: str) -> _Read:
    module, name = BY_TEXT[tag]

    def read(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> Any:
        from importlib import import_module

        text = str_of(data)
        found = getattr(import_module(module), name)(text)
        if str(found) != text:
            raise ValueError
        return found

    return read


def _read_numpy(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> Any:
    name, plain = list_of(data, 2)
    plain = r.value(plain, None, at, depth)
    if name not in NUMPY or not isinstance(plain, (bool, int, float, complex, str)):
        raise ValueError
    numpy: Any = sys.modules.get("numpy")
    return plain if numpy is None else getattr(numpy, name)(plain)


def _read_digest(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> Any:
    if not r.strict:
        return Redacted()
    reason = data.get("reason") if type(data) is dict else None
    told = reason if isinstance(reason, str) and len(reason) <= 300 and reason.isprintable() else ""
    raise DigestedValue(place(at), "only a digest of the value was stored" + (f" ({told})" if told else ""))


_Read: TypeAlias = Callable[[Reader, Any, Shape | None, At, int], Any]


READERS: Final[dict[str, _Read]] = {
    "$map": lambda r, data, shape, at, depth: r.pairs(data, shape, at, depth),
    "$str": lambda r, data, shape, at, depth: str_of({"$str": data}),
    "$int": _read_int,
    "$float": lambda r, data, shape, at, depth: _number(data),
    "$complex": _read_complex,
    "$bytes": lambda r, data, shape, at, depth: bytes_of(data),
    "$bytearray": lambda r, data, shape, at, depth: bytearray(bytes_of(data)),
    "$tuple": _read_tuple,
    "$set": _read_set,
    "$frozenset": _read_frozenset,
    "$deque": _read_deque,
    "$range": _read_range,
    "$date": lambda r, data, shape, at, depth: _iso(date, data),
    "$datetime": _read_moment(datetime),
    "$time": _read_moment(time),
    "$timedelta": _read_timedelta,
    "$ordereddict": lambda r, data, shape, at, depth: OrderedDict(r.mapping(data, shape, at, depth)),
    "$counter": lambda r, data, shape, at, depth: Counter(r.mapping(data, shape, at, depth)),
    "$mappingproxy": lambda r, data, shape, at, depth: MappingProxyType(r.mapping(data, shape, at, depth)),
    "$namespace": lambda r, data, shape, at, depth: SimpleNamespace(**r.mapping(data, None, at, depth)),
    "$unset": lambda r, data, shape, at, depth: msgspec.UNSET,
    "$credential": lambda r, data, shape, at, depth: Credential(str_of(data)),
    "$numpy": _read_numpy,
    "$digest": _read_digest,
    **{tag: _reader_of_text(tag) for tag in BY_TEXT},
    **{tag: reader_of(tag) for tag in OWN_TAGS},
}
