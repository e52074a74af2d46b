"""A dry run foretells: where the recorded state already says that a person is needed, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from agent_saga_core import (
    ActionSemantics,
    LogUnavailable,
    MemoryLog,
    Observation,
    RollbackIncomplete,
    Saga,
    compensator,
    probe,
    recover,
    resolve,
    saga_scope,
    undo,
)
from agent_saga_core.recovery import Recoverer, recover_as
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing import ManualClock

C, IRREVERSIBLE = ActionSemantics.COMPENSABLE, ActionSemantics.IRREVERSIBLE
REVERSIBLE = ActionSemantics.REVERSIBLE


SERVICE_BACK: list[bool] = []
"""Whether the compensator that failed works again: then it is not empty."""


class Died(BaseException):
    """The process is gone: raised so that nothing of it runs on."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    with isolated_registry():
        compensator("refund")(lambda id=None: None)
        compensator("payments")(_payments)
        SERVICE_BACK.clear()
        probe("blind")(lambda args, key: Observation(landed=None))
        probe("sees nothing")(lambda args, key: Observation(landed=False, final=True))
        yield


def _payments() -> None:
    if not SERVICE_BACK:
        raise ConnectionError("away")


def _dies() -> None:
    raise Died


def _left(body: Callable[[Saga], object]) -> MemoryLog:
    """The log of a process that dies at the end of `body`, as the next one opens it."""
    log = MemoryLog(ManualClock(auto=True))
    scope = saga_scope("s", log=log, approve=lambda request: True)
    scope.__enter__()
    try:
        body(scope)
    except Died:
        pass
    log.crash()
    with pytest.raises(LogUnavailable):
        scope.__exit__(None, None, None)
    return MemoryLog(log.clock, store=log.store)


def _state_and_more(saga: Saga) -> None:
    saga.execute("set", lambda: 1, semantics=REVERSIBLE, compensate=lambda result: lambda: None)
    saga.execute("pay", lambda: 1, semantics=C, compensate=undo("refund"))


def _dead_letter() -> MemoryLog:
    log = MemoryLog(ManualClock(auto=True))
    with pytest.raises(RollbackIncomplete):
        with saga_scope("s", log=log) as saga:
            saga.execute("pay", lambda: 1, semantics=C, compensate=undo("payments"))
            raise ValueError
    SERVICE_BACK.append(True)
    return MemoryLog(log.clock, store=log.store)


def _unknown_dead_letter() -> MemoryLog:
    log = _left(lambda saga: saga.execute("pay", _dies, semantics=C, compensate=undo("refund")))
    assert recover(log).attention == ("s",)
    return log


def _aged() -> MemoryLog:
    """A compensation that was started by a process that died in it, a day and more ago."""
    log = MemoryLog(ManualClock(auto=True))

    def dies(id: object = None) -> None:
        log.crash()
        raise Died

    with isolated_registry():
        compensator("refund")(dies)
        with pytest.raises(BaseException):  # noqa: B017 - whatever is left of a dead process
            with saga_scope("s", log=log) as saga:
                saga.execute("pay", lambda: 1, semantics=C, compensate=undo("refund"))
                raise ValueError
    log.clock.advance(86_401.0)
    return MemoryLog(log.clock, store=log.store)


def _accepted(log: MemoryLog) -> MemoryLog:
    resolve(log, "s", 1, outcome="accepted", by="ada", note="seen")
    return log


