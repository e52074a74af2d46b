"""Which call of its tool a call is: CrewAI hands no call id to a tool, so its calls are told apart by their place."""

from __future__ import annotations

import json
import threading
from typing import Any

from agent_saga_core.saga import Saga

__all__ = ["Numbers", "begin_segment", "canonical", "numbers_of"]


class Numbers:
    """Which call of its tool in its scope a call is: the lowest number that no other call has.

    A call that left nothing gives its number back when the framework is done with it, so that made again it is the next
    attempt of the same step. Kept for each saga that is open in this process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[tuple[str, str], set[int]] = {}
        self._turns: dict[int, tuple[object, list[tuple[str, str, str, int]]]] = {}
        self.prefix = ""

    def take(self, scope: str, tool: str, arguments: object, turn: tuple[object, object, list[Any]] | None) -> int:
        """The number of this call.

        Args:
            scope: The part of the run that makes it.
            tool: The tool's name.
            arguments: What the model gave.
            turn: The executor, its model's message, and the calls in it, if known: calls of one message may be made at
                the same time, and are numbered in the order in which they stand there.
        """
        with self._lock:
            wanted = (tool, canonical(arguments))
            if turn is None or not any(_named(call) == wanted for call in turn[2]):  # it is not this message's
                return self._next(scope, tool)
            places = self._places(scope, *turn)
            chosen = next((place for place in places if place[:3] == (scope, *wanted)), None)
            if chosen is None:
                return self._next(scope, tool)
            places.remove(chosen)
            return chosen[3]

    def give_back(self, scope: str, tool: str, number: int) -> None:
        """Let the next call have this number."""
        with self._lock:
            self._taken[scope, tool].discard(number)

    def _next(self, scope: str, tool: str) -> int:
        taken = self._taken.setdefault((scope, tool), set())
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        taken.add(number)
        return number

    def _places(
        self, scope: str, executor: object, message: object, calls: list[Any]
    ) -> list[tuple[str, str, str, int]]:
        """What is left of the numbers of a message's calls."""
        known = self._turns.get(id(executor))
        if known is None or known[0] is not message:
            places: list[tuple[str, str, str, int]] = []
            for call in calls:
                name, arguments = _named(call)
                if name:
                    places.append((scope, name, arguments, self._next(scope, name)))
            known = self._turns[id(executor)] = (message, places)
        return known[1]


def _named(call: Any) -> tuple[str, str]:
    """The tool's name and the arguments of a call as it stands in a message of the model."""
    try:
        function = call["function"]
        name, given = function["name"], function["arguments"]
        return str(name), canonical(json.loads(given) if isinstance(given, str) else given)
    except (KeyError, TypeError, ValueError):
        return "", ""


def canonical(arguments: object) -> str:
    """One spelling for equal arguments."""
    try:
        return json.dumps(arguments, sort_keys=True, default=repr)
    except (TypeError, ValueError):
        return repr(arguments)


def numbers_of(saga: Saga) -> Numbers:
    """The numbers of an open saga, which its savepoints share: an identity says nothing of savepoints."""
    return saga.shared(Numbers)


def begin_segment(saga: Saga, prefix: str) -> None:
    """Put a prefix before every run scope of this saga from now on: a run that goes on is not its beginning."""
    numbers_of(saga).prefix = prefix
