"""Fleets: adapters found from objects, one saga over several frameworks, and sagas carried to other threads."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import importlib.metadata
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from agent_saga_core import (
    ActionSemantics,
    BoundaryRequired,
    DeclarationError,
    MemoryLog,
    SagaFleet,
    SagaNotRunning,
    SagaStatus,
    carry,
    compensator,
    current_saga,
    current_step,
    list_sagas,
    read_saga,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.fleet import Adapter, adapter_for, adapters, coverage_of
from agent_saga_core.fleet.adapters import _announced
from agent_saga_core.registry import isolated_registry
from agent_saga_core.wrapping import runner_of

READ_ONLY, COMPENSABLE = ActionSemantics.READ_ONLY, ActionSemantics.COMPENSABLE
WAIT = 30.0


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    with isolated_registry():
        yield


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


Announce = Callable[..., list[str]]


@pytest.fixture
def announce(monkeypatch: pytest.MonkeyPatch) -> Iterator[Announce]:
    """Lets exactly these adapters be installed; the list fills with each look at the entry points."""
    looked: list[str] = []

    def announce(**entries: str) -> list[str]:
        def entry_points(*, group: str) -> list[EntryPoint]:
            looked.append(group)
            return [EntryPoint(name, value, "agent_saga.adapters") for name, value in entries.items()]

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        _announced.cache_clear()
        return looked

    announce()
    yield announce
    _announced.cache_clear()


@pytest.fixture
def toyframe(announce: Announce, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A small framework with an adapter; the adapter's package is not imported yet."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "toyframe"))
    announce(toyframe="toyframe_adapter:ADAPTER")
    import toyframe  # type: ignore[import-not-found]

    yield toyframe
    for name in ("toyframe", "toyframe_adapter", "toyframe_saga"):
        sys.modules.pop(name, None)


class World:
    """What happened outside: each effect with the saga that its step says it belongs to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.charged: list[tuple[str, str]] = []
        self.refunded: list[tuple[str, str]] = []

        @compensator("fleet.refund")
        def refund(tag: str) -> None:
            self.note(self.refunded, tag)

        def charge(tag: str) -> str:
            self.note(self.charged, tag)
            return tag

        async def acharge(tag: str) -> str:
            await asyncio.sleep(0)
            self.note(self.charged, tag)
            return tag

        self.charge, self.acharge = charge, acharge
        self.declaration: Any = {"semantics": COMPENSABLE, "compensate": undo(refund, tag="args.tag", if_absent="noop")}

    def note(self, where: list[tuple[str, str]], tag: str) -> None:
        step = current_step()
        with self.lock:
            where.append((step.saga_id if step else "", tag))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def on_a_thread(fn: Callable[[], Any]) -> Any:
    """What `fn` comes to on a thread that knows nothing of this one."""
    done: Future[Any] = Future()

    def work() -> None:
        try:
            done.set_result(fn())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done.result(WAIT)


# --- whose object it is


def test_an_objects_adapter_is_found_without_importing_it(toyframe: Any) -> None:
    (adapter,) = adapters()
    assert adapter_for(toyframe.Tool("pay", print)) is adapter
    assert adapter.owns(toyframe.Agent([])) and not adapter.owns(print)

    class Users(toyframe.Agent):  # type: ignore[misc]
        pass

    assert adapter_for(Users([])) is adapter
    assert adapter_for(print) is None and adapter_for(object()) is None
    assert "toyframe_saga" not in sys.modules
    assert adapter.load().wrap_tool and "toyframe_saga" in sys.modules


def test_the_most_derived_class_decides(announce: Announce, monkeypatch: pytest.MonkeyPatch) -> None:
    over, under = type("Over", (), {"__module__": "over.parts"}), type("Under", (), {"__module__": "under"})
    both = type("Both", (over, under), {"__module__": "shop"})()
    made = {name: Adapter(name=name, package="nowhere", roots=(name,)) for name in ("over", "under")}
    monkeypatch.setitem(sys.modules, "made_adapters", type("M", (), made))  # type: ignore[arg-type]
    announce(under="made_adapters:under", over="made_adapters:over")
    assert adapter_for(both) == made["over"]
    assert [adapter.name for adapter in adapters()] == ["over", "under"]
    announce(under="made_adapters:under")
    assert adapter_for(both) == made["under"]
    made["under2"] = Adapter(name="under2", package="nowhere", roots=("other", "under"))
    monkeypatch.setitem(sys.modules, "made_adapters", type("M", (), made))  # type: ignore[arg-type]
    announce(under="made_adapters:under", under2="made_adapters:under2")
    with pytest.raises(DeclarationError, match="'under' and 'under2' both claim the module 'under'"):
        adapter_for(both)


