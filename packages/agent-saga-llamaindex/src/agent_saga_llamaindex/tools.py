"""`wrap_tool`: the same tool, whose calls are steps.

The wrapped tool is a copy. Of a `FunctionTool` the function itself is replaced, so that whatever reaches it (`call`,
`acall`, `fn`, a conversion to another framework's tool) makes a step, and the step's result is what the function
returned. Of every other tool the methods that call it are overridden in a subclass of its class, and the step's result
is the `ToolOutput`. What LlamaIndex makes of a result or an exception afterwards is LlamaIndex's own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, Unpack, cast

from llama_index.core.tools import BaseTool, FunctionTool, ToolOutput, function_tool
from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo

from agent_saga_core import Secret
from agent_saga_core.errors import DeclarationError
from agent_saga_core.registry import annotations_of
from agent_saga_core.values.hints import field_hints, marks_secret
from agent_saga_core.wrapping import Binding, Declaration, ToolRunner, runner_of
from agent_saga_llamaindex.adapter import NAME
from agent_saga_llamaindex.inside import INTERRUPTS
from agent_saga_llamaindex.sites import site_of

__all__ = ["wrap_tool"]

T = TypeVar("T", bound=BaseTool)
KEY = "idempotency_key"

_blocking: Callable[..., Callable[..., Any]] = cast(Any, function_tool).async_to_sync
_threaded: Callable[..., Callable[..., Awaitable[Any]]] = function_tool.sync_to_async
_THREADED = cast(Any, _threaded(len)).__code__
"""The code of every async function that LlamaIndex makes of a sync one."""

_inside: ContextVar[ToolRunner | None] = ContextVar("agent_saga_llamaindex_inside", default=None)
"""The tool whose own code is running: one of its methods may call another."""


def wrap_tool(tool: T, **declaration: Unpack[Declaration]) -> T:
    """Make a tool's calls steps of the saga that they are made in.

    The returned tool is of the same type, with the same metadata, and injects a `Context` as before; the original is
    untouched. Outside of a saga it calls straight through. Recorded are the arguments that a model can give: not the
    `Context`, not `partial_params`. A parameter `idempotency_key` of the function is given by the saga, and no longer
    shown to the model.

    Not promised: that an exception which a tool's own code turns into a `ToolOutput(is_error=True)` counts as one.

    Args:
        tool: A `FunctionTool`, `QueryEngineTool` or any other `BaseTool`.
        **declaration: What the effect means, and how it is undone: as for `agent_saga_core.saga_tool`.

    Raises:
        DeclarationError: The tool, or its function, is wrapped already, or it is no tool of LlamaIndex, or the
            declaration could not keep the promises.
    """
    if not isinstance(tool, BaseTool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(
            f"{tool!r} is no LlamaIndex tool. Make one of it first: FunctionTool.from_defaults(fn), "
            "or declare the function with @saga_tool."
        )
    found = cast(Any, tool)
    parts = (found, *(getattr(found, name, None) for name in ("real_fn", "fn", "async_fn", "base_tool")))
    if any(runner_of(part) is not None for part in parts):
        raise DeclarationError(f"{_name(found)!r} is a saga tool already. Wrap the plain tool once.")
    if isinstance(tool, FunctionTool) and _runs_its_function(tool):
        return cast(T, _with_functions(tool, declaration))
    return cast(T, _with_methods(tool, declaration))


def _name(tool: BaseTool) -> str:
    return tool.metadata.get_name()


def _runs_its_function(tool: FunctionTool) -> bool:
    """Whether its class leaves calling to `FunctionTool`, whose functions are then what to replace."""
    static = inspect.getattr_static  # LlamaIndex's decorators give another object each time they are asked
    own = all(static(type(tool), name) is static(FunctionTool, name) for name in ("__call__", "call", "acall"))
    return own and all(callable(getattr(tool, name, None)) for name in ("_fn", "_async_fn"))


# --- tools made from functions


def _with_functions(tool: FunctionTool, declaration: Declaration) -> FunctionTool:
    wrapped: Any = _copy(tool)
    runner = ToolRunner(_name(tool), declaration, adapter=NAME, fn=tool.real_fn, interrupts=INTERRUPTS)
    hidden = frozenset({*tool.partial_params, *((tool.ctx_param_name,) if tool.ctx_param_name else ())})
    fn, async_fn = wrapped._fn, wrapped._async_fn
    if inspect.iscoroutinefunction(tool.real_fn):
        wrapped._async_fn = _async_step(runner, async_fn, hidden)
        given = inspect.iscoroutinefunction(fn)
        wrapped._fn = _async_step(runner, fn, hidden) if given else _marked(_blocking(wrapped._async_fn), runner)
    else:
        # A sync function's step is made in the thread that runs it: cancelling whoever waits for that thread leaves it
        # running, and the step with it.
        wrapped._fn = _sync_step(runner, fn, hidden)
        made = getattr(async_fn, "__code__", None) is _THREADED
        wrapped._async_fn = _marked(_threaded(wrapped._fn), runner) if made else _async_step(runner, async_fn, hidden)
    _carry(wrapped, runner)
    if runner.takes_key:
        wrapped._metadata = _without_key(tool)
    return wrapped


class _Function:
    """One function of a tool, and how a call of it becomes a step."""

    def __init__(self, runner: ToolRunner, fn: Callable[..., Any], hidden: frozenset[str]) -> None:
        self.runner = runner
        self.fn = fn
        self.hidden = hidden
        self.binding = Binding(fn)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Callable[[str], Any]] | None:
        """The arguments that a model can give, by name, and the call; None if the call cannot so much as begin."""
        try:
            named, invoke = self.binding.bind(args, kwargs)
        except TypeError:
            given = self.outside(args, kwargs)
            if not self._begins(args, given):
                return None
            named, invoke = given, functools.partial(self._call, args, given)
        return {name: value for name, value in named.items() if name not in self.hidden}, invoke

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the function takes these, although the one whose signature it shows (`functools.wraps`) does not."""
        try:
            inspect.signature(self.fn, follow_wrapped=False).bind(*args, **kwargs)
        except TypeError:
            return False
        return True

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: str) -> Any:
        return self.fn(*args, **({**kwargs, KEY: key} if KEY in kwargs else kwargs))

    def outside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return self.binding.outside(args, kwargs)


