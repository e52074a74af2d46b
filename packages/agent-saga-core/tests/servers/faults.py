"""Logs on servers when answers are lost, leases run out, and servers go and come back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import pytest

from agent_saga_core import ActionSemantics, Compensation, saga_scope
from agent_saga_core.errors import Fenced, LogUnavailable, SagaBusy
from agent_saga_core.log import lease
from agent_saga_core.records import Record

from .line import Line
from .store import BOUND, Store, also, begin, record, wait_for


class Behind:
    """What a store's tests do behind a log's back: each store has one, and derives its suites from it too."""

    fenced_as_a_whole: ClassVar[bool] = True
    """Whether who takes a saga of a writer whose lease ran out takes the writer's other sagas from it as well."""

    @pytest.fixture
    def ready(self) -> None:
        """The server has been asked before whatever a test will ask it."""

    def appended(self, url: str) -> bytes:
        """What is in a request that stores records, and in no other."""
        raise NotImplementedError

    def taken(self, url: str) -> bytes:
        """What is in one that claims a saga that is there."""
        raise NotImplementedError

    def entered(self, url: str) -> bytes:
        """What is in one that claims a saga that is not."""
        raise NotImplementedError

    def seize(self, log: Any, other: Any, url: str, final: bool) -> tuple[Record, ...]:
        """Let `other` claim the saga s of `log`, which cannot reach the server; `final` if s has ended."""
        raise NotImplementedError

    def expire(self, log: Any, url: str) -> None:
        """The lease of `log` has run out, as far as anybody else knows."""
        raise NotImplementedError

    def check_fenced(self, url: str, count: int) -> None:
        """So many writers are fenced, where the server knows that of each."""

    def before_the_fence(self, monkeypatch: pytest.MonkeyPatch, other: Any, do: Callable[[], object]) -> None:
        """Have something done when `other`, which claims, is about to fence a writer."""
        raise NotImplementedError

    def before_the_claim(self, monkeypatch: pytest.MonkeyPatch, other: Any, do: Callable[[], object]) -> None:
        """Have something done in the last moment in which a fenced writer may still be heard."""
        raise NotImplementedError

    def stop(self, mortal: Any, *, kill: bool) -> None:
        """End a server."""
        raise NotImplementedError

    def start(self, mortal: Any) -> None:
        """Start it again on what it has; return when it answers."""
        raise NotImplementedError

    def processes(self, mortal: Any) -> list[int]:
        """The ids of those of a server."""
        raise NotImplementedError

    def give_up_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let a log give up a server that says nothing after less than it does otherwise."""

    @contextmanager
    def frozen(self, mortal: Any) -> Iterator[None]:
        """A server that is stopped; the kernel keeps its connections, and takes new ones for it."""
        found = self.processes(mortal)
        try:
            for one in found:
                os.kill(one, signal.SIGSTOP)
            yield
        finally:
            for one in found:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGCONT)


class EntryBehind(Behind):
    """On a server that keeps an entry of each saga and of each writer, with the moment its lease ends."""

    def disown(self, url: str, saga: str) -> None:
        """Nobody has that saga."""
        raise NotImplementedError

    def fence(self, url: str, *, fenced: bool = True) -> None:
        """Every writer is fenced, or none of them."""
        raise NotImplementedError

    def left(self, url: str) -> float:
        """How many seconds the lease of the only writer has, by the server's clock."""
        raise NotImplementedError

    def set_epoch(self, url: str, saga: str, epoch: int) -> None:
        raise NotImplementedError

    def seize(self, log: Any, other: Any, url: str, final: bool) -> tuple[Record, ...]:
        self.disown(url, "s")
        return other.claim("s")

    def before_the_fence(self, monkeypatch: pytest.MonkeyPatch, other: Any, do: Callable[[], object]) -> None:
        change = other._ownership._change

        def late(*given: Any, **more: Any) -> Any:
            do()
            return change(*given, **more)

        monkeypatch.setattr(other._ownership, "_change", late)

    def before_the_claim(self, monkeypatch: pytest.MonkeyPatch, other: Any, do: Callable[[], object]) -> None:
        self.before_the_fence(monkeypatch, other, do)  # both are one request


