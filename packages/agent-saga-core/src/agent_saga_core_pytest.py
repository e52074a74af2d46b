"""The pytest plugin: three fixtures, and nothing that happens unless one of them, or a suite of the kit, is used.

A module of its own beside the package, because pytest imports it in every run of everyone who has agent-saga installed,
and importing anything inside the package imports the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from agent_saga_core.log.memory import MemoryLog
    from agent_saga_core.testing.clock import ManualClock

__all__ = ["isolated_handlers", "saga_clock", "saga_log"]

# Its failures then show what was compared, as those of a test file do. Nothing is imported by this.
pytest.register_assert_rewrite("agent_saga_core.testing.conformance", "agent_saga_core.testing.adapters")


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark of the suites' tests known, for runs that are strict about marks."""
    config.addinivalue_line("markers", "promise(*ids): the promises of agent-saga that this test holds")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tests of `AdapterConformance` an adapter does not pass, and why."""
    said: dict[str, None] = {}
    for report in terminalreporter.stats.get("xfailed", []):
        reasons = [str(value) for name, value in report.user_properties if name == "agent_saga_deferred"]
        said.update(dict.fromkeys(f"{report.nodeid.rpartition('::')[0]}: {reason}" for reason in reasons))
    if said:
        terminalreporter.section("deferred by adapters")
        for line in said:
            terminalreporter.line(line)


@pytest.fixture
def saga_clock() -> ManualClock:
    """A `ManualClock` that passes time only when the test says `advance`."""
    from agent_saga_core.testing.clock import ManualClock

    return ManualClock()


@pytest.fixture
def saga_log(saga_clock: ManualClock) -> Iterator[MemoryLog]:
    """A `MemoryLog` on `saga_clock`, closed after the test."""
    from agent_saga_core.log.memory import MemoryLog

    log = MemoryLog(saga_clock)
    yield log
    log.close()


@pytest.fixture
def isolated_handlers() -> Iterator[None]:
    """No compensator and no probe is registered when the test begins; what it registers is forgotten afterwards."""
    from agent_saga_core.registry import isolated_registry

    with isolated_registry():
        yield
