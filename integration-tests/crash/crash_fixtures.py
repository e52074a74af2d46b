"""Fixtures: real processes, real kills, a log of whatever store, and the demo service as the world."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from crash_log import Reader
from crash_processes import BOUND, Start, Worker, Zygote
from crash_stores import Fresh, Opened, Store

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


@pytest.fixture(scope="session")
def stores() -> Iterator[Opened]:
    opened = Opened()
    yield opened
    opened.close()


@pytest.fixture
def store(request: pytest.FixtureRequest, stores: Opened) -> Store:
    """The store of this test: the file log, unless the test is parametrized with others (`on`)."""
    return stores[getattr(request, "param", "file")]


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Where a file log of this test is."""
    return tmp_path / "log"


@pytest.fixture
def log_url(store: Store, log_dir: Path) -> str:
    """The log of this test."""
    return store.fresh(log_dir)


@pytest.fixture
def fresh_log(store: Store, tmp_path: Path) -> Fresh:
    """A callable that makes one more log, for a test that needs many; its address."""
    return Fresh(store, tmp_path)


@pytest.fixture
def start(zygote: Zygote, service: Service, store: Store, log_url: str, who: str) -> Iterator[Start]:
    """Start a worker, on this test's log or the one named; all that still live are killed afterwards."""
    workers: list[Worker] = []

    def start(job: str, *, fresh: bool = False, **options: Any) -> Worker:
        given = {"url": service.url, "log": log_url, "who": who, "saga": "order-7", **options}
        worker = Worker(zygote, job, given, fresh=fresh, bury=partial(store.bury, given["log"]))
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
def in_log(log_url: str) -> Reader:
    return Reader(log_url)


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