class LostAnswers(Behind):
    """Acknowledgements that are lost."""

    @pytest.mark.usefixtures("ready")
    @pytest.mark.parametrize("fresh", [True, False])
    @pytest.mark.parametrize("records", [1, 3])
    def test_an_append_whose_answer_is_lost_is_stored_once(
        self, store: Store, proxy: Line, url: str, records: int, fresh: bool
    ) -> None:
        log = store.log(proxy.address(url))
        log.claim("s", fresh=fresh)
        for n in range(1, records):
            log.append(record("s", n, "START" if n == 1 else "INTENT"))
        proxy.lose_the_answer(self.appended(url))
        log.flush(log.append(record("s", records, x="last")))
        assert proxy.lost.is_set()
        assert [one.n for one in log.read("s")] == list(range(1, records + 1))
        log.flush(log.append(record("s", records + 1)))  # the saga goes on
        assert log.verify().intact and log.verify().records == records + 1
        log.close()

    def lose_the_answer_to_a_claim(self, store: Store, proxy: Line, url: str, marker: bytes) -> None:
        first = store.log(url)
        begin(first, "s")
        first.close()
        log = store.log(proxy.address(url))
        log.claim("warm", fresh=True)
        proxy.lose_the_answer(marker)
        found = log.claim("s")
        assert proxy.lost.is_set()
        assert [(one.n, str(one.type)) for one in found] == [(1, "START"), (2, "CLAIM")]
        log.flush(log.append(record("s", 3, epoch=2)))
        assert log.verify().intact
        log.close()

    @pytest.mark.usefixtures("ready")
    def test_a_claim_whose_answer_is_lost_owns_the_saga_all_the_same(self, store: Store, proxy: Line, url: str) -> None:
        self.lose_the_answer_to_a_claim(store, proxy, url, self.taken(url))

    @pytest.mark.usefixtures("ready")
    def test_an_absent_id_whose_claim_is_lost_is_owned(self, store: Store, proxy: Line, url: str) -> None:
        log = store.log(proxy.address(url))
        log.claim("warm", fresh=True)
        proxy.lose_the_answer(self.entered(url))
        assert log.claim("s") == () and proxy.lost.is_set()
        log.flush(log.append(record("s", 1, "START")))
        log.close()

    @pytest.mark.usefixtures("ready")
    def test_the_final_record_whose_answer_is_lost_is_success_even_if_the_saga_was_claimed_since(
        self, store: Store, proxy: Line, url: str
    ) -> None:
        log = store.log(proxy.address(url))
        begin(log, "s")
        proxy.lose_the_answer(self.appended(url))
        log.flush(log.append(record("s", 2, "COMMITTED")))
        assert proxy.lost.is_set() and not log.unfinished().saga_ids
        log.release("s")
        log.close()

    @pytest.mark.usefixtures("ready")
    @pytest.mark.parametrize("final", [False, True])
    def test_what_was_stored_and_then_taken_over_is_no_reason_to_act(
        self, store: Store, proxy: Line, url: str, final: bool
    ) -> None:
        log, other = store.log(proxy.address(url)), store.log(url)
        begin(log, "s")
        ticket = log.append(record("s", 2, "COMMITTED" if final else "INTENT"))
        proxy.lose_the_answer(self.appended(url), and_stay_away=True)
        with ThreadPoolExecutor(1) as pool:
            flushed = pool.submit(log.flush, ticket)
            assert proxy.lost.wait(BOUND)
            found = self.seize(log, other, url, final)
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

    @pytest.mark.usefixtures("ready")
    def test_no_step_of_a_real_saga_is_done_twice_when_every_third_answer_is_lost(
        self, store: Store, proxy: Line, url: str
    ) -> None:
        log = store.log(proxy.address(url))
        done: list[int] = []
        for at in range(6):
            with saga_scope(f"s{at}", log=log) as saga:
                for n in range(3):
                    proxy.lose_the_answer(self.appended(url))
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


