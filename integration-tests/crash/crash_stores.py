"""The stores that the crash matrix runs on. One more store is one more entry of `STORES`, and one of `OPENED_BY`.

A process that was killed keeps its sagas on a store with leases until its lease has run out. No test waits for that:
every log has a lease that outlasts the test, and when a process has ended, `bury` ends its lease behind the log's back.
Nobody renews it meanwhile, since who would is dead, and what it had sent before is waited for. A process that lives,
stopped or not, keeps its lease. The rest depends on what a lease that has run out is, on that store:

PostgreSQL, Redis: the server's clock is past the moment that stands in the writer's row or key. Here the moment is put
before the clock.

NATS: no moment is anywhere. Somebody has seen the same revision of the lease for its whole length, on a clock of its
own, and notes that revision for whoever comes later (`NAME.i.o.`). Here the note is written at once. It is the one that
whoever watched would have written, as nothing comes after the last revision of a dead process; and should something
come all the same, the note names a revision that is not the last any more, and the lease runs on. What follows a note
is the log's own: the fence, the claim, its conflicts. That nobody believes a lease to be over who has not watched it
for its whole length is left to tests with short leases (`test_recovery_fleet.py` has one, the log's own the others).

`lapse` does the same to processes that live, and have not heard of it; even their own count, which would have ended
before anybody's, still says that they may act. So it is only by the fence that they can be kept from it.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

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


def _on_postgres(url: str, pid: int) -> str:
    return f"{url}&application_name={_name(pid)}"


def _on_nats(url: str, pid: int) -> str:
    base, _, query = url.partition("?")
    login = "" if "@" in base else f"{_name(pid)}:nobody-asks@"
    length = query.replace(f"lease={LEASE}", f"lease={_length(pid)}")
    return f"nats://{login}{base.removeprefix('nats://')}?{length}"


def _on_redis(url: str, pid: int) -> str:
    """That address; from now on every connection of this process is named, and each of its writers."""
    from agent_saga_core.log.redis import connection, lease

    linked: Any = connection
    heart: Any = lease.Heart
    register = heart.register

    def register_and_say_whose(self: Any, writer: Any) -> None:
        register(self, writer)
        # A field of which the log knows nothing, and before anything is claimed: what is not marked owns nothing.
        key = self._server.address.key("writer", writer.nonce.hex)
        self._server.run(lambda one: one.call("HSET", key, "process", pid))

    linked._LINK = partial(linked.redis.Connection, client_name=_name(pid))
    heart.register = register_and_say_whose
    return url


def _name(pid: int) -> str:
    return f"saga-{pid}"


def _length(pid: int) -> str:
    """The lease of a process on NATS: its length, which stands in it, is that of no other."""
    return f"{LEASE}.{pid:07}"


# How a process opens an address, so that `bury` finds what is its.
OPENED_BY: dict[str, Callable[[str, int], str]] = {
    "postgresql": _on_postgres,
    "nats": _on_nats,
    "redis": _on_redis,
}


def opened_by(url: str, pid: int) -> str:
    """The address under which that process, which asks, opens the log."""
    scheme = url.partition(":")[0]
    return OPENED_BY[scheme](url, pid) if scheme in OPENED_BY else url


@contextmanager
def _file() -> Generator[Store]:
    yield Store("file", lambda directory: f"file:{directory}")


@contextmanager
def _sqlite() -> Generator[Store]:
    yield Store("sqlite", lambda directory: f"sqlite:///{directory}.db")


@cache
def server_of(store: str) -> ModuleType:
    """The module that starts servers of that store for the tests of the core."""
    # By its place: the folder has the name of the client library.
    path = ROOT / f"packages/agent-saga-core/tests/{store}/server.py"
    spec = importlib.util.spec_from_file_location(f"agent_saga_{store}_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _until_let_go(pid: int, busy: Callable[[], bool]) -> None:
    """Wait until the server has read, and done, what a dead process had asked it to do."""
    until = time.monotonic() + BOUND
    while busy():
        assert time.monotonic() < until, f"the server does not let go of process {pid}, which is dead"
        threading.Event().wait(0.005)


@contextmanager
def _postgres() -> Generator[Store]:
    from agent_saga_core.log.postgres import init

    server = server_of("postgres")

    def fresh(uri: str, directory: Path) -> str:
        url = f"{uri}{'&' if '?' in uri else '?'}schema=t_{uuid.uuid4().hex[:12]}&lease={LEASE}"
        init(url)
        # Whose lease it is: a column of which the log knows nothing, as a newer minor version might have added one.
        server.sql(url, "ALTER TABLE {s}.writer ADD COLUMN process text DEFAULT current_setting('application_name')")
        return url

    def bury(url: str, pid: int) -> None:
        busy = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        _until_let_go(pid, lambda: server.sql(url, busy, _name(pid)) != [(0,)])
        server.sql(url, "UPDATE {s}.writer SET lease_until = now() - interval '1 hour' WHERE process = %s", _name(pid))

    with server.any_server() as uri:
        yield Store("postgres", lambda directory: fresh(uri, directory), bury, server.expire)


async def note_as_watched(index: Any, length: float | None = None) -> None:
    """Note of every lease, or of every one of that length, that it was watched running out. For the log's own loop."""
    for leased in await index.leases():
        if length is None or leased.lease.seconds == length:
            await index.put_expired(leased.nonce, leased.revision)


