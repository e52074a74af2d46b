"""kill -9 at every boundary of a life in which every kind of record occurs, on every store."""

from __future__ import annotations

import random
import signal

import pytest
from crash_ledger import Ledger
from crash_log import Reader
from crash_processes import Start
from crash_stores import STORES, Fresh

from agent_saga_core import SagaStatus
from agent_saga_core.demo.client import Client
from agent_saga_core.records import RecordType

RESERVED = {RecordType.PREPARED, RecordType.JOIN, RecordType.COMMITTING}
ELSEWHERE = {RecordType.COMMITTED, RecordType.MOVING, RecordType.MOVED}
"""A saga that was rolled back where it began has none of them. The first has
`test_killed_at_every_boundary_and_opened_again_until_it_commits`, the others the tests of `agent-saga log copy`."""


def a_service_that_is_difficult(world: Client, saga: str) -> None:
    world.reset()
    world.fail("/charges", answer=402, times=None, field={"customer": saga, "amount": 2})
    world.fail("/charges", when="after", answer="drop", times=None, field={"customer": saga, "amount": 4})
    world.fail("/transfers", answer="drop", times=None)
    world.fail("/refunds")  # once


@pytest.mark.promise(
    "compensate-once", "recover-anywhere", "no-false-clean", "in-flight-is-unknown", "no-silent-commit"
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", STORES, indirect=True)
def test_killed_at_every_boundary_of_a_life_with_every_kind_of_record(
    start: Start, world: Client, fresh_log: Fresh
) -> None:
    """It is killed there, once more somewhere in its next life, and then it comes to its end."""
    name = fresh_log.store.name
    whole = f"{name}, whole"
    a_service_that_is_difficult(world, whole)
    log = fresh_log()
    boundaries: list[str] = start("life", log=log, saga=whole, clock="fast").hear()["trace"]
    assert {*Reader(log).types(whole)} == {*RecordType} - RESERVED - ELSEWHERE

    dice = random.Random(17)
    lived: dict[str, str] = {}
    for place, point in enumerate(boundaries, start=1):
        saga, log = f"{name}, killed at {place} ({point})", fresh_log()
        a_service_that_is_difficult(world, saga)
        for death in (place, dice.randrange(1, len(boundaries)) if place % 3 == 0 else 0):
            victim = start("life", log=log, saga=saga, clock="fast", die_at=death)
            said = victim.hear_all()
            assert victim.ends() == (0 if said else -signal.SIGKILL), f"{saga}: {victim.errors()}"
            victim.close()
        if not said:
            last = start("life", log=log, saga=saga, clock="fast")
            said = last.hear_all()
            assert last.ends() == 0, f"{saga}: {last.errors()}"
            last.close()
        assert said[0]["status"] == "ROLLED_BACK", saga
        lived[saga] = log

    ledger = Ledger(world)
    for saga, log in lived.items():
        state = Reader(log).state(saga)
        assert (state.status, state.report and state.report.clean) == (SagaStatus.ROLLED_BACK, True), saga
        assert Reader(log).intact(), saga
        assert ledger.standing(saga) == [], saga
        for effect in ledger.effects(saga):
            undos = ledger.undos(effect)
            assert len({undo["key"] for undo in undos}) == 1, saga
            assert [undo["outcome"] for undo in undos].count("executed") == 1, (saga, undos)
    moved = {transfer[end] for transfer in ledger.all["transfers"] for end in ("source", "target")}
    assert not moved & set(lived)
    assert len(boundaries) > 60
