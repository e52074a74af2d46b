"""What one process knows of one saga: the fold of its records, and what no record holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from agent_saga_core.clock import Clock
from agent_saga_core.declare import ActionSemantics, StepSpec
from agent_saga_core.engine.effects import Draft
from agent_saga_core.records import Record, RecordType
from agent_saga_core.state import SETTLED_ABSENT, Attempt, SagaFold, Step, within
from agent_saga_core.values import Encoded

if TYPE_CHECKING:
    from agent_saga_core.log.base import Log

__all__ = ["Attempted", "CallSite", "LocalUndo", "Options", "Run", "Running", "StepCall"]

Attempted = tuple[int, int]
"""Step number and attempt number."""

_LEAVES_NOTHING = frozenset({RecordType.NOT_APPLIED, RecordType.COMPENSATED})


class Options:
    """How a scope was opened."""

    __slots__ = ("approve", "drain_timeout", "durability", "on_failure", "resume")

    def __init__(
        self,
        *,
        on_failure: Literal["settle", "abort"] = "settle",
        approve: Callable[..., Any] | None = None,
        drain_timeout: float = 30.0,
        durability: Literal["strict", "relaxed"] = "strict",
        resume: Literal["replay", "continue"] = "replay",
    ) -> None:
        self.on_failure = on_failure
        self.approve = approve
        self.drain_timeout = drain_timeout
        self.durability = durability
        self.resume = resume


class CallSite(NamedTuple):
    """Where a call was made, in the words of its framework: what makes the call the same one after a resume."""

    adapter: str
    """Whose words these are."""
    scope: str = ""
    """The part of the run that made the call, named as it will be named after a resume."""
    call_id: str | None = None
    """The framework's id of the call, unique within `scope`."""
    body: Hashable = None
    """One execution of the code that makes the calls. Calls without an id are counted within it; None: in the saga."""


class StepCall:
    """One call of a tool in a scope, from its lookup to its outcome."""

    __slots__ = (
        "aborts",
        "approve",
        "args",
        "base",
        "body",
        "declared_key",
        "encoded",
        "enclosing",
        "explicit",
        "fingerprint",
        "identity",
        "invoke",
        "occurrence",
        "parent",
        "placed",
        "refused",
        "scope",
        "settle_later",
        "spec",
        "undo_kwargs",
        "undo_stored",
    )

    def __init__(
        self,
        *,
        spec: StepSpec,
        args: dict[str, Any],
        encoded: Encoded,
        fingerprint: str,
        invoke: Callable[[str], Any],
        scope: str,
        identity: str | None,
        base: str,
        parent: int | None,
        enclosing: tuple[object, ...],
        declared_key: str | None = None,
        refused: BaseException | None = None,
        explicit: bool = False,
        body: Hashable = None,
        placed: bool = False,
    ) -> None:
        self.spec = spec
        self.args = args
        self.encoded = encoded
        self.fingerprint = fingerprint
        self.invoke = invoke
        self.scope = scope
        self.declared_key = declared_key
        self.explicit = explicit  # the identity alone says which call it is: other arguments are a conflict
        self.body = body
        self.placed = placed
        self.identity = identity or ""
        self.base = base
        self.occurrence = -1
        self.parent = parent
        self.enclosing = enclosing
        self.refused = refused  # found wanting while it was prepared: recorded as NOT_APPLIED, then raised
        self.settle_later = False  # its probe or inverse is async, and this caller blocks the loop it would run on
        self.approve: Callable[..., Any] | None = None  # asked instead of the scope's own gate
        self.aborts = False  # its scope, or one around it, was opened with on_failure="abort"
        self.undo_kwargs: dict[str, Any] | None = None
        self.undo_stored: dict[str, Any] | None = None


class Running:
    """A forward call that this process has started, or is about to."""

    __slots__ = ("attempt", "call", "cancel", "given_up", "goes_on", "started", "step")

    def __init__(self, call: StepCall, step: int, attempt: int, *, goes_on: bool = False) -> None:
        self.call = call
        self.step = step
        self.attempt = attempt
        self.goes_on = goes_on  # after a pause: before it, it was called already
        self.started = False
        self.given_up = False  # its caller waits no more, it goes on in a thread, and `Call.late` will hear its end
        self.cancel: Callable[[], object] | None = None  # set while an async call can be asked to stop


