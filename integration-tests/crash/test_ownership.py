"""One owner at a time: the stopped one keeps its saga, the dead one loses it, of many only one wins."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from crash_ledger import Ledger
from crash_log import Reader
from crash_processes import Start, first_to_speak
from crash_stores import STORES

from agent_saga_core import SagaStatus
from agent_saga_core.demo.client import Client

pytestmark = pytest.mark.parametrize("store", STORES, indirect=True)


@pytest.mark.promise("one-owner")
@pytest.mark.parametrize("ahead", [0.0, 3600.0, -3600.0], ids=["same time", "an hour ahead", "an hour behind"])
@pytest.mark.parametrize("where", ["between steps", "in a request"])
def test_a_stopped_owner_keeps_its_saga(
    start: Start, world: Client, who: str, in_log: Reader, ahead: float, where: str
) -> None:
    """Stopped is not dead. There is no timeout in this that could run out, so no time has to pass."""
    if where == "in a request":
        world.hold("/bookings")
    owner = start("saga", body=["charge", "book"] if where == "in a request" else ["charge", "heed", "book"])
    world.wait_held() if where == "in a request" else owner.hear()
    owner.signal(signal.SIGSTOP)
    recoverers = [start("recover", ahead=ahead, repeat=True, retry=retry) for retry in (True, False)]
    for recoverer in recoverers:
        recoverer.hear()
        recoverer.say("go")
        for _ in range(5):
            report = recoverer.hear()["report"]
            assert (report["live"], report["recovered"], report["attention"]) == (["order-7"], [], [])
            recoverer.say("again")
        recoverer.hear()
    assert in_log.types().count("CLAIM") == 0
    owner.signal(signal.SIGCONT)
    world.release() if where == "in a request" else owner.say("go on")
    assert owner.hear()["status"] == "COMMITTED"
    assert [len(Ledger(world).standing(who)), *Ledger(world).undo_counts(who)] == [2, 0, 0]
    for recoverer in recoverers:
        recoverer.say("again")
        report = recoverer.hear()["report"]
        assert not any(report[verdict] for verdict in ("live", "recovered", "attention", "damaged"))


@pytest.mark.promise("one-owner", "recover-anywhere")
def test_a_stopped_owner_loses_its_saga_when_it_dies(
    start: Start, world: Client, who: str, recovered: Callable[..., dict[str, Any]]
) -> None:
    owner = start("saga", body=["charge", "heed"])
    owner.hear()
    owner.signal(signal.SIGSTOP)
    assert recovered()["live"] == ["order-7"]
    owner.kill()
    assert recovered()["recovered"] == ["order-7"]
    assert Ledger(world).undo_counts(who) == [1]


@pytest.mark.promise("one-owner")
def test_of_many_that_open_one_saga_at_once_one_runs_and_the_others_hear_why_not(
    start: Start, world: Client, who: str, in_log: Reader
) -> None:
    world.hold("/charges")
    workers = [start("contend", body=["charge"]) for _ in range(8)]
    for worker in workers:
        worker.hear()
    for worker in workers:
        worker.say("go")
    world.wait_held()
    losers = first_to_speak(workers, 7)
    for loser in losers:
        said = loser.hear()
        assert (said["ran"], said["busy"]) == (False, True)
        assert "'order-7'" in said["message"] and "owned" in said["message"]
    world.release()
    (winner,) = (worker for worker in workers if worker not in losers)
    assert winner.hear() == {"ran": True}
    assert [len(Ledger(world).standing(who)), *Ledger(world).undo_counts(who)] == [1, 0]
    assert in_log.state().status is SagaStatus.COMMITTED


@pytest.mark.promise("one-owner", "replay-not-rerun", "compensate-once")
@pytest.mark.parametrize("round_", range(12))
def test_two_recoverers_and_a_resuming_owner_race(
    start: Start, world: Client, who: str, in_log: Reader, round_: int
) -> None:
    """Either the saga is rolled back or it goes on and commits: never both, never twice, never neither."""
    start("saga", body=["charge", "book"], die_at="before book").ends()
    world.wait_quiet()
    owner = start("contend", body=["charge", "book"])
    racers = [start("recover"), owner, start("recover")]
    for racer in racers:
        racer.hear()
    for turn in range(3):
        racers[(turn + round_) % 3].say("go")
    said = owner.hear()
    reports = [racer.hear()["report"] for racer in racers if racer is not owner]
    finishers = sum(report["recovered"] == ["order-7"] for report in reports)
    assert finishers + said["ran"] <= 1, "two of them won"
    ledger, state = Ledger(world), in_log.state()
    if said["ran"]:
        assert state.status is SagaStatus.COMMITTED
        assert ledger.undo_counts(who) == [0, 0] and len(ledger.effects(who)) == 2
    else:
        assert (state.status, finishers) == (SagaStatus.ROLLED_BACK, 1)
        assert ledger.undo_counts(who) == [1] and ledger.undone_once_each(who)
    assert in_log.intact()
