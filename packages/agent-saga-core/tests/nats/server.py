"""NATS servers for the tests: the one that is named in the environment, or some of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_saga_core.log.nats.address import address_of
from agent_saga_core.log.nats.connection import Server

# Beside the interpreter, or, in an environment that is laid over another, where its scripts are.
PROGRAM = shutil.which("nats-server", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
GIVEN = "AGENT_SAGA_TEST_NATS"
BOUND = 60.0


def wait_for(what: Callable[[], Any], bound: float = BOUND) -> Any:
    """What it is true to, once it is."""
    until = time.monotonic() + bound
    pause = threading.Event()
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < until, "it did not happen"
        pause.wait(0.01)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


class Nats:
    """A server on this machine, which may be stopped and started. Its data are gone with it."""

    def __init__(self, root: Path, name: str = "solo", *, sync: str | None = "always", more: str = "") -> None:
        self.name = name
        self.port, self.monitor = free_port(), free_port()
        self._config = root / f"{name}.conf"
        self._log = root / f"{name}.log"
        syncs = f"sync_interval: {sync}" if sync else ""
        self._config.write_text(
            f'server_name: "{name}"\nlisten: "127.0.0.1:{self.port}"\nhttp: "127.0.0.1:{self.monitor}"\n'
            f'jetstream {{ store_dir: "{root / name}"\n {syncs} }}\n{more}\n',
            "utf-8",
        )
        self.popen: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.popen = subprocess.Popen(
            [str(PROGRAM), "-c", str(self._config), "-l", str(self._log)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(self._answers)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as one:
                return one.recv(4) == b"INFO"
        except OSError:
            return False

    def ask(self, path: str) -> dict[str, Any]:
        """What its monitoring says."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.monitor}/{path}", timeout=5) as answer:
            return json.loads(answer.read())

    def stop(self, number: int = signal.SIGTERM) -> None:
        popen, self.popen = self.popen, None
        if popen is not None:
            popen.send_signal(number)
            popen.wait(BOUND)


@contextmanager
def scratch() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="saga-nats-"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def server_of_its_own(*, sync: str | None = "always", more: str = "") -> Generator[Nats]:
    """A server that may be stopped: it is nobody else's."""
    with scratch() as root:
        server = Nats(root, sync=sync, more=more)
        try:
            server.start()
            yield server
        finally:
            server.stop(signal.SIGKILL)


@contextmanager
def any_server() -> Generator[str]:
    """The address of a server that tests share."""
    given = os.environ.get(GIVEN)
    if given:
        yield given
        return
    with server_of_its_own() as server:
        yield f"{server.uri}?monitor=127.0.0.1:{server.monitor}"


def fresh(uri: str, **options: object) -> str:
    """The address of a log of its own there; nothing is made."""
    base, _, query = uri.partition("?")
    given = "&".join([*filter(None, [query]), *(f"{name}={value}" for name, value in options.items())])
    return f"{base.rstrip('/')}/t_{uuid.uuid4().hex[:12]}" + (f"?{given}" if given else "")


def through(url: str, port: int) -> str:
    """The same log by way of another port of this machine."""
    base, question, query = url.partition("?")
    path = base.removeprefix("nats://").partition("/")[2]
    return f"nats://127.0.0.1:{port}/{path}{question}{query}"


def behind(url: str, do: Callable[[Server], Any]) -> Any:
    """Do something behind the log's back."""
    server = Server(address_of(url))
    try:
        return server.run(lambda: do(server))
    finally:
        server.close()
