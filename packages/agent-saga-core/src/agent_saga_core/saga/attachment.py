"""Being in a saga for a block, without opening or ending it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from agent_saga_core.drive import CURRENT_SAGA

__all__ = ["Attachment"]

S = TypeVar("S")


class Attachment(AbstractContextManager[S], Generic[S]):
    """Makes a saga the current one of the running code for one block.

    Not a generator under `contextlib.contextmanager`: that sets the traceback of what leaves the block, which an
    exception may refuse (a frozen dataclass does), and another exception would come out.
    """

    __slots__ = ("_before", "_saga")

    def __init__(self, saga: S) -> None:
        self._saga = saga
        self._before: object = None

    def __enter__(self) -> S:
        self._before = CURRENT_SAGA.get()
        CURRENT_SAGA.set(self._saga)
        return self._saga

    def __exit__(self, *_: object) -> None:
        if CURRENT_SAGA.get() is self._saga:
            CURRENT_SAGA.set(self._before)
