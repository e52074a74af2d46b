"""Recovery: finish dead processes' sagas from the log alone, with the engine's own rollback.

`recover` looks at every unfinished saga, leaves alone what is owned, suspended or young, claims the rest and rolls it
back through compensators registered by name. `resolve` is how a person says what became of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from agent_saga_core import registry, values
from agent_saga_core.declare import ActionSemantics
from agent_saga_core.drive import adrive, asleep, drive
from agent_saga_core.engine.effects import Append, Blocking, Flow, Flush, Outcome, Transition
from agent_saga_core.engine.inverse import from_result
from agent_saga_core.engine.reopen import claim
from agent_saga_core.engine.run import Options, Run
from agent_saga_core.engine.unwind import in_doubt_until, release, roll_back, start_rollback, unwind
from agent_saga_core.errors import (
    DeclarationError,
    LogCorrupted,
    SagaBusy,
    SagaNotFound,
    SagaNotRunning,
)
from agent_saga_core.lazy import LazyModule
from agent_saga_core.log import open_log
from agent_saga_core.log.base import Log
from agent_saga_core.records import Record, RecordType
from agent_saga_core.signals import SignalHold
from agent_saga_core.state import Attempt, SagaFold, SagaHead, SagaState, SagaStatus, Step, StepStatus, fold

if TYPE_CHECKING:
    import asyncio
    from concurrent import futures
else:
    asyncio = LazyModule("asyncio")
    futures = LazyModule("concurrent.futures")

__all__ = [
    "RecoveryReport",
    "arecover",
    "list_sagas",
    "read_saga",
    "recover",
    "resolve",
]

Verdict = Literal["recovered", "attention", "untouched", "live", "damaged"]
Resolution = Literal["landed", "not-applied", "compensated", "accepted"]


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a recovery came to, as ids of sagas."""

    recovered: tuple[str, ...] = ()
    """Rolled back; with `dry_run`, those that would be."""
    attention: tuple[str, ...] = ()
    """Something is left that a person, or time, must settle."""
    untouched: tuple[str, ...] = ()
    """Left as they are: suspended, left to their framework for a while, or with a handler that is missing here."""
    live: tuple[str, ...] = ()
    """Owned by a running process."""
    damaged: tuple[str, ...] = ()
    """Damage in the log may concern them; nothing was done."""
    reasons: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Why, for those that are neither recovered nor live."""


def _log_of(log: Log | str) -> tuple[Log, bool]:
    return (open_log(log, create=False), True) if isinstance(log, str) else (log, False)


def list_sagas(log: Log | str) -> list[SagaHead]:
    """Every saga of a log, oldest first. One that damage may concern is left out: `verify` names it."""
    opened, ours = _log_of(log)
    try:
        heads: list[SagaHead] = []
        for saga_id in opened.saga_ids():
            try:
                folded = fold(opened.read(saga_id), saga_id)
            except LogCorrupted:
                continue
            if not folded.empty:
                heads.append(folded.head())
        return sorted(heads, key=lambda head: (head.started, head.saga_id))
    finally:
        if ours:
            opened.close()


def read_saga(log: Log | str, saga_id: str) -> SagaState:
    """One saga as its log tells it, with its timeline.

    Raises:
        SagaNotFound: The log holds none of that id.
        LogCorrupted: Damage may concern it.
    """
    opened, ours = _log_of(log)
    try:
        records = opened.read(saga_id)
        if not records:
            raise SagaNotFound(f"no saga {saga_id!r} in {opened.url}. See `agent-saga list`.", saga_id=saga_id)
        return fold(records, saga_id).view(records)
    finally:
        if ours:
            opened.close()


# --- recover


class _Job:
    """One saga on its way through a recovery."""

    def __init__(self, log: Log, saga_id: str, *, asked: bool, named: bool = True) -> None:
        self.log = log
        self.saga_id = saga_id
        self.asked = asked  # an explicit recovery, which gives what needs attention three new tries
        self.named = named  # by the caller; else it was found unfinished
        self.gone = False  # found unfinished, and finished by somebody else before it was looked at
        self.run = Run(saga_id, log, Options(), recovering=True)
        self.wake: float | None = None
        self.verdict: Verdict | None = None
        self.reason = ""

    def ends(self, verdict: Verdict, reason: str = "") -> None:
        self.verdict = verdict
        self.reason = reason

    def hand_back(self) -> None:
        """Give the saga up as it stands; another recovery goes on from there."""
        if self.run.claimed and self.log.owned(self.saga_id):
            self.log.release(self.saga_id)


def _begin(job: _Job, *, dry_run: bool) -> Flow[None]:
    """Look, check that every handler is here, claim, look again, and undo what can be undone at once.

    Afterwards the job has a verdict, or is claimed and waits until `job.wake` for what is in doubt.
    """
    outcome: Outcome = yield Blocking(partial(job.log.read, job.saga_id))
    if _failed(job, outcome):
        return
    folded = _folded(job, outcome.value)
    if folded is None or _leave_alone(job, folded) or _unable(job, folded):
        return
    if dry_run:
        live: Outcome = yield Blocking(partial(job.log.is_live, job.saga_id))
        job.ends("live") if live.value else job.ends("recovered", "would be rolled back")
        return
    try:
        records = yield from claim(job.run, fresh=False, busy_timeout=0.0)
    except SagaBusy:
        return job.ends("live")
    except LogCorrupted as error:
        return job.ends("damaged", str(error))
    folded = _folded(job, records)
    if folded is None or _leave_alone(job, folded) or _unable(job, folded):
        yield Blocking(partial(job.log.release, job.saga_id))
        return
    job.run.fold = folded
    retry = job.asked and folded.status is SagaStatus.NEEDS_ATTENTION
    yield from start_rollback(job.run, "its owner is gone", retry=retry)
    yield from _go_on(job)


def _go_on(job: _Job) -> Flow[None]:
    """Undo what can be undone now; end with a verdict, or set `job.wake`."""
    run = job.run
    yield from unwind(run, "", run.clock.monotonic())
    job.wake = yield Append(lambda: ([], in_doubt_until(run)))
    if job.wake is not None:
        return
    report = yield from roll_back(run, patient_until=run.clock.monotonic(), reason="its owner is gone")
    yield from release(run)
    if report.status is SagaStatus.ROLLED_BACK:
        job.ends("recovered", "" if report.clean else str(report))
    else:
        job.ends("attention", str(report))


def _failed(job: _Job, outcome: Outcome) -> bool:
    if outcome.error is None:
        return False
    if not isinstance(outcome.error, LogCorrupted):
        raise outcome.error
    job.ends("damaged", str(outcome.error))
    return True


def _folded(job: _Job, records: tuple[Record, ...]) -> SagaFold | None:
    try:
        folded = fold(records, job.saga_id)
    except LogCorrupted as error:
        job.ends("damaged", str(error))
        return None
    if folded.empty:
        job.ends("damaged", "no record of it can be read")
        return None
    return folded


def _leave_alone(job: _Job, folded: SagaFold) -> bool:
    """Whether the saga is not recovery's to touch, as it stands."""
    now = job.log.clock.time()
    match folded.status:
        case SagaStatus.COMMITTED | SagaStatus.ROLLED_BACK:
            job.gone = not job.named
            job.ends("untouched", f"it is {folded.status}")
        case SagaStatus.MOVED:
            job.gone = not job.named
            job.ends("untouched", f"it was moved to {folded.moves_to}")
        case SagaStatus.MOVING:  # it may have arrived: here nobody may act on it any more
            job.ends(
                "attention", f"it is being moved to {folded.moves_to}. Go on with agent-saga log copy --unfinished"
            )
        case SagaStatus.SUSPENDED if folded.deadline is not None and now < folded.deadline:
            job.ends("untouched", "it is suspended and its deadline has not passed")
        # Without a grace the clocks must not matter: one that is behind would make every orphan look young.
        case SagaStatus.RUNNING if folded.orphan_after > 0 and now - folded.last_time < folded.orphan_after:
            job.ends("untouched", f"its framework may resume it first, for {folded.orphan_after:g} s")
        case SagaStatus.NEEDS_ATTENTION if not (job.asked or folded.waiting):
            job.ends("attention", str(folded.report()))
        case _:
            return False
    return True


