"""What agent-saga raises: `SagaError` and its children, and `NotApplied`, which tools raise."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_saga_core.state import Report

__all__ = [
    "ApprovalRequired",
    "BoundaryRequired",
    "DeclarationError",
    "Fenced",
    "IdempotencyConflict",
    "LogCorrupted",
    "LogUnavailable",
    "NotApplied",
    "ReplayDiverged",
    "RollbackIncomplete",
    "SagaAborted",
    "SagaBusy",
    "SagaError",
    "SagaNotFound",
    "SagaNotRunning",
    "StepUnknown",
]


class NotApplied(Exception):
    """Raised by a tool or a compensator to say that nothing happened.

    Not a `SagaError`: it is the tool's own statement, and it reaches the tool's caller unchanged.
    """


class SagaError(Exception):
    """Root of every error that agent-saga itself raises."""


class DeclarationError(SagaError):
    """A tool, an inverse, or a call is declared or used in a way that could not keep the promises.

    Raised before the effect wherever the fault shows before it. The last sentence says what to write instead.
    """


class SagaBusy(SagaError):
    """The saga, or the part of it asked for, is in use by someone else.

    Attributes:
        saga_id: The saga concerned.
    """

    def __init__(self, message: str, *, saga_id: str | None = None) -> None:
        super().__init__(message)
        self.saga_id = saga_id


class SagaNotRunning(SagaError):
    """A new step was asked of a saga that takes none.

    Attributes:
        saga_id: The saga concerned, if there is one.
        status: Its status, if it is known.
    """

    def __init__(self, message: str, *, saga_id: str | None = None, status: str | None = None) -> None:
        super().__init__(message)
        self.saga_id = saga_id
        self.status = status


class SagaNotFound(SagaError):
    """The log holds no saga of that id.

    Attributes:
        saga_id: The id asked for.
    """

    def __init__(self, message: str, *, saga_id: str) -> None:
        super().__init__(message)
        self.saga_id = saga_id


class SagaAborted(SagaError):
    """The saga can no longer commit, or was rolled back although its body ended normally.

    Attributes:
        report: What the rollback came to; None while the saga is still open.
    """

    def __init__(self, message: str, *, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report


class RollbackIncomplete(SagaError):
    """The saga was rolled back and something may be left; `report.remaining` names it.

    The cause is the exception that the body raised, or None if it ended normally.

    Attributes:
        report: Status and the steps that remain.
    """

    def __init__(self, message: str, *, report: Report) -> None:
        super().__init__(message)
        self.report = report


class IdempotencyConflict(SagaError):
    """A declared key or call id was met again with other arguments."""


class ReplayDiverged(SagaError):
    """A resumed body did not make the calls that the log holds, or a recorded result cannot be given back."""


class StepUnknown(SagaError):
    """Opening or replaying a saga met a step whose effect may or may not have happened, and it stayed unsettled."""


class BoundaryRequired(SagaError):
    """A tool bound to a running saga was called where that saga cannot be told."""


class ApprovalRequired(SagaError):
    """An IRREVERSIBLE step had no yes. Nothing happened."""


class Fenced(SagaError):
    """This process lost the ownership of a saga; its append was refused."""


class LogUnavailable(SagaError):
    """The log cannot be read or written. What was not yet durable may or may not be stored."""


class LogCorrupted(SagaError):
    """A log, or one saga in it, is damaged and cannot be trusted.

    Attributes:
        saga_id: The saga that was asked for, if the damage was met while reading one.
        where: The damaged place: file and line, as far as known.
    """

    def __init__(self, message: str, *, saga_id: str | None = None, where: str | None = None) -> None:
        super().__init__(message)
        self.saga_id = saga_id
        self.where = where
