"""The demo service, through real processes on loopback. Every wait is for an event, and bounded."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from agent_saga_core.demo.client import Client, HTTPStatusError, Service, nothing_happened

BOUND = 30.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Service]:
    with Service.start() as service:
        yield service


@pytest.fixture
def own() -> Iterator[Service]:
    with Service.start() as service:
        yield service


@pytest.fixture
def client(shared: Service) -> Iterator[Client]:
    """A client of the shared service; rules and held requests never outlive a test."""
    client = shared.client(timeout=BOUND)
    yield client
    client.reset()
    client.release()


@pytest.fixture
def new_key(request: pytest.FixtureRequest) -> Callable[..., str]:
    """Keys of this test alone, so that the shared ledger can be asked for them."""
    return lambda name="k": f"{request.node.nodeid}/{name} %?é".encode("ascii", "replace").decode()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def refused(call: Callable[[], Any]) -> tuple[int, str]:
    with pytest.raises(HTTPStatusError) as caught:
        call()
    return caught.value.status, caught.value.code


def effects(client: Client, key: str) -> list[tuple[str, str]]:
    journal = client.ledger()["journal"]
    return [(e["kind"], e["id"]) for e in journal if e["entry"] == "effect" and e["key"] == key]


def outcomes(client: Client, key: str) -> list[tuple[str | None, int | None, str | None]]:
    journal = client.ledger()["journal"]
    mine = [e for e in journal if e["entry"] == "request" and e["key"] == key]
    return [(e["outcome"], e["status"], e["fault"]) for e in mine]


def port_of(service: Service) -> int:
    return int(service.url.rpartition(":")[2])


def raw_charge(service: Service, key: str, *, complete: bool = True) -> socket.socket:
    body = json.dumps({"customer": "c", "amount": 5})
    head = f"POST /charges HTTP/1.1\r\nIdempotency-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port_of(service)), timeout=BOUND)
    connection.sendall((head + (body if complete else body[:-1])).encode())
    return connection


def unheard(future: Future[Any]) -> None:
    with pytest.raises(ConnectionError):
        future.result(BOUND)


# -- the domain ------------------------------------------------------------------------------------------


def test_charges_and_refunds(own: Service) -> None:
    c = own.client()
    charge = c.charge("cus_7", 4200, currency="eur")
    assert charge["id"] == "ch_1" and charge["status"] == "succeeded" and charge["currency"] == "eur"
    assert c.refund("ch_1", 200) == {
        "id": "re_1", "charge_id": "ch_1", "amount": 200, "status": "succeeded",
    }  # fmt: skip
    assert c.request("GET", "/charges/ch_1").ok()["status"] == "partially_refunded"
    assert c.summary()["charged_net"] == 4000
    assert refused(lambda: c.refund("ch_1", 4001)) == (409, "over_refund")
    assert c.refund("ch_1")["amount"] == 4000
    assert refused(lambda: c.refund("ch_1")) == (409, "already_refunded")
    assert refused(lambda: c.refund("ch_99")) == (404, "not_found")
    assert refused(lambda: c.charge("cus_declined", 1)) == (402, "card_declined")
    ledger = c.ledger()
    assert [(x["captured"], x["refunded"], x["status"]) for x in ledger["charges"]] == [(4200, 4200, "refunded")]
    attempts = [(a["charge_id"], a["amount"], a["status"]) for a in ledger["refund_attempts"]]
    assert attempts == [
        ("ch_1", 200, 201), ("ch_1", 4001, 409), ("ch_1", None, 201), ("ch_1", None, 409),
        ("ch_99", None, 404),
    ]  # fmt: skip
    assert [r["amount"] for r in ledger["refunds"]] == [200, 4000]
    assert c.summary() == {
        "charged_net": 0, "open_charges": 0, "open_bookings": 0, "mails_sent": 0, "balances": {}, "left": [],
    }  # fmt: skip


def test_bookings_mails_and_transfers(own: Service) -> None:
    c = own.client()
    flight = c.book("flight", number="LH 400", seats=2)
    assert flight == {"id": "bk_1", "kind": "flight", "number": "LH 400", "seats": 2, "status": "booked"}
    hotel = c.book("hotel", city="Porto")
    assert c.cancel(flight["id"])["status"] == "cancelled"
    assert refused(lambda: c.cancel(flight["id"])) == (409, "already_cancelled")
    assert refused(lambda: c.cancel("bk_9")) == (404, "not_found")
    mail = c.mail("ada@example.org", "Your trip")
    assert refused(lambda: c.request("POST", f"/mails/{mail['id']}/cancel", {}).ok()) == (404, "no_such_path")
    c.transfer("alice", "bob", 30)
    assert refused(lambda: c.transfer("acc_empty", "bob", 1)) == (402, "insufficient_funds")
    summary = c.summary()
    assert summary["open_bookings"] == 1 and summary["mails_sent"] == 1
    assert summary["balances"] == {"alice": -30, "bob": 30}
    assert summary["left"] == [hotel["id"], mail["id"]]
    c.transfer("bob", "alice", 30)
    assert c.summary()["balances"] == {} and c.ledger()["balances"] == {"alice": 0, "bob": 0}
    ledger = c.ledger()
    tried = [(a["booking_id"], a["outcome"], a["status"]) for a in ledger["cancellation_attempts"]]
    assert tried == [("bk_1", "executed", 200), ("bk_1", "executed", 409), ("bk_9", "executed", 404)]
    assert [x["booking_id"] for x in ledger["cancellations"]] == ["bk_1"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/charges", {}),
        ("/charges", {"customer": "", "amount": 1}),
        ("/charges", {"customer": "c", "amount": 0}),
        ("/charges", {"customer": "c", "amount": True}),
        ("/charges", {"customer": "c", "amount": 1.5}),
        ("/charges", {"customer": "c", "amount": 10**12 + 1}),
        ("/charges", {"customer": "c", "amount": 1, "currency": 3}),
        ("/refunds", {"amount": 1}),
        ("/refunds", {"charge_id": "ch_1", "amount": -1}),
        ("/bookings", {"kind": "boat"}),
        ("/bookings", {"kind": "hotel", "id": "bk_7"}),
        ("/mails", {"to": "a"}),
        ("/transfers", {"source": "a", "target": "a", "amount": 1}),
    ],
)
def test_bad_input_is_refused_and_not_remembered(
    client: Client, new_key: Callable[..., str], path: str, body: dict[str, Any]
) -> None:
    answer = client.request("POST", path, body, key=new_key())
    assert (answer.status, answer.body["error"]["code"]) == (422, "bad_input")
    assert outcomes(client, new_key()) == [("invalid", 422, None)]
    assert client.charge("c", 1, key=new_key())["status"] == "succeeded"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /charges HTTP/1.1\r\nContent-Length: 3\r\n\r\n{!}", 400),
        (b"POST /charges HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]", 400),
        (b'POST /charges HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"a":NaN}', 400),
        (b"POST /charges HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n", 413),
        (b"POST charges HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"DELETE /charges HTTP/1.1\r\n\r\n", 501),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /charges/x/y/z HTTP/1.1\r\n\r\n", 404),
    ],
)
def test_what_is_not_a_request_gets_a_json_error(shared: Service, raw: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", port_of(shared)), timeout=BOUND) as connection:
        connection.sendall(raw)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == status
        assert json.loads(answer.read())["error"]["code"]
        answer.close()


def test_one_connection_may_carry_many_requests(shared: Service, client: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(shared), timeout=BOUND)
    ids: list[str] = []
    for _ in range(3):
        connection.request("POST", "/charges", json.dumps({"customer": "c", "amount": 1}))
        ids.append(json.loads(connection.getresponse().read())["id"])
    client.wait_quiet(timeout=BOUND)  # an idle connection is not a request under way
    connection.close()
    assert len(set(ids)) == 3


# -- keys ------------------------------------------------------------------------------------------------


def test_the_first_answer_is_replayed(client: Client, new_key: Callable[..., str]) -> None:
    body = {"customer": "c", "amount": 5}
    first = client.request("POST", "/charges", body, key=new_key())
    client.refund(first.body["id"])
    again = client.request("POST", "/charges", dict(reversed(body.items())), key=new_key())
    assert (first.status, first.replayed, again.replayed) == (201, False, True)
    assert again.body == first.body and again.body["status"] == "succeeded"
    assert effects(client, new_key()) == [("charge", first.body["id"])]
    assert outcomes(client, new_key()) == [("executed", 201, None), ("replayed", 201, None)]


def test_errors_of_an_execution_are_replayed_too(client: Client, new_key: Callable[..., str]) -> None:
    declined, missing = new_key("declined"), new_key("missing")
    assert refused(lambda: client.charge("cus_declined", 1, key=declined)) == (402, "card_declined")
    again = client.request("POST", "/charges", {"customer": "cus_declined", "amount": 1}, key=declined)
    assert (again.status, again.replayed) == (402, True)
    assert refused(lambda: client.cancel("bk_404", key=missing)) == (404, "not_found")
    assert client.request("POST", "/bookings/bk_404/cancel", {}, key=missing).replayed
    assert effects(client, declined) == effects(client, missing) == []


def test_a_key_belongs_to_one_method_path_and_body(client: Client, new_key: Callable[..., str]) -> None:
    client.charge("c", 5, key=new_key())
    assert refused(lambda: client.charge("c", 6, key=new_key())) == (400, "idempotency_error")
    assert refused(lambda: client.mail("c", "s", key=new_key())) == (400, "idempotency_error")
    assert len(effects(client, new_key())) == 1


def test_without_a_key_every_request_executes(client: Client) -> None:
    assert client.charge("c", 5)["id"] != client.charge("c", 5)["id"]


def test_of_two_requests_at_once_one_executes(
    client: Client, new_key: Callable[..., str], pool: ThreadPoolExecutor
) -> None:
    client.hold("/charges", key=new_key())
    first = pool.submit(client.charge, "c", 5, key=new_key())
    client.wait_held()
    assert client.lookup(new_key())["in_flight"]
    assert refused(lambda: client.charge("c", 5, key=new_key())) == (409, "in_flight")
    assert refused(lambda: client.charge("c", 6, key=new_key())) == (400, "idempotency_error")
    client.release()
    body = first.result(BOUND)
    assert client.charge("c", 5, key=new_key()) == body
    assert not client.lookup(new_key())["in_flight"]
    assert effects(client, new_key()) == [("charge", body["id"])]


def test_a_race_for_one_key_has_one_effect(
    client: Client, new_key: Callable[..., str], pool: ThreadPoolExecutor
) -> None:
    start = threading.Barrier(8)

    def race() -> int:
        start.wait(BOUND)
        return client.request("POST", "/charges", {"customer": "c", "amount": 5}, key=new_key()).status

    statuses = [f.result(BOUND) for f in [pool.submit(race) for _ in range(8)]]
    assert set(statuses) <= {201, 409} and 201 in statuses
    assert len(effects(client, new_key())) == 1
    assert len(outcomes(client, new_key())) == 8


def test_look_ups(client: Client, new_key: Callable[..., str]) -> None:
    unknown = client.lookup(new_key())
    assert unknown == {
        "key": new_key(), "landed": False, "in_flight": False, "tombstone": False, "outcome": None,
        "status": None, "body": None, "kind": None, "id": None,
    }  # fmt: skip
    charge = client.charge("c", 5, key=new_key())
    assert client.lookup(new_key()) == unknown | {
        "landed": True, "status": 201, "body": charge, "kind": "charge", "id": charge["id"],
    }  # fmt: skip
    (found,) = client.find("charges", key=new_key())
    assert found.items() >= charge.items() and found["key"] == new_key()
    assert client.find("charges", key=new_key("other")) == []
    assert client.request("GET", f"/charges/{charge['id']}").ok() == charge
    assert client.request("GET", "/charges/bk_1").status == 404
    declined = new_key("declined")
    refused(lambda: client.charge("cus_declined", 5, key=declined))
    assert (client.lookup(declined)["landed"], client.lookup(declined)["status"]) == (False, 402)


# -- cancel by key ---------------------------------------------------------------------------------------


def test_cancelling_a_landed_key_reverses_it_once(client: Client, new_key: Callable[..., str]) -> None:
    charge = client.charge("c", 100, key=new_key("charge"))
    client.refund(charge["id"], 30)
    booking = client.book("hotel", key=new_key("booking"))
    transfer = client.transfer("a", "b", 7, key=new_key("transfer"))
    for name in ("charge", "booking", "transfer"):
        undo = new_key(f"undo {name}")
        first = client.cancel_key(new_key(name), key=undo)
        assert first["outcome"] == "reversed"
        assert client.cancel_key(new_key(name), key=undo) == first  # replayed
        assert client.cancel_key(new_key(name))["outcome"] == "reversed"  # asked anew, and idempotent itself
        assert [id for _, id in effects(client, undo)] == [first["reversal"]]
        assert client.lookup(undo)["landed"]
        assert client.lookup(new_key(name)).items() >= {"landed": True, "tombstone": True}.items()
    ledger = client.ledger()
    assert [r["amount"] for r in ledger["refunds"] if r["charge_id"] == charge["id"]] == [30, 70]
    assert [x["booking_id"] for x in ledger["cancellations"]].count(booking["id"]) == 1
    assert [t["amount"] for t in ledger["transfers"] if t["reverses"] == transfer["id"]] == [7]
    tried = [a for a in ledger["key_cancel_attempts"] if a["key"] == new_key("undo charge")]
    assert [a["outcome"] for a in tried] == ["executed", "replayed"]
    assert refused(lambda: client.charge("c", 100, key=new_key("charge"))) == (410, "cancelled")


def test_nothing_is_left_to_reverse(client: Client, new_key: Callable[..., str]) -> None:
    client.refund(client.charge("c", 1, key=new_key("charge"))["id"])
    client.cancel(client.book("flight", key=new_key("booking"))["id"])
    assert client.cancel_key(new_key("charge"))["outcome"] == "nothing_left"
    assert client.cancel_key(new_key("booking"))["outcome"] == "nothing_left"


def test_a_tombstone_keeps_late_requests_from_landing(client: Client, new_key: Callable[..., str]) -> None:
    assert client.cancel_key(new_key())["outcome"] == "tombstoned"
    assert client.cancel_key(new_key())["outcome"] == "tombstoned"
    assert client.lookup(new_key()).items() >= {"landed": False, "tombstone": True}.items()
    assert refused(lambda: client.charge("c", 5, key=new_key())) == (410, "cancelled")
    assert refused(lambda: client.mail("c", "s", key=new_key())) == (410, "cancelled")
    assert effects(client, new_key()) == []
    journal = client.ledger()["journal"]
    assert [e["id"] for e in journal if e["entry"] == "tombstone"].count(new_key()) == 1


def test_a_tombstone_stops_a_request_that_is_in_flight(
    client: Client, new_key: Callable[..., str], pool: ThreadPoolExecutor
) -> None:
    client.hold("/charges", key=new_key())
    held = pool.submit(client.charge, "c", 5, key=new_key())
    client.wait_held()
    assert client.cancel_key(new_key())["outcome"] == "tombstoned"
    client.release()
    assert refused(lambda: held.result(BOUND)) == (410, "cancelled")
    assert effects(client, new_key()) == []
    assert outcomes(client, new_key()) == [("refused", 410, None)]


def test_a_failed_key_can_be_cancelled(client: Client, new_key: Callable[..., str]) -> None:
    refused(lambda: client.charge("cus_declined", 5, key=new_key()))
    assert client.cancel_key(new_key())["outcome"] == "tombstoned"
    assert refused(lambda: client.charge("cus_declined", 5, key=new_key())) == (410, "cancelled")


def test_what_is_irreversible_stays(client: Client, new_key: Callable[..., str]) -> None:
    client.mail("ada@example.org", "Sent", key=new_key("mail"))
    client.refund(client.charge("c", 5)["id"], key=new_key("refund"))
    for name in ("mail", "refund"):
        assert refused(lambda name=name: client.cancel_key(new_key(name))) == (409, "irreversible")
        assert not client.lookup(new_key(name))["tombstone"]


# -- the ledger ------------------------------------------------------------------------------------------


def test_the_journal_orders_requests_and_effects_of_all_kinds(own: Service) -> None:
    c = own.client()
    charge, booking = c.charge("c", 5, key="f1"), c.book("flight", key="f2")
    c.transfer("a", "b", 5, key="f3")
    c.transfer("b", "a", 5, key="u3")
    c.cancel(booking["id"], key="u2")
    c.refund(charge["id"], key="u1")
    c.lookup("f1")
    ledger = c.ledger()
    journal = ledger["journal"]
    assert [e["seq"] for e in journal] == list(range(1, len(journal) + 1))
    happened = [(e["key"], e["kind"]) for e in journal if e["entry"] == "effect"]
    assert happened == [
        ("f1", "charge"), ("f2", "booking"), ("f3", "transfer"),
        ("u3", "transfer"), ("u2", "cancellation"), ("u1", "refund"),
    ]  # fmt: skip
    requests = {e["seq"]: e for e in journal if e["entry"] == "request"}
    for effect in (e for e in journal if e["entry"] == "effect"):
        assert requests[effect["request"]]["key"] == effect["key"] and effect["request"] < effect["seq"]
    assert (journal[-1]["method"], journal[-1]["path"]) == ("GET", "/keys/f1")
    assert ledger["refunds"][0]["seq"] == next(e["seq"] for e in journal if e.get("kind") == "refund")


def test_a_restart_keeps_ledger_and_keys_and_forgets_what_was_in_flight(own: Service, pool: ThreadPoolExecutor) -> None:
    c, url, pid = own.client(), own.url, own.pid
    charge = c.charge("c", 5, key="done")
    c.cancel_key("never")
    c.hold("/mails")
    held = pool.submit(c.mail, "a", "s", key="held")
    c.wait_held()
    before = c.ledger()
    own.kill()
    unheard(held)
    with pytest.raises(ConnectionRefusedError) as caught:
        c.charge("c", 5, key="done")
    assert nothing_happened(caught.value)
    own.restart()
    assert own.url == url and own.pid != pid
    assert c.ledger() == before
    assert c.rules() == [] and c.wait_held(0) == []
    replay = c.request("POST", "/charges", {"customer": "c", "amount": 5}, key="done")
    assert replay.replayed and replay.body == charge
    assert refused(lambda: c.charge("c", 5, key="never")) == (410, "cancelled")
    assert c.lookup("held").items() >= {"landed": False, "in_flight": False}.items()
    assert c.mail("a", "s", key="held")["id"] == "ml_1"  # nothing had happened under it
    assert c.charge("c", 1)["id"] == "ch_2"


def test_a_killed_service_never_has_half_an_effect(own: Service, pool: ThreadPoolExecutor) -> None:
    c = own.client()
    started = threading.Event()

    def charge_until_it_dies(n: int) -> None:
        with pytest.raises(ConnectionError):
            for i in range(100_000):
                c.charge("c", 1, key=f"{n}-{i}")
                if i == 20:
                    started.set()

    workers = [pool.submit(charge_until_it_dies, n) for n in range(4)]
    assert started.wait(BOUND)
    own.kill()
    for worker in workers:
        worker.result(BOUND)
    own.restart()
    ledger = c.ledger()
    landed = [e["id"] for e in ledger["journal"] if e["entry"] == "effect"]
    executed = [e["key"] for e in ledger["journal"] if e.get("outcome") == "executed"]
    assert landed == [charge["id"] for charge in ledger["charges"]] == [f"ch_{n + 1}" for n in range(len(landed))]
    assert sorted(executed) == sorted(charge["key"] for charge in ledger["charges"])
    for charge in ledger["charges"][-4:]:
        assert c.lookup(charge["key"]).items() >= {"landed": True, "id": charge["id"]}.items()


# -- holding ---------------------------------------------------------------------------------------------


def test_held_before_the_effect(client: Client, new_key: Callable[..., str], pool: ThreadPoolExecutor) -> None:
    rule = client.hold("/charges", key=new_key())
    future = pool.submit(client.charge, "c", 5, key=new_key())
    (held,) = client.wait_held()
    assert (held["rule"], held["when"], held["path"], held["gone"]) == (rule, "before", "/charges", False)
    assert effects(client, new_key()) == [] and outcomes(client, new_key()) == [(None, None, None)]
    assert client.release(rule="rule_0") == [] and client.release(key="other") == []
    assert client.release(rule=rule) == [held["request"]]
    assert effects(client, new_key()) == [("charge", future.result(BOUND)["id"])]


def test_held_after_the_effect(client: Client, new_key: Callable[..., str], pool: ThreadPoolExecutor) -> None:
    client.hold("/charges", when="after", key=new_key())
    future = pool.submit(client.charge, "c", 5, key=new_key())
    client.wait_held()
    state = client.lookup(new_key())
    assert state["landed"] and not state["in_flight"]
    assert client.charge("c", 5, key=new_key()) == state["body"]  # the service is done with it: a replay
    assert not future.done()
    client.release()
    assert future.result(BOUND) == state["body"]


def test_release_goes_by_age_and_count(client: Client, new_key: Callable[..., str], pool: ThreadPoolExecutor) -> None:
    client.hold("/mails", times=None)
    futures: list[Future[Any]] = []
    for n in range(3):
        futures.append(pool.submit(client.mail, "a", f"{n}", key=new_key(f"{n}")))
        client.wait_held(n + 1)
    client.release(count=2)
    assert [futures[n].result(BOUND)["subject"] for n in range(2)] == ["0", "1"]
    assert [held["key"] for held in client.wait_held()] == [new_key("2")]
    client.release()
    futures[2].result(BOUND)


def test_a_request_may_be_held_on_both_sides(
    client: Client, new_key: Callable[..., str], pool: ThreadPoolExecutor
) -> None:
    client.hold("/charges", key=new_key())
    client.hold("/charges", when="after", key=new_key())
    future = pool.submit(client.charge, "c", 5, key=new_key())
    assert client.wait_held()[0]["when"] == "before"
    client.release()  # returns when it stands in the second hold
    assert client.wait_held(0)[0]["when"] == "after" and not future.done()
    client.release()
    future.result(BOUND)


def test_waiting_for_held_requests_is_bounded(client: Client) -> None:
    with pytest.raises(TimeoutError):
        client.wait_held(1, timeout=0.01)


def test_a_client_that_gives_up_does_not_stop_its_request(
    client: Client, shared: Service, new_key: Callable[..., str]
) -> None:
    client.hold("/charges", key=new_key())
    impatient = raw_charge(shared, new_key())
    client.wait_held()
    impatient.close()
    assert client.wait_held()[0]["gone"]
    assert effects(client, new_key()) == []
    client.release()
    assert [kind for kind, _ in effects(client, new_key())] == ["charge"]


def test_no_answer_in_time_is_a_timeout(client: Client, shared: Service, new_key: Callable[..., str]) -> None:
    client.hold("/charges", key=new_key())
    with pytest.raises(TimeoutError) as caught:
        Client(shared.url, timeout=0.05).charge("c", 5, key=new_key())
    assert not nothing_happened(caught.value)


CRASHER = """
import sys
from agent_saga_core.demo.client import Client
Client(sys.argv[1]).charge("cus_crash", 5, key=sys.argv[2])
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_client_s_effect_lands(
    client: Client, shared: Service, new_key: Callable[..., str], when: Any
) -> None:
    client.hold("/charges", when=when, key=new_key())
    crasher = subprocess.Popen([sys.executable, "-c", CRASHER, shared.url, new_key()])
    client.wait_held()
    crasher.kill()
    assert crasher.wait(BOUND) == -signal.SIGKILL
    assert client.wait_held(0)[0]["gone"]
    assert client.lookup(new_key())["landed"] == (when == "after")
    client.release()
    assert [kind for kind, _ in effects(client, new_key())] == ["charge"]
    assert client.lookup(new_key())["status"] == 201