def _unable(job: _Job, folded: SagaFold) -> bool:
    """Whether a handler is missing here, or the stored arguments do not fit it. Nothing is claimed then."""
    missing = [why for step, attempt in folded.open_attempts() for why in _missing(step, attempt)]
    if missing:
        job.ends("untouched", f"{'; '.join(dict.fromkeys(missing))}. Pass --import with the modules that register them")
    return bool(missing)


def _missing(step: Step, attempt: Attempt) -> Iterable[str]:
    if step.semantics is ActionSemantics.REVERSIBLE or attempt.accepted:
        return
    if step.probe is not None and attempt.status is not StepStatus.DONE and registry.probe_named(step.probe) is None:
        yield f"no probe {step.probe!r} is registered here"
    undo = attempt.undo
    if undo is None or undo.get("local") or "handler" not in undo:
        return
    handler = str(undo["handler"])
    entry = registry.compensator_named(handler)
    if entry is None:
        yield f"no compensator {handler!r} is registered here"
        return
    if "paths" in undo:
        return
    try:
        entry.check(values.decode_args(undo["kwargs"], entry.hints))
    except (values.Undecodable, TypeError, KeyError, ValueError) as error:
        yield f"the stored arguments of step {step.number} do not fit compensator {handler!r} ({type(error).__name__})"


