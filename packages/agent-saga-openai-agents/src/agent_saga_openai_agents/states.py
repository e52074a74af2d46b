"""Runs that wait for a person: the framework's state together with the saga that it belongs to, as plain JSON."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias, TypeVar, cast

from agents import Agent, RunState

from agent_saga_core.wrapping import on_a_loop
from agent_saga_openai_agents.sites import Mark, mark_of, put_mark

__all__ = ["Envelope", "aload_state", "complete", "dump_state", "load_state", "loop_of_this_thread", "resumes"]

T = TypeVar("T")
Envelope: TypeAlias = dict[str, Any]
"""`{"saga_id": ..., "state": ...}`: plain JSON. The state is the framework's, with an entry of ours in it."""

_OURS = "agent_saga"


def dump_state(
    result: Any, *, context_serializer: Callable[[Any], Mapping[str, Any]] | None = None, strict_context: bool = False
) -> Envelope:
    """What is to be kept of an interrupted run: its saga's id and the framework's state, as plain JSON.

    Any process can go on from it: `saga_run(agent, envelope)`, or `load_state(agent, envelope)` to approve or reject
    first. Going on twice from the same envelope makes each call once.

    Args:
        result: What `saga_run` or its kin returned, or a `RunState` of it, approved and rejected as it is.
        context_serializer: As in `RunState.to_json`.
        strict_context: As in `RunState.to_json`.

    Raises:
        ValueError: It is not the result of a run in a saga.
    """
    mark = mark_of(result)
    if mark is None:
        raise ValueError("This is no result of saga_run, so no saga belongs to it. Dump what saga_run returned.")
    state = cast(Any, result if isinstance(result, RunState) else result.to_state())
    data = state.to_json(context_serializer=context_serializer, strict_context=strict_context)
    data[_OURS] = {"run": mark.run, "token": mark.token}
    return {"saga_id": mark.saga_id, "state": data}


async def aload_state(
    agent: Agent[Any],
    envelope: Mapping[str, Any],
    *,
    context_override: Any = None,
    context_deserializer: Callable[[Mapping[str, Any]], Any] | None = None,
    strict_context: bool = False,
) -> RunState[Any]:
    """The state in an envelope, to approve or reject its interruptions and pass it to `saga_run` or its kin.

    Args:
        agent: The agent that the run began with.
        envelope: What `dump_state` returned.
        context_override: As in `RunState.from_json`.
        context_deserializer: As in `RunState.from_json`.
        strict_context: As in `RunState.from_json`.

    Raises:
        ValueError: It is no envelope.
    """
    mark, data = _opened(envelope)
    state = await RunState.from_json(
        agent,
        data,
        context_override=context_override,
        context_deserializer=context_deserializer,
        strict_context=strict_context,
    )
    put_mark(state, mark)
    return state


def load_state(agent: Agent[Any], envelope: Mapping[str, Any], **options: Any) -> RunState[Any]:
    """`aload_state`, where no event loop runs.

    Raises:
        RuntimeError: A loop runs here.
        ValueError: It is no envelope.
    """
    return complete(aload_state(agent, envelope, **options))


def resumes(given: object, saga_id: str | None) -> Mark | None:
    """The run of a saga that an input goes on with; None if it begins one.

    Raises:
        ValueError: It goes on with a run whose saga is not known, or is another one than is named.
    """
    if isinstance(given, Mapping):
        mark = _opened(cast("Mapping[str, Any]", given))[0]
    elif isinstance(given, RunState):
        known = mark_of(cast(object, given))
        if known is None and saga_id is None:
            raise ValueError(
                "Which saga this state belongs to is not known. Keep what dump_state(result) returns, and pass that or "
                "load_state(agent, envelope); or name the saga: saga_id=..."
            )
        mark = known if known is not None else Mark(cast(str, saga_id), 1)
    else:
        return None
    if saga_id is not None and saga_id != mark.saga_id:
        raise ValueError(f"This state belongs to saga {mark.saga_id!r}, and saga_id names another. Leave it out.")
    return mark


def _opened(envelope: Mapping[str, Any]) -> tuple[Mark, dict[str, Any]]:
    saga_id, state = envelope.get("saga_id"), envelope.get("state")
    ours: Any = cast("dict[str, Any]", state).get(_OURS) if isinstance(state, dict) else None
    if not isinstance(saga_id, str) or not isinstance(state, dict) or not isinstance(ours, dict):
        raise ValueError("This is no envelope of a run: pass what dump_state(result) returned.")
    run, token = (cast("dict[str, Any]", ours).get(name) for name in ("run", "token"))
    if not isinstance(run, int) or not isinstance(token, str):
        raise ValueError("This envelope does not say which run of its saga it is of. Pass it as dump_state made it.")
    data = {name: value for name, value in cast("dict[str, Any]", state).items() if name != _OURS}
    return Mark(saga_id, run, token), data


def complete(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on this thread's own event loop, on which `Runner.run_sync` runs its agents, too.

    Raises:
        RuntimeError: A loop runs here.
    """
    if on_a_loop():
        coroutine.close()
        raise RuntimeError("An event loop runs here, which this would block. Use the async form.")
    loop = loop_of_this_thread()
    if loop is not None:
        return loop.run_until_complete(coroutine)
    with asyncio.Runner() as runner:
        return runner.run(coroutine)


def loop_of_this_thread() -> asyncio.AbstractEventLoop | None:
    """The loop that `Runner.run_sync` uses here; None if it would make one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its end is announced, and run_sync relies on it
        try:
            loop = asyncio.get_event_loop_policy().get_event_loop()  # pyright: ignore[reportDeprecated]
        except RuntimeError:
            return None
    return None if loop.is_closed() else loop
