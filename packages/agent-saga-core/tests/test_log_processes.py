"""Ownership between real processes: killed, stopped, forked, and children that outlive their parents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from agent_saga_core.errors import SagaBusy
from agent_saga_core.log import FileLog, locks
from agent_saga_core.records import Record

PRELUDE = """
import os, signal, sys
from agent_saga_core.errors import *
from agent_saga_core.log import FileLog
from agent_saga_core.records import Record

def record(saga, n, kind="INTENT"):
    return Record(saga=saga, n=n, epoch=1, type=kind, time=1000.0, data={})

def say(text):
    os.write(1, (text + "\\n").encode())

def wait():
    os.read(0, 1)

directory = sys.argv[1]
"""


class Process:
    """A Python process that says lines and waits for bytes."""

    def __init__(self, script: str, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe

    def hear(self) -> str:
        return self._pipe(self._process.stdout).readline().decode().strip()

    def go_on(self) -> None:
        self._pipe(self._process.stdin).write(b".")
        self._pipe(self._process.stdin).flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        code = self._process.wait(timeout=20)
        self._pipe(self._process.stdin).close()
        self._pipe(self._process.stdout).close()
        return code

    def discard(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.end()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.discard()


@pytest.fixture(params=["ofd", "flock"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of each lock scheme, made in this process; a log keeps the scheme it was made with."""
    if request.param == "ofd" and locks.best_scheme() != "ofd":
        pytest.skip("no locks of open file descriptions here")
    monkeypatch.setattr("agent_saga_core.log.file.best_scheme", lambda: request.param)
    FileLog(tmp_path / "log").close()
    monkeypatch.undo()
    return tmp_path / "log"


OWNER = """
log = FileLog(directory)
log.claim("a")
log.flush(log.append(record("a", 1, "START")))
say("owned")
wait()
log.flush(log.append(record("a", 2)))
say("went on")
wait()
"""


def test_the_kernel_frees_what_a_killed_owner_owned(directory: Path, processes: list[Process]) -> None:
    owner = Process(OWNER, directory)
    processes.append(owner)
    assert owner.hear() == "owned"
    log = FileLog(directory)
    assert log.is_live("a")
    with pytest.raises(SagaBusy):
        log.claim("a")
    assert not log.owned("a")
    owner.signal(signal.SIGSTOP)  # stopped is not dead
    with pytest.raises(SagaBusy):
        log.claim("a")
    owner.signal(signal.SIGCONT)
    owner.go_on()
    assert owner.hear() == "went on"
    owner.signal(signal.SIGKILL)
    assert owner.end() == -signal.SIGKILL
    assert not log.is_live("a")
    assert [entry.type for entry in log.claim("a")] == ["START", "INTENT", "CLAIM"]
    log.close()
    assert FileLog(directory).verify().intact


FORKING = """
log = FileLog(directory)
log.claim("a")
log.flush(log.append(record("a", 1, "START")))
log.append(record("a", 2))           # in the buffer while forking
child = os.fork()
if child == 0:
    code = 0
    try:
        for call in (
            lambda: log.append(record("a", 3)),
            lambda: log.flush(10**6),
            lambda: log.claim("b"),
            lambda: log.read("a"),
        ):
            try:
                call()
                if call.__code__.co_names[1] != "flush":
                    code = 1
            except LogUnavailable:
                pass
        if log.owned("a"):
            code = 2
        log.release("a")
        log.close()
        own = FileLog(directory)     # a log of its own is another matter
        try:
            own.claim("a")
            code = 3
        except SagaBusy:
            pass
        own.claim("child")
        own.append(record("child", 1, "START"))
        own.close()
        END
    except Exception:
        code = 9
    os._exit(code)
_, status = os.waitpid(child, 0)
say(str(status))
log.flush(log.append(record("a", 3)))
say("still owned" if log.owned("a") else "lost")
wait()
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("pass", 0), ("raise ValueError", 9 << 8), ("os.kill(os.getpid(), signal.SIGKILL)", signal.SIGKILL)],
    ids=["returns", "raises", "killed"],
)
def test_a_forked_child_leaves_its_parents_log_alone(
    directory: Path, processes: list[Process], end: str, status: int
) -> None:
    parent = Process(FORKING.replace("END", end), directory)
    processes.append(parent)
    assert parent.hear() == str(status)
    assert parent.hear() == "still owned"
    log = FileLog(directory)
    with pytest.raises(SagaBusy):
        log.claim("a")
    parent.signal(signal.SIGKILL)
    parent.end()
    assert [entry.n for entry in log.claim("a")] == [1, 2, 3, 4]
    assert [entry.type for entry in log.claim("child")] == ["START", "CLAIM"]
    log.close()
    assert FileLog(directory).verify().intact


OUTLIVED = """
log = FileLog(directory)
log.claim("a")
log.flush(log.append(record("a", 1, "START")))
if os.fork() == 0:
    say("child")
    wait()                            # outlives its parent, with whatever it inherited
    say("child ends")
    os._exit(0)
