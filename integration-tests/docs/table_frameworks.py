"""The table of docs/frameworks/README.md: what each adapter package is, read from the package, its harness and a run.

Imports every framework; the ids are those of a real run of one call through each adapter's own harness.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Frameworks report to their makers, and ask questions, unless they are told not to, before they are imported.
os.environ.update(
    CREWAI_DISABLE_TELEMETRY="true",
    CREWAI_DISABLE_TRACKING="true",
    CREWAI_DISABLE_VERSION_CHECK="true",
    CREWAI_TESTING="true",
    CREWAI_TRACING_ENABLED="false",
    LANGSMITH_TRACING="false",
    OPENAI_AGENTS_DISABLE_TRACING="1",
    OPENAI_API_KEY="none",
    OTEL_SDK_DISABLED="true",
)
sys.path.insert(0, str(ROOT / "integration-tests" / "cross_framework"))

from cross_teams import FRAMEWORKS, harness_of  # noqa: E402

from agent_saga_core import MemoryLog, compensator, undo  # noqa: E402
from agent_saga_core.engine.calls import site_in  # noqa: E402
from agent_saga_core.registry import isolated_registry  # noqa: E402
from agent_saga_core.testing import AdapterHarness, Call, Script  # noqa: E402

PAUSES = "test_a_paused_run_is_suspended_and_goes_on_where_it_was"
EDITS = "test_a_person_may_change_the_arguments_of_a_paused_call"
NO_REASONS = frozenset({
    "wrapped by SagaMiddleware",
    "call-id in a graph, else occurrence",
    "the step and its work item",
})  # fmt: skip
"""Words of the walkers that are about tools, and about no opaque place; those given as `detail=` need no mention."""


def table() -> str:
    """The whole table, a row for each framework."""
    columns = (
        "framework", "package", "needs", "names", "streams", "a call is known by", "a person in the loop",
        "deferred", "cannot be seen into",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["CREWAI_STORAGE_DIR"] = directory
        lines += [f"| {' | '.join(_row(name))} |" for name in FRAMEWORKS]
    return "\n".join(lines)


def _row(name: str) -> Iterator[str]:
    dashed = name.replace("_", "-")
    package = ROOT / "packages" / f"agent-saga-{dashed}"
    page = ROOT / "docs" / "frameworks" / f"{dashed}.md"
    harness = harness_of(name)
    yield f"[{page.read_text('utf-8').partition('# ')[2].partition(chr(10))[0]}]({page.name})"
    yield f"[agent-saga-{dashed}](../../packages/agent-saga-{dashed}/README.md)"
    yield "<br>".join(_floors(package))
    yield " ".join(f"`{public}`" for public in _public(package))
    yield ", ".join(f"`{public}`" for public in _public(package) if public.endswith("_stream")) or "no"
    yield _identity(harness)
    yield _person(harness)
    yield "<br>".join(_deferred(harness)) or "-"
    yield "<br>".join(_reasons(package))


def _floors(package: Path) -> Iterator[str]:
    project = tomllib.loads((package / "pyproject.toml").read_text("utf-8"))["project"]
    yield from (f"`{needed}`" for needed in project["dependencies"] if not needed.startswith("agent-saga-"))
    for extra, needs in project.get("optional-dependencies", {}).items():
        yield f"[{extra}]: " + ", ".join(f"`{needed}`" for needed in needs)


def _source_of(package: Path) -> Path:
    (source,) = (package / "src").iterdir()
    return source


def _public(package: Path) -> list[str]:
    for line in ast.parse((_source_of(package) / "__init__.py").read_text("utf-8")).body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(line.value)
            return names
    raise AssertionError(f"{package} has no __all__")


def _identity(harness: AdapterHarness) -> str:
    """What coverage says that a call is known by, and the identity of a call that was made."""

    def book(item: str) -> str:
        """Book something."""
        return item

    with isolated_registry():

        @compensator("page.cancel")
        def cancel(item: str) -> None: ...

        tool = harness.wrap(
            harness.tool(book), semantics="COMPENSABLE", compensate=undo("page.cancel", item="args.item")
        )
        entry = next(entry for entry in harness.entries if not entry.streams)
        log, script = MemoryLog(), Script([Call("book", {"item": "room"}, id="call_0")])
        if entry.is_async:
            asyncio.run(harness.arun(entry, [tool], script, log=log, saga_id="s"))
        else:
            harness.run(entry, [tool], script, log=log, saga_id="s")
        (intent,) = [record for record in log.read("s") if record.type == "INTENT"]
        known = {found.identity for found in harness.coverage(harness.agent([tool], Script([]))).entries}
    identity = intent.data["identity"]
    placed = site_in(identity)
    assert placed is not None, identity
    site = placed[1]
    call = f"`{site.call_id}`" if site.call_id is not None else f"number {identity.rpartition('#')[2]}"
    scope = re.sub(r"[0-9a-f]{12,}", "...", site.scope)
    word = next(iter(known - {None, ""}))
    return f"{word}:<br>{call} within `{scope}`"


def _person(harness: AdapterHarness) -> str:
    """What the harness can do of pausing and resuming, beside `approve=`, which every adapter has."""
    if PAUSES in harness.deferred:
        return "no call can be paused"
    return "a call can be paused" + (", not changed" if EDITS in harness.deferred else ", and changed")


def _deferred(harness: AdapterHarness) -> Iterator[str]:
    for test, reason in sorted(harness.deferred.items()):
        yield f"*{test.removeprefix('test_').replace('_', ' ')}*: {reason.rstrip('.')}."


def _reasons(package: Path) -> list[str]:
    """The reasons that the package's walkers give for a place that they cannot see into."""
    source = _source_of(package)
    found: set[str] = set()
    for file in (source / "walk.py", source / "manifest.py"):
        if file.is_file():
            found |= set(_texts(ast.parse(file.read_text("utf-8"))))
    return sorted(found - NO_REASONS)


def _texts(tree: ast.AST) -> Iterator[str]:
    """Half sentences in code: no docstrings, messages of exceptions, annotations, details of tools, or identities."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node, ast.keyword) and node.arg in ("detail", "identity"):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign) and "IDENTITY" in ast.unparse(node).partition("=")[0].upper():
            continue
        text = _text(node)
        if text is None:
            yield from _texts(node)
        elif " " in text and "[" not in text:
            yield text.replace("|", "\\|")


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [str(it.value) if isinstance(it, ast.Constant) else "..." for it in node.values]
        spaced = any(isinstance(it, ast.Constant) and " " in str(it.value) for it in node.values)
        return "".join(parts) if spaced else ""
    return None
