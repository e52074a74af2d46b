"""Moving sagas between logs: every store to every store, killed at every point, never in the hands of two."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from agent_saga_core import (
    ActionSemantics,
    LogCorrupted,
    SagaBusy,
    SagaNotRunning,
    compensator,
    list_sagas,
    open_log,
    read_saga,
    recover,
    resolve,
    saga_scope,
    undo,
)
from agent_saga_core.cli.app import app
from agent_saga_core.log import Log, MemoryLog, osfile
from agent_saga_core.log import moving as moving_module
from agent_saga_core.log.lines import Adopted, Lines, is_final, record_in
from agent_saga_core.log.moving import Copied, copy_log
from agent_saga_core.log.open import init_log
from agent_saga_core.records import Encoded, Record, encode
from agent_saga_core.testing import Fault, FaultyLog

BOUND = 60.0
LEASE = 1.0
SERVERS = ("postgres", "nats", "redis")
STORES = ("file", "sqlite", *SERVERS)


# --- stores


class Stores:
    """Fresh logs of every kind. A store is added here and in `STORES`."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._uris: dict[str, str] = {}

    def url(self, kind: str, tmp_path: Path) -> str:
        """The address of a new log, which is made."""
        name = uuid.uuid4().hex[:8]
        match kind:
            case "file":
                url = f"file://{tmp_path}/{name}"
            case "sqlite":
                url = f"sqlite:///{tmp_path}/{name}.db"
            case _:
                url = self._on_server(kind)
        init_log(url)
        return url

    def _on_server(self, kind: str) -> str:
        pytest.importorskip({"postgres": "psycopg", "nats": "nats", "redis": "redis"}[kind])
        if kind == "postgres":
            from .postgres.server import any_server as server
            from .postgres.server import fresh_schema as fresh
        elif kind == "nats":
            from .nats.server import any_server as server
            from .nats.server import fresh
        else:
            from .redis.server import any_server as server
            from .redis.server import fresh_prefix as fresh
        if kind not in self._uris:
            self._uris[kind] = self._stack.enter_context(server())
        return fresh(self._uris[kind], lease=LEASE)


@pytest.fixture(scope="module")
def stores() -> Iterator[Stores]:
    with ExitStack() as stack:
        yield Stores(stack)


@pytest.fixture
def fresh(stores: Stores, tmp_path: Path) -> Callable[[str], str]:
    return lambda kind: stores.url(kind, tmp_path)


@contextmanager
def logs(*urls: str) -> Generator[tuple[Log, ...]]:
    with ExitStack() as stack:
        opened: list[Log] = []
        for url in urls:
            opened.append(open_log(url, create=False))
            stack.callback(opened[-1].close)
        yield tuple(opened)


# --- sagas

UNDONE: list[str] = []
"""The keys of the compensations that were made."""


@compensator("copy.refund")
def refund(charge_id: str, *, idempotency_key: str) -> None:
    UNDONE.append(idempotency_key)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    UNDONE.clear()
    yield
    UNDONE.clear()


def charge() -> dict[str, str]:
    return {"id": "ch_1"}


def a_history(saga_id: str, *, ends: str, grace: float = 0.0) -> Lines:
    """What the engine writes of a saga with one charge."""
    log = MemoryLog()
    steps: dict[str, Any] = {
        "semantics": ActionSemantics.COMPENSABLE,
        "compensate": undo(refund, charge_id="result.id"),
    }
    with suppress(ZeroDivisionError), saga_scope(saga_id, name="order", log=log, orphan_after=grace) as saga:
        saga.execute("charge", charge, **steps)
        if ends == "rolled back":
            raise ZeroDivisionError
        if ends == "suspended":
            saga.suspend("ask a person")
    UNDONE.clear()
    lines = log.lines(saga_id)
    return lines[:-1] if ends == "dead" else lines


ENDED = ("committed", "undone", "optional ☃", "erased")
OPEN = ("dead", "waits")


