"""The decorator for plain functions."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from agent_saga_core.declare import ActionSemantics, Inverse, NotAppliedRule
from agent_saga_core.drive import CURRENT_STEP
from agent_saga_core.engine.calls import is_async
from agent_saga_core.errors import DeclarationError
from agent_saga_core.registry import accepts_key
from agent_saga_core.wrapping.runner import Declaration, ToolRunner

__all__ = ["Binding", "refuse_generator", "saga_tool"]

F = TypeVar("F", bound=Callable[..., Any])


def saga_tool(
    *,
    semantics: ActionSemantics | str,
    compensate: Inverse = None,
    name: str | None = None,
    key: str | Callable[[dict[str, Any]], str] | None = None,
    timeout: float | None = None,
    not_applied: NotAppliedRule | Iterable[NotAppliedRule] = (),
    probe: Callable[[dict[str, Any], str], Any] | str | None = None,
    in_doubt: float | None = None,
    result_type: Any = None,
    offload: bool = False,
    require_saga: bool = False,
) -> Callable[[F], F]:
    """Declare a function as a tool: inside a saga each call is a step, outside it is called straight through.

    The function keeps its name, docstring, annotations and signature; a parameter `idempotency_key` is ours to give
    and is left out of the signature that a model sees; outside a saga, where nobody gives one, a key is drawn if it has
    no default. The original function is untouched. Of a function declared in a class's body, `self` is no argument: it
    is neither recorded nor part of the call's identity.

    Args:
        semantics: What the effect means for a rollback.
        compensate: The inverse: `undo(...)`, or `result -> Compensation`. May be left out if `inverse_of` names the
            function.
        name: The tool's name. Default: the function's.
        key: The call's identity, as a path (`"args.order_id"`) or a function of the arguments.
        timeout: Seconds after which a call is given up as UNKNOWN.
        not_applied: Exception types, or predicates, that say "nothing happened".
        probe: Looks the effect up: a function, or the name it was registered under with `@probe`.
        in_doubt: Seconds for which a call that was given up may still land. Default: `timeout`, else 30.
            Declared (or `timeout` is), a failed call waits that long itself, within `drain_timeout`, to be settled.
        result_type: The type that a recorded result is rebuilt through. Default: the return annotation.
        offload: Run a blocking function in a worker thread when an async caller awaits it.
        require_saga: Refuse to be called outside of a saga.

    Raises:
        DeclarationError: The declaration could not keep the promises; its last sentence says what to write.
    """

    def declare(fn: F) -> F:
        if hasattr(fn, "__agent_saga__"):
            raise DeclarationError(f"{fn.__qualname__!r} is a saga tool already. Declare the plain function once.")
        declaration = Declaration(
            semantics=semantics,
            compensate=compensate,
            key=key,
            timeout=timeout,
            not_applied=not_applied,
            probe=probe,
            in_doubt=in_doubt,
            result_type=result_type,
            offload=offload,
            require_saga=require_saga,
        )
        tool = name if name is not None else getattr(fn, "__name__", type(fn).__name__)
        runner = ToolRunner(tool, declaration, fn=fn)
        refuse_generator(tool, fn)
        return cast(F, _wrapped(fn, runner))

    return declare


def refuse_generator(tool: str, fn: Callable[..., Any]) -> None:
    """Refuse a function whose call is over before its effects begin.

    Raises:
        DeclarationError: It is a generator function.
    """
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise DeclarationError(
            f"{tool!r} is a generator function, whose effects would come after the step. Return a list instead."
        )


class Binding:
    """The arguments of one function's calls, by name."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.signature = inspect.signature(fn)
        self.takes_key = accepts_key(fn)
        parameters = self.signature.parameters.values()
        # Functions without *args, **kwargs and positional-only parameters are called by keyword, and bound without
        # the general machinery, which costs as much as the rest of a step's bookkeeping.
        self.plain = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
        self.names = [p.name for p in parameters]
        self.positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.key_required = self.takes_key and "idempotency_key" not in self.defaults
        # Where the key stands among positional arguments; beyond all of them if it is keyword-only.
        self.key_at = self.names.index("idempotency_key") if "idempotency_key" in self.positional else sys.maxsize
        if self.takes_key:
            self.defaults["idempotency_key"] = ""  # ours to give: a placeholder until the attempt has its key
        self.receiver = _receiver(fn, self.names)

    @property
    def shown(self) -> inspect.Signature:
        """The signature without `idempotency_key`, which is ours to give."""
        if not self.takes_key:
            return self.signature
        shown = [p for p in self.signature.parameters.values() if p.name != "idempotency_key"]
        return self.signature.replace(parameters=shown)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[str], Any]]:
        """The arguments by name, defaults applied, and the call itself, given its idempotency key.

        Raises:
            TypeError: They do not fit the function.
        """
        if self.plain and len(args) <= len(self.positional):
            given = {**self.defaults, **dict(zip(self.positional, args, strict=False)), **kwargs}
            # As many names as parameters, none of them given twice: then they are exactly the parameters.
            fits = len(given) == len(self.names) and kwargs.keys().isdisjoint(self.positional[: len(args)])
            if fits and all(name in given for name in self.names):
                named = self._named(given)
                return named, lambda key: self.fn(**({**given, "idempotency_key": key} if self.takes_key else given))
        return self._bind(args, kwargs)

    def outside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call outside of a saga: who sees no `idempotency_key` cannot give one either.

        Not in a compensation: it repeats, and a new key each time would repeat the effect.
        """
        given = not self.key_required or "idempotency_key" in kwargs or len(args) > self.key_at
        if given or CURRENT_STEP.get() is not None:
            return kwargs
        return {**kwargs, "idempotency_key": os.urandom(20).hex()}

    def _named(self, given: dict[str, Any]) -> dict[str, Any]:
        if self.receiver is None:
            return given
        return {name: value for name, value in given.items() if name != self.receiver}

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[str], Any]]:
        if self.takes_key and len(args) <= self.key_at:
            kwargs = {"idempotency_key": "", **kwargs}
        call = self.signature.bind(*args, **kwargs)
        call.apply_defaults()
        named: dict[str, Any] = {}
        for name, value in call.arguments.items():
            extra = self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            if extra and named.keys().isdisjoint(value):  # a positional-only parameter leaves its name to others
                named.update(value)
            else:
                named[name] = value

        def invoke(key: str) -> Any:
            if self.takes_key:
                call.arguments["idempotency_key"] = key
            return self.fn(*call.args, **call.kwargs)

        return self._named(named), invoke


def _receiver(fn: Callable[..., Any], names: list[str]) -> str | None:
    """The parameter that is the instance or class, if `fn` is a function from the body of a class; not yet bound."""
    place = getattr(fn, "__qualname__", "").rpartition(".")[0]
    in_class = inspect.isfunction(fn) and place and not place.endswith("<locals>")
    return names[0] if in_class and names[:1] in (["self"], ["cls"]) else None


def _annotations(fn: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    own: dict[str, Any] | None = getattr(fn, "__annotations__", None)
    if own is not None:
        return own
    found = {p.name: p.annotation for p in signature.parameters.values() if p.annotation is not p.empty}
    if signature.return_annotation is not signature.empty:
        found["return"] = signature.return_annotation
    return found


def _wrapped(fn: Callable[..., Any], runner: ToolRunner) -> Callable[..., Any]:
    binding, spec = Binding(fn), runner.spec
    bind, boundary = binding.bind, runner.saga

    if is_async(fn):

        @functools.wraps(fn)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            saga = boundary()
            if saga is None:
                return await fn(*args, **binding.outside(args, kwargs))
            given, invoke = bind(args, kwargs)
            return await saga.arun_step(spec, given, invoke)

        wrapper: Callable[..., Any] = run_async
    else:

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            saga = boundary()
            if saga is None:
                return fn(*args, **binding.outside(args, kwargs))
            given, invoke = bind(args, kwargs)
            return saga.run_step(spec, given, invoke)

        wrapper = run

    if not hasattr(fn, "__name__"):  # functools.partial and other callable objects have none to keep
        wrapper.__name__ = wrapper.__qualname__ = spec.tool
    annotations = _annotations(fn, binding.signature)
    wrapper.__annotations__ = {n: a for n, a in annotations.items() if n != "idempotency_key" or not binding.takes_key}
    if binding.takes_key:
        wrapper.__signature__ = binding.shown  # type: ignore[attr-defined]
    wrapper.__agent_saga__ = runner  # type: ignore[attr-defined]
    return wrapper
