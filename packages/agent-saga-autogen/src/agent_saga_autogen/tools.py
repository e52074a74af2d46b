"""`wrap_tool`: the same tool, whose calls are steps."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, Unpack, cast, get_type_hints, overload

from autogen_core import CancellationToken
from autogen_core.tools import BaseStreamTool, BaseTool, FunctionTool
from pydantic import BaseModel

from agent_saga_autogen.adapter import NAME
from agent_saga_autogen.calls import CALL_BODIES, make_call, saga_of
from agent_saga_core import DeclarationError
from agent_saga_core.wrapping import Declaration, ToolRunner, on_a_loop, refuse_generator, runner_under

__all__ = ["function_in", "wrap_tool"]

ToolT = TypeVar("ToolT", bound="BaseTool[Any, Any]")


class _Call(NamedTuple):
    """The call of a wrapped tool that is on its way through AutoGen's own code."""

    runner: ToolRunner
    call_id: str | None
    stepping: bool
    """Whether its step has begun: what the tool calls of itself now is part of it."""
    opened: list[AsyncGenerator[Any, None]]
    """The streams that were opened for it. AutoGen closes none of those that it reads from."""
    given: object = None
    """What a step that is around all of `run_json` or `run_json_stream` was given."""


_CALL: ContextVar[_Call | None] = ContextVar("agent_saga_autogen_call", default=None)


@overload
def wrap_tool(tool: ToolT, **declaration: Unpack[Declaration]) -> ToolT: ...
@overload
def wrap_tool(tool: Callable[..., Any], **declaration: Unpack[Declaration]) -> FunctionTool: ...
def wrap_tool(tool: Any, **declaration: Unpack[Declaration]) -> Any:
    """Wrap a tool: inside a saga each call is a step, outside of one it is called straight through.

    The wrapped tool is of the same class, with the same name, description, schema and component; the original is
    untouched. A plain function becomes a `FunctionTool`, as an agent would make of it. The step is the tool's own work:
    arguments that do not validate leave none, and what raises out of the tool is on record before AutoGen makes a text
    of it. A parameter `idempotency_key` of the function is ours to give and is not shown to the model.

    Inside a saga a sync function runs on a thread of its own, with its saga and step; it cannot be cancelled, only
    waited for. `load_component(tool.dump_component())` gives a tool that is not wrapped.

    Args:
        tool: A function, or any `BaseTool`: `FunctionTool`, tools with state, streaming tools, your own.
        **declaration: What is declared about it, as for `saga_tool`.

    Raises:
        DeclarationError: It is wrapped already, it is no tool, or the declaration could not keep the promises.
    """
    if isinstance(tool, BaseTool):
        found = cast("BaseTool[Any, Any]", tool)
    elif callable(tool):
        _refuse_wrapped(tool, getattr(tool, "__name__", type(tool).__name__))
        found = FunctionTool(tool, description=tool.__doc__ or "")
    else:
        raise DeclarationError(
            f"An object of type {type(tool).__qualname__} is no AutoGen tool. Pass a function or a BaseTool; "
            "put a workbench into SagaWorkbench(workbench, {name: declaration})."
        )
    _refuse_wrapped(found, found.name)
    fn = function_in(found)
    _refuse_wrapped(fn, found.name)
    wrapped = copy.copy(found)
    runner = _runner(found, fn if _runs_function(type(found)) else None, declaration)
    wrapped.__class__ = _class_of(type(found), runner)
    if runner.takes_key:
        _hide_key(cast(Any, wrapped))
    return wrapped


def function_in(tool: object) -> Callable[..., Any] | None:
    """The function of a `FunctionTool`; None if it has none that shows."""
    found = getattr(tool, "_func", None) if isinstance(tool, FunctionTool) else None
    return found if callable(found) else None


def _refuse_wrapped(found: object, name: str) -> None:
    if runner_under(found) is not None:
        raise DeclarationError(f"{name!r} is wrapped already, or its function is a saga tool. Wrap it once.")


def _runner(tool: BaseTool[Any, Any], fn: Callable[..., Any] | None, declaration: Declaration) -> ToolRunner:
    if fn is not None:
        refuse_generator(tool.name, fn)
        if not _is_async(fn):
            # A thread that outlives its cancelled caller must still be heard: AutoGen's own executor forgets it.
            declaration = declaration.copy()
            declaration["offload"] = True
        return ToolRunner(tool.name, declaration, adapter=NAME, fn=fn)
    return ToolRunner(
        tool.name, declaration, adapter=NAME, hints=_hints(tool.args_type()), result_type=_result_type(tool)
    )


