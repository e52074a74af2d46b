"""Runs that are one saga: `asaga_run`, `saga_run`, `asaga_stream`; and `bind`, for runtimes that you drive yourself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from autogen_core import CancellationToken

from agent_saga_autogen.calls import AgentRun
from agent_saga_autogen.walk import idle_runtimes, runners_in
from agent_saga_core import SagaAborted, saga_scope
from agent_saga_core.log.base import Log
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping import AsyncSagaStream, covered, run_blocking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autogen_agentchat.base import ChatAgent, TaskResult, Team
    from autogen_agentchat.messages import BaseChatMessage

__all__ = ["asaga_run", "asaga_stream", "bind", "saga_run"]

log = logging.getLogger("agent_saga")
T = TypeVar("T")
GRACE = 5.0
"""Seconds for what a stopped run has left behind to end. Its tools refuse from then on, whatever it does."""


async def asaga_run(
    agent: ChatAgent | Team,
    task: str | BaseChatMessage | Sequence[BaseChatMessage] | None = None,
    *,
    cancellation_token: CancellationToken | None = None,
    output_task_messages: bool = True,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: Literal["settle", "abort"] = "settle",
    metadata: Mapping[str, Any] | None = None,
) -> TaskResult:
    """Run an agent or team as one saga, and return what its `run` returns.

    When this returns, the saga has committed. Inside an open saga the run is a savepoint of that one, and commits with
    it. When it raises, the wrapped tools that were called were undone, or `RollbackIncomplete` names what may be left.

    The agent runs in a task of its own, under a `CancellationToken` of its own that follows yours. A run that is
    cancelled, by its token or by its task, comes out: calls under way are waited for (`drain_timeout`), settled and
    undone. After three refused calls the run is stopped.

    Agents that go on in a runtime of yours, which nobody but you can stop, are refused by the tools of this run.

    Args:
        agent: An agent or team; anything with the `run` of an AgentChat agent.
        task: What to do, as its `run` takes it.
        cancellation_token: Cancels the run.
        output_task_messages: Whether the result repeats the task.
        saga_id: Names the saga, so that it can be found, and the run made again. Default: drawn.
        log: A log, or the URL of one. Default: that of `saga_scope`.
        name: What the saga does, for people. Default: the agent's name.
        approve: Asked before each IRREVERSIBLE call.
        drain_timeout: Seconds to wait at the end for calls under way.
        on_failure: As for `saga_scope`.
        metadata: Plain data stored with the saga.

    Raises:
        CancelledError: The run was cancelled, and rolled back.
        SagaAborted: The run ended, and its saga could not commit. Nothing is left.
        RollbackIncomplete: Something may be left; `report.remaining` names it.
        Exception: What the run raised.
    """
    run = AgentRun()
    scope = saga_scope(
        saga_id,
        name=name if name is not None else agent.name,
        log=log,
        approve=approve,
        drain_timeout=drain_timeout,
        on_failure=on_failure,
        metadata=metadata,
    )
    watched = _Watched(run)
    try:
        async with scope as saga:
            run.open(saga, runners_in(agent), idle_runtimes(agent))
            run.follow(cancellation_token)
            made = agent.run(task=task, cancellation_token=run.token, **_only_if_asked(output_task_messages))
            result = await watched.wait(made)
            if not isinstance(result, _Stopped):
                return result
    finally:
        await watched.close()
    raise _stopped(scope)


def saga_run(agent: ChatAgent | Team, task: Any = None, **options: Any) -> TaskResult:
    """`asaga_run` from code without an event loop: takes the same arguments and returns the same.

    Raises:
        RuntimeError: An event loop runs here. Await `asaga_run` there.
        Exception: What `asaga_run` raises.
    """
    return run_blocking(lambda: asaga_run(agent, task, **options))


def asaga_stream(
    agent: ChatAgent | Team,
    task: str | BaseChatMessage | Sequence[BaseChatMessage] | None = None,
    *,
    cancellation_token: CancellationToken | None = None,
    output_task_messages: bool = True,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: Literal["settle", "abort"] = "settle",
    metadata: Mapping[str, Any] | None = None,
) -> AsyncSagaStream[Any]:
    """`asaga_run`, read piece by piece: yields what the agent's `run_stream` yields, the `TaskResult` last.

    The saga begins with the first piece and has committed when the loop ends, not when the `TaskResult` is there. A
    stream that is left early is rolled back when it is closed: `async with contextlib.aclosing(asaga_stream(...))`.
    """
    scope = saga_scope(
        saga_id,
        name=name if name is not None else agent.name,
        log=log,
        approve=approve,
        drain_timeout=drain_timeout,
        on_failure=on_failure,
        metadata=metadata,
    )

    def start(token: CancellationToken) -> AsyncGenerator[Any, None]:
        return cast(
            "AsyncGenerator[Any, None]",
            agent.run_stream(task=task, cancellation_token=token, **_only_if_asked(output_task_messages)),
        )

    return _RunStream(scope, agent, start, cancellation_token)


@contextmanager
def bind(saga: Saga, *objects: object) -> Generator[Saga]:
    """Bind the wrapped tools of agents, teams, tool agents, workbenches or lists to a running saga for the block.

    For what you drive through a core runtime yourself: a `ToolAgent`, your own routed agents. A runtime calls tools in
    the context in which it was started; bound tools are called as steps of this saga all the same. Bound to two
    running sagas at once, a tool refuses with `BoundaryRequired`.
    """
    with covered(saga, runners_in(objects), by_binding=True):
        yield saga


# --- the watch over a run


class _Stopped:
    """What a run that was stopped by its refusals came to."""


class _Watched:
    """The framework's own task of a run: waited for, stopped, and waited for once more."""

    def __init__(self, run: AgentRun) -> None:
        self.run = run
        self.work: asyncio.Task[Any] | None = None
        self.context: Context | None = None
        self.whole = False
        """Whether the run came to its end by itself."""
        self.loops: set[asyncio.Task[Any]] = set()

    async def wait(self, made: Awaitable[T], *, context: Context | None = None) -> T | _Stopped:
        """What the run (or its next piece) comes to; `_Stopped` after too many refusals.

        Raises:
            CancelledError: The token or this task was cancelled; the run's own task is told, and not waited for.
        """
        self.whole, self.context = False, context
        work = self.work = asyncio.get_running_loop().create_task(_awaited(made), context=context)
        try:
            await asyncio.wait({work, self.run.stopping}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._give_up(work)
            raise
        if work.done():
            self.whole = not work.cancelled() and isinstance(work.exception(), StopAsyncIteration | None)
            return work.result()
        self._give_up(work)
        if self.run.by_token:
            raise asyncio.CancelledError("the run's CancellationToken was cancelled")
        return _Stopped()

    def _give_up(self, work: asyncio.Task[Any]) -> None:
        self.run.stop()
        self.loops |= _loops_of(self.run.runtimes)
        if not (self.run.by_token and self.run.runtimes):
            # A team that its token has told already waits for its own runtime to end, and would leave it running.
            work.cancel()

    async def close(self, closing: Callable[[], Awaitable[Any]] | None = None) -> None:
        """End what the run has left, now that its saga has ended; returns within `GRACE` seconds, twice.

        Until everything has ended, the tools stay bound to the saga that is over, which refuses.
        """
        try:
            if not self.whole or closing is not None:
                await self._end_leftovers(closing)
        finally:
            self.run.ended.set()
            if self.work is None or self.work.done():
                self.run.close()
            else:
                log.error("a stopped run of AutoGen has not ended; its tools refuse until it does")
                self.work.add_done_callback(lambda _: self.run.close())

    async def _end_leftovers(self, closing: Callable[[], Awaitable[Any]] | None) -> None:
        self.run.token.cancel()
        self.loops |= _loops_of(self.run.runtimes)
        handlers = [task for runtime in self.run.runtimes for task in getattr(runtime, "_background_tasks", ())]
        for task in handlers:
            task.cancel()
        self.run.ended.set()
        if self.work is None:
            return
        if closing is not None and self.work.done():
            self.work = asyncio.get_running_loop().create_task(_awaited(closing()), context=self.context)
        await asyncio.wait({self.work}, timeout=GRACE)
        if not self.work.done():
            self.work.cancel()
            await asyncio.wait({self.work}, timeout=GRACE)
        if not self.work.done():
            return
        if not self.work.cancelled():
            self.work.exception()  # heard: what the run has to say of its own stopping is told already
        # A loop that is left would take the messages of the team's next run, and never rest.
        for task in self.loops:
            task.cancel()
        if ending := {*self.loops, *handlers}:
            await asyncio.wait(ending, timeout=GRACE)
        for runtime in self.run.runtimes:
            if hasattr(runtime, "_background_exception"):
                runtime._background_exception = None  # of a handler that was ended here: the next run would end by it


def _loops_of(runtimes: Iterable[Any]) -> set[asyncio.Task[Any]]:
    """The tasks in which runtimes read their messages. A runtime whose stopping is cancelled forgets its own."""
    found = [getattr(getattr(runtime, "_run_context", None), "_run_task", None) for runtime in runtimes]
    return {task for task in found if isinstance(task, asyncio.Task)}


async def _awaited(made: Awaitable[T]) -> T:
    return await made


class _RunStream(AsyncSagaStream[Any]):
    """The stream of a run: each piece is waited for like a whole run."""

    def __init__(
        self,
        scope: Saga,
        agent: object,
        start: Callable[[CancellationToken], AsyncGenerator[Any, None]],
        token: CancellationToken | None,
    ) -> None:
        super().__init__(scope, self._begin, around=lambda saga: _Bound(self, saga))
        self.agent = agent
        self.token = token
        self.pieces: _Pieces | None = None
        self.watched: _Watched | None = None
        self._make = start

    def _begin(self) -> _Pieces:
        assert self.watched is not None
        self.pieces = _Pieces(self.watched, self._make(self.watched.run.token))
        return self.pieces

    async def __anext__(self) -> Any:
        try:
            return await super().__anext__()
        except StopAsyncIteration:
            pieces = self.pieces
            if pieces is not None and pieces.stopped:
                pieces.stopped = False  # said once
                raise _stopped(self.saga) from None
            raise


class _Bound(AbstractAsyncContextManager[None]):
    """A stream's tools, bound to its saga from its opening to its end; no generator, so that a dropped one stays so."""

    def __init__(self, stream: _RunStream, saga: Saga) -> None:
        self._stream = stream
        self._saga = saga

    async def __aenter__(self) -> None:
        stream = self._stream
        run = AgentRun()
        stream.watched = _Watched(run)
        try:
            run.open(self._saga, runners_in(stream.agent), idle_runtimes(stream.agent))
            run.follow(stream.token)
        except BaseException:
            await stream.watched.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        watched, pieces = self._stream.watched, self._stream.pieces
        assert watched is not None
        left = pieces.source if pieces is not None and not pieces.over else None
        await watched.close(getattr(left, "aclose", None))


class _Pieces:
    """What a run yields, piece by piece. All of it is read in one context: a generator may hold on to its own."""

    def __init__(self, watched: _Watched, source: AsyncGenerator[Any, None]) -> None:
        self.watched = watched
        self.source = source
        self.stopped = False
        self.over = False
        self._context = copy_context()

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> Any:
        try:
            piece = await self.watched.wait(anext(self.source), context=self._context)
        except StopAsyncIteration:
            self.over = True
            raise
        if isinstance(piece, _Stopped):
            self.stopped = True
            raise StopAsyncIteration
        return piece


def _stopped(scope: Saga) -> SagaAborted:
    return SagaAborted("the run was stopped: its model kept calling tools that the saga refuses", report=scope.report)


def _only_if_asked(output_task_messages: bool) -> dict[str, Any]:
    return {} if output_task_messages else {"output_task_messages": False}
