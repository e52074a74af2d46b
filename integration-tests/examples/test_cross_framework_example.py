"""`examples/cross_framework.py` against a service of this test's, and the README's words about it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_saga_core.demo.client import Service

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "cross_framework.py"
HEADING = "## Several frameworks, one saga"
PROCESS = re.compile(r"process \d+")

_spec = importlib.util.spec_from_file_location("examples_page", ROOT / "integration-tests" / "docs" / "page.py")
assert _spec and _spec.loader
page_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(page_module)


class Ran(NamedTuple):
    code: int
    out: str
    err: str
    ledger: dict[str, Any]
    left: list[str]
    service: int


def run(home: Path, *, reserved: bool = False) -> Ran:
    with Service.start() as service:
        client = service.client()
        if reserved:
            client.book("hotel", title="somebody else's")
        done = subprocess.run(
            [sys.executable, str(EXAMPLE)],
            env={**os.environ, "AGENT_SAGA_DEMO_URL": service.url, "HOME": str(home)},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=110,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr, client.ledger(), client.summary()["left"], service.pid)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    yield run(tmp_path_factory.mktemp("home"))


def test_what_two_frameworks_did_is_undone_when_the_third_fails(ran: Ran) -> None:
    assert ran.code == 0, ran.out + ran.err
    assert ran.left == []
    effects = [(entry["kind"], entry["id"]) for entry in ran.ledger["journal"] if entry["entry"] == "effect"]
    assert effects == [
        ("transfer", "tr_1"),
        ("booking", "bk_1"),
        ("cancellation", "cn_1"),
        ("transfer", "tr_2"),
    ], "undone last first"
    assert ran.ledger["transfers"][1]["reverses"] == "tr_1" and ran.ledger["cancellations"][0]["booking_id"] == "bk_1"
    (refused,) = [entry for entry in ran.ledger["journal"] if entry["entry"] == "request" and entry["status"] == 422]
    assert refused["path"] == "/mails", "the guests were written to once, in vain"
    assert f"process {ran.service}" in ran.out, "what it prints is read from this service"


def test_it_says_that_there_was_one_saga(ran: Ran) -> None:
    assert "sagas in the log: launch-porto\n" in ran.out
    assert re.findall(r"^  \d (\w+) +\w+ +(\w+)$", ran.out, re.MULTILINE) == [
        ("reserve_budget", "COMPENSATED"),
        ("publish", "COMPENSATED"),
        ("notify", "NOT_APPLIED"),
    ]


def test_the_readme_shows_what_it_prints(ran: Ran) -> None:
    section = (ROOT / "README.md").read_text("utf-8").partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    (shown,) = [block.text for block in page_module.blocks(section) if block.info == "text"]
    assert PROCESS.sub("process N", shown).strip() == PROCESS.sub("process N", ran.out).strip()


def test_what_is_left_shows_in_the_exit_code(tmp_path: Path) -> None:
    left = run(tmp_path, reserved=True)
    assert left.code == 1 and "left of it: bk_1" in left.out, left.out + left.err
