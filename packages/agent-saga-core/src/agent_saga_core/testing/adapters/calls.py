# ruff: noqa: D102 - the name of a test is its sentence
"""Each call of the model is one step: recorded before it is made, told from every other, made once."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing, suppress
from typing import Any

import pytest

from agent_saga_core.errors import LogUnavailable, NotApplied, SagaAborted
from agent_saga_core.log.file import FileLog
from agent_saga_core.saga import saga_scope
from agent_saga_core.state import SagaStatus, StepStatus
from agent_saga_core.testing.adapters.desk import BOUND, BY_RESULT
from agent_saga_core.testing.adapters.harness import AdapterHarness, Call, Script
from agent_saga_core.testing.adapters.stage import Outcome, Stage, Staged, Stages, caused_by
from agent_saga_core.testing.faulty import Fault, FaultyLog

__all__ = ["Calls"]


class Calls(Staged):
    """Steps: identity, order, replay."""

    @pytest.mark.promise("any-thread-any-loop")
    def test_sync_and_async_tools_are_steps_through_every_entry(self, stages: Stages) -> None:
        for stage in stages():
            tools = [stage.tool("book", BY_RESULT), stage.tool("pay")]
            turns = (Call("book", {"item": "a"}), Call("pay", {"item": "b"}), "all is booked")
            outcome = stage.run(tools, *turns)
            assert "all is booked" in outcome.finished().text
            assert outcome.status is SagaStatus.COMMITTED
            assert outcome.statuses == [("book", StepStatus.DONE), ("pay", StepStatus.DONE)]
            assert stage.desk.booked() == ["a", "b"] and stage.desk.undone() == []
            assert len(outcome.heard) == 2 and "a/1" in outcome.heard[0] and "b/1" in outcome.heard[1]

    @pytest.mark.promise("recover-anywhere", "replay-not-rerun")
    def test_what_is_recorded_is_what_the_function_returned(self, stages: Stages) -> None:
        for stage in stages():
            assert stage.run([stage.tool("book", BY_RESULT)], Call("book", {"item": "a"})).finished()
            done = [record.data for record in stage.log.read("s") if record.type == "DONE"]
            assert [data["result"] for data in done] == [{"id": "a/1", "item": "a"}], (
                "not what the framework makes of it"
            )
            assert ["undo_error" in data for data in done] == [False]

    @pytest.mark.promise("intent-first")
    def test_the_intent_is_in_the_log_before_the_effect(self, stages: Stages) -> None:
        for stage in stages():
            found: list[list[tuple[str, Any]]] = []

            def look(item: str, stage: Stage = stage, found: list[Any] = found) -> None:
                with closing(FileLog(stage.directory / "log", create=False)) as reader:
                    found.append([(record.type, record.data.get("args")) for record in reader.read("s")])

            stage.desk.on["book"] = look
            assert stage.run([stage.tool("book")], Call("book", {"item": "a"})).finished()
            assert [records[-1:] for records in found] == [[("INTENT", {"item": "a"})]]

    @pytest.mark.promise("intent-first")
    def test_what_cannot_be_logged_does_not_happen(self, stages: Stages) -> None:
        for stage in stages():
            log = FaultyLog(stage.log, [Fault(on="flush", record="INTENT", nth=2)])
            tools = [stage.tool("book"), stage.tool("pay")]
            outcome = stage.run(tools, Call("book", {"item": "a"}), Call("pay", {"item": "b"}), log=log)
            assert caused_by(outcome.error, LogUnavailable)
            assert stage.desk.booked() == ["a"]

    @pytest.mark.promise("replay-not-rerun", "any-thread-any-loop")
    def test_parallel_calls_are_steps_of_their_own_at_the_same_time(self, stages: Stages) -> None:
        for stage in stages():
            together = stage.entry.is_async and stage.is_async and stage.harness.parallel
            inside, all_inside = list[str](), threading.Event()

            def meet(item: str, inside: list[str] = inside, all_inside: threading.Event = all_inside) -> None:
                inside.append(item)
                if len(inside) == 3:
                    all_inside.set()
                assert all_inside.wait(BOUND), "one call of a turn was made to wait for another"

            if together:
                stage.desk.on["book"] = meet
            outcome = stage.run([stage.tool("book", BY_RESULT)], tuple(Call("book", {"item": item}) for item in "abc"))
            assert outcome.finished() and outcome.status is SagaStatus.COMMITTED
            assert outcome.statuses == [("book", StepStatus.DONE)] * 3
            assert stage.desk.standing() == ["a", "b", "c"]
            assert sorted(intent["args"]["item"] for intent in stage.intents()) == ["a", "b", "c"]
            assert len({step.forward_key for step in outcome.steps}) == 3
            assert [item in text for item, text in zip("abc", outcome.heard, strict=True)] == [True] * 3

    @pytest.mark.promise("replay-not-rerun")
    def test_two_intended_identical_calls_both_run(self, stages: Stages) -> None:
        for stage in stages():
            call = Call("book", {"item": "a"})
            outcome = stage.run([stage.tool("book", BY_RESULT)], (call, call), call)
            assert outcome.finished() and outcome.status is SagaStatus.COMMITTED
            assert stage.desk.standing() == ["a"] * 3 and len(outcome.steps) == 3
            assert [number for text in outcome.heard for number in "123" if f"a/{number}" in text] in (
                ["1", "2", "3"],
                ["2", "1", "3"],  # the two of one turn, in either order
            )

    @pytest.mark.promise("replay-not-rerun")
    def test_call_ids_that_begin_anew_in_each_message_conflict_with_nothing(self, stages: Stages) -> None:
        for stage in stages():
            turns = [Call("book", {"item": item}, id="call_0") for item in "ab"]
            outcome = stage.run([stage.tool("book", BY_RESULT)], *turns)
            assert outcome.finished() and outcome.status is SagaStatus.COMMITTED
            assert stage.desk.standing() == ["a", "b"] and len(outcome.steps) == 2

    @pytest.mark.promise("replay-not-rerun")
    def test_call_ids_that_begin_anew_in_each_message_hide_no_call(self, stages: Stages) -> None:
        for stage in stages():
            turns = [Call("book", {"item": "a"}, id="call_0")] * 2
            outcome = stage.run([stage.tool("book", BY_RESULT)], *turns)
            assert outcome.finished() and outcome.status is SagaStatus.COMMITTED
            assert stage.desk.standing() == ["a", "a"] and len(outcome.steps) == 2

    @pytest.mark.promise("replay-not-rerun")
    def test_a_committed_run_made_again_gives_back_what_is_recorded(self, stages: Stages) -> None:
        for stage in stages():
            tools = [stage.tool("book", BY_RESULT, key="args.item")]
            first = stage.run(tools, Call("book", {"item": "a"}), "booked")
            again = stage.run(tools, Call("book", {"item": "a"}), "booked")
            assert again.finished().text == first.finished().text and again.heard == first.heard
            assert again.status is SagaStatus.COMMITTED and len(again.steps) == 1
            assert stage.desk.booked() == ["a"]

    @pytest.mark.promise("replay-not-rerun", "closed-means-closed")
    def test_a_committed_run_made_again_without_keys_reruns_nothing(self, stages: Stages) -> None:
        for stage in stages():
            tools = [stage.tool("book", BY_RESULT)]
            assert stage.run(tools, Call("book", {"item": "a"})).finished()
            again = stage.run(tools, Call("book", {"item": "a"}))
            assert stage.desk.booked() == ["a"], "replayed or refused, and never made again"
            assert again.status is SagaStatus.COMMITTED and len(again.steps) == 1

    @pytest.mark.promise("no-false-clean")
    def test_a_call_that_did_nothing_may_be_made_again(self, stages: Stages) -> None:
        for stage in stages():
            left = ["nothing was booked"]

            def refuse(item: str, left: list[str] = left) -> None:
                if left:
                    raise NotApplied(left.pop())

            stage.desk.on["book"] = refuse
            calls = [Call("book", {"item": "a"})] * 2
            outcome = stage.run([stage.tool("book", BY_RESULT)], *calls)
            assert outcome.steps[0].history[0].status is StepStatus.NOT_APPLIED
            assert stage.desk.undone() == [], "nothing had happened, so there was nothing to undo"
            if stage.harness.swallows:
                assert outcome.finished() and outcome.status is SagaStatus.COMMITTED
                assert stage.desk.standing() == ["a"] and outcome.steps[-1].status is StepStatus.DONE
                assert "nothing was booked" in outcome.heard[0] and "a/1" in outcome.heard[1]
            else:
                assert caused_by(outcome.error, NotApplied) and outcome.status is SagaStatus.ROLLED_BACK
                assert stage.desk.booked() == []

    @pytest.mark.promise("replay-not-rerun")
    def test_a_call_that_the_framework_tries_again_is_one_step(self, stages: Stages, harness: AdapterHarness) -> None:
        retrying = harness.retrying
        for stage in stages(lambda entry, is_async: not is_async):
            stage.entry = retrying
            left = ["nothing was booked"]

            def refuse(item: str, left: list[str] = left) -> None:
                if left:
                    raise NotApplied(left.pop())

            stage.desk.on["book"] = refuse
            outcome = stage.run([stage.tool("book", BY_RESULT)], Call("book", {"item": "a"}))
            assert outcome.finished() and outcome.status is SagaStatus.COMMITTED and not left
            assert outcome.statuses == [("book", StepStatus.DONE)]
            assert outcome.steps[0].attempts == 2
            assert stage.desk.standing() == ["a"]
            break

    @pytest.mark.promise("replay-not-rerun")
    def test_a_paused_run_is_suspended_and_goes_on_where_it_was(self, stages: Stages, harness: AdapterHarness) -> None:
        for stage in stages():
            tools, paused, outcome = _paused(stage, harness)
            assert outcome.status is SagaStatus.SUSPENDED
            assert stage.desk.booked() == ["a"], "the call that waits for a yes was made"
            assert [status for tool, status in outcome.statuses if tool == "book"] == [StepStatus.DONE]
            ran = harness.resume(paused, tools, outcome.script, log=stage.log)
            assert "all is booked" in ran.text
            _is_booked(stage)
            with suppress(Exception):  # an answer that comes twice may be refused; it has no effect
                harness.resume(paused, tools, outcome.script, log=stage.log)
            _is_booked(stage)
            break

    @pytest.mark.promise("replay-not-rerun")
    def test_a_person_may_change_the_arguments_of_a_paused_call(self, stages: Stages, harness: AdapterHarness) -> None:
        for stage in stages():
            tools, paused, outcome = _paused(stage, harness)
            ran = harness.resume(paused, tools, outcome.script, args={"item": "changed"}, log=stage.log)
            assert "all is booked" in ran.text
            _is_booked(stage, "changed")
            assert stage.intents()[-1]["args"] == {"item": "changed"}
            break

    @pytest.mark.promise("closed-means-closed")
    def test_two_sagas_at_once_never_mix(self, stages: Stages) -> None:
        for stage in stages():
            inside, other_over = threading.Event(), threading.Event()

            def hold(item: str, inside: threading.Event = inside, other_over: threading.Event = other_over) -> None:
                if item == "one":
                    inside.set()
                    assert other_over.wait(BOUND)

            stage.desk.on["book"] = hold
            tools = [stage.tool("book", BY_RESULT), stage.tool("pay", BY_RESULT)]
            outcomes: list[Outcome] = []

            def run(saga_id: str, stage: Stage = stage, tools: list[Any] = tools, to: list[Any] = outcomes) -> None:
                turns = (Call("book", {"item": saga_id}), Call("pay", {"item": saga_id}))
                to.append(stage.run(tools, *turns, saga_id=saga_id))

            first = threading.Thread(target=run, args=("one",))
            first.start()
            try:
                assert inside.wait(BOUND), "the first run never came to its tool"
                run("two")  # begins and ends while the first is inside of a tool
            finally:
                other_over.set()
                first.join(BOUND)
            assert not first.is_alive()
            for outcome, saga_id in zip(outcomes, ("two", "one"), strict=True):
                recorded = [intent["args"]["item"] for intent in stage.intents(saga_id)] if outcome.state else []
                assert recorded == [saga_id] * len(recorded), "a step of the other saga"
                assert stage.desk.booked().count(saga_id) == len(recorded), "a call that is nobody's step"
                if stage.harness.shares_tools:
                    assert outcome.finished() and outcome.status is SagaStatus.COMMITTED and len(recorded) == 2
            if not stage.harness.shares_tools:
                assert len(stage.desk.booked()) < 4, "nothing was refused: say shares_tools = True"

    @pytest.mark.promise("closed-means-closed", "no-silent-commit")
    def test_a_run_inside_of_a_saga_ends_with_that_saga(self, stages: Stages) -> None:
        for stage in stages():
            script = Script([Call("book", {"item": "a"}), "all is booked"])
            tools = [stage.tool("book", BY_RESULT)]
            with pytest.raises(SagaAborted):
                asyncio.run(_joined(stage, tools, script)) if stage.entry.is_async else _join(stage, tools, script)
            assert len(script.heard) == 1 and "a/1" in script.heard[0]
            assert stage.desk.booked() == ["a"] and stage.desk.standing() == []
            assert stage.seen("around").status is SagaStatus.ROLLED_BACK


def _join(stage: Stage, tools: list[Any], script: Script) -> None:
    with saga_scope("around", log=stage.log) as saga:
        stage.harness.run(stage.entry, tools, script)
        assert stage.desk.standing() == ["a"], "undone before the end of the saga around it"
        saga.abort("changed our mind")


async def _joined(stage: Stage, tools: list[Any], script: Script) -> None:
    async with saga_scope("around", log=stage.log) as saga:
        await stage.harness.arun(stage.entry, tools, script)
        assert stage.desk.standing() == ["a"], "undone before the end of the saga around it"
        saga.abort("changed our mind")


def _paused(stage: Stage, harness: AdapterHarness) -> tuple[list[Any], Any, Outcome]:
    """`book` is done, and the run has paused at `pay`."""
    pay = harness.tool(stage.desk.function("pay", stage.is_async), pauses=True)
    tools = [stage.tool("book", BY_RESULT), stage.wrap(pay, BY_RESULT)]
    script = Script([Call("book", {"item": "a"}), Call("pay", {"item": "b"}), "all is booked"])
    paused = harness.pause(tools, script, log=stage.log, saga_id="s")
    return tools, paused, stage.outcome(script)


def _is_booked(stage: Stage, second: str = "b") -> None:
    """Both calls were made once, and the saga has committed."""
    assert stage.desk.booked() == ["a", second] and stage.desk.undone() == []
    done = stage.seen()
    assert done.status is SagaStatus.COMMITTED
    assert [(step.tool, step.status) for step in done.steps] == [("book", StepStatus.DONE), ("pay", StepStatus.DONE)]
