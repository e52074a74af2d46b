"""The NATS log between real processes: stopped past a lease, stealing from each other, killed."""

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
from typing import IO

import pytest

from agent_saga_core.errors import SagaBusy
from agent_saga_core.log.nats import NatsLog
from agent_saga_core.records import Record

BOUND = 60.0
PRELUDE = """
import os, random, signal, sys, threading
from agent_saga_core import *
from agent_saga_core.log.nats import NatsLog
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

    def __init__(self, script: str, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), *arguments],
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


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for one in started:
        if one.popen.poll() is None:
            one.popen.kill()
            one.end()


def take_over(log: NatsLog, saga: str) -> tuple[Record, ...]:
    until = time.monotonic() + BOUND
    pause = threading.Event()
    while True:
        try:
            return log.claim(saga)
        except SagaBusy:
            assert time.monotonic() < until, "the lease did not run out"
            pause.wait(0.01)


# --- stopped past the lease


def test_an_owner_that_slept_past_its_lease_starts_no_step_when_it_wakes(url: str, processes: list[Process]) -> None:
    owner = Process(
        """
        log = NatsLog(url)
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
        f"{url}&lease=1",
    )
    processes.append(owner)
    assert owner.hear() == "effect one" and owner.hear() == "ready"
    owner.popen.send_signal(signal.SIGSTOP)
    log = NatsLog(url)
    found = take_over(log, "s")
    assert [str(one.type) for one in found] == ["START", "INTENT", "DONE", "CLAIM"]
    log.flush(log.append(record(len(found) + 1, epoch=len(found))))
    owner.popen.send_signal(signal.SIGCONT)
    owner.go_on()
    assert owner.rest() == ["Fenced", "Fenced"]  # no effect, and no undo either: they are another's
    assert owner.end() == 0
    assert [one.n for one in log.read("s")] == [1, 2, 3, 4, 5]
    assert log.verify().intact
    log.close()


def record(n: int, kind: str = "INTENT", *, epoch: int = 1) -> Record:
    return Record(saga="s", n=n, epoch=epoch, type=kind, time=1000.0, data={})


@pytest.mark.parametrize("at", [1, 7, 20])
def test_an_owner_stopped_anywhere_in_its_work_gets_nothing_in_behind_the_claim(
    url: str, processes: list[Process], at: int
) -> None:
    owner = Process(
        """
        log = NatsLog(url)
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
        f"{url}&lease=1",
    )
    processes.append(owner)
    said = [owner.hear() for _ in range(at)]
    owner.popen.send_signal(signal.SIGSTOP)
    log = NatsLog(url)
    found = take_over(log, "s")
    owner.popen.send_signal(signal.SIGCONT)
    said += owner.rest()
    owner.end()
    assert said[-1] == "Fenced"
    effects = [int(line.split()[1]) for line in said[:-1]]
    # One effect may have been past its guard when the process was stopped; its intent is before the claim all the same.
    assert effects == list(range(2, effects[-1] + 1)) and effects[-1] < found[-1].n
    assert log.read("s") == found  # not a record behind the CLAIM
    log.close()


# --- stealing


THIEF = """
mine, seed, rounds = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
log = NatsLog(url)
counts = {"claimed": 0, "fenced": 0, "busy": 0, "stored": 0}

async def run_out():
    # Everybody's lease has been watched running out, and nobody has heard of it.
    for leased in await log._index.leases():
        await log._index.put_expired(leased.nonce, leased.revision)

def work(number):
    draw = random.Random(seed * 10 + number)
    has = {}
    for _ in range(rounds):
        saga = f"s{draw.randrange(number, 40, 2)}"
        try:
            if saga not in has:
                if draw.random() < 0.2: log._server.run(run_out)
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


def test_processes_that_steal_sagas_from_each_other_leave_no_gap_and_no_epoch_of_two(
    url: str, processes: list[Process]
) -> None:
    processes.extend(Process(THIEF, url, name, str(random.randrange(10**6)), "120") for name in ("a", "b"))
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
    log = NatsLog(url)
    found = log.verify()
    assert found.intact, found.first_broken
    assert total["fenced"] > 20 and total["stored"] > 100 and total["claimed"] > 40, total
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
    log.close()


# --- killed


def test_processes_that_are_killed_at_random_lose_nothing_that_was_acknowledged(
    url: str, processes: list[Process]
) -> None:
    script = """
    log = NatsLog(url)
    def work(number):
        saga = f"{sys.argv[2]}-{number}"
        log.claim(saga, fresh=bool(number % 2))
        n = 0
        while n < 150:
            n += 1
            log.flush(log.append(record(saga, n, "START" if n == 1 else "INTENT")))
            say(f"{saga} {n}")
        wait()
    for number in range(4): threading.Thread(target=work, args=(number,), daemon=True).start()
    wait()
    """
    acknowledged: dict[str, int] = {}
    processes.extend(Process(script, f"{url}&lease=1", name) for name in ("a", "b", "c"))
    for one in processes:
        lines = [one.hear() for _ in range(random.randrange(5, 40))]
        os.kill(one.popen.pid, signal.SIGKILL)
        for line in [*lines, *one.rest()]:
            saga, _, n = line.partition(" ")
            if n.isdigit():
                acknowledged[saga] = max(acknowledged.get(saga, 0), int(n))
        assert one.end() == -signal.SIGKILL
    log = NatsLog(url)
    assert log.verify().intact
    assert set(acknowledged) <= set(log.unfinished().saga_ids)
    for saga, most in acknowledged.items():
        found = take_over(log, saga)
        assert [one.n for one in found] == list(range(1, len(found) + 1)) and len(found) > most
    log.close()


def test_another_process_finishes_the_saga_of_one_that_died(url: str, processes: list[Process]) -> None:
    script = """
    @compensator("natstest.undo")
    def take_back(what): say("undo " + what)
    def step(saga, name):
        return saga.execute(name, lambda what: say("effect " + what), args={"what": name},
                            semantics=ActionSemantics.COMPENSABLE, compensate=undo(take_back, what="args.what"))
    if sys.argv[2] == "dies":
        with saga_scope("s", log=url) as saga:
            for name in ("one", "two"): step(saga, name)
            os.kill(os.getpid(), signal.SIGKILL)
    log = NatsLog(url)
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
    dies = Process(script, f"{url}&lease=1", "dies")
    processes.append(dies)
    assert dies.rest() == ["effect one", "effect two"] and dies.end() == -signal.SIGKILL
    recoverers = [Process(script, url, "recovers") for _ in range(2)]
    processes.extend(recoverers)
    said = [one.rest() for one in recoverers]
    assert [one.end() for one in recoverers] == [0, 0]
    undone = [line for lines in said for line in lines if line.startswith("undo")]
    assert undone == ["undo two", "undo one"]  # once each, in order, by whichever came first
    assert [lines[-1] for lines in said] == ["ROLLED_BACK", "ROLLED_BACK"]
