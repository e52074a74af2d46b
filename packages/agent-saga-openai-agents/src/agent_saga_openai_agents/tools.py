"""`wrap_tool`: a copy of a tool, each of whose calls is a step.

A tool made with `function_tool` is built anew around a function that makes the step, by `function_tool` itself: what
parses and validates, what injects the context, and what makes a text of an exception stand outside of the step, and
are the framework's own. Of a tool made by hand the step is the call of its `on_invoke_tool`.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
import inspect
import json
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Final, TypeVar, Unpack, cast, get_type_hints

from agents import FunctionTool, function_tool
from agents import tool as framework
from agents.function_schema import function_schema
from agents.tool_context import ToolContext

from agent_saga_core import ActionSemantics, DeclarationError, Saga, SagaError, StepRequest
from agent_saga_core.engine.calls import is_async
from agent_saga_core.wrapping import (
    Binding,
    Declaration,
    ToolRunner,
    refuse_generator,
    refused_too_often,
    runner_of,
)
from agent_saga_openai_agents.adapter import NAME
from agent_saga_openai_agents.sites import runs_of, site_of

__all__ = ["agent_of", "function_of", "is_agent_tool", "wrap_tool"]

T = TypeVar("T")
Invoke = Callable[[str], Any]

_CONTEXT: Final = "agent_saga_context"


class _Heard:
    """What the invoker of a call hears of it, past the framework's formatter."""

    refusal: Exception | None = None
    """Why the call was refused."""
    ends = False
    """Whether that ends the run: its model does not listen."""


_refused: ContextVar[_Heard | None] = ContextVar("agent_saga_openai_agents_refused", default=None)


def wrap_tool(tool: T, **declaration: Unpack[Declaration]) -> T:
    """A copy of a function tool, each of whose calls inside of a saga is a step. The original is untouched.

    The copy keeps every public field, but for two: a parameter `idempotency_key` is ours to give and leaves the schema
    that the model sees, and an IRREVERSIBLE tool that needs no approval needs it from now on, since a person's yes is
    its gate. Where `needs_approval` is a function that says no, the saga's own `approve=` is asked.

    A failure is recorded as what the function raised, whatever the framework makes of it. Nothing is recorded of a
    call that never comes to the function: unreadable arguments, a guardrail that refuses, a rejected approval.

    Args:
        tool: A `FunctionTool`. One that was made by hand, not with `function_tool`, is recorded with its arguments as
            the model gave them, and with what its `on_invoke_tool` returns or raises.
        **declaration: What is declared about it: the arguments of `saga_tool`, without `name`.

    Raises:
        DeclarationError: It is no function tool, an agent, wrapped already, or its declaration could not keep the
            promises.
    """
    if not isinstance(tool, FunctionTool):
        raise DeclarationError(
            f"{type(tool).__name__} runs where no step can be put around it. Wrap function tools, and acknowledge "
            "the others in coverage."
        )
    fn = function_of(tool)
    if runner_of(tool) is not None or runner_of(fn) is not None:
        raise DeclarationError(f"{tool.name!r} is a saga tool already. Wrap the plain tool once.")
    if is_agent_tool(tool):
        raise DeclarationError(f"{tool.name!r} is an agent: its steps are the calls of its own tools. Wrap those.")
    if fn is not None:
        refuse_generator(tool.name, fn)
        if not is_async(fn):
            declaration["offload"] = True  # as the framework does; and a thread that was given up is waited for
    runner = ToolRunner(tool.name, declaration, adapter=NAME, fn=fn)
    wrapped = copy.copy(tool)
    _mark(wrapped, runner)
    if fn is not None:
        _build_anew(wrapped, fn, runner)
    else:
        _wrap_invoker(wrapped, runner)
    if runner.spec.semantics is ActionSemantics.IRREVERSIBLE and wrapped.needs_approval is False:
        wrapped.needs_approval = True
    return cast(T, wrapped)


def function_of(tool: FunctionTool) -> Callable[..., Any] | None:
    """The function that `function_tool` was given; None of a tool that was made otherwise."""
    fn = cast(object, getattr(tool, "__wrapped__", None))
    return cast("Callable[..., Any]", fn) if callable(fn) else None


def is_agent_tool(tool: FunctionTool) -> bool:
    """Whether a call of the tool runs an agent (`agent.as_tool`)."""
    return bool(getattr(tool, "_is_agent_tool", False)) or agent_of(tool) is not None


def agent_of(tool: FunctionTool) -> Any:
    """The agent that a call of the tool runs, or None."""
    return getattr(tool, "_agent_instance", None)


# --- a tool that function_tool made


