"""How a watch spreads out: what each process draws for itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_saga_core import ActionSemantics, FileLog, MemoryLog, RecoveryReport, compensator, saga_scope, undo
from agent_saga_core.cli import watching as watching_module
from agent_saga_core.cli.rounds import Round
from agent_saga_core.cli.stopping import Stop
from agent_saga_core.cli.watching import MAX_BACKOFF, Watch
from agent_saga_core.errors import LogUnavailable
from agent_saga_core.log.base import Unfinished
from agent_saga_core.records import Record
from agent_saga_core.recovery import Recoverer, recover_as
from agent_saga_core.registry import isolated_registry

BOUND = 20.0


def watch(directory: Path, interval: float = 5.0) -> Watch:
    return Watch(
        f"file:{directory}/log",
        (),
        modules=(),
        dry_run=False,
        concurrency=1,
        interval=interval,
        metrics=None,
        as_json=False,
        stop=Stop(),
    )


def test_pauses_are_drawn_by_each_process_for_itself_and_not_by_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    drawn = [[each.pause() for _ in range(200)] for each in (watch(tmp_path), watch(tmp_path))]
    for pauses in drawn:
        assert all(2.5 <= pause <= 7.5 for pause in pauses) and len(set(pauses)) > 190
        assert 4.5 < sum(pauses) / 200 < 5.5
    assert drawn[0] != drawn[1]


def test_after_a_server_was_away_they_do_not_all_come_back_at_once(tmp_path: Path) -> None:
    drawn = [[each._failed(LogUnavailable("away")) for _ in range(12)] for each in (watch(tmp_path), watch(tmp_path))]
    for pauses in drawn:
        longest = [min(MAX_BACKOFF, 5.0 * 2.0**n) for n in range(12)]
        assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True))
    assert drawn[0] != drawn[1]


class Ended:
    """A round that came to its end."""

    ended, taken, error = True, True, None
    listed, claimed, decided = True, False, False

    def __init__(self, number: int, *attention: str) -> None:
        self.number = number
        self.log = MemoryLog()
        self.report = RecoveryReport(attention=attention)


def test_a_round_that_waited_long_makes_nothing_be_told_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watching = watch(tmp_path)
    with caplog.at_level(logging.INFO, "agent_saga"):
        for rounds in ([Ended(1, "old")], [Ended(3, "old", "new")], [Ended(2, "old")], [Ended(4, "old", "new")]):
            for saga_id in rounds[0].report.attention:
                watching._found(saga_id, "attention", "why")
            watching._rounds = list[Any](rounds)
            watching._collect()
    assert caplog.messages == ["attention old: why", "attention new: why"]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    with isolated_registry():

        @compensator("held")
        def held() -> None:
            assert opened.wait(BOUND)

        yield opened
        opened.set()


def test_a_round_whose_sagas_wait_for_a_turn_is_told_from_one_that_only_waits(
    tmp_path: Path, gate: threading.Event
) -> None:
    log = FileLog(tmp_path / "log")
    for name in ("a", "b"):
        with saga_scope(name, log=log) as saga:
            saga.execute("act", lambda: 1, semantics=ActionSemantics.COMPENSABLE, compensate=undo("held"))
            saga.suspend("nobody comes back", deadline=0.000001)
    ended = threading.Event()
    this = Round(
        log,
        halt=threading.Event(),
        recoverer=Recoverer(),
        dry_run=False,
        retry=False,
        progress=lambda saga_id, verdict, reason: None,
        at_end=ended.set,
    )
    this.start()
    assert not this.taken
    gate.set()
    assert ended.wait(BOUND)
    assert this.taken and this.report is not None and sorted(this.report.recovered) == ["a", "b"]
    log.close()


def test_several_that_are_named_never_hold_up_the_next_round(tmp_path: Path) -> None:
    made = Round(
        FileLog(tmp_path / "log"),
        ("a", "b"),
        halt=threading.Event(),
        recoverer=Recoverer(),
        dry_run=False,
        retry=False,
        progress=lambda saga_id, verdict, reason: None,
        at_end=lambda: None,
    )
    assert made.taken
    made.log.close()


# --- whether the log can be used


class Server:
    """Logs on one storage, as a server that is away, that lets its user look only, or on which leases are watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *sagas: str) -> None:
        self.away: str | None = None
        self.refuses: str | None = None
        self.undecided = False
        first = MemoryLog()
        self.store, self.clock = first.store, first.clock
        for saga_id in sagas:
            with saga_scope(saga_id, log=first) as saga:
                saga.execute("act", lambda: 1, semantics=ActionSemantics.COMPENSABLE, compensate=undo("held"))
                saga.suspend("nobody comes back", deadline=0.000001)
        monkeypatch.setattr(watching_module, "open_existing", lambda url: Reached(self))


class Reached(MemoryLog):
    def __init__(self, server: Server) -> None:
        super().__init__(server.clock, store=server.store)
        self.server = server

    def unfinished(self) -> Unfinished:
        if self.server.away:
            raise LogUnavailable(self.server.away)
        return super().unfinished()

    def is_live(self, saga_id: str) -> bool:
        return self.server.undecided or super().is_live(saga_id)

    def undecided(self, saga_ids: Collection[str]) -> float:
        return 3.0 if self.server.undecided else 0.0

    def claim(self, saga_id: str, *, fresh: bool = False) -> tuple[Record, ...]:
        if self.server.refuses:
            raise LogUnavailable(self.server.refuses)
        return super().claim(saga_id, fresh=fresh)


