"""The runner that adapters call: what makes two calls the same call, pauses, binding, and runs read piece by piece."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from agent_saga_core import (
    ApprovalRequired,
    BoundaryRequired,
    DeclarationError,
    IdempotencyConflict,
    MemoryLog,
    ReplayDiverged,
    RollbackIncomplete,
    SagaAborted,
    SagaBusy,
    SagaNotRunning,
    SagaStatus,
    StepStatus,
    StepUnknown,
    compensator,
    current_saga,
    current_step,
    delete_by,
    read_saga,
    recover,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing import ManualClock
from agent_saga_core.wrapping import (
    AsyncSagaStream,
    CallSite,
    Declaration,
    SagaStream,
    ToolRunner,
    covered,
    runner_of,
)


class Interrupt(Exception):
    """A framework's own way to pause a run and ask a person."""


class World:
    """What the tools have done, by idempotency key."""

    def __init__(self) -> None:
        self.effects: list[Any] = []
        self.keys: list[str] = []
        self.undone: list[Any] = []

    def put(self, value: Any) -> Any:
        step = current_step()
        assert step is not None
        self.effects.append(value)
        self.keys.append(step.idempotency_key)
        return {"value": value}


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    with isolated_registry():
        yield


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(auto=True)


@pytest.fixture
def log(clock: ManualClock) -> MemoryLog:
    return MemoryLog(clock)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def charge(world: World) -> ToolRunner:
    @compensator("take_back")
    def take_back(value: Any) -> None:
        world.undone.append(value)
        if value in world.effects:
            world.effects.remove(value)

    return _runner(undo(take_back, value="result.value"))


def _runner(inverse: Any, tool: str = "charge", **more: Any) -> ToolRunner:
    declaration = Declaration(semantics="COMPENSABLE", compensate=inverse, **more)
    return ToolRunner(tool, declaration, adapter="frame", interrupts=(Interrupt,))


def _call(runner: ToolRunner, world: World, value: Any, site: CallSite | None = None) -> Any:
    return runner.run({"value": value}, lambda key: world.put(value), site=site)


def _statuses(log: MemoryLog, saga_id: str = "s") -> list[str]:
    return [str(step.status) for step in read_saga(log, saga_id).steps]


# --- the same call


def test_one_id_in_two_scopes_is_two_calls_and_in_one_scope_it_is_one(log, world, charge):
    with saga_scope("s", log=log):
        for scope in ("researcher", "writer"):
            _call(charge, world, 10, CallSite("frame", scope, "call_0"))
        again = _call(charge, world, 10, CallSite("frame", "writer", "call_0"))
        with pytest.raises(IdempotencyConflict):
            _call(charge, world, 11, CallSite("frame", "writer", "call_0"))
        _call(charge, world, 10, CallSite("other", "writer", "call_0"))
    assert world.effects == [10, 10, 10] and again == {"value": 10}


def test_calls_without_an_id_are_counted_in_the_body_that_makes_them(log, world, charge):
    def body() -> None:
        this = object()
        for value in ("a", "b", "a"):
            _call(charge, world, value, CallSite("frame", "task-1", body=this))

    with saga_scope("s", log=log) as saga:
        body()
        saga.suspend("asks")
    with saga_scope("s", log=log, resume="continue"):
        body()  # the same code once more, from its top
        _call(charge, world, "a", CallSite("frame", "task-2", body=object()))
    assert world.effects == ["a", "b", "a", "a"]


def test_a_body_that_runs_again_with_another_argument_meets_a_conflict_and_no_second_effect(log, world, charge):
    with saga_scope("s", log=log) as saga:
        _call(charge, world, "10:31", CallSite("frame", "task", body="first"))
        saga.suspend("asks")
    with pytest.raises(IdempotencyConflict), saga_scope("s", log=log, resume="continue"):
        _call(charge, world, "10:32", CallSite("frame", "task", body="second"))
    assert world.effects == [] and world.undone == ["10:31"]


def test_a_body_that_answers_a_failure_with_other_arguments_replays_to_the_recorded_call(log, world):
    class Refused(Exception):
        pass

    @compensator("x")
    def x(value: int) -> None: ...

    runner = _runner(undo(x, value="result.value"), not_applied=(Refused,))

    def pay(amount: int, body: object) -> Any:
        def invoke(key: str) -> Any:
            if amount > 5:
                raise Refused
            return world.put(amount)

        return runner.run({"amount": amount}, invoke, site=CallSite("frame", "task", body=body))

    def body() -> Any:
        this = object()
        try:
            return pay(10, this)
        except (Refused, IdempotencyConflict):
            return pay(5, this)

    with saga_scope("s", log=log) as saga:
        body()
        saga.suspend("asks")
    with saga_scope("s", log=log, resume="continue"):
        assert body() == {"value": 5}
    assert world.effects == [5]


