# ruff: noqa: D102 - the name of a test is its sentence
"""The part of `LogConformance` in which something goes wrong: what is lost, damaged, cut, and written by others."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from agent_saga_core.declare import ActionSemantics, Compensation
from agent_saga_core.errors import Fenced, LogCorrupted, LogUnavailable, SagaBusy
from agent_saga_core.log.base import Log
from agent_saga_core.records import Record
from agent_saga_core.recovery import read_saga, recover
from agent_saga_core.registry import compensator
from agent_saga_core.saga import Saga, saga_scope
from agent_saga_core.state import SagaStatus

__all__ = ["BOUND", "LogFaults", "LogServer", "record"]

BOUND = 30.0
"""Seconds of real time after which a thread or a process that does not end has failed the test."""
BAD_IDS = ("", "x" * 513, "ü" * 257, "a\nb", "a\0b", "\x1f", "\x7f", "a\x85", "\ud800")
AT_ONCE = 4
"""Sagas, each with a thread, while a server is cut off or restarted."""


def record(saga: str, n: int, kind: str = "INTENT", *, epoch: int = 1, **data: Any) -> Record:
    """A record for a test; plain, not folded by anyone."""
    return Record(saga=saga, n=n, epoch=epoch, type=kind, time=1_700_000_000.25, data=data)


class LogServer(Protocol):
    """The server of a store, as something that can fail. For the fixture `server` of `LogConformance`."""

    def cut(self) -> None:
        """End every connection that a log has to it, in the middle of whatever it does; new ones are taken."""
        ...

    def go_away(self) -> threading.Event:
        """Do so, and take no new one; the event is set as soon as one was refused."""
        ...

    def come_back(self) -> None:
        """Take connections again."""
        ...

    @property
    def restart(self) -> Callable[[], None] | None:
        """End the server and start it on the same data; None where this server is not the test's to end."""
        ...


