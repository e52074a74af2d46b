"""What the PostgreSQL log asks of its server: one statement for a batch, and updates that touch no index."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agent_saga_core.log.postgres import PostgresLog, connection, init
from agent_saga_core.log.postgres.address import address_of
from agent_saga_core.records import Record

from .between import Pooler
from .server import fresh_schema, sql
from .test_log_postgres_pooler import through

BOUND = 60.0


def record(saga: str, n: int, kind: str = "INTENT", *, epoch: int = 1, **data: Any) -> Record:
    return Record(saga=saga, n=n, epoch=epoch, type=kind, time=1000.0, data=data)


@pytest.fixture
def counted(uri: str) -> Iterator[tuple[Pooler, PostgresLog]]:
    """A log, and what counts its transactions; no heartbeat comes between."""
    pooler = Pooler(uri, size=4)
    address = through(pooler.port, fresh_schema(uri, lease=3600))
    init(address)
    log = PostgresLog(address)
    yield pooler, log
    log.close()
    pooler.close()


def test_a_batch_is_one_statement_in_a_transaction_of_its_own(counted: tuple[Pooler, PostgresLog]) -> None:
    pooler, log = counted
    for n in range(20):
        log.claim(f"s{n}", fresh=n % 2 == 0)

    def transactions(*records: Record) -> int:
        before = pooler.transactions
        log.flush([log.append(one) for one in records][-1])
        return pooler.transactions - before

    assert transactions(record("s0", 1, "START")) == 1  # a row that is made with its first record
    assert transactions(record("s0", 2)) == 1
    assert transactions(record("s0", 3), record("s0", 4), record("s0", 5)) == 1
    assert (
        transactions(*(record(f"s{n}", at, "START" if at == 1 else "INTENT") for n in range(1, 20) for at in (1, 2)))
        == 1
    )
    assert transactions(*(record(f"s{n}", 3, "COMMITTED") for n in range(1, 20))) == 1
    before = pooler.transactions
    for n in range(1, 20):
        log.release(f"s{n}")  # the final record has freed it
    assert pooler.transactions == before
    assert log.verify().records == 5 + 19 * 3


def test_one_saga_is_stored_without_the_arrays_of_a_batch(
    counted: tuple[Pooler, PostgresLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server plans what it is given each time, and a join with an array takes several times as long to plan."""
    _, log = counted
    asked: list[str] = []
    execute = connection.Connection.execute

    def noted(self: Any, query: Any, *given: Any, **more: Any) -> Any:
        asked.append(str(query))
        return execute(self, query, *given, **more)

    for saga in ("s", "t", "u"):
        log.claim(saga, fresh=True)
    monkeypatch.setattr(connection.Connection, "execute", noted)

    def arrays(*records: Record) -> int:
        del asked[:]
        log.flush([log.append(one) for one in records][-1])
        (statement,) = asked
        return statement.count("unnest(")

    assert arrays(record("s", 1, "START")) == 0  # a row that is made with its first record
    assert arrays(record("s", 2)) == 0
    assert arrays(record("s", 3), record("s", 4)) == 1  # its records, and nothing to find them by
    assert arrays(record("s", 5), record("t", 1, "START"), record("u", 1, "START")) == 2
    assert arrays(record("s", 6, "COMMITTED")) == 0


def test_a_claim_is_a_look_and_one_statement_that_fences_and_appends(counted: tuple[Pooler, PostgresLog]) -> None:
    pooler, log = counted
    log.claim("s")
    log.flush(log.append(record("s", 1, "START")))
    log.release("s")
    before = pooler.transactions
    assert log.claim("s")[-1].type == "CLAIM"
    assert pooler.transactions - before == 2


def test_updates_stay_in_their_page_and_touch_no_index(url: str) -> None:
    log = PostgresLog(url)
    for n in range(50):
        log.claim(f"s{n}", fresh=True)
    for at in range(1, 21):
        tickets = [log.append(record(f"s{n}", at, "START" if at == 1 else "INTENT", x="y" * 300)) for n in range(50)]
        log.flush(tickets[-1])
    log.close()  # a server tells of what a session did when that has ended
    statement = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = '{s}' AND relname = 'saga'"
    until = time.monotonic() + BOUND
    while (found := sql(url, statement)[0])[0] < 50 * 19:
        assert time.monotonic() < until, found
        threading.Event().wait(0.01)
    updates, hot = found
    assert hot > updates * 0.95, found


def test_the_schema_is_what_the_page_says(url: str) -> None:
    options = sql(url, "SELECT reloptions FROM pg_class WHERE oid = '{s}.saga'::regclass")
    assert options == [(["fillfactor=50"],)]
    collation = sql(
        url,
        "SELECT c.collname FROM pg_attribute a JOIN pg_collation c ON c.oid = a.attcollation"
        " WHERE a.attrelid = '{s}.saga'::regclass AND a.attname = 'id'",
    )
    assert collation == [("C",)]
    ((index,),) = sql(url, "SELECT indexdef FROM pg_indexes WHERE schemaname = '{s}' AND indexname = 'saga_open'")
    assert "WHERE (ended IS NULL)" in index
    assert address_of("postgresql://h/d").lease == 30.0
