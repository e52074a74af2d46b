"""A fork in a scope: the saga stays the parent's, whatever the child does and however long it lives."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from crash_ledger import Ledger
from crash_log import Reader
from crash_processes import Start
from crash_stores import STORES

from agent_saga_core import SagaStatus
from agent_saga_core.demo.client import Client

pytestmark = pytest.mark.parametrize("store", STORES, indirect=True)

# How the child of each kind ends, as its parent hears it.
ENDS = {"fork, ends": 0, "fork, raises": 0, "fork, killed": -signal.SIGKILL, "fork, multiprocessing": 0}


@pytest.mark.promise("one-owner", "no-false-clean")
@pytest.mark.parametrize("fork", ENDS)
@pytest.mark.parametrize("outcome", ["commits", "fails"])
def test_only_the_parents_saga_lives_on(
    start: Start, world: Client, who: str, in_log: Reader, fork: str, outcome: str
) -> None:
    fails = ["raise"] if outcome == "fails" else []
    said = start("saga", body=["charge", fork, "book", *fails]).hear_all()
    assert {"child": "SagaNotRunning"}.items() <= said[0].items()
    if fork == "fork, raises":
        assert said.pop(1)["raised"] == "SoldOut"
    assert said[1] == {"waited": ENDS[fork]}
    counts = Ledger(world).undo_counts(who)
    if outcome == "commits":
        assert said[2]["status"] == "COMMITTED" and counts == [0, 0]
        assert in_log.types() == ["START", "INTENT", "DONE", "INTENT", "DONE", "COMMITTED"]
    else:
        assert said[2]["raised"] == "SoldOut" and counts == [1, 1]
        assert in_log.state().status is SagaStatus.ROLLED_BACK
    assert in_log.intact()


@pytest.mark.promise("one-owner", "recover-anywhere", "compensate-once")
@pytest.mark.parametrize("child", ["fork, lives", "program, lives"])
def test_a_child_that_outlives_its_parent_does_not_keep_its_saga(
    start: Start, world: Client, who: str, in_log: Reader, recovered: Callable[..., dict[str, Any]], child: str
) -> None:
    parent = start("saga", body=["charge", child, "heed"])
    said = [parent.hear(), parent.hear()]
    pid: int = next(line["pid"] for line in said if "pid" in line)
    assert any(line.get("child") == "SagaNotRunning" for line in said)
    assert recovered()["live"] == ["order-7"]
    parent.kill()
    os.kill(pid, 0)  # it lives
    assert recovered()["recovered"] == ["order-7"]
    ledger = Ledger(world)
    assert ledger.undo_counts(who) == [1] and ledger.undone_once_each(who)
    assert in_log.state().status is SagaStatus.ROLLED_BACK
    os.kill(pid, 0)
    os.kill(pid, signal.SIGKILL)
    assert in_log.intact()
