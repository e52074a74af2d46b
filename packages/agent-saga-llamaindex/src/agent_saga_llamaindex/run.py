"""`saga_run` and `asaga_run`: one run of an agent or a workflow is one saga."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from typing import Any, Literal, Unpack, cast

from workflows import Context
from workflows.errors import WorkflowCancelledByUser
from workflows.events import Event, InputRequiredEvent, WorkflowIdleEvent
from workflows.handler import WorkflowHandler

from agent_saga_core import current_saga, current_step, read_saga, saga_scope
from agent_saga_core.errors import DeclarationError, SagaBusy
from agent_saga_core.log.base import Log
from agent_saga_core.logs import shared_log
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping import RunOptions, covered, run_blocking
from agent_saga_llamaindex.inside import UNTOLD, names_work
from agent_saga_llamaindex.sited import WorkflowFrame
from agent_saga_llamaindex.sites import HERE, RunScope, book_of, label_for
from agent_saga_llamaindex.suspended import SuspendedRun, state_of
from agent_saga_llamaindex.walk import runners_in

__all__ = ["Run", "asaga_run", "saga_run"]

log = logging.getLogger("agent_saga")


async def asaga_run(
    workflow: Any,
    *args: Any,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    on_failure: Literal["settle", "abort"] = "settle",
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    metadata: Mapping[str, Any] | None = None,
    on_wait: Literal["suspend", "wait"] = "suspend",
    deadline: float | None = None,
    **kwargs: Any,
) -> Any:
    """Run an agent or a workflow as one saga, and return what `await workflow.run(...)` returns.

    When this returns a result, the saga committed. When it raises, everything that may have happened was undone, or
    `RollbackIncomplete` names what may be left. When it returns a `SuspendedRun`, the run waits for an answer from
    outside, the saga is suspended, and nothing of the run is left in this process.

    In place of the input it takes such a `SuspendedRun`, or what `dump_state` made of it, with the events that answer
    behind it: the run goes on in the same saga, in whatever process that is. Inside of an open saga, the run is a
    savepoint of it; a run that waits then suspends the whole saga.

    A run whose saga has refused three calls is cancelled, and `SagaAborted` raised.

    Args:
        workflow: A `FunctionAgent`, `ReActAgent`, `AgentWorkflow` or any other `Workflow`.
        *args: What its `run` takes; or a suspended run, and the events that answer it.
        saga_id: Names the saga. Running again under the same id replays what is recorded.
        log: A `Log` or the URL of one.
        name: What the saga does, for people. Default: the agent's name, else that of the workflow's class.
        on_failure: As for `saga_scope`.
        approve: Asked with a `StepRequest` before each IRREVERSIBLE step.
        drain_timeout: Seconds to wait at the end for running steps and for what is in doubt.
        metadata: Plain data stored with the saga.
        on_wait: `"suspend"`, or `"wait"` where somebody answers through the `ctx` that was passed.
        deadline: Seconds for which a suspended saga waits. Default: 7 days.
        **kwargs: What `run` takes by name; where a start event has fields of the names above, pass `start_event=`.

    Raises:
        SagaAborted: The run ended, and its saga could not commit.
        RollbackIncomplete: Something may be left, and is named.
        SagaNotFound: The log holds no saga of the suspended run.
        SagaBusy: Somebody else owns the saga; or the run waits for a person inside of a tool's call.
        DeclarationError: A suspended run is given with something else than events; or the installed workflows are
            too old, or too new, to tell one call from another.
    """
    if on_wait not in ("suspend", "wait"):
        raise ValueError('on_wait is "suspend" or "wait".')
    run = Run(workflow, args, kwargs, saga_id)
    if run.state is not None and not run.answers and on_wait == "suspend":
        raise DeclarationError(
            "A suspended run goes on from an answer, and none was given. "
            'Write for example: saga_run(workflow, state, HumanResponseEvent(response="yes")).'
        )
    scope = run.scope(
        log, name=name if name is not None else run.title, on_failure=on_failure, approve=approve,
        drain_timeout=drain_timeout, metadata=metadata,
    )  # fmt: skip
    await run.find(log)
    result: Any = None
    async with scope as saga:
        with run.around(saga):
            try:
                run.begin(saga)
                result = await _heard(run, on_wait == "suspend", deadline)
            finally:
                await run.stop()
    return result


def saga_run(workflow: Any, *args: Any, **kwargs: Any) -> Any:
    """`asaga_run` where no event loop runs, with the same arguments.

    Raises:
        RuntimeError: A loop is running here. Await `asaga_run` there.
    """
    return run_blocking(lambda: asaga_run(workflow, *args, **kwargs))


async def _heard(run: Run, suspends: bool, deadline: float | None) -> Any:
    """Listen to the run until it ends, or waits."""
    if suspends:
        async with aclosing(run.events()) as events:
            async for event in events:
                context = run.waiting_context() if isinstance(event, WorkflowIdleEvent) else None
                if context is not None:
                    return await run.suspend(context, deadline)
    elif run.answers:  # still: they are given whenever it has come to rest
        async with aclosing(run.events()) as events:
            while run.answers and await anext(events, None) is not None:
                pass
    return await run.result()


class Run:
    """One run, from what it is given to what it comes to.

    Args:
        workflow: What runs.
        args: Its input, or a suspended run and the answers.
        kwargs: The rest of its input.
        saga_id: The saga's id, if one was asked for.
    """

    def __init__(self, workflow: Any, args: tuple[Any, ...], kwargs: dict[str, Any], saga_id: str | None) -> None:
        self.workflow = workflow
        self.args = args
        self.kwargs = kwargs
        self.saga_id = saga_id
        if not names_work():
            raise DeclarationError(f"A run cannot be a saga: {UNTOLD}")
        self.state = state_of(args[0]) if args else None
        self.answers: list[Any] = []
        self.asked: list[Event] = []
        self.asks = self.state is not None
        """Whether it has asked somebody outside, ever: an answer may be one of several, or one that nothing takes."""
        self.at_rest = False
        """Whether nothing has happened since the run last had nothing to do."""
        self.running: RunScope | None = None
        self.within: Saga | None = None
        if self.state is not None:
            self._take_up(self.state)

    def _take_up(self, state: Mapping[str, Any]) -> None:
        self.answers = list(self.args[1:])
        if self.kwargs or not all(isinstance(answer, Event) for answer in self.answers):
            raise DeclarationError(
                "A suspended run goes on from events alone. "
                'Write for example: saga_run(workflow, state, HumanResponseEvent(response="yes")).'
            )
        if self.saga_id not in (None, state["saga_id"]):
            raise DeclarationError(f"The suspended run belongs to saga {state['saga_id']!r}. Leave saga_id= out.")
        self.saga_id = state["saga_id"]

    @property
    def title(self) -> str:
        """What the run is called, for people."""
        name = getattr(self.workflow, "name", None)
        return name if isinstance(name, str) and name else type(self.workflow).__name__

    def scope(self, log: Log | str | None, **options: Unpack[RunOptions]) -> Saga:
        """The scope of the run, not yet entered."""
        saga = saga_scope(self.saga_id, log=log, resume="replay" if self.state is None else "continue", **options)
        saga.frame = WorkflowFrame()
        self.within = current_saga()
        return saga

    async def find(self, log: Log | str | None) -> None:
        """Make sure that a suspended run goes on in its saga: in another log it would be a new one, and act again.

        Raises:
            SagaNotFound: The log holds no such saga; nothing was opened or called.
        """
        if self.state is not None and self.saga_id is not None and self.within is None:
            await asyncio.to_thread(read_saga, shared_log(log), self.saga_id)

    def around(self, saga: Saga) -> AbstractContextManager[Any]:
        """Bind the tools that can be seen to the saga."""
        return covered(saga, runners_in(self.workflow))

    def begin(self, saga: Saga) -> WorkflowHandler:
        """Start the workflow, inside of the saga."""
        label = label_for(saga) if self.state is None else str(self.state["run"])
        self.running = RunScope(saga, label)
        before = HERE.set(self.running)
        try:
            if self.state is None:
                handler = self.workflow.run(*self.args, **self.kwargs)
            else:
                book_of(saga).recall(label, self.state["works"])
                handler = self.workflow.run(ctx=Context.from_dict(self.workflow, dict(self.state["context"])))
        finally:
            HERE.reset(before)
        self.running.handler = handler
        self.at_rest = self.state is not None
        if self.state is not None and not _asks_anew(self.state["context"]):
            self.answer()
        return handler

    def answer(self) -> None:
        """Give the next of the answers that the run was resumed with.

        One at a time: a run comes to rest after one that nothing takes, and all that it does not know by then is lost.
        """
        if self.answers:
            self.send(self.answers.pop(0))

    def send(self, event: Event, step: str | None = None) -> None:
        """Send an event into the run."""
        self.at_rest = False
        self.asked = []
        self.handler.ctx.send_event(event, step)

    @property
    def handler(self) -> WorkflowHandler:
        """LlamaIndex's handle on the run."""
        if self.running is None or self.running.handler is None:
            raise DeclarationError("The run was not started yet. Read the stream's first event before.")
        return self.running.handler

    async def events(self) -> AsyncGenerator[Event]:
        """Everything that the run publishes, its internal events too."""
        async for event in self.handler.stream_events(expose_internal=True):
            self.at_rest = isinstance(event, WorkflowIdleEvent)
            if isinstance(event, InputRequiredEvent):
                self.asked.append(event)
                self.asks = True
            if self.at_rest and self.answers:
                self.answer()
            else:
                yield event

    async def result(self) -> Any:
        """What the run came to. None if it was ended because its saga refuses, which the scope's end then says."""
        try:
            return await cast(Any, self.handler)
        except WorkflowCancelledByUser:
            running = self.running
            if running is None or running.refusal is None:
                raise
            if self.within is not None and self.within.same_as(running.saga):  # a savepoint's normal end says nothing
                raise running.refusal from None
            return None

    def waiting_context(self) -> dict[str, Any] | None:
        """The run's context, if only an answer from outside takes it on: it asked for one, and nothing is at work."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            context = self.handler.ctx.to_dict()
        lost = [str(one.message) for one in said if "Unserializable" in one.category.__name__]
        workers = _workers(context)
        if any(worker.get("queue") or worker.get("in_progress") for worker in workers):
            return None
        asks = self.asks or any(worker.get("collected_waiters") for worker in workers)
        if asks and lost:
            raise DeclarationError(
                f"The run waits for an answer, and its context cannot be stored whole, so that it could not go on "
                f"({'; '.join(lost)}). Answer in this process (on_wait='wait'), or keep such values out of the context."
            )
        return context if asks else None

    async def suspend(self, context: dict[str, Any], deadline: float | None = None) -> SuspendedRun:
        """Suspend the saga, and let go of the run."""
        assert self.running is not None
        saga, current = self.running.saga, current_step()
        if current is not None and current.saga_id == saga.id:
            raise SagaBusy(
                f"saga {saga.id!r}: a run inside of tool {current.tool!r} waits for a person, and cannot be suspended "
                "while that call is under way. Ask in the outer run, or answer through on_wait='wait'.",
                saga_id=saga.id,
            )
        label = self.running.label
        works = book_of(saga).works(label)
        await saga.asuspend("the run waits for an answer", deadline=deadline)
        suspended = SuspendedRun(saga_id=saga.id, run=label, context=context, works=works, waiting=tuple(self.asked))
        await self.stop()
        return suspended

    async def stop(self) -> None:
        """Cancel the run, if it still runs, as LlamaIndex cancels runs."""
        handler = self.running.handler if self.running is not None else None
        if handler is not None and not handler.is_done():
            try:
                await handler.cancel_run()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a tool's own, for which the run hung: what is to come out is known already
                log.debug("the cancelled run ended in %s", type(error).__name__)


def _workers(context: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a stored context says of each step."""
    return list(context.get("workers", {}).values())


def _asks_anew(context: Mapping[str, Any]) -> bool:
    """Whether a restored run first runs steps again, to learn what they wait for: an answer before that would be lost.

    It publishes that it has come to rest once they have asked, and publishes nothing of the kind if there are none.
    """
    waiters = (waiter for worker in _workers(context) for waiter in worker.get("collected_waiters", ()))
    return any(waiter.get("has_requirements") for waiter in waiters)
