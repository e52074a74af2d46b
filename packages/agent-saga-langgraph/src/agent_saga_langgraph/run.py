"""Runs of a graph that are one saga: `saga_run`, `saga_stream` and their async kin.

The saga's id goes into the run's metadata, and from there into every checkpoint: another process finds it in the
thread. A run that came to an interrupt leaves its saga suspended; what resumes the thread resumes the saga.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Literal, cast

from langchain_core.runnables.config import RunnableConfig
from langgraph import errors
from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent, GraphResumeEvent

from agent_saga_core import Log, SagaNotRunning, SagaStatus, current_saga
from agent_saga_core.errors import DeclarationError
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping import AsyncSagaStream, SagaStream, covered
from agent_saga_langchain.places import current_task
from agent_saga_langchain.run import with_handler
from agent_saga_langgraph.approvals import Gate
from agent_saga_langgraph.looking import Look, Read, alook, look
from agent_saga_langgraph.scope import graph_scope
from agent_saga_langgraph.thread import Standing, own_head, paused, stand, unbound
from agent_saga_langgraph.walk import Inside, inside

__all__ = ["ORPHAN_AFTER", "asaga_run", "asaga_stream", "saga_run", "saga_stream"]

ORPHAN_AFTER = 3600.0
"""Seconds for which recovery leaves the saga of a dead process to whoever resumes its thread."""


IS_INVALID_ANSWER: Callable[[BaseException], bool] = getattr(errors, "is_invalid_resume", lambda _: False)
"""Whether an exception says that an answer does not fit its question's schema: LangGraph keeps the question open."""


def saga_run(
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
) -> Any:
    """`graph.invoke`, as one saga: when it returns, the saga has committed or waits for a person.

    New input begins a new saga. `None` and `Command(...)` go on with the one that the thread's last run belongs to,
    which another process may have begun. A run that comes back interrupted leaves its saga suspended. When this raises,
    what the run did was undone, or `RollbackIncomplete` names what may be left. Two exceptions suspend instead, because
    LangGraph goes on after them: `GraphDrained`, and an answer that the graph does not take.

    A checkpoint that the thread has moved past is forked into a saga of its own, which undoes and repeats nothing of
    the one it was forked from.

    Args:
        graph: A compiled graph.
        input: As for `graph.invoke`.
        config: As for `graph.invoke`; it is not changed.
        saga_id: The id of a new saga; drawn by default. With new input, that of a saga that has begun means that the
            run is made again from its start: calls with a declared `key` give back their records.
        log: A `Log` or the URL of one. Default: `$AGENT_SAGA_LOG`, else `file:./.agent-saga`.
        name: What the saga does, for people. Default: the graph's name.
        approve: Asked before IRREVERSIBLE calls. Default: `interrupt()`, if the graph has a checkpointer; see
            `approve` and `reject`.
        drain_timeout: Seconds to wait at the end for running steps and for what is in doubt.
        on_failure: As for `saga_scope`.
        deadline: Seconds after which recovery rolls back a saga that waits for a person. Default: 7 days.
        metadata: Plain data stored with the saga.
        **kwargs: The further arguments of `graph.invoke`. `durability` is `"sync"` unless given: LangGraph's own
            default may lose the message whose calls were made when its process dies, and the model would be asked anew.

    Raises:
        SagaAborted: The run ended normally, and its saga could not commit: it was rolled back. Or the graph was
            interrupted and has no checkpointer, so that nobody could resume it.
        RollbackIncomplete: Something may be left; the report names it.
        DeclarationError: An answer to a checkpoint that the thread has moved past, and what else could not keep the
            promises. Nothing has run.
        SagaBusy: Another process runs this saga, or has just taken the thread further. Nothing has run.
        SagaNotRunning: The thread's saga was rolled back. Nothing has run.
        SagaNotFound: The thread's saga is not in this log. Nothing has run.
        Exception: What `graph.invoke` raises.
    """
    if _is_inside(config, saga_id):
        return graph.invoke(input, config, **kwargs)
    scope: dict[str, Any] = {"name": name, "approve": approve, "drain_timeout": drain_timeout, "on_failure": on_failure}
    run = _Run(graph, input, config, saga_id, log, scope, deadline, metadata, kwargs)
    look(run.standing())
    with run.opening():
        saga = run.scope()
        with saga, run.binding(saga):
            look(run.check(saga))
            try:
                result = run.graph.invoke(input, run.config(saga), **run.kwargs)
            except Exception as error:
                look(run.stopped(saga, error))
                raise
            look(run.ended(saga))
            return result


