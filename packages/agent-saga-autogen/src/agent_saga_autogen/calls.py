"""Whose call it is: the run that a call came from, the saga it is a step of, and what makes it the same call again.

AutoGen calls tools in the context in which a runtime was started, which may be that of another saga or of none. What a
call does carry, through agents, teams and nested teams, is the `CancellationToken` of its run: so each run under
`asaga_run` has a token of its own, and a call that carries it belongs to that run, whatever its context says. The
binding of the tool objects is for calls that come without it.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from types import CodeType
from typing import Any, Final

from autogen_core import CancellationToken, MessageHandlerContext

from agent_saga_autogen.adapter import NAME
from agent_saga_core import SagaAborted, SagaNotRunning, current_saga, current_step
from agent_saga_core.drive import STRAIGHT
from agent_saga_core.saga import Saga
from agent_saga_core.state import within
from agent_saga_core.wrapping import CallSite, ToolRunner, covered, refused_too_often

__all__ = ["CALL_BODIES", "AgentRun", "RunToken", "ToolCallStopped", "in_saga", "make_call", "saga_of"]

_TEAM_ID: Final = re.compile(r"_[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$")


class ToolCallStopped(Exception):
    """A tool's call ended with something that is no `Exception`: a cancellation, or an exception class of its own.

    AutoGen waits for ever for such a call. Inside a saga, a wrapped tool raises this instead, from the original, unless
    the task that made the call was itself cancelled. What became of the effect is on record: the step is UNKNOWN until
    it is settled.
    """


class AgentRun:
    """One run of an agent or team in a saga, from its opening to the end of the last task that it left.

    Made and used on one event loop, that of the run.
    """

    def __init__(self) -> None:
        self.token = RunToken(self)
        self.loop = asyncio.get_running_loop()
        self.stopping = self.loop.create_future()
        self.ended = asyncio.Event()
        self.by_token = False
        self.number = 0
        self.runtimes: list[Any] = []
        self._saga: Saga | None = None
        self._bound = ExitStack()

    @property
    def saga(self) -> Saga:
        """The scope of the run."""
        assert self._saga is not None, "the run is not open"
        return self._saga

    @property
    def is_open(self) -> bool:
        """Whether it has a saga, ended or not."""
        return self._saga is not None

    def follow(self, token: CancellationToken | None) -> None:
        """Stop when the caller's own token is cancelled, and pass that on through the run's."""
        if token is None:
            return
        ref = weakref.ref(self)  # a token keeps its callbacks for ever, and may outlive many runs

        def cancelled() -> None:
            run = ref()
            if run is not None:
                run.by_token = True
                run.token.cancel()
                run.stop()

        token.add_callback(cancelled)

    def open(self, saga: Saga, runners: Iterable[ToolRunner], runtimes: Iterable[Any] = ()) -> None:
        """Take the next number in this saga, and until `close` bind tools to it and own runtimes that nobody owns."""
        self.number = _ledger_of(saga).next_run()
        self._bound.enter_context(covered(saga, runners, by_binding=True))
        self._saga = saga
        with _lock:
            taken = [runtime for run in _open_runs for runtime in run.runtimes]
            self.runtimes = [runtime for runtime in runtimes if not any(runtime is other for other in taken)]
            _open_runs.append(self)

    def stop(self) -> None:
        """Let whoever waits for the run wake up. Any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed, and the run over
            self.loop.call_soon_threadsafe(self._stop)

    def close(self) -> None:
        """The tools and runtimes are nobody's again."""
        with _lock:
            if self in _open_runs:
                _open_runs.remove(self)
        self._bound.close()

    async def park(self) -> None:
        """Keep a refused call until the run has ended, so that its agent asks the model nothing meanwhile.

        Not a call inside of another step: the saga's end waits for that one.
        """
        stops = self.stopping.done() and asyncio.get_running_loop() is self.loop
        if stops and current_step() is None:
            await self.ended.wait()

    def _stop(self) -> None:
        if not self.stopping.done():
            self.stopping.set_result(None)


class RunToken(CancellationToken):
    """The token of one run: a call that carries it belongs to that run."""

    def __init__(self, run: AgentRun) -> None:
        super().__init__()
        self.run = run

    def link_future(self, future: asyncio.Future[Any]) -> asyncio.Future[Any]:
        """Cancel `future` when the token is cancelled; let a call of a wrapped tool begin, which then refuses.

        A workbench links the task of a call before it runs. Cancelled there, its agent would wait for ever.
        """
        coroutine: Any = future.get_coro() if isinstance(future, asyncio.Task) else None
        if getattr(coroutine, "cr_code", None) not in CALL_BODIES:
            return super().link_future(future)

        def cancel() -> None:
            if inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED:
                future.cancel()

        self.add_callback(cancel)
        return future


CALL_BODIES: set[CodeType] = set()
"""The code of the coroutines in which calls of wrapped tools run."""


def saga_of(runner: ToolRunner, token: object) -> Saga | None:
    """The saga that a call made here is a step of; None to call straight through.

    Raises:
        BoundaryRequired: The tool is bound to running sagas, and which one this call belongs to cannot be told.
        SagaNotRunning: There is none, and the tool's declaration requires one.
    """
    run = token.run if isinstance(token, RunToken) else None
    if run is None or not run.is_open:
        return runner.saga()
    current = current_saga()
    if current is None and STRAIGHT.get():
        return None
    return current if current is not None and _inside(current, run.saga) else run.saga


