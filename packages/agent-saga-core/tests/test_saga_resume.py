"""Opening an id again: resume by replay or by going on, a committed saga that only replays, and what is refused."""

from __future__ import annotations

import datetime
import decimal
import threading

import pytest

from agent_saga_core import (
    ActionSemantics,
    Compensation,
    IdempotencyConflict,
    LogUnavailable,
    MemoryLog,
    Observation,
    ReplayDiverged,
    SagaBusy,
    SagaNotRunning,
    SagaStatus,
    StepStatus,
    StepUnknown,
    compensator,
    read_saga,
    recover,
    saga_scope,
    undo,
)
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing import ManualClock
from agent_saga_core.testing.world import World

C, R, V = ActionSemantics.COMPENSABLE, ActionSemantics.READ_ONLY, ActionSemantics.REVERSIBLE


class Died(BaseException):
    pass


class OutOfStock(Exception):
    pass


@pytest.fixture(autouse=True)
def names():
    with isolated_registry():
        yield


@pytest.fixture
def clock():
    return ManualClock(auto=True)


@pytest.fixture
def log(clock):
    return MemoryLog(clock)


@pytest.fixture
def world():
    return World()


@pytest.fixture
def refund(world):
    @compensator("refund")
    def refund(charge_id: str, *, idempotency_key: str) -> None:
        world.refund(charge_id, idempotency_key)

    return refund


@pytest.fixture
def charge(world, refund):
    def charge(saga, amount, **more):
        return saga.execute(
            "charge",
            lambda amount, idempotency_key: world.charge(amount, idempotency_key),
            args={"amount": amount},
            semantics=C,
            compensate=undo(refund, charge_id="result.id"),
            **more,
        )

    return charge


def _die(log, body, **options):
    """Run the body in a process that dies at its end, and open the log as the next process."""
    saga = saga_scope("s", log=log, **options)
    saga.__enter__()
    try:
        body(saga)
    except (Died, LogUnavailable):
        pass
    log.crash()
    with pytest.raises(LogUnavailable):
        saga.__exit__(None, None, None)
    return MemoryLog(log.clock, store=log.store)


# --- replay


def test_the_same_calls_again_give_the_recorded_results_and_one_more_runs(log, world, charge):
    first = []
    again = _die(log, lambda saga: first.extend([charge(saga, 5), charge(saga, 6), charge(saga, 5)]))
    with saga_scope("s", log=again) as saga:
        assert [charge(saga, 6), charge(saga, 5), charge(saga, 5)] == [first[1], first[0], first[2]]
        assert len(world.charges) == 3
        assert charge(saga, 7)["id"] == "ch_4"
    assert saga.status is SagaStatus.COMMITTED
    assert len(world.left) == 4


