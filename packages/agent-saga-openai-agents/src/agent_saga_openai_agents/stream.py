"""`asaga_stream`: a streamed run as one saga, which ends when its events have been read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from typing import Any, Literal, Self, Unpack

from agents import Agent, Runner, RunResultStreaming, StreamEvent

from agent_saga_core import Log, Saga, SagaAborted, SagaStatus
from agent_saga_core.wrapping import AsyncSagaStream
from agent_saga_openai_agents.run import Arguments, Prepared, reason_to_wait

__all__ = ["StreamedSaga", "asaga_stream"]


def asaga_stream(
    starting_agent: Agent[Any],
    input: Any,
    *,
    saga_id: str | None = None,
    log: Log | str | None = None,
    **arguments: Unpack[Arguments],
) -> StreamedSaga:
    """`Runner.run_streamed` as one saga.

    The run begins with the first event that is read. The saga commits with the end of the events; it is rolled back
    when the run raises, when it is cancelled (`SagaAborted` comes out of the last `stream_events()` step), and when
    the stream is closed before its end. `async for` does not close what it leaves early: write
    `async with asaga_stream(...) as run:`, or call `aclose()`.

    Args:
        starting_agent: As in `asaga_run`.
        input: As in `asaga_run`.
        saga_id: As in `asaga_run`.
        log: As in `asaga_run`.
        **arguments: As in `asaga_run`.

    Returns:
        What has the events, and everything that the framework's `RunResultStreaming` has.
    """
    return StreamedSaga(starting_agent, input, saga_id, log, arguments)


class StreamedSaga:
    """A streamed run. What it does not have itself is looked up in the framework's own result.

    Attributes:
        result: The framework's `RunResultStreaming`; None until the first event is read.
    """

    def __init__(
        self, agent: Agent[Any], given: Any, saga_id: str | None, log: Log | str | None, arguments: Any
    ) -> None:
        self.result: RunResultStreaming | None = None
        self._prepared = Prepared(agent, given, saga_id, log, arguments)
        self._events: AsyncGenerator[StreamEvent] | None = None
        self._cancelled = False

    def stream_events(self) -> AsyncIterator[StreamEvent]:
        """The events of the run, which are read once; with the last one the saga has ended."""
        if self._events is None:
            self._events = self._read()
        return self._events

    def cancel(self, mode: Literal["immediate", "after_turn"] = "immediate") -> None:
        """Stop the run, at once or after its turn. Read the events to their end, or `aclose()`: it is rolled back."""
        self._cancelled = True
        if self.result is not None:
            self.result.cancel(mode)

    async def aclose(self) -> None:
        """End the run here and roll it back. Does nothing if it has ended."""
        if self._events is not None:
            await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        result = self.__dict__.get("result")
        if result is None:
            raise AttributeError(f"{name!r} is not known before the first event was read. Read stream_events().")
        return getattr(result, name)

    async def _read(self) -> AsyncGenerator[StreamEvent]:
        prepared = self._prepared
        await prepared.load()
        # Opening and ending happen in the stream's own coroutines, never in this generator's body. Dropped halfway,
        # the generator is closed by its loop, and the stream with it.
        stream = AsyncSagaStream(prepared.saga, self._start, at_end=self._at_end, around=prepared.bound)
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()

    def _start(self) -> AsyncIterable[StreamEvent]:
        prepared = self._prepared
        with prepared.running(prepared.saga) as run:
            self.result = Runner.run_streamed(prepared.agent, prepared.given, **run)
        prepared.mark(self.result)
        if self._cancelled:
            self.result.cancel()
        return _Events(self.result)

    async def _at_end(self, saga: Saga, last: object) -> None:
        result: Any = self.result
        failed = result.run_loop_exception
        if failed is not None:
            raise failed
        if self._cancelled or getattr(result, "_cancel_mode", "none") != "none":
            if saga.scope:  # a savepoint fails by an exception, and what is around it goes on
                raise SagaAborted("the stream was cancelled")
            if saga.status is SagaStatus.RUNNING:
                saga.abort("the stream was cancelled")
            return
        waits = reason_to_wait(saga, result)
        if waits:
            await saga.asuspend(waits)


class _Events(AsyncIterator[StreamEvent]):
    """The framework's events; closing them ends the run, which the framework's own closing would wait for."""

    def __init__(self, result: RunResultStreaming) -> None:
        self._result = result
        self._events = aiter(result.stream_events())

    async def __anext__(self) -> StreamEvent:
        return await anext(self._events)

    async def aclose(self) -> None:
        self._result.cancel()
        closing = getattr(self._events, "aclose", None)
        if closing is not None:
            await closing()
