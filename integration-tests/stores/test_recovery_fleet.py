"""Recoverers as processes of their own, several on one log: real stores, real kills, a world that counts.

The world is a file that every compensator appends a line to. Nothing sleeps: processes are waited for by what they say.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from crash_stores import LEASE, STORES, Store

from agent_saga_core import SagaStatus, open_log, read_saga

on_every_store = pytest.mark.parametrize("store", list(STORES), indirect=True)
BOUND = 60.0
START = ("watching", "looked")
CRASH = Path(__file__).parents[1] / "crash"

SHOP = """
import contextvars
import os
import signal
import sys
import threading

from agent_saga_core import ActionSemantics, compensator, current_step, saga_scope, saga_tool, undo

def world(*words):
    descriptor = os.open("world", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, (" ".join(map(str, words)) + "\\n").encode())
    os.close(descriptor)

def noted(saga, step):
    world("undo", os.getpid(), saga, step, current_step().idempotency_key)

passing = threading.Lock()

def at_gate():
    gate = f"gate-{os.getpid()}"
    with passing:  # while one waits there, no other thread of this process passes it
        if os.path.exists("gates") and not os.path.exists(gate):
            os.mkfifo(gate)
            print("at the gate", file=sys.stderr, flush=True)
            open(gate).close()  # returns once the test has opened the other end

@compensator("fleet.undo")
def undo_it(saga: str, step: int, *, idempotency_key: str) -> None:
    noted(saga, step)
    at_gate()
    if os.path.exists("down"):
        raise ConnectionError("the service is down")

@saga_tool(semantics=ActionSemantics.COMPENSABLE, compensate=undo(undo_it, saga="saga.id", step="args.step"))
def act(step: int) -> None:
    pass

@saga_tool(
    semantics=ActionSemantics.COMPENSABLE,
    compensate=undo(undo_it, saga="saga.id", step="args.step", if_absent="noop"),
    in_doubt=3600.0,
)
def act_and_die(step: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)

scopes = []

def begin(log, saga_id, steps):
    scopes.append(saga_scope(saga_id, log=log))
    scopes[-1].__enter__()
    for step in range(1, steps + 1):
        act(step)

def main():
    from crash_stores import opened_by

    url, what, *sagas = sys.argv[1:]
    log = opened_by(url, os.getpid())
    if what == "live":
        with saga_scope(sagas[0], log=log) as saga:
            act(1)
            print("in the middle", flush=True)
            sys.stdin.readline()
            act(2)
        print(saga.status, flush=True)
        return
    for each in sagas:
        saga_id, _, steps = each.partition("=")
        contextvars.copy_context().run(begin, log, saga_id, int(steps or 1))
    if what == "die in it":
        with saga_scope("doubtful", log=log):
            act_and_die(1)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main()
