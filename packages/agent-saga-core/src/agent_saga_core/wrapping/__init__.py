"""What declarations and adapters call: one runner, sync and async, for functions and for the tools of frameworks."""

from agent_saga_core.engine.run import CallSite
from agent_saga_core.saga import Frame
from agent_saga_core.wrapping.covered import covered
from agent_saga_core.wrapping.functions import Binding, saga_tool
from agent_saga_core.wrapping.runner import REFUSALS, Declaration, ToolRunner, runner_of
from agent_saga_core.wrapping.stream import AsyncSagaStream, SagaStream

__all__ = [
    "REFUSALS",
    "AsyncSagaStream",
    "Binding",
    "CallSite",
    "Declaration",
    "Frame",
    "SagaStream",
    "ToolRunner",
    "covered",
    "runner_of",
    "saga_tool",
]
