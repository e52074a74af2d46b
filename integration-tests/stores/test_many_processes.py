"""8 processes, 100 sagas each, 3 steps in each, SIGKILL at random: in the end the world equals what the log says."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest
from crash_equal import next_saga, the_ledger_equals_the_log
from crash_ledger import Ledger
from crash_log import Reader
from crash_processes import Start, Worker, readable
from crash_stores import STORES

from agent_saga_core.demo.client import Client

PROCESSES, SAGAS, STEPS, KILLS = 8, 100, 3, 40
EVERY = PROCESSES * SAGAS * STEPS // (KILLS + KILLS // 8)
"""About as many effects as there are between two kills: the last one comes while there is work left."""
BOUND = 240.0


class Storm:
    """The processes at work, and the one that dies whenever the world has seen so many effects more.

    Seeds say after how many effects, and who. Where that process is by then, the machine says: anywhere.
    """

    def __init__(self, start: Start, who: str, seed: int) -> None:
        self._start = start
        self._dice = random.Random(seed)
        self._until = time.monotonic() + BOUND
        self.names = [f"{who} {name}" for name in "abcdefgh"[:PROCESSES]]
        self._first = dict.fromkeys(self.names, 0)
        self._said: dict[str, list[dict[str, Any]]] = {}
        self._workers: dict[str, Worker] = {}
        self._recovering: Worker | None = None
        self.effects = self.kills = self.recoveries = 0
        self._next_kill = self._drawn()
        for name in self.names:
            self._begin(name)

    def run(self) -> None:
        """Until every process has come to its last saga."""
        while self._workers:
            readers = {worker: name for name, worker in self._workers.items()}
            recovering = [] if self._recovering is None else [self._recovering]
            spoke = readable([*readers, *recovering], self._until - time.monotonic())
            assert spoke, f"nobody says anything any more: {self.effects} effects, {self.kills} kills"
            for worker in spoke:
                if worker in readers:
                    self._hear(readers[worker], worker)
                else:
                    self._recovered(worker)
            if self.effects >= self._next_kill and self._workers:
                self._kill(self._dice.choice(sorted(self._workers)))
                if self._recovering is None:
                    self._recovering = self._recoverer()
        if self._recovering is not None:
            self._recovered(self._recovering)

    def _drawn(self) -> int:
        return self.effects + self._dice.randrange(1, 2 * EVERY)

    def _begin(self, name: str) -> None:
        given: dict[str, Any] = {"who": name, "first": self._first[name], "sagas": SAGAS}
        self._workers[name] = self._start("storm", tell=["after charge", "after book", "after pay"], **given)
        self._said[name] = []

    def _recoverer(self) -> Worker:
        """Somebody who recovers beside all of them, and now and then dies in the middle of it."""
        die_at = self._dice.randrange(1, 60) if self._dice.random() < 0.3 else 0
        recoverer = self._start("recover", concurrency=2, die_at=die_at)
        recoverer.hear()
        recoverer.say("go")
        return recoverer

    def _recovered(self, recoverer: Worker) -> None:
        said = recoverer.hear_all()
        assert recoverer.ends() in (0, -signal.SIGKILL), recoverer.errors()
        for line in said:
            assert not (line["report"]["damaged"] or line["report"]["untouched"]), line
        self.kills += recoverer.ends() == -signal.SIGKILL
        self.recoveries += bool(said)
        recoverer.close()
        self._recovering = None

    def _hear(self, name: str, worker: Worker) -> None:
        while worker.has_spoken():
            said = worker.hear()
            if "done" in said:
                assert worker.ends() == 0, worker.errors()
                self._workers.pop(name).close()
                return
            self._said[name].append(said)
            self.effects += "came_by" in said

    def _kill(self, name: str) -> None:
        worker = self._workers.pop(name)
        worker.signal(signal.SIGKILL)  # it has not said that it is done, or not so that anybody heard it
        said = worker.hear_all()
        self.kills += worker.ends() == -signal.SIGKILL
        assert worker.ends() in (0, -signal.SIGKILL), worker.errors()
        worker.close()
        self.effects += sum("came_by" in line for line in said)
        done = bool(said) and "done" in said[-1]
        self._first[name] = SAGAS if done else next_saga([*self._said[name], *said], self._first[name])
        self._next_kill = self._drawn()
        if self._first[name] < SAGAS:
            self._begin(name)


@pytest.mark.promise("no-false-clean", "compensate-once", "one-owner", "recover-anywhere", "intent-first")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("store", STORES, indirect=True)
def test_eight_processes_with_a_hundred_sagas_each_and_random_kills(
    start: Start, world: Client, who: str, in_log: Reader
) -> None:
    storm = Storm(start, who, seed=8)
    storm.run()
    assert storm.kills > KILLS / 2 and storm.recoveries > 3, (storm.kills, storm.recoveries)
    world.wait_quiet()
    last = [start("recover", concurrency=2) for _ in range(2)]
    for recoverer in last:
        recoverer.hear()
        recoverer.say("go")
    for recoverer in last:
        report = recoverer.hear()["report"]
        assert not (report["attention"] or report["damaged"] or report["untouched"])
    sagas = [f"{name}-{number}" for name in storm.names for number in range(SAGAS)]
    the_ledger_equals_the_log(Ledger(world), in_log, sagas)
