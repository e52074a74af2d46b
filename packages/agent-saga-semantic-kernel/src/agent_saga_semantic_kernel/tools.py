"""`wrap_tool`: the same kernel function, whose calls are steps.

What is replaced is the function's own method, so that everything the framework does around it (parsing, injection,
filters, and what becomes of an exception) stays as it is, and the saga sees what the method returned or raised.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Annotated, Any, Final, TypeVar, Unpack, cast, get_args, get_origin, overload
from weakref import WeakValueDictionary

from semantic_kernel import Kernel
from semantic_kernel.agents import Agent
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.functions import KernelArguments, KernelFunction, KernelFunctionFromMethod
from semantic_kernel.functions.kernel_function_metadata import KernelFunctionMetadata
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from agent_saga_core import DeclarationError, Saga
from agent_saga_core.registry import annotations_of, paired_inverse
from agent_saga_core.wrapping import Declaration, ToolRunner, runner_of, runner_under
from agent_saga_semantic_kernel.adapter import NAME
from agent_saga_semantic_kernel.steps import Step, StepMethod, StreamMethod, is_async_method, is_generator_method

__all__ = ["agent_in", "method_of", "wrap_function", "wrap_tool"]

FunctionT = TypeVar("FunctionT", bound=KernelFunction)

_INJECTED: Final = frozenset({"kernel", "service", "execution_settings", "arguments"})
"""Parameters that the framework fills by their names, whatever their types are."""
_FRAMEWORKS: Final = (Kernel, KernelArguments, AIServiceClientBase, PromptExecutionSettings)
_STREAMS: Final = (AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Iterator)


@overload
def wrap_tool(tool: FunctionT, **declaration: Unpack[Declaration]) -> FunctionT: ...
@overload
def wrap_tool(tool: Callable[..., Any], **declaration: Unpack[Declaration]) -> KernelFunctionFromMethod: ...
def wrap_tool(tool: Any, **declaration: Unpack[Declaration]) -> Any:
    """Wrap a kernel function: inside a saga each call is a step, outside of one it is called straight through.

    The wrapped function is of the same class, with equal metadata; the original is untouched, and copies of the wrapped
    one stay wrapped. A plain function with `@kernel_function` becomes a `KernelFunctionFromMethod`, as a plugin would
    make of it. A parameter `idempotency_key` is ours to give and leaves the metadata.

    Recorded are the arguments that a model can give, parsed and with defaults: not what the framework injects, and not
    what is declared with `include_in_function_choices=False`. The result is what the method returns; of a generator
    function it is the list of its pieces.

    A sync method runs on the event loop and blocks it, as without a saga. `offload=True` runs it in a worker thread
    inside of a saga, and so does `timeout=`, since a call that blocks the loop cannot be given up.

    Args:
        tool: A `KernelFunctionFromMethod`, or a function or method decorated with `@kernel_function`.
        **declaration: What is declared about it: the arguments of `saga_tool`, without `name`.

    Raises:
        DeclarationError: It is wrapped already, a prompt function, an agent, or no kernel function at all; or its
            declaration could not keep the promises.
    """
    found = _function(tool)
    return _wrapped(found, _runner(found, declaration))


wrap_function = wrap_tool
"""The same, in the framework's own word for a tool."""


def method_of(function: object) -> Callable[..., Any] | None:
    """The method that a kernel function calls; None if it has none that shows."""
    found = getattr(function, "method", None) if isinstance(function, KernelFunction) else None
    return found if callable(found) else None


def agent_in(method: object) -> Agent | None:
    """The agent that a method asks, if it is the function that each agent makes of itself."""
    if getattr(method, "__name__", "") != "_as_kernel_function":
        return None
    cells = cast("Iterable[Any]", getattr(method, "__closure__", None) or ())
    held = [cell.cell_contents for cell in cells]
    return next((one for one in held if isinstance(one, Agent)), None)


# --- what can be wrapped


def _function(tool: object) -> KernelFunctionFromMethod:
    if isinstance(tool, KernelFunction):
        found = tool
    elif callable(tool) and getattr(tool, "__kernel_function__", None):
        found = KernelFunctionFromMethod(method=tool)
    else:
        raise DeclarationError(
            f"An object of type {type(tool).__qualname__} is no kernel function. Decorate the function with "
            "@kernel_function; give a plugin, or an object with such methods, to wrap_plugin."
        )
    if runner_of(found) is not None or runner_under(method_of(found)) is not None:
        raise DeclarationError(f"{found.name!r} is wrapped already, or its method is a saga tool. Wrap it once.")
    if found.is_prompt:
        raise DeclarationError(
            f"{found.name!r} is a prompt: what happens in it are the calls of its model. Wrap the functions it calls."
        )
    if agent_in(method_of(found)) is not None:
        raise DeclarationError(f"{found.name!r} is an agent: its steps are the calls of its functions. Wrap those.")
    own = isinstance(found, KernelFunctionFromMethod)
    # A class with a way of its own to make the call may never come to the method, and then nothing would be recorded.
    if not own or any(
        getattr(type(found), name) is not getattr(KernelFunctionFromMethod, name)
        for name in ("_invoke_internal", "_invoke_internal_stream")
    ):
        raise DeclarationError(
            f"{found.name!r} is a {type(found).__qualname__}, which makes its calls in a way of its own. "
            "Make it a method with @kernel_function."
        )
    return found


