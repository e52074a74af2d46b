"""`agent-saga log init` and `log migrate`: what they make, what they say, and how they fail."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_saga_core.cli.app import app
from agent_saga_core.log import FileLog, open_log
from agent_saga_core.log.sql import Version
from agent_saga_core.log.sqlite import schema
from agent_saga_core.records import Record


def saga(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


warnings_about = schema.warnings_about


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(schema, "warnings_about", lambda: ())
    return tmp_path


def test_init_makes_a_log_and_finds_it_made(here: Path) -> None:
    url = f"sqlite:///{here}/log.db"
    assert saga("log", "init", "sqlite:///log.db") == (0, f"made {url} (version 1.0)\n", "")
    assert saga("log", "init", url) == (0, f"{url} is a log already (version 1.0)\n", "")
    code, document, _ = saga("log", "init", url, "--json")
    assert code == 0
    assert json.loads(document) == {"url": url, "version": "1.0", "made": False, "applied": [], "warnings": []}
    assert saga("log", "migrate", url) == (0, f"{url} is at version 1.0: nothing to migrate\n", "")


def test_the_log_of_the_environment_is_the_default(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_SAGA_LOG", "sqlite:///shop.db")
    assert saga("log", "init")[0] == 0 and (here / "shop.db").exists()
    monkeypatch.delenv("AGENT_SAGA_LOG")
    assert saga("log", "init")[0] == 0 and (here / ".agent-saga" / "log.json").exists()


def test_a_file_log_is_made_and_has_nothing_to_migrate(here: Path) -> None:
    assert saga("log", "init", "file:./log") == (0, f"made file://{here}/log (version 1)\n", "")
    assert saga("log", "init", "file:./log")[1] == f"file://{here}/log is a log already (version 1)\n"
    assert saga("log", "migrate", "file:./log")[1] == f"file://{here}/log is at version 1: nothing to migrate\n"
    assert FileLog(here / "log", create=False).saga_ids() == ()


def test_an_affected_sqlite_is_warned_about_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "warnings_about", warnings_about)
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 51, 2))
    for verb in ("init", "init", "migrate"):
        code, out, warning = saga("log", verb, "sqlite:///log.db")
        assert code == 0 and "WAL" not in out
        assert warning.startswith("agent-saga: warning: this is SQLite 3.51.2, which has the WAL-reset bug")
        assert warning.count("\n") == 1
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 51, 3))
    assert saga("log", "init", "sqlite:///log.db")[2] == ""


def test_migrate_brings_an_old_log_to_this_version(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    assert saga("log", "init", "sqlite:///log.db")[0] == 0
    more = (Version(1, 1), ("CREATE TABLE shard(id TEXT)",))
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, more))
    monkeypatch.setattr(schema, "SCHEMA", Version(1, 1))
    monkeypatch.setattr(schema.check_version, "__kwdefaults__", {"known": Version(1, 1)})
    code, _, complaint = saga("list", "--log", "sqlite:///log.db")
    assert code == 2 and complaint.endswith(f"agent-saga log migrate sqlite:///{here}/log.db\n")
    assert saga("log", "migrate", "sqlite:///log.db")[1] == f"sqlite:///{here}/log.db is at version 1.1; applied 1.1\n"
    assert saga("list", "--log", "sqlite:///log.db")[0] == 0
    assert saga("log", "migrate", "sqlite:///log.db")[1].endswith("nothing to migrate\n")


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("sqlite:///none/../none.db", 2, "make one: agent-saga log init sqlite:////"),
        ("memory:", 2, "a memory log ends with its process"),
        ("log.db", 2, "is no address of a log"),
        ("oracle://scott:tiger@host/db", 2, "there are no oracle: logs"),
        ("sqlite://scott:tiger@host/db", 2, "a SQLite log is a file"),
        ("redis://scott:tiger@127.0.0.1:1/0", 2, "cannot be used"),
        ("sqlite:////proc/log.db", 2, "on a proc file system"),
        ("sqlite:///notes.txt", 3, "is damaged"),
        ("sqlite:///shop.db", 2, "a database of something else"),
    ],
)
def test_failures_are_one_line_without_a_credential(here: Path, url: str, code: int, says: str) -> None:
    (here / "notes.txt").write_text("no database " * 100, "utf-8")
    raw = sqlite3.connect(here / "shop.db")
    raw.execute("CREATE TABLE orders(id)")
    raw.close()
    found, out, complaint = saga("log", "migrate", url)
    assert (found, out) == (code, "")
    assert says in complaint and complaint.startswith("agent-saga: ") and complaint.count("\n") == 1
    assert "tiger" not in complaint
    if says.startswith("make one"):
        return
    found, out, complaint = saga("log", "init", url)
    assert (found, out) == (code, "") and says in complaint and complaint.count("\n") == 1


@pytest.mark.parametrize("arguments", [("log",), ("log", "make"), ("log", "init", "a", "b")])
def test_usage_errors_are_one_line(arguments: tuple[str, ...]) -> None:
    code, out, complaint = saga(*arguments)
    assert code == 2 and out == "" and complaint.count("\n") == 1 and "See agent-saga --help." in complaint


MISSING = """
import sys
sys.modules[{module!r}] = None
from agent_saga_core.log import open_log
try:
    open_log({url!r})
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "url", "says"),
    [
        ("psycopg", "postgresql://scott:tiger@host/db", "pip install 'agent-saga-core[postgres]'"),
        ("nats", "nats://scott:tiger@host/log", "pip install 'agent-saga-core[nats]'"),
        ("redis", "redis://scott:tiger@host/0", "pip install 'agent-saga-core[redis]'"),
        ("_sqlite3", "sqlite:///log.db", "which this Python was built without"),
    ],
)
def test_a_missing_extra_is_named_with_the_line_that_installs_it(module: str, url: str, says: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", MISSING.format(module=module, url=url)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert says in ran.stdout and ran.stdout.count("\n") == 1 and "tiger" not in ran.stdout


def test_the_verbs_that_read_and_recover_take_a_sqlite_log(here: Path) -> None:
    log = open_log("sqlite:///log.db")
    for name, last in (("old", "COMMITTED"), ("open", "INTENT")):
        log.claim(name)
        log.append(Record(saga=name, n=1, epoch=1, type="START", time=1000.0, data={}))
        log.append(Record(saga=name, n=2, epoch=1, type=last, time=1000.0, data={}))
        log.release(name)
    log.close()
    assert saga("verify", "--log", "sqlite:///log.db")[:2] == (0, "intact: 4 records\n")
    code, done, _ = saga("compact", "--log", "sqlite:///log.db", "--json")
    assert code == 0 and json.loads(done)["sagas"] == 1
    again = open_log("sqlite:///log.db", create=False)
    assert again.saga_ids() == ("open",)
    again.close()
    for verb in (("list",), ("show", "x"), ("verify",), ("compact",)):
        code, out, complaint = saga(*verb, "--log", "sqlite:///none.db")
        assert (code, out) == (2, "") and "there is no log" in complaint
    assert not (here / "none.db").exists()