def _sync_step(runner: ToolRunner, fn: Callable[..., Any], hidden: frozenset[str]) -> Callable[..., Any]:
    made = _Function(runner, fn, hidden)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        saga = runner.saga()
        bound = made.bind(args, kwargs) if saga is not None else None
        if saga is None or bound is None:
            return fn(*args, **made.outside(args, kwargs))
        return runner.run(bound[0], bound[1], site=site_of(saga, runner.spec, bound[0]))

    return _marked(run, runner)


def _async_step(
    runner: ToolRunner, fn: Callable[..., Awaitable[Any]], hidden: frozenset[str]
) -> Callable[..., Awaitable[Any]]:
    made = _Function(runner, fn, hidden)

    @functools.wraps(fn)
    async def run(*args: Any, **kwargs: Any) -> Any:
        saga = runner.saga()
        bound = made.bind(args, kwargs) if saga is not None else None
        if saga is None or bound is None:
            return await fn(*args, **made.outside(args, kwargs))
        return await runner.arun(bound[0], bound[1], site=site_of(saga, runner.spec, bound[0]))

    return _marked(run, runner)


def _marked(fn: Callable[..., Any], runner: ToolRunner) -> Callable[..., Any]:
    fn.__agent_saga__ = runner  # type: ignore[attr-defined]
    return fn


def _without_key(tool: FunctionTool) -> Any:
    """The tool's metadata as a model may see it: without the parameter that is the saga's to give."""
    metadata = tool.metadata
    schema = metadata.fn_schema
    if schema is None or KEY not in schema.model_fields:
        return metadata
    fields = {name: (field.annotation, field) for name, field in schema.model_fields.items() if name != KEY}
    shown = create_model(schema.__name__, __config__=schema.model_config, **cast(Any, fields))
    shown.__doc__, shown.__module__ = schema.__doc__, schema.__module__
    description = _described_without_key(tool, metadata.description)
    return dataclasses.replace(metadata, fn_schema=shown, description=description)