def histories() -> dict[str, Lines]:
    """One saga of each sort, in the order of their beginning."""
    made: dict[str, Lines] = {
        "committed": a_history("committed", ends="committed"),
        "dead": a_history("dead", ends="dead"),
        "undone": a_history("undone", ends="rolled back"),
        "waits": a_history("waits", ends="suspended"),
        "optional ☃": a_history("optional ☃", ends="committed"),
        "erased": a_history("erased", ends="committed"),
    }
    erased = made["erased"][1]
    gone = erased._replace(rest=b" " * (len(erased.rest) - 2) + b"}\n")
    made["erased"] = (made["erased"][0], gone, *made["erased"][2:])
    last = record_in("optional ☃", made["optional ☃"][-1])
    later = Record(saga=last.saga, n=last.n, epoch=1, type="LATER", time=last.time, data={"x": [1]}, critical=False)
    final = Record(saga=last.saga, n=last.n + 1, epoch=1, type=last.type, time=last.time, data=last.data)
    made["optional ☃"] = (*made["optional ☃"][:-1], encode(later), encode(final))
    return made


def seeded(url: str) -> dict[str, Lines]:
    given = histories()
    with logs(url) as (log,):
        assert log.adopt(given).stored == tuple(given)
    return given


def recoverable(url: str) -> set[str]:
    """The sagas that a recoverer of this log would roll back; SUSPENDED ones it would, after their deadline."""
    with logs(url) as (log,):
        found = log.unfinished()
        assert not found.damage
        return {saga_id for saga_id in found.saga_ids if read_saga(log, saga_id).status not in ("MOVING", "MOVED")}


def arrived_whole(given: Mapping[str, Lines], url: str) -> set[str]:
    """The sagas in a log, each of which holds all that was given, whatever happened."""
    with logs(url) as (log,):
        assert log.verify().intact
        there = {saga_id: log.lines(saga_id) for saga_id in log.saga_ids()}
    for saga_id, lines in there.items():
        assert lines[: len(given[saga_id])] == given[saga_id]
        assert len(lines) == len(given[saga_id]) or not is_final(given[saga_id][-1])
    return set(there)


def recovered(url: str) -> tuple[str, ...]:
    """Recover a log once nobody owns anything in it, where leases are; what was rolled back."""
    pause, until = threading.Event(), time.monotonic() + BOUND
    with logs(url) as (log,):
        while any(map(log.is_live, log.unfinished().saga_ids)):
            assert time.monotonic() < until
            pause.wait(0.02)
        return recover(log).recovered


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child; how it ended, negative for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: the wait is bounded
        pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(70)
    timer = threading.Timer(BOUND, os.kill, (pid, signal.SIGKILL))
    timer.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        timer.cancel()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- every store to every store


@pytest.mark.parametrize("there", STORES)
@pytest.mark.parametrize("here", STORES)
def test_every_store_to_every_store(fresh: Callable[[str], str], here: str, there: str) -> None:
    source, target = fresh(here), fresh(there)
    given = seeded(source)
    with logs(source, target) as (one, other):
        first = copy_log(one, other)
        assert first == Copied(copied=4, records=sum(len(given[name]) for name in ENDED), unfinished=OPEN)
        assert one.lines("dead") == given["dead"] and other.lines("dead") == ()
        second = copy_log(one, other, unfinished=True)
        assert (second.copied, second.there, second.moved) == (0, 4, OPEN) and not second.refused
        third = copy_log(one, other, unfinished=True)
        assert (third.copied, third.there, third.moved, third.away) == (0, 4, (), 2)
    assert arrived_whole(given, target) == set(given)
    with logs(source, target) as (one, other):
        assert {name: other.lines(name) for name in given} == given
        assert one.verify().intact and one.unfinished().saga_ids == ()
        assert read_saga(one, "dead").status == "MOVED" and read_saga(other, "dead").status == "RUNNING"
        assert recover(one).recovered == () and recover(other).recovered == ("dead",)
    assert len(UNDONE) == 1


@pytest.mark.parametrize("way", [("file", "postgres", "sqlite", "file"), ("file", "postgres", "nats", "file"),
                                 ("sqlite", "redis", "nats", "postgres")], ids="-".join)  # fmt: skip