def test_a_savepoint_of_a_body_that_runs_again_has_the_calls_that_are_met_in_it(log, world, charge):
    def body(fails: bool) -> None:
        saga, this = current_saga(), object()
        assert saga is not None
        _call(charge, world, "outside", CallSite("frame", "task", body=this))
        with saga.savepoint():
            _call(charge, world, "inside", CallSite("frame", "task", body=this))
            if fails:
                raise ValueError

    with saga_scope("s", log=log):
        body(False)  # and whatever comes after it in the framework fails, so that the framework makes it again
        with pytest.raises(ValueError):
            body(True)
        assert world.undone == ["inside"] and world.effects == ["outside"]
        body(False)
    assert world.effects == ["outside", "inside"]


def test_what_a_savepoint_made_is_undone_with_it_though_the_body_that_runs_again_has_not_met_it_yet(log, world, charge):
    def body(fails: bool) -> None:
        saga, this = current_saga(), object()
        assert saga is not None
        with saga.savepoint():
            _call(charge, world, "met", CallSite("frame", "task", body=this))
            if fails:
                raise ValueError
            _call(charge, world, "not met", CallSite("frame", "task", body=this))
        with saga.savepoint():
            _call(charge, world, "other", CallSite("frame", "task", body=this))

    with saga_scope("s", log=log):
        body(False)
        with pytest.raises(ValueError):
            body(True)
        assert world.effects == ["other"]


def test_savepoints_of_a_former_owner_are_not_those_that_are_opened_when_the_saga_goes_on(log, world, charge):
    def node(name: str, *values: Any, fails: bool = False) -> None:
        saga, this = current_saga(), object()
        assert saga is not None
        with saga.savepoint():
            for value in values:
                _call(charge, world, value, CallSite("frame", name, body=this))
            if fails:
                raise ValueError

    with saga_scope("s", log=log) as saga:
        node("first", "a")
        node("second", "b", "c")
        saga.suspend("asks")
    with saga_scope("s", log=log, resume="continue"), pytest.raises(ValueError):
        node("second", "b", fails=True)  # its savepoint has the number here that the first node's had there
    assert read_saga(log, "s").status is SagaStatus.COMMITTED
    assert world.effects == ["a"]


def test_a_call_met_again_by_the_same_execution_stays_with_its_savepoint(log, world, charge):
    keyed = _runner(undo("take_back", value="result.value"), "pay", key="args.value")
    with saga_scope("s", log=log) as saga:
        this = object()
        with saga.savepoint():
            _call(keyed, world, "order 1", CallSite("frame", "task", body=this))
        with pytest.raises(ValueError), saga.savepoint():
            _call(keyed, world, "order 1", CallSite("frame", "task", body=this))
            raise ValueError
    assert world.effects == ["order 1"]


def test_a_new_attempt_belongs_to_the_savepoint_that_makes_it(log, world, charge):
    def pay(saga: Any) -> Any:
        inverse = undo("take_back", value="result.value")
        return saga.execute("pay", lambda: world.put(1), semantics="COMPENSABLE", compensate=inverse, key="k")

    with saga_scope("s", log=log) as saga:
        for _ in range(2):
            with pytest.raises(ValueError), saga.savepoint() as inner:
                pay(inner)
                raise ValueError
            assert world.effects == []


def test_a_try_that_was_undone_gives_its_number_back(log, world, charge):
    def body(failures: int) -> None:
        saga, this = current_saga(), object()
        assert saga is not None
        for n in range(failures + 1):
            try:
                with saga.savepoint():
                    _call(charge, world, 10, CallSite("frame", "task", body=this))
                    if n < failures:
                        raise ValueError
                    return
            except ValueError:
                continue

    with saga_scope("s", log=log) as saga:
        body(failures=1)
        saga.suspend("asks")
    with saga_scope("s", log=log, resume="continue"):
        body(failures=0)
    assert world.effects == [10]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, asyncio.CancelledError])
async def test_a_try_that_was_interrupted_gives_its_number_back_when_it_is_settled(log, world, charge, interruption):
    safe = _runner(delete_by("take_back", value="args.value"), in_doubt=0.0)

    async def body(*raises: type[BaseException]) -> None:
        left, site = list(raises), CallSite("frame", "task", body=object())

        async def invoke(key: str) -> Any:
            done = world.put(10)
            if left:
                raise left.pop()
            return done

        try:
            await safe.arun({"value": 10}, invoke, site=site)
        except interruption:
            await safe.arun({"value": 10}, invoke, site=site)

    async with saga_scope("s", log=log) as saga:
        await body(interruption)
        assert [step.attempts for step in saga.steps] == [2]
        await saga.asuspend("asks")
    async with saga_scope("s", log=log, resume="continue"):
        await body()
    assert world.effects == [10]


def test_a_call_that_was_refused_gives_its_number_back(log, world, charge):
    def body(stray: bool) -> None:
        saga, this = current_saga(), object()
        assert saga is not None
        with saga.savepoint() as ended:
            pass
        if stray:  # what still runs of it when it has ended
            with pytest.raises(SagaNotRunning), ended.attached():
                _call(charge, world, 1, CallSite("frame", "task", body=this))
        _call(charge, world, 1, CallSite("frame", "task", body=this))

    with saga_scope("s", log=log) as saga:
        body(stray=True)
        saga.suspend("asks")
    with saga_scope("s", log=log, resume="continue"):
        body(stray=False)
    assert world.effects == [1]


