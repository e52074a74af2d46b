"""`prove_rollback`: honest scenarios are proved, and every way of lying to it is found out and named."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from agent_saga_core import (
    Compensation,
    MemoryLog,
    Observation,
    SagaAborted,
    call_with,
    compensator,
    drive,
    logs,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing import aprove_rollback, prove_rollback
from agent_saga_core.testing.inject import WAYS
from agent_saga_core.testing.proof import difference


class Shop:
    """A world in this process's memory, with tools of each kind; `voided` are its tombstones."""

    def __init__(self):
        self.rows = {}
        self.voided = set()

        @compensator("shop.void")
        def void(key, *, idempotency_key):
            self.voided.add(key)
            self.rows.pop(key, None)

        @compensator("shop.lie")
        def lie(key, *, idempotency_key):
            self.voided.add(key)

        @compensator("shop.half")
        def half(key, *, idempotency_key):
            self.voided.add(key)
            if key in self.rows:
                self.rows[key] = "undone, but for this"

        @compensator("shop.refund")
        def refund(id):
            del self.rows[id]

        self.by_name = {"void": void, "lie": lie, "half": half, "refund": refund}

    def snapshot(self):
        return self.rows

    def reset(self):
        self.rows.clear()
        self.voided.clear()

    def put(self, value, key):
        if key in self.voided:
            raise ValueError("voided")
        self.rows[key] = value
        return {"id": key}

    def tool(self, name, how="void", **more):
        def call(value, idempotency_key):
            return self.put(value, idempotency_key)

        return saga_tool(semantics="COMPENSABLE", name=name, **{**self.undone_by(how), **more})(call)

    def atool(self, name, how="void", **more):
        async def call(value, idempotency_key):
            await asyncio.sleep(0)
            return self.put(value, idempotency_key)

        return saga_tool(semantics="COMPENSABLE", name=name, **{**self.undone_by(how), **more})(call)

    def undone_by(self, how):
        return {"compensate": undo(self.by_name[how], if_absent="forbids", key="step.forward_key")}

    def prove(self, scenario, **more):
        return prove_rollback(scenario, snapshot=self.snapshot, reset=self.reset, **more)

    async def aprove(self, scenario, **more):
        return await aprove_rollback(scenario, snapshot=self.snapshot, reset=self.reset, **more)


@pytest.fixture
def shop():
    with isolated_registry():
        yield Shop()


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert drive.CALLS == [] and logs.STAND_INS == []


def scenario_of(*tools):
    def scenario():
        with saga_scope():
            for tool in tools:
                tool(1)

    return scenario


def verdicts(proof):
    return {probe.id: probe.verdict for probe in proof.probes}


# --- what is honest is proved


def test_an_honest_scenario_is_proved_at_every_step_in_every_way(shop):
    proof = shop.prove(scenario_of(shop.tool("book"), shop.tool("pay")))
    assert proof.proven, proof
    assert {probe.id for probe in proof.probes} == {f"{step}/{way}" for step in ("book", "pay") for way in WAYS}
    assert "rollback proven: 22 probes (2 steps, 11 ways to fail): 22 proved" in str(proof)
    assert "SIGKILL is simulated" in str(proof)  # the world would die with the child
    assert shop.rows == {}


def test_two_parallel_steps_are_proved_wherever_the_other_stands(shop):
    book, pay = shop.atool("book"), shop.atool("pay")

    async def scenario():
        async with saga_scope(), asyncio.TaskGroup() as group:
            group.create_task(book(1))
            group.create_task(pay(2))

    proof = asyncio.run(shop.aprove(scenario))
    assert proof.proven, proof
    assert len(proof.probes) == 2 * len(WAYS) * 3
    assert verdicts(proof)["book/cancelled-after/others-held"] == "proved"
    assert "66 probes (2 steps, 11 ways to fail): 66 proved" in str(proof)


def test_parallel_steps_in_threads(shop):
    book, pay = shop.tool("book"), shop.tool("pay")

    def scenario():
        with saga_scope() as saga, ThreadPoolExecutor(2) as pool:
            for future in [
                pool.submit(saga.run_step, tool.__agent_saga__.spec, {"value": n}, lambda key, n=n: shop.put(n, key))
                for n, tool in enumerate((book, pay))
            ]:
                future.result()

    proof = shop.prove(scenario)
    assert proof.proven, proof
    assert len(proof.probes) == 66


