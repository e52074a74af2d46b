"""Faults on demand: rules that hold, drop or fail requests of the demo service, and who is busy meanwhile.

Nothing here waits on a clock for something to happen: a test asks for a fault, waits until the request stands
in it, and lets it go. Timeouts only bound how long a wait for a thing that never comes may last.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_saga_core.demo.ledger import Json, Refusal, Request

__all__ = ["Held", "Rule", "Rules", "Traffic"]

_FIELDS: dict[str, Callable[[Any], bool]] = {
    "rule": lambda v: v in ("hold", "land_late", "fail"),
    "when": lambda v: v in ("before", "after"),
    "method": lambda v: v is None or isinstance(v, str),
    "path": lambda v: isinstance(v, str),
    "exact": lambda v: isinstance(v, bool),
    "field": lambda v: isinstance(v, dict),
    "key": lambda v: v is None or isinstance(v, str),
    "times": lambda v: v is None or (type(v) is int and v > 0),
    "answer": lambda v: v == "drop" or (type(v) is int and 400 <= v <= 599),
    "error": lambda v: isinstance(v, str),
    "cache": lambda v: isinstance(v, bool),
}
_ONLY_FAIL = {"answer", "error", "cache"}


@dataclass(kw_only=True)
class Rule:
    """One fault and the requests that it strikes."""

    id: str
    rule: str
    when: str = "before"
    method: str | None = "POST"
    path: str = "/"
    exact: bool = False
    field: Json = field(default_factory=dict[str, Any])
    key: str | None = None
    times: int | None = 1
    answer: int | str = 500
    error: str = "fault"
    cache: bool = False
    struck: int = 0

    def matches(self, request: Request) -> bool:
        """Say whether the rule has something left for this request."""
        return (
            (self.times is None or self.struck < self.times)
            and self.method in (None, request.method)
            and (request.path == self.path if self.exact else request.path.startswith(self.path))
            and self.key in (None, request.key)
            and all(name in request.body and request.body[name] == v for name, v in self.field.items())
        )

    def body(self) -> Json:
        """The error body of a `fail` rule that answers."""
        return {"error": {"code": self.error, "message": f"Asked for by {self.id}."}}


class Rules:
    """The rules in force, in the order in which they were made; they end with the process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._rules: list[Rule] = []

    def add(self, spec: Json) -> Json:
        """Put a rule in force.

        Raises:
            Refusal: 422, for an unknown field or value: a misspelt rule must not pass for one that never
            strikes.
        """
        for name, value in spec.items():
            if name not in _FIELDS or not _FIELDS[name](value):
                raise Refusal(422, "bad_rule", f"No rule has {name!r} = {value!r}.")
        kind = spec.get("rule")
        if kind is None:
            raise Refusal(422, "bad_rule", "A rule needs 'rule': hold, land_late or fail.")
        if (kind != "fail" and _ONLY_FAIL & spec.keys()) or (kind == "land_late" and "when" in spec):
            raise Refusal(422, "bad_rule", f"A {kind} rule takes no such field as one of {sorted(spec)}.")
        # What came out of an execution is what a key caches; what came before one is not.
        cache = spec.get("cache", spec.get("when") == "after" and spec.get("answer", 500) != "drop")
        if cache and spec.get("answer") == "drop":
            raise Refusal(422, "bad_rule", "A dropped answer cannot be cached.")
        with self._lock:
            fields: Json = {**spec, "id": f"rule_{next(self._numbers)}", "cache": cache}
            rule = Rule(**fields)
            self._rules.append(rule)
            return dict(vars(rule))

    def take(self, holding: bool, when: str, request: Request) -> Rule | None:
        """Return the first rule of that sort and stage that strikes this request; count the strike."""
        with self._lock:
            for rule in self._rules:
                if (rule.rule != "fail") == holding and rule.when == when and rule.matches(request):
                    rule.struck += 1
                    return rule
        return None

    def all(self) -> list[Json]:
        """Return the rules, each with how often it has struck."""
        with self._lock:
            return [dict(vars(rule)) for rule in self._rules]

    def reset(self) -> None:
        """Drop every rule. What is held stays held."""
        with self._lock:
            self._rules.clear()


@dataclass(kw_only=True, eq=False)
class Held:
    """A request that stands still until it is released."""

    connection: socket.socket
    request: Request
    rule: Rule
    dropped: bool
    go: threading.Event = field(default_factory=threading.Event)

    def gone(self) -> bool:
        """Say whether the client can no longer hear an answer, as far as the kernel knows by now."""
        if self.dropped:
            return True
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def describe(self) -> Json:
        """The request as `GET /control/held` shows it."""
        return {
            "request": self.request.seq, "rule": self.rule.id, "when": self.rule.when,
            "method": self.request.method, "path": self.request.path, "key": self.request.key,
            "body": self.request.body, "gone": self.gone(),
        }  # fmt: skip


class Traffic:
    """Which connections have a request under way and which requests are held.

    A connection counts as busy from the moment it is accepted, before its thread runs and its bytes are read:
    a request that a dead client left in the kernel's queue is known of as soon as a later connection is
    served.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy: set[socket.socket] = set()
        self._held: list[Held] = []

    def busy(self, connection: socket.socket) -> None:
        """A request is on its way through this connection."""
        with self._changed:
            self._busy.add(connection)

    def idle(self, connection: socket.socket) -> None:
        """It is answered, or will never be."""
        with self._changed:
            self._busy.discard(connection)
            self._changed.notify_all()

    def park(self, held: Held, standing: Callable[[], None] | None = None) -> None:
        """Stand still until released; call `standing` when everybody can see that it does."""
        with self._changed:
            self._busy.discard(held.connection)
            self._held.append(held)
            self._changed.notify_all()
        if standing is not None:
            standing()
        held.go.wait()

    def release(self, *, rule: str | None, key: str | None, count: int | None, timeout: float) -> Json:
        """Let held requests go, oldest first, and return once each is through or held again."""
        with self._changed:
            matching = [h for h in self._held if rule in (None, h.rule.id) and key in (None, h.request.key)]
            chosen = matching[:count]
            for held in chosen:
                self._held.remove(held)
                self._busy.add(held.connection)
                held.go.set()
            connections = {held.connection for held in chosen}
            through = self._changed.wait_for(lambda: not connections & self._busy, timeout)
            return {"released": [held.request.seq for held in chosen], "through": through}

    def held(self, *, wait: int, timeout: float) -> Json:
        """Return what is held, waiting until it is at least `wait` requests."""
        with self._changed:
            reached = self._changed.wait_for(lambda: len(self._held) >= wait, timeout)
            return {"held": [held.describe() for held in self._held], "reached": reached}

    def quiet(self, *, timeout: float) -> Json:
        """Wait until no request is under way but held ones."""
        with self._changed:
            return {"quiet": self._changed.wait_for(lambda: not self._busy, timeout)}
