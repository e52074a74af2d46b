"""Claiming for several threads at once."""

from __future__ import annotations

import threading
from collections import deque

from agent_saga_core.errors import LogCorrupted, SagaBusy
from agent_saga_core.log.base import BatchClaims
from agent_saga_core.records import Record

__all__ = ["Claims"]


class _Asked:
    """One thread that wants one saga."""

    def __init__(self, saga_id: str) -> None:
        self.saga_id = saga_id
        self.answered = False
        self.answer: tuple[Record, ...] | BaseException | None = None


class Claims:
    """Claims for the threads of one recovery: what is asked for while one claims, the next one claims together.

    Each claim has a thread that will work on it, so that nothing is held that nobody works on.
    """

    def __init__(self, log: BatchClaims) -> None:
        self._log = log
        self._asked: deque[_Asked] = deque()
        self._turn = threading.Lock()

    def claim(self, saga_id: str) -> tuple[Record, ...]:
        """See `Log.claim`.

        Raises:
            SagaBusy: Somebody else has it, or is about to.
            LogCorrupted: Damage concerns it.
            LogUnavailable: The log cannot be read or written.
        """
        mine = _Asked(saga_id)
        self._asked.append(mine)
        with self._turn:
            if not mine.answered:
                self._claim_all()
        if isinstance(mine.answer, BaseException):
            raise mine.answer
        if mine.answer is None:
            raise SagaBusy(f"saga {saga_id!r} is owned; wait until its owner is done", saga_id=saga_id)
        return mine.answer

    def _claim_all(self) -> None:
        batch: list[_Asked] = []
        while self._asked:
            batch.append(self._asked.popleft())
        try:
            found = self._log.claim_some([each.saga_id for each in batch])
        except BaseException as error:
            for each in batch:
                each.answer, each.answered = _again(error), True
            raise
        for each in batch:
            each.answer, each.answered = found.get(each.saga_id), True


def _again(error: BaseException) -> BaseException:
    """The same failure, for another thread: one exception has one traceback."""
    if isinstance(error, LogCorrupted):
        return LogCorrupted(str(error), where=error.where)
    try:
        made = type(error)(str(error))
    except TypeError:
        return error
    made.__cause__ = error.__cause__
    return made
