"""Servers, and logs on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from agent_saga_core.log.redis import RedisLog, init

from .server import Proxy, Server, any_server, fresh_prefix, server_of_its_own


@pytest.fixture(scope="session")
def uri() -> Iterator[str]:
    """The address of a server that tests share."""
    with any_server() as found:
        yield found


@pytest.fixture
def url(uri: str) -> str:
    """The address of a new log on it, which is made."""
    made = fresh_prefix(uri)
    init(made)
    return made


@pytest.fixture
def opened(url: str) -> Iterator[Callable[..., RedisLog]]:
    """A callable that opens that log, once more each time; options are added to its address."""
    logs: list[RedisLog] = []

    def open_one(**options: object) -> RedisLog:
        address = "&".join([url, *(f"{name}={value}" for name, value in options.items())])
        logs.append(RedisLog(address))
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
def shared_mortal() -> Iterator[Server]:
    """A server that tests may stop."""
    with server_of_its_own() as server:
        yield server


@pytest.fixture
def mortal(shared_mortal: Server) -> Server:
    """A server that tests may stop and change; it is as new."""
    with shared_mortal.client() as client:
        client.flushall()
    return shared_mortal


@pytest.fixture
def mortal_url(mortal: Server) -> str:
    """The address of a new log on it, which is made."""
    made = fresh_prefix(mortal.uri)
    init(made)
    return made
