"""`saga_run` and `asaga_run`: an agent's run as one saga, its tools bound to it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack, cast

from agents import Agent, RunContextWrapper, Runner, RunResult

from agent_saga_core import Log, Saga, SagaNotFound, current_saga, saga_scope
from agent_saga_core.wrapping import RunOptions, covered, refuse_on_a_loop
from agent_saga_openai_agents.sites import (
    Mark,
    begin,
    inside,
    point_of,
    put_mark,
    runs_of,
    token_in,
    token_of,
)
from agent_saga_openai_agents.states import aload_state, complete, loop_of_this_thread, resumes
from agent_saga_openai_agents.walk import runners_of

__all__ = ["Arguments", "Prepared", "asaga_run", "reason_to_wait", "saga_run"]


class Arguments(RunOptions, total=False):
    """The arguments of the scope, and those of the framework's own run."""

    context: Any
    max_turns: int | None
    hooks: Any
    run_config: Any
    error_handlers: Any
    previous_response_id: str | None
    auto_previous_response_id: bool
    conversation_id: str | None
    session: Any


async def asaga_run(
    starting_agent: Agent[Any],
    input: Any,
    *,
    saga_id: str | None = None,
    log: Log | str | None = None,
    **arguments: Unpack[Arguments],
) -> RunResult:
    """`Runner.run` as one saga: when this returns a result without interruptions, the saga has committed.

    When it raises, everything that may have happened was undone, or `RollbackIncomplete` names what may be left. A
    result with interruptions means that the saga is suspended: keep `dump_state(result)`, and go on by passing that,
    or the state from `load_state`, as the input here.

    Inside of an open saga the run is a savepoint of it. Tools that are not wrapped, hosted tools and MCP servers run
    as ever and are no steps: see `coverage`.

    Args:
        starting_agent: The agent. Its wrapped tools, those of its handoffs and those of agents called as tools are
            bound to the saga.
        input: As in `Runner.run`; or what `dump_state` or `load_state` returned.
        saga_id: Names the saga; left out when a run goes on, which knows it. Default: drawn.
        log: A log or the URL of one.
        **arguments: The other arguments of `Runner.run`, and of `saga_scope`: `name` (the agent's), `approve`,
            `on_failure`, `drain_timeout`, `durability`, `busy_timeout`, `metadata`.

    Raises:
        SagaAborted: The run ended normally and its saga could not commit; all is undone.
        RollbackIncomplete: Something may be left; its `.report` names it.
        SagaNotRunning: The saga of this id has ended without committing.
        SagaNotFound: The run goes on from a state whose saga is not in this log.
        ValueError: The state belongs to no saga that is known.
    """
    prepared = Prepared(starting_agent, input, saga_id, log, arguments)
    await prepared.load()
    async with prepared.saga as saga:
        with prepared.bound(saga):
            with prepared.running(saga) as run:
                result = await Runner.run(starting_agent, prepared.given, **run)
            prepared.mark(result)
            waits = reason_to_wait(saga, result)
            if waits:
                await saga.asuspend(waits)
            return result
    raise AssertionError("a scope swallows no exception")


def saga_run(
    starting_agent: Agent[Any],
    input: Any,
    *,
    saga_id: str | None = None,
    log: Log | str | None = None,
    **arguments: Unpack[Arguments],
) -> RunResult:
    """`Runner.run_sync` as one saga; see `asaga_run`.

    Raises:
        RuntimeError: An event loop runs here. Nothing has run.
    """
    refuse_on_a_loop()
    prepared = Prepared(starting_agent, input, saga_id, log, arguments)
    if prepared.resumed is not None:
        complete(prepared.load())
    with prepared.saga as saga:
        with prepared.bound(saga):
            try:
                with prepared.running(saga) as run:
                    result = Runner.run_sync(starting_agent, prepared.given, **run)
            finally:
                prepared.let_end(saga)
            prepared.mark(result)
            waits = reason_to_wait(saga, result)
            if waits:
                saga.suspend(waits)
            return result
    raise AssertionError("a scope swallows no exception")


