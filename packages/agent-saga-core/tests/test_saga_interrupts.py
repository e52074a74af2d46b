"""A signal may raise between any two of our lines on the main thread: nothing is forgotten, nothing called clean."""

import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import agent_saga_core
from agent_saga_core import MemoryLog, RollbackIncomplete, SagaStatus, compensator, saga_scope, saga_tool, undo
from agent_saga_core.drive import CURRENT_SAGA
from agent_saga_core.registry import isolated_registry

OURS = os.path.dirname(agent_saga_core.__file__)
TIMES = 5000
"""More lines than any of these scopes runs: reaching it means that the injection never ended."""


class Interruption:
    """Raises `KeyboardInterrupt` at the k-th line that runs inside agent-saga while it is on."""

    def __init__(self, k: int) -> None:
        self.left = k
        self.where: str | None = None

    def __enter__(self) -> None:
        sys.settrace(self._frame)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _frame(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        # `__exit__` itself has a line before its loop: a signal there is the stated limit, as one before `with` ends.
        return self._line if code.co_filename.startswith(OURS) and code.co_name != "__exit__" else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "line" and self.where is None:
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename.removeprefix(OURS)}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


@pytest.fixture
def world() -> Iterator[dict[str, int]]:
    if sys.gettrace() is not None:
        pytest.skip("another tracer is at work; this test needs the interpreter's for itself")
    with isolated_registry():
        yield {}


def tool(world: dict[str, int]) -> Callable[[str], dict[str, str]]:
    @compensator("refund")
    def refund(charge_id: str, *, idempotency_key: str) -> None:
        world.pop(charge_id, None)

    @saga_tool(semantics="COMPENSABLE", compensate=undo(refund, charge_id="args.name", if_absent="noop"), in_doubt=0.0)
    def charge(name: str) -> dict[str, str]:
        world[name] = 1
        return {"id": name}

    return charge


def points() -> Iterator[Interruption]:
    for k in range(1, TIMES):
        interruption = Interruption(k)
        yield interruption
        if interruption.where is None:
            assert k > 100, "the lines of a scope were not interrupted at all"
            return
    raise AssertionError("no end in sight")


def test_interrupted_in_a_step(world: dict[str, int]) -> None:
    charge = tool(world)
    for interruption in points():
        log = MemoryLog()
        with pytest.raises((KeyboardInterrupt, StopAsyncIteration)) as raised, saga_scope(log=log) as saga:
            with interruption:
                charge("a")
                charge("b")
            raise StopAsyncIteration  # not interrupted: the last round
        assert saga.report is not None and saga.report.clean, (interruption.where, saga.report)
        assert not world, interruption.where
        assert log.verify().intact
        assert raised.type is KeyboardInterrupt or interruption.where is None


@pytest.mark.parametrize("fails", [False, True], ids=["commit", "rollback"])
def test_interrupted_at_the_end_of_the_scope(world: dict[str, int], fails: bool) -> None:
    charge = tool(world)
    for interruption in points():
        world.clear()
        log = MemoryLog()
        saga = saga_scope(log=log)
        raised: BaseException | None = None
        saga.__enter__()
        charge("a")
        charge("b")
        error = ValueError() if fails else None
        try:
            with interruption:
                saga.__exit__(type(error) if error else None, error, None)
        except BaseException as caught:
            raised = caught
        assert CURRENT_SAGA.get() is None, interruption.where
        report = saga.report
        assert report is not None, interruption.where
        if interruption.where is not None:
            # Raised inside a compensation, it is that compensation's failure, and named; else it comes out itself.
            assert isinstance(raised, KeyboardInterrupt | RollbackIncomplete), interruption.where
            assert isinstance(raised, KeyboardInterrupt) or not report.clean
        if report.status is SagaStatus.COMMITTED:
            assert not fails and sorted(world) == ["a", "b"]
        else:
            # Between a compensation's effect and its record it is reported although it is gone: the safe side.
            assert fails and not (report.clean and world), (interruption.where, report, world)
            assert {step.tool for step in report.remaining} >= ({"charge"} if world else set())
        assert log.verify().intact
