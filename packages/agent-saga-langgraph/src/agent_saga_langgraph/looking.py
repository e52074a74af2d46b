"""Looking things up in a thread: written once, as generators that say what they want to read; done by two drivers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

__all__ = ["Look", "Read", "alook", "look"]

T = TypeVar("T")


class Read(NamedTuple):
    """One thing to do, for a caller without a running loop and for one with it."""

    now: Callable[[], Any]
    on_loop: Callable[[], Awaitable[Any]]


Look: TypeAlias = Generator[Read, Any, T]


def look(flow: Look[T]) -> T:
    """Perform a look with blocking calls."""
    try:
        wanted = next(flow)
        while True:
            try:
                answer = wanted.now()
            except BaseException as error:
                wanted = flow.throw(error)
            else:
                wanted = flow.send(answer)
    except StopIteration as stop:
        found: T = stop.value
        return found


async def alook(flow: Look[T]) -> T:
    """Perform a look on the running loop."""
    try:
        wanted = next(flow)
        while True:
            try:
                answer = await wanted.on_loop()
            except BaseException as error:
                wanted = flow.throw(error)
            else:
                wanted = flow.send(answer)
    except StopIteration as stop:
        found: T = stop.value
        return found
