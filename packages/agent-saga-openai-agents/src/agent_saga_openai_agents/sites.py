"""Where a call was made: what makes a model's call ids unique within a saga, also after a resume in another process.

The framework holds each call id to one call within a run (handoffs included), and to nothing beyond: the next run may
begin at `call_0` again, and so may an agent that is called as a tool. A run has no id of its own that survives a
resume, so runs are numbered in their saga. Runs within runs cannot be told by name: what tells them apart here is that
every run has tables of its own in its context, shared by the contexts of all its calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, cast

from agents import RunContextWrapper

from agent_saga_core import Log, Saga
from agent_saga_core.logs import shared_log
from agent_saga_core.state import fold
from agent_saga_core.wrapping import CallSite
from agent_saga_openai_agents.adapter import NAME

__all__ = [
    "TABLES",
    "Mark",
    "Runs",
    "begin",
    "inside",
    "mark_of",
    "point_of",
    "put_mark",
    "runs_of",
    "site_of",
    "tells_runs_apart",
    "token_in",
    "token_of",
]

TABLES: Final = ("_tool_invocations", "_approvals")
"""Attributes of a run's context that all contexts made from it share, and no other run's."""
_MARK: Final = "_agent_saga"


class Mark(NamedTuple):
    """A run of a saga."""

    saga_id: str
    run: int
    """Its number among the runs of the saga, from 1."""
    token: str = ""
    """What tells the saga from all others, of other logs, too; empty if only its id is known."""
    part: str = "0"
    """Where this part of it began: at its top, or where it waited for a person (see `point_of`)."""


_inside: ContextVar[Mark | None] = ContextVar("agent_saga_openai_agents_run", default=None)


class Runs:
    """The runs of one saga in this process. Safe on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recalled = False
        self._count = 0
        self._scopes: dict[int, tuple[object, str]] = {}  # holds the tables, so that no id is used twice
        self._nested: Counter[str] = Counter()
        self._calls: set[asyncio.Task[Any]] = set()

    def recall(self, saga: Saga) -> None:
        """Count behind the runs of earlier processes, if the saga goes on; where its body runs again, it meets them."""
        with self._lock:
            if self._recalled:
                return
            self._recalled = True
            for _, site in saga.recorded_sites(NAME) if saga.goes_on else ():
                if site.call_id is None:
                    continue
                name, _, number = site.scope.rpartition("#")
                run = site.scope.partition("/")[0].partition(".")[0]
                if run.isdecimal():
                    self._count = max(self._count, int(run))
                elif number.isdecimal():  # those with a run around them are told from all others by its number
                    self._nested[name] = max(self._nested[name], int(number))

    def begin(self, context: object, resumed: Mark | None) -> int:
        """Number a run that is about to start with this context."""
        with self._lock:
            number = resumed.run if resumed is not None else self._count + 1
            self._count = max(self._count, number)
            table = _table(context)
            if table is not None:
                self._scopes[id(table)] = table, str(number)
        return number

    @contextmanager
    def calling(self) -> Generator[None]:
        """A call is being made in the block, in the task that runs here."""
        task = asyncio.current_task()
        if task is not None:
            self._calls.add(task)
        try:
            yield
        finally:
            if task is not None:
                self._calls.discard(task)

    def calls_on(self, loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
        """The tasks of a loop in which calls are being made."""
        return [task for task in tuple(self._calls) if task.get_loop() is loop and not task.done()]

    def scope(self, context: object, agent: str, call: str) -> str | None:
        """The name of the run that a call with this context belongs to; None if that cannot be told.

        A run that nobody numbered (an agent called as a tool, or one run by hand) is named by the run around it, its
        agent and the call that it is met with first, and numbered among those that have that in common.
        """
        table = _table(context)
        if table is None:
            return None
        around = _inside.get()
        with self._lock:
            known = self._scopes.get(id(table))
            if known is None:
                where = f"{around.run}.{around.part}" if around is not None else "-"
                name = f"{where}/{agent}/{call}"
                self._nested[name] += 1
                known = self._scopes[id(table)] = table, f"{name}#{self._nested[name]}"
        return known[1]


def runs_of(saga: Saga) -> Runs:
    """The runs of a saga: the same for all its savepoints, and new ones when it is opened again."""
    runs = saga.shared(Runs)
    runs.recall(saga)
    return runs


@contextmanager
def inside(mark: Mark) -> Generator[None]:
    """What is started in the block belongs to this run."""
    before = _inside.get()
    _inside.set(mark)
    try:
        yield
    finally:
        _inside.set(before)


def site_of(saga: Saga, context: Any, tool: str) -> CallSite | None:
    """Where the call with this context was made; None if the context tells nothing of it."""
    call_id = getattr(context, "tool_call_id", None)
    if not isinstance(call_id, str) or not call_id:
        return None
    agent = getattr(getattr(context, "agent", None), "name", "")
    scope = runs_of(saga).scope(context, str(agent), f"{tool}:{call_id}")
    if scope is None:  # without a run to be unique in, the id is worth nothing: calls are counted instead
        around = _inside.get()
        return CallSite(NAME, scope=str(around.run) if around is not None else "")
    return CallSite(NAME, scope=scope, call_id=call_id)


def begin(saga: Saga, context: object, resumed: Mark | None, part: str) -> Mark:
    """Number a run of a saga that is about to start with this context, at its top or where it goes on."""
    return Mark(saga.id, runs_of(saga).begin(context, resumed), token_of(saga), part)


def token_of(saga: Saga) -> str:
    """What tells a saga from all others, also from one of the same id."""
    opened: Any = saga._opened  # pyright: ignore[reportPrivateUsage]
    return _digest(opened.fold.nonce)


def token_in(log: Log | str | None, saga_id: str) -> str | None:
    """`token_of` the saga of this id that a log holds; None if it holds none."""
    records = shared_log(log).read(saga_id)
    return _digest(fold(records, saga_id).nonce) if records else None


def point_of(state: Any) -> str:
    """Where a state waits: the same for all states of that point, however they came here, and for no others.

    What an agent called as a tool did before an interruption is told by this from what it does behind it.
    """
    waits: list[object] = [len(getattr(state, "_model_responses", None) or ())]
    for item in state.get_interruptions():
        call: Any = item.raw_item
        found = cast("dict[str, Any]", call if isinstance(call, dict) else vars(call))
        waits.append([getattr(item.agent, "name", ""), found.get("call_id"), found.get("name"), found.get("arguments")])
    return _digest(json.dumps(waits, default=str))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def tells_runs_apart() -> bool:
    """Whether this version of the framework has what runs are told apart by."""
    return _table(RunContextWrapper(context=None)) is not None


def put_mark(target: object, mark: Mark) -> None:
    """Remember on one of the framework's objects which run it is of."""
    setattr(target, _MARK, mark)


def mark_of(found: object) -> Mark | None:
    """The run that a result or a state is of; it may be known by its context alone."""
    for holder in (found, getattr(found, "context_wrapper", None), getattr(found, "_context", None)):
        mark = cast(object, getattr(holder, _MARK, None))
        if isinstance(mark, Mark):
            return mark
    return None


def _table(context: object) -> object | None:
    for name in TABLES:
        table = getattr(context, name, None)
        if isinstance(table, dict):
            return cast(object, table)
    return None
