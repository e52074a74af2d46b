"""What was found: entries, the manifest that they make, its JSON form and its verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from agent_saga_core.declare import ActionSemantics

__all__ = [
    "HEADINGS",
    "MANIFEST_VERSION",
    "CoverageEntry",
    "CoverageManifest",
    "Survives",
    "Visibility",
    "row_of",
    "summary_of",
]

MANIFEST_VERSION = 1
"""The version of the JSON form. It rises when a reader of the former one would misread the new one."""

Survives = Literal["named", "closure", "none"]
Visibility = Literal["declared", "inferred", "opaque"]


class CoverageEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tool that was found, or one place that cannot be seen into.

    Attributes:
        path: Where it was found, such as `"node:tools/charge"`; unique in its manifest.
        tool: The tool's name; of an opaque entry, that of the place.
        framework: The adapter that found it; `"python"` for plain functions.
        wrapped: Whether its calls are steps of a saga.
        semantics: What its effect is declared to mean; None if it is not wrapped.
        inverse: How its inverse survives a crash. `"named"`: a compensator that any process can run. `"closure"`: a
            callable of its process alone. `"none"`: it has none. None: there is nothing to undo, it is not wrapped, or
            a function of the result decides at each call; `detail` says which.
        covers_unknown: Whether an UNKNOWN outcome can be settled without a person: by an undo that is safe for an
            absent effect, or by a probe. Nothing is left to settle of a READ_ONLY tool.
        identity: What makes two of its calls the same call: `"key"`, `"call-id"`, `"occurrence"`, or a sentence. None
            if it is not wrapped.
        visibility: `"declared"`: the framework lists it. `"inferred"`: found by looking at code, see `reach`.
            `"opaque"`: tools may be in there that nothing lists.
        remote: Whether it runs in another process or at a provider.
        detail: More, for people; of an opaque entry why it is one.
    """

    path: str
    tool: str
    framework: str
    wrapped: bool = False
    semantics: ActionSemantics | None = None
    inverse: Survives | None = None
    covers_unknown: bool = False
    identity: str | None = None
    visibility: Visibility = "declared"
    remote: bool = False
    detail: str = ""

    @property
    def is_opaque(self) -> bool:
        """Whether it is a place that cannot be seen into, not a tool."""
        return self.visibility == "opaque"


class CoverageManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in one object, or in several.

    A manifest tells what an adapter could see. What it could not see into is in it as an opaque entry; tools that are
    made or looked up while an agent runs may still be missing. Entries that came with the same path are told apart: the
    second one's becomes `path#2`.

    Attributes:
        version: The version of the JSON form.
        framework: The adapter that looked, or several with commas between them.
        entries: What was found, in the order of the walk.
    """

    version: Literal[1] = 1
    framework: str
    entries: tuple[CoverageEntry, ...] = ()

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "entries", _told_apart(self.entries))

    @property
    def tools(self) -> tuple[CoverageEntry, ...]:
        """Every tool that was found, wrapped or not."""
        return tuple(entry for entry in self.entries if not entry.is_opaque)

    @property
    def covered(self) -> tuple[CoverageEntry, ...]:
        """The tools whose calls are steps; a wrapped READ_ONLY tool is one of them."""
        return tuple(entry for entry in self.tools if entry.wrapped)

    @property
    def uncovered(self) -> tuple[CoverageEntry, ...]:
        """The tools that nobody wrapped."""
        return tuple(entry for entry in self.tools if not entry.wrapped)

    @property
    def opaque(self) -> tuple[CoverageEntry, ...]:
        """The places that cannot be seen into."""
        return tuple(entry for entry in self.entries if entry.is_opaque)

    @property
    def percent(self) -> float:
        """Covered tools out of tools and opaque entries, from 0 to 100."""
        return self.percent_with(())

    def percent_with(self, acknowledge: Iterable[str]) -> float:
        """`percent`, not counting the opaque entries of these paths. Where nothing was found at all: 0."""
        known = _paths(acknowledge)
        counted = len(self.tools) + sum(entry.path not in known for entry in self.opaque)
        if not counted:
            return 100.0 if self.entries else 0.0
        return 100.0 * len(self.covered) / counted

    def stale(self, acknowledge: Iterable[str]) -> tuple[str, ...]:
        """Those of these paths that no opaque entry has."""
        known = {entry.path for entry in self.opaque}
        return tuple(path for path in dict.fromkeys(_paths(acknowledge)) if path not in known)

    def faults(self, acknowledge: Iterable[str] = ()) -> tuple[str, ...]:
        """What keeps it from being fully covered: a line for each, with the path and the way out."""
        paths = _paths(acknowledge)
        lines = [_of_unwrapped(entry) for entry in self.uncovered]
        lines += [_of_opaque(entry) for entry in self.opaque if entry.path not in paths]
        tools = {entry.path: entry for entry in self.tools}
        lines += [_of_stale(path, tools.get(path)) for path in self.stale(paths)]
        if not self.entries:
            lines.append("no tool was found. Look into the object that holds the tools.")
        return tuple(lines)

    def assert_fully_covered(self, acknowledge: Iterable[str] = ()) -> None:
        """Return if every tool is wrapped and every opaque entry is acknowledged.

        It does not prove that nothing else is called: see the class.

        Args:
            acknowledge: Paths of opaque entries that somebody has looked into.

        Raises:
            AssertionError: A tool is not wrapped, an opaque entry is not acknowledged, an acknowledged path belongs to
                no opaque entry, or nothing was found. Each is named, with the way out.
        """
        faults = self.faults(acknowledge)
        if faults:
            raise AssertionError("\n  ".join((f"not fully covered ({self.framework}):", *faults)))

    def under(self, prefix: str) -> CoverageManifest:
        """The same with `prefix/` before every path: for an object that is part of another one."""
        entries = [msgspec.structs.replace(entry, path=f"{prefix}/{entry.path}") for entry in self.entries]
        return CoverageManifest(framework=self.framework, entries=tuple(entries))

    @classmethod
    def merged(cls, manifests: Iterable[CoverageManifest]) -> CoverageManifest:
        """Several in one, in their order. Nothing is dropped: what was found twice is there twice."""
        given = tuple(manifests)
        names = dict.fromkeys(name for found in given for name in found.framework.split(", ") if name)
        return cls(framework=", ".join(names), entries=tuple(entry for found in given for entry in found.entries))

    def to_json(self) -> dict[str, Any]:
        """Plain data, for `json.dumps`."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CoverageManifest:
        """The manifest that `to_json` wrote, or `agent-saga coverage --json`; unknown members are left out.

        Raises:
            ValueError: It is no manifest, or one of another version.
        """
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"no coverage manifest of version {MANIFEST_VERSION}: {error}. Make it anew.") from None

    def __str__(self) -> str:
        rows = [HEADINGS, *(row_of(entry) for entry in self.tools)] if self.tools else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"{entry.path}: {entry.detail}" for entry in self.tools if entry.detail]
        lines += [f"{entry.path}: opaque, {entry.detail}" for entry in self.opaque]
        return "\n".join((*lines, summary_of(self)))


