"""Runs that are one saga each: anything of LangChain that is invoked or streamed, `create_agent`'s agents above all.

Graphs with a checkpointer are what agent-saga-langgraph is for: it finds the saga of a thread by itself. Here, the
caller names it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Final, Literal, cast

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs
from langchain_core.tools import BaseTool

from agent_saga_core import Log, Saga, SagaAborted, SagaStatus, saga_scope
from agent_saga_core.wrapping import REFUSALS, AsyncSagaStream, SagaStream, covered
from agent_saga_langchain.places import is_rollback_only, is_savepoint
from agent_saga_langchain.walk import runners_in

__all__ = ["asaga_run", "asaga_stream", "saga_run", "saga_stream"]

INTERRUPT: Final = "__interrupt__"


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

    Inside of an open saga the run is a savepoint of it, and an interrupt is the caller's to see to.

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
    scope: dict[str, Any] = {
        "saga_id": saga_id, "log": log, "name": name or _name(runnable), "approve": approve, "metadata": metadata,
        "drain_timeout": drain_timeout, "on_failure": on_failure, "resume": resume, "orphan_after": orphan_after,
    }  # fmt: skip
    run = _Run(runnable, config, saga_scope(**scope), deadline, tools)
    with run.saga as saga, run.around(saga):
        result = runnable.invoke(input, run.config, **kwargs)
        reason = run.waits(saga, result)
        if reason is None and run.is_resumable(saga):
            reason = _reason(runnable.get_state(config))
        if reason is not None:
            saga.suspend(reason, deadline=run.deadline)
        return result


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
    scope: dict[str, Any] = {
        "saga_id": saga_id, "log": log, "name": name or _name(runnable), "approve": approve, "metadata": metadata,
        "drain_timeout": drain_timeout, "on_failure": on_failure, "resume": resume, "orphan_after": orphan_after,
    }  # fmt: skip
    run = _Run(runnable, config, saga_scope(**scope), deadline, tools)
    async with run.saga as saga:
        with run.around(saga):
            result = await runnable.ainvoke(input, run.config, **kwargs)
            reason = run.waits(saga, result)
            if reason is None and run.is_resumable(saga):
                reason = _reason(await runnable.aget_state(config))
            if reason is not None:
                await saga.asuspend(reason, deadline=run.deadline)
            return result


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
    scope: dict[str, Any] = {
        "saga_id": saga_id, "log": log, "name": name or _name(runnable), "approve": approve, "metadata": metadata,
        "drain_timeout": drain_timeout, "on_failure": on_failure, "resume": resume, "orphan_after": orphan_after,
    }  # fmt: skip
    run = _Run(runnable, config, saga_scope(**scope), deadline, tools)

    def pieces() -> Iterator[Any]:
        stream: Any = runnable.stream(input, run.config, **kwargs)
        try:
            for piece in stream:
                run.look(piece)
                yield piece
        finally:
            if hasattr(stream, "close"):
                stream.close()

    def at_end(saga: Saga, _: Any) -> None:
        reason = run.waits(saga, None)
        if reason is None and run.is_resumable(saga):
            reason = _reason(runnable.get_state(config))
        if reason is not None:
            saga.suspend(reason, deadline=run.deadline)

    return SagaStream(run.saga, pieces, at_end=at_end, around=run.around)


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
    scope: dict[str, Any] = {
        "saga_id": saga_id, "log": log, "name": name or _name(runnable), "approve": approve, "metadata": metadata,
        "drain_timeout": drain_timeout, "on_failure": on_failure, "resume": resume, "orphan_after": orphan_after,
    }  # fmt: skip
    run = _Run(runnable, config, saga_scope(**scope), deadline, tools)

    async def pieces() -> AsyncIterator[Any]:
        async with aclosing(runnable.astream(input, run.config, **kwargs)) as stream:
            async for piece in stream:
                run.look(piece)
                yield piece

    async def at_end(saga: Saga, _: Any) -> None:
        reason = run.waits(saga, None)
        if reason is None and run.is_resumable(saga):
            reason = _reason(await runnable.aget_state(config))
        if reason is not None:
            await saga.asuspend(reason, deadline=run.deadline)

    return AsyncSagaStream(run.saga, pieces, at_end=at_end, around=run.around)


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
        self.deadline = deadline
        self._tools = tuple(tools)
        self._limit = _Limit(saga)
        self.config = merge_configs(config, cast(RunnableConfig, {"callbacks": [self._limit]}))
        self._interrupted = False

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
        self._interrupted = self._interrupted or _has_interrupt(found)

    def waits(self, saga: Saga, result: Any) -> str | None:
        """Why the saga has to wait for a person, as far as the run's own result tells."""
        self.look(result)
        return "the run was interrupted" if self._interrupted and self._may_wait(saga) else None

    def is_resumable(self, saga: Saga) -> bool:
        """Whether the run may have stopped at a place that only the graph's state tells of."""
        return self._may_wait(saga) and bool(getattr(self.runnable, "checkpointer", None))

    def _may_wait(self, saga: Saga) -> bool:
        """Whether it is for this run to suspend the saga: not a savepoint, and nothing to be rolled back."""
        return not is_savepoint(saga) and saga.status is SagaStatus.RUNNING and not is_rollback_only(saga)


class _Limit(BaseCallbackHandler):
    """Ends the run of a model that calls on although its saga refuses, whatever its framework makes of exceptions."""

    raise_error = True
    run_inline = True

    def __init__(self, saga: Saga) -> None:
        self._saga = saga

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self._end()

    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self._end()

    def _end(self) -> None:
        saga = self._saga
        if saga.refusals >= REFUSALS:
            raise SagaAborted(f"saga {saga.id!r} is being rolled back and refused {saga.refusals} calls: the run ends.")


def _has_interrupt(found: Any) -> bool:
    if isinstance(found, Mapping):
        return INTERRUPT in found
    return bool(getattr(found, "interrupts", ()))


def _reason(state: Any) -> str | None:
    waiting: tuple[str, ...] = tuple(getattr(state, "next", ()) or ())
    return f"the run stopped before {', '.join(dict.fromkeys(waiting))}" if waiting else None


def _name(runnable: Any) -> str:
    found = getattr(runnable, "name", None)
    return found if isinstance(found, str) and found else type(runnable).__name__
