"""Compensators and probes by name: how another process finds the function that finishes a saga.

Names are the only thing a log holds of a function. A process that recovers must import the modules that register
them; distributions announce theirs through the entry point group `agent_saga.handlers` (each entry point is loaded,
which imports its module, the first time a name is missing).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from types import FunctionType
from typing import Any, TypeVar, get_type_hints

from agent_saga_core.errors import DeclarationError

__all__ = [
    "Compensator",
    "Probe",
    "accepts_key",
    "annotations_of",
    "compensator",
    "compensator_named",
    "compensator_of",
    "is_duration",
    "isolated_registry",
    "pair_inverse",
    "paired_inverse",
    "probe",
    "probe_named",
    "probe_of",
]

F = TypeVar("F", bound=Callable[..., Any])

ENTRY_POINT_GROUP = "agent_saga.handlers"

LONGEST = 1e9
"""Seconds: 31 years. Threads cannot wait ten times as long, and no reader can make a date of a much later moment."""


def annotations_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """The resolved annotations of `fn`, or nothing where they cannot be resolved."""
    if type(fn) is FunctionType and not fn.__annotations__ and not hasattr(fn, "__wrapped__"):
        return {}
    target = fn if inspect.isroutine(fn) or inspect.isclass(fn) else getattr(fn, "__call__", fn)  # noqa: B004
    try:
        return get_type_hints(inspect.unwrap(target), include_extras=True)
    except Exception:  # unresolvable annotations are the user's style, not an error of ours
        return {}


def accepts_key(fn: Callable[..., Any]) -> bool:
    """Whether `fn` has an explicit parameter `idempotency_key` (`**kwargs` does not count)."""
    if type(fn) is FunctionType and not hasattr(fn, "__wrapped__"):
        code = fn.__code__
        named = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
        return "idempotency_key" in named
    try:
        parameter = inspect.signature(fn).parameters.get("idempotency_key")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A registered probe: `fn(args, idempotency_key) -> Observation`."""

    name: str
    fn: Callable[[dict[str, Any], str], Any]


@dataclass(frozen=True, kw_only=True)
class Compensator:
    """A registered compensator.

    Attributes:
        name: What the log calls it.
        fn: The function, sync or async; called with the stored keyword arguments.
        probe: Tells whether a compensation under a given key has landed.
        key_ttl: For how many seconds the other system remembers an idempotency key.
        takes_key: Whether `fn` is handed `idempotency_key`.
        hints: Its resolved annotations, which are the types its stored arguments are rebuilt through.
    """

    name: str
    fn: Callable[..., Any]
    probe: Callable[[dict[str, Any], str], Any] | None = None
    key_ttl: float = 86400.0
    takes_key: bool = False
    hints: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def check(self, kwargs: Mapping[str, object]) -> None:
        """Raise `TypeError` if the function cannot be called with these arguments."""
        extra: dict[str, object] = {"idempotency_key": ""} if self.takes_key else {}
        inspect.signature(self.fn).bind(**{**kwargs, **extra})