class Prepared:
    """A run that is about to start: its scope, not yet opened, and the arguments of the framework's own run.

    Raises:
        ValueError: The input goes on with a run whose saga is not known, or is another one than is named.
    """

    def __init__(
        self, agent: Agent[Any], given: Any, saga_id: str | None, log: Log | str | None, arguments: Mapping[str, Any]
    ) -> None:
        scope: dict[str, Any] = {"name": agent.name or "agent"}
        scope |= {name: value for name, value in arguments.items() if name in RunOptions.__annotations__}
        self.run = {name: value for name, value in arguments.items() if name not in scope}
        self.agent = agent
        self.given = given
        self.resumed = resumes(given, saga_id)
        self.begun: Mark | None = None
        self.log = log
        self.drain_timeout: float = scope.get("drain_timeout", 30.0)
        self.saga = saga_scope(
            self.resumed.saga_id if self.resumed is not None else saga_id,
            log=log,
            # A state goes on behind the calls that the run has made; without one, the run begins at its top.
            resume="continue" if self.resumed is not None else "replay",
            **scope,
        )

    async def load(self) -> None:
        """Make the framework's state of an envelope. Before the saga is opened: an unfit state rolls nothing back.

        Raises:
            SagaNotFound: The log does not hold the saga that it goes on with.
        """
        if self.resumed is None:
            return
        await asyncio.to_thread(self._find, self.resumed)
        if isinstance(self.given, Mapping):
            self.given = await aload_state(self.agent, cast("Mapping[str, Any]", self.given))

    def _find(self, resumed: Mark) -> None:
        """Hold the saga against the log: in another one, every call that was made would be made again."""
        around = current_saga()
        joins = around is not None and around.id == resumed.saga_id
        found = token_of(around) if around is not None and joins else token_in(self.log, resumed.saga_id)
        if found is None or resumed.token not in ("", found):
            raise SagaNotFound(
                f"saga {resumed.saga_id!r}, which this state belongs to, is not in this log. Name the log that the run "
                "began with: log=..., or $AGENT_SAGA_LOG.",
                saga_id=resumed.saga_id,
            )

    def let_end(self, saga: Saga) -> None:
        """Let async calls that a sync run has left end on its loop, which the scope's end would not run."""
        loop = loop_of_this_thread()
        calls = runs_of(saga).calls_on(loop) if loop is not None and not loop.is_running() else []
        if loop is not None and calls:
            loop.run_until_complete(asyncio.wait(calls, timeout=self.drain_timeout))

    @contextmanager
    def bound(self, saga: Saga) -> Generator[None]:
        """The tools that can be seen belong to the saga in the block."""
        with covered(saga, runners_of(self.agent)):
            yield

    @contextmanager
    def running(self, saga: Saga) -> Generator[dict[str, Any]]:
        """Start the framework's run in the block, with these arguments: it is numbered in the saga."""
        run = self.run
        if self.resumed is not None:
            wrapper: object = getattr(self.given, "_context", None)
        else:
            context: Any = run.get("context")
            wrapper = cast(object, context if isinstance(context, RunContextWrapper) else RunContextWrapper(context))
            run = {**run, "context": wrapper}
        part = point_of(self.given) if self.resumed is not None else "0"
        self.begun = begin(saga, wrapper, self.resumed, part)
        with inside(self.begun):
            yield run

    def mark(self, result: Any) -> None:
        """Remember on a result which run it is of: on its context, too, which its states share."""
        if self.begun is not None:
            put_mark(result, self.begun)
            put_mark(result.context_wrapper, self.begun)


def reason_to_wait(saga: Saga, result: Any) -> str:
    """Why the saga is to be suspended after a run: for whose yes it waits. Empty: it is not.

    A saga that can no longer commit is not: it is rolled back rather than kept waiting.
    """
    waiting: list[Any] = getattr(result, "interruptions", None) or []
    if not waiting or not saga.takes_steps:
        return ""
    names = sorted({str(getattr(item, "name", None) or "a tool") for item in waiting})
    return f"waiting for approval of {', '.join(names)}"
