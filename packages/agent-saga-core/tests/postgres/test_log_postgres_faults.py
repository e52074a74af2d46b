"""The PostgreSQL log when answers are lost, leases run out, servers go and come back, and records are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log import pool
from agent_saga_core.log.postgres import PostgresLog, connection, init

from ..servers.faults import Absences, EntryBehind, LeasesOfEntries, LostAnswersOfEntries
from ..servers.store import BOUND, begin, record, wait_for
from .server import control, expire, fresh_schema, processes_of, server_of_its_own, sql, standby_of


class Postgres(EntryBehind):
    fenced_as_a_whole: ClassVar[bool] = False

    def appended(self, url: str) -> bytes:
        return b".record("

    def taken(self, url: str) -> bytes:
        return b".record("

    def entered(self, url: str) -> bytes:
        return b"ON CONFLICT"

    def expire(self, log: PostgresLog, url: str) -> None:
        expire(url)

    def check_fenced(self, url: str, count: int) -> None:
        assert sql(url, "SELECT count(*) FROM {s}.writer WHERE fenced") == [(count,)]

    def disown(self, url: str, saga: str) -> None:
        sql(url, "UPDATE {s}.saga SET owner = NULL WHERE id = %s", saga)

    def fence(self, url: str, *, fenced: bool = True) -> None:
        sql(url, "UPDATE {s}.writer SET fenced = %s", fenced)

    def left(self, url: str) -> float:
        ((left,),) = sql(url, "SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 FROM {s}.writer")
        return left

    def set_epoch(self, url: str, saga: str, epoch: int) -> None:
        sql(url, "UPDATE {s}.saga SET epoch = %s WHERE id = %s", epoch, saga)

    def stop(self, mortal: Any, *, kill: bool) -> None:
        control(mortal, "stop", "-m", "immediate" if kill else "fast")

    def start(self, mortal: Any) -> None:
        place = conninfo_to_dict(mortal.get_uri())["host"]
        control(mortal, "-o", '-h ""', "-o", f"-k {place}", "-l", str(mortal.log), "start")

    def processes(self, mortal: Any) -> list[int]:
        return processes_of(mortal)

    def give_up_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connection, "_LEAST_SILENCE", 0.3)


class TestPostgresLostAnswers(Postgres, LostAnswersOfEntries):
    pass


class TestPostgresAbsences(Postgres, Absences):
    pass


class TestPostgresLeases(Postgres, LeasesOfEntries):
    pass


# --- a server that lost what it acknowledged


@pytest.mark.parametrize("alone", [True, False])
def test_an_owner_whose_saga_lost_acknowledged_records_stops(
    opened: Callable[..., PostgresLog], url: str, alone: bool
) -> None:
    log = opened()
    begin(log, "s")
    begin(log, "whole")
    for n in (2, 3):
        log.flush(log.append(record("s", n)))
    # What a replica knows that did not hear of the last record.
    sql(url, "DELETE FROM {s}.record r USING {s}.saga s WHERE s.id = 's' AND r.saga = s.seq AND r.n = 3")
    sql(url, "UPDATE {s}.saga SET next = 3 WHERE id = 's'")
    whole = 0 if alone else log.append(record("whole", 2))
    with pytest.raises(LogCorrupted, match="lost records") as caught:
        log.flush(log.append(record("s", 4)))
    assert caught.value.saga_id == "s"
    log.flush(whole)
    with pytest.raises(LogCorrupted):
        log.flush(log.append(record("s", 5)))
    assert [one.n for one in log.read("s")] == [1, 2]


def test_an_owner_whose_saga_is_gone_altogether_stops(opened: Callable[..., PostgresLog], url: str) -> None:
    log = opened()
    begin(log, "s", fresh=True)
    sql(url, "DELETE FROM {s}.record")
    sql(url, "DELETE FROM {s}.saga")
    with pytest.raises(LogCorrupted, match="lost records"):
        log.flush(log.append(record("s", 2)))


def test_a_record_that_nobody_can_have_written_is_damage_and_not_a_crash(opened: Callable[..., PostgresLog], url: str):
    log = opened()
    begin(log, "s")
    begin(log, "t")
    sql(url, "INSERT INTO {s}.record SELECT seq, 2, 1, 'x' FROM {s}.saga WHERE id = 's'")
    tickets = [log.append(record("s", 2)), log.append(record("t", 2))]
    log.flush(tickets[1])
    with pytest.raises(LogCorrupted, match="'s'"):
        log.flush(tickets[0])
    assert [damage.saga_ids for damage in log.unfinished().damage] == [("s",)]
    assert not log.verify().intact


# --- transactions that were in the way of others


@pytest.mark.parametrize("state", ["40001", "40P01"])
def test_what_gave_way_to_another_transaction_is_done_again(
    opened: Callable[..., PostgresLog], url: str, state: str
) -> None:
    log = opened()
    begin(log, "s")
    log.release("s")
    sql(url, "CREATE SEQUENCE {s}.tries")  # which a rollback does not set back
    sql(
        url,
        "CREATE FUNCTION {s}.give_way() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF nextval('{s}.tries') % 2 = 1"
        f" THEN RAISE EXCEPTION 'another goes first' USING ERRCODE = '{state}'; END IF; RETURN NEW; END $$",
    )
    sql(url, "CREATE TRIGGER give_way BEFORE INSERT ON {s}.record FOR EACH ROW EXECUTE FUNCTION {s}.give_way()")
    assert [str(one.type) for one in log.claim("s")] == ["START", "CLAIM"]
    log.flush(log.append(record("s", 3, epoch=2)))
    assert [one.n for one in log.read("s")] == [1, 2, 3] and log.verify().intact
    assert sql(url, "SELECT last_value FROM {s}.tries") == [(4,)]


# --- a server that hangs


def test_what_a_server_was_asked_before_it_hung_is_settled_when_it_goes_on(
    mortal: Any, mortal_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LEAST_SILENCE", 0.3)
    log = PostgresLog(f"{mortal_url}&lease=0.5&connect_timeout=2")
    begin(log, "s")
    ticket = log.append(record("s", 2))
    given_up = threading.Event()
    drop_idle = log._server.drop_idle

    def noted() -> None:
        given_up.set()
        drop_idle()

    monkeypatch.setattr(log._server, "drop_idle", noted)
    with ThreadPoolExecutor(1) as pool:
        with Postgres().frozen(mortal):
            flushed = pool.submit(log.flush, ticket)
            assert given_up.wait(BOUND)
        flushed.result(BOUND)
    log.flush(log.append(record("s", 3)))
    assert [one.n for one in log.read("s")] == [1, 2, 3] and log.verify().records == 3
    log.close()


def test_a_server_is_given_up_for_its_silence_and_not_for_what_takes_its_time(
    opened: Callable[..., PostgresLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LEAST_SILENCE", 0.3)
    server = opened(lease=1)._server
    with server.connect() as one:
        with pytest.raises(psycopg.OperationalError, match="said nothing for 1 s"):
            one.execute("SELECT pg_sleep(3)")
        assert one.closed
    slow = connection.unhurried(lambda one: one.execute("SELECT true FROM pg_sleep(1.3)").fetchall())
    assert server.run(slow) == [(True,)]
    # Each row is longer than what the server keeps back.
    piecemeal = "SELECT pg_sleep(0.1), repeat('x', 20000) FROM generate_series(1, 13)"
    assert len(server.run(lambda one: one.execute(piecemeal).fetchall())) == 13


# --- sessions


def test_nothing_is_kept_in_a_session(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a pooler in transaction mode: every transaction may meet another session."""
    monkeypatch.setattr(pool, "IDLE", 0)
    seen: list[int] = []
    used = connection.Server.using

    from contextlib import contextmanager

    @contextmanager
    def noted(self: Any):
        with used(self) as one:
            yield one
            seen.append(one.info.backend_pid)
            state: Any = one.execute(
                "SELECT (SELECT count(*) FROM pg_prepared_statements) + (SELECT count(*) FROM pg_cursors WHERE name <>"
                " '') + (SELECT count(*) FROM pg_settings WHERE source = 'session') + (SELECT count(*) FROM pg_locks"
                " WHERE locktype = 'advisory' AND pid = pg_backend_pid())"
            ).fetchone()
            assert state == (0,)

    monkeypatch.setattr(connection.Server, "using", noted)
    init(url)
    log = PostgresLog(url)
    for n in range(3):
        begin(log, f"s{n}", fresh=n == 1)
    tickets = [log.append(record(f"s{n}", 2, "COMMITTED")) for n in range(3)]
    for ticket in tickets:
        log.flush(ticket)
    log.release("s0")
    assert len(log.claim("s0")) == 2 and log.verify().records == 6
    log.release("s1")
    assert log.compact(keep_days=0).sagas == 3 and log.unfinished().saga_ids == ()
    log.close()
    assert len(set(seen)) > 10


