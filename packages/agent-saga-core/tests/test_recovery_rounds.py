"""Recoverers over many rounds: who waits for a compensator that fails, and what several of them do to one log.

A process is a `MemoryLog` with a clock of its own; it dies by `crash`. Time moves only where a test says so.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from agent_saga_core import (
    ActionSemantics,
    LogCorrupted,
    LogUnavailable,
    MemoryLog,
    SagaBusy,
    SagaStatus,
    arecover,
    compensator,
    list_sagas,
    read_saga,
    recover,
    resolve,
    saga_scope,
    undo,
)
from agent_saga_core.log.base import Damage, Unfinished
from agent_saga_core.log.memory import MemoryStore
from agent_saga_core.records import Record
from agent_saga_core.recovery import Recoverer, recover_as
from agent_saga_core.recovery.backoff import Backoff
from agent_saga_core.recovery.claims import Claims
from agent_saga_core.recovery.handlers import Tries, Try
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing import ManualClock

C = ActionSemantics.COMPENSABLE
BOUND = 20.0


class Service:
    """What compensators call. `down` makes it refuse; `calls` holds what was asked of it, by tool."""

    def __init__(self) -> None:
        self.down = False
        self.calls: list[tuple[str, str]] = []
        self.hold: threading.Event | None = None
        self.entered = threading.Event()

    def undo(self, tool: str, saga_id: str) -> None:
        self.calls.append((tool, saga_id))
        self.entered.set()
        if self.hold is not None:
            assert self.hold.wait(BOUND)
        if self.down:
            raise ConnectionError("the service is down")


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    with isolated_registry():

        @compensator("refund")
        def refund(saga: str) -> None:
            made.undo("refund", saga)

        @compensator("release")
        def release(saga: str) -> None:
            made.calls.append(("release", saga))

        yield made


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def process(store: MemoryStore, *, ahead: float = 0.0, at: float = 0.0) -> MemoryLog:
    """A process that looks at the log, `at` seconds after the tests' zero, with a wall clock that may be off."""
    clock = ManualClock(auto=True, monotonic=at + 7_000.0, wall=1_700_000_000.0 + at + ahead)
    return MemoryLog(clock, store=store)


def dead(store: MemoryStore, sagas: Iterable[str], *how: Any, at: float = 0.0) -> None:
    """Sagas with a step for each of these compensators ("refund", if none is named), whose process is gone."""
    log = process(store, at=at)
    scopes: list[Any] = []

    def live(saga_id: str) -> None:
        scope = saga_scope(saga_id, log=log)
        scope.__enter__()
        scopes.append((scope, contextvars.copy_context()))
        for name in how or ("refund",):
            scope.execute("act", lambda: 1, semantics=C, compensate=undo(name, saga="saga.id"))

    for saga_id in sagas:
        contextvars.copy_context().run(live, saga_id)
    log.crash()
    for scope, context in scopes:
        with pytest.raises(LogUnavailable):
            context.run(scope.__exit__, None, None, None)


def types(store: MemoryStore, saga_id: str) -> list[str]:
    return [str(record.type) for record in store.records[saga_id].values()]


def advance(seconds: float, *logs: MemoryLog) -> None:
    for log in logs:
        clock = log.clock
        assert isinstance(clock, ManualClock)
        clock.advance(seconds)


def names(count: int, prefix: str = "s") -> list[str]:
    return [f"{prefix}{n:03}" for n in range(count)]


# --- backing off


def test_after_one_dead_letter_the_others_wait_and_nothing_is_written_to_them(store, service):
    dead(store, names(5))
    service.down = True
    log, recoverer = process(store), Recoverer()
    report = recover_as(recoverer, log)
    assert report.attention == ("s000",) and report.untouched == ("s001", "s002", "s003", "s004")
    assert len(service.calls) == 3
    for saga_id in report.untouched:
        assert types(store, saga_id) == ["START", "INTENT", "DONE"]
        # Calls at 0, 0.5 and 2.5 s failed. The third came when the two seconds after the second were over: four more.
        assert report.reasons[saga_id] == (
            "compensator 'refund' fails; it is tried again at 2023-11-14 22:13:26 UTC, by one saga at first"
        )
    again = recover_as(recoverer, log)
    assert again.reasons == report.reasons and len(service.calls) == 3, "told once: the moment is absolute"


