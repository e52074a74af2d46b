"""The demo service: payments, bookings, mails and transfers, with idempotency keys, tombstones and faults.

`python -m agent_saga_core.demo.service --port 0 --db ledger.db` prints one line, `{"url": ..., "pid": ...}`,
when it takes requests. It stands for somebody else's system: it imports nothing of the engine, and runs in
its own process so that a killed agent leaves behind what it really did. It has no authentication and is for
loopback only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sqlite3
import sys
import threading
import traceback
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from agent_saga_core.demo.desk import Answer, Desk, error_answer
from agent_saga_core.demo.ledger import Json, Ledger, Refusal, Request

__all__ = ["main"]

MAX_BODY = 1 << 20
MAX_KEY = 255


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class Handler(BaseHTTPRequestHandler):
    """One client's connection."""

    connection: socket.socket
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def _listener(self) -> Server:
        assert isinstance(self.server, Server)
        return self.server

    def drop(self) -> None:
        """Close the connection without an answer, now."""
        self.close_connection = True
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client was faster

    def parse_request(self) -> bool:
        """Read the head of a request; its connection is busy from here."""
        self._listener.desk.traffic.busy(self.connection)
        return super().parse_request()

    def do_GET(self) -> None:
        """Answer a GET."""
        self._serve()

    def do_POST(self) -> None:
        """Answer a POST."""
        self._serve()

    def _serve(self) -> None:
        desk = self._listener.desk
        try:
            try:
                answer = self._answer(desk)
            except Refusal as refusal:
                answer = Answer(status=refusal.status, body=refusal.body())
            except ConnectionError:
                raise
            except Exception as error:
                traceback.print_exc()
                answer = error_answer(500, "internal", f"{type(error).__name__}; the service's stderr says more.")
            if answer is None:
                self.drop()
            else:
                self._send(answer)
        except ConnectionError:
            self.close_connection = True  # the client is gone: its affair
        finally:
            desk.traffic.idle(self.connection)

    def _answer(self, desk: Desk) -> Answer | None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        body = self._body()
        if not url.path.startswith("/"):
            raise Refusal(400, "bad_request", "A path begins with a slash.")
        if url.path.split("/")[1] in ("ledger", "control", "health"):
            desk.traffic.idle(self.connection)  # who only looks on is not traffic
            try:
                return desk.observe(self.command, url.path, query, body)
            except (TypeError, ValueError) as error:
                raise Refusal(422, "bad_input", str(error)) from error
        key = self.headers.get("Idempotency-Key") if self.command == "POST" else None
        if key is not None and not 0 < len(key) <= MAX_KEY:
            raise Refusal(422, "bad_input", f"An idempotency key has 1 to {MAX_KEY} characters.")
        return desk.serve(Request(method=self.command, path=url.path, key=key, body=body), query, self)

    def _body(self) -> Json:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True  # where the next request begins is anybody's guess
            raise Refusal(413, "bad_body", f"A body needs a Content-Length of at most {MAX_BODY}.")
        raw = self.rfile.read(int(length))
        if len(raw) < int(length):
            raise ConnectionAbortedError("The client closed before its request was complete.")
        try:
            body = json.loads(raw or b"{}", parse_constant=_no_constant)
        except ValueError as error:
            raise Refusal(400, "bad_json", f"The body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refusal(400, "bad_json", "The body must be a JSON object.")
        return body  # pyright: ignore[reportUnknownVariableType]  # keys of a JSON object are strings

    def _send(self, answer: Answer) -> None:
        payload = json.dumps(answer.body).encode()
        head = [
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase if answer.status in _KNOWN else ''}",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
        ]
        if answer.replayed:
            head.append("Idempotent-Replayed: true")
        if self.close_connection:
            head.append("Connection: close")
        # One write: head and body in two segments would wait for each other's acknowledgement.
        self.wfile.write("\r\n".join(head).encode() + b"\r\n\r\n" + payload)
        self.log_request(answer.status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP, or uses a method that nothing here has."""
        self.close_connection = True
        try:
            self._send(error_answer(int(code), "bad_request", message or HTTPStatus(code).phrase))
        except ConnectionError:
            pass

    def log_message(self, format: str, *args: Any) -> None:
        """Log to stderr, with `--verbose` only."""
        if self._listener.verbose:
            sys.stderr.write(f"{format % args}\n")


_KNOWN = frozenset(HTTPStatus)


class Server(ThreadingHTTPServer):
    """The listener; a thread per connection, all of which end with the process."""

    daemon_threads = True
    request_queue_size = 1024  # with the default of 5 a burst of clients waits for retransmissions

    def __init__(self, address: tuple[str, int], desk: Desk, verbose: bool) -> None:
        self.desk = desk
        self.verbose = verbose
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        """Bind, without the look-up of the host's name that `HTTPServer` does: it may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)  # pyright: ignore[reportArgumentType]
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "localhost", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Count the connection as busy before its thread exists: see `Traffic`."""
        self.desk.traffic.busy(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        super().shutdown_request(request)
        self.desk.traffic.idle(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that are gone; anything else is a bug of this service."""
        if not isinstance(sys.exception(), ConnectionError):
            traceback.print_exc()


def _end_with_stdin() -> None:
    # stdin rather than PR_SET_PDEATHSIG: that one fires when the parent's *thread* ends. os.read rather than
    # sys.stdin: a thread inside its buffer's lock makes the interpreter abort at exit.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m agent_saga_core.demo.service", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    parser.add_argument("--db", required=True, help="the ledger's SQLite file; kept and continued")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--exit-with-parent", action="store_true", help="exit when stdin reaches its end")
    parser.add_argument("--verbose", action="store_true", help="one line per request on stderr")
    options = parser.parse_args(argv)
    stops = {signal.SIGTERM, signal.SIGINT}
    # Before any thread: they inherit the mask, and only sigwait hears.
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        desk = Desk(Ledger(options.db))
        server = Server((options.host, options.port), desk, options.verbose)
    except (sqlite3.Error, OSError) as error:
        print(f"demo service: cannot start: {error}", file=sys.stderr)
        return 2
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if options.exit_with_parent:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    host, port = server.server_address[:2]
    print(json.dumps({"url": f"http://{host}:{port}", "pid": os.getpid()}), flush=True)
    signal.sigwait(stops)
    desk.ledger.close()  # waits for the transaction under way; held requests never land
    return 0


if __name__ == "__main__":
    sys.exit(main())
