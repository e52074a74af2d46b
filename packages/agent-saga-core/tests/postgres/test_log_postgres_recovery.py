"""What recovery asks of the PostgreSQL log: what is live in the one list, and several claims at the price of one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from agent_saga_core import recover
from agent_saga_core.errors import Fenced, LogCorrupted, LogUnavailable, SagaBusy
from agent_saga_core.log.base import BatchClaims
from agent_saga_core.log.postgres import PostgresLog
from agent_saga_core.records import Record
from agent_saga_core.recovery import recoverer
from agent_saga_core.recovery.claims import Claims

from ..servers.store import wait_for
from .proxy import Proxy
from .server import expire, sql

Open = Callable[..., PostgresLog]
BOUND = 60.0


def record(saga: str, n: int, kind: str = "INTENT", *, epoch: int = 1, **data: Any) -> Record:
    return Record(saga=saga, n=n, epoch=epoch, type=kind, time=1000.0, data=data)


def begin(log: PostgresLog, *sagas: str) -> None:
    for saga in sagas:
        log.claim(saga)
        log.append(record(saga, 1, "START"))
        log.flush(log.append(record(saga, 2)))


def dead(url: str, *sagas: str) -> None:
    """Sagas whose process was killed, and whose lease is over: no test waits for one to run out."""
    script = """
        import os, sys
        from agent_saga_core.log.postgres import PostgresLog
        from agent_saga_core.records import Record
        log = PostgresLog(sys.argv[1])
        for saga in sys.argv[2:]:
            log.claim(saga)
            for n, kind in ((1, "START"), (2, "INTENT")):
                log.flush(log.append(Record(saga=saga, n=n, epoch=1, type=kind, time=1000.0, data={})))
        os.kill(os.getpid(), 9)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script), url, *sagas], timeout=BOUND, check=False)
    assert ended.returncode == -9
    sql(url, "UPDATE {s}.writer SET lease_until = now() - interval '1 second' WHERE nonce IN"
             " (SELECT owner FROM {s}.saga WHERE id = ANY(%s))", list(sagas))  # fmt: skip


def types(log: PostgresLog, saga: str) -> list[str]:
    return [str(one.type) for one in log.read(saga)]


def test_the_list_of_what_is_unfinished_says_what_is_live(url: str, opened: Open) -> None:
    owner, other = opened(), opened()
    dead(url, "dead")
    begin(owner, "lives", "given back", "ended")
    owner.release("given back")
    owner.flush(owner.append(record("ended", 3, "COMMITTED")))
    found = other.unfinished()
    assert found.saga_ids == ("dead", "lives", "given back") and found.live == {"lives"} and found.damage == ()
    assert owner.unfinished().live == {"lives"}
    sql(url, "UPDATE {s}.writer SET fenced = true")
    assert other.unfinished().live == frozenset()


def test_what_is_free_is_claimed_and_the_rest_left_out(url: str, opened: Open) -> None:
    dead(url, "d1", "d2", "d3")
    owner, log = opened(), opened()
    begin(owner, "lives", "free", "over")
    owner.release("free")
    owner.flush(owner.append(record("over", 3, "COMMITTED")))
    owner.release("over")
    begin(log, "mine already")
    assert isinstance(log, BatchClaims)
    found = log.claim_some(["d2", "lives", "d1", "absent", "free", "over", "mine already", "d1"])
    assert set(found) == {"d1", "d2", "free", "over"}
    for saga in ("d1", "d2", "free"):
        records = found[saga]
        assert not isinstance(records, LogCorrupted) and log.owned(saga)
        assert [(one.n, one.epoch, str(one.type)) for one in records] == [
            (1, 1, "START"), (2, 1, "INTENT"), (3, 3, "CLAIM"),
        ]  # fmt: skip
        assert log.read(saga) == records
        log.flush(log.append(record(saga, 4, epoch=3)))
    assert log.owned("over") and len(found["over"]) == 3  # over: owned, and no CLAIM
    log.release("over")
    for saga in ("lives", "absent", "d3"):
        assert not log.owned(saga)
    assert types(log, "lives") == ["START", "INTENT"] and types(log, "d3") == ["START", "INTENT"]
    owner.flush(owner.append(record("lives", 3)))  # nothing of it was touched
    with pytest.raises(SagaBusy):
        owner.claim("d1")
    for saga in ("d1", "d2", "free"):
        log.release(saga)
    assert [str(one.type) for one in owner.claim("d1")][-1] == "CLAIM"
    assert sql(url, "SELECT count(*) FROM {s}.saga WHERE id = 'absent'") == [(0,)]
    assert log.verify().intact


