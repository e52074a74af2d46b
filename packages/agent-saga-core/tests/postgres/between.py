"""What may stand between a log and its server in production: an end of TLS, and a pooler in transaction mode."""

from __future__ import annotations

import socket
import ssl
import struct
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict

_STARTUP = 196608
_SSL, _CANCEL = 80877103, 80877102


def connect(uri: str) -> socket.socket:
    """A connection to the server of an address, of which nothing is said yet."""
    target = conninfo_to_dict(uri)
    host, port = str(target.get("host") or "localhost"), str(target.get("port") or "5432")
    if not host.startswith("/"):
        return socket.create_connection((host, int(port)))
    made = socket.socket(socket.AF_UNIX)
    made.connect(f"{host}/.s.PGSQL.{port}")
    return made


def exactly(source: socket.socket, count: int) -> bytes:
    """So many bytes.

    Raises:
        EOFError: There are no more.
    """
    data = bytearray()
    while len(data) < count:
        got = source.recv(count - len(data))
        if not got:
            raise EOFError
        data += got
    return bytes(data)


def message(source: socket.socket, *, typed: bool = True) -> bytes:
    """The next message, with its type and length."""
    head = exactly(source, 5 if typed else 4)
    (length,) = struct.unpack("!I", head[-4:])
    return head + exactly(source, length - 4)


class Listener:
    """Takes connections on a port of this machine, each on a thread."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End everything."""
        self._listener.close()
        for one in self._open:
            end(one)

    def serve(self, client: socket.socket) -> None:
        raise NotImplementedError

    def opened(self, one: Any) -> Any:
        self._open.append(one)
        return one

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(self.opened(client),), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            self.serve(client)
        except (EOFError, OSError):
            return
        finally:
            end(client)


def end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def certificate(directory: Path, name: str) -> Path:
    """A self-signed certificate for `localhost`, made by `openssl`; its key is beside it."""
    made = directory / f"{name}.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-keyout", str(made.with_suffix(".key")), "-out", str(made)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return made


class TlsEnd(Listener):
    """Speaks TLS with whoever connects, and takes nobody who does not; the server behind it need not know any.

    The wheel of the test server is built without TLS. All of it that a log depends on is on the client's side.

    Attributes:
        spoken: The version of TLS of each connection, in order.
    """

    def __init__(self, uri: str, cert: Path) -> None:
        self._uri = uri
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(cert, cert.with_suffix(".key"))
        self.spoken: list[str] = []
        super().__init__()

    def serve(self, client: socket.socket) -> None:
        while struct.unpack("!I", message(client, typed=False)[4:8])[0] != _SSL:
            refusal = b"SFATAL\0C28000\0Mno encryption\0\0"  # as a server says whose rules are all of `hostssl`
            client.sendall(b"E" + struct.pack("!I", len(refusal) + 4) + refusal)
            return
        client.sendall(b"S")
        with self._context.wrap_socket(client, server_side=True) as secure:
            self.opened(secure)
            self.spoken.append(str(secure.version()))
            server = self.opened(connect(self._uri))
            threading.Thread(target=_copy, args=(server, secure), daemon=True).start()
            _copy(secure, server)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except (OSError, ValueError):
        return
    finally:
        end(target)


class Pooler(Listener):
    """What pgbouncer does in transaction mode, at its least convenient.

    A client has a server connection for a transaction, and the next transaction gets another one: the one that has
    been idle longest, whose session others have used meanwhile. So nothing that a client leaves in its session is
    there when it looks for it, unless it is in the way of somebody else.

    Attributes:
        transactions: How many there were.
        moves: How often a client's next transaction was not on the connection of its last one.
    """

    def __init__(self, uri: str, size: int = 24) -> None:
        self._uri = uri
        self._idle: list[socket.socket] = []
        self._freed = threading.Condition()
        self._greeting = b""
        self.transactions = self.moves = 0
        for _ in range(size):
            self._idle.append(self._backend())
        self._all = list(self._idle)
        super().__init__()

    def close(self) -> None:
        super().close()
        for one in self._all:
            end(one)

    def _backend(self) -> socket.socket:
        target = conninfo_to_dict(self._uri)
        fields = {"user": target.get("user") or "postgres", "database": target.get("dbname") or "postgres"}
        fields["client_encoding"] = "UTF8"
        body = b"".join(f"{name}\0{value}\0".encode() for name, value in fields.items()) + b"\0"
        server = connect(self._uri)
        server.sendall(struct.pack("!II", len(body) + 8, _STARTUP) + body)
        greeting = b""
        while not greeting.endswith(b"Z\0\0\0\x05I"):
            greeting += message(server)
        self._greeting = greeting
        return server

    def serve(self, client: socket.socket) -> None:
        while struct.unpack("!I", (first := message(client, typed=False))[4:8])[0] != _STARTUP:
            if struct.unpack("!I", first[4:8])[0] == _CANCEL:
                return
            client.sendall(b"N")
        client.sendall(self._greeting)
        last: socket.socket | None = None
        while True:
            asked = _until_it_waits(client)
            if asked is None:
                return
            with self._freed:
                assert self._freed.wait_for(lambda: self._idle, timeout=60)
                server = self._idle.pop(0)
                self.transactions += 1
                self.moves += server is not last
            last = server
            try:
                while not _answered(server, client, asked):
                    asked = _until_it_waits(client) or b"Q\0\0\0\x0dROLLBACK\0"
            finally:
                with self._freed:
                    self._idle.append(server)
                    self._freed.notify()


def _until_it_waits(client: socket.socket) -> bytes | None:
    """Everything that a client says before it waits for an answer; None if it leaves."""
    said = b""
    while True:
        try:
            said += (one := message(client))
        except (EOFError, OSError):
            return None
        if one[:1] == b"X":
            return None
        if one[:1] in (b"S", b"Q"):
            return said


def _answered(server: socket.socket, client: socket.socket, asked: bytes) -> bool:
    """Pass on what was asked, and what is answered; whether the transaction is over."""
    server.sendall(asked)
    answer = bytearray()
    while True:
        one = message(server)
        answer += one
        if one[:1] == b"Z":
            with suppress(OSError):  # a client that is gone: its transaction is brought to its end all the same
                client.sendall(answer)
            return one[5:6] == b"I"
