"""Recovery: another process finishes a saga from its log alone. A process dies here by `MemoryLog.crash`."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent_saga_core import (
    ActionSemantics,
    Compensation,
    DeclarationError,
    LogUnavailable,
    MemoryLog,
    NotApplied,
    Observation,
    RecoveryReport,
    RollbackIncomplete,
    SagaBusy,
    SagaNotFound,
    SagaNotRunning,
    SagaStatus,
    StepStatus,
    arecover,
    compensator,
    credential,
    list_sagas,
    probe,
    read_saga,
    recover,
    resolve,
    saga_scope,
    set_credential_resolver,
    undo,
)
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing import ManualClock
from agent_saga_core.testing.world import World

C, R, V = ActionSemantics.COMPENSABLE, ActionSemantics.READ_ONLY, ActionSemantics.REVERSIBLE
IRREVERSIBLE = ActionSemantics.IRREVERSIBLE


class Died(BaseException):
    """The process is gone: raised so that nothing of it runs on."""


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
def void(world):
    @compensator("void")
    def void(key: str, *, idempotency_key: str) -> None:
        world.void(key, idempotency_key)

    return void


@pytest.fixture
def soft_void(world):
    @compensator("soft void")
    def soft_void(key: str, *, idempotency_key: str) -> None:
        world.void(key, idempotency_key, forbid=False)

    return soft_void


def _die(log, clock, body, saga_id="s", **options):
    """Run a body in a saga whose process dies at its end; returns the log that the next process opens."""
    saga = saga_scope(saga_id, log=log, **options)
    saga.__enter__()
    try:
        body(saga)
    except (Died, LogUnavailable):
        pass
    finally:
        log.crash()
        with pytest.raises(LogUnavailable):  # what is left of the dead process must end too
            saga.__exit__(None, None, None)
    return MemoryLog(clock, store=log.store)


def _charge(world, saga, how, *, amount=5, act=None, **more):
    def charge(amount: int, idempotency_key: str):
        return (act or world.charge)(amount, idempotency_key)

    return saga.execute("charge", charge, args={"amount": amount}, semantics=C, compensate=how, **more)


def _dead(*args, **kwargs):
    raise Died


class _Sent:
    """Sends a request that arrives later, and dies."""

    def __init__(self, world, log):
        self.world, self.log = world, log

    def __call__(self, amount, key):
        self.world.queue.append(lambda: self.world.charge(amount, key))
        self.log.crash()
        raise Died


# --- the table


def test_a_done_step_is_undone_with_the_key_that_the_log_holds(log, clock, world, refund):
    again = _die(log, clock, lambda saga: _charge(world, saga, undo(refund, charge_id="result.id")))
    key = read_saga(again, "s").steps[0].compensation_key
    report = recover(again)
    assert report.recovered == ("s",) and report.reasons == {}
    assert world.left == [] and world.asked("refund") == [key]
    state = read_saga(again, "s")
    assert state.status is SagaStatus.ROLLED_BACK and state.report.clean
    assert recover(again) == type(report)()


def test_a_call_of_unknown_fate_whose_undo_is_unsafe_is_not_undone_and_named(log, clock, world, void):
    again = _die(
        log, clock, lambda saga: _charge(world, saga, undo(void, key="step.forward_key"), act=_Sent(world, log))
    )
    report = recover(again)
    assert report.attention == ("s",)
    (left,) = read_saga(again, "s").report.remaining
    assert left.tool == "charge" and left.status is StepStatus.UNKNOWN
    assert world.asked("void") == []


@pytest.mark.parametrize("lands", [True, False])
def test_a_request_that_lands_after_recovery_began_is_undone_once(world, soft_void, lands):
    """No clean verdict before `in_doubt` has passed on the recoverer's clock; the undo comes after that."""
    first = MemoryLog(ManualClock(monotonic=50_000.0))
    _die(
        first,
        None,
        lambda saga: _charge(
            world,
            saga,
            undo(soft_void, if_absent="noop", key="step.forward_key"),
            act=_Sent(world, first),
            in_doubt=20.0,
        ),
    )
    clock = ManualClock(monotonic=5.0)  # another process: its clock is no continuation of the first one's
    log = MemoryLog(clock, store=first.store)
    reports = []
    worker = threading.Thread(target=lambda: reports.append(recover(log)), daemon=True)
    worker.start()
    clock.wait_until_waiting()
    assert world.asked("void") == [] and log.owned("s")
    clock.advance(2.0)
    if lands:
        world.deliver()
    clock.advance(17.0)
    assert world.asked("void") == [] and not read_saga(log, "s").status.final
    clock.advance(1.0)
    worker.join(20)
    assert reports[0].recovered == ("s",)
    assert world.left == [] and len(world.asked("void")) == 1
    assert read_saga(log, "s").report.clean