def is_duration(value: object) -> bool:
    """Whether `value` is a finite number of seconds, from 0 on, that a log can hold and a clock can count."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LONGEST


class _Names:
    """The process-wide tables."""

    def __init__(self) -> None:
        self.compensators: dict[str, Compensator] = {}
        self.probes: dict[str, Probe] = {}
        self.inverses: dict[Callable[..., Any], Any] = {}
        self.entry_points_loaded = False


_names = _Names()
_lock = threading.Lock()


def compensator(
    name: str, *, probe: Callable[[dict[str, Any], str], Any] | None = None, key_ttl: float = 86400.0
) -> Callable[[F], F]:
    """Register the decorated function as the compensator `name`; the function itself is returned unchanged.

    It is called with the keyword arguments that the log holds, and with `idempotency_key` if it has a parameter of
    that name. It may run in any process, and again with the same key after a crash between its effect and its
    record: it must be idempotent under that key, or have a `probe`. Raising `NotApplied` says that nothing happened.

    Args:
        name: Unique in the process, stable over releases: logs refer to it for as long as sagas live.
        probe: `fn(kwargs, idempotency_key) -> Observation`; landed means that the compensation landed.
        key_ttl: Seconds for which the other system remembers a key. A compensation that was started longer ago is
            probed, or left to a person, never blindly repeated. For one that never forgets: `float("inf")`.

    Raises:
        DeclarationError: The name is taken by another function, or `key_ttl` is no number of seconds.
    """
    if not name or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError('A compensator needs a name. Write @compensator("payments.refund").')
    if not is_duration(key_ttl) and key_ttl != inf:
        raise DeclarationError(f"{name!r}: key_ttl is a number of seconds. Write for example key_ttl=86400.0.")

    def register(fn: F) -> F:
        entry = Compensator(
            name=name, fn=fn, probe=probe, key_ttl=key_ttl, takes_key=accepts_key(fn), hints=annotations_of(fn)
        )
        with _lock:
            known = _names.compensators.get(name)
            if known is not None and known.fn != fn:  # a method bound twice is equal, not the same
                raise DeclarationError(
                    f"The compensator name {name!r} is already registered by {known.fn.__module__}. "
                    "Give each compensator a name of its own."
                )
            _names.compensators[name] = entry
        return fn

    return register


def probe(name: str) -> Callable[[F], F]:
    """Register the decorated `fn(args, idempotency_key) -> Observation` as the probe `name`.

    Raises:
        DeclarationError: The name is taken by another function.
    """

    def register(fn: F) -> F:
        with _lock:
            known = _names.probes.get(name)
            if known is not None and known.fn != fn:  # a method bound twice is equal, not the same
                raise DeclarationError(
                    f"The probe name {name!r} is already registered by {known.fn.__module__}. "
                    "Give each probe a name of its own."
                )
            _names.probes[name] = Probe(name=name, fn=fn)
        return fn

    return register


def _load_entry_points() -> None:
    from importlib.metadata import entry_points  # 20 ms that most processes never need

    with _lock:
        if _names.entry_points_loaded:
            return
        _names.entry_points_loaded = True
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        entry.load()


def compensator_named(name: str) -> Compensator | None:
    """The compensator registered under `name` in this process, or None."""
    found = _names.compensators.get(name)
    if found is None and not _names.entry_points_loaded:
        _load_entry_points()
        found = _names.compensators.get(name)
    return found


def probe_named(name: str) -> Probe | None:
    """The probe registered under `name` in this process, or None."""
    found = _names.probes.get(name)
    if found is None and not _names.entry_points_loaded:
        _load_entry_points()
        found = _names.probes.get(name)
    return found


def compensator_of(fn: Callable[..., Any]) -> Compensator | None:
    """The registration of this very function, or None."""
    return next((entry for entry in _names.compensators.values() if entry.fn == fn), None)


def probe_of(fn: Callable[..., Any]) -> Probe | None:
    """The registration of this very probe, or None."""
    return next((entry for entry in _names.probes.values() if entry.fn == fn), None)


def pair_inverse(fn: Callable[..., Any], inverse: object) -> None:
    """Remember `inverse` (an undo declaration) for the tool function `fn`."""
    with _lock:
        if fn in _names.inverses:
            raise DeclarationError(
                f"{getattr(fn, '__qualname__', fn)!r} already has an inverse. Declare compensate= on one of the tools."
            )
        _names.inverses[fn] = inverse


def paired_inverse(fn: Callable[..., Any]) -> object | None:
    """What `inverse_of` paired with `fn`, or None."""
    try:
        return _names.inverses.get(fn)
    except TypeError:  # a callable object without a hash can have no entry
        return None


@contextmanager
def isolated_registry() -> Generator[None]:
    """Start with empty tables and put the former ones back at the end; for tests that register names.

    Not a boundary between threads: the tables are those of the whole process.
    """
    global _names
    former = _names
    _names = _Names()
    _names.entry_points_loaded = former.entry_points_loaded
    try:
        yield
    finally:
        _names = former