def test_landing_late(client: Client, new_key: Callable[..., str]) -> None:
    client.land_late("/charges", field={"customer": "cus_late"}, key=new_key())
    with pytest.raises(ConnectionError) as caught:
        client.charge("cus_late", 5, key=new_key())
    assert not nothing_happened(caught.value)
    assert client.wait_held()[0]["gone"]
    assert client.lookup(new_key()).items() >= {"landed": False, "in_flight": True}.items()
    assert refused(lambda: client.charge("cus_late", 5, key=new_key())) == (409, "in_flight")
    client.release()
    assert client.lookup(new_key()).items() >= {"landed": True, "in_flight": False}.items()
    assert client.charge("cus_late", 5, key=new_key())["id"] == client.lookup(new_key())["id"]


# -- failing ---------------------------------------------------------------------------------------------


def test_failing_before_the_effect(client: Client, new_key: Callable[..., str]) -> None:
    client.fail("/charges", answer=503, error="overloaded", times=2, key=new_key())
    for _ in range(2):
        assert refused(lambda: client.charge("c", 5, key=new_key())) == (503, "overloaded")
        assert client.lookup(new_key())["status"] is None
    assert client.charge("c", 5, key=new_key())["status"] == "succeeded"
    assert len(effects(client, new_key())) == 1
    assert outcomes(client, new_key()) == [("failed", 503, "503")] * 2 + [("executed", 201, None)]


