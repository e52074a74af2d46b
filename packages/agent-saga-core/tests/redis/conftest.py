"""Servers, and logs on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_saga_core.log.redis import RedisLog, init, migrate

from ..servers.store import Store, opened, proxy, uri, url
from .proxy import Proxy
from .server import Server, any_server, fresh_prefix, server_of_its_own

__all__ = ["opened", "proxy", "uri", "url"]


@pytest.fixture(scope="session")
def store() -> Store:
    return Store("redis", RedisLog, init, migrate, fresh_prefix, any_server, Proxy)


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
def mortal_url(store: Store, mortal: Server) -> str:
    """The address of a new log on it, which is made."""
    return store.made(mortal.uri)
