"""`saga_run` and `asaga_run`: a run of a crew, a flow or an agent that is one saga."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, Unpack, cast

from crewai.crew import Crew
from crewai.flow.async_feedback import HumanFeedbackPending
from crewai.hooks.dispatch import HookAborted

from agent_saga_core import saga_scope
from agent_saga_core.errors import DeclarationError, SagaAborted
from agent_saga_core.log.base import Log
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping import RunOptions, covered
from agent_saga_crewai.hooks import STOP, install_hooks, stop_hook_into
from agent_saga_crewai.numbers import begin_segment
from agent_saga_crewai.walk import seen_in

__all__ = ["Run", "asaga_kickoff", "asaga_run", "ended_by_us", "reason_to_wait", "saga_kickoff", "saga_run", "scope_of"]

OnFailure = Literal["settle", "abort"]


class Run:
    """What is to be run, and on what object: a crew, a flow or an agent, or one of its methods that run it."""

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_async: bool) -> None:
        self.owner: Any = target.__self__ if inspect.ismethod(target) else target
        self.method = target if inspect.ismethod(target) else _kickoff(target, args, kwargs, is_async)
        self.name: str = getattr(self.method, "__name__", "")
        self.args = args
        self.kwargs = kwargs
        self._check(is_async)

    def _check(self, is_async: bool) -> None:
        if inspect.iscoroutinefunction(self.method) != is_async:
            fit = "await asaga_run(...)" if not is_async else "saga_run(...)"
            raise TypeError(f"{type(self.owner).__name__}.{self.name} does not run this way. Write {fit} for it.")
        if any(getattr(given, "restore_from", None) is not None for given in (*self.args, *self.kwargs.values())):
            raise DeclarationError(
                "The tools of a crew that is restored from a checkpoint are not wrapped. Restore it first with "
                f"{type(self.owner).__name__}.from_checkpoint(...), wrap its tools, and run that."
            )

    @property
    def title(self) -> str:
        """What the run is called, for people."""
        given = getattr(self.owner, "name", None)
        return given if isinstance(given, str) and given else "crew"

    @property
    def resumes(self) -> bool:
        """Whether it goes on with a flow that waited for a person."""
        return self.name in ("resume", "resume_async")

    def start(self) -> Any:
        """Make the call."""
        return self.method(*self.args, **self.kwargs)

    @contextmanager
    def inside(self, saga: Saga) -> Generator[None]:
        """For the time of the run: bind its wrapped tools to the saga, and name the part of the flow that this is."""
        if self.resumes:
            answered = getattr(self.owner, "human_feedback_history", None)
            begin_segment(saga, f"resumed:{len(cast('list[Any]', answered)) if isinstance(answered, list) else 0}/")
        seen = seen_in(self.owner)
        for agent in seen.agents:
            stop_hook_into(agent)
        with covered(saga, seen.runners):
            yield


def _kickoff(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_async: bool) -> Callable[..., Any]:
    """The framework's own way to run it: for each input if there are several."""
    inputs: object = args[0] if args else kwargs.get("inputs")
    names = ("akickoff", "kickoff_async") if is_async else ("kickoff",)
    if isinstance(inputs, list) and isinstance(target, Crew):
        names = ("akickoff_for_each",) if is_async else ("kickoff_for_each",)
    for name in names:
        method = getattr(target, name, None)
        if callable(method):
            return method
    raise TypeError(
        f"{type(target).__name__} has no kickoff. Pass a Crew, a Flow or an Agent, or one of their methods that run it."
    )


def scope_of(run: Run, saga_id: str | None, log: Log | str | None, **options: Unpack[RunOptions]) -> Saga:
    """The scope of a run, not yet opened."""
    install_hooks()
    return saga_scope(saga_id, log=log, resume="continue" if run.resumes else "replay", **options)


