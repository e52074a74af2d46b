"""The scope: `saga_scope` opens a saga, everything called inside is a step of it, and its end commits or undoes."""

from agent_saga_core.saga.frame import Frame
from agent_saga_core.saga.scope import Saga, check_saga_id, current_saga, saga_scope

__all__ = ["Frame", "Saga", "check_saga_id", "current_saga", "saga_scope"]