def test_an_owner_that_meets_a_promoted_replica_which_lacks_its_records_stops() -> None:
    with server_of_its_own() as primary, standby_of(primary) as (replica, control_replica):
        url = fresh_schema(primary.get_uri())
        init(url)
        home = conninfo_to_dict(primary.get_uri())["host"]
        there = f"postgresql://postgres@/postgres?host={replica}&{url.partition('&')[2]}"
        log = PostgresLog(
            f"postgresql://postgres@/postgres?host={home},{replica}&target_session_attrs=read-write"
            f"&{url.partition('&')[2]}"
        )
        begin(log, "behind")
        begin(log, "whole")
        log.flush(log.append(record("behind", 2)))
        ((written,),) = sql(url, "SELECT pg_current_wal_lsn()::text")
        wait_for(lambda: sql(there, "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", written) == [(True,)])
        # From here on the replica hears of nothing, and the primary acknowledges all the same.
        sql(there, "ALTER SYSTEM SET primary_conninfo = ''")
        sql(there, "SELECT pg_reload_conf()")
        wait_for(lambda: sql(there, "SELECT count(*) FROM pg_stat_wal_receiver") == [(0,)])
        log.flush(log.append(record("behind", 3)))
        control(primary, "-m", "immediate", "stop")
        control_replica("promote")
        done: list[str] = []
        with pytest.raises(LogCorrupted, match="lost records"):
            log.flush(log.append(record("behind", 4)))
            done.append("effect")
        assert done == []
        log.flush(log.append(record("whole", 2)))  # what lost nothing goes on
        assert [one.n for one in log.read("behind")] == [1, 2] and log.verify().intact
        log.close()
