"""A shared log that cannot be had: waited for where that helps, refused in one line before any effect where not."""

from __future__ import annotations

import os
import signal
import sqlite3
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from crash_ledger import Ledger
from crash_log import Reader
from crash_processes import Start
from crash_stores import STORES, Opened, server_of

from agent_saga_core import ActionSemantics, Compensation, LogUnavailable, open_log, saga_scope
from agent_saga_core.demo.client import Client
from agent_saga_core.log.open import init_log

NOBODY = 65534
SECRET = "s3cr3t-of-Nell"


def refused(use: Callable[[], object]) -> str:
    """The one line that it is refused with; the secret is not in it, nor in anything that is printed with it."""
    with pytest.raises(LogUnavailable) as caught:
        use()
    said = str(caught.value)
    assert said and "\n" not in said and len(said) < 600
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return said


def without_an_effect(url: str) -> str:
    """Open a saga on that log, which must not come to its first effect; what it is refused with."""
    done: list[str] = []

    def run() -> None:
        with saga_scope("order-7", log=url) as saga:
            saga.execute(
                "act",
                lambda: done.append("act"),
                semantics=ActionSemantics.COMPENSABLE,
                compensate=lambda result: Compensation(fn=lambda: None),
            )

    said = refused(run)
    assert done == []
    return said


# --- SQLite


@pytest.mark.promise("intent-first", "recover-anywhere")
@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
@pytest.mark.parametrize("point", ["claimed", "append INTENT", "append DONE", "append COMMITTED"])
def test_a_sqlite_file_that_another_writer_keeps_busy_is_waited_for(
    start: Start, world: Client, who: str, log_url: str, in_log: Reader, point: str
) -> None:
    """As long as it takes, within the patience of the log: nothing happens meanwhile, and then everything."""
    open_log(log_url).close()
    owner = start("saga", body=["charge"], tell=[point], stop_at=point)
    assert owner.hear() == {"came_by": point}
    owner.wait_until_it_is("T")
    other = sqlite3.connect(log_url.removeprefix("sqlite:///"), isolation_level=None)  # it knows of no gate
    other.execute("BEGIN IMMEDIATE")
    before = len(Ledger(world).effects(who))
    owner.signal(signal.SIGCONT)
    owner.wait_until_it_is("S")
    assert len(Ledger(world).effects(who)) == before == ("DONE" in point or "COMMITTED" in point)
    assert not owner.has_spoken()
    other.execute("COMMIT")
    other.close()
    assert owner.hear()["status"] == "COMMITTED"
    assert len(Ledger(world).standing(who)) == 1 and in_log.intact()


@pytest.mark.promise("intent-first", "no-false-clean")
@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_a_sqlite_file_that_stays_busy_is_one_line_and_recovered_later(
    start: Start, world: Client, who: str, log_url: str, in_log: Reader, recovered: Callable[..., dict[str, Any]]
) -> None:
    open_log(log_url).close()
    owner = start(
        "saga", body=["charge"], log=f"{log_url}?busy_timeout=1", tell=["append INTENT"], stop_at="append INTENT"
    )
    assert owner.hear() == {"came_by": "append INTENT"}
    owner.wait_until_it_is("T")
    other = sqlite3.connect(log_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    owner.signal(signal.SIGCONT)
    said = owner.hear()
    assert said["raised"] == "LogUnavailable" and "another program holds the database" in said["message"]
    assert owner.ends() == 0 and Ledger(world).effects(who) == []
    other.close()
    assert not recovered()["attention"] and in_log.intact()
    assert Ledger(world).effects(who) == []


@pytest.fixture
def not_ours() -> Iterator[Callable[[str], tuple[str, dict[str, Any]]]]:
    """Make a log of a kind in a place of its own, and let nobody write there; with what a worker is started with."""
    with tempfile.TemporaryDirectory() as base:

        def made(kind: str) -> tuple[str, dict[str, Any]]:
            url = {"file": f"file:{base}/log", "sqlite": f"sqlite:///{base}/log.db"}[kind]
            open_log(url).close()
            for path in (Path(base), *Path(base).rglob("*")):
                path.chmod(0o555 if path.is_dir() else 0o444)
            return url, {"user": NOBODY} if os.geteuid() == 0 else {}

        yield made
        for path in (Path(base), *Path(base).rglob("*")):
            path.chmod(0o700)


@pytest.mark.promise("intent-first")
@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_a_file_that_may_only_be_read(
    start: Start, world: Client, who: str, not_ours: Callable[[str], tuple[str, dict[str, Any]]], kind: str
) -> None:
    url, options = not_ours(kind)
    said = start("until_broken", log=url, **options).hear()
    assert said["raised"] == "LogUnavailable" and said["done"] == 0 and "\n" not in said["message"], said
    assert "denied" in said["message"] or "readonly" in said["message"] or "read-only" in said["message"], said
    assert Ledger(world).effects(who) == []


# --- PostgreSQL


@pytest.fixture
def guarded(stores: Opened, tmp_path: Path) -> Iterator[tuple[str, Callable[[str], str]]]:
    """The address of a log whose server asks the user `nell` for a password, and that of hers."""
    server = server_of("postgres")
    with server.server_of_its_own() as own:
        uri = own.get_uri()
        url = server.fresh_schema(uri)
        init_log(url)
        server.sql(url, f"CREATE ROLE nell LOGIN PASSWORD '{SECRET}'")
        rules = own.pgdata / "pg_hba.conf"
        rules.write_text("local all nell scram-sha-256\n" + rules.read_text("utf-8"), "utf-8")
        server.sql(url, "SELECT pg_reload_conf()")
        place = uri.partition("host=")[2].partition("&")[0]

        def as_nell(password: str, schema: str = "") -> str:
            named = schema or url.partition("schema=")[2]
            return f"postgresql://nell:{quote(password)}@/postgres?host={place}&schema={named}"

        yield url, as_nell


@pytest.mark.promise("intent-first", "secrets-stay-out")
def test_a_postgresql_log_that_cannot_be_had(guarded: tuple[str, Callable[..., str]]) -> None:
    url, as_nell = guarded
    assert "password authentication failed" in without_an_effect(as_nell(f"{SECRET}?"))
    assert "USAGE" in without_an_effect(as_nell(SECRET))
    assert "permission denied" in refused(lambda: init_log(as_nell(SECRET, "of_her_own")))
    fresh = url.partition("&schema=")[0] + "&schema=nobody_made_it"
    said = without_an_effect(fresh)
    assert "was not initialised" in said and "agent-saga log init" in said
    away = f"postgresql://nell:{SECRET}@127.0.0.1:9/postgres?connect_timeout=2"  # discard: nobody listens there
    assert "cannot be used" in without_an_effect(away)
    nowhere = f"postgresql://nell:{SECRET}@/postgres?host=/nowhere/at/all"
    assert "cannot be used" in without_an_effect(nowhere)


@pytest.mark.promise("intent-first")
@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.parametrize("saga_id", ["", "x" * 513, "ü" * 257, "a\nb", "a\0b", "\x7f", "\x85", "\ud800"], ids=range(8))
def test_an_id_against_the_rule_is_refused_before_any_effect(log_url: str, in_log: Reader, saga_id: str) -> None:
    log = open_log(log_url)
    done: list[str] = []
    with (
        pytest.raises(ValueError, match="1 to 512 bytes of UTF-8 without control characters"),
        saga_scope(saga_id, log=log),
    ):
        done.append("opened")
    longest = "ü" * 256
    with saga_scope(longest, log=log):
        done.append("longest")
    assert done == ["longest"] and log.saga_ids() in ((), (longest,))
    log.close()
