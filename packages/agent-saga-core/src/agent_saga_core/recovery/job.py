"""One saga on its way through a recovery: look, claim, look again, roll back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Literal, NamedTuple

from agent_saga_core.engine.effects import Append, Blocking, Draft, Flow, Outcome
from agent_saga_core.engine.reopen import claim
from agent_saga_core.engine.run import Options, Run
from agent_saga_core.engine.unwind import in_doubt_until, release, roll_back, start_rollback, unwind
from agent_saga_core.errors import LogCorrupted, SagaBusy
from agent_saga_core.log.base import Log
from agent_saga_core.records import Record, RecordType
from agent_saga_core.recovery.claims import Claims
from agent_saga_core.recovery.forecast import left_for_sure, told_by_probes
from agent_saga_core.recovery.handlers import Tries, Try, missing, needs_of, tries_of
from agent_saga_core.recovery.report import Verdict
from agent_saga_core.state import SagaFold, SagaStatus, StepStatus, fold

__all__ = ["Job", "Seen", "Standing", "begin", "found_live", "go_on", "look"]

Standing = Literal["live", "orphaned", "suspended", "waiting", "attention", "damaged"]


class Seen(NamedTuple):
    """A call of a compensator that has ended here."""

    saga_id: str
    n: int
    """The number of the record that says so; of no account without a record of its own start."""
    handler: str
    outcome: Literal["compensated", "failed", "given_up"]
    called: bool
    """Whether it was called at all, and its end heard: a probe may have seen the effect, or nothing could be called."""


class _Watched(Run):
    """A run that tells of the compensations that it records."""

    def __init__(self, saga_id: str, log: Log, tell: Callable[[Seen], None]) -> None:
        super().__init__(saga_id, log, Options(), recovering=True)
        self._tell = tell
        self._tries = Tries()

    def append(self, drafts: Sequence[Draft]) -> None:
        """See `Run.append`."""
        first = self.fold.next_n
        super().append(drafts)
        for n, (kind, data) in enumerate(drafts, first):
            ended = self._tries.follow(kind, data)
            if kind not in (RecordType.COMPENSATED, RecordType.COMPENSATION_FAILED) or data.get("gone"):
                continue
            outcome = "failed" if "not_before" in data else "given_up"
            outcome = "compensated" if kind == RecordType.COMPENSATED else outcome
            handler = self._handler(data["step"], data["attempt"]) if ended is None else ended[0]
            self._tell(Seen(self.saga_id, n, handler, outcome, ended is not None))

    def _handler(self, step: int, attempt: int) -> str:
        undo: dict[str, object] = self.fold.steps[step - 1].attempts[attempt - 1].undo or {}
        return str(undo.get("handler", ""))


class Job:
    """One saga on its way through a recovery.

    Attributes:
        run: What this process knows of it; made when it is first asked for.
        wake: When what is in doubt is due, on the log's monotonic clock.
        verdict: What it came to; None while it is not over.
        gone: It was found unfinished, and finished by somebody else before it was looked at.
    """

    def __init__(
        self,
        log: Log,
        saga_id: str,
        *,
        asked: bool,
        named: bool = True,
        claims: Claims | None = None,
        tell: Callable[[Seen], None] | None = None,
        claimed: Callable[[], None] | None = None,
    ) -> None:
        self.log = log
        self.saga_id = saga_id
        self.asked = asked  # an explicit recovery, which gives what needs attention three new tries
        self.named = named  # by the caller; else it was found unfinished
        self.gone = False
        self.wake: float | None = None
        self.verdict: Verdict | None = None
        self.reason = ""
        self._claims = claims
        self._tell = tell
        self._told_claimed = claimed
        # What a look has found.
        self.standing: Standing = "orphaned"
        self.started: float | None = None
        self.needs: frozenset[str] = frozenset()
        self.doubtful = False  # rolling it back begins with a wait
        self.tries: tuple[Try, ...] = ()
        self.begun = False

    @cached_property
    def run(self) -> Run:
        """What this process knows of the saga."""
        if self._tell is None:
            return Run(self.saga_id, self.log, Options(), recovering=True)
        return _Watched(self.saga_id, self.log, self._tell)

    def ends(self, verdict: Verdict, reason: str = "") -> None:
        """It is over."""
        self.verdict = verdict
        self.reason = reason

    def hand_back(self) -> None:
        """Give the saga up as it stands; another recovery goes on from there."""
        if "run" in self.__dict__ and self.run.claimed and self.log.owned(self.saga_id):
            self.log.release(self.saga_id)

    def claim(self) -> Flow[tuple[Record, ...]]:
        """Own it, together with others that are claimed at this moment.

        Raises:
            SagaBusy: Somebody else has it.
            LogCorrupted: Damage concerns it.
        """
        if self._claims is None:
            records = yield from claim(self.run, fresh=False, busy_timeout=0.0)
        else:
            outcome: Outcome = yield Blocking(partial(self._claim_with_others, self._claims))
            if outcome.error is not None:
                raise outcome.error
            self.run.claimed_at = self.run.clock.monotonic()
            records = outcome.value
        if self._told_claimed is not None:
            self._told_claimed()
        return records

    def _claim_with_others(self, claims: Claims) -> tuple[Record, ...]:
        records = claims.claim(self.saga_id)
        self.run.claimed = True
        return records


def look(job: Job, *, ask: bool) -> None:
    """See how the saga stands, without touching it.

    Afterwards the job has a verdict, or may be begun; what it will call, and what the log tells of earlier calls, is
    noted.

    Args:
        job: The saga.
        ask: Whether to ask the log first if it is live; then it is not read.

    Raises:
        LogUnavailable: The log cannot be read.
    """
    if ask and found_live(job):
        return
    try:
        records = job.log.read(job.saga_id)
    except LogCorrupted as error:
        job.ends("damaged", str(error))
        records = None
    folded = None if records is None else _folded(job, records)
    if records is None or folded is None:
        job.standing = "damaged"
        return
    job.started = folded.started
    job.tries = tuple(tries_of(job.saga_id, records))
    job.needs = needs_of(folded, retry=job.asked)
    job.doubtful = any(a.status in (StepStatus.INTENDED, StepStatus.UNKNOWN) for _, a in folded.open_attempts())
    left_alone = _leave_alone(job, folded)
    match folded.status:
        case SagaStatus.SUSPENDED if left_alone:
            job.standing = "suspended"
        case SagaStatus.NEEDS_ATTENTION if not folded.waiting:
            job.standing = "attention"
        case SagaStatus.NEEDS_ATTENTION:
            job.standing = "waiting"
        case SagaStatus.RUNNING if left_alone:
            job.standing = "waiting"
        case _:
            job.standing = "orphaned"
    if not left_alone:
        _unable(job, folded)


def found_live(job: Job) -> bool:
    """Ask the log whether some process owns the saga; then that, or damage, is the job's verdict."""
    try:
        live = job.log.is_live(job.saga_id)
    except LogCorrupted as error:
        job.standing = "damaged"
        job.ends("damaged", str(error))
        return True
    if live:
        job.standing = "live"
        job.ends("live")
    return live