def test_forbids_need_not_wait(log, clock, world, void):
    again = _die(
        log,
        clock,
        lambda saga: _charge(
            world, saga, undo(void, if_absent="forbids", key="step.forward_key"), act=_Sent(world, log)
        ),
    )
    began = clock.monotonic()
    assert recover(again).recovered == ("s",)
    assert clock.monotonic() == began
    world.deliver()
    assert world.asked("charge") and world.charges == {}


def test_done_steps_are_undone_while_another_is_in_doubt(world, refund, soft_void):
    first = MemoryLog(ManualClock())

    def body(saga):
        _charge(world, saga, undo(refund, charge_id="result.id"))
        _charge(
            world,
            saga,
            undo(soft_void, if_absent="noop", key="step.forward_key"),
            act=_Sent(world, first),
            amount=6,
        )

    _die(first, None, body)
    clock = ManualClock()
    log = MemoryLog(clock, store=first.store)
    worker = threading.Thread(target=recover, args=(log,), daemon=True)
    worker.start()
    clock.wait_until_waiting()
    assert len(world.asked("refund")) == 1 and world.left == []
    clock.advance(30.0)
    worker.join(20)
    assert read_saga(log, "s").report.clean


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_wall_clock_that_is_wrong_by_an_hour_changes_no_wait(world, soft_void, hours):
    first = MemoryLog(ManualClock())
    _die(
        first,
        None,
        lambda saga: _charge(
            world, saga, undo(soft_void, if_absent="noop", key="step.forward_key"), act=_Sent(world, first)
        ),
    )
    clock = ManualClock(auto=True)
    clock.set_wall(clock.time() + hours * 3600)
    log = MemoryLog(clock, store=first.store)
    began = clock.monotonic()
    assert recover(log).recovered == ("s",)
    assert clock.monotonic() - began == 30.0


def test_a_stored_moment_lengthens_the_wait_and_never_shortens_it(world, soft_void):
    for hours, expected in ((1, 30.0), (-1, 60.0)):
        first = MemoryLog(ManualClock())

        def body(saga, first=first):
            with pytest.raises(TimeoutError):
                _charge(
                    world,
                    saga,
                    undo(soft_void, if_absent="noop", key="step.forward_key"),
                    act=lambda *a: (_ for _ in ()).throw(TimeoutError()),
                )
            raise Died

        _die(first, None, body)
        clock = ManualClock(auto=True)
        clock.set_wall(clock.time() + hours * 3600)
        log = MemoryLog(clock, store=first.store)
        began = clock.monotonic()
        assert recover(log).recovered == ("s",)
        assert clock.monotonic() - began == expected


# --- failing compensations


def test_a_compensation_that_fails_three_times_is_retried_by_an_explicit_recover_with_the_same_key(
    log, clock, world, refund
):
    down, keys = [True], []

    @compensator("flaky")
    def flaky(*, idempotency_key: str) -> None:
        keys.append(idempotency_key)
        if down[0]:
            raise RuntimeError("down")

    with pytest.raises(RollbackIncomplete):
        with saga_scope("s", log=log) as saga:
            _charge(world, saga, undo(refund, charge_id="result.id"))
            saga.execute("book", lambda: 1, semantics=C, compensate=undo(flaky))
            raise OutOfStock
    assert len(keys) == 3 and world.left == []
    assert [head.attention for head in list_sagas(log)] == [1]
    assert recover(log, retry=False).attention == ("s",) and len(keys) == 3
    assert recover(log).attention == ("s",) and len(keys) == 6
    down[0] = False
    assert recover(log).recovered == ("s",)
    assert len(keys) == 7 and len(set(keys)) == 1
    assert read_saga(log, "s").report.clean
    assert len(world.asked("refund")) == 1


