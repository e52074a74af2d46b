"""What was written once is read and recovered for ever, and can be checked with a shell."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from agent_saga_core.log import FileLog, locks

GOLDEN = Path(__file__).parent / "golden" / "log-v1"
DOCS = Path(__file__).parents[3] / "docs" / "log-format.md"
ODD = 'naïve "id"\t€'

pytestmark = pytest.mark.skipif(locks.best_scheme() != "ofd", reason="the golden log was made with ofd locks")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    # A copy: recovery writes. Empty files and directories do not survive every checkout, so the locks are made here.
    shutil.copytree(GOLDEN, tmp_path / "log")
    (tmp_path / "log" / "locks").mkdir(exist_ok=True)
    for number in range(64):
        (tmp_path / "log" / "locks" / f"{number:02d}").touch()
    return tmp_path / "log"


def test_the_golden_log_of_version_1_is_read(directory: Path) -> None:
    log = FileLog(directory, create=False)
    assert log.saga_ids() == ("order-1", "order-2", ODD, "order-3")
    assert [record.type for record in log.read("order-1")] == ["START", "INTENT", "DONE", "COMMITTED"]
    assert log.read("order-1")[2].data == {"result": {"id": "ch_1", "exact": 0.1, "big": 2**70}}
    assert [(record.n, record.epoch, record.type) for record in log.read("order-2")] == [
        (1, 1, "START"),
        (2, 1, "INTENT"),
        (3, 1, "DONE"),
        (4, 4, "CLAIM"),
        (5, 4, "ROLLING_BACK"),
        (6, 4, "COMPENSATING"),
    ]
    assert [record.n for record in log.read(ODD)] == [1, 2]  # the second is of a type that nobody knows yet
    assert [record.type for record in log.read("order-3")] == ["START"]
    unfinished = log.unfinished()
    assert unfinished.saga_ids == ("order-2", ODD, "order-3")
    assert unfinished.damage == ()
    verification = log.verify()
    assert (verification.intact, verification.records) == (True, 13)
    log.close()


def test_the_golden_log_of_version_1_is_recovered(directory: Path) -> None:
    log = FileLog(directory, create=False)
    for saga, claim in (("order-2", 7), (ODD, 3), ("order-3", 2)):
        assert log.claim(saga)[-1].n == claim
        log.release(saga)
    log.close()
    assert FileLog(directory, create=False).verify().intact


def lines_with_their_predecessors() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for writer in sorted(GOLDEN.glob("w-*")):
        chain = writer.name
        for segment in sorted(writer.glob("*.jsonl")):
            for line in segment.read_text(encoding="utf-8").split("\n")[:-1]:
                found.append((chain, line))
                chain = json.loads(line)["hash"]
    return found


def test_the_golden_log_can_be_checked_without_our_code() -> None:
    checked = 0
    for chain, line in lines_with_their_predecessors():
        entry = json.loads(line)
        header = line[75:].partition(',"salt":"')[0]
        if "salt" in entry:
            data = line.partition('","data":')[2][:-1]
            assert sha256((entry["salt"] + data).encode()).hexdigest() == entry["digest"]
        else:
            header = header.removesuffix("}")
        assert sha256((chain + header).encode()).hexdigest() == entry["hash"]
        checked += 1
    assert checked > 15


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("sha256sum")), reason="needs jq and sha256sum")
def test_the_documented_recipe_works() -> None:
    match = re.search(r"<!-- recipe: tests run this -->\s*```sh\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    for chain, line in lines_with_their_predecessors()[:8] + lines_with_their_predecessors()[-2:]:
        run = subprocess.run(
            ["sh", "-c", match[1]],
            env={"prev": chain, "line": line, "PATH": "/usr/bin:/bin:/usr/local/bin"},
            capture_output=True,
            check=True,
            timeout=20,
        )
        said = run.stdout.decode().split()
        entry = json.loads(line)
        assert said[0] == entry["hash"]
        if "salt" in entry:
            assert said[1] == said[2] == entry["digest"]
