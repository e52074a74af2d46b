"""The generated parts of the pages are what would be generated now."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WINDOWS = ROOT / "docs" / "crash-windows.md"
FRAMEWORKS = ROOT / "docs" / "frameworks" / "README.md"

_spec = importlib.util.spec_from_file_location("tables", HERE / "tables.py")
assert _spec and _spec.loader
tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tables)


def compared(page: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it forks, and imports every framework."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "tables.py"), str(page)],
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=200,
        check=False,
    )


@pytest.mark.timeout(240)  # it imports all seven frameworks
@pytest.mark.parametrize("page", [WINDOWS, FRAMEWORKS], ids=["crash-windows", "frameworks"])
def test_a_generated_part_is_up_to_date(page: Path, tmp_path: Path) -> None:
    done = compared(page, tmp_path)
    assert done.returncode == 0, (
        f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}\npython integration-tests/docs/tables.py --write"
    )


def test_every_page_with_a_generated_part_is_compared() -> None:
    assert tables.pages() == [WINDOWS, FRAMEWORKS]


def test_a_part_that_differs_is_seen_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated: of_a_test -->\nold\n<!-- end -->\nafter\n", "utf-8")
    (tmp_path / "table_of_a_test.py").write_text("def table():\n    return 'new'\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert tables.main([str(page)]) == 1 and "+new" in capsys.readouterr().out
    assert tables.main([str(page), "--write"]) == 0 and tables.main([str(page)]) == 0
    assert page.read_text("utf-8") == "before\n<!-- generated: of_a_test -->\n\nnew\n\n<!-- end -->\nafter\n"


def test_every_framework_with_a_package_is_in_the_table() -> None:
    packages = {found.name for found in ROOT.glob("packages/agent-saga-*")} - {"agent-saga-core"}
    text = FRAMEWORKS.read_text("utf-8")
    assert packages == set(re.findall(r"^\| \[[^|]+\| \[(agent-saga-[\w-]+)\]", text, re.MULTILINE))


def test_the_promises_of_the_windows_are_promises() -> None:
    promises = tomllib.loads((HERE.parent / "promises.toml").read_text("utf-8"))
    held = re.findall(r"^Held by: (.+)\.$", WINDOWS.read_text("utf-8"), re.MULTILINE)
    named = {promise for line in held for promise in re.findall(r"`([\w-]+)`", line)}
    assert len(held) >= 18 and named and named <= set(promises)


def test_one_window_alone_leaves_something_without_a_word() -> None:
    windows = re.split(r"^### ", WINDOWS.read_text("utf-8"), flags=re.MULTILINE)[1:]
    assert [window.partition("\n")[0] for window in windows if "**unreported**" in window] == [
        "4. Sent, and lands after recovery's verdict"
    ]
    (late,) = [window for window in windows if window.startswith("4.")]
    (forbids,) = [line for line in late.splitlines() if line.startswith("| forbids |")]
    assert forbids.endswith("| nothing |")
