"""One run of a scenario under a plan: on a loop or without one, in this process or in one that is killed."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import os
import selectors
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from agent_saga_core import drive, logs
from agent_saga_core.engine.calls import is_async
from agent_saga_core.engine.effects import Outcome
from agent_saga_core.log import FileLog, MemoryLog
from agent_saga_core.log.base import Log
from agent_saga_core.log.memory import MemoryStore
from agent_saga_core.recovery import RecoveryReport, arecover, read_saga, recover
from agent_saga_core.state import SagaState
from agent_saga_core.testing.inject import WAYS, InjectedInterrupt, Injector, Plan, ProofClock, Way

__all__ = ["KILLS", "Do", "Flow", "Kit", "Ran", "adrive_flow", "drive_flow", "run"]

T = TypeVar("T")
CHILD_PATIENCE = 60.0
"""Seconds of real time after which a child process that does not end is a broken probe."""

KILLS: Final[frozenset[Way]] = frozenset({"killed-before", "killed-after", "killed-undoing"})


# --- sync and async, once


class Do(NamedTuple):
    """Call something, and await what it returns if that is awaitable."""

    fn: Callable[[], Any]
    where: Literal["here", "thread", "scenario"] = "here"
    injector: Injector | None = None


Flow = Generator[Do, Any, T]


def drive_flow(flow: Flow[T]) -> T:
    """Do what a flow asks for, with blocking calls; returns what it returns."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            do = flow.throw(failure) if failure is not None else flow.send(answer)
        except StopIteration as stop:
            return stop.value
        answer, failure = None, None
        try:
            value = do.fn()
            if inspect.isawaitable(value):
                if _a_loop_runs():
                    _close(value)
                    raise _Refused("This is async, and an event loop runs here. Use `await aprove_rollback(...)`.")
                with asyncio.Runner() as runner:
                    value = runner.run(_main(value, do.injector))
            answer = value
        except BaseException as error:
            answer, failure = _heard(do, error)


async def adrive_flow(flow: Flow[T]) -> T:
    """Do what a flow asks for, on the running loop; returns what it returns."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            do = flow.throw(failure) if failure is not None else flow.send(answer)
        except StopIteration as stop:
            return stop.value
        answer, failure = None, None
        try:
            in_thread = do.where == "thread" or (do.where == "scenario" and not is_async(do.fn))
            value = await asyncio.to_thread(do.fn) if in_thread else do.fn()
            if inspect.isawaitable(value):
                value = await _task(_main(value, do.injector))
            answer = value
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _cancelled():
                failure = error
            else:
                answer, failure = _heard(do, error)


def _heard(do: Do, error: BaseException) -> tuple[Outcome | None, BaseException | None]:
    """A scenario's failure is an answer, unless it was not the kit that interrupted it."""
    ours = isinstance(error, InjectedInterrupt | asyncio.CancelledError | Exception)
    if isinstance(error, _Refused):
        ours = False
    return (Outcome(error=error), None) if do.where == "scenario" and ours else (None, error)


class _Refused(RuntimeError):
    """Not the scenario's failure, but ours to run it."""


def _close(value: Any) -> None:
    if inspect.iscoroutine(value):
        value.close()


async def _main(awaitable: Any, injector: Injector | None) -> Any:
    task = asyncio.current_task()
    if injector is not None and task is not None:
        injector.main = asyncio.get_running_loop(), task
    return await awaitable


