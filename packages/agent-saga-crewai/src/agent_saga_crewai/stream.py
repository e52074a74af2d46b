"""`saga_stream` and `asaga_stream`: a streaming run that is one saga."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Self

from crewai.hooks.dispatch import HookAborted

from agent_saga_core.errors import DeclarationError, SagaError
from agent_saga_core.log.base import Log
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping import AsyncSagaStream, SagaStream
from agent_saga_crewai.hooks import stop_run
from agent_saga_crewai.run import OnFailure, Run, ended_by_us, reason_to_wait, scope_of

__all__ = ["AsyncCrewStream", "CrewStream", "asaga_stream", "saga_stream"]

log = logging.getLogger("agent_saga")


class CrewStream(SagaStream[Any]):
    """The pieces of a streaming run that is one saga; after the last of them it has committed.

    `for` does not close what it leaves early: use `with saga_stream(...) as pieces`, or `close()`. Closed before its
    end, the run takes no more tool calls, its model is not asked again, and what it did is undone.
    """

    output: Any = None
    """CrewAI's own streaming output, once the first piece was asked for."""

    @property
    def result(self) -> Any:
        """What the kickoff would have returned; once the stream has ended."""
        return self.output.result if self.output is not None else None


class AsyncCrewStream(AsyncSagaStream[Any]):
    """`CrewStream` for `async for`; leave it early with `aclose()`, or use `async with`."""

    output: Any = None
    """CrewAI's own streaming output, once the first piece was asked for."""

    @property
    def result(self) -> Any:
        """What the kickoff would have returned; once the stream has ended."""
        return self.output.result if self.output is not None else None


def saga_stream(
    target: Any,
    /,
    *args: Any,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: OnFailure = "settle",
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> CrewStream:
    """Run a crew or flow with `stream=True` as one saga, and read its pieces.

    The saga is opened when the first piece is asked for. It commits when the run has ended, before the iteration does;
    it is rolled back when the run raises, and when the stream is closed before its end. Arguments as in `saga_run`.

    Raises:
        DeclarationError: It does not stream.
    """
    run = Run(target, args, kwargs, is_async=False)
    _check_stream(run)
    scope = scope_of(
        run, saga_id, log, name=name or run.title, approve=approve, drain_timeout=drain_timeout,
        on_failure=on_failure, metadata=metadata,
    )  # fmt: skip

    def start() -> _Pieces:
        stream.output = run.start()
        return _Pieces(stream.output, scope)

    def at_end(saga: Saga, last: object) -> None:
        waits = reason_to_wait(saga, stream.result)
        if waits:
            saga.suspend(waits)

    stream = CrewStream(scope, start, at_end=at_end, around=run.inside)
    return stream


def asaga_stream(
    target: Any,
    /,
    *args: Any,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: OnFailure = "settle",
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> AsyncCrewStream:
    """`saga_stream` for `async for`, by `akickoff`."""
    run = Run(target, args, kwargs, is_async=True)
    _check_stream(run)
    scope = scope_of(
        run, saga_id, log, name=name or run.title, approve=approve, drain_timeout=drain_timeout,
        on_failure=on_failure, metadata=metadata,
    )  # fmt: skip

    async def start() -> _AsyncPieces:
        stream.output = await run.start()
        return _AsyncPieces(stream.output, scope)

    async def at_end(saga: Saga, last: object) -> None:
        waits = reason_to_wait(saga, stream.result)
        if waits:
            await saga.asuspend(waits)

    stream = AsyncCrewStream(scope, start, at_end=at_end, around=run.inside)
    return stream


def _check_stream(run: Run) -> None:
    if not getattr(run.owner, "stream", False) or run.name.endswith(("for_each", "for_each_async")):
        raise DeclarationError(
            f"{type(run.owner).__name__}.{run.name} does not give one stream. Set stream=True, or use saga_run(...)."
        )


def _end_early(saga: Saga) -> None:
    """The reader has left: no call begins any more, and no model is asked what to call next."""
    stop_run(saga)
    if saga.scope:  # a savepoint: what is around it goes on
        return
    try:
        saga.abort("the stream was closed before its end")
    except SagaError as error:  # it ends anyway
        log.debug("saga %r: %s", saga.id, error)


class _Pieces(Iterator[Any]):
    """CrewAI's iterator, whose closing waits for the run on its thread."""

    def __init__(self, output: Any, saga: Saga) -> None:
        self._output = output
        self._pieces: Iterator[Any] = iter(output)
        self._saga = saga

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._pieces)
        except HookAborted as error:
            ended_by_us(error)

    def close(self) -> None:
        _end_early(self._saga)
        self._output.close()


class _AsyncPieces(AsyncIterator[Any]):
    def __init__(self, output: Any, saga: Saga) -> None:
        self._output = output
        self._pieces: AsyncIterator[Any] = aiter(output)
        self._saga = saga

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._pieces)
        except HookAborted as error:
            ended_by_us(error)

    async def aclose(self) -> None:
        _end_early(self._saga)
        await self._output.aclose()
