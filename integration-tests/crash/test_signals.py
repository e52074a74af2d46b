"""Ctrl-C, SIGTERM and timeouts during a rollback: it goes on to its end, and they come out afterwards."""

from __future__ import annotations

import signal

import pytest
from crash_ledger import Ledger
from crash_log import Reader
from crash_processes import Start, Worker
from crash_stores import STORES, Fresh

from agent_saga_core import SagaStatus
from agent_saga_core.demo.client import Client

LIVES = [
    ("signals", ["charge", "book", "pay"]),
    ("signals", ["charge", "book", "pay", "raise"]),
    ("async", ["acharge", "acharge"]),
    ("async", ["acharge", "acharge", "raise"]),
]


def rolled_back_once_each(world: Client, who: str, in_log: Reader, effects: int) -> None:
    ledger = Ledger(world)
    assert ledger.undo_counts(who) == [1] * effects and ledger.undone_once_each(who)
    state = in_log.state()
    assert (state.status, state.report and state.report.clean) == (SagaStatus.ROLLED_BACK, True)
    assert in_log.types()[-1] == "ROLLED_BACK" and in_log.intact()


def signalled_in_each_refund(worker: Worker, world: Client, numbers: list[int]) -> None:
    """One signal while each refund is held. That the next one is held proves that the last was taken and outlived."""
    for number in numbers:
        world.wait_held()
        worker.signal(number)
        world.release()


@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.promise("shielded", "compensate-once", "lifo")
@pytest.mark.parametrize("job", ["signals", "async"])
@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT], [signal.SIGTERM, signal.SIGINT]],
    ids=["INT", "TERM", "INT INT", "TERM INT"],
)
def test_a_signal_during_the_rollback_ends_the_process_after_it(
    start: Start, world: Client, who: str, in_log: Reader, job: str, numbers: list[int]
) -> None:
    world.hold("/refunds", times=len(numbers))
    tool = "acharge" if job == "async" else "charge"
    worker = start(job, fresh=True, body=[tool, tool, tool, "raise"])
    signalled_in_each_refund(worker, world, numbers)
    code = worker.ends()
    rolled_back_once_each(world, who, in_log, 3)
    assert code == -numbers[0], worker.errors()
    if numbers[0] == signal.SIGINT:
        assert "KeyboardInterrupt" in worker.errors() and "SoldOut" in worker.errors()
    undone = [found["charge_id"] for found in Ledger(world).all["refunds"]][-3:]
    assert undone == [found["id"] for found in reversed(Ledger(world).effects(who))]


@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.promise("shielded", "in-flight-is-unknown", "compensate-once")
@pytest.mark.parametrize("job", ["signals", "async"])
def test_ctrl_c_in_a_step_rolls_back_what_it_did_and_then_ends_the_process(
    start: Start, world: Client, who: str, in_log: Reader, job: str
) -> None:
    """In the middle of the second charge, which has landed unheard; once more in its refund."""
    tool = "acharge" if job == "async" else "charge"
    world.hold("/charges", when="after", field={"amount": 2})
    world.hold("/refunds", times=2)
    worker = start(job, fresh=True, body=[tool, tool])
    world.wait_held()
    worker.signal(signal.SIGINT)
    world.wait_held(2)
    world.release()
    world.wait_held()
    worker.signal(signal.SIGINT)
    world.release()
    assert worker.ends() == -signal.SIGINT
    assert "KeyboardInterrupt" in worker.errors()
    rolled_back_once_each(world, who, in_log, 2)


@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.promise("shielded", "in-flight-is-unknown", "no-false-clean")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_timeout_around_a_saga_with_a_held_request(
    start: Start, world: Client, who: str, in_log: Reader, when: str
) -> None:
    """`asyncio.timeout` ends the step and not the rollback; its TimeoutError comes out."""
    world.hold("/charges", when=when, field={"amount": 2})
    worker = start("timeout", body=["acharge", "acharge"])
    world.wait_held()
    worker.say("time is up")
    assert worker.hear() == {"at": "heard"}
    said = worker.hear()
    assert said["raised"] == "TimeoutError" and said["report"]["clean"] is True
    rolled_back_once_each(world, who, in_log, 1 if when == "before" else 2)


