"""The PostgreSQL log passes the suite of every store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest

from ..servers.conformance import ServedConformance
from .server import GIVEN, control, expire, sql


class TestPostgresLog(ServedConformance):
    given: ClassVar[str] = GIVEN

    def uri_of(self, mortal: Any) -> str:
        return mortal.get_uri()

    def restarted(self, mortal: Any) -> None:
        control(mortal, "restart", "-m", "fast")

    @pytest.fixture
    def end_leases(self, url: str) -> Callable[[], None]:
        return lambda: expire(url)

    @pytest.fixture
    def spoil(self, url: str) -> Callable[[str, int], None]:
        return partial(_spoil, url)


def _spoil(url: str, saga_id: str, n: int) -> None:
    sql(
        url,
        "UPDATE {s}.record r SET body = set_byte(body, length(body) - 20, get_byte(body, length(body) - 20) # 1)"
        " FROM {s}.saga s WHERE s.seq = r.saga AND s.id = %s AND r.n = %s",
        saga_id,
        n,
    )
