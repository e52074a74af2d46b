"""The schedule: one event after the other, chosen by a seed or read from a list."""

from __future__ import annotations

import asyncio
import os
import random
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from agent_saga_core import LogUnavailable, Observation
from agent_saga_core.engine.effects import Append, Blocking, CancelRunning, Flush, Outcome, Sleep, Wait, Write
from agent_saga_core.engine.effects import Call as CallEffect
from agent_saga_core.log.memory import MemoryStore
from agent_saga_core.records import FINAL, Record
from agent_saga_core.state import SagaStatus, fold, within
from simulation.checks import Checks, Violation
from simulation.plan import Call, Lane, Plan, Visitor
from simulation.process import SAGA, Late, Process, Stopped, Task, closable
from simulation.tools import IN_DOUBT, all_names, names_without, using
from simulation.world import Ask, Paused, Request, World

__all__ = ["Result", "Simulation"]

MOST_EVENTS = 4000
UNDO_LIMIT = 20.0
"""Seconds by which a compensation's request has landed or is lost."""


class Move(NamedTuple):
    """Something that may happen next. `plain` moves are what happens when nothing goes wrong."""

    label: str
    weight: float
    act: Callable[[], None]
    plain: bool = False


@dataclass
class Result:
    """What one run came to."""

    plan: Plan
    schedule: list[str]
    trace: list[str]
    failure: Violation | None = None
    events: int = 0
    seen: dict[str, int] = field(default_factory=dict[str, int])
    """What happened how often, to know what a number of seeds has covered."""


