"""SIGINT and SIGTERM as a request to end: what is in hand is finished first."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

__all__ = ["Stop"]

SAME = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """While it is open, the first SIGINT or SIGTERM is noted, and another one later ends the process at once.

    Not one that comes within `SAME` seconds: a supervisor and its process group often deliver one request twice.

    Ending at once is safe: the log holds what was begun, and another recovery goes on from there.

    The handler does nothing but write to a pipe that `wait` reads: setting an event in it could block for ever on a
    lock that the interrupted thread holds. Outside the main thread there are no handlers to install, and only `wake`
    has an effect.

    Attributes:
        requested: Whether to end.
        signal_number: The signal that asked for it; 0 if none did.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signal_number = 0
        self._heard_at = 0.0
        self._former: dict[int, Any] = {}
        self._pipe = (-1, -1)

    def __enter__(self) -> Self:
        self._pipe = os.pipe()
        for descriptor in self._pipe:
            os.set_blocking(descriptor, False)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and shells' background jobs ask for
                    self._former[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        read, write = self._pipe
        self._pipe = (-1, -1)
        os.close(read)
        os.close(write)

    def wait(self, timeout: float | None) -> bool:
        """Return whether to end, after a signal, after `wake`, or after `timeout` seconds."""
        if not self.requested:
            with selectors.DefaultSelector() as selector:  # `select` knows no descriptor from 1024 on
                selector.register(self._pipe[0], selectors.EVENT_READ)
                selector.select(timeout)
        self._drain()
        return self.requested

    def wake(self) -> None:
        """Let `wait` return; from any thread."""
        self._write(b"w")

    def _drain(self) -> None:
        try:
            while os.read(self._pipe[0], 4096):
                pass
        except BlockingIOError:
            pass

    def _write(self, byte: bytes) -> None:
        try:
            os.write(self._pipe[1], byte)
        except (BlockingIOError, OSError):  # full: `wait` returns anyway; closed: nobody waits any more
            pass

    def _heard(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._heard_at < SAME:
            return
        if self.requested:
            os.write(2, b"agent-saga: leaving at once; the next recovery goes on from the log\n")
            os._exit(128 + number)
        self.requested = True
        self.signal_number = number
        self._heard_at = now
        self._write(b"s")
