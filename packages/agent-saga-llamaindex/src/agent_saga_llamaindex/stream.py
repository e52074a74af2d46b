"""`asaga_stream`: the events of a run that is one saga, and the way to answer it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Literal

from workflows.events import Event, InternalDispatchEvent, StopEvent, WorkflowIdleEvent
from workflows.handler import WorkflowHandler

from agent_saga_core.errors import SagaNotRunning
from agent_saga_core.log.base import Log
from agent_saga_core.wrapping import AsyncSagaStream
from agent_saga_llamaindex.run import Run
from agent_saga_llamaindex.suspended import SuspendedRun

__all__ = ["WorkflowStream", "asaga_stream"]


def asaga_stream(
    workflow: Any,
    *args: Any,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    on_failure: Literal["settle", "abort"] = "settle",
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> WorkflowStream:
    """The events of a run that is one saga, as `handler.stream_events()` gives them.

    The saga is opened with the first event that is asked for and commits before the iteration ends; `stream.result` is
    then what `await handler` gives. A run that fails raises here what `await handler` raises, once the saga is rolled
    back. A stream that is left early is closed with `contextlib.aclosing`: the run is cancelled, the saga rolled back.

    A run that waits for a person goes on with `stream.send_event(answer)`, or is left with `await stream.suspend()`.

    Args:
        workflow: What runs; this and the rest as for `asaga_run`.
        *args: What its `run` takes; or a suspended run, and the events that answer it.
        saga_id: Names the saga.
        log: A `Log` or the URL of one.
        name: What the saga does, for people.
        on_failure: As for `saga_scope`.
        approve: Asked with a `StepRequest` before each IRREVERSIBLE step.
        drain_timeout: Seconds to wait at the end for running steps and for what is in doubt.
        metadata: Plain data stored with the saga.
        **kwargs: What `run` takes by name.
    """
    run = Run(workflow, args, kwargs, saga_id)
    scope = run.scope(
        log, name=name if name is not None else run.title, on_failure=on_failure, approve=approve,
        drain_timeout=drain_timeout, metadata=metadata,
    )  # fmt: skip
    return WorkflowStream(run, scope, log)


class WorkflowStream(AsyncSagaStream[Event]):
    """The events of one run. Made by `asaga_stream`."""

    def __init__(self, run: Run, scope: Any, log: Log | str | None) -> None:
        super().__init__(scope, self._events, around=run.around)
        self._run = run
        self._log = log
        self._result: Any = None
        self._ended = False
        self._heard: AsyncGenerator[Event] | None = None
        self._reading = asyncio.Lock()

    async def __anext__(self) -> Event:
        async with self._reading:
            if not (self._opened or self._over):
                await self._run.find(self._log)
            return await super().__anext__()

    async def aclose(self) -> None:
        """End the run here: cancel it and roll the saga back, also while another task waits for the next event."""
        if self._reading.locked():  # that task then hears that the run was cancelled
            await self._run.stop()
        async with self._reading:
            await super().aclose()

    @property
    def handler(self) -> WorkflowHandler:
        """LlamaIndex's handle on the run; there once the first event was read."""
        return self._run.handler

    @property
    def result(self) -> Any:
        """What the run came to.

        Raises:
            SagaNotRunning: It did not come to an end, or not yet.
        """
        if not self._ended:
            raise SagaNotRunning("The run has no result yet. Read its stream to the end first.")
        return self._result

    def send_event(self, event: Event, step: str | None = None) -> None:
        """Send an event into the run, as `handler.ctx.send_event` does: the answer that it waits for."""
        self._run.send(event, step)

    async def suspend(self, *, deadline: float | None = None) -> SuspendedRun:
        """Leave a run that waits for an answer: suspend its saga, cancel it here, and close the stream.

        Whatever the run publishes before it has come to rest is passed over.

        Args:
            deadline: Seconds for which the saga waits. Default: 7 days.

        Raises:
            SagaNotRunning: The run has ended. Read its stream to the end.
            SagaBusy: It is inside of a tool's call, or a step still runs; nothing changed.
        """
        context = self._run.waiting_context() if self._run.at_rest else None
        while context is None:
            event = await anext(self._heard, None) if self._heard is not None else None
            if event is None or isinstance(event, StopEvent):
                raise SagaNotRunning("The run does not wait for an answer: it has ended. Read its stream to the end.")
            if isinstance(event, WorkflowIdleEvent):
                context = self._run.waiting_context()
        suspended = await self._run.suspend(context, deadline)
        await self.aclose()
        return suspended

    def _events(self) -> AsyncGenerator[Event]:
        self._run.begin(self.saga)
        self._heard = self._run.events()
        return self._shown(self._heard)

    async def _shown(self, heard: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
        try:
            async with aclosing(heard):
                async for event in heard:
                    if not isinstance(event, InternalDispatchEvent):
                        yield event
            self._result = await self._run.result()
            self._ended = True
        finally:
            await self._run.stop()
