"""What the end of a scope comes to for its caller: which exception comes out, and what it says."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from agent_saga_core.engine.run import Run
from agent_saga_core.errors import (
    Fenced,
    LogCorrupted,
    LogUnavailable,
    ReplayDiverged,
    RollbackIncomplete,
    SagaAborted,
)
from agent_saga_core.lazy import LazyModule
from agent_saga_core.saga.base import SagaBase
from agent_saga_core.state import Report, SagaStatus

if TYPE_CHECKING:
    import asyncio
else:
    asyncio = LazyModule("asyncio")

__all__ = ["ended", "let_out", "log_failed", "note", "redeliver"]

log = logging.getLogger("agent_saga")


def ended(run: Run, report: Report | None, error: BaseException | None) -> BaseException | None:
    """The exception that an end comes to; None to let the body's own way stand."""
    if report is None or report.status is SagaStatus.COMMITTED:
        return None
    if not report.clean:
        message = f"the rollback is not complete: {report}. Run `agent-saga recover`, then `agent-saga resolve`."
        log.error("saga %r: %s", run.saga_id, message)
        return RollbackIncomplete(message, report=report)
    if error is not None:
        note(error, str(report))
        return None
    if run.diverged is not None:
        diverged = ReplayDiverged(f"{run.diverged}. Let the body make the calls that the log holds.")
        diverged.add_note(str(report))
        return diverged
    return SagaAborted(f"the saga was rolled back ({run.fold.rollback_only})", report=report)


def log_failed(run: Run, failed: BaseException) -> BaseException:
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


def let_out(
    saga: SagaBase,
    exit_by: BaseException | None,
    result: BaseException | None,
    error: BaseException | None,
    interruptions: list[BaseException],
) -> bool:
    """Let the right exception out: interruptions as themselves, else what the end came to, else the body's own.

    Args:
        saga: The scope that has ended.
        exit_by: What a compensation or probe raised to end the process.
        result: What the end came to.
        error: What the body raised.
        interruptions: What arrived while the scope was ending, in order.
    """
    first: BaseException | None = exit_by or (interruptions[0] if interruptions else None)
    if isinstance(error, Exception) or error is None:
        if first is not None and isinstance(first, asyncio.CancelledError):
            first = asyncio.CancelledError(*first.args)  # plain: asyncio.timeout looks at the exact type
        if first is not None and not (isinstance(result, RollbackIncomplete) and first is exit_by):
            _note(first, result, saga.report)
            raise first from error
        if result is not None:
            raise result from (error if error is not None else None)
        return False
    _note(error, result, saga.report)  # CancelledError, KeyboardInterrupt, SystemExit: always as themselves
    return False


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception, also to one that refuses notes, as a frozen dataclass does: it has to come out."""
    try:
        error.add_note(text)
    except Exception:
        with suppress(Exception):
            vars(error).setdefault("__notes__", []).append(text)


def _note(error: BaseException, result: BaseException | None, report: Report | None) -> None:
    if result is not None:
        note(error, str(result))
    elif report is not None and str(report) not in getattr(error, "__notes__", ()):
        note(error, str(report))


def redeliver(cancelled: asyncio.CancelledError) -> None:
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
