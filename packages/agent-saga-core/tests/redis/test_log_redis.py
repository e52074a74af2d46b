"""The Redis log passes the suite of every store."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from ..servers.conformance import ServedConformance
from .server import GIVEN, behind, spoil_a_byte, writers


class TestRedisLog(ServedConformance):
    given: ClassVar[str] = GIVEN

    @pytest.fixture
    def end_leases(self, url: str) -> Callable[[], object]:
        return lambda: writers(url, until="1")

    @pytest.fixture
    def spoil(self, url: str) -> Callable[[str, int], None]:
        def spoil(saga: str, n: int) -> None:
            with behind(url) as at:
                spoil_a_byte(at, saga, n)

        return spoil
