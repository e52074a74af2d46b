"""The Redis log when answers are lost, leases run out, servers go and come back, and records are gone."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from agent_saga_core import ActionSemantics, Compensation, saga_scope
from agent_saga_core.errors import Fenced, LogCorrupted, LogUnavailable, SagaBusy
from agent_saga_core.log import lease
from agent_saga_core.log.redis import RedisLog, connection, init, scripts
from agent_saga_core.records import Record

from .proxy import Proxy
from .server import Server, behind, fresh_prefix, server_of_its_own

BOUND = 60.0
APPENDED, TAKEN = scripts.APPEND.sha, scripts.TAKE.sha


def record(saga: str, n: int, kind: str = "INTENT", *, epoch: int = 1, **data: Any) -> Record:
    return Record(saga=saga, n=n, epoch=epoch, type=kind, time=1000.0, data=data)


def begin(log: RedisLog, saga: str, *, fresh: bool = False) -> None:
    log.claim(saga, fresh=fresh)
    log.flush(log.append(record(saga, 1, "START")))


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND
    pause = threading.Event()
    while not what():
        assert time.monotonic() < until, "it did not happen"
        pause.wait(0.01)


def writers(url: str, **fields: str) -> list[str]:
    """Set fields of every writer, as far as the server knows; their names."""
    with behind(url) as at:
        names = at.names("writer:*")
        for name in names:
            for field, value in fields.items():
                at("HSET", name, field, value)
        return names


def expire(url: str) -> None:
    """Every lease has run out, as far as the server knows."""
    writers(url, until="1")


@pytest.fixture
def known(url: str) -> None:
    """The server has seen the scripts: the first time, what it answers is that it has not."""
    log = RedisLog(url)
    begin(log, "known")
    log.release("known")
    log.claim("known")
    log.flush(log.append(record("known", 3, "COMMITTED", epoch=2)))
    log.release("known")
    log.compact(keep_days=0)
    log.close()


# --- acknowledgements that are lost


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("records", [1, 3])
def test_an_append_whose_answer_is_lost_is_stored_once(proxy: Proxy, url: str, records: int, fresh: bool) -> None:
    log = RedisLog(proxy.address(url))
    log.claim("s", fresh=fresh)
    for n in range(1, records):
        log.append(record("s", n, "START" if n == 1 else "INTENT"))
    proxy.lose_the_answer(APPENDED)
    log.flush(log.append(record("s", records, x="last")))
    assert proxy.lost.is_set()
    assert [one.n for one in log.read("s")] == list(range(1, records + 1))
    log.flush(log.append(record("s", records + 1)))  # the saga goes on
    assert log.verify().intact and log.verify().records == records + 1
    log.close()


@pytest.mark.usefixtures("known")
def test_a_batch_whose_answer_is_lost_is_stored_once_and_one_fenced_saga_fails_alone(proxy: Proxy, url: str) -> None:
    log = RedisLog(proxy.address(url))
    other = RedisLog(url)
    ids = [f"s{n}" for n in range(20)]
    for at, saga in enumerate(ids):
        begin(log, saga, fresh=at % 2 == 0)
    log.claim("new", fresh=True)
    with behind(url) as there:
        there("HSET", "saga:s7", "owner", "")
    assert other.claim("s7")[-1].n == 2  # another process took that one
    tickets = [log.append(record(saga, 2, x=saga)) for saga in ids]
    final = log.append(record("new", 1, "START"))
    proxy.lose_the_answer(APPENDED)
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


@pytest.mark.usefixtures("known")
def test_a_claim_whose_answer_is_lost_owns_the_saga_with_one_claim(proxy: Proxy, url: str) -> None:
    first = RedisLog(url)
    begin(first, "s")
    first.close()
    log = RedisLog(proxy.address(url))
    log.claim("warm", fresh=True)
    proxy.lose_the_answer(TAKEN)
    found = log.claim("s")
    assert proxy.lost.is_set()
    assert [(one.n, str(one.type)) for one in found] == [(1, "START"), (2, "CLAIM")]
    log.flush(log.append(record("s", 3, epoch=2)))
    assert log.verify().intact
    log.close()


@pytest.mark.usefixtures("known")
def test_an_absent_id_whose_claim_is_lost_is_owned(proxy: Proxy, url: str) -> None:
    log = RedisLog(proxy.address(url))
    log.claim("warm", fresh=True)
    proxy.lose_the_answer(TAKEN)
    assert log.claim("s") == () and proxy.lost.is_set()
    log.flush(log.append(record("s", 1, "START")))
    log.close()


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("final", [False, True])
def test_what_was_stored_and_then_taken_over_is_no_reason_to_act(proxy: Proxy, url: str, final: bool) -> None:
    log, other = RedisLog(proxy.address(url)), RedisLog(url)
    begin(log, "s")
    ticket = log.append(record("s", 2, "COMMITTED" if final else "INTENT"))
    proxy.lose_the_answer(APPENDED, and_stay_away=True)
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(log.flush, ticket)
        assert proxy.lost.wait(BOUND)
        with behind(url) as at:
            at("HSET", "saga:s", "owner", "")
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


@pytest.mark.usefixtures("known")
def test_no_step_of_a_real_saga_is_done_twice_when_every_third_answer_is_lost(proxy: Proxy, url: str) -> None:
    log = RedisLog(proxy.address(url))
    done: list[int] = []
    for at in range(6):
        with saga_scope(f"s{at}", log=log) as saga:
            for n in range(3):
                proxy.lose_the_answer(APPENDED)
                saga.execute(
                    f"step{n}",
                    lambda n=n: done.append(n),
                    semantics=ActionSemantics.COMPENSABLE,
                    compensate=lambda result: Compensation(fn=lambda: None),
                )
    assert done == [0, 1, 2] * 6
    assert log.verify().intact and log.unfinished().saga_ids == ()
    assert all(str(log.read(f"s{at}")[-1].type) == "COMMITTED" for at in range(6))
    log.close()


@pytest.mark.usefixtures("known")
def test_a_history_whose_adoption_is_not_acknowledged_is_there_once(proxy: Proxy, url: str) -> None:
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


def test_a_server_that_forgot_the_scripts_is_told_them_again(opened: Callable[..., RedisLog], url: str) -> None:
    log = opened()
    begin(log, "s")
    with behind(url) as at:
        at.client.script_flush()
    log.flush(log.append(record("s", 2)))
    log.release("s")
    assert len(log.claim("s")) == 3


# --- servers that go, and come back


def test_a_server_that_comes_back_in_time_is_waited_for(proxy: Proxy, url: str) -> None:
    log = RedisLog(proxy.address(url))
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
    log = RedisLog(proxy.address(url) + "&timeout=0.2")
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
    other = RedisLog(url)
    wait_for(lambda: not other.is_live("s"))
    assert [one.n for one in other.claim("s")] == [1, 2]
    other.close()
    log.close()


def test_a_saga_given_up_while_the_server_was_away_can_be_claimed_here_again(proxy: Proxy, url: str) -> None:
    log = RedisLog(proxy.address(url))
    begin(log, "s")
    proxy.go_away()
    log.release("s")
    proxy.come_back()
    assert log.claim("s")[-1].n == 2
    log.flush(log.append(record("s", 3, epoch=2)))
    wait_for(lambda: log.is_live("s"))
    assert not log._heart._chores
    other = RedisLog(url)
    with pytest.raises(SagaBusy):
        other.claim("s")
    other.close()
    log.close()


def test_what_was_to_be_given_up_later_is_not_taken_from_who_claimed_it_since(proxy: Proxy, url: str) -> None:
    log = RedisLog(proxy.address(url))
    log.claim("s")  # nothing is begun, so the next claim has the same epoch
    heart: Any = log._heart
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


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_server_that_dies_in_mid_work_loses_and_repeats_nothing(mortal: Server, mortal_url: str, how: str) -> None:
    log = RedisLog(mortal_url)
    ids = [f"s{n}" for n in range(8)]
    under_way = threading.Semaphore(0)
    restarted = threading.Event()
    acknowledged = dict.fromkeys(ids, 0)

    def work(saga: str) -> int:
        log.claim(saga, fresh=True)
        n = 0
        while n < 20 or not restarted.is_set():
            n += 1
            log.flush(log.append(record(saga, n, "START" if n == 1 else "INTENT", x=n)))
            acknowledged[saga] = n
            under_way.release()
        log.flush(log.append(record(saga, n + 1, "COMMITTED")))
        log.release(saga)
        return n + 1

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(work, saga) for saga in ids]
        try:
            for _ in range(3):
                for _ in range(40):
                    assert under_way.acquire(timeout=BOUND)
                if how == "kill":
                    mortal.kill()
                    before = acknowledged.copy()
                    mortal.start()
                    reader = RedisLog(mortal_url)
                    assert all(len(reader.read(saga)) >= n for saga, n in before.items())
                    reader.close()
                else:
                    mortal.stop()
                    mortal.start()
        finally:
            restarted.set()
        counts = [future.result(BOUND) for future in futures]
    for saga, most in zip(ids, counts, strict=True):
        assert [one.n for one in log.read(saga)] == list(range(1, most + 1))
    assert log.verify().intact and log.unfinished().saga_ids == ()
    log.close()


def test_a_log_opened_while_the_server_is_down_says_so_and_works_when_it_is_up(mortal: Server, mortal_url: str) -> None:
    mortal.kill()
    try:
        with pytest.raises(LogUnavailable) as caught:
            RedisLog(mortal_url)
        assert "\n" not in str(caught.value)
    finally:
        mortal.start()
    log = RedisLog(mortal_url)
    begin(log, "s")
    log.close()


def test_a_server_that_hangs_is_waited_for_and_not_for_ever(
    mortal: Server, mortal_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LEAST_WAIT", 0.3)
    log = RedisLog(mortal_url + "&timeout=0.3")
    begin(log, "s")
    mortal.signal(signal.SIGSTOP)
    try:
        with pytest.raises(LogUnavailable, match="cannot be used"):
            log.flush(log.append(record("s", 2)))
    finally:
        mortal.signal(signal.SIGCONT)
    log.close()
    other = RedisLog(mortal_url)
    wait_for(lambda: not other.is_live("s"))
    assert [one.n for one in other.claim("s")][:1] == [1]  # whether the second one arrived, nobody knows
    assert other.verify().intact
    other.close()


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


# --- leases


def test_no_effect_starts_after_the_lease_ran_out_and_somebody_took_over(opened: Callable[..., RedisLog], url: str):
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
    for saga in ("s", "t"):
        with pytest.raises(Fenced):
            log.release(saga)
    assert [one.n for one in log.claim("t")] == [1, 2]  # as another writer
    with pytest.raises(SagaBusy):
        log.claim("s")


def test_a_tripped_guard_is_asked_about_and_goes_on_if_nobody_took_over(opened: Callable[..., RedisLog]) -> None:
    log = opened()
    begin(log, "s")
    writer: Any = log._heart._current
    writer.until = 0.0
    log.flush(log.append(record("s", 2)))
    assert writer.good()
    writer.until = 0.0

    async def awaits() -> None:
        async with asyncio.timeout(BOUND):
            await log.aflush(log.append(record("s", 3)))

    asyncio.run(awaits())
    assert writer.good()


def test_a_guard_that_cannot_be_asked_about_stops_the_effect(opened: Callable[..., RedisLog]) -> None:
    log = opened(timeout=0.2)
    begin(log, "s")
    writer: Any = log._heart._current
    log._heart.stop()
    log._heart._thread.join(BOUND)
    writer.until = 0.0
    done: list[str] = []
    with pytest.raises(Fenced, match="ran out"):
        log.flush(log.append(record("s", 2)))
        done.append("effect")
    assert done == []
    log.flush(log.append(record("s", 3, "COMMITTED")))  # nothing follows that: it needs no lease


def test_a_lease_that_runs_is_respected_and_one_that_ran_out_is_not(opened: Callable[..., RedisLog], url: str):
    log, other = opened(lease=0.5), opened()
    begin(log, "s")
    for _ in range(3):
        with pytest.raises(SagaBusy):
            other.claim("s")
    log._heart.stop()  # as if the process hung
    wait_for(lambda: not other.is_live("s"))
    assert other.claim("s")[-1].type == "CLAIM"
    with behind(url) as at:
        assert sorted(at("HGET", name, "fenced") for name in at.names("writer:*")) == [b"0", b"1"]


def test_a_lease_that_is_renewed_in_the_moment_of_the_claim_holds(
    opened: Callable[..., RedisLog], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = opened(), opened()
    begin(log, "s")
    expire(url)
    change = other._ownership._change

    def late(*given: Any, **more: Any) -> Any:
        assert log._heart.still(log._heart._current)
        return change(*given, **more)

    monkeypatch.setattr(other._ownership, "_change", late)
    with pytest.raises(SagaBusy):
        other.claim("s")
    log.flush(log.append(record("s", 2)))
    assert [str(one.type) for one in other.read("s")] == ["START", "INTENT"]
    with behind(url) as at:
        assert {at("HGET", name, "fenced") for name in at.names("writer:*")} == {b"0"}


def test_a_record_that_comes_in_the_moment_of_the_claim_is_before_it(
    opened: Callable[..., RedisLog], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = opened(), opened()
    begin(log, "s")
    expire(url)
    change = other._ownership._change
    late = [log.append(record("s", 2))]

    def after_it(*given: Any, **more: Any) -> Any:
        if late:
            log._flush(late.pop())
        return change(*given, **more)

    monkeypatch.setattr(other._ownership, "_change", after_it)
    assert [str(one.type) for one in other.claim("s")] == ["START", "INTENT", "CLAIM"]
    with pytest.raises(Fenced):
        log.flush(log.append(record("s", 3)))
    assert other.verify().records == 3


def test_the_owner_counts_its_lease_shorter_than_the_server_does(opened: Callable[..., RedisLog], url: str) -> None:
    log = opened(lease=20)
    begin(log, "s")
    writer: Any = log._heart._current
    for renew in (lambda: True, lambda: log._heart.still(writer), lambda: log._heart.still(writer)):
        assert renew()
        mine = writer.until - lease.now()
        with behind(url) as at:
            (name,) = at.names("writer:*")
            seconds, micros = at.client.time()
            servers = float(at("HGET", name, "until")) / 1000 - seconds - micros / 1e6
        assert mine <= 18.0  # a tenth is left unused
        assert lease.now() + servers > writer.until + 1.0


def test_the_lease_is_renewed_beside_an_event_loop_that_is_blocked(opened: Callable[..., RedisLog]) -> None:
    log, other = opened(lease=0.5), opened()
    begin(log, "s")
    writer: Any = log._heart._current

    async def block() -> None:
        until = [writer.until]
        wait_for(lambda: (writer.until != until[-1] and until.append(writer.until)) or len(until) > 4)

    asyncio.run(block())
    assert other.is_live("s") and writer.good()


def test_threads_that_claim_at_once_leave_one_that_keeps_their_leases(
    opened: Callable[..., RedisLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(lease=0.5)
    log.claim("warm", fresh=True)
    heart: Any = log._heart
    heart._current = None
    heart.stop()
    heart._thread.join(BOUND)
    heart._stopped, heart._thread = False, None
    before = set(threading.enumerate())
    together = threading.Barrier(6)

    class AtOnce(threading.Thread):
        def start(self) -> None:
            if self.name == "agent-saga lease":
                together.wait(BOUND)
            super().start()

    register = heart.register

    def at_once(writer: Any) -> None:
        register(writer)
        together.wait(BOUND)

    monkeypatch.setattr(heart, "register", at_once)
    monkeypatch.setattr(threading, "Thread", AtOnce)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(log.claim, [f"s{n}" for n in range(6)], timeout=BOUND))
    beating = [one for one in threading.enumerate() if one not in before and one.name == "agent-saga lease"]
    for _ in range(3):
        until = {writer: writer.until for writer in heart._writers.values()}
        wait_for(lambda until=until: all(writer.until != was for writer, was in until.items()))
    wait_for(lambda: sum(one.is_alive() for one in beating) <= 1)
    assert heart._thread.is_alive() and len(heart._writers) == 7
    for n in range(6):
        log.flush(log.append(record(f"s{n}", 1, "START")))


def test_a_process_that_was_fenced_claims_as_a_new_writer(opened: Callable[..., RedisLog], url: str) -> None:
    log, other = opened(), opened()
    begin(log, "s")
    log.release("s")
    begin(other, "t")
    writers(url, until="1", fenced="1")
    before = log._heart._current
    assert log.claim("s")[-1].n == 2 and log._heart._current is not before
    log.flush(log.append(record("s", 3, epoch=2)))


def test_the_same_epoch_number_of_another_writer_is_not_the_same_token(
    opened: Callable[..., RedisLog], url: str
) -> None:
    log, other = opened(), opened()
    assert log.claim("s") == () and log.claim("t") == ()
    expire(url)
    assert other.claim("s") == ()  # nothing was begun: the same epoch again, under another nonce
    writers(url, fenced="0")  # nobody heard of that
    tickets = [log.append(record(saga, 1, "START", x="late")) for saga in ("s", "t")]
    with pytest.raises(Fenced):
        log.flush(tickets[0])
    assert len(log.read("t")) == 1
    other.flush(other.append(record("s", 1, "START", x="new")))
    assert [one.data for one in log.read("s")] == [{"x": "new"}]


def test_another_epoch_of_the_same_writer_is_not_the_same_token(opened: Callable[..., RedisLog], url: str) -> None:
    log = opened()
    begin(log, "s")
    begin(log, "t")
    with behind(url) as at:
        at("HSET", "saga:s", "epoch", 7)
    tickets = [log.append(record(saga, 2)) for saga in ("s", "t")]
    log.flush(tickets[1])
    with pytest.raises(Fenced):
        log.flush(tickets[0])


def test_a_fenced_process_cannot_begin_a_saga_either(opened: Callable[..., RedisLog], url: str) -> None:
    log = opened()
    log.claim("s", fresh=True)
    writers(url, fenced="1")
    with pytest.raises(Fenced):
        log.flush(log.append(record("s", 1, "START")))
    assert log.saga_ids() == ()


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
    expire(url)
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


def test_what_another_server_said_in_between_is_worth_nothing() -> None:
    """A connection to a server whose place another has taken is not believed, though it still answers."""
    with server_of_its_own() as old, replica_of(old) as (new, line):
        url = fresh_prefix(old.uri)
        init(url)
        proxy = Proxy(old.uri)
        log = RedisLog(proxy.address(url))
        begin(log, "s")
        replicate(old)
        line.go_away()
        with new.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        proxy.server_port = new.port
        log._server.connect().close()  # some thread needed one more, while another is idle that leads to the old one
        log.flush(log.append(record("s", 2)))
        with new.client() as client:
            assert client.llen(log._address.key("records", "s")) == 2
        log.close()
        proxy.close()
