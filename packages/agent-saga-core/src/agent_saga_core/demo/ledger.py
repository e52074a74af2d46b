"""The ledger of the demo service: one SQLite file that says what really happened, and in which order.

One connection behind one lock, rather than a pool over WAL readers: the journal's order *is* the order of
commits, so a reader that sees an effect sees everything before it, and a test that compares sequence numbers
compares history. `synchronous=OFF` loses nothing when the process is killed (the kernel has the pages); it
does when the machine dies, which a demo does not promise to survive.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Effect", "Json", "KeyState", "Ledger", "Refusal", "Request"]

Json = dict[str, Any]

PREFIXES = {
    "charge": "ch",
    "refund": "re",
    "booking": "bk",
    "cancellation": "cn",
    "mail": "ml",
    "transfer": "tr",
}

SCHEMA = """
CREATE TABLE IF NOT EXISTS journal (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    entry TEXT NOT NULL,                    -- request | effect | tombstone
    request INTEGER,                        -- seq of the request that caused it; NULL for requests themselves
    key TEXT, method TEXT, path TEXT, body TEXT,
    outcome TEXT, status INTEGER, fault TEXT,
    kind TEXT, id TEXT
);
CREATE TABLE IF NOT EXISTS resources (
    kind TEXT NOT NULL, n INTEGER NOT NULL, id TEXT NOT NULL UNIQUE,
    seq INTEGER NOT NULL, request INTEGER NOT NULL, key TEXT, body TEXT NOT NULL,
    PRIMARY KEY (kind, n)
);
CREATE INDEX IF NOT EXISTS resources_by_key ON resources (key);
CREATE TABLE IF NOT EXISTS keys (
    key TEXT PRIMARY KEY,
    fingerprint TEXT,                       -- NULL when no request under this key was ever answered
    status INTEGER, body TEXT,
    kind TEXT, id TEXT,                     -- the effect that landed under it, if one did
    cancelled TEXT                          -- reversed | nothing_left | tombstoned
);
"""


class Refusal(Exception):
    """The service's answer is an error; nothing was written for it.

    Attributes:
        status: The HTTP status.
        code: A word that programs compare.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> Json:
        """The JSON body of the answer."""
        return {"error": {"code": self.code, "message": str(self)}}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client asked for, as far as keys, rules and the journal look at it."""

    method: str
    path: str
    key: str | None
    body: Json
    seq: int = 0
    """Its place in the journal; 0 before it has one."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The answer of an operation that succeeded, and what it changed."""

    body: Json
    kind: str | None = None
    id: str | None = None


@dataclass(frozen=True, kw_only=True)
class KeyState:
    """What the ledger knows of one idempotency key."""

    fingerprint: str | None
    status: int | None
    body: Json | None
    kind: str | None
    id: str | None
    cancelled: str | None


