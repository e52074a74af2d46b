"""What code can reach: a look at a function's closure, names and defaults, without running anything.

Every attribute is read from where the interpreter keeps it, never through the object: a property, a `__getattr__` or
a lazy proxy of the user's is not woken.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from itertools import islice
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final, TypeAlias, TypeGuard, cast

__all__ = ["reach"]

MAX_OBJECTS: Final = 50_000
"""Objects after which a scan ends: a module that holds a data set is no reason to take a minute."""
MAX_DEPTH: Final = 12
"""Functions that call each other, objects in objects: how deep the scan follows."""
MAX_ITEMS: Final = 1_000
"""Elements of one container that are looked at."""

Found: TypeAlias = Iterator[tuple[str, object]]
_MISSING: Final = object()
_SEQUENCES: Final[tuple[Any, ...]] = (list, tuple, set, frozenset)
_STDLIB: Final = os.path.dirname(os.__file__) + os.sep
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

# The interpreter's own ways to an object's attributes; a class can put something else in front of each.
_mro: Final[Callable[[type], tuple[type, ...]]] = type.__dict__["__mro__"].__get__
_class_dict: Final[Callable[[type], Mapping[str, object]]] = type.__dict__["__dict__"].__get__


def reach(fn: object) -> Found:
    """Everything that a callable can reach, as far as that shows without running it; each object once.

    Looked at are its closure, the globals and builtins that it names (in nested functions, too), what it names in
    modules, classes and objects found so far, its defaults, the arguments of a `functools.partial`, the attributes of
    the object that a method is bound to, the elements of lists, tuples, sets and dicts, and the same of the functions
    that it may call. Only the user's own functions are followed; of an installed library's, the closure alone, where
    decorators keep what they wrap. What carries a saga declaration is found and not followed: what it calls is part of
    its step.

    It can add to what is known and never proves that this is all: imports inside of functions, registries, `getattr`
    with a computed name and arguments of a call are not seen; and a name may be found that is never used.

    Args:
        fn: A function, method, partial, class or callable object.

    Yields:
        How the object is reached, such as `"closure:tools[0]"` or `"global:pay/global:charge"`, and the object.
    """
    return _Scan().run(fn)


class _Scan:
    """One scan: what was seen, and what is still to be looked at, nearest first."""

    def __init__(self) -> None:
        self.seen: dict[int, object] = {}  # by identity; holds what it has seen, so that no id is used twice
        self.followed: set[tuple[int, int]] = set()  # (function, owner)
        self.looked: set[tuple[int, frozenset[str]]] = set()  # (object, the names it was searched for)
        self.queue: deque[tuple[str, object, frozenset[str], int]] = deque()

    def run(self, root: object) -> Found:
        self.seen[id(root)] = root
        yield from self.follow("", root, 0, whole=True)
        while self.queue and len(self.seen) < MAX_OBJECTS:
            path, found, names, depth = self.queue.popleft()
            fresh = id(found) not in self.seen
            if fresh:
                self.seen[id(found)] = found
                yield path, found
            if depth < MAX_DEPTH:
                if fresh and not _is_declared(found):
                    yield from self.follow(path, found, depth + 1)
                self.look_inside(path, found, names, depth + 1)

    def add(self, path: str, found: object, names: frozenset[str], depth: int) -> None:
        if len(self.queue) < MAX_OBJECTS:
            self.queue.append((path, found, names, depth))

    def follow(self, path: str, fn: object, depth: int, *, whole: bool = False) -> Found:
        """Look at what calling `fn` would run."""
        kind = type(fn)
        if issubclass(kind, MethodType):
            yield from self.method(path, cast(MethodType, fn), depth, whole=whole)
        elif issubclass(kind, FunctionType):
            self.function(path, cast(FunctionType, fn), depth, whole=whole)
        elif issubclass(kind, partial):
            self.partial(path, cast("partial[Any]", fn), depth)
        else:
            yield from self.other(path, fn, depth, whole=whole)

    def function(self, path: str, fn: FunctionType, depth: int, *, whole: bool = False) -> None:
        names = _names_in(fn.__code__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.add(_join(path, f"closure:{name}"), content, names, depth)
        if not (whole or _is_users(fn.__globals__)):
            return
        for name, default in _defaults(fn):
            self.add(_join(path, f"default:{name}"), default, names, depth)
        for name in sorted(names):
            for kind, place in (("global", fn.__globals__), ("builtin", fn.__builtins__)):
                found = _held(place, name)
                if found is not _MISSING:
                    self.add(_join(path, f"{kind}:{name}"), found, names, depth)
                    break

    def method(self, path: str, fn: MethodType, depth: int, *, whole: bool) -> Found:
        bound = fn.__self__
        yield from self.bound(path, bound, depth, whole=whole)
        inner: object = fn.__func__
        if type(inner) is FunctionType:
            self.function(path, inner, depth, whole=whole)
            self.look_inside(_join(path, "self"), bound, _names_in(inner.__code__), depth)
        else:
            yield from self.follow(path, inner, depth, whole=whole)

    def bound(self, path: str, bound: object, depth: int, *, whole: bool) -> Found:
        """All attributes of the object that a method belongs to."""
        if id(bound) not in self.seen:
            self.seen[id(bound)] = bound
            yield _join(path, "self"), bound
        if whole or _is_users_object(bound):
            for name, value in _attributes(bound):
                self.add(_join(path, f"self.{name}"), value, frozenset(), depth)

    def partial(self, path: str, fn: partial[Any], depth: int) -> None:
        self.add(_join(path, "partial:func"), _part(partial, "func", fn), frozenset(), depth)
        for n, value in enumerate(_part(partial, "args", fn)):
            self.add(_join(path, f"partial:{n}"), value, frozenset(), depth)
        for name, value in _named(_part(partial, "keywords", fn)):
            self.add(_join(path, f"partial:{name}"), value, frozenset(), depth)

    def other(self, path: str, fn: object, depth: int, *, whole: bool) -> Found:
        """Classes, callable objects, and objects that stand around a function: `lru_cache`, `property`."""
        for label, inner in _wrapped_in(fn):
            self.add(_join(path, label), inner, frozenset(), depth)
        if issubclass(type(fn), type):
            kind = cast("type[Any]", fn)
            if whole or _is_users_class(kind):
                for name in ("__new__", "__init__"):
                    self.add_method(_join(path, name), None, _in_class(kind, name), depth, whole=whole)
            return
        call = _in_class(type(fn), "__call__")
        if _function_in(call) is not None and (whole or _is_users_object(fn)):
            yield from self.bound(path, fn, depth, whole=whole)
            self.add_method(path, fn, call, depth, whole=whole)

    def add_method(self, path: str, owner: object | None, member: object, depth: int, *, whole: bool = False) -> None:
        """Follow a function of a class's body as a method of `owner`."""
        fn = _function_in(member)
        if fn is None or (id(fn), id(owner)) in self.followed:
            return
        self.followed.add((id(fn), id(owner)))
        if whole or _is_users(fn.__globals__):
            self.function(path, fn, depth, whole=whole)
            if owner is not None:
                self.look_inside(_join(path, "self"), owner, _names_in(fn.__code__), depth)

    def look_inside(self, path: str, found: object, names: frozenset[str], depth: int) -> None:
        """Elements of a container; of a module, class or object of the user's what the code names in it."""
        if (id(found), names) in self.looked:
            return
        self.looked.add((id(found), names))
        kind = type(found)
        for label, item in _items(found):
            self.add(f"{path}{label}", item, names, depth)
        if not names or _is_declared(found):
            return
        if issubclass(kind, ModuleType):
            place: Mapping[str, object] = _instance_dict(found)
            for name in sorted(names & place.keys()):
                self.add(f"{path}.{name}", place[name], names, depth)
        elif issubclass(kind, type):
            if _is_users_class(cast("type[Any]", found)):
                self.members(path, found, cast("type[Any]", found), names, depth)
        elif _is_users_object(found):
            for name, value in _attributes(found):
                if name in names:
                    self.add(f"{path}.{name}", value, names, depth)
            self.members(path, found, kind, names, depth)

    def members(self, path: str, owner: object, kind: type[Any], names: frozenset[str], depth: int) -> None:
        """What the code names in a class: attributes, and methods as those of `owner`."""
        for name in sorted(names):
            member = _in_class(kind, name)
            if member is _MISSING:
                continue
            if _function_in(member) is None or _is_declared(member):
                self.add(f"{path}.{name}", member, names, depth)
            else:
                self.add_method(f"{path}.{name}", owner, member, depth)


