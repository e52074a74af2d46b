"""What one hands in may be odd, consumed later, or secret: it changes no undo, and no secret reaches a log."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from agent_saga_core import (
    Compensation,
    DeclarationError,
    MemoryLog,
    ReplayDiverged,
    RollbackIncomplete,
    SagaAborted,
    SagaStatus,
    Secret,
    StepRequest,
    call_with,
    compensator,
    read_saga,
    recover,
    resolve,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.drive import CURRENT_SAGA
from agent_saga_core.log.memory import MemoryStore
from agent_saga_core.registry import isolated_registry
from agent_saga_core.values.redaction import Redacted


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    with isolated_registry():
        yield


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


def _everything(log: MemoryLog) -> str:
    return repr([log.read(saga_id) for saga_id in log.saga_ids()])


# --- an undo is what it was when it was derived


def test_a_tool_that_consumes_its_argument_does_not_change_its_undo(log):
    world: dict[str, int] = {}

    @compensator("release")
    def release(items: list[str]) -> None:
        for item in items:
            world.pop(item)

    @saga_tool(semantics="COMPENSABLE", compensate=undo(release, items="args.items"))
    def reserve(items: list[str]) -> None:
        while items:
            world[items.pop()] = 1

    with pytest.raises(ValueError), saga_scope(log=log) as saga:
        reserve(["a", "b"])
        raise ValueError
    assert saga.report.clean and world == {}


@pytest.mark.parametrize("how", ["paths", "mixed", "factory"])
def test_a_body_that_edits_a_result_does_not_change_the_undo(log, how):
    released: list[Any] = []

    @compensator("release")
    def release(ids: list[int], name: str = "n") -> None:
        released.append((list(ids), name))

    compensate = {
        "paths": undo(release, ids="result.ids"),
        "mixed": undo(release, ids="result.ids", name="args.who.name"),
        "factory": lambda r, a: Compensation(handler="release", kwargs={"ids": r["ids"], "name": a["who"]["name"]}),
    }[how]

    def reserve(who: dict[str, str]) -> dict[str, list[int]]:
        who["name"] = "consumed"
        return {"ids": [1, 2]}

    with pytest.raises(ValueError), saga_scope(log=log) as saga:
        result = saga.execute(
            "reserve", reserve, args={"who": {"name": "n"}}, semantics="COMPENSABLE", compensate=compensate
        )
        result["ids"].clear()
        raise ValueError
    assert saga.report.clean and released == [([1, 2], "n")]


def test_arguments_that_no_other_process_could_rebuild_are_run_here_and_reported_there(log):
    @dataclass
    class Room:
        number: int

    seen: list[Any] = []

    @compensator("leave")
    def leave(room) -> None:  # without an annotation: the log's data cannot become a Room again
        seen.append(room)

    def take(room: Room) -> None: ...

    how = {"semantics": "COMPENSABLE", "compensate": undo(leave, room="args.room")}
    with pytest.raises(ValueError), saga_scope(log=log) as saga:
        saga.execute("take", take, args={"room": Room(7)}, **how)
        raise ValueError
    assert saga.report.clean and seen == [Room(7)]
    store = MemoryStore()
    dying = MemoryLog(store=store)
    saga_scope("dead", log=dying).__enter__().execute("take", take, args={"room": Room(7)}, **how)
    CURRENT_SAGA.set(None)  # what the death of its process does, too
    dying.crash()
    report = recover(MemoryLog(store=store))
    assert report.attention == ("dead",) and "lived in the process" in report.reasons["dead"]


def test_private_state_is_put_back_although_the_call_raised(log):
    state = {"v": 1}

    def change() -> None:
        state["v"] = 2
        raise RuntimeError

    with saga_scope(log=log) as saga:
        with pytest.raises(RuntimeError):
            saga.execute("set", change, semantics="REVERSIBLE", compensate=call_with(lambda v: state.update(v=v), v=1))
        assert state == {"v": 1}
    assert saga.status is SagaStatus.COMMITTED


# --- odd texts


@pytest.mark.parametrize("reason", ["\ud83d broken", ValueError("x"), {1}])
def test_an_odd_reason_aborts_like_any_other(log, reason):
    refunds: list[str] = []

    @compensator("refund")
    def refund(charge: str) -> None:
        refunds.append(charge)

    with pytest.raises(SagaAborted), saga_scope(log=log) as saga:
        saga.execute("charge", lambda: "c", semantics="COMPENSABLE", compensate=undo(refund, charge="result"))
        saga.abort(reason)
    assert refunds == ["c"]


def test_an_odd_reason_suspends_and_an_odd_deadline_changes_nothing(log):
    with saga_scope("s", log=log) as saga:
        for deadline in (math.nan, math.inf, -1.0):
            with pytest.raises(ValueError, match="number of seconds"):
                saga.suspend("later", deadline=deadline)
        assert saga.status is SagaStatus.RUNNING
        saga.suspend("\ud83d later")
    assert read_saga(log, "s").status is SagaStatus.SUSPENDED


def test_a_handler_that_is_no_text_leaves_the_step_reported(log):
    with pytest.raises(RollbackIncomplete) as raised, saga_scope(log=log) as saga:
        saga.execute(
            "t", lambda: 1, semantics="COMPENSABLE", compensate=lambda r: Compensation(handler="\ud800", kwargs={})
        )
        raise ValueError
    assert isinstance(raised.value.__cause__, ValueError)
    assert "deriving the undo" in raised.value.report.remaining[0].detail


@pytest.mark.parametrize("part", ["tool", "key", "call_id"])
def test_odd_names_and_identities_are_refused(log, part):
    given: dict[str, Any] = {"tool": "t", "key": None, "call_id": None, part: "\ud800"}
    ran: list[int] = []
    with saga_scope(log=log) as saga, pytest.raises(DeclarationError):
        saga.execute(given.pop("tool"), lambda: ran.append(1), semantics="READ_ONLY", **given)
    assert ran == [] and saga.status is SagaStatus.COMMITTED


def test_a_persons_odd_note_and_a_second_word_with_the_result(log):
    refunds: list[str] = []

    @compensator("refund")
    def refund(charge: str) -> None:
        refunds.append(charge)

    def lost() -> str:
        raise TimeoutError

    with pytest.raises(RollbackIncomplete), saga_scope("s", log=log) as saga:
        with pytest.raises(TimeoutError):
            saga.execute("charge", lost, semantics="COMPENSABLE", compensate=undo(refund, charge="result.id"))
    said = {"outcome": "landed", "by": "ann", "note": "\udcff seen"}
    state = resolve(log, "s", "charge", **said)
    assert state.status is SagaStatus.NEEDS_ATTENTION
    state = resolve(log, "s", 1, **said, result={"id": "ch_1"})
    assert state.status is SagaStatus.ROLLED_BACK and refunds == ["ch_1"]


# --- secrets


def test_a_result_that_shows_a_secret_of_its_call_is_stored_as_a_digest(log):
    """Under whatever name the tool gives it back. It cannot be replayed then, and says so."""

    @compensator("back")
    def back(user: str) -> None: ...

    @saga_tool(semantics="COMPENSABLE", compensate=undo(back, user="args.user"), key="args.user")
    def login(user: str, password: str) -> dict:
        return {"url": f"https://{user}:{password}@example.org"}

    with saga_scope("s", log=log):
        assert login("ada", "hunter2-hunter2")["url"].count("hunter2") == 2
    assert "hunter2" not in repr(log.read("s"))
    assert "secret" in log.read("s")[2].data["result"]["$digest"]["reason"]
    with saga_scope("s", log=log), pytest.raises(ReplayDiverged):
        login("ada", "hunter2-hunter2")


def test_an_identity_does_not_show_a_secret(log):
    @saga_tool(semantics="READ_ONLY", key="args.password")
    def login(password: str) -> int:
        return 1

    with saga_scope(log=log):
        login("hunter2-and-more")
        login("hunter2-and-more")
        login("another-password")
    assert "hunter2" not in _everything(log) and "another-password" not in _everything(log)
    assert len(read_saga(log, log.saga_ids()[0]).steps) == 2


@pytest.mark.parametrize("of", ["result", "args"])
def test_a_factory_that_renames_a_secret_does_not_store_it(log, of):
    seen: list[str] = []

    @compensator("close")
    def close(p: str) -> None:
        seen.append(p)
        raise RuntimeError(f"cannot close {p}")

    def make(result: Any, args: Any) -> Compensation:
        return Compensation(handler="close", kwargs={"p": result["token"] if of == "result" else args["password"]})

    def open_(password: str) -> dict[str, str]:
        return {"token": "tok-0123456789abcdef"}

    with pytest.raises(RollbackIncomplete) as raised, saga_scope(log=log) as saga:
        saga.execute("open", open_, args={"password": "hunter2-and-more"}, semantics="COMPENSABLE", compensate=make)
        raise ValueError
    assert seen == (["tok-0123456789abcdef"] if of == "result" else ["hunter2-and-more"]) * 3
    told = _everything(log) + str(raised.value)
    assert "tok-0123456789abcdef" not in told and "hunter2" not in told


def test_a_compensators_own_secret_parameter_is_not_told(log):
    @compensator("close")
    def close(p: Secret[str]) -> None:
        raise RuntimeError(f"cannot close {p}")

    with pytest.raises(RollbackIncomplete), saga_scope(log=log) as saga:
        saga.execute(
            "open",
            lambda: 1,
            semantics="COMPENSABLE",
            compensate=lambda r: Compensation(handler="close", kwargs={"p": "sesame-open-wide"}),
        )
        raise ValueError
    assert "sesame" not in _everything(log)


def test_what_a_gate_is_asked_can_be_compared_and_shown(log):
    asked: list[StepRequest] = []

    def approve(request: StepRequest) -> bool:
        asked.append(request)
        return True

    with saga_scope("s", log=log, approve=approve) as saga:
        saga.execute("mail", lambda to: None, args={"to": "a"}, semantics="IRREVERSIBLE", key="k")
    token = asked[0].token
    expected = StepRequest(saga_id="s", tool="mail", args={"to": "a"}, semantics="IRREVERSIBLE", key="k", token=token)
    assert asked == [expected] and "mail" in repr(asked[0])


def test_a_generator_of_a_read_only_tool_does_not_commit_either(log):
    with pytest.raises(SagaAborted), saga_scope(log=log) as saga:
        with pytest.raises(DeclarationError):
            saga.execute("pages", lambda: (n for n in range(3)), semantics="READ_ONLY")
    assert saga.steps[0].status == "UNKNOWN"


def test_metadata_come_back_as_they_were_given_and_are_shown_plainly(log):
    given = {"order": "o-7", "total": Decimal("1.10"), "$map": 1, "seats": {1: "a"}, "api_key": "hunter2"}
    with saga_scope("s", log=log, metadata=given) as saga:
        assert saga.metadata == {**given, "api_key": Redacted()}
    shown = read_saga(log, "s").metadata
    assert shown == {"order": "o-7", "total": "1.10", "$map": 1, "seats": {"1": "a"}, "api_key": "[redacted]"}
    msgspec.json.encode(shown)