def test_each_failed_try_doubles_the_wait_and_one_saga_makes_it(store, service):
    dead(store, names(20))
    service.down = True
    log, recoverer = process(store), Recoverer()
    tried: list[float] = []
    for _ in range(1500):
        before = len(service.calls)
        recover_as(recoverer, log)
        if len(service.calls) > before:
            assert len(service.calls) == before + 3, "one saga, with its three calls"
            tried.append(log.clock.monotonic())
        advance(1.0, log)
    # The delay, and the 2.5 s that the three calls take.
    waits = [b - a - 2.5 for a, b in zip(tried, tried[1:], strict=False)]
    assert waits[:9] == [4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0]


@pytest.mark.parametrize("many", [2, 50])
def test_a_service_that_goes_away_for_a_moment_is_tried_soon_however_many_sagas_met_that(store, service, many):
    clock, backoff = ManualClock(), Backoff()
    for n in range(many):
        for number, pause in ((3, 0.0), (5, 0.5), (7, 1.0)):
            clock.advance(pause / many)
            backoff.ended(Try(f"s{n}", number, "h", False, 0.0), clock)
    assert not backoff.enter(["h"], "next", clock)
    clock.advance(1.9)
    assert not backoff.enter(["h"], "next", clock)
    clock.advance(0.2)
    assert backoff.enter(["h"], "next", clock)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_service_that_is_away_for_an_hour_makes_a_handful_of_dead_letters(store, service, concurrency):
    dead(store, names(60))
    service.down = True
    log, recoverer = process(store), Recoverer(concurrency=concurrency, seed=b"any")
    began = log.clock.monotonic()
    while log.clock.monotonic() - began < 3600.0:
        recover_as(recoverer, log)
        advance(10.0, log)
    letters = [head.saga_id for head in list_sagas(log) if head.status is SagaStatus.NEEDS_ATTENTION]
    assert 10 <= len(letters) <= 18 + concurrency
    service.down = False
    calls = len(service.calls)
    recovered: set[str] = set()
    for _ in range(31):
        recovered |= set(recover_as(recoverer, log).recovered)
        advance(10.0, log)
    assert len(recovered) == 60 - len(letters) == len(service.calls) - calls
    assert set(recover(log).recovered) == set(letters)


def test_a_success_opens_a_compensator_within_the_round(store, service):
    dead(store, names(6))
    service.down = True
    log, recoverer = process(store), Recoverer()
    recover_as(recoverer, log)
    service.down = False
    assert recover_as(recoverer, log).recovered == ()
    advance(8.0, log)
    assert len(recover_as(recoverer, log).recovered) == 5


def test_an_explicit_recovery_tries_at_once(store, service):
    dead(store, names(3))
    service.down = True
    log = process(store)
    assert recover_as(Recoverer(), log).attention == ("s000",)
    service.down = False
    assert recover(log).recovered == ("s000", "s001", "s002")


def test_a_new_process_learns_from_the_log_alone(store, service):
    dead(store, names(4))
    service.down = True
    first = process(store)
    recover_as(Recoverer(), first)
    second = process(store, at=5.0)
    report = recover_as(Recoverer(), second)
    assert report.attention == ("s000",) and len(report.untouched) == 3 and len(service.calls) == 3
    third = process(store, at=15.0)  # the delay is over: one of them tries
    service.down = False
    assert len(recover_as(Recoverer(), third).recovered) == 3


def test_what_needs_other_compensators_does_not_wait(store, service):
    dead(store, ["a"])
    dead(store, ["b", "c"], "release")
    dead(store, ["d"])
    service.down = True
    report = recover_as(Recoverer(), process(store))
    assert (report.attention, report.recovered, report.untouched) == (("a",), ("b", "c"), ("d",))


def test_an_undo_that_cannot_be_called_says_nothing_about_its_compensator(store, service):
    dead(store, ["mine"], lambda saga: None)
    dead(store, ["other"])
    report = recover_as(Recoverer(), process(store))
    assert (report.attention, report.recovered) == (("mine",), ("other",))


def test_a_dry_round_tells_who_would_wait(store, service):
    dead(store, names(3))
    service.down = True
    log = process(store)
    recover_as(Recoverer(), log)
    before = {saga_id: types(store, saga_id) for saga_id in names(3)}
    assert recover_as(Recoverer(), log, dry_run=True).untouched == ("s001", "s002")
    advance(60.0, log)
    assert recover_as(Recoverer(), log, dry_run=True).recovered == ("s001", "s002")
    assert {saga_id: types(store, saga_id) for saga_id in names(3)} == before and len(service.calls) == 3