def test_a_broken_adapter_is_named_and_hides_no_other(toyframe: Any, announce: Announce) -> None:
    announce(toyframe="toyframe_adapter:ADAPTER", gone="no_such_package:ADAPTER", wrong="os:sep")
    assert [adapter.name for adapter in adapters()] == ["toyframe"]
    assert adapter_for(toyframe.Agent([])) is not None
    assert adapter_for(print) is None  # no framework can be behind a function
    with pytest.raises(DeclarationError) as raised:
        adapter_for(World())
    assert "'gone' (no_such_package:ADAPTER)" in str(raised.value) and "ModuleNotFoundError" in str(raised.value)
    assert "'wrong' (os:sep)" in str(raised.value) and "World" in str(raised.value)


def test_entry_points_are_looked_up_once(announce: Announce) -> None:
    looked = announce()
    assert (adapters(), adapters(), adapter_for(object())) == ((), (), None)
    assert looked == ["agent_saga.adapters"]


# --- registering


def test_tools_of_every_kind_are_wrapped_by_whom_they_belong_to(toyframe: Any, world: World) -> None:
    fleet = SagaFleet("orders")
    plain = fleet.register(world.charge, **world.declaration)
    tool = toyframe.Tool("pay", world.charge)
    wrapped = fleet.register(tool, **world.declaration)
    own = saga_tool(semantics=READ_ONLY, name="look")(print)
    assert fleet.register(own) is own
    assert plain is not world.charge and runner_of(world.charge) is None
    assert isinstance(wrapped, toyframe.Tool) and runner_of(tool) is None
    assert [runner_of(it).spec.tool for it in fleet.tools] == ["charge", "pay", "look"]  # type: ignore[union-attr]
    assert fleet.register(wrapped) is wrapped and len(fleet.tools) == 3


def test_what_cannot_be_registered(announce: Announce, world: World) -> None:
    fleet = SagaFleet("orders")
    wrapped = fleet.register(world.charge, **world.declaration)
    with pytest.raises(DeclarationError, match="wrapped already"):
        fleet.register(wrapped, **world.declaration)
    with pytest.raises(DeclarationError, match="semantics="):
        fleet.register(world.acharge)
    for nothing in (object(), World, "charge"):
        with pytest.raises(DeclarationError, match="No adapter knows"):
            fleet.register(nothing, semantics=READ_ONLY)
    assert len(fleet.tools) == 1


def test_a_name_stands_for_one_declaration(toyframe: Any, world: World) -> None:
    fleet = SagaFleet("orders")
    fleet.register(world.charge, **world.declaration)
    # The same promise in another framework, written a second time.
    again = undo("fleet.refund", tag="args.tag", if_absent="noop")
    fleet.register(toyframe.Tool("charge", world.charge), semantics="COMPENSABLE", compensate=again)
    others: list[Any] = [
        {"semantics": READ_ONLY},
        {**world.declaration, "key": "args.tag"},
        {**world.declaration, "timeout": 5.0},
        {"semantics": COMPENSABLE, "compensate": undo("fleet.refund", tag="args.tag")},
    ]
    for other in others:
        with pytest.raises(DeclarationError, match="already has a tool 'charge' with another declaration"):
            fleet.register(toyframe.Tool("charge", world.charge), **other)
    assert len(fleet.tools) == 2


# --- transactions


def test_a_transaction_is_one_saga_over_all_frameworks(toyframe: Any, world: World, log: MemoryLog) -> None:
    fleet = SagaFleet("orders", log=log)
    plain = fleet.register(world.charge, **world.declaration)
    agent = toyframe.Agent([fleet.register(toyframe.Tool("pay", world.charge), **world.declaration)])
    with fleet.transaction("s1") as saga:
        assert saga is current_saga() and saga.id == "s1"
        plain("a")
        assert agent.run([("pay", {"tag": "b"})], spread=carry) == ["b"]
    assert current_saga() is None and saga.report is not None and saga.report.clean
    assert world.charged == [("s1", "a"), ("s1", "b")] and world.refunded == []
    assert [(head.saga_id, head.name) for head in list_sagas(log)] == [("s1", "orders")]
    with pytest.raises(ZeroDivisionError), fleet.transaction("s2", name="refused"):
        plain("c")
        agent.run([("pay", {"tag": "d"})], spread=carry)
        raise ZeroDivisionError
    assert world.refunded == [("s2", "d"), ("s2", "c")]
    assert read_saga(log, "s2").name == "refused"


