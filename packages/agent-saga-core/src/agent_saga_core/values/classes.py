"""The program's own classes: how each kind is written, and read into a class that the caller gives."""

# Values here are anything at all, and `type()` of them is unknown to the checker by nature.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import Enum, Flag
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, cast, get_origin

import msgspec

from agent_saga_core.values.hints import Fields, Shape, class_hints, fields_of, pydantic_model, shape_of
from agent_saga_core.values.plain import CACHE, At, class_name, int_of, json_text, str_of

if TYPE_CHECKING:
    from agent_saga_core.values.reading import Reader
    from agent_saga_core.values.writing import Writer

__all__ = ["OWN_TAGS", "own_class", "reader_of"]

_Write: TypeAlias = "Callable[[Writer, Any, Shape | None, At, int], Any]"
_Read: TypeAlias = "Callable[[Reader, Any, Shape | None, At, int], Any]"


class _Plan(msgspec.Struct, frozen=True):
    """How values of one class are written, and read back into it."""

    tag: str
    write: _Write
    read: Callable[[Reader, Any, Any, Any, At, int], Any]


@lru_cache(CACHE)
def own_class(kind: type[Any]) -> _Plan | None:
    """How values of this class are carried; None if they cannot be."""
    if issubclass(kind, Enum):
        return _Plan("$enum", _write_enum, _read_enum)
    if pydantic_model(kind):
        return _Plan("$model", _write_model, _read_model)
    if issubclass(kind, msgspec.Struct):
        return _Plan("$struct", _write_fields("$struct", kind.__struct_fields__, kind), _read_struct)
    if issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
        return _Plan("$namedtuple", _write_namedtuple, _read_namedtuple)
    base = _builtin_base(kind)
    if hasattr(kind, "__dataclass_fields__") and base is object:
        return _Plan("$dataclass", _write_fields("$dataclass", _dataclass_fields(kind), kind), _read_dataclass)
    if kind.__module__.startswith(("pydantic.networks", "pydantic_core")) and hasattr(kind, "unicode_string"):
        return _Plan("$url", _write_url, _read_url)
    if issubclass(kind, defaultdict):
        return None  # holds code besides its members, and from Python 3.12 on looks like a class written in Python
    if base in _BASES and not any(vars(cls).get("__slots__") for cls in kind.__mro__):
        return _Plan("$subclass", _write_subclass, _read_subclass)
    return None


def _builtin_base(kind: type[Any]) -> type[Any] | None:
    """The one base that is not written in Python; None if there are several, and nothing can be rebuilt."""
    fixed = [base for base in kind.__mro__ if not base.__flags__ & (1 << 9)]  # Py_TPFLAGS_HEAPTYPE
    return fixed[0] if fixed[0] is object or fixed[1:] == [object] else None


def _dataclass_fields(kind: type[Any]) -> tuple[str, ...]:
    return tuple([field.name for field in sys.modules["dataclasses"].fields(kind)])


def _field_shape(kind: type[Any], shape: Shape | None) -> Fields:
    """The annotations of the fields, by the value's own class and the arguments that the hint gives it."""
    if shape is not None:
        for hint in shape.classes:
            if get_origin(hint) is kind:
                return fields_of(hint)
    return fields_of(kind)


def _attributes(value: Any, fields: Iterable[str]) -> dict[str, Any]:
    """What the instance holds besides its fields. Cached properties are left to be computed again."""
    held: dict[str, Any] = getattr(value, "__dict__", {})
    if not held:
        return held
    kind: type[Any] = type(value)
    return {
        name: item
        for name, item in held.items()
        if name not in fields
        and not (name.startswith("__") and name.endswith("__"))
        and type(getattr(kind, name, None)).__name__ != "cached_property"
    }


