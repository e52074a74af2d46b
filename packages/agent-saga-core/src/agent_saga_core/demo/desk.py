"""What the demo service decides: a request's way through keys, rules and the ledger. No HTTP here."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import unquote

from agent_saga_core.demo.faults import Held, Rule, Rules, Traffic
from agent_saga_core.demo.ledger import Effect, Json, Ledger, Refusal, Request

__all__ = ["Answer", "Desk", "Line", "error_answer"]

MAX_AMOUNT = 10**12  # sums of it stay exact in every JSON reader
MAX_WAIT = 600.0  # seconds; a long poll that nobody ends must not hold a thread for ever

COLLECTIONS = {
    "charges": "charge", "refunds": "refund", "bookings": "booking", "cancellations": "cancellation",
    "mails": "mail", "transfers": "transfer",
}  # fmt: skip

Operation = Callable[[Ledger, Request], Effect]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A status and a JSON body."""

    status: int
    body: Any
    replayed: bool = False


class Line(Protocol):
    """The client's end of a request."""

    connection: socket.socket

    def drop(self) -> None:
        """Close the connection without an answer, now."""
        ...


def _text(body: Json, name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise Refusal(422, "bad_input", f"{name!r} must be a string that is not empty.")
    return value


def _amount(body: Json) -> int:
    value = body.get("amount")
    if type(value) is not int or not 0 < value <= MAX_AMOUNT:
        message = f"'amount' must be an integer from 1 to {MAX_AMOUNT}, in the currency's smallest unit."
        raise Refusal(422, "bad_input", message)
    return value


def _charge(body: Json) -> Operation:
    customer, amount = _text(body, "customer"), _amount(body)
    currency = _text({"currency": "usd", **body}, "currency")
    return lambda ledger, request: ledger.charge(request, customer, amount, currency)


def _refund(body: Json) -> Operation:
    charge_id = _text(body, "charge_id")
    amount = None if body.get("amount") is None else _amount(body)
    return lambda ledger, request: ledger.refund(request, charge_id, amount)


def _book(body: Json) -> Operation:
    kind = body.get("kind")
    if kind not in ("flight", "hotel"):
        raise Refusal(422, "bad_input", "'kind' must be 'flight' or 'hotel'.")
    if body.keys() & {"id", "status"}:
        raise Refusal(422, "bad_input", "'id' and 'status' are the service's to give.")
    return lambda ledger, request: ledger.book(request, kind, body)


def _mail(body: Json) -> Operation:
    to, subject = _text(body, "to"), _text(body, "subject")
    return lambda ledger, request: ledger.mail(request, to, subject)


def _transfer(body: Json) -> Operation:
    source, target, amount = _text(body, "source"), _text(body, "target"), _amount(body)
    if source == target:
        raise Refusal(422, "bad_input", "'source' and 'target' must differ.")
    return lambda ledger, request: ledger.transfer(request, source, target, amount)


CREATIONS: dict[str, Callable[[Json], Operation]] = {
    "charges": _charge, "refunds": _refund, "bookings": _book, "mails": _mail, "transfers": _transfer,
}  # fmt: skip


class Desk:
    """Takes requests through keys, rules and the ledger.

    A request is journalled and its key claimed in one transaction; its effect, the journal's entry of it and
    the key's answer are another. So a killed service forgets what was in flight, and never half of an effect.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.rules = Rules()
        self.traffic = Traffic()
        # Written inside ledger transactions only, so that a claim and a stored answer exclude each other.
        self._in_flight: dict[str, Request] = {}

    def serve(self, request: Request, query: dict[str, str], line: Line) -> Answer | None:
        """Answer one request of the domain; None to close the connection without an answer."""
        try:
            operation = self._route(request, query)
        except Refusal as refusal:
            with self.ledger.transaction():
                self.ledger.decide(self.ledger.arrive(request), "invalid", refusal.status)
            return Answer(status=refusal.status, body=refusal.body())
        request, early = self._arrive(request)
        try:
            self._hold("before", request, line)
            if (rule := self.rules.take(False, "before", request)) is not None:
                return self._fail_before(request, rule, claimed=early is None)
            if early is None:
                answer, rule = self._execute(request, operation)
            else:
                answer, rule = early, self.rules.take(False, "after", request)
                if rule is not None:
                    outcome = "replayed" if early.replayed else "refused"
                    with self.ledger.transaction():
                        self.ledger.decide(request.seq, outcome, answer.status, str(rule.answer))
            self._hold("after", request, line)
            return answer if rule is None else _spoilt(rule)
        finally:
            if self._carries(request):  # failed, or the ledger did: whoever comes next may claim the key
                with self.ledger.transaction():
                    self._put_down(request)

    def _route(self, request: Request, query: dict[str, str]) -> Operation:
        parts = request.path.strip("/").split("/")
        match request.method, parts:
            case "POST", [name] if name in CREATIONS:
                return CREATIONS[name](request.body)
            case "POST", ["bookings", id, "cancel"]:
                return lambda ledger, request: ledger.cancel_booking(request, id)
            case "POST", ["keys", key, "cancel"]:
                return lambda ledger, request: ledger.cancel_key(request, unquote(key))
            case "GET", [name] if name in COLLECTIONS:
                kind, wanted = COLLECTIONS[name], query.get("key")
                return lambda ledger, request: Effect(body={"data": ledger.find(kind, wanted)})
            case "GET", [name, id] if name in COLLECTIONS:
                return lambda ledger, request: Effect(body=ledger.get(COLLECTIONS[name], id))
            case "GET", ["keys", key]:
                return lambda ledger, request: Effect(body=self._look_up(unquote(key)))
            case _:
                raise Refusal(404, "no_such_path", f"Nothing answers {request.method} {request.path}.")

    def _arrive(self, request: Request) -> tuple[Request, Answer | None]:
        """Journal the request and claim its key; an answer means that it must not be executed."""
        with self.ledger.transaction():
            request = replace(request, seq=self.ledger.arrive(request))
            if request.key is None:
                return request, None
            answer = self._by_key(request, request.key)
            if answer is None:
                self._in_flight[request.key] = request
            else:
                self.ledger.decide(request.seq, "replayed" if answer.replayed else "refused", answer.status)
            return request, answer

    def _by_key(self, request: Request, key: str) -> Answer | None:
        state = self.ledger.key(key)
        if state is not None and state.cancelled is not None:
            return _cancelled(key)
        flying = self._in_flight.get(key)
        known = state.fingerprint if state is not None else flying and _fingerprint(flying)
        if known is None:
            return None
        if known != _fingerprint(request):
            message = "This idempotency key was used with another method, path or body."
            return error_answer(400, "idempotency_error", message)
        if state is None:
            return error_answer(409, "in_flight", "A request with this idempotency key is in flight.")
        assert state.status is not None
        return Answer(status=state.status, body=state.body, replayed=True)

    def _execute(self, request: Request, operation: Operation) -> tuple[Answer, Rule | None]:
        with self.ledger.transaction():
            state = self.ledger.key(request.key) if request.key is not None else None
            # It was not there on arrival, so it is a tombstone, written while this request was held.
            if state is not None:
                rule = self.rules.take(False, "after", request)
                answer = _cancelled(request.key or "")
                self.ledger.decide(request.seq, "refused", answer.status, rule and str(rule.answer))
            else:
                effect: Effect | None = None
                try:
                    effect = operation(self.ledger, request)
                    created = request.method == "POST" and not request.path.endswith("/cancel")
                    answer = Answer(status=201 if created else 200, body=effect.body)
                except Refusal as refusal:
                    answer = Answer(status=refusal.status, body=refusal.body())
                rule = self.rules.take(False, "after", request)
                stored = answer if rule is None or not rule.cache else _spoilt(rule) or answer
                if request.key is not None:
                    fingerprint = _fingerprint(request)
                    self.ledger.remember(request.key, fingerprint, stored.status, stored.body, effect)
                self.ledger.decide(request.seq, "executed", answer.status, rule and str(rule.answer))
            self._put_down(request)
            return answer, rule

    def _fail_before(self, request: Request, rule: Rule, *, claimed: bool) -> Answer | None:
        answer = _spoilt(rule)
        with self.ledger.transaction():
            if answer is not None and rule.cache and claimed and request.key is not None:
                if self.ledger.key(request.key) is None:
                    self.ledger.remember(request.key, _fingerprint(request), answer.status, answer.body, None)
            self.ledger.decide(request.seq, "failed", answer and answer.status, str(rule.answer))
            self._put_down(request)
        return answer

    def _carries(self, request: Request) -> bool:
        return request.key is not None and self._in_flight.get(request.key) is request

    def _put_down(self, request: Request) -> None:
        if self._carries(request):
            del self._in_flight[request.key or ""]

    def _hold(self, when: str, request: Request, line: Line) -> None:
        rule = self.rules.take(True, when, request)
        if rule is None:
            return
        dropped = rule.rule == "land_late"
        held = Held(connection=line.connection, request=request, rule=rule, dropped=dropped)
        # Dropped only once it is held: a client that hears of the drop may ask for the release at once.
        self.traffic.park(held, line.drop if dropped else None)

    def _look_up(self, key: str) -> Json:
        state, flying = self.ledger.key(key), key in self._in_flight
        found: Json = {
            "key": key, "landed": False, "in_flight": flying, "tombstone": False, "outcome": None,
            "status": None, "body": None, "kind": None, "id": None,
        }  # fmt: skip
        if state is not None:
            found |= {
                "landed": state.kind is not None, "tombstone": state.cancelled is not None,
                "outcome": state.cancelled, "status": state.status, "body": state.body,
                "kind": state.kind, "id": state.id,
            }  # fmt: skip
        return found

    # -- what tests ask, outside keys, rules and journal -------------------------------------------------

    def observe(self, method: str, path: str, query: dict[str, str], body: Json) -> Answer:
        """Answer a request under `/ledger`, `/control` or `/health`."""
        given: Any = query.get("timeout", body.get("timeout", 10.0))
        wait = min(float(given), MAX_WAIT)
        match method, path:
            case "GET", "/health":
                return Answer(status=200, body={"pid": os.getpid()})
            case "GET", "/ledger":
                with self.ledger.transaction():
                    return Answer(status=200, body=self.ledger.everything())
            case "GET", "/ledger/summary":
                with self.ledger.transaction():
                    return Answer(status=200, body=self.ledger.summary())
            case "GET", "/control/rules":
                return Answer(status=200, body={"rules": self.rules.all()})
            case "POST", "/control/rules":
                return Answer(status=201, body=self.rules.add(body))
            case "POST", "/control/reset":
                self.rules.reset()
                return Answer(status=200, body={})
            case "GET", "/control/held":
                count = int(query.get("wait", 0))
                return Answer(status=200, body=self.traffic.held(wait=count, timeout=wait))
            case "POST", "/control/release":
                rule, key, count = body.get("rule"), body.get("key"), body.get("count")
                released = self.traffic.release(rule=rule, key=key, count=count, timeout=wait)
                return Answer(status=200, body=released)
            case "GET", "/control/quiet":
                return Answer(status=200, body=self.traffic.quiet(timeout=wait))
            case _:
                return error_answer(404, "no_such_path", f"Nothing answers {method} {path}.")


def error_answer(status: int, code: str, message: str) -> Answer:
    """Return an answer whose body is an error."""
    return Answer(status=status, body=Refusal(status, code, message).body())


def _cancelled(key: str) -> Answer:
    return error_answer(410, "cancelled", f"Key {key!r} is cancelled; nothing happens under it any more.")


def _spoilt(rule: Rule) -> Answer | None:
    return Answer(status=rule.answer, body=rule.body()) if isinstance(rule.answer, int) else None


def _fingerprint(request: Request) -> str:
    canonical = json.dumps([request.method, request.path, request.body], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
