# ruff: noqa: D102 - the name of a test is its sentence
"""`LogConformance`: what every store must do, as one pytest class with one fixture to override."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from agent_saga_core.errors import Fenced, LogCorrupted, LogUnavailable, SagaBusy
from agent_saga_core.log.base import Log
from agent_saga_core.log.lines import AnotherHistory, Lines
from agent_saga_core.records import Encoded, Record, encode
from agent_saga_core.testing.log_faults import BOUND, LogFaults, record

__all__ = ["LogConformance"]

TRIES = 30_000
"""How often a busy saga is asked for before the test has failed."""
HOSTILE: dict[str, Any] = {
    "quotes": '"\\"}{][',
    "controls": "".join(map(chr, range(32))) + "\x7f\x85\u2028\u2029",
    "astral": "\U0001f4a3 \u0000 \ufffd \uffff",
    "lines": "a\nb\r\nc",
    "looks like a line": '{"hash":"' + "0" * 64 + '","saga":"s","n":1}\n',
    "": {"": {"": []}},
    "__proto__": None,
    "$redacted": True,
    "numbers": [0, -1, 2**53, -(2**63), 2**64 - 1, 0.1, 1e308, 5e-324, -0.0],
    "deep": [[[[[[[[]]]]]]]],
}
IDS = (
    "plain",
    "ümläut ☃ 💣",
    "a/../b",
    "'; drop table records; --",
    'with "quotes" and \\',
    "x" * 512,
    " ",
    "%00%2f?#",
)


_moments = itertools.count(1_700_000_000)


def history(saga: str, *kinds: str, **data: Any) -> Lines:
    """The history of a saga as a log would hand it out: a record of each type, the first one with `data`.

    Each one made began later than those made before.
    """
    at = float(next(_moments))
    lines: list[Encoded] = []
    for n, kind in enumerate(kinds, 1):
        lines.append(encode(Record(saga=saga, n=n, epoch=1, type=kind, time=at, data=data if n == 1 else {"of": n})))
    return tuple(lines)


def erased(line: Encoded) -> Encoded:
    """The same record with its payload erased."""
    return line._replace(rest=b" " * (len(line.rest) - 2) + b"}\n")


class LogConformance(LogFaults):
    """The suite that every store passes. Override the fixture `open_log_again`.

    Set `survives_process = False` for a store in this process's memory: what a killed process leaves cannot be asked
    of it, and those tests say so. Set `lease` to the seconds for which a process that died still owns its sagas; 0
    says that they are free the moment it dies. Where the store can, override `end_leases`, `spoil` and `server`, too:
    what they do is how fencing, damage and a failing server are asked about, and what has none says so.
    """

    survives_process: ClassVar[bool] = True
    lease: ClassVar[float] = 0.0

    # --- what a store supplies

    @pytest.fixture
    def open_log_again(self) -> Callable[[], Log]:
        """A callable that opens the storage of this test once more, as another process would."""
        raise NotImplementedError("Override the fixture open_log_again: a callable that gives a fresh Log.")

    # --- what the suite makes of it

    @pytest.fixture
    def another(self, open_log_again: Callable[[], Log]) -> Iterator[Callable[[], Log]]:
        """`open_log_again`, with every log closed after the test."""
        opened: list[Log] = []

        def open_one() -> Log:
            opened.append(open_log_again())
            return opened[-1]

        yield open_one
        for one in reversed(opened):
            try:
                one.close()
            except LogUnavailable:
                continue  # a test broke it on purpose

    @pytest.fixture
    def log(self, another: Callable[[], Log]) -> Log:
        """A log on an empty storage."""
        return another()

    @pytest.fixture
    def saga(self) -> str:
        """The id of a saga of this test alone."""
        return uuid.uuid4().hex

    # --- the face

    def test_it_is_a_log(self, log: Log) -> None:
        assert isinstance(log, Log)
        assert log.url and ":" in log.url and log.max_result_bytes > 0 and log.clock.monotonic() is not None

    def test_an_empty_log(self, log: Log, saga: str) -> None:
        assert log.saga_ids() == () and log.unfinished().saga_ids == () and log.unfinished().damage == ()
        assert log.read(saga) == () and not log.is_live(saga) and not log.owned(saga)
        assert log.verify().intact and log.verify().records == 0

    # --- appending and flushing

    def test_records_come_back_equal_and_in_order(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.claim(saga, fresh=True)
        written = [record(saga, n, "START" if n == 1 else "INTENT", x=n) for n in range(1, 30)]
        tickets = [log.append(one) for one in written]
        log.flush(tickets[-1])
        assert tickets == sorted(set(tickets))
        assert log.read(saga) == tuple(written) == another().read(saga)

    def test_what_is_flushed_is_there_for_others_at_once(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        other = another()
        log.claim(saga, fresh=True)
        for n in range(1, 4):
            log.flush(log.append(record(saga, n, "START" if n == 1 else "INTENT")))
            assert [one.n for one in other.read(saga)] == list(range(1, n + 1))

    def test_write_is_there_for_others_as_well(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.claim(saga, fresh=True)
        log.write(log.append(record(saga, 1, "START")))
        assert [one.n for one in another().read(saga)] == [1]

    def test_flushing_a_ticket_flushes_what_came_before(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.claim(saga, fresh=True)
        log.append(record(saga, 1, "START"))
        log.append(record(saga, 2))
        log.flush(log.append(record(saga, 3)))
        assert [one.n for one in another().read(saga)] == [1, 2, 3]
        log.flush(0)

    def test_a_plain_number_is_a_ticket(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.claim(saga, fresh=True)
        log.flush(int(str(int(log.append(record(saga, 1, "START"))))))
        assert len(another().read(saga)) == 1

    def test_a_repeated_append_stores_once(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.claim(saga, fresh=True)
        first = log.append(record(saga, 1, "START", x=[1]))
        assert log.append(record(saga, 1, "START", x=[1])) == first
        log.flush(first)
        assert log.append(record(saga, 1, "START", x=[1])) == first
        log.flush(log.append(record(saga, 2)))
        assert [one.n for one in another().read(saga)] == [1, 2]

    @pytest.mark.parametrize("n", [1, 2, 4, 5])
    def test_a_number_that_does_not_follow_is_refused_and_nowhere(self, log: Log, saga: str, n: int) -> None:
        log.claim(saga, fresh=True)
        log.append(record(saga, 1, "START"))
        log.append(record(saga, 2, x="two"))
        with pytest.raises(ValueError, match=r"."):
            log.append(record(saga, n, x="other"))
        log.flush(log.append(record(saga, 3)))
        assert [one.n for one in log.read(saga)] == [1, 2, 3] and log.read(saga)[1].data == {"x": "two"}

    @pytest.mark.parametrize(
        "value",
        [object(), {1, 2}, float("nan"), float("inf"), b"bytes", (1, 2), {1: 2}, "\ud800"],
        ids=["object", "set", "nan", "inf", "bytes", "tuple", "number as key", "surrogate"],
    )
    def test_what_cannot_be_encoded_is_refused_and_nowhere(self, log: Log, saga: str, value: Any) -> None:
        log.claim(saga, fresh=True)
        with pytest.raises(ValueError, match=r"."):
            log.append(record(saga, 1, "START", x=value))
        log.flush(log.append(record(saga, 1, "START", x="fine")))
        assert [one.data for one in log.read(saga)] == [{"x": "fine"}]

    def test_the_record_is_a_copy(self, log: Log, saga: str) -> None:
        log.claim(saga, fresh=True)
        data: dict[str, Any] = {"x": [1]}
        ticket = log.append(record(saga, 1, "START", **data))
        data["x"].append(2)
        log.flush(ticket)
        assert log.read(saga)[0].data == {"x": [1]}

    def test_hostile_values_come_back_equal(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.claim(saga, fresh=True)
        log.append(record(saga, 1, "START", **HOSTILE))
        log.flush(log.append(record(saga, 2, x=HOSTILE)))
        for reader in (log, another()):
            assert [one.data for one in reader.read(saga)] == [HOSTILE, {"x": HOSTILE}]
        assert repr(log.read(saga)[0].data["numbers"]) == repr(HOSTILE["numbers"])
        assert another().verify().intact

    @pytest.mark.parametrize("saga_id", IDS, ids=range(len(IDS)))
    def test_any_saga_id(self, log: Log, another: Callable[[], Log], saga_id: str) -> None:
        log.claim(saga_id)
        log.flush(log.append(record(saga_id, 1, "START")))
        other = another()
        assert other.saga_ids() == (saga_id,) and other.read(saga_id)[0].saga == saga_id
        assert other.is_live(saga_id) and not other.is_live("another")

    def test_large_records(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.claim(saga, fresh=True)
        large: dict[str, Any] = {"text": "ü" * 1_500_000, "list": list(range(50_000))}
        for n in range(1, 4):
            log.append(record(saga, n, "START" if n == 1 else "DONE", **large))
        log.flush(log.append(record(saga, 4)))
        found = another().read(saga)
        assert [one.n for one in found] == [1, 2, 3, 4] and found[2].data == large

    def test_an_optional_record_of_a_newer_version_is_no_damage(self, log: Log, saga: str) -> None:
        log.claim(saga, fresh=True)
        log.append(record(saga, 1, "START"))
        later = Record(saga=saga, n=2, epoch=1, type="LATER", time=1.0, data={}, critical=False)
        log.append(later)
        log.flush(log.append(record(saga, 3)))
        assert [one.n for one in log.read(saga)] == [1, 2, 3] and log.read(saga)[1] == later

    # --- owning

    def test_an_absent_saga_is_claimed_with_nothing(self, log: Log, saga: str) -> None:
        assert log.claim(saga) == () and log.owned(saga) and log.is_live(saga)
        assert log.saga_ids() == () and log.unfinished().saga_ids == ()

    def test_nobody_but_the_owner_appends(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        with pytest.raises((Fenced, ValueError)):
            log.append(record(saga, 1, "START"))
        log.claim(saga)
        log.flush(log.append(record(saga, 1, "START")))
        with pytest.raises((Fenced, ValueError)):
            another().append(record(saga, 2))
        log.release(saga)
        with pytest.raises((Fenced, ValueError)):
            log.append(record(saga, 2))
        assert [one.n for one in log.read(saga)] == [1]

    def test_an_owned_saga_is_busy_for_everybody(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.claim(saga)
        other = another()
        for one in (other, log):
            with pytest.raises(SagaBusy):
                one.claim(saga)
        assert log.owned(saga) and not other.owned(saga) and other.is_live(saga)
        log.flush(log.append(record(saga, 1, "START")))  # the refused claims have changed nothing
        assert len(other.read(saga)) == 1

    def test_a_claim_appends_a_claim_whose_number_is_the_epoch(
        self, log: Log, another: Callable[[], Log], saga: str
    ) -> None:
        log.claim(saga)
        log.append(record(saga, 1, "START"))
        log.append(record(saga, 2))
        log.release(saga)
        other = another()
        found = other.claim(saga)
        assert [(one.n, one.type) for one in found] == [(1, "START"), (2, "INTENT"), (3, "CLAIM")]
        assert found[-1].epoch == 3
        other.flush(other.append(record(saga, 4, "DONE", epoch=3)))
        other.release(saga)
        assert [one.epoch for one in another().claim(saga)] == [1, 1, 3, 3, 5]

    def test_a_release_flushes_and_is_harmless_twice(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.claim(saga)
        log.append(record(saga, 1, "START"))
        log.release(saga)
        log.release(saga)
        log.release("never seen")
        other = another()
        assert not other.is_live(saga) and len(other.read(saga)) == 1 and len(other.claim(saga)) == 2

    @pytest.mark.parametrize("final", ["COMMITTED", "ROLLED_BACK"])
    def test_nothing_follows_a_final_record(self, log: Log, another: Callable[[], Log], saga: str, final: str) -> None:
        log.claim(saga)
        log.append(record(saga, 1, "START"))
        log.flush(log.append(record(saga, 2, final)))
        with pytest.raises(ValueError, match=r"."):
            log.append(record(saga, 3))
        log.release(saga)
        other = another()
        assert [one.type for one in other.claim(saga)] == ["START", final]  # owned, and no CLAIM
        with pytest.raises(ValueError, match=r"."):
            other.append(record(saga, 3))
        assert other.unfinished().saga_ids == () and other.saga_ids() == (saga,)

    def test_reading_needs_no_ownership(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.claim(saga)
        log.flush(log.append(record(saga, 1, "START")))
        other = another()
        assert len(other.read(saga)) == 1 and other.saga_ids() == (saga,) and other.verify().records == 1
        assert other.unfinished().saga_ids == (saga,)
        log.flush(log.append(record(saga, 2)))
        assert len(other.read(saga)) == 2

    def test_unfinished_and_saga_ids_are_oldest_first(self, log: Log, another: Callable[[], Log]) -> None:
        ids = [f"{letter}-{uuid.uuid4().hex}" for letter in "dacb"]
        for saga_id in ids:
            log.claim(saga_id)
            log.flush(log.append(record(saga_id, 1, "START")))
        log.flush(log.append(record(ids[1], 2, "COMMITTED")))
        log.append(record(ids[2], 2, "NEEDS_ATTENTION"))
        log.release(ids[2])
        other = another()
        assert list(other.saga_ids()) == ids
        assert list(other.unfinished().saga_ids) == [ids[0], ids[2], ids[3]]

    def test_one_of_many_claimers_wins(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.claim(saga)
        log.append(record(saga, 1, "START"))
        log.release(saga)
        logs = [another() for _ in range(3)]
        start = threading.Barrier(12, timeout=BOUND)
        won: list[tuple[Log, tuple[Record, ...]]] = []

        def claim(one: Log) -> None:
            start.wait()
            try:
                won.append((one, one.claim(saga)))
            except SagaBusy:
                return

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(claim, logs * 4, timeout=BOUND))
        ((owner, found),) = won
        assert [one.n for one in found] == [1, 2]
        assert [one.owned(saga) for one in logs] == [one is owner for one in logs]

    def test_ownership_goes_from_hand_to_hand_without_a_gap(
        self, log: Log, another: Callable[[], Log], saga: str
    ) -> None:
        log.claim(saga)
        log.append(record(saga, 1, "START"))
        log.release(saga)
        logs = [another() for _ in range(3)]
        pause = threading.Event()

        def work(one: Log) -> int:
            done = tries = 0
            while done < 5 and tries < TRIES:
                tries += 1
                try:
                    found = one.claim(saga)
                except SagaBusy:
                    pause.wait(0.001)  # the others may be syncing; nothing tells a waiter that a saga is free
                    continue
                last = found[-1]
                one.append(record(saga, last.n + 1, epoch=last.n, x=done))
                one.release(saga)
                done += 1
            return done

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(work, logs, timeout=BOUND)) == [5, 5, 5]
        found = another().read(saga)
        assert [one.n for one in found] == list(range(1, 32))
        assert [one.epoch for one in found[1:]] == [n - (n % 2) for n in range(2, 32)]

    # --- several at once

    def test_many_threads_lose_nothing(self, log: Log, another: Callable[[], Log]) -> None:
        ids = [uuid.uuid4().hex for _ in range(16)]

        def work(saga_id: str) -> None:
            log.claim(saga_id, fresh=True)
            for n in range(1, 21):
                ticket = log.append(record(saga_id, n, "START" if n == 1 else "INTENT", x=n))
                if n % 2:
                    log.flush(ticket)
            log.release(saga_id)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, ids, timeout=BOUND))
        other = another()
        assert sorted(other.saga_ids()) == sorted(ids)
        for saga_id in ids:
            assert [one.data.get("x") for one in other.read(saga_id)] == list(range(1, 21))
        assert other.verify().intact and other.verify().records == 320

    def test_several_writers_share_a_storage(self, another: Callable[[], Log]) -> None:
        logs = [another() for _ in range(3)]
        ids = [uuid.uuid4().hex for _ in range(9)]

        def work(at: int) -> None:
            one = logs[at % 3]
            one.claim(ids[at])
            for n in range(1, 11):
                one.flush(one.append(record(ids[at], n, "START" if n == 1 else "INTENT")))

        with ThreadPoolExecutor(9) as pool:
            list(pool.map(work, range(9), timeout=BOUND))
        for one in (*logs, another()):
            assert [len(one.read(saga_id)) for saga_id in ids] == [10] * 9
            assert one.verify().intact and sorted(one.unfinished().saga_ids) == sorted(ids)

    def test_two_event_loops_share_a_log(self, log: Log, another: Callable[[], Log]) -> None:
        ids = [uuid.uuid4().hex for _ in range(2)]

        async def work(saga_id: str) -> None:
            log.claim(saga_id, fresh=True)
            for n in range(1, 16):
                await log.aflush(log.append(record(saga_id, n, "START" if n == 1 else "INTENT")))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(asyncio.run, map(work, ids), timeout=BOUND))
        assert [len(another().read(saga_id)) for saga_id in ids] == [15, 15]

    def test_many_coroutines_share_a_loop(self, log: Log, another: Callable[[], Log]) -> None:
        ids = [uuid.uuid4().hex for _ in range(50)]

        async def work(saga_id: str) -> None:
            log.claim(saga_id, fresh=True)
            await log.aflush(log.append(record(saga_id, 1, "START")))

        async def everybody() -> None:
            async with asyncio.timeout(BOUND):
                await asyncio.gather(*map(work, ids))

        asyncio.run(everybody())
        assert sorted(another().saga_ids()) == sorted(ids)

    def test_cancelling_aflush_cancels_the_wait_and_not_the_flush(
        self, log: Log, another: Callable[[], Log], saga: str
    ) -> None:
        async def waits() -> None:
            log.claim(saga, fresh=True)
            ticket = log.append(record(saga, 1, "START"))
            cancelled = asyncio.create_task(log.aflush(ticket))
            other = asyncio.create_task(log.aflush(log.append(record(saga, 2))))
            await asyncio.sleep(0)
            cancelled.cancel()
            async with asyncio.timeout(BOUND):
                await asyncio.wait({cancelled, other})
                other.result()
            await log.aflush(log.append(record(saga, 3)))

        asyncio.run(waits())
        assert [one.n for one in another().read(saga)] == [1, 2, 3]

    # --- compaction

    def test_compaction_touches_nothing_that_has_not_ended(self, log: Log, another: Callable[[], Log]) -> None:
        ids = [f"{n}-{uuid.uuid4().hex}" for n in range(12)]
        for at, saga_id in enumerate(ids):
            log.claim(saga_id)
            log.append(record(saga_id, 1, "START", x=HOSTILE))
            log.flush(log.append(record(saga_id, 2, "COMMITTED" if at % 3 else "INTENT")))
            if at % 2:
                log.release(saga_id)
        before = {saga_id: log.read(saga_id) for saga_id in ids}
        other = another()
        other.compact(keep_days=0.0, dry_run=True)
        assert list(other.saga_ids()) == ids  # it only said what would be done
        other.compact(keep_days=0.0)
        open_ids = ids[::3]
        for one in (other, log, another()):
            assert one.verify().intact and list(one.unfinished().saga_ids) == open_ids
            for saga_id in ids:
                found = one.read(saga_id)
                assert found == before[saga_id] or (saga_id not in open_ids and found == ())
        log.flush(log.append(record(ids[0], 3)))  # still owned
        assert [one.n for one in another().claim(ids[3])] == [1, 2, 3]

    def test_what_was_flushed_together_is_forgotten_apart(self, log: Log, another: Callable[[], Log]) -> None:
        owner = another()
        owner.claim("ended", fresh=True)
        owner.claim("open", fresh=True)
        owner.append(record("ended", 1, "START"))
        owner.flush(owner.append(record("open", 1, "START")))
        owner.append(record("open", 2))
        owner.flush(owner.append(record("ended", 2)))
        owner.flush(owner.append(record("ended", 3, "COMMITTED")))
        owner.close()
        for _ in range(2):
            log.compact(keep_days=0.0)
            assert log.verify().intact and set(log.saga_ids()) <= {"ended", "open"}
        assert [one.n for one in log.claim("open")] == [1, 2, 3]
        log.flush(log.append(record("open", 4, "COMMITTED", epoch=3)))
        log.release("open")
        log.compact(keep_days=0.0)
        assert log.verify().intact and log.unfinished().saga_ids == ()

    def test_compaction_and_retention_beside_live_writers(self, log: Log, another: Callable[[], Log]) -> None:
        """What ended long ago goes, what ended lately and what has not ended stays, and nobody is held up."""
        stop = threading.Event()
        begun = threading.Semaphore(0)
        now = log.clock.time()

        def work(at: int) -> int:
            n = 0
            while not stop.is_set():
                n += 1
                saga_id = f"{at}-{n}"
                time_ = now if n % 3 == 1 else 1000.0
                log.claim(saga_id, fresh=n % 2 == 0)
                log.append(Record(saga=saga_id, n=1, epoch=1, type="START", time=time_, data={}))
                last = "INTENT" if n % 3 == 0 else "COMMITTED"
                log.flush(log.append(Record(saga=saga_id, n=2, epoch=1, type=last, time=time_, data={"x": "y" * 2000})))
                log.release(saga_id)
                begun.release()
            return n

        compactor = another()
        forgotten = 0
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(work, at) for at in range(3)]
            try:
                for _ in range(6):
                    for _ in range(12):
                        assert begun.acquire(timeout=BOUND), "the writers do not get on"
                    forgotten += compactor.compact(keep_days=1.0).sagas
            finally:
                stop.set()
            counts = [future.result(BOUND) for future in futures]
        for one in (log, another()):
            found = set(one.saga_ids())
            for at, most in enumerate(counts):
                lately_or_open = {f"{at}-{n}" for n in range(1, most + 1) if n % 3 != 2}
                assert lately_or_open <= found
            assert sorted(one.unfinished().saga_ids) == sorted(
                f"{at}-{n}" for at, most in enumerate(counts) for n in range(3, most + 1, 3)
            )
            assert one.verify().intact
        assert forgotten + len(log.saga_ids()) == sum(counts)

    def test_ten_thousand_unfinished_are_found_beside_as_many_that_ended(
        self, log: Log, another: Callable[[], Log]
    ) -> None:
        ids = [f"saga-{at}" for at in range(20_000)]
        ticket = 0
        for at, saga_id in enumerate(ids):
            log.claim(saga_id, fresh=True)
            ticket = log.append(record(saga_id, 1, "START"))
            if at % 2:
                ticket = log.append(record(saga_id, 2, "COMMITTED"))
        log.flush(ticket)
        for one in (log, another()):
            found = one.unfinished()
            assert list(found.saga_ids) == ids[::2] and found.damage == ()

    def test_compaction_keeps_what_ended_lately(self, log: Log, saga: str) -> None:
        log.claim(saga)
        now = log.clock.time()
        log.append(Record(saga=saga, n=1, epoch=1, type="START", time=now, data={}))
        log.flush(log.append(Record(saga=saga, n=2, epoch=1, type="COMMITTED", time=now, data={})))
        log.release(saga)
        log.compact(keep_days=1.0)
        assert len(log.read(saga)) == 2
        with pytest.raises(ValueError, match=r"."):
            log.compact(keep_days=-1.0)

    # --- moving

    def test_lines_leave_nothing_out(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        assert log.lines(saga) == ()
        log.claim(saga)
        written = [
            record(saga, 1, "START", **HOSTILE),
            Record(saga=saga, n=2, epoch=1, type="LATER", time=1.5, data={"x": [1]}, critical=False),
            record(saga, 3, "COMMITTED"),
        ]
        log.flush([log.append(one) for one in written][-1])
        found = log.lines(saga)
        assert all(encode(one).same_content(line) for one, line in zip(written, found, strict=True))
        assert another().lines(saga) == found
        assert log.read(saga) == tuple(written)

    def test_a_history_is_adopted_exactly_as_it_is(self, log: Log, another: Callable[[], Log]) -> None:
        kinds: dict[str, tuple[str, ...]] = {
            "z-ended": ("START", "INTENT", "DONE", "CLAIM", "COMMITTED"),
            "open ☃": ("START", "INTENT", "CLAIM", "DONE"),
            "a-short": ("START",),
            "undone": ("START", "INTENT", "ROLLED_BACK"),
        }
        given = {saga_id: history(saga_id, *of, **HOSTILE) for saga_id, of in kinds.items()}
        done = log.adopt(given)
        assert (done.stored, done.there, done.refused) == (tuple(given), (), {})
        for one in (log, another()):
            assert {saga_id: one.lines(saga_id) for saga_id in given} == given
            assert [found.type for found in one.read("z-ended")] == list(kinds["z-ended"])
            assert one.read("a-short")[0].data == HOSTILE
            assert one.saga_ids() == tuple(given) and one.unfinished().saga_ids == ("open ☃", "a-short")
            assert not one.unfinished().damage and not any(map(one.is_live, given)) and not any(map(one.owned, given))
            assert one.verify().intact and one.verify().records == 13

    def test_what_was_adopted_goes_on_like_any_other(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.adopt({saga: history(saga, "START", "INTENT", "CLAIM"), "over": history("over", "START", "COMMITTED")})
        other = another()
        found = other.claim(saga)
        assert [(one.n, one.type) for one in found[2:]] == [(3, "CLAIM"), (4, "CLAIM")]
        other.flush(other.append(record(saga, 5, "DONE", epoch=4)))
        assert len(other.claim("over")) == 2
        with pytest.raises(ValueError, match=r"."):
            other.append(record("over", 3))
        for saga_id in (saga, "over"):
            other.release(saga_id)
        assert [one.epoch for one in log.read(saga)][3:] == [4, 4] and another().verify().intact

    def test_a_history_that_is_there_is_left_as_it_is(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        given = {saga: history(saga, "START", "INTENT"), "over": history("over", "START", "ROLLED_BACK")}
        log.adopt(given)
        for one in (log, another()):
            again = one.adopt(given)
            assert (again.stored, again.there, again.refused) == ((), tuple(given), {})
        log.claim(saga)
        log.append(record(saga, 4, "COMMITTED", epoch=3))
        log.release(saga)
        gone_on = log.lines(saga)
        fresh = {**given, "new": history("new", "START", "COMMITTED")}
        again = another().adopt(fresh)
        assert (again.stored, again.there, again.refused) == (("new",), tuple(given), {})
        assert log.lines(saga) == gone_on and gone_on[:2] == given[saga] and len(gone_on) == 4
        assert another().verify().intact and log.verify().records == 8

    def test_another_history_of_that_id_is_refused_and_the_rest_adopted(
        self, log: Log, another: Callable[[], Log]
    ) -> None:
        there = history("other", "START", "COMMITTED"), history("shorter", "START")
        log.adopt({"other": there[0], "shorter": there[1]})
        longer = (*there[1], encode(record("shorter", 2, "COMMITTED")))
        given = {
            "first": history("first", "START", "COMMITTED"),
            "other": history("other", "START", "COMMITTED"),  # equal records, other salts
            "shorter": longer,
            "last": history("last", "START"),
        }
        done = another().adopt(given)
        assert done.stored == ("first", "last") and done.there == ()
        assert {saga_id: type(error) for saga_id, error in done.refused.items()} == {
            "other": AnotherHistory,
            "shorter": AnotherHistory,
        }
        assert (log.lines("other"), log.lines("shorter")) == there
        assert log.lines("last") == given["last"] and log.verify().intact

    def test_what_somebody_owns_is_not_adopted(self, log: Log, another: Callable[[], Log], saga: str) -> None:
        log.claim("reserved")  # nothing of it is stored yet
        log.claim(saga)
        log.flush(log.append(record(saga, 1, "START")))
        given = {
            "reserved": history("reserved", "START", "COMMITTED"),
            saga: log.lines(saga),
            "free": history("free", "START"),
        }
        for one in (another(), log):
            done = one.adopt(given)
            assert {name: type(error) for name, error in done.refused.items()} == {"reserved": SagaBusy, saga: SagaBusy}
        log.flush(log.append(record("reserved", 1, "START")))
        log.flush(log.append(record(saga, 2)))
        assert [len(another().lines(name)) for name in given] == [1, 2, 1]
        log.release("reserved")
        log.claim("given back")
        log.release("given back")
        assert another().adopt({"given back": history("given back", "START")}).stored == ("given back",)

    @pytest.mark.parametrize("fault", ["empty", "gap", "name", "digest", "shape", "behind the end"])
    def test_what_is_no_history_is_refused_and_nothing_stored(self, log: Log, fault: str) -> None:
        good = history("s", "START", "INTENT", "DONE")
        bad: Lines = {
            "empty": (),
            "gap": (good[0], good[2]),
            "name": history("t", "START"),
            "digest": (good[0]._replace(rest=good[1].rest),),
            "shape": (good[0]._replace(head=good[0].head + b',"x":1'),),
            "behind the end": history("s", "START", "COMMITTED", "INTENT"),
        }[fault]
        with pytest.raises(ValueError, match=r"."):
            log.adopt({"fine": history("fine", "START"), "s": bad})
        assert log.saga_ids() == () and log.verify().records == 0
        assert log.adopt({}).stored == ()

    def test_erased_and_unknown_records_are_adopted_as_they_are(self, log: Log, another: Callable[[], Log]) -> None:
        start, intent, final = history("erased", "START", "INTENT", "COMMITTED", x="secret")
        newer = encode(Record(saga="newer", n=2, epoch=1, type="LATER", time=2.0, data={"x": 1}))
        given = {
            "erased": (erased(start), intent, final),
            "newer": (*history("newer", "START"), newer),
            "plain": history("plain", "START", "COMMITTED"),
        }
        assert log.adopt(given).stored == tuple(given)
        for one in (log, another()):
            assert {saga_id: one.lines(saga_id) for saga_id in given} == given
            for saga_id in ("erased", "newer"):
                with pytest.raises(LogCorrupted):
                    one.read(saga_id)
            assert len(one.read("plain")) == 2 and one.unfinished().saga_ids == ("newer",)
            assert one.verify().intact and one.verify().records == 7  # neither is damage
        with pytest.raises(LogCorrupted):
            log.claim("newer")
        assert another().adopt(given).there == tuple(given)
        log.adopt({"later": history("later", "START")})  # so that a store may give back what was stored with the others
        log.compact(keep_days=0.0)
        assert another().verify().intact and log.lines("newer") == given["newer"]

    def test_many_and_large_histories_are_adopted_at_once(self, log: Log, another: Callable[[], Log]) -> None:
        large: dict[str, Any] = {"text": "ü" * 1_500_000}
        given = {f"s{n:04d}": history(f"s{n:04d}", "START", "INTENT", "DONE", "COMMITTED") for n in range(400)}
        at = float(next(_moments))
        given["large"] = tuple(
            encode(Record(saga="large", n=n, epoch=1, type="DONE" if n > 1 else "START", time=at, data=large))
            for n in range(1, 8)
        )
        given["long"] = history("long", "START", *["INTENT"] * 3_000)
        assert len(log.adopt(given).stored) == 402
        other = another()
        assert all(other.lines(saga_id) == lines for saga_id, lines in given.items())
        assert other.saga_ids() == tuple(given) and other.unfinished().saga_ids == ("large", "long")
        assert other.verify().intact and other.verify().records == 1_600 + 7 + 3_001

    def test_adopting_and_appending_at_once(self, log: Log, another: Callable[[], Log]) -> None:
        other = another()
        start = threading.Barrier(2, timeout=BOUND)

        def append() -> None:
            start.wait()
            for n in range(30):
                saga_id = f"own-{n}"
                log.claim(saga_id)
                log.append(record(saga_id, 1, "START"))
                log.flush(log.append(record(saga_id, 2, "COMMITTED")))
                log.release(saga_id)

        def adopt() -> list[str]:
            start.wait()
            stored: list[str] = []
            for n in range(6):
                ids = [f"given-{n}-{i}" for i in range(5)]
                stored += other.adopt({saga_id: history(saga_id, "START", "COMMITTED") for saga_id in ids}).stored
            return stored

        with ThreadPoolExecutor(2) as pool:
            appending = pool.submit(append)
            assert len(pool.submit(adopt).result(BOUND)) == 30
            appending.result(BOUND)
        found = another()
        assert found.verify().intact and found.verify().records == 120 and found.unfinished().saga_ids == ()

    # --- the end

    def test_closing_flushes_releases_and_takes_nothing_more(
        self, log: Log, another: Callable[[], Log], saga: str
    ) -> None:
        log.claim(saga)
        ticket = log.append(record(saga, 1, "START"))
        log.close()
        log.close()
        for call in (
            lambda: log.append(record(saga, 2)),
            lambda: log.claim(uuid.uuid4().hex),
            lambda: log.read(saga),
            log.saga_ids,
            log.unfinished,
            lambda: log.lines(saga),
            lambda: log.adopt({saga: history(saga, "START")}),
        ):
            with pytest.raises(LogUnavailable):
                call()
        log.release(saga)
        log.flush(ticket)  # that one is durable
        other = another()
        assert len(other.read(saga)) == 1 and not other.is_live(saga) and len(other.claim(saga)) == 2

    def test_a_killed_process_leaves_what_it_flushed_and_no_owner(
        self, log: Log, open_log_again: Callable[[], Log], saga: str
    ) -> None:
        if not self.survives_process:
            pytest.skip("this store is in the memory of its process: nothing survives that, and it says so")

        def die() -> None:
            one = open_log_again()
            one.claim(saga)
            one.append(record(saga, 1, "START"))
            one.flush(one.append(record(saga, 2, x=HOSTILE)))
            one.append(record(saga, 3))
            os.kill(os.getpid(), signal.SIGKILL)

        assert _in_child(die) == -signal.SIGKILL
        assert [one.n for one in log.read(saga)][:2] == [1, 2] and log.read(saga)[1].data == {"x": HOSTILE}
        until = time.monotonic() + (self.lease and self.lease + BOUND)
        pause = threading.Event()
        while log.is_live(saga) and time.monotonic() < until:
            pause.wait(0.01)
        assert not log.is_live(saga) and log.unfinished().saga_ids == (saga,) and log.verify().intact
        found = log.claim(saga)
        assert found[-1].type == "CLAIM" and [one.n for one in found] == list(range(1, len(found) + 1))

    def test_a_forked_child_has_no_part_in_its_parents_log(self, log: Log, saga: str) -> None:
        if not self.survives_process:
            pytest.skip("this store is in the memory of its process: a child has its own copy of it")
        log.claim(saga)
        log.flush(log.append(record(saga, 1, "START")))

        def meddle() -> None:
            for call in (lambda: log.append(record(saga, 2)), lambda: log.claim("other"), log.saga_ids):
                try:
                    call()
                except (LogUnavailable, Fenced):
                    continue
                os._exit(1)
            log.release(saga)
            log.close()
            os._exit(0)

        assert _in_child(meddle) == 0
        assert log.owned(saga) and log.is_live(saga)
        log.flush(log.append(record(saga, 2)))
        assert [one.n for one in log.read(saga)] == [1, 2]


def _in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; how it ended, negative for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads: the wait is bounded
        pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(70)
    timer = threading.Timer(BOUND, os.kill, (pid, signal.SIGKILL))
    timer.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        timer.cancel()
