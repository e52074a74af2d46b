"""The SQLite log between real processes: killed, stopped, forked, busy, without permission, and while it is made."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from agent_saga_core.errors import LogUnavailable, SagaBusy
from agent_saga_core.log.sqlite import SqliteLog
from agent_saga_core.log.sqlite import connection as connection_module
from agent_saga_core.log.sqlite import place as place_module
from agent_saga_core.log.sqlite.place import Place, WriteGate
from agent_saga_core.records import Record

BOUND = 60.0
PRELUDE = """
import os, signal, sys, threading
from agent_saga_core.errors import *
from agent_saga_core.log.sqlite import SqliteLog, init
from agent_saga_core.records import Record

def record(saga, n, kind="INTENT", time=1000.0, epoch=1, **data):
    return Record(saga=saga, n=n, epoch=epoch, type=kind, time=time, data=data)

def say(text):
    os.write(1, (text + "\\n").encode())

def wait():
    os.read(0, 1)

path = sys.argv[1]
"""


def record(saga: str, n: int, kind: str = "INTENT") -> Record:
    return Record(saga=saga, n=n, epoch=1, type=kind, time=1000.0, data={})


class Process:
    """A Python process that says lines and waits for bytes."""

    def __init__(self, script: str, path: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(path)],
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

    def kill(self) -> None:
        self.popen.kill()
        self.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def one(script: str) -> Process:
        started.append(Process(script, tmp_path / "log.db"))
        return started[-1]

    yield one
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.end()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


# --- ownership

OWNER = """
log = SqliteLog(path)
log.claim("a")
log.flush(log.append(record("a", 1, "START")))
say("owned")
wait()
log.flush(log.append(record("a", 2)))
say("went on")
wait()
"""


def test_the_kernel_frees_what_a_killed_owner_owned(path: Path, start: Callable[[str], Process]) -> None:
    owner = start(OWNER)
    assert owner.hear() == "owned"
    log = SqliteLog(path)
    assert log.is_live("a")
    owner.popen.send_signal(signal.SIGSTOP)  # stopped is not dead
    with pytest.raises(SagaBusy):
        log.claim("a")
    assert not log.owned("a")
    owner.popen.send_signal(signal.SIGCONT)
    owner.go_on()
    assert owner.hear() == "went on"
    owner.kill()
    assert not log.is_live("a")
    assert [entry.type for entry in log.claim("a")] == ["START", "INTENT", "CLAIM"]
    log.close()
    assert SqliteLog(path).verify().intact


# --- kills

KILLED = """
log = SqliteLog(path)
me, run = str(os.getpid()), 0
say("ready")
while True:
    run += 1
    saga = f"{me}-{run}"
    log.claim(saga, fresh=True)
    size = (run * 7919) % 20_000
    for n in range(1, 5):
        kind = "START" if n == 1 else "COMMITTED" if n == 4 and run % 2 else "INTENT"
        ticket = log.append(record(saga, n, kind, fill="x" * size))
        (log.write if n == 3 else log.flush)(ticket)
        say(f"{saga} {n} {kind}")
    log.release(saga)
"""

COMPACTING = """
say("ready")
while True:
    log = SqliteLog(path)
    log.compact(keep_days=0.0)
    log.close()
    say("compacted")
