"""How a watch spreads out: what each process draws for itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_saga_core import ActionSemantics, FileLog, MemoryLog, RecoveryReport, compensator, saga_scope, undo
from agent_saga_core.cli.rounds import Round
from agent_saga_core.cli.stopping import Stop
from agent_saga_core.cli.watching import MAX_BACKOFF, Watch
from agent_saga_core.errors import LogUnavailable
from agent_saga_core.recovery import Recoverer
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
