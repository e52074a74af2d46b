"""`saga_scope` and `Saga`: how a saga is opened, joined, left early, and ended."""

from __future__ import annotations

import inspect
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from agent_saga_core import values
from agent_saga_core.drive import CURRENT_SAGA, adrive, drive
from agent_saga_core.engine.effects import Flow
from agent_saga_core.engine.finish import abort, finish, finish_savepoint, leave_savepoint, suspend
from agent_saga_core.engine.reopen import opening
from agent_saga_core.engine.run import Options, Run
from agent_saga_core.engine.unwind import release
from agent_saga_core.errors import DeclarationError, SagaBusy, SagaNotRunning
from agent_saga_core.lazy import LazyModule
from agent_saga_core.log.base import Log
from agent_saga_core.logs import shared_log
from agent_saga_core.registry import is_duration
from agent_saga_core.saga.apart import end_apart
from agent_saga_core.saga.attachment import Attachment
from agent_saga_core.saga.base import SagaBase
from agent_saga_core.saga.ending import ended, let_out, log_failed, redeliver
from agent_saga_core.saga.steps import LOG_ERRORS, SteppingSaga, put_back, running_loop, surroundings
from agent_saga_core.signals import SignalHold
from agent_saga_core.state import Report, SagaStatus
from agent_saga_core.values.plain import is_utf8

if TYPE_CHECKING:
    import asyncio
else:
    asyncio = LazyModule("asyncio")

__all__ = ["Saga", "check_saga_id", "current_saga", "saga_scope"]

SUSPENDED_FOR = 7 * 86400.0
"""Seconds for which a suspended saga waits for its person, unless a deadline is given."""


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
        ValueError: The id or the name is not one that every store can hold, or an option is none.
    """
    if saga_id is not None:
        check_saga_id(saga_id)
    if not all(is_duration(seconds) for seconds in (drain_timeout, orphan_after, busy_timeout)):
        raise ValueError("drain_timeout, orphan_after and busy_timeout are numbers of seconds, of 31 years at most.")
    if not isinstance(name, str) or not is_utf8(name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("The name of a saga is text without lone surrogates. Choose another name.")
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


class Saga(SteppingSaga):
    """One saga, or a savepoint in it. Made by `saga_scope`; entered once.

    Its steps may run on any thread and any event loop, sync or async, at once. It belongs to the process that opened
    it: in a forked child it takes no step and leaving its scope does nothing.
    """

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

    def attached(self) -> AbstractContextManager[Self]:
        """Make this the current saga of the running code for the block, on whatever thread or loop that is."""
        return Attachment(self)

    def savepoint(self) -> Saga:
        """A scope in this saga whose failure undoes only its own steps. One may be open at a time in each scope."""
        return Saga(None, name=self._name, log=None, options=self._options, parent=self)

    # --- the scope

    def __enter__(self) -> Self:
        flow = self._entering(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        if flow is not None:
            self._blocks = running_loop()
            try:
                drive(flow, self._run)
            except BaseException:
                self._give_up_opening()
                raise
        else:
            self._blocks = running_loop() or self._blocks
        self._entered()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        interruptions: list[BaseException] = []
        while True:
            try:
                if interruptions:
                    put_back(self._around)
                run = self._leaving()
                if run is None:
                    result = None
                    break
                with SignalHold(interruptions, needed=run.may_unwind(error)):
                    try:
                        result = self._outcome(run, drive(self._end_flow(run, error), run), error)
                    except LOG_ERRORS as failed:
                        result = log_failed(run, failed)
                break
            except (KeyboardInterrupt, SystemExit) as interruption:  # once more, from where the records are
                interruptions.append(interruption)
        return let_out(self, self._exit_by(), result, error, interruptions)

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
        if isinstance(error, GeneratorExit):  # the coroutine is being closed and can await nothing any more
            if current_saga() is self:
                CURRENT_SAGA.set(self._before)
            if self._opened is not None and self._pid == os.getpid() and not sys.is_finalizing():
                end_apart(self.id, partial(self._aend, error), partial(self.__exit__, kind, error, trace))
            return False
        return await self._aend(error)

    async def _aend(self, error: BaseException | None) -> bool:
        interruptions: list[BaseException] = []
        held: list[asyncio.CancelledError] = []
        task = asyncio.current_task()
        asked = task.cancelling() if task is not None else 0
        while True:
            try:
                if interruptions:
                    put_back(self._around)
                run = self._leaving()
                if run is None:
                    result = None
                    break
                with SignalHold(interruptions, needed=run.may_unwind(error)):
                    try:
                        report = await adrive(self._end_flow(run, error), run, held, shield=True)
                        result = self._outcome(run, report, error)
                    except LOG_ERRORS as failed:
                        result = log_failed(run, failed)
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
            redeliver(held[0])  # right after the scope: its normal end says that the saga committed
            held.clear()
        return let_out(self, self._exit_by(), result, error, [*interruptions, *held])

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

    def _join(self, parent: SagaBase) -> None:
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
        self._around = surroundings()

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

    def _outcome(self, run: Run, report: Report | None, error: BaseException | None) -> BaseException | None:
        if self._parent is not None:
            self._own_report = report
        return ended(run, report, error)

    def _exit_by(self) -> BaseException | None:
        return self._opened.exit_by if self._opened is not None and not self._scope else None