@pytest.mark.parametrize("identity", ['["n"]#\u00b2', "[" * 100_000 + "#0", '["n"]#' + "9" * 5000])
def test_an_identity_that_no_call_has_made_is_no_end_of_the_saga(log, monkeypatch, identity):
    def count(run: Any, call: Any) -> None:
        call.identity = identity

    monkeypatch.setattr("agent_saga_core.engine.step._count", count)
    for resume in ("replay", "continue"):
        with saga_scope("s", log=log, resume=resume) as saga:
            saga.execute("look", lambda: 1, semantics="READ_ONLY")
            assert saga.recorded_sites("frame") == ()
            saga.suspend("asks")


class Paper:
    """A frame: every call is made at a place of its own kind, may pause, and asks the frame."""

    pauses = (Interrupt,)

    def __init__(self) -> None:
        self.body: object = None
        self.heard: list[SagaAborted] = []
        self.yes = True

    def place(self, saga: Any, spec: Any, args: Any, site: CallSite | None, *, named: bool) -> Any:
        if site is None and not named:
            site = CallSite("frame", "task", body=self.body)
        return replace(spec, interrupts=(Interrupt,)), site, lambda request: self.yes

    def refuse(self, saga: Any, refusal: SagaAborted) -> SagaAborted:
        self.heard.append(refusal)
        return refusal


@pytest.mark.parametrize("nested", ["none", "savepoint", "scope"])
def test_plain_functions_and_nested_scopes_learn_from_the_frame(log, world, nested):
    frame = Paper()

    @compensator("take_back")
    def take_back(value: Any) -> None: ...

    @saga_tool(semantics="COMPENSABLE", compensate=undo(take_back, value="result.value"))
    def pay(value: int) -> Any:
        return world.put(value)

    @saga_tool(semantics="IRREVERSIBLE")
    def mail(to: str) -> Any:
        return world.put(to)

    def body(answered: bool) -> None:
        frame.body = object()
        outer = current_saga()
        assert outer is not None
        inner = {"none": nullcontext, "savepoint": outer.savepoint, "scope": saga_scope}[nested]()
        with inner:
            pay(1)
            mail("ada")
            outer.execute("keyed", lambda: world.put("keyed"), semantics="IRREVERSIBLE", key="k")
            if not answered:
                raise Interrupt

    saga = saga_scope("s", log=log)
    saga.frame = frame
    with saga:
        with pytest.raises(Interrupt):
            body(False)
        assert world.effects == [1, "ada", "keyed"], "a pause is no failure: no savepoint undoes anything"
        saga.suspend("asks")
    again = saga_scope("s", log=log, resume="continue")
    again.frame = frame
    with again:
        body(True)
        frame.yes = False
        with pytest.raises(ApprovalRequired):
            mail("bob")
    assert world.effects == [1, "ada", "keyed"]


async def test_the_frame_hears_refusals_and_says_what_comes_out(log):
    frame = Paper()

    @saga_tool(semantics="READ_ONLY")
    def look() -> None: ...

    @saga_tool(semantics="READ_ONLY")
    async def alook() -> None: ...

    saga = saga_scope(log=log)
    saga.frame = frame
    with pytest.raises(SagaAborted):
        async with saga:
            saga.abort("enough")
            with pytest.raises(SagaAborted):
                look()
            with pytest.raises(SagaAborted):
                await alook()
    assert len(frame.heard) == 2


def test_the_gate_and_the_patience_of_a_joined_scope_are_its_own(log, world):
    def send(saga: Any, to: str) -> Any:
        return saga.execute("send", lambda: world.put(to), semantics="IRREVERSIBLE")

    def fails() -> None:
        raise ValueError

    with pytest.raises(RollbackIncomplete), saga_scope("s", log=log, approve=lambda request: True) as outer:
        with saga_scope(approve=lambda request: False) as inner:
            with pytest.raises(ApprovalRequired):
                send(inner, "ada")
            with inner.savepoint() as innermost, pytest.raises(ApprovalRequired):
                send(innermost, "bob")
        with outer.savepoint() as plain:
            send(plain, "cy")
        assert outer.has_gate and world.effects == ["cy"]
        with saga_scope(on_failure="abort") as strict, pytest.raises(ValueError):
            strict.execute("x", fails, semantics="COMPENSABLE", compensate=delete_by(print, sep="step.forward_key"))
        assert outer.rollback_only is not None


def test_a_gate_is_asked_also_where_it_is_empty(log, world):
    class Queue(list[Any]):
        """Those who wait for an answer; none yet, so that it is false."""

        def __call__(self, request: Any) -> bool:
            return False

    mail = ToolRunner("mail", Declaration(semantics="IRREVERSIBLE"))
    with saga_scope("s", log=log, approve=lambda request: True), saga_scope(approve=Queue()):
        with pytest.raises(ApprovalRequired):
            mail.run({}, lambda key: world.put("sent"))
    assert world.effects == []


def test_a_saga_whose_id_somebody_else_keeps_is_durable_when_it_is_open(log):
    with saga_scope("kept", log=log, orphan_after=60.0):
        assert log.durable_history("kept")[0]
    with saga_scope("alone", log=log):
        assert not log.durable_history("alone")[0]