async def test_on_a_loop_they_wait_as_well(store, service):
    dead(store, names(3))
    service.down = True
    log = process(store)
    report = await arecover(log, retry=False)
    assert report.attention == ("s000",) and report.untouched == ("s001", "s002") and len(service.calls) == 3


# --- clocks that are wrong


@pytest.mark.parametrize("ahead", [3600.0, -3600.0], ids=["an hour ahead", "an hour behind"])
def test_the_clock_of_whoever_failed_makes_nobody_wait_longer_than_the_cap(store, service, ahead):
    dead(store, names(3))
    service.down = True
    recover_as(Recoverer(), process(store, ahead=ahead))
    service.down = False
    log, recoverer = process(store), Recoverer()
    waited = 0.0
    while not recover_as(recoverer, log).recovered:
        advance(1.0, log)
        waited += 1.0
        assert waited <= 300.0
    # All three calls seem to have failed just now, or an hour ago.
    assert waited == (2.0 if ahead > 0 else 0.0)


@pytest.mark.parametrize("ahead", [3600.0, -3600.0], ids=["an hour ahead", "an hour behind"])
def test_what_fails_while_a_process_watches_is_no_older_than_its_last_look(store, service, ahead):
    dead(store, ["before"], "release")
    log, recoverer = process(store), Recoverer()
    recover_as(recoverer, log)
    advance(1.0, log)
    dead(store, names(3))
    service.down = True
    recover_as(Recoverer(), process(store, ahead=ahead))
    assert recover_as(recoverer, log).untouched == ("s001", "s002")
    assert [tool for tool, _ in service.calls] == ["release", "refund", "refund", "refund"]


@pytest.mark.parametrize("ahead", [3600.0, -3600.0], ids=["an hour ahead", "an hour behind"])
def test_own_clock_set_by_an_hour_changes_no_wait(store, service, ahead):
    dead(store, names(2))
    service.down = True
    log, recoverer = process(store), Recoverer()
    recover_as(recoverer, log)
    log.clock.set_wall(log.clock.time() + ahead)
    service.down = False
    advance(3.5, log)
    assert recover_as(recoverer, log).untouched == ("s001",)
    advance(0.5, log)
    assert recover_as(recoverer, log).recovered == ("s001",)


# --- several recoverers


def test_two_recoverers_never_try_a_failing_compensator_at_once(store, service):
    """The saga that tries is the same for all, and who finds it owned waits until it knows what came of it."""
    dead(store, names(6))
    service.down = True
    logs = [process(store), process(store)]
    recoverers = [Recoverer(seed=b"one"), Recoverer(seed=b"two")]
    recover_as(recoverers[0], logs[0])
    advance(2.5, logs[1])
    assert len(recover_as(recoverers[1], logs[1]).untouched) == 5
    advance(20.0, *logs)
    service.down, service.hold, calls = False, threading.Event(), len(service.calls)
    service.entered.clear()
    trying = threading.Thread(target=recover_as, args=(recoverers[0], logs[0]), daemon=True)
    trying.start()
    assert service.entered.wait(BOUND)
    for _ in range(3):
        report = recover_as(recoverers[1], logs[1])
        assert len(report.live) == 1 and len(report.untouched) == 4 and report.recovered == ()
        advance(5.0, logs[1])
    assert len(service.calls) == calls + 1
    service.hold.set()
    trying.join(BOUND)
    assert len(service.calls) == calls + 5


def test_two_rounds_of_one_process_do_not_try_a_failing_compensator_at_once(store, service):
    dead(store, names(4))
    service.down = True
    logs, recoverer = [process(store), process(store)], Recoverer(concurrency=4)
    recover_as(recoverer, logs[0])
    letters = len(list_sagas(logs[0])) - len(recover_as(recoverer, logs[0]).untouched)
    advance(100.0, *logs)
    service.hold, calls = threading.Event(), len(service.calls)
    service.entered.clear()
    dead(store, names(3, "t"))
    trying = threading.Thread(target=recover_as, args=(recoverer, logs[0]), daemon=True)
    trying.start()
    assert service.entered.wait(BOUND)
    report = recover_as(recoverer, logs[1])
    assert len(report.live) == 1 and len(report.untouched) == 7 - letters - 1
    assert len(service.calls) == calls + 1
    service.down = False
    service.hold.set()
    trying.join(BOUND)