def _is_async(fn: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(fn)


def _hints(model: type[BaseModel]) -> dict[str, Any]:
    try:
        return get_type_hints(model, include_extras=True)
    except Exception:  # a name that only its own module can resolve
        return {name: field.annotation for name, field in model.model_fields.items()}


def _result_type(tool: BaseTool[Any, Any]) -> Any:
    found = tool.return_type()
    return None if found is inspect.Signature.empty else found


def _hide_key(tool: Any) -> None:
    """Take `idempotency_key` out of what the model is shown, and out of what is validated."""
    shown = [p for p in tool._signature.parameters.values() if p.name != "idempotency_key"]
    signature = tool._signature.replace(parameters=shown)

    def template() -> None: ...

    template.__signature__ = signature  # type: ignore[attr-defined]
    template.__annotations__ = {p.name: p.annotation for p in shown}
    if signature.return_annotation is not signature.empty:
        template.__annotations__["return"] = signature.return_annotation
    made: Any = FunctionTool(template, description=tool.description, name=tool.name)
    tool._signature, tool._args_type = made._signature, made._args_type


# --- the class of a wrapped tool


def _class_of(base: type[Any], runner: ToolRunner) -> type[Any]:
    """A subclass for one wrapped tool and its copies: the runner stands in the class, where no copy loses it.

    Its names and docstring are those of `base`: components are described by them.
    """
    body: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__agent_saga__": runner,
    }
    makes: Callable[[Any, ToolRunner], Any]
    if _is_own(base, BaseTool, "run_json"):
        body["run_json"] = _whole_run_json(base, runner)
    else:
        makes = _function_run if _runs_function(base) else _run
        body["run"] = makes(base, runner)
        body["run_json"] = _run_json(base, runner)
    if BaseStreamTool in base.__mro__:
        if _is_own(base, BaseStreamTool, "run_json_stream"):
            body["run_json_stream"] = _whole_run_json_stream(base, runner)
        else:
            body["run_stream"] = _run_stream(base, runner)
            body["run_json_stream"] = _run_json_stream(base, runner)
    return type(base.__name__, (base,), body)


def _is_own(base: type[Any], framework: type[Any], method: str) -> bool:
    return getattr(base, method) is not getattr(framework, method)


def _runs_function(base: type[Any]) -> bool:
    """Whether calling such a tool is calling its function, by `FunctionTool`'s own code."""
    own = issubclass(base, FunctionTool) and not _is_own(base, FunctionTool, "run")
    return own and not _is_own(base, BaseTool, "run_json")


def _stepping(runner: ToolRunner) -> bool:
    """Whether this is the tool's own call of itself, in the middle of its step."""
    held = _CALL.get()
    return held is not None and held.runner is runner and held.stepping


def _goes_on(runner: ToolRunner, args: Mapping[str, Any], call_id: str | None) -> bool:
    """Whether `run_json` and `run_json_stream` of one tool call each other; else the call is one of its own.

    A tool may well be called in the middle of its own step, by an agent that it runs.
    """
    held = _CALL.get()
    return _stepping(runner) and held is not None and held.given == dict(args) and call_id in (None, held.call_id)


def _call_id(runner: ToolRunner) -> str | None:
    held = _CALL.get()
    return held.call_id if held is not None and held.runner is runner else None


async def _within(call: _Call, awaitable: Coroutine[Any, Any, Any]) -> Any:
    before = _CALL.set(call)
    try:
        return await awaitable
    finally:
        _CALL.reset(before)


def _named(args: BaseModel) -> dict[str, Any]:
    """The validated arguments by name."""
    return {name: getattr(args, name) for name in type(args).model_fields} | dict(args.model_extra or {})


def _run_json(base: Any, runner: ToolRunner) -> Any:
    """AutoGen's own `run_json` validates, traces and calls `run`, where the step is; it keeps the call id to itself."""

    async def run_json(
        self: Any, args: Mapping[str, Any], cancellation_token: CancellationToken, call_id: str | None = None
    ) -> Any:
        call = _Call(runner, call_id, False, [])
        return await _within(call, base.run_json(self, args, cancellation_token, call_id=call_id))

    CALL_BODIES.add(run_json.__code__)
    return run_json


def _run(base: Any, runner: ToolRunner) -> Any:
    async def run(self: Any, args: Any, cancellation_token: CancellationToken) -> Any:
        if _stepping(runner):
            return await base.run(self, args, cancellation_token)

        def invoke(key: str) -> Any:
            call = _Call(runner, None, True, [])
            return _within(call, base.run(self, args, cancellation_token))

        return await make_call(runner, _named(args), invoke, token=cancellation_token, call_id=_call_id(runner))

    return run


def _function_run(base: Any, runner: ToolRunner) -> Any:
    """The step of a `FunctionTool` is the function. Straight through, everything is AutoGen's own."""

    async def run(self: Any, args: Any, cancellation_token: CancellationToken) -> Any:
        fn: Callable[..., Any] = self._func
        given = {name: getattr(args, name) for name in self._signature.parameters if hasattr(args, name)}

        def invoke(key: str) -> Any:
            keyed = {"idempotency_key": key} if runner.takes_key else {}
            # Of a sync function: straight through. A step of one runs on a thread that has no loop.
            if _is_async(fn) or on_a_loop():
                made = self
                if keyed:
                    made = copy.copy(self)
                    made._func = functools.partial(fn, **keyed)
                return base.run(made, args, cancellation_token)
            if self._has_cancellation_support:
                return fn(**given, **keyed, cancellation_token=cancellation_token)
            return fn(**given, **keyed)

        return await make_call(runner, given, invoke, token=cancellation_token, call_id=_call_id(runner))

    return run