def test_the_cancelled_step_beside_one_in_flight_is_really_in_flight(shop):
    """The probe's name is no decoration: when the cancellation comes, the other step has acted and not returned."""
    met = []
    book = shop.atool("book")

    @saga_tool(semantics="COMPENSABLE", name="pay", **shop.undone_by("void"))
    async def pay(value, idempotency_key):
        return shop.put(value, idempotency_key)

    async def scenario():
        async with saga_scope() as saga:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(book(1))
                    group.create_task(pay(2))
            finally:
                met.append({step.tool: step.status.value for step in saga.steps})

    proof = shop.prove(scenario, only="book/cancelled-after/others-held")
    assert proof.proven, proof
    assert met[-1] == {"book": "UNKNOWN", "pay": "UNKNOWN"}


def test_a_world_outside_of_the_process_is_proved_with_real_kills(tmp_path):
    path = tmp_path / "world.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("create table rows (key text primary key, value)")

    def sql(statement, *values):
        with closing(sqlite3.connect(path)) as db, db:
            return db.execute(statement, values).fetchall()

    deaths = []
    with isolated_registry():

        @compensator("rows.delete")
        def delete(key):
            sql("delete from rows where key = ?", key)

        @saga_tool(semantics="COMPENSABLE", compensate=undo(delete, if_absent="noop", key="step.forward_key"))
        def insert(value, idempotency_key):
            sql("insert into rows values (?, ?)", idempotency_key, value)

        def scenario():
            deaths.append(threading.get_native_id())
            with saga_scope():
                insert(1)
                insert(2)

        proof = prove_rollback(
            scenario, snapshot=lambda: sql("select * from rows"), reset=lambda: sql("delete from rows")
        )
    assert proof.proven, proof
    assert proof.notes == ()
    assert len(proof.probes) == 22
    in_process = 1 + 2 * sum(not way.startswith("killed") for way in WAYS)
    assert len(deaths) == in_process  # the others ran, and died, elsewhere


def test_a_killed_child_really_dies_where_it_should(tmp_path):
    """What is on disk after a kill: the effect and its intent for killed-after, the intent alone for killed-before."""
    seen = {}
    here = tmp_path / "world"
    here.mkdir()
    with isolated_registry():

        @compensator("unlink")
        def unlink(key):
            seen[which].append((here / key).exists())
            (here / key).unlink(missing_ok=True)

        @saga_tool(semantics="COMPENSABLE", compensate=undo(unlink, if_absent="forbids", key="step.forward_key"))
        def touch(idempotency_key):
            (here / idempotency_key).touch()

        def scenario():
            with saga_scope():
                touch()

        def reset():
            for file in here.iterdir():
                file.unlink()

        for which in ("killed-before", "killed-after", "killed-undoing"):
            seen[which] = []
            proof = prove_rollback(
                scenario, snapshot=lambda: sorted(p.name for p in here.iterdir()), reset=reset, ways=(which,)
            )
            assert proof.proven and proof.notes == (), proof
    assert seen == {"killed-before": [False], "killed-after": [True], "killed-undoing": [False]}


def test_nobody_waits_for_time(shop):
    """Doubts of an hour are waited out on the kit's clock."""
    by_absence = undo(shop.by_name["void"], if_absent="noop", key="step.forward_key")
    proof = shop.prove(scenario_of(shop.tool("slow", in_doubt=3600.0, compensate=by_absence)))
    assert proof.proven, proof


def test_a_scenario_that_swallows_failures_is_made_to_roll_back(shop):
    book, pay = shop.tool("book"), shop.tool("pay")

    def scenario():
        with saga_scope():
            for tool in (book, pay):
                try:
                    tool(1)
                except Exception:
                    continue

    assert shop.prove(scenario).proven


def test_a_call_that_is_tried_again_is_one_step(shop):
    book = shop.tool("book")

    def scenario():
        with saga_scope():
            for _ in range(2):
                try:
                    return book(1)
                except SagaAborted:
                    raise
                except Exception:
                    continue

    proof = shop.prove(scenario)
    assert proof.proven and len(proof.probes) == len(WAYS), proof


