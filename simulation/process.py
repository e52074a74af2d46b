"""Simulated processes: a clock and a log of their own, and the flows that their threads and tasks would drive.

A script here is a generator of the engine's effects: the engine's own flows, wrapped so that an exception that the
driver would let out (a signal, a broken log) closes them as `drive` does and takes the way that `Saga` takes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from agent_saga_core import LogUnavailable, MemoryLog, SagaBusy, SagaNotRunning, StepUnknown
from agent_saga_core.engine.calls import prepare
from agent_saga_core.engine.effects import Effect, Flow, Outcome, Sleep, Wait
from agent_saga_core.engine.finish import abort, finish, finish_savepoint, leave_savepoint, suspend
from agent_saga_core.engine.reopen import opening
from agent_saga_core.engine.run import Options, Run, Running
from agent_saga_core.engine.step import abandon, step
from agent_saga_core.engine.unwind import release
from agent_saga_core.log.commit import Batch
from agent_saga_core.records import Record
from agent_saga_core.recovery.job import Job, begin, go_on
from simulation.plan import Call, Lane, Plan, Savepoint
from simulation.tools import Names, spec_of
from simulation.world import Ask, Paused, Request

if TYPE_CHECKING:
    from simulation.simulation import Simulation

__all__ = ["SAGA", "Late", "Process", "SimClock", "SimLog", "Stopped", "Task", "closable"]

SAGA = "s"
SUSPENDED_FOR = 500.0
Script = Generator[Effect, Any, Any]


class SimClock:
    """The simulation's time as one process sees it: an origin of its own, a wall clock that may be wrong."""

    def __init__(self, simulation: Simulation, origin: float, skew: float) -> None:
        self._simulation = simulation
        self._origin = origin
        self._skew = skew

    def time(self) -> float:
        """See `Clock.time`."""
        return 1_700_000_000.0 + self._simulation.now + self._skew

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._origin + self._simulation.now

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """Nothing in the simulation may block."""
        raise AssertionError("the simulation would block")

    def call_later(self, loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[[], None]) -> Any:
        """Nothing in the simulation has a loop."""
        raise AssertionError("the simulation has no loop")


class SimLog(MemoryLog):
    """A process's log. A signal or a full disk can strike in it where the schedule says so."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.clock, store=process.simulation.store)
        self.process = process
        self.strike = ""

    def _struck(self, where: str) -> None:
        if self.strike == where:
            self.strike = ""
            raise KeyboardInterrupt

    def append(self, record: Record) -> int:
        """See `Log.append`."""
        self._struck("before the append")
        ticket = super().append(record)
        self.process.simulation.checks.appended(self.process, record)
        self._struck("after the append")
        return ticket

    def write_batch(self, batch: Batch) -> None:
        """See `GroupCommitLog.write_batch`."""
        self._struck("before the write")
        if self.process.disk_full:
            raise OSError("no space left")
        for entry in batch.entries:
            self.process.simulation.checks.written(self.process, entry)
        super().write_batch(batch)
        self._struck("before the sync")

    def sync(self) -> None:
        """See `GroupCommitLog.sync`."""
        super().sync()
        self._struck("after the sync")

    def _start_flusher(self) -> None:
        """What the flusher does in the background is an event of the schedule."""

    def background_sync(self) -> None:
        """What `write` put off."""
        self._sync_written()

    @property
    def written_only(self) -> bool:
        """Whether something was written and not synced."""
        return bool(self._unsynced) and self._closed is None and self._broken is None

    @property
    def left_over(self) -> bool:
        """Whether records wait for a flush of a saga that this process has given up."""
        return self._closed is None and self._broken is None and SAGA not in self._owned and bool(self._buffer)

    def flush_left(self) -> None:
        """As the flush of another saga of this process would."""
        try:
            self.flush(max(self._buffer.values()))
        except LogUnavailable:
            self._buffer.clear()

    def kill(self) -> None:
        """SIGKILL: what was written stays with the kernel, synced or not; the rest is gone, and so are the locks."""
        self._closed = "it was killed"
        self._drop_ownerships()


class Stopped:
    """Instead of an effect's answer: the exception that left the driver."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def closable(flow: Flow[Any]) -> Script:
    """Drive an engine's flow as `drive` does; returns a `Stopped` where an exception left the driver."""
    answer: Any = None
    while True:
        try:
            effect = flow.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield effect
        if isinstance(answer, Stopped):
            flow.close()
            return answer


class Task:
    """One thread or asyncio task of a process: a script, and where it stands."""

    def __init__(self, name: str, process: Process, run: Run, script: Script, role: str) -> None:
        self.name = f"{process.name}/{name}"
        self.process = process
        self.run = run
        self.script = script
        self.role = role
        self.effect: Effect | None = None
        self.due: float | None = None
        self.request: Request | None = None
        self.running: Running | None = None
        self.cancel_asked = False
        self.held: BaseException | None = None
        self.call: Call | None = None
        self.undoing = ""
        """The savepoint that it is undoing."""
        self.decided_at = -1
        self.done = False

    def cancel(self) -> None:
        """An async call is asked to stop."""
        self.cancel_asked = True