@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.promise("shielded", "compensate-once")
def test_a_timeout_during_the_rollback_waits_for_it(start: Start, world: Client, who: str, in_log: Reader) -> None:
    world.hold("/refunds", times=2)
    worker = start("timeout", body=["acharge", "acharge", "raise"])
    world.wait_held()
    worker.say("time is up")
    assert worker.hear() == {"at": "heard"}
    world.release()
    world.wait_held()
    world.release()
    said = worker.hear()
    assert said["raised"] == "TimeoutError" and said["report"]["clean"] is True
    rolled_back_once_each(world, who, in_log, 2)


@pytest.mark.promise("shielded", "compensate-once", "no-false-clean", "no-silent-commit")
@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.parametrize(("job", "body"), LIVES)
def test_ctrl_c_at_every_boundary(start: Start, world: Client, fresh_log: Fresh, job: str, body: list[str]) -> None:
    """Not a death: the process that was interrupted ends its saga itself, and recovery finds nothing to do."""
    effects = len([word for word in body if word != "raise"])
    place, committed, at_work = 0, 0, True
    while at_work:
        place += 1
        saga, url = f"{fresh_log.store.name} {job} {body[-1]} interrupted at {place}", fresh_log()
        worker = start(job, log=url, who=saga, saga=saga, body=body, die_at=place, die_of=signal.SIGINT)
        worker.ends()
        errors = worker.errors()
        at_work = "KeyboardInterrupt" in errors
        ledger, reader = Ledger(world), Reader(url)
        assert reader.intact(), saga
        with reader.opened() as log:
            unfinished, records = log.unfinished().saga_ids, log.read(saga)
        if [record.type for record in records] == ["START"]:
            continue  # interrupted while it was being opened: an empty saga is left to recovery
        assert unfinished == (), f"{saga}: {errors}"
        last = records[-1:]
        if last and last[0].type == "COMMITTED":
            committed += 1
            assert len(ledger.standing(saga)) == effects and ledger.undo_counts(saga) == [0] * effects, saga
            assert "raise" not in body, saga
        else:
            assert not last or (last[0].type, last[0].data["clean"]) == ("ROLLED_BACK", True), saga
            assert ledger.undone_once_each(saga) and set(ledger.undo_counts(saga)) <= {1}, saga
            assert at_work or "raise" in body, saga
    assert place > 12 and committed < place / 2


@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.promise("shielded", "no-silent-commit", "any-thread-any-loop")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_end_waits_for_a_call_on_another_thread(
    start: Start, world: Client, who: str, in_log: Reader, number: int
) -> None:
    """The body failed, and the rollback waits for the call: it is undone as well, and then the signal is heard."""
    world.hold("/bookings", when="after")
    world.hold("/refunds")
    worker = start("leaving", fresh=True, body=["book", "charge", "raise"])
    world.wait_held()
    worker.say("leave")
    worker.wait_until_it_catches(signal.SIGTERM)  # from then on it is at the end of its scope
    worker.signal(number)
    world.release(count=1)
    world.wait_held()
    world.release()
    assert worker.ends() == -number
    rolled_back_once_each(world, who, in_log, 2)


@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.promise("shielded", "compensate-once", "recover-anywhere")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_during_a_recovery_is_heard_between_two_sagas(
    start: Start, world: Client, who: str, in_log: Reader, number: int, when: str
) -> None:
    """The saga at hand is finished, the next one is not begun, and another recovery goes on with that."""
    for name in ("ann", "bob"):
        worker = start("saga", body=["charge", "book", "heed"], saga=name, who=f"{name} {who}")
        worker.hear()
        worker.kill()
    world.hold("/refunds", when=when)
    recoverer = start("recover", fresh=True)
    recoverer.hear()
    recoverer.say("go")
    world.wait_held()
    recoverer.signal(number)
    world.release()
    assert recoverer.ends() == -number
    assert (number == signal.SIGINT) is ("KeyboardInterrupt" in recoverer.errors())
    ledger = Ledger(world)
    assert ledger.undo_counts(f"ann {who}") == [1, 1] and ledger.undo_counts(f"bob {who}") == [0, 0]
    assert [str(in_log.state(name).status) for name in ("ann", "bob")] == ["ROLLED_BACK", "RUNNING"]
    second = start("recover")
    second.hear()
    second.say("go")
    assert second.hear()["report"]["recovered"] == ["bob"]
    assert Ledger(world).undone_once_each(f"bob {who}") and in_log.intact()