class LogFaults:
    """See `LogConformance`, which has this and what every store can be asked."""

    # --- what a store supplies, where it can

    @pytest.fixture
    def end_leases(self) -> Callable[[], None] | None:
        """Let the lease of everybody who owns something run out, as far as the store knows, and tell nobody.

        None says that a process that lives cannot lose what it owns.
        """
        return None

    @pytest.fixture
    def spoil(self) -> Callable[[str, int], None] | None:
        """Change what is stored of a saga's record, given its number, behind the back of the log.

        None says that there is nothing beneath the log that could be changed.
        """
        return None

    @pytest.fixture
    def server(self) -> LogServer | None:
        """The server of the store; None if there is none.

        What `open_log_again` opens in a test that takes this fixture must have its connections cut by it.
        """
        return None

    # --- fencing

    def test_a_former_owner_is_fenced(
        self, log: Log, another: Callable[[], Log], saga: str, end_leases: Callable[[], None] | None
    ) -> None:
        """An append is refused, nothing of it is behind the CLAIM, and what was buffered before is refused as well."""
        log.claim(saga)
        log.flush(log.append(record(saga, 1, "START")))
        if end_leases is None:
            with pytest.raises(SagaBusy):
                another().claim(saga)
            pytest.skip("a process that lives cannot lose a saga on this store: there is nobody to fence")
        buffered = log.append(record(saga, 2, x="late"))
        end_leases()
        other = another()
        assert [one.type for one in other.claim(saga)] == ["START", "CLAIM"]
        other.flush(other.append(record(saga, 3, epoch=2, x="new")))
        with pytest.raises(Fenced):
            log.flush(buffered)
        with pytest.raises(Fenced):
            log.flush(log.append(record(saga, 3, x="later")))
        with pytest.raises(Fenced):
            log.write(buffered)
        with pytest.raises(Fenced):
            log.release(saga)
        for one in (log, other, another()):
            assert [(r.n, r.epoch, r.data.get("x")) for r in one.read(saga)] == [
                (1, 1, None),
                (2, 2, None),
                (3, 2, "new"),
            ]
        assert other.owned(saga) and not log.owned(saga) and other.verify().intact

    # --- damage

    def test_damage_names_its_saga_and_stops_no_other(
        self, log: Log, another: Callable[[], Log], spoil: Callable[[str, int], None] | None
    ) -> None:
        ids = [f"{name}-{uuid.uuid4().hex}" for name in ("good", "bad", "fine")]
        for saga_id in ids:
            log.claim(saga_id)
            for n in (1, 2, 3):
                log.flush(log.append(record(saga_id, n, "START" if n == 1 else "INTENT", x=saga_id)))
            log.release(saga_id)
        log.close()
        if spoil is None:
            pytest.skip("there is nothing beneath this store that could be damaged")
        good, bad, fine = ids
        spoil(bad, 2)
        other = another()
        for use in (other.read, other.claim):
            with pytest.raises(LogCorrupted, match=bad) as caught:
                use(bad)
            assert caught.value.saga_id == bad
        assert not other.owned(bad) and bad in other.unfinished().saga_ids
        found = other.verify()
        assert not found.intact and found.first_broken
        assert found.damage and all(damage.saga_ids == (bad,) for damage in found.damage)
        assert recover(other, saga_id=bad).damaged == (bad,)
        for saga_id in (good, fine):
            assert [one.n for one in other.claim(saga_id)] == [1, 2, 3, 4]
        other.compact(keep_days=0.0)
        with pytest.raises(LogCorrupted):
            another().read(bad)  # it is left to be found

    # --- what a newer version wrote

    def test_what_a_newer_minor_version_adds_is_read_over(
        self, log: Log, another: Callable[[], Log], saga: str
    ) -> None:
        """Types that are not critical, and fields in the data of types that are known: the saga is recovered."""
        undone = _left_open(log, saga)
        newer = another()
        epoch = newer.claim(saga)[-1].n
        newer.append(Record(saga=saga, n=epoch + 1, epoch=epoch, type="LATER", time=1.0, data={}, critical=False))
        newer.append(record(saga, epoch + 2, "ABORT", epoch=epoch, reason="why", added={"x": [1]}))
        newer.release(saga)
        other = another()
        state = read_saga(other, saga)
        assert (state.status, len(state.timeline)) == (SagaStatus.RUNNING, epoch + 2)
        assert recover(other).recovered == (saga,) and undone == ["undone"]
        assert other.read(saga)[-1].type == "ROLLED_BACK" and other.verify().intact

    def test_an_unknown_critical_type_names_its_saga_and_leaves_it_alone(
        self, log: Log, another: Callable[[], Log], saga: str
    ) -> None:
        newer = another()
        strange = f"strange-{saga}"
        newer.claim(strange)
        newer.append(record(strange, 1, "START"))
        newer.flush(newer.append(record(strange, 2, "SPLIT_IN_TWO")))
        newer.release(strange)
        undone = _left_open(log, saga)
        other = another()
        for use in (other.read, other.claim):
            with pytest.raises(LogCorrupted, match="SPLIT_IN_TWO") as caught:
                use(strange)
            assert caught.value.saga_id == strange
        assert not other.owned(strange) and not other.is_live(strange)
        report = recover(other)
        assert (report.recovered, report.damaged) == ((saga,), (strange,)) and undone == ["undone"]
        assert "newer version" in report.reasons[strange] and strange in other.unfinished().saga_ids
        after = another()
        assert after.verify().records == 2 + len(after.read(saga))  # not a record was put behind it

    # --- ids

    @pytest.mark.parametrize("saga_id", BAD_IDS, ids=range(len(BAD_IDS)))
    def test_an_id_against_the_rule_is_refused_where_a_saga_is_opened(self, log: Log, saga_id: str) -> None:
        with (
            pytest.raises(ValueError, match="1 to 512 bytes of UTF-8 without control characters"),
            saga_scope(saga_id, log=log),
        ):
            pytest.fail("it was opened")
        assert log.saga_ids() == ()

    # --- replay

    def test_a_saga_that_is_opened_again_replays_what_it_did(
        self, log: Log, another: Callable[[], Log], saga: str
    ) -> None:
        done: list[str] = []

        def act(name: str) -> dict[str, Any]:
            done.append(name)
            return {"did": name, "n": len(done)}

        def step(opened: Saga, name: str) -> Any:
            return opened.execute(
                "act", act, args={"name": name}, semantics=ActionSemantics.COMPENSABLE, compensate=_nothing, key=name
            )

        first: list[Any] = []
        with pytest.raises(LogUnavailable), saga_scope(saga, log=log) as opened:
            first += [step(opened, "a"), step(opened, "b")]
            log.close()
        with saga_scope(saga, log=another()) as opened:
            assert [step(opened, "a"), step(opened, "b")] == first and done == ["a", "b"]
            step(opened, "c")
        assert done == ["a", "b", "c"]
        with saga_scope(saga, log=another()) as opened:
            assert step(opened, "c") == {"did": "c", "n": 3}
        assert done == ["a", "b", "c"]
        kinds = [one.type for one in another().read(saga)]
        assert kinds.count("DONE") == 3 and kinds.count("CLAIM") == 1 and kinds[-1] == "COMMITTED"

    # --- a server that fails

    def test_connections_that_are_cut_in_the_middle_of_batches(
        self, log: Log, another: Callable[[], Log], server: LogServer | None
    ) -> None:
        if server is None:
            pytest.skip("this store has no server that a connection could be cut to")
        with _Writers(log) as writers:
            for _ in range(12):
                writers.go_on(AT_ONCE)
                server.cut()
        writers.check(another())

    def test_a_server_that_is_restarted_under_its_writers(
        self, log: Log, another: Callable[[], Log], server: LogServer | None
    ) -> None:
        restart = None if server is None else server.restart
        if restart is None:
            pytest.skip("this store has no server, or one that is not the test's to restart")
        with _Writers(log) as writers:
            for _ in range(2):
                writers.go_on(5 * AT_ONCE)
                restart()
            writers.go_on(AT_ONCE)
        writers.check(another())

    def test_a_server_that_is_gone_and_comes_back_is_waited_for(
        self, log: Log, another: Callable[[], Log], server: LogServer | None, saga: str
    ) -> None:
        if server is None:
            pytest.skip("this store has no server that could be gone")
        log.claim(saga)
        log.flush(log.append(record(saga, 1, "START")))
        knocked = server.go_away()
        with ThreadPoolExecutor(1) as pool:
            flushed = pool.submit(log.flush, log.append(record(saga, 2)))
            assert knocked.wait(BOUND)
            assert not flushed.done()
            server.come_back()
            flushed.result(BOUND)
        log.flush(log.append(record(saga, 3)))
        assert [one.n for one in another().read(saga)] == [1, 2, 3] and log.verify().intact


