"""Every page of documentation does what it shows, and its links lead somewhere."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("packages/*/*.md"), *ROOT.glob("docs/**/*.md")],
    key=lambda page: page.relative_to(ROOT),
)
NOT_RUN = {"", "bash", "json", "jsonl", "mermaid", "sql", "text", "toml", "yaml"}

# page.py is a script with no package around it.
_spec = importlib.util.spec_from_file_location("page", HERE / "page.py")
assert _spec and _spec.loader
page_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(page_module)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def run_page(page: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AGENT_SAGA_", "PYTEST_"))}
    # `agent-saga` is the one of this environment.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    return subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "page.py"), str(page)],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
        check=False,
    )


@each_page
def test_what_a_page_shows_works(page: Path, tmp_path: Path) -> None:
    done = run_page(page, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@each_page
def test_every_block_is_run_or_is_no_code(page: Path) -> None:
    # A shell recipe is run by the test that its page's comment speaks of.
    text = page.read_text("utf-8").replace("<!-- recipe: tests run this -->\n\n```sh", "```text")
    infos = {block.info for block in page_module.blocks(text)}
    assert infos - NOT_RUN <= {"python", "console"}, "write ```python or ```console, nothing behind it"


def headings(text: str) -> set[str]:
    """The anchors that a page's headings get, as GitHub makes them."""
    found = re.findall(r"^#+ +(.+)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def without_blocks(text: str) -> str:
    return re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)


def broken_links(page: Path) -> list[str]:
    broken: list[str] = []
    for link in re.findall(r"\]\(([^()\s]+)\)", without_blocks(page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target.read_text("utf-8"))):
            broken.append(link)
    return broken


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_wrong_page_is_seen(tmp_path: Path) -> None:
    def outcome(text: str) -> tuple[int, str]:
        page = tmp_path / "page.md"
        page.write_text(text, "utf-8")
        done = run_page(page, tmp_path)
        return done.returncode, done.stderr

    assert outcome("```python\nx = 1\n```\n\n  ```python\n  assert x == 1\n  ```\n") == (0, "")
    code, stderr = outcome("# A\n\n```python\nx = 1\nassert x == 2\n```\n")
    assert code and 'page.md", line 5' in stderr
    code, stderr = outcome("```console\n$ agent-saga no-such-verb  # exit 7\n```\n")
    assert code and "not 7" in stderr
    code, stderr = outcome("```python\n")
    assert code and "not closed" in stderr


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The `one` page\n[a](#the-one-page) [b](#two) [c](gone.md) [d](https://x.org/y)\n", "utf-8")
    assert broken_links(page) == ["#two", "gone.md"]
