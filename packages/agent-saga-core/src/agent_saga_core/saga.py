"""The scope: `saga_scope` opens a saga, everything called inside is a step of it, and its end commits or undoes."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from math import isfinite
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from agent_saga_core import values
from agent_saga_core.declare import ActionSemantics, Inverse, NotAppliedRule, Observation, StepSpec
from agent_saga_core.drive import CURRENT_SAGA, CURRENT_STEP, INSIDE, adrive, drive
from agent_saga_core.engine.calls import has_async_part, prepare, site_in
from agent_saga_core.engine.effects import Flow
from agent_saga_core.engine.finish import abort, finish, finish_savepoint, leave_savepoint, suspend
from agent_saga_core.engine.reopen import opening
from agent_saga_core.engine.run import CallSite, Options, Run, StepCall
from agent_saga_core.engine.step import abandon, step
from agent_saga_core.engine.unwind import release
from agent_saga_core.errors import (
    DeclarationError,
    Fenced,
    LogCorrupted,
    LogUnavailable,
    ReplayDiverged,
    RollbackIncomplete,
    SagaAborted,
    SagaBusy,
    SagaNotRunning,
)
from agent_saga_core.lazy import LazyModule
from agent_saga_core.log.base import Log
from agent_saga_core.logs import shared_log
from agent_saga_core.registry import accepts_key, annotations_of
from agent_saga_core.signals import SignalHold
from agent_saga_core.state import Report, SagaStatus, StepState

if TYPE_CHECKING:
    import asyncio
else:
    asyncio = LazyModule("asyncio")

__all__ = ["Frame", "Saga", "check_saga_id", "current_saga", "saga_scope"]

log = logging.getLogger("agent_saga")
T = TypeVar("T")
SUSPENDED_FOR = 7 * 86400.0
"""Seconds for which a suspended saga waits for its person, unless a deadline is given."""
_LOG_ERRORS = (LogUnavailable, LogCorrupted, Fenced)


def check_saga_id(saga_id: str) -> str:
    """Return a saga id that every store can hold.

    Raises:
        ValueError: It is not 1 to 512 bytes of UTF-8 without control characters.
    """
    if isinstance(saga_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        try:
            size = len(saga_id.encode())
        except UnicodeEncodeError:
            size = 0
        if 1 <= size <= 512 and not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in saga_id):
            return saga_id
    raise ValueError("A saga id is 1 to 512 bytes of UTF-8 without control characters. Choose another id.")


def current_saga() -> Saga | None:
    """The saga that code running here belongs to, or None."""
    saga: Saga | None = CURRENT_SAGA.get()
    return saga


def saga_scope(
    saga_id: str | None = None,
    *,
    name: str = "saga",
    log: Log | str | None = None,
    on_failure: Literal["settle", "abort"] = "settle",
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    durability: Literal["strict", "relaxed"] = "strict",
    resume: Literal["replay", "continue"] = "replay",
    orphan_after: float = 0.0,
    busy_timeout: float = 0.0,
    independent: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Saga:
    """Make a scope; `with` or `async with` opens it. A scope inside an open one joins it as a savepoint.

    A scope that joins another one has an `approve` and an `on_failure` of its own, where they are given; the rest is
    that of the saga.

    Leaving the scope normally means that the saga committed. An exception means that it did not: everything that
    may have happened was undone, or `RollbackIncomplete` names what may be left.

    Args:
        saga_id: Names the saga, so that opening it again resumes or replays it; 1-512 bytes of UTF-8. Default: drawn.
        name: What it does, for people.
        log: A `Log` or the URL of one. Default: `$AGENT_SAGA_LOG`, else `file:./.agent-saga`.
        on_failure: `"settle"` brings a failed step to a known end if it can, and the saga goes on; `"abort"` makes the
            saga rollback-only at the first failure that may have had an effect.
        approve: Asked with a `StepRequest` before each IRREVERSIBLE step; only True is a yes. May be async.
        drain_timeout: Seconds to wait at the end for running steps and for what is in doubt.
        durability: `"strict"`: a step's result is durable before it is returned. `"relaxed"`: it survives this
            process, and the machine within 50 ms.
        resume: What opening a known id means: `"replay"`, the body runs again from its top; `"continue"`, it goes on.
        orphan_after: Seconds for which recovery leaves the saga alone after its owner died.
        busy_timeout: Seconds to wait for another owner.
        independent: Open a saga of its own inside another one.
        metadata: Plain data stored with it.

    Raises:
        ValueError: The id is not one that every store can hold.
    """
    if saga_id is not None:
        check_saga_id(saga_id)
    for seconds in (drain_timeout, orphan_after, busy_timeout):
        if not (isfinite(seconds) and seconds >= 0):
            raise ValueError("drain_timeout, orphan_after and busy_timeout are finite numbers of seconds from 0 on.")
    if on_failure not in ("settle", "abort") or durability not in ("strict", "relaxed"):
        raise ValueError('on_failure is "settle" or "abort", durability is "strict" or "relaxed".')
    if resume not in ("replay", "continue"):
        raise ValueError('resume is "replay" or "continue".')
    options = Options(
        on_failure=on_failure, approve=approve, drain_timeout=drain_timeout, durability=durability, resume=resume
    )
    return Saga(
        saga_id,
        name=name,
        log=log,
        options=options,
        orphan_after=orphan_after,
        busy_timeout=busy_timeout,
        independent=independent,
        metadata=metadata,
    )


class Frame(Protocol):
    """What the calls in a saga learn from the framework that runs its body.

    A wrapped tool of the framework brings its own place. A plain saga function, or `Saga.execute`, called in the
    framework's nodes or steps knows nothing of it: the frame of the saga says where the call is made, by which
    exceptions it may be paused, and whom to ask. Every savepoint has the frame of the scope around it.
    """

    @property
    def pauses(self) -> tuple[type[BaseException], ...]:
        """The exceptions by which the framework leaves a body that it will run again: no savepoint fails by one."""
        ...

    def place(
        self, saga: Saga, spec: StepSpec, args: Mapping[str, Any], site: CallSite | None, *, named: bool
    ) -> tuple[StepSpec, CallSite | None, Callable[..., Any] | None]:
        """The declaration, place and gate of a call that is about to be made.

        Args:
            saga: The scope that it is made in.
            spec: Its declaration.
            args: Its arguments by name.
            site: Its place, if whoever makes it knows one.
            named: Whether it has a key or id of its own, so that no place is needed.
        """
        ...

    def refuse(self, saga: Saga, refusal: SagaAborted) -> SagaAborted:
        """What the framework hears when a call is refused because the saga can no longer commit."""
        ...


class Saga:
    """One saga, or a savepoint in it. Made by `saga_scope`; entered once.

    Its steps may run on any thread and any event loop, sync or async, at once. It belongs to the process that opened
    it: in a forked child it takes no step and leaving its scope does nothing.
    """

    def __init__(
        self,
        saga_id: str | None,
        *,
        name: str,
        log: Log | str | None,
        options: Options,
        orphan_after: float = 0.0,
        busy_timeout: float = 0.0,
        independent: bool = False,
        metadata: Mapping[str, Any] | None = None,
        parent: Saga | None = None,
    ) -> None:
        self._asked_id = saga_id
        self._name = name
        self._asked_log = log
        self._options = options
        self._orphan_after = orphan_after
        self._busy_timeout = busy_timeout
        self._independent = independent
        self._metadata = metadata
        self._parent = parent
        self._before: Saga | None = None
        self._around: tuple[Any, Any, Any] = (None, None, ())
        self._opened: Run | None = None
        self._pid = 0
        self._scope = ""
        self._child: Saga | None = None
        self._children = 0
        self._blocks: asyncio.AbstractEventLoop | None = None
        self._held: list[asyncio.CancelledError] = []
        self._own_report: Report | None = None
        self.frame: Frame | None = None
        """For adapters: set before the scope is entered. A savepoint takes over that of the scope around it."""

    # --- what it tells

    @property
    def id(self) -> str:
        """The saga's id; drawn when the scope is opened, if none was given.

        Raises:
            SagaNotRunning: It is not open yet and has no id.
        """
        if self._opened is not None:
            return self._opened.saga_id
        if self._asked_id is None:
            raise SagaNotRunning("This saga is not open yet. Enter the scope first: `with saga_scope() as saga:`.")
        return self._asked_id

    @property
    def status(self) -> SagaStatus:
        """Where the saga stands now."""
        run = self._run
        with run.lock:
            status = run.fold.status
            return SagaStatus.RUNNING if status is SagaStatus.SUSPENDED and not run.suspended else status

    @property
    def steps(self) -> tuple[StepState, ...]:
        """The steps of this scope as they stand now, in the order of their first intents."""
        run = self._run
        with run.lock:
            return tuple(found.view() for found in run.fold.steps if found.within(self._scope))

    @property
    def report(self) -> Report | None:
        """What the end of the scope came to; None until it has ended."""
        if self._opened is None:
            return None
        if self._scope:
            return self._own_report
        with self._opened.lock:
            return self._opened.fold.report()

    @property
    def scope(self) -> str:
        """The savepoint's path within the saga; empty for the saga itself."""
        return self._scope

    @property
    def takes_steps(self) -> bool:
        """Whether new steps may start in it, and it may still commit."""
        run = self._run
        with run.lock:
            return run.fold.rollback_only is None and not (run.replay_only or run.over or run.suspended)

    @property
    def has_gate(self) -> bool:
        """Whether this scope, or one around it, was opened with `approve=`."""
        return self._gate is not None

    @property
    def _gate(self) -> Callable[..., Any] | None:
        """The `approve=` of the nearest scope that was given one."""
        own = self._options.approve
        return own if own is not None or self._parent is None else self._parent._gate

    @property
    def _aborts(self) -> bool:
        return self._options.on_failure == "abort" or (self._parent is not None and self._parent._aborts)

    @property
    def goes_on(self) -> bool:
        """Whether it was opened with `resume="continue"`: the body does not run again from its top."""
        return self._run.options.resume == "continue"

    @property
    def rollback_only(self) -> str | None:
        """Why it can no longer commit; None if it can."""
        run = self._run
        with run.lock:
            return run.fold.rollback_only

    def recorded_sites(self, adapter: str) -> tuple[tuple[str, CallSite], ...]:
        """Tool and place of every call of this saga that an adapter has made, in the order of the first intents."""
        run = self._run
        with run.lock:
            found = [site_in(step.identity) for step in run.fold.steps]
        return tuple(one for one in found if one is not None and one[1].adapter == adapter)

    def shared(self, make: Callable[[], T]) -> T:
        """What `make` made when it was first asked for here: one for all savepoints, a new one at the next opening."""
        run = self._run
        with run.lock:
            if make not in run.shelf:
                run.shelf[make] = make()
            made: T = run.shelf[make]
            return made

    @property
    def refusals(self) -> int:
        """How many calls were refused because the saga takes no new step."""
        return self._run.refusals

    @property
    def metadata(self) -> dict[str, Any]:
        """The plain data stored with it."""
        return dict(self._run.fold.metadata)

    @property
    def _run(self) -> Run:
        if self._opened is None:
            raise SagaNotRunning("This saga is not open yet. Enter the scope first: `with saga_scope() as saga:`.")
        return self._opened

    def _is_open(self) -> bool:
        run = self._opened
        return run is not None and self._pid == os.getpid() and not run.over and not run.suspended

    def same_as(self, other: Saga) -> bool:
        """Whether both are the same saga, be it in different savepoints."""
        return self._opened is not None and self._opened is other._opened

    # --- steps

    def execute(
        self,
        tool: str,
        forward: Callable[..., Any],
        *,
        args: Mapping[str, Any] | None = None,
        semantics: ActionSemantics | str,
        compensate: Inverse = None,
        key: str | None = None,
        call_id: str | None = None,
        timeout: float | None = None,
        not_applied: NotAppliedRule | tuple[NotAppliedRule, ...] = (),
        probe: Callable[[dict[str, Any], str], Any] | str | None = None,
        in_doubt: float | None = None,
        result_type: Any = None,
        offload: bool = False,
    ) -> Any:
        """Call `forward` as a step of this saga and return what it returns.

        When this returns, the effect and its undo are on record (durably, unless READ_ONLY, REVERSIBLE or
        `durability="relaxed"`). When it raises the tool's own exception, the effect is known to be absent, or was
        undone, or the saga can no longer commit.

        Args:
            tool: The tool's name.
            forward: The call; without parameters if `args` is None, else called as `forward(**args)`. It is handed
                `idempotency_key` if it has an explicit parameter of that name. An awaitable that it returns is
                awaited.
            args: The arguments, recorded and used for the identity and the undo.
            semantics: What the effect means for a rollback.
            compensate: The inverse: `undo(...)` or `result -> Compensation`.
            key: The identity of this call: met again in this saga, it returns the recorded result.
            call_id: The framework's id of this call, where that is unique in a scope that survives a resume.
            timeout: Seconds after which the call is given up as UNKNOWN. A sync call then runs in another thread,
                which cannot be stopped, only waited for.
            not_applied: Exception types, or predicates, that say "nothing happened".
            probe: Looks the effect up: `fn(args, idempotency_key) -> Observation`.
            in_doubt: Seconds for which a call that was given up may still land. Default: `timeout`, else 30.
                Declared (or `timeout` is), a failed call waits that long itself, within `drain_timeout`, to be settled.
            result_type: The type that a recorded result is rebuilt through.
            offload: For `aexecute`: run a blocking `forward` in a worker thread.

        Raises:
            DeclarationError: The declaration or an argument cannot keep the promises; nothing was called.
            SagaAborted: The saga is rollback-only.
            SagaNotRunning: The saga takes no new step.
            ApprovalRequired: IRREVERSIBLE, and nobody said yes.
            IdempotencyConflict: The key or call id was used with other arguments.
            LogUnavailable: The log cannot be written; nothing was called, or the outcome is for recovery.
        """
        spec, hinted = _spec(
            tool, forward, semantics, compensate, timeout, not_applied, probe, in_doubt, result_type, offload
        )
        return self.run_step(spec, args or {}, _invoker(forward, args, hinted), key=key, call_id=call_id)

    async def aexecute(
        self,
        tool: str,
        forward: Callable[..., Any],
        *,
        args: Mapping[str, Any] | None = None,
        semantics: ActionSemantics | str,
        compensate: Inverse = None,
        key: str | None = None,
        call_id: str | None = None,
        timeout: float | None = None,
        not_applied: NotAppliedRule | tuple[NotAppliedRule, ...] = (),
        probe: Callable[[dict[str, Any], str], Any] | str | None = None,
        in_doubt: float | None = None,
        result_type: Any = None,
        offload: bool = False,
    ) -> Any:
        """Like `execute`, on the running loop: `forward` is called there and what it returns is awaited.

        A cancellation that comes while `forward` runs leaves the step UNKNOWN, to be settled before the next durable
        step or at the scope's end; one that comes during a flush is heard once durability is known.
        """
        spec, hinted = _spec(
            tool, forward, semantics, compensate, timeout, not_applied, probe, in_doubt, result_type, offload
        )
        return await self.arun_step(spec, args or {}, _invoker(forward, args, hinted), key=key, call_id=call_id)

    def run_step(
        self,
        spec: StepSpec,
        args: Mapping[str, Any],
        invoke: Callable[[str], Any],
        *,
        key: str | None = None,
        call_id: str | None = None,
        site: CallSite | None = None,
        approve: Callable[..., Any] | None = None,
    ) -> Any:
        """`execute` for a declaration that is already checked; `invoke(idempotency_key)` makes the call.

        `site` is where a framework made the call; `approve` is asked instead of the scope's own gate.
        """
        run = self._stepping()
        spec, site, approve = self._placed(spec, args, key, call_id, site, approve)
        call = self._prepare(run, spec, args, invoke, key, call_id, site)
        call.approve = approve
        token, around = object(), _surroundings()
        try:
            outcome = drive(step(run, call, token), run)
        except BaseException:
            _put_back(around)
            self._abandon(run, token)
            raise
        if outcome.error is not None:
            raise self._told(outcome.error)
        return outcome.value

    async def arun_step(
        self,
        spec: StepSpec,
        args: Mapping[str, Any],
        invoke: Callable[[str], Any],
        *,
        key: str | None = None,
        call_id: str | None = None,
        site: CallSite | None = None,
        approve: Callable[..., Any] | None = None,
    ) -> Any:
        """`aexecute` for a declaration that is already checked; `invoke(idempotency_key)` makes the call."""
        run = self._stepping()
        if self._blocks is not None and asyncio.get_running_loop() is self._blocks:
            raise DeclarationError(
                "This scope was opened with `with` on a running event loop, which its end will block: it takes no "
                "async step there. Use `async with saga_scope(...)`."
            )
        spec, site, approve = self._placed(spec, args, key, call_id, site, approve)
        call = self._prepare(run, spec, args, invoke, key, call_id, site)
        call.approve = approve
        call.settle_later = False
        token, around = object(), _surroundings()
        held: list[asyncio.CancelledError] = []
        try:
            outcome = await adrive(step(run, call, token), run, held)
        except BaseException:
            _put_back(around)
            self._abandon(run, token)
            raise
        if held:
            raise held[0]
        if outcome.error is not None:
            raise self._told(outcome.error)
        return outcome.value

    def _placed(
        self,
        spec: StepSpec,
        args: Mapping[str, Any],
        key: str | None,
        call_id: str | None,
        site: CallSite | None,
        approve: Callable[..., Any] | None,
    ) -> tuple[StepSpec, CallSite | None, Callable[..., Any] | None]:
        if self.frame is None:
            return spec, site, approve or self._gate
        spec, site, gate = self.frame.place(self, spec, args, site, named=key is not None or call_id is not None)
        return spec, site, approve or gate or self._gate

    def _told(self, error: BaseException) -> BaseException:
        if self.frame is None or not isinstance(error, SagaAborted):
            return error
        return self.frame.refuse(self, error)

    def _stepping(self) -> Run:
        run = self._run
        if self._pid != os.getpid():
            raise SagaNotRunning(
                f"saga {run.saga_id!r} belongs to the process that opened it, not to this forked child. "
                "Open a saga of its own in the child.",
                saga_id=run.saga_id,
            )
        return run

    def _prepare(
        self,
        run: Run,
        spec: StepSpec,
        args: Mapping[str, Any],
        invoke: Callable[[str], Any],
        key: str | None,
        call_id: str | None,
        site: CallSite | None = None,
    ) -> StepCall:
        around = CURRENT_STEP.get()
        inside = around is not None and around.saga_id == run.saga_id and around.direction == "forward"
        call = prepare(
            run,
            spec,
            args,
            invoke,
            scope=self._scope,
            key=key,
            call_id=call_id,
            parent=around.number if inside and around is not None else None,
            enclosing=INSIDE.get(),
            site=site,
        )
        call.aborts = self._aborts
        loop = _running_loop()
        if (loop is not None or self._blocks is not None) and has_async_part(spec):
            if self._blocks is not None and call.refused is None:
                call.refused = DeclarationError(
                    f"{spec.tool!r} has an async inverse or probe, and this scope was opened with `with` on a running "
                    "event loop, where it could not be awaited. Use `async with saga_scope(...)`."
                )
            call.settle_later = loop is not None
        return call

    def _abandon(self, run: Run, token: object) -> None:
        """Whatever interrupted a step's driver, the step is not forgotten."""
        try:
            drive(abandon(run, token), run)
        except _LOG_ERRORS:
            log.error("saga %r: the log failed in the middle of a step; recovery will settle it", run.saga_id)
            if run.idle():
                run.log.release(run.saga_id)

    # --- what ends it early

    def abort(self, reason: str) -> None:
        """Make the saga rollback-only; when this returns, that is durable. Nothing is undone before the scope's end."""
        run = self._stepping()
        if run.over or run.replay_only or run.suspended:
            raise SagaNotRunning(
                f"saga {run.saga_id!r} is {run.fold.status} and cannot be aborted. Abort it inside the scope.",
                saga_id=run.saga_id,
                status=run.fold.status,
            )
        drive(abort(run, values.legible(reason)), run)
        if run.suspended and run.fold.rollback_only is None:
            raise SagaNotRunning(
                f"saga {run.saga_id!r} was suspended meanwhile, and was not aborted. Open it again to abort it.",
                saga_id=run.saga_id,
                status=run.fold.status,
            )

    def suspend(self, reason: str, *, deadline: float | None = None) -> None:
        """Leave the saga open, without commit or rollback, until it is opened again or the deadline passes.

        When this returns, that is durable, the saga is no longer owned, and no step starts in this scope any more.

        Args:
            reason: For people.
            deadline: Seconds from now after which recovery rolls it back. Default: 7 days.

        Raises:
            SagaBusy: A step still runs after `drain_timeout`; nothing changed.
            SagaNotRunning: It is already ending.
            ValueError: The deadline is no finite number of seconds.
        """
        run, seconds = self._suspendable(deadline)
        try:
            left = drive(suspend(run, values.legible(reason), seconds), run)
        except BaseException:
            if run.suspended:  # the scope's end does nothing any more: what the log holds is for the next owner
                run.log.release(run.saga_id)
            raise
        self._suspended(run, left)

    def _suspendable(self, deadline: float | None) -> tuple[Run, float]:
        run = self._stepping()
        if run.over or run.closing or run.replay_only or run.suspended:
            raise SagaNotRunning(
                f"saga {run.saga_id!r} is ending and cannot be suspended. Suspend it inside the scope.",
                saga_id=run.saga_id,
                status=run.fold.status,
            )
        seconds = SUSPENDED_FOR if deadline is None else deadline
        if not 0 <= seconds < 1e10:  # NaN is neither; what is later than that, no reader can make a date of
            raise ValueError("A deadline is a number of seconds from now. Write for example deadline=3600.0.")
        return run, seconds

    def _suspended(self, run: Run, left: bool) -> None:
        if not left:
            raise SagaBusy(
                f"saga {run.saga_id!r}: a step is still running, so it was not suspended. Wait for its steps first.",
                saga_id=run.saga_id,
            )
        run.log.release(run.saga_id)

    async def asuspend(self, reason: str, *, deadline: float | None = None) -> None:
        """Like `suspend`, without blocking the running loop, on which the steps that it waits for may run."""
        run, seconds = self._suspendable(deadline)
        held: list[asyncio.CancelledError] = []
        try:
            left = await adrive(suspend(run, values.legible(reason), seconds), run, held, shield=True)
        except BaseException:
            if run.suspended:
                run.log.release(run.saga_id)
            raise
        self._suspended(run, left)
        if held:
            raise held[0]

    @contextmanager
    def attached(self) -> Generator[Self]:
        """Make this the current saga of the running code for the block, on whatever thread or loop that is."""
        before = current_saga()
        CURRENT_SAGA.set(self)
        try:
            yield self
        finally:
            if current_saga() is self:
                CURRENT_SAGA.set(before)

    def savepoint(self) -> Saga:
        """A scope in this saga whose failure undoes only its own steps. One may be open at a time in each scope."""
        return Saga(None, name=self._name, log=None, options=self._options, parent=self)

    # --- the scope

    def __enter__(self) -> Self:
        flow = self._entering(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        if flow is not None:
            self._blocks = _running_loop()
            try:
                drive(flow, self._run)
            except BaseException:
                self._give_up_opening()
                raise
        else:
            self._blocks = _running_loop() or self._blocks
        self._entered()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        interruptions: list[BaseException] = []
        while True:
            try:
                if interruptions:
                    _put_back(self._around)
                run = self._leaving()
                if run is None:
                    result = None
                    break
                with SignalHold(interruptions, needed=run.may_unwind(error)):
                    try:
                        result = self._ended(run, drive(self._end_flow(run, error), run), error)
                    except _LOG_ERRORS as failed:
                        result = self._log_failed(run, failed, error)
                break
            except (KeyboardInterrupt, SystemExit) as interruption:  # once more, from where the records are
                interruptions.append(interruption)
        return self._raise_or_not(result, error, interruptions)

    def __aenter__(self) -> Any:
        return self._aenter(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]

    async def _aenter(self, frame: FrameType) -> Self:
        flow = self._entering(frame)
        held: list[asyncio.CancelledError] = []
        if flow is not None:
            try:
                await adrive(flow, self._run, held, shield=True)
            except BaseException:
                self._give_up_opening()
                raise
            if held:
                await self._cancelled_opening()
                raise held[0]
        self._entered()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        interruptions: list[BaseException] = []
        held: list[asyncio.CancelledError] = []
        task = asyncio.current_task()
        asked = task.cancelling() if task is not None else 0
        while True:
            try:
                if interruptions:
                    _put_back(self._around)
                run = self._leaving()
                if run is None:
                    result = None
                    break
                with SignalHold(interruptions, needed=run.may_unwind(error)):
                    try:
                        report = await adrive(self._end_flow(run, error), run, held, shield=True)
                        result = self._ended(run, report, error)
                    except _LOG_ERRORS as failed:
                        result = self._log_failed(run, failed, error)
                break
            except (KeyboardInterrupt, SystemExit) as interruption:
                interruptions.append(interruption)
        if task is not None and task.cancelling() > asked:
            # `asyncio.run` answers a SIGINT by cancelling this task where it next waits: here, or it would be lost to
            # the exception that is on its way out.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError as cancelled:
                held.append(cancelled)
        if held and run is not None and run.fold.status is SagaStatus.COMMITTED and not self._scope:
            _redeliver(held[0])  # right after the scope: its normal end says that the saga committed
            held.clear()
        return self._raise_or_not(result, error, [*interruptions, *held])

    def _entering(self, frame: FrameType) -> Flow[None] | None:
        """Decide what entering means: a savepoint (None), or a saga to be opened by the returned flow."""
        if self._opened is not None:
            raise SagaBusy("This scope was entered before. Make a new one with saga_scope(...).")
        if frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
            raise DeclarationError(
                "A saga scope was entered in a generator's body, whose context comes and goes with its caller. "
                "Open the scope in the caller, around the loop over the generator."
            )
        outer = current_saga()
        if self._parent is None and outer is not None and outer._is_open() and not self._independent:
            if self._asked_id is not None and self._asked_id != outer.id:
                raise DeclarationError(
                    f"saga {outer.id!r} is open here, and this scope names another one. "
                    "Pass independent=True to open a saga of its own."
                )
            self._parent = outer
        self._pid = os.getpid()
        if self._parent is not None:
            self._join(self._parent)
            return None
        opened = shared_log(self._asked_log)
        fresh = self._asked_id is None
        run = Run(self._asked_id if self._asked_id is not None else uuid.uuid4().hex, opened, self._options)
        start = self._start()
        self._opened = run
        return opening(run, start, fresh=fresh, busy_timeout=self._busy_timeout)

    def _start(self) -> dict[str, Any]:
        start: dict[str, Any] = {"name": self._name, "nonce": os.urandom(16).hex()}
        if self._orphan_after:
            start["orphan_after"] = float(self._orphan_after)
        if self._metadata:
            try:
                start["metadata"] = values.encode(dict(self._metadata), where="metadata").data
            except values.Unstorable as error:
                raise DeclarationError(f"metadata: {error}. Pass plain data.") from None
        return start

    def _join(self, parent: Saga) -> None:
        run = parent._stepping()
        with run.lock:
            if parent._child is not None:
                raise SagaBusy(
                    f"a savepoint is already open in this scope of saga {run.saga_id!r}. Close it first.",
                    saga_id=run.saga_id,
                )
            parent._children += 1
            parent._child = self
            self._scope = f"{parent._scope}/{parent._children}" if parent._scope else str(parent._children)
            run.savepoints.add(self._scope)
        self._opened = run
        self._blocks = parent._blocks
        self.frame = self.frame or parent.frame

    def _entered(self) -> None:
        self._before = current_saga()
        CURRENT_SAGA.set(self)
        self._around = _surroundings()

    def _give_up_opening(self) -> None:
        run, self._opened = self._opened, None
        if run is not None and run.claimed and run.log.owned(run.saga_id):
            run.over = True
            run.log.release(run.saga_id)

    async def _cancelled_opening(self) -> None:
        """Cancelled while it was being opened: a new saga ends here, a resumed one is left as it was."""
        run = self._run
        if run.replay_only:
            return
        if not run.fold.steps:
            await adrive(finish(run, asyncio.CancelledError()), run, [], shield=True)
        await asyncio.to_thread(run.log.release, run.saga_id)

    def _leaving(self) -> Run | None:
        """Restore the context; None if there is nothing to end here."""
        if current_saga() is self:
            CURRENT_SAGA.set(self._before)
        run = self._opened
        if self._parent is not None and self._parent._child is self:
            self._parent._child = None
        if run is None or self._pid != os.getpid() or sys.is_finalizing():
            return None  # a forked child's copy, or too late: the owner's death leaves it to recovery
        if run.replay_only or run.suspended:
            return None
        return run

    def _end_flow(self, run: Run, error: BaseException | None) -> Flow[Report | None]:
        return self._end_savepoint(run, error) if self._scope else self._end_saga(run, error)

    def _end_saga(self, run: Run, error: BaseException | None) -> Flow[Report | None]:
        report = yield from finish(run, error)
        yield from release(run)
        return report

    def _end_savepoint(self, run: Run, error: BaseException | None) -> Flow[Report | None]:
        if run.over:
            return None
        if error is None or (self.frame is not None and isinstance(error, self.frame.pauses)):
            yield from leave_savepoint(run, self._scope)
            return None
        clean: bool = yield from finish_savepoint(run, self._scope)
        if clean:
            return Report(saga_id=run.saga_id, status=run.fold.status, clean=True)
        remaining = {found.number: found.view() for found, _ in run.open_attempts(self._scope)}
        return Report(saga_id=run.saga_id, status=run.fold.status, clean=False, remaining=tuple(remaining.values()))

    def _ended(self, run: Run, report: Report | None, error: BaseException | None) -> BaseException | None:
        """What the end comes to for the caller: an exception, or None to let the body's own way stand."""
        if self._parent is not None:
            self._own_report = report
            if report is None:
                return None
        if report is None or report.status is SagaStatus.COMMITTED:
            return None
        if not report.clean:
            message = f"the rollback is not complete: {report}. Run `agent-saga recover`, then `agent-saga resolve`."
            log.error("saga %r: %s", run.saga_id, message)
            incomplete = RollbackIncomplete(message, report=report)
            return incomplete
        if error is not None:
            error.add_note(str(report))
            return None
        if run.diverged is not None:
            diverged = ReplayDiverged(f"{run.diverged}. Let the body make the calls that the log holds.")
            diverged.add_note(str(report))
            return diverged
        return SagaAborted(f"the saga was rolled back ({run.fold.rollback_only})", report=report)

    def _log_failed(self, run: Run, failed: BaseException, error: BaseException | None) -> BaseException | None:
        """The log failed: nothing is undone here, because its undoing could not be recorded."""
        with run.lock:
            run.over = True
            open_steps = [str(found.view()) for found, _ in run.fold.open_attempts()]
            steps = run.fold.steps
            lost = [steps[n - 1].tool for (n, _), held in run.local.items() if held.handler is None and n <= len(steps)]
            idle = run.idle()
        if idle:
            run.log.release(run.saga_id)
        names = "; ".join(open_steps) or "no step"
        message = f"saga {run.saga_id!r}: the log failed ({failed}), so nothing was undone here. Open: {names}."
        if lost:
            message += f" Undoable by this process alone, and lost with it: {', '.join(sorted(set(lost)))}."
        message += " Run `agent-saga recover` once the log can be written again."
        log.error("%s", message)
        raised = type(failed)(message) if isinstance(failed, LogUnavailable | Fenced) else LogCorrupted(message)
        raised.__context__ = failed
        return raised

    def _raise_or_not(
        self, result: BaseException | None, error: BaseException | None, interruptions: list[BaseException]
    ) -> bool:
        """Let the right exception out: interruptions as themselves, else what the end came to, else the body's own."""
        exit_by = self._opened.exit_by if self._opened is not None and not self._scope else None
        first: BaseException | None = exit_by or (interruptions[0] if interruptions else None)
        if isinstance(error, Exception) or error is None:
            if first is not None and isinstance(first, asyncio.CancelledError):
                first = asyncio.CancelledError(*first.args)  # plain: asyncio.timeout looks at the exact type
            if first is not None and not (isinstance(result, RollbackIncomplete) and first is exit_by):
                _note(first, result, self.report)
                raise first from error
            if result is not None:
                raise result from (error if error is not None else None)
            return False
        _note(error, result, self.report)  # CancelledError, KeyboardInterrupt, SystemExit: always as themselves
        return False


def _surroundings() -> tuple[Any, Any, Any]:
    """The saga, the step and the calls that the running code is in."""
    return CURRENT_SAGA.get(), CURRENT_STEP.get(), INSIDE.get()


def _put_back(around: tuple[Any, Any, Any]) -> None:
    """Undo what an interrupt in the middle of entering or leaving a call has left behind."""
    for variable, value in zip((CURRENT_SAGA, CURRENT_STEP, INSIDE), around, strict=True):
        variable.set(value)


def _note(error: BaseException, result: BaseException | None, report: Report | None) -> None:
    if result is not None:
        error.add_note(str(result))
    elif report is not None and str(report) not in getattr(error, "__notes__", ()):
        error.add_note(str(report))


def _redeliver(cancelled: asyncio.CancelledError) -> None:
    """Cancel the running task again, where it next waits; the number of its cancellations stays what it was.

    Unless whoever cancelled it has withdrawn that by then, as `asyncio.timeout` does at its end.
    """
    task = asyncio.current_task()
    if task is None:
        return
    asked = task.cancelling()

    def cancel() -> None:
        if task.cancelling() >= asked and task.cancel(*cancelled.args[:1]) and asked:
            task.uncancel()

    asyncio.get_running_loop().call_soon(cancel)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    # Unlike `get_running_loop`, it says None instead of raising, which every synchronous step would pay for.
    return asyncio._get_running_loop() if "asyncio" in sys.modules else None


def _spec(
    tool: str,
    forward: Callable[..., Any],
    semantics: ActionSemantics | str,
    compensate: Inverse,
    timeout: float | None,
    not_applied: NotAppliedRule | tuple[NotAppliedRule, ...],
    probe: Callable[[dict[str, Any], str], Observation] | str | None,
    in_doubt: float | None,
    result_type: Any,
    offload: bool,
) -> tuple[StepSpec, bool]:
    hints = annotations_of(forward)
    spec = StepSpec.declared(
        tool,
        semantics=semantics,
        compensate=compensate,
        timeout=timeout,
        not_applied=not_applied,
        probe=probe,
        in_doubt=in_doubt,
        result_type=result_type if result_type is not None else hints.get("return"),
        hints=hints,
        offload=offload,
    )
    return spec, accepts_key(forward)


def _invoker(forward: Callable[..., Any], args: Mapping[str, Any] | None, takes_key: bool) -> Callable[[str], Any]:
    def invoke(key: str) -> Any:
        kwargs = dict(args or {})
        if takes_key:
            kwargs["idempotency_key"] = key
        return forward(**kwargs)

    return invoke