VALUES = [
    {"a": [1, 2.5, None, True, "x"]},
    datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    decimal.Decimal("1.10"),
    b"\x00\xff",
    (1, (2, 3)),
    {1: 2},
    frozenset({1}),
    2**70,
    float("inf"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_a_replayed_result_is_equal_in_value_and_type(log, value):
    def call(saga):
        return saga.execute("t", lambda: value, semantics=C, compensate=lambda r: Compensation(fn=print))

    again = _die(log, call)
    with saga_scope("s", log=again) as saga:
        got = saga.execute("t", lambda: pytest.fail("ran again"), semantics=C, compensate=lambda r: None)
        assert got == value and type(got) is type(value)


def test_fewer_calls_cannot_commit(log, world, charge):
    again = _die(log, lambda saga: (charge(saga, 5), charge(saga, 6)))
    with pytest.raises(ReplayDiverged, match="charge"):
        with saga_scope("s", log=again) as saga:
            charge(saga, 5)
    assert saga.report.clean and world.left == []


def test_read_only_calls_need_not_be_met_again_and_replay(log, charge):
    calls = []

    def look(saga):
        return saga.execute("look", lambda: calls.append(1) or len(calls), semantics=R)

    again = _die(log, lambda saga: (look(saga), charge(saga, 5)))
    with saga_scope("s", log=again) as saga:
        assert look(saga) == 1
        charge(saga, 5)
    assert calls == [1]
    log = MemoryLog(log.clock)
    again = _die(log, lambda saga: (look(saga), charge(saga, 5)))
    with saga_scope("s", log=again) as saga:
        charge(saga, 5)
    assert saga.status is SagaStatus.COMMITTED


def test_continue_goes_on_where_it_was(log, world, charge):
    again = _die(log, lambda saga: (charge(saga, 5), charge(saga, 6)))
    with saga_scope("s", log=again, resume="continue") as saga:
        assert charge(saga, 5)["id"] == "ch_3"
    assert saga.status is SagaStatus.COMMITTED and len(world.left) == 3


def test_continue_still_replays_what_has_a_key(log, world, charge):
    again = _die(log, lambda saga: charge(saga, 5, key="k"))
    with saga_scope("s", log=again, resume="continue") as saga:
        assert charge(saga, 5, key="k")["id"] == "ch_1"
        with pytest.raises(IdempotencyConflict):
            charge(saga, 6, key="k")


def test_a_failed_call_of_the_first_run_is_not_replayed(log, world, charge):
    """The body meets the attempt that succeeded."""
    tries = []

    def flaky(saga):
        def act():
            tries.append(1)
            if len(tries) == 1:
                raise ValueError
            return len(tries)

        return saga.execute(
            "flaky", act, semantics=C, not_applied=ValueError, compensate=lambda r: Compensation(fn=print)
        )

    def body(saga):
        with pytest.raises(ValueError):
            flaky(saga)
        assert flaky(saga) == 2

    again = _die(log, body)
    with saga_scope("s", log=again) as saga:
        assert flaky(saga) == 2
    assert tries == [1, 1] and saga.status is SagaStatus.COMMITTED


def test_a_resumed_saga_that_fails_undoes_what_the_first_process_did(log, world, charge):
    again = _die(log, lambda saga: charge(saga, 5))
    with pytest.raises(OutOfStock):
        with saga_scope("s", log=again) as saga:
            charge(saga, 5)
            charge(saga, 6)
            raise OutOfStock
    assert world.left == [] and saga.report.clean


def test_savepoints_are_found_again(log, world, charge):
    def body(saga):
        with pytest.raises(OutOfStock):
            with saga.savepoint() as inner:
                charge(inner, 1)
                raise OutOfStock
        with saga.savepoint() as inner:
            return charge(inner, 2)

    first = []
    again = _die(log, lambda saga: first.append(body(saga)))
    with saga_scope("s", log=again) as saga:
        assert body(saga) == first[0]
    assert saga.status is SagaStatus.COMMITTED
    assert [c.amount for c in world.left] == [2]


def test_a_redacted_result_cannot_be_given_back_and_is_not_run_again(log):
    calls = []

    def login(saga):
        return saga.execute(
            "login",
            lambda: calls.append(1) or {"token": "x"},
            semantics=C,
            compensate=lambda r: Compensation(handler="out", kwargs={}),
        )

    @compensator("out")
    def out() -> None:
        calls.append("out")

    again = _die(log, login)
    with pytest.raises(ReplayDiverged, match="login"):
        with saga_scope("s", log=again) as saga:
            login(saga)
    assert calls == [1, "out"] and saga.report.clean


# --- private state, and reads in flight at the death


def _die_inside(log, tool, how, before):
    """Die while a non-durable call is in flight whose INTENT a later flush carried along."""
    inside, go = threading.Event(), threading.Event()

    def stay():
        inside.set()
        go.wait(20)

    def body(saga):
        def call():
            with pytest.raises(LogUnavailable):
                saga.execute(tool, stay, **how)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        assert inside.wait(20)
        before(saga)
        threads.append(thread)

    threads = []
    again = _die(log, body)
    go.set()
    threads[0].join(20)
    return again


@pytest.mark.parametrize("met_again", [True, False])
@pytest.mark.parametrize("semantics", [R, V])
def test_a_private_or_reading_call_in_flight_at_the_death_runs_again(log, charge, semantics, met_again):
    how = {"semantics": semantics}
    if semantics is V:
        how["compensate"] = lambda r: Compensation(fn=print)
    again = _die_inside(log, "private", how, lambda saga: charge(saga, 5))
    assert read_saga(again, "s").steps[0].status is StepStatus.INTENDED
    with saga_scope("s", log=again) as saga:
        if met_again:
            assert saga.execute("private", lambda: "ran", **how) == "ran"
        charge(saga, 5)
    assert saga.status is SagaStatus.COMMITTED


def test_reversible_runs_again_in_another_process_and_is_restored_there(log, charge):
    state = {"x": 0}

    def put(saga):
        def act():
            old, state["x"] = state["x"], state["x"] + 1
            return old

        return saga.execute(
            "put", act, semantics=V, compensate=lambda old: Compensation(fn=lambda: state.update(x=old))
        )

    again = _die(log, lambda saga: (put(saga), charge(saga, 5)))
    state["x"] = 10
    with pytest.raises(OutOfStock):
        with saga_scope("s", log=again) as saga:
            assert put(saga) == 10
            assert state["x"] == 11
            raise OutOfStock
    assert state["x"] == 10 and saga.report.clean
    log = MemoryLog(log.clock)
    again = _die(log, lambda saga: (put(saga), charge(saga, 5)))
    with saga_scope("s", log=again) as saga:
        charge(saga, 5)
    assert saga.status is SagaStatus.COMMITTED


# --- unsettled steps at opening


def _in_flight(log, world, refund, **more):
    def die(amount, idempotency_key):
        world.charge(amount, idempotency_key)
        log.crash()
        raise Died

    return _die(
        log,
        lambda saga: saga.execute(
            "charge", die, args={"amount": 5}, semantics=C, compensate=undo(refund, charge_id="result.id"), **more
        ),
    )


def test_a_step_that_nobody_can_settle_rolls_back_and_says_so(log, world, refund):
    again = _in_flight(log, world, refund)
    with pytest.raises(StepUnknown, match="charge"):
        with saga_scope("s", log=again):
            pytest.fail("the body ran")
    assert read_saga(again, "s").status is SagaStatus.NEEDS_ATTENTION
    assert not again.owned("s")


def test_a_step_that_its_probe_finds_goes_on(log, world, charge, refund):
    from agent_saga_core import probe

    @probe("look")
    def look(args, key):
        return world.look(key)

    again = _in_flight(log, world, refund, probe=look)
    with saga_scope("s", log=again) as saga:
        assert charge(saga, 5)["id"] == "ch_1"
    assert saga.status is SagaStatus.COMMITTED and len(world.charges) == 1


def test_a_step_in_doubt_is_waited_for_at_most_the_drain_time(log, clock, world, refund):
    from agent_saga_core import probe

    @probe("look")
    def look(args, key):
        return Observation(landed=False)

    again = _in_flight(log, world, refund, probe=look, in_doubt=20.0)
    began = clock.monotonic()
    with saga_scope("s", log=again, drain_timeout=25.0):
        assert clock.monotonic() - began == 20.0
    log = MemoryLog(clock)
    again = _in_flight(log, world, refund, probe=look, in_doubt=20.0)
    with pytest.raises(StepUnknown):
        with saga_scope("s", log=again, drain_timeout=5.0):
            pytest.fail("the body ran")
    assert not again.owned("s")
    assert not read_saga(again, "s").report.clean
    assert recover(again).recovered == ("s",)


# --- what opening refuses


def test_a_committed_saga_only_replays(log, world, charge):
    with saga_scope("s", log=log) as saga:
        charge(saga, 5)
    before = log.read("s")
    with pytest.raises(OutOfStock):
        with saga_scope("s", log=log) as again:
            assert charge(again, 5)["id"] == "ch_1"
            with pytest.raises(SagaNotRunning):
                charge(again, 6)
            with pytest.raises(SagaNotRunning):
                again.abort("no")
            with again.savepoint():
                pass
            with again.savepoint():
                pass
            raise OutOfStock
    assert log.read("s") == before and not log.owned("s")
    assert len(world.left) == 1


@pytest.mark.parametrize("status", ["ROLLED_BACK", "NEEDS_ATTENTION"])
def test_an_ended_saga_is_refused(log, charge, status):
    def fail():
        if status == "NEEDS_ATTENTION":
            raise RuntimeError

    with pytest.raises(Exception):  # noqa: B017 - which one is another test's
        with saga_scope("s", log=log) as saga:
            saga.execute("t", lambda: 1, semantics=C, compensate=lambda r: Compensation(fn=fail))
            raise OutOfStock
    with pytest.raises(SagaNotRunning) as raised:
        with saga_scope("s", log=log):
            pytest.fail("the body ran")
    assert raised.value.status == status
    assert not log.owned("s")


def _elsewhere(fn):
    """In a thread without this one's context."""
    failures = []

    def guarded():
        try:
            fn()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(30)
    return failures


def test_an_owned_saga_is_busy_and_stays_owned(log, charge):
    with saga_scope("s", log=log) as saga:
        charge(saga, 5)

        def open_it(there):
            with saga_scope("s", log=there):
                pytest.fail("the body ran")

        for there in (log, MemoryLog(log.clock, store=log.store)):
            (error,) = _elsewhere(lambda there=there: open_it(there))
            assert isinstance(error, SagaBusy)
            assert log.owned("s")
        charge(saga, 6)
    assert saga.status is SagaStatus.COMMITTED


def test_busy_timeout_waits_for_the_owner(log, charge):
    clock = ManualClock()
    log = MemoryLog(clock)
    done = []

    def open_it():
        with saga_scope("s", log=log, busy_timeout=5.0) as second:
            done.append(second.status)

    with saga_scope("s", log=log) as saga:
        charge(saga, 5)
        thread = threading.Thread(target=open_it, daemon=True)
        thread.start()
        clock.wait_until_waiting()
        clock.advance(0.05)
        clock.wait_until_waiting()
    clock.advance(0.05)
    thread.join(20)
    assert done == [SagaStatus.RUNNING] or done == [SagaStatus.COMMITTED]


def test_a_scope_is_entered_once(log):
    scope = saga_scope("s", log=log)
    with scope:
        pass
    with pytest.raises(SagaBusy):
        scope.__enter__()


@pytest.mark.parametrize("saga_id", ["", "a\nb", "x" * 513, "\ud800", "a\x7fb"])
def test_ids_that_no_store_could_hold(log, saga_id):
    with pytest.raises(ValueError):
        saga_scope(saga_id, log=log)


@pytest.mark.parametrize(
    "odd",
    [
        {"name": "\ud800"},
        {"name": 5},
        {"drain_timeout": float("nan")},
        {"drain_timeout": 1e12},
        {"busy_timeout": float("inf")},
        {"orphan_after": -1.0},
        {"on_failure": "hope"},
        {"durability": "some"},
        {"resume": "perhaps"},
    ],
)
def test_options_that_no_saga_could_have(log, odd):
    """No thread can wait for 1e12 seconds: the end of the scope would raise instead of waiting."""
    with pytest.raises(ValueError):
        saga_scope(log=log, **odd)