# --- what is declared


class _Runner(ToolRunner):
    """A runner that can be made again from its declaration, where a pickled function is read by another process."""

    __slots__ = ("declaration", "token")

    def __init__(self, tool: str, declaration: Declaration, method: Callable[..., Any], token: str) -> None:
        super().__init__(tool, declaration, adapter=NAME, fn=method, result_type=_pieces_type(method))
        self.declaration = declaration
        self.token = token


_runners: WeakValueDictionary[str, _Runner] = WeakValueDictionary()


def _runner(function: KernelFunctionFromMethod, declaration: Declaration, token: str | None = None) -> _Runner:
    method = function.method
    given = declaration.copy()
    if given.get("compensate") is None and inspect.ismethod(method):
        paired = cast(Any, paired_inverse(method.__func__))
        if paired is not None:
            given["compensate"] = paired
    if is_async_method(method):
        if given.get("offload"):
            raise DeclarationError(f"{function.name!r} is async and blocks nothing. Leave offload= out.")
    elif given.get("timeout") is not None:
        given["offload"] = True
    runner = _Runner(function.name, given, method, token or uuid.uuid4().hex)
    return _runners.setdefault(runner.token, runner)


def _pieces_type(method: Callable[..., Any]) -> Any:
    """The type of the list of a generator function's pieces; None of any other function."""
    if not is_generator_method(method):
        return None
    found = annotations_of(method).get("return")
    if get_origin(found) is Annotated:
        found = get_args(found)[0]
    of = get_args(found)
    item: Any = of[0] if of and get_origin(found) in _STREAMS else Any
    return types.GenericAlias(list, (item,))


def _injected(function: KernelFunctionFromMethod) -> frozenset[str]:
    """The parameters that are no model's to give."""
    names: set[str] = set()
    for parameter in function.parameters:
        kind: Any = parameter.type_object
        of_framework = isinstance(kind, type) and issubclass(kind, _FRAMEWORKS)
        hidden = not parameter.include_in_function_choices
        if parameter.name and (parameter.name in _INJECTED or of_framework or hidden):
            names.add(parameter.name)
    return frozenset(names)


# --- the wrapped function


def _wrapped(function: KernelFunctionFromMethod, runner: _Runner) -> KernelFunctionFromMethod:
    injected = _injected(function)
    changed: dict[str, Any] = {
        "method": StepMethod(function.method, runner, injected),
        "metadata": _metadata(function, hide="idempotency_key" if runner.takes_key else None),
    }
    if function.stream_method is not None:
        changed["stream_method"] = StreamMethod(function.stream_method, _stream_runner(function, runner), injected)
    wrapped = function.model_copy(update=changed)
    wrapped.__class__ = _class_of(type(function))
    return wrapped


def _metadata(function: KernelFunctionFromMethod, hide: str | None) -> KernelFunctionMetadata:
    """The function's metadata, shared with nobody. Not a deep copy: of some schemas that would not be equal."""
    found = function.metadata
    returned = found.return_parameter
    return found.model_copy(
        update={
            "parameters": [parameter.model_copy() for parameter in found.parameters if parameter.name != hide],
            "return_parameter": returned.model_copy() if returned is not None else None,
            "additional_properties": copy.copy(found.additional_properties),
        }
    )


def _stream_runner(function: KernelFunctionFromMethod, runner: _Runner) -> ToolRunner:
    stream = cast("Callable[..., Any]", function.stream_method)
    if not is_generator_method(stream):
        raise DeclarationError(
            f"The stream method of {function.name!r} is no generator function, and where its effects end cannot be "
            "told. Make it one."
        )
    return runner if stream == function.method else _StreamRunner(stream, runner)


class _StreamRunner(ToolRunner):
    """The runner of a stream method that is another function than the method: bound where that one is."""

    __slots__ = ("whole",)

    def __init__(self, stream: Callable[..., Any], whole: _Runner) -> None:
        super().__init__(whole.spec.tool, whole.declaration, adapter=NAME, fn=stream, result_type=_pieces_type(stream))
        self.whole = whole

    def saga(self) -> Saga | None:
        return self.whole.saga()


@functools.cache
def _class_of(base: type[Any]) -> type[Any]:
    """`base`, whose objects also say that they are wrapped: by their method, which all copies keep."""

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        runner = runner_of(self)
        if not isinstance(runner, _Runner):  # somebody has put another method into it
            return cast(Any, base).__reduce_ex__(self, protocol)
        return _unpickled, (_plain(self, base), runner.declaration, runner.token)

    body: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__agent_saga__": property(lambda function: runner_of(function.method)),
        "__reduce_ex__": __reduce_ex__,
    }
    return cast("type[Any]", types.new_class(base.__name__, (base,), exec_body=lambda names: names.update(body)))


def _plain(function: KernelFunctionFromMethod, base: type[Any]) -> Any:
    """The function as it was before it was wrapped."""
    methods = {"method": function.method, "stream_method": function.stream_method}
    plain = function.model_copy(
        update={name: found.method if isinstance(found, Step) else found for name, found in methods.items()}
    )
    plain.__class__ = base
    return plain


def _unpickled(plain: KernelFunctionFromMethod, declaration: Declaration, token: str) -> KernelFunctionFromMethod:
    return _wrapped(plain, _runners.get(token) or _runner(plain, declaration, token))