def test_calls_counted_in_the_saga_go_on_counting_when_it_goes_on(log, world, charge):
    with saga_scope("s", log=log) as saga:
        _call(charge, world, 1, CallSite("frame", "task"))
        saga.suspend("asks")
    with saga_scope("s", log=log, resume="continue"):
        _call(charge, world, 2, CallSite("frame", "task"))
    assert world.effects == [1, 2]


def test_a_try_that_left_nothing_gives_its_number_back(log, world):
    runner = _runner(undo(lambda value: None, value="result.value"), not_applied=(KeyError,))

    def fails(key: str) -> Any:
        raise KeyError

    with saga_scope("s", log=log):
        with pytest.raises(KeyError):
            runner.run({"value": 1}, fails, site=CallSite("frame", "task"))
        _call(runner, world, 1, CallSite("frame", "task"))
    (step,) = read_saga(log, "s").steps
    assert (step.status, step.attempts) == (StepStatus.DONE, 2)


def test_a_scope_that_shows_a_secret_is_not_in_the_log(log, world, charge):
    with saga_scope("s", log=log):
        charge.run(
            {"value": 1, "api_key": "sk-4711-geheim"},
            lambda key: world.put(1),
            site=CallSite("frame", "thread sk-4711-geheim", "call sk-4711-geheim"),
        )
    assert "geheim" not in repr(log.read("s"))


def test_an_adapter_can_ask_for_its_calls_and_keep_what_belongs_to_one_opening(log, world, charge):
    with saga_scope("s", log=log) as saga:
        _call(charge, world, 1, CallSite("frame", "1/clerk", "call_0"))
        _call(charge, world, 2, CallSite("frame", "2", body="b"))
        _call(charge, world, 3, CallSite("other", "2"))
        saga.execute("plain", lambda: None, semantics="READ_ONLY")
        saga.execute("plain", lambda: None, semantics="READ_ONLY", key='["call","frame","x","y","z"]')
        kept = saga.shared(list)
        with saga.savepoint() as inner:
            assert inner.shared(list) is kept and inner.shared(dict) is not kept
            assert (saga.scope, inner.scope) == ("", "1")
        assert not saga.goes_on and saga.rollback_only is None
        saga.suspend("asks")
    with saga_scope("s", log=log, resume="continue") as saga:
        assert saga.recorded_sites("frame") == (
            ("charge", CallSite("frame", "1/clerk", "call_0")),
            ("charge", CallSite("frame", "2")),
        )
        assert saga.shared(list) is not kept and saga.goes_on


def test_a_result_that_shows_a_secret_of_its_arguments_is_not_in_the_log(log, world):
    @saga_tool(semantics="READ_ONLY")
    def whoami(api_key: str) -> dict[str, str]:
        return {"account": f"of {api_key}"}

    with saga_scope("s", log=log) as saga:
        assert whoami("sk-4711-geheim") == {"account": "of sk-4711-geheim"}
        saga.suspend("asks")
    assert "geheim" not in repr(log.read("s"))
    with pytest.raises(ReplayDiverged), saga_scope("s", log=log):
        whoami("sk-4711-geheim")


# --- pauses


class Asking:
    """A tool that asks a person in the middle, as a framework does it: made again from its top."""

    def __init__(self, runner: ToolRunner, world: World) -> None:
        self.runner, self.world = runner, world
        self.answer: str | None = None
        self.keys: list[str] = []

    def __call__(self, value: int = 1, **more: Any) -> Any:
        def invoke(key: str) -> Any:
            self.keys.append(key)
            if self.answer is None:
                raise Interrupt
            return self.world.put(value)

        site = CallSite("frame", "task", "call_0")
        return self.runner.run({"value": value}, invoke, site=site, **more)


def test_a_paused_call_passes_through_and_goes_on_as_the_same_try_under_the_same_key(log, world, charge):
    ask = Asking(charge, world)
    with saga_scope("s", log=log) as saga:
        with pytest.raises(Interrupt):
            ask()
        assert [step.status for step in saga.steps] == [StepStatus.PAUSED]
        saga.suspend("asks ada")
    assert read_saga(log, "s").status is SagaStatus.SUSPENDED
    ask.answer = "yes"
    with saga_scope("s", log=log, resume="continue"):
        assert ask() == {"value": 1}
    (step,) = read_saga(log, "s").steps
    assert (step.status, step.attempts) == (StepStatus.DONE, 1)
    assert len(set(ask.keys)) == 1 and world.effects == [1]


def test_a_paused_call_that_was_going_on_when_its_process_died_is_unknown(log, world, charge):
    ask = Asking(charge, world)
    with saga_scope("s", log=log) as saga:
        with pytest.raises(Interrupt):
            ask()
        saga.suspend("asks")

    def dies(key: str) -> Any:
        world.put(1)
        log.crash()
        raise Interrupt

    with pytest.raises(BaseException), saga_scope("s", log=log, resume="continue"):  # noqa: B017
        charge.run({"value": 1}, dies, site=CallSite("frame", "task", "call_0"))
    ask.answer = "yes"
    again = MemoryLog(log.clock, store=log.store)
    with pytest.raises(StepUnknown), saga_scope("s", log=again, resume="continue"):
        ask()
    assert world.effects == [1] and _statuses(again) == ["UNKNOWN"]


