"""CrewAI's cache of tool results: an answer from it is one only while what the answer tells of stands.

With `cache=True` CrewAI remembers what a tool returned for as long as the agent or crew lives, which is longer than a
saga, and answers an equal call itself. The answer of a call that was undone, or that another saga may still undo, is
taken out.
"""

from __future__ import annotations

import json
import threading
import weakref
from typing import Any, NamedTuple

from agent_saga_core import Saga, SagaStatus, StepStatus

__all__ = ["forget_undone", "remember"]


class _Answer(NamedTuple):
    saga: Saga
    """The scope that the call was made in."""
    forward_key: str
    """The key that it was made under; empty if the log has given its result back."""

    def stands(self, current: Saga | None) -> bool:
        """Whether it may be given to a call in the current saga; None for one outside of any."""
        if current is None or not current.same_as(self.saga):
            return self.saga.status is SagaStatus.COMMITTED
        step = next((step for step in self.saga.steps if step.forward_key == self.forward_key), None)
        return step is None or step.status is not StepStatus.COMPENSATED


_lock = threading.Lock()
_answers: dict[int, dict[tuple[str, str], _Answer]] = {}
"""By cache, which has no hash; an entry goes with its cache."""


def remember(context: Any, saga: Saga, forward_key: str) -> None:
    """Note in which saga the call was made that the framework may have cached the result of."""
    cache = _cache(context)
    if cache is None:
        return
    try:
        place = (context.tool_name, json.dumps(context.tool_input) if context.tool_input else "")
    except (TypeError, ValueError):  # CrewAI spells it like this, too
        return
    if cache.read(*place) is None:
        return
    with _lock:
        known = _answers.get(id(cache))
        if known is None:
            known = _answers[id(cache)] = {}
            weakref.finalize(cache, _answers.pop, id(cache), None).atexit = False
        known[place] = _Answer(saga, forward_key)


def forget_undone(context: Any, current: Saga | None) -> None:
    """Take out of the framework's cache what it must not answer a call of this tool with."""
    cache = _cache(context)
    if cache is None:
        return
    with _lock:
        known = _answers.get(id(cache), {})
        answers = {place: answer for place, answer in known.items() if place[0] == context.tool_name}
    for place, answer in answers.items():
        if not answer.stands(current):
            cache.add(*place, None)  # read as if there were none
            with _lock:
                known.pop(place, None)


def _cache(context: Any) -> Any:
    """The cache that the framework asks before it makes a call; None if there is none."""
    return getattr(getattr(context.agent, "tools_handler", None), "cache", None)
