"""The steps of a scope: every way in which a call becomes one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from agent_saga_core.declare import ActionSemantics, Inverse, NotAppliedRule, Observation, StepSpec
from agent_saga_core.drive import CURRENT_SAGA, CURRENT_STEP, INSIDE, adrive, drive
from agent_saga_core.engine.calls import has_async_part, prepare
from agent_saga_core.engine.run import CallSite, Run, StepCall
from agent_saga_core.engine.step import abandon, step
from agent_saga_core.errors import DeclarationError, Fenced, LogCorrupted, LogUnavailable, SagaAborted
from agent_saga_core.lazy import LazyModule
from agent_saga_core.registry import accepts_key, annotations_of, paired_inverse
from agent_saga_core.saga.base import SagaBase

if TYPE_CHECKING:
    import asyncio

    from agent_saga_core.saga.scope import Saga
else:
    asyncio = LazyModule("asyncio")

__all__ = ["LOG_ERRORS", "SteppingSaga", "put_back", "running_loop", "surroundings"]

log = logging.getLogger("agent_saga")
LOG_ERRORS = (LogUnavailable, LogCorrupted, Fenced)


class SteppingSaga(SagaBase):
    """A scope that makes steps."""

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
            compensate: The inverse: `undo(...)` or `result -> Compensation`. Default: what `inverse_of` paired with
                `forward`.
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
        token, around = object(), surroundings()
        try:
            outcome = drive(step(run, call, token), run)
        except BaseException:
            put_back(around)
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
        token, around = object(), surroundings()
        held: list[asyncio.CancelledError] = []
        try:
            outcome = await adrive(step(run, call, token), run, held)
        except BaseException:
            put_back(around)
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
        spec, site, gate = self.frame.place(
            cast("Saga", self), spec, args, site, named=key is not None or call_id is not None
        )
        return spec, site, approve or gate or self._gate

    def _told(self, error: BaseException) -> BaseException:
        if self.frame is None or not isinstance(error, SagaAborted):
            return error
        return self.frame.refuse(cast("Saga", self), error)

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
        loop = running_loop()
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
        except LOG_ERRORS:
            log.error("saga %r: the log failed in the middle of a step; recovery will settle it", run.saga_id)
            if run.idle():
                run.log.release(run.saga_id)


def surroundings() -> tuple[Any, Any, Any]:
    """The saga, the step and the calls that the running code is in."""
    return CURRENT_SAGA.get(), CURRENT_STEP.get(), INSIDE.get()


def put_back(around: tuple[Any, Any, Any]) -> None:
    """Undo what an interrupt in the middle of entering or leaving a call has left behind."""
    for variable, value in zip((CURRENT_SAGA, CURRENT_STEP, INSIDE), around, strict=True):
        variable.set(value)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """This thread's running loop, or None: `get_running_loop` would raise, and every synchronous step pay for it."""
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
    if compensate is None and semantics in (ActionSemantics.COMPENSABLE, ActionSemantics.REVERSIBLE):
        compensate = cast("Inverse", paired_inverse(forward))
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
