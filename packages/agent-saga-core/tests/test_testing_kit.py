"""The rest of the kit: a log that fails on order, the plugin, and what importing it costs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import agent_saga_core.testing as kit
from agent_saga_core import FileLog, LogUnavailable, MemoryLog, compensator, list_sagas, recover, saga_scope, undo
from agent_saga_core.log.memory import MemoryStore
from agent_saga_core.records import Record
from agent_saga_core.registry import compensator_named, isolated_registry
from agent_saga_core.testing import Fault, FaultyLog, ManualClock


def test_the_names_of_the_kit_are_the_pinned_ones():
    assert sorted(kit.__all__) == sorted(
        """AdapterConformance AdapterHarness Call Deferred Entry Fault FaultyLog Invariants LogConformance ManualClock
        Probe Proof Ran Script Turn aprove_rollback prove_rollback verify_invariants""".split()
    )
    assert [name for name in kit.__all__ if not getattr(kit, name).__doc__] == []


def test_a_name_that_is_none_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = kit.Nonsense


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("from agent_saga_core.testing import ManualClock", {"pytest", "agent_saga_core.testing.prove"}),
        ("from agent_saga_core.testing import prove_rollback", {"pytest", "hypothesis"}),
        ("import agent_saga_core_pytest", {"agent_saga_core"}),
    ],
)
def test_nothing_is_imported_that_was_not_asked_for(statement, absent):
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert set(ran.stdout.split()) & absent == set()


# --- the plugin


def test_the_plugin_is_announced_under_our_own_name():
    (entry,) = [entry for entry in entry_points(group="pytest11") if entry.name == "agent_saga_core"]
    assert entry.value == "agent_saga_core_pytest"


def test_the_fixtures(saga_log, saga_clock):
    assert isinstance(saga_log, MemoryLog) and isinstance(saga_clock, ManualClock)
    assert saga_log.clock is saga_clock
    with saga_scope(log=saga_log) as saga:
        saga.execute("look", lambda: 1, semantics="READ_ONLY")
    assert len(list_sagas(saga_log)) == 1


def test_handlers_are_isolated(isolated_handlers):
    @compensator("kit.only-here")
    def here():
        return None

    assert compensator_named("kit.only-here") is not None


def test_handlers_were_isolated():
    assert compensator_named("kit.only-here") is None


# --- a log that fails on order


def _record(n, kind="INTENT"):
    return Record(saga="s", n=n, epoch=1, type=kind, time=1.0, data={})


def _faulty(*plan):
    log = FaultyLog(MemoryLog(store=MemoryStore()), plan)
    log.claim("s")
    return log


def test_a_call_that_fails_once():
    log = _faulty(Fault(on="append", nth=2, how="fails"))
    log.append(_record(1, "START"))
    with pytest.raises(LogUnavailable, match="append 2"):
        log.append(_record(2))
    log.flush(log.append(_record(2)))
    assert [one.n for one in log.read("s")] == [1, 2]
    assert [fault.on for fault in log.struck] == ["append"]


@pytest.mark.parametrize(("how", "stored"), [("breaks", []), ("breaks-after", [1])])
def test_a_log_that_breaks_takes_nothing_more_and_still_lets_go(how, stored):
    inner = MemoryLog(store=MemoryStore())
    log = FaultyLog(inner, [Fault(on="flush", how=how)])
    log.claim("s")
    ticket = log.append(_record(1, "START"))
    for call in (lambda: log.flush(ticket), lambda: log.flush(ticket), lambda: log.append(_record(2)), log.saga_ids):
        with pytest.raises(LogUnavailable):
            call()
    assert [one.n for one in MemoryLog(store=inner.store).read("s")] == stored
    log.release("s")
    assert not inner.owned("s")


@pytest.mark.parametrize(("how", "kept"), [("crashes", []), ("crashes-after", [1])])
def test_a_crash_loses_what_was_not_flushed_and_all_ownership(how, kept):
    inner = MemoryLog(store=MemoryStore())
    log = FaultyLog(inner, [Fault(on="flush", how=how)])
    log.claim("s")
    with pytest.raises(LogUnavailable):
        log.flush(log.append(_record(1, "START")))
    after = MemoryLog(store=inner.store)
    assert [one.n for one in after.read("s")] == kept and not after.is_live("s")


def test_aflush_write_and_the_rest_count_as_well():
    async def flushed(log):
        await log.aflush(log.append(_record(1, "START")))

    with pytest.raises(LogUnavailable):
        asyncio.run(flushed(_faulty(Fault(on="flush"))))
    log = _faulty(Fault(on="flush"))
    with pytest.raises(LogUnavailable):
        log.write(log.append(_record(1, "START")))
    log = FaultyLog(MemoryLog(), [Fault(on="claim", how="fails"), Fault(on="read", nth=2, how="fails")])
    with pytest.raises(LogUnavailable):
        log.claim("s")
    assert log.claim("s") == () and log.read("s") == ()
    with pytest.raises(LogUnavailable):
        log.unfinished()


def test_a_file_log_crashes_with_its_process(tmp_path):
    code = (
        "import sys; from agent_saga_core import FileLog, saga_scope; "
        "from agent_saga_core.testing import Fault, FaultyLog\n"
        "log = FaultyLog(FileLog(sys.argv[1]), [Fault(on='flush', record='DONE', how='crashes')])\n"
        "with saga_scope('s', log=log, approve=lambda request: True) as saga:\n"
        "    saga.execute('mail', lambda: print('sent'), semantics='IRREVERSIBLE')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-u", "-c", code, str(tmp_path / "log")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == -9 and ran.stdout == "sent\n", ran
    log = FileLog(tmp_path / "log")
    assert [one.type for one in log.read("s")] == ["START", "INTENT"]
    log.close()


@pytest.mark.parametrize("record", ["INTENT", "DONE", "COMPENSATING", "ROLLED_BACK"])
@pytest.mark.parametrize("how", ["breaks", "breaks-after", "crashes", "crashes-after"])
def test_a_saga_over_a_log_that_fails_is_finished_by_recovery(record, how):
    """What the wrapper is for: the engine meets the fault at a chosen record, and nothing is lost or called clean."""
    world = set()
    store = MemoryStore()
    with isolated_registry():

        @compensator("drop")
        def drop(key):
            world.discard(key)

        inverse = undo(drop, if_absent="forbids", key="step.forward_key")
        log = FaultyLog(MemoryLog(store=store), [Fault(on="flush", record=record, how=how)])
        with pytest.raises((LogUnavailable, ZeroDivisionError)), saga_scope("s", log=log) as saga:

            def put(idempotency_key):
                world.add(idempotency_key)

            saga.execute("put", put, semantics="COMPENSABLE", compensate=inverse)
            raise ZeroDivisionError
        assert [fault.record for fault in log.struck] == [record]
        clock = ManualClock(auto=True)
        report = recover(MemoryLog(clock, store=store))
        assert report.attention == () and report.live == () and world == set()