class Simulation:
    """One run of a plan.

    Args:
        plan: What it is about.
        chance: Chooses among the moves; None to follow `schedule`.
        schedule: Labels of moves. One that cannot happen is passed over; when they are used up, what is plain happens.
    """

    def __init__(self, plan: Plan, chance: random.Random | None, schedule: list[str] | None = None) -> None:
        self.plan = plan
        self.chance = chance
        self.to_follow = list(schedule or ())[::-1]
        self.now = 0.0
        self.store = MemoryStore()
        self.world = World()
        self.processes: list[Process] = []
        self.requests: list[Request] = []
        self.visitors = list(plan.visitors)
        self.kills = plan.kills
        self.calm = False
        self.current: Any = None
        self.count = 0
        self.names = 0
        self.nonces = 0
        self.refusals = 2
        self.sleeps = 1
        self.interrupts = 5
        self.forks = 1
        self.schedule: list[str] = []
        self.trace: list[str] = []
        self.seen: dict[str, int] = {}
        self.appended: list[str] = []
        self.checks = Checks(self)

    def nonce(self) -> str:
        """A new one for every START."""
        self.nonces += 1
        return f"{self.nonces:032x}"

    def fault(self, name: str) -> float:
        """The weight of a fault now."""
        return 0.0 if self.calm else self.plan.faults.get(name, 0.0)

    # --- running

    def run(self) -> Result:
        """Run to the end; a broken promise is in the result, not raised."""
        failure: Violation | None = None
        try:
            self._visit(Visitor(role="open", body="same"))
            self._play()
            self._epilogue()
            self.checks.final()
        except Violation as violation:
            failure = violation
        except Exception as error:  # the engine itself failed
            where = traceback.extract_tb(error.__traceback__)[-1]
            failure = Violation("no surprises", f"{type(error).__name__}: {error} ({where.name}:{where.lineno})")
            failure.__cause__ = error
        for process in self.processes:
            self._let_die(process)
        return Result(self.plan, self.schedule, self.trace, failure, self.count, self.seen)

    def _play(self) -> None:
        while moves := self.moves():
            move = self._choose(moves)
            if move is None:
                return
            self.count += 1
            if self.count > MOST_EVENTS:
                raise Violation("it ends", f"not after {MOST_EVENTS} events")
            self.schedule.append(move.label)
            self.trace.append(f"{self.now:8.1f}  {move.label}")
            move.act()
            if self.appended:
                self.trace[-1] += "  -> " + ", ".join(self.appended)
                self.appended.clear()
            self.checks.after_event()

    def _choose(self, moves: list[Move]) -> Move | None:
        if self.chance is not None and not self.calm:
            return self.chance.choices(moves, [move.weight for move in moves])[0]
        by_label = {move.label: move for move in reversed(moves)}
        while self.to_follow and not self.calm:
            found = by_label.get(self.to_follow.pop())
            if found is not None:
                return found
        return next((move for move in moves if move.plain), None)

    def _epilogue(self) -> None:
        """Nothing goes wrong any more: everything sent arrives, and recoveries that are asked for come by."""
        self.calm = True
        self._play()
        for _ in range(2):
            folded = self.folded()
            if folded is None or folded.status.final:
                break
            if folded.status is SagaStatus.SUSPENDED and folded.deadline is not None:
                self.now += 100_000.0
            elif folded.status is SagaStatus.RUNNING and folded.orphan_after:
                self.now += folded.orphan_after + (10_000.0 if self.plan.skew else 10.0)
            self.trace.append(f"{self.now:8.1f}  -- a recovery in peace")
            self._visit(Visitor(asked=True))
            self._play()
        self._play()

    def folded(self) -> Any:
        """The saga as the store holds it; None if it holds nothing."""
        records = self.records()
        return fold(records, SAGA) if records else None

    def records(self) -> list[Record]:
        """The stored records, in order."""
        stored = self.store.records.get(SAGA, {})
        return [stored[n] for n in sorted(stored)]

    # --- what may happen

    def moves(self) -> list[Move]:
        """Everything that may happen next."""
        moves: list[Move] = []
        landing = [r for r in self.requests if r.state == "sent" and r.lands_by <= self.now]
        for process in self.processes:
            if not process.alive:
                continue
            if process.log.left_over:
                moves.append(Move(f"{process.name} flushes what is left", 0.5, process.log.flush_left, True))
            for task in process.tasks:
                self._task_moves(moves, task)
            for late in process.lates:
                self._late_moves(moves, late)
            self._process_moves(moves, process)
        for request in self.requests:
            if request.state == "sent":
                self._landing_moves(moves, request)
        if not landing:
            self._time_moves(moves, bool(moves))
        if not self.calm:
            self._visits(moves)
        return moves

    def _task_moves(self, moves: list[Move], task: Task) -> None:
        effect = task.effect
        act = partial(self._perform, task)
        if task.request is not None:
            self._calling_moves(moves, task, task.request)
            return
        if isinstance(effect, Wait | Sleep):
            if not self._ready(task):
                if isinstance(effect, Wait) and task.role == "lane" and self.plan.is_async and effect.timeout is None:
                    weight = 0.1 * self.fault("cancel")
                    _may(moves, f"{task.name} cancelled in its wait", weight, partial(self._cancelled, task))
                self._interrupts(moves, task)
                return
        moves.append(Move(f"{task.name} {_say(effect)}", 2.0, act, True))
        if isinstance(effect, Flush):
            if task.role == "lane" and self.plan.is_async:
                weight = 0.15 * self.fault("cancel")
                _may(moves, f"{task.name} cancelled in its flush", weight, partial(self._cancelled_flush, task))
            if self.kills:
                label = f"kill {task.process.name} in the flush of {task.name}"
                _may(moves, label, 0.2 * self.fault("flush"), partial(self._kill_in_flush, task))
        elif isinstance(effect, CallEffect) and effect.kind in ("probe", "approve"):
            weight = 0.7 * self.fault("blind")
            _may(moves, f"{task.name} {effect.kind} in vain", weight, partial(self._blind, task))
        self._interrupts(moves, task)

    def _interrupts(self, moves: list[Move], task: Task) -> None:
        """A signal on the main thread, or a recoverer that is stopped."""
        effect, weight = task.effect, 0.04 * self.fault("interrupt") if self.interrupts else 0.0
        if not weight or (task.role == "recover" and not isinstance(effect, Sleep | Flush)):
            return
        if self.plan.is_async or task.role not in ("main", "lane", "recover"):
            return
        if task.role == "lane" and not task.name.endswith("lane0"):
            return
        if isinstance(effect, CallEffect | CancelRunning) or (task.role == "main" and task.process.in_body):
            return
        wheres = ["before it"]
        if isinstance(effect, Append):
            wheres = ["before the append", "after the append", "after it"]
        elif isinstance(effect, Flush):
            wheres = ["before the write", "before the sync", "after the sync"]
        for where in wheres:
            _may(moves, f"{task.name} interrupted {where}", weight, partial(self._interrupt, task, where))

    def _calling_moves(self, moves: list[Move], task: Task, request: Request) -> None:
        self._request_moves(moves, request, partial(self._answered, task))
        effect = task.effect
        assert isinstance(effect, CallEffect)
        lost = request.state == "lost"
        if effect.kind == "compensation":
            weight = 0.15 * self.fault("undo")
            if lost or (weight and request.state != "held"):
                act = partial(self._give_up, task, ConnectionResetError())
                moves.append(Move(f"{task.name} hears nothing of {request.name}", max(weight, 0.05), act, lost))
            _may(moves, f"{task.name} interrupted in {request.name}", 0.03 * weight,
                 partial(self._give_up, task, KeyboardInterrupt()))  # fmt: skip
            return
        if request.state in ("held", "landed"):
            weight = 0.3 * self.fault("pause")
            _may(moves, f"{task.name} pauses in {request.name}", weight, partial(self._pause, task))
        weight = 0.12 * self.fault("cut")
        if request.state != "held" and (weight or lost):
            act = partial(self._give_up, task, ConnectionResetError())
            moves.append(Move(f"{task.name} hears nothing of {request.name}", max(weight, 0.05), act, lost))
        if self.plan.is_async:
            asked = 5.0 if task.cancel_asked else 0.1 * self.fault("cancel")
            if asked:
                act = partial(self._give_up, task, asyncio.CancelledError())
                moves.append(Move(f"{task.name} cancelled in {request.name}", asked, act, task.cancel_asked))
            _may(
                moves, f"{task.name} times out in {request.name}", weight, partial(self._give_up, task, TimeoutError())
            )
        else:
            _may(moves, f"{task.name} leaves {request.name} to its thread", weight, partial(self._leave, task))
            if task.name.endswith("lane0"):
                weight = 0.08 * self.fault("interrupt")
                act = partial(self._give_up, task, KeyboardInterrupt())
                _may(moves, f"{task.name} interrupted in {request.name}", weight, act)

    def _request_moves(self, moves: list[Move], request: Request, answered: Callable[[], None]) -> None:
        if request.state == "held":
            moves.append(Move(f"{request.name} sent", 2.0, partial(self._send, request), True))
        elif request.state == "landed":
            moves.append(Move(f"{request.name} answered", 1.5, answered, True))

    def _late_moves(self, moves: list[Move], late: Late) -> None:
        self._request_moves(moves, late.request, partial(self._late_ends, late, None))
        if late.request.state != "held":
            weight, lost = 0.1 * self.fault("cut"), late.request.state == "lost"
            if weight or lost:
                act = partial(self._late_ends, late, ConnectionResetError())
                moves.append(Move(f"{late.name} hears nothing", max(weight, 0.05), act, lost))

    def _landing_moves(self, moves: list[Move], request: Request) -> None:
        moves.append(
            Move(
                f"{request.name} lands", 1.0 / (1.0 + 6.0 * self.fault("slow")), partial(self._land, request, ""), True
            )
        )
        ask, name = request.ask, request.name
        if self.calm or self.world.knows(ask.key, self.now):
            return
        if ask.what == "act":
            weight = 0.15 * self.fault("wrong")
            for how in ("declined", "fails", "breaks") if ask.tool != "quote" else ("declined", "fails"):
                _may(moves, f"{name} {how}", weight, partial(self._land, request, how))
            _may(moves, f"{name} lost", 0.1 * self.fault("lose"), partial(setattr, request, "state", "lost"))
            return
        weight = 0.25 * self.fault("undo")
        _may(moves, f"{name} stumbles", weight, partial(self._land, request, "stumbles"))
        _may(moves, f"{name} breaks", 0.1 * weight, partial(self._land, request, "breaks"))
        _may(moves, f"{name} lost", 0.5 * weight, partial(setattr, request, "state", "lost"))
        if self.refusals:
            _may(moves, f"{name} refused", weight, partial(self._refuse, request))

    def _process_moves(self, moves: list[Move], process: Process) -> None:
        name = process.name
        if not process.busy:
            return
        calm = self.calm or not process.in_body
        if process.in_body and not process.ends_early and process.lanes_left:
            _may(moves, f"{name} ends early", 0.05 * self.fault("early"), partial(setattr, process, "ends_early", True))
        if not calm and process.run is not None and not process.run.replay_only and not process.aborted:
            _may(moves, f"{name} aborts", 0.05 * self.fault("abort"), process.abort)
        if process.log.written_only:
            moves.append(Move(f"{name} syncs", 0.3, process.log.background_sync))
        if self.kills and not self.calm:
            undoing = any(
                isinstance(task.effect, CallEffect) and task.effect.kind == "compensation" for task in process.tasks
            )
            weight = self.fault("kill") * (0.25 if undoing else 0.04)
            _may(moves, f"kill {name}", weight, partial(self._kill, process))
            _may(moves, "the power fails", 0.02 * self.fault("power"), self._power)
        if not process.disk_full:
            _may(moves, f"{name} disk full", 0.02 * self.fault("disk"), partial(setattr, process, "disk_full", True))
        _may(moves, f"{name} forks", 0.3 * self.fault("fork") * self.forks, partial(self._fork, process))

    def _time_moves(self, moves: list[Move], busy: bool) -> None:
        due = [r.lands_by for r in self.requests if r.state == "sent"]
        due += [t.due for p in self.processes if p.alive for t in p.tasks if t.due is not None]
        later = [moment for moment in due if moment > self.now]
        if later:
            weight = 1.0 if not busy else 0.15 * self.fault("hasty")
            _may(moves, "time passes", weight, partial(self._pass_time, min(later)), plain=not busy)
        if busy and not self.calm:
            until = min([self.now + 7.0, *later])
            _may(moves, "a while passes", 0.08 * self.fault("hasty"), partial(self._pass_time, until))
        if self.sleeps and not later and not busy and not any(p.busy for p in self.processes):
            _may(moves, "a long time passes", self.fault("sleep"), self._long_sleep)

    def _visits(self, moves: list[Move]) -> None:
        owned = SAGA in self.store.owners
        alone = not any(process.busy for process in self.processes)
        for visitor in self.visitors:
            if visitor.role == "open" or SAGA in self.store.records:
                weight = 0.03 + self.fault("crowd") if owned else 1.5 if alone else 0.5
                moves.append(Move(f"there comes: {visitor}", weight, partial(self._next_visit, visitor)))
                break
        stored = self.store.records.get(SAGA)
        if stored and not owned and any(record.type in FINAL for record in stored.values()):
            _may(moves, "compaction", 0.5 * self.fault("compact"), self._compact)

    # --- what happens

    def proceed(self, task: Task, answer: Any) -> None:
        """Give a script its answer, and see what it wants next."""
        former, self.current = self.current, task
        task.due, task.effect = None, None
        try:
            with using(task.process.names):
                task.effect = task.script.send(answer)
        except StopIteration:
            task.done = True
            task.process.tasks.remove(task)
            self.checks.task_ended(task)
        finally:
            self.current = former
        effect = task.effect
        if isinstance(effect, Sleep):
            task.due = self.now + effect.seconds
        elif isinstance(effect, Wait) and effect.timeout is not None:
            task.due = self.now + effect.timeout

    def _ready(self, task: Task) -> bool:
        effect = task.effect
        over = task.due is not None and task.due <= self.now + 1e-9
        return over or (isinstance(effect, Wait) and effect.ready())

    def _perform(self, task: Task) -> None:
        try:
            with using(task.process.names):
                answer = self._effect(task)
        except (KeyboardInterrupt, LogUnavailable) as error:
            answer = Stopped(error)
        if task.request is None:
            self.proceed(task, answer)

    def _effect(self, task: Task) -> Any:
        effect, run = task.effect, task.run
        match effect:
            case Append():
                task.decided_at = self.count
                return self._append(effect, run)
            case Flush():
                run.log.flush(run.ticket)
            case Write():
                run.log.write(run.ticket)
            case Wait():
                return effect.ready()
            case Blocking():
                try:
                    return Outcome(effect.fn())
                except Exception as error:
                    return Outcome(error=error)
            case CancelRunning():
                for running in run.running.values():
                    if running.cancel is not None and within(running.call.scope, effect.scope):
                        running.cancel()
            case CallEffect():
                return self._begin_call(task, effect)
            case _:
                pass
        return None

    def _append(self, effect: Append, run: Any) -> Any:
        with run.lock:
            if run.pending:
                run.catch_up()
            records, answer = effect.decide()
            if records:
                run.append(records)
            if run.waiters:
                run.notify()
        return answer

    def _begin_call(self, task: Task, effect: CallEffect) -> Outcome | None:
        if effect.kind == "forward":
            self.checks.call_begins(task)
        try:
            ask = effect.fn()
        except Exception as error:
            return Outcome(error=error)
        assert isinstance(ask, Ask)
        if effect.kind == "approve":
            return Outcome(True)
        if effect.kind == "probe":
            return Outcome(self.world.look(ask))
        self.names += 1
        limit = 0.9 * IN_DOUBT if effect.kind == "forward" else UNDO_LIMIT
        task.request = Request(name=f"r{self.names} {ask.what} {ask.tool or ask.of}", ask=ask,
                               process=task.process.name, limit=limit)  # fmt: skip
        self.requests.append(task.request)
        if effect.kind == "forward" and self.plan.is_async:
            task.running = task.run.running.get(effect.token)
            if task.running is not None:
                task.running.cancel = task.cancel
        return None

    def _call_ends(self, task: Task, outcome: Outcome) -> None:
        task.request = None
        task.cancel_asked = False
        if task.running is not None:
            task.running.cancel = None
            task.running = None
        self.proceed(task, outcome)

    def _send(self, request: Request) -> None:
        self.checks.sent(request)
        request.state = "sent"
        request.lands_by = self.now + request.limit

    def _land(self, request: Request, how: str) -> None:
        if "cache" in (request.ask.tool or request.ask.of):
            process = next(p for p in self.processes if p.name == request.process)
            if not process.busy:  # what was private to it is gone
                request.state = "lost"
                return
        self.world.serve(request, how, self.now)
        self._count(f"world: {request.ask.what} {how}".rstrip())

    def _refuse(self, request: Request) -> None:
        self.refusals -= 1
        self._land(request, "refused")

    def _outcome(self, request: Request) -> Outcome:
        request.state = "answered"
        return Outcome(error=request.error()) if request.error is not None else Outcome(request.value)

    def _answered(self, task: Task) -> None:
        assert task.request is not None
        self._call_ends(task, self._outcome(task.request))

    def _give_up(self, task: Task, error: BaseException) -> None:
        """The caller stops waiting. What was not sent never will be; what was may still land."""
        assert task.request is not None
        self._count(f"given up: {type(error).__name__}, {task.request.state}")
        if task.request.state == "held":
            task.request.state = "never sent"
        self._call_ends(task, Outcome(error=error))

    def _pause(self, task: Task) -> None:
        """Its framework interrupts a call that has not acted yet, or has acted and then asks."""
        assert task.request is not None
        self._count(f"paused, {task.request.state}")
        task.request.state = "never sent" if task.request.state == "held" else "paused"
        self._call_ends(task, Outcome(error=Paused()))

    def _leave(self, task: Task) -> None:
        """A sync call with a timeout: it goes on in its thread."""
        effect, request = task.effect, task.request
        assert isinstance(effect, CallEffect) and effect.late is not None and request is not None
        self._count("left to its thread")
        running = task.run.running.get(effect.token)
        if running is not None:
            running.given_up = True
        task.process.lates.append(Late(task, effect.late, request))
        self._call_ends(task, Outcome(error=TimeoutError(), still_running=True))

    def _late_ends(self, late: Late, error: BaseException | None) -> None:
        late.process.lates.remove(late)
        outcome = Outcome(error=error) if error is not None else self._outcome(late.request)
        late.process.spawn(late.name.partition("/")[2], late.run, _late_script(late, outcome), "late")

    def _cancelled(self, task: Task) -> None:
        self.proceed(task, asyncio.CancelledError())

    def _cancelled_flush(self, task: Task) -> None:
        effect = task.effect
        assert isinstance(effect, Flush)
        if task.call is not None:
            task.process.cut.append(task.call.amount)
        answer: Any = asyncio.CancelledError()
        try:
            task.run.log.flush(task.run.ticket)
        except LogUnavailable as error:
            answer = Stopped(error)
        if not effect.heed and not isinstance(answer, Stopped):
            task.held, answer = answer, None
        self.proceed(task, answer)

    def _blind(self, task: Task) -> None:
        effect = task.effect
        assert isinstance(effect, CallEffect)
        self.proceed(task, Outcome(Observation(landed=None) if effect.kind == "probe" else False))

    def _interrupt(self, task: Task, where: str) -> None:
        self._count("interrupted")
        self.interrupts -= 1
        log = task.process.log
        if where not in ("before it", "after it"):
            log.strike = where
        if where == "before it":
            self.proceed(task, Stopped(KeyboardInterrupt()))
            return
        try:
            with using(task.process.names):
                self._effect(task)
        except (KeyboardInterrupt, LogUnavailable):
            pass
        log.strike = ""
        self.proceed(task, Stopped(KeyboardInterrupt()))

    def _kill(self, process: Process) -> None:
        self.kills -= 1
        self._count("killed")
        self._die(process)

    def _die(self, process: Process) -> None:
        process.log.kill()
        self._let_die(process)
        self.world.forget_process(process.name)
        for request in self.requests:
            private = "cache" in (request.ask.tool or request.ask.of) and request.state == "sent"
            if request.process == process.name and (request.state == "held" or private):
                request.state = "never sent"

    def _let_die(self, process: Process) -> None:
        process.alive = False
        for task in process.tasks:
            task.script.close()

    def _kill_in_flush(self, task: Task) -> None:
        try:
            task.run.log.write(task.run.ticket)
        except LogUnavailable:
            pass
        self._kill(task.process)

    def _power(self) -> None:
        self.kills -= 1
        self._count("power lost")
        for process in self.processes:
            if process.alive:
                self._die(process)
        stored = self.store.records.get(SAGA, {})
        for saga, n in list(self.store.volatile):
            self.store.volatile.pop((saga, n))
            stored.pop(n, None)
        if not stored:
            self.store.records.pop(SAGA, None)

    def _fork(self, process: Process) -> None:
        """A real fork: the child must reach neither the world nor the log."""
        self._count("forked")
        self.forks -= 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads, of a test runner, do not matter here
            pid = os.fork()
        if pid == 0:  # pragma: no cover
            os._exit(0 if self.checks.harmless_child(process) else 3)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
            raise Violation("one-owner", "a forked child went on with its parent's saga")

    def _pass_time(self, until: float) -> None:
        self.now = until

    def _long_sleep(self) -> None:
        self.sleeps -= 1
        self.now += 1000.0

    def _compact(self) -> None:
        """A finished saga leaves the log."""
        self._count("compacted")
        self.checks.incarnation_ended()
        del self.store.records[SAGA]

    def _next_visit(self, visitor: Visitor) -> None:
        self.visitors.remove(visitor)
        self._visit(visitor)

    def _visit(self, visitor: Visitor) -> None:
        names = names_without("refund", "delete") if visitor.poor else all_names
        skew = self.plan.skew if len(self.processes) % 2 else 0.0
        process = Process(self, f"P{len(self.processes) + 1}", names, skew=skew)
        self.processes.append(process)
        if visitor.role == "recover":
            process.recover(asked=visitor.asked)
        else:
            process.own(_varied(self.plan.lanes, visitor.body), visitor.body)

    def _count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1


