"""What the demo service's ledger says of one customer: the only witness that no test can argue with."""

from __future__ import annotations

from typing import Any

from agent_saga_core.demo.client import Client

Json = dict[str, Any]


class Ledger:
    """The ledger at one moment."""

    def __init__(self, client: Client) -> None:
        client.wait_quiet()
        self.all = client.ledger()

    def effects(self, customer: str) -> list[Json]:
        """The charges and bookings of a customer, oldest first."""
        made = [found for kind in ("charges", "bookings") for found in self.all[kind] if found["customer"] == customer]
        return sorted(made, key=lambda found: found["seq"])

    def standing(self, customer: str) -> list[Json]:
        return [found for found in self.effects(customer) if found["status"] not in ("refunded", "cancelled")]

    def undos(self, effect: Json) -> list[Json]:
        """Every request that asked for the undoing of an effect, in order."""
        own, key = effect["id"], effect["key"]
        asked = [found for found in self.all["refund_attempts"] if found["charge_id"] == own]
        asked += [found for found in self.all["cancellation_attempts"] if found["booking_id"] == own]
        return sorted(asked + self.voids(key), key=lambda found: found["seq"])

    def voids(self, key: str) -> list[Json]:
        """Every request to cancel a key."""
        return [found for found in self.all["key_cancel_attempts"] if found["path"] == f"/keys/{key}/cancel"]

    def requests(self, key: str) -> list[Json]:
        """Every request that came with a key."""
        return [found for found in self.all["journal"] if found["entry"] == "request" and found["key"] == key]

    def undo_counts(self, customer: str) -> list[int]:
        return [len(self.undos(effect)) for effect in self.effects(customer)]

    def undone_once_each(self, customer: str) -> bool:
        """Whether every effect of the customer was undone, each with requests under one key of which one counted."""
        return all(
            len({found["key"] for found in self.undos(effect)}) == 1
            and [found["outcome"] for found in self.undos(effect)][:1] == ["executed"]
            and all(found["outcome"] == "replayed" for found in self.undos(effect)[1:])
            for effect in self.effects(customer)
        ) and not self.standing(customer)
