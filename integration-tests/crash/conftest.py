"""Real processes, real kills, a log on disk, and the demo service as the world."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the workers import their modules by name, and so do the tests

from crash_log import Reader
from crash_processes import BOUND, Start, Worker, Zygote

from agent_saga_core.demo.client import Client, Service


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """One for each file of tests: the ledger is read as a whole, so it should not grow for ever."""
    with Service.start() as service:
        yield service


@pytest.fixture
def world(service: Service) -> Iterator[Client]:
    """The service, with no rule left behind and nothing held afterwards. Each test has customers of its own."""
    client = service.client(timeout=BOUND)
    yield client
    client.reset()
    client.release()


@pytest.fixture
def who(request: pytest.FixtureRequest) -> str:
    """A customer of this test alone."""
    return request.node.nodeid.rpartition("::")[2].encode("ascii", "replace").decode()


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def start(zygote: Zygote, service: Service, log_dir: Path, who: str) -> Iterator[Start]:
    """Start a worker on this test's log; all that still live are killed afterwards."""
    workers: list[Worker] = []

    def start(job: str, *, fresh: bool = False, **options: Any) -> Worker:
        given = {"url": service.url, "log": str(log_dir), "who": who, "saga": "order-7", **options}
        worker = Worker(zygote, job, given, fresh=fresh)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Where many logs are made and synced: on tmpfs where there is one."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as directory:
        yield Path(directory)


@pytest.fixture
def on_disk(log_dir: Path) -> Reader:
    return Reader(log_dir)


@pytest.fixture
def recovered(start: Start) -> Callable[..., dict[str, Any]]:
    """Recover this test's log in a process of its own; returns the report."""

    def recovered(**options: Any) -> dict[str, Any]:
        worker = start("recover", **options)
        worker.hear()
        worker.say("go")
        report: dict[str, Any] = worker.hear()["report"]
        assert worker.ends() == 0, worker.errors()
        return report

    return recovered
