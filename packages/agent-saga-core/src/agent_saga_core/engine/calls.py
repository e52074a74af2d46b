"""A call, prepared: its arguments as the log will hold them, its identity, and what its arguments give of the undo."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from agent_saga_core import paths, registry, values
from agent_saga_core.declare import StepSpec
from agent_saga_core.engine.inverse import from_arguments
from agent_saga_core.engine.run import Run, StepCall
from agent_saga_core.errors import DeclarationError

__all__ = ["has_async_part", "prepare"]


def prepare(
    run: Run,
    spec: StepSpec,
    args: Mapping[str, Any],
    invoke: Callable[[str], Any],
    *,
    scope: str,
    key: str | None,
    call_id: str | None,
    parent: int | None,
    enclosing: tuple[object, ...],
) -> StepCall:
    """Make a `StepCall`. What is wrong with it becomes `StepCall.refused`, so that the refusal is on record."""
    # The key is ours to give: a value that the model gave is neither recorded nor part of the identity.
    given = {name: value for name, value in args.items() if name != "idempotency_key"}
    refused: DeclarationError | None = None
    try:
        encoded = values.encode_args(given, spec.hints)
    except values.Unstorable as error:
        refused = DeclarationError(f"{spec.tool!r}: {error}. Pass plain data, or a handle to what it stands for.")
        encoded = values.Encoded(data={}, redacted=(), secrets=())
    fingerprint = values.fingerprint(spec.tool, encoded.data)
    declared: str | None = None
    if refused is None:
        try:
            declared = key if key is not None else _declared_key(spec, given)
        except DeclarationError as error:
            refused = error
    call = StepCall(
        spec=spec,
        args=given,
        encoded=encoded,
        fingerprint=fingerprint,
        invoke=invoke,
        scope=scope,
        identity=_explicit_identity(spec.tool, declared, call_id),
        base=_json(("n", scope, spec.tool, fingerprint)),
        parent=parent,
        enclosing=enclosing,
        declared_key=declared,
        refused=refused,
    )
    if refused is None:
        try:
            from_arguments(run, call)
        except DeclarationError as error:
            call.refused = error
    return call


def _json(parts: tuple[str, ...]) -> str:
    return msgspec.json.encode(parts).decode()


def _explicit_identity(tool: str, key: str | None, call_id: str | None) -> str | None:
    if key is not None:
        return _json(("key", tool, key))
    if call_id is not None:
        return _json(("call", tool, call_id))
    return None


def _declared_key(spec: StepSpec, args: dict[str, Any]) -> str | None:
    if spec.key is None:
        return None
    try:
        found: object = spec.key.get({"args": args}) if isinstance(spec.key, paths.Path) else spec.key(dict(args))
    except Exception as error:
        raise DeclarationError(
            f"{spec.tool!r}: its key could not be taken from the arguments ({type(error).__name__}). Correct key=."
        ) from error
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise DeclarationError(f"{spec.tool!r}: its key is a {type(found).__name__}. Make key= give a string.")
    return str(found)


def has_async_part(spec: StepSpec) -> bool:
    """Whether the tool's inverse or probe is known to be async."""
    parts: list[Any] = [spec.probe]
    if spec.undo is not None:
        entry = registry.compensator_named(spec.undo.handler) if spec.undo.handler is not None else None
        parts += [spec.undo.fn, entry.fn if entry else None, entry.probe if entry else None]
    return any(part is not None and is_async(part) for part in parts)


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling `fn` is known to give an awaitable."""
    while hasattr(fn, "func") and not inspect.isroutine(fn):  # functools.partial
        fn = fn.func  # type: ignore[attr-defined]
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