def test_of_two_that_choose_the_saga_to_try_at_one_moment_the_other_tries_none(store, service):
    """Both have looked, both find the time over: the claim decides, and who loses it does not take the next saga."""
    dead(store, names(4))
    service.down = True
    log, recoverer = Overtaken(ManualClock(auto=True), store=store), Recoverer(seed=b"any")
    recover_as(Recoverer(), log)
    advance(8.0, log)
    log.by = process(store)
    report = recover_as(recoverer, log)
    assert report.live == ("s001",) and report.untouched == ("s002", "s003") and len(service.calls) == 3


class Overtaken(MemoryLog):
    """Whatever it wants to claim, another process claims a moment before."""

    by: MemoryLog | None = None

    def claim(self, saga_id: str, *, fresh: bool = False) -> tuple[Record, ...]:
        if self.by is not None:
            self.by.claim(saga_id)
        return super().claim(saga_id, fresh=fresh)


def test_who_needs_two_that_fail_does_not_keep_others_from_trying_the_one_that_is_due(store, service):
    down = [True]

    @compensator("void")
    def void(saga: str) -> None:
        if down[0]:
            raise ConnectionError

    service.down = True
    log, recoverer = process(store), Recoverer()
    dead(store, ["v"], "void")
    assert recover_as(recoverer, log).attention == ("v",)
    advance(7.0, log)
    dead(store, ["r"])
    assert recover_as(recoverer, log).attention == ("v", "r")
    dead(store, ["both"], "void", "refund")
    dead(store, ["next"], "void")
    down[0] = False
    report = recover_as(recoverer, log)
    assert report.recovered == ("next",) and report.untouched == ("both",)
    assert "'refund'" in report.reasons["both"]
    service.down = False
    advance(10.0, log)
    assert recover_as(recoverer, log).recovered == ("both",)


def test_a_success_of_another_recoverer_is_learnt_from_the_saga_that_is_over(store, service):
    dead(store, names(2))
    service.down = True
    logs = [process(store), process(store)]
    recoverers = [Recoverer(), Recoverer()]
    recover_as(recoverers[0], logs[0])
    advance(2.5, logs[1])
    assert recover_as(recoverers[1], logs[1]).untouched == ("s001",)
    service.down = False
    advance(9.0, logs[0])
    assert recover_as(recoverers[0], logs[0]).recovered == ("s001",)
    dead(store, ["late"])
    assert recover_as(recoverers[1], logs[1]).recovered == ("late",), "the second one's own clock has not moved"


def test_a_saga_settled_by_hand_is_no_success_of_its_compensator(store, service):
    dead(store, names(3))
    service.down = True
    log, recoverer = process(store), Recoverer()
    recover_as(recoverer, log)
    resolve(log, "s000", 1, outcome="compensated", by="Ada", note="by hand")
    assert recover_as(recoverer, log).untouched == ("s001", "s002") and len(service.calls) == 3
    resolve(log, "s001", 1, outcome="compensated", by="Ada", note="by hand")
    resolve(log, "s002", 1, outcome="compensated", by="Ada", note="by hand")
    assert recover_as(recoverer, log).untouched == () and recoverer.backoff.failing() == {"refund": 3}
    advance(8.0, log)
    recover_as(recoverer, log)
    assert recoverer.backoff.failing() == {}, "nothing in the log speaks of it any more"


def test_a_recoverer_that_holds_a_failing_compensator_for_long_is_waited_for_no_longer_than_the_cap(store, service):
    dead(store, names(3))
    service.down = True
    log, recoverer = process(store), Recoverer()
    recover_as(recoverer, log)
    recover_as(recoverer, log)
    service.down = False
    hung = process(store)
    hung.claim("s001")  # as whoever tries, and never comes back from it
    advance(10.0, log)
    assert recover_as(recoverer, log).untouched == ("s002",)
    advance(299.0, log)
    assert recover_as(recoverer, log).untouched == ("s002",)
    advance(1.0, log)
    assert recover_as(recoverer, log).recovered == ("s002",)


def doubtful(store: MemoryStore, saga_id: str, how: str, *, seconds: float) -> None:
    """A saga whose step timed out and may still land, and whose process is gone."""
    log = process(store)

    def lost() -> None:
        raise TimeoutError

    def live() -> None:
        scope = saga_scope(saga_id, log=log, drain_timeout=0.0)
        scope.__enter__()
        with pytest.raises(TimeoutError):
            inverse = undo(how, if_absent="noop", saga="saga.id")
            scope.execute("act", lost, semantics=C, compensate=inverse, in_doubt=seconds)
        log.crash()
        with pytest.raises(LogUnavailable):
            scope.__exit__(None, None, None)

    contextvars.copy_context().run(live)