class Ledger:
    """The service's books. All methods but `transaction` and `close` are called inside `transaction`."""

    def __init__(self, path: str) -> None:
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
        # Exclusive: a second service on the same file must fail at its start, not share ids with this one.
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.executescript(SCHEMA)

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Hold the ledger alone; commit at the end, roll back on an exception."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the file and keep everybody out for good: threads that still serve block rather than fail."""
        self._lock.acquire()
        self._db.close()

    # -- the journal -------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> int:
        """Enter a request into the journal and return its sequence number."""
        cursor = self._db.execute(
            "INSERT INTO journal (entry, method, path, key, body) VALUES ('request', ?, ?, ?, ?)",
            (request.method, request.path, request.key, json.dumps(request.body)),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def decide(self, seq: int, outcome: str, status: int | None, fault: str | None = None) -> None:
        """Note beside request `seq` what became of it and which rule, if any, spoilt its answer."""
        self._db.execute(
            "UPDATE journal SET outcome = ?, status = ?, fault = ? WHERE seq = ?",
            (outcome, status, fault, seq),
        )

    def _enter(self, entry: str, request: Request, kind: str | None, id: str | None) -> int:
        cursor = self._db.execute(
            "INSERT INTO journal (entry, request, key, kind, id) VALUES (?, ?, ?, ?, ?)",
            (entry, request.seq, request.key, kind, id),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    # -- resources ---------------------------------------------------------------------------------------

    def _create(self, request: Request, kind: str, fields: Json) -> Json:
        (last,) = self._db.execute("SELECT max(n) FROM resources WHERE kind = ?", (kind,)).fetchone()
        n = (last or 0) + 1
        id = f"{PREFIXES[kind]}_{n}"
        seq = self._enter("effect", request, kind, id)
        body = {"id": id, **fields}
        self._db.execute(
            "INSERT INTO resources (kind, n, id, seq, request, key, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (kind, n, id, seq, request.seq, request.key, json.dumps(body)),
        )
        return body

    def _rewrite(self, body: Json) -> None:
        self._db.execute("UPDATE resources SET body = ? WHERE id = ?", (json.dumps(body), body["id"]))

    def get(self, kind: str, id: str) -> Json:
        """Return one resource as it is now; `Refusal` 404 if there is none of that kind and id."""
        row = self._db.execute("SELECT body FROM resources WHERE kind = ? AND id = ?", (kind, id)).fetchone()
        if row is None:
            raise Refusal(404, "not_found", f"There is no {kind} {id!r}.")
        return json.loads(row[0])

    def find(self, kind: str, key: str | None = None) -> list[Json]:
        """Return the resources of a kind, oldest first, each with its key and place in the journal."""
        rows = self._db.execute(
            "SELECT body, key, seq, request FROM resources WHERE kind = ? AND (? IS NULL OR key = ?) ORDER BY n",
            (kind, key, key),
        )
        return [{**json.loads(body), "key": k, "seq": seq, "request": req} for body, k, seq, req in rows]

    # -- operations --------------------------------------------------------------------------------------

    def charge(self, request: Request, customer: str, amount: int, currency: str) -> Effect:
        """Take money from a customer; `cus_declined` has none."""
        if customer == "cus_declined":
            raise Refusal(402, "card_declined", "The card was declined.")
        fields = {
            "customer": customer, "amount": amount, "currency": currency,
            "captured": amount, "refunded": 0, "status": "succeeded",
        }  # fmt: skip
        body = self._create(request, "charge", fields)
        return Effect(body=body, kind="charge", id=body["id"])

    def refund(self, request: Request, charge_id: str, amount: int | None) -> Effect:
        """Give back `amount`, or all that is left of a charge."""
        charge = self.get("charge", charge_id)
        left = charge["captured"] - charge["refunded"]
        if left == 0:
            raise Refusal(409, "already_refunded", f"{charge_id} is refunded already.")
        if amount is not None and amount > left:
            raise Refusal(409, "over_refund", f"Only {left} is left of {charge_id}.")
        amount = left if amount is None else amount
        fields: Json = {"charge_id": charge_id, "amount": amount, "status": "succeeded"}
        body = self._create(request, "refund", fields)
        charge["refunded"] += amount
        charge["status"] = "refunded" if charge["refunded"] == charge["captured"] else "partially_refunded"
        self._rewrite(charge)
        return Effect(body=body, kind="refund", id=body["id"])

    def book(self, request: Request, kind: str, details: Json) -> Effect:
        """Book a flight or a hotel."""
        body = self._create(request, "booking", {**details, "kind": kind, "status": "booked"})
        return Effect(body=body, kind="booking", id=body["id"])

    def cancel_booking(self, request: Request, booking_id: str) -> Effect:
        """Cancel a booking that is still open and return it."""
        booking = self.get("booking", booking_id)
        if booking["status"] == "cancelled":
            raise Refusal(409, "already_cancelled", f"{booking_id} is cancelled already.")
        cancellation = self._create(request, "cancellation", {"booking_id": booking_id})
        booking["status"] = "cancelled"
        self._rewrite(booking)
        return Effect(body=booking, kind="cancellation", id=cancellation["id"])

    def mail(self, request: Request, to: str, subject: str) -> Effect:
        """Send a mail. There is no way back."""
        body = self._create(request, "mail", {"to": to, "subject": subject, "status": "sent"})
        return Effect(body=body, kind="mail", id=body["id"])

    def transfer(self, request: Request, source: str, target: str, amount: int, reverses: str | None = None) -> Effect:
        """Move money between accounts, which may go below zero; `acc_empty` may not."""
        if source == "acc_empty" and reverses is None:
            raise Refusal(402, "insufficient_funds", "There is not enough money in the source account.")
        fields = {
            "source": source, "target": target, "amount": amount, "reverses": reverses, "status": "succeeded",
        }  # fmt: skip
        body = self._create(request, "transfer", fields)
        return Effect(body=body, kind="transfer", id=body["id"])

    # -- keys --------------------------------------------------------------------------------------------

    def key(self, key: str) -> KeyState | None:
        """Return what is stored under a key; None if it was neither answered nor cancelled."""
        row = self._db.execute(
            "SELECT fingerprint, status, body, kind, id, cancelled FROM keys WHERE key = ?", (key,)
        ).fetchone()
        if row is None:
            return None
        fingerprint, status, body, kind, id, cancelled = row
        return KeyState(
            fingerprint=fingerprint, status=status, body=None if body is None else json.loads(body),
            kind=kind, id=id, cancelled=cancelled,
        )  # fmt: skip

    def remember(self, key: str, fingerprint: str, status: int, body: Json, effect: Effect | None) -> None:
        """Store the first answer given under a key."""
        kind, id = (None, None) if effect is None else (effect.kind, effect.id)
        self._db.execute(
            "INSERT INTO keys (key, fingerprint, status, body, kind, id) VALUES (?, ?, ?, ?, ?, ?)",
            (key, fingerprint, status, json.dumps(body), kind, id),
        )

    def cancel_key(self, request: Request, key: str) -> Effect:
        """See to it that the effect under `key` is gone or never comes; once."""
        state = self.key(key)
        reversal: str | None = None
        if state is not None and state.cancelled is not None:
            outcome = state.cancelled
        else:
            if state is not None and state.kind is not None:
                reversal = self._reverse(request, state.kind, state.id or "")
                outcome = "reversed" if reversal else "nothing_left"
            else:
                outcome = "tombstoned"
                self._enter("tombstone", request, None, key)
            self._db.execute(
                "INSERT INTO keys (key, cancelled) VALUES (?, ?) "
                "ON CONFLICT (key) DO UPDATE SET cancelled = excluded.cancelled",
                (key, outcome),
            )
        body: Json = {"key": key, "outcome": outcome, "reversal": reversal}
        return Effect(body=body, kind="key_cancel", id=key)

    def _reverse(self, request: Request, kind: str, id: str) -> str | None:
        if kind == "charge":
            charge = self.get("charge", id)
            return self.refund(request, id, None).id if charge["refunded"] < charge["captured"] else None
        if kind == "booking":
            open_ = self.get("booking", id)["status"] == "booked"
            return self.cancel_booking(request, id).id if open_ else None
        if kind == "transfer":
            done = self.get("transfer", id)
            return self.transfer(request, done["target"], done["source"], done["amount"], reverses=id).id
        raise Refusal(409, "irreversible", f"The {kind} {id!r} has landed and cannot be taken back.")

    # -- the truth ---------------------------------------------------------------------------------------

    def journal(self) -> list[Json]:
        """Return all requests, effects and tombstones in their order."""
        requests = ("seq", "entry", "method", "path", "key", "body", "outcome", "status", "fault")
        others = ("seq", "entry", "request", "key", "kind", "id")
        cursor = self._db.execute("SELECT * FROM journal ORDER BY seq")
        names = [column[0] for column in cursor.description]
        entries: list[Json] = []
        for row in cursor:
            whole: Json = dict(zip(names, row, strict=True))
            if whole["body"] is not None:
                whole["body"] = json.loads(whole["body"])
            wanted = requests if whole["entry"] == "request" else others
            entries.append({name: whole[name] for name in wanted})
        return entries

    def balances(self) -> dict[str, int]:
        """Return what the transfers left in every account they touched; the sum is zero."""
        balances: dict[str, int] = {}
        for transfer in self.find("transfer"):
            balances[transfer["source"]] = balances.get(transfer["source"], 0) - transfer["amount"]
            balances[transfer["target"]] = balances.get(transfer["target"], 0) + transfer["amount"]
        return balances

    def everything(self) -> Json:
        """Return the whole ledger. Attempts are requests that asked; the rest is what was done."""
        journal = self.journal()
        posts = [e for e in journal if e["entry"] == "request" and e["method"] == "POST"]

        def attempts(first: str, last: str | None = None) -> list[Json]:
            names = ("seq", "key", "path", "body", "outcome", "status", "fault")
            chosen: list[Json] = []
            for entry in posts:
                parts = entry["path"].strip("/").split("/")
                if parts[0] == first and (parts[-1] == last if last else len(parts) == 1):
                    chosen.append({name: entry[name] for name in names})
            return chosen

        return {
            "charges": self.find("charge"),
            "refund_attempts": [
                {**a, "charge_id": a["body"].get("charge_id"), "amount": a["body"].get("amount")}
                for a in attempts("refunds")
            ],
            "refunds": self.find("refund"),
            "bookings": self.find("booking"),
            "cancellation_attempts": [
                {**a, "booking_id": a["path"].split("/")[2]} for a in attempts("bookings", "cancel")
            ],
            "cancellations": self.find("cancellation"),
            "key_cancel_attempts": attempts("keys", "cancel"),
            "mails": self.find("mail"),
            "transfers": self.find("transfer"),
            "balances": self.balances(),
            "journal": journal,
        }

    def summary(self) -> Json:
        """Return what is left behind: money not given back, bookings open, mails sent, accounts moved."""
        charges = [c for c in self.find("charge") if c["refunded"] < c["captured"]]
        bookings = [b for b in self.find("booking") if b["status"] == "booked"]
        mails = self.find("mail")
        return {
            "charged_net": sum(c["captured"] - c["refunded"] for c in charges),
            "open_charges": len(charges),
            "open_bookings": len(bookings),
            "mails_sent": len(mails),
            "balances": {account: amount for account, amount in self.balances().items() if amount},
            "left": [resource["id"] for resource in (*charges, *bookings, *mails)],
        }
