"""Carrying a saga to where its context does not reach: to another thread, at a later time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Token
from typing import Any, ParamSpec, TypeVar, cast

from agent_saga_core.drive import CURRENT_SAGA, CURRENT_STEP, INSIDE, STRAIGHT
from agent_saga_core.engine.calls import is_async
from agent_saga_core.errors import DeclarationError, SagaNotRunning
from agent_saga_core.saga import current_saga

__all__ = ["Place", "bound_to", "carry"]

P = ParamSpec("P")
R = TypeVar("R")

_PLACE = (CURRENT_SAGA, CURRENT_STEP, INSIDE, STRAIGHT)


class Place:
    """Where code stands: in which saga, step and calls. Entering it again elsewhere stands there for the block."""

    __slots__ = ("_here",)

    def __init__(self) -> None:
        self._here = tuple(variable.get() for variable in _PLACE)

    def __call__(self) -> _Stand:
        """A context manager for one use."""
        return _Stand(self._here)


class _Stand:
    __slots__ = ("_before", "_there")

    def __init__(self, there: tuple[Any, ...]) -> None:
        self._there = there
        self._before: list[Token[Any]] = []

    def __enter__(self) -> None:
        for variable, value in zip(_PLACE, self._there, strict=True):
            self._before.append(variable.set(value))

    def __exit__(self, *_: object) -> None:
        # A coroutine that nobody ran to its end may be closed in the context of somebody else, who keeps what it has.
        with suppress(ValueError):
            for token in reversed(self._before):
                token.var.reset(token)


def carry(fn: Callable[P, R]) -> Callable[P, R]:
    """Bind a callable to the saga that is current here, wherever and whenever it is called.

    Called on any thread or loop, at once or often, it runs in that saga (in the savepoint and the step that were
    current when it was bound, too), whatever saga is current at the call. After the saga has ended it can still be
    called: tools in it hear what the saga tells them, which is `SagaNotRunning` for a new step.

    The saga does not wait for calls that have not started a step yet. No other context variables are carried.

    Args:
        fn: A function, sync or async. Not a generator function: its body would run outside of the call.

    Raises:
        SagaNotRunning: No saga is open here.
        DeclarationError: `fn` is a generator function, or cannot be called.
    """
    if current_saga() is None:
        raise SagaNotRunning(
            "carry() was called where no saga is open, so there is none to carry. "
            "Call it inside `with saga_scope():`, or inside a transaction."
        )
    return bound_to(Place(), fn)


def bound_to(place: Place, fn: Callable[P, R]) -> Callable[P, R]:
    """`fn`, running in `place` whenever it is called."""
    if not callable(fn):  # pyright: ignore[reportUnnecessaryComparison]
        raise DeclarationError(f"carry() got a {type(fn).__name__}, which cannot be called. Pass the function itself.")
    call = getattr(fn, "__call__", None)  # noqa: B004 - of an object that can be called
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (fn, call)):
        raise DeclarationError(
            "carry() got a generator function, whose body runs while it is read. Carry a function that reads it."
        )
    if is_async(fn):

        async def acarried(*args: P.args, **kwargs: P.kwargs) -> Any:
            with place():
                return await cast(Any, fn(*args, **kwargs))

        return cast("Callable[P, R]", functools.update_wrapper(acarried, fn))

    def carried(*args: P.args, **kwargs: P.kwargs) -> Any:
        with place():
            result = fn(*args, **kwargs)
        return _in_place(place, cast(Any, result)) if inspect.iscoroutine(result) else result

    return cast("Callable[P, R]", functools.update_wrapper(carried, fn))


async def _in_place(place: Place, coroutine: Coroutine[Any, Any, Any]) -> Any:
    with place():
        return await coroutine