def _late_script(late: Late, outcome: Outcome) -> Any:
    answer = yield from closable(late.late(outcome))
    if isinstance(answer, Stopped) and late.run.idle():
        late.process.release(late.run)


def _may(moves: list[Move], label: str, weight: float, act: Callable[[], None], *, plain: bool = False) -> None:
    if weight or plain:
        moves.append(Move(label, max(weight, 0.01), act, plain))


def _say(effect: Any) -> str:
    match effect:
        case Append():
            decide = effect.decide
            name = getattr(getattr(decide, "func", decide), "__name__", "look")
            return "decides" if name == "<lambda>" else f"decides ({name.strip('_').replace('_', ' ')})"
        case CallEffect():
            return f"begins a {effect.kind}"
        case Flush():
            return "flushes"
        case Wait():
            return "has waited"
        case Sleep():
            return "has slept"
        case Blocking():
            decide = effect.fn
            return f"log: {getattr(getattr(decide, 'func', decide), '__name__', 'release').strip('_<>')}"
        case _:
            return type(effect).__name__.lower()


def _varied(lanes: tuple[Lane, ...], body: str) -> tuple[Lane, ...]:
    if body == "fewer":
        return (lanes[0][:-1], *lanes[1:])
    if body == "more":
        return ((*lanes[0], Call(kind="book", amount=900)), *lanes[1:])
    return lanes