def _nats_end_leases(url: str, length: float | None = None) -> None:
    from agent_saga_core.log.nats.address import address_of
    from agent_saga_core.log.nats.connection import Server
    from agent_saga_core.log.nats.index import Index

    server = Server(address_of(url))
    try:
        server.run(lambda: note_as_watched(Index(server), length))
    finally:
        server.close()


@contextmanager
def _nats() -> Generator[Store]:
    from agent_saga_core.log.nats import init
    from agent_saga_core.log.nats.address import address_of

    server = server_of("nats")

    def fresh(uri: str, directory: Path) -> str:
        url = server.fresh(uri, lease=LEASE)
        init(url)
        return url

    def busy(monitor: str, pid: int) -> bool:
        with urllib.request.urlopen(f"http://{monitor}/connz?auth=1", timeout=BOUND) as answer:
            return any(one.get("authorized_user") == _name(pid) for one in json.load(answer)["connections"])

    def bury(url: str, pid: int) -> None:
        for monitor in address_of(url).monitor:
            _until_let_go(pid, partial(busy, monitor, pid))
        _nats_end_leases(url, float(_length(pid)))

    with server.any_server() as uri:
        yield Store("nats", lambda directory: fresh(uri, directory), bury, _nats_end_leases)


def put_before_the_clock(at: Any, pid: int | None = None) -> None:
    """Let every lease, or every one of that process, have run out as far as the server knows."""
    for nonce in at("ZRANGE", "writers", 0, -1):
        name = f"writer:{nonce.decode()}"
        if at("EXISTS", name) and (pid is None or at("HGET", name, "process") == str(pid).encode()):
            at("HSET", name, "until", 1)


@contextmanager
def _redis() -> Generator[Store]:
    from agent_saga_core.log.redis import init

    server = server_of("redis")

    def fresh(uri: str, directory: Path) -> str:
        url = server.fresh_prefix(uri, lease=LEASE)
        init(url)
        return url

    def bury(url: str, pid: int) -> None:
        with server.behind(url) as at:
            _until_let_go(pid, lambda: any(one["name"] == _name(pid) for one in at.client.client_list()))
            put_before_the_clock(at, pid)

    def lapse(url: str) -> None:
        with server.behind(url) as at:
            put_before_the_clock(at)

    with server.any_server() as uri:
        yield Store("redis", lambda directory: fresh(uri, directory), bury, lapse)


STORES: dict[str, Callable[[], AbstractContextManager[Store]]] = {
    "file": _file,
    "sqlite": _sqlite,
    "postgres": _postgres,
    "nats": _nats,
    "redis": _redis,
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
