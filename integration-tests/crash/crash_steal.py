"""Processes that take sagas from each other, each time behind the back of who has it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from crash_stores import note_as_watched, opened_by, put_before_the_clock, server_of

from agent_saga_core import Fenced, Log, SagaBusy, open_log
from agent_saga_core.log.sqlite import SqliteLog
from agent_saga_core.records import Record

THREADS = 2
MOST_TURNS = 200_000
"""After which a thief that has not had its steals says so."""


class Lockless(SqliteLog):
    """A SQLite log whose locks exclude nobody, as if they had failed: what is left is the number of each record."""

    def take(self, saga_id: str, token: object) -> None:
        return

    def give_up(self, saga_id: str, token: object) -> None:
        self._refusals.forget(token)


def _from_leases(url: str, pid: int) -> tuple[Log, Callable[[], object]]:
    """Everybody's lease has run out, and nobody has heard of it; the other process is in the middle of its work."""
    import psycopg

    from agent_saga_core.log.postgres.address import address_of

    address = address_of(url)
    # None that somebody is changing at this moment: two of these, waiting for each other, would be a deadlock of ours.
    running = f"SELECT id FROM {address.schema}.writer WHERE lease_until > now() FOR UPDATE SKIP LOCKED"
    statement: Any = (
        f"UPDATE {address.schema}.writer SET lease_until = now() - interval '1 hour' WHERE id IN ({running})"
    )
    server = psycopg.connect("", autocommit=True, **address.parameters)  # pyright: ignore[reportArgumentType]
    using = threading.Lock()

    def steal() -> None:
        with using:
            server.execute(statement)

    return open_log(opened_by(url, pid)), steal


def _from_leases_on_nats(url: str, pid: int) -> tuple[Log, Callable[[], object]]:
    log: Any = open_log(opened_by(url, pid))
    return log, lambda: log._server.run(lambda: note_as_watched(log._index))


def _from_leases_on_redis(url: str, pid: int) -> tuple[Log, Callable[[], object]]:
    at = server_of("redis").Behind(url)
    using = threading.Lock()

    def steal() -> None:
        with using:
            put_before_the_clock(at)

    return open_log(opened_by(url, pid)), steal


def _from_locks(url: str, pid: int) -> tuple[Log, Callable[[], object]]:
    return Lockless(url.removeprefix("sqlite:///")), lambda: None


STEALING: dict[str, Callable[[str, int], tuple[Log, Callable[[], object]]]] = {
    "postgresql": _from_leases,
    "sqlite": _from_locks,
    "nats": _from_leases_on_nats,
    "redis": _from_leases_on_redis,
}
"""How a saga is taken from a process that lives, on each store on which an append can be refused."""


def stealable(url: str, pid: int) -> tuple[Log, Callable[[], object]]:
    """The log, and what makes the sagas of all others claimable."""
    return STEALING[url.partition(":")[0]](url, pid)


class _Thief:
    """One thread's share of the sagas: no other thread of this process claims them."""

    def __init__(self, log: Log, steal: Callable[[], object], mine: str, draw: random.Random) -> None:
        self._log = log
        self._steal = steal
        self._mine = mine
        self._draw = draw
        self._has: dict[str, tuple[int, int]] = {}
        self.counts = dict.fromkeys(("claimed", "stolen", "busy", "fenced", "stored"), 0)

    def go(self, sagas: Sequence[str], steals: int, enough: threading.Semaphore, stop: threading.Event) -> None:
        """Claim what is another's, and append to what is one's own, until `steals` claims took one from another.

        Then release `enough`, and go on until `stop`: who still needs some must have somebody to take them from.
        """
        for _ in range(MOST_TURNS):
            if self.counts["stolen"] >= steals:
                break
            self._turn(self._draw.choice(sagas))
        else:
            raise AssertionError(f"{self._mine} has stolen too little: {self.counts}")
        enough.release()
        while not stop.is_set():
            self._turn(self._draw.choice(sagas))

    def _turn(self, saga: str) -> None:
        try:
            if saga not in self._has:
                self._claim(saga)
            n, epoch = self._has[saga]
            self._has[saga] = n + 1, epoch
            self._log.flush(self._log.append(self._record(saga, n + 1, "INTENT", epoch)))
            self.counts["stored"] += 1
        except SagaBusy:
            self.counts["busy"] += 1
        except Fenced:
            self.counts["fenced"] += 1
            self._has.pop(saga, None)
            try:
                self._log.release(saga)
            except Fenced:
                return

    def _claim(self, saga: str) -> None:
        self._steal()
        found = self._log.claim(saga)
        self.counts["claimed"] += 1
        if not found:
            self._log.flush(self._log.append(self._record(saga, 1, "START", 1)))
            self._has[saga] = 1, 1
            return
        self._has[saga] = found[-1].n, found[-1].n
        writers = [one.data["who"] for one in found if one.type != "CLAIM"]
        self.counts["stolen"] += writers[-1] != self._mine

    def _record(self, saga: str, n: int, kind: str, epoch: int) -> Record:
        return Record(saga=saga, n=n, epoch=epoch, type=kind, time=1000.0, data={"who": self._mine})


def steal_from_each_other(
    log: Log,
    steal: Callable[[], object],
    mine: str,
    seed: int,
    sagas: Sequence[str],
    steals: int,
    until: Callable[[], object],
) -> dict[str, int]:
    """Steal on two threads, each with every second saga; how often what happened.

    `until` is called as soon as there were `steals`; when it returns, no more is stolen.
    """
    thieves = [_Thief(log, steal, mine, random.Random(seed + at)) for at in range(THREADS)]
    enough, stop = threading.Semaphore(0), threading.Event()
    threads = [
        threading.Thread(target=thief.go, args=(sagas[at::THREADS], steals // THREADS, enough, stop))
        for at, thief in enumerate(thieves)
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            enough.acquire()
        until()
    finally:
        stop.set()
    for thread in threads:
        thread.join()
    return {name: sum(thief.counts[name] for thief in thieves) for name in thieves[0].counts}