def test_the_pauses_between_the_tries(log, clock):
    at = []

    @compensator("flaky")
    def flaky() -> None:
        at.append(clock.monotonic())
        raise RuntimeError

    with pytest.raises(RollbackIncomplete):
        with saga_scope("s", log=log) as saga:
            saga.execute("t", lambda: 1, semantics=C, compensate=undo(flaky))
            raise OutOfStock
    assert [round(b - a, 6) for a, b in zip(at, at[1:], strict=False)] == [0.5, 2.0]


def test_not_applied_from_a_compensator_gives_a_new_key(log, clock):
    keys = []

    @compensator("back")
    def back(*, idempotency_key: str) -> None:
        keys.append(idempotency_key)
        if len(keys) < 3:
            raise NotApplied

    with pytest.raises(OutOfStock):
        with saga_scope("s", log=log) as saga:
            saga.execute("t", lambda: 1, semantics=C, compensate=undo(back))
            raise OutOfStock
    assert len(set(keys)) == 3
    assert saga.steps[0].compensation_key == keys[-1]


def _compensating(log, clock, world, *, landed, attempts=1):
    """Die in a compensation `attempts` times, after its effect or before it."""

    def die_in_it(charge_id: str, *, idempotency_key: str) -> None:
        if landed:
            world.refund(charge_id, idempotency_key)
        current[0].crash()
        raise Died

    current = [log]
    with isolated_registry():
        dying = compensator("refund")(die_in_it)
        try:
            with saga_scope("s", log=log) as saga:
                _charge(world, saga, undo(dying, charge_id="result.id"))
                raise OutOfStock
        except BaseException:
            pass
        for _ in range(attempts - 1):
            current[0] = MemoryLog(clock, store=log.store)
            try:
                recover(current[0])
            except BaseException:
                pass
    return MemoryLog(clock, store=log.store)


def test_a_crash_between_a_compensations_effect_and_its_record_repeats_it_under_its_key(log, clock, world, refund):
    again = _compensating(log, clock, world, landed=True)
    assert read_saga(again, "s").steps[0].status is StepStatus.COMPENSATING
    assert recover(again).recovered == ("s",)
    assert len(world.asked("refund")) == 2 and len(set(world.asked("refund"))) == 1
    assert [len(c.refunds) for c in world.charges.values()] == [1]


def test_three_crashes_in_a_compensation_are_for_a_person(log, clock, world, refund):
    again = _compensating(log, clock, world, landed=False, attempts=3)
    called = len(world.asked("refund"))
    assert recover(again).attention == ("s",)
    assert len(world.asked("refund")) == called
    assert read_saga(again, "s").status is SagaStatus.NEEDS_ATTENTION
    assert recover(again).recovered == ("s",)
    assert world.left == []


@pytest.mark.parametrize("landed", [True, False, None])
def test_a_compensator_with_a_probe_is_not_repeated_blindly(log, clock, world, landed):
    again = _compensating(log, clock, world, landed=bool(landed))
    before = len(world.asked("refund"))
    seen = []

    def look(kwargs, key):
        seen.append((kwargs, key))
        return Observation(landed=landed)

    @compensator("refund", probe=look)
    def refund(charge_id: str, *, idempotency_key: str) -> None:
        world.refund(charge_id, idempotency_key)

    assert recover(again).recovered == ("s",)
    assert seen == [({"charge_id": "ch_1"}, read_saga(again, "s").steps[0].compensation_key)]
    assert len(world.asked("refund")) == before + (landed is not True)


