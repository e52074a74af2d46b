"""What no file of the repository may contain."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Written in halves, so that this file does not contain what it looks for.
HOSTS = [
    "pypi" + ".org",
    "pythonhosted" + ".org",
    "registry.npm" + "js.org",
    "crates" + ".io",
    "proxy.go" + "lang.org",
]
PATHS = ["/" + "work/", "/" + "root/"]
FORBIDDEN = re.compile("|".join(re.escape(text) for text in HOSTS + PATHS))
SLEEPS = {"time." + "sleep"}
# Proving a user's scenario waits a moment for its other tasks, which nobody can ask whether they have got there.
MAY_SLEEP = {"inject.py"}


def tracked(*patterns: str) -> list[Path]:
    run = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    # uv.lock names where every archive lies: that is what a lock is for.
    return [ROOT / name for name in run.stdout.split("\0") if name and name != "uv.lock" and (ROOT / name).is_file()]


def test_no_file_names_a_machine_or_a_registry() -> None:
    found: list[str] = []
    for file in tracked():
        for number, line in enumerate(file.read_bytes().decode("utf-8", "replace").splitlines(), start=1):
            if FORBIDDEN.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


def sleeps(source: str) -> Iterator[int]:
    """Lines that sleep by the wall clock, in scripts inside strings too. `asyncio.sleep(0)` only yields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in {"time", "asyncio"}:
            if any(alias.name == "sleep" for alias in node.names):
                yield node.lineno
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in SLEEPS:
            yield node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.sleep":
            if [ast.unparse(argument) for argument in node.args] != ["0"]:
                yield node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if any(f"{sleep}(" in node.value for sleep in SLEEPS):
                yield node.lineno


def test_nothing_sleeps_by_the_wall_clock() -> None:
    files = [f for f in tracked("packages/*.py", "integration-tests/*.py") if f.name not in MAY_SLEEP]
    assert files
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in sleeps(file.read_text("utf-8"))]
    assert found == [], "take the log's clock, or wait for an event"


def test_a_sleep_is_seen() -> None:
    call = "time." + "sleep"
    lines = [
        f"{call}(1)",
        "from time import sleep",
        "asyncio.sleep(0.1)",
        "asyncio.sleep(0)",
        f"x = 'a; {call}(9)'",
    ]
    assert sorted(sleeps("\n".join(lines))) == [1, 2, 3, 5]