def test_what_waits_in_doubt_is_handed_back_when_its_compensator_fails_meanwhile(store, service):
    """Claimed, it waits for what may still land; by then its compensator fails. It is not called, and not held."""
    doubtful(store, "soon", "refund", seconds=60.0)
    doubtful(store, "late", "release", seconds=3600.0)
    clock = ManualClock()
    log, recoverer, reports = MemoryLog(clock, store=store), Recoverer(), []
    waiting = threading.Thread(target=lambda: reports.append(recover_as(recoverer, log)), daemon=True)
    waiting.start()
    clock.wait_until_waiting(due_in=10.0)
    assert log.owned("soon") and log.owned("late")
    dead(store, names(2))
    service.down = True
    # Another round of the same process, shortly before the wait of the first one is over.
    at = ManualClock(auto=True, monotonic=clock.monotonic() + 118.0, wall=clock.time() + 118.0)
    recover_as(recoverer, MemoryLog(at, store=store))
    clock.advance(120.0)
    clock.wait_until_waiting(due_in=1000.0)
    assert not log.owned("soon") and log.owned("late"), "given back while the round still waits"
    assert ("refund", "soon") not in service.calls
    clock.advance(7200.0)
    waiting.join(BOUND)
    (report,) = reports
    assert report.untouched == ("soon",) and "'refund' fails" in report.reasons["soon"]
    assert report.recovered == ("late",)
    claims = types(store, "soon").count("CLAIM")
    recover_as(Recoverer(), MemoryLog(at, store=store))
    assert types(store, "soon").count("CLAIM") == claims == 1


def test_a_saga_in_doubt_is_not_the_one_to_try_where_another_can_tell_at_once(store, service):
    dead(store, ["first"])
    service.down = True
    log, recoverer = process(store), Recoverer()
    assert recover_as(recoverer, log).attention == ("first",)
    doubtful(store, "doubtful", "refund", seconds=60.0)
    dead(store, ["certain"])
    advance(8.0, log)
    report = recover_as(recoverer, log)
    assert report.attention == ("first", "certain") and report.untouched == ("doubtful",)
    assert types(store, "doubtful").count("CLAIM") == 0


def test_one_that_this_process_holds_in_doubt_keeps_nobody_from_trying(store, service):
    dead(store, ["first"])
    service.down = True
    doubtful(store, "doubtful", "refund", seconds=3600.0)
    clock = ManualClock()
    recoverer, log = Recoverer(), MemoryLog(clock, store=store)
    before = MemoryLog(
        ManualClock(auto=True, monotonic=clock.monotonic() - 60.0, wall=clock.time() - 60.0), store=store
    )
    assert recover_as(recoverer, before).untouched == ("doubtful",)
    stop = threading.Event()
    holding = threading.Thread(target=recover_as, args=(recoverer, log), kwargs={"stop": stop}, daemon=True)
    holding.start()
    clock.wait_until_waiting(due_in=1000.0)
    assert log.owned("doubtful")
    dead(store, ["certain"])
    service.down = False
    beside = MemoryLog(ManualClock(auto=True, monotonic=clock.monotonic() + 1.0, wall=clock.time() + 1.0), store=store)
    assert recover_as(recoverer, beside).recovered == ("certain",)
    stop.set()
    holding.join(BOUND)


def test_what_will_not_be_called_any_more_does_not_wait(store, service):
    """Three processes died in its compensation: that is for a person, at once, whatever its compensator does."""
    mortal: list[MemoryLog] = []

    class Died(BaseException):
        pass

    @compensator("mortal")
    def compensate(saga: str) -> None:
        if mortal:
            mortal.pop().crash()
            raise Died
        raise ConnectionError

    dead(store, ["loop"], "mortal")
    for _ in range(3):
        mortal.append(process(store))
        with pytest.raises(LogUnavailable):
            recover(mortal[0])
    assert types(store, "loop").count("COMPENSATING") == 3
    dead(store, ["other"], "mortal")
    recoverer, log = Recoverer(), process(store)
    assert recover_as(recoverer, log, saga_id="other").attention == ("other",)
    assert recoverer.backoff.failing() == {"mortal": 3}
    assert recover_as(recoverer, log).attention == ("loop", "other")
    assert types(store, "loop").count("COMPENSATING") == 3