async def test_an_async_transaction(world: World, log: MemoryLog, announce: Announce) -> None:
    fleet = SagaFleet("orders", log=log)
    acharge = fleet.register(world.acharge, **world.declaration)
    async with fleet.transaction("s1") as saga:
        await asyncio.gather(*(acharge(f"t{n}") for n in range(3)))
    assert saga.report is not None and saga.report.clean and len(world.charged) == 3
    with pytest.raises(asyncio.CancelledError):
        async with fleet.transaction("s2"):
            await acharge("u")
            raise asyncio.CancelledError
    assert world.refunded == [("s2", "u")]


def test_another_log_than_the_fleets(world: World, log: MemoryLog, announce: Announce) -> None:
    fleet = SagaFleet("orders", log=MemoryLog())
    with fleet.transaction("s1", log=log):
        pass
    assert [head.saga_id for head in list_sagas(log)] == ["s1"]
    with pytest.raises(ValueError, match="saga id"):
        fleet.transaction("")


def test_a_transaction_in_a_saga_is_a_savepoint(world: World, log: MemoryLog, announce: Announce) -> None:
    fleet = SagaFleet("orders", log=log)
    charge = fleet.register(world.charge, **world.declaration)
    with saga_scope("s1", log=log):
        charge("a")
        with pytest.raises(ZeroDivisionError), fleet.transaction():
            charge("b")
            raise ZeroDivisionError
        charge("c")
    assert world.refunded == [("s1", "b")] and read_saga(log, "s1").status is SagaStatus.COMMITTED


@pytest.mark.promise("no-unprotected-call")
def test_where_no_saga_can_be_told_a_tool_refuses(toyframe: Any, world: World, log: MemoryLog) -> None:
    fleet = SagaFleet("orders", log=log)
    plain = fleet.register(world.charge, **world.declaration)
    agent = toyframe.Agent([fleet.register(toyframe.Tool("pay", world.charge), **world.declaration)])
    with fleet.transaction("s1"):
        with pytest.raises(BoundaryRequired, match="carry"):
            on_a_thread(lambda: plain("lost"))
        (error,) = agent.run([("pay", {"tag": "lost"})])
        assert isinstance(error, BoundaryRequired)
        late = fleet.register(saga_tool(name="late", **world.declaration)(world.charge))
        with pytest.raises(BoundaryRequired):
            on_a_thread(lambda: late("lost"))
        assert world.charged == []
    assert on_a_thread(lambda: plain("after")) == "after"
    assert world.charged == [("", "after")]


@pytest.mark.promise("no-unprotected-call")
def test_a_tool_stays_covered_until_the_rollback_is_complete(world: World, log: MemoryLog, announce: Announce) -> None:
    rolling, go_on = threading.Event(), threading.Event()

    @compensator("fleet.slow")
    def slow(tag: str) -> None:
        rolling.set()
        assert go_on.wait(WAIT)

    fleet = SagaFleet("orders", log=log)
    declaration: Any = {"semantics": COMPENSABLE, "compensate": undo(slow, tag="args.tag")}
    charge = fleet.register(world.charge, **declaration)

    def body() -> None:
        with fleet.transaction("s1"):
            charge("a")
            raise ZeroDivisionError

    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(body)
        assert rolling.wait(WAIT)
        try:
            with pytest.raises(BoundaryRequired):
                charge("meanwhile")
        finally:
            go_on.set()
        with pytest.raises(ZeroDivisionError):
            ending.result(WAIT)
    assert charge("after") == "after" and [tag for _, tag in world.charged] == ["a", "after"]


def test_a_transaction_that_does_not_open_covers_nothing(world: World, log: MemoryLog, announce: Announce) -> None:
    fleet = SagaFleet("orders", log=log)
    charge = fleet.register(world.charge, **world.declaration)
    opened = fleet.transaction("s1")
    with opened:
        charge("a")
    with pytest.raises(Exception, match="entered before"), opened:
        pass
    assert charge("b") == "b"
    with saga_scope("s2", log=log), pytest.raises(DeclarationError, match="another one"), fleet.transaction("s3"):
        pass
    assert charge("c") == "c"