"""


@pytest.mark.timeout(300)
def test_a_kill_at_any_moment_loses_nothing_that_was_acknowledged(path: Path, start: Callable[[str], Process]) -> None:
    dice = random.Random(7)
    told: dict[str, tuple[int, str]] = {}
    SqliteLog(path).close()
    compactions = 0
    for _ in range(8):
        writers = [start(KILLED) for _ in range(3)]
        compactor = start(COMPACTING)
        for process in (*writers, compactor):
            assert process.hear() == "ready"
        for _ in range(dice.randrange(1, 6)):
            for writer in writers:
                _note(told, writer.hear())
        # Each dies somewhere else in what it does next; what it said meanwhile counts as well.
        for process in dice.sample([*writers, compactor], 4):
            process.popen.kill()
            for line in process.rest():
                if line == "compacted":
                    compactions += 1
                else:
                    _note(told, line)
        log = SqliteLog(path)
        assert log.verify().intact
        open_ones = log.unfinished()
        assert not open_ones.damage
        for saga, (n, kind) in told.items():
            found = log.read(saga)
            if kind == "COMMITTED":
                assert found == () or found[-1].type == "COMMITTED", saga
            elif found and found[-1].type == "COMMITTED":
                assert found[-1].n == 4
            elif int(saga.rpartition("-")[2]) % 2 and n == 3 and not found:
                continue  # committed without a word, and forgotten by the compaction
            else:
                assert len(found) >= n and saga in open_ones.saga_ids, saga
                assert not log.is_live(saga)
        log.close()
    assert compactions and len(told) > 20


def _note(told: dict[str, tuple[int, str]], line: str) -> None:
    if line:
        saga, n, kind = line.split(" ")
        told[saga] = (int(n), kind)


COMING_AND_GOING = """
say("ready")
wait()
me = str(os.getpid())
for run in range(25):
    log = SqliteLog(path)
    log.claim(f"{me}-{run}", fresh=True)
    log.append(record(f"{me}-{run}", 1, "START"))
    log.flush(log.append(record(f"{me}-{run}", 2)))
    assert len(log.read(f"{me}-{run}")) == 2
    log.close()
say("done")
"""


def test_the_last_to_leave_and_the_next_to_come_do_not_hurt_each_other(
    path: Path, start: Callable[[str], Process]
) -> None:
    SqliteLog(path).close()
    visitors = [start(COMING_AND_GOING) for _ in range(4)]
    for visitor in visitors:
        assert visitor.hear() == "ready"
    for visitor in visitors:
        visitor.go_on()
    assert [visitor.hear() for visitor in visitors] == ["done"] * 4
    log = SqliteLog(path)
    assert len(log.saga_ids()) == 100 and log.verify().records == 200 and log.verify().intact
    log.close()


# --- fork

FORKING = """
log = SqliteLog(path)
log.claim("a")
log.flush(log.append(record("a", 1, "START")))
log.append(record("a", 2))           # in the buffer while forking
child = os.fork()
if child == 0:
    code = 0
    try:
        for call in (
            lambda: log.append(record("a", 3)),
            lambda: log.claim("b"),
            lambda: log.read("a"),
        ):
            try:
                call()
                code = 1
            except LogUnavailable:
                pass
        if log.owned("a"):
            code = 2
        log.release("a")
        log.close()
        own = SqliteLog(path)        # a log of its own is another matter
        try:
            own.claim("a")
            code = 3
        except SagaBusy:
            pass
        own.claim("child")
        own.append(record("child", 1, "START"))
        END
        own.close()
    except Exception:
        code = 9
    EXIT
_, status = os.waitpid(child, 0)
say(str(status))
log.flush(log.append(record("a", 3)))
say("still owned" if log.owned("a") else "lost")
wait()
"""


@pytest.mark.parametrize(
    ("end", "leave", "status"),
    [
        ("pass", "os._exit(code)", 0),
        ("pass", "sys.exit(code)", 0),  # everything that it inherited is thrown away
        ("raise ValueError", "os._exit(code)", 9 << 8),
        ("os.kill(os.getpid(), signal.SIGKILL)", "pass", signal.SIGKILL),
    ],
    ids=["returns", "exits", "raises", "killed"],
)
def test_a_forked_child_leaves_its_parents_log_alone(
    path: Path, start: Callable[[str], Process], end: str, leave: str, status: int
) -> None:
    parent = start(FORKING.replace("END", end).replace("EXIT", leave))
    assert parent.hear() == str(int(status))
    assert parent.hear() == "still owned"
    log = SqliteLog(path)
    with pytest.raises(SagaBusy):
        log.claim("a")
    parent.kill()
    assert [entry.n for entry in log.claim("a")] == [1, 2, 3, 4]
    assert [entry.type for entry in log.claim("child")] == (["START", "CLAIM"] if end == "pass" else [])
    log.close()
    assert SqliteLog(path).verify().intact


BUSY_FORKING = """
log = SqliteLog(path)
log.claim("a")
log.flush(log.append(record("a", 1, "START")))
inside, done = threading.Event(), threading.Event()
n = [1]