@pytest.mark.parametrize("landed", [True, False, None])
def test_a_compensation_older_than_its_key_is_probed_or_left_to_a_person(log, clock, world, landed):
    again = _compensating(log, clock, world, landed=False)
    clock.advance(86_401.0)

    @compensator("refund", probe=lambda kwargs, key: Observation(landed=landed))
    def refund(charge_id: str, *, idempotency_key: str) -> None:
        world.refund(charge_id, idempotency_key)

    report = recover(again)
    if landed is None:
        assert report.attention == ("s",)
        assert "longer ago than its key lives" in read_saga(again, "s").report.remaining[0].detail
    else:
        assert report.recovered == ("s",)
    assert len(world.asked("refund")) == (landed is False)


# --- what recovery leaves alone


def test_a_live_saga_is_never_touched(log, clock, world, refund):
    with saga_scope("s", log=log) as saga:
        _charge(world, saga, undo(refund, charge_id="result.id"))
        other = MemoryLog(clock, store=log.store)
        before = len(other.read("s"))
        assert recover(other).live == ("s",)
        assert recover(other, dry_run=True).live == ("s",)
        assert recover(log).live == ("s",)
        for log_there in (log, other):
            with pytest.raises(SagaBusy):
                resolve(log_there, "s", 1, outcome="accepted", by="a", note="b")
            assert log.owned("s")
        with pytest.raises(SagaBusy):
            resolve(other, "s", 1, outcome="accepted", by="a", note="b")
        assert len(other.read("s")) == before
    assert saga.status is SagaStatus.COMMITTED and len(world.left) == 1


def test_a_dry_run_changes_nothing(log, clock, world, refund):
    again = _die(log, clock, lambda saga: _charge(world, saga, undo(refund, charge_id="result.id")))
    before = again.read("s")
    assert recover(again, dry_run=True).recovered == ("s",)
    assert again.read("s") == before and len(world.left) == 1


def test_an_orphan_is_left_to_its_framework_for_a_while(log, clock, world, refund):
    again = _die(log, clock, lambda saga: _charge(world, saga, undo(refund, charge_id="result.id")), orphan_after=600.0)
    assert recover(again).untouched == ("s",)
    clock.advance(599.0)
    assert recover(again).untouched == ("s",)
    clock.advance(2.0)
    report = recover(again)
    assert report.recovered == ("s",), report


def test_a_missing_handler_leaves_the_saga_untouched_and_counts_no_attempt(log, clock, world):
    with isolated_registry():

        @compensator("refund")
        def refund(charge_id: str, *, idempotency_key: str) -> None: ...

        again = _die(log, clock, lambda saga: _charge(world, saga, undo(refund, charge_id="result.id")))
    before = again.read("s")
    report = recover(again)
    assert report.untouched == ("s",) and "no compensator 'refund'" in report.reasons["s"]
    assert again.read("s") == before and not again.owned("s")

    @compensator("refund")
    def other(order_id: str) -> None: ...

    report = recover(again)
    assert report.untouched == ("s",) and "do not fit" in report.reasons["s"]
    assert again.read("s") == before


def test_a_handler_that_is_missing_for_a_step_that_left_nothing_does_not_matter(log, clock, world, refund):
    with isolated_registry():

        @compensator("gone")
        def gone(charge_id: str) -> None: ...

        @compensator("refund")
        def declared(charge_id: str, *, idempotency_key: str) -> None: ...

        def body(saga):
            with pytest.raises(ValueError):
                _charge(
                    world,
                    saga,
                    undo(gone, charge_id="result.id"),
                    act=lambda *a: int("x"),
                    not_applied=ValueError,
                )
            _charge(world, saga, undo(declared, charge_id="result.id"), amount=6)

        again = _die(log, clock, body)
    assert recover(again).recovered == ("s",)
    assert world.left == []


def test_an_undo_that_lived_in_the_process_is_named(log, clock, world):
    again = _die(
        log,
        clock,
        lambda saga: saga.execute("t", lambda: 1, semantics=C, compensate=lambda r: Compensation(fn=print)),
    )
    assert recover(again).attention == ("s",)
    assert "lived in the process" in read_saga(again, "s").report.remaining[0].detail