def test_a_transaction_in_a_generator_is_refused(log: MemoryLog, announce: Announce) -> None:
    fleet = SagaFleet("orders", log=log)

    def generator() -> Iterator[int]:
        with fleet.transaction():
            yield 1

    async def agenerator() -> Any:
        async with fleet.transaction():
            yield 1

    async def read() -> None:
        with pytest.raises(DeclarationError, match="generator"):
            await anext(agenerator())

    with pytest.raises(DeclarationError, match="generator"):
        next(generator())
    asyncio.run(read())
    assert list_sagas(log) == []


# --- carrying


def test_a_carried_callable_runs_in_its_saga_wherever_it_is_called(world: World, log: MemoryLog) -> None:
    charge = saga_tool(**world.declaration)(world.charge)
    acharge = saga_tool(**world.declaration)(world.acharge)
    with saga_scope("s1", log=log):
        carried = carry(charge)
        acarried = carry(acharge)
        later = carry(lambda tag: acharge(tag))
        part = carry(functools.partial(acharge, tag="part"))
        assert carried.__name__ == "charge" and asyncio.iscoroutinefunction(acarried)
        assert on_a_thread(lambda: carried("a")) == "a"
        assert on_a_thread(lambda: asyncio.run(acarried("b"))) == "b"
        assert on_a_thread(lambda: asyncio.run(later("c"))) == "c"
        assert on_a_thread(lambda: asyncio.run(part())) == "part"

        def in_another() -> str:
            with saga_scope("s2", log=log):
                carried("d")
                return charge("e") + ("" if current_saga() is None else current_saga().id)  # type: ignore[union-attr]

        assert on_a_thread(in_another) == "es2"
    assert sorted(world.charged) == [("s1", tag) for tag in ("a", "b", "c", "d", "part")] + [("s2", "e")]


def test_after_the_call_everything_is_as_it_was(log: MemoryLog) -> None:
    with saga_scope("s1", log=log):

        def fail() -> None:
            assert current_saga() is not None
            raise ZeroDivisionError

        carried = carry(fail)

    def thread() -> Any:
        with pytest.raises(ZeroDivisionError):
            carried()
        return current_saga()

    assert on_a_thread(thread) is None


def test_a_carried_call_that_nobody_ended_leaves_the_context_in_which_it_is_closed(log: MemoryLog) -> None:
    async def waits() -> None:
        await asyncio.sleep(0)

    with saga_scope("a", log=log):
        call: Any = carry(waits)()
        contextvars.copy_context().run(call.send, None)
    with saga_scope("b", log=log) as other:
        call.close()
        assert current_saga() is other


def test_one_carried_callable_on_many_threads_at_once(world: World, log: MemoryLog) -> None:
    charge = saga_tool(**world.declaration)(world.charge)
    together = threading.Barrier(4, timeout=WAIT)

    def both(tag: str) -> str:
        together.wait()
        return charge(tag)

    with saga_scope("s1", log=log), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(carry(both), "abcd")) == list("abcd")
    assert sorted(world.charged) == [("s1", tag) for tag in "abcd"]


def test_what_is_carried_out_of_a_step_belongs_to_it(world: World, log: MemoryLog, pool: ThreadPoolExecutor) -> None:
    inner = saga_tool(**world.declaration)(world.charge)

    @saga_tool(semantics=READ_ONLY)
    def outer() -> str:
        return pool.submit(carry(inner), "a").result(WAIT)

    with saga_scope("s1", log=log):
        assert outer() == "a"
    intents = [record.data for record in log.read("s1") if record.type == "INTENT"]
    assert [(data["tool"], data.get("parent")) for data in intents] == [("outer", None), ("charge", 1)]


def test_a_savepoint_is_carried_too(world: World, log: MemoryLog, pool: ThreadPoolExecutor) -> None:
    charge = saga_tool(**world.declaration)(world.charge)
    with saga_scope("s1", log=log) as saga:
        with pytest.raises(ZeroDivisionError), saga.savepoint():
            pool.submit(carry(charge), "a").result(WAIT)
            raise ZeroDivisionError
        pool.submit(carry(charge), "b").result(WAIT)
    assert world.refunded == [("s1", "a")]


def test_there_must_be_a_saga_to_carry(world: World, log: MemoryLog) -> None:
    with pytest.raises(SagaNotRunning, match="with saga_scope"):
        carry(world.charge)
    charge = saga_tool(**world.declaration)(world.charge)
    with saga_scope("s1", log=log):
        carried, plain = carry(charge), carry(lambda: "ran")
    with pytest.raises(SagaNotRunning):
        carried("a")
    assert plain() == "ran" and world.charged == []