# --- what counts


def tried(saga_id: str, n: int, ok: bool, time: float) -> Try:
    return Try(saga_id, n, "h", ok, time)


def test_calls_count_by_when_they_were_made_in_whatever_order_they_are_found():
    clock, backoff = ManualClock(wall=1000.0), Backoff()
    backoff.heard([tried("a", 3, False, 990.0)], clock, began=clock.monotonic(), everything={"a", "b", "c"})
    clock.advance(20.0)
    # Made before: a success that was found late does not forgive a later failure, and is not forgotten by it.
    found = [tried("b", 2, True, 1005.0), tried("c", 2, False, 1003.0)]
    backoff.heard(found, clock, began=clock.monotonic(), everything={"a", "b", "c"})
    assert backoff.failing() == {}
    clock.advance(10.0)
    backoff.ended(tried("a", 9, False, 0.0), clock)
    assert backoff.failing() == {"h": 1}
    backoff.heard([tried("c", 4, True, 1025.0)], clock, began=clock.monotonic(), everything={"a", "b", "c"})
    assert backoff.failing() == {"h": 1}
    backoff.ended(tried("a", 12, True, 0.0), clock)
    assert backoff.failing() == {}


def test_a_failure_found_after_a_later_success_is_forgiven():
    clock, backoff = ManualClock(wall=1000.0), Backoff()
    backoff.ended(tried("a", 5, True, 0.0), clock)
    backoff.heard([tried("b", 2, False, 990.0)], clock, began=clock.monotonic(), everything={"a", "b"})
    assert backoff.failing() == {}


def test_which_records_end_a_call():
    def follow(*records: tuple[str, dict[str, Any]]) -> list[Any]:
        tries = Tries()
        return [tries.follow(kind, {"step": 1, "attempt": 1, **data}) for kind, data in records]

    start = ("COMPENSATING", {"handler": "h"})
    assert follow(start, ("COMPENSATED", {})) == [None, ("h", True)]
    assert follow(start, ("COMPENSATION_FAILED", {})) == [None, ("h", False)]
    assert follow(start, ("COMPENSATED", {"by": "probe"})) == [None, None], "it says nothing of how things are now"
    assert follow(start, ("COMPENSATION_FAILED", {}), ("COMPENSATION_FAILED", {})) == [None, ("h", False), None]
    assert follow(("COMPENSATION_FAILED", {}), ("COMPENSATED", {"gone": True})) == [None, None]
    assert follow(("COMPENSATING", {}), ("COMPENSATION_FAILED", {})) == [None, None]


def test_of_names_that_are_not_registered_here_nothing_is_kept(store, service):
    with isolated_registry():

        @compensator("of another application")
        def fails(saga: str) -> None:
            raise ConnectionError

        dead(store, ["theirs"], "of another application")
        assert recover(process(store)).attention == ("theirs",)
    recoverer = Recoverer()
    assert recover_as(recoverer, process(store)).attention == ("theirs",)
    assert recoverer.backoff.known() == ()


# --- what a round leaves alone


class Counting(MemoryLog):
    """Counts what is read, and says in its list what is live, as the shared stores do."""

    def __init__(self, *args: Any, hint: bool, **more: Any) -> None:
        super().__init__(*args, **more)
        self.hint = hint
        self.reads: list[str] = []
        self.asked: list[str] = []
        self.damage: tuple[Damage, ...] = ()

    def read(self, saga_id: str) -> tuple[Record, ...]:
        self.reads.append(saga_id)
        return super().read(saga_id)

    def is_live(self, saga_id: str) -> bool:
        self.asked.append(saga_id)
        return super().is_live(saga_id)

    def _damage(self) -> tuple[Damage, ...]:
        return self.damage  # as found: the list of this log reads everything for it

    def unfinished(self) -> Unfinished:
        found = super().unfinished()
        if not self.hint:
            return found
        live = frozenset(self.store.owners)
        return Unfinished(saga_ids=found.saga_ids, damage=found.damage, live=live)


@pytest.mark.promise("one-owner")
@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize("rounds", ["watch", "explicit"])
def test_the_history_of_a_live_saga_is_not_read(store, service, hint, rounds):
    dead(store, ["dead"])
    log = Counting(ManualClock(auto=True), store=store, hint=hint)
    recoverer = Recoverer()
    with saga_scope("lives", log=process(store)) as saga:
        saga.execute("act", lambda: 1, semantics=C, compensate=undo("refund", saga="saga.id"))
        for _ in range(3):
            report = recover_as(recoverer, log) if rounds == "watch" else recover(log)
            assert report.live == ("lives",)
        assert "lives" not in log.reads and "dead" in log.reads
        assert ("lives" in log.asked) is not hint
        assert types(store, "lives") == ["START", "INTENT", "DONE"]
    assert saga.status is SagaStatus.COMMITTED and service.calls == [("refund", "dead")]


