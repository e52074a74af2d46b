"""The command line as processes: signals, the daemon, a missing extra. Nothing sleeps: every wait is for a line."""

import json
import os
import pty
import queue
import resource
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from unittest.mock import ANY

import pytest

from agent_saga_core import open_log, read_saga
from agent_saga_core.cli.stopping import Stop

BOUND = 20.0
"""Seconds that a process may take to say its next line, or to end; what is in doubt here waits longer."""

SHOP = """
import contextvars
import os
import sys

from agent_saga_core import ActionSemantics, compensator, saga_scope, saga_tool, undo

@compensator("process.refund")
def refund(charge_id: str) -> None:
    print("a compensator that talks")
    if os.path.exists("down"):
        raise ConnectionError("payments are down")

@compensator("process.cancel")
def cancel(room: int) -> None:
    pass

@compensator("process.slow")
def slow(room: int) -> None:
    print("entered", file=sys.stderr, flush=True)
    open("gate").close()  # a pipe: returns once the test has opened the other end

@saga_tool(semantics=ActionSemantics.COMPENSABLE, compensate=undo(refund, charge_id="result.id"))
def charge(amount: int) -> dict:
    return {"id": f"ch_{amount}"}

@saga_tool(semantics=ActionSemantics.COMPENSABLE, compensate=undo(cancel, room="args.room"))
def hold(room: int) -> None:
    pass

@saga_tool(semantics=ActionSemantics.COMPENSABLE, compensate=undo(slow, room="args.room"))
def reserve(room: int) -> None:
    pass

@saga_tool(
    semantics=ActionSemantics.COMPENSABLE,
    compensate=undo(slow, room="args.room", if_absent="noop"),
    in_doubt=3600.0,
)
def book(room: int) -> None:
    os._exit(9)

scopes = []

def die(tool, saga_id):
    scopes.append(saga_scope(saga_id, log="file:./log"))
    scopes[-1].__enter__()
    {"charge": charge, "hold": hold, "reserve": reserve, "book": book}[tool](1)

if __name__ == "__main__":
    for what in sys.argv[1:]:
        contextvars.copy_context().run(die, *what.split("="))
    os._exit(9)
"""