def _build_anew(tool: FunctionTool, fn: Callable[..., Any], runner: ToolRunner) -> None:
    """Give `tool`, a copy, the invoker of the same tool made from a function that makes the step."""
    calls = _Calls(fn, runner)
    step = calls.step()
    output = getattr(tool, "_output_type_adapter", None)
    more: dict[str, Any] = {} if output is None else {"output_type": getattr(output, "_type", Any)}
    made = function_tool(step, name_override=tool.name, use_docstring_info=False, strict_mode=False, **more)
    invoker: Any = made.on_invoke_tool
    for name, mark in vars(tool.on_invoke_tool).items():
        if name.startswith("__agents_"):  # what else is known of it, such as that its function is sync
            setattr(invoker, name, mark)
    _replace_attribute(getattr(invoker, "_invoke_tool_impl", None), step, calls.direct())  # `tool.__wrapped__`
    tool.on_invoke_tool = _ending(invoker, tool, runner)
    if runner.takes_key:
        tool.params_json_schema = _without_key(tool.params_json_schema)


def _replace_attribute(holder: object, old: object, new: object) -> None:
    attributes: dict[str, Any] = getattr(holder, "__dict__", {})
    for name in [name for name, value in attributes.items() if value is old]:
        attributes[name] = new


class _Calls:
    """The calls of one function: through its tool, and by hand."""

    def __init__(self, fn: Callable[..., Any], runner: ToolRunner) -> None:
        # An object that can be called is read through its method, as the framework does.
        self.fn: Any = fn if inspect.isroutine(fn) or inspect.isclass(fn) else fn.__call__
        self.runner = runner
        self.binding = Binding(self.fn)
        self.is_async = is_async(fn)
        parameters = list(self.binding.signature.parameters.values())
        schema = function_schema(self.fn, name_override="tool", use_docstring_info=False, strict_json_schema=False)
        self.context = parameters[0].name if schema.takes_context else None
        shown = self.binding.shown.parameters.values()
        self.visible = inspect.Signature([p for p in shown if p.name != self.context])
        if self.binding.takes_key and not self.binding.plain and self.binding.key_at < len(parameters):
            raise DeclarationError(
                f"{runner.spec.tool!r} takes idempotency_key by position, before arguments that have no names. "
                "Make it keyword-only."
            )

    def step(self) -> Callable[..., Any]:
        """What the framework calls instead of the function: it is given the context first, whoever asked for it."""
        runner = self.runner

        @functools.wraps(self.fn)
        async def step(context: Any, /, *args: Any, **kwargs: Any) -> Any:
            named, invoke = self.bind(context, args, kwargs)
            return await _step(runner, context, named, invoke, in_thread=not self.is_async)

        first = inspect.Parameter(_CONTEXT, inspect.Parameter.POSITIONAL_ONLY, annotation=ToolContext)
        shown: Any = step
        shown.__signature__ = inspect.Signature([first, *self.visible.parameters.values()])
        hints = self._annotations()
        shown.__annotations__ = {n: a for n, a in hints.items() if n in self.visible.parameters or n == "return"}
        shown.__annotations__[_CONTEXT] = ToolContext
        return step

    def direct(self) -> Callable[..., Any]:
        """The function for those who call it by hand, past the framework: a step all the same."""
        runner, binding = self.runner, self.binding

        def bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Invoke]:
            named, invoke = binding.bind(args, kwargs)
            return self._recorded(named), invoke

        if self.is_async:

            @functools.wraps(self.fn)
            async def acall(*args: Any, **kwargs: Any) -> Any:
                return await runner.arun(*bound(args, kwargs))

            call: Any = acall
        else:

            @functools.wraps(self.fn)
            def scall(*args: Any, **kwargs: Any) -> Any:
                return runner.run(*bound(args, kwargs))

            call = scall
        if binding.takes_key:
            call.__signature__ = binding.shown
        call.__agent_saga__ = runner
        return call

    def bind(self, context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Invoke]:
        """The arguments of a call through the tool, by name, and the call itself."""
        first = () if self.context is None else (context,)
        if self.binding.plain:
            given = self.visible.bind(*args, **kwargs)
            named, invoke = self.binding.bind(first, given.arguments)
        else:
            named, invoke = self.binding.bind((*first, *args), kwargs)
        return self._recorded(named), invoke

    def _recorded(self, named: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in named.items() if name != self.context}

    def _annotations(self) -> dict[str, Any]:
        try:
            return get_type_hints(self.fn, include_extras=True)
        except (NameError, TypeError):  # names that only the function's class knows
            return dict(getattr(self.fn, "__annotations__", {}))


async def _step(
    runner: ToolRunner, context: Any, named: dict[str, Any], invoke: Invoke, *, in_thread: bool = False
) -> Any:
    """Make a call as a step of its saga, if it belongs to one."""
    saga: Saga | None = None
    try:
        saga = runner.saga()
        if saga is None:
            return await runner.arun(named, (lambda key: asyncio.to_thread(invoke, key)) if in_thread else invoke)
        site = site_of(saga, context, runner.spec.tool)
        with runs_of(saga).calling():
            return await runner.arun(named, invoke, site=site, approve=_yes_of_a_person(runner, context))
    except SagaError as refusal:
        heard = _refused.get()
        if heard is not None:
            heard.refusal, heard.ends = refusal, saga is not None and refused_too_often(saga)
        raise