def _write_fields(tag: str, names: tuple[str, ...], kind: type[Any]) -> _Write:
    aliases: dict[str, str] = {}
    if tag == "$struct":
        renamed = zip(names, cast("Any", kind).__struct_encode_fields__, strict=True)
        aliases = {name: alias for name, alias in renamed if alias != name}
    known = frozenset(names)

    def write(w: Writer, value: Any, shape: Shape | None, at: At, depth: int) -> Any:
        try:
            held = {name: getattr(value, name) for name in names}
        except AttributeError:
            w.refuse(value, at, "one of its fields is not set")
        row = [class_name(kind), w.mapping(held, _field_shape(kind, shape), at, depth, aliases)]
        if more := _attributes(value, known):
            row.append({"attributes": w.mapping(more, None, at, depth)})
        return {tag: row}

    return write


def _write_namedtuple(w: Writer, value: Any, shape: Shape | None, at: At, depth: int) -> Any:
    kind: type[Any] = type(value)
    names: tuple[str, ...] = value._fields
    if tuple.__len__(value) != len(names) or _attributes(value, ()):
        w.refuse(value, at, "it holds something else than its fields")
    held = dict(zip(names, tuple.__iter__(value), strict=True))
    return {"$namedtuple": [class_name(kind), w.mapping(held, _field_shape(kind, shape), at, depth)]}


def _write_model(w: Writer, value: Any, shape: Shape | None, at: At, depth: int) -> Any:
    kind: type[Any] = type(value)
    declared: dict[str, Any] = cast("Any", kind).model_fields
    held: dict[str, Any] = {name: vars(value)[name] for name in declared if name in vars(value)}
    if len(held) != len(declared):
        w.refuse(value, at, "one of its fields is not set")
    aliases = {name: field.alias for name, field in declared.items() if field.alias}
    row = [class_name(kind), w.mapping(held, _field_shape(kind, shape), at, depth, aliases)]
    more: dict[str, Any] = {}
    extra: dict[str, Any] = value.__pydantic_extra__ or {}
    if extra:
        more["extra"] = w.mapping(extra, None, at, depth)
    if value.__pydantic_private__:
        more["private"] = w.mapping(value.__pydantic_private__, Fields(class_hints(kind)), at, depth)
    if value.__pydantic_fields_set__ != {*held, *extra}:
        more["set"] = [json_text(name) for name in sorted(value.__pydantic_fields_set__)]
    return {"$model": [*row, more] if more else row}


def _write_enum(w: Writer, value: Any, shape: Shape | None, at: At, depth: int) -> Any:
    kind: type[Any] = type(value)
    if isinstance(value, Flag):
        return {"$enum": [class_name(kind), w.value(value.value, None, at, depth)]}
    if cast("Any", kind).__members__.get(value.name) is not value:
        w.refuse(value, at, "it is not one of the members of its Enum")
    row = [class_name(kind), json_text(value.name)]
    if type(value.value) in {str, int}:  # what readers without the class can make of it
        row.append({"value": w.value(value.value, None, at, depth)})
    return {"$enum": row}


def _write_url(w: Writer, value: Any, shape: Shape | None, at: At, depth: int) -> Any:
    return {"$url": [class_name(type(value)), json_text(value.unicode_string())]}


_BASES: Final[dict[Any, Callable[[Any], Any]]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: lambda value: bytes(memoryview(value)),
    list: lambda value: [*list.__iter__(value)],
    tuple: lambda value: (*tuple.__iter__(value),),
    set: lambda value: {*set.__iter__(value)},
    frozenset: lambda value: frozenset([*frozenset.__iter__(value)]),
    dict: lambda value: dict(dict.items(value)),
}
"""What a subclass of a builtin holds, past whatever methods it overrides."""


def _write_subclass(w: Writer, value: Any, shape: Shape | None, at: At, depth: int) -> Any:
    kind: type[Any] = type(value)
    plain = _BASES[_builtin_base(kind)](value)
    row = [class_name(kind), w.value(plain, shape_of(kind) if shape is None else shape, at, depth)]
    if more := _attributes(value, ()):
        row.append({"attributes": w.mapping(more, Fields(class_hints(kind)), at, depth)})
    return {"$subclass": row}


