"""Many processes, many sagas, kills at random: in the end the ledger equals what the log says."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest
from crash_ledger import Ledger
from crash_log import Reader
from crash_processes import Start, Worker
from crash_stores import STORES

from agent_saga_core import open_log
from agent_saga_core.demo.client import Client

WORKERS, SAGAS, POINTS = 8, 20, 35
"""POINTS: about as many crash points as three steps, their flushes and their rollback come by."""


def next_saga(said: list[dict[str, Any]], first: int) -> int:
    """Where the heir of a killed worker goes on: behind the saga that it had begun last."""
    begun = [line["begun"] for line in said if "begun" in line]
    return max(begun, default=first - 1) + 1


@pytest.mark.promise("no-false-clean", "compensate-once", "one-owner", "recover-anywhere", "intent-first", "lifo")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("store", STORES, indirect=True)
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
    the_ledger_equals_the_log(Ledger(world), in_log, names)


def the_ledger_equals_the_log(ledger: Ledger, in_log: Reader, names: list[str]) -> None:
    assert in_log.intact()
    log = open_log(in_log.url, create=False)
    assert log.unfinished().saga_ids == ()
    known = set(log.saga_ids())
    statuses: list[str] = []
    for saga in (f"{name}-{number}" for name in names for number in range(SAGAS)):
        effects = ledger.effects(saga)
        if saga not in known:
            assert effects == [], f"{saga}: effects, and no record"
            continue
        records = log.read(saga)
        intents = {r.data["key"] for r in records if r.type == "INTENT"}
        assert {effect["key"] for effect in effects} <= intents
        statuses.append(records[-1].type)
        if records[-1].type == "COMMITTED":
            assert len(ledger.standing(saga)) == 3 and ledger.undo_counts(saga) == [0, 0, 0]
            assert not saga.endswith(("-2", "-5", "-8")), "this one was to fail"
        else:
            assert records[-1].type == "ROLLED_BACK" and records[-1].data["clean"]
            assert ledger.undone_once_each(saga), saga
    assert statuses.count("COMMITTED") > len(statuses) / 4 and statuses.count("ROLLED_BACK") > len(statuses) / 4
    log.close()
