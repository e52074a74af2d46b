"""Logs on servers between real processes: stopped past a lease, stealing from each other, killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import IO, Any, ClassVar

import pytest

from agent_saga_core.errors import SagaBusy
from agent_saga_core.records import Record

from .store import BOUND, Store, also, record

PRELUDE = """
import os, random, signal, sys, threading
from agent_saga_core import *
from agent_saga_core.records import Record

def record(saga, n, kind="INTENT", *, epoch=1, **data):
    return Record(saga=saga, n=n, epoch=epoch, type=kind, time=1000.0, data=data)

def say(text):
    os.write(1, (text + "\\n").encode())

def wait():
    os.read(0, 1)

url = sys.argv[1]
"""


class Process:
    """A Python process that says lines and waits for bytes."""

    def __init__(self, store: Store, script: str, *arguments: str) -> None:
        log = f"from agent_saga_core.log.{store.name} import {store.log.__name__} as StoreLog\n"
        self.popen = subprocess.Popen(
            [sys.executable, "-c", log + PRELUDE + textwrap.dedent(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe

    def hear(self) -> str:
        return self._pipe(self.popen.stdout).readline().decode().strip()

    def rest(self) -> list[str]:
        return self._pipe(self.popen.stdout).read().decode().splitlines()

    def go_on(self) -> None:
        self._pipe(self.popen.stdin).write(b".")
        self._pipe(self.popen.stdin).flush()

    def end(self) -> int:
        code = self.popen.wait(timeout=BOUND)
        self._pipe(self.popen.stdin).close()
        self._pipe(self.popen.stdout).close()
        return code


def take_over(log: Any, saga: str) -> tuple[Record, ...]:
    until = time.monotonic() + BOUND
    pause = threading.Event()
    while True:
        try:
            return log.claim(saga)
        except SagaBusy:
            assert time.monotonic() < until, "the lease did not run out"
            pause.wait(0.01)


THIEF = """
mine, seed, rounds, run_outs = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
log = StoreLog(url)
counts = {"claimed": 0, "fenced": 0, "busy": 0, "stored": 0}

def work(number):
    draw = random.Random(seed * 10 + number)
    has = {}
    for _ in range(rounds):
        saga = f"s{draw.randrange(number, 40, 2)}"
        try:
            if saga not in has:
                if draw.random() < run_outs:
                    run_out()  # everybody's lease has, and nobody has heard of it
                found = log.claim(saga)
                has[saga] = [found[-1].n if found else 0, found[-1].n if found else 1]
                counts["claimed"] += 1
                if not found:
                    has[saga][0] = 1
                    log.flush(log.append(record(saga, 1, "START", who=mine)))
            n, epoch = has[saga]
            has[saga][0] = n + 1
            log.flush(log.append(record(saga, n + 1, epoch=epoch, who=mine)))
            counts["stored"] += 1
            if draw.random() < 0.2:
                has.pop(saga)
                log.release(saga)
        except SagaBusy:
            counts["busy"] += 1
        except Fenced:
            counts["fenced"] += 1
            has.pop(saga, None)
            try:
                log.release(saga)
            except Fenced:
                pass