def test_failing_before_the_effect_and_remembering_it(client: Client, new_key: Callable[..., str]) -> None:
    client.fail("/charges", answer=500, cache=True, key=new_key())
    assert refused(lambda: client.charge("c", 5, key=new_key())) == (500, "fault")
    again = client.request("POST", "/charges", {"customer": "c", "amount": 5}, key=new_key())
    assert (again.status, again.replayed) == (500, True)
    assert not client.lookup(new_key())["landed"] and effects(client, new_key()) == []


def test_an_error_after_the_effect_is_what_the_key_remembers(client: Client, new_key: Callable[..., str]) -> None:
    client.fail("/charges", when="after", key=new_key())
    with pytest.raises(HTTPStatusError) as caught:
        client.charge("c", 5, key=new_key())
    assert caught.value.status == 500 and not nothing_happened(caught.value)
    again = client.request("POST", "/charges", {"customer": "c", "amount": 5}, key=new_key())
    assert (again.status, again.replayed) == (500, True)
    assert client.lookup(new_key()).items() >= {"landed": True, "status": 500}.items()
    assert len(effects(client, new_key())) == 1
    assert client.cancel_key(new_key())["outcome"] == "reversed"


def test_an_error_after_the_effect_may_be_of_the_way_back_only(client: Client, new_key: Callable[..., str]) -> None:
    client.fail("/charges", when="after", answer=502, cache=False, key=new_key())
    assert refused(lambda: client.charge("c", 5, key=new_key())) == (502, "fault")
    assert client.charge("c", 5, key=new_key())["id"] == client.lookup(new_key())["id"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_dropping_the_connection(client: Client, new_key: Callable[..., str], when: Any) -> None:
    client.fail("/charges", when=when, answer="drop", times=2, key=new_key())
    for _ in range(2):  # after: the second is a replay, and lost as well
        with pytest.raises(ConnectionError):
            client.charge("c", 5, key=new_key())
        assert client.lookup(new_key())["landed"] == (when == "after")
    assert client.charge("c", 5, key=new_key())["status"] == "succeeded"
    assert len(effects(client, new_key())) == 1
    assert [fault for _, _, fault in outcomes(client, new_key())] == ["drop", "drop", None]


def test_rules_match_on_method_path_field_and_key(client: Client) -> None:
    booking = client.book("flight", seat="1A")
    client.fail("/bookings", exact=True, field={"kind": "hotel"}, answer=599, times=None)
    client.fail("/bookings/", answer=598, times=None)
    client.fail("/charges", method="GET", answer=597, times=None)
    client.fail("/", key="only this", answer=596, times=None)
    assert client.book("flight")["status"] == "booked"
    assert refused(lambda: client.book("hotel"))[0] == 599
    assert refused(lambda: client.cancel(booking["id"]))[0] == 598
    assert refused(lambda: client.find("charges"))[0] == 597
    assert client.charge("c", 1)["status"] == "succeeded"
    assert refused(lambda: client.charge("c", 1, key="only this"))[0] == 596
    assert [rule["struck"] for rule in client.rules()] == [1, 1, 1, 1]
    client.reset()
    assert client.rules() == []
    assert client.cancel(booking["id"])["status"] == "cancelled"


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"rule": "explode"},
        {"rule": "fail", "pathh": "/charges"},
        {"rule": "fail", "answer": 200},
        {"rule": "fail", "times": 0},
        {"rule": "fail", "answer": "drop", "cache": True},
        {"rule": "hold", "answer": 500},
        {"rule": "land_late", "when": "after"},
    ],
)
def test_a_misspelt_rule_is_refused(client: Client, rule: dict[str, Any]) -> None:
    answer = client.request("POST", "/control/rules", rule)
    assert (answer.status, answer.body["error"]["code"]) == (422, "bad_rule")
    assert client.rules() == []