async def _task(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it in a task of its own, so that cancelling it is not cancelling us."""
    task = asyncio.create_task(coroutine)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    return task.result()


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# --- what is run


class Kit:
    """What was asked for."""

    def __init__(
        self,
        scenario: Callable[[], Any],
        snapshot: Callable[[], Any],
        reset: Callable[[], Any],
        ways: Iterable[Way] | None,
        only: str | Iterable[str] | None,
        allow: Iterable[str],
    ) -> None:
        self.scenario = scenario
        self.reset = reset
        self._snapshot = snapshot
        self.ways: tuple[Way, ...] = tuple(WAYS) if ways is None else tuple(ways)
        unknown = [way for way in self.ways if way not in WAYS]
        if unknown:
            raise ValueError(f"unknown ways {unknown}. Choose from {', '.join(WAYS)}.")
        self.only = (only,) if isinstance(only, str) else tuple(only) if only is not None else None
        if isinstance(allow, str):
            raise ValueError(f"allow= takes tools' names. Write allow=({allow!r},).")
        self.allow = frozenset(allow)

    def snapshot(self) -> Any:
        """The state of the world, as a copy; awaitable if the user's is."""
        value = self._snapshot()
        return _acopied(value) if inspect.isawaitable(value) else _copied(value)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # what cannot be copied is taken for something that does not change
        return value


async def _acopied(value: Any) -> Any:
    return _copied(await value)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run of the scenario, everything recovered."""

    injector: Injector
    before: Any
    after: Any
    error: BaseException | None
    states: dict[str, SagaState]
    reasons: dict[str, str]
    struck: str | None
    said: str = ""


# --- one run


@contextmanager
def _installed(injector: Injector, log: Log) -> Generator[None]:
    """The kit's log and its seam, in place of the scenario's own; what fails on purpose is not logged."""
    drive.CALLS.append(injector.replace)
    logs.STAND_INS.append(log)
    drive.log.addFilter(_nothing)
    try:
        yield
    finally:
        drive.log.removeFilter(_nothing)
        drive.CALLS.remove(injector.replace)
        logs.STAND_INS.remove(log)


def _nothing(_: logging.LogRecord) -> bool:
    return False


def run(kit: Kit, plan: Plan, *, child: bool = False) -> Flow[Ran]:
    """Reset the world, run the scenario under the plan, recover, and look at the world; `child`: in a child process."""
    yield Do(kit.reset)
    before = yield Do(kit.snapshot)
    if child:
        return (yield from _run_in_child(kit, plan, before))
    clock = ProofClock()
    store = MemoryStore()
    log = MemoryLog(clock, store=store)
    injector = Injector(plan, clock, log, snapshot=kit.snapshot)
    with _installed(injector, log):
        outcome = yield Do(kit.scenario, "scenario", injector)
        if plan.simulate_death and injector.saga is not None and plan.way in KILLS:
            log.crash()
            log = MemoryLog(clock, store=store)
        reasons = yield from _recovered(log, clock)
        for late in injector.land():
            yield Do(lambda late=late: _forgiving(late))
        reasons |= yield from _recovered(log, clock)
    after = yield Do(kit.snapshot)
    states = {saga: read_saga(log, saga) for saga in log.saga_ids()}
    error = outcome.error if isinstance(outcome, Outcome) else None
    log.close()
    return Ran(
        injector=injector,
        before=before,
        after=after,
        error=error,
        states=states,
        reasons=reasons,
        struck=injector.saga,
    )


async def _forgiving(awaitable: Any) -> None:
    try:
        await awaitable
    except Exception:
        return  # the other side refused what came late


def _recovered(log: Log, clock: ProofClock) -> Flow[dict[str, str]]:
    """Finish what the scenario left to recovery; returns why anything is left."""
    unfinished = log.unfinished().saga_ids
    if not unfinished:
        return {}
    starts = [log.read(saga)[0].data for saga in unfinished]
    clock.let_pass(max(float(start.get("orphan_after", 0.0)) for start in starts))
    running = _a_loop_runs()
    report: RecoveryReport = yield Do(
        (lambda: arecover(log, retry=False)) if running else (lambda: recover(log, retry=False))
    )
    return {**dict.fromkeys(report.live, "it is still owned"), **report.reasons}


def _a_loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# --- one run in a process of its own


def _run_in_child(kit: Kit, plan: Plan, before: Any) -> Flow[Ran]:
    clock = ProofClock()
    with tempfile.TemporaryDirectory(prefix="agent-saga-proof-") as directory:
        FileLog(directory, force=True).close()  # made here, so that a child that dies early leaves a log to read
        pid, hearing = _fork(kit, plan, directory)
        ended, told = yield Do(lambda: _await_child(pid, hearing), "thread")
        log = FileLog(directory, clock=clock, force=True)
        try:
            reasons = yield from _recovered(log, clock)
            states = {saga: read_saga(log, saga) for saga in log.saga_ids()}
        finally:
            log.close()
        said = "" if ended in (0, -signal.SIGKILL) else _last_words(directory, ended)
    after = yield Do(kit.snapshot)
    injector = Injector(plan, clock)
    struck = None
    for line in told.splitlines():
        kind, _, text = line.partition(" ")
        if kind == "struck":
            struck = text
        elif kind == "missed":
            injector.missed = text
    return Ran(
        injector=injector,
        before=before,
        after=after,
        error=None,
        states=states,
        reasons=reasons,
        struck=struck,
        said=said,
    )


def _fork(kit: Kit, plan: Plan, directory: str) -> tuple[int, int]:
    """Start the scenario in a child; returns its pid and the pipe on which it tells what it met."""
    hearing, telling = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns that a child of a process with threads may deadlock: `_await_child` is bounded.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(telling)
        return pid, hearing
    code = 70
    try:
        os.close(hearing)
        _silence(directory)
        code = _child(kit, plan, directory, telling)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _silence(directory: str) -> None:
    """What the child prints goes to a file, and what its parent had not printed yet is not printed twice."""
    words = os.open(f"{directory}.words", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(words, 1)
    os.dup2(words, 2)
    sys.stdout = sys.stderr = open(2, "w", encoding="utf-8", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _child(kit: Kit, plan: Plan, directory: str, telling: int) -> int:
    clock = ProofClock()
    log = FileLog(directory, clock=clock, force=True)
    injector = Injector(plan, clock, snapshot=kit.snapshot)
    injector.tell = lambda saga: _say(telling, f"struck {saga}")
    with _installed(injector, log):
        outcome = drive_flow(_scenario_alone(kit, injector))
        log.close()
    if injector.missed:
        _say(telling, f"missed {injector.missed}")
    if injector.saga is None and isinstance(outcome, Outcome) and outcome.error is not None:
        os.write(2, f"{type(outcome.error).__name__}: {outcome.error}\n".encode())
        return 1
    return 0


def _scenario_alone(kit: Kit, injector: Injector) -> Flow[Any]:
    return (yield Do(kit.scenario, "scenario", injector))


def _say(telling: int, line: str) -> None:
    os.write(telling, f"{line}\n".encode())


def _await_child(pid: int, hearing: int) -> tuple[int, str]:
    """How the child ended, and what it told. One that hangs is killed."""
    told = b""
    try:
        with selectors.DefaultSelector() as selector:  # `select` knows no descriptor from 1024 on
            selector.register(hearing, selectors.EVENT_READ)
            while selector.select(CHILD_PATIENCE):
                heard = os.read(hearing, 65536)
                if not heard:
                    break
                told += heard
            else:
                os.kill(pid, signal.SIGKILL)
                told += b"missed the child process did not end\n"
    finally:
        os.close(hearing)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told.decode(errors="replace")


def _last_words(directory: str, ended: int) -> str:
    words = Path(f"{directory}.words")
    lines = words.read_text("utf-8", "replace").splitlines() if words.exists() else []
    return f"it ended with {ended}" + (f", {lines[-1]}" if lines else "")