def test_a_pause_nobody_ends_is_named_by_recovery_and_undone_where_that_is_safe(log, clock, world, charge):
    for saga_id, inverse in (("named", undo("take_back", value="result.value")), ("undone", None)):
        runner = _runner(inverse or delete_by("take_back", value="args.value"))
        with saga_scope(saga_id, log=log) as saga:
            with pytest.raises(Interrupt):
                Asking(runner, world)()
            saga.suspend("asks", deadline=60.0)
    clock.advance(61.0)
    started = clock.monotonic()
    report = recover(log)
    assert report.recovered == ("undone",) and report.attention == ("named",)
    assert clock.monotonic() == started, "nothing can land after a pause: nothing is waited for"
    assert "paused" in read_saga(log, "named").steps[0].detail


def test_a_saga_does_not_commit_around_a_paused_call(log, world, charge):
    with pytest.raises(RollbackIncomplete), saga_scope("s", log=log), pytest.raises(Interrupt):
        Asking(charge, world)()
    assert read_saga(log, "s").status is SagaStatus.NEEDS_ATTENTION


def test_a_paused_call_made_again_with_other_arguments_is_settled_first(log, world, charge):
    safe = _runner(delete_by("take_back", value="args.value"))
    ask = Asking(safe, world)
    with saga_scope("s", log=log) as saga:
        with pytest.raises(Interrupt):
            ask(1)
        ask.answer = "yes, but 2"
        ask(2)
        (step,) = saga.steps
        assert (step.status, step.attempts) == (StepStatus.DONE, 2)
    assert world.undone == [1] and world.effects == [2] and len(set(ask.keys)) == 2


def test_a_paused_call_that_is_then_refused_is_not_called_absent(log, world):
    ask = Asking(ToolRunner("mail", Declaration(semantics="IRREVERSIBLE"), interrupts=(Interrupt,)), world)
    with pytest.raises(RollbackIncomplete), saga_scope("s", log=log):
        with pytest.raises(Interrupt):
            ask(approve=lambda request: True)
        with pytest.raises(ApprovalRequired):
            ask(approve=lambda request: False)
    assert _statuses(log) == ["UNKNOWN"]


def test_a_gate_that_asks_through_the_framework_leaves_no_step_and_is_asked_again(log, world):
    mail = ToolRunner("mail", Declaration(semantics="IRREVERSIBLE"), adapter="frame", interrupts=(Interrupt,))
    tokens: list[str] = []

    def send(to: str, gate: Callable[[Any], bool]) -> Any:
        site = CallSite("frame", "task", body=gate)
        return mail.run({"to": to}, lambda key: world.put(to), site=site, approve=gate)

    def asks(request: Any) -> bool:
        tokens.append(request.token)
        raise Interrupt

    def knows(request: Any) -> bool:
        tokens.append(request.token)
        return True

    with saga_scope("s", log=log) as saga:
        with pytest.raises(Interrupt):
            send("ada", asks)
        assert saga.steps == ()
        saga.suspend("asks")
    with saga_scope("s", log=log, resume="continue"):
        send("ada", knows)
        send("bob", knows)
    assert world.effects == ["ada", "bob"]
    assert tokens[0] == tokens[1] != tokens[2], "the token names this call with these arguments, before and after"


async def test_a_paused_async_call_is_paused_too_and_asuspend_leaves_it_to_the_next_owner(log, world, charge):
    async def invoke(key: str) -> Any:
        raise Interrupt

    site = CallSite("frame", "task", "call_0")
    async with saga_scope("s", log=log) as saga:
        with pytest.raises(Interrupt):
            await charge.arun({"value": 1}, invoke, site=site)
        await saga.asuspend("asks")
        with pytest.raises(SagaNotRunning):
            await saga.asuspend("asks")
    assert _statuses(log) == ["PAUSED"] and not log.is_live("s")

    async def goes_on(key: str) -> Any:
        return world.put(1)

    async with saga_scope("s", log=log, resume="continue"):
        await charge.arun({"value": 1}, goes_on, site=site)
    assert world.effects == [1]


async def test_asuspend_waits_for_a_step_on_its_own_loop(log, world, charge):
    began, release = asyncio.Event(), asyncio.Event()

    async def invoke(key: str) -> Any:
        began.set()
        await release.wait()
        return world.put(1)

    async with saga_scope("s", log=log) as saga:
        running = asyncio.ensure_future(charge.arun({"value": 1}, invoke))
        await began.wait()
        suspending = asyncio.ensure_future(saga.asuspend("asks"))
        await asyncio.sleep(0)
        release.set()
        await suspending
        await running
    assert _statuses(log) == ["DONE"] and read_saga(log, "s").status is SagaStatus.SUSPENDED


