"""kill -9 at every boundary of a saga's life, then one or several recoverers at once."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
from crash_ledger import Ledger
from crash_log import Reader
from crash_processes import Start, Worker
from crash_stores import SHARED, STORES, Fresh

from agent_saga_core import SagaNotFound, SagaStatus
from agent_saga_core.demo.client import Client

BODY = ["charge", "book", "pay", "raise"]
STANDING = [(None, 1), ("hotel", None), (None, 3)]
UNDO_OF = {"charge": "refund", "book": "cancel", "pay": "void"}

WAYS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "on a loop": ("async", ["acharge", "acharge", "acharge", "raise"], {}),
    "relaxed": ("saga", BODY, {"durability": "relaxed"}),
    "six threads": ("parallel", ["charge", "raise"], {}),
    "six tasks": ("aparallel", ["acharge", "raise"], {}),
}


class Told:
    """What a killed worker's trace says should be found afterwards: an account of its own, made of points alone.

    A record survives kill -9 if the worker came by "written" after appending it. An undo that was made and whose
    COMPENSATED did not survive is made again under the same key; every other effect is undone exactly once.
    """

    def __init__(self, trace: list[str]) -> None:
        written = max((place for place, point in enumerate(trace) if point == "written"), default=-1)
        self.survived = [point for point in trace[: written + 1] if point.startswith("append")]
        self.landed = [tool for tool in UNDO_OF if f"after {tool}" in trace]
        self.twice = [
            tool
            for tool in self.landed
            if f"after {UNDO_OF[tool]}" in trace
            and "append COMPENSATED" not in trace[trace.index(f"after {UNDO_OF[tool]}") : written + 1]
        ]

    @property
    def attempts(self) -> dict[str, int]:
        return {tool: 2 if tool in self.twice else 1 for tool in self.landed}

    @property
    def knows_the_saga(self) -> bool:
        return bool(self.survived)


def whole_trace(start: Start, url: str) -> list[str]:
    worker = start("saga", log=url, body=BODY, close=False, who="whole")
    trace: list[str] = worker.hear()["trace"]
    return trace


def together(recoverers: list[Worker]) -> list[dict[str, Any]]:
    for recoverer in recoverers:
        recoverer.hear()
    for recoverer in recoverers:
        recoverer.say("go")
    return [recoverer.hear()["report"] for recoverer in recoverers]


def check(world: Client, log: Reader, saga: str, told: Told) -> None:
    """The ledger shows what the trace led to expect, and the log says so too."""
    ledger = Ledger(world)
    effects = ledger.effects(saga)
    named = dict(zip(("charge", "book", "pay"), effects, strict=False))
    assert list(named) == told.landed
    assert {tool: len(ledger.undos(effect)) for tool, effect in named.items()} == told.attempts
    assert ledger.undone_once_each(saga), "an effect is left, or was undone under several keys"
    if told.knows_the_saga:
        state = log.state(saga)
        assert (state.status, state.report and state.report.clean) == (SagaStatus.ROLLED_BACK, True)
    else:
        with pytest.raises(SagaNotFound):
            log.state(saga)
    assert log.intact()


@pytest.fixture
def boundaries(start: Start, fresh_log: Fresh) -> list[str]:
    """The whole run's points, from first claim to last flush; the test goes through all of them."""
    trace = whole_trace(start, fresh_log())
    assert {f"{side} {word}" for side in ("before", "after") for pair in UNDO_OF.items() for word in pair} <= {*trace}
    assert trace.count("append COMPENSATING") == 3 and trace[-1] == "after flush"
    return trace


@pytest.mark.promise("compensate-once", "recover-anywhere", "no-false-clean", "intent-first", "one-owner")
@pytest.mark.parametrize(
    ("store", "recoverers"),
    [("file", 1), ("file", 2), ("file", 4), *((name, 2) for name in SHARED)],
    indirect=["store"],
)
def test_killed_at_every_boundary_then_recovered(
    start: Start, world: Client, fresh_log: Fresh, boundaries: list[str], recoverers: int
) -> None:
    on = f"{fresh_log.store.name}, {recoverers}"
    for place, point in enumerate(boundaries, start=1):
        saga, log = f"{on} after kill {place} ({point})", fresh_log()
        victim = start("saga", log=log, body=BODY, who=saga, saga=saga, die_at=place)
        assert victim.ends() == -signal.SIGKILL, saga
        world.wait_quiet()
        reports = together([start("recover", log=log) for _ in range(recoverers)])
        told = Told(boundaries[:place])
        check(world, Reader(log), saga, told)
        finishers = [report for report in reports if report["recovered"]]
        unfinished = told.knows_the_saga and "append ROLLED_BACK" not in told.survived
        assert len(finishers) == (1 if unfinished else 0), saga
        assert not any(report["attention"] or report["damaged"] for report in reports), saga


