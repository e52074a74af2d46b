"""What a wrapped function calls: its method, each of whose calls is a step."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing
from contextvars import copy_context
from typing import Any, cast

from agent_saga_core import Saga
from agent_saga_core.engine.calls import is_async
from agent_saga_core.wrapping import Binding, ToolRunner, on_a_loop
from agent_saga_semantic_kernel.sites import stepping

__all__ = ["Step", "StepMethod", "StreamMethod", "is_async_method", "is_generator_method"]

Invoke = Callable[[str], Any]


def is_async_method(method: Callable[..., Any]) -> bool:
    """Whether a call of the method is known to leave the loop to others: a coroutine or an async generator."""
    method = _innermost(method)
    return is_async(method) or inspect.isasyncgenfunction(method)


def is_generator_method(method: Callable[..., Any]) -> bool:
    """Whether the method is known to give pieces."""
    method = _innermost(method)
    return inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)


def _innermost(method: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(method, functools.partial):
        method = method.func
    return method


class Step:
    """A method and what is declared about it. Looks like the method to whoever reads its attributes.

    Attributes:
        method: The method itself.
    """

    def __init__(self, method: Callable[..., Any], runner: ToolRunner, injected: frozenset[str]) -> None:
        functools.update_wrapper(cast(Any, self), method)
        self.method = method
        self._injected = injected
        self._binding = Binding(method)
        self.__agent_saga__ = runner
        if runner.takes_key:
            self.__signature__ = self._binding.shown

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A method of a plugin object is copied with that object; the declaration is one for all copies.
        return type(self)(copy.deepcopy(self.method, memo), self.__agent_saga__, self._injected)

    def _straight(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.method(*args, **self._binding.outside(args, kwargs))

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Invoke]:
        """The arguments to record, and the call itself.

        Raises:
            TypeError: They do not fit; the method's own, where Python is sure to refuse them again.
        """
        try:
            named, invoke = self._binding.bind(args, kwargs)
        except TypeError:
            known = inspect.isroutine(self.method) and not hasattr(self.method, "__wrapped__")
            if known and not hasattr(self.method, "__signature__"):
                key = {"idempotency_key": ""} if self._binding.takes_key else {}
                self.method(*args, **{**key, **kwargs})
            raise
        return {name: value for name, value in named.items() if name not in self._injected}, invoke


class StepMethod(Step):
    """The method of a wrapped function.

    On a running loop a call inside of a saga gives an awaitable, also of a sync method: the framework awaits it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method: a step inside of a saga, straight through outside of one."""
        saga = self.__agent_saga__.saga()
        if saga is None:
            return self._straight(args, kwargs)
        named, invoke = self._bound(args, kwargs)
        if is_async_method(self.method) or on_a_loop():
            return self._astep(saga, named, invoke)
        runner = self.__agent_saga__
        with stepping(saga, runner) as site:
            return runner.run(named, lambda key: _whole(invoke(key)), site=site)

    async def _astep(self, saga: Saga, named: dict[str, Any], invoke: Invoke) -> Any:
        runner = self.__agent_saga__
        with stepping(saga, runner) as site:
            return await runner.arun(named, lambda key: _whole(invoke(key)), site=site)


def _whole(result: Any) -> Any:
    """What the framework would make of what a method returned: all pieces of a generator."""
    if inspect.isasyncgen(result):
        return _collected(cast("AsyncGenerator[Any, None]", result))
    return list(cast("Generator[Any]", result)) if inspect.isgenerator(result) else result


async def _collected(pieces: AsyncGenerator[Any, None]) -> list[Any]:
    async with aclosing(pieces):
        return [piece async for piece in pieces]


# --- streams


class StreamMethod(Step):
    """The stream method of a wrapped function: an async generator of the same pieces, whatever the original is.

    The pieces come as they are made, and their end when the step is on record. The method is read to its end as fast as
    it can be, and not as its pieces are taken; closing the generator cancels what still runs of it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method: its pieces are one step inside of a saga, and come straight through outside of one."""
        saga = self.__agent_saga__.saga()
        if saga is None:
            return self._straight(args, kwargs)
        named, invoke = self._bound(args, kwargs)
        # Its reader may be somewhere else by then; the step belongs to the context of the call.
        step = functools.partial(self._step, saga, named, invoke)
        return self._pieces(step, copy_context())

    async def _step(self, saga: Saga, named: dict[str, Any], invoke: Invoke, give: Callable[[Any], None]) -> list[Any]:
        runner = self.__agent_saga__
        with stepping(saga, runner) as site:
            return await runner.arun(named, lambda key: _read(invoke(key), give), site=site)

    async def _pieces(self, step: Callable[..., Any], context: Any) -> AsyncGenerator[Any, None]:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[Any] | None] = asyncio.Queue()

        def give(piece: Any) -> None:  # from whatever thread the method runs in
            loop.call_soon_threadsafe(waiting.put_nowait, (piece,))

        task: asyncio.Task[list[Any]] = loop.create_task(step(give), context=context)
        task.add_done_callback(lambda _: waiting.put_nowait(None))
        given = 0
        try:
            while (piece := await waiting.get()) is not None:
                yield piece[0]
                given += 1
            for left in (await task)[given:]:  # of a replay: all of them
                yield left
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


def _read(result: Any, give: Callable[[Any], None]) -> Any:
    """All pieces of a generator, each of them given as it comes."""
    if inspect.isasyncgen(result):
        return _read_async(cast("AsyncGenerator[Any, None]", result), give)
    pieces: list[Any] = []
    for piece in cast("Generator[Any]", result):
        pieces.append(piece)
        give(piece)
    return pieces


async def _read_async(result: AsyncGenerator[Any, None], give: Callable[[Any], None]) -> list[Any]:
    pieces: list[Any] = []
    async with aclosing(result):
        async for piece in result:
            pieces.append(piece)
            give(piece)
    return pieces