async def test_asuspend_with_a_step_that_does_not_end_is_busy_and_changes_nothing(log, world, charge):
    began, release = asyncio.Event(), asyncio.Event()

    async def invoke(key: str) -> Any:
        began.set()
        await release.wait()
        return world.put(1)

    async with saga_scope("s", log=log, drain_timeout=0.0) as saga:
        running = asyncio.ensure_future(charge.arun({"value": 1}, invoke))
        await began.wait()
        with pytest.raises(SagaBusy):
            await saga.asuspend("asks")
        release.set()
        await running
    assert read_saga(log, "s").status is SagaStatus.COMMITTED


# --- which saga


def _on_a_thread(fn: Callable[[], Any]) -> Any:
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(fn())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    return outcome[0]


def test_a_covered_tool_refuses_where_no_saga_can_be_told(log, world, charge):
    with saga_scope("s", log=log) as saga:
        outside = _on_a_thread(lambda: charge.run({}, lambda key: "straight through"))
        with covered(saga, [charge]):
            refused = _on_a_thread(lambda: _call(charge, world, 1))
            _call(charge, world, 2)
        after = _on_a_thread(lambda: charge.run({}, lambda key: "straight through"))
    assert outside == after == "straight through"
    assert isinstance(refused, BoundaryRequired) and "carry(fn)" in str(refused) and world.effects == [2]


def test_code_that_the_engine_itself_runs_calls_covered_tools_straight_through(log, world):
    seen: list[Any] = []

    @saga_tool(semantics="READ_ONLY", require_saga=True)
    def look() -> str:
        seen.append((current_saga(), current_step() is not None))
        return "here"

    @compensator("back")
    def back() -> None:
        look()

    @saga_tool(semantics="COMPENSABLE", compensate=undo(back))
    def act() -> None: ...

    def gate(request: Any) -> bool:
        return look() == "here"

    mail = ToolRunner("mail", Declaration(semantics="IRREVERSIBLE"))
    with pytest.raises(RollbackIncomplete), saga_scope(log=log, approve=gate) as saga, covered(saga, [look, act]):
        act()
        mail.run({}, lambda key: None)
        raise ValueError
    assert seen == [(None, False), (None, True)]


def test_a_binding_that_beats_the_context_takes_the_call_for_its_own_saga(log, world, charge):
    with saga_scope("a", log=log) as a, saga_scope("b", log=log, independent=True) as b:
        with covered(a, [charge], by_binding=True):
            _call(charge, world, 1)
            _on_a_thread(lambda: _call(charge, world, 2))
            with covered(b, [charge], by_binding=True), pytest.raises(BoundaryRequired):
                _call(charge, world, 3)
            with a.attached(), a.savepoint() as inner:
                _call(charge, world, 4)
                assert len(inner.steps) == 1, "a savepoint of the bound saga stays where the call belongs"
        _call(charge, world, 5)
        assert (len(a.steps), len(b.steps)) == (3, 1)
    assert world.effects == [1, 2, 4, 5]


def test_only_wrapped_tools_can_be_bound(log):
    with saga_scope(log=log) as saga, pytest.raises(DeclarationError), covered(saga, [print]):
        pass
    assert runner_of(print) is None


def test_attached_makes_a_saga_current_for_the_block_on_any_thread(log, world, charge):
    with saga_scope("s", log=log) as saga:

        def work() -> Any:
            with saga.attached():
                inside = current_saga()
                _call(charge, world, 1)
            return inside, current_saga()

        assert _on_a_thread(work) == (saga, None)
        assert current_saga() is saga
    assert world.effects == [1]


def test_refusals_are_counted(log, world, charge):
    with pytest.raises(SagaAborted), saga_scope(log=log) as saga:
        saga.abort("enough")
        for _ in range(4):
            with pytest.raises(SagaAborted):
                _call(charge, world, 1)
        assert saga.refusals == 4


# --- runs that are read piece by piece


def test_a_stream_is_one_saga_that_is_current_only_while_it_works(log, world, charge):
    def run() -> Iterator[int]:
        for value in (1, 2):
            _call(charge, world, value)
            yield value

    stream = SagaStream(saga_scope("s", log=log), run)
    assert current_saga() is None
    pieces: list[int] = []
    for piece in stream:
        assert current_saga() is None and read_saga(log, "s").status is SagaStatus.RUNNING
        pieces.append(piece)
    assert pieces == [1, 2] and current_saga() is None
    assert read_saga(log, "s").status is SagaStatus.COMMITTED
    with pytest.raises(StopIteration):
        next(stream)


def test_a_stream_that_raises_or_is_closed_early_is_rolled_back(log, world, charge):
    closed: list[str] = []

    def run(fails: bool) -> Iterator[int]:
        try:
            _call(charge, world, 1)
            yield 1
            if fails:
                raise ValueError("no")
            yield 2
        finally:
            closed.append("closed")

    failing = SagaStream(saga_scope("fails", log=log), lambda: run(True))
    assert next(failing) == 1
    with pytest.raises(ValueError, match="no"):
        next(failing)
    with SagaStream(saga_scope("left", log=log), lambda: run(False)) as left:
        assert next(left) == 1
    with SagaStream(saga_scope("unread", log=log), lambda: run(False)):
        pass
    assert [read_saga(log, name).status for name in ("fails", "left")] == [SagaStatus.ROLLED_BACK] * 2
    assert world.effects == [] and closed == ["closed", "closed"] and "unread" not in log.saga_ids()


