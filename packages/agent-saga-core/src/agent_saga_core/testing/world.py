"""Somebody else's system, in memory: it remembers answers by idempotency key, and can be slow to act."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agent_saga_core.declare import Observation

__all__ = ["Charge", "World"]


@dataclass(kw_only=True)
class Charge:
    """One effect in the world."""

    id: str
    amount: int
    key: str
    refunds: list[str] = field(default_factory=list[str])
    """The keys under which money went back: more than one is a loss."""

    @property
    def left(self) -> bool:
        """Whether it still stands."""
        return not self.refunds


class World:
    """A payment provider as engines must expect one.

    The first answer under a key is given again for every later call with that key, errors included, however much has
    been undone meanwhile. A voided key never charges (a tombstone). `queue` holds what has been sent and not yet
    arrived. Nothing here is durable, and nothing knows of sagas.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.charges: dict[str, Charge] = {}
        self.answers: dict[str, Any] = {}
        self.tombstones: set[str] = set()
        self.queue: list[Callable[[], object]] = []
        self.calls: list[tuple[str, str]] = []
        """Every call that arrived: what was asked, and its key."""

    @property
    def left(self) -> list[Charge]:
        """The charges that stand."""
        with self._lock:
            return [charge for charge in self.charges.values() if charge.left]

    def asked(self, what: str) -> list[str]:
        """The keys with which `what` was asked for, in order."""
        with self._lock:
            return [key for name, key in self.calls if name == what]

    def charge(self, amount: int, key: str) -> dict[str, Any]:
        """Take money; returns the charge as the provider describes it."""

        def act() -> dict[str, Any]:
            if key in self.tombstones:
                raise ValueError("voided")
            charge = Charge(id=f"ch_{len(self.charges) + 1}", amount=amount, key=key)
            self.charges[charge.id] = charge
            return {"id": charge.id, "amount": amount}

        return self._answer("charge", key, act)

    def refund(self, charge_id: str, key: str) -> None:
        """Give the money of one charge back."""

        def act() -> None:
            self.charges[charge_id].refunds.append(key)

        self._answer("refund", key, act)

    def void(self, charge_key: str, key: str, *, forbid: bool = True) -> None:
        """Undo whatever was charged under `charge_key`; nothing if nothing was. With `forbid` nothing can be later."""

        def act() -> None:
            if forbid:
                self.tombstones.add(charge_key)
            for charge in self.charges.values():
                if charge.key == charge_key and charge.left:
                    charge.refunds.append(key)

        self._answer("void", key, act)

    def look(self, charge_key: str) -> Observation:
        """What a probe sees of a charge."""
        with self._lock:
            self.calls.append(("look", charge_key))
            for charge in self.charges.values():
                if charge.key == charge_key:
                    return Observation(landed=True, result={"id": charge.id, "amount": charge.amount})
            return Observation(landed=False)

    def deliver(self) -> None:
        """Let what was sent arrive, in order. The answers go to nobody: whoever asked is gone."""
        while self.queue:
            with suppress(Exception):
                self.queue.pop(0)()

    def _answer(self, what: str, key: str, act: Callable[[], Any]) -> Any:
        with self._lock:
            self.calls.append((what, key))
            if key not in self.answers:
                try:
                    self.answers[key] = act()
                except Exception as error:
                    self.answers[key] = error
            answer = self.answers[key]
        if isinstance(answer, Exception):
            raise answer
        return answer
