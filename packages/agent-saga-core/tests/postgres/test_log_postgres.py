"""The PostgreSQL log passes the suite of every store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest

from agent_saga_core.log.postgres import PostgresLog, init
from agent_saga_core.testing import LogConformance

from .proxy import Proxy
from .server import GIVEN, control, expire, fresh_schema, sql


class Failing:
    """A server that is reached through a proxy, and restarted if it is a server of the tests."""

    def __init__(self, proxy: Proxy, restart: Callable[[], None] | None) -> None:
        self._proxy = proxy
        self.restart = restart

    def cut(self) -> None:
        self._proxy.cut()

    def go_away(self) -> threading.Event:
        return self._proxy.go_away()

    def come_back(self) -> None:
        self._proxy.come_back()


class TestPostgresLog(LogConformance):
    lease: ClassVar[float] = 2.0

    @pytest.fixture
    def mortal_or_given(self, request: pytest.FixtureRequest) -> Any:
        """A server that may be restarted; none where a server was given."""
        return None if os.environ.get(GIVEN) else request.getfixturevalue("mortal")

    @pytest.fixture
    def url(self, request: pytest.FixtureRequest, mortal_or_given: Any) -> str:
        uri = request.getfixturevalue("uri") if mortal_or_given is None else mortal_or_given.get_uri()
        made = fresh_schema(uri)
        init(made)
        return made

    @pytest.fixture
    def proxy(self, url: str):
        proxy = Proxy(url.partition("schema=")[0].rstrip("?&"))
        yield proxy
        proxy.close()

    @pytest.fixture
    def open_log_again(self, request: pytest.FixtureRequest, url: str) -> Callable[[], PostgresLog]:
        address = f"{url}&lease={self.lease}"
        if "server" in request.fixturenames:
            address = request.getfixturevalue("proxy").address(address)
        return lambda: PostgresLog(address)

    @pytest.fixture
    def end_leases(self, url: str) -> Callable[[], None]:
        return lambda: expire(url)

    @pytest.fixture
    def spoil(self, url: str) -> Callable[[str, int], None]:
        return partial(_spoil, url)

    @pytest.fixture
    def server(self, proxy: Proxy, mortal_or_given: Any) -> Failing:
        restart = None if mortal_or_given is None else partial(control, mortal_or_given, "restart", "-m", "fast")
        return Failing(proxy, restart)


def _spoil(url: str, saga_id: str, n: int) -> None:
    sql(
        url,
        "UPDATE {s}.record r SET body = set_byte(body, length(body) - 20, get_byte(body, length(body) - 20) # 1)"
        " FROM {s}.saga s WHERE s.seq = r.saga AND s.id = %s AND r.n = %s",
        saga_id,
        n,
    )
