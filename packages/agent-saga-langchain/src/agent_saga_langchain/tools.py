"""`wrap_tool`: a LangChain tool of the same type, whose calls are steps of a saga."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, Unpack, cast, get_type_hints
from weakref import WeakValueDictionary

from langchain_core.tools import BaseTool, InjectedToolArg, StructuredTool, Tool
from pydantic import BaseModel, create_model

from agent_saga_core import DeclarationError
from agent_saga_core.registry import accepts_key
from agent_saga_core.wrapping import Declaration, ToolRunner, runner_of
from agent_saga_langchain.adapter import NAME
from agent_saga_langchain.pauses import GraphPause
from agent_saga_langchain.seats import Seat, entered, hints_of, left_out, original_of, seated, shown_fields

__all__ = ["WrappedOnce", "wrap_tool"]

T = TypeVar("T", bound=BaseTool)
KEY = "idempotency_key"
FUNCTIONS = ("func", "coroutine")
"""The fields of `StructuredTool` and `Tool` that hold what they call."""


def wrap_tool(tool: T, **declaration: Unpack[Declaration]) -> T:
    """Return a copy of the tool whose calls, inside a saga, are steps of it; outside it calls straight through.

    The copy has the tool's type, name, description, argument schema, injected arguments and return value, and the
    original is untouched. The step is made around the tool's own function: `result.` paths speak of what it returned,
    the saga sees the exception that it raised, and only the arguments that a model can give are recorded, validated and
    with their defaults. What fails before the function runs (validation, a missing sync or async side) makes no step.

    An `idempotency_key` parameter of the function is ours to give: a model is not shown it, and what one gives is
    replaced. Copies of the copy stay wrapped, pickled ones too where the original and the declaration can be pickled.

    Not kept: `type(tool) is ...`, and `tool.func`, which is a function that makes the step. No step is made by a class
    that overrides `run` or `invoke` and never comes to its `_run`.

    Args:
        tool: Any tool of LangChain: made by `@tool`, a `StructuredTool`, a `Tool`, or of a `BaseTool` subclass.
        **declaration: What its effect means and how it is undone; see `agent_saga_core.saga_tool`.

    Raises:
        DeclarationError: It is no tool, or a saga tool already, or the declaration could not keep the promises.
    """
    if not isinstance(tool, BaseTool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"{tool!r} is no LangChain tool. Make one of it first, with @tool.")
    for part in (tool, *(fn for _, fn in _functions(tool))):
        if runner_of(part) is not None:
            raise DeclarationError(f"{tool.name!r} is a saga tool already. Wrap the tool that it was made from, once.")
    return _wrapped(tool, _runner(tool, declaration))


class WrappedOnce:
    """Tools that are wrapped where they are called: each once, whichever of its parallel calls comes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[int, tuple[BaseTool, BaseTool]] = {}  # holds the tool too, so that no other one gets its id

    def of(self, tool: BaseTool, declaration: Declaration) -> BaseTool:
        """The tool, wrapped.

        Raises:
            DeclarationError: Its declaration could not keep the promises.
        """
        with self._lock:
            known = self._made.get(id(tool))
            if known is None:
                known = self._made[id(tool)] = (tool, wrap_tool(tool, **declaration))
            return known[1]


class _Runner(ToolRunner):
    """A runner that can be made again from its declaration, where a pickled tool is read by another process."""

    __slots__ = ("declaration", "plain_schema", "token")

    def __init__(self, tool: BaseTool, declaration: Declaration, token: str) -> None:
        own = [fn for _, fn in _functions(tool)] or [type(tool)._run, type(tool)._arun]  # pyright: ignore[reportPrivateUsage]
        fn = next(filter(accepts_key, own), own[0])
        hints = hints_of(fn)
        super().__init__(
            tool.name,
            declaration,
            adapter=NAME,
            fn=fn,
            hints={**_schema_hints(tool), **hints},
            result_type=hints.get("return"),
            interrupts=(GraphPause,),
        )
        self.declaration = declaration
        self.plain_schema = tool.args_schema
        self.token = token


_live: WeakValueDictionary[str, _Runner] = WeakValueDictionary()


def _runner(tool: BaseTool, declaration: Declaration, token: str | None = None) -> _Runner:
    runner = _Runner(tool, declaration, token or uuid.uuid4().hex)
    return _live.setdefault(runner.token, runner)


