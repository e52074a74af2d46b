"""The PostgreSQL log when answers are lost, leases run out, servers go and come back, and records are gone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from agent_saga_core import ActionSemantics, saga_scope
from agent_saga_core.errors import Fenced, LogCorrupted, LogUnavailable, SagaBusy
from agent_saga_core.log import lease
from agent_saga_core.log.postgres import PostgresLog, connection, init
from agent_saga_core.records import Record

from .proxy import Proxy
from .server import control, expire, fresh_schema, server_of_its_own, sql, standby_of

BOUND = 60.0


def record(saga: str, n: int, kind: str = "INTENT", *, epoch: int = 1, **data: Any) -> Record:
    return Record(saga=saga, n=n, epoch=epoch, type=kind, time=1000.0, data=data)


def begin(log: PostgresLog, saga: str, *, fresh: bool = False) -> None:
    log.claim(saga, fresh=fresh)
    log.flush(log.append(record(saga, 1, "START")))


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND
    pause = threading.Event()
    while not what():
        assert time.monotonic() < until, "it did not happen"
        pause.wait(0.01)


# --- acknowledgements that are lost


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("records", [1, 3])
def test_an_append_whose_answer_is_lost_is_stored_once(proxy: Proxy, url: str, records: int, fresh: bool) -> None:
    log = PostgresLog(proxy.address(url))
    log.claim("s", fresh=fresh)
    for n in range(1, records):
        log.append(record("s", n, "START" if n == 1 else "INTENT"))
    proxy.lose_the_answer(b".record(")
    log.flush(log.append(record("s", records, x="last")))
    assert proxy.lost.is_set()
    assert [one.n for one in log.read("s")] == list(range(1, records + 1))
    log.flush(log.append(record("s", records + 1)))  # the saga goes on
    assert log.verify().intact and log.verify().records == records + 1
    log.close()


def test_a_batch_whose_answer_is_lost_is_stored_once_and_one_fenced_saga_fails_alone(proxy: Proxy, url: str) -> None:
    log = PostgresLog(proxy.address(url))
    other = PostgresLog(url)
    ids = [f"s{n}" for n in range(20)]
    for at, saga in enumerate(ids):
        begin(log, saga, fresh=at % 2 == 0)
    log.claim("new", fresh=True)
    sql(url, "UPDATE {s}.saga SET owner = NULL WHERE id = 's7'")
    assert other.claim("s7")[-1].n == 2  # another process took that one
    tickets = [log.append(record(saga, 2, x=saga)) for saga in ids]
    final = log.append(record("new", 1, "START"))
    proxy.lose_the_answer(b".record(")
    log.flush(final)
    assert proxy.lost.is_set()
    for saga, ticket in zip(ids, tickets, strict=True):
        if saga == "s7":
            with pytest.raises(Fenced, match="s7"):
                log.flush(ticket)
        else:
            log.flush(ticket)
            assert [one.data.get("x") for one in log.read(saga)] == [None, saga]
    with pytest.raises(Fenced):  # what follows a refused record is refused too
        log.flush(log.append(record("s7", 3)))
    assert [str(one.type) for one in other.read("s7")] == ["START", "CLAIM"]
    assert other.verify().intact
    log.close()
    other.close()


def test_a_claim_whose_answer_is_lost_owns_the_saga_all_the_same(proxy: Proxy, url: str) -> None:
    first = PostgresLog(url)
    begin(first, "s")
    first.close()
    log = PostgresLog(proxy.address(url))
    log.claim("warm", fresh=True)
    proxy.lose_the_answer(b".record(")
    found = log.claim("s")
    assert proxy.lost.is_set()
    assert [one.n for one in found] == list(range(1, len(found) + 1)) and found[-1].type == "CLAIM"
    log.flush(log.append(record("s", len(found) + 1, epoch=len(found))))
    assert log.verify().intact
    log.close()


def test_an_absent_id_whose_claim_is_lost_is_owned(proxy: Proxy, url: str) -> None:
    log = PostgresLog(proxy.address(url))
    log.claim("warm", fresh=True)
    proxy.lose_the_answer(b"ON CONFLICT")
    assert log.claim("s") == () and proxy.lost.is_set()
    log.flush(log.append(record("s", 1, "START")))
    log.close()


def test_the_final_record_whose_answer_is_lost_is_success_even_if_the_saga_was_claimed_since(
    proxy: Proxy, url: str
) -> None:
    log = PostgresLog(proxy.address(url))
    begin(log, "s")
    proxy.lose_the_answer(b".record(")
    log.flush(log.append(record("s", 2, "COMMITTED")))
    assert proxy.lost.is_set() and not log.unfinished().saga_ids
    log.release("s")
    log.close()


@pytest.mark.parametrize("final", [False, True])
def test_what_was_stored_and_then_taken_over_is_no_reason_to_act(proxy: Proxy, url: str, final: bool) -> None:
    log, other = PostgresLog(proxy.address(url)), PostgresLog(url)
    begin(log, "s")
    ticket = log.append(record("s", 2, "COMMITTED" if final else "INTENT"))
    proxy.lose_the_answer(b".record(", and_stay_away=True)
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(log.flush, ticket)
        assert proxy.lost.wait(BOUND)
        sql(url, "UPDATE {s}.saga SET owner = NULL")
        found = other.claim("s")
        proxy.come_back()
        if final:
            flushed.result(BOUND)  # it is so, whoever looks at it now
        else:
            with pytest.raises(Fenced):
                flushed.result(BOUND)
    assert [str(one.type) for one in found] == (["START", "COMMITTED"] if final else ["START", "INTENT", "CLAIM"])
    assert other.read("s") == found
    log.close()
    other.close()


def test_no_step_of_a_real_saga_is_done_twice_when_every_third_answer_is_lost(proxy: Proxy, url: str) -> None:
    log = PostgresLog(proxy.address(url))
    done: list[int] = []
    for at in range(6):
        with saga_scope(f"s{at}", log=log) as saga:
            for n in range(3):
                proxy.lose_the_answer(b".record(")
                saga.execute(
                    f"step{n}", lambda n=n: done.append(n), semantics=ActionSemantics.COMPENSABLE, compensate=_nothing
                )
    assert done == [0, 1, 2] * 6
    assert log.verify().intact and log.unfinished().saga_ids == ()
    assert all(str(log.read(f"s{at}")[-1].type) == "COMMITTED" for at in range(6))
    log.close()


def _nothing(result: object) -> Any:
    from agent_saga_core import Compensation

    return Compensation(fn=lambda: None)


# --- servers that go, and come back


def test_a_server_that_comes_back_in_time_is_waited_for(proxy: Proxy, url: str) -> None:
    log = PostgresLog(proxy.address(url))
    begin(log, "s")
    proxy.go_away()
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(log.flush, log.append(record("s", 2)))
        threading.Timer(0.2, proxy.come_back).start()
        flushed.result(BOUND)
    log.flush(log.append(record("s", 3)))
    assert [one.n for one in log.read("s")] == [1, 2, 3]
    log.close()


def test_a_server_that_stays_away_is_a_clear_error_and_the_saga_is_free_when_it_is_back(proxy: Proxy, url: str) -> None:
    log = PostgresLog(proxy.address(url) + "&timeout=0.2")
    begin(log, "s")
    proxy.go_away()
    ticket = log.append(record("s", 2))
    with pytest.raises(LogUnavailable, match="cannot be used") as caught:
        log.flush(ticket)
    assert "\n" not in str(caught.value) and log.poisoned is not None
    with pytest.raises(LogUnavailable):
        log.append(record("s", 3))
    with pytest.raises(LogUnavailable):
        log.unfinished()
    log.release("s")  # told to the server when it is back
    proxy.come_back()
    other = PostgresLog(url)
    wait_for(lambda: not other.is_live("s"))
    assert [one.n for one in other.claim("s")] == [1, 2]
    other.close()
    log.close()


def test_a_saga_given_up_while_the_server_was_away_can_be_claimed_here_again(proxy: Proxy, url: str) -> None:
    log = PostgresLog(proxy.address(url))
    begin(log, "s")
    proxy.go_away()
    log.release("s")
    proxy.come_back()
    assert log.claim("s")[-1].n == 2
    log.flush(log.append(record("s", 3, epoch=2)))
    wait_for(lambda: log.is_live("s"))
    assert not log._heart._chores
    other = PostgresLog(url)
    with pytest.raises(SagaBusy):
        other.claim("s")
    other.close()
    log.close()


def test_what_was_to_be_given_up_later_is_not_taken_from_who_claimed_it_since(proxy: Proxy, url: str) -> None:
    log = PostgresLog(proxy.address(url))
    log.claim("s")  # nothing is begun, so the next claim has the same epoch
    heart = log._heart
    heart.stop()
    heart._thread.join(BOUND)
    proxy.go_away()
    log.release("s")
    assert heart._chores
    proxy.come_back()
    assert log.claim("s") == ()
    assert heart._beat()
    log.flush(log.append(record("s", 1, "START")))
    heart._disconnect()
    log.close()


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_that_is_restarted_in_mid_work_loses_and_repeats_nothing(
    mortal: Any, mortal_url: str, mode: str
) -> None:
    log = PostgresLog(mortal_url)
    ids = [f"s{n}" for n in range(8)]
    under_way = threading.Semaphore(0)
    restarted = threading.Event()

    def work(saga: str) -> int:
        log.claim(saga, fresh=True)
        n = 0
        while n < 20 or not restarted.is_set():
            n += 1
            log.flush(log.append(record(saga, n, "START" if n == 1 else "INTENT", x=n)))
            under_way.release()
        log.flush(log.append(record(saga, n + 1, "COMMITTED")))
        log.release(saga)
        return n + 1

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(work, saga) for saga in ids]
        for _ in range(40):
            assert under_way.acquire(timeout=BOUND)
        try:
            control(mortal, "restart", "-m", mode)
        finally:
            restarted.set()
        counts = [future.result(BOUND) for future in futures]
    for saga, most in zip(ids, counts, strict=True):
        assert [one.n for one in log.read(saga)] == list(range(1, most + 1))
    assert log.verify().intact and log.unfinished().saga_ids == ()
    log.close()


def test_a_log_opened_while_the_server_is_down_says_so_and_works_when_it_is_up(mortal: Any, mortal_url: str) -> None:
    control(mortal, "stop", "-m", "fast")
    try:
        with pytest.raises(LogUnavailable) as caught:
            PostgresLog(mortal_url)
        assert "\n" not in str(caught.value)
    finally:
        place = conninfo_to_dict(mortal.get_uri())["host"]
        control(mortal, "-o", '-h ""', "-o", f"-k {place}", "-l", str(mortal.log), "start")
    log = PostgresLog(mortal_url)
    begin(log, "s")
    log.close()


# --- leases


def test_no_effect_starts_after_the_lease_ran_out_and_somebody_took_over(opened: Callable[..., PostgresLog], url: str):
    log, other = opened(), opened()
    begin(log, "s")
    begin(log, "t")
    expire(url)
    other.claim("s")
    log._heart._current.until = 0.0  # the guard has tripped; the thread has not asked yet
    with pytest.raises(Fenced):
        log.flush(log.append(record("t", 2)))  # nobody took that one, but whose it is can be known no more
    with pytest.raises(Fenced):
        log.flush(log.append(record("s", 2)))
    assert [str(one.type) for one in other.read("s")] == ["START", "CLAIM"]
    with pytest.raises(Fenced):
        log.release("s")
    log.release("t")
    assert [one.n for one in log.claim("t")] == [1, 2, 3]  # as another writer, and with what the first one wrote
    with pytest.raises(SagaBusy):
        log.claim("s")


def test_a_tripped_guard_is_asked_about_and_goes_on_if_nobody_took_over(opened: Callable[..., PostgresLog]) -> None:
    log = opened()
    begin(log, "s")
    writer = log._heart._current
    writer.until = 0.0
    log.flush(log.append(record("s", 2)))
    assert writer.good()
    writer.until = 0.0

    async def awaits() -> None:
        await log.aflush(log.append(record("s", 3)))

    asyncio.run(awaits())
    assert writer.good()


def test_a_guard_that_cannot_be_asked_about_stops_the_effect(opened: Callable[..., PostgresLog]) -> None:
    log = opened(timeout=0.2)
    begin(log, "s")
    writer = log._heart._current
    log._heart.stop()
    log._heart._thread.join(BOUND)
    writer.until = 0.0
    done: list[str] = []
    with pytest.raises(Fenced, match="ran out"):
        log.flush(log.append(record("s", 2)))
        done.append("effect")
    assert done == []
    log.flush(log.append(record("s", 3, "COMMITTED")))  # nothing follows that: it needs no lease


def test_a_lease_that_runs_is_respected_and_one_that_ran_out_is_not(opened: Callable[..., PostgresLog], url: str):
    log, other = opened(lease=0.5), opened()
    begin(log, "s")
    for _ in range(3):
        with pytest.raises(SagaBusy):
            other.claim("s")
    log._heart.stop()  # as if the process hung
    wait_for(lambda: not other.is_live("s"))
    assert other.claim("s")[-1].type == "CLAIM"
    assert sql(url, "SELECT count(*) FROM {s}.writer WHERE fenced") == [(1,)]


def test_a_lease_that_is_renewed_in_the_moment_of_the_claim_holds(
    opened: Callable[..., PostgresLog], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = opened(), opened()
    begin(log, "s")
    expire(url)
    change = other._ownership._change

    def late(*given: Any, **more: Any) -> bool:
        assert log._heart.still(log._heart._current)
        return change(*given, **more)

    monkeypatch.setattr(other._ownership, "_change", late)
    with pytest.raises(SagaBusy):
        other.claim("s")
    log.flush(log.append(record("s", 2)))
    assert [str(one.type) for one in other.read("s")] == ["START", "INTENT"]
    assert sql(url, "SELECT count(*) FROM {s}.writer WHERE fenced") == [(0,)]


def test_a_record_that_comes_in_the_moment_of_the_claim_is_before_it(
    opened: Callable[..., PostgresLog], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = opened(), opened()
    begin(log, "s")
    expire(url)
    change = other._ownership._change
    late = [log.append(record("s", 2))]

    def after_it(*given: Any, **more: Any) -> bool:
        if late:
            log._flush(late.pop())
        return change(*given, **more)

    monkeypatch.setattr(other._ownership, "_change", after_it)
    assert [str(one.type) for one in other.claim("s")] == ["START", "INTENT", "CLAIM"]
    with pytest.raises(Fenced):
        log.flush(log.append(record("s", 3)))
    assert other.verify().records == 3


def test_the_owner_counts_its_lease_shorter_than_the_server_does(opened: Callable[..., PostgresLog], url: str) -> None:
    log = opened(lease=20)
    begin(log, "s")
    writer = log._heart._current
    for renew in (lambda: True, lambda: log._heart.still(writer), lambda: log._heart.still(writer)):
        assert renew()
        mine = writer.until - lease.now()
        ((servers,),) = sql(url, "SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 FROM {s}.writer")
        assert mine <= 18.0  # a tenth is left unused
        assert lease.now() + servers > writer.until + 1.0


def test_the_lease_is_renewed_beside_an_event_loop_that_is_blocked(opened: Callable[..., PostgresLog]) -> None:
    log, other = opened(lease=0.5), opened()
    begin(log, "s")
    writer = log._heart._current

    async def block() -> None:
        until = [writer.until]
        wait_for(lambda: until[-1] == writer.until or until.append(writer.until) or len(until) > 4)
        wait_for(lambda: (writer.until != until[-1] and until.append(writer.until)) or len(until) > 4)

    asyncio.run(block())
    assert other.is_live("s") and writer.good()


def test_a_process_that_was_fenced_claims_as_a_new_writer(opened: Callable[..., PostgresLog], url: str) -> None:
    log, other = opened(), opened()
    begin(log, "s")
    log.release("s")
    begin(other, "t")
    expire(url)
    sql(url, "UPDATE {s}.writer SET fenced = true")
    before = log._heart._current
    assert log.claim("s")[-1].n == 2 and log._heart._current is not before
    log.flush(log.append(record("s", 3, epoch=2)))


@pytest.mark.parametrize("alone", [True, False])
def test_the_same_epoch_number_of_another_writer_is_not_the_same_token(
    opened: Callable[..., PostgresLog], url: str, alone: bool
) -> None:
    log, other = opened(), opened()
    assert log.claim("s") == () and log.claim("t") == ()
    expire(url)
    assert other.claim("s") == ()  # nothing was begun: the same epoch again, under another nonce
    tickets = [log.append(record(saga, 1, "START", x="late")) for saga in ("s", "t")[: 1 if alone else 2]]
    with pytest.raises(Fenced):
        log.flush(tickets[0])
    assert len(log.read("t")) == len(tickets) - 1
    other.flush(other.append(record("s", 1, "START", x="new")))
    assert [one.data for one in log.read("s")] == [{"x": "new"}]


def test_a_fenced_process_cannot_begin_a_saga_either(opened: Callable[..., PostgresLog], url: str) -> None:
    log = opened()
    log.claim("s", fresh=True)
    sql(url, "UPDATE {s}.writer SET fenced = true")
    with pytest.raises(Fenced):
        log.flush(log.append(record("s", 1, "START")))
    assert log.saga_ids() == ()


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


# --- sessions


def test_nothing_is_kept_in_a_session(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a pooler in transaction mode: every transaction may meet another session."""
    monkeypatch.setattr(connection, "_IDLE", 0)
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
