"""What declarations and adapters call: one runner, sync and async, for functions and for the tools of frameworks."""

from agent_saga_core.engine.run import CallSite
from agent_saga_core.saga import Frame
from agent_saga_core.wrapping.covered import covered
from agent_saga_core.wrapping.functions import Binding, refuse_generator, saga_tool
from agent_saga_core.wrapping.runner import REFUSALS, Declaration, ToolRunner, runner_of, runner_under
from agent_saga_core.wrapping.running import (
    RunOptions,
    ScopeOptions,
    on_a_loop,
    refuse_on_a_loop,
    refused_too_often,
    run_blocking,
)
from agent_saga_core.wrapping.same import Same, equal_args
from agent_saga_core.wrapping.stream import AsyncSagaStream, SagaStream

__all__ = [
    "REFUSALS",
    "AsyncSagaStream",
    "Binding",
    "CallSite",
    "Declaration",
    "Frame",
    "RunOptions",
    "Same",
    "SagaStream",
    "ScopeOptions",
    "ToolRunner",
    "covered",
    "equal_args",
    "on_a_loop",
    "refuse_generator",
    "refuse_on_a_loop",
    "refused_too_often",
    "run_blocking",
    "runner_of",
    "runner_under",
    "saga_tool",
]