async def asaga_run(
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
) -> Any:
    """`graph.ainvoke`, as one saga; everything else as for `saga_run`. A cancellation undoes, and comes out."""
    if _is_inside(config, saga_id):
        return await graph.ainvoke(input, config, **kwargs)
    scope: dict[str, Any] = {"name": name, "approve": approve, "drain_timeout": drain_timeout, "on_failure": on_failure}
    run = _Run(graph, input, config, saga_id, log, scope, deadline, metadata, kwargs)
    await alook(run.standing())
    with run.opening():
        saga = run.scope()
        async with saga:
            with run.binding(saga):
                await alook(run.check(saga))
                try:
                    result = await run.graph.ainvoke(input, run.config(saga), **run.kwargs)
                except Exception as error:
                    await alook(run.stopped(saga, error))
                    raise
                await alook(run.ended(saga))
                return result


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
    if _is_inside(config, saga_id):
        return cast("SagaStream[Any]", graph.stream(input, config, **kwargs))  # a generator, closed like one
    scope: dict[str, Any] = {"name": name, "approve": approve, "drain_timeout": drain_timeout, "on_failure": on_failure}
    run = _Run(graph, input, config, saga_id, log, scope, deadline, metadata, kwargs)
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
    if _is_inside(config, saga_id):
        return cast("AsyncGraphStream", graph.astream(input, config, **kwargs))  # a generator, closed like one
    scope: dict[str, Any] = {"name": name, "approve": approve, "drain_timeout": drain_timeout, "on_failure": on_failure}
    return AsyncGraphStream(_Run(graph, input, config, saga_id, log, scope, deadline, metadata, kwargs))


def _pieces(run: _Run, saga: Saga) -> Iterator[Any]:
    try:
        yield from run.graph.stream(run.input, run.config(saga), **run.kwargs)
    except Exception as error:
        look(run.stopped(saga, error))
        raise


async def _apieces(run: _Run, saga: Saga) -> AsyncIterator[Any]:
    try:
        async with aclosing(run.graph.astream(run.input, run.config(saga), **run.kwargs)) as pieces:
            async for piece in pieces:
                yield piece
    except Exception as error:
        await alook(run.stopped(saga, error))
        raise


class _Stream(SagaStream[Any]):
    """A stream that says what can be done when its saga cannot be opened."""

    def __init__(self, run: _Run, saga: Saga, start: Callable[[], Any], **more: Any) -> None:
        super().__init__(saga, start, **more)
        self._run = run

    def __next__(self) -> Any:
        with self._run.opening():
            return super().__next__()


class AsyncGraphStream(AsyncIterator[Any]):
    """The stream of `asaga_stream`: looks the thread up before its first piece, then is an `AsyncSagaStream`."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._inner: AsyncSagaStream[Any] | None = None
        self._closed = False

    async def __anext__(self) -> Any:
        if self._closed:
            raise StopAsyncIteration
        if self._inner is None:
            await alook(self._run.standing())
            self._inner = self._begin(self._run.scope())
        with self._run.opening():
            return await anext(self._inner)

    async def aclose(self) -> None:
        """End the run here and roll its saga back. Does nothing if it has ended."""
        self._closed = True
        if self._inner is not None:
            await self._inner.aclose()

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


class _Watch(GraphCallbackHandler):
    """Hears what no checkpoint tells: whether the graph was interrupted, and whether it has begun to go on."""

    def __init__(self) -> None:
        self.interrupted = False
        self.resumed = False

    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        self.interrupted = True

    def on_resume(self, event: GraphResumeEvent) -> None:
        self.resumed = True


class _Opening:
    """Adds the way out to the refusal of a saga that was rolled back."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        stands = self._run.stands
        if not isinstance(error, SagaNotRunning) or error.status == SagaStatus.COMMITTED:
            return
        if stands.resumes and error.saga_id == stands.saga_id:
            error.add_note(
                "The thread's state still says what was undone. Begin anew with new input, fork an earlier checkpoint "
                "(saga_run(graph, None, old_config)), or go on knowingly under another saga_id."
            )