class _Recovery:
    """The jobs of one recovery, and the order in which they are taken."""

    def __init__(
        self,
        log: Log,
        saga_id: str | None,
        *,
        dry_run: bool,
        retry: bool,
        progress: Callable[[str, str, str], None] | None,
    ) -> None:
        self.log = log
        self.dry_run = dry_run
        self.progress = progress
        self.told = threading.Lock()
        if saga_id is not None:
            _check_known(log, saga_id)
        ids = (saga_id,) if saga_id is not None else log.unfinished().saga_ids
        self.jobs = [_Job(log, found, asked=retry, named=saga_id is not None) for found in ids]

    def first(self, job: _Job) -> Flow[None]:
        yield from _begin(job, dry_run=self.dry_run)
        self._tell(job)

    def again(self, job: _Job) -> Flow[None]:
        yield from _go_on(job)
        self._tell(job)

    def _tell(self, job: _Job) -> None:
        if self.progress is not None and job.verdict is not None and not job.gone:
            with self.told:
                self.progress(job.saga_id, job.verdict, job.reason)

    def pause(self) -> float | None:
        """Seconds until the next saga that waits is due; None if none waits."""
        wakes = [job.wake for job in self.jobs if job.verdict is None and job.wake is not None]
        return max(0.0, min(wakes) - self.log.clock.monotonic()) if wakes else None

    def due(self) -> list[_Job]:
        now = self.log.clock.monotonic()
        return [job for job in self.jobs if job.verdict is None and job.wake is not None and job.wake <= now]

    def hand_back(self) -> None:
        for job in self.jobs:
            job.hand_back()

    def report(self) -> RecoveryReport:
        def of(verdict: Verdict) -> tuple[str, ...]:
            return tuple(job.saga_id for job in self.jobs if job.verdict == verdict and not job.gone)

        return RecoveryReport(
            recovered=of("recovered"),
            attention=of("attention"),
            untouched=of("untouched"),
            live=of("live"),
            damaged=of("damaged"),
            reasons={job.saga_id: job.reason for job in self.jobs if job.reason and not job.gone},
        )


def _check_known(log: Log, saga_id: str) -> None:
    try:
        known = bool(log.read(saga_id))
    except LogCorrupted:
        return  # the recovery itself reports it
    if not known:
        raise SagaNotFound(f"no saga {saga_id!r} in {log.url}. See `agent-saga list`.", saga_id=saga_id)


