"""What `log copy` says of sagas that a process owns, and how many it names; and that no verb's line of help is cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agent_saga_core.cli.app import app
from agent_saga_core.errors import SagaBusy
from agent_saga_core.log import FileLog, MemoryLog
from agent_saga_core.log.moving import copy_log
from agent_saga_core.records import Record


def agent_saga(*words: str, **env: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, words, env=env)
    return result.exit_code, result.stdout, result.stderr


def own(log: Any, number: int) -> None:
    ticket = 0
    for at in range(number):
        log.claim(f"live-{at:02}")
        ticket = log.append(Record(saga=f"live-{at:02}", n=1, epoch=1, type="START", time=1.0, data={}))
    log.flush(ticket)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileLog]:
    """A file log of this process; `./there` is another one."""
    monkeypatch.chdir(tmp_path)
    FileLog(tmp_path / "there").close()
    log = FileLog(tmp_path / "here")
    yield log
    log.close()


@pytest.mark.parametrize(
    ("number", "what"),
    [(1, "saga 'live-00' of {url} is owned by a running process; "),
     (2, "2 sagas of {url}, such as 'live-00', are owned by running processes; ")],
)  # fmt: skip
def test_who_owns_sagas_of_a_file_has_no_lease(source: FileLog, number: int, what: str) -> None:
    own(source, number)
    code, out, err = agent_saga("log", "copy", "file:./here", "file:./there")
    assert (code, out) == (4, "") and err.count("\n") == 1
    assert err.startswith(f"agent-saga: {what.format(url=source.url)}stop the agents") and "--wait" in err
    assert "lease" not in err and "1 sagas" not in err
    code, out, err = agent_saga("log", "copy", "file:./here", "file:./there", "--live")
    assert code == 1 and "left, live: a running process owns it; copy again when it is done" in err


def test_who_owns_sagas_under_a_lease_may_be_dead(tmp_path: Path) -> None:
    class UnderLeases(FileLog):
        lease = 12.0

    log = UnderLeases(tmp_path / "log")
    own(log, 1)
    with pytest.raises(SagaBusy, match=r"died less than its lease \(12 s\) ago; .*until their leases have run out"):
        copy_log(log, MemoryLog())
    log.close()


def test_twenty_of_many_live_sagas_are_named_and_all_in_the_document(source: FileLog) -> None:
    own(source, 23)
    code, out, err = agent_saga("log", "copy", "file:./here", "file:./there", "--live")
    named = [line for line in out.splitlines() if "live-" in line]
    assert code == 1 and len(named) == 20 and "and 3 more; --json names all" in out
    assert err == "agent-saga: 23 sagas left, live: a running process owns it; copy again when it is done\n"
    code, out, err = agent_saga("log", "copy", "file:./here", "file:./there", "--live", "--json")
    assert len(json.loads(out)["live"]) == 23 and err == ""


@pytest.mark.parametrize("columns", ["80", "110"])
@pytest.mark.parametrize(("group", "verbs"), [((), 10), (("log",), 3)])
def test_no_line_of_the_list_of_verbs_is_cut(group: tuple[str, ...], verbs: int, columns: str) -> None:
    code, out, _ = agent_saga(*group, "--help", COLUMNS=columns)
    listed = out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert code == 0 and len(listed) == verbs
    assert all(len(line) <= 80 and line.endswith(".") and not line.endswith("..") for line in listed), listed
