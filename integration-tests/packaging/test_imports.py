"""Imports of the core go one way (docs/design.md), and bring nothing that the process did not ask for."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "packages/agent-saga-core/src"

# A module imports from its own row and the rows above it. Whoever adds a module gives it a place here.
ROWS: tuple[set[str], ...] = (
    {"errors", "clock", "lazy", "paths", "values"},
    {"declare", "records", "registry"},
    {"state"},
    {"engine"},
    {"drive", "log", "logs", "signals"},
    {"saga", "recovery"},
    {"wrapping", "coverage", "fleet"},
    {"policy", "audit", "views"},
    {"agent_saga_core"},  # the public names: __init__.py
    {"cli", "demo", "testing", "__main__", "agent_saga_core_pytest"},
)
# Narrower than the row: a store, and whatever only reads.
ONLY: dict[str, set[str]] = {
    "log": {"errors", "clock", "lazy", "records"},
    "audit": {"errors", "records", "state"},
    "views": {"errors", "records", "state"},
}
THIRD_PARTY: dict[str, set[str]] = {
    "cli": {"typer", "rich", "prometheus_client"},
    "log": {"nats", "psycopg", "psycopg_pool", "redis"},
    "testing": {"pytest", "hypothesis"},
    "agent_saga_core_pytest": {"pytest"},
}
EVERYWHERE = {"msgspec"}
NEVER = {"pickle", "marshal", "shelve"}  # reading a log must not be able to run anything

RANK = {module: rank for rank, row in enumerate(ROWS) for module in row}


def part_of(module: str) -> str:
    """`agent_saga_core.log.file` -> `log`: what stands in the rows."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


class Imports(ast.NodeVisitor):
    """Every module that a file may import, inside functions too; not what only a type checker reads."""

    def __init__(self, package: str, tree: ast.Module) -> None:
        self.package = package.split(".")
        self.found: list[str] = []
        self.visit(tree)

    def visit_If(self, node: ast.If) -> None:
        checked_only = ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.orelse if checked_only else node.body + node.orelse:
            self.visit(statement)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [alias.name for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else []
        module = ".".join(base + ([node.module] if node.module else []))
        self.found += [f"{module}.{alias.name}" for alias in node.names]


def modules() -> Iterator[tuple[str, str, ast.Module]]:
    """(dotted name, package it is in, tree) of every module of the core."""
    for file in sorted(SRC.rglob("*.py")):
        parts = file.relative_to(SRC).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        package = name if is_package else ".".join(parts[:-1])
        yield name, package, ast.parse(file.read_text("utf-8"))


def faults(name: str, package: str, tree: ast.Module) -> Iterator[str]:
    part = part_of(name)
    if part not in RANK:
        yield f"{name} has no place in ROWS"
        return
    for target in Imports(package, tree).found:
        root = target.partition(".")[0]
        if root in sys.stdlib_module_names:
            if root in NEVER and part != "testing":  # the test kit tries whether copies of a tool stay wrapped
                yield f"{name} imports {root}"
        elif root != "agent_saga_core":
            if root not in EVERYWHERE | THIRD_PARTY.get(part, set()):
                yield f"{name} imports {root}"
        else:
            other = target_part(target)
            allowed = ONLY.get(part, {row for row, rank in RANK.items() if rank <= RANK[part]}) | {part}
            if other not in allowed or (other == "testing" and part not in {"testing", "agent_saga_core_pytest"}):
                yield f"{name} imports {target}"


def target_part(target: str) -> str:
    """Where an import leads: `from agent_saga_core import saga` is the module, `import Saga` is the face."""
    part = part_of(target)
    return part if part in RANK or is_module(part) else "agent_saga_core"


def is_module(part: str) -> bool:
    return (SRC / "agent_saga_core" / part).is_dir() or (SRC / "agent_saga_core" / f"{part}.py").is_file()


def test_imports_go_left_to_right() -> None:
    found = [fault for module in modules() for fault in faults(*module)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("state", "from agent_saga_core.engine import x", ["agent_saga_core.engine.x"]),
        ("state", "def f():\n    import agent_saga_core.saga", ["agent_saga_core.saga"]),
        ("log.file", "from ..state import fold\nfrom . import base", ["agent_saga_core.state.fold"]),
        ("log.file", "from agent_saga_core import SagaError", ["agent_saga_core.SagaError"]),
        ("cli.app", "from agent_saga_core.testing import x", ["agent_saga_core.testing.x"]),
        ("values", "import pydantic", ["pydantic"]),
        ("values", "import pickle", ["pickle"]),
        ("errors", "if TYPE_CHECKING:\n    from agent_saga_core.state import Report", []),
        ("engine.step", "from agent_saga_core.engine import unwind\nfrom agent_saga_core import state", []),
        ("cli.app", "import typer\nfrom agent_saga_core import recover", []),
    ],
)
def test_a_wrong_import_is_seen(name: str, source: str, expected: list[str]) -> None:
    dotted = f"agent_saga_core.{name}"
    found = faults(dotted, dotted.rpartition(".")[0], ast.parse(source))
    assert [fault.rpartition(" ")[2] for fault in found] == expected


def test_importing_the_core_brings_msgspec_and_the_standard_library_only() -> None:
    code = (
        "import sys, json; before = set(sys.modules); import agent_saga_core; "
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    brought = set(json.loads(run.stdout)) - sys.stdlib_module_names
    # msgspec itself imports typing_extensions where that is installed.
    assert brought - {"agent_saga_core", "typing_extensions"} == EVERYWHERE