def test_quiet_counts_what_dead_clients_left(client: Client, shared: Service, new_key: Callable[..., str]) -> None:
    half = raw_charge(shared, new_key(), complete=False)
    with pytest.raises(TimeoutError):
        client.wait_quiet(timeout=0.01)
    half.sendall(b"}")
    half.close()  # sent, and dead before any answer
    client.wait_quiet(timeout=BOUND)
    assert len(effects(client, new_key())) == 1


# -- async -----------------------------------------------------------------------------------------------


async def test_every_async_form(own: Service) -> None:
    c = own.client(timeout=BOUND)
    charge = await c.acharge("c", 5, currency="eur", key="k")
    assert (await c.arefund(charge["id"], 2))["amount"] == 2
    booking = await c.abook("hotel", city="Porto")
    assert (await c.acancel(booking["id"]))["status"] == "cancelled"
    assert (await c.amail("a", "s"))["status"] == "sent"
    assert (await c.atransfer("a", "b", 1))["amount"] == 1
    assert (await c.alookup("k"))["id"] == charge["id"]
    assert (await c.afind("charges", key="k"))[0]["id"] == charge["id"]
    assert (await c.acancel_key("k"))["outcome"] == "reversed"
    assert (await c.arequest("GET", "/health")).body == {"pid": own.pid}
    assert (await c.aledger())["charges"][0]["refunded"] == 5
    assert (await c.asummary())["mails_sent"] == 1
    await c.await_quiet()
    with pytest.raises(HTTPStatusError):
        await c.acharge("cus_declined", 1)
    c.hold("/charges", key="slow")
    with pytest.raises(TimeoutError):
        await Client(own.url, timeout=0.05).acharge("c", 1, key="slow")
    c.fail("/charges", answer="drop", key="lost")
    with pytest.raises(ConnectionError):
        await c.acharge("c", 1, key="lost")
    own.kill()
    with pytest.raises(ConnectionRefusedError):
        await c.acharge("c", 1)