class _Run:
    """One run of a graph, apart from the two ways to make it."""

    def __init__(
        self,
        graph: Any,
        given: Any,
        config: RunnableConfig | None,
        saga_id: str | None,
        log: Log | str | None,
        scope: dict[str, Any],
        deadline: float | None,
        metadata: Mapping[str, Any] | None,
        kwargs: dict[str, Any],
    ) -> None:
        self.graph, self.given_config = unbound(graph, config)
        self.input = given
        self.saga_id = saga_id
        self.log = log
        self.options = scope
        self.deadline = deadline
        self.metadata = metadata
        self.kwargs = kwargs
        self.stands = Standing(config={})
        self.watch = _Watch()
        self.inside = Inside([], {})

    def standing(self) -> Look[None]:
        """Find out which saga this run belongs to.

        Raises:
            DeclarationError: As `stand`; or the calls in a subgraph could not be found again.
        """
        self.stands = yield from stand(self.graph, self.input, self.given_config, self.saga_id, self.log)
        self.inside = inside(self.graph)
        if self.stands.thread is None:
            return
        for path, tools in self.inside.unkept.items():
            if tools:
                raise DeclarationError(
                    f"{path}: this subgraph is compiled with checkpointer=False, so that LangGraph gives its tasks new "
                    f"ids when it runs again, and {', '.join(map(repr, tools))} would be called once more. Compile it "
                    "without checkpointer=False, or declare key= for these tools."
                )
        if "checkpoint_during" not in self.kwargs:  # the former name of the same
            # LangGraph fails in a subgraph that keeps no checkpoints, if it is to wait for them.
            self.kwargs = {"durability": "async" if self.inside.unkept else "sync", **self.kwargs}

    def scope(self) -> Saga:
        """The scope, not yet opened."""
        stands = self.stands
        thread = (stands.thread or {}).get("configurable", {}).get("thread_id")
        named = {"thread_id": str(thread)} if thread is not None else {}
        metadata = {**(self.metadata or {}), **named, **stands.forked}
        options = {**self.options, "name": self.options["name"] or getattr(self.graph, "name", None) or "graph"}
        return graph_scope(
            stands.saga_id,
            gate=Gate() if stands.thread is not None else None,
            renamed=stands.renamed,
            log=self.log,
            orphan_after=ORPHAN_AFTER if stands.thread is not None else 0.0,
            resume="continue" if stands.resumes else "replay",
            metadata=metadata,
            **options,
        )

    def opening(self) -> _Opening:
        """Around what opens the saga: says what can be done about one that was rolled back."""
        return _Opening(self)

    def binding(self, saga: Saga) -> Any:
        """Bind what can be seen of the graph's tools to the saga."""
        return covered(saga, self.inside.runners)

    def config(self, saga: Saga) -> Any:
        """The config to run with: the saga's id is stored with each checkpoint."""
        given = cast(RunnableConfig, self.stands.config)
        # Not merged with what surrounds the run: a thread that was given would lose to the one around it.
        return {**with_handler(given, self.watch), "metadata": {**(given.get("metadata") or {}), "saga_id": saga.id}}

    def check(self, saga: Saga) -> Look[None]:
        """Look at the thread once more, now that nobody else can resume it."""
        try:
            yield from own_head(self.graph, self.stands, saga)
        except Exception:  # nothing has run: the saga is left as it was found
            if saga.takes_steps and (self.stands.resumes or saga.steps):
                yield self._suspend(saga, "its thread could not be resumed")
            raise

    def ended(self, saga: Saga) -> Look[None]:
        """Suspend the saga of a run that waits; leave every other to the scope's end."""
        if not saga.takes_steps:
            return
        if self.stands.thread is None:
            if self.watch.interrupted:
                saga.abort("the graph was interrupted, and without a checkpointer nobody can resume it")
            return
        at = yield from paused(self.graph, self.stands)
        if at is not None or self.watch.interrupted:
            yield self._suspend(saga, f"the graph waits at {', '.join(dict.fromkeys(at or ('a question',)))}")

    def stopped(self, saga: Saga, error: Exception) -> Look[None]:
        """Suspend the saga of a run that LangGraph has stopped where it may go on; leave others to the scope's end."""
        if not saga.takes_steps or self.stands.thread is None:
            return
        if isinstance(error, errors.GraphDrained):
            yield self._suspend(saga, "the run was drained")
        elif IS_INVALID_ANSWER(error) or (self.stands.resumes and not self.watch.resumed):
            yield self._suspend(saga, "the answer was not one that the graph takes")

    def _suspend(self, saga: Saga, reason: str) -> Read:
        return Read(
            lambda: saga.suspend(reason, deadline=self.deadline),
            lambda: saga.asuspend(reason, deadline=self.deadline),
        )


def _is_inside(config: RunnableConfig | None, saga_id: str | None) -> bool:
    """Whether this is part of a run that a saga is around already: its interrupts and its steps are that one's."""
    task, saga = current_task(), current_saga()
    if task is None or saga is None or saga_id not in (None, saga.id):
        return False
    own = ((config or {}).get("configurable") or {}).get("thread_id")
    return own is None or str(own) == task.thread_id
