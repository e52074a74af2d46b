"""Holding SIGINT and SIGTERM back while a rollback or a commit runs on the main thread."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, ClassVar, Self

__all__ = ["SignalHold"]


class SignalHold:
    """While at least one is open, the two signals are recorded; when the last closes, they are raised again.

    Only the main thread has signal handlers: elsewhere this does nothing. Signals that Python does not handle, and
    SIGKILL, are not held: recovery is for those.

    Args:
        interruptions: Where the exceptions of the former handlers are put, to be raised afterwards.
        needed: False to hold nothing: swapping handlers costs as much as a flush of a fast disk.
    """

    _open: ClassVar[int] = 0
    _former: ClassVar[dict[int, Any]] = {}
    _received: ClassVar[list[int]] = []

    def __init__(self, interruptions: list[BaseException], *, needed: bool = True) -> None:
        self._interruptions = interruptions
        self._needed = needed and threading.current_thread() is threading.main_thread()
        self._counts = False

    def __enter__(self) -> Self:
        try:
            self._swap()
        except BaseException:  # a signal that came before the handlers were ours
            self.__exit__()
            raise
        return self

    def _swap(self) -> None:
        if self._needed:
            self._counts = True
            SignalHold._open += 1
            if SignalHold._open == 1:
                for number in (signal.SIGINT, signal.SIGTERM):
                    former = signal.getsignal(number)
                    if former is not None:  # None: installed by C code, not ours to replace
                        SignalHold._former[number] = former
                        signal.signal(number, SignalHold._record)

    def __exit__(self, *_: object) -> None:
        if not self._counts:
            return
        self._counts = False
        SignalHold._open -= 1
        if SignalHold._open:
            return
        for number, former in SignalHold._former.items():
            signal.signal(number, former)
        SignalHold._former.clear()
        received = list(dict.fromkeys(SignalHold._received))
        SignalHold._received.clear()
        for number in received:
            try:
                signal.raise_signal(number)
            except BaseException as interruption:  # the former handler's own exception, due after the rollback
                self._interruptions.append(interruption)

    @staticmethod
    def _record(number: int, frame: FrameType | None) -> None:
        SignalHold._received.append(number)