def _join(path: str, label: str) -> str:
    return f"{path}/{label}" if path else label


def _names_in(code: CodeType) -> frozenset[str]:
    """The names of globals, builtins and attributes in a function and in those that stand in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return frozenset(names)


def _defaults(fn: FunctionType) -> Iterator[tuple[str, object]]:
    positional = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    defaults = fn.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=False)
    yield from _named(fn.__kwdefaults__ or {})


def _held(namespace: dict[str, object], name: str) -> object:
    return dict[str, object].get(namespace, name, _MISSING)


def _named(namespace: dict[Any, object]) -> Iterator[tuple[str, object]]:
    """What a namespace holds, by plain names: a subclass of `str` may have a mind of its own."""
    for name, value in list(dict[Any, object].items(namespace)):
        if issubclass(type(name), str):
            yield str.__str__(name), value


def _items(found: object) -> Iterator[tuple[str, object]]:
    """The elements of a container, by its base class: an overridden `__iter__` is the user's code."""
    kind = type(found)
    try:
        if issubclass(kind, dict):
            pairs = list(islice(dict[object, object].items(cast("dict[object, object]", found)), MAX_ITEMS))
            for n, (key, item) in enumerate(pairs):
                yield f"[{key!r}]" if type(key) in (str, int) else f"[{n}]", item
            return
        for base in _SEQUENCES:
            if issubclass(kind, base):
                items: list[object] = list(islice(base.__iter__(found), MAX_ITEMS))
                yield from ((f"[{n}]", item) for n, item in enumerate(items))
                return
    except RuntimeError:  # another thread is filling it
        return