def _wrapped(tool: T, runner: _Runner) -> T:
    functions = _functions(tool)
    seats = _seats(tool, runner)
    wrapped = tool.model_copy()
    wrapped.__class__ = cast("type[T]", _class_of(type(tool)))
    # Not through pydantic, which knows fields only. Copies of the instance's dict carry it along.
    object.__setattr__(wrapped, "__agent_saga__", runner)
    object.__setattr__(wrapped, "__agent_saga_seats__", seats)
    for name, fn in functions:
        BaseTool.__setattr__(wrapped, name, seated(fn, seats[name], is_async=name == "coroutine"))
    if runner.takes_key:
        wrapped.args_schema = _without_key(tool)  # which also makes the copy forget the schema it has shown so far
    return wrapped


def _functions(tool: BaseTool) -> list[tuple[str, Callable[..., Any]]]:
    """The functions that the tool holds, if it calls them itself; none if its class decides what a call is."""
    if not _holds_functions(type(tool)):
        return []
    return [(name, fn) for name in FUNCTIONS if (fn := getattr(tool, name)) is not None]


def _holds_functions(cls: type[BaseTool]) -> bool:
    plain: list[Any] = [(kind._run, kind._arun) for kind in (StructuredTool, Tool)]  # pyright: ignore[reportPrivateUsage]
    return (cls._run, cls._arun) in plain  # pyright: ignore[reportPrivateUsage]


def _seats(tool: BaseTool, runner: _Runner) -> dict[str, Seat]:
    shown = shown_fields(tool)
    seats: dict[str, Seat] = {}
    for name, fn in _functions(tool):
        seats[name] = Seat(fn, runner, left_out(tool, fn, shown))
    if not seats:
        for name in ("_run", "_arun"):
            fn = getattr(type(tool), name)
            seats[name] = Seat(fn, runner, left_out(tool, fn, shown), is_method=True)
    return seats


# --- the class of wrapped tools


@functools.cache
def _class_of(cls: type[BaseTool]) -> type[BaseTool]:
    """The subclass of a tool's class whose instances are wrapped; it passes for the class itself by name."""
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__agent_saga_plain__": cls,
        **_calls(cls),
        **_copies(cls),
    }
    metaclass: Any = type(cls)
    made: type[BaseTool] = metaclass(cls.__name__, (cls,), body)
    return made


