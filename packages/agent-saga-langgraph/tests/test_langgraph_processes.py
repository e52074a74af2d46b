"""A thread that outlives its process: killed at the worst moments, and resumed by another one."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_saga_core import FileLog, SagaStatus, StepStatus, list_sagas, read_saga, recover
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing.adapters.desk import BOUND, Desk

CHILD = Path(__file__).parent / "langgraph_children.py"


def start(kind: str, verb: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CHILD), kind, verb, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(child: subprocess.Popen[str], line: str | None = None) -> str:
    out, errors = child.communicate(line, timeout=2 * BOUND)
    assert child.returncode == 0, errors
    return out.strip().splitlines()[-1]


def killed(kind: str, directory: Path) -> None:
    child = start(kind, "begin", directory)
    _, errors = child.communicate(timeout=2 * BOUND)
    assert child.returncode == -signal.SIGKILL, errors


def state_in(directory: Path) -> Any:
    with closing(FileLog(directory / "log", create=False)) as log:
        (head,) = list_sagas(log)
        return read_saga(log, head.saga_id)


@pytest.mark.parametrize("kind", ["agent", "by-hand"])
def test_killed_before_the_outcome_is_recorded_and_resumed_elsewhere(kind: str, tmp_path: Path) -> None:
    killed(kind, tmp_path)
    desk = Desk(tmp_path / "desk")
    assert sorted(desk.booked()) == ["a", "b"] and desk.undone() == []
    assert said(start(kind, "resume", tmp_path)) == "done"
    # Whether the call landed cannot be told, so it was undone under its own arguments, and made again.
    assert desk.standing() == ["a", "b"] and desk.undone() == ["b"] and desk.booked().count("a") == 1
    state = state_in(tmp_path)
    assert state.status is SagaStatus.COMMITTED
    assert sorted((step.tool, step.status, step.attempts) for step in state.steps) == [
        ("book", StepStatus.DONE, 1),
        ("hold", StepStatus.DONE, 2),
    ]


def test_a_call_that_cannot_be_settled_is_not_made_again(tmp_path: Path) -> None:
    killed("agent-unknown", tmp_path)
    assert said(start("agent-unknown", "resume", tmp_path)) == "StepUnknown"
    desk = Desk(tmp_path / "desk")
    assert desk.booked() == ["a", "b"] and desk.undone() == ["a"]
    state = state_in(tmp_path)
    assert state.status is SagaStatus.NEEDS_ATTENTION
    assert [step.tool for step in state.report.remaining] == ["hold"]


def test_killed_after_the_outcomes_and_before_the_checkpoint(tmp_path: Path) -> None:
    killed("node", tmp_path)
    assert said(start("node", "resume", tmp_path)) == "done"
    desk = Desk(tmp_path / "desk")
    assert desk.booked() == ["a", "b"] and desk.undone() == []
    state = state_in(tmp_path)
    assert state.status is SagaStatus.COMMITTED and [step.attempts for step in state.steps] == [1, 1]


def test_recovery_leaves_a_killed_run_to_whoever_resumes_its_thread(tmp_path: Path) -> None:
    killed("node", tmp_path)
    desk = Desk(tmp_path / "desk")
    with isolated_registry(), closing(FileLog(tmp_path / "log", create=False)) as log:
        desk.register()
        report = recover(log)
        assert len(report.untouched) == 1 and desk.undone() == []
    assert said(start("node", "resume", tmp_path)) == "done"


def test_two_processes_that_resume_one_thread_are_one(tmp_path: Path) -> None:
    assert said(start("asking", "begin", tmp_path)) == "interrupted"
    first = start("asking", "hold", tmp_path)
    assert first.stdout is not None and first.stdout.readline().strip() == "standing"
    try:
        assert said(start("asking", "answer", tmp_path)) == "SagaBusy"
    finally:
        last = said(first, "go on\n")
    assert last == "done" and Desk(tmp_path / "desk").booked() == ["a"]
    assert state_in(tmp_path).status is SagaStatus.COMMITTED
    assert said(start("asking", "answer", tmp_path)) == "done", "an answer that comes late to a finished thread"
    assert Desk(tmp_path / "desk").booked() == ["a"]