_SCRIPTS: Final = frozenset({"__main__", "__mp_main__"})


def _same_class(recorded: str, kind: type) -> bool:
    """Whether a recorded name means this class. A script's module has another name where it is imported."""
    if recorded == class_name(kind):
        return True
    suffix = f".{kind.__qualname__}"
    if not recorded.endswith(suffix):
        return False
    return kind.__module__ in _SCRIPTS or recorded.removesuffix(suffix) in _SCRIPTS


def reader_of(tag: str) -> _Read:
    """What reads one of `OWN_TAGS`: finds the class among those that the annotation gives."""

    def read(r: Reader, data: Any, shape: Shape | None, at: At, depth: int) -> Any:
        if type(data) is not list or len(cast("list[Any]", data)) not in {2, 3}:
            raise ValueError
        name, state, *more = cast("list[Any]", data)
        recorded = str_of(name)
        hints = [] if shape is None else shape.classes
        kinds: list[tuple[Any, type[Any]]] = [(hint, get_origin(hint) or hint) for hint in hints]
        found = [pair for pair in kinds if _same_class(recorded, pair[1])]
        found.sort(key=lambda pair: recorded != class_name(pair[1]))
        for hint, kind in found:
            plan = own_class(kind)
            if plan is not None and plan.tag == tag:
                return plan.read(r, hint, state, more[0] if more else {}, at, depth)
        if not r.strict:
            return _plainly(r, tag, state, more[0] if more else {}, at, depth)
        given = ", ".join(sorted({class_name(kind) for _, kind in kinds})) or "no class"
        shown = recorded if len(recorded) <= 200 and recorded.isprintable() else "unnamed"
        r.refuse(
            at,
            f"it is a {tag[1:]} of the class {shown!r}, and the annotation gives {given}. "
            "Annotate the value with that class, such as result_type=... or the parameter of the compensator",
        )

    return read


OWN_TAGS: Final = frozenset({"$enum", "$model", "$struct", "$namedtuple", "$dataclass", "$url", "$subclass"})


def _plainly(r: Reader, tag: str, state: Any, more: Any, at: At, depth: int) -> Any:
    """What a value of an unknown class holds: its fields, an Enum member's value, a subclass's builtin."""
    if tag == "$enum" and "value" in more:
        return r.value(more["value"], None, at, depth)
    plain = r.value(state, None, at, depth)
    return {**plain, **r.mapping(more["extra"], None, at, depth)} if "extra" in more else plain


def _read_state(
    r: Reader,
    hint: Any,
    state: Any,
    names: Iterable[str],
    defaults: Callable[[str], Any],
    at: At,
    depth: int,
) -> dict[str, Any]:
    """The fields, all of them and no others; those that the class has gained since take their defaults."""
    held = r.mapping(state, fields_of(hint), at, depth)
    names = tuple(names)
    if not held.keys() <= set(names):
        r.refuse(at, f"the class {class_name(get_origin(hint) or hint)!r} no longer has one of its fields")
    try:
        return {name: held[name] if name in held else defaults(name) for name in names}
    except LookupError:
        r.refuse(at, f"the class {class_name(get_origin(hint) or hint)!r} has a field that was not stored")


def _no_default(name: str) -> NoReturn:
    raise LookupError(name)


def _set_attributes(r: Reader, value: Any, kind: type[Any], more: Any, at: At, depth: int) -> None:
    if more:
        value.__dict__.update(r.mapping(more["attributes"], Fields(class_hints(kind)), at, depth))


def _read_dataclass(r: Reader, hint: Any, state: Any, more: Any, at: At, depth: int) -> Any:
    kind: type[Any] = get_origin(hint) or hint
    declared: dict[str, Any] = cast("Any", kind).__dataclass_fields__
    missing: Any = sys.modules["dataclasses"].MISSING

    def default(name: str) -> Any:
        field = declared[name]
        if field.default is not missing:
            return field.default
        return _no_default(name) if field.default_factory is missing else field.default_factory()

    fields = _read_state(r, hint, state, _dataclass_fields(kind), default, at, depth)
    value = object.__new__(kind)
    for name, item in fields.items():
        object.__setattr__(value, name, item)
    _set_attributes(r, value, kind, more, at, depth)
    return value


