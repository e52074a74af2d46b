"""Agents of seven frameworks in one saga: what one of them fails at, all of them have undone."""

from __future__ import annotations

import itertools

import pytest
from cross_processes import Worker, bookings, undone
from cross_teams import FRAMEWORKS

from agent_saga_core import list_sagas, open_log
from agent_saga_core.demo.client import Client

NAMES = list(FRAMEWORKS)
NEIGHBOURS = [(name, NAMES[(at + 1) % len(NAMES)]) for at, name in enumerate(NAMES)]


@pytest.mark.promise("any-thread-any-loop", "lifo", "no-false-clean")
@pytest.mark.parametrize("fails", NAMES)
def test_one_saga_over_all_frameworks(process: Worker, world: Client, log: str, fails: str) -> None:
    saga_id = f"all-{fails}"
    world.fail("/bookings", field={"by": fails}, times=None)
    told = process.run("everybody", saga_id=saga_id, log=log, fails=fails)
    order = [name for name in NAMES if name != fails]
    assert told["status"] == "ROLLED_BACK" and told["clean"], told
    assert [tool for tool, _ in told["steps"]] == [*(f"book_{name}" for name in order), f"book_{fails}"]
    assert {status for _, status in told["steps"]} == {"COMPENSATED"}
    made = bookings(world, saga_id)
    assert [one["by"] for one in made] == order
    assert undone(world, made) == order[::-1]
    assert [head.saga_id for head in list_sagas(log)] == [saga_id], "one saga, whoever acts in it"


@pytest.mark.promise("any-thread-any-loop", "no-silent-commit", "no-false-clean")
@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(NAMES, 2)))
def test_what_one_has_done_is_undone_when_another_fails(
    process: Worker, world: Client, log: str, first: str, second: str
) -> None:
    saga_id = f"{first}-{second}"
    world.fail("/bookings", field={"by": second}, times=None)
    before = len(world.ledger()["journal"])
    told = process.run("pair", saga_id=saga_id, log=log, first=first, second=second)
    assert told["status"] == "ROLLED_BACK" and told["clean"], told
    assert told["steps"] == [[f"book_{first}", "COMPENSATED"], [f"book_{second}", "COMPENSATED"]]
    asked = [entry for entry in world.ledger()["journal"][before:] if entry["entry"] == "request"]
    refused = [entry for entry in asked if entry["path"] == "/bookings" and entry["status"] >= 400]
    assert len(refused) == 1, "the second has asked once, and was told that it failed"
    made = bookings(world, saga_id)
    assert [one["by"] for one in made] == [first] and undone(world, made) == [first]


@pytest.mark.promise("any-thread-any-loop", "replay-not-rerun")
@pytest.mark.parametrize("fails", [False, True], ids=["commits", "fails"])
@pytest.mark.parametrize(("first", "second"), NEIGHBOURS)
def test_two_at_once_on_one_loop(
    process: Worker, world: Client, log: str, first: str, second: str, fails: bool
) -> None:
    saga_id = f"{first}+{second}-{fails}"
    told = process.run("together", saga_id=saga_id, log=log, first=first, second=second, fails=fails)
    made = bookings(world, saga_id)
    assert {one["by"] for one in made} == {first, second} and len(made) == 2
    assert told["status"] == ("ROLLED_BACK" if fails else "COMMITTED") and told["clean"], told
    assert sorted(undone(world, made)) == (sorted([first, second]) if fails else [])
    assert len(list_sagas(log)) == 1


@pytest.mark.promise("closed-means-closed")
@pytest.mark.parametrize(("first", "second"), NEIGHBOURS)
def test_a_second_run_in_a_saga_waits_for_the_end_of_the_first(
    process: Worker, world: Client, log: str, first: str, second: str
) -> None:
    """Adapters' runs are savepoints, which are opened one after the other; the frameworks' own may be at once."""
    saga_id = f"{first}, {second}"
    told = process.run("second_run", saga_id=saga_id, log=log, first=first, second=second)
    assert "savepoint is already open" in told["heard"]
    assert [one["by"] for one in bookings(world, saga_id)] == [first, second]
    assert told["status"] == "COMMITTED" and told["clean"] and len(told["steps"]) == 2, told


@pytest.mark.promise("any-thread-any-loop", "lifo")
@pytest.mark.parametrize(("outer", "inner"), NEIGHBOURS)
def test_an_agent_of_one_framework_inside_a_tool_of_another(
    process: Worker, world: Client, log: str, outer: str, inner: str
) -> None:
    saga_id = f"{outer}({inner})"
    told = process.run("nested", saga_id=saga_id, log=log, outer=outer, inner=inner)
    made = bookings(world, saga_id)
    assert [one["by"] for one in made] == [inner, outer]
    assert undone(world, made) == [outer, inner], "the outer call ended last"
    assert told["status"] == "ROLLED_BACK" and told["clean"], told
    assert sorted(tool for tool, _ in told["steps"]) == sorted([f"book_{outer}", f"book_{inner}"])


@pytest.mark.promise("drop-in", "any-thread-any-loop", "lifo")
def test_one_function_is_a_tool_of_every_framework(process: Worker, world: Client, log: str) -> None:
    told = process.run("shared", saga_id="shared", log=log)
    assert told["runners"] == len(NAMES) and told["unwrapped"] == NAMES, "each tool is a tool of its own"
    assert told["changed"] == [] and told["marked"] == [] and told["parts in common"] == 0
    # The fleet has told from the tool whose it is: LangGraph's are LangChain's.
    own = {name: name.replace("_", "-") for name in NAMES}
    assert told["adapters"] == {**own, "langgraph": "langchain"}
    assert {path.partition("/")[0] for path in told["covered"]} == {"tools", *NAMES}
    made = bookings(world, "shared")
    assert [one["by"] for one in made] == ["shared"] * len(NAMES)
    cancelled = [one["booking_id"] for one in world.ledger()["cancellations"]]
    assert [id for id in cancelled if id in {one["id"] for one in made}] == [one["id"] for one in made][::-1]
    assert told["status"] == "ROLLED_BACK" and told["clean"], told
    undone_by = {record.data["undo"]["handler"] for record in open_log(log).read("shared") if record.type == "INTENT"}
    assert undone_by == {"cross.cancel"}, "two tools, one compensator"
    assert [head.saga_id for head in list_sagas(log)] == ["shared"]
