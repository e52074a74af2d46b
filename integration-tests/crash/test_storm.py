"""Many processes, many sagas, kills at random: in the end the ledger equals what the log says."""

from __future__ import annotations

import random
import signal

import pytest
from crash_equal import next_saga, the_ledger_equals_the_log
from crash_ledger import Ledger
from crash_log import Reader
from crash_processes import Start, Worker
from crash_stores import STORES

from agent_saga_core.demo.client import Client

WORKERS, SAGAS, POINTS = 8, 20, 35
"""POINTS: about as many crash points as three steps, their flushes and their rollback come by."""


@pytest.mark.promise("no-false-clean", "compensate-once", "one-owner", "recover-anywhere", "intent-first", "lifo")
@pytest.mark.parametrize(("store", "seed"), [("file", 2), *((name, 1) for name in STORES)], indirect=["store"])
def test_random_kills_over_one_log(start: Start, world: Client, who: str, in_log: Reader, seed: int) -> None:
    dice = random.Random(seed)
    names = [f"{who} {name}" for name in "abcdefgh"]
    progress = dict.fromkeys(names, 0)
    kills = 0
    while unfinished := [name for name in names if progress[name] < SAGAS]:
        running: list[tuple[str, Worker]] = [
            (name, start("storm", who=name, first=progress[name], sagas=SAGAS, die_at=dice.randrange(1, 4 * POINTS)))
            for name in unfinished
        ]
        recoverer = start("recover", concurrency=2)  # in the thick of it
        recoverer.hear()
        recoverer.say("go")
        for name, worker in running:
            said = worker.hear_all()
            progress[name] = SAGAS if said and "done" in said[-1] else next_saga(said, progress[name])
            kills += worker.ends() == -signal.SIGKILL
            assert worker.ends() in (0, -signal.SIGKILL), worker.errors()
        recoverer.hear()
    assert kills > WORKERS
    world.wait_quiet()
    last = [start("recover", concurrency=2) for _ in range(2)]
    for recoverer in last:
        recoverer.hear()
        recoverer.say("go")
    for recoverer in last:
        report = recoverer.hear()["report"]
        assert not (report["attention"] or report["damaged"] or report["untouched"])
    sagas = [f"{name}-{number}" for name in names for number in range(SAGAS)]
    the_ledger_equals_the_log(Ledger(world), in_log, sagas)