class Late:
    """A call that was given up and goes on in its thread."""

    def __init__(self, task: Task, late: Callable[[Outcome], Flow[Any]], request: Request) -> None:
        self.name = f"{task.name} thread of {request.name}"
        self.process = task.process
        self.run = task.run
        self.late = late
        self.request = request


class Process:
    """One process on the machine."""

    def __init__(self, simulation: Simulation, name: str, names: Names, *, skew: float = 0.0) -> None:
        self.simulation = simulation
        self.plan: Plan = simulation.plan
        self.name = name
        self.names = names
        self.clock = SimClock(simulation, 1000.0 * (1 + len(simulation.processes)), skew)
        self.log = SimLog(self)
        self.alive = True
        self.disk_full = False
        self.tasks: list[Task] = []
        self.lates: list[Late] = []
        self.run: Run | None = None
        self.said = ""
        # of an owner
        self.body = ""
        self.in_body = False
        self.ends_early = False
        self.body_error: BaseException | None = None
        self.lanes_left = 0
        self.lane0_over = False
        self.savepoints = 0
        self.heard: list[tuple[Call, str]] = []
        self.cut: list[int] = []
        """Amounts of calls whose callers heard a cancellation when the outcome was on record."""
        self.aborted = False
        self.paused = False
        self.job: Job | None = None

    @property
    def busy(self) -> bool:
        """Whether something of it still runs."""
        return self.alive and bool(self.tasks or self.lates)

    def spawn(self, name: str, run: Run, script: Script, role: str) -> Task:
        """Start a thread or a task."""
        task = Task(name, self, run, script, role)
        self.tasks.append(task)
        self.simulation.proceed(task, None)
        return task

    # --- an owner

    def own(self, lanes: tuple[Lane, ...], body: str) -> None:
        """Open the saga and run the body in it."""
        self.body = body
        plan = self.plan
        options = Options(
            on_failure=plan.on_failure,  # type: ignore[arg-type]
            approve=lambda request: Ask(what="approve", key=""),
            drain_timeout=plan.drain,
            durability=plan.durability,  # type: ignore[arg-type]
            resume=plan.resume,  # type: ignore[arg-type]
        )
        self.run = Run(SAGA, self.log, options)
        self.spawn("main", self.run, self._main(self.run, lanes), "main")

    def _main(self, run: Run, lanes: tuple[Lane, ...]) -> Script:
        start: dict[str, Any] = {"name": "simulated", "nonce": self.simulation.nonce()}
        if self.plan.orphan_after:
            start["orphan_after"] = self.plan.orphan_after
        try:
            opened = yield from closable(opening(run, start, fresh=False, busy_timeout=0.0))
            self.said = "opened"
        except (SagaBusy, SagaNotRunning, StepUnknown) as refused:
            self.said = type(refused).__name__
            opened = Stopped(refused)
        if isinstance(opened, Stopped):
            if run.claimed and run.log.owned(SAGA):
                run.over = True
                self.release(run)
            return
        yield from self._body(run, lanes)
        yield from self._end(run)

    def _body(self, run: Run, lanes: tuple[Lane, ...]) -> Script:
        self.in_body = True
        self.lanes_left = len(lanes)
        for number, lane in enumerate(lanes):
            self.spawn(f"lane{number}", run, self._lane(run, lane, number), "lane")
        yield Wait(self._body_over, None)
        if self.body_error is None and not self.lanes_left:
            if self.plan.raises:
                self.body_error = ValueError("the body")
            elif (self.plan.suspends or self.paused) and not (run.over or run.replay_only):
                yield from self._suspend(run)
        self.in_body = False

    def _body_over(self) -> bool:
        # Of a synchronous process the first lane is the main thread itself.
        if not self.plan.is_async and not self.lane0_over:
            return False
        return not self.lanes_left or self.body_error is not None or self.ends_early

    def _suspend(self, run: Run) -> Script:
        answer = yield from closable(suspend(run, "ask a person", SUSPENDED_FOR))
        if isinstance(answer, Stopped):
            self.body_error = answer.error
            if run.suspended:
                self.release(run)
        elif answer:
            self.simulation.checks.suspended(self)
            self.release(run)
            self.said = "suspended"

    def _end(self, run: Run) -> Script:
        """What `Saga.__exit__` does."""
        error = self.body_error
        while not (run.replay_only or run.suspended):
            ended = yield from closable(self._ending(run, error))
            if isinstance(ended, Stopped) and isinstance(ended.error, KeyboardInterrupt):
                continue
            if isinstance(ended, Stopped):
                self._log_failed(run)
                return
            self.said = str(ended)
            return

    def _ending(self, run: Run, error: BaseException | None) -> Flow[Any]:
        report = yield from finish(run, error)
        self.simulation.checks.ended(self, report, error)
        yield from release(run)
        return report

    def _log_failed(self, run: Run) -> None:
        run.over = True
        self.said = "its log failed"
        if run.idle():
            self.release(run)

    def release(self, run: Run) -> None:
        """Give the saga up; a broken log gives it up all the same."""
        try:
            run.log.release(SAGA)
        except LogUnavailable:
            pass

    # --- its body

    def _lane(self, run: Run, lane: Lane, number: int) -> Script:
        try:
            for op in lane:
                error = yield from (
                    self._savepoint(run, op) if isinstance(op, Savepoint) else self._call(run, op, "", self.heard)
                )
                if isinstance(error, Paused):
                    self.paused = self.plan.heeds
                    return
                if error is not None:
                    self.body_error = self.body_error or error
                    return
        finally:
            self.lanes_left -= 1
            self.lane0_over = self.lane0_over or not number

    def _savepoint(self, run: Run, op: Savepoint) -> Script:
        self.savepoints += 1
        scope = str(self.savepoints)
        run.savepoints.add(scope)
        heard: list[tuple[Call, str]] = []
        error: BaseException | None = ValueError("the savepoint") if op.fails else None
        for call in op.calls:
            failed = yield from self._call(run, call, scope, heard)
            if failed is not None:
                error = failed
                break
        while not (run.over or run.suspended or run.replay_only):
            task = self.simulation.current
            task.undoing = scope
            flow = leave_savepoint(run, scope) if error is None else finish_savepoint(run, scope)
            ended = yield from closable(flow)
            task.undoing = ""
            if not isinstance(ended, Stopped):
                break
            if not isinstance(ended.error, KeyboardInterrupt):
                self._log_failed(run)
                return ended.error
        if error is None:
            self.heard += heard
        return error if error is not None and not isinstance(error, Exception) else None

    def _call(self, run: Run, call: Call, scope: str, heard: list[tuple[Call, str]]) -> Script:
        """One intended call, made again after an error if the plan says so; returns the error that the lane hears."""
        error: BaseException | None = None
        for _ in range(1 + call.again):
            outcome = yield from self._once(run, call, scope)
            error = outcome.error
            if error is None:
                self.simulation.checks.heard(self, call, outcome.value)
                heard.append((call, outcome.value["id"]))
                return None
            if not isinstance(error, Exception):
                if call.raises or not isinstance(error, asyncio.CancelledError):
                    return error
                continue  # swallowed, as frameworks do
            if isinstance(error, Paused):
                if call.raises:
                    return error
                continue  # asked and answered at once
            self.simulation.checks.refused(self, call, error)
        return error if call.raises and isinstance(error, Exception) else None

    def _once(self, run: Run, call: Call, scope: str) -> Script:
        token = object()

        def invoke(key: str) -> Ask:
            return Ask(what="act", tool=call.kind, amount=call.amount, key=key)

        prepared = prepare(
            run,
            spec_of(call.kind),
            {"amount": call.amount},
            invoke,
            scope=scope,
            key=call.key,
            call_id=None,
            parent=None,
            enclosing=(),
        )
        task = self.simulation.current
        task.call = call
        outcome = yield from closable(step(run, prepared, token))
        if isinstance(outcome, Stopped):
            after = yield from closable(abandon(run, token))
            if isinstance(after, Stopped) and not isinstance(after.error, KeyboardInterrupt) and run.idle():
                self.release(run)
            return Outcome(error=outcome.error)
        held, task.held = task.held, None
        return Outcome(error=held) if held is not None else outcome

    def abort(self) -> None:
        """The body, or a guard beside it, gives the saga up."""
        assert self.run is not None
        self.aborted = True
        self.spawn("abort", self.run, self._abort(self.run), "aside")

    def _abort(self, run: Run) -> Script:
        answer = yield from closable(abort(run, "somebody said so"))
        if not isinstance(answer, Stopped):
            self.simulation.checks.aborted(self)

    # --- a recoverer

    def recover(self, *, asked: bool) -> None:
        """Do what `recover(log, saga_id=..., retry=asked)` does."""
        self.job = Job(self.log, SAGA, asked=asked)
        self.run = self.job.run
        self.spawn("recover", self.run, self._recover(self.job), "recover")

    def _recover(self, job: Job) -> Script:
        flow: Callable[[], Flow[None]] = partial(begin, job, dry_run=False)
        while True:
            answer = yield from closable(flow())
            if not isinstance(answer, Stopped) and job.verdict is None:
                assert job.wake is not None
                answer = yield Sleep(max(0.0, job.wake - self.clock.monotonic()))
                flow = partial(go_on, job)
                if not isinstance(answer, Stopped):
                    continue
            break
        try:
            job.hand_back()
        except LogUnavailable:
            pass
        self.said = f"{job.verdict}: {job.reason}"
