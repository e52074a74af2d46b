"""A run that is read piece by piece: the saga is current only around each piece, and ends with the last one.

A generator cannot hold a scope: its context comes and goes with whoever reads it.

Adapters derive their streams from these classes. What only this module uses has two underscores, so that no method of
theirs takes the place of one that ends the saga.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from inspect import isawaitable
from typing import Any, Generic, Self, TypeVar, cast

from agent_saga_core.drive import CURRENT_SAGA
from agent_saga_core.errors import SagaNotRunning
from agent_saga_core.saga import Saga
from agent_saga_core.saga.apart import DROPPED_WAIT

__all__ = ["AsyncSagaStream", "SagaStream"]

T = TypeVar("T")
log = logging.getLogger("agent_saga")


class StreamClosed(Exception):
    """Why the saga of a stream that was closed before its end is rolled back. Nobody sees it raised."""


class _Reading:
    """Who reads a stream at this moment: one at a time. Safe against an interrupt anywhere."""

    __slots__ = ("_busy", "_seat")

    def __init__(self, busy: str) -> None:
        self._busy = busy
        self._seat: dict[str, object] = {}

    def sit(self, me: object) -> None:
        if self._seat.setdefault("", me) is not me:
            raise RuntimeError(f"{self._busy}; nothing was changed.")

    def rise(self, me: object) -> None:
        if self._seat.get("") is me:
            del self._seat[""]


class SagaStream(Iterator[T], Generic[T]):
    """An iterator over a run that is one saga.

    The saga is opened at the first step. It commits when the run has ended, before `StopIteration`; it is rolled back
    when the run raises, and when the stream is closed before its end. `for` does not close what it leaves early: use
    `with contextlib.closing(stream)`, or `close()`. One that is dropped is rolled back on a thread of its own.

    Args:
        saga: The scope, not yet opened.
        start: Makes the run's own iterator, inside of the saga.
        at_end: Called with the saga and the last piece (None if there was none) when the run has ended, before the
            saga does; may suspend it.
        around: Makes a context manager that is entered with the saga and left after its end.
    """

    _opened = False
    _over = False

    def __init__(
        self,
        saga: Saga,
        start: Callable[[], Iterable[T]],
        *,
        at_end: Callable[[Saga, Any], object] | None = None,
        around: Callable[[Saga], Any] | None = None,
    ) -> None:
        self.saga = saga
        self.__start = start
        self.__at_end = at_end
        self.__around = around
        self.__inside: Any = None
        self.__source: Iterator[T] | None = None
        self.__reader = _Reading("Another thread is reading this stream. Wait for its piece")
        self.__last: Any = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """The next piece.

        Raises:
            StopIteration: The run has ended, and so has its saga.
            RuntimeError: Another thread is reading it at this moment; nothing was changed.
            Exception: What the run raised, or what `saga_scope` says of an end that is none.
        """
        me = object()
        try:
            self.__reader.sit(me)
            return self.__piece()
        finally:
            self.__reader.rise(me)

    def close(self) -> None:
        """End the run here: close its iterator and roll the saga back. Does nothing if it has ended.

        Raises:
            RollbackIncomplete: The rollback left something.
            RuntimeError: Another thread is reading it at this moment; nothing was changed.
        """
        me = object()
        try:
            self.__reader.sit(me)
            self.__close()
        finally:
            self.__reader.rise(me)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._over or not self._opened or sys.is_finalizing():
            return
        # Not here: a garbage collection may come in the middle of anything, such as a commit of the log.
        try:
            apart = threading.Thread(target=self.__dropped, name="agent-saga-stream")
            apart.start()
        except RuntimeError:
            log.error("saga %r: its stream was dropped before its end; recovery will roll it back", self.saga.id)
        else:
            apart.join(DROPPED_WAIT)

    def __dropped(self) -> None:
        log.warning("saga %r: its stream was dropped before its end, and is rolled back", self.saga.id)
        try:
            self.__close()
        except Exception as error:
            log.error("saga %r: its stream was dropped, and its end came to %s", self.saga.id, type(error).__name__)

    def __piece(self) -> T:
        if self._over:
            raise StopIteration
        try:
            if not self._opened:
                self.__open()
            assert self.__source is not None
            with self.saga.attached():
                self.__last = next(self.__source)
            return self.__last
        except StopIteration:
            self.__end(None)
            raise
        except BaseException as error:
            self.__end(error)
            raise

    def __close(self) -> None:
        if self._over:
            return
        if not self._opened:
            self._over = True
            return
        try:
            closing = getattr(self.__source, "close", None)
            if closing is not None:
                with self.saga.attached():
                    closing()
        finally:
            self.__end(StreamClosed("the stream was closed before its end"))

    def __open(self) -> None:
        with _detaching(), _Bounds():
            self._opened = _never_entered(self.saga)  # before: an interrupt right after entering must find it open
            self.saga.__enter__()
            if self.__around is not None:
                inside = self.__around(self.saga)
                inside.__enter__()
                self.__inside = inside
            self.__source = iter(self.__start())

    def __end(self, error: BaseException | None) -> None:
        if self._over:
            return
        self._over = True
        if not self._opened:
            return
        with _detaching(), self.saga.attached():
            try:
                if error is None and self.__at_end is not None:
                    with _Bounds():
                        self.__at_end(self.saga, self.__last)
            except BaseException as failed:
                error = failed
                raise
            finally:
                self.__leave(error)

    def __leave(self, error: BaseException | None) -> None:
        try:
            self.saga.__exit__(type(error) if error is not None else None, error, None)
        except BaseException:
            _left(self.__inside, self.saga, quietly=True)
            raise
        _left(self.__inside, self.saga, quietly=error is not None)


class AsyncSagaStream(AsyncIterator[T], Generic[T]):
    """`SagaStream` for `async for`. Close one that is left early: `async with contextlib.aclosing(stream)`.

    What `around` makes may be an async context manager as well.

    One that is dropped before its end cannot be ended any more: its saga stays as it is, owned, until this process
    ends, and is then for recovery. That is logged as an error.
    """

    _opened = False
    _over = False

    def __init__(
        self,
        saga: Saga,
        start: Callable[[], AsyncIterable[T] | Awaitable[AsyncIterable[T]]],
        *,
        at_end: Callable[[Saga, Any], Any] | None = None,
        around: Callable[[Saga], Any] | None = None,
    ) -> None:
        self.saga = saga
        self.__start = start
        self.__at_end = at_end
        self.__around = around
        self.__inside: Any = None
        self.__source: AsyncIterator[T] | None = None
        self.__reader = _Reading(
            "Another task is reading this stream. Cancel that task: that ends the run and its saga"
        )
        self.__last: Any = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """The next piece.

        Raises:
            StopAsyncIteration: The run has ended, and so has its saga.
            RuntimeError: Another task is reading it at this moment; nothing was changed.
            Exception: What the run raised, or what `saga_scope` says of an end that is none.
        """
        me = object()
        try:
            self.__reader.sit(me)
            return await self.__piece()
        finally:
            self.__reader.rise(me)

    async def aclose(self) -> None:
        """End the run here: close its iterator and roll the saga back. Does nothing if it has ended.

        Raises:
            RollbackIncomplete: The rollback left something.
            RuntimeError: Another task is reading it at this moment; nothing was changed.
        """
        if self._over:
            return
        me = object()
        try:
            self.__reader.sit(me)
            await self.__close()
        finally:
            self.__reader.rise(me)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._opened and not self._over and not sys.is_finalizing():
            log.error("saga %r: its stream was dropped before its end; recovery will roll it back", self.saga.id)

    async def __piece(self) -> T:
        if self._over:
            raise StopAsyncIteration
        try:
            if not self._opened:
                await self.__open()
            assert self.__source is not None
            with self.saga.attached():
                self.__last = await anext(self.__source)
            return self.__last
        except StopAsyncIteration:
            await self.__end(None)
            raise
        except GeneratorExit:  # this coroutine is being closed: nothing can be awaited any more
            raise
        except BaseException as error:
            await self.__end(error)
            raise

    async def __close(self) -> None:
        if self._over:
            return
        if not self._opened:
            self._over = True
            return
        try:
            closing = getattr(self.__source, "aclose", None)
            if closing is not None:
                with self.saga.attached():
                    await closing()
        finally:
            await self.__end(StreamClosed("the stream was closed before its end"))

    async def __open(self) -> None:
        with _detaching(), _Bounds():
            self._opened = _never_entered(self.saga)
            await self.saga.__aenter__()
            if self.__around is not None:
                inside = self.__around(self.saga)
                if isinstance(inside, AbstractAsyncContextManager):
                    await inside.__aenter__()
                else:
                    inside.__enter__()
                self.__inside = inside
            source: Any = self.__start()
            if isawaitable(source):
                source = await source
            self.__source = aiter(source)

    async def __end(self, error: BaseException | None) -> None:
        if self._over:
            return
        self._over = True
        if not self._opened:
            return
        with _detaching(), self.saga.attached():
            try:
                if error is None and self.__at_end is not None:
                    with _Bounds():
                        answer = self.__at_end(self.saga, self.__last)
                        if isawaitable(answer):
                            await answer
            except BaseException as failed:
                error = failed
                raise
            finally:
                await self.__leave(error)

    async def __leave(self, error: BaseException | None) -> None:
        try:
            await self.saga.__aexit__(type(error) if error is not None else None, error, None)
        except BaseException:
            await self.__left(quietly=True)
            raise
        await self.__left(quietly=error is not None)

    async def __left(self, *, quietly: bool) -> None:
        inside: Any = self.__inside
        if not isinstance(inside, AbstractAsyncContextManager):
            _left(inside, self.saga, quietly=quietly)
            return
        try:
            await cast("AbstractAsyncContextManager[Any]", inside).__aexit__(None, None, None)
        except Exception as error:
            _not_left(self.saga, error, quietly=quietly)


def _left(inside: Any, saga: Saga, *, quietly: bool) -> None:
    """Leave what was entered with the saga; `quietly` where another exception is on its way out."""
    if inside is None:
        return
    try:
        inside.__exit__(None, None, None)
    except Exception as error:
        _not_left(saga, error, quietly=quietly)


def _not_left(saga: Saga, error: Exception, *, quietly: bool) -> None:
    if not quietly:
        error.add_note(f"The saga had ended before: {saga.report}")
        raise error
    name = type(error).__name__
    log.error("saga %r: what was entered around its stream could not be left: %s", saga.id, name)


def _never_entered(saga: Saga) -> bool:
    """Whether the scope is still to be entered: one that somebody else has opened is not for this stream to end."""
    try:
        saga.refusals  # noqa: B018 - answers from its opening on
    except SagaNotRunning:
        return True
    return False


@contextmanager
def _detaching() -> Generator[None]:
    """Whatever opening or ending a scope makes current here, the reader of the stream is left with what it had."""
    before = CURRENT_SAGA.get()
    try:
        yield
    finally:
        CURRENT_SAGA.set(before)


class _Bounds:
    """Around code that begins or ends a stream: a StopIteration of its own would be taken for the run's end.

    A class, because `contextmanager` lets a StopIteration through that was turned into another exception.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StopIteration | StopAsyncIteration):
            raise RuntimeError(f"{type(error).__name__} was raised where a stream begins or ends") from error
