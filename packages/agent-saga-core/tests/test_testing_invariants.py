"""The search finds nothing in the engine, and finds the fault where one is put in."""

from __future__ import annotations

import itertools

import pytest

from agent_saga_core.declare import ActionSemantics
from agent_saga_core.engine import compensate, finish, settle, step
from agent_saga_core.records import RecordType
from agent_saga_core.registry import compensator_named
from agent_saga_core.state import SagaFold
from agent_saga_core.testing import verify_invariants


def test_the_invariants_hold_and_the_bound_and_the_count_are_printed(capsys):
    result = verify_invariants(max_steps=2)
    assert result.hold, str(result)
    assert result.runs > 10_000
    said = capsys.readouterr().out
    assert said == f"{result}\n" and "bound: sagas of 1 to 2 steps" in said and str(result.runs) in said


def test_nothing_is_left_registered_and_quiet_is_quiet(capsys, monkeypatch):
    monkeypatch.setattr(step, "in_transit", lambda error, around: False)
    verify_invariants(max_steps=1, quiet=True)
    assert compensator_named("invariants.refund") is None
    assert capsys.readouterr().out == ""


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="counts from 1"):
        verify_invariants(max_steps=0)


def _no_intent(monkeypatch):
    monkeypatch.setattr(ActionSemantics, "durable", property(lambda self: False))


def _nothing_is_in_transit(monkeypatch):
    monkeypatch.setattr(step, "in_transit", lambda error, around: False)


def _order_of_doing(monkeypatch):
    real = SagaFold.open_attempts
    monkeypatch.setattr(SagaFold, "open_attempts", lambda self, scope="": real(self, scope)[::-1])


def _commit_anyhow(monkeypatch):
    def commit(run):
        run.over = True
        run.append([(RecordType.COMMITTED, {})])
        return [], run.fold.report()

    monkeypatch.setattr(finish, "_commit", commit)


def _one_key_for_all_attempts(monkeypatch):
    real = step.derive_key
    monkeypatch.setattr(
        step, "derive_key", lambda nonce, identity, attempt, direction: real(nonce, identity, 1, direction)
    )


def _a_new_key_for_every_try(monkeypatch):
    real, count = compensate._starting, itertools.count()

    def starting(*args):
        [(kind, data)], answer = real(*args)
        return [(kind, {**data, "key": f"{data['key']}-{next(count)}"})], answer

    monkeypatch.setattr(compensate, "_starting", starting)


def _forget_what_lands_late(monkeypatch):
    def ended(run, tokens, *_):
        run.running.pop(tokens[0], None)
        return [], None

    monkeypatch.setattr(step, "_ended_late", ended)
    monkeypatch.setattr(settle.Run, "is_running", lambda self, number, attempt: False)
    monkeypatch.setattr(step, "in_transit", lambda error, around: False)


def _steps_after_the_end(monkeypatch):
    real = step._closed
    monkeypatch.setattr(step, "_closed", lambda run, scope: real(run, scope) if run.over else None)


@pytest.mark.parametrize(
    ("spoil", "promise"),
    [
        (_no_intent, "intent-first"),
        (_nothing_is_in_transit, "no-false-clean"),
        (_order_of_doing, "lifo"),
        (_commit_anyhow, "no-silent-commit"),
        (_one_key_for_all_attempts, "no-false-clean"),
        (_a_new_key_for_every_try, "compensate-once"),
        (_forget_what_lands_late, "no-false-clean"),
        (_steps_after_the_end, "closed-means-closed"),
    ],
)
def test_a_fault_in_the_engine_is_found_and_told(monkeypatch, spoil, promise):
    spoil(monkeypatch)
    result = verify_invariants(max_steps=2, quiet=True, stop_at=12)
    assert not result.hold
    found = next((violation for violation in result.violations if violation.promise == promise), None)
    assert found is not None, str(result)
    assert found.how.startswith("a saga of") and f"{promise}: {found.what}" in str(result)
