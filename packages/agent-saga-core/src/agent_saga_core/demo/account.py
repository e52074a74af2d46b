"""What the booking service's ledger says of one customer. Nothing here looks at a saga or at its log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

__all__ = ["Account", "Asked", "money"]

Json = dict[str, Any]


def money(cents: int) -> str:
    """An amount as people read it."""
    return f"{cents / 100:.2f} EUR"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One booking or charge that was asked of the service, and what became of it.

    Attributes:
        what: What was asked for.
        id: What the service made of it; empty if nothing.
        now: `booked`, `cancelled`, `paid`, `refunded`, `refused (STATUS)`, `on its way`, or `forbidden`: not
            landed, and never will, because its key is cancelled.
        paid: Cents that the customer is without because of it.
        undo_requests: How often anybody asked the service to undo it, whatever came of that.
        landed: Place of the effect in the service's journal.
        undone: Place of its reversal there.
    """

    what: str
    id: str
    now: str
    paid: int
    undo_requests: int
    landed: int | None
    undone: int | None


@dataclass(frozen=True, kw_only=True)
class Account:
    """Everything that was asked for one customer, oldest first."""

    customer: str
    asked: tuple[Asked, ...]

    @classmethod
    def of(cls, ledger: Json, customer: str) -> Account:
        """Read one customer's account out of the whole ledger."""
        requests = [
            entry
            for entry in ledger["journal"]
            if entry["entry"] == "request"
            and entry["method"] == "POST"
            and entry["path"] in ("/bookings", "/charges")
            and entry["body"].get("customer") == customer
        ]
        return cls(customer=customer, asked=tuple(_asked(ledger, request) for request in requests))

    @property
    def paid(self) -> int:
        """Cents taken and not given back."""
        return sum(asked.paid for asked in self.asked)

    @property
    def booked(self) -> int:
        """Bookings that stand."""
        return sum(asked.now == "booked" for asked in self.asked)

    @property
    def landed(self) -> tuple[Asked, ...]:
        """Those that had an effect, in the order of the effects."""
        return tuple(sorted((a for a in self.asked if a.landed is not None), key=lambda a: a.landed or 0))

    @property
    def undone(self) -> tuple[Asked, ...]:
        """Those whose effect was reversed, in the order of the reversals."""
        return tuple(sorted((a for a in self.asked if a.undone is not None), key=lambda a: a.undone or 0))

    @property
    def undo_requests(self) -> tuple[int, ...]:
        """How often each effect was asked to be undone, in the order of the effects."""
        return tuple(asked.undo_requests for asked in self.landed)


def _asked(ledger: Json, request: Json) -> Asked:
    if request["path"] == "/charges":
        return _charge(ledger, request)
    return _booking(ledger, request)


def _charge(ledger: Json, request: Json) -> Asked:
    charge = _made_by(ledger["charges"], request)
    what = f"charge {money(request['body']['amount'])}"
    if charge is None:
        return _nothing(ledger, request, what)
    left = charge["captured"] - charge["refunded"]
    attempts = [a for a in ledger["refund_attempts"] if a["charge_id"] == charge["id"]]
    return Asked(
        what=what,
        id=charge["id"],
        now="paid" if left else "refunded",
        paid=left,
        undo_requests=len(attempts) + _key_cancels(ledger, request),
        landed=charge["seq"],
        undone=_last(r["seq"] for r in ledger["refunds"] if r["charge_id"] == charge["id"]),
    )


def _booking(ledger: Json, request: Json) -> Asked:
    booking = _made_by(ledger["bookings"], request)
    what = f"{request['body']['kind']} {request['body']['what']}"
    if booking is None:
        return _nothing(ledger, request, what)
    attempts = [a for a in ledger["cancellation_attempts"] if a["booking_id"] == booking["id"]]
    return Asked(
        what=what,
        id=booking["id"],
        now=booking["status"],
        paid=0,
        undo_requests=len(attempts) + _key_cancels(ledger, request),
        landed=booking["seq"],
        undone=_last(c["seq"] for c in ledger["cancellations"] if c["booking_id"] == booking["id"]),
    )


def _nothing(ledger: Json, request: Json, what: str) -> Asked:
    """A request that has had no effect, so far or for good."""
    tombstones = {entry["id"] for entry in ledger["journal"] if entry["entry"] == "tombstone"}
    if request["outcome"] is not None:
        now = f"refused ({request['status']})"
    else:
        now = "forbidden" if request["key"] in tombstones else "on its way"
    undo_requests = _key_cancels(ledger, request)
    return Asked(what=what, id="", now=now, paid=0, undo_requests=undo_requests, landed=None, undone=None)


def _made_by(resources: list[Json], request: Json) -> Json | None:
    return next((resource for resource in resources if resource["request"] == request["seq"]), None)


def _key_cancels(ledger: Json, request: Json) -> int:
    """Requests to undo, or to forbid, whatever there is under this request's key."""
    key = request["key"]
    cancels = (unquote(attempt["path"].split("/")[2]) for attempt in ledger["key_cancel_attempts"])
    return sum(key is not None and key == cancelled for cancelled in cancels)


def _last(places: Iterable[int]) -> int | None:
    return max(places, default=None)