async def test_cancelling_the_task_closes_the_connection(client: Client, new_key: Callable[..., str]) -> None:
    client.hold("/charges", key=new_key())
    task = asyncio.create_task(client.acharge("c", 5, key=new_key()))
    (held,) = await client.await_held()
    assert not held["gone"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await client.await_held())[0]["gone"]
    await client.arelease()
    assert (await client.alookup(new_key()))["landed"]


async def test_many_at_once(client: Client, new_key: Callable[..., str]) -> None:
    bodies = await asyncio.gather(*(client.acharge("c", 1, key=new_key(f"{n}")) for n in range(200)))
    assert len({body["id"] for body in bodies}) == 200


# -- the process -----------------------------------------------------------------------------------------


def spawn(*options: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "agent_saga_core.demo.service", *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline() or "{}")


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_one_line_when_ready_then_silence_and_a_clean_exit(tmp_path: Any, stop: signal.Signals) -> None:
    process, ready = spawn("--port", "0", "--db", str(tmp_path / "ledger.db"))
    assert ready == {"url": ready["url"], "pid": process.pid}
    client = Client(ready["url"])
    client.charge("c", 5)
    client.land_late("/charges")
    with pytest.raises(ConnectionError):
        client.charge("c", 5)
    client.release()
    client.land_late("/charges")
    with pytest.raises(ConnectionError):
        client.charge("c", 5)  # held when the signal comes: it never lands
    client.wait_held()
    process.send_signal(stop)
    out, err = process.communicate(timeout=BOUND)
    assert (process.returncode, out, err) == (0, "", "")
    with Service.start(tmp_path / "ledger.db") as service:
        assert service.client().summary()["charged_net"] == 10