def test_what_cannot_be_carried(log: MemoryLog) -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def agenerator() -> Any:
        yield 1

    class Generates:
        def __call__(self) -> Iterator[int]:
            yield 1

    wrong: list[Any] = [generator, agenerator, functools.partial(generator), Generates(), "charge"]
    with saga_scope("s1", log=log):
        for fn in wrong:
            with pytest.raises(DeclarationError, match="carry"):
                carry(fn)


# --- executors


def test_a_bound_executor_submits_in_the_saga_of_the_submission(
    world: World, log: MemoryLog, announce: Announce
) -> None:
    fleet = SagaFleet("orders", log=log)
    charge = fleet.register(world.charge, **world.declaration)
    hold = threading.Event()
    with ThreadPoolExecutor(1) as plain:
        pool = fleet.bind(plain)
        with fleet.transaction("s1"):
            plain.submit(hold.wait, WAIT)  # the one worker is busy until both sagas have submitted
            first = pool.submit(charge, "a")

            def other() -> str:
                with fleet.transaction("s2"):
                    second = pool.submit(charge, tag="b")
                    hold.set()
                    return second.result(WAIT)

            assert on_a_thread(other) == "b" and first.result(WAIT) == "a"
            lost = plain.submit(charge, "lost")
            with pytest.raises(BoundaryRequired):
                lost.result(WAIT)
        assert pool.submit(charge, "c").result(WAIT) == "c"  # no saga here, and none left in the worker
    assert sorted(world.charged) == [("", "c"), ("s1", "a"), ("s2", "b")]


def test_map_shutdown_and_event_loops(world: World, log: MemoryLog, announce: Announce) -> None:
    fleet = SagaFleet("orders", log=log)
    charge = fleet.register(world.charge, **world.declaration)

    async def run(pool: Executor) -> str:
        async with fleet.transaction("s2"):
            return await asyncio.get_running_loop().run_in_executor(pool, charge, "c")

    plain = ThreadPoolExecutor(2)
    with fleet.bind(plain) as pool:
        with fleet.transaction("s1"):
            answers = pool.map(charge, ["a", "b"], timeout=WAIT)
            assert list(answers) == ["a", "b"]
        assert asyncio.run(run(pool)) == "c"
    assert sorted(world.charged) == [("s1", "a"), ("s1", "b"), ("s2", "c")]
    with pytest.raises(RuntimeError, match="after shutdown"):
        plain.submit(print)


def test_other_processes_are_refused(announce: Announce) -> None:
    class Users(ProcessPoolExecutor):
        pass

    fleet = SagaFleet("orders")
    with Users(1) as processes, pytest.raises(DeclarationError, match="Bind a ThreadPoolExecutor"):
        fleet.bind(processes)


# --- coverage


def test_coverage_of_registered_tools_and_observed_agents(toyframe: Any, world: World) -> None:
    fleet = SagaFleet("orders")
    fleet.register(world.charge, **world.declaration)
    pay = fleet.register(toyframe.Tool("pay", world.charge), **world.declaration)
    fleet.assert_fully_covered()
    hidden = toyframe.Tool("hidden", world.charge)
    agent = toyframe.Agent([pay, toyframe.Tool("mail", print)], planner=lambda: hidden)
    assert fleet.observe(agent) is agent and fleet.observe(agent) is agent
    fleet.observe([pay], name="spare")
    found = fleet.coverage()
    assert found.framework == "python, toyframe"
    assert {entry.path: (entry.wrapped, entry.identity) for entry in found.tools} == {
        "tools/charge": (True, "occurrence"),
        "tools/pay": (True, "call-id"),
        "agents/0/agent/pay": (True, "call-id"),
        "agents/0/agent/mail": (False, None),
        "agents/0/agent/planner/closure:hidden": (False, None),
        "spare/tool/pay": (True, "call-id"),
    }
    assert [entry.visibility for entry in found.uncovered] == ["declared", "inferred"]
    with pytest.raises(AssertionError) as raised:
        fleet.assert_fully_covered(acknowledge=["agents/0/agent/planner"])
    message = str(raised.value)
    assert "'mail' is not wrapped" in message and "agents/0/agent/planner:" not in message


def test_what_cannot_be_observed(toyframe: Any) -> None:
    fleet = SagaFleet("orders")
    with pytest.raises(DeclarationError, match="installed: toyframe"):
        fleet.observe(object())
    fleet.observe(toyframe.Agent([]), name="one")
    with pytest.raises(DeclarationError, match="'one'"):
        fleet.observe(toyframe.Agent([]), name="one")
    with pytest.raises(AssertionError, match="no tool was found"):
        fleet.assert_fully_covered()


