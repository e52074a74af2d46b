"""A saga over a fleet's tools: while it is open, none of them runs where no saga can be told."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any

from agent_saga_core.errors import DeclarationError
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping import covered

__all__ = ["Transaction"]


class Transaction:
    """A scope that also covers tools. Made by `SagaFleet.transaction`; `with` and `async with` give the `Saga`."""

    def __init__(
        self, saga: Saga, *, opened: Callable[[Transaction], None], closed: Callable[[Transaction], None]
    ) -> None:
        self._saga = saga
        self._opened = opened
        self._closed = closed
        self._covering = ExitStack()

    def cover(self, tools: Iterable[object]) -> None:
        """Cover these tools as well, until the end."""
        self._covering.enter_context(covered(self._saga, tools))

    def uncover(self) -> None:
        """Cover nothing any more."""
        self._covering.close()

    def __enter__(self) -> Saga:
        _refuse_generator(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        self._saga.__enter__()
        try:
            self._opened(self)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self._saga

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # Covered to the end of the rollback: what still runs on other threads must not slip out meanwhile.
        try:
            return self._saga.__exit__(kind, error, trace)
        finally:
            self._closed(self)

    def __aenter__(self) -> Coroutine[Any, Any, Saga]:
        _refuse_generator(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        return self._aenter()

    async def _aenter(self) -> Saga:
        await self._saga.__aenter__()
        try:
            self._opened(self)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self._saga

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            return await self._saga.__aexit__(kind, error, trace)
        finally:
            self._closed(self)


def _refuse_generator(frame: FrameType) -> None:
    if frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        raise DeclarationError(
            "A transaction was entered in a generator's body, whose context comes and goes with its caller. "
            "Open it in the caller, around the loop over the generator."
        )
