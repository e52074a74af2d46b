"""The NATS log when answers are lost, leases run out, servers go and come back, and records are gone."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest

from agent_saga_core.errors import Fenced, LogCorrupted, LogUnavailable, SagaBusy
from agent_saga_core.log import lease
from agent_saga_core.log.nats import NatsLog, init
from agent_saga_core.log.nats.address import address_of
from agent_saga_core.log.nats.connection import Away
from agent_saga_core.log.nats.messages import Lease
from agent_saga_core.records import Record

from ..servers.faults import Absences, Behind, Leases, LostAnswers
from ..servers.store import Store, begin, record, wait_for
from .proxy import Proxy
from .server import Nats, fresh, server_of_its_own


def written(url: str) -> bytes:
    """What a message of a writer begins with on the wire."""
    return f"HPUB {address_of(url).name}.w.".encode()


def entered(url: str, what: str = "s") -> bytes:
    """What a change of the index begins with on the wire."""
    return f"HPUB {address_of(url).name}.i.{what}.".encode()


def expire(log: NatsLog) -> None:
    """Let everybody believe that the leases of this log have been watched running out; it has not heard of it."""
    index = log._index
    for pen in log._nats_heart.pens.values():
        log._server.run(lambda pen=pen: index.put_expired(pen.nonce, pen.revision))


def pen_of(log: NatsLog) -> Any:
    return log._nats_heart.pen(log._nats_heart._current)


class NatsBehind(Behind):
    def appended(self, url: str) -> bytes:
        return written(url)

    def taken(self, url: str) -> bytes:
        return written(url)

    def entered(self, url: str) -> bytes:
        return entered(url)

    def seize(self, log: NatsLog, other: NatsLog, url: str, final: bool) -> tuple[Record, ...]:
        pen, index = pen_of(log), other._index
        other._server.run(lambda: index.put_expired(pen.nonce, pen.revision))
        begin(other, "t")
        wait_for(lambda: len(other.read("s")) == 2)
        found = other.claim("s")
        if final:  # that needs no fence; somebody else took another saga of this process
            other._server.run(lambda: other._ownership.fence(pen.nonce, None))
        return found

    def expire(self, log: NatsLog, url: str) -> None:
        expire(log)

    def before_the_fence(self, monkeypatch: pytest.MonkeyPatch, other: NatsLog, do: Callable[[], object]) -> None:
        fence = other._ownership.fence

        async def late(nonce: str, leased: Any) -> bool:
            await asyncio.to_thread(do)
            return await fence(nonce, leased)

        monkeypatch.setattr(other._ownership, "fence", late)

    def before_the_claim(self, monkeypatch: pytest.MonkeyPatch, other: NatsLog, do: Callable[[], object]) -> None:
        stop = other._ownership._stop

        async def after_it(nonce: str) -> None:
            await asyncio.to_thread(do)
            await stop(nonce)

        monkeypatch.setattr(other._ownership, "_stop", after_it)

    def stop(self, mortal: Nats, *, kill: bool) -> None:
        mortal.stop(signal.SIGKILL if kill else signal.SIGTERM)

    def start(self, mortal: Nats) -> None:
        mortal.start()

    def processes(self, mortal: Nats) -> list[int]:
        assert mortal.popen is not None
        return [mortal.popen.pid]


class TestNatsLostAnswers(NatsBehind, LostAnswers):
    def test_a_claim_whose_entry_is_lost_owns_the_saga_all_the_same(self, store: Store, proxy: Proxy, url: str) -> None:
        self.lose_the_answer_to_a_claim(store, proxy, url, entered(url))


class TestNatsAbsences(NatsBehind, Absences):
    pass


class TestNatsLeases(NatsBehind, Leases):
    pass


# --- acknowledgements that are lost


def test_the_deduplication_of_the_server_is_not_relied_on(
    opened: Callable[..., NatsLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened()
    begin(log, "s")
    put = log._server.put
    tries: list[str] = []

    async def once_lost(subject: str, data: bytes, *, token: str, **given: Any) -> int:
        if ".w." in subject:
            tries.append(token)
        if len(tries) > 1:
            token = f"{token}-again"  # as if the server had forgotten that it has seen this one
        seq = await put(subject, data, token=token, **given)
        if len(tries) == 1:
            raise Away("lost")
        return seq

    monkeypatch.setattr(log._server, "put", once_lost)
    log.flush(log.append(record("s", 2)))
    assert len(tries) == 2 and tries[0] == tries[1]
    monkeypatch.undo()
    log.flush(log.append(record("s", 3)))
    assert [one.n for one in log.read("s")] == [1, 2, 3] and log.verify().records == 3


def test_a_batch_whose_answer_is_lost_is_stored_once_and_one_fenced_saga_fails_alone(proxy: Proxy, url: str) -> None:
    log, other = NatsLog(proxy.address(url)), NatsLog(url)
    ids = [f"s{n}" for n in range(20)]
    for saga in ids:
        log.claim(saga, fresh=True)
    begin(other, "s7")  # an id that was drawn here, and that somebody else knew
    tickets = [log.append(record(saga, 1, "START", x=saga)) for saga in ids]
    proxy.lose_the_answer(written(url))
    log.flush(tickets[0])
    assert proxy.lost.is_set()
    for saga, ticket in zip(ids, tickets, strict=True):
        if saga == "s7":
            with pytest.raises(Fenced, match="s7"):
                log.flush(ticket)
        else:
            log.flush(ticket)
            assert [one.data.get("x") for one in log.read(saga)] == [saga]
    with pytest.raises(Fenced):  # what follows a refused record is refused too
        log.flush(log.append(record("s7", 2)))
    assert [one.data for one in other.read("s7")] == [{}]
    assert other.verify().intact and other.verify().records == 20
    log.close()
    other.close()


def test_sagas_of_a_writer_that_was_fenced_fail_and_those_of_its_successor_are_stored(
    opened: Callable[..., NatsLog],
) -> None:
    log, other = opened(), opened()
    begin(log, "old")
    begin(log, "older")
    expire(log)
    assert other.claim("older")[-1].type == "CLAIM"
    assert not log._nats_heart.still(log._nats_heart._current)
    begin(log, "new")  # as another writer
    tickets = {saga: log.append(record(saga, 2)) for saga in ("old", "new", "older")}
    log.flush(tickets["new"])
    for saga in ("old", "older"):
        with pytest.raises(Fenced):
            log.flush(tickets[saga])
    assert [len(other.read(saga)) for saga in ("old", "new", "older")] == [1, 2, 2]
    assert other.verify().intact


def test_many_new_ids_whose_common_entry_is_lost_are_entered_once(proxy: Proxy, url: str) -> None:
    log = NatsLog(proxy.address(url))
    ids = [f"s{n}" for n in range(40)]
    for saga in ids:
        log.claim(saga, fresh=True)
    ticket = [log.append(record(saga, 1, "START")) for saga in ids][-1]
    proxy.lose_the_answer(b"Nats-Batch-Commit: 1")
    log.flush(ticket)
    assert proxy.lost.is_set()
    assert list(log.saga_ids()) == ids and log.verify().records == 40
    log.close()


def test_a_message_that_was_sent_and_given_up_cannot_come_in_behind_a_release(
    opened: Callable[..., NatsLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it is still on its way when the log gives up: then whatever follows has to be sure of it first."""
    log, other = opened(timeout=0), opened()
    begin(log, "s")
    put = log._server.put
    late: list[Any] = []

    async def held_up(subject: str, data: bytes, **given: Any) -> int:
        if ".w." in subject and not late:
            late.append((subject, data, given))
            raise Away("lost")
        return await put(subject, data, **given)

    monkeypatch.setattr(log._server, "put", held_up)
    with pytest.raises(LogUnavailable):
        log.flush(log.append(record("s", 2)))
    subject, data, given = late[0]
    log.release("s")
    found = other.claim("s")
    with pytest.raises(Exception, match="last"):
        log._server.run(lambda: put(subject, data, **given))  # now it arrives
    assert [str(one.type) for one in found] == ["START", "CLAIM"] and other.read("s") == found
    assert other.verify().intact