def write():
    while not done.is_set():
        n[0] += 1
        log.flush(log.append(record("a", n[0])))
        inside.set()

def read():
    while not done.is_set():
        assert len(log.read("a")) <= n[0]

threads = [threading.Thread(target=write), threading.Thread(target=read)]
for thread in threads:
    thread.start()
inside.wait()
statuses = []
for k in range(20):
    child = os.fork()
    if child == 0:
        try:
            own = SqliteLog(path)
            own.claim(f"child-{k}")
            own.flush(own.append(record(f"child-{k}", 1, "START")))
            assert own.verify().intact
            os._exit(0)
        finally:
            os._exit(1)
    statuses.append(os.waitpid(child, 0)[1])
done.set()
for thread in threads:
    thread.join()
say(str(statuses))
say(str(len(log.read("a")) == n[0] and log.verify().intact))
"""


@pytest.mark.timeout(200)
def test_a_process_that_forks_while_its_threads_use_the_log(path: Path, start: Callable[[str], Process]) -> None:
    parent = start(BUSY_FORKING)
    assert parent.hear() == str([0] * 20)
    assert parent.hear() == "True"
    assert parent.end() == 0
    log = SqliteLog(path)
    assert log.verify().intact and len(log.saga_ids()) == 21
    log.close()


TAINTED = """
log = SqliteLog(path)
log.claim("a")
log.flush(log.append(record("a", 1, "START")))
with log._connections.reading() as connection:      # as a signal handler would that forks in the middle of it
    child = os.fork()
if child == 0:
    try:
        SqliteLog(path)
    except LogUnavailable as error:
        say(str(error))
    sys.exit(0)                                     # throws the inherited connection away
os.waitpid(child, 0)
log.flush(log.append(record("a", 2)))
say(str(len(log.read("a"))))
"""


def test_a_child_that_inherited_an_open_connection_does_not_use_the_log(start: Callable[[str], Process]) -> None:
    parent = start(TAINTED)
    assert "was forked while its parent used the log" in parent.hear()
    assert parent.hear() == "2"
    assert parent.end() == 0


ORPHANED = """
log = SqliteLog(path)
log.claim("a")
log.flush(log.append(record("a", 1, "START")))
with log._connections.reading() as connection:
    child = os.fork()
if child == 0:
    say("child")
    wait()
    say("child ends")
    sys.exit(0)
