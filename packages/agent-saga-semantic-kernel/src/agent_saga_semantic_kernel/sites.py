"""Where a call was made: what makes a model's call ids unique within a saga, also when its body runs again.

A model's id of a call may begin anew with every message. What tells messages apart here: each conversation with a model
copies its execution settings and hands that copy along with every call that it invokes, together with the number of the
message in it. So a call's site is the run's number in the saga, the conversation's number in the run, the message's
number in the conversation, and the id. A filter sees all that; the function that it is about hears of it by ContextVar.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from agent_saga_core import BoundaryRequired, Saga, SagaNotRunning, current_saga
from agent_saga_core.wrapping import CallSite, ToolRunner, refused_too_often, runner_of
from agent_saga_semantic_kernel.adapter import NAME

__all__ = ["HERE", "Place", "hand_over", "in_place", "run_in", "stepping"]


class Place(NamedTuple):
    """Where in a saga the code is that runs here."""

    saga: Saga
    scope: str
    """Names the run, and the calls around the code within it, alike whenever the saga's body runs."""
    call_id: str | None = None
    """The model's id of the call that is being made, unique within the scope; None if no model asked for it."""
    runner: ToolRunner | None = None
    """The wrapped function that the call is of."""

    def within(self) -> Place:
        """The same for the code inside of the call."""
        return self if self.call_id is None else Place(self.saga, f"{self.scope}/{self.call_id}")


HERE: ContextVar[Place | None] = ContextVar("agent_saga_semantic_kernel_place", default=None)


class Ledger:
    """The runs, conversations and calls of one saga in this process, numbered. Safe on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._counts: Counter[str] = Counter()
        # By identity, and held: no other object gets the same one while the saga is open.
        self._conversations: dict[int, tuple[object, str]] = {}
        self._calls: dict[int, tuple[object, str]] = {}

    def next_run(self) -> int:
        """The number of a run that is about to start, from 1."""
        with self._lock:
            self._runs += 1
            return self._runs

    def conversation(self, settings: object, base: str) -> str:
        """What the conversation with these settings is called."""
        return self._named(self._conversations, settings, base, always=True)

    def call(self, content: object, base: str) -> str:
        """What a call is called: an id met again for another call of the same message gets a number."""
        return self._named(self._calls, content, base)

    def _named(self, known: dict[int, tuple[object, str]], found: object, base: str, *, always: bool = False) -> str:
        with self._lock:
            entry = known.get(id(found))
            if entry is None:
                self._counts[base] += 1
                number = self._counts[base]
                entry = known[id(found)] = found, f"{base}#{number}" if always or number > 1 else base
            return entry[1]


def ledger_of(saga: Saga) -> Ledger:
    """The ledger of a saga: one for all its savepoints, and a new one when it is opened again."""
    return saga.shared(Ledger)


def run_in(saga: Saga) -> Place:
    """The place of a run that is about to start in this saga."""
    here = _here_in(saga)
    number = ledger_of(saga).next_run()
    return Place(saga, f"{here.within().scope}/{number}" if here is not None else str(number))


@contextmanager
def in_place(place: Place | None) -> Generator[None]:
    """What is called in the block is made at this place."""
    before = HERE.get()
    HERE.set(place)
    try:
        yield
    finally:
        HERE.set(before)  # not by token: the block of a generator may be left in another context


@contextmanager
def stepping(saga: Saga, runner: ToolRunner) -> Generator[CallSite]:
    """The site of a call of this wrapped function; what it calls in the block is within that call."""
    here, current = _here_in(saga), current_saga()
    inside = here.within() if here is not None else None
    if here is None or inside is None:
        site = CallSite(NAME)
    elif here.runner is runner:
        site = CallSite(NAME, here.scope, here.call_id)
    else:
        site = CallSite(NAME, inside.scope)
    with ExitStack() as held:
        if current is None or not current.same_as(saga):  # the binding has told it: its context is another one's
            held.enter_context(saga.attached())
        held.enter_context(in_place(inside))
        yield site


async def hand_over(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
    """The filter around each call that a model asks for: says where it is made, and ends a run that is refused.

    The framework passes `next` by that name. After so many refusals no further message goes to the model: this is what
    `terminate` means, and the exceptions of functions never reach the code that asks the model.
    """
    saga = _saga_of(runner_of(context.function))
    if saga is None:
        await next(context)
        return
    with in_place(_place_of(saga, context)):
        await next(context)
    if refused_too_often(saga):
        context.terminate = True


def _saga_of(runner: ToolRunner | None) -> Saga | None:
    """The saga that a call of the function will be a step of; None where it will be none, or refuse by itself."""
    if runner is None:
        return current_saga()
    try:
        return runner.saga()
    except (BoundaryRequired, SagaNotRunning):
        return None


def _here_in(saga: Saga) -> Place | None:
    here = HERE.get()
    return here if here is not None and here.saga.same_as(saga) else None


def _place_of(saga: Saga, context: Any) -> Place:
    here, ledger = _here_in(saga), ledger_of(saga)
    base = f"{here.within().scope if here is not None else ''}/{_speaker(context.chat_history)}"
    settings = context.execution_settings
    if settings is not None:
        base = f"{ledger.conversation(settings, base)}/{context.request_sequence_index}"
    content = context.function_call_content
    call_id = getattr(content, "id", None) or "-"
    named = ledger.call(content if content is not None else context, f"{base}/{call_id}")
    return Place(saga, base, named.removeprefix(f"{base}/"), runner_of(context.function))


def _speaker(history: Any) -> str:
    """The name of the agent that speaks: agents with instructions put it on the first message."""
    messages = getattr(history, "messages", None)
    return str(getattr(messages[0], "name", None) or "") if messages else ""
