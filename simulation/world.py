"""The world outside: somebody else's system, which remembers answers by key and may be late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_saga_core import NotApplied, Observation

__all__ = ["KEY_LIFE", "Ask", "Declined", "Effect", "Paused", "Request", "ServerError", "World"]

KEY_LIFE = 400.0
"""Seconds for which the system remembers an answer: a little longer than the compensators' `key_ttl` promises."""


class Declined(Exception):
    """Refused without effect; every tool here lists it in `not_applied`."""


class Paused(Exception):
    """A framework's own interrupt, raised out of a tool, which is called again from its top."""


class ServerError(Exception):
    """An answer that says nothing about what happened."""


@dataclass(kw_only=True)
class Ask:
    """What a tool, a compensator or a probe wants of the world: user code in the simulation returns one of these."""

    what: str
    key: str
    tool: str = ""
    amount: int = 0
    of: str = ""
    """The effect's id, or the forward key of the call that made it."""


@dataclass(kw_only=True)
class Effect:
    """One thing that happened in the world."""

    id: str
    tool: str
    amount: int
    key: str
    process: str
    undone: list[str] = field(default_factory=list[str])
    """The keys under which it was undone: more than one is a loss."""

    @property
    def stands(self) -> bool:
        """Whether it has not been undone."""
        return not self.undone


@dataclass(kw_only=True)
class Request:
    """An `Ask` on its way: held by the caller, sent, and landed or lost."""

    name: str
    ask: Ask
    process: str
    limit: float
    """Seconds after sending by which it has landed or is lost."""
    state: str = "held"
    lands_by: float = 0.0
    value: Any = None
    error: Callable[[], Exception] | None = None


class World:
    """A provider: one answer per key for as long as keys live, errors included; a voided key never acts."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.answers: dict[str, tuple[float, Any, Callable[[], Exception] | None]] = {}
        self.tombstones: set[str] = set()
        self.harm: list[str] = []
        self.stuck: set[str] = set()
        """Keys whose answer is for ever an error although the effect happened."""

    def of_key(self, key: str) -> Effect | None:
        """The effect made under a forward key."""
        return next((effect for effect in self.effects if effect.key == key), None)

    def standing(self) -> list[Effect]:
        """What has happened and was not undone."""
        return [effect for effect in self.effects if effect.stands]

    def knows(self, key: str, now: float) -> bool:
        """Whether a key's answer is remembered."""
        return key in self.answers and now - self.answers[key][0] <= KEY_LIFE

    def forget_process(self, process: str) -> None:
        """A process is gone, and with it whatever was private to it."""
        for effect in self.effects:
            if effect.tool == "cache" and effect.process == process and effect.stands:
                effect.undone.append("gone with its process")

    def serve(self, request: Request, how: str, now: float) -> None:
        """Let a request land. `how` is `""`, or the way in which it goes wrong."""
        ask = request.ask
        request.state = "landed"
        if how == "stumbles":  # before anything was looked at: not remembered
            request.error = lambda: ServerError("try again later")
            return
        # What is private to a process knows nothing of keys that another process has used.
        key = f"{request.process}: {ask.key}" if "cache" in (ask.tool or ask.of) else ask.key
        if not self.knows(key, now):
            self.answers[key] = (now, *self._act(ask, how, request.process))
        _, request.value, request.error = self.answers[key]

    def _act(self, ask: Ask, how: str, process: str) -> tuple[Any, Callable[[], Exception] | None]:
        if how == "declined" or ask.key in self.tombstones:
            return None, lambda: Declined("no")
        if how == "refused":
            return None, lambda: NotApplied("not now")
        if how == "fails":
            return None, lambda: ServerError("500")
        value = self._forward(ask, process) if ask.what == "act" else self._undo(ask)
        if how == "breaks":
            if ask.what != "act":
                self.stuck.add(ask.key)
            return None, lambda: ServerError("500, after it happened")
        return value, None

    def _forward(self, ask: Ask, process: str) -> dict[str, Any]:
        name = f"{ask.tool}-{len(self.effects) + 1}"
        if ask.tool != "quote":
            self.effects.append(Effect(id=name, tool=ask.tool, amount=ask.amount, key=ask.key, process=process))
        return {"id": name, "amount": ask.amount}

    def _undo(self, ask: Ask) -> None:
        effect = next((e for e in self.effects if ask.of in (e.id, e.key)), None)
        if ask.what == "void":
            self.tombstones.add(ask.of)
        if ask.what in ("refund", "reverse") and (effect is None or not effect.stands):
            self.harm.append(f"{ask.what} of {ask.of} " + ("which never happened" if effect is None else "once more"))
        if effect is not None and (effect.stands or ask.what == "refund"):
            effect.undone.append(ask.key)

    def look(self, ask: Ask) -> Observation:
        """What a probe sees, now."""
        if ask.what == "look undo":
            return Observation(landed=any(ask.key in effect.undone for effect in self.effects))
        effect = self.of_key(ask.key)
        if effect is None:
            if ask.what == "seal":
                self.tombstones.add(ask.key)
            return Observation(landed=False, final=ask.what == "seal")
        result = None if ask.what == "glimpse" else {"id": effect.id, "amount": effect.amount}
        return Observation(landed=True, result=result)
