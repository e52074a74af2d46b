"""The promises, held against the log and the world: while a run goes on, and when it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_saga_core import ActionSemantics, Fenced, LogUnavailable, NotApplied
from agent_saga_core.engine.effects import Append, Blocking, Flush, Write
from agent_saga_core.engine.effects import Call as CallEffect
from agent_saga_core.log.commit import Entry
from agent_saga_core.records import Record, RecordType
from agent_saga_core.state import SETTLED_ABSENT, Attempt, SagaStatus, Step, StepStatus, fold
from simulation.plan import Call
from simulation.tools import KEY_TTL
from simulation.world import Effect, Request

if TYPE_CHECKING:
    from simulation.process import Process, Task
    from simulation.simulation import Simulation

__all__ = ["Checks", "Violation"]

SAGA = "s"


class Violation(AssertionError):
    """A promise was broken."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"{promise}: {what}")
        self.promise = promise


class Checks:
    """What is watched in one run."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.intents: dict[str, Record] = {}
        self.undo_keys: dict[str, list[str]] = {}
        """Per forward key, the compensation keys that were used, in order."""
        self.undo_sends: dict[str, int] = {}
        self.undo_began: dict[str, float] = {}
        self.closed_at: dict[int, int] = {}
        self.committed_by: Process | None = None
        self.excused: set[str] = set()

    # --- the log

    def appended(self, process: Process, record: Record) -> None:
        """A record was appended by `process`."""
        owner = self.simulation.store.owners.get(SAGA)
        if owner is None or owner[0] is not process.log:
            raise Violation("one-owner", f"{process.name} appends {record.type} to a saga that it does not own")
        self.simulation.appended.append(_brief(record))
        if record.type == RecordType.INTENT:
            known = self.intents.get(record.data["key"])
            goes_on = record.data.get("resumed") and record.data["step"] == (known.data["step"] if known else 0)
            if known is not None and known.n != record.n and self._stored(known) and not goes_on:
                raise Violation("compensate-once", "two attempts have one forward key")
            self.intents[record.data["key"]] = record
        elif record.type == RecordType.ROLLING_BACK and process.job is not None:
            self._may_recover(process)
        elif record.type == RecordType.COMMITTED:
            self.committed_by = process

    def _stored(self, record: Record) -> bool:
        stored = self.simulation.store.records.get(SAGA, {}).get(record.n)
        return stored is not None and stored.data == record.data

    def _may_recover(self, process: Process) -> None:
        folded = self.simulation.folded()
        if folded is not None and not self.simulation.plan.skew:
            young = (
                folded.status is SagaStatus.RUNNING and process.clock.time() - folded.last_time < folded.orphan_after
            )
            waits = folded.status is SagaStatus.SUSPENDED and process.clock.time() < folded.deadline
            if young or waits:
                raise Violation("one-owner", f"{process.name} recovers a saga that is to be left alone")
        for step, attempt in folded.open_attempts() if folded is not None else ():
            handler = (attempt.undo or {}).get("handler")
            private = step.semantics is ActionSemantics.REVERSIBLE or (attempt.undo or {}).get("local")
            if handler is not None and handler not in process.names.compensators and not private:
                raise Violation("recover-anywhere", f"{process.name} recovers, and has no {handler!r}")

    def written(self, process: Process, entry: Entry) -> None:
        """A record is about to be stored."""
        stored = self.simulation.store.records.get(entry.saga, {}).get(entry.n)
        if stored is not None and stored.data != entry.encoded.data():
            raise Violation("one-owner", f"{process.name} writes record {entry.n} which is there already")

    def durable(self, n: int) -> bool:
        """Whether losing power would not lose record `n`."""
        store = self.simulation.store
        return n in store.records.get(SAGA, {}) and (SAGA, n) not in store.volatile

    def _last(self, kind: str) -> Record | None:
        return next((r for r in reversed(self.simulation.records()) if r.type == kind), None)

    # --- calls

    def call_begins(self, task: Task) -> None:
        """The engine makes a forward call: not if its last look came after the saga had closed."""
        closed = self.closed_at.get(id(task.run))
        if closed is not None and task.decided_at > closed:
            raise Violation("closed-means-closed", f"{task.name} starts a call in a saga that ends")

    def sent(self, request: Request) -> None:
        """A request leaves its process."""
        if request.ask.what == "act":
            self._forward_sent(request)
        else:
            self._undo_sent(request)

    def _forward_sent(self, request: Request) -> None:
        intent = self.intents.get(request.ask.key)
        if intent is None:
            raise Violation("intent-first", f"{request.name} is sent without an intent")
        process = self._process(request)
        assert process.run is not None
        folded = process.run.fold
        step = folded.step(intent.data["step"])
        attempt = step.attempts[intent.data["attempt"] - 1]
        if step.semantics.durable:
            if not self.durable(intent.n) or not self._stored(intent):
                raise Violation("intent-first", f"{request.name} is sent and its intent is not durable")
        if step.semantics.durable and attempt.status is StepStatus.NOT_APPLIED:
            raise Violation("closed-means-closed", f"{request.name} is sent although it is recorded as never started")
        for earlier in step.attempts[: attempt.number - 1]:
            if earlier.status not in SETTLED_ABSENT:
                raise Violation(
                    "in-flight-is-unknown",
                    f"{request.name}: attempt {attempt.number} while attempt {earlier.number} is {earlier.status}",
                )

    def _undo_sent(self, request: Request) -> None:
        process = self._process(request)
        assert process.run is not None
        folded, key = process.run.fold, request.ask.key
        found = [(s, a) for s in folded.steps for a in s.attempts if a.compensation_key == key]
        if len(found) != 1:
            raise Violation("compensate-once", f"{request.name} has a key that {len(found)} attempts have")
        step, attempt = found[0]
        if attempt.status is not StepStatus.COMPENSATING:
            raise Violation("compensate-once", f"{request.name} for an attempt that is {attempt.status}")
        self._keys(request, step, attempt, key)
        self._starts(request, step, attempt)
        if self.undo_sends[attempt.forward_key] == 1:
            self._order(request, process, step, attempt)

    def _keys(self, request: Request, step: Step, attempt: Attempt, key: str) -> None:
        used = self.undo_keys.setdefault(attempt.forward_key, [])
        if not used and key != self.intents[attempt.forward_key].data["undo_key"]:
            raise Violation("compensate-once", f"{request.name} has another key than its intent stored")
        if key in used:
            return
        if used:
            answers = self.simulation.world.answers
            answer = answers.get(used[-1]) or answers.get(f"{request.process}: {used[-1]}")
            error = answer[2]() if answer is not None and answer[2] is not None else None
            if not isinstance(error, NotApplied):
                raise Violation("compensate-once", f"{request.name} has a new key, and the old one was not refused")
        used.append(key)

    def _starts(self, request: Request, step: Step, attempt: Attempt) -> None:
        self.undo_began.setdefault(attempt.forward_key, self.simulation.now)
        self.undo_sends[attempt.forward_key] = self.undo_sends.get(attempt.forward_key, 0) + 1
        starts = in_round = 0
        for record in self.simulation.records():
            if record.type == RecordType.ROLLING_BACK and record.data.get("retry"):
                in_round = 0
            of_it = (record.data.get("step"), record.data.get("attempt")) == (step.number, attempt.number)
            if record.type == RecordType.COMPENSATING and of_it and self.durable(record.n):
                starts, in_round = starts + 1, in_round + 1
        if starts < self.undo_sends[attempt.forward_key]:
            raise Violation("compensate-once", f"{request.name} is sent and its start is not durable")
        if in_round > 3:
            raise Violation("compensate-once", f"{request.name} is start {in_round} of one compensation")

    def _order(self, request: Request, process: Process, step: Step, attempt: Attempt) -> None:
        assert process.run is not None
        run = process.run
        task = next(task for task in process.tasks if task.request is request)
        in_savepoint = bool(task.undoing)
        if task.role == "lane" and not in_savepoint:
            return  # one step that failed or was cancelled, not a rollback
        if in_savepoint:
            began = run.fold.next_n  # it undoes its own steps, in their order, whatever else goes on
        elif run.fold.status is SagaStatus.ROLLING_BACK:
            records = reversed(self.simulation.records())
            began = next((r.n for r in records if r.type == RecordType.ROLLING_BACK), 0)
        else:
            return
        outcomes = self._outcomes(began)
        mine = outcomes.get((step.number, attempt.number))
        if mine is None:
            return
        for other in run.fold.steps:
            if other.semantics is not ActionSemantics.COMPENSABLE or (in_savepoint and not other.within(step.scope)):
                continue
            for its in other.attempts:
                key = (other.number, its.number)
                if its.undo_error is not None or its.status is not StepStatus.DONE or key in run.busy:
                    continue
                if outcomes.get(key, 0) > mine:
                    raise Violation("lifo", f"{request.name} before that of step {key[0]}, whose outcome came later")

    def _outcomes(self, began: int) -> dict[tuple[int, int], int]:
        """The first outcome of each attempt that was DONE when a rollback began, and did not land late."""
        first: dict[tuple[int, int], int] = {}
        done: set[tuple[int, int]] = set()
        for record in self.simulation.records():
            at = (record.data.get("step", 0), record.data.get("attempt", 0))
            if record.type in (RecordType.UNKNOWN, RecordType.DONE):
                first.setdefault(at, record.n)
            if record.type == RecordType.DONE and record.n < began and not record.data.get("late"):
                done.add(at)
        return {at: n for at, n in first.items() if at in done}

    def _process(self, request: Request) -> Process:
        return next(p for p in self.simulation.processes if p.name == request.process)

    # --- what the body hears

    def heard(self, process: Process, call: Call, value: Any) -> None:
        """A call returned to the body."""
        if value["amount"] != call.amount:
            raise Violation("replay-not-rerun", f"{call} returned the result of another call")
        if call.kind == "quote" or self.simulation.plan.durability != "strict":
            return
        if SAGA not in self.simulation.store.records:  # it committed and has left the log meanwhile
            return
        if call.kind != "cache" and process.run is not None and not process.run.replay_only:
            effect = next((e for e in self.simulation.world.effects if e.id == value["id"]), None)
            assert effect is not None
            done = [
                r.n
                for r in self.simulation.records()
                if r.type == RecordType.DONE and (r.data.get("result") or {}).get("id") == effect.id
            ]
            if not any(self.durable(n) for n in done):
                raise Violation("replay-not-rerun", f"{call} returned and its outcome is not durable")

    def refused(self, process: Process, call: Call, error: BaseException) -> None:
        """A call ended with an error that the body hears."""
        run = process.run
        if run is None or not run.replay_only or call.key is None:
            return
        for step in run.fold.steps:
            finished = step.last.status is StepStatus.DONE and step.last.has_result
            if finished and step.last.args == {"amount": call.amount}:
                raise Violation("replay-not-rerun", f"{call} is on record, and its caller heard {type(error).__name__}")

    def suspended(self, process: Process) -> None:
        """`suspend` returned."""
        record = self._last(RecordType.SUSPENDED)
        if record is None or not self.durable(record.n):
            raise Violation("in-flight-is-unknown", "suspend returned and its record is not durable")

    def aborted(self, process: Process) -> None:
        """`abort` returned."""
        assert process.run is not None
        if process.run.fold.status is SagaStatus.RUNNING and process.run.fold.rollback_only is not None:
            record = self._last(RecordType.ABORT)
            if record is None or not self.durable(record.n):
                raise Violation("no-silent-commit", "abort returned and its record is not durable")

    def ended(self, process: Process, report: Any, error: BaseException | None) -> None:
        """The scope's end returned a report."""
        self._diverged(process)
        private = [e for e in self.simulation.world.standing() if e.tool == "cache" and e.process == process.name]
        if report.status is SagaStatus.ROLLED_BACK and private:
            raise Violation("no-false-clean", f"rolled back, and {_names(private)} left")
        if report.status is SagaStatus.COMMITTED and error is not None:
            raise Violation("no-silent-commit", "the body raised, and the saga committed")
        verdicts = (RecordType.COMMITTED, RecordType.ROLLED_BACK, RecordType.NEEDS_ATTENTION)
        verdict = next((r for r in reversed(self.simulation.records()) if r.type in verdicts), None)
        if SAGA not in self.simulation.store.records:
            return
        if verdict is None or not self.durable(verdict.n):
            raise Violation("no-false-clean", f"the scope returned {report.status} and its verdict is not durable")

    def _diverged(self, process: Process) -> None:
        """The same body does not diverge from its own record."""
        run = process.run
        if run is None or run.diverged is None or process.cut or process.ends_early:
            return
        if any("Cancelled" in what for what in self.simulation.seen):
            return  # a cancelled call keeps its count: made again, it is another equal call
        sizes = {"": 0, "fewer": 1, "same": 2, "more": 3}
        earlier = [sizes[p.body] for p in self.simulation.processes if p is not process]
        if sizes[process.body] >= max(earlier, default=0):
            raise Violation("replay-not-rerun", f"the same body was told: {run.diverged}")

    # --- after each event

    def after_event(self) -> None:
        """Remember when sagas closed; see that a process that has ended owns nothing."""
        for process in self.simulation.processes:
            run = process.run
            if run is None or not process.alive:
                continue
            if id(run) not in self.closed_at and (run.closing or run.over or run.fold.rollback_only is not None):
                self.closed_at[id(run)] = self.simulation.count
            if not process.busy:
                if process.log.owned(SAGA):
                    raise Violation("one-owner", f"{process.name} is at its end and still owns the saga")
                self.simulation.world.forget_process(process.name)

    def task_ended(self, task: Task) -> None:
        """A task returned."""

    def harmless_child(self, process: Process) -> bool:
        """In a forked child: whether none of its threads' work reaches the log or the world."""
        if process.log.owned(SAGA):
            return False
        for task in list(process.tasks):
            effect = task.effect
            if isinstance(effect, CallEffect | Blocking) or not isinstance(effect, Append | Flush | Write):
                continue
            try:
                if isinstance(effect, Append):
                    records, _ = effect.decide()
                    if records:
                        task.run.append(records)
                        return False
                else:
                    task.run.log.flush(task.run.ticket)
            except (LogUnavailable, Fenced):
                continue
        return True

    # --- when it is over

    def incarnation_ended(self) -> None:
        """A finished saga is about to leave the log: hold it against the world now."""
        for request in self.simulation.requests:
            if request.state == "sent":
                self.simulation._land(request, "")
        self._against_world(forget=True)

    def final(self) -> None:
        """Everything was recovered and everything sent has arrived."""
        if self.simulation.store.owners:
            raise Violation("one-owner", "nothing runs any more, and the saga is still owned")
        self._against_world(forget=False)

    def _against_world(self, *, forget: bool) -> None:
        world, records = self.simulation.world, self.simulation.records()
        if [r.n for r in records] != list(range(1, len(records) + 1)):
            raise Violation("one-owner", f"the log holds records {[r.n for r in records]}")
        if world.harm:
            raise Violation("no-false-clean", f"harm was done: {'; '.join(world.harm)}")
        for effect in world.effects:
            if len(effect.undone) > 1:
                raise Violation("compensate-once", f"{effect.id} was undone {len(effect.undone)} times")
        if not records:
            if world.standing():
                raise Violation("intent-first", f"{_names(world.standing())} left, and the log knows of no saga")
            return
        folded = fold(records, SAGA)
        keys = {attempt.forward_key: (step, attempt) for step in folded.steps for attempt in step.attempts}
        left = world.standing()
        strangers = [effect for effect in left if effect.key not in keys]
        if strangers:
            raise Violation("intent-first", f"{_names(strangers)} left, and the log does not know of it")
        self._verdict(folded, left, keys)
        if forget:
            for effect in left:
                effect.undone.append("its saga left the log")
        self.committed_by = None if forget else self.committed_by

    def _verdict(self, folded: Any, left: list[Effect], keys: dict[str, tuple[Step, Attempt]]) -> None:
        report = folded.report()
        if folded.status is SagaStatus.COMMITTED:
            self._committed(folded, left, keys)
            return
        if folded.status is SagaStatus.ROLLED_BACK:
            if report.clean and left:
                raise Violation("no-false-clean", f"reported clean, and {_names(left)} left")
            if not report.clean:
                raise Violation("no-false-clean", "nobody accepted anything, and yet it is not clean")
            return
        if folded.status is not SagaStatus.NEEDS_ATTENTION:
            raise Violation("it ends", f"everything was tried, and the saga is {folded.status}")
        named = {step.number for step in report.remaining}
        for effect in left:
            if keys[effect.key][0].number not in named:
                raise Violation("no-false-clean", f"{effect.id} left, and its step is not named")
        for step, attempt in folded.open_attempts():
            if step.number in named and not self._excuse(step, attempt):
                raise Violation(
                    "no-false-clean",
                    f"step {step.number} {step.tool} is {attempt.status} for no reason: {attempt.detail}",
                )
        if not named:
            raise Violation("no-false-clean", "it needs attention and names no step")

    def _excuse(self, step: Step, attempt: Attempt) -> bool:
        """Whether a person is really needed."""
        world, undo = self.simulation.world, attempt.undo or {}
        if step.semantics is ActionSemantics.IRREVERSIBLE or attempt.undo_error is not None:
            return True
        if attempt.compensation_key in world.stuck or (undo.get("local") and step.semantics.durable):
            return True
        age = self.simulation.now - self.undo_began.get(attempt.forward_key, 0.0)
        if attempt.error.startswith("it was started longer ago") and (age > KEY_TTL or self.simulation.plan.skew):
            return True
        if step.semantics is ActionSemantics.REVERSIBLE or self._was_answered(attempt):
            return False
        if attempt.status is StepStatus.UNKNOWN or attempt.outcome == 0:
            return step.probe is None and ("paths" in undo or not undo or undo.get("if_absent") == "unsafe")
        return not undo or "handler" not in undo or "paths" in undo

    def _was_answered(self, attempt: Attempt) -> bool:
        """Whether a process that lives has the call's result."""
        for request in self.simulation.requests:
            if request.ask.key == attempt.forward_key and request.state == "answered" and request.error is None:
                process = self._process(request)
                return process.alive and not process.disk_full and attempt.status is StepStatus.UNKNOWN
        return False

    def _committed(self, folded: Any, left: list[Effect], keys: dict[str, tuple[Step, Attempt]]) -> None:
        for step in folded.steps:
            for attempt in step.attempts:
                if step.semantics is not ActionSemantics.READ_ONLY and attempt.unsettled:
                    raise Violation("no-silent-commit", f"committed with step {step.number} {attempt.status}")
        if folded.rollback_only is not None:
            raise Violation("no-silent-commit", f"committed although it was rollback-only: {folded.rollback_only}")
        process = self.committed_by
        private = {e.key for e in self.simulation.world.effects if e.tool == "cache"}
        done = {k for k, (s, a) in keys.items() if a.status is StepStatus.DONE and s.tool != "quote"} - private
        standing = {effect.key for effect in left} - private
        if standing != done:
            raise Violation(
                "no-false-clean",
                f"committed; {_names([e for e in left if e.key not in done | private])} left without a record, "
                f"{len(done - standing)} recorded and not there",
            )
        if process is not None and self.simulation.plan.resume == "replay":
            self._heard_all(process, [effect for effect in left if effect.key not in private])

    def _heard_all(self, process: Process, left: list[Effect]) -> None:
        """What stands is what the body of the process that committed was told."""
        told = [name for call, name in process.heard if call.kind not in ("cache", "quote")]
        there = {effect.id: effect.amount for effect in left}
        if len(set(told)) < len(told) or not set(told) <= set(there):
            raise Violation("replay-not-rerun", f"the body was told of {sorted(told)}, and {sorted(there)} is there")
        untold = [name for name, amount in there.items() if name not in told and amount not in process.cut]
        if untold and process.alive and not process.busy:
            raise Violation("replay-not-rerun", f"the body was not told of {sorted(untold)}, which is there")


def _names(effects: list[Effect]) -> str:
    return ", ".join(effect.id for effect in effects) or "nothing"


def _brief(record: Record) -> str:
    data = record.data
    said = f"{record.n} {record.type}"
    if "step" in data:
        said += f" {data['step']}.{data.get('attempt', '')}"
    for name in ("reason", "error"):
        if name in data:
            said += f" ({str(data[name])[:60]})"
    if data.get("late"):
        said += " late"
    return said
