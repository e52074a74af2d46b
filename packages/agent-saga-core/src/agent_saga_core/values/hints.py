"""Type annotations, read once: what they mark as secret, and which classes they name."""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, Final, ForwardRef, TypeVar, cast

from agent_saga_core.values.redaction import SecretMark, is_secret_type

__all__ = ["Fields", "Shape", "class_hints", "field_hints", "fields_of", "marks_secret", "pydantic_model", "shape_of"]

_NOTHING_TO_SAY: Final[frozenset[Any]] = frozenset({
    Any, object, type(None), None, str, int, float, bool, bytes, bytearray, complex,
    list, dict, tuple, set, frozenset,
})  # fmt: skip
_WRAPPERS: Final = frozenset(
    getattr(typing, name, None) for name in ("Required", "NotRequired", "ReadOnly", "Final", "ClassVar")
) - {None}
_OWN_MODULES: Final = frozenset({"builtins", "collections", "collections.abc", "typing", "types"})
_CACHE: Final = 4096
_UNIONS: Final = (typing.Union, types.UnionType)
_SECRET_WORD: Final = re.compile(r"\bSecret\b")
_UNSET: Final[Any] = object()
R = TypeVar("R")


class Shape:
    """What is known of a value from annotations; this one knows nothing.

    Attributes:
        secret: The value is marked secret as a whole.
        classes: The classes that the annotation names, each as written (`Order`, `Box[Item]`).
    """

    __slots__ = ()

    secret: bool = False
    classes: Sequence[Any] = ()

    def item(self) -> Shape | None:
        """The shape of an element of a list, set or deque."""

    def position(self, index: int) -> Shape | None:
        """The shape of a tuple's element."""

    def key(self) -> Shape | None:
        """The shape of a mapping's keys."""

    def value(self, name: object) -> Shape | None:
        """The shape of what a mapping holds under `name`."""


