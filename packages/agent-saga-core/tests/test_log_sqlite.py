"""The SQLite log: the suite of all stores, and what is special about it."""

from __future__ import annotations

import pytest

from agent_saga_core.log.sqlite import SqliteLog
from agent_saga_core.testing import LogConformance


class TestSqliteLog(LogConformance):
    @pytest.fixture
    def open_log_again(self, tmp_path):
        return lambda: SqliteLog(tmp_path / "log.db")
