"""The Redis log when answers are lost, leases run out, servers go and come back, and records are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from agent_saga_core.errors import Fenced, LogCorrupted, LogUnavailable, SagaBusy
from agent_saga_core.log.redis import RedisLog, connection, init, scripts

from ..servers.faults import Absences, EntryBehind, LeasesOfEntries, LostAnswersOfEntries
from ..servers.store import BOUND, begin, record, wait_for
from .proxy import Proxy
from .server import Behind, Server, behind, fresh_prefix, server_of_its_own, writers


def know(url: str) -> None:
    """The server has seen the scripts: the first time, what it answers is that it has not."""
    log = RedisLog(url)
    begin(log, "known")
    log.release("known")
    log.claim("known")
    log.flush(log.append(record("known", 3, "COMMITTED", epoch=2)))
    log.release("known")
    log.compact(keep_days=0)
    log.close()


class Redis(EntryBehind):
    @pytest.fixture
    def ready(self, url: str) -> None:
        know(url)

    def appended(self, url: str) -> bytes:
        return scripts.APPEND.sha

    def taken(self, url: str) -> bytes:
        return scripts.TAKE.sha

    def entered(self, url: str) -> bytes:
        return scripts.TAKE.sha

    def expire(self, log: RedisLog, url: str) -> None:
        writers(url, until="1")

    def check_fenced(self, url: str, count: int) -> None:
        with behind(url) as at:
            assert [at("HGET", name, "fenced") for name in at.names("writer:*")].count(b"1") == count

    def disown(self, url: str, saga: str) -> None:
        with behind(url) as at:
            at("HSET", f"saga:{saga}", "owner", "")

    def fence(self, url: str, *, fenced: bool = True) -> None:
        writers(url, fenced="1" if fenced else "0")

    def left(self, url: str) -> float:
        with behind(url) as at:
            (name,) = at.names("writer:*")
            seconds, micros = at.client.time()
            return float(at("HGET", name, "until")) / 1000 - seconds - micros / 1e6

    def set_epoch(self, url: str, saga: str, epoch: int) -> None:
        with behind(url) as at:
            at("HSET", f"saga:{saga}", "epoch", epoch)

    def stop(self, mortal: Server, *, kill: bool) -> None:
        if kill:
            mortal.kill()
        else:
            mortal.stop()

    def start(self, mortal: Server) -> None:
        mortal.start()

    def processes(self, mortal: Server) -> list[int]:
        return [mortal.pid]

    def give_up_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connection, "_LEAST_WAIT", 0.3)


class TestRedisLostAnswers(Redis, LostAnswersOfEntries):
    pass


class TestRedisAbsences(Redis, Absences):
    pass


class TestRedisLeases(Redis, LeasesOfEntries):
    pass


# --- acknowledgements that are lost


def test_a_history_whose_adoption_is_not_acknowledged_is_there_once(proxy: Proxy, url: str) -> None:
    know(url)
    source = RedisLog(url)
    begin(source, "s")
    source.flush(source.append(record("s", 2, "COMMITTED")))
    lines = source.lines("s")
    long = (*lines[:1], *(_line(n) for n in range(2, 1_300)))
    there = fresh_prefix(url.partition("?")[0])
    init(there)
    log = RedisLog(proxy.address(there))
    for saga, given, script in (("s", lines, scripts.ADOPT), ("long", _renamed(long), scripts.STAGE)):
        log.adopt({f"known {script.sha!r}": _renamed(long, f"known {script.sha!r}")})
        proxy.lose_the_answer(script.sha)
        assert log.adopt({saga: given}).stored == (saga,) and proxy.lost.is_set()
        assert log.lines(saga) == given
    with behind(there) as at:
        assert at.names("staged:*") == []
        assert {at("PTTL", name) for name in at.names("*")} == {-1}  # nothing else goes by itself
    assert log.verify().intact
    log.close()
    source.close()


def _line(n: int) -> Any:
    from agent_saga_core.records import encode

    return encode(record("s", n))


def _renamed(lines: tuple[Any, ...], saga: str = "long") -> tuple[Any, ...]:
    from agent_saga_core.records import encode

    return tuple(encode(record(saga, n)) for n in range(1, len(lines) + 1))


# --- in the moment between


def between(monkeypatch: pytest.MonkeyPatch, script: scripts.Script, *, before: Callable[[], object]) -> None:
    """Have something done just before that script runs the next time."""
    run = connection.Connection.run

    def late(self: connection.Connection, asked: scripts.Script, *given: Any) -> Any:
        if asked is script:
            monkeypatch.setattr(connection.Connection, "run", run)
            before()
        return run(self, asked, *given)

    monkeypatch.setattr(connection.Connection, "run", late)


def test_a_history_is_not_adopted_over_a_saga_that_somebody_claims_meanwhile(
    opened: Callable[..., RedisLog], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = opened(), opened()
    lines = (_line(1), _line(2))
    between(monkeypatch, scripts.ADOPT, before=lambda: other.claim("s"))
    adopted = log.adopt({"s": lines})
    assert adopted.stored == () and isinstance(adopted.refused["s"], SagaBusy)
    assert log.lines("s") == () and other.holds("s")
    writers(url, until="1")
    assert log.adopt({"s": lines}).stored == ("s",)
    with pytest.raises(Fenced):
        other.flush(other.append(record("s", 1, "START", x="late")))
    assert log.lines("s") == lines and log.verify().intact


@pytest.mark.parametrize("goes", ["UNLINK", "RPOP"])
def test_a_long_history_of_which_something_is_gone_before_it_is_adopted_is_not_stored(
    opened: Callable[..., RedisLog], url: str, monkeypatch: pytest.MonkeyPatch, goes: str
) -> None:
    log = opened()
    lines = tuple(_line(n) for n in range(1, 1_300))
    with behind(url) as at:

        def spoil() -> None:
            (name,) = at.names("staged:*")
            at(goes, name)

        between(monkeypatch, scripts.ADOPT, before=spoil)
        adopted = log.adopt({"s": lines})
        assert adopted.stored == () and "vanished" in str(adopted.refused["s"])
        assert at.names("staged:*") == at.names("*:s") == []
    assert log.saga_ids() == () and log.verify().intact
    assert log.adopt({"s": lines}).stored == ("s",) and log.lines("s") == lines


def test_a_server_that_forgot_the_scripts_is_told_them_again(opened: Callable[..., RedisLog], url: str) -> None:
    log = opened()
    begin(log, "s")
    with behind(url) as at:
        at.client.script_flush()
    log.flush(log.append(record("s", 2)))
    log.release("s")
    assert len(log.claim("s")) == 3


# --- servers that go, and come back


def test_a_server_without_memory_refuses_a_batch_as_a_whole(mortal: Server, mortal_url: str) -> None:
    log = RedisLog(mortal_url + "&timeout=0.2")
    for saga in ("a", "b"):
        begin(log, saga)
    with mortal.client() as client:
        client.config_set("maxmemory", "1")
        try:
            log.append(record("a", 2))
            with pytest.raises(LogUnavailable, match="memory"):
                log.flush(log.append(record("b", 2)))
        finally:
            client.config_set("maxmemory", "0")
    log.close()
    other = RedisLog(mortal_url)
    assert [len(other.read(saga)) for saga in ("a", "b")] == [1, 1] and other.verify().intact
    other.close()


# --- a server that lost what it acknowledged


@pytest.mark.parametrize("alone", [True, False])
def test_an_owner_whose_saga_lost_acknowledged_records_stops_and_nobody_takes_what_is_left(
    opened: Callable[..., RedisLog], url: str, alone: bool
) -> None:
    log, other = opened(), opened()
    begin(log, "s")
    begin(log, "whole")
    for n in (2, 3):
        log.flush(log.append(record("s", n)))
    with behind(url) as at:
        at("RPOP", "records:s")
        at("HSET", "saga:s", "next", 3)
    assert len(other.read("s")) == 2  # nothing tells that one is gone
    whole = 0 if alone else log.append(record("whole", 2))
    with pytest.raises(LogCorrupted, match="lost records") as caught:
        log.flush(log.append(record("s", 4)))
    assert caught.value.saga_id == "s"
    log.flush(whole)
    with pytest.raises(LogCorrupted):
        log.flush(log.append(record("s", 5)))
    with pytest.raises(LogCorrupted):
        log.release("s")
    with pytest.raises(LogCorrupted, match="2 records are there, and 3 were written"):
        other.claim("s")
    assert [one.saga_ids for one in other.unfinished().damage] == [("s",)]
    log.flush(log.append(record("whole", 3 if not alone else 2)))


@pytest.mark.parametrize("by", ["append", "claim", "beat"])
def test_a_server_that_is_behind_what_it_acknowledged_stops_its_writer(
    opened: Callable[..., RedisLog], url: str, by: str
) -> None:
    log, other = opened(lease=0.5) if by == "beat" else opened(), opened()
    for saga in ("open", "behind", "ended", "given back"):
        begin(log, saga)
    log.flush(log.append(record("ended", 2, "COMMITTED")))
    log.release("ended")
    log.release("given back")
    with behind(url) as at:  # what a replica knows that heard of nothing but the beginning of each
        for saga in ("behind", "ended"):
            at("HSET", f"saga:{saga}", "next", 1)
            at("DEL", f"records:{saga}")
        at("HDEL", "saga:ended", "ended")
        at("ZREM", "ended", "ended")
        at("ZADD", "open", 3, "ended")
        (name,) = at.names("writer:*")
        at("HINCRBY", name, "count", -2)
    if by == "append":
        ticket = log.append(record("open", 2))
        with pytest.raises(LogCorrupted, match="lost records"):
            log.flush(ticket)
    elif by == "claim":
        with pytest.raises(LogCorrupted, match="lost records"):
            log.claim("given back")
    else:
        wait_for(lambda: log.poisoned is not None)
    with pytest.raises(LogCorrupted, match="lost records"):
        log.append(record("behind", 2))
    with pytest.raises(LogCorrupted):
        log.claim("another")
    for saga in ("open", "behind"):
        log.release(saga)
    # The others know which sagas those are, and take the ones that are whole.
    wait_for(lambda: len(other.unfinished().damage) == 2)
    for saga in ("behind", "ended"):
        with pytest.raises(LogCorrupted, match="were written"):
            other.claim(saga)
    writers(url, until="1")
    assert other.claim("open")[-1].type == "CLAIM" and other.claim("given back")[-1].type == "CLAIM"


def test_an_owner_on_a_server_that_was_emptied_stops(mortal: Server, mortal_url: str) -> None:
    log = RedisLog(mortal_url)
    begin(log, "s", fresh=True)
    with mortal.client() as client:
        client.flushall()
    with pytest.raises(LogCorrupted, match="lost it"):
        log.flush(log.append(record("s", 2)))
    with pytest.raises(LogCorrupted):
        log.claim("t")
    log.close()


def test_another_log_in_the_place_of_ours_is_found(mortal: Server, mortal_url: str) -> None:
    log = RedisLog(mortal_url + "&lease=0.5")
    begin(log, "s", fresh=True)
    with mortal.client() as client:
        client.flushall()
    init(mortal_url)
    wait_for(lambda: log.poisoned is not None)  # it also looks for itself
    with pytest.raises(LogCorrupted):
        log.append(record("s", 2))
    log.close()


def test_a_server_that_is_made_forgetful_while_it_runs_is_found(mortal: Server, mortal_url: str) -> None:
    log = RedisLog(mortal_url + "&lease=0.5")
    begin(log, "s")
    writer: Any = log._heart._current
    was = writer.until
    wait_for(lambda: writer.until != was)  # over a connection that stays
    with mortal.client() as client:
        client.config_set("appendfsync", "everysec")
        try:
            wait_for(lambda: log.poisoned is not None)
            with pytest.raises(LogUnavailable, match="appendfsync everysec"):
                log.append(record("s", 2))
        finally:
            client.config_set("appendfsync", "always")
    log.close()


def test_keys_of_another_kind_are_damage_of_their_saga_alone(opened: Callable[..., RedisLog], url: str) -> None:
    log = opened()
    for saga in ("row", "records", "stray", "ahead", "fine"):
        begin(log, saga)
    with behind(url) as at:
        at("DEL", "saga:row")
        at("SET", "saga:row", "x")
        at("DEL", "records:records")
        at("SADD", "records:records", "x")
        at("RPUSH", "records:stray", "x")
        at("HSET", "saga:ahead", "next", 3)
    bad = ["row", "records", "stray", "ahead"]
    tickets = {saga: log.append(record(saga, 2)) for saga in (*bad, "fine")}
    log.flush(tickets.pop("fine"))
    for saga, ticket in tickets.items():
        with pytest.raises(LogCorrupted, match=repr(saga)):
            log.flush(ticket)
    assert [one.saga_ids for one in log.unfinished().damage] == [(saga,) for saga in bad]
    found = log.verify()
    assert [one.saga_ids for one in found.damage] == [(saga,) for saga in bad] and found.records == 2


def stored(at: Behind) -> dict[str, bytes]:
    """Everything that is stored but the leases."""
    return {name: at("DUMP", name) for name in at.names("*") if not name.startswith("writer")}


@pytest.mark.parametrize("use", ["flush", "claim", "adopt"])
@pytest.mark.parametrize("name", ["sagas", "open", "ended", "empty"])
def test_a_shared_key_of_another_kind_is_found_before_anything_is_written(
    opened: Callable[..., RedisLog], url: str, name: str, use: str
) -> None:
    log = opened()
    begin(log, "s")
    log.claim("new", fresh=True)
    with behind(url) as at:
        at("DEL", name)
        at("SET", name, "x")
        before = stored(at)
        with pytest.raises(LogCorrupted, match="WRONGTYPE"):
            if use == "flush":
                log.append(record("new", 1, "START"))
                log.flush(log.append(record("s", 2, "COMMITTED")))
            elif use == "claim":
                log.claim("another")
            else:
                log.adopt({"adopted": _renamed((1, 2), "adopted")})
        assert stored(at) == before


@contextmanager
def replica_of(primary: Server) -> Iterator[tuple[Server, Proxy]]:
    """A replica, and what it hears the primary through."""
    line = Proxy(primary.uri)
    with server_of_its_own(replicaof=f"127.0.0.1 {line.port}") as replica:
        try:
            with replica.client() as client:
                wait_for(lambda: client.info("replication")["master_link_status"] == "up")
                wait_for(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
            yield replica, line
        finally:
            line.close()


def replicate(primary: Server) -> None:
    """Return when the replica has all that is here now."""
    with primary.client() as client:
        client.set("mark", "1")
        assert client.wait(1, int(BOUND * 1000)) == 1


@pytest.mark.parametrize("idle", [False, True])
def test_an_owner_that_meets_a_promoted_replica_which_lacks_its_records_stops(idle: bool) -> None:
    with server_of_its_own() as primary, replica_of(primary) as (replica, line):
        url = fresh_prefix(primary.uri)
        init(url)
        proxy = Proxy(primary.uri)
        there = url.replace(str(primary.port), str(replica.port))
        log = RedisLog(proxy.address(url) + "&lease=300")  # its next beat is further away than this test waits
        for saga in ("behind", "whole", "ended"):
            begin(log, saga)
        with pytest.raises(LogUnavailable, match="replica"):
            RedisLog(there)
        replicate(primary)
        line.go_away()  # from here on the replica hears of nothing, and the primary acknowledges all the same
        log.flush(log.append(record("behind", 2)))
        log.flush(log.append(record("ended", 2, "COMMITTED")))
        log.release("ended")
        primary.kill()
        with replica.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        proxy.server_port = replica.port
        done: list[str] = []
        if idle:
            assert log.saga_ids() == ("behind", "whole", "ended")  # who meets another server has it looked at
            wait_for(lambda: log.poisoned is not None)
        with pytest.raises(LogCorrupted, match="lost records"):
            log.flush(log.append(record("behind", 3)))
            done.append("effect")
        assert done == []
        with pytest.raises(LogCorrupted):
            log.flush(log.append(record("whole", 2)))
        other = RedisLog(there)
        wait_for(lambda: len(other.unfinished().damage) == 2)
        for saga in ("behind", "whole"):
            log.release(saga)
        wait_for(lambda: not other.is_live("whole"))
        for saga in ("behind", "ended"):
            with pytest.raises(LogCorrupted, match="1 records are there, and 2 were written"):
                other.claim(saga)
        assert len(other.claim("whole")) == 2
        log.close()
        other.close()
        proxy.close()


def test_an_owner_follows_to_a_promoted_replica_that_has_everything() -> None:
    with server_of_its_own() as primary, replica_of(primary) as (replica, _):
        url = fresh_prefix(primary.uri)
        init(url)
        proxy = Proxy(primary.uri)
        log = RedisLog(proxy.address(url))
        begin(log, "s")
        replicate(primary)
        proxy.server_port = replica.port
        proxy.go_away()
        proxy.come_back()
        with ThreadPoolExecutor(1) as pool:
            with replica.client() as client:
                before = client.info("stats")["total_connections_received"]
                flushed = pool.submit(log.flush, log.append(record("s", 2)))
                # What answers is a replica as yet.
                wait_for(lambda: client.info("stats")["total_connections_received"] > before + 3)
                client.execute_command("REPLICAOF", "NO", "ONE")
            flushed.result(BOUND)
        log.flush(log.append(record("s", 3, "COMMITTED")))
        assert log.verify().intact and len(log.read("s")) == 3
        log.close()
        proxy.close()


@pytest.mark.parametrize("when", ["idle", "read", "flush"])
def test_what_another_server_said_in_between_is_worth_nothing(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A connection to a server whose place another has taken is not believed, though it still answers."""
    with server_of_its_own() as old, replica_of(old) as (new, line):
        url = fresh_prefix(old.uri)
        init(url)
        proxy = Proxy(old.uri)
        log = RedisLog(proxy.address(url))
        begin(log, "s")
        begin(log, "given back")
        log.release("given back")
        replicate(old)
        line.go_away()
        with new.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        proxy.server_port = new.port
        other = RedisLog(url.replace(str(old.port), str(new.port)))
        assert len(other.claim("given back")) == 2

        def meet() -> None:
            log._server.connect().close()  # some thread needed one more, while another has one that leads to the old

        if when == "idle":
            meet()
        else:
            between(monkeypatch, scripts.APPEND if when == "flush" else scripts.LOOK, before=meet)
        if when == "read":
            assert log.is_live("given back")
        log.flush(log.append(record("s", 2)))
        with new.client() as client:
            assert client.llen(log._address.key("records", "s")) == 2
        assert len(log.read("s")) == 2 and log.verify().intact
        log.close()
        other.close()
        proxy.close()