def test_lists_and_dicts_are_looked_into_each_by_its_own_adapter(toyframe: Any, world: World) -> None:
    charge = saga_tool(**world.declaration)(world.charge)
    agent = toyframe.Agent([toyframe.Tool("pay", print)])
    paths = [entry.path for entry in coverage_of([charge, world.charge, agent, (charge,)]).entries]
    assert paths == ["tools/charge", "tools/charge#2", "[2]/agent/pay", "[3]/tools/charge"]
    named = coverage_of({"crew": agent, "fleet": SagaFleet("empty"), "tool": charge, "seen": coverage_of(charge)})
    assert [entry.path for entry in named.entries] == ["crew/agent/pay", "tools/charge", "seen/tools/charge"]


# --- never mixed


@pytest.mark.promise("no-unprotected-call")
@pytest.mark.parametrize("seed", range(6))
def test_eight_transactions_on_four_threads_each_never_mix(toyframe: Any, world: World, seed: int) -> None:
    """Each step ends in its own saga: by the log, and by what the world saw; lost calls refuse."""
    log = MemoryLog()
    fleet = SagaFleet("orders", log=log)
    charge = fleet.register(world.charge, **world.declaration)
    acharge = fleet.register(world.acharge, **world.declaration)
    agent = toyframe.Agent([fleet.register(toyframe.Tool("pay", world.charge), **world.declaration)])
    together = threading.Barrier(8, timeout=WAIT)
    shared = ThreadPoolExecutor(4)
    refused: list[str] = []

    def ways(own: Executor) -> list[Callable[[str], Any]]:
        def lost(tag: str) -> None:
            try:
                on_a_thread(lambda: charge(tag))
            except BoundaryRequired:
                refused.append(tag)

        def by_agent(tag: str) -> None:
            (answer,) = agent.run([("pay", {"tag": tag})], spread=carry)
            assert answer == tag

        return [
            charge,
            lost,
            by_agent,
            lambda tag: fleet.bind(own).submit(charge, tag).result(WAIT),
            lambda tag: fleet.bind(shared).submit(charge, tag).result(WAIT),
            lambda tag: list(fleet.bind(shared).map(charge, [tag + "/0", tag + "/1"])),
            lambda tag: own.submit(carry(charge), tag).result(WAIT),
            lambda tag: on_a_thread(functools.partial(asyncio.run, carry(acharge)(tag))),
        ]

    def transaction(n: int) -> bool:
        chance = random.Random(seed * 100 + n)
        saga_id, fails = f"s{n}", chance.random() < 0.5
        with ThreadPoolExecutor(4) as own:
            try:
                with fleet.transaction(saga_id):
                    together.wait()  # from here on all are open, until all are done
                    calls = ways(own)
                    workers = fleet.bind(own) if chance.random() < 0.3 else None
                    for k in range(12):
                        tag = f"{saga_id}:{k}"
                        call = chance.choice(calls)
                        if workers is not None and call is charge:
                            workers.submit(call, tag).result(WAIT)
                        else:
                            call(tag)
                    together.wait()
                    if fails:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            except BaseException:
                together.abort()  # nobody waits for this one
                raise
        return fails

    with shared, ThreadPoolExecutor(8) as sagas:
        ended = [sagas.submit(transaction, n) for n in range(8)]
    wrong = [error for it in ended if (error := it.exception()) and not isinstance(error, threading.BrokenBarrierError)]
    assert wrong == []
    failed = [it.result() for it in ended]

    def owner(tag: str) -> str:
        return tag.partition(":")[0]

    assert refused and len(set(map(owner, refused))) > 1
    assert not {tag for _, tag in world.charged} & set(refused)
    assert [(saga, tag) for saga, tag in world.charged if saga != owner(tag)] == []
    for n, rolled_back in enumerate(failed):
        saga_id = f"s{n}"
        intents = [record.data["args"]["tag"] for record in log.read(saga_id) if record.type == "INTENT"]
        effects = sorted(tag for saga, tag in world.charged if saga == saga_id)
        assert sorted(intents) == effects and set(map(owner, intents)) <= {saga_id}
        undone = sorted(tag for saga, tag in world.refunded if saga == saga_id)
        assert undone == (effects if rolled_back else [])
        status = SagaStatus.ROLLED_BACK if rolled_back else SagaStatus.COMMITTED
        assert read_saga(log, saga_id).status is status
