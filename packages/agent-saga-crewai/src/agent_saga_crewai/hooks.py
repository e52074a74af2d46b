"""CrewAI's global hooks around tool and model calls, by which a tool is told which call it is in, and a run is ended.

The hook before a tool call runs in the tool's own context, so it leaves there what is known of the call: its task, and
which call of this tool in that task it is. The hooks are registered once in a process, say nothing to the framework,
and where no saga is open they only see to it that CrewAI's cache does not speak of what a saga has undone.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any, cast
from weakref import WeakSet

from crewai.hooks import (
    get_after_tool_call_hooks,
    get_before_llm_call_hooks,
    get_before_tool_call_hooks,
    register_after_tool_call_hook,
    register_before_llm_call_hook,
    register_before_tool_call_hook,
)
from crewai.hooks.dispatch import HookAborted

from agent_saga_core import SagaNotRunning, current_saga
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping import refused_too_often
from agent_saga_crewai.cached import forget_undone, remember
from agent_saga_crewai.calls import CALL, FrameworkCall, runner_in
from agent_saga_crewai.numbers import canonical, numbers_of

__all__ = ["STOP", "install_hooks", "stop_hook_into", "stop_run"]

STOP = "agent-saga"
"""The `source` of the `HookAborted` by which a run is ended whose model does not listen."""
_lock = threading.Lock()
_stopped: WeakSet[Saga] = WeakSet()


def _scope(context: Any, parent: FrameworkCall | None) -> str:
    """The run scope: the task by its key and its place in its crew, the crew by its key and inputs.

    A task that is no task of the crew was made on the way: by a delegation, whose call is then around it.
    """
    task, crew, agent = context.task, context.crew, context.agent
    if task is None:
        inside = f"agent:{_key(agent)}"
        return f"{parent.path}>{inside}" if parent is not None else inside
    tasks = cast("list[Any]", getattr(crew, "tasks", None) or [])
    place = next((n for n, found in enumerate(tasks) if found is task), None)
    if place is not None:
        inside = f"crew:{_key(crew)}{_inputs(crew)}/task:{place}:{_key(task)}"
    elif parent is not None:  # its text is the model's, and changes when the model is asked again
        inside = f"agent:{_key(agent)}"
    else:
        inside = f"task:{_key(task)}"
    return f"{parent.path}>{inside}" if parent is not None else inside


def _key(found: Any) -> str:
    key = getattr(found, "key", None)
    return key[:16] if isinstance(key, str) else ""


def _inputs(crew: Any) -> str:
    """What tells the copies of a crew apart that `kickoff_for_each` makes."""
    inputs = getattr(crew, "_inputs", None)
    if not inputs:
        return ""
    return "@" + hashlib.sha256(canonical(inputs).encode("utf-8", "replace")).hexdigest()[:16]


def _turn(context: Any) -> tuple[object, object, list[Any]] | None:
    """The message of the model that a call stands in, if the agent's executor shows it."""
    executor = getattr(context.agent, "agent_executor", None)
    messages = getattr(executor, "messages", None)
    if not isinstance(messages, list):
        return None
    for found in reversed(cast("list[object]", messages)):
        if not isinstance(found, dict):
            return None
        message = cast("dict[str, Any]", found)
        role, calls = message.get("role"), message.get("tool_calls")
        if role == "assistant" and isinstance(calls, list):
            return executor, message, cast("list[Any]", calls)
        if role != "tool":
            return None
    return None


def _before_tool_call(context: Any) -> None:
    """Leave in the tool's context which call of the framework it is in."""
    saga = current_saga()
    forget_undone(context, saga)
    if saga is None:
        return
    parent = CALL.get()
    CALL.set(None)
    if parent is not None and parent.done:
        parent = None
    if parent is not None:
        parent.kept = True
    numbers = numbers_of(saga)
    name = context.tool_name
    scope = (numbers.prefix if parent is None else "") + _scope(context, parent)
    number = numbers.take(scope, name, context.tool_input, _turn(context))
    known = context.tool is not None
    runner = runner_in(context.tool) if known else None
    call = FrameworkCall(name, runner, scope, number, numbers, parent, known=known)
    if saga in _stopped:
        call.refuse(SagaNotRunning(f"{name!r} was not called: its run is over, and what it did is being undone."))
    CALL.set(call)


def _after_tool_call(context: Any) -> None:
    """The framework is done with the call that this context is in."""
    call = CALL.get()
    if call is not None and call.name == context.tool_name:
        call.end()
        CALL.set(call.parent)
        saga = current_saga()
        if saga is not None and call.forward_key is not None:
            remember(context, saga, call.forward_key)


def _before_llm_call(context: Any) -> None:
    """End a run whose model goes on calling tools that its saga refuses."""
    saga = current_saga()
    if saga is not None and (refused_too_often(saga) or saga in _stopped):
        raise HookAborted("the saga takes no more tool calls, and the model was told so", source=STOP)


def stop_run(saga: Saga) -> None:
    """Let no tool be called and no model be asked any more in this scope: its run is over."""
    _stopped.add(saga)


def install_hooks() -> None:
    """Register the hooks, unless they are; others' hooks are left where they are."""
    with _lock:
        if _before_tool_call not in get_before_tool_call_hooks():
            register_before_tool_call_hook(_before_tool_call)
        if _after_tool_call not in get_after_tool_call_hooks():
            register_after_tool_call_hook(_after_tool_call)
        if _before_llm_call not in get_before_llm_call_hooks():
            register_before_llm_call_hook(_before_llm_call)


def stop_hook_into(agent: Any) -> None:
    """Let an executor that was made before the hooks were registered ask them, too: it keeps a list of its own."""
    hooks = getattr(getattr(agent, "agent_executor", None), "before_llm_call_hooks", None)
    if isinstance(hooks, list) and _before_llm_call not in hooks:
        cast("list[Any]", hooks).append(_before_llm_call)
