"""`saga_stream` and `asaga_stream`: a run of a graph that is one saga, read piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Literal, cast

from langchain_core.runnables.config import RunnableConfig

from agent_saga_core import Log
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping import AsyncSagaStream, SagaStream, ScopeOptions
from agent_saga_langgraph.looking import alook, look
from agent_saga_langgraph.run import Run, is_inside, title_of

__all__ = ["AsyncGraphStream", "asaga_stream", "saga_stream"]


def saga_stream(
    graph: Any,
    input: Any,
    config: RunnableConfig | None = None,
    *,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: Literal["settle", "abort"] = "settle",
    deadline: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> SagaStream[Any]:
    """`graph.stream`, as one saga; everything else as for `saga_run`.

    The saga is looked up here, opened with the first piece, and ends with the last one. Leaving the stream early rolls
    back: `for` does not close what it leaves, so use `with contextlib.closing(stream)`.
    """
    if is_inside(config, saga_id):
        return cast("SagaStream[Any]", graph.stream(input, config, **kwargs))  # a generator, closed like one
    scope: ScopeOptions = {
        "name": name or title_of(graph), "log": log, "approve": approve, "drain_timeout": drain_timeout,
        "on_failure": on_failure, "metadata": metadata,
    }  # fmt: skip
    run = Run(graph, input, config, saga_id, scope, deadline, kwargs)
    look(run.standing())
    saga = run.scope()

    def start() -> Iterator[Any]:
        look(run.check(saga))
        return _pieces(run, saga)

    def end(_saga: Saga, _last: object) -> None:
        look(run.ended(saga))

    return _Stream(run, saga, start, at_end=end, around=run.binding)


def asaga_stream(
    graph: Any,
    input: Any,
    config: RunnableConfig | None = None,
    *,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: Literal["settle", "abort"] = "settle",
    deadline: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> AsyncGraphStream:
    """`graph.astream`, as one saga; everything else as for `saga_run`.

    The saga is looked up and opened with the first piece, and ends with the last one. Close a stream that is left
    early: `async with contextlib.aclosing(stream)`.
    """
    if is_inside(config, saga_id):
        return cast("AsyncGraphStream", graph.astream(input, config, **kwargs))  # a generator, closed like one
    scope: ScopeOptions = {
        "name": name or title_of(graph), "log": log, "approve": approve, "drain_timeout": drain_timeout,
        "on_failure": on_failure, "metadata": metadata,
    }  # fmt: skip
    return AsyncGraphStream(Run(graph, input, config, saga_id, scope, deadline, kwargs))


def _pieces(run: Run, saga: Saga) -> Iterator[Any]:
    try:
        yield from run.graph.stream(run.input, run.config(saga), **run.kwargs)
    except Exception as error:
        look(run.stopped(saga, error))
        raise


async def _apieces(run: Run, saga: Saga) -> AsyncIterator[Any]:
    try:
        async with aclosing(run.graph.astream(run.input, run.config(saga), **run.kwargs)) as pieces:
            async for piece in pieces:
                yield piece
    except Exception as error:
        await alook(run.stopped(saga, error))
        raise


class _Stream(SagaStream[Any]):
    """A stream that says what can be done when its saga cannot be opened."""

    def __init__(self, run: Run, saga: Saga, start: Callable[[], Any], **more: Any) -> None:
        super().__init__(saga, start, **more)
        self._run = run

    def __next__(self) -> Any:
        with self._run.opening():
            return super().__next__()


class AsyncGraphStream(AsyncIterator[Any]):
    """The stream of `asaga_stream`: looks the thread up before its first piece, then is an `AsyncSagaStream`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._inner: AsyncSagaStream[Any] | None = None
        self._closed = False
        """Whether it was closed before it began; later it is for the inner stream to say."""
        self._looking = asyncio.Lock()

    async def __anext__(self) -> Any:
        inner = await self._begun()
        if inner is None:
            raise StopAsyncIteration
        with self._run.opening():
            return await anext(inner)

    async def aclose(self) -> None:
        """End the run here and roll its saga back. Does nothing if it has ended.

        Raises:
            RollbackIncomplete: The rollback left something.
            RuntimeError: Another task is reading it at this moment; nothing was changed.
        """
        self._closed = True  # whoever looks the thread up finds it so, and begins nothing
        async with self._looking:
            inner = self._inner
        if inner is not None:
            await inner.aclose()

    async def _begun(self) -> AsyncSagaStream[Any] | None:
        """The inner stream; None if this one was closed before it began. One task at a time looks the thread up."""
        async with self._looking:
            if self._inner is None and not self._closed:
                await alook(self._run.standing())
                if not self._closed:
                    self._inner = self._begin(self._run.scope())
            return self._inner

    async def __aenter__(self) -> AsyncGraphStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _begin(self, saga: Saga) -> AsyncSagaStream[Any]:
        run = self._run

        async def start() -> AsyncIterator[Any]:
            await alook(run.check(saga))
            return _apieces(run, saga)

        return AsyncSagaStream(saga, start, at_end=lambda _saga, _last: alook(run.ended(saga)), around=run.binding)