def _yes_of_a_person(runner: ToolRunner, context: Any) -> Callable[[StepRequest], bool] | None:
    """The gate of a call that a person has approved through the framework; None: whatever gate the saga has."""
    if runner.spec.semantics is not ActionSemantics.IRREVERSIBLE:
        return None
    approved = getattr(context, "is_tool_approved", None)
    if approved is None:
        return None
    names = {getattr(context, "tool_name", None), getattr(context, "qualified_tool_name", None)} - {None}
    call_id = getattr(context, "tool_call_id", "")
    return (lambda request: True) if any(approved(name, call_id) is True for name in names) else None


def _without_key(schema: dict[str, Any]) -> dict[str, Any]:
    shown = copy.deepcopy(schema)
    shown.get("properties", {}).pop("idempotency_key", None)
    if "idempotency_key" in shown.get("required", ()):
        shown["required"].remove("idempotency_key")
    return shown


# --- what the framework invokes


def _ending(invoker: Any, tool: FunctionTool, runner: ToolRunner) -> Any:
    """The framework's own invoker, bound to `tool`, which lets out what ends the run instead of formatting it."""
    bound: Any = invoker.__agents_bind_function_tool__(tool)
    bound.__class__ = _ending_type(cast("type[Any]", type(bound)))
    bound.agent_saga_runner = runner
    return bound


@functools.cache
def _ending_type(kind: type[Any]) -> type[Any]:
    async def call(self: Any, ctx: ToolContext[Any], input: str) -> Any:
        before, heard = _refused.get(), _Heard()
        _refused.set(heard)
        try:
            answer = await kind.__call__(self, ctx, input)
        finally:
            _refused.set(before)
        if heard.refusal is not None:
            if heard.ends:
                raise heard.refusal
            # From 0.24 on, the default text says nothing of the exception, and asks to try again.
            if answer == framework.default_tool_error_function(ctx, heard.refusal):
                return answer if str(heard.refusal) in answer else str(heard.refusal)
        return answer

    def bind(self: Any, tool: FunctionTool) -> Any:
        bound = kind.__agents_bind_function_tool__(self, tool)
        if bound is not self:
            bound.__class__ = type(self)
            bound.agent_saga_runner = self.agent_saga_runner
        _mark(tool, self.agent_saga_runner)
        return bound

    body = {"__call__": call, "__agents_bind_function_tool__": bind, "__module__": __name__}
    return type("SagaInvoker", (kind,), body)


# --- a tool made otherwise


def _wrap_invoker(tool: FunctionTool, runner: ToolRunner) -> None:
    """Make each call of `tool`'s invoker a step; of one that formats exceptions, what it does before that."""
    inner: Any = tool.on_invoke_tool
    implementation = getattr(inner, "_invoke_tool_impl", None)
    if implementation is None or not hasattr(inner, "__agents_bind_function_tool__"):
        tool.on_invoke_tool = _Invoker(tool, runner, inner)
        return
    formatting = copy.copy(inner)
    formatting._invoke_tool_impl = _Invoker(tool, runner, implementation, narrows=False)
    tool.on_invoke_tool = _ending(formatting, tool, runner)


class _Invoker:
    """An `on_invoke_tool` each of whose calls is a step."""

    def __init__(self, tool: FunctionTool, runner: ToolRunner, inner: Any, *, narrows: bool = True) -> None:
        self.tool = tool
        self.runner = runner
        self.inner = inner
        self.narrows = narrows

    def __agents_bind_function_tool__(self, tool: FunctionTool) -> _Invoker:
        if tool is self.tool:
            return self
        inner = self.inner
        if inspect.ismethod(inner) and inner.__self__ is self.tool:  # a copy acts on itself, not on the original
            inner = inner.__func__.__get__(tool, type(tool))
        _mark(tool, self.runner)
        return _Invoker(tool, self.runner, inner, narrows=self.narrows)

    async def __call__(self, ctx: ToolContext[Any], input: str) -> Any:
        return await _step(self.runner, ctx, _arguments(input), lambda key: self.inner(self._narrowed(ctx), input))

    def _narrowed(self, ctx: ToolContext[Any]) -> Any:
        """The context as the framework would have given it to the inner function."""
        narrow = getattr(framework, "_get_function_tool_invoke_context", None)
        if narrow is None or not self.narrows:
            return ctx
        return narrow(SimpleNamespace(on_invoke_tool=self.inner), ctx)


def _arguments(text: str) -> dict[str, Any]:
    """The arguments as the model gave them, for their names to say what is a secret; of what has none, a digest."""
    try:
        found: Any = json.loads(text) if text else {}
    except ValueError:
        found = f"unreadable, sha256 {hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {"input": found}


def _mark(tool: FunctionTool, runner: ToolRunner) -> None:
    """Say on the tool that it is wrapped: also on copies that are made of its public fields alone."""
    tool.__dict__["__agent_saga__"] = runner
