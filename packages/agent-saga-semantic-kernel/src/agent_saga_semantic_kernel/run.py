"""Runs that are one saga: `asaga_run`, `saga_run`, `asaga_invoke`, `asaga_stream`; and `bind` for all others."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Unpack, cast

from semantic_kernel import Kernel

from agent_saga_core import DeclarationError, Log, Saga, saga_scope
from agent_saga_core.wrapping import AsyncSagaStream, RunOptions, covered, run_blocking
from agent_saga_semantic_kernel.sites import Place, hand_over, in_place, run_in
from agent_saga_semantic_kernel.walk import kernels_in, runners_in

__all__ = ["asaga_invoke", "asaga_run", "asaga_stream", "bind", "saga_run"]


async def asaga_run(
    runs: Any,
    *args: Any,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: Literal["settle", "abort"] = "settle",
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Run an agent or a kernel as one saga: `agent.get_response(...)` or `kernel.invoke(...)`, and what that returns.

    When this returns, the saga has committed. When it raises, everything that may have happened was undone, or
    `RollbackIncomplete` names what may be left. Inside of an open saga the run is a savepoint of it, and commits with
    it. After three refused calls the model is not asked again.

    Functions that are not wrapped run as ever and are no steps: see `coverage`.

    Args:
        runs: An agent, or a `Kernel`.
        *args: What `get_response` or `invoke` takes.
        saga_id: Names the saga. Running again under the same id gives back what is recorded. Default: drawn.
        log: A log, or the URL of one.
        name: What the saga does, for people. Default: the agent's name.
        approve: Asked with a `StepRequest` before each IRREVERSIBLE call; may be async. After a no, the model hears it.
        drain_timeout: Seconds to wait at the end for calls under way and for what is in doubt.
        on_failure: As for `saga_scope`.
        metadata: Plain data stored with the saga.
        **kwargs: What `get_response` or `invoke` takes by name. Arguments of a kernel function that have one of the
            names above go into `arguments=KernelArguments(...)`.

    Raises:
        SagaAborted: The run ended normally and its saga could not commit. Nothing is left.
        RollbackIncomplete: Something may be left; its `.report` names it.
        KernelInvokeException: A kernel's function raised; the cause is what it raised.
    """
    entry = _entry(runs, "get_response", "invoke")
    saga_of_run = saga_scope(
        saga_id,
        name=name if name is not None else _name_of(runs),
        log=log,
        approve=approve,
        drain_timeout=drain_timeout,
        on_failure=on_failure,
        metadata=metadata,
    )
    async with saga_of_run as saga:
        with bind(saga, runs, kwargs.get("kernel")), in_place(run_in(saga)):
            return await entry(*args, **kwargs)
    raise AssertionError("a scope swallows no exception")


def saga_run(runs: Any, *args: Any, **kwargs: Any) -> Any:
    """`asaga_run` where no event loop runs, with the same arguments.

    Raises:
        RuntimeError: An event loop runs here. Await `asaga_run` there.
    """
    return run_blocking(lambda: asaga_run(runs, *args, **kwargs))