def _calls(cls: Any) -> dict[str, Any]:
    @functools.wraps(cls.run)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with entered(self.__agent_saga__, kwargs.get("tool_call_id")):
            return cls.run(self, *args, **kwargs)

    @functools.wraps(cls.arun)
    async def arun(self: Any, *args: Any, **kwargs: Any) -> Any:
        with entered(self.__agent_saga__, kwargs.get("tool_call_id")):
            return await cls.arun(self, *args, **kwargs)

    body: dict[str, Any] = {"run": run, "arun": arun}
    if _holds_functions(cls):
        return body  # the step is made in the functions

    if not _is_missing(cls._run):

        @functools.wraps(cls._run)
        def _run(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.__agent_saga_seats__["_run"].call((self, *args), kwargs)

        body["_run"] = _without_key_parameter(_run, cls._run)
    # The inherited `_arun` runs `_run` in a thread, and LangChain looks whether it is that one.
    if cls._arun is not BaseTool._arun and not _is_missing(cls._arun):  # pyright: ignore[reportPrivateUsage]

        @functools.wraps(cls._arun)
        async def _arun(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await self.__agent_saga_seats__["_arun"].acall((self, *args), kwargs)

        body["_arun"] = _without_key_parameter(_arun, cls._arun)
    return body


def _is_missing(fn: Any) -> bool:
    """Whether a method only says that there is no such side of the tool: it knows nothing by which to do more."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return code is not None and "NotImplementedError" in code.co_names and set(code.co_names) <= {
        "NotImplementedError", "name", "__class__", "__name__",
    }  # fmt: skip


def _copies(cls: Any) -> dict[str, Any]:
    """Whatever way it is copied or changed, a wrapped tool stays one, and shares its runner with the copy."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        cls.__setattr__(self, name, _seated_anew(self, name, value))

    @functools.wraps(cls.model_copy)
    def model_copy(self: Any, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Any:
        changed = {name: _seated_anew(self, name, value) for name, value in (update or {}).items()}
        return cls.model_copy(self, update=changed or None, deep=deep)

    def __deepcopy__(self: Any, memo: dict[int, Any] | None = None) -> Any:
        memo = {} if memo is None else memo
        for shared in (self.__agent_saga__, self.__agent_saga_seats__):
            memo[id(shared)] = shared
        return cls.__deepcopy__(self, memo)

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        runner: _Runner = self.__agent_saga__
        return _unpickled, (_plain(self), runner.declaration, runner.token)

    return {
        "__setattr__": __setattr__,
        "model_copy": model_copy,
        "__deepcopy__": __deepcopy__,
        "__reduce_ex__": __reduce_ex__,
    }


def _seated_anew(tool: Any, name: str, value: Any) -> Any:
    """A function that is put into a wrapped tool in place of another one, wrapped like it."""
    if name not in FUNCTIONS or not callable(value) or not _holds_functions(_plain_class(tool)):
        return value
    runner = tool.__agent_saga__
    if runner_of(value) is runner:
        return value
    seat = Seat(value, runner, left_out(tool, value, shown_fields(tool)))
    return seated(value, seat, is_async=name == "coroutine")


def _plain_class(tool: Any) -> type[BaseTool]:
    plain: type[BaseTool] = tool.__agent_saga_plain__
    return plain


def _plain(tool: Any) -> BaseTool:
    """The tool as it was before it was wrapped, with what was changed in it since."""
    cls = _plain_class(tool)
    plain: Any = copy.copy(tool)
    plain.__class__ = cls
    for name in FUNCTIONS if _holds_functions(cls) else ():
        BaseTool.__setattr__(plain, name, original_of(getattr(plain, name)))
    runner: _Runner = tool.__agent_saga__
    if runner.takes_key and plain.args_schema is not None:
        plain.args_schema = runner.plain_schema
    for name in ("__agent_saga__", "__agent_saga_seats__"):
        object.__delattr__(plain, name)
    return plain


def _unpickled(plain: BaseTool, declaration: Declaration, token: str) -> BaseTool:
    return _wrapped(plain, _live.get(token) or _runner(plain, declaration, token))


# --- the schema


def _schema_hints(tool: BaseTool) -> dict[str, Any]:
    schema = tool.args_schema
    if schema is None or isinstance(schema, dict):
        return {}
    try:
        return get_type_hints(schema, include_extras=True)
    except Exception:  # unresolvable annotations are the user's style
        return {}


def _without_key(tool: BaseTool) -> Any:
    """The argument schema with `idempotency_key` as an injected argument, which a model is not shown."""
    schema = tool.args_schema
    if schema is None:  # made from the signature, see `_without_key_parameter`
        return None
    if isinstance(schema, dict):
        shown: dict[str, Any] = copy.deepcopy(schema)
        shown.get("properties", {}).pop(KEY, None)
        if KEY in shown.get("required", ()):
            shown["required"] = [name for name in shown["required"] if name != KEY]
        return shown
    if not issubclass(schema, BaseModel):
        raise DeclarationError(
            f"{tool.name!r}: its argument schema is of pydantic 1, in which {KEY} cannot be hidden from a model. "
            "Write args_schema= with pydantic 2."
        )
    if KEY not in schema.model_fields:
        return schema
    hidden: Any = (Annotated[str, InjectedToolArg()], "")
    return create_model(
        schema.__name__, __base__=schema, __module__=schema.__module__, __doc__=schema.__doc__, **{KEY: hidden}
    )


def _without_key_parameter(wrapper: Any, method: Any) -> Any:
    """The signature that LangChain makes a schema from, where a tool's class declares none."""
    if not accepts_key(method):
        return wrapper
    # A signature of its own is read as it stands: its annotations have to be resolved.
    hints = hints_of(method)
    signature = inspect.signature(method)
    shown = [
        p.replace(annotation=hints.get(p.name, p.annotation)) for p in signature.parameters.values() if p.name != KEY
    ]
    wrapper.__signature__ = signature.replace(parameters=shown)
    wrapper.__annotations__ = {name: hint for name, hint in hints.items() if name != KEY}
    return wrapper
