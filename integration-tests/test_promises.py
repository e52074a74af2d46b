"""The list of promises and the suite agree: none without a test, no integration test without any."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
PROMISES: dict[str, dict[str, Any]] = tomllib.loads((HERE / "promises.toml").read_text("utf-8"))
MARKED_FOLDERS = ("crash", "cross_framework", "simulation", "stores")

Collected = tuple[str, list[ast.expr]]
"""The name of a test as pytest writes it behind the file, and the decorators and `pytestmark`s that apply."""


def collected(source: str) -> Iterator[Collected]:
    tree = ast.parse(source)
    yield from _collected_in(tree.body, "", [])


def _collected_in(body: list[ast.stmt], prefix: str, marks: list[ast.expr]) -> Iterator[Collected]:
    marks = marks + [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and any(ast.unparse(t) == "pytestmark" for t in node.targets)
    ]
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield prefix + node.name, marks + node.decorator_list
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _collected_in(node.body, f"{prefix}{node.name}::", marks + node.decorator_list)


def promises_marked(marks: list[ast.expr]) -> set[str]:
    return {
        ast.literal_eval(argument)
        for mark in marks
        for call in ast.walk(mark)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.promise"
        for argument in call.args
    }


def inherited(file: Path, name: str) -> set[str]:
    """The names of the tests that a class of that file has of its bases, as far as these stand in other test files."""
    tree = ast.parse(file.read_text("utf-8"))
    # Test files name each other relatively: `from ..servers.faults import Faults`.
    places = {
        alias.asname or alias.name: (file.parents[node.level - 1] / f"{node.module.replace('.', '/')}.py", alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level and node.module
        for alias in node.names
    }
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found |= {test for test, _ in _collected_in(node.body, "", [])}
            for base in map(ast.unparse, node.bases):
                found |= inherited(*places.get(base, (file, base)))
    return found


def exists(test: str) -> bool:
    """Whether `path/from/the/root.py::test_name` is a test; in a class it may be that of a base."""
    path, _, name = test.partition("::")
    file = ROOT / path
    if not file.is_file():
        return False
    owner, _, method = name.rpartition("::")
    return name in {found for found, _ in collected(file.read_text("utf-8"))} or method in inherited(file, owner)


def marked_files() -> list[Path]:
    return sorted(file for folder in MARKED_FOLDERS for file in (HERE / folder).rglob("test_*.py"))


@pytest.mark.parametrize("promise", PROMISES)
def test_every_promise_is_proved_or_says_why_not(promise: str) -> None:
    entry = PROMISES[promise]
    assert set(entry) <= {"text", "tests", "pending"}
    assert entry["text"].endswith(".")
    assert entry.get("tests") or entry.get("pending"), "names no test, and gives no reason in `pending`"
    missing = [test for test in entry.get("tests", []) if not exists(test)]
    assert not missing, "promises.toml names tests that do not exist"


def test_every_integration_test_holds_a_promise() -> None:
    wrong: list[str] = []
    for file in marked_files():
        for name, marks in collected(file.read_text("utf-8")):
            held = promises_marked(marks)
            if not held or not held <= set(PROMISES):
                wrong.append(f"{file.relative_to(ROOT)}::{name} has {sorted(held)}")
    assert not wrong, 'each needs @pytest.mark.promise("...") with ids that promises.toml lists'


def test_a_test_may_be_inherited_from_another_test_file(tmp_path: Path) -> None:
    suite = tmp_path / "servers" / "suite.py"
    suite.parent.mkdir()
    suite.write_text("class Oldest:\n def test_a(self): ...\nclass Suite(Oldest):\n def test_b(self): ...\n", "utf-8")
    file = tmp_path / "store" / "test_store.py"
    file.parent.mkdir()
    file.write_text(
        "from ..servers.suite import Suite\nclass TestStore(Suite):\n def test_c(self): ...\nclass TestOther: ...\n",
        "utf-8",
    )
    assert inherited(file, "TestStore") == {"test_a", "test_b", "test_c"}
    assert inherited(file, "TestOther") == inherited(file, "") == set()


def test_marks_are_read_from_function_class_and_module() -> None:
    source = """
pytestmark = [pytest.mark.promise("a"), pytest.mark.slow]

@pytest.mark.promise("b")
class TestIt:
    @pytest.mark.promise("c", "d")
    async def test_x(self): ...

def test_y(): ...
def helper(): ...
"""
    held = {name: promises_marked(marks) for name, marks in collected(source)}
    assert held == {"TestIt::test_x": {"a", "b", "c", "d"}, "test_y": {"a"}}