def _part(kind: type, name: str, found: object) -> Any:
    """A member of a built-in type, whatever a subclass put in front of it."""
    return _class_dict(kind)[name].__get__(found)  # type: ignore[attr-defined]


def _instance_dict(found: object) -> dict[str, object]:
    """The attributes that the object itself holds; empty if its class hides them."""
    for kind in _mro(type(found)):
        shown = _class_dict(kind).get("__dict__", _MISSING)
        if shown is not _MISSING and type(shown) is not GetSetDescriptorType:
            # A class that answers for `__dict__` itself; a module's is a member of its C structure.
            if type(shown) is not MemberDescriptorType:
                return {}
    try:
        attributes: dict[str, object] = object.__getattribute__(found, "__dict__")
    except AttributeError:
        return {}
    return attributes if type(attributes) is dict else {}


def _attributes(found: object) -> Iterator[tuple[str, object]]:
    """Attributes of an object: those in its dict and in its slots."""
    yield from list(_named(_instance_dict(found)))[:MAX_ITEMS]
    for kind in _mro(type(found)):
        for name, member in list(_class_dict(kind).items()):
            if type(member) is MemberDescriptorType and name != "__dict__":
                try:
                    yield name, member.__get__(found)
                except AttributeError:  # a slot that was never filled
                    continue


def _in_class(kind: type, name: str) -> object:
    """What a class's body, or that of one of its bases, says of a name; no descriptor is asked."""
    return next((_class_dict(base)[name] for base in _mro(kind) if name in _class_dict(base)), _MISSING)


def _wrapped_in(found: object) -> Iterator[tuple[str, object]]:
    kind = type(found)
    if issubclass(kind, staticmethod):
        yield "func", _part(staticmethod, "__func__", found)
    elif issubclass(kind, classmethod):
        yield "func", _part(classmethod, "__func__", found)
    elif issubclass(kind, property):
        yield "get", _part(property, "fget", found)
    elif issubclass(kind, cached_property):
        yield "get", _instance_dict(found).get("func")
    wrapped = _instance_dict(found).get("__wrapped__", _MISSING)
    if wrapped is not _MISSING:
        yield "wrapped", wrapped


def _function_in(member: object) -> FunctionType | None:
    """The function that stands in a class's body, also as a static or class method, or behind a property."""
    if type(member) is FunctionType:
        return member
    for _, inner in _wrapped_in(member):
        if type(inner) is FunctionType:
            return inner
    return None


def _is_declared(found: object) -> bool:
    """Whether it carries a saga declaration."""
    if "__agent_saga__" in _instance_dict(found):
        return True
    return any("__agent_saga__" in _class_dict(kind) for kind in _mro(type(found)))


def _is_users_object(found: object) -> bool:
    return _is_users_class(type(found))


def _is_users_class(kind: type) -> bool:
    """Whether a class, not one of its bases, is defined in a module of the user's."""
    name = _class_dict(kind).get("__module__")
    module = sys.modules.get(name) if _is_text(name) else None
    if module is None:
        return _is_text(name) and _root(name) not in sys.stdlib_module_names
    return _is_users(_instance_dict(module))


def _is_users(namespace: dict[str, object]) -> bool:
    """Whether a module, given by its namespace, is the user's own: not installed, not Python's, not ours."""
    name, file = _held(namespace, "__name__"), _held(namespace, "__file__")
    if _is_text(name) and _root(name) == "agent_saga_core":
        return False
    if _is_text(file):
        return not file.startswith(_STDLIB) and not any(part in file for part in _INSTALLED)
    return not (_is_text(name) and _root(name) in sys.stdlib_module_names)


def _is_text(found: object) -> TypeGuard[str]:
    return type(found) is str


def _root(module: str) -> str:
    return module.partition(".")[0]
