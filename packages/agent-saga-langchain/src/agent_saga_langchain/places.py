"""Where a call was made: what makes it the same call when a graph's task, or a whole run, is executed again.

Inside of a LangGraph task the place is the task, and the model's id of the call tells it from the others there:

- *With a thread* (a checkpointer), the task's id is the place. LangGraph derives it from the checkpoint, so that a task
  that is executed again, after an interrupt, a retry or in another process, has the same id; the tasks of two steps,
  two `Send`s, two subgraphs or two forks do not.
- *Without one*, ids of tasks are new in each run. Then the place is spelled by what a run of the same body from its top
  repeats: node, step number, position in the step, and which of several such tasks of this saga it is.
- Where one id is given to several calls of a task, they are numbered.
- Calls without an id are counted for each execution of the task's code.

Outside of a graph there is no place: an id such as "call_0" begins anew with each message, and nothing tells the
messages apart. The call's tool, arguments and number among equal calls say which it is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Hashable, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from agent_saga_core import DeclarationError, Saga
from agent_saga_core.wrapping import CallSite, Same, equal_args

__all__ = ["Made", "Task", "current_task", "numbered", "site_of", "told_apart"]

TASKS: Final = "langgraph"
"""Whose tasks the places are: the `adapter` of every site, as the log has it."""


class Task(NamedTuple):
    """The LangGraph task that is being executed."""

    runtime: Any
    """LangGraph's object for this execution of the task's code; a new one for each."""
    task_id: str
    thread_id: str | None
    namespace: str
    """The tasks around this one and itself, `name:id` for each, joined by `|`."""
    position: tuple[str, str]
    """Step and path in the innermost graph, as far as LangGraph tells them."""


def current_task() -> Task | None:
    """The task that the running code belongs to; None outside of any.

    A thread that was started without its starter's context sees none.

    Raises:
        DeclarationError: A graph is running, and this LangGraph does not tell its executions apart.
    """
    module = sys.modules.get("langgraph.runtime")
    if module is None:
        return None
    try:
        runtime: Any = module.get_runtime()
    except (RuntimeError, KeyError):  # no runnable is running, or one of no graph
        return None
    if runtime is None:
        return None
    if not hasattr(runtime, "execution_info"):
        raise DeclarationError("This LangGraph does not tell the calls of a graph apart. Install langgraph>=1.2.")
    info = runtime.execution_info
    if info is None:
        return None
    config: dict[str, Any] = sys.modules["langgraph.config"].get_config()
    metadata: dict[str, Any] = config.get("metadata") or {}
    return Task(
        runtime=runtime,
        task_id=info.task_id,
        thread_id=str(info.thread_id) if _is_kept(info, config) else None,
        namespace=info.checkpoint_ns,
        position=(str(metadata.get("langgraph_step")), str(metadata.get("langgraph_path"))),
    )


def _is_kept(info: Any, config: dict[str, Any]) -> bool:
    """Whether the graph can be resumed, so that the ids of its tasks are met again.

    Many name a thread and have no checkpointer. Of a subgraph that says nothing: the graph around it may have one.
    """
    if info.thread_id is None:
        return False
    configurable: dict[str, Any] = config.get("configurable") or {}
    return "|" in info.checkpoint_ns or configurable.get("__pregel_checkpointer", True) is not None


def site_of(saga: Saga, task: Task | None, call_id: str | None) -> CallSite | None:
    """The place of a call, in the words of its framework; None where nothing tells it."""
    if task is None:
        return None
    scope = f"{task.thread_id}/{task.task_id}" if task.thread_id is not None else _spelled(saga, task)
    return CallSite(TASKS, scope, call_id or None, body=Same(task.runtime))


def _spelled(saga: Saga, task: Task) -> str:
    """The place of a task whose id is new in each run: the same one in a second run of the same body.

    Tasks that run at the same time in graphs that were called side by side may swap their numbers in a second run.
    Their calls are then not found again, or refused as a conflict, and the saga is rolled back.
    """
    before = _numbers_of(saga).before
    parts = [f"after {before}"] if before else []
    segments = task.namespace.split("|")
    for n, segment in enumerate(segments):
        name, colon, task_id = segment.rpartition(":")
        if not colon:  # which of the subgraphs called by one task
            parts.append(segment)
            continue
        at = task.position if n == len(segments) - 1 else ("", "")
        here = "|".join((*parts, f"{name}@{at[0]}{at[1]}"))
        parts.append(f"{name}@{at[0]}{at[1]}#{numbered(saga, task_id, here)}")
    return "|".join(parts)


class Made:
    """One call of a function, as far as it tells whether another one is the same call, made again.

    Args:
        args: The arguments by name.
        models: The model's own call that it is made for, where somebody has shown that very object.
    """

    __slots__ = ("args", "heard", "models")

    def __init__(self, args: Mapping[str, Any], models: object = None) -> None:
        self.args = dict(args)
        self.models = models
        self.heard = True
        """Whether who called was told of its end; else of an error that came after it."""

    def is_again(self, other: Made) -> bool:
        """Whether this is once more a call that has not failed, `other`; it may still run."""
        is_models = self.models is not None and self.models is other.models
        return (is_models or not other.heard) and equal_args(self.args, other.args)


@contextmanager
def told_apart(saga: Saga, site: CallSite | None, tool: str, made: Made) -> Generator[CallSite | None]:
    """The place of a call for as long as it runs, told from other calls with its id in this execution of the body.

    A loop over several messages in one node, or a careless provider, gives one id to several calls. One that is met
    again after it has failed is a retry, and the same call; so is one whose caller was told of an error after it had
    returned, and one that is made for the very same call of the model. Another one, with that id, is another call.
    """
    if site is None or site.call_id is None:
        yield site
        return
    numbers = _numbers_of(saga)
    key = (site.body, site.scope, tool, site.call_id)
    with numbers.lock:
        taken = numbers.taken.setdefault(key, {})
        free = next(n for n in range(len(taken) + 1) if n not in taken)
        number = next((n for n, other in taken.items() if made.is_again(other)), free)
        taken[number] = made
    try:
        yield site if number == 0 else site._replace(call_id=f"{site.call_id}#{number}")
    except BaseException:
        with numbers.lock:
            if taken.get(number) is made:
                del taken[number]
        raise


class _Numbers:
    """What one opening of a saga in this process has numbered, in all of its savepoints."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.before: int | None = None
        self.known: dict[tuple[Hashable, ...], dict[Hashable, int]] = {}
        self.taken: dict[tuple[Hashable, ...], dict[int, Made]] = {}


def _numbers_of(saga: Saga) -> _Numbers:
    """The numbers of this opening of a saga.

    A saga that goes on where it was makes no call again, and may make some that look like former ones: what it numbers
    begins behind the calls that it had.
    """
    numbers = saga.shared(_Numbers)
    with numbers.lock:
        if numbers.before is None:  # asked for before the first call of this opening is recorded
            numbers.before = len(saga.recorded_sites(TASKS)) if saga.goes_on else 0
    return numbers


def numbered(saga: Saga, key: Hashable, *like: Hashable) -> int:
    """The number of `key` among its like in this opening of the saga, from 0; met again, it has the number it had."""
    numbers = _numbers_of(saga)
    with numbers.lock:
        known = numbers.known.setdefault(like, {})
        return known.setdefault(key, len(known))
