"""Starting workers, hearing them, and ending them; every wait is bounded."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

Json = dict[str, Any]
HERE = Path(__file__).parent
BOUND = 30.0
"""Seconds that any single wait may last."""


class Zygote:
    """The process that workers are forked from."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(BOUND)
        self._statuses: dict[int, int] = {}
        command = [sys.executable, str(HERE / "crash_zygote.py"), str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()

    def fork(self, job: str, options: Json, descriptors: list[int]) -> int:
        socket.send_fds(self._connection, [json.dumps([job, options]).encode()], descriptors)
        while True:
            pid, status = json.loads(self._connection.recv(1 << 16))
            if status is None:
                return pid
            self._statuses[pid] = status

    def wait(self, pid: int) -> int:
        while pid not in self._statuses:
            ended, status = json.loads(self._connection.recv(1 << 16))
            self._statuses[ended] = status
        return self._statuses.pop(pid)

    def close(self) -> None:
        self._connection.close()
        self._process.wait(BOUND)


R = TypeVar("R", bound=Any)


def readable(sources: Iterable[R], timeout: float) -> list[R]:
    """Those of `sources` that can be read, as soon as one can; none after `timeout` seconds.

    A session of tests may have more descriptors than `select` knows.
    """
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(max(0.0, timeout))]


class Worker:
    """One worker process. With `fresh` it is an interpreter of its own, else a fork of the zygote."""

    def __init__(
        self, zygote: Zygote, job: str, options: Json, *, fresh: bool, bury: Callable[[int], None] = lambda pid: None
    ) -> None:
        self._zygote = zygote
        self._bury = bury
        self._process: subprocess.Popen[bytes] | None = None
        self._status: int | None = None
        self._heard = b""
        self._stderr = tempfile.TemporaryFile()
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        try:
            if fresh:
                command = [sys.executable, str(HERE / "crash_worker.py"), job, json.dumps(options)]
                self._process = subprocess.Popen(command, stdin=read, stdout=write, stderr=self._stderr)
                self.pid = self._process.pid
            else:
                self.pid = zygote.fork(job, options, [read, write, self._stderr.fileno()])
        finally:
            os.close(read)
            os.close(write)

    def say(self, word: str) -> None:
        os.write(self._write, f"{word}\n".encode())

    def hear(self, bound: float = BOUND) -> Json:
        """The next line that it says, within `bound` seconds."""
        until = time.monotonic() + bound
        while b"\n" not in self._heard:
            if not readable([self._read], until - time.monotonic()):
                raise AssertionError(f"worker {self.pid} says nothing; its stderr: {self.errors()}")
            got = os.read(self._read, 65536)
            if not got:
                raise AssertionError(f"worker {self.pid} has ended; its stderr: {self.errors()}")
            self._heard += got
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def has_spoken(self) -> bool:
        return b"\n" in self._heard or bool(readable([self._read], 0))

    def fileno(self) -> int:
        return self._read

    def hear_all(self) -> list[Json]:
        """All that it says until it, and whoever shares its stdout, has ended."""
        until = time.monotonic() + BOUND
        while readable([self._read], until - time.monotonic()):
            got = os.read(self._read, 65536)
            if not got:
                lines, self._heard = self._heard.splitlines(), b""
                return [json.loads(line) for line in lines]
            self._heard += got
        raise AssertionError(f"worker {self.pid} does not end; its stderr: {self.errors()}")

    def ends(self) -> int:
        """Its exit code, negative for a signal, when it has ended; by then, what it owned is free on every store."""
        if self._status is None:
            self._status = self._process.wait(BOUND) if self._process is not None else self._zygote.wait(self.pid)
            self._bury(self.pid)
        return self._status

    def wait_until_it_catches(self, number: int) -> None:
        """Until the process has a handler of its own for a signal, as Linux tells."""
        until = time.monotonic() + BOUND
        while not self._caught() >> (number - 1) & 1:
            if time.monotonic() > until:
                raise AssertionError(f"worker {self.pid} does not catch {number}; its stderr: {self.errors()}")
            os.sched_yield()

    def wait_until_it_is(self, state: str) -> None:
        """Until the process is stopped (`T`) or waits for something (`S`), as Linux tells."""
        until = time.monotonic() + BOUND
        while self._of_status("State") != state:
            if time.monotonic() > until:
                raise AssertionError(f"worker {self.pid} does not come to {state}; its stderr: {self.errors()}")
            os.sched_yield()

    def _caught(self) -> int:
        return int(self._of_status("SigCgt"), 16)

    def _of_status(self, name: str) -> str:
        status = Path(f"/proc/{self.pid}/status").read_text("ascii", "replace")
        return next(line for line in status.splitlines() if line.startswith(f"{name}:")).split()[1]

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens to a process that has just ended by itself."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        assert self.ends() == -signal.SIGKILL

    def errors(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def close(self) -> None:
        """End it if it lives, and forget it; harmless twice."""
        if self._stderr.closed:
            return
        if self._status is None:
            self.signal(signal.SIGKILL)
            self.ends()
        os.close(self._read)
        os.close(self._write)
        self._stderr.close()


def first_to_speak(workers: list[Worker], count: int) -> list[Worker]:
    """Those of `workers` that have something to say, as soon as `count` of them have."""
    until = time.monotonic() + BOUND
    while len(speaking := [worker for worker in workers if worker.has_spoken()]) < count:
        silent = [worker for worker in workers if worker not in speaking]
        if not readable(silent, until - time.monotonic()):
            raise AssertionError(f"only {len(speaking)} of {len(workers)} workers said something")
    return speaking


Start = Callable[..., Worker]
"""The fixture `start`: a job and its options."""