signal.pause()
"""


def test_a_child_that_outlives_its_parent_does_not_keep_its_sagas(directory: Path, processes: list[Process]) -> None:
    parent = Process(OUTLIVED, directory)
    processes.append(parent)
    assert parent.hear() == "child"
    log = FileLog(directory)
    with pytest.raises(SagaBusy):
        log.claim("a")
    parent.signal(signal.SIGKILL)
    parent._process.wait(timeout=20)
    assert [entry.type for entry in log.claim("a")] == ["START", "CLAIM"]
    parent.go_on()
    assert parent.hear() == "child ends"
    log.close()


def test_two_logs_in_one_process_exclude_each_other(directory: Path) -> None:
    first, second = FileLog(directory), FileLog(directory)
    first.claim("a")
    with pytest.raises(SagaBusy):
        second.claim("a")
    with pytest.raises(SagaBusy):
        first.claim("a")
    assert second.is_live("a") and first.is_live("a")
    second.release("a")  # not its own
    assert first.owned("a") and second.is_live("a")
    second.claim("b")
    first.release("a")
    assert not second.is_live("a")
    second.claim("a")
    first.close()
    assert second.owned("a") and second.owned("b")
    second.close()


FULL = """
import resource
log = FileLog(directory)
log.claim("a")
log.flush(log.append(record("a", 1, "START")))
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
n = 1
try:
    while True:
        n += 1
        log.flush(log.append(record("a", n)))
except LogUnavailable:
    say(str(n))
try:
    log.append(record("a", n + 1))
except LogUnavailable:
    say("poisoned")
log.close()
"""


def test_a_file_that_may_not_grow_poisons_and_leaves_a_readable_log(directory: Path, processes: list[Process]) -> None:
    writer = Process(FULL, directory)
    processes.append(writer)
    failed = int(writer.hear())
    assert failed > 2
    assert writer.hear() == "poisoned"
    assert writer.end() == 0
    log = FileLog(directory)
    assert log.verify().intact
    assert [entry.n for entry in log.claim("a")] == list(range(1, failed + 1))


def test_a_full_disk_poisons_and_leaves_a_readable_log(tmp_path: Path, processes: list[Process]) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(mount)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("mounting is refused here; a file that may not grow is tested instead")
    try:
        script = FULL.replace("resource.setrlimit", "(lambda *_: None)").replace('record("a", n)', "big(n)")
        script = (
            "def big(n):\n    return Record(saga='a', n=n, epoch=1, type='INTENT', time=1.0, data={'x': 'y' * 900})\n"
            + (textwrap.dedent(script))
        )
        writer = Process(script, mount / "log")
        processes.append(writer)
        failed = int(writer.hear())
        assert failed > 2
        assert writer.hear() == "poisoned"
        assert writer.end() == 0
        log = FileLog(mount / "log", create=False)
        assert log.verify().intact
        assert len(log.read("a")) == failed - 1
        log.close()
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_reader_leaves_no_trace_and_needs_no_write_permission(directory: Path, processes: list[Process]) -> None:
    log = FileLog(directory)
    log.claim("a")
    log.append(Record(saga="a", n=1, epoch=1, type="START", time=1.0, data={}))
    log.close()
    before = sorted(path.relative_to(directory) for path in directory.rglob("*"))
    script = """
    os.chdir("/")
    if os.getuid() == 0:
        for path, _, files in os.walk(directory):
            for name in (path, *(os.path.join(path, file) for file in files)):
                os.chmod(name, 0o755 if os.path.isdir(name) else 0o644)
        for path in reversed([p for p in parents(directory)]):
            os.chmod(path, 0o755)
        os.setuid(65534)
    log = FileLog(directory, create=False)
    say(",".join(log.saga_ids()) + str(len(log.read("a"))) + str(log.verify().intact) + str(log.is_live("a")))
    try:
        log.claim("a")
    except LogUnavailable as error:
        say("refused" if "Permission denied" in str(error) and "\\n" not in str(error) else repr(error))
    log.close()
    """
    helper = """
def parents(path):
    while path not in ("/", "/tmp"):
        path = os.path.dirname(path)
        if path not in ("/", "/tmp"):
            yield path
"""
    if os.getuid() != 0:
        for path in (directory, *directory.rglob("*")):
            path.chmod(0o500 if path.is_dir() else 0o400)
    reader = Process(helper + textwrap.dedent(script), directory)
    processes.append(reader)
    assert reader.hear() == "a1TrueFalse"
    assert reader.hear() == "refused"
    assert reader.end() == 0
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert sorted(path.relative_to(directory) for path in directory.rglob("*")) == before