CASES: dict[str, tuple[Callable[[], MemoryLog], str, str]] = {
    "done": (
        lambda: _left(lambda saga: saga.execute("pay", lambda: 1, semantics=C, compensate=undo("refund"))),
        "recovered", "",
    ),
    "unknown, unsafe": (
        lambda: _left(lambda saga: saga.execute("pay", _dies, semantics=C, compensate=undo("refund"))),
        "attention", "step 1 pay: INTENDED (nobody knows whether it happened",
    ),
    "unknown, unsafe, a dead letter already": (
        _unknown_dead_letter, "attention", "step 1 pay: UNKNOWN (nobody knows whether it happened",
    ),
    "unknown, safe if absent": (
        lambda: _left(
            lambda saga: saga.execute("pay", _dies, semantics=C, compensate=undo("refund", if_absent="noop"))
        ),
        "recovered", "",
    ),
    "unknown, an undo of what was returned": (
        lambda: _left(
            lambda saga: saga.execute(
                "pay", _dies, semantics=C, compensate=undo("refund", if_absent="noop", id="result.id")
            )
        ),
        "attention", "step 1 pay: INTENDED (nobody knows whether it happened",
    ),
    "unknown, with a probe": (
        lambda: _left(
            lambda saga: saga.execute(
                "pay", _dies, semantics=C, compensate=undo("refund"), probe="sees nothing", in_doubt=0.0
            )
        ),
        "recovered", "if its probe can tell what became of step 1 pay",
    ),
    "irreversible, done": (
        lambda: _left(lambda saga: saga.execute("mail", lambda: 1, semantics=IRREVERSIBLE)),
        "attention", "step 1 mail: DONE (irreversible",
    ),
    "irreversible, unknown": (
        lambda: _left(lambda saga: saga.execute("mail", _dies, semantics=IRREVERSIBLE)),
        "attention", "step 1 mail: INTENDED (irreversible",
    ),
    "irreversible, unknown, with a probe": (
        lambda: _left(lambda saga: saga.execute("mail", _dies, semantics=IRREVERSIBLE, probe="sees nothing")),
        "recovered", "if its probe can tell",
    ),
    "state of its process": (
        lambda: _left(_state_and_more),
        "recovered", "",
    ),
    "no undo could be derived": (
        lambda: _left(
            lambda saga: saga.execute("pay", lambda: {}, semantics=C, compensate=undo("refund", id="result.id"))
        ),
        "attention", "step 1 pay: DONE (no undo could be derived",
    ),
    "an undo that lived in its process": (
        lambda: _left(lambda saga: saga.execute("pay", lambda: 1, semantics=C, compensate=lambda result: None)),
        "attention", "step 1 pay: DONE (",
    ),
    "failed, and given new tries": (_dead_letter, "recovered", ""),
    "a compensation older than its key": (_aged, "attention", "longer ago than its key lives"),
    "settled by a person": (
        lambda: _accepted(_left(lambda saga: saga.execute("mail", lambda: 1, semantics=IRREVERSIBLE))), "recovered", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_a_dry_run_says_what_the_recovery_then_does(case: str) -> None:
    make, verdict, said = CASES[case]
    log = make()
    before = log.read("s")
    dry = recover(log, dry_run=True)
    assert getattr(dry, verdict) == ("s",) and said in dry.reasons["s"], dry
    assert ("would end as NEEDS_ATTENTION" in dry.reasons["s"]) == (verdict == "attention")
    assert log.read("s") == before
    assert getattr(recover(log), verdict) == ("s",)


def test_what_calls_decide_is_not_foretold() -> None:
    """A probe that can see nothing, and a compensator that fails: nobody knows before they are called."""
    log = _left(lambda saga: saga.execute("pay", _dies, semantics=C, compensate=undo("refund"), probe="blind"))
    assert recover(log, dry_run=True).recovered == ("s",)
    assert recover(log).attention == ("s",)


def test_a_rollback_whose_tries_are_used_up_gets_new_ones_only_from_an_explicit_recovery_of_a_dead_letter() -> None:
    log = MemoryLog(ManualClock(auto=True))
    for _ in range(3):  # each of them dies in a try
        with isolated_registry():

            def dies(current: MemoryLog = log) -> None:
                current.crash()
                raise Died

            compensator("refund")(dies)
            try:
                if log.saga_ids():
                    recover(log)
                else:
                    with saga_scope("s", log=log) as saga:
                        saga.execute("pay", lambda: 1, semantics=C, compensate=undo("refund"))
                        raise ValueError
            except (Died, ValueError, LogUnavailable):
                pass
        log = MemoryLog(log.clock, store=log.store)
    for _ in range(2):
        dry = recover(log, dry_run=True)
        assert dry.attention == ("s",) and "its compensation did not end" in dry.reasons["s"]
        assert recover_as(Recoverer(), log, dry_run=True).attention == ("s",)
    assert recover(log).attention == ("s",)
    assert recover(log, dry_run=True).recovered == ("s",)
    assert recover(log).recovered == ("s",)