async def test_what_an_adapter_calls_its_own_is_not_taken_for_the_end_of_its_stream(log, world, charge):
    def mine(*_: Any) -> Any:
        pytest.fail("a method of the adapter's own was called by the stream")

    own = dict.fromkeys(
        ("_piece", "_close", "_open", "_end", "_leave", "_start", "_at_end", "_around", "_dropped"), mine
    )

    def run() -> Iterator[int]:
        _call(charge, world, 1)
        yield 1

    async def arun() -> Any:
        for piece in run():
            yield piece

    with type("Derived", (SagaStream,), own)(saga_scope("left", log=log), run) as stream:
        assert next(stream) == 1
    async with type("Derived", (AsyncSagaStream,), own)(saga_scope("aleft", log=log), arun) as stream:
        assert await anext(stream) == 1
    assert [read_saga(log, name).status for name in ("left", "aleft")] == [SagaStatus.ROLLED_BACK] * 2
    assert world.effects == []


def test_a_stream_that_is_dropped_is_rolled_back(log, world, charge):
    def run() -> Iterator[int]:
        _call(charge, world, 1)
        yield 1

    stream = SagaStream(saga_scope("s", log=log), run)
    next(stream)
    del stream
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


def test_a_stream_whose_run_cannot_start_is_rolled_back(log):
    def run() -> Iterator[int]:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        next(SagaStream(saga_scope("s", log=log), run))
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


def test_the_end_of_a_stream_may_suspend_it_and_hears_the_last_piece(log, world, charge):
    heard: list[Any] = []

    def at_end(saga: Any, last: Any) -> None:
        heard.append(last)
        saga.suspend("asks")

    assert list(SagaStream(saga_scope("s", log=log), lambda: iter("ab"), at_end=at_end)) == ["a", "b"]
    assert heard == ["b"] and read_saga(log, "s").status is SagaStatus.SUSPENDED


def test_a_stream_whose_saga_cannot_commit_says_so_at_its_end(log, world, charge):
    def run() -> Iterator[int]:
        yield 1
        saga = current_saga()
        assert saga is not None
        saga.abort("enough")

    with pytest.raises(SagaAborted):
        list(SagaStream(saga_scope("s", log=log), run))


def test_a_stream_whose_rollback_is_incomplete_says_so_when_it_is_closed(log, world):
    def fails(value: Any) -> None:
        raise OSError

    def run() -> Iterator[int]:
        _call(_runner(undo(fails, value="result.value")), world, 1)
        yield 1

    stream = SagaStream(saga_scope("s", log=log), run)
    next(stream)
    with pytest.raises(RollbackIncomplete):
        stream.close()
    assert read_saga(log, "s").status is SagaStatus.NEEDS_ATTENTION
    stream.close()


@pytest.mark.parametrize("where", ["start", "at_end", "around"])
def test_a_stop_that_is_not_the_end_of_the_run_is_not_taken_for_it(log, where):
    def stops(*_: object) -> Any:
        return next(iter(()))

    start = stops if where == "start" else lambda: iter("a")
    at_end, around = (stops if where == name else None for name in ("at_end", "around"))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(SagaStream(saga_scope("s", log=log), start, at_end=at_end, around=around))
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


def test_a_stream_that_is_being_read_is_neither_read_nor_closed_by_another_thread(log, world, charge):
    def run() -> Iterator[int]:
        for attempt in (stream.close, lambda: next(stream)):
            assert isinstance(_on_a_thread(attempt), RuntimeError)
        _call(charge, world, 1)
        yield 1

    stream = SagaStream(saga_scope("s", log=log), run)
    assert list(stream) == [1] and world.effects == [1]
    assert read_saga(log, "s").status is SagaStatus.COMMITTED


def test_a_scope_that_somebody_else_has_opened_is_not_ended_by_a_stream(log):
    with saga_scope("s", log=log) as saga:
        with pytest.raises(SagaBusy):
            next(SagaStream(saga, lambda: iter("a")))
        assert saga.status is SagaStatus.RUNNING


def test_a_dropped_stream_is_rolled_back_away_from_what_the_collection_came_upon(log, world):
    names: list[str] = []

    def back(value: Any) -> None:
        names.append(threading.current_thread().name)

    def run() -> Iterator[int]:
        _call(_runner(undo(back, value="result.value")), world, 1)
        yield 1

    stream = SagaStream(saga_scope("s", log=log), run)
    next(stream)
    del stream  # in the middle of anything, a commit of the very log that its rollback needs
    assert names == ["agent-saga-stream"]


@pytest.mark.parametrize("commits", [True, False])
def test_what_is_around_a_stream_does_not_hide_what_the_saga_came_to(log, world, commits):
    class Around:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            raise LookupError

    def run() -> Iterator[int]:
        yield 1
        if not commits:
            raise ValueError

    stream = SagaStream(saga_scope("s", log=log), run, around=lambda saga: Around())
    with pytest.raises(LookupError if commits else ValueError) as raised:
        list(stream)
    status = SagaStatus.COMMITTED if commits else SagaStatus.ROLLED_BACK
    assert read_saga(log, "s").status is status and any(status in note for note in raised.value.__notes__)


