"""What the client says to the demo service and hears from it, as plain values: no I/O here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

__all__ = ["Answer", "Call", "HTTPStatusError", "nothing_happened"]

Json = dict[str, Any]


class HTTPStatusError(Exception):
    """The service answered with an error.

    Attributes:
        status: The HTTP status.
        body: The JSON body, `{"error": {"code", "message"}}`.
        code: The error's code, such as `card_declined`.
    """

    def __init__(self, status: int, body: Json) -> None:
        error: Json = body.get("error", {})
        super().__init__(f"{status} {error.get('code')}: {error.get('message')}")
        self.status = status
        self.body = body
        self.code: str = error.get("code", "")


def nothing_happened(error: BaseException) -> bool:
    """Say whether this error proves that the request had no effect and will have none; for `not_applied=`.

    True for 4xx answers but 408, 409, 423, 425 and 499 (another request under the same key may yet land), and
    for a refused connection. Timeouts, broken connections and 5xx prove nothing.
    """
    if isinstance(error, HTTPStatusError):
        return 400 <= error.status < 500 and error.status not in (408, 409, 423, 425, 499)
    return isinstance(error, ConnectionRefusedError)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back: status, JSON body, and whether it was replayed from the key's stored answer."""

    status: int
    body: Any
    replayed: bool

    def ok(self) -> Any:
        """Return the body of a 2xx answer.

        Raises:
            HTTPStatusError: For any other.
        """
        if not 200 <= self.status < 300:
            raise HTTPStatusError(self.status, self.body)
        return self.body


class Call(NamedTuple):
    """One request, before it is sent."""

    method: str
    path: str
    body: Json | None = None
    key: str | None = None
    timeout: float | None = None  # None: the client's


# -- what each operation sends, once for its sync and its async form -------------------------------------


def charge(customer: str, amount: int, currency: str | None, key: str | None) -> Call:
    body: Json = {"customer": customer, "amount": amount}
    return Call("POST", "/charges", body if currency is None else {**body, "currency": currency}, key)


def refund(charge_id: str, amount: int | None, key: str | None) -> Call:
    body: Json = {"charge_id": charge_id}
    return Call("POST", "/refunds", body if amount is None else {**body, "amount": amount}, key)


def book(kind: str, details: Json, key: str | None) -> Call:
    return Call("POST", "/bookings", {**details, "kind": kind}, key)


def cancel(booking_id: str, key: str | None) -> Call:
    return Call("POST", f"/bookings/{quote(booking_id, safe='')}/cancel", {}, key)


def mail(to: str, subject: str, key: str | None) -> Call:
    return Call("POST", "/mails", {"to": to, "subject": subject}, key)


def transfer(source: str, target: str, amount: int, key: str | None) -> Call:
    return Call("POST", "/transfers", {"source": source, "target": target, "amount": amount}, key)


def lookup(key: str) -> Call:
    return Call("GET", f"/keys/{quote(key, safe='')}")


def cancel_key(cancelled: str, key: str | None) -> Call:
    return Call("POST", f"/keys/{quote(cancelled, safe='')}/cancel", {}, key)


def find(collection: str, key: str | None) -> Call:
    return Call("GET", f"/{collection}" + ("" if key is None else f"?key={quote(key, safe='')}"))


def rule(rule: str, path: str, given: Json) -> Call:
    # None in `times`, `method` and `key` is a value of its own; elsewhere it means: the service's default.
    kept = {n: v for n, v in given.items() if v is not None or n in ("times", "method", "key")}
    return Call("POST", "/control/rules", {"rule": rule, "path": path, **kept})


def held(count: int, timeout: float) -> Call:
    return Call("GET", f"/control/held?wait={count}&timeout={timeout}", timeout=timeout + 5)


def release(rule: str | None, key: str | None, count: int | None, timeout: float) -> Call:
    body: Json = {"rule": rule, "key": key, "count": count, "timeout": timeout}
    return Call("POST", "/control/release", body, timeout=timeout + 5)


def quiet(timeout: float) -> Call:
    return Call("GET", f"/control/quiet?timeout={timeout}", timeout=timeout + 5)


# -- the wire ---------------------------------------------------------------------------------------------


def encode(call: Call, address: tuple[str, int]) -> bytes:
    """Return the bytes of a request that closes its connection after the answer."""
    payload = b"" if call.body is None else json.dumps(call.body).encode()
    head = [
        f"{call.method} {call.path} HTTP/1.1",
        f"Host: {address[0]}:{address[1]}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(payload)}",
    ]
    if call.key is not None:
        if not call.key.isascii() or not call.key.isprintable():
            raise ValueError("An idempotency key is printable ASCII.")
        head.append(f"Idempotency-Key: {call.key}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + payload


def decode(raw: bytes) -> Answer:
    """Return the answer in all that the service sent until it closed the connection.

    Raises:
        ConnectionResetError: It is not complete.
    """
    head, separator, payload = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if not separator or len(payload) != int(headers["content-length"]):
        raise ConnectionResetError("The service closed the connection before its answer was complete.")
    replayed = headers.get("idempotent-replayed") == "true"
    return Answer(status=int(first.split(" ")[1]), body=json.loads(payload), replayed=replayed)
