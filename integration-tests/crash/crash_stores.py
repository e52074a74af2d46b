"""The stores that the crash matrix runs on. One more store is one more entry of `STORES`, and one of `OPENED_BY`.

A process that was killed keeps its sagas on a store with leases until its lease has run out. No test waits for that:
every log has a lease that outlasts the test, and when a process has ended, `bury` ends its lease behind the log's back,
by the server's own time. That is the same: all that a lease that has run out changes is that the server's clock is
past the moment that stands in its row, and here the moment is put before the clock. Nobody renews it meanwhile, since
who would is dead, and what it had sent before is waited for. A process that lives, stopped or not, keeps its lease.
"""

from __future__ import annotations

import importlib.util
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

BOUND = 30.0
LEASE = 600
"""Seconds; longer than any test may last."""
ROOT = Path(__file__).parents[2]


def _nothing(url: str, pid: int) -> None:
    """The kernel has freed what the process owned."""


class Store(NamedTuple):
    """A store, as far as these tests must know which."""

    name: str
    fresh: Callable[[Path], str]
    """Make a log at a place of its own, which is the given directory if it needs one; its address."""
    bury: Callable[[str, int], None] = _nothing
    """Let the leases of a process that has ended, on the log of that address, be over."""
    lapse: Callable[[str], None] | None = None
    """Let the leases of everybody be over, behind their backs; None on a store where who lives keeps what it owns."""


# How a process opens an address, so that `bury` finds what is its.
OPENED_BY: dict[str, Callable[[str, int], str]] = {
    "postgresql": lambda url, pid: f"{url}&application_name=saga-{pid}",
}


def opened_by(url: str, pid: int) -> str:
    """The address under which that process opens the log."""
    scheme = url.partition(":")[0]
    return OPENED_BY[scheme](url, pid) if scheme in OPENED_BY else url


@contextmanager
def _file() -> Generator[Store]:
    yield Store("file", lambda directory: f"file:{directory}")


@contextmanager
def _sqlite() -> Generator[Store]:
    yield Store("sqlite", lambda directory: f"sqlite:///{directory}.db")


def postgres_server() -> ModuleType:
    """The module that starts PostgreSQL servers for the tests of the core."""
    path = ROOT / "packages/agent-saga-core/tests/postgres/server.py"
    spec = importlib.util.spec_from_file_location("agent_saga_postgres_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _postgres() -> Generator[Store]:
    from agent_saga_core.log.postgres import init

    server = postgres_server()

    def fresh(uri: str, directory: Path) -> str:
        url = f"{uri}{'&' if '?' in uri else '?'}schema=t_{uuid.uuid4().hex[:12]}&lease={LEASE}"
        init(url)
        # Whose lease it is: a column of which the log knows nothing, as a newer minor version might have added one.
        server.sql(url, "ALTER TABLE {s}.writer ADD COLUMN process text DEFAULT current_setting('application_name')")
        return url

    def bury(url: str, pid: int) -> None:
        name = f"saga-{pid}"
        busy = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        until = time.monotonic() + BOUND
        while server.sql(url, busy, name) != [(0,)]:  # the server still does what the process had asked it to do
            assert time.monotonic() < until, f"the server does not let go of process {pid}, which is dead"
            threading.Event().wait(0.005)
        server.sql(url, "UPDATE {s}.writer SET lease_until = now() - interval '1 hour' WHERE process = %s", name)

    with server.any_server() as uri:
        yield Store("postgres", lambda directory: fresh(uri, directory), bury, server.expire)


STORES: dict[str, Callable[[], AbstractContextManager[Store]]] = {
    "file": _file,
    "sqlite": _sqlite,
    "postgres": _postgres,
}
SHARED = [name for name in STORES if name != "file"]
"""Those of which a part of the matrix is enough: what happens at a boundary does not depend on what led to it."""


class Opened:
    """The stores that this session has needed so far."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._stores: dict[str, Store] = {}

    def __getitem__(self, name: str) -> Store:
        if name not in self._stores:
            self._stores[name] = self._stack.enter_context(STORES[name]())
        return self._stores[name]

    def close(self) -> None:
        self._stack.close()


class Fresh:
    """Logs of one test, each at a place of its own."""

    def __init__(self, store: Store, directory: Path) -> None:
        self.store = store
        self._directory = directory
        self._numbers: Iterator[int] = iter(range(1, 1_000_000))

    def __call__(self) -> str:
        return self.store.fresh(self._directory / f"log-{next(self._numbers)}")