def test_verbose_logs_requests(tmp_path: Any) -> None:
    process, ready = spawn("--db", str(tmp_path / "ledger.db"), "--verbose")
    Client(ready["url"]).charge("c", 5)
    process.terminate()
    _, err = process.communicate(timeout=BOUND)
    assert "POST /charges" in err and "201" in err


def test_it_ends_with_its_parent(tmp_path: Any) -> None:
    process, ready = spawn("--db", str(tmp_path / "ledger.db"), "--exit-with-parent")
    Client(ready["url"]).charge("c", 5)
    process.communicate(timeout=BOUND)  # closes its stdin, as a parent's death does
    assert process.returncode == 0


PARENT = """
import signal, sys
from agent_saga_core.demo.client import Service
service = Service.start(sys.argv[1])
print(service.url, flush=True)
signal.pause()
"""


def test_a_killed_parent_takes_its_service_along(tmp_path: Any) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "ledger.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        connection = http.client.HTTPConnection("127.0.0.1", int(url.rpartition(":")[2]), timeout=BOUND)
        connection.request("GET", "/health")
        connection.getresponse().read()
        parent.kill()
        # The service closes this connection by ending: a wait for its death that needs no sleep.
        assert connection.sock.recv(1) == b""
        connection.close()
    with pytest.raises(ConnectionError):
        Client(url).summary()


