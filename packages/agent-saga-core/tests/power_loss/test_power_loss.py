"""Whatever a loss of power leaves of a log: what was told durable is there, and torn is told from damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_saga_core.log import file, history, index

from .disk import Order, any_order, in_order
from .replay import Count, flipped, outcomes, replay
from .workloads import (
    FROM_NOTHING,
    WORKLOADS,
    Workload,
    boundary_behind_head,
    boundary_between_lines,
    compacted,
    creation,
    handed_over_between_segments,
    handed_over_twice,
    killed,
    killed_at,
    killed_while_compacting,
    killed_while_making,
    recorded,
    recorded_after,
    relaxed,
    rotation,
)

# How many outcomes of one crash are opened at most. `just power-loss` asks for more.
AT_MOST = int(os.environ.get("AGENT_SAGA_POWER_LOSS", "40"))
LONG = AT_MOST > 40
SEED = os.environ.get("AGENT_SAGA_POWER_LOSS_SEED", "")

TWICE = (killed, relaxed, rotation, handed_over_twice, handed_over_between_segments, compacted)
SHIFTS = (-2, -1, 0, 1, 2)


@pytest.mark.parametrize("order", [in_order, any_order], ids=["in_order", "any_order"])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_every_crash_of(workload: Workload, order: Order, place: Path) -> None:
    recording = recorded(workload, place)
    # The 64 lock files of a new log, each for itself, would be most of what is looked at.
    at_most = AT_MOST // 10 if workload in FROM_NOTHING and order is any_order else AT_MOST
    count = replay(recording, place / "survived", at_most=at_most, order=order, seed=SEED)
    print(f"{workload.__name__}, names {order.name}: {len(recording.ops)} operations, {count}")
    assert count.opened > 30


@pytest.mark.parametrize("one_batch", [True, False], ids=["one batch", "two batches"])
@pytest.mark.parametrize("shift", SHIFTS)
def test_a_line_that_ends_at_a_sector_boundary(shift: int, one_batch: bool, place: Path) -> None:
    recording = recorded(boundary_between_lines(shift, one_batch=one_batch), place)
    count = replay(recording, place / "survived", at_most=2 * AT_MOST, seed=SEED)
    print(f"{len(recording.ops)} operations, {count}")
    assert count.opened > count.crashes


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_segment_whose_first_line_ends_at_a_sector_boundary(shift: int, place: Path) -> None:
    recording = recorded(boundary_behind_head(shift), place)
    count = replay(recording, place / "survived", at_most=2 * AT_MOST, seed=SEED)
    print(f"{len(recording.ops)} operations, {count}")
    assert count.opened > count.crashes


@pytest.mark.parametrize("workload", TWICE, ids=lambda workload: workload.__name__)
def test_the_power_fails_again_during_recovery(workload: Workload, place: Path) -> None:
    first = recorded(workload, place)
    count = Count()
    crashes = 0
    for at, tree in outcomes(first, AT_MOST // 10, random.Random(f"{SEED}{workload.__name__}")):
        second = recorded_after(first, at, tree, place)
        replay(second, place / "survived", at_most=AT_MOST // 10, order=any_order, seed=SEED, count=count)
        crashes += 1
    print(f"{workload.__name__}: {crashes} first crashes, then {count}")
    assert crashes >= 4 and count.opened > 50


# Of what a compaction retired, nobody reads anything.
@pytest.mark.parametrize("workload", TWICE[:-1], ids=lambda workload: workload.__name__)
def test_a_flipped_bit_in_what_survived_is_no_torn_end(workload: Workload, place: Path) -> None:
    recording = recorded(workload, place)
    chance = random.Random(f"{SEED}{workload.__name__}")
    flips = 0
    for _ in range(60 if LONG else 6):
        for _, tree in outcomes(recording, 10_000, chance):
            flips += flipped(recording, tree, place / "survived", chance)
    print(f"{workload.__name__}: {flips} flips")
    assert flips > 20


def test_a_writer_killed_anywhere_then_a_second_one_then_power_loss(place: Path) -> None:
    deaths = kill_everywhere(killed_at, place, at_most=AT_MOST // 10)
    assert deaths > 30


@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "not indexed"])
def test_a_compaction_killed_anywhere_then_another_process_then_power_loss(
    indexed: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if indexed:
        for module in (index, history, file):
            monkeypatch.setattr(module, "INDEX_FROM", 1)
    deaths = kill_everywhere(killed_while_compacting, place, at_most=AT_MOST // 20, each=1 if LONG else 7)
    assert deaths > 20


def kill_everywhere(workload: Callable[[int], Workload], place: Path, *, at_most: int, each: int = 1) -> int:
    """Replay the recordings in which the first process dies at each of its operations; return how many these are."""
    count = Count()
    for at in range(0, 10_000, each):
        recording = recorded(workload(at), place)
        since = recording.killed_at
        if since is None:
            print(f"{at} places to die at; {count}")
            return at
        into = place / "survived"
        count = replay(recording, into, at_most=at_most, order=any_order, seed=SEED, since=since, count=count)
    raise AssertionError("it never got to its end")


def test_a_process_killed_while_it_makes_a_log_then_a_second_one_then_power_loss(place: Path) -> None:
    made = len(recorded(creation, place).ops)
    opened = 0
    # Of the 64 lock files, a few stand for all.
    for at in (*range(6), *range(made - 15, made + 1)):
        recording = recorded(killed_while_making(at), place, from_nothing=True)
        count = replay(recording, place / "survived", at_most=AT_MOST // 10, order=any_order, seed=SEED, since=at)
        opened += count.opened
    print(f"{made} places to die at, {opened} outcomes opened")
