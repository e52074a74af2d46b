"""`ManualClock`: time that moves when a test says so."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent_saga_core.clock import Clock
from agent_saga_core.drive import asleep
from agent_saga_core.testing import ManualClock


def _in_thread(fn):
    thread = threading.Thread(target=fn, daemon=True)
    thread.start()
    return thread


def test_it_is_a_clock():
    clock: Clock = ManualClock(wall=100.0, monotonic=7.0)
    assert (clock.time(), clock.monotonic()) == (100.0, 7.0)


def test_threads_are_woken_in_the_order_of_their_moments():
    clock, woken = ManualClock(monotonic=0.0), []

    def sleeper(seconds):
        assert clock.wait(threading.Event(), seconds) is False
        woken.append((seconds, clock.monotonic()))

    threads = [_in_thread(lambda s=s: sleeper(s)) for s in (3.0, 1.0, 2.0)]
    clock.wait_until_waiting(3)
    clock.advance(2.5)
    for thread in threads[1:]:
        thread.join(10)
    assert sorted(seconds for seconds, _ in woken) == [1.0, 2.0]
    assert clock.waiters == 1
    clock.advance(0.5)
    threads[0].join(10)
    assert woken[-1] == (3.0, 3.0)


def test_an_event_ends_a_wait_before_its_time():
    clock, event, heard = ManualClock(), threading.Event(), []
    thread = _in_thread(lambda: heard.append(clock.wait(event, 60.0)))
    clock.wait_until_waiting()
    event.set()
    thread.join(10)
    assert heard == [True]
    assert clock.waiters == 0


def test_the_wall_clock_moves_alone():
    clock = ManualClock(wall=10_000.0, monotonic=5.0)
    clock.set_wall(6_400.0)
    assert (clock.time(), clock.monotonic()) == (6_400.0, 5.0)
    clock.advance(2.0)
    assert (clock.time(), clock.monotonic()) == (6_402.0, 7.0)


async def test_callbacks_run_on_their_loop_and_can_be_called_off():
    clock, ran = ManualClock(), []
    loop = asyncio.get_running_loop()
    clock.call_later(loop, 2.0, lambda: ran.append("second"))
    clock.call_later(loop, 1.0, lambda: ran.append("first"))
    off = clock.call_later(loop, 1.5, lambda: ran.append("never"))
    off.cancel()
    await asyncio.to_thread(clock.advance, 1.0)
    await asyncio.sleep(0)
    assert ran == ["first"]
    clock.advance(1.0)
    await asyncio.sleep(0)
    assert ran == ["first", "second"]
    clock.call_later(loop, 1.0, lambda: ran.append("too late")).cancel()
    clock.advance(1.0)
    await asyncio.sleep(0)
    assert ran == ["first", "second"]


async def test_a_due_callback_can_still_be_called_off():
    clock, ran = ManualClock(), []
    timer = clock.call_later(asyncio.get_running_loop(), 1.0, lambda: ran.append("never"))
    clock.advance(1.0)
    timer.cancel()
    await asyncio.sleep(0)
    assert ran == []


async def test_auto_lets_time_pass_by_itself():
    clock = ManualClock(monotonic=0.0, auto=True)
    assert clock.wait(threading.Event(), 30.0) is False
    await asleep(5.0, clock)
    assert clock.monotonic() == 35.0
    done = threading.Event()
    done.set()
    assert clock.wait(done, 30.0) is True
    assert clock.monotonic() == 35.0


def test_nobody_came_to_wait():
    with pytest.raises(AssertionError, match="0 waits"):
        ManualClock().wait_until_waiting(timeout=0.01)
