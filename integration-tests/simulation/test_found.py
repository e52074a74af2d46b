"""What the simulation found, each through the public surface."""

import asyncio

import pytest

from agent_saga_core import (
    ActionSemantics,
    LogUnavailable,
    MemoryLog,
    Observation,
    ReplayDiverged,
    SagaAborted,
    SagaStatus,
    compensator,
    probe,
    read_saga,
    saga_scope,
    undo,
)
from agent_saga_core.log.memory import MemoryStore
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing.clock import ManualClock
from agent_saga_core.testing.world import World

C = ActionSemantics.COMPENSABLE


class Disk(MemoryLog):
    """A log whose disk can be full."""

    full = False

    def sync(self):
        if self.full:
            raise OSError("no space left")
        super().sync()


@pytest.fixture
def world():
    world = World()
    with isolated_registry():

        @compensator("refund")
        def refund(charge_id, *, idempotency_key):
            world.refund(charge_id, idempotency_key)

        @probe("look")
        def look(args, key) -> Observation:
            return world.look(key)

        yield world


def charging(world, then=None):
    def charge(amount, *, idempotency_key):
        made = world.charge(amount, idempotency_key)
        if then is not None:
            then()
        return made

    return charge


def charge(saga, world, then=None, **more):
    return saga.execute(
        "charge",
        charging(world, then),
        args={"amount": 7},
        semantics=C,
        compensate=undo("refund", charge_id="result.id"),
        **more,
    )


@pytest.mark.promise("replay-not-rerun", "no-false-clean")
def test_a_step_that_a_probe_found_has_to_be_repeated_by_the_resumed_body(world):
    store = MemoryStore()
    first = MemoryLog(ManualClock(auto=True), store=store)
    with pytest.raises(LogUnavailable), saga_scope("s", log=first) as saga:
        charge(saga, world, then=first.crash, probe="look")
    assert len(world.left) == 1
    second = MemoryLog(ManualClock(auto=True), store=store)
    with pytest.raises(ReplayDiverged), saga_scope("s", log=second):
        pass  # one call less than before
    assert world.left == []
    assert read_saga(second, "s").status is SagaStatus.ROLLED_BACK


@pytest.mark.promise("replay-not-rerun")
def test_a_result_that_could_not_be_made_durable_is_not_given_back_either(world):
    log = Disk(ManualClock(auto=True))

    def fills():
        log.full = True

    with pytest.raises(LogUnavailable), saga_scope("s", log=log) as saga:
        for _ in range(2):
            with pytest.raises(LogUnavailable):
                charge(saga, world, then=fills, key="k")
    assert len(world.charges) == 1


@pytest.mark.promise("one-owner")
def test_a_suspend_that_fails_halfway_gives_the_saga_up(world):
    store = MemoryStore()
    log = Disk(ManualClock(auto=True), store=store)
    with saga_scope("s", log=log) as saga:
        charge(saga, world)
        log.full = True
        with pytest.raises(LogUnavailable):
            saga.suspend("ask a person")
    assert not MemoryLog(store=store).is_live("s")


@pytest.mark.promise("no-silent-commit", "one-owner")
async def test_a_saga_does_not_commit_around_an_open_savepoint(world):
    log = MemoryLog(ManualClock(auto=True))
    inside, go = asyncio.Event(), asyncio.Event()

    async def work(saga):
        async with saga.savepoint() as savepoint:
            charge(savepoint, world)
            inside.set()
            await go.wait()
            raise ValueError("not this one")

    with pytest.raises(SagaAborted):
        async with saga_scope("s", log=log) as saga:
            task = asyncio.create_task(work(saga))
            await inside.wait()
    assert world.left == []
    go.set()
    with pytest.raises(ValueError):
        await task
    assert read_saga(log, "s").report.clean
    assert not log.is_live("s")
    assert len(world.asked("refund")) == 1


@pytest.mark.promise("one-owner", "closed-means-closed")
async def test_the_saga_waits_for_a_savepoint_that_is_being_undone(world):
    clock = ManualClock()
    log = MemoryLog(clock)
    undoing, go = asyncio.Event(), asyncio.Event()

    @compensator("slow refund")
    async def slow_refund(charge_id, *, idempotency_key):
        undoing.set()
        await go.wait()
        world.refund(charge_id, idempotency_key)

    async def work(saga):
        async with saga.savepoint() as savepoint:
            await savepoint.aexecute(
                "charge",
                charging(world),
                args={"amount": 7},
                semantics=C,
                compensate=undo("slow refund", charge_id="result.id"),
            )
            raise ValueError("not this one")

    async with asyncio.timeout(30):
        async with saga_scope("s", log=log) as saga:
            task = asyncio.create_task(work(saga))
            await undoing.wait()
            asyncio.get_running_loop().call_soon(go.set)
        with pytest.raises(ValueError):
            await task
    assert read_saga(log, "s").status is SagaStatus.COMMITTED
    assert world.left == []
