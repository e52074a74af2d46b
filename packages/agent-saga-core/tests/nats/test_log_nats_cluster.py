"""The NATS log on a cluster of three that syncs always: its leader is killed in mid-saga, twice, under load."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agent_saga_core import ActionSemantics, Compensation, saga_scope
from agent_saga_core.log.nats import NatsLog, init
from agent_saga_core.log.nats.address import address_of
from agent_saga_core.records import Record

from .server import BOUND, Nats, free_port, scratch, wait_for


class Cluster:
    """Three servers on this machine."""

    def __init__(self, servers: list[Nats]) -> None:
        self.servers = servers

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in self.servers)
        monitor = ",".join(f"127.0.0.1:{one.monitor}" for one in self.servers)
        return f"nats://{hosts}/shop?replicas=3&monitor={monitor}&require_sync=1"

    def leader(self, url: str) -> Nats | None:
        """Who leads the stream of the records."""
        name = address_of(url).name
        for one in self.servers:
            if one.popen is None:
                continue
            try:
                found = one.ask("jsz?streams=1&config=0&leader_only=1")
            except OSError:
                continue
            for account in found.get("account_details") or []:
                for stream in account.get("stream_detail") or []:
                    leads = (stream.get("cluster") or {}).get("leader")
                    if stream["name"] == name and leads == one.name:
                        return one
        return None

    def whole(self, url: str) -> bool:
        """Whether every server is there and has all of the log."""
        name = address_of(url).name
        for one in self.servers:
            try:
                found = one.ask("jsz?streams=1&leader_only=1")
            except OSError:
                return False
            for account in found.get("account_details") or []:
                for stream in account.get("stream_detail") or []:
                    cluster = stream.get("cluster") or {}
                    if stream["name"] == name and cluster.get("leader") == one.name:
                        replicas = cluster.get("replicas") or []
                        if len(replicas) == 2 and all(not each.get("offline") and each["current"] for each in replicas):
                            return True
        return False


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with scratch() as root:
        routes = [free_port() for _ in range(3)]
        given = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        servers = [
            Nats(
                root,
                f"n{at}",
                more=f'cluster {{ name: "trio", listen: "127.0.0.1:{route}", routes: [{given}] }}',
            )
            for at, route in enumerate(routes)
        ]
        try:
            for one in servers:
                one.start()
            made = Cluster(servers)
            wait_for(lambda: any((one.ask("jsz").get("meta_cluster") or {}).get("leader") for one in servers))
            yield made
        finally:
            for one in servers:
                one.stop(signal.SIGKILL)


def record(saga: str, n: int, kind: str = "INTENT", **data: Any) -> Record:
    return Record(saga=saga, n=n, epoch=1, type=kind, time=1000.0, data=data)


def test_nothing_acknowledged_is_lost_when_the_leader_is_killed_twice_in_mid_saga(cluster: Cluster) -> None:
    url = cluster.url
    assert wait_for(lambda: _made(url)).warnings == ()
    log, other = NatsLog(url), NatsLog(url)
    stop = threading.Event()
    under_way = threading.Semaphore(0)
    acknowledged: dict[str, int] = {}
    effects: dict[str, list[int]] = {}

    def raw(saga: str) -> None:
        log.claim(saga, fresh=True)
        n = 0
        while not stop.is_set():
            n += 1
            log.flush(log.append(record(saga, n, "START" if n == 1 else "INTENT", x=n)))
            acknowledged[saga] = n
            under_way.release()

    def whole(saga: str) -> None:
        done: list[int] = []
        effects[saga] = done
        with saga_scope(saga, log=log) as scope:
            n = 0
            while not stop.is_set() or n < 3:
                n += 1
                scope.execute(
                    f"step{n}",
                    lambda n=n: done.append(n),
                    semantics=ActionSemantics.COMPENSABLE,
                    compensate=lambda result: Compensation(fn=lambda: None),
                )
                under_way.release()

    sagas = [f"raw-{n}" for n in range(6)]
    scopes = [f"scope-{n}" for n in range(4)]
    with ThreadPoolExecutor(10) as pool:
        futures = [pool.submit(raw, saga) for saga in sagas] + [pool.submit(whole, saga) for saga in scopes]
        try:
            for _ in range(2):
                _go_on(under_way, futures, 60)
                leader = wait_for(lambda: cluster.leader(url))
                leader.stop(signal.SIGKILL)
                _go_on(under_way, futures, 60)  # the two that are left have agreed on another
                assert log._heart._current.lost is None and not other._server.run(_fenced(other))
                leader.start()
                wait_for(lambda: cluster.whole(url))
        finally:
            stop.set()
        for future in futures:
            future.result(BOUND)
    for saga, most in acknowledged.items():
        assert [one.data["x"] for one in other.read(saga)] == list(range(1, most + 1))
    for saga, done in effects.items():
        assert done == list(range(1, len(done) + 1))  # each once
        assert str(other.read(saga)[-1].type) == "COMMITTED"
    assert sorted(other.unfinished().saga_ids) == sagas
    found = other.verify()
    assert found.intact, found.first_broken
    assert not any(map(other.is_live, scopes)) and all(map(other.is_live, sagas))
    log.close()
    assert other.claim("raw-0")[-1].type == "CLAIM"
    other.close()


def _made(url: str) -> Any:
    from agent_saga_core.errors import LogUnavailable

    try:
        return init(url)
    except LogUnavailable:
        return None  # they have not met yet


def _go_on(under_way: threading.Semaphore, futures: list[Any], steps: int) -> None:
    while under_way.acquire(blocking=False):
        pass
    for _ in range(steps):
        while not under_way.acquire(timeout=0.1):
            for future in futures:
                if future.done():
                    future.result()


def _fenced(log: NatsLog) -> Any:
    async def any_fenced() -> bool:
        return any(one.lease.fenced for one in await log._index.leases())

    return any_fenced