def test_two_services_cannot_share_a_ledger(own: Service) -> None:
    process, ready = spawn("--db", own.db)
    _, err = process.communicate(timeout=BOUND)
    assert ready == {} and process.returncode == 2
    assert err.startswith("demo service: cannot start") and len(err.splitlines()) == 1
    assert own.client().charge("c", 5)["id"] == "ch_1"


def test_a_service_that_does_not_start_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(RuntimeError, match="ended with 2"):
        Service.start(tmp_path / "missing" / "ledger.db")
    with pytest.raises(TimeoutError):
        Service.start(tmp_path / "ledger.db", ready_timeout=0.0)


def test_a_temporary_ledger_leaves_with_the_service() -> None:
    with Service.start() as service:
        assert os.path.exists(service.db)
    assert not os.path.exists(service.db)
    service.stop()  # harmless


def test_the_service_imports_nothing_of_the_engine() -> None:
    def modules(code: str) -> set[str]:
        code = f"import json, sys; {code}; print(json.dumps([*sys.modules]))"
        command = [sys.executable, "-c", code]
        return set(json.loads(subprocess.run(command, capture_output=True, check=True, timeout=BOUND).stdout))

    bare = modules("import agent_saga_core")
    added = modules("import agent_saga_core.demo.service, agent_saga_core.demo.client") - bare
    names = ("", ".service", ".desk", ".faults", ".ledger", ".client", ".calls")
    ours = {name for name in added if name.startswith("agent_saga_core")}
    assert ours == {f"agent_saga_core.demo{name}" for name in names}


def test_urls_are_checked() -> None:
    with pytest.raises(ValueError, match="no URL"):
        Client("127.0.0.1:8000")
    with pytest.raises(ValueError, match="ASCII"):
        Client("http://127.0.0.1:9").charge("c", 1, key="two\r\nlines")
