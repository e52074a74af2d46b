"""A client of the demo service, sync and async, and `Service`, which runs it in a process of its own.

Every call opens one connection and sends one request: nothing is retried, so what the client hears about a
request is all that anybody knows of it. A cancelled async call closes its connection at once; the effect may
land all the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

from agent_saga_core.demo import calls
from agent_saga_core.demo.calls import Answer, Call, HTTPStatusError, decode, encode, nothing_happened

__all__ = ["Answer", "Client", "HTTPStatusError", "Service", "nothing_happened"]

Json = dict[str, Any]


def _reached(body: Json, flag: str, what: str) -> Json:
    if not body[flag]:
        raise TimeoutError(what)
    return body


class Client:
    """Talks to one service; holds no connection, so it may be shared by threads, loops and forked children.

    Methods that begin with `a` are the async forms. Each returns the body of a 2xx answer and raises
    `HTTPStatusError` for another one, `TimeoutError` if no whole answer came in time, and `ConnectionError`
    if the connection could not be made (then `ConnectionRefusedError`) or broke.

    Args:
        url: As the service printed it.
        timeout: Seconds for one whole request and answer.
    """

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise ValueError(f"{url!r} is no URL of the demo service; it looks like http://127.0.0.1:8000.")
        self.url = url
        self.timeout = timeout
        self._address = (parts.hostname, parts.port)

    # -- any request -------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Send one request and return its answer, whatever its status."""
        return self._send(Call(method, path, body, key, timeout))

    async def arequest(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Send one request and return its answer, whatever its status."""
        return await self._asend(Call(method, path, body, key, timeout))

    def _send(self, call: Call) -> Answer:
        deadline = time.monotonic() + (self.timeout if call.timeout is None else call.timeout)
        request = encode(call, self._address)
        chunks: list[bytes] = []
        try:
            with socket.create_connection(self._address, timeout=_left(deadline)) as connection:
                connection.sendall(request)
                while True:
                    connection.settimeout(_left(deadline))
                    chunk = connection.recv(65536)
                    if not chunk:
                        return decode(b"".join(chunks))
                    chunks.append(chunk)
        except (TimeoutError, ConnectionError):
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from error

    async def _asend(self, call: Call) -> Answer:
        request = encode(call, self._address)
        try:
            async with asyncio.timeout(self.timeout if call.timeout is None else call.timeout):
                reader, writer = await asyncio.open_connection(*self._address)
                try:
                    writer.write(request)
                    raw = await reader.read()
                finally:
                    writer.transport.abort()
                return decode(raw)
        except (TimeoutError, ConnectionError):
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from error

    # -- operations --------------------------------------------------------------------------------------

    def charge(self, customer: str, amount: int, *, currency: str | None = None, key: str | None = None) -> Json:
        """Charge a customer; `cus_declined` is declined with 402."""
        return self._send(calls.charge(customer, amount, currency, key)).ok()

    async def acharge(self, customer: str, amount: int, *, currency: str | None = None, key: str | None = None) -> Json:
        """See `charge`."""
        return (await self._asend(calls.charge(customer, amount, currency, key))).ok()

    def refund(self, charge_id: str, amount: int | None = None, *, key: str | None = None) -> Json:
        """Refund `amount`, or all that is left of a charge."""
        return self._send(calls.refund(charge_id, amount, key)).ok()

    async def arefund(self, charge_id: str, amount: int | None = None, *, key: str | None = None) -> Json:
        """See `refund`."""
        return (await self._asend(calls.refund(charge_id, amount, key))).ok()

    def book(self, kind: Literal["flight", "hotel"], *, key: str | None = None, **details: Any) -> Json:
        """Book a flight or a hotel; `details` come back in the booking."""
        return self._send(calls.book(kind, details, key)).ok()

    async def abook(self, kind: Literal["flight", "hotel"], *, key: str | None = None, **details: Any) -> Json:
        """See `book`."""
        return (await self._asend(calls.book(kind, details, key))).ok()

    def cancel(self, booking_id: str, *, key: str | None = None) -> Json:
        """Cancel a booking; 409 if it is cancelled already."""
        return self._send(calls.cancel(booking_id, key)).ok()

    async def acancel(self, booking_id: str, *, key: str | None = None) -> Json:
        """See `cancel`."""
        return (await self._asend(calls.cancel(booking_id, key))).ok()

    def mail(self, to: str, subject: str, *, key: str | None = None) -> Json:
        """Send a mail. Sent stays sent."""
        return self._send(calls.mail(to, subject, key)).ok()

    async def amail(self, to: str, subject: str, *, key: str | None = None) -> Json:
        """See `mail`."""
        return (await self._asend(calls.mail(to, subject, key))).ok()

    def transfer(self, source: str, target: str, amount: int, *, key: str | None = None) -> Json:
        """Move money between two accounts; from `acc_empty` it is refused with 402."""
        return self._send(calls.transfer(source, target, amount, key)).ok()

    async def atransfer(self, source: str, target: str, amount: int, *, key: str | None = None) -> Json:
        """See `transfer`."""
        return (await self._asend(calls.transfer(source, target, amount, key))).ok()

    def cancel_key(self, cancelled: str, *, key: str | None = None) -> Json:
        """Undo what landed under the key `cancelled`, or make sure that nothing ever does.

        Returns:
            `{"key", "outcome": "reversed" | "nothing_left" | "tombstoned", "reversal": id or None}`.
        """
        return self._send(calls.cancel_key(cancelled, key)).ok()

    async def acancel_key(self, cancelled: str, *, key: str | None = None) -> Json:
        """See `cancel_key`."""
        return (await self._asend(calls.cancel_key(cancelled, key))).ok()

    def lookup(self, key: str) -> Json:
        """Return what is known of a key: `landed`, `in_flight`, `tombstone`, `status`, `body` and more."""
        return self._send(calls.lookup(key)).ok()

    async def alookup(self, key: str) -> Json:
        """See `lookup`."""
        return (await self._asend(calls.lookup(key))).ok()

    def find(self, collection: str, *, key: str | None = None) -> list[Json]:
        """Return the resources of a collection, such as `charges`; with `key`, those made under it."""
        return self._send(calls.find(collection, key)).ok()["data"]

    async def afind(self, collection: str, *, key: str | None = None) -> list[Json]:
        """See `find`."""
        return (await self._asend(calls.find(collection, key))).ok()["data"]

    def ledger(self) -> Json:
        """Return everything that happened: see `docs/demo-service.md`."""
        return self._send(Call("GET", "/ledger")).ok()

    async def aledger(self) -> Json:
        """See `ledger`."""
        return (await self._asend(Call("GET", "/ledger"))).ok()

    def summary(self) -> Json:
        """Return what is left behind."""
        return self._send(Call("GET", "/ledger/summary")).ok()

    async def asummary(self) -> Json:
        """See `summary`."""
        return (await self._asend(Call("GET", "/ledger/summary"))).ok()

    # -- control -----------------------------------------------------------------------------------------

    def hold(
        self, path: str, *, when: Literal["before", "after"] = "before", times: int | None = 1,
        method: str | None = "POST", exact: bool = False, field: Json | None = None, key: str | None = None,
    ) -> str:  # fmt: skip
        """Hold matching requests before their effect, or after it and before the answer, until `release`.

        Args:
            path: Prefix of the paths that match; the whole path with `exact`.
            when: On which side of the effect.
            times: How many requests; None for all.
            method: None for any.
            exact: Compare whole paths, so that `/bookings` leaves `/bookings/bk_1/cancel` alone.
            field: Values that the request's body must have.
            key: The idempotency key that it must have.

        Returns:
            The rule's id.
        """
        given: Json = {
            "when": when,
            "times": times,
            "method": method,
            "exact": exact,
            "field": field,
            "key": key,
        }
        return self._send(calls.rule("hold", path, given)).ok()["id"]

    def land_late(
        self, path: str, *, times: int | None = 1, method: str | None = "POST", exact: bool = False,
        field: Json | None = None, key: str | None = None,
    ) -> str:  # fmt: skip
        """Drop the connection of matching requests at once, and let their effect happen when released."""
        given: Json = {"times": times, "method": method, "exact": exact, "field": field, "key": key}
        return self._send(calls.rule("land_late", path, given)).ok()["id"]

    def fail(
        self, path: str, *, when: Literal["before", "after"] = "before", answer: int | Literal["drop"] = 500,
        error: str = "fault", cache: bool | None = None, times: int | None = 1, method: str | None = "POST",
        exact: bool = False, field: Json | None = None, key: str | None = None,
    ) -> str:  # fmt: skip
        """Fail matching requests before their effect, which then never happens, or after it.

        Args:
            path: See `hold`, as for the arguments not named here.
            when: On which side of the effect.
            answer: The status to answer with (400 to 599), or "drop" to close without an answer.
            error: The code in the error body.
            cache: Whether the key remembers this error instead of the true answer. By default it does for an
                error after the effect, as real services do, and not for one before it.
            times: See `hold`.
            method: See `hold`.
            exact: See `hold`.
            field: See `hold`.
            key: See `hold`.

        Returns:
            The rule's id.
        """
        given: Json = {
            "when": when, "answer": answer, "error": error, "cache": cache, "times": times,
            "method": method, "exact": exact, "field": field, "key": key,
        }  # fmt: skip
        return self._send(calls.rule("fail", path, given)).ok()["id"]

    def rules(self) -> list[Json]:
        """Return the rules in force, each with how often it has `struck`."""
        return self._send(Call("GET", "/control/rules")).ok()["rules"]

    def reset(self) -> None:
        """Remove every rule. What is held stays held."""
        self._send(Call("POST", "/control/reset")).ok()

    def wait_held(self, count: int = 1, *, timeout: float = 30.0) -> list[Json]:
        """Return the held requests once there are `count`; `gone` in each says whether its client is.

        Raises:
            TimeoutError: They did not come.
        """
        body = self._send(calls.held(count, timeout)).ok()
        return _reached(body, "reached", f"Fewer than {count} requests are held.")["held"]

    async def await_held(self, count: int = 1, *, timeout: float = 30.0) -> list[Json]:
        """See `wait_held`."""
        body = (await self._asend(calls.held(count, timeout))).ok()
        return _reached(body, "reached", f"Fewer than {count} requests are held.")["held"]

    def release(
        self, *, rule: str | None = None, key: str | None = None, count: int | None = None, timeout: float =
        30.0
    ) -> list[int]:  # fmt: skip
        """Let held requests go, oldest first; return their numbers once each is through or held again.

        Raises:
            TimeoutError: They were let go, and did not get through.
        """
        body = self._send(calls.release(rule, key, count, timeout)).ok()
        return _reached(body, "through", "Released requests did not get through.")["released"]

    async def arelease(
        self, *, rule: str | None = None, key: str | None = None, count: int | None = None, timeout: float =
        30.0
    ) -> list[int]:  # fmt: skip
        """See `release`."""
        body = (await self._asend(calls.release(rule, key, count, timeout))).ok()
        return _reached(body, "through", "Released requests did not get through.")["released"]

    def wait_quiet(self, *, timeout: float = 30.0) -> None:
        """Return once no request is under way but held ones; those of dead clients count too.

        Raises:
            TimeoutError: Some still are.
        """
        _reached(self._send(calls.quiet(timeout)).ok(), "quiet", "Requests are still under way.")

    async def await_quiet(self, *, timeout: float = 30.0) -> None:
        """See `wait_quiet`."""
        _reached((await self._asend(calls.quiet(timeout))).ok(), "quiet", "Requests are still under way.")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class Service:
    """The demo service as a child process; leaving the `with` block ends it.

    It runs in a session of its own, so that Ctrl-C in a terminal interrupts the agent and not the world it
    acted on. It ends when this process does, however that dies; a forked child that lives on keeps it alive.
    Its port is reserved for as long as the object lives: after `kill` connections are refused, and after
    `restart` the same URL works.

    Attributes:
        url: Where it listens; the same after `restart`.
        pid: Its process id; another after `restart`.
        db: The ledger's file.
    """

    def __init__(self, db: str | os.PathLike[str] | None, ready_timeout: float) -> None:
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        if db is None:
            self._directory = tempfile.TemporaryDirectory(prefix="agent-saga-demo-")
            db = os.path.join(self._directory.name, "ledger.db")
        self.db = os.fspath(db)
        self._ready_timeout = ready_timeout
        # Bound, with SO_REUSEADDR and never listening: on Linux the child can bind and listen beside it, and
        # nobody is given the port while the child is down. Elsewhere the port may be lost to another process
        # by a restart.
        self._reservation = socket.socket()
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("127.0.0.1", 0))
        self._port: int = self._reservation.getsockname()[1]
        if sys.platform != "linux":
            self._reservation.close()
        self.url = ""
        self.pid = 0
        try:
            self._process = self._spawn()
        except BaseException:
            self._release()
            raise

    @classmethod
    def start(cls, db: str | os.PathLike[str] | None = None, *, ready_timeout: float = 30.0) -> Service:
        """Start the service and return when it takes requests.

        Args:
            db: The ledger's file, kept afterwards; None for a temporary one.
            ready_timeout: Seconds that it may take.

        Raises:
            TimeoutError: It did not get ready in time.
            RuntimeError: It ended instead; it said why on stderr.
        """
        return cls(db, ready_timeout)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "agent_saga_core.demo.service", "--exit-with-parent"]
        process = subprocess.Popen(
            [*command, "--port", str(self._port), "--db", self.db],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            ready = json.loads(_first_line(process, self._ready_timeout))
        except BaseException:
            _end(process, force=True)
            raise
        self.url, self.pid = ready["url"], ready["pid"]
        return process

    def client(self, timeout: float = 10.0) -> Client:
        """Return a client of this service."""
        return Client(self.url, timeout)

    def kill(self) -> None:
        """Kill it as `kill -9` does; the ledger stays, what was held is forgotten."""
        _end(self._process, force=True)

    def restart(self) -> None:
        """Kill it if it runs, and start it again on the same ledger and URL. Rules are gone."""
        self.kill()
        self._process = self._spawn()

    def stop(self) -> None:
        """End it; harmless when it has ended."""
        _end(self._process, force=False)
        self._release()

    def _release(self) -> None:
        self._reservation.close()
        if self._directory is not None:
            self._directory.cleanup()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _first_line(process: subprocess.Popen[bytes], timeout: float) -> bytes:
    assert process.stdout is not None
    deadline = time.monotonic() + timeout
    line = b""
    with selectors.DefaultSelector() as selector:  # `select` knows no descriptor from 1024 on
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"The demo service was not ready within {timeout} s.")
            chunk = os.read(process.stdout.fileno(), 4096)
            if not chunk:
                raise RuntimeError(f"The demo service ended with {process.wait()} before it was ready.")
            line += chunk
    return line


def _end(process: subprocess.Popen[bytes], *, force: bool) -> None:
    if process.poll() is None:
        process.kill() if force else process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