def test_later_sagas_are_compared_with_the_world_that_they_found(shop):
    book, pay = shop.tool("book"), shop.tool("pay")

    def scenario():
        with saga_scope():
            book(1)
        with saga_scope():
            pay(1)

    proof = shop.prove(scenario)
    assert proof.proven, proof
    assert proof.steps == ("1:book", "2:pay")


def test_equal_tools_are_told_apart(shop):
    book = shop.tool("book")
    proof = shop.prove(scenario_of(book, book, book), ways=("after",))
    assert verdicts(proof) == {"book#1/after": "proved", "book#2/after": "proved", "book#3/after": "proved"}


def test_a_probe_and_an_undo_from_the_result(shop):
    def look(args, key):
        return Observation(landed=key in shop.rows, result={"id": key} if key in shop.rows else None)

    pay = shop.tool("pay", compensate=undo(shop.by_name["refund"], id="result.id"), probe=look)
    assert shop.prove(scenario_of(pay), ways=("before", "after", "timeout-late", "cancelled-after")).proven


async def test_async_world_and_scenario_on_the_running_loop(shop):
    home = asyncio.get_running_loop()
    book = shop.atool("book")

    async def scenario():
        async with saga_scope():
            await book(1)

    async def snapshot():
        assert asyncio.get_running_loop() is home
        await asyncio.sleep(0)
        return shop.rows

    async def reset():
        shop.reset()

    proof = await aprove_rollback(scenario, snapshot=snapshot, reset=reset)
    assert proof.proven, proof


async def test_a_sync_scenario_on_a_running_loop(shop):
    assert (await shop.aprove(scenario_of(shop.tool("book")))).proven


async def test_an_offloaded_step(shop):
    book = shop.tool("book", offload=True)

    async def scenario():
        async with saga_scope() as saga:
            await saga.arun_step(book.__agent_saga__.spec, {"value": 1}, lambda key: shop.put(1, key))

    proof = await shop.aprove(scenario)
    assert proof.proven, proof


async def test_cancelling_the_proof_cancels_the_scenario_and_cleans_up(shop):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def scenario():
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(shop.aprove(scenario))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


# --- every lie is found out


def test_a_compensation_that_returns_without_undoing_is_named(shop):
    proof = shop.prove(scenario_of(shop.tool("book"), shop.tool("bad", "lie"), shop.tool("pay")))
    assert not proof.proven
    found = verdicts(proof)
    assert found["bad/after"] == found["bad/aborted"] == found["pay/before"] == "lied"
    assert found["book/after"] == found["bad/before"] == "proved"
    assert {probe.culprits for probe in proof.probes if probe.verdict == "lied" and probe.way != "timeout-late"} == {
        ("bad: its compensation returned and changed nothing.",)
    }
    assert 'again: prove_rollback(..., only="bad/after")' in str(proof)


def test_a_lie_is_named_where_sigkill_is_real(tmp_path):
    with isolated_registry():

        @compensator("lie")
        def lie(key):
            return None

        @saga_tool(semantics="COMPENSABLE", compensate=undo(lie, if_absent="forbids", key="step.forward_key"))
        def touch(idempotency_key):
            (tmp_path / idempotency_key).touch()

        def scenario():
            with saga_scope():
                touch()

        proof = prove_rollback(
            scenario,
            snapshot=lambda: sorted(p.name for p in tmp_path.iterdir()),
            reset=lambda: [p.unlink() for p in tmp_path.iterdir()],
            ways=("killed-before", "killed-after"),
        )
    assert [probe.verdict for probe in proof.probes] == ["proved", "lied"] and proof.notes == ()
    assert proof.probes[1].culprits == ("touch: its compensation returned and changed nothing.",)


def test_a_lie_about_what_landed_late_is_named(shop):
    """The compensation waited for it, ran after it, and did nothing."""
    lie = undo(shop.by_name["lie"], if_absent="noop", key="step.forward_key")
    proof = shop.prove(scenario_of(shop.tool("bad", compensate=lie)), ways=("timeout-late",))
    assert proof.probes[0].culprits == ("bad: its compensation returned and changed nothing.",)


