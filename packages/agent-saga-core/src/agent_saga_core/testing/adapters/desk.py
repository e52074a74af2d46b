"""The world of the adapter suite: a desk whose bookings stand in a file, and the tool functions that book there.

No `from __future__ import annotations` here: frameworks read the annotations of these functions, not all of them
through `get_type_hints`.
"""

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from agent_saga_core.declare import undo
from agent_saga_core.registry import compensator

__all__ = ["BOUND", "BY_ITEM", "BY_RESULT", "Desk", "NoSuchItem", "echo"]

BOUND: Final = 30.0
"""Seconds of real time after which a wait that does not end has failed the test."""

BY_RESULT: Final[dict[str, Any]] = {
    "semantics": "COMPENSABLE",
    "compensate": undo("conformance.unbook", id="result.id"),
}
"""Undone by what the call returned: nothing can be done about a call of which only the error is known."""

BY_ITEM: Final[dict[str, Any]] = {
    "semantics": "COMPENSABLE",
    "compensate": undo("conformance.release", if_absent="forbids", item="args.item"),
}
"""Undone by what the call was given, landed or not, at once."""


class NoSuchItem(Exception):
    """What a tool of the suite raises when it fails and says nothing of what happened."""


def echo(text: str) -> str:
    """Say the text again."""
    return f"echo {text}"


class Desk:
    """Bookings in a file of lines: shared by every thread, and by the processes of a test.

    A line is one act, `book` or `undo`, in the order in which they happened. `on` holds what a test wants to happen
    inside of a tool, by the tool's name: called with the item before the booking. It may block: an async tool awaits it
    on a thread.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.on: dict[str, Callable[[str], Any]] = {}
        self.then: dict[str, Callable[[str], Any]] = {}
        """The same, after the booking."""
        self._lock = threading.Lock()

    def register(self) -> None:
        """Register the desk's two compensators."""
        compensator("conformance.unbook")(self.unbook)
        compensator("conformance.release")(self.release)

    # --- what has happened

    def acts(self) -> list[tuple[str, str]]:
        """Every act so far, `("book", item)` or `("undo", item)`."""
        try:
            with open(self.path, encoding="utf-8") as file:
                return [(act, item) for act, item in map(json.loads, file)]
        except FileNotFoundError:
            return []

    def booked(self) -> list[str]:
        """The items in the order in which they were booked, undone or not."""
        return [item for act, item in self.acts() if act == "book"]

    def undone(self) -> list[str]:
        """The items in the order in which they were undone."""
        return [item for act, item in self.acts() if act == "undo"]

    def standing(self) -> list[str]:
        """The bookings that stand, sorted."""
        left = Counter(self.booked())
        left.subtract(self.undone())
        return sorted(left.elements())

    # --- acting

    def book(self, item: str) -> dict[str, Any]:
        """Book an item; what the tools return."""
        with self._lock:
            number = self.booked().count(item) + 1
            self._write("book", item)
        return {"id": f"{item}/{number}", "item": item}

    def unbook(self, id: str) -> None:
        """Undo one booking. A compensator."""
        with self._lock:
            self._write("undo", id.rpartition("/")[0])

    def release(self, item: str) -> None:
        """Undo the bookings of an item, if there are any. A compensator."""
        with self._lock:
            for _ in range(self.standing().count(item)):
                self._write("undo", item)

    def _write(self, act: str, item: str) -> None:
        line = json.dumps([act, item]) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    # --- tools

    def function(self, name: str, is_async: bool = False) -> Callable[..., Any]:
        """A tool function of this name that books its item."""

        def act(item: str) -> dict[str, Any]:
            """Book one item."""
            if name in self.on:
                self.on[name](item)
            booked = self.book(item)
            if name in self.then:
                self.then[name](item)
            return booked

        async def aact(item: str) -> dict[str, Any]:
            """Book one item."""
            if name in self.on:
                await asyncio.to_thread(self.on[name], item)
            booked = self.book(item)
            if name in self.then:
                await asyncio.to_thread(self.then[name], item)
            return booked

        return _named(name, aact if is_async else act)

    def charging(self, is_async: bool = False) -> Callable[..., Any]:
        """A tool function `charge` with a secret among its arguments, and one that has a default."""

        def act(item: str, api_key: str, amount: int = 7) -> dict[str, Any]:
            """Charge for one item."""
            self.book(f"{item} {amount} {api_key}")
            return {"item": item}

        async def aact(item: str, api_key: str, amount: int = 7) -> dict[str, Any]:
            """Charge for one item."""
            return act(item, api_key, amount)

        return _named("charge", aact if is_async else act)

    def keyed(self, is_async: bool = False) -> Callable[..., Any]:
        """A tool function `order` that asks for the idempotency key, and books the key."""

        def act(item: str, *, idempotency_key: str) -> dict[str, Any]:
            """Order one item."""
            return self.book(idempotency_key)

        async def aact(item: str, *, idempotency_key: str) -> dict[str, Any]:
            """Order one item."""
            return self.book(idempotency_key)

        return _named("order", aact if is_async else act)

    def answering(self, is_async: bool = False) -> list[Callable[..., Any]]:
        """Tool functions whose answers are of different types."""
        answers: dict[str, tuple[Any, Any]] = {
            "give_text": (str, "fine, thank you"),
            "give_nothing": (type(None), None),
            "give_number": (int, 17),
            "give_list": (list[str], ["a", "b"]),
            "give_record": (dict[str, Any], {"id": "x/1", "lines": [1, 2.5, None], "text": "grün"}),
        }
        return [self._answering(name, hint, answer, is_async) for name, (hint, answer) in answers.items()]

    def _answering(self, name: str, hint: Any, answer: Any, is_async: bool) -> Callable[..., Any]:
        def give(item: str) -> Any:
            """Give an answer."""
            self.book(item)
            return answer

        async def agive(item: str) -> Any:
            """Give an answer."""
            return give(item)

        fn = _named(name, agive if is_async else give)
        fn.__annotations__ = {"item": str, "return": hint}
        return fn


def _named(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    fn.__name__ = fn.__qualname__ = name
    return fn