def test_reversible_state_is_gone_with_its_process(log, clock):
    again = _die(
        log,
        clock,
        lambda saga: saga.execute("t", lambda: 1, semantics=V, compensate=lambda r: Compensation(fn=print)),
    )
    saga = again.read("s")
    assert saga == () or recover(again).recovered == ("s",)


def test_reversible_and_read_only_beside_a_durable_step(log, clock, world, refund):
    def body(saga):
        saga.execute("put", lambda: 1, semantics=V, compensate=lambda r: Compensation(fn=print))
        _charge(world, saga, undo(refund, charge_id="result.id"))
        for tool, how in (
            ("look", {"semantics": R}),
            ("put2", {"semantics": V, "compensate": lambda r: Compensation(fn=print)}),
        ):
            inside = threading.Event()

            def stay(inside=inside):
                inside.set()
                go.wait(20)

            def call(tool=tool, how=how, stay=stay):
                with pytest.raises(LogUnavailable):
                    saga.execute(tool, stay, **how)

            threads.append(threading.Thread(target=call, daemon=True))
            threads[-1].start()
            assert inside.wait(20)
        _charge(world, saga, undo(refund, charge_id="result.id"), amount=6)

    go, threads = threading.Event(), []
    again = _die(log, clock, body)
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(read_saga(again, "s").steps) == 5
    assert recover(again).recovered == ("s",)
    assert world.left == [] and read_saga(again, "s").report.clean


# --- probes in another process


@pytest.mark.parametrize("sees", ["landed", "landed without result", "absent", "final", "cannot tell"])
def test_a_registered_probe_settles_in_another_process(log, clock, world, refund, sees):
    seen = []

    @probe("look")
    def look(args, key):
        seen.append((args, key))
        return {
            "landed": world.look(key),
            "landed without result": Observation(landed=True),
            "absent": Observation(landed=False),
            "final": Observation(landed=False, final=True),
            "cannot tell": Observation(landed=None),
        }[sees]

    def landing(amount, key):
        if sees.startswith("landed"):
            world.charge(amount, key)
        log.crash()
        raise Died

    began = clock.monotonic()
    again = _die(
        log, clock, lambda saga: _charge(world, saga, undo(refund, charge_id="result.id"), act=landing, probe=look)
    )
    report = recover(again)
    state = read_saga(again, "s")
    assert seen[0] == ({"amount": 5}, state.steps[0].forward_key)
    if sees == "landed":
        assert report.recovered == ("s",) and world.left == [] and len(world.asked("refund")) == 1
    elif sees == "absent":
        assert report.recovered == ("s",) and clock.monotonic() - began == 30.0
        assert state.steps[0].status is StepStatus.NOT_APPLIED
    elif sees == "final":
        assert report.recovered == ("s",) and clock.monotonic() == began
    else:
        assert report.attention == ("s",)
        assert state.report.remaining[0].tool == "charge"


# --- many sagas, and the async one


def test_what_another_recovery_has_finished_meanwhile_is_none_of_this_ones(log, clock, world, refund, monkeypatch):
    again = _die(log, clock, lambda saga: _charge(world, saga, undo(refund, charge_id="result.id")))
    stale = again.unfinished()
    assert recover(again).recovered == ("s",)
    told: list[str] = []
    monkeypatch.setattr(again, "unfinished", lambda: stale)  # the list was read before the other one was through
    report = recover(again, progress=lambda saga_id, verdict, reason: told.append(saga_id))
    assert report == RecoveryReport() and told == []
    assert recover(again, saga_id="s").untouched == ("s",), "who names it hears how it stands"


@pytest.mark.parametrize("concurrency", [1, 8])
def test_many_sagas(log, clock, world, refund, concurrency):
    for n in range(20):
        log = _die(log, clock, lambda saga: _charge(world, saga, undo(refund, charge_id="result.id")), f"s{n}")
    assert len(recover(log, concurrency=concurrency).recovered) == 20
    assert world.left == [] and len(world.asked("refund")) == 20