class _Writers:
    """Threads that append and flush, each in a saga of its own, until the test has done what it does to them."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._flushed = threading.Semaphore(0)
        self._stop = threading.Event()
        self._working: dict[str, Future[int]] = {}

    def go_on(self, flushes: int) -> None:
        """Let so many flushes pass."""
        for _ in range(flushes):
            assert self._flushed.acquire(timeout=BOUND), "nobody gets on"

    def __enter__(self) -> _Writers:
        for _ in range(AT_ONCE):
            saga = uuid.uuid4().hex
            self._working[saga] = self._pool.submit(self._work, saga)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def _work(self, saga: str) -> int:
        self._log.claim(saga)
        n = 0
        while not self._stop.is_set():
            n += 1
            self._log.append(record(saga, 2 * n - 1, "START" if n == 1 else "INTENT", x=n))
            self._log.flush(self._log.append(record(saga, 2 * n, x=n)))
            self._flushed.release()
        self._log.flush(self._log.append(record(saga, 2 * n + 1, "COMMITTED")))
        self._log.release(saga)
        return 2 * n + 1

    def check(self, log: Log) -> None:
        """Everything that was flushed is there, once."""
        for saga, working in self._working.items():
            found = log.read(saga)
            assert [one.n for one in found] == list(range(1, working.result(BOUND) + 1))
            assert [one.data.get("x") for one in found[:-1]] == [(one.n + 1) // 2 for one in found[:-1]]
        assert log.verify().intact and log.unfinished().saga_ids == ()


def _nothing(result: object) -> Compensation:
    return Compensation(fn=lambda: None)


def _left_open(log: Log, saga: str) -> list[str]:
    """Leave a saga with one step to be undone, as a process does that loses its log; what was undone, as it comes."""
    undone: list[str] = []
    name = f"log-faults.{uuid.uuid4().hex}"

    @compensator(name)
    def undo() -> None:
        undone.append("undone")

    def by_name(result: object) -> Compensation:
        return Compensation(handler=name)

    with pytest.raises(LogUnavailable), saga_scope(saga, log=log) as opened:
        opened.execute("act", lambda: 1, semantics=ActionSemantics.COMPENSABLE, compensate=by_name)
        log.close()
    return undone
