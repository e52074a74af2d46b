"""What LlamaIndex's workflows keep to themselves and this adapter reads, each looked for where it is.

Where one of them is gone, calls are refused: a step that is run again could not be told from a new one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from workflows import Context

__all__ = ["INTERRUPTS", "UNTOLD", "calls_a_tool", "names_work", "run_here", "step_here"]

UNTOLD = (
    "these workflows do not tell what their steps work on. "
    "Install llama-index-workflows>=2.24, or the newest that this adapter is tested with."
)


def _found(name: str) -> Any:
    try:
        return getattr(import_module("workflows.runtime.types.results"), name, None)
    except ImportError:
        return None


INTERRUPTS: tuple[type[BaseException], ...] = tuple(kind for kind in (_found("WaitingForEvent"),) if kind is not None)
"""The exceptions by which a workflow pauses a step. None known: a tool that waits for an event is one that failed."""


def step_here() -> Any:
    """What the workflow knows of the step that is running here: `event`, `state.step_name`; None outside of one."""
    variable = _found("StepWorkerStateContextVar")
    return variable.get(None) if variable is not None else None


def calls_a_tool(step: Any) -> bool:
    """Whether an agent makes one call for its model in this step."""
    kind = cast("type[Any]", type(step.event))
    return kind.__name__ == "ToolCall" and kind.__module__.startswith("llama_index.core.agent.")


def run_here() -> str | None:
    """The id of the workflow run that the code belongs to; None where it cannot be told."""
    try:
        context: Any = Context.get_step_context()
        return str(context._face._internal_adapter.run_id)
    except Exception:  # outside of a step it raises one of its own; where the way there has changed, any other
        return None


def names_work() -> bool:
    """Whether the workflows number the work of a run, store the numbers with its context, and tell them in a step."""
    fields = getattr(_found("StepWorkerState"), "__dataclass_fields__", {})
    told = _found("StepWorkerStateContextVar") is not None and hasattr(Context, "get_step_context")
    return told and "work_item_id" in fields