def test_two_that_reach_for_the_same_sagas_share_them_and_never_one_twice(url: str, opened: Open) -> None:
    """Four at once on the sagas of several dead writers, in batches and one by one: no deadlock, nothing twice."""
    sagas = [f"s{n}" for n in range(60)]
    for writer in range(3):
        dead(url, *sagas[writer::3])
    logs = [opened() for _ in range(4)]
    got: list[list[str]] = [[] for _ in logs]
    start = threading.Barrier(len(logs))

    def take(number: int) -> None:
        order = sagas[number * 15 :] + sagas[: number * 15]
        if number % 2:
            order.reverse()
        start.wait(BOUND)
        for at in range(0, len(order), 8):
            if number:
                got[number] += logs[number].claim_some(order[at : at + 8])
                continue
            for saga in order[at : at + 8]:  # one of them claims one by one: neither way waits for the other
                with suppress(SagaBusy):
                    logs[number].claim(saga)
                    got[number].append(saga)

    threads = [threading.Thread(target=take, args=(number,), daemon=True) for number in range(len(logs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
        assert not thread.is_alive()
    left = logs[0].claim_some(sagas)  # what one left to another that left it
    assert sorted([*left, *(saga for each in got for saga in each)]) == sorted(sagas)
    for saga in sagas:
        assert types(logs[0], saga) == ["START", "INTENT", "CLAIM"]


def test_a_saga_that_somebody_is_just_changing_is_left_out_and_nobody_waits(url: str, opened: Open) -> None:
    import psycopg

    from agent_saga_core.log.postgres.address import address_of

    dead(url, "locked", "free")
    log = opened()
    address = address_of(url)
    with psycopg.connect("", **address.parameters) as other:
        other.execute(f"SELECT FROM {address.schema}.saga WHERE id = 'locked' FOR UPDATE")
        assert set(log.claim_some(["locked", "free"])) == {"free"}
        other.rollback()
    assert set(log.claim_some(["locked", "free"])) == {"locked"}


def test_damage_is_the_answer_of_its_saga_alone(url: str, opened: Open) -> None:
    dead(url, "broken", "gap", "sound", "odd")
    sql(url, "UPDATE {s}.record SET body = 'x' WHERE n = 2 AND saga = (SELECT seq FROM {s}.saga WHERE id = 'broken')")
    sql(url, "DELETE FROM {s}.record WHERE n = 1 AND saga = (SELECT seq FROM {s}.saga WHERE id = 'gap')")
    log = opened()
    found = log.claim_some(["broken", "gap", "sound"])
    assert isinstance(found["broken"], LogCorrupted) and isinstance(found["gap"], LogCorrupted)
    assert log.owned("sound") and not log.owned("broken") and not log.owned("gap")


def test_a_claim_whose_answer_was_lost_is_given_back(url: str, opened: Open, proxy: Proxy) -> None:
    """Committed, and the answer lost: asked again it is no more to be had. It must not stay owned for nobody."""
    dead(url, "s", "t")
    log = PostgresLog(proxy.address(url))
    try:
        begin(log, "warm")
        proxy.lose_the_answer(b"SKIP LOCKED")
        assert log.claim_some(["s", "t"]) == {}
        assert proxy.lost.is_set()
        assert not log.owned("s") and not opened().is_live("s")
        assert set(log.claim_some(["s", "t"])) == {"s", "t"}
        assert types(log, "s") == ["START", "INTENT", "CLAIM", "CLAIM"]
    finally:
        log.close()


def test_a_server_that_is_away_leaves_nothing_owned(url: str, opened: Open, proxy: Proxy) -> None:
    dead(url, "s")
    log = PostgresLog(f"{proxy.address(url)}&timeout=1")
    try:
        begin(log, "warm")
        proxy.go_away()
        with pytest.raises(LogUnavailable):
            log.claim_some(["s"])
        assert not log.owned("s")
        proxy.come_back()
        assert set(log.claim_some(["s"])) == {"s"}
    finally:
        log.close()


def test_a_writer_that_lost_its_lease_claims_as_another(url: str, opened: Open) -> None:
    dead(url, "s")
    log = opened()
    begin(log, "warm")
    sql(url, "UPDATE {s}.writer SET fenced = true WHERE nonce = (SELECT owner FROM {s}.saga WHERE id = 'warm')")
    fenced = log._heart._current
    assert set(log.claim_some(["s"])) == {"s"}
    assert log._heart._current is not fenced and opened().is_live("s")
    log.flush(log.append(record("s", 4, epoch=3)))


def test_who_lost_one_saga_to_a_batch_acts_on_no_other(url: str, opened: Open) -> None:
    owner, other = opened(), opened()
    begin(owner, "s", "t")
    owner.claim("new", fresh=True)
    expire(url)
    assert set(other.claim_some(["s"])) == {"s"}
    assert sql(url, "SELECT count(*) FROM {s}.writer WHERE fenced") == [(1,)]
    with pytest.raises(Fenced):
        owner.flush(owner.append(record("new", 1, "START")))
    owner._heart._current.until = 0.0  # the guard has tripped
    with pytest.raises(Fenced):
        owner.flush(owner.append(record("t", 3)))
    assert set(owner.saga_ids()) == {"s", "t"} and types(other, "s") == ["START", "INTENT", "CLAIM"]


def test_an_owner_that_renews_in_the_moment_of_a_batch_loses_nothing(
    url: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = opened(), opened()
    begin(owner, "s", "t")
    begin(other, "free")
    other.release("free")
    expire(url)
    take_all = other._ownership._take_all
    renewed: list[bool] = []

    def late(*given: Any) -> Any:
        renewed.append(owner._heart.still(owner._heart._current))
        return take_all(*given)

    monkeypatch.setattr(other._ownership, "_take_all", late)
    assert set(other.claim_some(["s", "free", "t"])) == {"free"}
    assert renewed == [True]
    for saga in ("s", "t"):
        owner.flush(owner.append(record(saga, 3)))
        assert types(other, saga) == ["START", "INTENT", "INTENT"]
    assert sql(url, "SELECT count(*) FROM {s}.writer WHERE fenced") == [(0,)]


def test_a_recovery_of_several_at_once_claims_in_batches(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, log = opened(), opened()
    sagas = [f"s{n}" for n in range(8)]
    for saga in sagas:
        owner.claim(saga)
        owner.flush(owner.append(record(saga, 1, "START", nonce=saga)))
        owner.release(saga)
    claims: list[Claims] = []
    batches: list[list[str]] = []
    claim_some = log.claim_some

    class Noted(Claims):
        def __init__(self, log: BatchClaims) -> None:
            super().__init__(log)
            claims.append(self)

    def together(saga_ids: Any) -> Any:
        batches.append(list(saga_ids))
        if len(batches) == 1:
            wait_for(lambda: len(batches[0]) + len(claims[0]._asked) == len(sagas))  # the others want theirs
        return claim_some(saga_ids)

    def alone(saga_id: str, *, fresh: bool = False) -> Any:
        raise AssertionError(f"{saga_id} was claimed alone")

    monkeypatch.setattr(recoverer, "Claims", Noted)
    monkeypatch.setattr(log, "claim_some", together)
    monkeypatch.setattr(log, "claim", alone)
    report = recover(log, concurrency=len(sagas))
    assert sorted(report.recovered) == sagas, report
    assert len(batches) <= 2 and sorted(saga for batch in batches for saga in batch) == sagas
