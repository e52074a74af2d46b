"""A run that is read piece by piece: the saga is current only around each piece, and ends with the last one.

A generator cannot hold a scope: its context comes and goes with whoever reads it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from inspect import isawaitable
from typing import Any, Generic, Self, TypeVar

from agent_saga_core.drive import CURRENT_SAGA
from agent_saga_core.saga import Saga

__all__ = ["AsyncSagaStream", "SagaStream"]

T = TypeVar("T")
log = logging.getLogger("agent_saga")


class SagaStream(Iterator[T], Generic[T]):
    """An iterator over a run that is one saga.

    The saga is opened at the first step. It commits when the run has ended, before `StopIteration`; it is rolled back
    when the run raises, and when the stream is closed before its end. `for` does not close what it leaves early: use
    `with contextlib.closing(stream)`, or `close()`.

    Args:
        saga: The scope, not yet opened.
        start: Makes the run's own iterator, inside of the saga.
        at_end: Called with the saga and the last piece (None if there was none) when the run has ended, before the
            saga does; may suspend it.
        around: Makes a context manager that is entered with the saga and left after its end.
    """

    def __init__(
        self,
        saga: Saga,
        start: Callable[[], Iterable[T]],
        *,
        at_end: Callable[[Saga, Any], object] | None = None,
        around: Callable[[Saga], Any] | None = None,
    ) -> None:
        self.saga = saga
        self._start = start
        self._at_end = at_end
        self._around = around
        self._inside: Any = None
        self._source: Iterator[T] | None = None
        self._last: Any = None
        self._over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._over:
            raise StopIteration
        try:
            if self._source is None:
                self._open()
            assert self._source is not None
            with self.saga.attached():
                self._last = next(self._source)
            return self._last
        except StopIteration:
            self._end(None)
            raise
        except BaseException as error:
            self._end(error)
            raise

    def close(self) -> None:
        """End the run here: close its iterator and roll the saga back. Does nothing if it has ended."""
        if self._over:
            return
        if self._source is None:
            self._over = True
            return
        error = GeneratorExit("the stream was closed before its end")
        try:
            closing = getattr(self._source, "close", None)
            if closing is not None:
                with self.saga.attached():
                    closing()
        finally:
            self._end(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._over and self._source is not None and not sys.is_finalizing():
            log.warning("saga %r: its stream was dropped before its end, and is rolled back", self.saga.id)
            self.close()

    def _open(self) -> None:
        with _detaching():
            self.saga.__enter__()
            try:
                if self._around is not None:
                    self._inside = self._around(self.saga)
                    self._inside.__enter__()
                self._source = iter(self._start())
            except BaseException as error:
                self._source = iter(())
                self._end(error)
                raise

    def _end(self, error: BaseException | None) -> None:
        if self._over or self._source is None:
            self._over = True
            return
        self._over = True
        with _detaching(), self.saga.attached():
            try:
                if error is None and self._at_end is not None:
                    self._at_end(self.saga, self._last)
            except BaseException as failed:
                error = failed
                raise
            finally:
                self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        try:
            self.saga.__exit__(type(error) if error is not None else None, error, None)
        finally:
            inside, self._inside = self._inside, None
            if inside is not None:
                inside.__exit__(None, None, None)


class AsyncSagaStream(AsyncIterator[T], Generic[T]):
    """`SagaStream` for `async for`. Close one that is left early: `async with contextlib.aclosing(stream)`.

    One that is dropped before its end cannot be ended any more: its saga stays as it is, owned, until this process
    ends, and is then for recovery. That is logged as an error.
    """

    def __init__(
        self,
        saga: Saga,
        start: Callable[[], AsyncIterable[T] | Awaitable[AsyncIterable[T]]],
        *,
        at_end: Callable[[Saga, Any], Any] | None = None,
        around: Callable[[Saga], Any] | None = None,
    ) -> None:
        self.saga = saga
        self._start = start
        self._at_end = at_end
        self._around = around
        self._inside: Any = None
        self._source: AsyncIterator[T] | None = None
        self._opened = False
        self._in_piece = False
        self._last: Any = None
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._over:
            raise StopAsyncIteration
        try:
            if not self._opened:
                await self._open()
            assert self._source is not None
            self._in_piece = True
            try:
                with self.saga.attached():
                    self._last = await anext(self._source)
            finally:
                self._in_piece = False
            return self._last
        except StopAsyncIteration:
            await self._end(None)
            raise
        except BaseException as error:
            await self._end(error)
            raise

    async def aclose(self) -> None:
        """End the run here: close its iterator and roll the saga back. Does nothing if it has ended.

        Raises:
            RuntimeError: Another task is reading it at this moment; nothing was changed.
        """
        if self._over or not self._opened:
            self._over = True
            return
        if self._in_piece:
            raise RuntimeError("Another task is reading this stream. Cancel that task: that ends the run and its saga.")
        try:
            closing = getattr(self._source, "aclose", None)
            if closing is not None:
                with self.saga.attached():
                    await closing()
        finally:
            await self._end(GeneratorExit("the stream was closed before its end"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._opened and not self._over and not sys.is_finalizing():
            log.error("saga %r: its stream was dropped before its end; recovery will roll it back", self.saga.id)

    async def _open(self) -> None:
        with _detaching():
            await self.saga.__aenter__()
            self._opened = True
            if self._around is not None:
                inside = self._around(self.saga)
                inside.__enter__()
                self._inside = inside
            source: Any = self._start()
            if isawaitable(source):
                source = await source
            self._source = aiter(source)

    async def _end(self, error: BaseException | None) -> None:
        if self._over or not self._opened:
            self._over = True
            return
        self._over = True
        with _detaching(), self.saga.attached():
            try:
                if error is None and self._at_end is not None:
                    answer = self._at_end(self.saga, self._last)
                    if isawaitable(answer):
                        await answer
            except BaseException as failed:
                error = failed
                raise
            finally:
                await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        try:
            await self.saga.__aexit__(type(error) if error is not None else None, error, None)
        finally:
            inside, self._inside = self._inside, None
            if inside is not None:
                inside.__exit__(None, None, None)


@contextmanager
def _detaching() -> Generator[None]:
    """Whatever opening or ending a scope makes current here, the reader of the stream is left with what it had."""
    before = CURRENT_SAGA.get()
    try:
        yield
    finally:
        CURRENT_SAGA.set(before)