def _whole_run_json(base: Any, runner: ToolRunner) -> Any:
    """The tool's class has a `run_json` of its own, which may never call `run`: the step is around all of it."""

    async def run_json(
        self: Any, args: Mapping[str, Any], cancellation_token: CancellationToken, call_id: str | None = None
    ) -> Any:
        def inner() -> Coroutine[Any, Any, Any]:
            return cast("Coroutine[Any, Any, Any]", base.run_json(self, args, cancellation_token, call_id=call_id))

        if _goes_on(runner, args, call_id):
            return await inner()

        def invoke(key: str) -> Any:
            return _within(_Call(runner, call_id, True, [], dict(args)), inner())

        return await make_call(runner, _validated(self, args), invoke, token=cancellation_token, call_id=call_id)

    CALL_BODIES.add(run_json.__code__)
    return run_json


def _validated(tool: BaseTool[Any, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the tool's model reads them, or as they came if it does not."""
    try:
        return _named(tool.args_type().model_validate(args))
    except Exception:
        return dict(args)


# --- streams


def _run_json_stream(base: Any, runner: ToolRunner) -> Any:
    async def run_json_stream(
        self: Any, args: Mapping[str, Any], cancellation_token: CancellationToken, call_id: str | None = None
    ) -> AsyncGenerator[Any, None]:
        call = _Call(runner, call_id, False, [])
        stream: AsyncGenerator[Any, None] = base.run_json_stream(self, args, cancellation_token, call_id=call_id)
        try:
            async with aclosing(stream):
                try:
                    # Up to the first piece everything runs in this context; later ones may be read in another.
                    first = await _within(call, _next(stream))
                except StopAsyncIteration:
                    return
                yield first
                async for piece in stream:
                    yield piece
        finally:
            for opened in call.opened:
                await opened.aclose()

    return run_json_stream


async def _next(stream: AsyncGenerator[Any, None]) -> Any:
    return await anext(stream)


def _run_stream(base: Any, runner: ToolRunner) -> Any:
    def run_stream(self: Any, args: Any, cancellation_token: CancellationToken) -> AsyncGenerator[Any, None]:
        def start() -> AsyncGenerator[Any, None]:
            return base.run_stream(self, args, cancellation_token)

        held = _CALL.get()
        stream = _stream(runner, lambda: _named(args), start, cancellation_token, _call_id(runner))
        if held is not None and held.runner is runner:
            held.opened.append(stream)
        return stream

    return run_stream


def _whole_run_json_stream(base: Any, runner: ToolRunner) -> Any:
    def run_json_stream(
        self: Any, args: Mapping[str, Any], cancellation_token: CancellationToken, call_id: str | None = None
    ) -> AsyncGenerator[Any, None]:
        def start() -> AsyncGenerator[Any, None]:
            return base.run_json_stream(self, args, cancellation_token, call_id=call_id)

        if _goes_on(runner, args, call_id):
            return start()
        return _stream(runner, lambda: _validated(self, args), start, cancellation_token, call_id, dict(args))

    return run_json_stream


async def _stream(
    runner: ToolRunner,
    args: Callable[[], Mapping[str, Any]],
    start: Callable[[], AsyncGenerator[Any, None]],
    token: CancellationToken,
    call_id: str | None,
    given: object = None,
) -> AsyncGenerator[Any, None]:
    """The pieces of a stream that is one step. The last one is the result, and is given when the step is on record."""
    if (given is None and _stepping(runner)) or saga_of(runner, token) is None:
        async with aclosing(start()) as straight:
            async for piece in straight:
                yield piece
        return
    pieces: asyncio.Queue[tuple[Any] | None] = asyncio.Queue()

    async def read() -> Any:
        last: Any = None
        async with aclosing(start()) as stream:
            async for piece in stream:
                last = piece
                pieces.put_nowait((piece,))
        return last

    def invoke(key: str) -> Any:
        return _within(_Call(runner, call_id, True, [], given), read())

    step = asyncio.ensure_future(make_call(runner, args(), invoke, token=token, call_id=call_id))
    step.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        held: tuple[Any] | None = None
        while (piece := await pieces.get()) is not None:
            if held is not None:
                yield held[0]
            held = piece
        if step.exception() is not None and held is not None:
            yield held[0]
        result = step.result()
        yield held[0] if held is not None else result  # a recorded result comes alone
    finally:
        if not step.done():
            step.cancel()
            await asyncio.wait({step})
