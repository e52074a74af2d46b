"""Transactions for AI agents' tool calls: a write-ahead log, derived undo, and recovery by another process."""

from agent_saga_core.coverage import CoverageManifest
from agent_saga_core.declare import (
    ActionSemantics,
    Compensation,
    Observation,
    call_with,
    delete_by,
    http_client_error,
    inverse_of,
    undo,
)
from agent_saga_core.drive import current_step
from agent_saga_core.engine.effects import CurrentStep
from agent_saga_core.engine.step import StepRequest
from agent_saga_core.errors import (
    ApprovalRequired,
    BoundaryRequired,
    DeclarationError,
    Fenced,
    IdempotencyConflict,
    LogCorrupted,
    LogUnavailable,
    NotApplied,
    ReplayDiverged,
    RollbackIncomplete,
    SagaAborted,
    SagaBusy,
    SagaError,
    SagaNotFound,
    SagaNotRunning,
    StepUnknown,
)
from agent_saga_core.fleet import SagaFleet, carry
from agent_saga_core.log import FileLog, MemoryLog, open_log
from agent_saga_core.log.base import Log
from agent_saga_core.recovery import RecoveryReport, arecover, list_sagas, read_saga, recover, resolve
from agent_saga_core.registry import compensator, probe
from agent_saga_core.saga import Saga, current_saga, saga_scope
from agent_saga_core.state import Report, SagaHead, SagaState, SagaStatus, StepState, StepStatus
from agent_saga_core.values import Secret, credential, set_credential_resolver, set_redaction
from agent_saga_core.wrapping import saga_tool

__all__ = [
    "ActionSemantics",
    "ApprovalRequired",
    "BoundaryRequired",
    "Compensation",
    "CoverageManifest",
    "CurrentStep",
    "DeclarationError",
    "Fenced",
    "FileLog",
    "IdempotencyConflict",
    "Log",
    "LogCorrupted",
    "LogUnavailable",
    "MemoryLog",
    "NotApplied",
    "Observation",
    "RecoveryReport",
    "ReplayDiverged",
    "Report",
    "RollbackIncomplete",
    "Saga",
    "SagaAborted",
    "SagaBusy",
    "SagaError",
    "SagaFleet",
    "SagaHead",
    "SagaNotFound",
    "SagaNotRunning",
    "SagaState",
    "SagaStatus",
    "Secret",
    "StepRequest",
    "StepState",
    "StepStatus",
    "StepUnknown",
    "arecover",
    "call_with",
    "carry",
    "compensator",
    "credential",
    "current_saga",
    "current_step",
    "delete_by",
    "http_client_error",
    "inverse_of",
    "list_sagas",
    "open_log",
    "probe",
    "read_saga",
    "recover",
    "resolve",
    "saga_scope",
    "saga_tool",
    "set_credential_resolver",
    "set_redaction",
    "undo",
]
