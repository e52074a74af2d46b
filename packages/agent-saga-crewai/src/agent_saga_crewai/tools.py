"""`wrap_tool`: a CrewAI tool whose calls are steps."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType, MethodType
from typing import Any, Final, TypeVar, Unpack, cast

from crewai.tools.base_tool import BaseTool, Tool
from crewai.tools.structured_tool import CrewStructuredTool
from pydantic import BaseModel, create_model

from agent_saga_core import current_step
from agent_saga_core.errors import DeclarationError
from agent_saga_core.registry import accepts_key
from agent_saga_core.wrapping import Binding, Declaration, ToolRunner, refuse_generator
from agent_saga_crewai.adapter import NAME
from agent_saga_crewai.calls import aperform, perform, runner_in
from agent_saga_crewai.hooks import install_hooks

__all__ = ["wrap_tool"]

T = TypeVar("T")
_ENTRIES: Final = ("run", "arun")
_METHODS: Final = ("_run", "_arun", *_ENTRIES)
_BASES: Final[tuple[Any, ...]] = (CrewStructuredTool, Tool, BaseTool)


def wrap_tool(tool: T, **declaration: Unpack[Declaration]) -> T:
    """Make the calls of a tool steps of the open saga.

    Returned is a copy of the same type, with the same name, description, argument schema and settings; the tool itself
    is left alone. Outside of a saga the copy calls straight through. The step is the call of the tool's own function
    (`func`, `_run` or `_arun`): `result.` paths speak of what that returned, and the saga sees what that raised,
    whatever the framework makes of either. What CrewAI decides before that (arguments that do not fit, a spent
    `max_usage_count`, a cached result) is no step.

    A parameter `idempotency_key` of the function is ours to give, and the model is not shown it.

    Args:
        tool: What `@tool` makes, a `BaseTool`, or a `CrewStructuredTool`.
        **declaration: What `saga_tool` takes, but for the name.

    Raises:
        DeclarationError: The declaration could not keep the promises, or the tool is wrapped already; its last
            sentence says what to write.
    """
    found: Any = tool
    if not isinstance(tool, BaseTool | CrewStructuredTool):
        raise DeclarationError(
            f"{type(tool).__name__} is no CrewAI tool. Make one with @tool, or of another framework's tool with "
            "Tool.from_langchain(...), and wrap that."
        )
    name = str(found.name)
    if runner_in(found) is not None or runner_in(getattr(found, "_run", None)) is not None:
        raise DeclarationError(f"{name!r} is a saga tool already. Wrap the plain tool once.")
    wrapped = _of_function(found, name, declaration) if _calls_func(found) else _of_methods(found, name, declaration)
    install_hooks()
    return cast(T, wrapped)


def _calls_func(tool: Any) -> bool:
    """Whether every way to call the tool ends in its field `func`."""
    kind: Any = tool.__class__
    base: Any = CrewStructuredTool if issubclass(kind, CrewStructuredTool) else Tool
    if not issubclass(kind, base) or not callable(tool.func):
        return False
    methods = (*_METHODS, "invoke", "ainvoke")
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in methods)


# --- tools made of a function


def _of_function(tool: Any, name: str, declaration: Declaration) -> Any:
    fn: Callable[..., Any] = tool.func
    runner = ToolRunner(name, declaration, adapter=NAME, fn=fn)
    refuse_generator(name, fn)
    update: dict[str, Any] = {"func": _function(fn, runner)}
    if runner.takes_key:
        update["args_schema"] = _without_key(name, tool.args_schema)
    copied = tool.model_copy(update=update)
    _reclass(copied, {"__agent_saga__": runner})
    return copied


def _function(fn: Callable[..., Any], runner: ToolRunner) -> Callable[..., Any]:
    binding = Binding(fn)

    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            named, invoke = binding.bind(args, kwargs)
            return await aperform(runner, named, invoke)

        made: Callable[..., Any] = acall
    else:

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            named, invoke = binding.bind(args, kwargs)
            return perform(runner, named, invoke)

        made = call
    return _shown(made, fn, runner)


def _shown(made: Callable[..., Any], fn: Callable[..., Any], runner: ToolRunner) -> Callable[..., Any]:
    """Carry the runner, and show the function's signature without the key."""
    shown: Any = made
    shown.__agent_saga__ = runner
    if runner.takes_key:
        shown.__signature__ = Binding(fn).shown
    return made


# --- tools made of methods


_INSIDE: ContextVar[Mapping[ToolRunner, str]] = ContextVar("agent_saga_crewai_inside", default=MappingProxyType({}))
"""The wrapped tools whose methods are running here, each with its innermost: `run` calls `_run`, and `_arun` may."""


@contextmanager
def _inside(runner: ToolRunner, method: str | None) -> Generator[None]:
    """While a method of a tool runs; with None, outside of all of them, as for a call of its own."""
    others = {other: innermost for other, innermost in _INSIDE.get().items() if other is not runner}
    token = _INSIDE.set({**others, runner: method} if method is not None else others)
    try:
        yield
    finally:
        _INSIDE.reset(token)


def _is_part(runner: ToolRunner, method: str) -> bool:
    """Whether a method that is called here is part of the call of the tool that is being made here.

    A tool that calls itself, by `run` from within its `_run`, makes a call of its own.
    """
    innermost = _INSIDE.get().get(runner)
    return innermost is not None and (innermost in _ENTRIES or method not in _ENTRIES)


