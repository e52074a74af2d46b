"""Binding: which running sagas a tool belongs to, so that a call that lost its context is told from one without."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager

from agent_saga_core.errors import DeclarationError
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping.runner import Bound, ToolRunner, runner_of

__all__ = ["covered"]

_lock = threading.Lock()


def covered(saga: Saga, tools: Iterable[object], *, by_binding: bool = False) -> AbstractContextManager[Saga]:
    """Bind wrapped tools to a running saga for the block.

    Within it, a call where no saga can be told raises `BoundaryRequired` instead of running unprotected. All copies of
    a tool object are bound with it. Not bound: what is found neither wrapped nor a runner.

    Args:
        saga: The saga, open.
        tools: Wrapped tools, or their runners.
        by_binding: Take the call for this saga's, whatever saga its context names: for frameworks that call tools in
            the context of something else. Bound to two running sagas that way, a tool refuses every call.

    Raises:
        DeclarationError: A tool is not wrapped.
    """
    runners: list[ToolRunner] = []
    for tool in tools:
        runner = tool if isinstance(tool, ToolRunner) else runner_of(tool)
        if runner is None:
            raise DeclarationError(f"{tool!r} is not wrapped, so it cannot be bound to a saga. Wrap it first.")
        if runner not in runners:
            runners.append(runner)
    return _Covering(runners, Bound(saga, by_binding))


class _Covering(AbstractContextManager[Saga]):
    """The binding, for one block. No generator, for the reason that `Attachment` gives."""

    def __init__(self, runners: list[ToolRunner], bound: Bound) -> None:
        self._runners = runners
        self._bound = bound

    def __enter__(self) -> Saga:
        with _lock:
            for runner in self._runners:
                runner.bound = (*runner.bound, self._bound)
        return self._bound.saga

    def __exit__(self, *_: object) -> None:
        with _lock:
            for runner in self._runners:
                rest = list(runner.bound)
                rest.remove(self._bound)
                runner.bound = tuple(rest)
