"""The fold: a pure function of the records, that hostile ones can only make refuse."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_saga_core import ActionSemantics, LogCorrupted, SagaStatus, StepStatus
from agent_saga_core.records import Record, RecordType
from agent_saga_core.state import SagaFold, fold


def _records(*drafts):
    return [
        Record(saga="s", n=n, epoch=1, type=kind, time=1_700_000_000.0 + n, data=data)
        for n, (kind, data) in enumerate(drafts, 1)
    ]


START = ("START", {"nonce": "n", "name": "order", "metadata": {"a": 1}})


def _intent(step=1, attempt=1, **more):
    data = {
        "step": step, "attempt": attempt, "tool": f"t{step}", "semantics": "COMPENSABLE", "identity": f"i{step}",
        "fingerprint": "f", "key": f"k{step}.{attempt}", "undo_key": f"u{step}.{attempt}",
    }  # fmt: skip
    return ("INTENT", {**data, **more})


def _at(kind, step=1, attempt=1, **more):
    return (kind, {"step": step, "attempt": attempt, **more})


def test_a_committed_saga():
    state = fold(_records(START, _intent(), _at("DONE", result=5), ("COMMITTED", {}))).view()
    assert state.status is SagaStatus.COMMITTED and state.report.clean and state.name == "order"
    (step,) = state.steps
    assert (step.number, step.tool, step.status, step.attempts) == (1, "t1", StepStatus.DONE, 1)
    assert (step.forward_key, step.compensation_key) == ("k1.1", "u1.1")
    assert step.semantics is ActionSemantics.COMPENSABLE


def test_the_order_of_undo_is_the_reverse_of_first_outcomes_and_those_without_one_come_first():
    folded = fold(
        _records(
            START,
            _intent(1),
            _intent(2),
            _intent(3),
            _intent(4),
            _at("UNKNOWN", 3),
            _at("DONE", 1),
            _at("DONE", 2),
            _at("DONE", 3),  # a later settling does not move it
        )
    )
    assert [step.number for step, _ in folded.open_attempts()] == [4, 2, 1, 3]


def test_what_left_nothing_is_not_open():
    folded = fold(
        _records(
            START,
            _intent(1),
            _at("NOT_APPLIED", 1),
            _intent(2, semantics="READ_ONLY"),
            _intent(3),
            _at("DONE", 3),
            _at("COMPENSATING", 3, key="u3.1"),
            _at("COMPENSATED", 3),
        )
    )
    assert folded.open_attempts() == []


def test_attempts_of_one_step_each_have_their_keys():
    folded = fold(_records(START, _intent(1, 1), _at("NOT_APPLIED"), _intent(1, 2), _at("DONE", 1, 2)))
    (step,) = folded.view().steps
    assert step.attempts == 2 and step.forward_key == "k1.2"
    assert [a.forward_key for a in step.history] == ["k1.1", "k1.2"]
    assert [a.status for a in step.history] == [StepStatus.NOT_APPLIED, StepStatus.DONE]


def test_a_retry_gives_new_tries_and_a_crash_does_not():
    rolling = ("ROLLING_BACK", {"reason": "r"})
    compensating = _at("COMPENSATING", key="u1.1")
    records = _records(START, _intent(), _at("DONE"), rolling, compensating, compensating, compensating)
    (_, attempt) = fold(records).open_attempts()[0]
    assert attempt.tries == 3 and attempt.started
    more = _records(*[(r.type, r.data) for r in records], ("ROLLING_BACK", {"reason": "r", "retry": True}))
    (_, attempt) = fold(more).open_attempts()[0]
    assert attempt.tries == 0 and attempt.total == 3 and attempt.started


@pytest.mark.parametrize(
    "drafts",
    [
        [_intent()],
        [START, _at("DONE")],
        [START, _intent(2)],
        [START, _intent(1, 2)],
        [START, _intent(), _intent(1, 3)],
        [START, _intent(), _at("DONE", 0)],
        [START, _intent(), _at("DONE", -1)],
        [START, _intent(), _at("DONE", 1, 0)],
        [START, _intent(semantics="WISHFUL")],
        [START, ("INTENT", {})],
        [START, _intent(), _at("RESOLVED", outcome="perhaps")],
        [START, ("NEEDS_ATTENTION", {"remaining": [7]})],
        [START, ("FUTURE", {})],
        [("START", {})],
    ],
)
def test_records_that_make_no_sense_are_refused(drafts):
    with pytest.raises(LogCorrupted):
        fold(_records(*drafts), "s")


def test_a_gap_is_refused_and_an_unknown_record_that_is_not_critical_is_skipped():
    records = _records(START, _intent(), _at("DONE"))
    with pytest.raises(LogCorrupted):
        fold([records[0], records[2]])
    extra = Record(saga="s", n=2, epoch=1, type="NOTE", time=0.0, data={}, critical=False)
    assert fold([records[0], extra]).next_n == 3


def test_every_prefix_is_a_state():
    records = _records(START, _intent(), _at("UNKNOWN", error="x"), _at("DONE", result=1), ("ABORT", {"reason": "r"}))
    folded = SagaFold("s")
    for record in records:
        folded.apply(record)
        assert folded.view() == fold(records[: record.n]).view()
    assert folded.rollback_only == "r"


_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 4), st.floats(allow_nan=False), st.sampled_from(["", "a", "COMPENSABLE"])
)
_values = st.one_of(_scalars, st.lists(_scalars, max_size=2), st.dictionaries(st.sampled_from("ab"), _scalars))
_names = st.sampled_from(
    "step attempt tool semantics identity fingerprint key undo_key undo result remaining reasons deadline nonce "
    "orphan_after metadata outcome in_doubt args settle_not_before not_before scope parent".split()
)


@st.composite
def _hostile(draw):
    drafts = [START, _intent(), _at("DONE", result=1)][: draw(st.integers(0, 3))]
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from([str(t) for t in RecordType]))
        data = draw(st.dictionaries(_names, _values, max_size=6))
        if draw(st.booleans()):
            data = {**draw(st.sampled_from([START[1], _intent()[1], _at("X")[1], {"deadline": 1}])), **data}
        drafts.append((kind, data))
    return _records(*drafts)


@settings(max_examples=400)
@given(_hostile())
def test_hostile_records_can_only_be_refused(records):
    try:
        folded = fold(records, "s")
    except LogCorrupted:
        return
    folded.open_attempts()
    folded.report()
    str(folded.view(records))
    folded.head()
