"""Servers, and logs on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_saga_core.log.nats import NatsLog, init, migrate

from ..servers.store import Store, opened, proxy, uri, url
from .proxy import Proxy
from .server import Nats, any_server, fresh, server_of_its_own

__all__ = ["opened", "proxy", "uri", "url"]


@pytest.fixture(scope="session")
def store() -> Store:
    return Store("nats", NatsLog, init, migrate, fresh, any_server, Proxy)


@pytest.fixture(scope="session")
def mortal() -> Iterator[Nats]:
    """A server that tests may stop and start."""
    with server_of_its_own() as server:
        yield server


@pytest.fixture
def mortal_url(store: Store, mortal: Nats) -> str:
    """The address of a new log on it, which is made."""
    return store.made(mortal.uri)
