"""What must be durable before what, and what it costs: PROTOCOL in `docs/design.md`, seen by a log that tells."""

from __future__ import annotations

import pytest

from agent_saga_core import (
    ActionSemantics,
    Compensation,
    MemoryLog,
    SagaAborted,
    compensator,
    recover,
    saga_scope,
    undo,
)
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing import ManualClock

C, R, V = ActionSemantics.COMPENSABLE, ActionSemantics.READ_ONLY, ActionSemantics.REVERSIBLE
IRREVERSIBLE = ActionSemantics.IRREVERSIBLE


class OutOfStock(Exception):
    pass


class _Telling(MemoryLog):
    """Notes what is written and synced, in order; `call` notes what the outside world sees, and what was durable."""

    def __init__(self, clock, store=None):
        super().__init__(clock, store=store)
        self.told = []

    def sync(self):
        super().sync()
        self.told.append("sync")

    def kinds(self, saga_id="s", *, durable):
        volatile = {n for (saga, n) in self.store.volatile if saga == saga_id}
        history = self.store.records.get(saga_id, {})
        return [str(r.type) for n, r in sorted(history.items()) if not durable or n not in volatile]

    def call(self, name):
        self.told.append(name)
        return self.kinds(durable=True)


@pytest.fixture(autouse=True)
def names():
    with isolated_registry():
        yield


@pytest.fixture
def log():
    return _Telling(ManualClock(auto=True))


def _step(saga, log, name, seen, *, semantics=C):
    how = {"semantics": semantics}
    if semantics in (C, V):
        back = lambda: seen.append((f"undo {name}", log.call(f"undo {name}")))  # noqa: E731
        how["compensate"] = lambda r: Compensation(fn=back)
    return saga.execute(name, lambda: seen.append((name, log.call(name))), **how)