def _described_without_key(tool: FunctionTool, description: str) -> str:
    """LlamaIndex writes the function's signature into the description that it makes; the key goes from there, too."""
    signature = inspect.signature(tool.real_fn)
    hidden = {tool.ctx_param_name, *tool.partial_params}
    shown = [
        p.replace(default=p.empty) if isinstance(p.default, FieldInfo) else p
        for p in signature.parameters.values()
        if p.name not in hidden
    ]
    before = str(signature.replace(parameters=shown))
    after = str(signature.replace(parameters=[p for p in shown if p.name != KEY]))
    start = f"{_name(tool)}{before}"
    return f"{_name(tool)}{after}{description[len(start) :]}" if description.startswith(start) else description


# --- every other tool


def _with_methods(tool: BaseTool, declaration: Declaration) -> BaseTool:
    wrapped: Any = _copy(tool)
    hints = _hints(tool)
    given = declaration.copy()
    given["result_type"] = declaration.get("result_type") or ToolOutput
    if any(marks_secret(hints, (name,)) for name in hints):
        # A `ToolOutput` repeats the arguments, and says the result as text.
        given["result_type"] = Secret[given["result_type"]]
    runner = ToolRunner(_name(tool), given, adapter=NAME, hints=hints, interrupts=INTERRUPTS)
    _carry(wrapped, runner)
    kind: Any = wrapped.__class__
    base = type(tool)
    # Set after the class was made: LlamaIndex opens a span around every method that a class brings with it, and the
    # inherited ones have theirs.
    for name in ("__call__", "call"):
        if hasattr(base, name):
            setattr(kind, name, _sync_method(runner, getattr(base, name)))
    if hasattr(base, "acall"):
        kind.acall = _async_method(runner, cast(Any, base).acall)
    return wrapped


def _hints(tool: BaseTool) -> dict[str, Any]:
    """What annotates the arguments, and the result, in any of the places where it may be marked as a secret."""
    found: dict[str, Any] = {}
    for name in ("__call__", "call", "acall"):
        found.update(annotations_of(getattr(type(tool), name, None) or _nothing))
    schema = tool.metadata.fn_schema
    found.update(field_hints(schema) if schema is not None else {})
    if isinstance(tool, FunctionTool):
        found.update(annotations_of(tool.real_fn))
    return found


def _nothing() -> None:
    """A function without arguments."""


def _sync_method(runner: ToolRunner, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        saga = None if _inside.get() is runner else runner.saga()
        if saga is None:
            return method(self, *args, **kwargs)

        def invoke(_key: str) -> Any:
            with _being(runner):
                return method(self, *args, **kwargs)

        named = _named(self, args, kwargs)
        return runner.run(named, invoke, site=site_of(saga, runner.spec, named))

    return run


def _async_method(runner: ToolRunner, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        saga = None if _inside.get() is runner else runner.saga()
        if saga is None:
            return await method(self, *args, **kwargs)

        async def invoke(_key: str) -> Any:
            with _being(runner):
                return await method(self, *args, **kwargs)

        named = _named(self, args, kwargs)
        return await runner.arun(named, invoke, site=site_of(saga, runner.spec, named))

    return run


@contextmanager
def _being(runner: ToolRunner) -> Generator[None]:
    before = _inside.get()
    _inside.set(runner)
    try:
        yield
    finally:
        _inside.set(before)


def _named(tool: BaseTool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names that the model is shown.

    LlamaIndex hands a single argument over without its name, and again with it if that failed: the same call.
    """
    schema: type[BaseModel] | None = tool.metadata.fn_schema
    names = [*schema.model_fields] if schema is not None else ["input"]
    names += [f"args[{n}]" for n in range(len(names), len(args))]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    hidden: set[str | None] = set()
    if isinstance(tool, FunctionTool):
        hidden = {tool.ctx_param_name, *tool.partial_params}
    return {name: value for name, value in named.items() if name not in hidden}


# --- the copy


def _copy(tool: BaseTool) -> Any:
    """A copy whose class is its own, so that what is set on the class is set for it and its copies alone."""
    base = type(tool)
    made = copy.copy(tool)
    kind: Any = type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__})
    kind.__qualname__ = base.__qualname__
    cast(Any, made).__class__ = kind
    return made


def _carry(wrapped: Any, runner: ToolRunner) -> None:
    # On the class, not in the object: a deep copy of the tool shares its runner.
    type(wrapped).__agent_saga__ = runner
