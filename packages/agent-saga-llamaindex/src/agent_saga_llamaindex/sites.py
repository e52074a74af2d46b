"""Where a call is made: what of a workflow run stays the same when the run is taken up again.

A workflow runs a step again from its top when an event that the step waited for arrives, when its retry policy says so,
and in another process, after the run's context was restored there. What names the step's work through all of that is
its work item, which LlamaIndex numbers within a run and stores with the context. So a call's site is the run's label in
the saga, the step, and the work item; and one execution of the step is the body within which calls are counted.

The numbers depend on what happens to be finished first where steps run at the same time, as an agent's calls for one
message do. A run that is made again from its top would not find such calls again. So the work item of an agent's call
is named by that call, and by which of the equal ones of its run it is; a suspended run takes these names along.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Hashable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from workflows.handler import WorkflowHandler

from agent_saga_core import current_step, values
from agent_saga_core.declare import StepSpec
from agent_saga_core.errors import BoundaryRequired
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping import CallSite, Same, refused_too_often
from agent_saga_llamaindex.adapter import NAME
from agent_saga_llamaindex.inside import UNTOLD, calls_a_tool, run_here, step_here

__all__ = ["HERE", "RunScope", "book_of", "label_for", "site_of"]


class Book:
    """What one process has seen of one saga: the runs in it, and what they were called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Hashable, int] = {}
        self._labels: dict[str, str] = {}
        self._works: dict[str, dict[str, str]] = {}

    def next(self, *key: Hashable) -> int:
        """Count, from 1."""
        with self._lock:
            number = self._counts[key] = self._counts.get(key, 0) + 1
            return number

    def label_of(self, run_id: str, base: str, body: Hashable) -> str:
        """What a run is called that nobody announced: its place among those seen from the same body."""
        with self._lock:
            if run_id not in self._labels:
                number = self._counts[base, body] = self._counts.get((base, body), 0) + 1
                self._labels[run_id] = f"{base}.{number}"
            return self._labels[run_id]

    def work(self, label: str, item: str, call: str) -> str:
        """What the work item of an agent's call is called: the call, and its place among the equal ones of its run."""
        with self._lock:
            known = self._works.setdefault(label, {})
            if item not in known:
                number = self._counts[label, call] = self._counts.get((label, call), 0) + 1
                known[item] = f"{call}:{number}"
            return known[item]

    def works(self, label: str) -> dict[str, str]:
        """What the work items of a run are called, for whoever goes on with it elsewhere."""
        with self._lock:
            return dict(self._works.get(label, {}))

    def recall(self, label: str, works: Mapping[str, str]) -> None:
        """Go on from what the work items of a run were called elsewhere."""
        with self._lock:
            self._works.setdefault(label, {}).update(works)
            for name in works.values():
                call, _, number = name.rpartition(":")
                self._counts[label, call] = max(self._counts.get((label, call), 0), int(number))


class RunScope:
    """One run that the adapter has started, on the running loop.

    Attributes:
        saga: The saga, or the savepoint in one, that the run is.
        label: What the run is called in the saga, in this process and after a resume in another.
        handler: LlamaIndex's handle on the run; None until it is started.
        refusal: Why the run is being ended, if it is: its saga has refused too many calls.
    """

    def __init__(self, saga: Saga, label: str) -> None:
        self.saga = saga
        self.label = label
        self.handler: WorkflowHandler | None = None
        self.refusal: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[None] | None = None

    def hear(self, refusal: BaseException) -> None:
        """A call was refused, on whatever thread: after so many, the run is cancelled as LlamaIndex cancels runs.

        Raising would not end it: an agent tells its model of every exception that a tool raises, and asks it again.
        """
        if refused_too_often(self.saga) and self.refusal is None:
            self.refusal = refusal
            with suppress(RuntimeError):  # the loop is closed, and the run over
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.handler is not None:
            self._ending = asyncio.ensure_future(self.handler.cancel_run())


HERE: ContextVar[RunScope | None] = ContextVar("agent_saga_llamaindex_run", default=None)
"""The run that the code belongs to: LlamaIndex copies the context into every step, and into a sync tool's thread."""


def book_of(saga: Saga) -> Book:
    """The book of a saga, which its savepoints share."""
    return saga.shared(Book)


def label_for(saga: Saga) -> str:
    """What a run is called that is about to be started here. Repeated where the code around it is run again."""
    around, step, book = HERE.get(), step_here(), book_of(saga)
    if around is not None and step is not None and around.saga.same_as(saga):
        base = f"{_label_here(saga, book, 'asaga_run')}/{_work(step, 'asaga_run')}"
        return f"{base}.{book.next('run', base, Same(step))}"
    current = current_step()
    if current is not None:
        return f"step{current.number}.{book.next('run', Same(current))}"
    if saga.goes_on:  # the runs before it were counted in another process
        return f"new-{uuid.uuid4().hex}"
    return str(book.next("run"))


def site_of(saga: Saga, spec: StepSpec, args: Mapping[str, Any]) -> CallSite | None:
    """Where a call is made: None outside of a workflow's steps.

    Counted, too, in the step in which an agent calls a tool for its model: a class of the user's may call it again
    there. The model's id of the call is not used: a ReAct agent draws a new one whenever it reads the same text.

    Args:
        saga: The scope that it is made in.
        spec: The declaration of the tool.
        args: The arguments by name.

    Raises:
        BoundaryRequired: Which run, or which of its work, makes the call cannot be told.
    """
    step = step_here()
    if step is None:
        return None
    book = book_of(saga)
    label, work = _label_here(saga, book, spec.tool), _work(step, spec.tool)
    if calls_a_tool(step):
        work = book.work(label, work, f"{step.state.step_name}/{_spelled(spec, args)}")
    return CallSite(NAME, f"{label}/{work}", body=Same(step))


def _spelled(spec: StepSpec, args: Mapping[str, Any]) -> str:
    """The same for equal calls, secrets aside."""
    try:
        told = values.encode_args({name: args[name] for name in args if name != "idempotency_key"}, spec.hints).data
    except values.Unstorable:  # the step is refused for its arguments
        told = None
    digest = values.fingerprint(spec.tool, told).rpartition(":")[2]
    return digest[:16]


def _label_here(saga: Saga, book: Book, tool: str) -> str:
    """The label of the run that the code belongs to."""
    around, run_id = HERE.get(), run_here()
    if run_id is None:
        raise BoundaryRequired(f"{tool!r}: {UNTOLD}")
    announced = around is not None and around.saga.same_as(saga)
    if announced and around is not None and around.handler is not None and run_id == around.handler.run_id:
        return around.label
    current = current_step()
    if current is None and saga.goes_on:
        raise BoundaryRequired(
            f"{tool!r} was called in a workflow that was started by hand, in a saga that goes on from another process: "
            "whether that process made this call cannot be told. Start and resume workflows with asaga_run."
        )
    outer = around.label if announced and around is not None else "by-hand"
    base = f"{outer}/step{current.number}" if current is not None else f"{outer}/inner"
    return book.label_of(run_id, base, Same(current))


def _work(step: Any, tool: str) -> str:
    """The step, and the work item that it runs for."""
    item = getattr(step.state, "work_item_id", None)
    if item is None:
        raise BoundaryRequired(f"{tool!r}: {UNTOLD}")
    return f"{step.state.step_name}/{item}"
