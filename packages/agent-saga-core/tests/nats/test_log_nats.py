"""The NATS log passes the suite of every store."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from agent_saga_core.log.nats import NatsLog
from agent_saga_core.testing import LogConformance


class TestNatsLog(LogConformance):
    lease: ClassVar[float] = 2.0

    @pytest.fixture
    def open_log_again(self, url: str) -> Callable[[], NatsLog]:
        return lambda: NatsLog(f"{url}&lease={self.lease}")
