"""The inverse of one attempt: derived from arguments or result, in the form the log holds and in this process's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_saga_core import paths, registry, values
from agent_saga_core.declare import Compensation, StepSpec, Undo
from agent_saga_core.engine.run import LocalUndo, Run, StepCall
from agent_saga_core.errors import DeclarationError
from agent_saga_core.state import Attempt, Step

__all__ = ["from_arguments", "from_result", "stored_at_intent", "target", "tells"]


def _roots(run: Run, **more: object) -> dict[str, object]:
    return {"saga": {"id": run.saga_id, "name": run.fold.name}, **more}


def _step_root(number: int, attempt: int, tool: str, key: str, undo_key: str) -> dict[str, object]:
    return {"number": number, "attempt": attempt, "tool": tool, "forward_key": key, "compensation_key": undo_key}


def _hints(handler: str | None) -> Mapping[str, Any]:
    found = registry.compensator_named(handler) if handler is not None else None
    return found.hints if found is not None else {}


def from_arguments(run: Run, call: StepCall) -> None:
    """Derive what the arguments alone give of the inverse, before anything happens.

    Raises:
        DeclarationError: An argument that the inverse needs is not there: an effect without an undo.
    """
    undo = call.spec.undo
    if undo is None or not undo.from_arguments:
        return
    roots = _roots(run, args=call.args)
    kwargs: dict[str, Any] = dict(undo.literals)
    try:
        for name, path in undo.paths.items():
            if path.root != "step":
                kwargs[name] = path.get(roots)
    except paths.PathMissing as error:
        raise DeclarationError(
            f"{call.spec.tool!r}: its undo cannot be derived from this call ({error}). Correct the path in compensate=."
        ) from None
    call.undo_stored, local = _both(undo.handler, undo.fn, kwargs, call.encoded.secrets)
    call.undo_kwargs = kwargs if local is None else dict(local.kwargs)


def _both(
    handler: str | None, fn: Callable[..., Any] | None, kwargs: Mapping[str, Any], secrets: Sequence[str]
) -> tuple[dict[str, Any], LocalUndo | None]:
    """An inverse as the log holds it, and as this process runs it where that differs.

    What another process can run, this one runs from the same stored form: a tool that consumes its argument, or a body
    that edits a result, cannot change the undo afterwards. Only what cannot be stored is kept as objects; for a
    registered compensator they are copied, for a callable of this process they are the very ones it may have to act on.
    """
    if handler is None:
        return {"local": True}, LocalUndo(None, fn, dict(kwargs), secrets)
    stored: dict[str, Any] = {"handler": handler}
    hints = _hints(handler)
    try:
        encoded = values.encode_args(dict(kwargs), hints)
        if not encoded.redacted and not tells(encoded.data, secrets):
            values.decode_args(encoded.data, hints)
            return {**stored, "kwargs": encoded.data}, None
        stored["why"] = "it needs a secret, which the log never holds"
    except (values.Unstorable, values.Undecodable) as error:
        stored["why"] = str(error)
    try:
        kept = copy.deepcopy(dict(kwargs))
    except Exception:  # what cannot be copied is kept as it is
        kept = dict(kwargs)
    return {**stored, "local": True}, LocalUndo(handler, None, kept, secrets)


def tells(data: Any, secrets: Sequence[str]) -> bool:
    """Whether encoded data shows one of these texts, under whatever name."""
    if not secrets:
        return False
    text = values.json_bytes(data).decode()
    return values.scrub(text, secrets) != text


def stored_at_intent(
    run: Run, call: StepCall, data: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, LocalUndo | None]:
    """The inverse as INTENT holds it, and as this process would run it; under the lock, plain data only."""
    undo = call.spec.undo
    if undo is None:
        return None, None
    if call.undo_kwargs is None or call.undo_stored is None:
        return {**_declared(undo), "if_absent": undo.if_absent}, None
    root = {"step": _step_root(data["step"], data["attempt"], data["tool"], data["key"], data["undo_key"])}
    keys = {name: path.get(root) for name, path in undo.paths.items() if path.root == "step"}
    stored: dict[str, Any] = {**call.undo_stored, "if_absent": undo.if_absent}
    if stored.get("local"):
        return stored, LocalUndo(undo.handler, undo.fn, {**call.undo_kwargs, **keys}, call.encoded.secrets)
    if keys:
        stored["kwargs"] = dict[str, Any](stored["kwargs"]) | keys
    return stored, None


def _declared(undo: Undo) -> dict[str, Any]:
    """An inverse that needs the result, as a declaration that another process can derive from."""
    if undo.handler is not None and not undo.literals:
        return {"handler": undo.handler, "kwargs": {}, "paths": undo.stored_paths}
    return {**_both(undo.handler, undo.fn, undo.literals, ())[0], "paths": undo.stored_paths}


def from_result(
    run: Run,
    spec: StepSpec | None,
    step: Step,
    attempt: Attempt,
    args: Mapping[str, Any],
    result: object,
    secrets: Sequence[str] = (),
) -> tuple[dict[str, Any] | None, LocalUndo | None, str | None]:
    """Derive the inverse from a result: as DONE holds it, as this process would run it, or why it cannot be derived.

    Without a declaration in this process (`spec` is None) the one in INTENT is used. `secrets` are the texts that the
    arguments and the result hide: an inverse that shows one is run by this process alone.
    """
    if spec is not None and spec.undo is None and spec.factory is None:
        return None, None, None
    try:
        compensation = _derive(run, spec, step, attempt, args, result)
    except paths.PathMissing as error:
        return None, None, str(error)
    except Exception as error:  # a user's factory or property may raise anything; the step is reported, never skipped
        return None, None, f"deriving the undo raised {type(error).__name__}"
    if compensation is None:
        return None, None, None
    return *_both(compensation.handler, compensation.fn, compensation.kwargs, secrets), None


def _derive(
    run: Run, spec: StepSpec | None, step: Step, attempt: Attempt, args: Mapping[str, Any], result: object
) -> Compensation | None:
    root = _step_root(step.number, attempt.number, step.tool, attempt.forward_key, attempt.compensation_key)
    roots = _roots(run, args=args, result=result, step=root)
    if spec is not None and spec.factory is not None:
        factory: Callable[..., Any] = spec.factory
        made: Any = factory(result, dict(args)) if spec.factory_takes_args else factory(result)
        if not isinstance(made, Compensation):
            raise TypeError(type(made).__name__)
        return made
    if spec is not None and spec.undo is not None:
        if spec.undo.from_arguments:
            return None  # INTENT has it
        return Compensation(handler=spec.undo.handler, fn=spec.undo.fn, kwargs=spec.undo.kwargs(roots))
    declared = attempt.undo
    if declared is None or "paths" not in declared or "handler" not in declared:
        return None
    kwargs: dict[str, Any] = values.decode(declared.get("kwargs", {}))
    for name, text in declared["paths"].items():
        kwargs[name] = paths.parse(text).get(roots)
    return Compensation(handler=declared["handler"], kwargs=kwargs)


class Target:
    """What a compensation will call."""

    __slots__ = ("fn", "handler", "hints", "key_ttl", "kwargs", "probe", "secrets", "takes_key")

    def __init__(
        self,
        fn: Callable[..., Any],
        kwargs: dict[str, Any],
        *,
        handler: str | None = None,
        takes_key: bool = False,
        probe: Callable[[dict[str, Any], str], Any] | None = None,
        key_ttl: float | None = None,
        hints: Mapping[str, Any] | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        self.fn = fn
        self.kwargs = kwargs
        self.handler = handler
        self.takes_key = takes_key
        self.probe = probe
        self.key_ttl = key_ttl
        self.secrets = secrets
        self.hints: Mapping[str, Any] = hints if hints is not None else registry.annotations_of(fn)


def target(run: Run, step: Step, attempt: Attempt) -> Target | str:
    """What undoes an attempt here and now, or why nothing in this process can."""
    local = run.local.get((step.number, attempt.number))
    if local is not None and local.fn is not None:
        takes_key = registry.accepts_key(local.fn)
        return Target(local.fn, dict(local.kwargs), takes_key=takes_key, secrets=local.secrets)
    undo = attempt.undo
    handler = local.handler if local is not None else None
    if handler is None:
        if undo is None or "paths" in undo:
            return attempt.undo_error or "it has no undo"
        if undo.get("local") or "handler" not in undo:
            return "its undo lived in the process that made the call"
        handler = str(undo["handler"])
    entry = registry.compensator_named(handler)
    if entry is None:
        return f"no compensator {handler!r} is registered here"
    try:
        if local is not None:
            kwargs = dict(local.kwargs)
        else:
            assert undo is not None
            kwargs = values.decode_args(undo["kwargs"], entry.hints)
        entry.check(kwargs)
    except (values.Undecodable, TypeError, KeyError, ValueError) as error:
        return f"the stored arguments do not fit compensator {handler!r} ({type(error).__name__})"
    return Target(
        entry.fn,
        kwargs,
        handler=handler,
        takes_key=entry.takes_key,
        probe=entry.probe,
        key_ttl=entry.key_ttl,
        hints=entry.hints,
        secrets=local.secrets if local is not None else (),
    )
