"""A call, prepared: its arguments as the log will hold them, its identity, and what its arguments give of the undo."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from agent_saga_core import paths, registry, values
from agent_saga_core.declare import StepSpec
from agent_saga_core.engine.inverse import from_arguments
from agent_saga_core.engine.run import CallSite, Run, StepCall
from agent_saga_core.errors import DeclarationError

__all__ = ["has_async_part", "prepare", "site_in"]


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
    site: CallSite | None = None,
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
    if spec.reads_args_later:
        given = _kept(given, encoded, spec)
    fingerprint = values.fingerprint(spec.tool, encoded.data)
    declared: str | None = None
    if refused is None:
        try:
            declared = key if key is not None else _declared_key(spec, given)
            declared = _spelled(spec.tool, "key", declared, encoded.secrets)
            call_id = _spelled(spec.tool, "call id", call_id, encoded.secrets)
            site = _spelled_site(spec.tool, site, encoded.secrets)
        except DeclarationError as error:
            refused, declared, call_id, site = error, None, None, None
    counted = ("n", scope, spec.tool, fingerprint) if site is None else _counted_at(site, scope, spec.tool)
    call = StepCall(
        spec=spec,
        args=given,
        encoded=encoded,
        fingerprint=fingerprint,
        invoke=invoke,
        scope=scope,
        identity=_explicit_identity(spec.tool, declared, call_id, site),
        base=_json(counted),
        explicit=site is not None or declared is not None or call_id is not None,
        body=site.body if site is not None else None,
        placed=site is not None,
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


def _kept(args: dict[str, Any], encoded: values.Encoded, spec: StepSpec) -> dict[str, Any]:
    """The arguments as they are before the call: the tool may consume them, and the inverse is derived after it."""
    try:
        return copy.deepcopy(args) if encoded.redacted else values.decode_args(encoded.data, spec.hints)
    except Exception:  # no type to rebuild them through, or no way to copy them
        return args


def _spelled(tool: str, what: str, text: str | None, secrets: tuple[str, ...]) -> str | None:
    """An identity as the log may hold it: one that shows a secret is replaced by its digest."""
    if text is None:
        return None
    try:
        spelled = text.encode()
    except UnicodeEncodeError:
        raise DeclarationError(f"{tool!r}: its {what} is not UTF-8. Pass text without lone surrogates.") from None
    if secrets and values.scrub(text, secrets) != text:
        return f"sha256:{hashlib.sha256(spelled).hexdigest()}"
    return text


def _json(parts: tuple[str, ...]) -> str:
    return msgspec.json.encode(parts).decode()


def _explicit_identity(tool: str, key: str | None, call_id: str | None, site: CallSite | None) -> str | None:
    if key is not None:
        return _json(("key", tool, key))
    if call_id is not None:
        return _json(("call", tool, call_id))
    if site is not None and site.call_id is not None:
        return _json(("call", site.adapter, site.scope, tool, site.call_id))
    return None


def site_in(identity: str) -> tuple[str, CallSite] | None:
    """The tool and the place that an identity was made from; None if no framework made the call."""
    base, sign, _ = identity.rpartition("#")
    try:
        parts = msgspec.json.decode(base if sign and not identity.endswith("]") else identity)
    except (msgspec.DecodeError, RecursionError):
        return None
    match parts:
        case ["call", str(adapter), str(scope), str(tool), str(call_id)]:
            return tool, CallSite(adapter, scope, call_id)
        case ["n" | "body", str(), str(adapter), str(scope), str(tool)]:
            return tool, CallSite(adapter, scope)
        case _:
            return None


def _counted_at(site: CallSite, scope: str, tool: str) -> tuple[str, ...]:
    """What calls without an id have in common that are counted together.

    A call counted within a body is the same call in the next execution of that body, whose savepoints may have other
    numbers then; one that is counted in the saga goes on counting when the saga goes on ("n", see `reopen`).
    """
    if site.body is not None:
        return ("body", "", site.adapter, site.scope, tool)
    return ("n", scope, site.adapter, site.scope, tool)


def _spelled_site(tool: str, site: CallSite | None, secrets: tuple[str, ...]) -> CallSite | None:
    if site is None:
        return None
    return site._replace(
        scope=_spelled(tool, "run scope", site.scope, secrets) or "",
        call_id=_spelled(tool, "call id", site.call_id, secrets),
    )


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