def test_what_is_in_doubt_waits_all_at_once(clock, world, void, soft_void):
    log = MemoryLog(clock)
    for n in range(5):
        dying = log
        log = _die(
            dying,
            clock,
            lambda saga, dying=dying: _charge(
                world, saga, undo(soft_void, if_absent="noop", key="step.forward_key"), act=_Sent(world, dying)
            ),
            f"s{n}",
        )
    began = clock.monotonic()
    assert len(recover(log).recovered) == 5
    assert clock.monotonic() - began == 30.0


async def test_arecover_awaits_compensators_on_the_loop(log, clock, world):
    loops = []

    @compensator("refund")
    async def refund(charge_id: str, *, idempotency_key: str) -> None:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        world.refund(charge_id, idempotency_key)

    def dying():
        return _die(log, clock, lambda saga: _charge(world, saga, undo(refund, charge_id="result.id")))

    again = await asyncio.to_thread(dying)
    report = await arecover(again)
    assert report.recovered == ("s",) and loops == [asyncio.get_running_loop()]
    assert world.left == []


def test_recover_awaits_async_compensators_on_a_loop_of_its_own(log, clock, world):
    @compensator("refund")
    async def refund(charge_id: str, *, idempotency_key: str) -> None:
        world.refund(charge_id, idempotency_key)

    again = _die(log, clock, lambda saga: _charge(world, saga, undo(refund, charge_id="result.id")))
    assert recover(again).recovered == ("s",) and world.left == []


async def test_arecover_cancelled_hands_the_sagas_back(clock, world, soft_void):
    log = MemoryLog(ManualClock())

    def dying():
        _die(
            log,
            None,
            lambda saga: _charge(
                world, saga, undo(soft_void, if_absent="noop", key="step.forward_key"), act=_Sent(world, log)
            ),
        )

    await asyncio.to_thread(dying)
    still = ManualClock()
    again = MemoryLog(still, store=log.store)
    task = asyncio.create_task(arecover(again))
    await asyncio.to_thread(still.wait_until_waiting)
    assert again.owned("s")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not again.owned("s")
    assert recover(MemoryLog(clock, store=log.store)).recovered == ("s",)


def test_a_stopped_recovery_hands_the_sagas_back(world, soft_void):
    log = MemoryLog(ManualClock())
    _die(
        log,
        None,
        lambda saga: _charge(
            world, saga, undo(soft_void, if_absent="noop", key="step.forward_key"), act=_Sent(world, log)
        ),
    )
    clock, stop = ManualClock(), threading.Event()
    again = MemoryLog(clock, store=log.store)
    worker = threading.Thread(target=lambda: recover(again, stop=stop), daemon=True)
    worker.start()
    clock.wait_until_waiting()
    stop.set()
    worker.join(20)
    assert not again.owned("s") and world.asked("void") == []


def test_unknown_ids(log):
    for ask in (
        lambda: read_saga(log, "no"),
        lambda: recover(log, saga_id="no"),
        lambda: resolve(log, "no", 1, outcome="accepted", by="a", note="b"),
    ):
        with pytest.raises(SagaNotFound):
            ask()


# --- credentials


def test_a_credential_is_a_reference_in_the_log_and_resolved_where_it_is_used(log, clock, world):
    used = []

    @compensator("refund")
    def refund(charge_id: str, auth: str, *, idempotency_key: str) -> None:
        used.append(auth)

    again = _die(
        log,
        clock,
        lambda saga: _charge(
            world,
            saga,
            lambda r: Compensation(handler="refund", kwargs={"charge_id": r["id"], "auth": credential("payments")}),
        ),
    )
    assert "sk_live" not in repr(again.read("s"))
    set_credential_resolver(lambda name: f"sk_live_{name}")
    try:
        assert recover(again).recovered == ("s",)
    finally:
        set_credential_resolver(None)
    assert used == ["sk_live_payments"]
    assert "sk_live" not in repr(again.read("s"))


# --- a person's word