def _read_struct(r: Reader, hint: Any, state: Any, more: Any, at: At, depth: int) -> Any:
    from msgspec.structs import FieldInfo, fields, force_setattr

    kind: type[Any] = get_origin(hint) or hint
    declared: dict[str, FieldInfo] = {}

    def default(name: str) -> Any:
        declared.update({} if declared else {field.name: field for field in fields(kind)})
        field = declared[name]
        if field.default is not msgspec.NODEFAULT:
            return field.default
        return _no_default(name) if field.default_factory is msgspec.NODEFAULT else field.default_factory()

    found = _read_state(r, hint, state, kind.__struct_fields__, default, at, depth)
    value: Any = kind(**found)
    if hasattr(kind, "__post_init__"):
        for name, item in found.items():
            force_setattr(value, name, item)
    _set_attributes(r, value, kind, more, at, depth)
    return value


def _read_namedtuple(r: Reader, hint: Any, state: Any, more: Any, at: At, depth: int) -> Any:
    kind: Any = get_origin(hint) or hint
    fields = _read_state(r, hint, state, kind._fields, kind._field_defaults.__getitem__, at, depth)
    return tuple.__new__(kind, fields.values())


def _read_model(r: Reader, hint: Any, state: Any, more: Any, at: At, depth: int) -> Any:
    kind: Any = hint
    declared: dict[str, Any] = kind.model_fields

    def default(name: str) -> Any:
        field = declared[name]
        return _no_default(name) if field.is_required() else field.get_default(call_default_factory=True)

    fields = _read_state(r, hint, state, declared, default, at, depth)
    private: dict[str, Any] | None = None
    if kind.__private_attributes__:
        undefined = sys.modules["pydantic_core"].PydanticUndefined
        fresh = {name: item.get_default() for name, item in kind.__private_attributes__.items()}
        private = {name: item for name, item in fresh.items() if item is not undefined}
    if "private" in more:
        private = {**(private or {}), **r.mapping(more["private"], Fields(class_hints(kind)), at, depth)}
        if not private.keys() <= kind.__private_attributes__.keys():
            raise ValueError
    extra = r.mapping(more.get("extra", {}), None, at, depth)
    allowed = kind.model_config.get("extra") == "allow"
    if extra and not allowed:
        raise ValueError
    value = kind.__new__(kind)
    value.__setstate__(
        {
            "__dict__": fields,
            "__pydantic_extra__": extra if allowed else None,
            "__pydantic_fields_set__": set(map(str_of, more["set"])) if "set" in more else {*state, *extra},
            "__pydantic_private__": private,
        }
    )
    return value


def _read_enum(r: Reader, hint: Any, state: Any, more: Any, at: At, depth: int) -> Any:
    if issubclass(hint, Flag):
        return hint(int_of(r.value(state, None, at, depth)))
    try:
        return hint.__members__[str_of(state)]
    except KeyError:
        r.refuse(at, f"the Enum {class_name(hint)!r} no longer has that member")


def _read_url(r: Reader, hint: Any, state: Any, more: Any, at: At, depth: int) -> Any:
    return hint(str_of(state))


def _read_subclass(r: Reader, hint: Any, state: Any, more: Any, at: At, depth: int) -> Any:
    kind: Any = get_origin(hint) or hint
    base: Any = _builtin_base(kind)
    plain = r.value(state, shape_of(hint), at, depth)
    if type(plain) is not base:
        raise ValueError
    if base in {list, dict, set}:
        value = base.__new__(kind)
        {list: list.extend, dict: dict.update, set: set.update}[base](value, plain)
    else:
        value = base.__new__(kind, plain)
    _set_attributes(r, value, kind, more, at, depth)
    return value
