"""Runs of a graph that are one saga: `saga_run` and `asaga_run`, and what they have in common with streams.

The saga's id goes into the run's metadata, and from there into every checkpoint: another process finds it in the
thread. A run that came to an interrupt leaves its saga suspended; what resumes the thread resumes the saga.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from langchain_core.runnables.config import RunnableConfig
from langgraph import errors
from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent, GraphResumeEvent

from agent_saga_core import Log, SagaNotRunning, SagaStatus, current_saga
from agent_saga_core.errors import DeclarationError
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping import ScopeOptions, covered
from agent_saga_langchain.places import current_task
from agent_saga_langchain.run import with_handler
from agent_saga_langgraph.approvals import Gate
from agent_saga_langgraph.looking import Look, Read, alook, look
from agent_saga_langgraph.scope import graph_scope
from agent_saga_langgraph.thread import Standing, own_head, paused, stand, unbound
from agent_saga_langgraph.walk import Inside, inside

__all__ = ["ORPHAN_AFTER", "Run", "asaga_run", "is_inside", "saga_run", "title_of"]

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
        DeclarationError: An answer to a checkpoint that the thread has moved past; in a node of a graph around which
            no saga is, a graph that keeps its state there; and what else could not keep the promises. Nothing has run.
        SagaBusy: Another process runs this saga, or has just taken the thread further. Nothing has run.
        SagaNotRunning: The thread's saga was rolled back. Nothing has run.
        SagaNotFound: The thread's saga is not in this log. Nothing has run.
        Exception: What `graph.invoke` raises.
    """
    if is_inside(config, saga_id):
        return graph.invoke(input, config, **kwargs)
    scope: ScopeOptions = {
        "name": name or title_of(graph), "log": log, "approve": approve, "drain_timeout": drain_timeout,
        "on_failure": on_failure, "metadata": metadata,
    }  # fmt: skip
    run = Run(graph, input, config, saga_id, scope, deadline, kwargs)
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
    if is_inside(config, saga_id):
        return await graph.ainvoke(input, config, **kwargs)
    scope: ScopeOptions = {
        "name": name or title_of(graph), "log": log, "approve": approve, "drain_timeout": drain_timeout,
        "on_failure": on_failure, "metadata": metadata,
    }  # fmt: skip
    run = Run(graph, input, config, saga_id, scope, deadline, kwargs)
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

    def __init__(self, run: Run) -> None:
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


class Run:
    """One run of a graph, apart from the two ways to make it."""

    def __init__(
        self,
        graph: Any,
        given: Any,
        config: RunnableConfig | None,
        saga_id: str | None,
        scope: ScopeOptions,
        deadline: float | None,
        kwargs: dict[str, Any],
    ) -> None:
        self.graph, self.given_config = unbound(graph, config)
        self.input = given
        self.saga_id = saga_id
        self.options = scope
        self.deadline = deadline
        self.kwargs = kwargs
        self.stands = Standing(config={})
        self.watch = _Watch()
        self.inside = Inside([], {})

    def standing(self) -> Look[None]:
        """Find out which saga this run belongs to.

        Raises:
            DeclarationError: As `stand`; or the calls in a subgraph could not be found again.
        """
        self.stands = yield from stand(self.graph, self.input, self.given_config, self.saga_id, self.options.get("log"))
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
        options: ScopeOptions = {
            **self.options,
            "orphan_after": ORPHAN_AFTER if stands.thread is not None else 0.0,
            "resume": "continue" if stands.resumes else "replay",
            "metadata": {**(self.options.get("metadata") or {}), **named, **stands.forked},
        }
        gate = Gate() if stands.thread is not None else None
        return graph_scope(stands.saga_id, gate=gate, renamed=stands.renamed, **options)

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


def title_of(graph: Any) -> str:
    """What a run of the graph is called, for people."""
    return getattr(graph, "name", None) or "graph"


def is_inside(config: RunnableConfig | None, saga_id: str | None) -> bool:
    """Whether this is part of a run that a saga is around already: its interrupts and its steps are that one's."""
    task, saga = current_task(), current_saga()
    if task is None or saga is None or saga_id not in (None, saga.id):
        return False
    own = ((config or {}).get("configurable") or {}).get("thread_id")
    return own is None or str(own) == task.thread_id