def _refuse_stream(run: Run) -> None:
    if getattr(run.owner, "stream", False):
        raise DeclarationError(
            f"This {type(run.owner).__name__} streams: it would run after saga_run has returned. "
            "Use saga_stream(...) or asaga_stream(...), or set stream=False."
        )


def ended_by_us(error: HookAborted) -> NoReturn:
    """Say in the words of sagas why the run was ended, if it was our hook that ended it.

    Raises:
        SagaAborted: It was.
        HookAborted: It was somebody else's.
    """
    if error.source != STOP:
        raise error
    raise SagaAborted(
        "The run was ended: its saga is being rolled back, and the model went on calling tools. "
        "The first error in the log says why."
    ) from error


def saga_run(
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
) -> Any:
    """Run a crew, a flow or an agent as one saga, and return what its own kickoff returns.

    When it returns, the saga has committed. When it raises, it has not: what the run's wrapped tools did was undone, or
    `RollbackIncomplete` names what may be left. Inside of an open saga the run is a savepoint of that one.

    A flow that waits for a person's feedback leaves the saga SUSPENDED; `saga_run(flow.resume, feedback, saga_id=...)`
    goes on with it. Inside of an open saga, whoever opened that sees to it: it is not suspended here.

    Args:
        target: A `Crew`, `Flow` or `Agent`, or one of their methods that run it: `crew.kickoff_for_each`,
            `flow.resume`.
        *args: What the kickoff takes. A list of inputs runs a crew once for each of them, in one saga.
        saga_id: Names the saga; run again under it, the recorded calls are given back.
        log: A `Log` or the URL of one. Default: `$AGENT_SAGA_LOG`, else `file:./.agent-saga`.
        name: What it does, for people. Default: the name of the crew or flow.
        approve: Asked before each IRREVERSIBLE step.
        drain_timeout: Seconds to wait at the end for running calls and for what is in doubt.
        on_failure: As in `saga_scope`.
        metadata: Plain data stored with the saga.
        **kwargs: What the kickoff takes by name.

    Raises:
        SagaAborted: The saga was rolled back although the crew came to an end; or the model went on calling tools
            although they were refused.
        RollbackIncomplete: Something may be left.
        Exception: The run's own.
    """
    run = Run(target, args, kwargs, is_async=False)
    _refuse_stream(run)
    scope = scope_of(
        run, saga_id, log, name=name or run.title, approve=approve, drain_timeout=drain_timeout,
        on_failure=on_failure, metadata=metadata,
    )  # fmt: skip
    with scope as saga, run.inside(saga):
        try:
            result = run.start()
        except HookAborted as error:
            ended_by_us(error)
        waits = reason_to_wait(saga, result)
        if waits:
            saga.suspend(waits)
        return result


async def asaga_run(
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
) -> Any:
    """`saga_run` on the running loop, by `akickoff`; `asaga_run(crew.kickoff_async, ...)` runs the crew on a thread.

    Cancelled, it rolls back. CrewAI runs every tool on a thread of its own, which no cancellation stops: a call that is
    being made is waited for, up to `drain_timeout`.
    """
    run = Run(target, args, kwargs, is_async=True)
    _refuse_stream(run)
    scope = scope_of(
        run, saga_id, log, name=name or run.title, approve=approve, drain_timeout=drain_timeout,
        on_failure=on_failure, metadata=metadata,
    )  # fmt: skip
    async with scope as saga:
        with run.inside(saga):
            try:
                result = await run.start()
            except HookAborted as error:
                ended_by_us(error)
            waits = reason_to_wait(saga, result)
            if waits:
                await saga.asuspend(waits)
            return result


def reason_to_wait(saga: Saga, result: object) -> str:
    """Why the saga is to be suspended after a run. Empty: it is not, or it is for whoever opened it to see to."""
    if not isinstance(result, HumanFeedbackPending) or saga.scope:
        return ""
    method = getattr(getattr(result, "context", None), "method_name", "")
    return f"the flow waits for a person's feedback on {method!r}"


saga_kickoff = saga_run
asaga_kickoff = asaga_run
