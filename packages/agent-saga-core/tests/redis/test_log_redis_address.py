"""What a Redis log is opened by, what it says when it cannot be, its keys, its damage, and its upkeep."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import pytest
import redis

from agent_saga_core.errors import LogCorrupted, SagaBusy
from agent_saga_core.log.redis import RedisLog, compaction, connection, fitness, init, migrate, schema
from agent_saga_core.log.redis.address import address_of
from agent_saga_core.log.sql import Version
from agent_saga_core.records import encode

from ..servers.addresses import SECRET, Addresses, begin, refused
from ..servers.store import record
from .proxy import Proxy
from .server import Behind, Server, behind, fresh_prefix, server_of_its_own, spoil_a_byte

PAGE = Path(__file__).parents[4] / "docs" / "log-redis.md"


def as_user(url: str, user: str, password: str = "") -> str:
    login = f"{user}:{quote(password, safe='')}@" if password else f"{user}@"
    return url.replace("redis://", f"redis://{login}")


# --- addresses


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://scott:{SECRET}@db.example:6380/3", "redis://scott@db.example:6380/3"),
        (f"redis://:{SECRET}@db.example?lease=5", "redis://db.example/0?lease=5"),
        (f"rediss://scott:{SECRET}@h/1?ssl_ca_certs=/etc/ca.pem", "rediss://scott@h/1?ssl_ca_certs=/etc/ca.pem"),
        ("redis://", "redis:///0"),
        ("redis:///2?socket=/run/valkey.sock&prefix=a.b-c", "redis:///2?socket=/run/valkey.sock&prefix=a.b-c"),
        (f"redis://sc%40tt:{SECRET}%40@[::1]:7/0", "redis://sc%40tt@[::1]:7/0"),
    ],
)
def test_an_address_is_shown_without_its_credentials_and_means_the_same(url: str, shown: str) -> None:
    address = address_of(url)
    assert SECRET not in address.url and address.url == shown
    again = address_of(address.url)
    assert again.parameters == {**address.parameters, "password": None}
    assert again[2:] == (*address[2:3], (), *address[4:])


def test_logs_of_several_prefixes_share_a_server_and_know_nothing_of_each_other(uri: str) -> None:
    urls = [f"{uri}?prefix={name}" for name in ("t-twin", "t-twi", "t-twin.saga")]
    for url in urls:
        init(url)
    logs = [RedisLog(url) for url in urls]
    for log in logs:
        begin(log, "log", "COMMITTED")
        begin(log, "n:saga:x")
    for log in logs:
        assert log.saga_ids() == ("log", "n:saga:x") and log.verify().records == 3 and log.verify().intact
        log.release("log")
    logs[0].compact(keep_days=0)
    assert [len(log.saga_ids()) for log in logs] == [1, 2, 2]
    for log in logs:
        log.close()


# --- what cannot be opened


@pytest.fixture
def guarded(mortal: Server, mortal_url: str) -> str:
    """A log whose server knows a user with a password that may do everything on keys of this log."""
    prefix = address_of(mortal_url).prefix
    with mortal.client() as client:
        rights = ["reset", "on", f">{SECRET}", f"~{prefix}:*", "+@all"]
        client.execute_command("ACL", "SETUSER", "scott", *rights)
    return mortal_url


def test_a_wrong_password_and_none_are_one_line(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "invalid username-password" in refused(lambda: RedisLog(as_user(guarded, "scott", SECRET + "x")))
    refused(lambda: RedisLog(as_user(guarded, "scott")))
    log = RedisLog(as_user(guarded, "scott", SECRET))
    begin(log, "s")
    assert SECRET not in log.url
    monkeypatch.setenv("REDISCLI_AUTH", SECRET)
    again = RedisLog(log.url)
    assert again.is_live("s")
    again.close()
    log.close()


def test_a_server_that_wants_a_password_says_so_in_one_line(mortal: Server, mortal_url: str) -> None:
    with mortal.client() as client:
        client.config_set("requirepass", SECRET)
        try:
            for use in (RedisLog, init, migrate):
                assert "uthentication required" in refused(lambda use=use: use(mortal_url))
            secured = mortal_url.replace("redis://", f"redis://:{SECRET}@")
            RedisLog(secured).close()
            assert SECRET not in init(secured).url
        finally:
            client.config_set("requirepass", "")


def test_a_user_that_may_not_look_or_may_not_write_is_told_so_before_any_effect(mortal: Server, guarded: str) -> None:
    address = as_user(guarded, "scott", SECRET)
    with mortal.client() as client:

        def grant(*rights: str) -> None:
            client.execute_command("ACL", "SETUSER", "scott", *rights)

        grant("-info")
        assert "command INFO" in refused(lambda: RedisLog(address))
        grant("+info", "resetkeys")
        assert "may not be used by this user" in refused(lambda: RedisLog(address))
        grant("allkeys", "-@write", "-@scripting", "+eval", "+evalsha")
        log = RedisLog(address)  # enough to look
        assert log.saga_ids() == () and log.verify().intact
        said = refused(lambda: log.claim("s", fresh=True))
        assert "may not be written" in said and "RPUSH" in said and "ZADD" in said
        grant("+@write", "-zadd")
        assert refused(lambda: log.claim("s", fresh=True)).endswith(": ZADD")
        assert refused(lambda: log.adopt({"s": ()}), ValueError)
        assert not log.owned("s")
        grant("+zadd")
        begin(log, "s")
        log.close()


def test_the_rights_that_the_page_names_are_enough(mortal: Server, guarded: str) -> None:
    rights = "+info +config|get +acl|dryrun +eval +evalsha +@read +@write +time".split()
    assert f"`~agent-saga:* {' '.join(rights)}`" in PAGE.read_text("utf-8")
    with mortal.client() as client:
        client.script_flush()
        client.execute_command("ACL", "SETUSER", "scott", "-@all", *rights)
    log = RedisLog(as_user(guarded, "scott", SECRET))
    begin(log, "s")
    begin(log, "over", "COMMITTED")
    log.release("s")
    assert len(log.claim("s")) == 2 and log.unfinished().saga_ids == ("s",) and log.verify().intact
    large = tuple(encode(record("long", n)) for n in range(1, 1_200))
    assert log.adopt({"long": large}).stored == ("long",)
    log.release("over")
    assert log.compact(keep_days=0).sagas == 1
    log.close()


FORGETFUL = [
    ("appendfsync", "everysec"),
    ("appendfsync", "no"),
    ("appendonly", "no"),
    ("no-appendfsync-on-rewrite", "yes"),
]


@pytest.mark.parametrize(("name", "value"), FORGETFUL)
def test_a_server_that_does_not_keep_what_it_acknowledges_is_refused_unless_that_is_accepted(
    mortal: Server, mortal_url: str, name: str, value: str
) -> None:
    with mortal.client() as client:
        before = client.config_get(name)[name]
        client.config_set(name, value)
        try:
            for use in (RedisLog, init, migrate):
                said = refused(lambda use=use: use(mortal_url))
                assert f"{name} {value}" in said and "accept_data_loss=1" in said
            log = RedisLog(f"{mortal_url}&accept_data_loss=1")
            begin(log, "s")
            log.close()
            (warning,) = init(f"{mortal_url}&accept_data_loss=1").warnings
            assert f"{name} {value}" in warning
        finally:
            client.config_set(name, before)
            _wait_for_the_file(client)
    assert init(mortal_url).warnings == ()


def _wait_for_the_file(client: redis.Redis) -> None:
    pause = threading.Event()
    for _ in range(3_000):
        found = client.info("persistence")
        if not found["aof_rewrite_in_progress"] and not found["aof_rewrite_scheduled"]:
            return
        pause.wait(0.01)
    raise AssertionError("the append-only file is not made")


def test_an_append_only_file_that_is_being_made_is_waited_for(mortal: Server, mortal_url: str) -> None:
    with mortal.client() as client:
        client.config_set("appendonly", "no")
        client.config_set("rdb-key-save-delay", "1000000")  # a second for every key: it stays half made
        client.set("one", "1")
        client.set("two", "2")
        try:
            client.config_set("appendonly", "yes")
            assert "being written" in refused(lambda: RedisLog(f"{mortal_url}&timeout=0"))
            RedisLog(f"{mortal_url}&accept_data_loss=1").close()
            client.config_set("rdb-key-save-delay", "0")
            with ThreadPoolExecutor(1) as pool:
                opening = pool.submit(RedisLog, mortal_url)
                client.config_set("appendonly", "no")
                client.config_set("appendonly", "yes")
                opening.result(60).close()
            assert not client.info("persistence")["aof_rewrite_in_progress"]
        finally:
            client.config_set("rdb-key-save-delay", "0")
            client.config_set("appendonly", "yes")
            _wait_for_the_file(client)


@pytest.mark.parametrize("how", ["acl", "renamed"])
def test_a_server_whose_configuration_is_hidden_is_refused_unless_that_is_accepted(
    mortal: Server, guarded: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "acl":
        with mortal.client() as client:
            client.execute_command("ACL", "SETUSER", "scott", "-config")
        address = as_user(guarded, "scott", SECRET)
        _hidden(address)
    else:
        with server_of_its_own(rename_command="CONFIG hidden") as server:
            _hidden(fresh_prefix(server.uri))


def _hidden(address: str) -> None:
    assert "CONFIG GET" in refused(lambda: init(address))
    accepting = f"{address}&accept_data_loss=1"
    assert "CONFIG GET" in init(accepting).warnings[0]
    assert "CONFIG GET" in refused(lambda: RedisLog(address))
    log = RedisLog(accepting)
    begin(log, "s")
    log.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
def test_a_server_that_drops_keys_is_refused_whatever_is_accepted(mortal: Server, mortal_url: str, policy: str) -> None:
    with mortal.client() as client:
        client.config_set("maxmemory-policy", policy)
        try:
            for address in (mortal_url, f"{mortal_url}&accept_data_loss=1"):
                assert policy in refused(lambda address=address: RedisLog(address))
            client.config_set("maxmemory-policy", "volatile-lru")  # our keys are none of those
            RedisLog(mortal_url).close()
        finally:
            client.config_set("maxmemory-policy", "noeviction")


def test_a_cluster_and_a_replica_are_refused_whatever_is_accepted(mortal: Server) -> None:
    with server_of_its_own(cluster_enabled="yes") as member:
        for address in (fresh_prefix(member.uri), fresh_prefix(member.uri, accept_data_loss=1)):
            for use in (RedisLog, init):
                assert "Cluster" in refused(lambda use=use, address=address: use(address))
    with server_of_its_own(replicaof=f"127.0.0.1 {mortal.port}") as replica:
        for address in (fresh_prefix(replica.uri), fresh_prefix(replica.uri, accept_data_loss=1)):
            for use in (RedisLog, init):
                assert "replica" in refused(lambda use=use, address=address: use(address))


def test_a_server_that_is_too_old_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitness, "_OLDEST", (99, 0))
    assert "too old" in refused(lambda: RedisLog(url))


def test_encryption_is_asked_for_by_the_address(proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LEAST_WAIT", 0.3)  # the server waits for more of what it takes for a command
    address = proxy.address(url).replace("redis://", "rediss://") + "&timeout=0.3"
    assert "cannot be used" in refused(lambda: RedisLog(address))


def test_a_socket_takes_the_place_of_a_host() -> None:
    with server_of_its_own() as server:
        path = str(server.root / "s")
        server.kill()
        server.start(unixsocket=path)
        url = fresh_prefix(f"redis:///0?socket={path}")
        init(url)
        log = RedisLog(url)
        begin(log, "s")
        log.close()


# --- the schema


def test_a_newer_minor_version_is_used_and_a_newer_major_one_refused(url: str) -> None:
    with behind(url) as at:
        at("HSET", "log", "minor", 1)
        log = RedisLog(url)
        begin(log, "a")
        log.close()
        assert migrate(url).version == init(url).version == "1.1"
        at("HSET", "log", "major", 2)
        for use in (RedisLog, init, migrate):
            assert "schema 2.1, of a newer version" in refused(lambda use=use: use(url))


def test_an_older_version_is_to_be_migrated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "SCHEMA", Version(1, 1))
    for use in (RedisLog, init):
        assert "agent-saga log migrate" in refused(lambda use=use: use(url))


@pytest.mark.parametrize("spoil", [("HDEL", "id"), ("HSET", "id", "x"), ("HSET", "major", "x"), ("HDEL", "minor")])
def test_a_log_that_does_not_say_what_it_is_is_damaged(url: str, spoil: tuple[str, ...]) -> None:
    with behind(url) as at:
        at(spoil[0], "log", *spoil[1:])
        refused(lambda: RedisLog(url), LogCorrupted)
        at("DEL", "log")
        at("SET", "log", "x")
        refused(lambda: RedisLog(url), LogCorrupted)
        at("DEL", "log")


# --- damage


NO_ADDRESSES = [
    f"redis:scott:{SECRET}@h/0",
    f"redis://scott:{SECRET}/x@h/0",
    f"redis://scott:%{SECRET}@h/0",
    f"redis://scott:{SECRET}@h:port/0",
    f"redis://scott:{SECRET}@h:99999/0",
    f"redis://scott:{SECRET}@h/shop",
    f"redis://scott:{SECRET}@h/0/1",
    f"redis://scott:{SECRET}#x@h/0",
    f"redis://scott:{SECRET}@h/0?nonsense=1",
    f"redis://scott:{SECRET}@h/0?lease",
    f"redis://scott:{SECRET}@h/0?prefix=a:b",
    f"redis://scott:{SECRET}@h/0?prefix=a*",
    f"redis://scott:{SECRET}@h/0?lease=0",
    f"redis://scott:{SECRET}@h/0?lease=soon",
    f"redis://scott:{SECRET}@h/0?timeout=-1",
    f"redis://scott:{SECRET}@h/0?timeout=nan",
    f"redis://scott:{SECRET}@h/0?accept_data_loss=yes",
    f"redis://scott:{SECRET}@h/0?max_result_bytes=lots",
    f"redis://scott:{SECRET}@h/0?socket=/x",
    f"redis://scott:{SECRET}@h/0?ssl_ca_certs=/x",
]


SPOILS: dict[str, Callable[[Behind], object]] = {
    "first": lambda at: spoil_a_byte(at, "bad", 1),
    "byte": lambda at: spoil_a_byte(at, "bad", 2),
    "middle": lambda at: at("LREM", "records:bad", 1, at("LINDEX", "records:bad", 1)),
    "last": lambda at: at("RPOP", "records:bad"),
    "more": lambda at: at("RPUSH", "records:bad", "x"),
    "next": lambda at: at("HSET", "saga:bad", "next", 9),
    "nonsense": lambda at: at("HSET", "saga:bad", "next", "x"),
    "owner": lambda at: at("HDEL", "saga:bad", "owner"),
    "epoch": lambda at: at("HSET", "saga:bad", "epoch", 2),
    "ended": lambda at: at("HSET", "saga:bad", "ended", "1"),
    "copied": lambda at: at("LSET", "records:bad", 1, at("LINDEX", "records:good", 1)),
    "records": lambda at: at("DEL", "records:bad"),
    "row": lambda at: at("DEL", "saga:bad"),
}


def spoiler(spoil: Callable[[Behind], object]) -> Callable[[str], object]:
    def through(url: str) -> None:
        with behind(url) as at:
            spoil(at)

    return through


class TestRedisAddresses(Addresses):
    no_addresses: ClassVar[list[str]] = NO_ADDRESSES
    spoils: ClassVar[dict[str, Callable[[str], object]]] = {name: spoiler(spoil) for name, spoil in SPOILS.items()}

    def as_scott(self, url: str) -> str:
        return as_user(url, "scott", SECRET)

    def shown(self, url: str) -> str:
        return address_of(url).url

    def check_what_ended_costs_nothing(
        self, log: RedisLog, late: RedisLog, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with behind(url) as there:
            before = there.client.info("commandstats")
            assert len(late.unfinished().saga_ids) == 10_000
            after = there.client.info("commandstats")
        looked = after["cmdstat_hmget"]["calls"] - before["cmdstat_hmget"]["calls"]
        assert looked < 10_100  # a lease is renewed meanwhile

    def check_nothing(self, url: str) -> None:
        with behind(url) as at:
            assert at.names("*") == []

    def check_what_the_dead_left(self, log: RedisLog, other: RedisLog, url: str) -> None:
        other.compact(keep_days=0)
        with behind(url) as at:
            assert at("ZRANGE", "empty", 0, -1) == [b"never begun"] and at.names("writer:*")
            for name in at.names("writer:*"):
                at("HSET", name, "until", 1)
                at("ZADD", "writers", 1, name.removeprefix("writer:"))
            other.compact(keep_days=0)
            assert at("ZCARD", "empty") == 0 and at.names("saga:never*") == at.names("writer:*") == []
            assert at("GET", "compact") is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda at: at("ZREM", "open", "s"),
        lambda at: at("ZREM", "sagas", "s"),
        lambda at: at("ZADD", "sagas", 77, "s"),
        lambda at: at("ZADD", "ended", 1, "s"),
        lambda at: at("ZREM", "ended", "over"),
        lambda at: at("ZADD", "ended", 1, "over"),
        lambda at: at("ZADD", "open", 1, "over"),
    ],
    ids="open sagas place ended forgotten earlier reopened".split(),
)
def test_a_list_that_is_wrong_is_found(url: str, spoil: Callable[[Any], object]) -> None:
    log = RedisLog(url)
    begin(log, "s", "INTENT")
    begin(log, "over", "COMMITTED")
    with behind(url) as at:
        spoil(at)
    found = log.verify()
    assert len(found.damage) == 1 and found.damage[0].saga_ids in (("s",), ("over",))
    log.close()


def test_records_under_another_id_are_damage_under_both_names(url: str) -> None:
    log = RedisLog(url)
    begin(log, "s", "INTENT")
    log.close()
    with behind(url) as at:
        for kind in ("saga", "records"):
            at.client.rename(at.key(f"{kind}:s"), at.key(f"{kind}:other"))
        for index in ("sagas", "open"):
            at("ZREM", index, "s")
            at("ZADD", index, 1, "other")
    log = RedisLog(url)
    assert {name for one in log.verify().damage for name in one.saga_ids or ()} == {"s", "other"}
    with pytest.raises(LogCorrupted):
        log.claim("other")
    log.close()


# --- upkeep


def test_one_compaction_at_a_time_and_a_killed_one_holds_up_the_next_for_a_while(
    opened: Callable[..., RedisLog], url: str
) -> None:
    log = opened()
    begin(log, "s", "COMMITTED")
    log.release("s")
    with behind(url) as at:
        at("SET", "compact", "another")
        with pytest.raises(SagaBusy):
            log.compact(keep_days=0)
        assert log.compact(keep_days=0, dry_run=True).sagas == 1
        at("DEL", "compact")
    assert log.compact(keep_days=0).sagas == 1


def test_a_compaction_that_was_stopped_past_its_time_forgets_nothing(
    opened: Callable[..., RedisLog], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened()
    begin(log, "s", "COMMITTED")
    log.release("s")
    look = compaction._Passage._may_go

    def late(self: Any, found: Any) -> Any:
        with behind(url) as at:
            at("SET", "compact", "another")
        return look(self, found)

    monkeypatch.setattr(compaction._Passage, "_may_go", late)
    with pytest.raises(SagaBusy):
        log.compact(keep_days=0)
    assert len(log.read("s")) == 2
