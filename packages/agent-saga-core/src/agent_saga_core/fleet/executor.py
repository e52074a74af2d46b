"""An executor that takes the saga along."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from agent_saga_core.errors import DeclarationError
from agent_saga_core.fleet.carrying import Place, bound_to

__all__ = ["BoundExecutor"]

P = ParamSpec("P")
T = TypeVar("T")

_OTHER_PROCESS = {"ProcessPoolExecutor", "InterpreterPoolExecutor"}


class BoundExecutor(Executor):
    """Submits to another executor; each call runs in the saga that is current where it was submitted.

    Submitted where no saga is open, a call runs without one, whatever the worker did before. Everything else is the
    other executor's.

    Args:
        executor: Any executor whose workers are threads of this process.

    Raises:
        DeclarationError: Its workers are other processes or interpreters, where this saga is not.
    """

    def __init__(self, executor: Executor) -> None:
        if any(kind.__name__ in _OTHER_PROCESS for kind in type(executor).__mro__):
            raise DeclarationError(
                f"A {type(executor).__name__} runs calls where the saga of this process is not. "
                "Bind a ThreadPoolExecutor, and let the tool itself hand work to other processes."
            )
        self._executor = executor

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedule a call in the current saga."""
        return self._executor.submit(bound_to(Place(), fn), *args, **kwargs)

    def map(self, fn: Callable[..., T], *iterables: Iterable[Any], **options: Any) -> Iterator[T]:
        """Schedule calls in the saga that is current now, also those that are submitted as the results are read."""
        return self._executor.map(bound_to(Place(), fn), *iterables, **options)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut the other executor down."""
        self._executor.shutdown(wait=wait, cancel_futures=cancel_futures)
