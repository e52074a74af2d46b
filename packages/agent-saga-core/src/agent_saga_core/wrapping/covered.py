"""Binding: which running sagas a tool belongs to, so that a call that lost its context is told from one without."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from agent_saga_core.errors import DeclarationError
from agent_saga_core.saga import Saga
from agent_saga_core.wrapping.runner import Bound, ToolRunner, runner_of

__all__ = ["covered"]

_lock = threading.Lock()


@contextmanager
def covered(saga: Saga, tools: Iterable[object], *, by_binding: bool = False) -> Generator[Saga]:
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
    bound = Bound(saga, by_binding)
    with _lock:
        for runner in runners:
            runner.bound = (*runner.bound, bound)
    try:
        yield saga
    finally:
        with _lock:
            for runner in runners:
                rest = list(runner.bound)
                rest.remove(bound)
                runner.bound = tuple(rest)