def test_a_live_saga_that_damage_may_concern_is_looked_at(store, service):
    log = Counting(ManualClock(auto=True), store=store, hint=True)
    log.damage = (Damage(where="somewhere", reason="a page is broken", saga_ids=("lives",)),)
    with saga_scope("lives", log=process(store)) as saga:
        saga.execute("act", lambda: 1, semantics=C, compensate=undo("refund", saga="saga.id"))
        del store.records["lives"][2]
        assert recover_as(Recoverer(), log).damaged == ("lives",)
        log.damage = (Damage(where="somewhere", reason="a page is broken", saga_ids=None),)
        assert recover_as(Recoverer(), log).damaged == ("lives",)
        log.damage = ()
        assert recover_as(Recoverer(), log).live == ("lives",)
        service.down = True
        store.records.pop("lives")


def test_a_saga_whose_doubts_wait_or_that_is_suspended_gets_no_claim_round_after_round(store, service):
    log = process(store)
    scope = saga_scope("asks", log=log)
    with scope:
        scope.execute("act", lambda: 1, semantics=C, compensate=undo("refund", saga="saga.id"))
        scope.suspend("a person")
    recoverer = Recoverer()
    for _ in range(3):
        assert recover_as(recoverer, log).untouched == ("asks",)
    assert types(store, "asks").count("CLAIM") == 0


# --- how much at once, and in which order


class Turns:
    """The turns of a recoverer, which say when somebody has to wait for one."""

    def __init__(self, count: int) -> None:
        self._turns = threading.Semaphore(count)
        self.waiting = threading.Semaphore(0)

    def __enter__(self) -> None:
        if not self._turns.acquire(blocking=False):
            self.waiting.release()
            assert self._turns.acquire(timeout=BOUND)

    def __exit__(self, *_: object) -> None:
        self._turns.release()


def test_all_rounds_of_a_process_together_roll_back_no_more_than_its_concurrency(store, service):
    dead(store, names(12))
    service.hold = threading.Event()
    recoverer = Recoverer(concurrency=2)
    recoverer.turns = turns = Turns(2)  # type: ignore[assignment]
    reports: list[Any] = []
    rounds = [
        threading.Thread(target=lambda: reports.append(recover_as(recoverer, process(store))), daemon=True)
        for _ in range(4)
    ]
    for each in rounds:
        each.start()
    for _ in range(6):  # four rounds with two threads each: all but two wait
        assert turns.waiting.acquire(timeout=BOUND)
    assert len(service.calls) == 2
    service.hold.set()
    for each in rounds:
        each.join(BOUND)
    assert sorted(saga_id for report in reports for saga_id in report.recovered) == names(12)


def test_a_round_says_when_each_of_its_sagas_has_its_turn(store, service):
    dead(store, names(4))
    service.hold = threading.Event()
    taken, recoverer = threading.Event(), Recoverer(concurrency=2)
    log = process(store)
    running = threading.Thread(target=recover_as, args=(recoverer, log), kwargs={"taken": taken.set}, daemon=True)
    running.start()
    assert service.entered.wait(BOUND)
    assert not taken.is_set(), "two of four wait for a turn"
    service.hold.set()
    assert taken.wait(BOUND)
    running.join(BOUND)


def test_recoverers_take_the_sagas_each_in_an_order_of_its_own(service):
    orders: list[list[str]] = []
    for seed in (b"one", b"one", b"two", None):
        store = MemoryStore()
        dead(store, names(30))
        service.calls.clear()
        recover_as(Recoverer(seed=seed), process(store))
        orders.append([saga_id for _, saga_id in service.calls])
    assert orders[0] == orders[1] != orders[2] and orders[3] == names(30)
    assert all(sorted(order) == names(30) for order in orders)