def begin_round(watching: Watch) -> None:
    try:
        watching._start_round()
    except LogUnavailable as error:
        watching._failed(error)


def end_round(watching: Watch) -> None:
    for each in watching._rounds:
        each.join(BOUND)
        assert each.ended
    try:
        watching._collect()
    except LogUnavailable as error:
        watching._failed(error)


def one_round(watching: Watch) -> None:
    begin_round(watching)
    end_round(watching)


AGAIN = "the log can be used again"


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if not message.startswith("watching ")]


@pytest.mark.parametrize("outage", [False, True])
def test_a_log_is_usable_as_soon_as_it_has_answered_not_when_the_round_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gate: threading.Event,
    caplog: pytest.LogCaptureFixture,
    outage: bool,
) -> None:
    caplog.set_level(logging.INFO, "agent_saga")
    server = Server(monkeypatch, "a")
    entered = threading.Event()

    @compensator("told")
    def told() -> None:
        entered.set()
        assert gate.wait(BOUND)

    log = MemoryLog(server.clock, store=server.store)
    with saga_scope("b", log=log) as saga:
        saga.execute("act", lambda: 1, semantics=ActionSemantics.COMPENSABLE, compensate=undo("told"))
        saga.suspend("nobody comes back", deadline=0.000001)
    watching = watch(tmp_path)
    assert watching._reachable is None
    if outage:
        server.away = "connection refused"
        one_round(watching)
        assert watching._reachable is False
        server.away = None
    watching._sagas = ("b",)
    begin_round(watching)
    assert entered.wait(BOUND)
    assert watching._reachable is True and watching._rounds
    assert (AGAIN in caplog.messages) == outage
    gate.set()
    end_round(watching)
    expected = ["connection refused; trying again", AGAIN] if outage else []
    assert messages(caplog) == [*expected, "recovered b"]


def test_who_may_look_and_not_write_hears_one_error_until_something_is_written_or_there_is_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agent_saga")
    gate.set()
    server = Server(monkeypatch, "a")
    watching = watch(tmp_path)
    for nonce in ("3f2a9c0d11", "77bb01c2d3", "0a1b2c3d4e"):
        server.undecided, server.refuses = False, f"permissions violation for publish to n.i.l.{nonce}; grant it"
        one_round(watching)
        assert watching._reachable is False
        server.undecided = True  # the log is opened anew, and calls everybody live until it has watched their leases
        one_round(watching)
        one_round(watching)
        assert watching._reachable is False
    assert messages(caplog) == [
        "1 saga not ended: 1 orphaned",
        "permissions violation for publish to n.i.l.3f2a9c0d11; grant it; trying again",
    ]
    server.undecided, server.refuses = False, None
    one_round(watching)
    assert messages(caplog)[2:] == [AGAIN, "recovered a"] and watching._reachable is True


def test_who_may_not_write_and_has_nothing_to_write_can_use_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agent_saga")
    gate.set()
    server = Server(monkeypatch, "a")
    server.refuses = "you may not"
    watching = watch(tmp_path)
    one_round(watching)
    assert watching._reachable is False
    elsewhere = MemoryLog(server.clock, store=server.store)
    recover_as(Recoverer(), elsewhere)
    one_round(watching)
    assert watching._reachable is True and messages(caplog)[-1] == AGAIN


def test_each_new_reason_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "agent_saga")
    watching = watch(tmp_path)
    outage = ("connection refused", "connection refused", "not initialised", "connection refused", "not initialised")
    for _ in range(2):
        for reason in outage:
            watching._failed(LogUnavailable(reason))
        watching._heard("listed")
        watching._heard("listed")
    said = ["connection refused; trying again", "not initialised; trying again", AGAIN]
    assert caplog.messages == said * 2
    caplog.clear()
    for drawn in range(1000):
        watching._failed(LogUnavailable(f"reason {drawn} of many"))
    assert len(caplog.messages) == watching_module.MAX_REASONS


def test_the_first_look_is_told_in_numbers_and_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agent_saga")
    gate.set()
    server = Server(monkeypatch, "a", "b", "c")
    owner = MemoryLog(server.clock, store=server.store)
    owner.claim("b")
    with saga_scope("d", log=owner) as saga:
        saga.suspend("a person", deadline=3600.0)
    watching = watch(tmp_path)
    one_round(watching)
    owner.release("b")
    one_round(watching)
    (first,) = [record for record in caplog.records if getattr(record, "event", "") == "looked"]
    assert first.getMessage() == "4 sagas not ended: 1 live, 2 orphaned, 1 suspended"
    facts: dict[str, Any] = getattr(first, "facts")  # noqa: B009 - a record has it only through `extra`
    assert facts["unfinished"] == 4 and facts["by_status"]["live"] == 1 and facts["by_status"]["damaged"] == 0
    caplog.clear()
    Server(monkeypatch)
    one_round(watch(tmp_path))
    assert messages(caplog) == ["every saga has ended"]