def recover(
    log: Log | str,
    *,
    saga_id: str | None = None,
    dry_run: bool = False,
    concurrency: int = 1,
    retry: bool = True,
    stop: threading.Event | None = None,
    progress: Callable[[str, str, str], None] | None = None,
) -> RecoveryReport:
    """Finish what dead processes left: roll back every saga that nobody owns.

    Never touches a saga whose owner lives. A call whose process died in it may still land: recovery waits `in_doubt`
    seconds, counted from its own claim, before it calls such a step absent; all those waits run at once. Compensators
    are found by name, so the modules that register them must have been imported; a saga with a missing one is left
    untouched. When this raises, sagas that were begun are handed back as they stand.

    On the main thread, SIGINT and SIGTERM are heard between two sagas and during the wait for what is in doubt, not in
    the middle of a rollback.

    Args:
        log: A log, or the URL of one that exists.
        saga_id: Only this saga.
        dry_run: Change nothing, and tell what would be done.
        concurrency: How many sagas to roll back at once. Those that only wait do not count.
        retry: Give what needs attention three new tries.
        stop: When set, no further saga is begun, and those that wait are handed back.
        progress: Called with (saga id, verdict, reason) as each saga ends; from any thread, one call at a time.

    Raises:
        SagaNotFound: There is no such saga.
        LogUnavailable: The log cannot be read or written.
    """
    stopped = stop if stop is not None else threading.Event()
    opened, ours = _log_of(log)
    recovery: _Recovery | None = None
    try:
        recovery = _Recovery(opened, saga_id, dry_run=dry_run, retry=retry, progress=progress)
        _each(recovery.first, recovery.jobs, concurrency, stopped)
        while (pause := recovery.pause()) is not None and not opened.clock.wait(stopped, pause):
            _each(recovery.again, recovery.due(), concurrency, stopped)
        return recovery.report()
    finally:
        if recovery is not None:
            recovery.hand_back()
        if ours:
            opened.close()


def _each(flow: Callable[[_Job], Flow[None]], jobs: list[_Job], concurrency: int, stopped: threading.Event) -> None:
    def work(job: _Job) -> None:
        if stopped.is_set():
            return
        interruptions: list[BaseException] = []
        with SignalHold(interruptions):  # a Ctrl-C in a compensator is no failure of the compensation
            drive(flow(job), job.run)
        if job.run.exit_by is not None:
            interruptions.insert(0, job.run.exit_by)
        if interruptions:
            raise interruptions[0]

    if concurrency <= 1:
        for job in jobs:
            work(job)
        return
    with futures.ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="agent-saga-recover") as pool:
        for _ in pool.map(work, jobs):
            pass


async def arecover(
    log: Log | str,
    *,
    saga_id: str | None = None,
    dry_run: bool = False,
    concurrency: int = 1,
    retry: bool = True,
    progress: Callable[[str, str, str], None] | None = None,
) -> RecoveryReport:
    """Like `recover`, with compensators called and awaited on the running loop.

    A cancellation is heard between two compensations' records, never in the middle of one; sagas that were begun are
    then handed back as they stand.
    """
    opened, ours = (await asyncio.to_thread(_log_of, log)) if isinstance(log, str) else (log, False)
    recovery: _Recovery | None = None
    try:
        recovery = await asyncio.to_thread(
            partial(_Recovery, opened, saga_id, dry_run=dry_run, retry=retry, progress=progress)
        )
        await _aeach(recovery.first, recovery.jobs, concurrency)
        while (pause := recovery.pause()) is not None:
            await asleep(pause, opened.clock)
            await _aeach(recovery.again, recovery.due(), concurrency)
        return recovery.report()
    finally:
        if recovery is not None:
            recovery.hand_back()
        if ours:
            opened.close()


async def _aeach(flow: Callable[[_Job], Flow[None]], jobs: list[_Job], concurrency: int) -> None:
    turns = asyncio.Semaphore(max(1, concurrency))

    async def work(job: _Job) -> None:
        async with turns:
            held: list[asyncio.CancelledError] = []
            await adrive(flow(job), job.run, held, shield=True)
            if held:
                raise held[0]

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(work(job))


# --- a person's word


def resolve(
    log: Log | str,
    saga_id: str,
    step: int | str,
    *,
    outcome: Resolution,
    by: str,
    note: str,
    result: Any = None,
) -> SagaState:
    """Record what a person found out about a step, and go on with the rollback if one is under way.

    When this returns, who said what and why is durable. Nothing is undone here that the person did not speak of,
    except what the rollback still owes and this process has the compensators for; the rest is left to `recover`.

    Args:
        log: A log, or the URL of one that exists.
        saga_id: The saga.
        step: The step's number, or its tool's name if only one step has it.
        outcome: `"landed"`: the effect happened (`result` is what the call returned; the undo may need it).
            `"not-applied"`: it did not. `"compensated"`: it was undone by hand. `"accepted"`: it stays.
        by: Who says so.
        note: Why.
        result: With `"landed"`: the call's result, as plain data.

    Returns:
        The saga as it stands afterwards.

    Raises:
        SagaNotFound: There is no such saga, or no such step in it.
        SagaBusy: A running process owns it.
        SagaNotRunning: It has ended, or that step is not open.
        DeclarationError: `by` or `note` is empty, the outcome is unknown, or `result` does not go with it.
    """
    if outcome not in ("landed", "not-applied", "compensated", "accepted"):
        raise DeclarationError('outcome is one of "landed", "not-applied", "compensated" and "accepted".')
    if not by.strip() or not note.strip():
        raise DeclarationError("A resolution is signed and explained. Pass by= and note=.")
    if result is not None and outcome != "landed":
        raise DeclarationError('Only a step that landed has a result. Leave result= out, or pass outcome="landed".')
    opened, ours = _log_of(log)
    try:
        _check_known(opened, saga_id)
        run = Run(saga_id, opened, Options(), recovering=True)
        said = {"outcome": outcome, "by": values.legible(by), "note": values.legible(note)}
        try:
            drive(_resolving(run, step, said, result), run)
            return read_saga(opened, saga_id)
        finally:
            if run.claimed and opened.owned(saga_id):
                opened.release(saga_id)
    finally:
        if ours:
            opened.close()


