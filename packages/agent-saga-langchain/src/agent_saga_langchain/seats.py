"""The functions in a tool: where a call becomes a step, with its real arguments, result and exception."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FunctionType, UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, InjectedToolArg, Tool
from langchain_core.tools import base as tools_base

from agent_saga_core import DeclarationError, Saga, SagaAborted
from agent_saga_core.registry import annotations_of
from agent_saga_core.wrapping import Binding, CallSite, ToolRunner
from agent_saga_langchain.pauses import Handover, handover_of, heard
from agent_saga_langchain.places import Made, Task, current_task, site_of, told_apart

__all__ = ["Seat", "entered", "hints_of", "left_out", "made_for", "original_of", "seated", "shown_fields"]

FILTERED = frozenset({"run_manager", "callbacks"})
"""Parameters that LangChain fills in and shows to no model."""

# The base of ToolRuntime, which langchain-core does not export; where it is missing, LangChain's own finding is left.
_DIRECTLY: type[Any] | None = getattr(tools_base, "_DirectlyInjectedToolArg", None)


class _Call:
    """One call of a tool object, from its `run` on. Shared by every thread and task that the call goes through."""

    __slots__ = ("call_id", "inside", "made", "models", "runner", "task")

    def __init__(self, runner: ToolRunner, call_id: str | None, task: Task | None, models: object = None) -> None:
        self.runner = runner
        self.call_id = call_id
        self.task = task
        self.models = models
        self.made: Made | None = None
        self.inside = False


_CALL: ContextVar[_Call | None] = ContextVar("agent_saga_langchain_call", default=None)


_MODELS: ContextVar[object] = ContextVar("agent_saga_langchain_models", default=None)


@contextmanager
def made_for(call: object) -> Generator[None]:
    """Around what makes the call of a tool for this call of the model, an object that is handed on when it is retried.

    A tool hears of a copy only, and cannot tell a retry of what it has done from another message with the same id.
    """
    token = _MODELS.set(call)
    try:
        yield
    finally:
        _MODELS.reset(token)


@contextmanager
def entered(runner: ToolRunner, call_id: str | None) -> Generator[None]:
    """Around `run` and `arun` of a tool, which alone hear of the call's id.

    The task is looked up here, in the context of who calls the tool: the config that the call itself is given may be
    one of the caller's own making, which knows nothing of the graph.
    """
    before = _CALL.get()
    call = _Call(runner, call_id, current_task(), _MODELS.get())
    _CALL.set(call)
    token = _MODELS.set(None)
    try:
        yield
    except BaseException:
        if call.made is not None:
            call.made.heard = False
        raise
    finally:
        _MODELS.reset(token)
        _CALL.set(before)


class Seat:
    """One function of a tool, and how its calls become steps.

    Args:
        fn: The function as the tool has it; of a method, the function in the class, called with the tool first.
        runner: The tool's.
        left_out: Names of arguments that no model gives, which are not recorded.
        is_method: Whether the first parameter is the tool.

    Raises:
        DeclarationError: Python cannot tell the function's parameters.
    """

    def __init__(
        self, fn: Callable[..., Any], runner: ToolRunner, left_out: frozenset[str], *, is_method: bool = False
    ) -> None:
        try:
            self.binding = Binding(fn)
        except (TypeError, ValueError):
            raise DeclarationError(
                f"{runner.spec.tool!r}: the parameters of its function cannot be told. Call it in a `def` of your own."
            ) from None
        self.fn = fn
        self.runner = runner
        self.is_method = is_method
        names = self.binding.names
        self.left_out = left_out | frozenset(names[:1] if is_method else ())
        kinds = self.binding.signature.parameters.values()
        self.rest = next((p.name for p in kinds if p.kind is p.VAR_POSITIONAL), None)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call on this thread."""
        call = _CALL.get()
        if self._is_within(call):
            return self.fn(*args, **kwargs)
        bound = self._bound(args, kwargs)
        if bound is None:
            return self.fn(*args, **kwargs)  # raises, as it would unwrapped, before its body
        named, invoke = bound
        saga = self.runner.saga()
        if saga is None:
            return self.runner.run(named, invoke)
        try:
            with self._told_apart(saga, call, named) as site, self._inside(call):
                result = self.runner.run(named, partial(_handing_over, invoke), site=site)
        except SagaAborted as refusal:
            raise heard(saga, refusal) from refusal.__cause__
        return _given(result)

    async def acall(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call on the running loop."""
        call = _CALL.get()
        if self._is_within(call):
            return await self.fn(*args, **kwargs)
        bound = self._bound(args, kwargs)
        if bound is None:
            return await self.fn(*args, **kwargs)
        named, invoke = bound
        saga = self.runner.saga()
        if saga is None:
            return await self.runner.arun(named, invoke)
        try:
            with self._told_apart(saga, call, named) as site, self._inside(call):
                result = await self.runner.arun(named, partial(_ahanding_over, invoke), site=site)
        except SagaAborted as refusal:
            raise heard(saga, refusal) from refusal.__cause__
        return _given(result)

    def _bound(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], Callable[[str], Any]] | None:
        """The arguments that a model can give, by name, and the call itself; None if they do not fit the function."""
        try:
            named, invoke = self.binding.bind(args, kwargs)
        except TypeError:
            if type(self.fn) is FunctionType and not hasattr(self.fn, "__wrapped__"):
                return None
            raise  # what looks like a signature may not be that of what is called
        given = {name: value for name, value in named.items() if name not in self.left_out}
        if self.rest is not None and not given.get(self.rest, True):
            del given[self.rest]
        return given, invoke

    def _is_within(self, call: _Call | None) -> bool:
        """Whether it is called by this very call: a tool's async side, falling back on its sync one, is one step."""
        return self.is_method and call is not None and call.inside and call.runner is self.runner

    @contextmanager
    def _told_apart(self, saga: Saga, call: _Call | None, named: Mapping[str, Any]) -> Generator[CallSite | None]:
        # A function that calls itself by the tool makes a call of its own.
        mine = call if call is not None and call.runner is self.runner and not call.inside else None
        # Called by its bare function, or with the graph's own config from a thread without context: look here.
        task = mine.task if mine is not None and mine.task is not None else current_task()
        made = Made(named, mine.models if mine is not None else None)
        if mine is not None:
            mine.made = made
        site = site_of(saga, task, mine.call_id if mine is not None else None)
        with told_apart(saga, site, self.runner.spec.tool, made) as place:
            yield place

    @contextmanager
    def _inside(self, call: _Call | None) -> Generator[None]:
        """While the function runs, what it calls of this very call is no step of its own."""
        if call is None or call.runner is not self.runner or call.inside:
            call = _Call(self.runner, None, None)
        before = _CALL.get()
        call.inside = True
        _CALL.set(call)
        try:
            yield
        finally:
            call.inside = False
            _CALL.set(before)


def seated(fn: Callable[..., Any], seat: Seat, *, is_async: bool) -> Callable[..., Any]:
    """`fn` with its calls made by its seat: the same name, annotations and signature."""
    if is_async:

        @functools.wraps(fn)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            return await seat.acall(args, kwargs)

        wrapper: Callable[..., Any] = acall
    else:

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return seat.call(args, kwargs)

        wrapper = call
    if not hasattr(fn, "__annotations__"):  # a partial or a callable object: its own would be those of the wrapper
        wrapper.__annotations__ = hints_of(fn)
    wrapper.__agent_saga__ = seat.runner  # type: ignore[attr-defined]
    return wrapper


def original_of(fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """What `seated` wrapped; anything else as it is."""
    return cast("Callable[..., Any]", fn).__wrapped__ if hasattr(fn, "__agent_saga__") else fn  # type: ignore[attr-defined]


# --- what a model can give


def hints_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """The resolved annotations of a function, of the one in a partial, or of a callable object's call."""
    while isinstance(fn, partial):
        fn = cast("partial[Any]", fn).func
    return annotations_of(fn)


def shown_fields(tool: BaseTool) -> tuple[frozenset[str], frozenset[str]] | None:
    """The arguments in the schema that a model is shown, and all of the tool's; None if the schema does not tell.

    A JSON schema says nothing of what else is accepted, and the one of a `Tool` is that of its `_run`.
    """
    if isinstance(tool.args_schema, dict) or (isinstance(tool, Tool) and tool.args_schema is None):
        return None
    shown, whole = tool.tool_call_schema, tool.get_input_schema()
    if isinstance(shown, dict):
        return None
    return frozenset(_fields(shown)), frozenset(_fields(whole))


def left_out(
    tool: BaseTool, fn: Callable[..., Any], shown: tuple[frozenset[str], frozenset[str]] | None
) -> frozenset[str]:
    """The names of arguments of `fn` that no model gives: what the framework injects, and what the schema hides."""
    hidden = {*FILTERED, *(name for name, hint in hints_of(fn).items() if _is_injected(hint))}
    # LangChain's own finding knows annotations that only its scopes resolve.
    found: Any = getattr(tool, "_injected_args_keys", None)
    hidden |= cast("frozenset[str]", found) if found is not None else frozenset()
    if shown is not None:
        visible, every = shown
        kinds = inspect.signature(fn).parameters.values()
        declared = {p.name for p in kinds if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        hidden |= (declared | every) - visible
    return frozenset(hidden)


def _fields(schema: Any) -> Mapping[str, Any]:
    found = getattr(schema, "model_fields", None)  # pydantic 2
    return found if found is not None else schema.__fields__


def _is_injected(hint: Any) -> bool:
    """Whether an annotation, or a part of a union, says that the framework gives the argument."""
    if hint is RunnableConfig:
        return True
    marks: tuple[Any, ...] = getattr(hint, "__metadata__", ())
    if any(issubclass(mark if isinstance(mark, type) else type(mark), InjectedToolArg) for mark in marks):
        return True
    kind = get_origin(hint) or hint
    if kind is Annotated or kind is Union or kind is UnionType:
        return any(_is_injected(part) for part in get_args(hint))
    return _DIRECTLY is not None and isinstance(kind, type) and issubclass(kind, _DIRECTLY)


# --- around the function


def _handing_over(invoke: Callable[[str], Any], key: str) -> Any:
    try:
        return invoke(key)
    except Exception as error:
        handover = handover_of(error)
        if handover is None:
            raise
        return handover


async def _ahanding_over(invoke: Callable[[str], Any], key: str) -> Any:
    try:
        return await invoke(key)
    except Exception as error:
        handover = handover_of(error)
        if handover is None:
            raise
        return handover


def _given(result: Any) -> Any:
    if isinstance(result, Handover):
        raise result.command
    return result
