"""Making entries: what is read from a wrapped tool's declaration."""

from __future__ import annotations

from agent_saga_core import registry
from agent_saga_core.coverage.manifest import CoverageEntry, Survives, Visibility
from agent_saga_core.declare import ActionSemantics, StepSpec
from agent_saga_core.wrapping import runner_of

__all__ = ["entry_for", "opaque"]


def entry_for(
    tool: object,
    *,
    path: str,
    framework: str,
    identity: str = "occurrence",
    visibility: Visibility = "declared",
    remote: bool = False,
    name: str | None = None,
    detail: str = "",
) -> CoverageEntry:
    """The entry of one tool, wrapped or not, read from its declaration.

    Args:
        tool: The tool object, or the function in it if that is what was wrapped.
        path: Where it was found.
        framework: The adapter that found it.
        identity: What makes two calls the same where the declaration has no `key`, which comes first.
        visibility: `"inferred"` if it was found by `reach`.
        remote: Whether it runs elsewhere.
        name: The tool's name in its framework. Default: the declared one, else the object's `name` or `__name__`.
        detail: What else is to be said of it.
    """
    runner = runner_of(tool)
    if runner is None:
        return CoverageEntry(
            path=path,
            tool=name if name is not None else _name_of(tool),
            framework=framework,
            visibility=visibility,
            remote=remote,
            detail=detail,
        )
    spec = runner.spec
    inverse, said = _inverse_of(spec)
    return CoverageEntry(
        path=path,
        tool=name if name is not None else spec.tool,
        framework=framework,
        wrapped=True,
        semantics=spec.semantics,
        inverse=inverse,
        covers_unknown=_covers_unknown(spec),
        identity="key" if spec.key is not None else identity,
        visibility=visibility,
        remote=remote,
        detail="; ".join(word for word in (detail, *said) if word),
    )


def opaque(path: str, why: str, *, framework: str, remote: bool = False, name: str | None = None) -> CoverageEntry:
    """The entry of a place where tools may be called that nothing lists.

    Args:
        path: The place, such as `"node:plan"`; what a person acknowledges.
        why: Why it cannot be seen into, as half a sentence.
        framework: The adapter that found it.
        remote: Whether it runs elsewhere.
        name: What to call it. Default: the path.
    """
    return CoverageEntry(
        path=path,
        tool=name if name is not None else path,
        framework=framework,
        visibility="opaque",
        remote=remote,
        detail=why,
    )


def _name_of(tool: object) -> str:
    for attribute in ("name", "__name__"):
        found = getattr(tool, attribute, None)
        if isinstance(found, str) and found:
            return found
    return type(tool).__name__


def _covers_unknown(spec: StepSpec) -> bool:
    if spec.semantics is ActionSemantics.READ_ONLY:
        return True
    if spec.probe is not None or spec.probe_name is not None:
        return True
    return spec.undo is not None and spec.undo.covers_unknown


def _inverse_of(spec: StepSpec) -> tuple[Survives | None, list[str]]:
    """How the inverse survives a crash, and what is to be said about that."""
    said: list[str] = []
    if spec.probe is not None and spec.probe_name is None:
        said.append("its probe has no name: only this process can ask it")
    if spec.probe is None and spec.probe_name is not None:
        said.append(f"its probe {spec.probe_name!r} is not registered here")
    if spec.semantics is ActionSemantics.READ_ONLY:
        return None, said
    if spec.semantics is ActionSemantics.REVERSIBLE:
        said.append("gone with its process, and nothing to undo then")
    if spec.factory is not None:
        said.append("its inverse is made at each call, which decides whether another process can run it")
        return None, said
    if spec.undo is None:
        return "none", said
    if spec.undo.handler is None:
        return "closure", said
    said += _missing(spec.undo.handler)
    return "named", said


def _missing(handler: str) -> list[str]:
    try:
        known = registry.compensator_named(handler) is not None
    except Exception as error:  # an announced module that does not load is its own matter, and no end of the report
        return [f"its compensator {handler!r} could not be looked up ({type(error).__name__})"]
    return [] if known else [f"its compensator {handler!r} is not registered here"]
