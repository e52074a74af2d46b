"""A process dies while its request is on the way: what recovery may say, when, and what it may undo."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from crash_ledger import Ledger
from crash_log import Reader
from crash_processes import Start, Worker
from crash_stores import STORES

from agent_saga_core import SagaStatus
from agent_saga_core.demo.client import Client

pytestmark = pytest.mark.parametrize("store", STORES, indirect=True)

Recovered = Callable[..., dict[str, Any]]


def killed_while_held(
    start: Start, world: Client, tool: str, path: str, *, when: str = "before", **options: Any
) -> None:
    """A worker is killed while its request is held at the service, before or after the effect."""
    world.hold(path, when=when)
    owner = start("saga", body=[tool], **options)
    world.wait_held()
    owner.kill()


def waiting(recoverer: Worker) -> None:
    recoverer.say("waiting")
    assert recoverer.hear() == {"clock": "waiting"}


def advance(worker: Worker, seconds: float) -> None:
    worker.say(f"advance {seconds}")


def report_of(worker: Worker) -> dict[str, Any]:
    report: dict[str, Any] = worker.hear()["report"]
    return report


@pytest.mark.promise("no-false-clean", "in-flight-is-unknown")
@pytest.mark.parametrize("sent", [False, True], ids=["never sent", "sent and landed"])
def test_an_unsafe_undo_is_never_run_on_what_may_not_have_happened(
    start: Start, world: Client, who: str, in_log: Reader, recovered: Recovered, sent: bool
) -> None:
    """A transfer's undo is a transfer back: where the first may not have happened, it would move money on its own."""
    world.hold("/transfers", when="after" if sent else "before")
    owner = start("saga", body=["move"])
    world.wait_held()
    owner.kill()
    report = recovered()
    assert report["attention"] == ["order-7"] and not report["recovered"]
    state = in_log.state()
    assert state.status is SagaStatus.NEEDS_ATTENTION and state.report and not state.report.clean
    assert [(step.tool, step.status) for step in state.report.remaining] == [("move", "UNKNOWN")]
    assert "move" in report["reasons"]["order-7"]
    backwards = [t for t in Ledger(world).all["transfers"] if t["target"] == who]
    assert not backwards, "the undo was run"


@pytest.mark.promise("no-false-clean", "in-flight-is-unknown", "recover-anywhere")
@pytest.mark.parametrize(("tool", "path"), [("charge", "/charges"), ("reserve", "/bookings")])
def test_a_request_that_lands_after_its_sender_died_is_undone_once(
    start: Start, world: Client, who: str, in_log: Reader, tool: str, path: str
) -> None:
    """A probe, and an undo that is harmless when there is nothing, are not believed before `in_doubt` is over."""
    killed_while_held(start, world, tool, path, in_doubt=20.0)
    recoverer = start("recover", clock="manual")
    waiting(recoverer)
    advance(recoverer, 19.0)
    waiting(recoverer)
    assert in_log.state().report is None, "a verdict before the time was over"
    world.release()
    assert len(Ledger(world).standing(who)) == 1
    assert Ledger(world).undo_counts(who) == [0]
    advance(recoverer, 2.0)
    assert report_of(recoverer)["recovered"] == ["order-7"]
    ledger = Ledger(world)
    assert ledger.undo_counts(who) == [1] and ledger.undone_once_each(who)
    state = in_log.state()
    assert (state.status, state.report and state.report.clean) == (SagaStatus.ROLLED_BACK, True)


@pytest.mark.promise("no-false-clean", "in-flight-is-unknown")
def test_a_request_that_never_lands_is_called_absent_only_when_the_time_is_over(
    start: Start, world: Client, who: str, in_log: Reader
) -> None:
    world.hold("/charges")
    owner = start("saga", body=["charge"], in_doubt=20.0)
    world.wait_held()
    owner.kill()
    recoverer = start("recover", clock="manual")
    waiting(recoverer)
    advance(recoverer, 19.9)
    waiting(recoverer)
    assert in_log.state().report is None, "a verdict before the time was over"
    advance(recoverer, 0.2)
    assert report_of(recoverer)["recovered"] == ["order-7"]
    assert in_log.types()[-2:] == ["NOT_APPLIED", "ROLLED_BACK"]
    assert Ledger(world).effects(who) == []


