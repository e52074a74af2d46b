# ruff: noqa: D102 - the name of a test is its sentence
"""However a run ends, nothing of it is left unsaid: failures, refusals, cancellation, timeouts, death."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import pytest

from agent_saga_core.errors import RollbackIncomplete
from agent_saga_core.log.file import FileLog
from agent_saga_core.recovery import recover
from agent_saga_core.state import SagaStatus, StepStatus
from agent_saga_core.testing.adapters.desk import BOUND, BY_ITEM, BY_RESULT, NoSuchItem
from agent_saga_core.testing.adapters.harness import AdapterHarness, Call, Script
from agent_saga_core.testing.adapters.stage import Stage, Staged, Stages, caused_by
from agent_saga_core.testing.clock import ManualClock
from agent_saga_core.wrapping import REFUSALS

__all__ = ["Endings"]

TIMEOUT = 10.0
"""Seconds of manual time."""
IMPORTED = 50.0
"""Seconds of real time within which another process has imported the framework and run an agent."""


class Endings(Staged):
    """The end of a run."""

    @pytest.mark.promise("no-silent-commit", "no-false-clean")
    def test_an_unsettled_failure_ends_in_a_rollback_whatever_the_model_says(self, stages: Stages) -> None:
        for stage in stages():
            stage.desk.then["pay"] = _fail  # its effect stands, and nobody has its id
            tools = [stage.tool("book"), stage.tool("pay", BY_RESULT)]
            calls = [Call(name, {"item": item}) for name, item in (("book", "a"), ("pay", "b"), ("book", "c"))]
            outcome = stage.run(tools, *calls, "all is booked")
            assert caused_by(outcome.error, RollbackIncomplete)
            assert outcome.status is SagaStatus.NEEDS_ATTENTION
            assert outcome.state is not None and outcome.state.report is not None
            assert [step.tool for step in outcome.state.report.remaining] == ["pay"]
            assert stage.desk.booked() == ["a", "b"], "a call of a saga that cannot commit any more was made"
            assert stage.desk.standing() == ["b"]
            if stage.harness.swallows:
                refusal = outcome.heard[2].lower()
                assert "rolled back" in refusal and "traceback" not in refusal, "the model is told to stop"
            else:
                assert caused_by(outcome.error, NoSuchItem)

    @pytest.mark.promise("no-silent-commit")
    def test_a_model_that_never_stops_is_stopped(self, stages: Stages) -> None:
        def calls() -> Iterator[Call]:
            yield Call("pay", {"item": "a"})
            for number in range(100):
                yield Call("book", {"item": f"again {number}"})

        for stage in stages():
            stage.desk.then["pay"] = _fail
            outcome = stage.play([stage.tool("book"), stage.tool("pay", BY_RESULT)], Script(calls()))
            assert outcome.error is not None and outcome.status is SagaStatus.NEEDS_ATTENTION
            assert stage.desk.booked() == ["a"]
            # One turn for the failure, one for each refusal, and one for a framework that asks before it stops.
            assert outcome.script.played <= 1 + REFUSALS + 1

    @pytest.mark.promise("closed-means-closed", "no-silent-commit")
    def test_the_sibling_of_a_failed_call_is_undone(self, stages: Stages) -> None:
        for stage in stages():
            failed = threading.Event()

            def fail(item: str, failed: threading.Event = failed) -> None:
                failed.set()
                raise NoSuchItem(item)

            def late(item: str, failed: threading.Event = failed) -> None:
                assert failed.wait(BOUND)

            stage.desk.then["pay"], stage.desk.on["book"] = fail, late
            tools = [stage.tool("pay", BY_RESULT), stage.tool("book", BY_RESULT)]
            outcome = stage.run(tools, (Call("pay", {"item": "a"}), Call("book", {"item": "b"})), "all is booked")
            assert caused_by(outcome.error, RollbackIncomplete) and outcome.status is SagaStatus.NEEDS_ATTENTION
            assert outcome.state is not None and outcome.state.report is not None
            # A sibling that was cancelled on its way is UNKNOWN without an answer, and then it is named as well.
            named = {step.tool for step in outcome.state.report.remaining}
            assert named in ({"pay"}, {"pay", "book"})
            assert "b" not in stage.desk.standing() or "book" in named
            assert stage.desk.undone() in ([], ["b"]) and "a" in stage.desk.standing()

    @pytest.mark.promise("lifo")
    def test_calls_are_undone_in_reverse_order(self, stages: Stages) -> None:
        for stage in stages():
            stage.desk.then["pay"] = _fail
            tools = [stage.tool("book", BY_RESULT), stage.tool("pay", BY_RESULT)]
            outcome = stage.run(tools, *(Call("book", {"item": item}) for item in "abc"), Call("pay", {"item": "d"}))
            assert outcome.error is not None
            assert stage.desk.undone() == ["c", "b", "a"] and stage.desk.standing() == ["d"]
            assert [status for tool, status in outcome.statuses if tool == "book"] == [StepStatus.COMPENSATED] * 3

    @pytest.mark.promise("shielded", "in-flight-is-unknown")
    def test_a_cancelled_run_is_rolled_back_and_stays_cancelled(self, stages: Stages, harness: AdapterHarness) -> None:
        def can(entry: Any, is_async: bool) -> bool:
            return bool(entry.is_async) and (is_async or not harness.sync_tools_block)

        for stage in stages(can):
            asyncio.run(_cancel_in_mid_call(stage))
            state = stage.seen()
            assert state.status is SagaStatus.ROLLED_BACK
            assert [(step.tool, step.status) for step in state.steps] == [
                ("book", StepStatus.COMPENSATED),
                ("hold", StepStatus.COMPENSATED),
            ]
            assert stage.desk.booked() == ["a", "b"] and stage.desk.standing() == []

    @pytest.mark.promise("in-flight-is-unknown", "no-false-clean")
    def test_a_call_that_takes_too_long_is_undone(self, stages: Stages, harness: AdapterHarness) -> None:
        def can(entry: Any, is_async: bool) -> bool:
            return is_async or not entry.is_async or not harness.sync_tools_block

        for stage in stages(can):
            clock, standing, let_go = ManualClock(), threading.Event(), threading.Event()
            stage.close()
            stage.log = FileLog(stage.directory / "log", clock=clock)

            def hold(item: str, standing: threading.Event = standing, let_go: threading.Event = let_go) -> None:
                standing.set()
                let_go.wait(BOUND)

            def pass_time(stage: Stage = stage, clock: ManualClock = clock, at: Any = (standing, let_go)) -> None:
                try:
                    assert at[0].wait(BOUND)
                    clock.wait_until_waiting(due_in=TIMEOUT / 2)
                    clock.advance(TIMEOUT)
                    if not stage.is_async:  # it cannot be stopped: the saga's end is what waits for it now
                        clock.wait_until_waiting(due_in=TIMEOUT / 2)
                finally:
                    at[1].set()

            stage.desk.then["hold"] = hold
            time = threading.Thread(target=pass_time)
            time.start()
            outcome = stage.run([stage.tool("hold", timeout=TIMEOUT)], Call("hold", {"item": "a"}), "never mind")
            time.join(BOUND)
            assert not time.is_alive()
            assert stage.desk.booked() == ["a"] and stage.desk.standing() == []
            assert outcome.statuses == [("hold", StepStatus.COMPENSATED)]
            assert outcome.status in (SagaStatus.COMMITTED, SagaStatus.ROLLED_BACK)
            if outcome.status is SagaStatus.COMMITTED:
                assert outcome.heard and "a/1" not in outcome.heard[0], "told of a success that was undone"
            if not stage.harness.swallows:
                assert caused_by(outcome.error, TimeoutError)

    @pytest.mark.promise("no-silent-commit")
    def test_a_stream_that_is_left_early_is_rolled_back(self, stages: Stages, harness: AdapterHarness) -> None:
        if not any(entry.streams for entry in harness.entries):
            pytest.skip("no entry of this framework streams")
        for stage in stages(lambda entry, is_async: entry.streams):
            script = Script([Call("book", {"item": "a"}), Call("pay", {"item": "b"}), "all is booked"])
            tools = [stage.tool("book", BY_RESULT), stage.tool("pay")]
            harness.leave(stage.entry, tools, script, log=stage.log, saga_id="s")
            assert "a" in stage.desk.booked() and stage.desk.standing() == []
            assert stage.seen().status is SagaStatus.ROLLED_BACK

    @pytest.mark.promise("recover-anywhere", "one-owner")
    def test_a_run_killed_in_mid_call_is_undone_by_another_process(self, stages: Stages) -> None:
        kinds: set[bool] = set()
        for stage in stages():
            if stage.is_async in kinds:
                continue
            kinds.add(stage.is_async)
            with _child(stage) as child:
                try:
                    assert child.stdout is not None
                    assert _first_line(child.stdout) == b"standing\n", (stage.directory / "stderr").read_text(
                        "utf-8", errors="replace"
                    )
                    assert stage.desk.standing() == ["a", "b"]
                    assert stage.log.is_live("s") and recover(stage.log).live == ("s",), "it lives, and is left alone"
                finally:
                    child.send_signal(signal.SIGKILL)
            assert stage.seen().status is SagaStatus.RUNNING
            ran = subprocess.run(
                [sys.executable, "-m", "agent_saga_core.testing.adapters.child", "recover", str(stage.directory)],
                capture_output=True, text=True, timeout=BOUND, check=False,
            )  # fmt: skip
            assert ran.returncode == 0, ran.stderr
            assert stage.desk.standing() == [] and stage.desk.undone() == ["b", "a"]
            state = stage.seen()
            assert state.status is SagaStatus.ROLLED_BACK
            assert state.report is not None and state.report.clean and state.report.remaining == ()


def _first_line(stream: IO[bytes]) -> bytes | None:
    """The first line, once it is there; None if nothing comes."""
    lines: list[bytes] = []
    reader = threading.Thread(target=lambda: lines.append(stream.readline()))
    reader.start()
    reader.join(IMPORTED)
    return lines[0] if lines else None


def _fail(item: str) -> None:
    raise NoSuchItem(f"there is no {item}")


async def _cancel_in_mid_call(stage: Stage) -> None:
    """Cancel a run while its second call is inside of a tool whose effect stands."""
    standing, let_go = threading.Event(), threading.Event()

    def hold(item: str) -> None:
        standing.set()
        let_go.wait(BOUND)

    stage.desk.then["hold"] = hold
    script = Script([Call("book", {"item": "a"}), Call("hold", {"item": "b"}), "all is booked"])
    tools = [stage.tool("book", BY_RESULT), stage.tool("hold", BY_ITEM)]
    task = asyncio.create_task(stage.harness.arun(stage.entry, tools, script, log=stage.log, saga_id="s"))
    try:
        await asyncio.wait({task, arrived := asyncio.create_task(asyncio.to_thread(standing.wait, BOUND))},
                           return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        assert standing.is_set(), task
        await arrived
        task.cancel()
        if not stage.is_async or not stage.harness.cancels_async_tools:
            let_go.set()  # it runs on by itself, and is waited for
        await asyncio.wait({task}, timeout=BOUND)
        assert task.done(), "the run did not end after its cancellation"
        assert task.cancelled(), "the cancellation did not come out as itself"
        assert let_go.is_set() or stage.is_async
    finally:
        let_go.set()
        standing.set()


def _child(stage: Stage) -> subprocess.Popen[bytes]:
    """Another process that runs the harness's agent on the stage, and says a line when its effect stands."""
    kind = type(stage.harness)
    file = cast(str, sys.modules[kind.__module__].__file__)
    with open(stage.directory / "stderr", "wb") as errors:
        return subprocess.Popen(
            [
                sys.executable, "-m", "agent_saga_core.testing.adapters.child", "run", str(stage.directory),
                str(Path(file).resolve()), kind.__qualname__, stage.entry.name, "async" if stage.is_async else "sync",
            ],
            stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL,
        )  # fmt: skip
