"""A KeyboardInterrupt that strikes anywhere in a log on a server leaves nothing owned, lost or stored twice."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from agent_saga_core import log as log_package
from agent_saga_core.clock import SystemClock
from agent_saga_core.errors import SagaBusy

from .store import Store, record

INSIDE = os.path.dirname(log_package.__file__)


def interrupted_at(step: int, work: Callable[[], None]) -> bool:
    """Run `work`, raising KeyboardInterrupt at the given line inside the log; whether it came to that."""
    left = step
    fired = False

    def local(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left, fired
        if event == "line" and not fired:
            left -= 1
            if left < 0:
                fired = True
                raise KeyboardInterrupt
        return local

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        return None if fired or not frame.f_code.co_filename.startswith(INSIDE) else local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return fired


def insist(call: Callable[[], Any]) -> Any:
    for _ in range(3):
        try:
            return call()
        except KeyboardInterrupt:
            continue
    raise AssertionError("interrupted more than once")


class Shifted(SystemClock):
    def __init__(self, by: float) -> None:
        self._by = by

    def time(self) -> float:
        return super().time() + self._by


class Interrupts:
    def test_an_interrupt_at_any_line_of_append_flush_and_release_does_no_harm(
        self, opened: Callable[..., Any]
    ) -> None:
        log, other = opened(), opened()
        step = 0
        expected = 0
        while True:
            saga = f"s{step}"
            log.claim(saga, fresh=step % 2 == 0)

            def work(saga: str = saga) -> None:
                first = record(saga, 1, "START")
                insist(lambda: log.append(first))
                ticket = insist(lambda: log.append(record(saga, 2)))
                insist(lambda: log.flush(ticket))
                insist(lambda: log.release(saga))

            fired = interrupted_at(step, work)
            assert [one.n for one in log.read(saga)] == [1, 2], step
            assert [one.n for one in other.claim(saga)] == [1, 2, 3], step  # free, for anybody
            expected += 3
            if not fired:
                break
            step += 1
        assert step > 150
        found = log.verify()
        assert found.intact and found.records == expected
        assert not log._buffer and not log._batch and not log._leader and not log._holdings and not log._held

    @pytest.mark.parametrize("absent", [True, False])
    def test_an_interrupt_at_any_line_of_a_claim_leaves_the_saga_free_or_owned(
        self, opened: Callable[..., Any], absent: bool
    ) -> None:
        log, other = opened(), opened()
        log.claim("warm", fresh=True)
        step = 0
        while True:
            saga = f"s{step}"
            if not absent:
                other.claim(saga)
                other.append(record(saga, 1, "START"))
                other.release(saga)
            owned = False

            def work(saga: str = saga) -> None:
                nonlocal owned
                try:
                    log.claim(saga)
                    owned = True
                except KeyboardInterrupt:
                    owned = log.owned(saga)

            fired = interrupted_at(step, work)
            assert step > 0 or fired
            assert log.owned(saga) == owned
            if owned:
                log.release(saga)
            numbers = [one.n for one in other.claim(saga)]  # nobody else has it
            assert numbers == [] if absent else numbers in ([1, 2], [1, 2, 3]), step
            other.release(saga)
            if not fired:
                break
            step += 1
        assert step > 50
        assert other.verify().intact

    @pytest.mark.parametrize("by", [-3600.0, 3600.0])
    def test_a_wall_clock_that_is_an_hour_off_takes_nothing_and_keeps_nothing(
        self, store: Store, url: str, opened: Callable[..., Any], by: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = opened()
        log.claim("s")
        log.flush(log.append(record("s", 1, "START")))
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + by)
        other = store.log(url, clock=Shifted(by))
        with pytest.raises(SagaBusy):
            other.claim("s")
        log.flush(log.append(record("s", 2)))  # its own lease does not go by that clock either
        log.release("s")
        assert other.claim("s")[-1].type == "CLAIM"
        other.close()