def test_a_long_way_leaves_equal_histories(fresh: Callable[[str], str], way: Sequence[str]) -> None:
    urls = [fresh(kind) for kind in way]
    given = seeded(urls[0])
    for here, there in zip(urls, urls[1:], strict=False):
        # Cut off after the sagas were marked in the source, and then after the target had them.
        for fault in (Fault(on="adopt", how="crashes"), Fault(on="adopt", how="crashes-after")):
            assert in_child(partial(_copy, here, there, on_target=fault)) == -signal.SIGKILL
            assert recoverable(here) & recoverable(there) == set()
        with logs(here, there) as (one, other):
            done = copy_log(one, other, unfinished=True, patience=BOUND)
            assert set(done.moved) == set(OPEN) and done.there == 4
            assert not (done.refused or done.damaged or done.live or done.unfinished)
            assert one.unfinished().saga_ids == () and one.verify().intact
            assert {name: other.lines(name) for name in given} == given
        assert arrived_whole(given, there) == set(given) and recoverable(there) == set(OPEN)
    assert [recovered(url) for url in urls] == [(), (), (), ("dead",)] and len(UNDONE) == 1


# --- killed


def _copy(
    here: str, there: str, *, on_source: Fault | None = None, on_target: Fault | None = None, batch: int = 10_000
) -> Copied:
    moving_module.BATCH_SAGAS = batch  # in a child of its own
    with logs(here, there) as (one, other):
        source = one if on_source is None else FaultyLog(one, [on_source])
        target = other if on_target is None else FaultyLog(other, [on_target])
        return copy_log(source, target, unfinished=True, patience=BOUND)


def came_whole(one: Log, other: Log, name: str, given: Lines) -> None:
    """The target has what was given and what was done here before the saga left, and nothing else of the copies."""
    here, there = one.lines(name), other.lines(name)
    last = record_in(name, here[-1])
    if last.type != "MOVED":
        assert there == here and here[: len(given)] == given
        return
    went, since = here[: last.data["last"]], [record_in(name, line).type for line in there[last.data["last"] :]]
    assert went[: len(given)] == given and there[: len(went)] == went
    # The copy that was killed may have left its claim, as any owner does. What came since is the recovery there.
    assert [record_in(name, line).type for line in went[len(given) :]] in ([], ["CLAIM"])
    assert since == [] if name == "waits" else (since[0], since[-1]) == ("CLAIM", "ROLLED_BACK")
    assert not {"MOVING", "MOVED"} & set(since)


def killed_and_made_again(source: str, target: str, given: dict[str, Lines], kill: Callable[[], object]) -> None:
    """Whatever was killed: nothing is in the hands of two, nothing forgotten; and the next copy brings the rest."""
    assert in_child(kill) == -signal.SIGKILL
    arrived_whole(given, target)
    here, there = recoverable(source), recoverable(target)
    assert here & there == set()
    with logs(source) as (log,):
        marked = {name for name in log.unfinished().saga_ids if read_saga(log, name).status == "MOVING"}
        moved = {name for name in log.saga_ids() if name in OPEN and read_saga(log, name).status == "MOVED"}
    assert here | marked | moved == set(OPEN) and moved <= there  # each is somewhere, and whoever left has arrived
    # Recoverers of both logs come before the copy is made again.
    recovered(source), recovered(target)
    with logs(source, target) as (one, other):
        copy_log(one, other, unfinished=True, patience=BOUND)
        assert copy_log(one, other, unfinished=True).unfinished == () == one.unfinished().saga_ids
        recover(one), recover(other)
        for name in given:
            came_whole(one, other, name, given[name])
        assert other.unfinished().saga_ids == ("waits",) and one.verify().intact and other.verify().intact
    assert len(UNDONE) == 1