def test_half_an_undo_is_named(shop):
    proof = shop.prove(scenario_of(shop.tool("book"), shop.tool("half", "half")), ways=("aborted",))
    (probe,) = [probe for probe in proof.probes if not probe.good]
    assert probe.culprits == ("half: its compensation returned and did not restore what was there before.",)


def test_a_declaration_that_nothing_happened_is_named(shop):
    pay = shop.tool("pay", not_applied=(TimeoutError,))
    proof = shop.prove(scenario_of(pay), ways=("timeout-absent", "timeout-landed", "timeout-late"))
    assert [probe.verdict for probe in proof.probes] == ["proved", "lied", "lied"]
    assert all("pay: counts as not applied" in probe.culprits[0] for probe in proof.probes[1:])


def test_a_tombstone_that_is_none_is_named(shop):
    """An undo that claims to forbid a late landing, and does not."""

    @compensator("shop.pop")
    def pop(key):
        shop.rows.pop(key, None)

    pay = shop.tool("pay", compensate=undo(pop, if_absent="forbids", key="step.forward_key"))
    proof = shop.prove(scenario_of(pay))
    (probe,) = [probe for probe in proof.probes if not probe.good]
    assert probe.id == "pay/timeout-late" and "landed after its compensation" in probe.culprits[0]


def test_a_compensator_that_forgets_its_key_is_named(shop):
    """A second start after a crash undoes twice."""
    balance = {"a": 10}

    @compensator("shop.back")
    def back(amount):
        balance["a"] += amount

    @saga_tool(semantics="COMPENSABLE", compensate=call_with(back, amount=3))
    def take():
        balance["a"] -= 3

    def scenario():
        with saga_scope():
            take()

    proof = prove_rollback(
        scenario, snapshot=lambda: balance, reset=lambda: balance.update(a=10), ways=("aborted", "killed-undoing")
    )
    assert [probe.verdict for probe in proof.probes] == ["proved", "lied"]


def test_a_read_only_tool_that_writes_is_named(shop):
    @saga_tool(semantics="READ_ONLY")
    def look():
        shop.rows["seen"] = True

    proof = shop.prove(scenario_of(lambda _: look(), shop.tool("pay")), ways=("before",))
    (lied,) = [probe for probe in proof.probes if probe.verdict == "lied"]
    assert lied.id == "pay/before" and lied.culprits == ("look: is declared READ_ONLY, and changed the world.",)


def test_an_effect_outside_of_any_step_is_named(shop):
    pay = shop.tool("pay")

    def scenario():
        with saga_scope():
            shop.rows["log"] = "paying"
            pay(1)

    proof = shop.prove(scenario, ways=("before",))
    assert proof.probes[0].verdict == "lied"
    assert proof.probes[0].culprits == (
        "Every compensation did its part: something outside of any step changed the world.",
    )


def test_what_is_honestly_left_behind_is_reported_not_proved(shop):
    """An undo from the result alone cannot settle a lost answer."""
    proof = shop.prove(scenario_of(shop.tool("pay", compensate=undo(shop.by_name["refund"], id="result.id"))))
    assert not proof.proven
    assert verdicts(proof)["pay/aborted"] == "proved"
    assert verdicts(proof)["pay/after"] == "reported"
    assert {probe.remaining for probe in proof.probes if probe.verdict == "reported"} == {("pay",)}


def test_an_inverse_of_this_process_alone_is_reported_after_a_kill(shop):
    pay = shop.tool("pay", compensate=lambda result: Compensation(fn=shop.rows.pop, kwargs={}))
    proof = shop.prove(scenario_of(pay), ways=("killed-after",))
    assert verdicts(proof) == {"pay/killed-after": "reported"}


def test_irreversible_tools_are_allowed_by_name(shop):
    @saga_tool(semantics="IRREVERSIBLE")
    def mail(value):
        shop.rows["mail"] = value

    book, pay = shop.tool("book"), shop.tool("pay")

    def scenario():
        with saga_scope(approve=lambda request: True):
            for tool in (book, mail, pay):
                tool(1)

    assert not shop.prove(scenario, ways=("after",)).proven
    proof = shop.prove(scenario, allow=("mail",))
    assert proof.proven and {probe.verdict for probe in proof.probes} == {"proved", "allowed"}