def test_one_step_is_three_syncs(log):
    seen = []
    with saga_scope("s", log=log) as saga:
        _step(saga, log, "a", seen)
        assert log.kinds(durable=True) == ["START", "INTENT", "DONE"]
    assert log.told == ["sync", "a", "sync", "sync"]
    assert seen == [("a", ["START", "INTENT"])]
    assert log.kinds(durable=True) == ["START", "INTENT", "DONE", "COMMITTED"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_rollback_of_n_steps_is_n_plus_one_syncs(log, count):
    seen = []
    with pytest.raises(OutOfStock):
        with saga_scope("s", log=log) as saga:
            for n in range(count):
                _step(saga, log, str(n), seen)
            log.told.clear()
            raise OutOfStock
    expected = []
    for n in reversed(range(count)):
        expected += ["sync", f"undo {n}"]
    assert log.told == [*expected, "sync"]
    for at, (name, durable) in enumerate(seen[count:]):
        assert name.startswith("undo")
        assert durable.count("COMPENSATING") == at + 1 and durable.count("COMPENSATED") == at
        assert durable.count("ROLLING_BACK") == 1
    assert log.kinds(durable=True)[-1] == "ROLLED_BACK"


@pytest.mark.parametrize("semantics", [R, V])
def test_private_and_reading_steps_cost_no_sync_of_their_own(log, semantics):
    seen = []
    with saga_scope("s", log=log) as saga:
        for n in range(5):
            _step(saga, log, str(n), seen, semantics=semantics)
        assert "sync" not in log.told
        _step(saga, log, "durable", seen)
    assert log.told.count("sync") == 3


def test_an_empty_saga_is_one_sync(log):
    with saga_scope("s", log=log):
        pass
    assert log.told == ["sync"]


def test_an_irreversible_intent_is_durable_before_its_call(log):
    seen = []
    with saga_scope("s", log=log, approve=lambda request: True) as saga:
        _step(saga, log, "send", seen, semantics=IRREVERSIBLE)
    assert seen == [("send", ["START", "INTENT"])] and log.told.count("sync") == 3


def test_a_refusal_costs_no_sync_and_rides_with_the_next_intent(log):
    seen = []

    def refuse():
        raise ValueError

    with saga_scope("s", log=log) as saga:
        log.told.clear()
        with pytest.raises(ValueError):
            saga.execute("t", refuse, semantics=C, not_applied=ValueError, compensate=lambda r: Compensation(fn=print))
        assert log.told == ["sync"]
        _step(saga, log, "next", seen)
    assert seen[0][1][-2:] == ["NOT_APPLIED", "INTENT"]


def test_a_new_attempts_intent_carries_the_end_of_the_last(log):
    durable = []

    def flaky():
        durable.append(log.kinds(durable=True))
        if len(durable) == 1:
            raise RuntimeError

    @compensator("back")
    def back() -> None: ...

    with saga_scope("s", log=log) as saga:
        call = {"semantics": C, "compensate": undo(back, if_absent="noop")}
        with pytest.raises(RuntimeError):
            saga.execute("t", flaky, **call)
        saga.execute("t", flaky, **call)
    assert durable[1][2:] == ["UNKNOWN", "COMPENSATING", "COMPENSATED", "INTENT"]


def test_abort_is_durable_when_it_returns(log):
    with pytest.raises(SagaAborted):
        with saga_scope("s", log=log) as saga:
            saga.abort("no")
            assert log.kinds(durable=True)[-1] == "ABORT"


def test_suspended_is_durable_when_it_returns_and_before_the_saga_is_given_up(log):
    given_up = []
    give_up = log.give_up
    log.give_up = lambda saga_id, token: (given_up.append(log.kinds(durable=True)), give_up(saga_id, token))
    with saga_scope("s", log=log) as saga:
        saga.suspend("ask")
        assert log.kinds(durable=True) == ["START", "SUSPENDED"]
    assert given_up == [["START", "SUSPENDED"]]


@pytest.mark.parametrize("durability", ["strict", "relaxed"])
@pytest.mark.parametrize("fails", [True, False])
def test_every_end_is_durable_before_the_saga_is_given_up(log, durability, fails):
    given_up = []
    give_up = log.give_up
    log.give_up = lambda saga_id, token: (given_up.append(log.kinds(durable=True)[-1]), give_up(saga_id, token))
    try:
        with saga_scope("s", log=log, durability=durability) as saga:
            _step(saga, log, "a", [])
            if fails:
                raise OutOfStock
    except OutOfStock:
        pass
    assert given_up == ["ROLLED_BACK" if fails else "COMMITTED"]


def test_relaxed_results_survive_the_process(log):
    with saga_scope("s", log=log, durability="relaxed") as saga:
        _step(saga, log, "a", [])
        assert log.kinds(durable=False) == ["START", "INTENT", "DONE"]


def test_a_claim_rides_with_the_next_record_that_is_flushed(log):
    class Died(BaseException):
        pass

    @compensator("back")
    def back() -> None:
        durable.append(again.kinds(durable=True))

    durable = []
    with pytest.raises(BaseException):  # noqa: B017 - whatever a dead process says
        with saga_scope("s", log=log) as saga:
            saga.execute("t", lambda: 1, semantics=C, compensate=undo(back))
            log.crash()
            raise Died
    again = _Telling(log.clock, store=log.store)
    assert recover(again).recovered == ("s",)
    assert durable == [["START", "INTENT", "DONE", "CLAIM", "ROLLING_BACK", "COMPENSATING"]]
    assert again.told == ["sync", "sync"]


async def test_the_same_order_on_a_loop(log):
    seen = []
    with pytest.raises(OutOfStock):
        async with saga_scope("s", log=log) as saga:
            for name in "ab":

                async def effect(name=name):
                    seen.append((name, log.call(name)))

                def back(name=name):
                    seen.append((f"undo {name}", log.call(f"undo {name}")))

                await saga.aexecute(name, effect, semantics=C, compensate=lambda r, back=back: Compensation(fn=back))
            raise OutOfStock
    assert log.told == ["sync", "a", "sync", "sync", "b", "sync", "sync", "undo b", "sync", "undo a", "sync"]
    assert [durable[-1] for _, durable in seen] == ["INTENT", "INTENT", "COMPENSATING", "COMPENSATING"]