class LocalUndo:
    """An inverse with this process's own objects."""

    __slots__ = ("fn", "handler", "kwargs", "secrets")

    def __init__(
        self,
        handler: str | None,
        fn: Callable[..., Any] | None,
        kwargs: Mapping[str, Any],
        secrets: Sequence[str] = (),
    ) -> None:
        self.handler = handler
        self.fn = fn
        self.kwargs = kwargs
        self.secrets = secrets  # texts that its arguments may show and messages may not


class Run:
    """One saga in this process. Everything in it changes under `lock`, within a decision.

    `pending` makes the critical section safe against an exception that a signal raises in the middle of it: a record
    stands there from before it is appended until after it is folded, and the next decision first finishes what stands
    there; appending a record again stores nothing twice.
    """

    def __init__(self, saga_id: str, log: Log, options: Options, *, recovering: bool = False) -> None:
        self.saga_id = saga_id
        self.log = log
        self.clock: Clock = log.clock
        self.options = options
        self.recovering = recovering
        self.lock = threading.RLock()
        self.fold = SagaFold(saga_id)
        self.pending: list[Record] = []
        self.ticket = 0
        self.waiters: list[Callable[[], None]] = []
        self.running: dict[object, Running] = {}
        self.flows: dict[object, str] = {}
        self.savepoints: set[str] = set()  # open ones: the saga cannot commit around them
        self.ended: set[str] = set()
        self.busy: set[Attempted] = set()
        self.born: dict[Attempted, float] = {}
        self.local: dict[Attempted, LocalUndo] = {}
        self.taken: dict[tuple[str, Hashable], set[int]] = {}
        self.unsettled: set[Attempted] = set()
        self.must_undo: set[Attempted] = set()
        self.recorded: set[int] = set()
        self.met: set[int] = set()
        self.met_in: dict[int, str] = {}  # by step: the savepoint that it belongs to, if not the one it began in
        self.met_by: dict[int, tuple[str, Hashable, int]] = {}  # by step: what was counted, in which body, its number
        self.types: dict[str, type] = {}
        self.secrets: dict[int, tuple[str, ...]] = {}  # by step: what its arguments hide
        self.shelf: dict[object, Any] = {}  # what adapters keep for as long as the saga is open here
        self.specs: dict[int, StepSpec] = {}
        self.claimed_at = self.clock.monotonic()
        self.refusals = 0
        self.claimed = False  # this run owns the saga; another one in this process may own the same id
        self.closing = False
        self.over = False
        self.stale = False
        self.suspended = False
        self.replay_only = False
        self.diverged: str | None = None
        self.exit_by: BaseException | None = None

    def append(self, drafts: Sequence[Draft]) -> None:
        """Number, append and fold records. Under the lock."""
        fold = self.fold
        self.stale = True
        number, epoch = fold.next_n, fold.epoch or 1
        now = self.clock.time()
        pending = self.pending
        pending.extend(
            [
                Record(saga=self.saga_id, n=number + i, epoch=epoch, type=kind, time=now, data=data)
                for i, (kind, data) in enumerate(drafts)
            ]
        )
        self.catch_up()

    def catch_up(self) -> None:
        """Append and fold what stands in `pending`. Under the lock; safe to repeat after any interruption."""
        pending, fold = self.pending, self.fold
        while pending:
            record = pending[0]
            if record.n >= fold.next_n:
                try:
                    self.ticket = self.log.append(record)
                except ValueError:  # refused for what it holds: nothing of this decision is anywhere, nor will be
                    pending.clear()
                    raise
                fold.apply(record)
            if record.type in _LEAVES_NOTHING:
                self._count_back(record.data["step"])
            pending.pop(0)

    def load(self, records: tuple[Record, ...]) -> None:
        """Fold what the log holds."""
        for record in records:
            self.fold.apply(record)

    def notify(self) -> None:
        """Wake everyone who waits for a change. Under the lock."""
        waiters, self.waiters = self.waiters, []
        for wake in waiters:
            wake()

    def free(self, key: Attempted) -> None:
        """Let others settle or compensate this attempt again."""
        with self.lock:
            self.busy.discard(key)
            self.notify()

    def open_attempts(self, scope: str = "") -> list[tuple[Step, Attempt]]:
        """What may have to be undone in `scope`, in the order of undo, by the savepoints of the body that runs now."""
        if not scope or not self.met_in:
            return self.fold.open_attempts(scope)
        found = self.fold.open_attempts()
        return [(step, its) for step, its in found if within(self.belongs(step), scope)]

    def belongs(self, step: Step) -> str:
        """The savepoint, as they are numbered here, that a step is undone with."""
        return self.met_in.get(step.number, step.scope)

    def begin(self, number: int, call: StepCall) -> None:
        """A call makes an attempt, which belongs to the savepoint of the call. Under the lock."""
        self.met.add(number)
        self.met_by[number] = (call.base, call.body, call.occurrence)
        if number <= len(self.fold.steps):
            self.met_in[number] = call.scope

    def meet(self, step: Step, call: StepCall) -> None:
        """A call has met what its step has done. Under the lock.

        A framework that runs a body again opens its savepoints again, under other numbers: a step that was made in one
        of them belongs to the one that it is met in now, and is undone with that; so is what else was made there and
        not met yet. Met again by the same execution of the body, it stays where it is.
        """
        number = step.number
        before = self.met_by.get(number)
        self.met.add(number)
        self.met_by[number] = (call.base, call.body, call.occurrence)
        here, there = self.belongs(step), call.scope
        same = before is not None and call.body is not None and before[1] == call.body
        if not call.placed or not step.scope or same or (here and within(there, here)):
            return
        if here and call.body is not None:
            for other in self.fold.steps:
                known = self.met_by.get(other.number)
                if self.belongs(other) == here and (known is None or known[1] != call.body):
                    self.met_in[other.number] = there
        self.met_in[number] = there

    def detach(self) -> None:
        """The savepoints of former owners are none of those that are opened here, under the same numbers.

        Not where the body runs again from its top: then they are the same ones.
        """
        for step in self.fold.steps:
            if step.scope:
                self.met_in[step.number] = f"{step.attempts[0].epoch}:{step.scope}"

    def _count_back(self, number: int) -> None:
        """A call that left nothing gives its number back, whoever settled or undid it."""
        if number in self.met_by and self.fold.step(number).last.status in SETTLED_ABSENT:
            base, body, occurrence = self.met_by[number]
            self.taken.get((base, body), set()).discard(occurrence)

    def leave(self, token: object) -> None:
        """A step's flow appends nothing any more."""
        with self.lock:
            self.flows.pop(token, None)
            self.notify()

    def idle(self) -> bool:
        """Whether the scope is over and nothing in this process can append to the saga any more."""
        return self.over and not self.running and not self.flows

    def may_unwind(self, error: BaseException | None) -> bool:
        """Whether ending the scope may have to call anything: if not, an interrupted end is simply driven again."""
        open_ends = self.running or self.flows or self.unsettled or self.must_undo or self.recorded
        return error is not None or self.fold.rollback_only is not None or bool(open_ends)

    def is_running(self, step: int, attempt: int) -> bool:
        """Whether this process still runs the attempt's forward call."""
        return any(r.step == step and r.attempt == attempt for r in self.running.values())

    def running_on(self, step: int) -> tuple[object, Running] | None:
        """The forward call that this process runs for a step."""
        return next(((token, r) for token, r in self.running.items() if r.step == step), None)

    def has_means(self, step: Step, attempt: Attempt) -> bool:
        """Whether an UNKNOWN attempt can be settled without a person: by a probe, or by an undo safe when absent."""
        spec = self.specs.get(step.number)
        if step.probe is not None or (spec is not None and spec.probe is not None):
            return True
        undo = attempt.undo
        if step.semantics is ActionSemantics.REVERSIBLE:
            return undo is not None and "paths" not in undo
        return undo is not None and undo.get("if_absent") in ("noop", "forbids") and "paths" not in undo

    def settle_at(self, step: Step, attempt: Attempt) -> float:
        """When, on this process's monotonic clock, a call that was given up can no longer land.

        The process that made the call counts from the call's end (from INTENT while it has none): until then it may
        have sent something. Any other counts from its own claim. A stored moment can only lengthen that, and by no more
        than another `in_doubt`: clocks of two processes may be hours apart.
        """
        born = self.born.get((step.number, attempt.number))
        if born is not None:
            return born + attempt.in_doubt
        now = self.clock.monotonic()
        stored = now + attempt.settle_not_before - self.clock.time()
        return max(self.claimed_at + attempt.in_doubt, min(stored, self.claimed_at + 2 * attempt.in_doubt))
