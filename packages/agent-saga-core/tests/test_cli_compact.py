"""`agent-saga compact`: what it says, what it leaves, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_saga_core.cli.app import app
from agent_saga_core.log import FileLog
from agent_saga_core.log.locks import best_scheme, lock_whole
from agent_saga_core.records import Record


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    log = FileLog(tmp_path / "log")
    for saga, last in (("old-1", "COMMITTED"), ("old-2", "ROLLED_BACK"), ("open", "INTENT")):
        log.claim(saga)
        log.append(Record(saga=saga, n=1, epoch=1, type="START", time=1000.0, data={}))
        log.append(Record(saga=saga, n=2, epoch=1, type=last, time=1000.0, data={"x": "x" * 900}))
        log.release(saga)
    log.close()
    monkeypatch.setenv("AGENT_SAGA_LOG", f"file:{tmp_path}/log")
    return f"file:{tmp_path}/log"


def saga(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def ids(url: str) -> tuple[str, ...]:
    return FileLog(url.removeprefix("file:"), create=False).saga_ids()


def test_it_forgets_what_is_old_and_says_so(url: str) -> None:
    assert saga("compact", "--keep-days", "99999") == (0, "nothing to compact in 1 segment\n", "")
    code, planned, _ = saga("compact", "--dry-run")
    assert code == 0 and planned.startswith("nothing to compact")  # one small segment, half of which must stay
    log = FileLog(url.removeprefix("file:"))
    log.claim("open")
    log.append(Record(saga="open", n=4, epoch=3, type="COMMITTED", time=1000.0, data={}))
    log.close()
    code, planned, _ = saga("compact", "--dry-run")
    assert code == 0 and planned.startswith("would forget 2 finished sagas: ") and "about" in planned
    assert set(ids(url)) == {"old-1", "old-2", "open"}
    code, done, _ = saga("compact", "--json")
    assert code == 0
    assert json.loads(done).keys() == {"retired", "sagas", "carried", "freed", "kept", "unit"}
    assert json.loads(done)["sagas"] == 2
    assert ids(url) == ("open",)
    assert saga("verify")[:2] == (0, "intact: 4 records\n")


def test_its_failures_are_one_line(url: str, tmp_path: Path) -> None:
    assert saga("compact", "--keep-days", "-1")[0] == 2
    assert saga("compact", "--log", f"file:{tmp_path}/none")[0] == 2
    with open(tmp_path / "log" / "compact", "w+b") as file:
        assert lock_whole(file.fileno(), best_scheme())
        code, _, complaint = saga("compact")
        assert code == 4 and "another compaction" in complaint and complaint.count("\n") == 1
    assert saga("compact")[0] == 0
