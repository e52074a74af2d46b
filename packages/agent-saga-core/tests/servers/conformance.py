"""The suite that every store passes, with what it needs of a store on a server to ask about one that fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from agent_saga_core.testing import LogConformance

from .line import Line
from .store import Store, also


class Failing:
    """A server that is reached through a line, and restarted if it is a server of the tests."""

    def __init__(self, line: Line, restart: Callable[[], None] | None) -> None:
        self._line = line
        self.restart = restart

    def cut(self) -> None:
        self._line.cut()

    def go_away(self) -> threading.Event:
        return self._line.go_away()

    def come_back(self) -> None:
        self._line.come_back()


class ServedConformance(LogConformance):
    """What every store must do, of one on a server. A store's conftest has its fixtures, and `mortal` with a `uri`.

    It also supplies `end_leases` and `spoil`.
    """

    lease: ClassVar[float] = 2.0
    given: ClassVar[str]
    """What the environment calls a server that is not the tests' own, and that they do not restart."""

    def uri_of(self, mortal: Any) -> str:
        """The address of a server of the tests."""
        return mortal.uri

    def restarted(self, mortal: Any) -> None:
        """End a server of the tests as it wants to be ended, and start it on what it has."""
        mortal.stop()
        mortal.start()

    @pytest.fixture
    def mortal_or_given(self, request: pytest.FixtureRequest) -> Any:
        """A server that may be restarted; None where one was given."""
        return None if os.environ.get(self.given) else request.getfixturevalue("mortal")

    @pytest.fixture
    def uri(self, mortal_or_given: Any) -> str:
        """The address of either."""
        return os.environ[self.given] if mortal_or_given is None else self.uri_of(mortal_or_given)

    @pytest.fixture
    def open_log_again(self, request: pytest.FixtureRequest, store: Store, url: str) -> Callable[[], Any]:
        address = also(url, lease=self.lease)
        if "server" in request.fixturenames:
            address = request.getfixturevalue("proxy").address(address)
        return lambda: store.log(address)

    @pytest.fixture
    def server(self, proxy: Line, mortal_or_given: Any) -> Failing:
        return Failing(proxy, None if mortal_or_given is None else lambda: self.restarted(mortal_or_given))