def _resolving(run: Run, named: int | str, said: dict[str, Any], result: Any) -> Flow[None]:
    looked: Outcome = yield Blocking(partial(run.log.read, run.saga_id))
    if looked.error is not None:
        raise looked.error
    before = fold(looked.value, run.saga_id)
    _named_step(before, named)  # before claiming: a misspelt step leaves no trace
    _refuse_moving(run.saga_id, before)
    records = yield from claim(run, fresh=False, busy_timeout=0.0)
    run.load(records)
    status = run.fold.status
    _refuse_moving(run.saga_id, run.fold)
    step = _named_step(run.fold, named)
    attempt = next((a for a in reversed(step.attempts) if a.open), None)
    if status.final or attempt is None:
        raise SagaNotRunning(
            f"saga {run.saga_id!r} is {status} and step {step.number} {step.tool!r} is {step.last.status}: "
            "there is nothing to resolve.",
            saga_id=run.saga_id,
            status=status,
        )
    yield Append(partial(_resolved, run, step, attempt, said, result))
    yield Flush()
    if status not in (SagaStatus.ROLLING_BACK, SagaStatus.NEEDS_ATTENTION):
        return
    yield from start_rollback(run, f"resolved by {said['by']}", retry=False)
    if any(not a.accepted for s, a in run.fold.open_attempts() if any(_missing(s, a))):
        yield Flush()  # it is rolling back, and a recovery that has the compensators goes on
        return
    yield from roll_back(run, patient_until=run.clock.monotonic(), reason="resolved")


def _refuse_moving(saga_id: str, folded: SagaFold) -> None:
    if folded.moves_to is not None:
        said = "was moved to" if folded.status.final else "is being moved to"
        raise SagaNotRunning(
            f"saga {saga_id!r} {said} the log {folded.moves_to}. Resolve it there, once it has arrived.",
            saga_id=saga_id,
            status=folded.status,
        )


def _named_step(folded: SagaFold, named: int | str) -> Step:
    if isinstance(named, int) or named.isdigit():
        if 1 <= int(named) <= len(folded.steps):
            return folded.step(int(named))
    else:
        found = [step for step in folded.steps if step.tool == named]
        if len(found) == 1:
            return found[0]
        if found:
            numbers = ", ".join(str(step.number) for step in found)
            raise SagaNotFound(
                f"saga {folded.saga_id!r} has several steps {named!r} ({numbers}). Name one by its number.",
                saga_id=folded.saga_id,
            )
    raise SagaNotFound(f"saga {folded.saga_id!r} has no step {named!r}. See `agent-saga show`.", saga_id=folded.saga_id)


def _resolved(run: Run, step: Step, attempt: Attempt, said: dict[str, Any], result: Any) -> Transition:
    data: dict[str, Any] = {"step": step.number, "attempt": attempt.number, **said}
    if said["outcome"] == "landed" and (attempt.status is not StepStatus.DONE or attempt.undo_error is not None):
        if result is not None:
            data["result"] = values.encode(result, where="result").data
        undo, _, undo_error = from_result(run, None, step, attempt, _args(attempt), result)
        if undo is not None:
            data["undo"] = undo
        if undo_error is not None:
            data["undo_error"] = undo_error
    return [(RecordType.RESOLVED, data)], None


def _args(attempt: Attempt) -> dict[str, Any]:
    return values.decode_args(attempt.args, {}, strict=False)