signal.pause()
"""


def test_a_child_that_inherited_an_open_connection_never_closes_it(path: Path, start: Callable[[str], Process]) -> None:
    parent = start(ORPHANED)
    assert parent.hear() == "child"
    parent.popen.kill()
    parent.popen.wait(BOUND)
    wal = path.with_name("log.db-wal")
    left = wal.read_bytes()
    parent.go_on()
    assert parent.hear() == "child ends"
    assert parent.rest() == []  # it has ended
    assert left and wal.read_bytes() == left  # the last to close would have carried it over
    log = SqliteLog(path)
    assert [one.n for one in log.claim("a")] == [1, 2]
    log.close()


# --- busy


def test_a_program_that_holds_the_database_is_waited_for(
    path: Path, start: Callable[[str], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SqliteLog(path)
    log.claim("a")
    foreign = sqlite3.connect(path, isolation_level=None)  # knows nothing of the gate
    foreign.execute("BEGIN IMMEDIATE")
    refused = threading.Event()
    retry = log._connections._retry  # pyright: ignore[reportPrivateUsage]

    def watched(connection: sqlite3.Connection, statement: str) -> None:
        refused.set()
        retry(connection, statement)

    monkeypatch.setattr(log._connections, "_retry", watched)  # pyright: ignore[reportPrivateUsage]
    ticket = log.append(record("a", 1, "START"))
    flush = threading.Thread(target=log.flush, args=(ticket,))
    flush.start()
    assert refused.wait(BOUND)
    assert log.read("a") == ()  # readers are not kept out
    foreign.execute("COMMIT")
    flush.join(BOUND)
    assert not flush.is_alive() and len(log.read("a")) == 1
    foreign.close()
    log.close()


@pytest.mark.parametrize("held", [59.0, 61.0])
def test_a_program_that_holds_the_database_is_waited_for_a_minute(
    path: Path, monkeypatch: pytest.MonkeyPatch, held: float
) -> None:
    log = SqliteLog(path)
    log.claim("a")
    log.flush(log.append(record("a", 1, "START")))
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    looks: list[float] = []

    def monotonic() -> float:
        if looks:  # it was refused once, and looks how long it has waited
            foreign.execute("COMMIT")
        looks.append(held if looks else 0.0)
        return looks[-1]

    ticket = log.append(record("a", 2))
    monkeypatch.setattr(connection_module, "time", SimpleNamespace(monotonic=monotonic))
    if held < 60:
        log.flush(ticket)
    else:
        with pytest.raises(LogUnavailable, match="another program holds the database"):
            log.flush(ticket)
    monkeypatch.undo()
    assert looks == [0.0, held] and len(log.read("a")) == (2 if held < 60 else 1)
    foreign.close()
    log.close()


def test_another_writer_is_waited_for_a_minute(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SqliteLog(path)
    log.claim("a")
    other = WriteGate(Place(path, force=False), BOUND)
    asked: list[float | None] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            asked.append(timeout)
            other.leave()
            return super().wait(BOUND)

    other.enter()
    ticket = log.append(record("a", 1, "START"))
    monkeypatch.setattr(place_module, "threading", SimpleNamespace(Event=Event, Thread=threading.Thread))
    log.flush(ticket)
    monkeypatch.undo()
    assert asked == [60.0] and len(log.read("a")) == 1
    log.close()


def test_a_program_that_never_lets_go_is_one_clear_line(path: Path) -> None:
    log = SqliteLog(path, busy_timeout=0.1)
    log.claim("a")
    ticket = log.append(record("a", 1, "START"))
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(LogUnavailable, match="another program holds the database") as caught:
        log.flush(ticket)
    assert "\n" not in str(caught.value)
    with pytest.raises(LogUnavailable):
        log.append(record("a", 2))
    foreign.close()
    log.close()
    assert SqliteLog(path).read("a") == ()


STOPPED = """
log = SqliteLog(path)
log._connections.gate.enter()
say("inside")
wait()
log._connections.gate.leave()
say("left")
wait()
"""


def test_a_process_that_is_stopped_in_a_write_is_waited_for_and_then_named(
    path: Path, start: Callable[[str], Process]
) -> None:
    stopped = start(STOPPED)
    assert stopped.hear() == "inside"
    stopped.popen.send_signal(signal.SIGSTOP)
    impatient = SqliteLog(path, busy_timeout=0.1)
    with pytest.raises(LogUnavailable, match=r"holds .*log\.db-locks/write for more than 0\.1 s"):
        impatient.claim("a")  # before any effect
    impatient.close()
    log = SqliteLog(path)
    claiming = threading.Thread(target=log.claim, args=("a",))
    claiming.start()
    stopped.popen.send_signal(signal.SIGCONT)
    stopped.go_on()
    claiming.join(BOUND)
    assert not claiming.is_alive() and log.owned("a")
    log.flush(log.append(record("a", 1, "START")))
    log.close()


def test_one_at_a_time_passes_the_gate(path: Path) -> None:
    SqliteLog(path).close()
    place = Place(path, force=False)
    gates = [WriteGate(place, BOUND) for _ in range(8)]
    inside: list[int] = []
    most: list[int] = []

    def pass_it(gate: WriteGate) -> None:
        for _ in range(50):
            gate.enter()
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            gate.leave()

    threads = [threading.Thread(target=pass_it, args=(gate,)) for gate in gates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    assert len(most) == 400 and max(most) == 1
    assert gates[0].try_enter() and not gates[1].try_enter()
    gates[0].leave()
    assert gates[1].try_enter()
    gates[1].leave()


# --- making

MAKING = """
say("ready")
wait()
done = init(path)
log = SqliteLog(path)
log.claim(str(os.getpid()), fresh=True)
log.flush(log.append(record(str(os.getpid()), 1, "START")))
say("made" if done.made else "found")
wait()
"""


def test_of_several_that_make_a_log_one_does(path: Path, start: Callable[[str], Process]) -> None:
    makers = [start(MAKING) for _ in range(6)]
    for maker in makers:
        assert maker.hear() == "ready"
    for maker in makers:
        maker.go_on()
    said = [maker.hear() for maker in makers]
    assert sorted(said) == ["found"] * 5 + ["made"]
    log = SqliteLog(path, create=False)
    assert sorted(log.saga_ids()) == sorted(str(maker.popen.pid) for maker in makers)
    assert all(log.is_live(saga_id) for saga_id in log.saga_ids())
    log.close()


KILLED_MAKING = """
import sqlite3
left = int(sys.argv[2]) if len(sys.argv) > 2 else STEP
def trace(frame, event, arg):
    global left
    if "agent_saga_core/log" in frame.f_code.co_filename:
        def local(frame, event, arg):
            global left
            if event == "line":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return local
        return local