class LostAnswersOfEntries(EntryBehind, LostAnswers):
    """And those of a batch, of which one saga is another's."""

    @pytest.mark.usefixtures("ready")
    def test_a_batch_whose_answer_is_lost_is_stored_once_and_one_fenced_saga_fails_alone(
        self, store: Store, proxy: Line, url: str
    ) -> None:
        log = store.log(proxy.address(url))
        other = store.log(url)
        ids = [f"s{n}" for n in range(20)]
        for at, saga in enumerate(ids):
            begin(log, saga, fresh=at % 2 == 0)
        log.claim("new", fresh=True)
        self.disown(url, "s7")
        assert other.claim("s7")[-1].n == 2  # another process took that one
        tickets = [log.append(record(saga, 2, x=saga)) for saga in ids]
        final = log.append(record("new", 1, "START"))
        proxy.lose_the_answer(self.appended(url))
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


class Absences(Behind):
    """Servers that go, and come back."""

    def test_a_server_that_comes_back_in_time_is_waited_for(self, store: Store, proxy: Line, url: str) -> None:
        log = store.log(proxy.address(url))
        begin(log, "s")
        proxy.go_away()
        with ThreadPoolExecutor(1) as pool:
            flushed = pool.submit(log.flush, log.append(record("s", 2)))
            threading.Timer(0.2, proxy.come_back).start()
            flushed.result(BOUND)
        log.flush(log.append(record("s", 3)))
        assert [one.n for one in log.read("s")] == [1, 2, 3]
        log.close()

    def test_a_server_that_stays_away_is_a_clear_error_and_the_saga_is_free_when_it_is_back(
        self, store: Store, proxy: Line, url: str
    ) -> None:
        log = store.log(also(proxy.address(url), timeout=0.2))
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
        other = store.log(url)
        wait_for(lambda: not other.is_live("s"))
        assert [one.n for one in other.claim("s")] == [1, 2]
        other.close()
        log.close()

    def test_a_saga_given_up_while_the_server_was_away_can_be_claimed_here_again(
        self, store: Store, proxy: Line, url: str
    ) -> None:
        log = store.log(proxy.address(url))
        begin(log, "s")
        proxy.go_away()
        log.release("s")
        proxy.come_back()
        assert log.claim("s")[-1].n == 2
        log.flush(log.append(record("s", 3, epoch=2)))
        wait_for(lambda: log.is_live("s"))
        assert not log._heart._chores
        other = store.log(url)
        with pytest.raises(SagaBusy):
            other.claim("s")
        other.close()
        log.close()

    def test_what_was_to_be_given_up_later_is_not_taken_from_who_claimed_it_since(
        self, store: Store, proxy: Line, url: str
    ) -> None:
        log = store.log(proxy.address(url))
        log.claim("s")  # nothing is begun, so the next claim has the same epoch
        heart = log._heart
        heart.stop()
        heart._thread.join(BOUND)
        proxy.go_away()
        log.release("s")
        chores = dict(heart._chores)
        assert chores
        proxy.come_back()
        assert log.claim("s") == ()
        for n in (1, 2):
            heart._chores.update(chores)  # it was being done in that moment
            assert heart._beat()
            log.flush(log.append(record("s", n, "START" if n == 1 else "INTENT")))
        heart._disconnect()
        log.close()

    @pytest.mark.parametrize("kill", [True, False])
    def test_a_server_that_dies_in_mid_work_loses_and_repeats_nothing(
        self, store: Store, mortal: Any, mortal_url: str, kill: bool
    ) -> None:
        log = store.log(mortal_url)
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
                    self.stop(mortal, kill=kill)
                    before = acknowledged.copy()
                    self.start(mortal)
                    reader = store.log(mortal_url)
                    assert all(len(reader.read(saga)) >= n for saga, n in before.items())
                    reader.close()
            finally:
                restarted.set()
            counts = [future.result(BOUND) for future in futures]
        for saga, most in zip(ids, counts, strict=True):
            assert [one.n for one in log.read(saga)] == list(range(1, most + 1))
        assert log.verify().intact and log.unfinished().saga_ids == ()
        log.close()

    def test_a_server_that_hangs_is_waited_for_and_not_for_ever(
        self, store: Store, mortal: Any, mortal_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.give_up_soon(monkeypatch)
        log = store.log(also(mortal_url, timeout=0.3, lease=0.5))
        begin(log, "s")
        ticket = log.append(record("s", 2))
        with ThreadPoolExecutor(1) as pool:
            with self.frozen(mortal):
                flushed = pool.submit(log.flush, ticket)
                with pytest.raises(LogUnavailable, match="cannot be used") as caught:
                    flushed.result(BOUND)
            assert "\n" not in str(caught.value) and log.poisoned is not None
        log.close()
        other = store.log(mortal_url)
        wait_for(lambda: not other.is_live("s"))
        found = [one.n for one in other.claim("s")]
        assert found in ([1, 2], [1, 2, 3])  # whether the second one arrived, nobody knew
        assert other.verify().intact
        other.close()

    def test_a_log_opened_while_the_server_is_down_says_so_and_works_when_it_is_up(
        self, store: Store, mortal: Any, mortal_url: str
    ) -> None:
        self.stop(mortal, kill=False)
        try:
            with pytest.raises(LogUnavailable) as caught:
                store.log(mortal_url)
            assert "\n" not in str(caught.value)
        finally:
            self.start(mortal)
        log = store.log(mortal_url)
        begin(log, "s")
        log.close()


class Leases(Behind):
    """Leases, and the guard of effects."""

    def test_no_effect_starts_after_the_lease_ran_out_and_somebody_took_over(
        self, opened: Callable[..., Any], url: str
    ) -> None:
        log, other = opened(), opened()
        begin(log, "s")
        begin(log, "t")
        self.expire(log, url)
        other.claim("s")
        log._heart._current.until = 0.0  # the guard has tripped; the thread has not asked yet
        with pytest.raises(Fenced):
            log.flush(log.append(record("t", 2)))  # nobody took that one, but whose it is can be known no more
        with pytest.raises(Fenced):
            log.flush(log.append(record("s", 2)))
        assert [str(one.type) for one in other.read("s")] == ["START", "CLAIM"]
        with pytest.raises(Fenced):
            log.release("s")
        if self.fenced_as_a_whole:
            with pytest.raises(Fenced):
                log.release("t")
        else:
            log.release("t")
        # As another writer, and with what the first one wrote.
        assert [one.n for one in log.claim("t")] == ([1, 2] if self.fenced_as_a_whole else [1, 2, 3])
        with pytest.raises(SagaBusy):
            log.claim("s")

    def test_a_tripped_guard_is_asked_about_and_goes_on_if_nobody_took_over(self, opened: Callable[..., Any]) -> None:
        log = opened()
        begin(log, "s")
        writer = log._heart._current
        writer.until = 0.0
        log.flush(log.append(record("s", 2)))
        assert writer.good()
        writer.until = 0.0

        async def awaits() -> None:
            async with asyncio.timeout(BOUND):
                await log.aflush(log.append(record("s", 3)))

        asyncio.run(awaits())
        assert writer.good()

    def test_a_guard_that_cannot_be_asked_about_stops_the_effect(self, opened: Callable[..., Any]) -> None:
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

    def test_a_lease_that_runs_is_respected_and_one_that_ran_out_is_not(
        self, opened: Callable[..., Any], url: str
    ) -> None:
        log, other = opened(lease=0.5), opened()
        begin(log, "s")
        for _ in range(3):
            with pytest.raises(SagaBusy):
                other.claim("s")
        log._heart.stop()  # as if the process hung
        wait_for(lambda: not other.is_live("s"))
        assert other.claim("s")[-1].type == "CLAIM"
        self.check_fenced(url, 1)

    def test_a_lease_that_is_renewed_in_the_moment_of_the_claim_holds(
        self, opened: Callable[..., Any], url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log, other = opened(), opened()
        begin(log, "s")
        self.expire(log, url)
        renewed: list[bool] = []
        self.before_the_fence(monkeypatch, other, lambda: renewed.append(log._heart.still(log._heart._current)))
        with pytest.raises(SagaBusy):
            other.claim("s")
        assert renewed and all(renewed)
        log.flush(log.append(record("s", 2)))
        assert [str(one.type) for one in other.read("s")] == ["START", "INTENT"]
        self.check_fenced(url, 0)

    def test_a_record_that_comes_in_the_moment_of_the_claim_is_before_it(
        self, opened: Callable[..., Any], url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log, other = opened(), opened()
        begin(log, "s")
        self.expire(log, url)
        late = [log.append(record("s", 2))]

        def arrive() -> None:
            if late:
                log._flush(late.pop())

        self.before_the_claim(monkeypatch, other, arrive)
        assert [str(one.type) for one in other.claim("s")] == ["START", "INTENT", "CLAIM"]
        with pytest.raises(Fenced):
            log.flush(log.append(record("s", 3)))
        assert other.verify().records == 3

    def test_the_lease_is_renewed_beside_an_event_loop_that_is_blocked(self, opened: Callable[..., Any]) -> None:
        log, other = opened(lease=0.5), opened()
        begin(log, "s")
        writer = log._heart._current

        async def block() -> None:
            until = [writer.until]
            wait_for(lambda: (writer.until != until[-1] and until.append(writer.until)) or len(until) > 4)

        asyncio.run(block())
        assert other.is_live("s") and writer.good()

    def test_the_lease_is_counted_from_the_moment_in_which_it_is_asked_for(
        self, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = opened()
        heart = log._heart
        clock = [1000.0]
        monkeypatch.setattr(lease, "now", lambda: clock[0])

        def slow(name: str) -> None:
            ask = getattr(heart, name)

            def late(*given: Any) -> Any:
                answer = ask(*given)
                clock[0] += 10  # the server heard it at once; its answer takes its time
                return answer

            monkeypatch.setattr(heart, name, late)

        slow("register")
        log.claim("s", fresh=True)
        writer = heart._current
        assert clock[0] > 1000.0 and writer.until == pytest.approx(1000.0 + 0.9 * log.lease)
        heart.stop()
        heart._thread.join(BOUND)
        slow("renew")
        slow("renew_on")
        for renew in (lambda: heart.still(writer), heart._beat):
            asked = clock[0]
            assert renew() and clock[0] > asked
            assert writer.until == pytest.approx(asked + 0.9 * log.lease)
        heart._disconnect()

    def test_a_lease_goes_on_running_while_the_machine_is_suspended(
        self, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        goes_on = time.CLOCK_MONOTONIC if sys.platform == "darwin" else getattr(time, "CLOCK_BOOTTIME", None)
        if goes_on is None:
            pytest.skip("no clock of this machine goes on while it is suspended")
        log = opened(timeout=0.2)
        begin(log, "s")
        heart = log._heart
        heart.stop()  # a suspended process renews nothing
        heart._thread.join(BOUND)
        assert heart._current.good()
        read = time.clock_gettime
        monkeypatch.setattr(time, "clock_gettime", lambda which: read(which) + 3600 * (which == goes_on))
        with pytest.raises(Fenced, match="ran out"):
            log.flush(log.append(record("s", 2)))

    def test_the_lease_is_renewed_while_most_of_it_is_left_and_soon_again_if_that_fails(
        self, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = opened()
        heart = log._heart
        clock = [1000.0]
        left: list[float] = []
        monkeypatch.setattr(lease, "now", lambda: clock[0])

        class Passes(threading.Event):
            """Who waits for it finds that all that time has passed."""

            def wait(self, timeout: float | None = None) -> bool:
                assert timeout is not None
                clock[0] += timeout
                return False

        renew_on = heart.renew_on

        def noted(connection: Any, writers: Any) -> Any:
            left.append(min(writer.until for writer in writers) - clock[0])
            if len(left) == 6:
                heart.stop()
            if len(left) in (2, 4, 5):
                raise heart.passing[0]("the server does not hear it")
            return renew_on(connection, writers)

        monkeypatch.setattr(heart, "renew_on", noted)
        monkeypatch.setattr(heart, "_wake", Passes())
        log.claim("s", fresh=True)
        heart._thread.join(BOUND)
        assert len(left) == 6 and min(left) > log.lease / 2, left

    def test_threads_that_claim_at_once_leave_one_that_keeps_their_leases(
        self, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = opened(lease=0.5)
        log.claim("warm", fresh=True)
        heart = log._heart
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

    def test_a_process_that_was_fenced_claims_as_a_new_writer(self, opened: Callable[..., Any], url: str) -> None:
        log, other = opened(), opened()
        begin(log, "s")
        begin(log, "t")
        log.release("s")
        self.expire(log, url)
        other.claim("t")
        before = log._heart._current
        assert log.claim("s")[-1].type == "CLAIM" and log._heart._current is not before
        n = len(log.read("s"))
        log.flush(log.append(record("s", n + 1, epoch=n)))
        assert log.verify().intact

    def test_a_fenced_process_cannot_begin_a_saga_either(self, opened: Callable[..., Any], url: str) -> None:
        log, other = opened(), opened()
        begin(log, "t")
        log.claim("s", fresh=True)
        self.expire(log, url)
        other.claim("t")
        with pytest.raises(Fenced):
            log.flush(log.append(record("s", 1, "START")))
        assert log.saga_ids() == ("t",) and other.claim("s") == ()


class LeasesOfEntries(EntryBehind, Leases):
    """And what can be changed of them at the server."""

    def test_the_owner_counts_its_lease_shorter_than_the_server_does(
        self, opened: Callable[..., Any], url: str
    ) -> None:
        log = opened(lease=20)
        begin(log, "s")
        writer = log._heart._current
        for renew in (lambda: True, lambda: log._heart.still(writer), lambda: log._heart.still(writer)):
            assert renew()
            mine = writer.until - lease.now()
            servers = self.left(url)
            assert mine <= 18.0  # a tenth is left unused
            assert lease.now() + servers > writer.until + 1.0

    def test_a_process_that_was_fenced_and_had_nothing_open_claims_as_a_new_writer(
        self, opened: Callable[..., Any], url: str
    ) -> None:
        log, other = opened(), opened()
        begin(log, "s")
        log.release("s")
        begin(other, "t")
        self.expire(log, url)
        self.fence(url)
        before = log._heart._current
        assert log.claim("s")[-1].n == 2 and log._heart._current is not before
        log.flush(log.append(record("s", 3, epoch=2)))

    @pytest.mark.parametrize("alone", [True, False])
    def test_the_same_epoch_number_of_another_writer_is_not_the_same_token(
        self, opened: Callable[..., Any], url: str, alone: bool
    ) -> None:
        log, other = opened(), opened()
        assert log.claim("s") == () and log.claim("t") == ()
        self.expire(log, url)
        assert other.claim("s") == ()  # nothing was begun: the same epoch again, under another nonce
        self.fence(url, fenced=False)  # nobody heard of that
        tickets = [log.append(record(saga, 1, "START", x="late")) for saga in ("s", "t")[: 1 if alone else 2]]
        with pytest.raises(Fenced):
            log.flush(tickets[0])
        assert len(log.read("t")) == len(tickets) - 1
        other.flush(other.append(record("s", 1, "START", x="new")))
        assert [one.data for one in log.read("s")] == [{"x": "new"}]

    def test_another_epoch_of_the_same_writer_is_not_the_same_token(self, opened: Callable[..., Any], url: str) -> None:
        log = opened()
        begin(log, "s")
        begin(log, "t")
        self.set_epoch(url, "s", 7)
        tickets = [log.append(record(saga, 2)) for saga in ("s", "t")]
        log.flush(tickets[1])
        with pytest.raises(Fenced):
            log.flush(tickets[0])

    @pytest.mark.parametrize("alone", [True, False])
    def test_a_fenced_process_that_has_nothing_cannot_begin_a_saga_either(
        self, opened: Callable[..., Any], url: str, alone: bool
    ) -> None:
        log = opened()
        ids = ("s", "t")[: 1 if alone else 2]
        for saga in ids:
            log.claim(saga, fresh=True)
        self.fence(url)
        tickets = [log.append(record(saga, 1, "START")) for saga in ids]
        for ticket in tickets:
            with pytest.raises(Fenced):
                log.flush(ticket)
        assert log.saga_ids() == ()