def _of_methods(tool: Any, name: str, declaration: Declaration) -> Any:
    kind: Any = tool.__class__
    base: Any = next(base for base in _BASES if issubclass(kind, base))
    own = [method for method in _METHODS if getattr(kind, method, None) is not getattr(base, method, None)]
    if base is CrewStructuredTool or "_run" not in own:
        raise DeclarationError(
            f"{name!r} is a {kind.__name__}, whose own ways to be called cannot be told from its function. "
            "Derive from BaseTool and implement _run, or use @tool."
        )
    for method in own:
        refuse_generator(name, getattr(kind, method))
    keyed = [method for method in ("_run", "_arun") if method in own and accepts_key(getattr(tool, method))]
    runner = ToolRunner(name, declaration, adapter=NAME, fn=getattr(tool, [*keyed, "_run"][0]))
    namespace = {method: _method(method, getattr(kind, method), runner) for method in own}
    namespace.update({m: _entry(m, getattr(kind, m), runner) for m in _ENTRIES if m not in own and hasattr(kind, m)})
    update = {"args_schema": _without_key(name, tool.args_schema)} if runner.takes_key else {}
    copied: Any = tool.model_copy(update=update)
    _reclass(copied, {**namespace, "__agent_saga__": runner})
    return copied


def _method(name: str, fn: Callable[..., Any], runner: ToolRunner) -> Callable[..., Any]:
    """A method that makes the original's call a step, unless it is called from within another one of this tool."""
    raw = name in _ENTRIES  # these are given what the model gave, before anything is checked

    def bind(tool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Mapping[str, Any], Callable[..., Any]]:
        if not raw:
            return Binding(MethodType(fn, tool)).bind(args, kwargs)
        given = {name: value for name, value in kwargs.items() if name != "idempotency_key" or not runner.takes_key}

        def invoke(key: str) -> Any:
            return fn(tool, *args, **given)

        return _as_validated(tool, args, given), invoke

    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def acall(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_part(runner, name):
                with _inside(runner, name):
                    return await fn(self, *args, **_keyed(fn, kwargs))
            named, invoke = bind(self, args, kwargs)

            async def inside(key: str) -> Any:
                with _inside(runner, name):
                    return await invoke(key)

            return await aperform(runner, named, inside)

        return _shown(acall, fn, runner)

    @functools.wraps(fn)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_part(runner, name):
            with _inside(runner, name):
                return fn(self, *args, **_keyed(fn, kwargs))
        named, invoke = bind(self, args, kwargs)

        def inside(key: str) -> Any:
            with _inside(runner, name):
                return invoke(key)

        return perform(runner, named, inside)

    return _shown(call, fn, runner)


def _entry(name: str, fn: Callable[..., Any], runner: ToolRunner) -> Callable[..., Any]:
    """CrewAI's own `run` or `arun`, which makes no step: the method behind it does, also if the tool calls itself."""
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def acall(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _inside(runner, name if _is_part(runner, name) else None):
                return await fn(self, *args, **kwargs)

        return acall

    @functools.wraps(fn)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _inside(runner, name if _is_part(runner, name) else None):
            return fn(self, *args, **kwargs)

    return call


def _keyed(fn: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method called from within another one of its tool: the key is that of the step around it."""
    if not accepts_key(fn) or "idempotency_key" in kwargs:
        return kwargs
    step = current_step()
    return {**kwargs, "idempotency_key": step.idempotency_key if step is not None else os.urandom(20).hex()}


def _as_validated(tool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """The arguments that a tool's own `run` is given, as they are once they are checked; that is up to the tool."""
    if args:
        return {"args": list(args), **kwargs}
    try:
        validated: Mapping[str, Any] = tool._validate_kwargs(kwargs)
    except Exception:  # they do not fit: it will say so itself, or take them as they are
        return kwargs
    return validated


# --- the copy


class _Quiet:
    """Keeps a wrapped tool's class out of the registries of its bases: CrewAI finds tools by class name in one."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def _reclass(copied: Any, namespace: dict[str, Any]) -> None:
    """Give the copy a class of its own that is called like the tool's: what it carries, every copy of it carries."""
    kind: Any = copied.__class__
    metaclass: Any = kind.__class__
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    copied.__class__ = metaclass(kind.__name__, (_Quiet, kind), {**names, **namespace})


def _without_key(name: str, schema: type[BaseModel] | None) -> type[BaseModel] | None:
    """The argument schema as the model is to see it: without the key, if it is in there."""
    if schema is None or "idempotency_key" not in schema.model_fields:
        return schema
    rules = schema.__pydantic_decorators__
    if rules.validators or rules.field_validators or rules.root_validators or rules.model_validators:
        raise DeclarationError(
            f"{name!r}: idempotency_key is ours to give, and its args_schema has validators that may read it. "
            "Leave idempotency_key out of args_schema."
        )
    fields: dict[str, Any] = {
        field: (info.annotation, info) for field, info in schema.model_fields.items() if field != "idempotency_key"
    }
    made: type[BaseModel] = create_model(
        schema.__name__, __config__=schema.model_config, __doc__=schema.__doc__, __module__=schema.__module__, **fields
    )
    return made
