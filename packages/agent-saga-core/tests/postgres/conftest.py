"""Servers, and logs on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent_saga_core.log.postgres import PostgresLog, init

from .server import Proxy, any_server, fresh_schema, server_of_its_own


@pytest.fixture(scope="session")
def uri() -> Iterator[str]:
    """The address of a server that tests share."""
    with any_server() as found:
        yield found


@pytest.fixture
def url(uri: str) -> str:
    """The address of a new log on it, which is made."""
    made = fresh_schema(uri)
    init(made)
    return made


@pytest.fixture
def opened(url: str) -> Iterator[Callable[..., PostgresLog]]:
    """A callable that opens that log, once more each time; options are added to its address."""
    logs: list[PostgresLog] = []

    def open_one(**options: object) -> PostgresLog:
        address = "&".join([url, *(f"{name}={value}" for name, value in options.items())])
        logs.append(PostgresLog(address))
        return logs[-1]

    yield open_one
    for log in reversed(logs):
        log.close()


@pytest.fixture
def proxy(uri: str) -> Iterator[Proxy]:
    """What stands between a log and that server."""
    made = Proxy(uri)
    yield made
    made.close()


@pytest.fixture(scope="session")
def mortal() -> Iterator[Any]:
    """A server that tests may stop and change."""
    with server_of_its_own() as server:
        yield server


@pytest.fixture
def mortal_url(mortal: Any) -> str:
    """The address of a new log on it, which is made."""
    made = fresh_schema(mortal.get_uri())
    init(made)
    return made
