"""Steps in an open saga: what is called, what is undone, and what the framework hears."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from agent_saga_core import (
    ActionSemantics,
    ApprovalRequired,
    Compensation,
    DeclarationError,
    IdempotencyConflict,
    MemoryLog,
    NotApplied,
    Observation,
    ReplayDiverged,
    RollbackIncomplete,
    SagaAborted,
    SagaNotRunning,
    SagaStatus,
    StepStatus,
    compensator,
    current_saga,
    current_step,
    delete_by,
    read_saga,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing import ManualClock
from agent_saga_core.testing.world import World
from agent_saga_core.wrapping import covered

C, R, IRR, V = (
    ActionSemantics.COMPENSABLE,
    ActionSemantics.READ_ONLY,
    ActionSemantics.IRREVERSIBLE,
    ActionSemantics.REVERSIBLE,
)


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
def charge(world, refund):
    @saga_tool(semantics=C, compensate=undo(refund, charge_id="result.id"), not_applied=ValueError)
    def charge(amount: int, *, idempotency_key: str) -> dict:
        """Charge somebody."""
        if amount < 0:
            raise ValueError("negative")
        return world.charge(amount, idempotency_key)

    return charge


# --- the plain ways


def test_a_normal_end_commits(log, world, charge):
    with saga_scope("s", log=log) as saga:
        assert charge(5) == {"id": "ch_1", "amount": 5}
        assert saga.status is SagaStatus.RUNNING
    assert saga.status is SagaStatus.COMMITTED
    assert saga.report.clean and saga.report.remaining == ()
    assert len(world.left) == 1
    assert read_saga(log, "s").status is SagaStatus.COMMITTED


def test_the_users_exception_comes_out_and_the_rollback_is_in_its_notes(log, world, charge):
    caught = None
    with pytest.raises(OutOfStock) as raised:
        with saga_scope("s", log=log) as saga:
            charge(5)
            charge(6)
            raise OutOfStock("none left")
    caught = raised.value
    assert caught.args == ("none left",)
    assert any("ROLLED_BACK, clean" in note for note in caught.__notes__)
    assert saga.report.status is SagaStatus.ROLLED_BACK and saga.report.clean
    assert world.left == []
    assert [c.id for c in sorted(world.charges.values(), key=lambda c: world.asked("refund").index(c.refunds[0]))] == [
        "ch_2",
        "ch_1",
    ]


@dataclass(frozen=True)
class Frozen(Exception):
    sku: str


class Sealed(Exception):
    def add_note(self, note: str) -> None:
        raise TypeError("no notes, please")


@pytest.mark.parametrize("where", ["body", "tool", "attached", "covered"])
@pytest.mark.parametrize("kind", [Frozen, Sealed])
def test_an_exception_that_takes_no_notes_comes_out_as_itself(log, world, charge, kind, where):
    def fail():
        raise error

    error = kind("A1")
    saga = saga_scope("s", log=log)
    with pytest.raises(kind) as raised, saga:
        charge(10)
        inside = {"attached": saga.attached(), "covered": covered(saga, [charge])}.get(where, nullcontext())
        with inside:
            saga.execute("look", fail, semantics=R) if where == "tool" else fail()
    assert raised.value is error
    assert error.__notes__ == ["saga 's' ROLLED_BACK, clean"]
    assert world.left == []


async def test_the_same_on_a_loop(log, world, charge):
    with pytest.raises(OutOfStock):
        async with saga_scope("s", log=log) as saga:
            charge(5)
            raise OutOfStock
    assert saga.status is SagaStatus.ROLLED_BACK
    assert world.left == []


def test_a_failing_compensation_does_not_stop_the_others_and_is_named(log, world, charge):
    broken = 0

    def fail():
        nonlocal broken
        broken += 1
        raise RuntimeError("down")

    with pytest.raises(RollbackIncomplete) as raised:
        with saga_scope("s", log=log) as saga:
            charge(5)
            saga.execute("book", lambda: 1, semantics=C, compensate=lambda result: Compensation(fn=fail))
            charge(6)
            raise OutOfStock
    assert isinstance(raised.value.__cause__, OutOfStock)
    assert broken == 3
    assert world.left == []
    assert [step.tool for step in raised.value.report.remaining] == ["book"]
    assert saga.status is SagaStatus.NEEDS_ATTENTION


def test_an_abort_rolls_back_although_the_body_ended_normally(log, world, charge):
    with pytest.raises(SagaAborted) as raised:
        with saga_scope("s", log=log) as saga:
            charge(5)
            saga.abort("changed my mind")
            with pytest.raises(SagaAborted, match="changed my mind"):
                charge(6)
    assert raised.value.report.status is SagaStatus.ROLLED_BACK
    assert world.left == [] and len(world.charges) == 1


# --- failing steps


def test_a_tool_error_that_the_body_caught_does_not_commit(log, refund):
    def fail():
        raise RuntimeError("maybe")

    with pytest.raises(RollbackIncomplete) as raised:
        with saga_scope("s", log=log) as saga:
            with pytest.raises(RuntimeError):
                saga.execute("charge", fail, semantics=C, compensate=undo(refund, charge_id="result.id"))
    assert raised.value.__cause__ is None
    assert [str(step.status) for step in raised.value.report.remaining] == ["UNKNOWN"]


def test_not_applied_lets_the_saga_go_on(log, world, charge):
    with saga_scope("s", log=log) as saga:
        with pytest.raises(ValueError):
            charge(-1)
        with pytest.raises(NotApplied):
            saga.execute("other", _raise(NotApplied), semantics=C, compensate=lambda r: Compensation(fn=print))
        charge(5)
    assert saga.status is SagaStatus.COMMITTED
    assert [step.status for step in saga.steps] == [StepStatus.NOT_APPLIED, StepStatus.NOT_APPLIED, StepStatus.DONE]


def _raise(error):
    def raising(*args, **kwargs):
        raise error

    return raising


def test_a_failed_step_with_a_safe_undo_is_settled_and_the_saga_goes_on(log, world, void):
    tries = []

    def charge(amount: int, idempotency_key: str):
        tries.append(idempotency_key)
        answer = world.charge(amount, idempotency_key)
        if len(tries) == 1:
            raise RuntimeError("after the effect")
        return answer

    def call(saga):
        return saga.execute(
            "charge",
            charge,
            args={"amount": 5},
            semantics=C,
            compensate=undo(void, if_absent="forbids", key="step.forward_key"),
        )

    with saga_scope("s", log=log) as saga:
        with pytest.raises(RuntimeError):
            call(saga)
        assert world.left == []
        assert call(saga)["id"] == "ch_2"
    assert saga.status is SagaStatus.COMMITTED
    assert len(set(tries)) == 2
    assert [c.id for c in world.left] == ["ch_2"]
    assert saga.steps[0].attempts == 2


@pytest.mark.parametrize("if_absent", ["forbids", "noop"])
async def test_a_charge_whose_client_timed_out_is_undone_and_charged_again_under_a_new_key(log, world, if_absent):
    @compensator("void")
    def void(key: str, *, idempotency_key: str) -> None:
        world.void(key, idempotency_key, forbid=if_absent == "forbids")

    tries = []

    async def charge(amount: int, idempotency_key: str):
        tries.append(idempotency_key)
        answer = world.charge(amount, idempotency_key)
        if len(tries) == 1:
            raise TimeoutError
        return answer

    async def call(saga):
        return await saga.aexecute(
            "charge",
            charge,
            args={"amount": 5},
            semantics=C,
            in_doubt=0.0 if if_absent == "noop" else 30.0,
            compensate=undo(void, if_absent=if_absent, key="step.forward_key"),
        )

    async with saga_scope("s", log=log) as saga:
        with pytest.raises(TimeoutError):
            await call(saga)
        assert (await call(saga))["id"] == "ch_2"
        assert len(world.left) == 1
        await saga.aexecute("fail", lambda: 1, semantics=C, compensate=undo(void, key="step.forward_key"))
        step = saga.steps[0]
    assert saga.status is SagaStatus.COMMITTED
    assert len(set(tries)) == 2
    assert len({attempt.compensation_key for attempt in step.history}) == 2


async def test_both_attempts_have_a_refund_of_their_own(log, world):
    @compensator("void")
    def void(key: str, *, idempotency_key: str) -> None:
        world.void(key, idempotency_key)

    first = True

    async def charge(amount: int, idempotency_key: str):
        nonlocal first
        answer = world.charge(amount, idempotency_key)
        if first:
            first = False
            raise TimeoutError
        return answer

    with pytest.raises(OutOfStock):
        async with saga_scope("s", log=log) as saga:
            call = {"args": {"amount": 5}, "semantics": C}
            call["compensate"] = undo(void, if_absent="forbids", key="step.forward_key")
            with pytest.raises(TimeoutError):
                await saga.aexecute("charge", charge, **call)
            await saga.aexecute("charge", charge, **call)
            raise OutOfStock
    assert saga.report.clean
    assert world.left == [] and len(world.charges) == 2
    assert all(len(c.refunds) == 1 for c in world.charges.values())
    assert len(set(world.asked("void"))) == len(world.asked("void")) == 2


def test_on_failure_abort(log, world, void):
    with pytest.raises(SagaAborted):
        with saga_scope("s", log=log, on_failure="abort") as saga:
            with pytest.raises(RuntimeError):
                saga.execute(
                    "charge",
                    _raise(RuntimeError("no")),
                    semantics=C,
                    compensate=undo(void, if_absent="forbids", key="step.forward_key"),
                )
            with pytest.raises(SagaAborted):
                saga.execute("next", lambda: 1, semantics=R)
    assert saga.report.clean


# --- probes


def _probed(saga, observation, **more):
    return saga.execute(
        "charge",
        _raise(RuntimeError("after?")),
        args={"amount": 5},
        semantics=C,
        probe=lambda args, key: observation,
        **more,
    )


def test_landed_with_a_result_is_what_the_call_returns(log, world, refund):
    with saga_scope("s", log=log) as saga:
        seen = Observation(landed=True, result={"id": "ch_9"})
        assert _probed(saga, seen, compensate=undo(refund, charge_id="result.id")) == {"id": "ch_9"}
    assert saga.status is SagaStatus.COMMITTED and saga.steps[0].status is StepStatus.DONE


def test_landed_without_a_result_is_undone_and_then_raised(log, world, void):
    with saga_scope("s", log=log) as saga:
        with pytest.raises(RuntimeError):
            _probed(saga, Observation(landed=True), compensate=undo(void, key="step.forward_key"))
        assert saga.steps[0].status is StepStatus.COMPENSATED
    assert saga.status is SagaStatus.COMMITTED
    assert len(world.asked("void")) == 1


def test_landed_without_a_result_that_the_undo_needs_is_reported(log, refund):
    with pytest.raises(RollbackIncomplete):
        with saga_scope("s", log=log) as saga:
            with pytest.raises(RuntimeError):
                _probed(saga, Observation(landed=True), compensate=undo(refund, charge_id="result.id"))
    assert "knows no result" in saga.report.remaining[0].detail


def test_absent_is_conclusive_when_the_tool_itself_answered(log, refund):
    with saga_scope("s", log=log) as saga:
        with pytest.raises(RuntimeError):
            _probed(saga, Observation(landed=False), compensate=undo(refund, charge_id="result.id"))
        assert saga.steps[0].status is StepStatus.NOT_APPLIED
    assert saga.status is SagaStatus.COMMITTED


def _answered_late(saga, refund, final=False, **declared):
    return saga.execute(
        "charge",
        _raise(TimeoutError()),
        semantics=C,
        key=str(final),
        probe=lambda args, key: Observation(landed=False, final=final),
        compensate=undo(refund, charge_id="result.id"),
        **declared,
    )


def test_absent_is_not_conclusive_while_the_request_may_be_on_its_way(log, clock, refund):
    began = clock.monotonic()
    with pytest.raises(SagaAborted) as raised:
        with saga_scope("s", log=log) as saga:
            with pytest.raises(TimeoutError):
                _answered_late(saga, refund, final=True)
            assert saga.steps[0].status is StepStatus.NOT_APPLIED
            with pytest.raises(TimeoutError):
                _answered_late(saga, refund)
            assert saga.steps[1].status is StepStatus.UNKNOWN
            assert clock.monotonic() == began, "nobody said for how long: the call does not wait"
    assert raised.value.report.clean
    assert clock.monotonic() - began >= 30.0


@pytest.mark.parametrize("declared", [{"in_doubt": 20.0}, {"timeout": 20.0}], ids=["in_doubt", "timeout"])
def test_a_declared_doubt_is_waited_out_by_the_call_itself(log, clock, refund, declared):
    began = clock.monotonic()
    with saga_scope("s", log=log) as saga:
        with pytest.raises(TimeoutError):
            _answered_late(saga, refund, **declared)
        assert clock.monotonic() - began >= 20.0
        assert saga.steps[0].status is StepStatus.NOT_APPLIED
    assert saga.status is SagaStatus.COMMITTED


def test_a_doubt_longer_than_the_drain_time_is_not_waited_out_by_the_call(log, clock, refund):
    began = clock.monotonic()
    with pytest.raises(RollbackIncomplete) as raised:
        with saga_scope("s", log=log, drain_timeout=5.0) as saga:
            with pytest.raises(TimeoutError):
                _answered_late(saga, refund, in_doubt=20.0)
            assert saga.steps[0].status is StepStatus.UNKNOWN
            assert clock.monotonic() == began
    assert [step.detail for step in raised.value.report.remaining] == ["in doubt: it may still land"]


async def test_a_cancellation_cuts_the_wait_for_a_doubt_short(refund):
    clock = ManualClock()
    log = MemoryLog(clock)

    async def body():
        async with saga_scope("s", log=log, drain_timeout=60.0) as saga:
            await saga.aexecute(
                "charge",
                _raise(TimeoutError()),
                semantics=C,
                in_doubt=20.0,
                probe=lambda args, key: Observation(landed=False),
                compensate=undo(refund, charge_id="result.id"),
            )

    task = asyncio.create_task(body())
    await asyncio.to_thread(clock.wait_until_waiting)
    task.cancel()
    await asyncio.to_thread(clock.wait_until_waiting)  # the scope's end, which waits out the rest
    clock.advance(20.0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


def test_a_probe_that_cannot_tell_leaves_it_to_a_person(log, refund):
    with pytest.raises(RollbackIncomplete) as raised:
        with saga_scope("s", log=log) as saga:
            with pytest.raises(RuntimeError):
                _probed(saga, Observation(landed=None), compensate=undo(refund, charge_id="result.id"))
    assert raised.value.report.remaining[0].status is StepStatus.UNKNOWN


# --- what is awaited


class _Callable:
    def __init__(self, log):
        self.log = log

    async def __call__(self, *args, **kwargs):
        self.log.append(kwargs)
        return "done"


def _async_ways(seen):
    async def effect():
        seen.append("effect")
        return "done"

    return {"lambda": lambda: effect(), "object": _Callable(seen), "function": effect}


@pytest.mark.parametrize("way", ["lambda", "object", "function"])
def test_awaitables_are_awaited_without_a_loop(log, way):
    seen, undone = [], []
    with pytest.raises(OutOfStock):
        with saga_scope("s", log=log) as saga:
            compensate = _async_ways(undone)[way]
            assert (
                saga.execute("t", _async_ways(seen)[way], semantics=C, compensate=lambda r: Compensation(fn=compensate))
                == "done"
            )
            raise OutOfStock
    assert len(seen) == len(undone) == 1
    assert saga.report.clean


@pytest.mark.parametrize("way", ["lambda", "object", "function"])
async def test_awaitables_are_awaited_on_the_loop(log, way):
    seen, undone = [], []
    with pytest.raises(OutOfStock):
        async with saga_scope("s", log=log) as saga:
            compensate = _async_ways(undone)[way]
            made = await saga.aexecute(
                "t", _async_ways(seen)[way], semantics=C, compensate=lambda r: Compensation(fn=compensate)
            )
            assert made == "done"
            raise OutOfStock
    assert len(seen) == len(undone) == 1


async def test_with_on_a_running_loop_refuses_async_parts_before_the_effect(log):
    called = []

    @compensator("async undo")
    async def back(x: int) -> None: ...

    with saga_scope("s", log=log) as saga:
        with pytest.raises(DeclarationError, match="async with"):
            await saga.aexecute("t", lambda: called.append(1), semantics=R)
        with pytest.raises(DeclarationError, match="async with"):
            saga.execute("t", lambda x: called.append(1), args={"x": 1}, semantics=C, compensate=undo(back, x="args.x"))

        async def probe(args, key): ...

        with pytest.raises(DeclarationError, match="async with"):
            saga.execute(
                "t",
                lambda: called.append(1),
                semantics=C,
                probe=probe,
                compensate=lambda r: Compensation(fn=print),
            )
    assert called == []
    assert saga.status is SagaStatus.COMMITTED


async def test_with_on_a_running_loop_takes_async_steps_of_other_loops(log, world, charge):
    with saga_scope("s", log=log) as saga:

        def elsewhere():
            async def effect():
                return await saga.aexecute("t", _Callable([]), semantics=R)

            return asyncio.run(effect())

        assert await asyncio.to_thread(elsewhere) == "done"
    assert saga.status is SagaStatus.COMMITTED


def test_a_generator_result_is_refused_before_the_commit(log):
    def lazily():
        yield 1

    with pytest.raises(RollbackIncomplete):
        with saga_scope("s", log=log) as saga:
            with pytest.raises(DeclarationError, match="generator"):
                saga.execute("t", lambda: lazily(), semantics=C, compensate=lambda r: Compensation(fn=print))
    assert saga.steps[0].status is StepStatus.UNKNOWN


async def test_an_async_generator_result_is_refused_before_the_commit(log):
    async def lazily():
        yield 1

    with pytest.raises(RollbackIncomplete):
        async with saga_scope("s", log=log) as saga:
            with pytest.raises(DeclarationError, match="generator"):
                await saga.aexecute("t", lambda: lazily(), semantics=C, compensate=lambda r: Compensation(fn=print))
    assert saga.steps[0].status is StepStatus.UNKNOWN


# --- identity


def test_two_intended_identical_calls_have_two_effects(log, world, charge):
    with saga_scope("s", log=log):
        assert charge(5)["id"] != charge(5)["id"]
    assert len(world.left) == 2


def test_a_declared_key_met_again_returns_the_record_and_other_arguments_conflict(log, world, refund):
    @saga_tool(semantics=C, compensate=undo(refund, charge_id="result.id"), key="args.order")
    def charge(order: str, amount: int, *, idempotency_key: str) -> dict:
        return world.charge(amount, idempotency_key)

    with saga_scope("s", log=log) as saga:
        assert charge("o1", 5) == charge("o1", 5)
        with pytest.raises(IdempotencyConflict):
            charge("o1", 6)
        charge("o2", 6)
    assert saga.status is SagaStatus.COMMITTED
    assert len(world.charges) == 2


def test_a_key_whose_attempt_left_nothing_may_bring_other_arguments(log, world, refund):
    @saga_tool(semantics=C, compensate=undo(refund, charge_id="result.id"), key="args.order", not_applied=ValueError)
    def charge(order: str, amount: int, *, idempotency_key: str) -> dict:
        if amount < 0:
            raise ValueError
        return world.charge(amount, idempotency_key)

    with saga_scope("s", log=log) as saga:
        with pytest.raises(ValueError):
            charge("o1", -5)
        assert charge("o1", 5)["amount"] == 5
    assert len(saga.steps) == 1 and saga.steps[0].attempts == 2


async def test_concurrent_calls_with_one_key_have_one_effect_and_one_result(log, world, refund):
    inside, go = asyncio.Event(), asyncio.Event()

    async def charge(amount: int, idempotency_key: str):
        inside.set()
        await go.wait()
        return world.charge(amount, idempotency_key)

    async with saga_scope("s", log=log) as saga:

        def call():
            return saga.aexecute(
                "charge",
                charge,
                args={"amount": 5},
                semantics=C,
                key="k",
                compensate=undo(refund, charge_id="result.id"),
            )

        first = asyncio.create_task(call())
        await inside.wait()
        second = asyncio.create_task(call())
        third = asyncio.create_task(asyncio.to_thread(lambda: None))
        await third
        go.set()
        assert await first == await second
    assert len(world.charges) == 1


def test_reentry_passes_through(log, world, refund):
    depth = []

    with saga_scope("s", log=log) as saga:

        def call():
            return saga.execute(
                "charge", charge, args={"n": 1}, semantics=C, key="k", compensate=lambda r: Compensation(fn=print)
            )

        def charge(n: int):
            depth.append(n)
            return call() if len(depth) < 3 else "bottom"

        assert call() == "bottom"
    assert depth == [1, 1, 1] and len(saga.steps) == 1


def test_current_step_and_the_injected_key(log, world):
    seen = []

    @compensator("back")
    def back(*, idempotency_key: str) -> None:
        seen.append((current_step(), idempotency_key, current_saga()))

    @saga_tool(semantics=C, compensate=undo(back))
    def act(x: int, *, idempotency_key: str = "model", **more) -> str:
        seen.append((current_step(), idempotency_key, current_saga()))
        return "r"

    with pytest.raises(OutOfStock):
        with saga_scope("s", log=log) as saga:
            act(1, idempotency_key="from the model")
            state = saga.steps[0]
            raise OutOfStock
    assert current_step() is None
    (forward, forward_key, inner), (backward, back_key, none) = seen
    assert (forward.direction, backward.direction) == ("forward", "compensation")
    assert forward.idempotency_key == forward_key == state.forward_key
    assert backward.idempotency_key == back_key == state.compensation_key
    assert forward.saga_id == "s" and forward.number == 1 and forward.tool == "act" and forward.attempt == 1
    assert inner is saga and none is None
    assert "from the model" not in repr(log.read("s"))


def test_the_key_is_not_given_through_kwargs(log):
    seen = []

    def act(**kwargs):
        seen.append(kwargs)

    with saga_scope("s", log=log) as saga:
        saga.execute("t", act, args={"a": 1}, semantics=R)
    assert seen == [{"a": 1}]


# --- semantics


def test_read_only_raising_is_not_applied(log):
    with saga_scope("s", log=log) as saga:
        with pytest.raises(RuntimeError):
            saga.execute("look", _raise(RuntimeError()), semantics=R)
    assert saga.status is SagaStatus.COMMITTED
    assert saga.steps[0].status is StepStatus.NOT_APPLIED


def test_reversible_is_restored(log):
    state = {"x": 1}

    def put(x):
        old, state["x"] = state["x"], x
        return old

    with pytest.raises(OutOfStock):
        with saga_scope("s", log=log) as saga:
            saga.execute(
                "put",
                put,
                args={"x": 2},
                semantics=V,
                compensate=lambda old: Compensation(fn=put, kwargs={"x": old}),
            )
            assert state == {"x": 2}
            raise OutOfStock
    assert state == {"x": 1} and saga.report.clean


@pytest.mark.parametrize(
    "approve", [None, lambda request: False, lambda request: "yes", _raise(RuntimeError("gate down"))]
)
def test_irreversible_without_a_yes_is_refused_and_the_saga_goes_on(log, approve):
    called = []
    with saga_scope("s", log=log, approve=approve) as saga:
        with pytest.raises(ApprovalRequired):
            saga.execute("send", lambda: called.append(1), semantics=IRR)
        assert saga.steps[0].status is StepStatus.NOT_APPLIED
    assert called == [] and saga.status is SagaStatus.COMMITTED


def test_irreversible_with_a_yes(log):
    asked = []

    def approve(request):
        asked.append((request.saga_id, request.tool, request.args, request.semantics, request.key, current_saga()))
        return True

    with saga_scope("s", log=log, approve=approve) as saga:
        assert saga.execute("send", lambda to: "sent", args={"to": "a"}, semantics=IRR, key="k") == "sent"
        assert saga.execute("send", lambda to: "sent", args={"to": "a"}, semantics=IRR, key="k") == "sent"
    assert asked == [("s", "send", {"to": "a"}, IRR, "k", None)]


async def test_irreversible_with_an_async_gate(log):
    async def approve(request):
        await asyncio.sleep(0)
        return request.tool == "send"

    async with saga_scope("s", log=log, approve=approve) as saga:
        assert await saga.aexecute("send", lambda: 1, semantics=IRR) == 1
        with pytest.raises(ApprovalRequired):
            await saga.aexecute("drop", lambda: 1, semantics=IRR)


def test_irreversible_done_needs_attention_when_the_rest_rolls_back(log, world, charge):
    with pytest.raises(RollbackIncomplete) as raised:
        with saga_scope("s", log=log, approve=lambda request: True) as saga:
            charge(5)
            saga.execute("send", lambda: 1, semantics=IRR)
            raise OutOfStock
    assert [step.tool for step in raised.value.report.remaining] == ["send"]
    assert world.left == []


def test_an_undo_that_cannot_be_derived_is_reported(log, world, refund):
    with pytest.raises(RollbackIncomplete):
        with saga_scope("s", log=log) as saga:
            saga.execute("charge", lambda: {}, semantics=C, compensate=undo(refund, charge_id="result.id"))
            assert saga.steps[0].status is StepStatus.DONE
            raise OutOfStock
    (left,) = saga.report.remaining
    assert left.status is StepStatus.DONE and "no undo could be derived" in left.detail


def test_an_undo_that_needs_an_absent_argument_is_refused_before_the_effect(log, refund):
    called = []
    with saga_scope("s", log=log) as saga:
        with pytest.raises(DeclarationError):
            saga.execute(
                "t",
                lambda **k: called.append(1),
                args={"a": 1},
                semantics=C,
                compensate=undo(refund, charge_id="args.b"),
            )
        assert saga.steps[0].status is StepStatus.NOT_APPLIED
    assert called == []


def test_an_unstorable_argument_is_refused_before_the_effect(log, charge):
    called = []
    with saga_scope("s", log=log) as saga:
        with pytest.raises(DeclarationError):
            saga.execute("t", lambda x: called.append(1), args={"x": object()}, semantics=R)
        assert saga.steps[0].status is StepStatus.NOT_APPLIED
    assert called == [] and saga.status is SagaStatus.COMMITTED


def _deep(levels):
    value = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [_deep(300), _deep(100_000), "\ud800", float("nan"), 2**70, b"\x00\xff", {1: 2}, {1, 2}, object(), "x" * 2_000_000],
    ids=["deep", "very deep", "surrogate", "nan", "big", "bytes", "intkeys", "set", "object", "long"],
)
def test_no_result_can_wedge_a_saga(log, value):
    undone = []
    with pytest.raises(OutOfStock):
        with saga_scope("s", log=log) as saga:
            got = saga.execute(
                "t", lambda: value, semantics=C, compensate=lambda r: Compensation(fn=lambda: undone.append(1))
            )
            assert got is value
            assert saga.steps[0].status is StepStatus.DONE
            raise OutOfStock
    assert undone == [1] and saga.report.clean


@pytest.mark.parametrize(
    "value",
    [_deep(300), _deep(100_000), "\ud800", float("nan"), 2**70, b"\x00\xff", {1: 2}],
    ids=["deep", "very deep", "surrogate", "nan", "big", "bytes", "intkeys"],
)
def test_no_argument_can_wedge_a_saga(log, value):
    with saga_scope("s", log=log) as saga:
        try:
            saga.execute("t", lambda x: 1, args={"x": value}, semantics=R)
        except DeclarationError:
            assert saga.steps[0].status is StepStatus.NOT_APPLIED
        saga.execute("u", lambda: 1, semantics=C, compensate=lambda r: Compensation(fn=print))
    assert saga.status is SagaStatus.COMMITTED


# --- many at once


def test_many_threads_in_one_saga(log):
    done, lock = [], threading.Lock()
    failures = []

    with saga_scope("s", log=log) as saga:

        def work(thread):
            try:
                for i in range(20):
                    saga.execute(
                        "t",
                        lambda t, i: (t, i),
                        args={"t": thread, "i": i},
                        semantics=C,
                        compensate=lambda r: Compensation(fn=print),
                    )
                    with lock:
                        done.append((thread, i))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == []
    assert saga.status is SagaStatus.COMMITTED
    records = log.read("s")
    intents = [(r.data["args"]["t"], r.data["args"]["i"]) for r in records if r.type == "INTENT"]
    assert len(intents) == 1000 and set(intents) == {(t, i) for t in range(50) for i in range(20)}
    assert sum(r.type == "DONE" for r in records) == 1000


def test_two_loops_in_two_threads(log):
    failures = []
    with saga_scope("s", log=log) as saga:

        def loop(thread):
            async def main():
                async def one(i):
                    async def effect(t, i):
                        await asyncio.sleep(0)
                        return i

                    await saga.aexecute(
                        "t",
                        effect,
                        args={"t": thread, "i": i},
                        semantics=C,
                        compensate=lambda r: Compensation(fn=print),
                    )

                await asyncio.gather(*(one(i) for i in range(500)))

            try:
                asyncio.run(main())
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=loop, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == []
    records = log.read("s")
    assert sum(r.type == "INTENT" for r in records) == sum(r.type == "DONE" for r in records) == 1000
    assert saga.status is SagaStatus.COMMITTED


# --- nesting


def test_an_inner_scope_that_ended_is_undone_with_the_outer(log, world, charge):
    with pytest.raises(OutOfStock):
        with saga_scope("s", log=log) as outer:
            with saga_scope() as inner:
                charge(5)
                assert inner.id == "s" and len(inner.steps) == 1
            charge(6)
            assert len(world.left) == 2
            raise OutOfStock
    assert world.left == [] and outer.report.clean


def test_a_failing_savepoint_undoes_only_its_own_steps(log, world, charge):
    with saga_scope("s", log=log) as saga:
        charge(5)
        with pytest.raises(OutOfStock):
            with saga.savepoint() as inner:
                charge(6)
                raise OutOfStock
        assert inner.report.clean
        assert [c.amount for c in world.left] == [5]
        charge(7)
    assert saga.status is SagaStatus.COMMITTED
    assert [c.amount for c in world.left] == [5, 7]


def test_a_savepoint_that_cannot_be_undone_makes_the_saga_rollback_only(log, world, charge):
    with pytest.raises(RollbackIncomplete):
        with saga_scope("s", log=log) as saga:
            charge(5)
            with pytest.raises(RollbackIncomplete) as raised:
                with saga.savepoint():
                    saga.execute(
                        "t",
                        lambda: 1,
                        semantics=C,
                        compensate=lambda r: Compensation(fn=_raise(RuntimeError("down"))),
                    )
                    raise OutOfStock
            assert isinstance(raised.value.__cause__, OutOfStock)
            with pytest.raises(SagaAborted):
                charge(6)
    assert world.left == []


def test_a_step_in_a_scope_that_has_ended_is_refused(log, world, charge):
    def call(scope):
        return scope.execute("t", lambda: 1, semantics=C, compensate=lambda r: Compensation(fn=print))

    with saga_scope("s", log=log) as saga:
        with pytest.raises(OutOfStock):
            with saga.savepoint() as failed:
                raise OutOfStock
        with pytest.raises(SagaNotRunning, match="ended"):
            call(failed)
        with saga.savepoint() as ended:
            call(ended)
        with pytest.raises(SagaNotRunning, match="ended"):
            call(ended)
    with pytest.raises(SagaNotRunning):
        call(saga)
    assert len(saga.steps) == 1


def test_another_id_inside_needs_independent(log, world, charge):
    with saga_scope("s", log=log):
        with pytest.raises(DeclarationError, match="independent"):
            with saga_scope("other", log=log):
                pass
        with saga_scope("s", log=log) as joined:
            charge(1)
        assert joined.id == "s"
        with pytest.raises(OutOfStock):
            with saga_scope("other", log=log, independent=True) as own:
                charge(2)
                raise OutOfStock
        assert current_saga().id == "s"
    assert own.status is SagaStatus.ROLLED_BACK
    assert [c.amount for c in world.left] == [1]


def test_a_scope_in_a_generators_body_is_refused(log):
    def body():
        with saga_scope("s", log=log):
            yield 1

    with pytest.raises(DeclarationError, match="generator"):
        next(body())

    async def abody():
        async with saga_scope("s", log=log):
            yield 1

    with pytest.raises(DeclarationError, match="generator"):
        asyncio.run(anext_of(abody()))


async def anext_of(generator):
    try:
        return await anext(generator)
    finally:
        await generator.aclose()


def test_outside_a_saga_a_tool_calls_straight_through(world, refund):
    @saga_tool(semantics=C, compensate=undo(refund, charge_id="result.id"))
    def charge(amount: int, *, idempotency_key: str = "none") -> dict:
        return world.charge(amount, idempotency_key)

    @saga_tool(semantics=R, require_saga=True)
    def strict() -> int:
        return 1

    assert charge(5)["id"] == "ch_1"
    with pytest.raises(SagaNotRunning):
        strict()
    assert delete_by(refund, charge_id="args.amount").if_absent == "noop"


# --- secrets


def test_secrets_never_reach_log_report_or_exception_text(log, refund):
    secret = "hunter2-4242"
    requests = []

    def approve(request):
        requests.append(request)
        return False

    def login(user: str, password: str):
        raise RuntimeError(f"wrong password {password} for {user}")

    with pytest.raises(RollbackIncomplete) as raised:
        with saga_scope("s", log=log, approve=approve) as saga:
            with pytest.raises(RuntimeError):
                saga.execute(
                    "login",
                    login,
                    args={"user": "u", "password": secret},
                    semantics=C,
                    compensate=lambda r: Compensation(fn=print),
                )
    with saga_scope("t", log=log, approve=approve) as other:
        with pytest.raises(ApprovalRequired):
            other.execute("send", login, args={"user": "u", "password": secret}, semantics=IRR)
    shown = [repr(log.read("s")), repr(log.read("t")), str(raised.value), repr(saga.report), str(saga.steps)]
    shown += [repr(requests[0].args), repr(read_saga(log, "s"))]
    assert not [text for text in shown if secret in text]


def test_a_replay_of_a_redacted_result_is_divergence_and_the_effect_is_not_rerun(log):
    calls = []

    def token():
        calls.append(1)
        return {"token": "abc"}

    with pytest.raises(RollbackIncomplete):
        with saga_scope("s", log=log) as saga:
            call = {"semantics": C, "key": "k", "compensate": lambda r: Compensation(fn=_raise(RuntimeError()))}
            saga.execute("t", token, **call)
            with pytest.raises(ReplayDiverged):
                saga.execute("t", token, **call)
    assert calls == [1]


def test_what_was_being_handled_where_the_call_was_made_is_no_part_of_its_error(log, clock, refund):
    """A fallback in an `except TimeoutError:` that answers with an error of its own has been answered."""
    began = clock.monotonic()
    with saga_scope("s", log=log) as saga:
        try:
            raise TimeoutError
        except TimeoutError:
            with pytest.raises(RuntimeError):
                _probed(saga, Observation(landed=False), compensate=undo(refund, charge_id="result.id"))
        assert saga.steps[0].status is StepStatus.NOT_APPLIED
    assert saga.status is SagaStatus.COMMITTED and clock.monotonic() == began