@pytest.mark.promise("no-false-clean", "recover-anywhere")
def test_each_recoverer_counts_the_doubt_from_its_own_claim(
    start: Start, world: Client, who: str, in_log: Reader
) -> None:
    """Clocks of two processes are never compared: what the first one waited does not count for the second."""
    killed_while_held(start, world, "charge", "/charges", in_doubt=20.0)
    first = start("recover", clock="manual")
    waiting(first)
    advance(first, 19.0)
    waiting(first)
    first.kill()
    second = start("recover", clock="manual")
    waiting(second)
    advance(second, 19.0)
    waiting(second)
    world.release()
    advance(second, 2.0)
    assert report_of(second)["recovered"] == ["order-7"]
    assert Ledger(world).undo_counts(who) == [1]
    assert in_log.state().status is SagaStatus.ROLLED_BACK


@pytest.mark.promise("no-false-clean", "in-flight-is-unknown", "no-silent-commit")
def test_an_owner_that_lives_waits_for_what_it_gave_up(start: Start, world: Client, who: str, in_log: Reader) -> None:
    """The connection broke and the request lands later: the call waits its doubt out, and knows what became of it."""
    world.land_late("/charges")
    owner = start("saga", body=["charge"], in_doubt=20.0, clock="manual", swallow=True)
    waiting(owner)
    advance(owner, 19.0)
    waiting(owner)
    assert in_log.state().steps[0].status == "INTENDED"  # UNKNOWN rides with the next flush
    world.release()
    advance(owner, 2.0)
    assert owner.hear()["status"] == "COMMITTED"  # its probe saw the charge, so that the call returned it after all
    assert Ledger(world).undo_counts(who) == [0]
    assert in_log.state().steps[0].status == "DONE"


@pytest.mark.promise("no-false-clean", "in-flight-is-unknown", "recover-anywhere")
def test_what_only_time_can_settle_is_named_and_come_back_to_without_being_asked(
    start: Start, world: Client, who: str, in_log: Reader
) -> None:
    """The scope may not wait, so it says NEEDS_ATTENTION; a recovery that retries nothing still waits for it."""
    world.land_late("/charges")
    said = start("saga", body=["charge"], in_doubt=20.0, drain=0.0).hear()
    assert said["raised"] == "RollbackIncomplete"
    assert (said["status"], said["remaining"]) == ("NEEDS_ATTENTION", [["charge", "UNKNOWN"]])
    recoverer = start("recover", clock="manual", retry=False)
    waiting(recoverer)
    world.release()
    assert Ledger(world).undo_counts(who) == [0]
    advance(recoverer, 41.0)
    assert report_of(recoverer)["recovered"] == ["order-7"]
    assert Ledger(world).undo_counts(who) == [1]
    state = in_log.state()
    assert (state.status, state.report and state.report.clean) == (SagaStatus.ROLLED_BACK, True)


@pytest.mark.promise("recover-anywhere", "no-false-clean", "compensate-once")
@pytest.mark.parametrize("tool", ["pay", "pay_seen"], ids=["tombstone", "probe and tombstone"])
def test_a_tombstone_ends_the_doubt_at_once_and_refuses_what_comes_late(
    start: Start, world: Client, who: str, in_log: Reader, tool: str
) -> None:
    killed_while_held(start, world, tool, "/charges", in_doubt=3600.0)
    recoverer = start("recover", clock="manual")  # whose time stands still: it can only end if it waits for nothing
    assert report_of(recoverer)["recovered"] == ["order-7"]
    state = in_log.state()
    assert (state.status, state.report and state.report.clean) == (SagaStatus.ROLLED_BACK, True)
    world.release()
    ledger = Ledger(world)
    assert ledger.effects(who) == []
    (key,) = {step.forward_key for step in state.steps}
    assert [(found["outcome"], found["status"]) for found in ledger.requests(key)] == [("refused", 410)]
    assert len(ledger.voids(key)) == 1


@pytest.mark.promise("recover-anywhere", "no-false-clean", "compensate-once")
@pytest.mark.parametrize("tool", ["charge", "pay", "pay_seen"])
def test_killed_between_effect_and_answer(start: Start, world: Client, who: str, in_log: Reader, tool: str) -> None:
    """A probe that sees the effect by its key, and an undo by key, both end it at once."""
    killed_while_held(start, world, tool, "/charges", when="after", in_doubt=3600.0)
    recoverer = start("recover", clock="manual")
    assert report_of(recoverer)["recovered"] == ["order-7"]
    ledger = Ledger(world)
    assert ledger.undo_counts(who) == [1] and ledger.undone_once_each(who)
    assert in_log.state().status is SagaStatus.ROLLED_BACK