def in_saga(token: object) -> bool:
    """Whether a call made here, of a tool that nobody wrapped, is made in a saga."""
    run = token.run if isinstance(token, RunToken) else None
    return current_saga() is not None or (run is not None and run.is_open)


async def make_call(
    runner: ToolRunner,
    args: Mapping[str, Any],
    invoke: Callable[[str], Any],
    *,
    token: object,
    call_id: str | None,
) -> Any:
    """Make a call of a wrapped tool: a step of the saga it belongs to, or straight through where there is none.

    Raises:
        ToolCallStopped: Inside a saga: it ended with something that is no `Exception`.
        Exception: The tool's own, unchanged; and what `ToolRunner.arun` names.
    """
    saga = saga_of(runner, token)
    if saga is None:
        return await runner.arun(args, invoke)
    if isinstance(token, RunToken) and token.is_cancelled():
        await _parked(token)
        raise SagaNotRunning(
            f"the run that {runner.spec.tool!r} was called in has been stopped, and makes no new call.", saga_id=saga.id
        )
    site, task = _site(saga, runner, token, call_id), _current_task()
    try:
        return await saga.arun_step(runner.spec, args, invoke, site=site)
    except (SagaAborted, SagaNotRunning):
        _stop_if_refused(saga)
        await _parked(token)
        raise
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and not _is_the_calls_own(token):
            raise
        if isinstance(error, GeneratorExit) and _current_task() is not task:
            raise  # not the tool's: this coroutine is closed from outside, and must not wait any more
        await _parked(token)
        raise ToolCallStopped(f"{runner.spec.tool!r} ended with {type(error).__name__}, not with a result") from error


# --- what makes two calls the same


class _Ledger:
    """Runs and call ids of one saga in this process, counted; of one that goes on, from where the log leaves off."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.recalled = False
        self.runs = 0
        self.met: Counter[tuple[str, str, str]] = Counter()

    def recall(self, saga: Saga) -> None:
        """Count behind the calls that were made before; a body that is replayed makes all of them anew."""
        with self.lock:
            if self.recalled:
                return
            self.recalled = True
            for tool, site in saga.recorded_sites(NAME) if saga.goes_on else ():
                self._recall(tool, site)

    def next_run(self) -> int:
        with self.lock:
            self.runs += 1
            return self.runs

    def spelled(self, scope: str, tool: str, call_id: str) -> str:
        """A call id that no earlier call of this scope and tool has.

        Clients of some providers begin at the same id with every message, or with every agent. AutoGen itself never
        makes a call a second time, so an id that is met again is another call.
        """
        with self.lock:
            self.met[scope, tool, call_id] += 1
            number = self.met[scope, tool, call_id]
        return call_id if number == 1 else f"{call_id}#{number}"

    def _recall(self, tool: str, site: CallSite) -> None:
        if site.call_id is not None:
            self.met[site.scope, tool, site.call_id] += 1
            plain, mark, number = site.call_id.rpartition("#")
            if mark and number.isdecimal():
                self.met[site.scope, tool, plain] = max(self.met[site.scope, tool, plain], int(number))
        run = site.scope.partition("/")[0]
        if run.isdecimal():
            self.runs = max(self.runs, int(run))


_lock = threading.RLock()
_open_runs: list[AgentRun] = []


def _ledger_of(saga: Saga) -> _Ledger:
    """The ledger of a saga: one for all its savepoints, and a new one when it is opened again."""
    ledger = saga.shared(_Ledger)
    ledger.recall(saga)
    return ledger


def _site(saga: Saga, runner: ToolRunner, token: object, call_id: str | None) -> CallSite:
    run = token.run if isinstance(token, RunToken) else _run_in(saga)
    number = run.number if run is not None else 0
    agent = _agent()
    scope = f"{number}/{agent}" if agent else str(number)
    tool = runner.spec.tool
    return CallSite(
        adapter=NAME,
        scope=scope,
        call_id=_ledger_of(saga).spelled(scope, tool, call_id) if call_id is not None else None,
    )


def _agent() -> str:
    """The name of the agent whose message is being handled; teams put a random id behind it."""
    try:
        kind: str = MessageHandlerContext.agent_id().type
    except RuntimeError:
        return ""
    return _TEAM_ID.sub("", kind)


def _run_in(saga: Saga) -> AgentRun | None:
    """The innermost open run of a saga."""
    with _lock:
        return next((run for run in reversed(_open_runs) if run.saga.same_as(saga)), None)


def _inside(saga: Saga, other: Saga) -> bool:
    """Whether `saga` is the scope `other`, or a savepoint in it."""
    return saga.same_as(other) and within(saga.scope, other.scope)


# --- refusals and cancellation


def _stop_if_refused(saga: Saga) -> None:
    if not refused_too_often(saga):
        return
    with _lock:
        runs = [run for run in _open_runs if run.saga.same_as(saga)]
    for run in runs:
        run.stop()


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None


async def _parked(token: object) -> None:
    if isinstance(token, RunToken):
        try:
            await token.run.park()
        except asyncio.CancelledError:
            if not _is_the_calls_own(token):
                raise


def _is_the_calls_own(token: object) -> bool:
    """Whether a cancellation is the call's alone: raised in it, or asked for through its token.

    A workbench makes each call in a task of its own and lets the token cancel that. Otherwise whoever cancelled the
    task that runs here waits for the cancellation to come out.
    """
    task = asyncio.current_task()
    if task is None or task.cancelling() == 0:
        return True
    return isinstance(token, CancellationToken) and token.is_cancelled()