@pytest.mark.parametrize("commits", [True, False])
async def test_what_is_around_an_async_stream_may_be_async_and_is_left_once_the_saga_has_ended(log, world, commits):
    seen: list[Any] = []

    class Around(AbstractAsyncContextManager[None]):
        async def __aenter__(self) -> None:
            await asyncio.sleep(0)
            seen.append(stream.saga.status)

        async def __aexit__(self, *_: object) -> None:
            await asyncio.sleep(0)
            seen.append(stream.saga.status)
            raise LookupError

    async def run() -> Any:
        yield 1
        if not commits:
            raise ValueError

    stream = AsyncSagaStream(saga_scope("s", log=log), run, around=lambda saga: Around())
    with pytest.raises(LookupError if commits else ValueError) as raised:
        [piece async for piece in stream]
    status = SagaStatus.COMMITTED if commits else SagaStatus.ROLLED_BACK
    assert seen == [SagaStatus.RUNNING, status] and any(status in note for note in raised.value.__notes__)
    await stream.aclose()
    assert len(seen) == 2


async def test_an_async_stream_does_the_same(log, world, charge):
    async def invoke(key: str) -> Any:
        return world.put(1)

    async def run() -> Any:
        await charge.arun({"value": 1}, invoke)
        yield 1
        await charge.arun({"value": 1}, invoke)
        yield 2

    whole = [piece async for piece in AsyncSagaStream(saga_scope("whole", log=log), run)]
    assert whole == [1, 2] and world.effects == [1, 1]
    async with aclosing(AsyncSagaStream(saga_scope("left", log=log), run)) as left:
        assert await anext(left) == 1
        assert current_saga() is None
    assert [read_saga(log, name).status for name in ("whole", "left")] == [
        SagaStatus.COMMITTED,
        SagaStatus.ROLLED_BACK,
    ]
    assert world.effects == [1, 1]

    async def opens() -> Any:
        return run()

    async def at_end(saga: Any, last: Any) -> None:
        await saga.asuspend(f"asks after {last}")

    stream = AsyncSagaStream(saga_scope("asks", log=log), opens, at_end=at_end)
    assert [piece async for piece in stream] == [1, 2]
    assert read_saga(log, "asks").status is SagaStatus.SUSPENDED


async def test_an_async_stream_that_is_being_read_is_not_closed_by_another_task(log, world, charge):
    began = asyncio.Event()

    async def run() -> Any:
        began.set()
        await asyncio.Event().wait()
        yield 1

    stream = AsyncSagaStream(saga_scope("s", log=log), run)
    reading = asyncio.ensure_future(anext(stream))
    await began.wait()
    with pytest.raises(RuntimeError, match="Cancel that task"):
        await stream.aclose()
    assert stream.saga.status is SagaStatus.RUNNING and not reading.done()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


async def test_a_cancelled_async_stream_is_rolled_back(log, world, charge):
    began = asyncio.Event()

    async def invoke(key: str) -> Any:
        return world.put(1)

    async def run() -> Any:
        await charge.arun({"value": 1}, invoke)
        began.set()
        await asyncio.Event().wait()
        yield 1

    async def read() -> None:
        async for _ in AsyncSagaStream(saga_scope("s", log=log), run):
            pass

    task = asyncio.ensure_future(read())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled() and world.effects == []
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


async def test_a_cancellation_while_an_async_stream_is_closed_is_heard(log, world):
    began, release = asyncio.Event(), asyncio.Event()

    @compensator("slow")
    async def slow(value: Any) -> None:
        began.set()
        await release.wait()
        world.undone.append(value)

    async def invoke(key: str) -> Any:
        return world.put(1)

    async def run() -> Any:
        await _runner(undo(slow, value="result.value")).arun({"value": 1}, invoke)
        yield 1

    stream = AsyncSagaStream(saga_scope("s", log=log), run)
    await anext(stream)
    closing = asyncio.ensure_future(stream.aclose())
    await began.wait()
    closing.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert world.undone == [1] and read_saga(log, "s").status is SagaStatus.ROLLED_BACK


async def test_an_async_stream_is_read_by_one_task_from_its_opening_on(log, world, charge):
    began, release = asyncio.Event(), asyncio.Event()

    async def invoke(key: str) -> Any:
        return world.put(1)

    async def start() -> Any:
        began.set()
        await release.wait()
        return run()

    async def run() -> Any:
        await charge.arun({"value": 1}, invoke)
        yield 1

    stream = AsyncSagaStream(saga_scope("s", log=log), start)
    reading = asyncio.ensure_future(anext(stream))
    await began.wait()
    for other in (stream.aclose(), anext(stream)):
        with pytest.raises(RuntimeError, match="Another task"):
            await other
    release.set()
    assert await reading == 1
    assert [piece async for piece in stream] == []
    assert read_saga(log, "s").status is SagaStatus.COMMITTED
