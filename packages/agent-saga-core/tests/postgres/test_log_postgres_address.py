"""What a PostgreSQL log is opened by, what it says when it cannot be, its schema, its damage, and its upkeep."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from agent_saga_core.errors import LogCorrupted, SagaBusy
from agent_saga_core.log.postgres import PostgresLog, init, migrate, reading, schema
from agent_saga_core.log.postgres.address import address_of
from agent_saga_core.log.sql import Version

from ..servers.addresses import SECRET, Addresses, begin, refused
from ..servers.store import record
from .proxy import Proxy
from .server import fresh_schema, sql


def as_user(url: str, user: str, password: str = "") -> str:
    parts = conninfo_to_dict(url.partition("?")[0] + "?host=" + str(address_of(url).parameters["host"]))
    login = f"{user}:{quote(password)}@" if password else f"{user}@"
    return f"postgresql://{login}/{parts['dbname']}?{url.partition('?')[2]}"


# --- addresses


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"postgresql://scott:{SECRET}@db.example:5433/app", "postgresql://scott@db.example:5433/app"),
        (f"postgres://scott:{SECRET}@db.example/app?sslmode=verify-full", None),
        (f"postgresql://scott@/app?host=/run/pg&password={SECRET}", "postgresql://scott@/app?host=/run/pg"),
        (f"postgresql://scott@a,b/app?sslpassword={SECRET}&lease=5", "postgresql://scott@/app?host=a,b&lease=5"),
        ("postgresql://", "postgresql:///"),
        (f"postgresql://sc%40tt:{SECRET}%40@h/d%2Fb", "postgresql://sc%40tt@h/d%2Fb"),
    ],
)
def test_an_address_is_shown_without_its_credentials_and_means_the_same(url: str, shown: str | None) -> None:
    address = address_of(url)
    assert SECRET not in address.url and (shown is None or address.url == shown)
    again = address_of(address.url)
    secrets = {"password", "sslpassword"}
    assert again.parameters == {name: value for name, value in address.parameters.items() if name not in secrets}
    assert (again.url, again.lease, again.schema) == (address.url, address.lease, address.schema)


def test_the_environment_supplies_what_the_address_leaves_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = address_of(url)
    monkeypatch.setenv("PGHOST", address.parameters["host"])
    monkeypatch.setenv("PGUSER", address.parameters["user"])
    monkeypatch.setenv("PGDATABASE", address.parameters["dbname"])
    if "port" in address.parameters:
        monkeypatch.setenv("PGPORT", address.parameters["port"])
    log = PostgresLog(f"postgresql:///?schema={address.schema}")
    begin(log, "s")
    assert log.url == f"postgresql:///?schema={address.schema}"
    other = PostgresLog(url)
    assert other.is_live("s")
    other.close()
    log.close()


# --- what cannot be opened


@pytest.fixture
def guarded(mortal: Any, mortal_url: str) -> str:
    """A log whose server wants a password of everybody but its superuser."""
    sql(mortal_url, "DROP OWNED BY scott") if sql(
        mortal_url, "SELECT 1 FROM pg_roles WHERE rolname = 'scott'"
    ) else None
    sql(mortal_url, "DROP ROLE IF EXISTS scott")
    sql(mortal_url, f"CREATE ROLE scott LOGIN PASSWORD '{SECRET}'")
    rules = mortal.pgdata / "pg_hba.conf"
    if "scott" not in rules.read_text("utf-8"):
        rules.write_text("local all scott scram-sha-256\n" + rules.read_text("utf-8"), "utf-8")
        sql(mortal_url, "SELECT pg_reload_conf()")
    return mortal_url


def test_a_wrong_password_and_none_are_one_line(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sql(guarded, "GRANT USAGE ON SCHEMA {s} TO scott")
    sql(guarded, "GRANT ALL ON ALL TABLES IN SCHEMA {s} TO scott")
    assert "password authentication failed" in refused(lambda: PostgresLog(as_user(guarded, "scott", SECRET + "x")))
    assert "password" in refused(lambda: PostgresLog(as_user(guarded, "scott")))
    log = PostgresLog(as_user(guarded, "scott", SECRET))
    begin(log, "s")
    assert SECRET not in log.url
    monkeypatch.setenv("PGPASSWORD", SECRET)
    again = PostgresLog(log.url)
    assert again.is_live("s")
    again.close()
    log.close()


def test_a_role_that_may_not_create_is_one_line(guarded: str) -> None:
    fresh = fresh_schema(guarded.partition("&schema=")[0])
    said = refused(lambda: init(as_user(fresh, "scott", SECRET)))
    assert "permission denied" in said and "grant" in said
    assert sql(fresh, "SELECT to_regnamespace('{s}')") == [(None,)]


def test_a_role_that_may_not_look_or_may_not_write_is_told_so_before_any_effect(guarded: str) -> None:
    address = as_user(guarded, "scott", SECRET)
    assert "USAGE" in refused(lambda: PostgresLog(address))
    sql(guarded, "GRANT USAGE ON SCHEMA {s} TO scott")
    assert "may not be used by this role" in refused(lambda: PostgresLog(address))
    sql(guarded, "GRANT SELECT ON ALL TABLES IN SCHEMA {s} TO scott")
    log = PostgresLog(address)  # enough to look
    assert log.saga_ids() == () and log.verify().intact
    for grant in ("INSERT, UPDATE ON {s}.saga", "INSERT, UPDATE, DELETE ON {s}.writer", "DELETE ON {s}.saga"):
        said = refused(lambda: log.claim("s", fresh=True))
        assert "record (INSERT)" in said and "may not be written" in said
        sql(guarded, f"GRANT {grant} TO scott")
    assert not log.owned("s")
    sql(guarded, "GRANT INSERT ON {s}.record TO scott")
    begin(log, "s")
    log.close()


def test_a_server_that_does_not_keep_what_it_acknowledges_is_refused_unless_forced(guarded: str) -> None:
    sql(guarded, "GRANT USAGE ON SCHEMA {s} TO scott")
    sql(guarded, "GRANT ALL ON ALL TABLES IN SCHEMA {s} TO scott")
    sql(guarded, "ALTER ROLE scott SET synchronous_commit = off")
    address = as_user(guarded, "scott", SECRET)
    for use in (PostgresLog, init):
        assert "synchronous_commit = off" in refused(lambda use=use: use(address))
    PostgresLog(f"{address}&force=1").close()
    (warning,) = init(f"{address}&force=1").warnings
    assert "synchronous_commit" in warning


def test_a_database_that_cannot_hold_every_id_is_refused(mortal: Any, mortal_url: str) -> None:
    if not sql(mortal_url, "SELECT 1 FROM pg_database WHERE datname = 'ascii'"):
        sql(mortal_url, "CREATE DATABASE ascii ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    assert "encoding SQL_ASCII" in refused(lambda: init(fresh_schema(mortal.get_uri(database="ascii"))))


def test_encryption_is_asked_for_by_the_address(proxy: Proxy, url: str) -> None:
    if sql(url, "SHOW ssl") != [("off",)]:
        pytest.skip("this server speaks TLS, so that asking for it is not refused")
    assert "SSL" in refused(lambda: PostgresLog(f"{proxy.address(url)}&sslmode=require"))


# --- the schema


NEXT = (Version(1, 1), ("CREATE TABLE {s}.shard(id text)",))


def migrations(patch: pytest.MonkeyPatch, known: Version, *more: tuple[Version, tuple[str, ...]]) -> None:
    patch.setattr(schema, "MIGRATIONS", (schema.MIGRATIONS[0], *more))
    patch.setattr(schema, "SCHEMA", known)


def test_a_newer_minor_version_is_used_and_a_newer_major_one_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = fresh_schema(uri)
    with monkeypatch.context() as newer:
        migrations(newer, Version(1, 1), NEXT)
        assert init(url).version == "1.1"
    log = PostgresLog(url)
    begin(log, "a")
    log.close()
    assert migrate(url).version == "1.1"
    sql(url, "INSERT INTO {s}.migration VALUES(2, 0)")
    for use in (PostgresLog, init, migrate):
        assert "schema 2.0, of a newer version" in refused(lambda use=use: use(url))


def test_an_older_version_is_migrated_as_a_whole_or_not_at_all(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        migrations(broken, Version(1, 1), (Version(1, 1), (*NEXT[1], "CREATE TABLE {s}.shard(id text)")))
        assert "already exists" in refused(lambda: migrate(url))
    PostgresLog(url).close()
    migrations(monkeypatch, Version(1, 1), NEXT)
    for use in (PostgresLog, init):
        assert "agent-saga log migrate" in refused(lambda use=use: use(url))
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(migrate, [url] * 4))
    assert sorted(one.applied for one in done) == [(), (), (), ("1.1",)]
    PostgresLog(url).close()


def test_a_log_that_does_not_say_what_it_is_is_damaged(url: str) -> None:
    sql(url, "DELETE FROM {s}.meta")
    refused(lambda: PostgresLog(url), LogCorrupted)


# --- damage


def spoil_a_byte(url: str, saga: str, n: int) -> None:
    sql(
        url,
        "UPDATE {s}.record r SET body = set_byte(body, length(body) - 20, get_byte(body, length(body) - 20) # 1)"
        " FROM {s}.saga s WHERE s.seq = r.saga AND s.id = %s AND r.n = %s",
        saga,
        n,
    )


NO_ADDRESSES = [
    f"postgresql:scott:{SECRET}@h/d",
    f"postgresql://scott:{SECRET}/x@h/d",
    f"postgresql://scott:%{SECRET}@h/d",
    f"postgresql://scott:{SECRET}@h:port/d",
    f"postgresql://scott:{SECRET}@h/d?nonsense=1",
    f"postgresql://scott:{SECRET}@h/d?schema=No-Name",
    f"postgresql://scott:{SECRET}@h/d?lease=0",
    f"postgresql://scott:{SECRET}@h/d?lease=soon",
    f"postgresql://scott:{SECRET}@h/d?timeout=-1",
    f"postgresql://scott:{SECRET}@h/d?timeout=nan",
    f"postgresql://scott:{SECRET}@h/d?force=yes",
    f"postgresql://scott:{SECRET}@h/d?max_result_bytes=lots",
]


SPOILS: dict[str, Callable[[str], object]] = {
    "first": lambda url: spoil_a_byte(url, "bad", 1),
    "byte": lambda url: spoil_a_byte(url, "bad", 2),
    "middle": lambda url: sql(
        url, "DELETE FROM {s}.record r USING {s}.saga s WHERE seq = saga AND id = 'bad' AND n = 2"
    ),
    "last": lambda url: sql(url, "DELETE FROM {s}.record r USING {s}.saga s WHERE seq = saga AND id = 'bad' AND n = 3"),
    "next": lambda url: sql(url, "UPDATE {s}.saga SET next = next + 1 WHERE id = 'bad'"),
    "epoch": lambda url: sql(url, "UPDATE {s}.saga SET epoch = 2 WHERE id = 'bad'"),
    "record epoch": lambda url: sql(
        url, "UPDATE {s}.record r SET epoch = 2 FROM {s}.saga s WHERE seq = saga AND id = 'bad' AND n = 3"
    ),
    "ended": lambda url: sql(url, "UPDATE {s}.saga SET ended = 1 WHERE id = 'bad'"),
    "moved": lambda url: sql(
        url, "UPDATE {s}.record SET n = n + 10 FROM {s}.saga WHERE seq = saga AND id = 'bad' AND n = 3"
    ),
    "copied": lambda url: sql(
        url,
        "UPDATE {s}.record r SET body = o.body FROM {s}.record o, {s}.saga s, {s}.saga g WHERE r.saga = s.seq AND"
        " o.saga = g.seq AND s.id = 'bad' AND g.id = 'good' AND r.n = 2 AND o.n = 2",
    ),
}


class TestPostgresAddresses(Addresses):
    no_addresses: ClassVar[list[str]] = NO_ADDRESSES
    spoils: ClassVar[dict[str, Callable[[str], object]]] = SPOILS

    def as_scott(self, url: str) -> str:
        return url.replace("postgresql://postgres@", f"postgresql://scott:{SECRET}@")

    def shown(self, url: str) -> str:
        return address_of(url).url

    def check_nothing(self, url: str) -> None:
        assert sql(url, "SELECT to_regnamespace('{s}')") == [(None,)]

    def check_what_ended_costs_nothing(
        self, log: PostgresLog, late: PostgresLog, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sql(url, "UPDATE {s}.saga SET ended = 1, owner = NULL WHERE id <> 'saga-0'")
        sql(url, "VACUUM ANALYZE {s}.saga")
        plan = sql(url, "EXPLAIN " + reading._OPEN.replace("%b", "%s"), -(2**63), 10_000)
        assert any("saga_open" in line for (line,) in plan), plan

    def check_unfinished(self, saga_ids: tuple[str, ...]) -> None:
        """A saga of which the row says that it has ended is found by what looks at records."""

    def check_what_the_dead_left(self, log: PostgresLog, other: PostgresLog, url: str) -> None:
        sql(url, "UPDATE {s}.writer SET lease_until = now() - interval '2 days'")
        other.compact(keep_days=0)
        assert sql(url, "SELECT count(*) FROM {s}.saga WHERE next = 1") == [(0,)]
        assert sql(url, "SELECT count(*) FROM {s}.writer") == [(0,)]


def test_a_row_that_is_missing_is_found_and_its_saga_named(url: str) -> None:
    log = PostgresLog(url)
    begin(log, "s", "INTENT")
    sql(url, "DELETE FROM {s}.saga")
    found = log.verify()
    assert [one.saga_ids for one in found.damage] == [("s",)] and "'s'" in str(found.first_broken)
    with pytest.raises(LogCorrupted):
        log.close() if log.flush(log.append(record("s", 3))) else None
    log.close()


def test_an_id_that_was_changed_is_damage_under_both_names(url: str) -> None:
    log = PostgresLog(url)
    begin(log, "s", "INTENT")
    log.close()
    sql(url, "UPDATE {s}.saga SET id = 'other'")
    log = PostgresLog(url)
    assert {name for one in log.verify().damage for name in one.saga_ids or ()} == {"s", "other"}
    with pytest.raises(LogCorrupted):
        log.claim("other")
    log.close()


# --- upkeep


def test_one_compaction_at_a_time(opened: Callable[..., PostgresLog], url: str) -> None:
    log = opened()
    begin(log, "s", "COMMITTED")
    log.release("s")
    with psycopg.connect("", **address_of(url).parameters) as connection:
        connection.execute(
            schema._sql("SELECT pg_advisory_xact_lock(hashtextextended('agent-saga compact {s}', 0))", address_of(url))
        )
        with pytest.raises(SagaBusy):
            log.compact(keep_days=0)
    assert log.compact(keep_days=0).sagas == 1