def test_what_is_allowed_does_not_hide_a_lie(shop):
    @saga_tool(semantics="IRREVERSIBLE")
    def mail(value):
        shop.rows["mail"] = value

    bad = shop.tool("bad", "lie")

    def scenario():
        with saga_scope(approve=lambda request: True):
            bad(1)
            mail(1)

    proof = shop.prove(scenario, allow=("mail",), ways=("after",))
    assert [probe.verdict for probe in proof.probes] == ["lied", "lied"]


# --- what cannot be proved


def test_a_snapshot_that_sees_nothing_proves_nothing(shop):
    proof = prove_rollback(scenario_of(shop.tool("book")), snapshot=lambda: 1, reset=shop.reset)
    assert not proof.proven and "snapshot() is the same" in str(proof)


def test_a_live_object_as_snapshot_is_copied(shop):
    assert not shop.prove(scenario_of(shop.tool("bad", "lie")), ways=("after",)).proven


def test_a_scenario_that_fails_by_itself_is_refused_with_its_own_error(shop):
    def scenario():
        with saga_scope():
            raise LookupError("no stock")

    with pytest.raises(LookupError) as caught:
        shop.prove(scenario)
    assert any("no failure was injected" in note for note in caught.value.__notes__)


def test_a_scenario_without_steps_is_refused(shop):
    with pytest.raises(ValueError, match="made no step"):
        shop.prove(lambda: None)


def test_a_scenario_that_does_not_commit_is_refused(shop):
    book = shop.tool("book")

    def scenario():
        try:
            with saga_scope() as saga:
                book(1)
                saga.abort("no")
        except SagaAborted:
            pass

    with pytest.raises(ValueError, match="Let it commit"):
        shop.prove(scenario)


def test_a_step_that_another_run_does_not_reach_is_missed(shop):
    turns = iter([True])
    book = shop.tool("book")
    pay = shop.tool("pay")

    def scenario():
        with saga_scope():
            if next(turns, False):
                pay(1)
            book(1)

    proof = shop.prove(scenario, ways=("after",))
    assert verdicts(proof) == {"pay/after": "missed", "book/after": "proved"} and not proof.proven


def test_an_unknown_way_or_id_or_a_bare_string_is_refused(shop):
    scenario = scenario_of(shop.tool("book"))
    with pytest.raises(ValueError, match="book/after"):
        shop.prove(scenario, only="pay/after")
    with pytest.raises(ValueError, match="unknown ways"):
        shop.prove(scenario, ways=("sideways",))
    with pytest.raises(ValueError, match=r"allow=\('mail',\)"):
        shop.prove(scenario, allow="mail")


def test_only_takes_patterns(shop):
    proof = shop.prove(scenario_of(shop.tool("book"), shop.tool("pay")), only=("pay/timeout-*", "book/before"))
    assert sorted(verdicts(proof)) == ["book/before", "pay/timeout-absent", "pay/timeout-landed", "pay/timeout-late"]


def test_the_scenarios_own_log_is_left_alone(shop, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_SAGA_LOG", f"file:{tmp_path}/log")
    own = MemoryLog()
    book = shop.tool("book")

    def scenario():
        with saga_scope(log=own):
            book(1)
        with saga_scope():
            book(2)

    assert shop.prove(scenario).proven
    assert own.saga_ids() == () and not (tmp_path / "log").exists()


async def test_an_async_scenario_under_a_running_loop_is_sent_to_aprove(shop):
    book = shop.atool("book")

    async def scenario():
        async with saga_scope():
            await book(1)

    with pytest.raises(RuntimeError, match="aprove_rollback"):
        shop.prove(scenario)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, "world['b']: 2 is left"),
        ({"a": 1}, {}, "world['a']: 1 is gone"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "world['a']['b']: 1 became 2"),
        ([1], [2], "world: [1] became [2]"),
    ],
)
def test_a_difference_is_told(before, after, said):
    assert difference(before, after) == said
