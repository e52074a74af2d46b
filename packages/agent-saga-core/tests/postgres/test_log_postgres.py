"""The PostgreSQL log passes the suite of every store."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from agent_saga_core.log.postgres import PostgresLog
from agent_saga_core.testing import LogConformance


class TestPostgresLog(LogConformance):
    lease: ClassVar[float] = 2.0

    @pytest.fixture
    def open_log_again(self, url: str) -> Callable[[], PostgresLog]:
        return lambda: PostgresLog(f"{url}&lease={self.lease}")