"""

# The command line, opening the log under an address by which a test can end its lease.
CLI = """
import os, sys
from crash_stores import opened_by
os.environ["AGENT_SAGA_LOG"] = opened_by(os.environ["AGENT_SAGA_LOG"], os.getpid())
from agent_saga_core.cli import main
sys.exit(main())
"""


class Process:
    """A process and the lines it says, each waited for with a bound."""

    def __init__(self, directory: Path, url: str, *words: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *words],
            cwd=directory,
            env={**os.environ, "AGENT_SAGA_LOG": url, "PYTHONPATH": str(CRASH), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._readers: list[threading.Thread] = []
        self.out, self.err = self._reading(self.popen.stdout), self._reading(self.popen.stderr)

    def _reading(self, stream: IO[str] | None) -> queue.Queue[str | None]:
        assert stream is not None
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            with stream:
                for line in stream:
                    lines.put(line.rstrip("\n"))
            lines.put(None)

        self._readers.append(threading.Thread(target=read, daemon=True))
        self._readers[-1].start()
        return lines

    @property
    def pid(self) -> int:
        return self.popen.pid

    def hear(self) -> str:
        line = self.out.get(timeout=BOUND)
        assert line is not None, f"it ended: {self.rest(self.err)}"
        return line

    def event(self) -> dict[str, Any]:
        return json.loads(self.hear())

    def until(self, event: str, saga: str | None = None) -> list[dict[str, Any]]:
        """Every event up to this one."""
        heard = [self.event()]
        while (heard[-1]["event"], heard[-1].get("saga")) != (event, saga):
            heard.append(self.event())
        return heard

    def says(self, words: str) -> None:
        while (line := self.err.get(timeout=BOUND)) is not None:
            if words in line:
                return
        raise AssertionError(f"it ended without saying {words!r}")

    def say(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()

    def rest(self, lines: queue.Queue[str | None]) -> list[str]:
        return list(iter(lambda: lines.get(timeout=BOUND), None))

    def ends(self) -> int:
        return self.popen.wait(BOUND)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait(BOUND)
        for reader in self._readers:
            reader.join(BOUND)
        assert self.popen.stdin is not None
        self.popen.stdin.close()


class Place:
    """One log, its world, and the processes of one test."""

    def __init__(self, directory: Path, url: str, store: Store) -> None:
        self.directory, self.url, self.store = directory, url, store
        (directory / "shop.py").write_text(SHOP, "utf-8")
        self.started: list[Process] = []

    def start(self, *words: str) -> Process:
        self.started.append(Process(self.directory, self.url, *words))
        return self.started[-1]

    def cli(self, *words: str) -> Process:
        return self.start("-c", CLI, *words)

    def recoverer(self, *words: str) -> Process:
        return self.cli("recover", "--import", "shop", "--json", *words)

    def watch(self, *words: str) -> Process:
        return self.recoverer("--watch", "--interval", "0.05", *words)

    def dead(self, *sagas: str, what: str = "die") -> None:
        """Sagas (`id=steps`) whose process was killed, and whose lease is over."""
        died = self.start("shop.py", self.url, what, *sagas)
        assert died.ends() == -signal.SIGKILL, died.rest(died.err)
        self.store.bury(self.url, died.pid)

    def kill(self, process: Process) -> None:
        process.signal(signal.SIGKILL)
        process.ends()
        self.store.bury(self.url, process.pid)

    def open_gate(self, process: Process) -> None:
        (self.directory / f"gate-{process.pid}").open("w", encoding="utf-8").close()

    def undone(self) -> list[tuple[int, str, int, str]]:
        """What compensators were asked, in order: process, saga, step, key."""
        world = self.directory / "world"
        lines = world.read_text("utf-8").split("\n")[:-1] if world.exists() else []
        return [(int(pid), saga, int(step), key) for _, pid, saga, step, key in map(str.split, lines)]

    def types(self, saga_id: str) -> list[str]:
        log = open_log(self.url, create=False)
        try:
            return [str(record.type) for record in log.read(saga_id)]
        finally:
            log.close()


@pytest.fixture
def place(tmp_path: Path, log_url: str, store: Store) -> Iterator[Place]:
    made = Place(tmp_path, log_url, store)
    yield made
    for process in made.started:
        process.close()


@pytest.mark.promise("recover-anywhere", "compensate-once", "one-owner", "lifo")
@pytest.mark.timeout(300)
@on_every_store
@pytest.mark.parametrize("concurrency", [1, 8])
def test_two_recoverers_on_200_dead_sagas_of_uneven_length(place: Place, concurrency: int) -> None:
    lengths = {f"saga-{n:03}": 1 + n * 7 % 6 for n in range(200)}
    place.dead(*(f"{saga_id}={steps}" for saga_id, steps in lengths.items()))
    (place.directory / "gates").touch()
    recoverers = [place.recoverer("--concurrency", str(concurrency)) for _ in range(2)]
    for each in recoverers:
        each.says("at the gate")  # in its first compensation, so that each of them has work by construction
    for each in recoverers:
        place.open_gate(each)
    reports = [json.loads("\n".join(each.rest(each.out))) for each in recoverers]
    assert [each.ends() for each in recoverers] == [0, 0]
    undone = place.undone()
    assert {pid for pid, *_ in undone} == {each.pid for each in recoverers}
    assert Counter((saga, step) for _, saga, step, _ in undone) == {
        (saga_id, step): 1 for saga_id, steps in lengths.items() for step in range(1, steps + 1)
    }
    first, second = (set(report["recovered"]) for report in reports)
    assert first and second and not first & second and first | second == set(lengths)
    log = open_log(place.url, create=False)
    try:
        for saga_id, steps in lengths.items():
            assert [step for _, saga, step, _ in undone if saga == saga_id] == list(range(steps, 0, -1))
            assert len({pid for pid, saga, *_ in undone if saga == saga_id}) == 1
            state = read_saga(log, saga_id)
            assert state.status is SagaStatus.ROLLED_BACK and state.report is not None and state.report.clean
            assert [str(record.type) for record in log.read(saga_id)].count("CLAIM") == 1
        assert log.verify().intact and log.unfinished().saga_ids == ()
    finally:
        log.close()


@pytest.mark.promise("recover-anywhere", "compensate-once")
@on_every_store
def test_a_recoverer_that_is_killed_in_a_compensation_is_finished_by_the_other_watch(place: Place) -> None:
    place.dead("a=3", "b=3")
    (place.directory / "gates").touch()
    first = place.watch()
    first.says("at the gate")
    ((_, held, step, key),) = place.undone()
    (place.directory / "gates").unlink()
    second = place.watch()
    (other,) = {"a", "b"} - {held}
    assert [event["event"] for event in second.until("recovered", other)] == ["watching", "looked", "recovered"]
    assert [saga for _, saga, *_ in place.undone()] == [held, other, other, other]
    place.kill(first)
    second.until("recovered", held)
    again = [(step, key) for _, saga, step, key in place.undone() if saga == held]
    assert again[:2] == [(step, key), (step, key)], "between its effect and its record: again, with the same key"
    assert [step for step, _ in again] == [3, 3, 2, 1]
    second.signal(signal.SIGTERM)
    assert second.ends() == 0


@pytest.mark.promise("one-owner")
@on_every_store
def test_a_daemon_touches_nothing_of_a_healthy_process_of_the_same_app_on_the_same_log(place: Place) -> None:
    healthy = place.start("shop.py", place.url, "live", "healthy")
    assert healthy.hear() == "in the middle"
    before = place.types("healthy")
    assert before == ["START", "INTENT", "DONE"]
    daemon = place.watch("--metrics", "0", "--concurrency", "4")
    url = next(event["metrics"] for event in daemon.until("serving"))
    for name in ("one", "two", "three"):  # each is found by a round that saw the healthy one, too
        place.dead(name)
        daemon.until("recovered", name)
    with urllib.request.urlopen(url, timeout=BOUND) as answer:
        assert 'agent_saga_unfinished_sagas{status="live"} 1.0' in answer.read().decode()
    assert place.types("healthy") == before
    assert [saga for _, saga, *_ in place.undone()] == ["one", "two", "three"]
    healthy.say("go on")
    assert healthy.hear() == "COMMITTED" and healthy.ends() == 0
    assert place.types("healthy") == ["START", "INTENT", "DONE", "INTENT", "DONE", "COMMITTED"]
    daemon.signal(signal.SIGTERM)
    assert daemon.ends() == 0
    assert all(saga != "healthy" for _, saga, *_ in place.undone())


@pytest.mark.promise("recover-anywhere", "one-owner")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@on_every_store
def test_a_daemon_that_is_asked_to_end_finishes_what_is_in_hand_and_hands_back_what_waits(
    place: Place, number: int
) -> None:
    """On a store with leases, too, what it hands back is free at once, not when its lease has run out."""
    place.dead(what="die in it")
    daemon = place.watch()
    assert daemon.event()["event"] == "watching"
    place.dead("marker")
    daemon.until("recovered", "marker")  # the doubtful one is claimed by now, and waits an hour
    (place.directory / "gates").touch()
    place.dead("in-hand=2")
    daemon.says("at the gate")
    log = open_log(place.url, create=False)
    try:
        assert log.is_live("doubtful") and log.is_live("in-hand")
        daemon.signal(number)
        place.open_gate(daemon)
        daemon.until("recovered", "in-hand")
        assert [event["event"] for event in daemon.until("stopped")] == ["stopped"]
        assert daemon.ends() == 0
        assert not log.is_live("doubtful")
        assert log.claim("doubtful")[-1].type == "CLAIM"
        log.release("doubtful")
    finally:
        log.close()
    assert [(saga, step) for _, saga, step, _ in place.undone()] == [("marker", 1), ("in-hand", 2), ("in-hand", 1)]


@pytest.mark.promise("recover-anywhere", "one-owner")
@pytest.mark.parametrize("store", ["postgres", "nats", "redis"], indirect=True)
def test_a_lease_that_nobody_ended_runs_out_before_the_eyes_of_two_daemons(place: Place) -> None:
    """Nothing is done behind the log's back: on NATS nobody else has seen it run out, and both have to watch it."""
    place.url = place.url.replace(f"lease={LEASE}", "lease=3")
    died = place.start("shop.py", place.url, "die", "left=3")
    assert died.ends() == -signal.SIGKILL, died.rest(died.err)
    daemons = [place.watch() for _ in range(2)]
    for each in daemons:
        assert each.event()["event"] == "watching"
    recovered = queue.Queue[Process]()

    def listen(to: Process) -> None:
        for line in iter(to.out.get, None):
            if json.loads(line)["event"] == "recovered":
                recovered.put(to)

    listeners = [threading.Thread(target=listen, args=(each,), daemon=True) for each in daemons]
    for listener in listeners:
        listener.start()
    winner = recovered.get(timeout=BOUND)
    for each, listener in zip(daemons, listeners, strict=True):
        each.signal(signal.SIGTERM)
        assert each.ends() == 0
        listener.join(BOUND)
    assert recovered.empty(), "both say so"
    assert [(pid, step) for pid, _, step, _ in place.undone()] == [(winner.pid, step) for step in (3, 2, 1)]
    assert place.types("left").count("CLAIM") == 1


