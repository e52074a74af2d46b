"""What declarations and adapters call: one runner, sync and async, and the decorator for plain functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from agent_saga_core import registry
from agent_saga_core.declare import ActionSemantics, Inverse, NotAppliedRule, StepSpec
from agent_saga_core.drive import CURRENT_STEP
from agent_saga_core.errors import DeclarationError, SagaNotRunning
from agent_saga_core.registry import accepts_key, annotations_of
from agent_saga_core.saga import Saga, current_saga

__all__ = ["boundary", "saga_tool"]

F = TypeVar("F", bound=Callable[..., Any])


def boundary(spec: StepSpec) -> Saga | None:
    """The saga that a call of this tool belongs to; None to call straight through.

    Raises:
        SagaNotRunning: There is none, and the declaration requires one.
    """
    saga = current_saga()
    if saga is None and spec.require_saga and CURRENT_STEP.get() is None:
        raise SagaNotRunning(
            f"{spec.tool!r} was called outside of a saga and is declared with require_saga=True. "
            "Call it inside `with saga_scope():`."
        )
    return saga


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
    and is left out of the signature that a model sees. The original function is untouched.

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
        result_type: The type that a recorded result is rebuilt through. Default: the return annotation.
        offload: Run a blocking function in a worker thread when an async caller awaits it.
        require_saga: Refuse to be called outside of a saga.

    Raises:
        DeclarationError: The declaration could not keep the promises; its last sentence says what to write.
    """

    def declare(fn: F) -> F:
        if hasattr(fn, "__agent_saga__"):
            raise DeclarationError(f"{fn.__qualname__!r} is a saga tool already. Declare the plain function once.")
        inverse = compensate if compensate is not None else cast(Inverse, registry.paired_inverse(fn))
        hints = annotations_of(fn)
        spec = StepSpec.declared(
            name if name is not None else getattr(fn, "__name__", type(fn).__name__),
            semantics=semantics,
            compensate=inverse,
            key=key,
            timeout=timeout,
            not_applied=not_applied,
            probe=probe,
            in_doubt=in_doubt,
            result_type=result_type if result_type is not None else hints.get("return"),
            hints=hints,
            offload=offload,
            require_saga=require_saga,
        )
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise DeclarationError(
                f"{spec.tool!r} is a generator function, whose effects would come after the step. "
                "Return a list instead."
            )
        return cast(F, _wrapped(fn, spec))

    return declare


def _wrapped(fn: Callable[..., Any], spec: StepSpec) -> Callable[..., Any]:
    signature = inspect.signature(fn)
    takes_key = accepts_key(fn)
    is_async = inspect.iscoroutinefunction(fn)

    def bound(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        given = dict(kwargs)
        if takes_key:
            given.setdefault("idempotency_key", "")  # ours to give: a placeholder until the attempt has its key
        found = signature.bind(*args, **given)
        found.apply_defaults()
        return found

    def invoker(call: inspect.BoundArguments) -> Callable[[str], Any]:
        def invoke(idempotency_key: str) -> Any:
            if takes_key:
                call.arguments["idempotency_key"] = idempotency_key
            return fn(*call.args, **call.kwargs)

        return invoke

    if is_async:

        @functools.wraps(fn)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            saga = boundary(spec)
            if saga is None:
                return await fn(*args, **kwargs)
            call = bound(args, kwargs)
            return await saga.arun_step(spec, named(call), invoker(call))

        wrapper: Callable[..., Any] = run_async
    else:

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            saga = boundary(spec)
            if saga is None:
                return fn(*args, **kwargs)
            call = bound(args, kwargs)
            return saga.run_step(spec, named(call), invoker(call))

        wrapper = run

    if takes_key:
        shown = [p for p in signature.parameters.values() if p.name != "idempotency_key"]
        wrapper.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {n: a for n, a in fn.__annotations__.items() if n != "idempotency_key"}
    wrapper.__agent_saga__ = spec  # type: ignore[attr-defined]
    return wrapper


def named(call: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments of a bound call by name, with those of `**kwargs` beside the others."""
    found: dict[str, Any] = {}
    for name, value in call.arguments.items():
        if call.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found
