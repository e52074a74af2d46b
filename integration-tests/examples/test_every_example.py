"""No example is left to rot: each is run by the tests of exactly one place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))


def named(source: str) -> set[str]:
    """The examples that a test file builds the path of: `... / "examples" / "trip.py"`, in code and not in prose."""
    code = ast.unparse(_without_docstrings(ast.parse(source)))
    return set(re.findall(r"""['"]examples['"] / ['"](\w+\.py)['"]""", code))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [line for line in node.body if not _is_text(line)] or [ast.Pass()]
    return tree


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def test_each_example_is_run_by_exactly_one_test_file() -> None:
    files = [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("integration-tests/**/test_*.py")]
    sources = {file: file.read_text("utf-8") for file in files}
    runs = {
        example.name: [str(file.relative_to(ROOT)) for file, text in sources.items() if example.name in named(text)]
        for example in EXAMPLES
    }
    assert len(runs) >= 8
    assert {name: places for name, places in runs.items() if len(places) != 1} == {}


def test_one_that_is_only_talked_about_is_not_run() -> None:
    assert named('EXAMPLE = ROOT / "examples" / "trip.py"') == {"trip.py"}
    assert named('"""ROOT / "examples" / "trip.py" is run elsewhere."""\nx = 1  # "examples" / "trip.py"') == set()