@pytest.mark.promise("honest-store")
@pytest.mark.parametrize("store", ["postgres", "nats", "redis"], indirect=True)
def test_of_a_process_that_was_just_killed_nobody_says_that_it_runs(place: Place) -> None:
    died = place.start("shop.py", place.url, "die", "left=1")
    assert died.ends() == -signal.SIGKILL, died.rest(died.err)
    shown = place.cli("show", "left")
    said = " ".join(" ".join(shown.rest(shown.out)).split())
    assert shown.ends() == 0 and "running process" not in said
    assert "Its owner runs, or died" in said and f"its lease ({LEASE}" in said
    assert "agent-saga recover --saga left" in said and "agent-saga recover --watch" in said
    if place.url.startswith("nats:"):  # there the others wait, to know it
        return
    resolved = place.cli("resolve", "left", "1", "--as", "accepted", "--by", "ada", "--note", "seen")
    resolved.says("or its lease is over")
    assert resolved.ends() == 4
    once = place.cli("recover", "--import", "shop")
    said = " ".join(" ".join(once.rest(once.out)).split())
    assert once.ends() == 0 and said.startswith("owned left") and "or died less than its lease" in said


@pytest.mark.promise("recover-anywhere")
@on_every_store
def test_what_failed_for_one_recoverer_makes_the_next_one_wait(place: Place) -> None:
    """Nothing but the log tells the second daemon, and what it lists as dead letters is the one saga that tried."""
    (place.directory / "down").touch()
    place.dead(*(f"saga-{n}" for n in range(5)))
    first = place.watch()
    events = [event for event in (first.event() for _ in range(7)) if event["event"] not in START]
    assert sorted(event["event"] for event in events) == ["attention", *["untouched"] * 4]
    first.signal(signal.SIGTERM)
    assert first.ends() == 0
    (letter,) = {event["saga"] for event in events if event["event"] == "attention"}
    assert [saga for _, saga, *_ in place.undone()] == [letter] * 3
    second = place.watch()
    told = {event["saga"]: event for event in (second.event() for _ in range(7)) if event["event"] not in START}
    second.signal(signal.SIGTERM)
    assert second.ends() == 0
    letters = {saga for _, saga, *_ in place.undone()}
    assert told[letter]["event"] == "attention"
    # The compensator is given 4 s. Where the machine took longer to get here, one more saga has tried it, not four.
    assert len(letters) <= 2
    for saga in told.keys() - letters:
        assert told[saga]["event"] == "untouched" and "'fleet.undo' fails" in told[saga]["reason"]
    listed = place.cli("list", "--attention", "--json")
    heads = json.loads("\n".join(listed.rest(listed.out)))
    assert {(head["saga_id"], head["status"], head["attention"]) for head in heads} == {
        (saga, "NEEDS_ATTENTION", 1) for saga in letters
    }
    (place.directory / "down").unlink()
    explicit = place.recoverer()
    report = json.loads("\n".join(explicit.rest(explicit.out)))
    assert explicit.ends() == 0 and sorted(report["recovered"]) == [f"saga-{n}" for n in range(5)]
    listed = place.cli("list", "--attention", "--json")
    assert json.loads("\n".join(listed.rest(listed.out))) == []
