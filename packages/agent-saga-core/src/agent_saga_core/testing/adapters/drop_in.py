# ruff: noqa: D102 - the name of a test is its sentence
"""A wrapped tool is the framework's own tool: what it shows, takes, gives and copies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_saga_core.errors import BoundaryRequired, DeclarationError, SagaNotRunning
from agent_saga_core.state import SagaStatus, StepStatus
from agent_saga_core.testing.adapters.desk import BOUND, NoSuchItem, echo
from agent_saga_core.testing.adapters.harness import AdapterHarness, Call, Script
from agent_saga_core.testing.adapters.stage import Outcome, Stage, Staged, Stages, caused_by
from agent_saga_core.wrapping import runner_of

__all__ = ["DropIn"]

SECRET = "sk-9f-conformance-4c"


class DropIn(Staged):
    """The tool as an object, and what passes through it."""

    def test_every_deferral_names_a_test(self, harness: AdapterHarness) -> None:
        tests = {name for name in dir(type(self)) if name.startswith("test_")}
        assert set(harness.deferred) <= tests, f"no such test: {sorted(set(harness.deferred) - tests)}"
        assert all(reason.strip() for reason in harness.deferred.values()), "a deferral says why"
        assert harness.hangs <= set(harness.deferred), "a test that is not run is a deferred one"

    @pytest.mark.promise("drop-in")
    def test_the_face_of_a_tool_is_unchanged(self, stages: Stages, harness: AdapterHarness) -> None:
        for stage in stages():
            original = stage.plain("book")
            before = dict(harness.face(original))
            assert before, "a face has fields"
            wrapped = stage.wrap(original)
            after = dict(harness.face(wrapped))
            assert {
                name: after[name] for name in after if name not in before or not _same(before[name], after[name])
            } == {}
            assert before.keys() == after.keys()
            assert isinstance(wrapped, type(original))
            assert harness.shown(wrapped) == harness.shown(original) == {"item"}

    @pytest.mark.promise("drop-in")
    def test_wrapping_leaves_the_original_alone_and_is_done_once(self, stages: Stages, harness: AdapterHarness) -> None:
        for stage in stages():
            original = stage.plain("book")
            before = dict(harness.face(original))
            wrapped = stage.wrap(original)
            assert wrapped is not original and runner_of(original) is None and runner_of(wrapped) is not None
            with pytest.raises(DeclarationError):
                stage.wrap(wrapped)
            with pytest.raises(DeclarationError):
                stage.wrap(original, {"semantics": "COMPENSABLE"})  # an effect, and nothing that undoes it
            assert all(_same(value, harness.face(original)[name]) for name, value in before.items())
            assert runner_of(original) is None
            bare = stage.run([original], Call("book", {"item": "bare"}), saga_id="bare")
            assert bare.finished() and bare.steps == (), "the original has become a tool of sagas"

    @pytest.mark.promise("drop-in")
    def test_what_the_model_hears_and_the_caller_gets_is_unchanged(self, stages: Stages) -> None:
        for stage in stages():
            functions = stage.desk.answering(stage.is_async)
            tools = [stage.harness.tool(fn) for fn in functions]
            turns = [Call(fn.__name__, {"item": "x"}) for fn in functions]
            unwrapped = stage.run(tools, *turns, "all given", saga=False)
            wrapped = [stage.wrap(tool) for tool in tools]
            self._equal(stage, unwrapped, stage.run(wrapped, *turns, "all given"))
            assert len(unwrapped.heard) == len(functions), "the model did not hear of every call"

    @pytest.mark.promise("drop-in")
    def test_results_that_only_this_framework_has_are_unchanged(self, stages: Stages) -> None:
        for stage in stages():
            for number, (tool, args) in enumerate(stage.harness.rich_tools()):
                wrapped = stage.wrap(tool, {"semantics": "READ_ONLY"})
                runner = runner_of(wrapped)
                assert runner is not None
                call = Call(runner.spec.tool, args)
                unwrapped = stage.run([tool], call, saga=False)
                self._equal(stage, unwrapped, stage.run([wrapped], call, saga_id=f"rich {number}"))

    @pytest.mark.promise("drop-in")
    def test_a_failure_is_told_as_without_a_saga(self, stages: Stages) -> None:
        def refuse(item: str) -> None:
            raise NoSuchItem(f"there is no {item}")

        for stage in stages():
            stage.desk.on["book"] = refuse
            original = stage.plain("book")
            unwrapped = stage.run([original], Call("book", {"item": "x"}), saga=False)
            wrapped = stage.run([stage.wrap(original)], Call("book", {"item": "x"}))
            assert wrapped.heard == unwrapped.heard
            assert (unwrapped.error is None) == stage.harness.swallows
            assert type(wrapped.error) is type(unwrapped.error)
            if unwrapped.error is not None:
                assert caused_by(wrapped.error, NoSuchItem) == caused_by(unwrapped.error, NoSuchItem)
                assert wrapped.status is SagaStatus.ROLLED_BACK
            else:
                # Undone from its arguments, nothing can be left of it, and the saga may go on.
                assert wrapped.status is SagaStatus.COMMITTED

    def _equal(self, stage: Stage, unwrapped: Outcome, wrapped: Outcome) -> None:
        one, other = unwrapped.finished(), wrapped.finished()
        assert wrapped.heard == unwrapped.heard
        assert other.text == one.text and type(other.raw) is type(one.raw)
        results = [list(stage.harness.results(ran)) for ran in (one, other)]
        assert results[1] == results[0] and list(map(type, results[1])) == list(map(type, results[0]))
        assert wrapped.status is SagaStatus.COMMITTED
        assert all(step.status is StepStatus.DONE for step in wrapped.steps) and wrapped.steps

    @pytest.mark.promise("drop-in", "secrets-stay-out")
    def test_injected_arguments_are_injected_and_not_logged(self, stages: Stages, harness: AdapterHarness) -> None:
        seen: list[object] = []
        original = harness.injected(seen.append)
        for stage in stages(lambda entry, is_async: not is_async or not harness.runs(entry, False)):
            seen.clear()
            wrapped = stage.wrap(original)
            assert harness.shown(wrapped) == harness.shown(original) == {"item"}
            outcome = stage.run([wrapped], Call("injected", {"item": "a"}))
            assert outcome.finished() and outcome.status is SagaStatus.COMMITTED
            assert len(seen) == 1 and seen[0] is not None
            (intent,) = stage.intents()
            assert intent["args"] == {"item": "a"}

    @pytest.mark.promise("secrets-stay-out")
    def test_arguments_are_recorded_by_name_and_secrets_are_not(self, stages: Stages) -> None:
        for stage in stages():
            charge = stage.harness.tool(stage.desk.charging(stage.is_async))
            outcome = stage.run([stage.wrap(charge)], Call("charge", {"item": "a", "api_key": SECRET}))
            assert outcome.finished() and outcome.status is SagaStatus.COMMITTED
            assert stage.desk.booked() == [f"a 7 {SECRET}"], "the tool gets the plain value, and the default"
            (intent,) = stage.intents()
            assert (intent["args"]["item"], intent["args"]["amount"]) == ("a", 7)
            assert set(intent["args"]) == {"item", "amount", "api_key"}
            stage.close()
            holding = [path.name for path in stage.directory.glob("log/**/*") if SECRET.encode() in _bytes(path)]
            assert holding == []

    @pytest.mark.promise("drop-in")
    def test_a_tool_that_asks_for_the_idempotency_key_gets_it(self, stages: Stages, harness: AdapterHarness) -> None:
        for stage in stages():
            order = harness.tool(stage.desk.keyed(stage.is_async))
            tool = stage.wrap(order)
            assert harness.shown(tool) == {"item"}, "the key is ours to give: a model is not asked for it"
            outcome = stage.run([tool], Call("order", {"item": "a"}))
            assert outcome.finished()
            (step,) = outcome.steps
            assert stage.desk.booked() == [step.forward_key]
            forged = stage.run([tool], Call("order", {"item": "a", "idempotency_key": "forged"}), saga_id="forged")
            assert "forged" not in stage.desk.booked()
            assert [step.forward_key for step in forged.steps] == stage.desk.booked()[1:], "replaced, or refused"
            outside, error = stage.call_straight(tool, item="b")
            assert error is None, (outside, error)
            assert len(set(stage.desk.booked())) == len(stage.desk.booked()) and all(stage.desk.booked())

    @pytest.mark.promise("drop-in")
    def test_outside_of_a_saga_a_wrapped_tool_calls_straight_through(
        self, stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AGENT_SAGA_LOG", f"file:{tmp_path}/nobody's")
        monkeypatch.chdir(tmp_path)
        for stage in stages():
            original = stage.plain("book")
            wrapped = stage.wrap(original)
            one = stage.run([original], Call("book", {"item": "xxx"}), saga=False)
            other = stage.run([wrapped], Call("book", {"item": "yyy"}), saga=False)
            assert one.finished().text == other.finished().text
            assert [text.replace("yyy", "xxx") for text in other.heard] == one.heard
            _, error = stage.call_straight(wrapped, item="zzz")
            assert error is None
            assert stage.desk.standing() == ["xxx", "yyy", "zzz"]
        assert not (tmp_path / "nobody's").exists() and not (tmp_path / ".agent-saga").exists()

    @pytest.mark.promise("drop-in", "no-unprotected-call")
    def test_require_saga_refuses_outside_of_one(self, stages: Stages) -> None:
        for stage in stages():
            tool = stage.tool("book", require_saga=True)
            outcome = stage.run([tool], Call("book", {"item": "a"}), saga=False)
            assert caused_by(outcome.error, SagaNotRunning) or "saga" in " ".join(outcome.heard)
            text, error = stage.call_straight(tool, item="b")
            assert caused_by(error, SagaNotRunning) or "saga" in str(text)
            assert stage.desk.booked() == []
            assert stage.run([tool], Call("book", {"item": "c"})).status is SagaStatus.COMMITTED
            assert stage.desk.booked() == ["c"]

    @pytest.mark.promise("no-unprotected-call")
    def test_a_covered_tool_is_never_called_unprotected(self, stages: Stages) -> None:
        for stage in stages():
            inner = stage.tool("inner")
            told: list[tuple[Any, Exception | None]] = []

            def stray(item: str, stage: Stage = stage, inner: Any = inner, told: list[Any] = told) -> None:
                thread = threading.Thread(target=lambda: told.append(stage.call_straight(inner, item="stray")))
                thread.start()  # with an empty context: nothing tells it of a saga
                thread.join(BOUND)

            stage.desk.on["outer"] = stray
            outcome = stage.run([stage.tool("outer"), inner], Call("outer", {"item": "a"}))
            ((text, error),) = told
            if "stray" in stage.desk.booked():  # a binding may tell which saga it is: then it is a step of that one
                assert [step.tool for step in outcome.steps] == ["outer", "inner"]
            else:
                assert caused_by(error, BoundaryRequired) or "saga" in str(text), (text, error)
                assert [step.tool for step in outcome.steps] == ["outer"]
                assert stage.desk.standing() == ["a"]
            # It was covered for the time of the run, not for ever.
            assert stage.call_straight(inner, item="later")[1] is None
            assert "later" in stage.desk.standing() and len(stage.seen().steps) == len(outcome.steps)

    @pytest.mark.promise("drop-in")
    def test_copies_stay_wrapped_where_the_original_can_be_copied(
        self, stages: Stages, harness: AdapterHarness
    ) -> None:
        for stage in stages(lambda entry, is_async: not is_async):
            original = harness.tool(echo)
            wrapped = stage.wrap(original, {"semantics": "READ_ONLY"})
            for number, (way, copied) in enumerate(harness.copies().items()):
                if not _survives(copied, original):
                    continue
                other = copied(wrapped)
                assert runner_of(other) is not None, f"{way} gives a tool that is not wrapped"
                outcome = stage.run([other], Call("echo", {"text": "x"}), saga_id=f"copied {number}")
                assert outcome.finished() and outcome.statuses == [("echo", StepStatus.DONE)], way
                assert {k for k, v in harness.face(wrapped).items() if not _same(v, harness.face(other)[k])} == {
                    k for k, v in harness.face(original).items() if not _same(v, harness.face(copied(original))[k])
                }, way

    def test_coverage_of_an_agent_names_what_is_not_wrapped(self, stages: Stages, harness: AdapterHarness) -> None:
        for stage in stages():
            book, pay, bare = stage.tool("book"), stage.tool("pay"), stage.plain("bare")
            whole = harness.coverage(harness.agent([book, pay], Script(["done"])))
            assert {"book", "pay"} <= {entry.tool for entry in whole.covered}
            whole.assert_fully_covered(acknowledge=harness.acknowledge)
            partly = harness.coverage(harness.agent([book, bare], Script(["done"])))
            assert [entry.tool for entry in partly.uncovered] == ["bare"]
            with pytest.raises(AssertionError, match="bare"):
                partly.assert_fully_covered(acknowledge=harness.acknowledge)


def _same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and one == other)


def _survives(copied: Callable[[Any], Any], original: Any) -> bool:
    try:
        copied(original)
    except Exception:
        return False
    return True


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