def test_a_round_that_is_stopped_gives_up_what_it_has_not_begun(store, service):
    dead(store, names(6))
    service.hold, stop = threading.Event(), threading.Event()
    log, recoverer, reports = process(store), Recoverer(concurrency=2), []
    running = threading.Thread(target=lambda: reports.append(recover_as(recoverer, log, stop=stop)), daemon=True)
    running.start()
    assert service.entered.wait(BOUND)
    stop.set()
    service.hold.set()
    running.join(BOUND)
    assert 1 <= len(reports[0].recovered) <= 2
    assert store.owners == {}
    assert sum("CLAIM" in types(store, saga_id) for saga_id in names(6)) == len(reports[0].recovered)


# --- claims together


class Batches:
    """A log that claims several at once, and notes how many."""

    def __init__(self, answers: Callable[[str], tuple[Record, ...] | LogCorrupted | None]) -> None:
        self.answers = answers
        self.batches: list[list[str]] = []
        self.inside, self.go = threading.Event(), threading.Event()

    def claim_some(self, saga_ids: Sequence[str]) -> dict[str, tuple[Record, ...] | LogCorrupted]:
        self.batches.append(list(saga_ids))
        self.inside.set()
        assert self.go.wait(BOUND)
        return {saga_id: found for saga_id in saga_ids if (found := self.answers(saga_id)) is not None}


def test_what_is_asked_for_while_one_claims_the_next_one_claims_together(store):
    def answer(saga_id: str) -> tuple[Record, ...] | LogCorrupted | None:
        return {"busy": None, "broken": LogCorrupted("broken")}.get(saga_id, ())

    log = Batches(answer)
    claims = Claims(log)
    said: dict[str, object] = {}

    def ask(saga_id: str) -> None:
        try:
            said[saga_id] = claims.claim(saga_id)
        except (SagaBusy, LogCorrupted) as error:
            said[saga_id] = type(error)

    first = threading.Thread(target=ask, args=("first",), daemon=True)
    first.start()
    assert log.inside.wait(BOUND)
    rest = [threading.Thread(target=ask, args=(each,), daemon=True) for each in ("a", "busy", "broken", "b")]
    for thread in rest:
        thread.start()
    for _ in range(2000):
        if len(claims._asked) == 4:
            break
        threading.Event().wait(0.005)
    log.go.set()
    for thread in (first, *rest):
        thread.join(BOUND)
    assert said == {"first": (), "a": (), "b": (), "busy": SagaBusy, "broken": LogCorrupted}
    assert [len(batch) for batch in log.batches] == [1, 4]


def test_a_failure_of_the_log_is_heard_by_everybody_who_asked(store):
    def answer(saga_id: str) -> None:
        raise LogUnavailable("the server is away")

    log = Batches(answer)
    claims = Claims(log)
    heard: list[str] = []

    def ask(saga_id: str) -> None:
        try:
            claims.claim(saga_id)
        except LogUnavailable as error:
            heard.append(str(error))

    log.go.set()
    threads = [threading.Thread(target=ask, args=(f"s{n}",), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    assert heard == ["the server is away"] * 4


# --- numbers


def test_the_numbers_of_a_recoverer(store, service):
    log = process(store, at=100.0)
    dead(store, names(3))
    dead(store, ["r"], "release", at=40.0)
    asks = saga_scope("asks", log=log)
    with asks:
        asks.execute("act", lambda: 1, semantics=C, compensate=undo("refund", saga="saga.id"))
        asks.suspend("a person")
    service.down = True
    recoverer = Recoverer()
    with saga_scope("lives", log=process(store)) as saga:
        saga.execute("act", lambda: 1, semantics=C, compensate=undo("refund", saga="saga.id"))
        recover_as(recoverer, log)
        numbers = recoverer.tally.numbers()
        assert numbers.backlog == {"live": 1, "attention": 1, "waiting": 2, "suspended": 1}
        recover_as(recoverer, log)
        numbers = recoverer.tally.numbers()
    assert numbers.backlog == {"live": 1, "attention": 1, "waiting": 2, "suspended": 1}
    assert numbers.oldest == 1_700_000_000.0
    assert numbers.compensations == {
        ("refund", "failed"): 2, ("refund", "given_up"): 1, ("release", "compensated"): 1,
    }  # fmt: skip
    assert (numbers.recovered, numbers.rounds) == (1, 2)
    assert recoverer.backoff.failing() == {"refund": 3}
    service.down = False
    advance(60.0, log)
    recover_as(recoverer, log)
    numbers = recoverer.tally.numbers()
    assert numbers.backlog == {"attention": 1, "suspended": 1} and numbers.recovered == 3
    assert recoverer.backoff.failing() == {}
    assert read_saga(log, "s000").report is not None