def _unknown(log, clock, world, how):
    def act(amount, key):
        log.crash()
        raise Died

    again = _die(log, clock, lambda saga: _charge(world, saga, how, act=act))
    assert recover(again).attention == ("s",)
    return again


def test_resolve_not_applied(log, clock, world, refund):
    again = _unknown(log, clock, world, undo(refund, charge_id="result.id"))
    state = resolve(again, "s", "charge", outcome="not-applied", by="Anna", note="looked at the ledger")
    assert state.status is SagaStatus.ROLLED_BACK and state.report.clean
    (said,) = [r.data for r in again.read("s") if r.type == "RESOLVED"]
    assert said == {
        "step": 1, "attempt": 1, "outcome": "not-applied", "by": "Anna", "note": "looked at the ledger",
    }  # fmt: skip
    with pytest.raises(SagaNotRunning):
        resolve(again, "s", 1, outcome="accepted", by="a", note="b")
    assert not again.owned("s")


def test_resolve_compensated(log, clock, world, refund):
    again = _unknown(log, clock, world, undo(refund, charge_id="result.id"))
    state = resolve(again, "s", 1, outcome="compensated", by="Anna", note="by hand")
    assert state.report.clean and world.asked("refund") == []


def test_resolve_accepted_is_not_clean(log, clock, world, refund):
    again = _unknown(log, clock, world, undo(refund, charge_id="result.id"))
    state = resolve(again, "s", 1, outcome="accepted", by="Anna", note="let it be")
    assert state.status is SagaStatus.ROLLED_BACK and not state.report.clean
    assert [s.number for s in state.report.remaining] == [1]
    assert [head.attention for head in list_sagas(again)] == [0]


def test_resolve_landed_with_its_result_is_undone(log, clock, world, refund):
    again = _unknown(log, clock, world, undo(refund, charge_id="result.id"))
    world.charge(5, "by hand")
    state = resolve(again, "s", 1, outcome="landed", by="Anna", note="seen", result={"id": "ch_1"})
    assert state.report.clean and world.left == []


def test_resolve_landed_without_the_result_that_the_undo_needs(log, clock, world, refund):
    again = _unknown(log, clock, world, undo(refund, charge_id="result.id"))
    state = resolve(again, "s", 1, outcome="landed", by="Anna", note="seen")
    assert state.status is SagaStatus.NEEDS_ATTENTION
    assert "no undo could be derived" in state.report.remaining[0].detail
    state = resolve(again, "s", 1, outcome="landed", by="Anna", note="and its id", result={"id": "ch_1"})
    assert state.status is SagaStatus.NEEDS_ATTENTION or state.report.clean


def test_resolve_an_irreversible_step(log, clock):
    with pytest.raises(RollbackIncomplete):
        with saga_scope("s", log=log, approve=lambda request: True) as saga:
            saga.execute("send", lambda: 1, semantics=IRREVERSIBLE)
            raise OutOfStock
    assert recover(log).attention == ("s",)
    state = resolve(log, "s", "send", outcome="accepted", by="Anna", note="apologised")
    assert state.status is SagaStatus.ROLLED_BACK and not state.report.clean


def test_resolve_wants_a_signature_and_sense(log, clock, world, refund):
    again = _unknown(log, clock, world, undo(refund, charge_id="result.id"))
    before = again.read("s")
    for wrong in (
        {"outcome": "accepted", "by": " ", "note": "b"},
        {"outcome": "accepted", "by": "a", "note": ""},
        {"outcome": "maybe", "by": "a", "note": "b"},
        {"outcome": "accepted", "by": "a", "note": "b", "result": 1},
    ):
        with pytest.raises(DeclarationError):
            resolve(again, "s", 1, **wrong)
    with pytest.raises(SagaNotFound):
        resolve(again, "s", 2, outcome="accepted", by="a", note="b")
    with pytest.raises(SagaNotFound):
        resolve(again, "s", "nothing", outcome="accepted", by="a", note="b")
    assert [r.type for r in again.read("s")][: len(before)] == [r.type for r in before]
    assert not again.owned("s")
