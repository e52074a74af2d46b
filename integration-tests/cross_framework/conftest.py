"""One process with all frameworks in it, the demo service as the world, a log on disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cross_acts import BOUND
from cross_processes import Worker

from agent_saga_core.demo.client import Client, Service


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    with Service.start() as service:
        yield service


@pytest.fixture
def world(service: Service) -> Iterator[Client]:
    """The service, with no rule left behind and nothing held afterwards."""
    client = service.client(timeout=BOUND)
    yield client
    client.reset()


@pytest.fixture(scope="session")
def process(service: Service) -> Iterator[Worker]:
    """The one process that all teams of this suite run in, all frameworks imported."""
    worker = Worker(service.client(timeout=BOUND))
    worker.begin("imports")
    worker.outcome(120.0)  # about 16 s on a cold machine
    yield worker
    worker.close()


@pytest.fixture
def log(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'log'}"