# --- leases


def test_a_renewal_after_the_lease_was_fenced_is_refused_although_the_writer_can_still_write(
    opened: Callable[..., NatsLog],
) -> None:
    """Between the two steps of a claimer: no effect may start then, and what is written is before the CLAIM."""
    log, other = opened(), opened()
    begin(log, "s")
    pen = pen_of(log)
    marked = Lease(seconds=30.0, beat=pen.beat, fenced=True)
    other._server.run(lambda: other._index.put_lease(pen.nonce, marked, pen.revision))
    pen.writer.until = 0.0
    done: list[str] = []
    with pytest.raises(Fenced):
        log.flush(log.append(record("s", 2)))
        done.append("effect")
    assert done == []
    assert [str(one.type) for one in other.claim("s")] == ["START", "INTENT", "CLAIM"]
    with pytest.raises(Fenced):
        log.flush(log.append(record("s", 3)))
    assert other.verify().records == 3


def test_a_lease_is_not_judged_by_any_wall_clock(
    opened: Callable[..., NatsLog], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    log, other = opened(), opened()
    begin(log, "s")
    real = time.time
    for by in (-3600.0, 3600.0):
        monkeypatch.setattr(time, "time", lambda by=by: real() + by)
        with pytest.raises(SagaBusy):
            other.claim("s")
        log._nats_heart.still(log._nats_heart._current)
        log.flush(log.append(record("s", len(log.read("s")) + 1)))
    log.release("s")
    assert other.claim("s")[-1].type == "CLAIM"


def test_a_process_that_watched_a_lease_run_out_says_so_to_those_who_come_later(
    opened: Callable[..., NatsLog],
) -> None:
    log, witness = opened(lease=0.5), opened(lease=0.5)
    begin(log, "s")
    begin(witness, "other")
    log._heart.stop()
    pen = pen_of(log)
    wait_for(lambda: witness._server.run(lambda: witness._index.expired(pen.nonce)) == pen.revision)
    late = opened()
    assert not late.is_live("s") and late.claim("s")[-1].type == "CLAIM"  # at once


def test_the_owner_counts_its_lease_shorter_than_everybody_else_does(opened: Callable[..., NatsLog]) -> None:
    log, other = opened(lease=20), opened()
    begin(log, "s")
    writer = log._heart._current
    for _ in range(2):
        before = lease.now()
        assert log._heart.still(writer)
        with pytest.raises(SagaBusy):
            other.claim("s")  # it has seen this renewal, and counts from now
        look = other._ownership.watch._looks[pen_of(log).nonce]
        assert writer.until <= lease.now() + 18.0 and look.since >= before
        assert look.since + 20.0 > writer.until + 1.0


def test_a_lease_is_judged_run_out_after_its_whole_length_from_when_it_was_read_until_it_is_asked_for(
    opened: Callable[..., NatsLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = opened(lease=20), opened()
    begin(log, "s")
    log._heart.stop()
    clock = [1000.0]
    monkeypatch.setattr("agent_saga_core.log.nats.lease.now", lambda: clock[0])

    def slow(name: str) -> None:
        read = getattr(other._index, name)

        async def late(*given: Any) -> Any:
            found = await read(*given)
            clock[0] += 5  # it was so at the server before that, and nobody knows when
            return found

        monkeypatch.setattr(other._index, name, late)

    slow("get_lease")
    slow("leases")
    with pytest.raises(SagaBusy):
        other.claim("s")
    known = clock[0]
    assert known > 1000.0
    clock[0] = known + 19.9
    with pytest.raises(SagaBusy):
        other.claim("s")  # though the answer comes when it has run out
    assert clock[0] > known + 20.0
    clock[0] = known + 20.0
    assert other.claim("s")[-1].type == "CLAIM"


def test_the_same_epoch_number_of_another_writer_is_not_the_same_token(opened: Callable[..., NatsLog]) -> None:
    log, other = opened(), opened()
    assert log.claim("s") == ()
    expire(log)
    assert other.claim("s") == ()  # nothing was begun: the same epoch again, under another nonce
    with pytest.raises(Fenced):
        log.flush(log.append(record("s", 1, "START", x="late")))
    other.flush(other.append(record("s", 1, "START", x="new")))
    assert [one.data for one in log.read("s")] == [{"x": "new"}]


# --- every moment between the steps of a claim


@pytest.mark.parametrize("crash", ["lease", "stop", "marks", "bury", "entry", "claim"])
def test_a_claimer_that_dies_between_two_steps_leaves_what_another_can_take(
    opened: Callable[..., NatsLog], monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    class Died(BaseException):
        pass

    log, dying, other = opened(), opened(), opened()
    for saga in ("s", "t", "over"):
        begin(log, saga)
    log.flush(log.append(record("over", 2, "COMMITTED")))
    expire(log)
    begin(dying, "warm")
    place, name = {
        "lease": (dying._ownership, "_stop"),
        "stop": (dying._ownership, "bury"),
        "marks": (dying._ownership, "note_ended"),
        "bury": (dying._index, "drop_lease"),
        "entry": (dying._index, "change"),
        "claim": (pen_of(dying), "write"),
    }[crash]

    async def die(*given: Any, **more: Any) -> Any:
        raise Died

    monkeypatch.setattr(place, name, die)
    monkeypatch.setattr(dying._ownership, "release", die)
    with pytest.raises(Died):
        dying.claim("s")
    assert set(other.unfinished().saga_ids) == {"s", "t", "warm"}
    expire(dying)  # it is dead: nobody hears of it any more
    done: list[str] = []
    with pytest.raises(Fenced):
        log._heart._current.until = 0.0
        log.flush(log.append(record("s", 2)))
        done.append("effect")
    assert done == []
    found = other.claim("s")
    assert [one.n for one in found] == list(range(1, len(found) + 1)) and found[-1].type == "CLAIM"
    assert found[-1].epoch == len(found) and [str(one.type) for one in found].count("INTENT") <= 1
    assert other.claim("t")[-1].type == "CLAIM" and len(other.claim("over")) == 2
    other.flush(other.append(record("s", len(found) + 1, epoch=len(found))))
    assert set(other.unfinished().saga_ids) == {"s", "t", "warm"} and other.verify().intact
    monkeypatch.undo()


# --- a server that lost what it acknowledged


def test_an_owner_whose_saga_lost_acknowledged_records_stops() -> None:
    with server_of_its_own() as server:
        url = fresh(server.uri)
        init(url)
        log = NatsLog(url)
        begin(log, "s")
        begin(log, "t")
        server.stop()
        root = server._config.parent
        shutil.copytree(root / "solo", root / "copy")
        server.start()
        log.flush(log.append(record("s", 2)))
        server.stop()
        shutil.rmtree(root / "solo")
        shutil.copytree(root / "copy", root / "solo")  # what a backup has, or a replica that did not hear of the last
        server.start()
        done: list[str] = []
        with pytest.raises(LogCorrupted, match="lost records") as caught:
            log.flush(log.append(record("s", 3)))
            done.append("effect")
        assert caught.value.saga_id == "s" and done == []
        with pytest.raises((LogCorrupted, Fenced)):
            log.flush(log.append(record("s", 4)))
        assert [one.n for one in log.read("s")] == [1]
        log.close()


def test_a_claim_that_was_sent_and_given_up_is_not_made_twice(
    opened: Callable[..., NatsLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CLAIM arrives while the same process claims the saga again."""
    log, other = opened(timeout=0), opened()
    begin(other, "s")
    other.release("s")
    begin(log, "warm")
    put = log._server.put
    late: list[Any] = []

    async def held_up(subject: str, data: bytes, **given: Any) -> int:
        if ".w." in subject and not late:
            late.append((subject, data, given))
            raise Away("lost")
        return await put(subject, data, **given)

    monkeypatch.setattr(log._server, "put", held_up)
    monkeypatch.setattr(log, "hand_back", lambda saga, holding: None)  # as if it were interrupted
    with pytest.raises(LogUnavailable):
        log.claim("s")
    monkeypatch.undo()
    subject, data, given = late[0]
    log._server.run(lambda: put(subject, data, **given))  # now it arrives
    found = log.claim("s")
    assert [(one.n, str(one.type)) for one in found] == [(1, "START"), (2, "CLAIM"), (3, "CLAIM")]
    log.flush(log.append(record("s", 4, epoch=3)))
    assert other.verify().intact and [one.n for one in other.read("s")] == [1, 2, 3, 4]
    assert set(other.unfinished().saga_ids) == {"s", "warm"}
    log.release("s")
    assert set(other.unfinished().saga_ids) == {"s", "warm"}


def test_a_saga_that_is_given_back_while_it_is_read_is_read_whole(
    opened: Callable[..., NatsLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = opened(), opened()
    begin(log, "s")
    begin(log, "another")
    tails = other._reader.tails
    late: list[int] = []

    def give_back() -> None:
        log.flush(log.append(record("s", 2)))
        log.release("s")
        pen_of(log)._since = 10**6  # what its writer says is open does not hold it any more
        log.flush(log.append(record("another", 2)))

    async def after_it(nonce: str) -> Any:
        if not late:
            late.append(1)
            await asyncio.to_thread(give_back)
        return await tails(nonce)

    monkeypatch.setattr(other._reader, "tails", after_it)
    assert [one.n for one in other.read("s")] == [1, 2] and late
