"""Servers, and logs on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agent_saga_core.log.postgres import PostgresLog, init, migrate

from ..servers.store import Store, opened, proxy, uri, url
from .proxy import Proxy
from .server import any_server, fresh_schema, server_of_its_own

__all__ = ["opened", "proxy", "uri", "url"]


@pytest.fixture(scope="session")
def store() -> Store:
    return Store("postgres", PostgresLog, init, migrate, fresh_schema, any_server, Proxy)


@pytest.fixture(scope="session")
def mortal() -> Iterator[Any]:
    """A server that tests may stop and change."""
    with server_of_its_own() as server:
        yield server


@pytest.fixture
def mortal_url(store: Store, mortal: Any) -> str:
    """The address of a new log on it, which is made."""
    return store.made(mortal.get_uri())
