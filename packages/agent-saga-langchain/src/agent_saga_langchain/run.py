"""Runs that are one saga each: anything of LangChain that is invoked or streamed, `create_agent`'s agents above all.

Graphs with a checkpointer are what agent-saga-langgraph is for: it finds the saga of a thread by itself. Here, the
caller names it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Literal, cast

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.tools import BaseTool

from agent_saga_core import Log, Saga, saga_scope
from agent_saga_core.wrapping import AsyncSagaStream, SagaStream, ScopeOptions, covered
from agent_saga_langchain.frame import RunFrame
from agent_saga_langchain.pauses import GraphPause, end_refused_run, handover_of
from agent_saga_langchain.waiting import has_interrupt, reason_in, thread_of
from agent_saga_langchain.walk import kept_graphs_in, runners_in

__all__ = ["asaga_run", "asaga_stream", "saga_run", "saga_stream", "with_handler"]


def saga_run(
    runnable: Any,
    input: Any,
    config: RunnableConfig | None = None,
    *,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: Literal["settle", "abort"] = "settle",
    resume: Literal["replay", "continue"] = "replay",
    orphan_after: float = 0.0,
    deadline: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    tools: Iterable[BaseTool] = (),
    **kwargs: Any,
) -> Any:
    """`runnable.invoke`, as one saga: when it returns, the saga has committed, or was suspended by an interrupt.

    When it raises, what the run did was undone, or `RollbackIncomplete` names what may be left. The wrapped tools that
    can be seen in the runnable are bound to the saga for the run: called where the saga cannot be told, they refuse.
    When the saga, being rolled back, has refused three calls, the run is ended before a model is asked again.

    A result with `__interrupt__` suspends the saga, and so does a graph with a checkpointer that stopped before its
    end. To go on, resume the graph under the same `saga_id` with `resume="continue"`.

    An interrupt that leaves the run as LangGraph's exception, in a node of another graph, suspends it as well, and
    comes out once it has.

    Inside of an open saga the run is a savepoint of it, and an interrupt is the caller's to see to: the savepoint keeps
    what it has done.

    Args:
        runnable: An agent of `create_agent`, or anything else with `invoke`.
        input: As for `runnable.invoke`.
        config: As for `runnable.invoke`; it is not changed.
        saga_id: As for `saga_scope`.
        log: As for `saga_scope`.
        name: As for `saga_scope`. Default: the runnable's name.
        approve: As for `saga_scope`.
        drain_timeout: As for `saga_scope`, in seconds.
        on_failure: As for `saga_scope`.
        resume: What a known `saga_id` means: `"replay"`, the run is made again from its start; `"continue"`, a graph
            with a checkpointer goes on.
        orphan_after: As for `saga_scope`, in seconds.
        deadline: Seconds after which recovery rolls back a saga that waits for a person. Default: 7 days.
        metadata: As for `saga_scope`.
        tools: Wrapped tools that the runnable uses and that cannot be seen in it.
        **kwargs: Further arguments of `runnable.invoke`.

    Raises:
        SagaAborted: The run ended normally and its saga could not commit, or it was ended because it called on.
        RollbackIncomplete: Something may be left; the report names it.
        SagaBusy: Another process runs this saga. Nothing has run.
        SagaNotRunning: It was rolled back. Nothing has run.
        Exception: What `runnable.invoke` raises.
    """
    scope: ScopeOptions = {
        "log": log, "name": name or _name(runnable), "approve": approve, "metadata": metadata,
        "drain_timeout": drain_timeout, "on_failure": on_failure, "resume": resume, "orphan_after": orphan_after,
    }  # fmt: skip
    run = _Run(runnable, config, saga_scope(saga_id, **scope), deadline, tools)
    result: Any = None
    with run.saga as saga, run.around(saga):
        try:
            result = runnable.invoke(input, run.config, **kwargs)
        except Exception as error:
            if not run.is_left_by(error):
                raise
        reason = run.waits(saga, result)
        for graph, thread in run.resumable(saga) if reason is None else ():
            reason = reason or reason_in(graph.get_state(thread))
        if reason is not None:
            saga.suspend(reason, deadline=run.deadline)
    return run.outcome(result)


async def asaga_run(
    runnable: Any,
    input: Any,
    config: RunnableConfig | None = None,
    *,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: Literal["settle", "abort"] = "settle",
    resume: Literal["replay", "continue"] = "replay",
    orphan_after: float = 0.0,
    deadline: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    tools: Iterable[BaseTool] = (),
    **kwargs: Any,
) -> Any:
    """`runnable.ainvoke`, as one saga; everything else as for `saga_run`.

    A cancellation waits for the calls that run, undoes what was done, and comes out as itself.
    """
    scope: ScopeOptions = {
        "log": log, "name": name or _name(runnable), "approve": approve, "metadata": metadata,
        "drain_timeout": drain_timeout, "on_failure": on_failure, "resume": resume, "orphan_after": orphan_after,
    }  # fmt: skip
    run = _Run(runnable, config, saga_scope(saga_id, **scope), deadline, tools)
    result: Any = None
    async with run.saga as saga:
        with run.around(saga):
            try:
                result = await runnable.ainvoke(input, run.config, **kwargs)
            except Exception as error:
                if not run.is_left_by(error):
                    raise
            reason = run.waits(saga, result)
            for graph, thread in run.resumable(saga) if reason is None else ():
                reason = reason or reason_in(await graph.aget_state(thread))
            if reason is not None:
                await saga.asuspend(reason, deadline=run.deadline)
    return run.outcome(result)


def saga_stream(
    runnable: Any,
    input: Any,
    config: RunnableConfig | None = None,
    *,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: Literal["settle", "abort"] = "settle",
    resume: Literal["replay", "continue"] = "replay",
    orphan_after: float = 0.0,
    deadline: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    tools: Iterable[BaseTool] = (),
    **kwargs: Any,
) -> SagaStream[Any]:
    """`runnable.stream`, as one saga; everything else as for `saga_run`.

    The saga is opened with the first piece and ends with the last one, before the loop over the stream does. Leaving
    early rolls back: `for` does not close what it leaves, so use `with contextlib.closing(stream)`.
    """
    scope: ScopeOptions = {
        "log": log, "name": name or _name(runnable), "approve": approve, "metadata": metadata,
        "drain_timeout": drain_timeout, "on_failure": on_failure, "resume": resume, "orphan_after": orphan_after,
    }  # fmt: skip
    run = _Run(runnable, config, saga_scope(saga_id, **scope), deadline, tools)

    def pieces() -> Iterator[Any]:
        stream: Any = runnable.stream(input, run.config, **kwargs)
        try:
            for piece in stream:
                run.look(piece)
                yield piece
        except Exception as error:
            if not run.is_left_by(error):
                raise
        finally:
            if hasattr(stream, "close"):
                stream.close()

    def at_end(saga: Saga, _: Any) -> None:
        reason = run.waits(saga, None)
        for graph, thread in run.resumable(saga) if reason is None else ():
            reason = reason or reason_in(graph.get_state(thread))
        if reason is not None:
            saga.suspend(reason, deadline=run.deadline)

    return _Stream(run, pieces, at_end)


def asaga_stream(
    runnable: Any,
    input: Any,
    config: RunnableConfig | None = None,
    *,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: Literal["settle", "abort"] = "settle",
    resume: Literal["replay", "continue"] = "replay",
    orphan_after: float = 0.0,
    deadline: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    tools: Iterable[BaseTool] = (),
    **kwargs: Any,
) -> AsyncSagaStream[Any]:
    """`runnable.astream`, as one saga; everything else as for `saga_stream`.

    Close a stream that is left early: `async with contextlib.aclosing(stream)`.
    """
    scope: ScopeOptions = {
        "log": log, "name": name or _name(runnable), "approve": approve, "metadata": metadata,
        "drain_timeout": drain_timeout, "on_failure": on_failure, "resume": resume, "orphan_after": orphan_after,
    }  # fmt: skip
    run = _Run(runnable, config, saga_scope(saga_id, **scope), deadline, tools)

    async def pieces() -> AsyncIterator[Any]:
        async with aclosing(runnable.astream(input, run.config, **kwargs)) as stream:
            try:
                async for piece in stream:
                    run.look(piece)
                    yield piece
            except Exception as error:
                if not run.is_left_by(error):
                    raise

    async def at_end(saga: Saga, _: Any) -> None:
        reason = run.waits(saga, None)
        for graph, thread in run.resumable(saga) if reason is None else ():
            reason = reason or reason_in(await graph.aget_state(thread))
        if reason is not None:
            await saga.asuspend(reason, deadline=run.deadline)

    return _AsyncStream(run, pieces, at_end)


class _Run:
    """One run, apart from the ways to make it."""

    def __init__(
        self,
        runnable: Any,
        config: RunnableConfig | None,
        saga: Saga,
        deadline: float | None,
        tools: Iterable[BaseTool],
    ) -> None:
        self.runnable = runnable
        self.saga = saga
        saga.frame = RunFrame()
        self.deadline = deadline
        self._tools = tuple(tools)
        self._given = config
        self.config = with_handler(config, _Limit(saga))
        self._interrupted = False
        self._left_by: Exception | None = None

    @contextmanager
    def around(self, saga: Saga) -> Generator[None]:
        """Bind what can be seen of the run's tools to the saga, and watch what it refuses."""
        with covered(saga, [*runners_in(self.runnable), *self._tools]):
            yield

    def look(self, piece: Any) -> None:
        """See whether a piece of a stream tells of an interrupt."""
        # A piece may come with its mode, and with the subgraph it is from, before it.
        found: Any = piece
        if isinstance(piece, tuple) and piece:
            found = cast("tuple[Any, ...]", piece)[-1]
        self._interrupted = self._interrupted or has_interrupt(found)

    def is_left_by(self, error: Exception) -> bool:
        """Whether it is by this exception that LangGraph takes the run out of a node: then the run has not failed.

        A graph without a checkpointer of its own, run in a node of another one, is interrupted like that. The node is
        run again, and the graph goes on where it was, behind the calls that it has made.
        """
        if not isinstance(error, GraphPause):
            return False
        self._interrupted = self._interrupted or handover_of(error) is None
        self._left_by = error
        return True

    def outcome(self, result: Any) -> Any:
        """What the run returned, once its saga has ended.

        Raises:
            Exception: What LangGraph took it out by.
        """
        if self._left_by is not None:
            error, self._left_by = self._left_by, None
            raise error
        return result

    def waits(self, saga: Saga, result: Any) -> str | None:
        """Why the saga has to wait for a person, as far as the run's own result tells."""
        self.look(result)
        return "the run was interrupted" if self._interrupted and self._may_wait(saga) else None

    def resumable(self, saga: Saga) -> list[tuple[Any, RunnableConfig]]:
        """The graphs of the run that may have stopped at a place that only their state tells of, and where that is."""
        if not self._may_wait(saga):
            return []
        found = [(graph, thread_of(bound, self._given)) for graph, bound in kept_graphs_in(self.runnable)]
        return [(graph, thread) for graph, thread in found if thread is not None]

    def _may_wait(self, saga: Saga) -> bool:
        """Whether it is for this run to suspend the saga: not a savepoint, and nothing to be rolled back."""
        return not saga.scope and saga.takes_steps


