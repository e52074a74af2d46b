"""The state of a saga: a pure fold over its records. Reads nothing, calls nothing, imports nothing named in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, cast

import msgspec

from agent_saga_core import values
from agent_saga_core.declare import ActionSemantics
from agent_saga_core.errors import LogCorrupted
from agent_saga_core.records import Record, RecordType

__all__ = [
    "Attempt",
    "AttemptState",
    "Report",
    "SagaFold",
    "SagaHead",
    "SagaState",
    "SagaStatus",
    "Step",
    "StepState",
    "StepStatus",
    "fold",
    "within",
]


class SagaStatus(StrEnum):
    """Where a saga stands."""

    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMMITTED = "COMMITTED"
    ROLLING_BACK = "ROLLING_BACK"
    ROLLED_BACK = "ROLLED_BACK"
    NEEDS_ATTENTION = "NEEDS_ATTENTION"
    MOVING = "MOVING"
    """On its way to another log: nobody touches it here until `agent-saga log copy` has gone on with it."""
    MOVED = "MOVED"
    """It lives in another log."""

    @property
    def final(self) -> bool:
        """Whether no record can follow."""
        return self in (SagaStatus.COMMITTED, SagaStatus.ROLLED_BACK, SagaStatus.MOVED)


class StepStatus(StrEnum):
    """Where a step stands, which is where its last attempt stands."""

    INTENDED = "INTENDED"
    DONE = "DONE"
    NOT_APPLIED = "NOT_APPLIED"
    UNKNOWN = "UNKNOWN"
    PAUSED = "PAUSED"
    COMPENSATING = "COMPENSATING"
    COMPENSATED = "COMPENSATED"
    COMPENSATION_FAILED = "COMPENSATION_FAILED"


SETTLED_ABSENT: Final = frozenset({StepStatus.NOT_APPLIED, StepStatus.COMPENSATED})
"""An attempt that left nothing behind: the next call of the same identity is a new attempt."""


class AttemptState(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a step, as reports and the command line show it."""

    number: int
    status: StepStatus
    forward_key: str
    compensation_key: str
    compensations: int
    """How many times its compensation was started."""
    detail: str


