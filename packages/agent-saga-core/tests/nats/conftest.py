"""Servers, and logs on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from agent_saga_core.log.nats import NatsLog, init

from .server import Nats, Proxy, any_server, fresh, server_of_its_own


@pytest.fixture(scope="session")
def uri() -> Iterator[str]:
    """The address of a server that tests share."""
    with any_server() as found:
        yield found


@pytest.fixture
def url(uri: str) -> str:
    """The address of a new log on it, which is made."""
    made = fresh(uri)
    init(made)
    return made


@pytest.fixture
def opened(url: str) -> Iterator[Callable[..., NatsLog]]:
    """A callable that opens that log, once more each time; options are added to its address."""
    logs: list[NatsLog] = []

    def open_one(**options: object) -> NatsLog:
        joined = "&" if "?" in url else "?"
        more = "&".join(f"{name}={value}" for name, value in options.items())
        logs.append(NatsLog(url + (joined + more if more else "")))
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
def mortal() -> Iterator[Nats]:
    """A server that tests may stop and start."""
    with server_of_its_own() as server:
        yield server


@pytest.fixture
def mortal_url(mortal: Nats) -> str:
    """The address of a new log on it, which is made."""
    made = fresh(mortal.uri)
    init(made)
    return made