class _Stream(SagaStream[Any]):
    """A stream that ends by what LangGraph took its run out by, once its saga has ended."""

    def __init__(self, run: _Run, start: Callable[[], Iterable[Any]], at_end: Callable[[Saga, Any], None]) -> None:
        super().__init__(run.saga, start, at_end=at_end, around=run.around)
        self._run = run

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self._run.outcome(None)
            raise


class _AsyncStream(AsyncSagaStream[Any]):
    def __init__(
        self, run: _Run, start: Callable[[], AsyncIterator[Any]], at_end: Callable[[Saga, Any], Awaitable[None]]
    ) -> None:
        super().__init__(run.saga, start, at_end=at_end, around=run.around)
        self._run = run

    async def __anext__(self) -> Any:
        try:
            return await super().__anext__()
        except StopAsyncIteration:
            self._run.outcome(None)
            raise


class _Limit(BaseCallbackHandler):
    """Ends the run of a model that calls on although its saga refuses, whatever its framework makes of exceptions."""

    raise_error = True
    run_inline = True

    def __init__(self, saga: Saga) -> None:
        self._saga = saga

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        end_refused_run(self._saga)

    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        end_refused_run(self._saga)


def with_handler(config: RunnableConfig | None, handler: BaseCallbackHandler) -> RunnableConfig:
    """The config with one callback more; all else is for the runnable to merge with what surrounds it.

    A config without callbacks means those of the run around this one, which naming a callback would silence.
    """
    found: Any = ensure_config(config).get("callbacks")  # a copy
    if found is None:
        callbacks: Any = [handler]
    elif isinstance(found, list):
        callbacks = [*cast("list[Any]", found), handler]
    else:
        callbacks = found
        callbacks.add_handler(handler, inherit=True)
    return {**(config or {}), "callbacks": callbacks}


def _name(runnable: Any) -> str:
    found = getattr(runnable, "name", None)
    return found if isinstance(found, str) and found else type(runnable).__name__