@pytest.mark.promise("compensate-once", "recover-anywhere", "no-false-clean", "one-owner")
@pytest.mark.parametrize("store", STORES, indirect=True)
def test_recoverers_killed_at_every_boundary(
    start: Start, world: Client, fresh_log: Fresh, boundaries: list[str]
) -> None:
    """The first recoverer dies at each boundary of its own work in turn; the next one finishes."""
    place, ended = 0, -signal.SIGKILL
    while ended != 0:
        place += 1
        saga, log = f"{fresh_log.store.name}, recoverer killed at {place}", fresh_log()
        start("saga", log=log, body=BODY, who=saga, saga=saga, die_at="after pay").ends()
        first = start("recover", log=log, die_at=place)
        first.hear()
        first.say("go")
        ended = first.ends()
        assert ended in (0, -signal.SIGKILL), first.errors()
        together([start("recover", log=log) for _ in range(2)])
        ledger = Ledger(world)
        assert len(ledger.effects(saga)) == 3
        assert ledger.undone_once_each(saga), saga
        assert sum(ledger.undo_counts(saga)) <= 4, "only the undo that was under way may be repeated"
        state = Reader(log).state(saga)
        assert (state.status, state.report and state.report.clean) == (SagaStatus.ROLLED_BACK, True)
        assert Reader(log).intact()
    assert place > 10


@pytest.mark.promise("compensate-once", "no-false-clean")
@pytest.mark.parametrize("store", STORES, indirect=True)
def test_three_crashes_in_one_compensation_are_left_to_a_person(
    start: Start, world: Client, who: str, in_log: Reader, recovered: Callable[..., dict[str, Any]]
) -> None:
    start("saga", body=["charge", "heed"], die_at="after charge").ends()
    for _ in range(3):
        loop = start("recover", die_at="before refund")
        loop.hear()
        loop.say("go")
        assert loop.ends() == -signal.SIGKILL
    world.wait_quiet()
    assert recovered(retry=False)["attention"] == ["order-7"]
    assert Ledger(world).undo_counts(who) == [0]
    assert in_log.state().status is SagaStatus.NEEDS_ATTENTION
    assert recovered()["recovered"] == ["order-7"], "an explicit recovery gives new tries"
    assert Ledger(world).undo_counts(who) == [1]


@pytest.mark.promise("replay-not-rerun", "recover-anywhere", "in-flight-is-unknown", "no-silent-commit")
@pytest.mark.parametrize("store", STORES, indirect=True)
def test_killed_at_every_boundary_and_opened_again_until_it_commits(
    start: Start, world: Client, fresh_log: Fresh
) -> None:
    """The body runs again from its top, twice interrupted: each effect stands once, and none is made for nothing."""
    body = ["charge", "book", "pay"]
    whole = start("saga", log=fresh_log(), body=body, close=False, who="whole").hear()["trace"]
    dice = random.Random(11)
    for place, point in enumerate(whole, start=1):
        saga, log = f"{fresh_log.store.name}, opened again after kill {place} ({point})", fresh_log()
        deaths = [place, dice.randrange(1, len(whole)), 0]
        for death in deaths:
            owner = start("saga", log=log, body=body, who=saga, saga=saga, die_at=death)
            ended = owner.ends()
            world.wait_quiet()
        assert ended == 0 and owner.hear()["status"] == "COMMITTED", saga
        ledger = Ledger(world)
        standing = ledger.standing(saga)
        assert [(found.get("kind"), found.get("amount")) for found in standing] == STANDING, saga
        assert [len(ledger.undos(found)) for found in standing] == [0, 0, 0], saga
        # What else there was is a payment that nobody could look up: it was undone by its key before the next attempt.
        gone = [found for found in ledger.effects(saga) if found not in standing]
        assert all(found["amount"] == 3 and len(ledger.undos(found)) == 1 for found in gone), saga
        assert Reader(log).intact()


@pytest.mark.promise("compensate-once", "recover-anywhere", "no-false-clean", "any-thread-any-loop")
@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.parametrize("mode", WAYS)
def test_killed_at_every_boundary_in_other_ways_of_running(
    start: Start, world: Client, fresh_log: Fresh, mode: str
) -> None:
    job, body, options = WAYS[mode]
    every = not mode.startswith("six") and fresh_log.store.name == "file"
    place, ended, stride = 0, -signal.SIGKILL, 1 if every else 3
    while ended == -signal.SIGKILL:
        place += stride
        saga, url = f"{fresh_log.store.name}, {mode} killed at {place}", fresh_log()
        given = {"log": url, "who": saga, "saga": saga, **options}
        victim = start(job, body=body, die_at=place, **given)
        ended = victim.ends()
        world.wait_quiet()
        together([start("recover", log=url) for _ in range(2)])
        ledger = Ledger(world)
        assert ledger.undone_once_each(saga), saga
        assert sum(ledger.undo_counts(saga)) <= len(ledger.effects(saga)) + 1, saga
        with Reader(url).opened() as log:
            assert log.unfinished().saga_ids == () and log.verify().intact, saga
            for record in log.read(saga)[-1:]:
                assert (record.type, record.data["clean"]) == ("ROLLED_BACK", True), saga
    assert ended in (0, 1) and place > 25