POINTS = {
    "before the claim": Fault(on="claim", how="crashes"),
    "after the claim": Fault(on="claim", how="crashes-after"),
    "between two claims": Fault(on="claim", nth=2, how="crashes"),
    "MOVING appended": Fault(on="append", record="MOVING", how="crashes-after"),
    "MOVING durable": Fault(on="flush", record="MOVING", how="crashes-after"),
    "MOVED appended": Fault(on="append", record="MOVED", how="crashes-after"),
    "one MOVED, the other not": Fault(on="append", record="MOVED", nth=2, how="crashes"),
    "MOVED durable": Fault(on="flush", record="MOVED", how="crashes-after"),
    "at the release": Fault(on="release", how="crashes"),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("here", ["file", "sqlite", "postgres"])
def test_killed_on_the_side_of_the_source(fresh: Callable[[str], str], here: str, point: str) -> None:
    source, target = fresh(here), fresh("file" if here != "file" else "sqlite")
    given = seeded(source)
    killed_and_made_again(source, target, given, lambda: _copy(source, target, on_source=POINTS[point]))


@pytest.mark.parametrize("here", ["nats", "redis"])
@pytest.mark.parametrize("point", ["MOVING durable", "MOVED appended"])
def test_killed_on_the_side_of_another_source(fresh: Callable[[str], str], here: str, point: str) -> None:
    source, target = fresh(here), fresh("file")
    given = seeded(source)
    killed_and_made_again(source, target, given, lambda: _copy(source, target, on_source=POINTS[point]))


@pytest.mark.parametrize("here", STORES)
def test_the_claim_of_a_copy_that_was_killed_is_that_of_any_dead_owner(fresh: Callable[[str], str], here: str) -> None:
    """It goes along, where a claim is stored at once, and the saga has no new grace from it."""
    source, target = fresh(here), fresh("file")
    written = (record_in("dead", line) for line in a_history("dead", ends="dead", grace=600.0))
    given = tuple(_renamed(record, "dead", -601.0) for record in written)
    with logs(source) as (one,):
        one.adopt({"dead": given})
    assert in_child(lambda: _copy(source, target, on_source=POINTS["after the claim"])) == -signal.SIGKILL
    with logs(source, target) as (one, other):
        stored = one.lines("dead")
        left = [record_in("dead", line).type for line in stored[len(given) :]]
        assert stored[: len(given)] == given and left == (["CLAIM"] if here in SERVERS else [])
        assert copy_log(one, other, unfinished=True, patience=BOUND).moved == ("dead",)
        assert other.lines("dead") == stored
        assert recover(other).recovered == ("dead",) and len(UNDONE) == 1


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("how", ["crashes", "crashes-after"])
@pytest.mark.parametrize("there", STORES)
def test_killed_between_two_batches(fresh: Callable[[str], str], there: str, how: Any, nth: int) -> None:
    source, target = fresh("file"), fresh(there)
    given = seeded(source)
    fault = Fault(on="adopt", nth=nth, how=how)
    killed_and_made_again(source, target, given, lambda: _copy(source, target, on_target=fault, batch=2))


def test_killed_at_every_write_of_a_file_log(fresh: Callable[[str], str]) -> None:
    calls = ("write_at", "sync_file", "sync_directory", "create_file", "make_directory", "write_whole", "remove_file")
    source = fresh("sqlite")
    given = seeded(source)
    kinds = ("START", "DONE", "DONE", "DONE", "COMMITTED")  # so long that it takes several writes
    given["large"] = tuple(
        encode(Record(saga="large", n=n, epoch=1, type=kind, time=2e9, data={"x": "x" * 700_000}))
        for n, kind in enumerate(kinds, 1)
    )
    with logs(source) as (log,):
        log.adopt({"large": given["large"]})
    ended = {*ENDED, "large"}

    def copy(target: str, nth: int) -> None:
        made = 0

        def counted(do: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal made
                made += 1
                if made == nth:
                    die()
                return do(*arguments, **options)

            return call

        for name in calls:
            setattr(osfile, name, counted(getattr(osfile, name)))
        with logs(source, target) as (one, other):
            copy_log(one, other)

    for nth in range(1, 60):
        target = fresh("file")
        code = in_child(partial(copy, target, nth))
        there = arrived_whole(given, target)
        assert not there or there == ended  # of one batch, all or none
        if code == 0:
            assert nth > 8 and there  # all of them were met
            return
        assert code == -signal.SIGKILL
        with logs(source, target) as (one, other):
            copy_log(one, other)
            assert all(other.lines(name) == given[name] for name in ended) and other.verify().intact
    pytest.fail("a copy of five sagas makes fewer writes than that")


@pytest.mark.parametrize("there", ["sqlite", "postgres"])
def test_killed_in_the_middle_of_a_transaction(fresh: Callable[[str], str], there: str) -> None:
    source, target = fresh("file"), fresh(there)
    given = seeded(source)

    def kill() -> None:
        if there == "sqlite":
            from agent_saga_core.log.sqlite import writing as module

            name, left = "body_of", iter(range(9))
        else:
            from agent_saga_core.log.postgres import adopting as module

            name, left = "_pieces", iter(())

        do = getattr(module, name)

        def call(*arguments: Any) -> Any:
            if next(left, None) is None:
                die()
            return do(*arguments)

        setattr(module, name, call)
        _copy(source, target)

    killed_and_made_again(source, target, given, kill)


# --- what is not copied


def test_a_saga_that_a_process_owns_stays(fresh: Callable[[str], str]) -> None:
    source, target = fresh("file"), fresh("sqlite")
    given = seeded(source)
    with logs(source, target, source) as (one, other, owner):
        owner.claim("dead")
        before = one.lines("dead")
        with pytest.raises(SagaBusy, match="'dead' of .* is owned by a running process; "):
            copy_log(one, other, unfinished=True)
        assert other.saga_ids() == ()
        done = copy_log(one, other, live=True, unfinished=True)
        assert (done.copied, done.live, done.moved) == (4, ("dead",), ("waits",))
        assert one.lines("dead") == before and other.lines("dead") == () and owner.owned("dead")
        owner.flush(owner.append(Record(saga="dead", n=5, epoch=4, type="ABORT", time=1.0, data={"reason": "no"})))
        owner.release("dead")
        assert copy_log(one, other, unfinished=True).moved == ("dead",)
        assert len(other.lines("dead")) == 5 and other.lines("waits") == given["waits"]


def test_what_the_target_holds_under_that_id_stays_as_it_is(fresh: Callable[[str], str]) -> None:
    source, target = fresh("file"), fresh("sqlite")
    given = seeded(source)
    others = {name: a_history(name, ends="dead") for name in ("committed", "dead")}
    with logs(source, target) as (one, other):
        other.adopt(others)
        other.claim("waits")  # reserved: somebody is about to begin it there
        before = one.lines("waits")
        done = copy_log(one, other, unfinished=True)
        assert set(done.refused) == {"committed", "dead", "waits"} and done.copied == 3 and done.moved == ()
        assert {name: other.lines(name) for name in others} == others
        # Nothing was marked in the source: what did not go is recovered here, as ever.
        assert one.lines("dead") == given["dead"] and one.lines("waits") == before
        assert recover(one, saga_id="dead").recovered == ("dead",)


class Begins:
    """A target in which somebody begins a saga of that id at the very last moment."""

    def __init__(self, inner: Log, saga_id: str) -> None:
        self._inner = inner
        self._saga_id = saga_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def adopt(self, histories: Mapping[str, Sequence[Encoded]]) -> Adopted:
        self._inner.adopt({self._saga_id: a_history(self._saga_id, ends="dead")})
        return self._inner.adopt(histories)


def test_a_saga_whose_place_was_taken_at_the_last_moment_stays_and_lives_on(fresh: Callable[[str], str]) -> None:
    source, target = fresh("file"), fresh("sqlite")
    seeded(source)
    with logs(source, target) as (one, other):
        done = copy_log(one, Begins(other, "waits"), unfinished=True)  # pyright: ignore[reportArgumentType]
        assert set(done.refused) == {"waits"} and done.moved == ("dead",)
        assert read_saga(one, "waits").status == "SUSPENDED" and not one.is_live("waits")
        kinds = [record.type for record in one.read("waits")][-3:]
        assert kinds == ["CLAIM", "MOVING", "MOVING"]
        with saga_scope("waits", log=one, resume="continue"):
            pass
        assert read_saga(one, "waits").status == "COMMITTED"


def test_a_saga_on_its_way_goes_nowhere_else(fresh: Callable[[str], str]) -> None:
    source, target, elsewhere = fresh("file"), fresh("sqlite"), fresh("file")
    given = seeded(source)
    assert in_child(lambda: _copy(source, target, on_target=Fault(on="adopt", how="crashes"))) == -signal.SIGKILL
    with logs(source, target, elsewhere) as (one, other, third):
        done = copy_log(one, third, unfinished=True)
        assert set(done.refused) == set(OPEN) and "sqlite" in done.refused["dead"] and done.moved == ()
        assert third.lines("dead") == ()
        report = recover(one)
        assert set(report.attention) == set(OPEN) and "log copy" in report.reasons["dead"] and not UNDONE
        for name in OPEN:
            with pytest.raises(SagaNotRunning, match="is being moved"), saga_scope(name, log=one):
                pass
        with pytest.raises(SagaNotRunning, match="is being moved"):
            resolve(one, "dead", 1, outcome="accepted", by="ada", note="no")
        assert copy_log(one, other, unfinished=True).moved == OPEN
        with pytest.raises(SagaNotRunning, match="was moved"), saga_scope("dead", log=one):
            pass
        with pytest.raises(SagaNotRunning, match="was moved"):
            resolve(one, "dead", 1, outcome="accepted", by="ada", note="no")
        assert {name: other.lines(name) for name in given} == given
        assert {head.status for head in list_sagas(one) if head.saga_id in OPEN} == {"MOVED"}


class Overtaken:
    """A source in which another copy begins a move, and is killed, between the look at a saga and its claim."""

    def __init__(self, inner: Log, other: Callable[[], object]) -> None:
        self._inner = inner
        self._other: Callable[[], object] | None = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def claim(self, saga_id: str, *, fresh: bool = False) -> tuple[Record, ...]:
        other, self._other = self._other, None
        if other is not None:
            other()
        return self._inner.claim(saga_id, fresh=fresh)


def test_a_saga_that_sets_out_to_another_log_after_it_was_looked_at_goes_only_there(
    fresh: Callable[[str], str],
) -> None:
    source, target, elsewhere = fresh("file"), fresh("sqlite"), fresh("file")
    given = seeded(source)

    def other() -> None:
        after = Fault(on="adopt", how="crashes-after")
        assert in_child(lambda: _copy(source, elsewhere, on_target=after)) == -signal.SIGKILL

    with logs(source, target, elsewhere) as (one, two, third):
        done = copy_log(Overtaken(one, other), two, unfinished=True)  # pyright: ignore[reportArgumentType]
        assert set(done.refused) == set(OPEN) and done.moved == () and not any(map(one.is_live, OPEN))
        assert elsewhere in done.refused["dead"] and two.lines("dead") == ()
        assert third.lines("dead") == given["dead"]
        assert recover(two).recovered == () and recover(third).recovered == ("dead",) and len(UNDONE) == 1
        assert copy_log(one, third, unfinished=True).moved == OPEN


def test_a_move_whose_saga_has_gone_on_is_only_noted(fresh: Callable[[str], str]) -> None:
    source, target = fresh("file"), fresh("sqlite")
    seeded(source)
    assert in_child(lambda: _copy(source, target, on_target=Fault(on="adopt", how="crashes-after"))) == -signal.SIGKILL
    with logs(source, target) as (one, other):
        assert recover(other).recovered == ("dead",) and len(UNDONE) == 1
        ended = other.lines("dead")
        assert copy_log(one, other, unfinished=True).moved == OPEN
        assert other.lines("dead") == ended and recover(one).recovered == () and len(UNDONE) == 1


def test_a_saga_that_ends_after_it_was_looked_at_is_copied_with_its_end(fresh: Callable[[str], str]) -> None:
    source, target = fresh("file"), fresh("sqlite")
    seeded(source)
    with logs(source, source, target) as (one, owner, other):
        ends = Overtaken(one, lambda: recover(owner, saga_id="dead"))
        done = copy_log(ends, other, unfinished=True)  # pyright: ignore[reportArgumentType]
        assert (done.copied, done.moved) == (5, ("waits",)) and not (done.refused or done.damaged)
        assert read_saga(one, "dead").status == "ROLLED_BACK" and not one.is_live("dead")
        assert other.lines("dead") == one.lines("dead") and len(UNDONE) == 1


def test_a_move_that_another_copy_began_is_not_taken_back(fresh: Callable[[str], str]) -> None:
    """The saga had arrived, and was undone and forgotten there: taken back, it would be undone again."""
    source, target = fresh("file"), fresh("sqlite")
    seeded(source)
    assert in_child(lambda: _copy(source, target, on_target=Fault(on="adopt", how="crashes-after"))) == -signal.SIGKILL
    with logs(source, target) as (one, other):
        assert recover(other).recovered == ("dead",) and len(UNDONE) == 1
        other.compact(keep_days=0)
        assert other.lines("dead") == ()
        other.adopt({"dead": a_history("dead", ends="dead")})  # another one, of the same id; UNDONE is empty again
        done = copy_log(one, other, unfinished=True)
        assert set(done.refused) == {"dead"} and done.moved == ("waits",)
        assert read_saga(one, "dead").status == "MOVING" and [one.is_live(name) for name in OPEN] == [False, False]
        assert recover(one).attention == ("dead",) and not UNDONE


def test_an_id_that_the_target_cannot_hold_is_refused_and_the_rest_goes(fresh: Callable[[str], str]) -> None:
    source, target = fresh("file"), fresh("postgres")
    strange = {"nul\0 ended": "committed", "nul\0 open": "dead", "plain": "committed", "open": "dead"}
    given = {
        name: tuple(_renamed(record_in("x", line), name, 0.0) for line in a_history("x", ends=ends))
        for name, ends in strange.items()
    }
    with logs(source, target) as (one, other):
        one.adopt(given)
        assert set(copy_log(one, other, unfinished=True, dry_run=True).refused) == {"nul\0 ended", "nul\0 open"}
        done = copy_log(one, other, unfinished=True)
        assert set(done.refused) == {"nul\0 ended", "nul\0 open"} and (done.copied, done.moved) == (1, ("open",))
        assert other.lines("plain") == given["plain"] and one.lines("nul\0 open") == given["nul\0 open"]


def test_one_log_under_two_addresses_is_not_moved_into_itself(fresh: Callable[[str], str], tmp_path: Path) -> None:
    source = fresh("file")
    given = seeded(source)
    (tmp_path / "link").symlink_to(source.removeprefix("file://"))
    with logs(source, f"file://{tmp_path}/link", source) as (one, again, same):
        with pytest.raises(ValueError, match="same log"):
            copy_log(one, same)
        done = copy_log(one, again, unfinished=True)
        assert set(done.refused) == set(OPEN) and done.there == 4 and done.copied == 0
        assert {name: one.lines(name) for name in given} == given


def test_damage_and_what_a_newer_version_wrote_are_left_and_named(fresh: Callable[[str], str], tmp_path: Path) -> None:
    source, target = fresh("sqlite"), fresh("file")
    seeded(source)
    import sqlite3

    newer = encode(Record(saga="newer", n=2, epoch=1, type="JOIN", time=2.0, data={}))
    final = encode(Record(saga="newer", n=3, epoch=1, type="COMMITTED", time=2.0, data={}))
    with logs(source) as (log,):
        log.adopt({"newer": (a_history("newer", ends="dead")[0], newer, final)})
    raw = sqlite3.connect(source.removeprefix("sqlite:///"), isolation_level=None)
    flipped = "CAST(replace(CAST(body AS TEXT), 'ch_1', 'ch_2') AS BLOB)"
    assert raw.execute(f"UPDATE record SET body = {flipped} WHERE saga = 1 AND n = 3").rowcount == 1
    raw.close()
    with logs(source, target) as (one, other):
        done = copy_log(one, other, unfinished=True)
        assert set(done.damaged) == {"committed", "newer"} and done.copied == 3 and done.moved == OPEN
        assert "JOIN" in done.damaged["newer"] and other.lines("newer") == () == other.lines("committed")


def test_a_target_that_gives_back_something_else_is_found(fresh: Callable[[str], str]) -> None:
    source, target = fresh("file"), fresh("sqlite")
    seeded(source)

    class Lies(Begins):
        def lines(self, saga_id: str) -> Lines:
            return self._inner.lines(saga_id)[:-1]

        def adopt(self, histories: Mapping[str, Sequence[Encoded]]) -> Adopted:
            return self._inner.adopt(histories)

    with logs(source, target) as (one, other):
        with pytest.raises(LogCorrupted, match="does not give back"):
            copy_log(one, Lies(other, ""), unfinished=True)  # pyright: ignore[reportArgumentType]
        assert not one.is_live("dead") and recoverable(source) & recoverable(target) == set()


def test_a_dry_run_writes_nothing_and_says_what_would_be_done(fresh: Callable[[str], str]) -> None:
    source, target = fresh("file"), fresh("sqlite")
    given = seeded(source)
    with logs(source, target) as (one, other):
        other.adopt({name: given[name] for name in ("committed",)} | {"undone": a_history("undone", ends="dead")})
        would = copy_log(one, other, unfinished=True, dry_run=True)
        assert (would.copied, would.there, would.moved, set(would.refused)) == (2, 1, OPEN, {"undone"})
        assert set(other.saga_ids()) == {"committed", "undone"}
        assert {name: one.lines(name) for name in given} == given
        done = copy_log(one, other, unfinished=True)
        assert (done.copied, done.there, done.moved, set(done.refused)) == (2, 1, OPEN, {"undone"})
        assert done.records == would.records


def test_many_sagas_share_a_sync(fresh: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = fresh("file")
    shape = a_history("x", ends="committed")
    many = {f"s{n}": tuple(_renamed(record_in("x", line), f"s{n}", n) for line in shape) for n in range(2_000)}
    memory = MemoryLog()
    memory.adopt(many)
    syncs: list[str] = []
    for name in ("sync_file", "sync_directory"):
        do = getattr(osfile, name)
        monkeypatch.setattr(osfile, name, lambda at, do=do, name=name: (syncs.append(name), do(at))[1])
    seen: list[tuple[int, int]] = []
    with logs(target) as (other,):
        assert copy_log(memory, other, progress=lambda *at: seen.append(at)).copied == 2_000
        assert len(syncs) < 30 and seen[-1] == (2_000, 2_000)
        assert other.saga_ids() == tuple(many)


def _renamed(record: Record, saga_id: str, later: float) -> Encoded:
    return encode(msgspec.structs.replace(record, saga=saga_id, time=record.time + later))


# --- the command


def agent_saga(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("kind", STORES)
def test_the_verbs_speak_of_every_store(fresh: Callable[[str], str], kind: str) -> None:
    source, url = fresh("file"), fresh(kind)
    given = seeded(source)
    code, out, err = agent_saga("log", "copy", source, url)
    assert code == 1 and out.startswith("copied 4 sagas; ") and "unfinished dead\n" in out.replace("  ", " ")
    assert "2 sagas left, unfinished" in err
    code, out, err = agent_saga("log", "copy", source, url, "--unfinished", "--json")
    done = json.loads(out)
    assert (code, err) == (0, "") and done["there"] == 4 and done["moved"] == list(OPEN)
    code, out, err = agent_saga("list", "--log", url)
    assert code == 0 and "dead" in out and "SUSPENDED" in out and "cannot be read" in err  # the erased one
    code, out, _ = agent_saga("show", "dead", "--log", url)
    assert code == 0 and "recover --saga dead" in out
    code, out, _ = agent_saga("show", "dead", "--log", source)
    assert code == 0 and "MOVED" in out and "It lives in another log." in out
    records = sum(map(len, given.values()))
    assert agent_saga("verify", "--log", url)[:2] == (0, f"intact: {records} records\n")
    code, out, _ = agent_saga("recover", "--log", url)
    assert code == 0 and "recovered" in out and len(UNDONE) == 1
    code, out, _ = agent_saga("compact", "--log", url, "--keep-days", "0")
    assert code == 0 and "forgot 5 finished sagas" in out or "forgot 4 finished sagas" in out
    assert ("segment" in out) == (kind == "file")
    assert agent_saga("list", "--log", url)[0] == 0


def test_the_codes_of_the_command(fresh: Callable[[str], str], tmp_path: Path) -> None:
    source, target = fresh("file"), fresh("sqlite")
    seeded(source)
    assert agent_saga("log", "copy", source, f"file://{tmp_path}/none")[0] == 2
    assert agent_saga("log", "copy", source, source)[0] == 2
    assert agent_saga("log", "copy", source, "nonsense")[0] == 2
    assert agent_saga("log", "copy", source)[0] == 2
    with logs(source) as (owner,):
        owner.claim("dead")
        code, out, err = agent_saga("log", "copy", source, target, "--unfinished")
        assert code == 4 and out == "" and "--live" in err and err.count("\n") == 1
        code, out, err = agent_saga("log", "copy", source, target, "--unfinished", "--live")
        assert code == 1 and "moved 1 saga" in out and "live" in out
    code, out, err = agent_saga("log", "copy", source, target, "--unfinished", "--dry-run")
    assert code == 0 and out == "would copy 0 sagas, would move 1 saga, 4 there already, 1 moved away earlier\n"
    code, out, err = agent_saga("log", "copy", source, target, "--unfinished")
    assert code == 0 and out.startswith("copied 0 sagas, moved 1 saga, ") and err == ""
