"""What is said of an address that is none: which option nobody knows, which logs there are, and never a credential."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from psycopg import OperationalError
from typer.testing import CliRunner

from agent_saga_core.cli.app import app
from agent_saga_core.errors import LogUnavailable
from agent_saga_core.log import FileLog, open_log
from agent_saga_core.log.nats.address import address_of as nats_address
from agent_saga_core.log.nats.connection import Server as nats_server
from agent_saga_core.log.open import init_log
from agent_saga_core.log.options import flag
from agent_saga_core.log.postgres.address import address_of as postgres_address
from agent_saga_core.log.postgres.connection import Server as postgres_server
from agent_saga_core.log.redis.address import address_of as redis_address
from agent_saga_core.log.redis.connection import Server as redis_server

PLACES = [
    "file:./log",
    "sqlite:///log.db",
    "memory:",
    "postgresql://shop@127.0.0.1:1/db",
    "nats://127.0.0.1:1/log",
    "redis://127.0.0.1:1/0",
]
SCHEMES = ("file:./", "sqlite:///", "postgresql://", "nats://", "redis://")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(url: str) -> str:
    with pytest.raises(ValueError) as caught:
        open_log(url)
    said = str(caught.value)
    assert "\n" not in said and caught.value.__cause__ is None
    return said


@pytest.mark.parametrize("place", PLACES)
def test_an_option_that_nobody_knows_is_named_with_those_that_exist(place: str) -> None:
    for query in ("leese=3", "max_result_bytes=9&leese=3"):
        said = refused(f"{place}?{query}")
        assert "there is no option 'leese'" in said and "max_result_bytes=N" in said and "3" not in said.split(";")[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "query",
    [
        "pasword=hunter2",
        "hunter2passwd=1",
        "token_hunter2=1",
        "hunter2hunter2hunter2hunter2hunter2=1",
        "hunter2@host=1",
        "hunter2=a@host/db",  # the rest of a password with a question mark
        "lease=9&hunter2=1@host/db",
        "password=a&hunter2=1",  # the rest of one with an ampersand
        "hunter2%3D=1",
        "hun-ter2hunter2=1",
        "hunter2",
    ],
)
def test_what_may_be_a_credential_is_not_named(place: str, query: str) -> None:
    said = refused(f"{place}?{query}&leese=hunter2")
    assert "hunter2" not in said and "pasword" not in said and "there is no option" not in said


@pytest.mark.parametrize("place", PLACES[3:])
def test_an_option_is_named_beside_a_password_that_is_not(place: str) -> None:
    host = place.partition("://")[2].rpartition("@")[2]
    said = refused(f"{place.partition('://')[0]}://shop:hunter2@{host}?lease=5&leese=hunter2")
    assert "there is no option 'leese'" in said and "hunter2" not in said


@pytest.mark.parametrize("url", ["mysql://x/y", "shop@host/db", "mysql://shop:hunter2@x/y", "hunter2@x://y"])
def test_an_address_of_no_kind_names_every_kind(url: str) -> None:
    said = refused(url)
    assert all(scheme in said for scheme in SCHEMES) and "hunter2" not in said
    result = CliRunner().invoke(app, ["list", "--log", url])
    assert result.exit_code == 2 and all(scheme in result.stderr for scheme in SCHEMES)


def test_help_names_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["list", "--help"], ["log", "init", "--help"]):
        said = " ".join(CliRunner().invoke(app, words).stdout.split())
        assert all(scheme in said for scheme in SCHEMES), said


def test_the_page_names_every_kind() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
    section = page.partition("\n## log\n")[2].partition("\n## ")[0]
    assert all(scheme in section for scheme in SCHEMES)


def test_a_file_log_that_is_not_there_is_said_with_the_command_that_makes_it(here: Path) -> None:
    with pytest.raises(LogUnavailable) as caught:
        open_log("file:./a log", create=False)
    said, _, url = str(caught.value).rpartition(" ")
    assert said == f"there is no log at {here}/a log; check the path, or make one: agent-saga log init"
    assert init_log(url).made
    FileLog(here / "a log", create=False).close()


@pytest.mark.parametrize(
    ("value", "means"), [("1", True), ("True", True), ("true", True), ("0", False), ("False", False)]
)
def test_a_yes_or_no_is_1_or_0_or_true_or_false(value: str, means: bool) -> None:
    assert flag({"require_sync": value}, "require_sync") is means
    with pytest.raises(ValueError, match="is 0 or 1"):
        flag({"require_sync": f"{value}x"}, "require_sync")


@pytest.mark.parametrize(
    "made",
    [
        lambda: redis_server(redis_address("redis://scott:tiger-and-lion@h")),
        lambda: nats_server(nats_address("nats://scott:tiger-and-lion@h/log")),
        lambda: postgres_server(postgres_address("postgresql://scott:tiger-and-lion@h/d")),
    ],
)
def test_no_line_shows_a_part_of_a_password_wherever_it_is_cut(made: Callable[[], Any]) -> None:
    server = made()
    for before in range(280, 302):
        line = server.line_of(OperationalError(f"{'x' * before}tiger-and-lion\nmore"))
        assert "\n" not in line and "tig" not in line
    server.close()