class StepState(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a saga at one moment. `str()` of it is a line for people."""

    number: int
    """From 1, in the order of the first intents."""
    tool: str
    semantics: ActionSemantics
    status: StepStatus
    attempts: int
    forward_key: str
    """The idempotency key of the last attempt's forward call."""
    compensation_key: str
    """The idempotency key of the last attempt's compensation."""
    detail: str = ""
    """Why it stands where it stands, if there is something to say."""
    scope: str = ""
    """The savepoint it belongs to; empty for the saga itself."""
    history: tuple[AttemptState, ...] = ()

    def __str__(self) -> str:
        said = f"step {self.number} {self.tool}: {self.status}"
        return f"{said} ({self.detail})" if self.detail else said


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the end of a scope, or of a recovery, came to."""

    saga_id: str
    status: SagaStatus
    clean: bool
    """Whether nothing of the saga's effects may be left (or, committed, nothing is open)."""
    remaining: tuple[StepState, ...] = ()
    """The steps whose effects may be left behind."""

    def __str__(self) -> str:
        head = f"saga {self.saga_id!r} {self.status}"
        if self.clean:
            return f"{head}, clean"
        return f"{head}; remaining: " + "; ".join(str(step) for step in self.remaining)


class SagaState(msgspec.Struct, frozen=True, kw_only=True):
    """A saga as its log tells it."""

    saga_id: str
    name: str
    status: SagaStatus
    steps: tuple[StepState, ...]
    metadata: dict[str, Any]
    """Plain JSON data for people: values without their types. `Saga.metadata` gives them as they were."""
    report: Report | None
    """The last verdict; None before there is one."""
    started: datetime | None = None
    rollback_only: str | None = None
    """Why it can no longer commit; None if it can."""
    deadline: datetime | None = None
    """Until when a SUSPENDED saga is left alone."""
    timeline: tuple[dict[str, Any], ...] = ()
    """The records in order: number, type, time, and the step they speak of."""


class SagaHead(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a list of sagas."""

    saga_id: str
    name: str
    status: SagaStatus
    started: datetime
    steps: int
    attention: int
    """How many of its steps need a person or a recovery."""


class Attempt:
    """One try of a step, as far as the records tell."""

    # What few attempts ever have stands on the class, so that making one costs little.
    undo_error: str | None = None
    outcome = 0  # number of the first DONE or UNKNOWN record: the order of undo
    has_result = False
    result: Any = None
    error = ""
    in_transit = True
    settle_not_before = 0.0
    tries = 0  # compensations started since the last explicit recovery
    total = 0
    started = False  # a compensation was started whose end is not in the log
    first_started = 0.0
    key_round = 0
    not_before = 0.0
    accepted = False

    def __init__(self, number: int, data: dict[str, Any], epoch: int) -> None:
        self.number = number
        self.status = StepStatus.INTENDED
        self.epoch = epoch
        self.forward_key: str = data["key"]
        self.compensation_key: str = data.get("undo_key", "")
        self.fingerprint: str = data["fingerprint"]
        self.args: Any = data.get("args", {})
        self.in_doubt = float(data.get("in_doubt", 30.0))
        self.undo: dict[str, Any] | None = data.get("undo")
        self.local_only = bool(data.get("local", False))

    @property
    def open(self) -> bool:
        """Whether its effect may exist."""
        return self.status not in SETTLED_ABSENT

    @property
    def unsettled(self) -> bool:
        """Whether nobody knows yet what became of it, or its undo has not ended."""
        return self.status not in (StepStatus.DONE, StepStatus.NOT_APPLIED, StepStatus.COMPENSATED)

    @property
    def detail(self) -> str:
        """A word for people."""
        if self.accepted:
            return "accepted by a person"
        if self.undo_error and self.status is StepStatus.DONE:
            return f"no undo could be derived: {self.undo_error}"
        return self.error if self.status is not StepStatus.COMPENSATED else ""

    def view(self) -> AttemptState:
        """A frozen copy."""
        return AttemptState(
            number=self.number,
            status=self.status,
            forward_key=self.forward_key,
            compensation_key=self.compensation_key,
            compensations=self.total,
            detail=self.detail,
        )


def within(inner: str, scope: str) -> bool:
    """Whether `inner` is `scope` or a savepoint inside it."""
    return not scope or inner == scope or inner.startswith(f"{scope}/")


class Step:
    """The attempts of one call identity."""

    __slots__ = ("attempts", "identity", "number", "parent", "probe", "scope", "semantics", "tool")

    def __init__(self, data: dict[str, Any]) -> None:
        self.number: int = data["step"]
        self.tool: str = data["tool"]
        self.semantics = ActionSemantics(data["semantics"])
        self.identity: str = data["identity"]
        self.scope: str = data.get("scope", "")
        self.parent: int | None = data.get("parent")
        self.probe: str | None = data.get("probe")
        self.attempts: list[Attempt] = []

    @property
    def last(self) -> Attempt:
        """The attempt that the step's status is that of."""
        return self.attempts[-1]

    def within(self, scope: str) -> bool:
        """Whether it belongs to `scope` or to a savepoint inside it."""
        return within(self.scope, scope)

    def view(self) -> StepState:
        """A frozen copy."""
        last = self.last
        return StepState(
            number=self.number,
            tool=self.tool,
            semantics=self.semantics,
            status=last.status,
            attempts=len(self.attempts),
            forward_key=last.forward_key,
            compensation_key=last.compensation_key,
            detail=last.detail,
            scope=self.scope,
            history=tuple(attempt.view() for attempt in self.attempts),
        )


class SagaFold:
    """The running fold of one saga's records; `apply` takes the next one.

    Not locked: whoever folds decides who may look.
    """

    def __init__(self, saga_id: str) -> None:
        self.saga_id = saga_id
        self.name = "saga"
        self.nonce = ""
        self.metadata: dict[str, Any] = {}
        self.orphan_after = 0.0
        self.status = SagaStatus.RUNNING
        self.started = 0.0
        self.last_time = 0.0
        self.next_n: int = 1
        self.epoch = 0
        self.rollback_only: str | None = None
        self.deadline: float | None = None
        self.moves_to: str | None = None  # the log it is moved to
        self.stays = SagaStatus.RUNNING  # what it was before, and is again if the other log does not take it
        self.waiting = False  # the last verdict only waits for time to pass
        self.verdict: tuple[bool, dict[int, str]] | None = None  # clean, and why each remaining step remains
        self.steps: list[Step] = []
        self.by_identity: dict[str, Step] = {}

    @property
    def empty(self) -> bool:
        """Whether no record has been folded."""
        return self.next_n == 1

    def apply(self, record: Record) -> None:
        """Fold one record.

        Raises:
            LogCorrupted: The record does not follow, or does not hold what its type demands.
        """
        if record.n != self.next_n:
            raise LogCorrupted(
                f"saga {self.saga_id!r}: record {record.n} where {self.next_n} was due. Run `agent-saga verify`.",
                saga_id=self.saga_id,
            )
        if record.n == 1 and record.type != RecordType.START:
            raise LogCorrupted(
                f"saga {self.saga_id!r} does not begin with START. Run `agent-saga verify`.", saga_id=self.saga_id
            )
        fold_one = _FOLDS.get(record.type)
        if fold_one is None and record.critical:
            raise LogCorrupted(
                f"saga {self.saga_id!r}: record {record.n} is of the unknown type {record.type[:40]!r}. "
                "Read it with the version of agent-saga that wrote it.",
                saga_id=self.saga_id,
            )
        if fold_one is not None:
            try:
                fold_one(self, record, record.data)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
                raise LogCorrupted(
                    f"saga {self.saga_id!r}: record {record.n} ({record.type}) cannot be read "
                    f"({type(error).__name__}). Run `agent-saga verify`.",
                    saga_id=self.saga_id,
                ) from error
        self.next_n = record.n + 1
        if record.type != RecordType.CLAIM:  # a recoverer that looks and leaves again must not make an orphan young
            self.last_time = record.time

    def step(self, number: int) -> Step:
        """The step of that number."""
        if number < 1:
            raise IndexError(number)
        return self.steps[number - 1]

    def open_attempts(self, scope: str = "") -> list[tuple[Step, Attempt]]:
        """What may have to be undone in `scope`, in the order of undo.

        Reverse order of the first outcome; attempts without one first. READ_ONLY leaves nothing.
        """
        found = [
            (step, attempt)
            for step in self.steps
            if step.semantics is not ActionSemantics.READ_ONLY and step.within(scope)
            for attempt in step.attempts
            if attempt.open
        ]
        found.sort(key=lambda item: (item[1].outcome or self.next_n, item[0].number, item[1].number), reverse=True)
        return found

    def attention(self) -> int:
        """How many steps need a person or a recovery."""
        if self.status.final or self.status is SagaStatus.SUSPENDED:
            return 0
        if self.status is SagaStatus.NEEDS_ATTENTION and self.verdict is not None:
            return len(self.verdict[1])
        return sum(
            step.last.status in (StepStatus.UNKNOWN, StepStatus.COMPENSATION_FAILED)
            and step.semantics is not ActionSemantics.READ_ONLY
            for step in self.steps
        )

    def report(self) -> Report | None:
        """The last verdict, or None before there is one."""
        if self.status is SagaStatus.COMMITTED:
            return Report(saga_id=self.saga_id, status=self.status, clean=True)
        if self.verdict is None or self.moves_to is not None:  # what remains of it is told where it is
            return None
        clean, remaining = self.verdict
        return Report(
            saga_id=self.saga_id,
            status=self.status,
            clean=clean,
            remaining=tuple(
                msgspec.structs.replace(view, detail=why or view.detail)
                for view, why in ((self.step(number).view(), why) for number, why in remaining.items())
            ),
        )

    def view(self, timeline: Iterable[Record] = ()) -> SagaState:
        """A frozen copy."""
        shown = values.display(self.metadata)
        metadata = cast("dict[str, Any]", shown) if isinstance(shown, dict) else {}  # a log may hold anything
        return SagaState(
            saga_id=self.saga_id,
            name=self.name,
            status=self.status,
            steps=tuple(step.view() for step in self.steps),
            metadata=metadata,
            report=self.report(),
            started=moment(self.started),
            rollback_only=self.rollback_only,
            deadline=moment(self.deadline)
            if self.deadline is not None and self.status is SagaStatus.SUSPENDED
            else None,
            timeline=tuple(_entry(record) for record in timeline),
        )

    def head(self) -> SagaHead:
        """One line about it."""
        return SagaHead(
            saga_id=self.saga_id,
            name=self.name,
            status=self.status,
            started=moment(self.started),
            steps=len(self.steps),
            attention=self.attention(),
        )


def moment(seconds: float) -> datetime:
    """Seconds since the epoch as an aware UTC datetime; the epoch itself where they are out of range."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0, UTC)


_SHOWN: Final = (
    "step", "attempt", "tool", "key", "undo_key", "handler", "try", "error", "reason", "outcome", "by", "note",
    "parent", "to",
)  # fmt: skip


def _entry(record: Record) -> dict[str, Any]:
    shown = {name: record.data[name] for name in _SHOWN if name in record.data}
    return {"n": record.n, "type": record.type, "time": moment(record.time).isoformat(), "epoch": record.epoch, **shown}


def fold(records: Iterable[Record], saga_id: str | None = None) -> SagaFold:
    """Fold records, in order, into the state they tell.

    Raises:
        LogCorrupted: They do not make a saga.
    """
    folded: SagaFold | None = SagaFold(saga_id) if saga_id is not None else None
    for record in records:
        if folded is None:
            folded = SagaFold(record.saga)
        folded.apply(record)
    return folded if folded is not None else SagaFold("")


def _attempt(state: SagaFold, data: dict[str, Any]) -> Attempt:
    number: int = data["attempt"]
    if number < 1:
        raise IndexError(number)
    return state.step(data["step"]).attempts[number - 1]


def _start(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    state.name = str(data.get("name", "saga"))
    state.nonce = str(data["nonce"])
    state.metadata = dict(data.get("metadata", {}))
    state.orphan_after = float(data.get("orphan_after", 0.0))
    state.started = record.time
    state.epoch = record.n


def _claim(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    state.epoch = record.n


def _intent(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    number: int = data["step"]
    if number == len(state.steps) + 1:
        step = Step(data)
        state.steps.append(step)
        state.by_identity[step.identity] = step
    step = state.step(number)
    attempt = Attempt(data["attempt"], data, record.epoch)
    if attempt.number == len(step.attempts) and step.last.forward_key == attempt.forward_key:
        step.attempts[-1] = attempt  # a fold that a signal interrupted is repeated
    elif attempt.number == len(step.attempts) + 1:
        step.attempts.append(attempt)
    else:
        raise ValueError("attempt out of order")
    if state.status is SagaStatus.SUSPENDED:
        state.status = SagaStatus.RUNNING


def _done(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    attempt = _attempt(state, data)
    attempt.status = StepStatus.DONE
    attempt.outcome = attempt.outcome or record.n
    attempt.has_result = "result" in data
    attempt.result = data.get("result")
    if "undo" in data:
        attempt.undo = data["undo"]
    attempt.local_only = attempt.local_only or bool(data.get("local", False))
    attempt.undo_error = data.get("undo_error")


def _not_applied(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    attempt = _attempt(state, data)
    attempt.status = StepStatus.NOT_APPLIED
    attempt.error = str(data.get("error") or data.get("reason", ""))


def _unknown(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    attempt = _attempt(state, data)
    attempt.status = StepStatus.UNKNOWN
    attempt.outcome = attempt.outcome or record.n
    attempt.error = str(data.get("error", ""))
    attempt.in_transit = bool(data.get("in_transit", True))
    attempt.settle_not_before = float(data.get("settle_not_before", 0.0))


def _paused(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    attempt = _attempt(state, data)
    attempt.status = StepStatus.PAUSED
    attempt.in_transit = False


def _abort(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    state.rollback_only = state.rollback_only or str(data.get("reason", "aborted"))


def _suspended(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    state.status = SagaStatus.SUSPENDED
    state.deadline = float(data["deadline"])


def _rolling_back(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    state.status = SagaStatus.ROLLING_BACK
    state.rollback_only = state.rollback_only or str(data.get("reason", "rolled back"))
    state.waiting = False
    if data.get("retry"):
        for step in state.steps:
            for attempt in step.attempts:
                attempt.tries = 0
                attempt.not_before = 0.0


def _compensating(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    attempt = _attempt(state, data)
    if data["key"] != attempt.compensation_key:
        attempt.compensation_key = data["key"]
        attempt.first_started = 0.0
    attempt.status = StepStatus.COMPENSATING
    attempt.tries += 1
    attempt.total += 1
    attempt.started = True
    attempt.first_started = attempt.first_started or record.time


def _compensated(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    attempt = _attempt(state, data)
    attempt.status = StepStatus.COMPENSATED
    attempt.started = False


def _compensation_failed(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    attempt = _attempt(state, data)
    attempt.status = StepStatus.COMPENSATION_FAILED
    attempt.error = str(data.get("error", ""))
    attempt.not_before = float(data.get("not_before", 0.0))
    if data.get("not_applied"):
        attempt.key_round += 1
        attempt.started = False


def _committed(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    state.status = SagaStatus.COMMITTED


def _rolled_back(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    state.status = SagaStatus.ROLLED_BACK
    state.verdict = (bool(data.get("clean", False)), _remaining(state, data))


def _needs_attention(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    state.status = SagaStatus.NEEDS_ATTENTION
    state.waiting = bool(data.get("waiting", False))
    state.verdict = (False, _remaining(state, data))


def _remaining(state: SagaFold, data: dict[str, Any]) -> dict[int, str]:
    numbers = [state.step(number).number for number in data.get("remaining", ())]
    reasons = [str(reason) for reason in data.get("reasons", ())]
    return {number: reasons[i] if i < len(reasons) else "" for i, number in enumerate(numbers)}


def _moving(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    to = data["to"]
    if state.moves_to is None:
        state.stays = state.status
    state.moves_to = None if to is None else str(to)
    state.status = state.stays if to is None else SagaStatus.MOVING


def _moved(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    state.moves_to = str(data["to"])
    state.status = SagaStatus.MOVED


def _resolved(state: SagaFold, record: Record, data: dict[str, Any]) -> None:
    attempt = _attempt(state, data)
    match data["outcome"]:
        case "landed":
            attempt.outcome = attempt.outcome or record.n
            attempt.status = StepStatus.DONE
            attempt.has_result = attempt.has_result or "result" in data
            attempt.result = data.get("result", attempt.result)
            attempt.undo = data.get("undo", attempt.undo)
            attempt.undo_error = data.get("undo_error")
        case "not-applied":
            attempt.status = StepStatus.NOT_APPLIED
        case "compensated":
            attempt.status = StepStatus.COMPENSATED
            attempt.started = False
        case "accepted":
            attempt.accepted = True
        case _:
            raise ValueError("unknown outcome")


_FOLDS: Final[dict[str, Callable[[SagaFold, Record, dict[str, Any]], None]]] = {
    RecordType.START: _start,
    RecordType.CLAIM: _claim,
    RecordType.INTENT: _intent,
    RecordType.DONE: _done,
    RecordType.NOT_APPLIED: _not_applied,
    RecordType.UNKNOWN: _unknown,
    RecordType.PAUSED: _paused,
    RecordType.ABORT: _abort,
    RecordType.SUSPENDED: _suspended,
    RecordType.ROLLING_BACK: _rolling_back,
    RecordType.COMPENSATING: _compensating,
    RecordType.COMPENSATED: _compensated,
    RecordType.COMPENSATION_FAILED: _compensation_failed,
    RecordType.COMMITTED: _committed,
    RecordType.ROLLED_BACK: _rolled_back,
    RecordType.NEEDS_ATTENTION: _needs_attention,
    RecordType.RESOLVED: _resolved,
    RecordType.MOVING: _moving,
    RecordType.MOVED: _moved,
}