class Running:
    """A process and the lines it says, each waited for with a bound."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agent_saga_core", *words],
            cwd=directory,
            env={**os.environ, "AGENT_SAGA_LOG": "file:./log", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.readers: list[threading.Thread] = []
        self.out = self._reading(self.process.stdout)
        self.err = self._reading(self.process.stderr)

    def _reading(self, stream: IO[str] | None) -> "queue.Queue[str | None]":
        assert stream is not None
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            with stream:
                for line in stream:
                    lines.put(line.rstrip("\n"))
            lines.put(None)

        self.readers.append(threading.Thread(target=read, daemon=True))
        self.readers[-1].start()
        return lines

    def event(self, name: str, saga: Any = None) -> dict[str, Any]:
        """The next event, which has to be this one. That of the first look is left out, unless it is asked for."""
        event = self._next(name)
        if event["event"] == "looked" != name:
            event = self._next(name)
        assert (event["event"], event.get("saga")) == (name, saga), event
        return event

    def _next(self, name: str) -> dict[str, Any]:
        line = self.out.get(timeout=BOUND)
        assert line is not None, f"ended before {name!r}: {self.rest(self.err)}"
        event: dict[str, Any] = json.loads(line)
        return event

    def says(self, words: str) -> str:
        """The next line on stderr that holds these words."""
        while (line := self.err.get(timeout=BOUND)) is not None:
            if words in line:
                return line
        raise AssertionError(f"ended without saying {words!r}")

    def rest(self, lines: "queue.Queue[str | None]") -> list[str]:
        """Every line up to the end of the stream."""
        return list(iter(lambda: lines.get(timeout=BOUND), None))

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(BOUND)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(BOUND)
        for reader in self.readers:
            reader.join(BOUND)


Start = Callable[..., Running]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP, "utf-8")
    return tmp_path


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    started: list[Running] = []

    def start_one(*words: str) -> Running:
        started.append(Running(directory, *words))
        return started[-1]

    yield start_one
    for each in started:
        each.kill()


def die(directory: Path, *sagas: str) -> None:
    died = subprocess.run(
        [sys.executable, "shop.py", *sagas], cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )
    assert died.returncode == 9, died.stderr


def status(directory: Path, saga_id: str) -> str:
    return read_saga(f"file://{directory}/log", saga_id).status


WATCH = ("recover", "--watch", "--json", "--interval", "0.05", "--import", "shop")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_daemon_recovers_what_comes_and_ends_with_0(directory: Path, start: Start, number: int) -> None:
    die(directory, "charge=one")
    daemon = start(*WATCH)
    watching = daemon.event("watching")
    assert watching["log"] == f"file://{directory}/log" and watching["pid"] == daemon.process.pid
    daemon.event("recovered", "one")
    die(directory, "charge=two")
    daemon.event("recovered", "two")
    assert daemon.stop(number) == 0
    daemon.event("stopped")
    assert daemon.rest(daemon.out) == []
    assert status(directory, "two") == "ROLLED_BACK"


def test_a_saga_in_doubt_holds_up_neither_the_others_nor_the_end(directory: Path, start: Start) -> None:
    die(directory, "book=doubtful")
    die(directory, "charge=one")
    daemon = start(*WATCH)
    daemon.event("watching")
    daemon.event("recovered", "one")
    die(directory, "charge=two")
    daemon.event("recovered", "two")  # in a later round: by now the first one has claimed what waits for an hour
    log = open_log(f"file://{directory}/log", create=False)
    assert log.is_live("doubtful")
    log.close()
    assert daemon.stop() == 0
    # Handed back: another process can take it.
    report = start("recover", "--saga", "doubtful", "--dry-run", "--import", "shop", "--json")
    assert json.loads("\n".join(report.rest(report.out)))["recovered"] == ["doubtful"]


def test_the_daemon_finishes_what_is_in_hand(directory: Path, start: Start) -> None:
    os.mkfifo(directory / "gate")
    die(directory, "reserve=first", "reserve=second")
    daemon = start(*WATCH)
    daemon.event("watching")
    daemon.says("entered")  # one of them: each daemon has an order of its own
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.send_signal(signal.SIGTERM)  # as from a supervisor and its process group: one request
    with (directory / "gate").open("w", encoding="utf-8"):
        daemon.event("recovered", ANY)
    assert daemon.process.wait(BOUND) == 0
    daemon.event("stopped")
    # The other one was not begun any more.
    assert sorted(status(directory, saga_id) for saga_id in ("first", "second")) == ["ROLLED_BACK", "RUNNING"]


def test_what_needs_attention_is_told_once_and_others_wait_for_what_failed(directory: Path, start: Start) -> None:
    (directory / "down").touch()
    die(directory, "charge=stuck")
    daemon = start(*WATCH)
    daemon.event("watching")
    assert "payments are down" in daemon.event("attention", "stuck")["reason"]
    records = len(read_saga(f"file://{directory}/log", "stuck").timeline)
    die(directory, "charge=waits")
    assert "'process.refund' fails; it is tried again at 2" in daemon.event("untouched", "waits")["reason"]
    for name in ("a", "b"):  # rounds go by
        die(directory, f"hold={name}")
        daemon.event("recovered", name)
    assert daemon.stop() == 0
    daemon.event("stopped")
    assert len(read_saga(f"file://{directory}/log", "stuck").timeline) == records
    assert "a compensator that talks" in daemon.rest(daemon.err)


def test_the_daemon_waits_for_its_log_and_says_so_once(directory: Path, start: Start) -> None:
    daemon = start(*WATCH)
    assert "no log" in daemon.event("unavailable")["message"]
    die(directory, "charge=one")
    daemon.event("watching")
    daemon.event("available")
    looked = daemon.event("looked")
    assert (looked["unfinished"], looked["by_status"]["orphaned"]) == (1, 1)
    daemon.event("recovered", "one")
    assert daemon.stop() == 0


def test_a_dry_daemon_only_tells(directory: Path, start: Start) -> None:
    die(directory, "charge=one")
    before = read_saga(f"file://{directory}/log", "one")
    daemon = start(*WATCH, "--dry-run")
    daemon.event("watching")
    assert daemon.event("recovered", "one")["dry_run"] is True
    die(directory, "charge=two")
    daemon.event("recovered", "two")
    assert daemon.stop() == 0
    assert read_saga(f"file://{directory}/log", "one") == before


def test_without_json_the_daemon_writes_lines_to_stderr(directory: Path, start: Start) -> None:
    die(directory, "charge=one")
    daemon = start("recover", "--watch", "--interval", "0.05", "--import", "shop")
    assert " INFO " in daemon.says("watching file://")
    daemon.says("INFO 1 saga not ended: 1 orphaned")
    daemon.says("INFO recovered one")
    assert daemon.stop() == 0
    assert daemon.rest(daemon.out) == []


def test_a_single_recovery_tells_what_it_waits_for_and_can_be_stopped(directory: Path, start: Start) -> None:
    die(directory, "book=doubtful")
    die(directory, "charge=one")
    single = start("recover", "--import", "shop")
    line = single.says("waiting up to 3600 s")
    assert "'doubtful'" in line and "step 1 book" in line
    assert single.stop() == 128 + signal.SIGTERM
    single.says("handed back")
    assert any(line.split() == ["recovered", "one"] for line in single.rest(single.out))


def test_on_a_terminal_the_waits_are_a_moving_picture(directory: Path) -> None:
    die(directory, "book=doubtful")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "agent_saga_core", "recover", "--log", "file:./log", "--import", "shop"],
        cwd=directory,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        shown = b""
        with selectors.DefaultSelector() as selector:
            selector.register(ours, selectors.EVENT_READ)
            while b"may still land" not in shown and selector.select(BOUND):
                shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND) == 130
    os.close(ours)
    assert b"recovering: 0 of 1 saga" in shown and b"saga 'doubtful': step 1 book may still land" in shown


def test_without_its_extra_the_command_says_what_to_install() -> None:
    for missing in ("typer", "rich"):
        code = f"import sys; sys.modules[{missing!r}] = None; from agent_saga_core.cli import main; sys.exit(main())"
        bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert bare.returncode == 2 and bare.stdout == ""
        (line,) = bare.stderr.splitlines()
        assert "pip install 'agent-saga-core[cli]'" in line


def test_a_reader_that_leaves_early_causes_no_traceback(directory: Path) -> None:
    die(directory, "charge=one")
    command = f"{sys.executable} -m agent_saga_core list --log file:./log | true"
    piped = subprocess.run(command, cwd=directory, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in piped.stderr and "Exception" not in piped.stderr


def test_who_has_very_many_descriptors_is_still_woken():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this machine gives no process 1,200 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    taken: list[int] = []
    try:
        while not taken or taken[-1] < 1024:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        with Stop() as stop:
            stop.wake()
            assert stop.wait(BOUND) is False
            stop.requested = True
            assert stop.wait(BOUND) is True
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