HEADINGS = ("path", "tool", "wrapped", "semantics", "inverse", "covers unknown", "identity")


def row_of(entry: CoverageEntry) -> tuple[str, ...]:
    """The cells of one tool, for a table with the columns of `str(manifest)`."""
    if not entry.wrapped:
        return (entry.path, entry.tool, "no", "-", "-", "-", "-")
    read_only = entry.semantics is ActionSemantics.READ_ONLY
    return (
        entry.path,
        entry.tool,
        "yes",
        entry.semantics or "-",
        entry.inverse or ("-" if read_only else "per call"),
        "-" if read_only else "yes" if entry.covers_unknown else "no",
        entry.identity or "-",
    )


def summary_of(manifest: CoverageManifest, acknowledge: Iterable[str] = ()) -> str:
    """`3 of 4 tools covered, 1 opaque: 60%`."""
    if not manifest.entries:
        return "no tool was found"
    paths = _paths(acknowledge)
    tools = len(manifest.tools)
    known = sum(entry.path in paths for entry in manifest.opaque)
    said = f"{len(manifest.covered)} of {tools} tool{'' if tools == 1 else 's'} covered"
    if manifest.opaque:
        said += f", {len(manifest.opaque)} opaque" + (f" ({known} acknowledged)" if known else "")
    # Rounded down: only what is complete reads as 100%.
    return f"{said}: {int(manifest.percent_with(paths))}%"


def _told_apart(entries: Iterable[CoverageEntry]) -> tuple[CoverageEntry, ...]:
    entries = tuple(entries)
    taken = {entry.path for entry in entries}
    seen: set[str] = set()
    apart: list[CoverageEntry] = []
    for entry in entries:
        path, n = entry.path, 1
        while path in seen or (n > 1 and path in taken):
            n += 1
            path = f"{entry.path}#{n}"
        seen.add(path)
        apart.append(entry if path == entry.path else msgspec.structs.replace(entry, path=path))
    return tuple(apart)


def _paths(acknowledge: Iterable[str]) -> tuple[str, ...]:
    # A str is an iterable of its letters, which would all be reported as stale.
    return (acknowledge,) if isinstance(acknowledge, str) else tuple(acknowledge)


def _of_unwrapped(entry: CoverageEntry) -> str:
    more = f" ({entry.detail})" if entry.detail else ""
    return (
        f"{entry.path}: {entry.tool!r} is not wrapped{more}. "
        "Wrap it; if it has no effect, with semantics=ActionSemantics.READ_ONLY."
    )


def _of_opaque(entry: CoverageEntry) -> str:
    return (
        f"{entry.path}: cannot be seen into ({entry.detail}). "
        f"Wrap what is called in there, then acknowledge it: acknowledge=[{entry.path!r}]."
    )


def _of_stale(path: str, tool: CoverageEntry | None) -> str:
    if tool is None:
        return f"acknowledge={[path]!r} matches nothing. Leave it out."
    if tool.wrapped:
        return f"acknowledge={[path]!r} is a wrapped tool. Leave it out."
    return f"acknowledge={[path]!r} is a tool, and only what cannot be seen into is acknowledged. Wrap the tool."
