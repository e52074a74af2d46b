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


SAYS = "```python\nimport os\nprint('one', os.getpid(), 'two')\nos.system('echo three')\n```\n"


@pytest.mark.parametrize(
    "shown",
    [
        "\n```text\none … two\nthree\n```\n",
        "```text\n\none … two  \nthree\n```\n",
        "\nThat prints, of which\nthis is all:\n\n```text\n…\nthree\n…\n```\n",
        "\nIt prints. Here is a tree.\n\n```text\nsrc/\n```\n",
        "\nIt prints.\n\nHere is a tree:\n\n```text\nsrc/\n```\n",
        "\n## A tree:\n\n```text\nsrc/\n```\n",
        "\n```json\n{}\n```\n\n```text\nsrc/\n```\n",
        "\n<!-- not compared: it is\nfrom another machine -->\n```text\nfour\n```\n",
        "\nIt prints:\n\n<!-- not compared: another machine -->\n\n```text\nfour\n```\n",
    ],
)
def test_a_right_output_and_what_is_no_output_pass(shown: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(SAYS + shown, "utf-8")
    done = run_page(page, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(" two\nthree\n"), "what is printed is still to be seen"


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        ("\n```text\none … two\n```\n", "(?s)page.md:8: .*\n\\+three"),
        ("\n```text\none … two\nthree\nfour\n```\n", "\n-four"),
        ("\n```text\none … three\n```\n", "\n-one … three\n"),
        ("\n```text\n```\n", "\n\\+three"),
        ("\nThis prints:\n\n```text\nfour\n```\n", "\n-four"),
        ("\n- as follows:\n\n  ```text\n  four\n  ```\n", "\n-four"),
        ("\n<!-- not compared -->\n```text\none … two\nthree\n```\n", "without a reason"),
        ("\n<!-- not compared: x -->\nAnd so on.\n\n```text\nsrc/\n```\n", "not just before an output"),
        ("\n<!-- not compared: x -->\n```python\nx = 1\n```\n", "not just before an output"),
        ("\n<!-- not compared: x -->\n", "not just before an output"),
        (
            "\n```text\nfive\n```\n\n```python\nprint('six')\n```\n\n```text\nseven\n```\n",
            "(?s)-five.*page.md:16:.*-seven",
        ),
    ],
)
def test_a_wrong_output_is_seen(shown: str, why: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(SAYS + shown, "utf-8")
    done = run_page(page, tmp_path)
    assert done.returncode and re.search(why, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_output_of_a_command_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "shop.py").write_text("tools = []\n", "utf-8")

    def outcome(first: str, rest: str) -> tuple[int, str]:
        page.write_text(f"{first}```console\n$ agent-saga coverage shop:tools  # exit 1\n{rest}```\n", "utf-8")
        done = run_page(page, tmp_path)
        return done.returncode, done.stderr

    assert outcome("", "") == (0, "")
    assert outcome("", "$ ls\nshop.py\n") == (0, ""), "what is not run is not compared"
    assert outcome("<!-- not compared: why -->\n", "2 of 3 tools covered: 66%\n") == (0, "")
    code, stderr = outcome("", "2 of 3 tools covered: 66%\n$ ls\nshop.py\n")
    assert code and "\n-2 of 3 tools covered: 66%\n" in stderr and "shop.py" not in stderr


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("it took 1.6 s and 30ms", "it took 12 s and 7ms"),
        ("saga 4f0c2a91d3b84e6f", "saga 0123456789abcdef01234567"),
        ("'3f2b8c1d-0000-4000-8000-000000000001'", "'00000000-1111-4111-8111-ffffffffffff'"),
        ("Process 7470: processes 12 and 13, pid=4", "Process 1: processes 8000 and 9, pid=55555"),
        ("2026-03-02T09:20:00.105Z at 09:14:08.877", "1999-12-31T23:59:59Z at 00:00:00"),
        ("2026-03-02 09:14:07 UTC, 2026-03-02", "1999-12-31 23:59:59 UTC, 2000-01-01"),
        ("http://127.0.0.1:4711/x localhost:1", "http://127.0.0.1:80/x localhost:65535"),
        ("--log file:/tmp/…/log --import", "--log file:/tmp/agent-saga-demo-wg1uel7s/log --import"),
        ("at /tmp/a", "at /private/var/folders/zz/T/b"),
        ("… of …", "3 of 4"),
        ("a (b) [c] *d*", "a (b) [c] *d*"),
        ("1\n…\n4", "1\n2\n3\n4"),
        ("1\n…\n4", "1\n4"),
    ],
)
def test_what_differs_from_run_to_run_is_not_compared(shown: str, printed: str) -> None:
    assert page_module.difference(shown, printed) == ""


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("22 records", "20 records"),
        ("2 steps", "3 steps"),
        ("epoch 6", "epoch 7"),
        ("paid 420.00 EUR", "paid 42.00 EUR"),
        ("saga 4f0c2a91d3b84e6f", "saga order-402"),
        ("process 1", "process dead"),
        ("refused (422)", "refused (410)"),
        ("file:/tmp/x --import a", "file:/tmp/y --import b"),
        ("… of 4", "3\nof 4"),
        ("1\n…\n4", "1\n2\n3"),
        ("a.c", "abc"),
        ("a  b", "a b"),
        ("a\n\nb", "a\nb"),
        (" a", "a"),
    ],
)
def test_everything_else_is_compared(shown: str, printed: str) -> None:
    assert page_module.difference(shown, printed)


def test_the_readme_shows_the_demo_shortened(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    (shown,) = [block.text for block in page_module.blocks(page) if block.lead.rstrip().endswith("Shortened:")]
    demo = subprocess.run(
        [sys.executable, "-m", "agent_saga_core.demo.acts"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        timeout=100,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    printed = iter(page_module.steady(demo.stdout))
    for line in page_module.steady(shown):  # lines are left out, and ends of lines
        assert any(one.startswith(line) for one in printed), f"the demo does not print, or not there: {line}"


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The `one` page\n[a](#the-one-page) [b](#two) [c](gone.md) [d](https://x.org/y)\n", "utf-8")
    assert broken_links(page) == ["#two", "gone.md"]