say("ready")
wait()
threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
for one in threads: one.start()
for one in threads: one.join()
log.close()
say(" ".join(f"{name}={count}" for name, count in counts.items()))
"""


class Processes:
    """What is true of several processes that have one log.

    A store says with `run_out` how every lease is made to run out while nobody has heard of it, and how many steps its
    tests take, since servers are not equally fast.
    """

    run_out: ClassVar[str]
    """Source of `run_out()`, for a process that has its log as `log`, opened later, under the address `url`."""
    steals: ClassVar[int]
    """How many times each of four threads takes a saga, or goes on with one."""
    run_outs: ClassVar[float] = 1.0
    """The part of the claims before which every lease runs out."""
    least: ClassVar[dict[str, int]]
    """What has happened more often than that in the end, or it was no race."""
    killed_by: ClassVar[int] = 10**9
    """The record at which a process that is to be killed waits for it."""
    heard: ClassVar[int] = 80
    """Below how many acknowledgements it is killed."""

    def check_stored(self, url: str) -> None:
        """What else is true of what is stored."""

    @pytest.fixture
    def processes(self) -> Iterator[list[Process]]:
        started: list[Process] = []
        yield started
        for one in started:
            if one.popen.poll() is None:
                one.popen.kill()
                one.end()

    # --- stopped past the lease

    def test_an_owner_that_slept_past_its_lease_starts_no_step_when_it_wakes(
        self, store: Store, url: str, processes: list[Process]
    ) -> None:
        owner = Process(
            store,
            """
            log = StoreLog(url)
            log.claim("untouched")
            log.flush(log.append(record("untouched", 1, "START")))
            def step(saga, name):
                saga.execute(name, lambda: say("effect " + name), semantics=ActionSemantics.COMPENSABLE,
                             compensate=lambda result: Compensation(fn=lambda: say("undo " + name)))
            try:
                with saga_scope("s", log=log) as saga:
                    step(saga, "one")
                    say("ready")
                    wait()
                    step(saga, "two")
                    say("went on")
            except BaseException as error:
                say(type(error).__name__)
            try:
                log.flush(log.append(record("untouched", 2)))
                say("effect of the other saga")
            except Fenced:
                say("Fenced")
            log.close()
            """,
            also(url, lease=1),
        )
        processes.append(owner)
        assert owner.hear() == "effect one" and owner.hear() == "ready"
        owner.popen.send_signal(signal.SIGSTOP)
        log = store.log(url)
        found = take_over(log, "s")
        assert [str(one.type) for one in found] == ["START", "INTENT", "DONE", "CLAIM"]
        log.flush(log.append(record("s", len(found) + 1, epoch=len(found))))
        owner.popen.send_signal(signal.SIGCONT)
        owner.go_on()
        assert owner.rest() == ["Fenced", "Fenced"]  # no effect, and no undo either: they are another's
        assert owner.end() == 0
        assert [one.n for one in log.read("s")] == [1, 2, 3, 4, 5]
        assert log.verify().intact
        log.close()

    @pytest.mark.parametrize("at", [1, 7, 20])
    def test_an_owner_stopped_anywhere_in_its_work_gets_nothing_in_behind_the_claim(
        self, store: Store, url: str, processes: list[Process], at: int
    ) -> None:
        owner = Process(
            store,
            """
            log = StoreLog(url)
            log.claim("s")
            log.flush(log.append(record("s", 1, "START")))
            n = 1
            try:
                while True:
                    n += 1
                    log.flush(log.append(record("s", n)))
                    say(f"effect {n}")
            except Fenced:
                say("Fenced")
            """,
            also(url, lease=1),
        )
        processes.append(owner)
        said = [owner.hear() for _ in range(at)]
        owner.popen.send_signal(signal.SIGSTOP)
        log = store.log(url)
        found = take_over(log, "s")
        owner.popen.send_signal(signal.SIGCONT)
        said += owner.rest()
        owner.end()
        assert said[-1] == "Fenced"
        effects = [int(line.split()[1]) for line in said[:-1]]
        # One effect may have been past its guard when the process was stopped; its intent is before the claim too.
        assert effects == list(range(2, effects[-1] + 1)) and effects[-1] < found[-1].n
        assert log.read("s") == found  # not a record behind the CLAIM
        log.close()

    # --- stealing

    def test_processes_that_steal_sagas_from_each_other_leave_no_gap_and_no_epoch_of_two(
        self, store: Store, url: str, processes: list[Process]
    ) -> None:
        how = str(self.steals), str(self.run_outs)
        processes.extend(
            Process(store, self.run_out + THIEF, url, name, str(random.randrange(10**6)), *how) for name in ("a", "b")
        )
        for one in processes:
            assert one.hear() == "ready"
        for one in processes:
            one.go_on()
        total: dict[str, int] = {}
        for one in processes:
            for pair in one.hear().split():
                name, _, count = pair.partition("=")
                total[name] = total.get(name, 0) + int(count)
            assert one.end() == 0
        log = store.log(url)
        found = log.verify()
        assert found.intact, found.first_broken
        assert all(total[name] > least for name, least in self.least.items()), total
        stored = 0
        for saga in log.saga_ids():
            records = log.read(saga)
            epochs = [one.epoch for one in records]
            assert epochs == sorted(epochs), saga
            owners: dict[int, set[str]] = {}
            for one in records:
                if one.type == "CLAIM":
                    assert one.epoch == one.n
                else:
                    owners.setdefault(one.epoch, set()).add(one.data["who"])
            assert all(len(who) == 1 for who in owners.values()), saga
            stored += sum(one.type == "INTENT" for one in records)
        # A refused flush may have stored its record: the lease was lost after it. None that succeeded is missing.
        assert total["stored"] <= stored <= total["stored"] + total["fenced"]
        self.check_stored(url)
        log.close()

    # --- killed

    def test_processes_that_are_killed_at_random_lose_nothing_that_was_acknowledged(
        self, store: Store, url: str, processes: list[Process]
    ) -> None:
        script = """
        log = StoreLog(url)
        def work(number):
            saga = f"{sys.argv[2]}-{number}"
            log.claim(saga, fresh=bool(number % 2))
            n = 0
            while n < int(sys.argv[3]):
                n += 1
                log.flush(log.append(record(saga, n, "START" if n == 1 else "INTENT")))
                say(f"{saga} {n}")
            wait()
        for number in range(4): threading.Thread(target=work, args=(number,), daemon=True).start()
        wait()
        """
        acknowledged: dict[str, int] = {}
        processes.extend(
            Process(store, script, also(url, lease=1), name, str(self.killed_by)) for name in ("a", "b", "c")
        )
        for one in processes:
            lines = [one.hear() for _ in range(random.randrange(5, self.heard))]
            os.kill(one.popen.pid, signal.SIGKILL)
            for line in [*lines, *one.rest()]:
                saga, _, n = line.partition(" ")
                if n.isdigit():
                    acknowledged[saga] = max(acknowledged.get(saga, 0), int(n))
            assert one.end() == -signal.SIGKILL
        log = store.log(url)
        assert log.verify().intact
        assert set(acknowledged) <= set(log.unfinished().saga_ids)
        for saga, most in acknowledged.items():
            found = take_over(log, saga)
            assert [one.n for one in found] == list(range(1, len(found) + 1)) and len(found) > most
        log.close()

    def test_another_process_finishes_the_saga_of_one_that_died(
        self, store: Store, url: str, processes: list[Process]
    ) -> None:
        script = """
        @compensator("test.undo")
        def take_back(what): say("undo " + what)
        def step(saga, name):
            return saga.execute(name, lambda what: say("effect " + what), args={"what": name},
                                semantics=ActionSemantics.COMPENSABLE, compensate=undo(take_back, what="args.what"))
        if sys.argv[2] == "dies":
            with saga_scope("s", log=url) as saga:
                for name in ("one", "two"): step(saga, name)
                os.kill(os.getpid(), signal.SIGKILL)
        log = StoreLog(url)
        say("watching")
        pause = threading.Event()
        for _ in range(3000):
            report = recover(log)
            state = read_saga(log, "s")
            if str(state.status) == "ROLLED_BACK": break
            pause.wait(0.02)
        say(str(state.status))
        log.close()
        """
        dies = Process(store, script, also(url, lease=1), "dies")
        processes.append(dies)
        assert dies.rest() == ["effect one", "effect two"] and dies.end() == -signal.SIGKILL
        recoverers = [Process(store, script, url, "recovers") for _ in range(2)]
        processes.extend(recoverers)
        said = [one.rest() for one in recoverers]
        assert [one.end() for one in recoverers] == [0, 0]
        undone = [line for lines in said for line in lines if line.startswith("undo")]
        assert undone == ["undo two", "undo one"]  # once each, in order, by whichever came first
        assert [lines[-1] for lines in said] == ["ROLLED_BACK", "ROLLED_BACK"]