def asaga_invoke(
    agent: Any,
    *args: Any,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: Literal["settle", "abort"] = "settle",
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> AsyncSagaStream[Any]:
    """`agent.invoke(...)` as one saga: yields the messages that it yields. As `asaga_stream`."""
    return _streamed(
        _entry(agent, "invoke"),
        agent,
        args,
        kwargs,
        saga_id,
        log,
        name=name if name is not None else _name_of(agent),
        approve=approve,
        drain_timeout=drain_timeout,
        on_failure=on_failure,
        metadata=metadata,
    )


def asaga_stream(
    runs: Any,
    *args: Any,
    saga_id: str | None = None,
    log: Log | str | None = None,
    name: str | None = None,
    approve: Callable[..., Any] | None = None,
    drain_timeout: float = 30.0,
    on_failure: Literal["settle", "abort"] = "settle",
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> AsyncSagaStream[Any]:
    """`agent.invoke_stream(...)` or `kernel.invoke_stream(...)` as one saga: yields what that yields.

    The saga is opened when the first piece is asked for and has committed when the loop ends. It is rolled back when
    the run raises, and when the stream is closed before its end. `async for` does not close what it leaves early: write
    `async with contextlib.aclosing(asaga_stream(...)) as pieces:`.

    Args:
        runs: An agent, or a `Kernel`.
        *args: What `invoke_stream` takes.
        saga_id: As for `asaga_run`.
        log: As for `asaga_run`.
        name: As for `asaga_run`.
        approve: As for `asaga_run`.
        drain_timeout: As for `asaga_run`.
        on_failure: As for `asaga_run`.
        metadata: As for `asaga_run`.
        **kwargs: What `invoke_stream` takes by name.
    """
    return _streamed(
        _entry(runs, "invoke_stream", "invoke_stream"),
        runs,
        args,
        kwargs,
        saga_id,
        log,
        name=name if name is not None else _name_of(runs),
        approve=approve,
        drain_timeout=drain_timeout,
        on_failure=on_failure,
        metadata=metadata,
    )


@contextmanager
def bind(saga: Saga, *objects: object, by_binding: bool = False) -> Generator[Saga]:
    """Bind the wrapped functions of agents, kernels, plugins, functions or lists of them to a running saga.

    For whatever runs them itself: a chat service with a history of yours, a group of agents. In the block the kernels
    that are found tell functions which call of the model's they are made for, and a call of a bound function where no
    saga can be told raises `BoundaryRequired`.

    An agent runtime calls functions in the context in which it was started. Start it inside of the scope; of one that
    was started elsewhere, and maybe in another saga, say `by_binding=True`.

    Args:
        saga: The saga, open.
        *objects: What runs in it.
        by_binding: Take each call of a bound function for this saga's, whatever saga its context names. Bound that way
            to two running sagas at once, a function refuses.
    """
    with ExitStack() as held:
        held.enter_context(covered(saga, runners_in(objects), by_binding=by_binding))
        for kernel in kernels_in(objects):
            held.enter_context(_filtered(kernel))
        yield saga


# --- the filter on a kernel

_lock = threading.Lock()
_filtered_kernels: dict[int, tuple[Kernel, int]] = {}
"""By identity: the kernels that have the filter, and for how many runs."""


@contextmanager
def _filtered(kernel: Kernel) -> Generator[None]:
    """Have the filter on a kernel once, for the time of all runs of it."""
    with _lock:
        _, runs = _filtered_kernels.get(id(kernel), (kernel, 0))
        _filtered_kernels[id(kernel)] = kernel, runs + 1
        if runs == 0:
            _replace_filters(kernel, add=True)
    try:
        yield
    finally:
        with _lock:
            _, runs = _filtered_kernels.pop(id(kernel))
            if runs > 1:
                _filtered_kernels[id(kernel)] = kernel, runs - 1
            else:
                _replace_filters(kernel, add=False)


def _replace_filters(kernel: Kernel, *, add: bool) -> None:
    # Not in place, as `add_filter` would: another thread may be reading the list for a call, and would then miss one of
    # the user's filters or call it twice. First in the list is innermost: nearest to the call, behind every filter that
    # makes it again or not at all.
    found = cast("list[tuple[int, Any]]", cast(Any, kernel).auto_function_invocation_filters)
    others = [entry for entry in found if entry[1] is not hand_over]  # a clone of a kernel in a run has it already
    kernel.auto_function_invocation_filters = [(id(hand_over), hand_over), *others] if add else others


# --- ways in


def _entry(runs: Any, of_agent: str, of_kernel: str | None = None) -> Callable[..., Any]:
    if isinstance(runs, Kernel):
        if of_kernel is not None:
            return getattr(runs, of_kernel)
    else:
        found = getattr(runs, of_agent, None)
        if callable(found) and isinstance(getattr(runs, "kernel", None), Kernel):
            return found
    raise DeclarationError(
        f"An object of type {type(runs).__qualname__} cannot be run here. Pass an agent or a kernel; for anything else "
        "open saga_scope() and bind(saga, ...) its kernels."
    )


def _name_of(runs: Any) -> str:
    return str(getattr(runs, "name", None) or "kernel")


def _streamed(
    entry: Callable[..., AsyncIterable[Any]],
    runs: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    saga_id: str | None,
    log: Log | str | None,
    **options: Unpack[RunOptions],
) -> AsyncSagaStream[Any]:
    places: list[Place] = []

    @contextmanager
    def around(saga: Saga) -> Generator[None]:
        places.append(run_in(saga))
        with bind(saga, runs, kwargs.get("kernel")):
            yield

    return AsyncSagaStream(
        saga_scope(saga_id, log=log, **options),
        lambda: _Pieces(entry(*args, **kwargs), places[0]),
        around=around,
    )


class _Pieces(AsyncIterator[Any]):
    """The pieces of a run, each of them made in the place of the run."""

    def __init__(self, source: AsyncIterable[Any], place: Place) -> None:
        self._source = aiter(source)
        self._place = place

    async def __anext__(self) -> Any:
        with in_place(self._place):
            return await anext(self._source)

    async def aclose(self) -> None:
        closing = getattr(self._source, "aclose", None)
        if closing is not None:
            with in_place(self._place):
                await closing()