sys.settrace(trace)
SqliteLog(path)
sys.settrace(None)
say("done")
"""


@pytest.mark.timeout(300)
def test_a_kill_while_it_is_made_leaves_what_can_be_made_again(tmp_path: Path) -> None:
    for step in range(0, 10_000, 61):
        path = tmp_path / f"log-{step}.db"
        maker = Process(KILLED_MAKING.replace("STEP", str(step)), path)
        said = maker.hear()
        assert maker.end() == (0 if said else -signal.SIGKILL)
        log = SqliteLog(path)
        log.claim("a")
        log.flush(log.append(record("a", 1, "START")))
        assert log.verify().intact
        log.close()
        if said:
            break
    else:
        raise AssertionError("it never came to its end")
    assert step > 100


# --- permissions

READER = """
import json
os.setuid(65534)
answers = []
for create in (True, False):
    try:
        log = SqliteLog(path, create=create)
        answers.append(list(log.saga_ids()))
        try:
            log.claim("a")
            answers.append("claimed")
        except LogUnavailable as error:
            answers.append(str(error))
    except LogUnavailable as error:
        answers.append(str(error))
say(json.dumps(answers))
"""


@pytest.fixture
def open_to_others() -> Iterator[Path]:
    """Like `path`, where others may look: pytest's own folders it closes again whenever a session of it starts."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory) / "log.db"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("live", [True, False])
def test_a_log_that_is_not_ours_to_write_is_refused_before_any_effect(open_to_others: Path, live: bool) -> None:
    path = open_to_others
    log = SqliteLog(path)
    log.claim("a")
    log.flush(log.append(record("a", 1, "START")))
    log.release("a")
    if not live:
        log.close()
    path.with_name("log.db-locks").chmod(0o755)
    for part in path.parent.iterdir():
        if part.is_file():
            part.chmod(0o444)
    before = {part.name: part.read_bytes() for part in path.parent.iterdir() if part.is_file()}
    reader = Process(READER, path)
    answers = json.loads(reader.hear())
    reader.end()
    refusals = [answer for answer in answers if isinstance(answer, str)]
    assert refusals and "claimed" not in refusals
    for refusal in refusals:
        assert "cannot be used" in refusal and "\n" not in refusal
    if live:  # with the write-ahead file there, it can be read
        assert answers[0] == ["a"]
    after = {part.name: part.read_bytes() for part in path.parent.iterdir() if part.is_file()}
    for name in before:
        assert after[name] == before[name] or name.endswith("-shm")
    log.close()