class Annotation(Shape):
    """What one annotation says. Children are worked out when first asked for, so recursive types are fine."""

    __slots__ = ("_cache", "_classes", "_items", "_keys", "_positions", "_records", "_values", "secret")

    def __init__(self, hints: Iterable[Any]) -> None:
        self.secret = False
        self._classes: list[Any] = []
        self._items: list[Any] = []
        self._positions: list[tuple[Any, ...]] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._records: list[Any] = []
        self._cache: dict[Any, Shape | None] = {}
        for hint in self._alternatives(list(hints)):
            self._read(hint)

    @property
    def classes(self) -> Sequence[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Shape`."""
        return self._classes

    @property
    def empty(self) -> bool:
        """Whether it says nothing at all."""
        return not (
            self.secret
            or self._classes
            or self._items
            or self._positions
            or self._keys
            or self._values
            or self._records
        )

    def item(self) -> Shape | None:
        """The shape of an element of a list, set or deque."""
        return self._child("item", lambda: [*self._items, *(hint for row in self._positions for hint in row)])

    def position(self, index: int) -> Shape | None:
        """The shape of a tuple's element."""
        return self._child(index, lambda: [*self._items, *(row[index] for row in self._positions if index < len(row))])

    def key(self) -> Shape | None:
        """The shape of a mapping's keys."""
        return self._child("key", lambda: self._keys)

    def value(self, name: object) -> Shape | None:
        """The shape of what a mapping holds under `name`."""
        if not self._records:
            return self._child("value", lambda: self._values)
        named = [found[name] for found in map(field_hints, self._records) if isinstance(name, str) and name in found]
        return _joined([*self._values, *named])

    def _child(self, name: object, hints: Callable[[], list[Any]]) -> Shape | None:
        found: Any = self._cache.get(name, _UNSET)
        if found is _UNSET:
            found = self._cache[name] = _joined(hints())
        return found

    def _alternatives(self, todo: list[Any]) -> Iterable[Any]:
        """Members of unions, without the wrappings that do not change what the value is."""
        for _ in range(1000):  # an alias can name itself
            if not todo:
                return
            hint = todo.pop(0)
            origin = typing.get_origin(hint)
            if origin is Annotated:
                self.secret = self.secret or any(isinstance(mark, SecretMark) for mark in hint.__metadata__)
                todo.insert(0, hint.__origin__)
            elif origin in _UNIONS:
                todo[:0] = hint.__args__
            elif origin in _WRAPPERS:
                todo.insert(0, hint.__args__[0])
            elif origin is typing.Literal:
                todo[:0] = [type(member) for member in hint.__args__ if isinstance(member, Enum)]
            elif isinstance(hint, (str, ForwardRef)):
                # Not resolved. Rather one value too few in the log than one secret too many.
                self.secret = self.secret or _SECRET_WORD.search(str(hint)) is not None
            elif isinstance(hint, TypeVar):
                todo[:0] = hint.__constraints__ or (hint.__bound__,)
            elif hasattr(hint, "__supertype__"):
                todo.insert(0, hint.__supertype__)
            elif type(hint).__name__ == "TypeAliasType":
                todo.insert(0, hint.__value__)
            elif type(origin).__name__ == "TypeAliasType":
                meaning: Any = origin
                todo.insert(
                    0,
                    _substitute(meaning.__value__, dict(zip(meaning.__type_params__, hint.__args__, strict=False))),
                )
            else:
                yield hint

    def _read(self, hint: Any) -> None:
        origin: Any = typing.get_origin(hint) or hint
        if _says_nothing(hint) or not isinstance(origin, type):
            return
        kind = cast("type[Any]", origin)
        if is_secret_type(kind):
            self.secret = True
        if typing.is_typeddict(kind):
            self._records.append(hint)
            return
        self._read_contents(kind, typing.get_args(hint))
        if kind.__module__ not in _OWN_MODULES:
            self._classes.append(hint)
            for base in getattr(kind, "__orig_bases__", ()):  # class Orders(list[Order])
                if isinstance(container := typing.get_origin(base), type):
                    self._read_contents(cast("type[Any]", container), typing.get_args(base))

    def _read_contents(self, kind: type[Any], args: tuple[Any, ...]) -> None:
        if not args or all(_says_nothing(arg) for arg in args):
            return
        if issubclass(kind, Mapping):
            self._keys.append(args[0])
            self._values.extend(args[1:2])
        elif kind is tuple and args[-1] is not Ellipsis:
            self._positions.append(args)
        elif issubclass(kind, Iterable) and kind.__module__ in _OWN_MODULES:
            self._items.append(args[0])


class Fields(Shape):
    """The shape of something whose members are annotated one by one: arguments, or the fields of a class."""

    __slots__ = ("_annotations",)

    def __init__(self, annotations: Mapping[str, Any]) -> None:
        self._annotations = annotations

    def value(self, name: object) -> Shape | None:
        """The shape of the member `name`."""
        return shape_of(self._annotations.get(cast("str", name)))


def marks_secret(hints: Mapping[str, Any], segments: Iterable[str | int]) -> bool:
    """Whether annotations mark as secret what `segments` lead to, or something on the way there."""
    shapes: list[Shape] = [Fields(hints)]
    for segment in segments:
        found: list[Shape | None] = []
        for shape in shapes:
            if isinstance(segment, int):
                found.append(shape.position(segment) if segment >= 0 else shape.item())
            else:
                found.append(shape.value(segment))
                found.extend(fields_of(kind).value(segment) for kind in shape.classes)
        shapes = [shape for shape in found if shape is not None]
        if any(shape.secret for shape in shapes):
            return True
    return False


def _says_nothing(hint: Any) -> bool:
    try:
        return hint is Ellipsis or hint in _NOTHING_TO_SAY
    except TypeError:  # Annotated with metadata that has no hash
        return False


def _joined(hints: Iterable[Any]) -> Shape | None:
    hints = list(hints)
    if not hints:
        return None
    if len(hints) == 1:
        return shape_of(hints[0])
    shape = Annotation(hints)
    return None if shape.empty else shape


def shape_of(hint: Any) -> Shape | None:
    """The shape of an annotation; None if it says nothing that matters here. Remembered per annotation."""
    return None if hint is None else _read_hint(hint)


def _per_hint(read: Callable[[Any], R]) -> Callable[[Any], R]:
    """Remember what was read. Annotations without a hash (some metadata has none) are read anew each time."""
    remembered = lru_cache(_CACHE)(read)

    def known(hint: Any) -> R:
        try:
            return remembered(hint)
        except TypeError:
            return read(hint)

    return known


@_per_hint
def _read_hint(hint: Any) -> Shape | None:
    if _says_nothing(hint):
        return None
    shape = Annotation((hint,))
    return None if shape.empty else shape


# --- the fields of a class ----------------------------------------------------------------------------------


def pydantic_model(kind: type) -> bool:
    """Whether the class is a pydantic v2 model. Imports nothing: if pydantic is not loaded, it is none."""
    pydantic = sys.modules.get("pydantic.main")
    return pydantic is not None and issubclass(kind, pydantic.BaseModel)


@_per_hint
def field_hints(hint: Any) -> Mapping[str, Any]:
    """Annotations by field name of a class, or of a generic one with its arguments (`Box[Item]`)."""
    kind: type[Any] = typing.get_origin(hint) or hint
    found = class_hints(kind)
    if pydantic_model(kind):
        # `Box[Item].__annotations__` still says T. Pydantic knows better, and keeps marks apart from types.
        for name, field in cast("Any", kind).model_fields.items():
            marked = any(isinstance(mark, SecretMark) for mark in field.metadata)
            found[name] = Annotated[field.annotation, SecretMark()] if marked else field.annotation
    meanings = _meanings(hint)
    return {name: _substitute(annotation, meanings) for name, annotation in found.items()}


@_per_hint
def fields_of(hint: Any) -> Fields:
    """`field_hints` as a shape."""
    return Fields(field_hints(hint))


def class_hints(kind: type[Any]) -> dict[str, Any]:
    """Annotations of a class and its bases, strings resolved as far as they can be."""
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except Exception:  # a name that only type checkers import; the others can still be read
        found: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            module = vars(sys.modules.get(base.__module__, types))
            for name, annotation in vars(base).get("__annotations__", {}).items():
                found[name] = _annotation(annotation, module, dict(vars(base)))
        return found


def _annotation(annotation: Any, module: dict[str, Any], names: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, module, names, include_extras=True)["it"]
    except Exception:
        # Rather one value too few in the log than one secret too many.
        return Annotated[Any, SecretMark()] if _SECRET_WORD.search(annotation) else Any


def _meanings(hint: Any) -> dict[Any, Any]:
    """What each type variable stands for in `Box[Item]`, and in the generic bases of `IntBox(Box[int])`."""
    kind: Any = typing.get_origin(hint) or hint
    found = dict(zip(getattr(kind, "__parameters__", ()), typing.get_args(hint), strict=False))
    for base in getattr(kind, "__orig_bases__", ()):
        if typing.get_origin(base) in {None, typing.Generic, typing.Protocol}:
            continue
        for variable, meaning in _meanings(base).items():
            found.setdefault(variable, _substitute(meaning, found))
    return found


def _substitute(hint: Any, meanings: Mapping[Any, Any]) -> Any:
    if not meanings:
        return hint
    if isinstance(hint, TypeVar):
        return meanings.get(hint, hint)
    parameters: tuple[Any, ...] = getattr(hint, "__parameters__", ())
    if not parameters or isinstance(hint, type):
        return hint
    return hint[tuple([meanings.get(parameter, parameter) for parameter in parameters])]