def begin(job: Job, *, dry_run: bool) -> Flow[None]:
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
        job.ends("live") if live.value else _foretell(job, folded)
        return
    try:
        records = yield from job.claim()
    except SagaBusy:
        return job.ends("live")
    except LogCorrupted as error:
        return job.ends("damaged", str(error))
    folded = _folded(job, records)
    if folded is None or _leave_alone(job, folded) or _unable(job, folded):
        yield Blocking(partial(job.log.release, job.saga_id))
        return
    job.run.fold = folded
    yield from start_rollback(job.run, "its owner is gone", retry=_retries(job, folded))
    yield from go_on(job)


def _foretell(job: Job, folded: SagaFold) -> None:
    """The verdict of a dry run: what is recorded may say already that a person is needed, whatever is called."""
    left = left_for_sure(folded, job.log.clock.time(), retry=_retries(job, folded))
    if left:
        remaining = "; ".join(str(step) for step in left)
        return job.ends("attention", f"saga {job.saga_id!r} would end as NEEDS_ATTENTION; remaining: {remaining}")
    probed = told_by_probes(folded)
    told = f", if its probe can tell what became of {', '.join(probed)}" if probed else ""
    job.ends("recovered", f"would be rolled back{told}")


def _retries(job: Job, folded: SagaFold) -> bool:
    return job.asked and folded.status is SagaStatus.NEEDS_ATTENTION


def go_on(job: Job) -> Flow[None]:
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


def _failed(job: Job, outcome: Outcome) -> bool:
    if outcome.error is None:
        return False
    if not isinstance(outcome.error, LogCorrupted):
        raise outcome.error
    job.ends("damaged", str(outcome.error))
    return True


def _folded(job: Job, records: tuple[Record, ...]) -> SagaFold | None:
    try:
        folded = fold(records, job.saga_id)
    except LogCorrupted as error:
        job.ends("damaged", str(error))
        return None
    if folded.empty:
        job.ends("damaged", "no record of it can be read")
        return None
    return folded


def _leave_alone(job: Job, folded: SagaFold) -> bool:
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


def _unable(job: Job, folded: SagaFold) -> bool:
    """Whether a handler is missing here, or the stored arguments do not fit it. Nothing is claimed then."""
    lacking = [why for step, attempt in folded.open_attempts() for why in missing(step, attempt)]
    if lacking:
        job.ends("untouched", f"{'; '.join(dict.fromkeys(lacking))}. Pass --import with the modules that register them")
    return bool(lacking)