@pytest.mark.promise("in-flight-is-unknown", "no-false-clean")
@pytest.mark.parametrize(
    ("tool", "left"), [("acharge", []), ("acharge_blindly", [["acharge_blindly", "UNKNOWN"]])], ids=["probe", "blind"]
)
def test_an_async_step_cancelled_after_its_effect_is_undone_or_named(
    start: Start, world: Client, who: str, in_log: Reader, tool: str, left: list[list[str]]
) -> None:
    world.hold("/charges", when="after")
    owner = start("cancelled", body=[tool])
    world.wait_held()
    owner.say("cancel")
    assert owner.hear() == {"at": "heard"}
    said = owner.hear()
    assert said["raised"] == "CancelledError"
    assert said["report"]["clean"] is (not left)
    assert [[step["tool"], step["status"]] for step in said["report"]["remaining"]] == left
    assert any("order-7" in note and (not left or tool in note) for note in said["notes"])
    ledger = Ledger(world)
    assert ledger.undo_counts(who) == [0 if left else 1]
    assert in_log.state().status is (SagaStatus.NEEDS_ATTENTION if left else SagaStatus.ROLLED_BACK)
    assert owner.ends() == 0


@pytest.mark.promise("in-flight-is-unknown", "no-false-clean")
def test_killed_by_a_signal_that_nobody_handles_in_the_middle_of_a_request(
    start: Start, world: Client, who: str, in_log: Reader, recovered: Recovered
) -> None:
    """SIGTERM at its default ends a process as bluntly as SIGKILL, and recovery finds the same."""
    world.hold("/charges", when="after")
    owner = start("saga", fresh=True, body=["charge"])
    world.wait_held()
    owner.signal(signal.SIGTERM)
    assert owner.ends() == -signal.SIGTERM
    assert in_log.types() == ["START", "INTENT"]
    assert recovered()["recovered"] == ["order-7"]
    assert Ledger(world).undo_counts(who) == [1]


@pytest.mark.promise("any-thread-any-loop", "in-flight-is-unknown", "compensate-once", "recover-anywhere")
@pytest.mark.parametrize(("job", "tool"), [("parallel", "charge"), ("parallel", "pay"), ("aparallel", "acharge")])
@pytest.mark.parametrize("landed", [0, 3, 6])
def test_killed_with_six_requests_in_flight(
    start: Start, world: Client, who: str, in_log: Reader, recovered: Recovered, job: str, tool: str, landed: int
) -> None:
    """Some have landed, unheard, and the others never will: each that did is undone once."""
    world.hold("/charges", times=6)
    owner = start(job, body=[tool])
    world.wait_held(6)
    world.hold("/charges", when="after", times=None)
    if landed:
        world.release(count=landed)  # into the hold behind the effect
    owner.kill()
    assert len(Ledger(world).standing(who)) == landed
    assert recovered()["recovered"] == ["order-7"]
    ledger = Ledger(world)
    assert ledger.undo_counts(who) == [1] * landed and ledger.undone_once_each(who)
    state = in_log.state()
    assert (state.status, state.report and state.report.clean) == (SagaStatus.ROLLED_BACK, True)
    assert len(state.steps) == 6


@pytest.mark.promise("any-thread-any-loop", "lifo", "compensate-once")
@pytest.mark.parametrize(("job", "tool"), [("parallel", "charge"), ("aparallel", "acharge")])
def test_six_parallel_steps_are_undone_in_reverse_order_of_their_outcomes(
    start: Start, world: Client, who: str, in_log: Reader, job: str, tool: str
) -> None:
    world.hold("/charges", times=6)
    owner = start(job, body=[tool, "raise"])
    world.wait_held(6)
    world.release()
    assert owner.hear()["raised"] == "SoldOut"
    outcomes = [entry["step"] for entry in in_log.state().timeline if entry["type"] == "DONE"]
    undone = [entry["step"] for entry in in_log.state().timeline if entry["type"] == "COMPENSATED"]
    assert len(outcomes) == 6 and undone == outcomes[::-1]
    ledger = Ledger(world)
    assert ledger.undo_counts(who) == [1] * 6 and ledger.undone_once_each(who)
