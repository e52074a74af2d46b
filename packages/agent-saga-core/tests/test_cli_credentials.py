"""The commands that are suggested: no credential is in them, and what supplies it is said beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agent_saga_core import saga_scope
from agent_saga_core.cli import options
from agent_saga_core.cli.advice import next_steps
from agent_saga_core.cli.app import app
from agent_saga_core.cli.credentials import forget, note, with_credentials
from agent_saga_core.errors import LogUnavailable
from agent_saga_core.log import FileLog, MemoryLog
from agent_saga_core.log.open import shown_address
from agent_saga_core.records import Record
from agent_saga_core.recovery import read_saga

VARIABLES = ("PGPASSWORD", "NATS_USER", "NATS_PASSWORD", "NATS_TOKEN", "REDISCLI_AUTH", "VALKEYCLI_AUTH")
GIVEN = [
    ("postgresql://shop:hunter2@h/db", "PGPASSWORD supplies the password"),
    ("postgresql://shop@h/db?password=hunter2&sslpassword=hunter2",
     "PGPASSWORD supplies the password; sslpassword is left out"),
    ("postgresql://shop@h/db", ""),
    ("nats://shop:hunter2@h/log", "NATS_PASSWORD supplies the password"),
    ("nats://hunter2@h/log", "NATS_TOKEN supplies the token"),
    ("nats://h/log?token=hunter2", "NATS_TOKEN supplies the token"),
    ("nats://h/log", ""),
    ("nats://shop:@h/log", ""),
    ("redis://shop:hunter2@h/0", "REDISCLI_AUTH supplies the password"),
    ("rediss://:hunter2@h/1?lease=5", "REDISCLI_AUTH supplies the password"),
    ("redis://shop@h/0", ""),
    ("file:./log", ""),
    ("sqlite:///log.db", ""),
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    forget()
    return tmp_path


@pytest.mark.parametrize(("url", "words"), GIVEN)
def test_what_an_address_is_shown_without_and_what_supplies_it(url: str, words: str) -> None:
    address, said = shown_address(url)
    assert said == words and "hunter2" not in address
    note(url)
    command = f"agent-saga show s --log {address}"
    assert with_credentials(command) == (f"{command}  # {words}" if words else command)
    assert with_credentials("agent-saga show s") == "agent-saga show s"
    assert with_credentials(f"no sagas in {address}") == f"no sagas in {address}"


def test_a_name_is_a_user_where_the_environment_has_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_PASSWORD", "hunter2")
    assert shown_address("nats://shop@h/log") == ("nats://h/log", "NATS_USER supplies the user")


def test_what_the_environment_supplies_was_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGPASSWORD", "REDISCLI_AUTH", "NATS_TOKEN"):
        monkeypatch.setenv(name, "hunter2")
    for url in ("postgresql://shop@h/db", "redis://shop@h/0", "nats://h/log"):
        assert shown_address(url)[1] == ""


def stored(log: FileLog, saga: str, *records: tuple[str, dict[str, Any]]) -> None:
    """A saga that began, and those records behind its first."""
    written = MemoryLog()
    with saga_scope(saga, name="order", log=written):
        pass
    started = written.read(saga)[0].data
    log.claim(saga)
    for n, (kind, data) in enumerate([("START", started), *records], 1):
        log.flush(log.append(Record(saga=saga, n=n, epoch=1, type=kind, time=float(n), data=data)))
    log.release(saga)


class OnAServer(FileLog):
    """A log with the address of a server."""

    @property
    def url(self) -> str:
        return "postgresql://shop@h/db"


def test_the_commands_of_show_say_which_variable_supplies_the_password(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = OnAServer(here / "log")
    stored(log, "s")

    def opening(url: str, **more: object) -> FileLog:
        return log

    monkeypatch.setattr(options, "open_log", opening)
    result = CliRunner().invoke(app, ["show", "s", "--log", "postgresql://shop:hunter2@h/db"])
    command = "agent-saga recover --saga s --log postgresql://shop@h/db"
    assert f"    {command}  # PGPASSWORD supplies the password\n" in result.stdout and "hunter2" not in result.output


def test_a_log_that_nobody_made_is_said_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, **more: object) -> None:
        raise LogUnavailable(f"there is no log; make it: agent-saga log init {shown_address(url)[0]}")

    monkeypatch.setattr(options, "open_log", refuse)
    result = CliRunner().invoke(app, ["list", "--log", "redis://shop:hunter2@h/0"])
    assert result.stderr.endswith("log init redis://shop@h/0  # REDISCLI_AUTH supplies the password\n")
    again = CliRunner().invoke(app, ["list", "--log", "redis://shop@h/0"])
    assert again.stderr.endswith("log init redis://shop@h/0\n")


def test_the_move_that_is_to_be_finished_is_named_without_the_password_of_the_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FileLog(here / "log")
    stored(log, "s", ("MOVING", {"to": "file:///there", "last": 1}))
    monkeypatch.setenv("AGENT_SAGA_LOG", "postgresql://shop:hunter2@h/db")
    ((_, (command,)),) = next_steps(read_saga(log, "s"), owner=None)
    assert command == (
        "agent-saga log copy postgresql://shop@h/db file:///there --unfinished  # PGPASSWORD supplies the password"
    )
    log.close()
