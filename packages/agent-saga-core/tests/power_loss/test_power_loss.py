"""Whatever a loss of power leaves of a log: what was told durable is there, and torn is told from damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .disk import Order, any_order, in_order
from .replay import replay
from .workloads import (
    FROM_NOTHING,
    WORKLOADS,
    Workload,
    boundary_behind_head,
    boundary_between_lines,
    creation,
    killed_at,
    killed_while_making,
    recorded,
)

# How many outcomes of one crash are opened at most. `just power-loss` asks for more.
AT_MOST = int(os.environ.get("AGENT_SAGA_POWER_LOSS", "300"))
SEED = os.environ.get("AGENT_SAGA_POWER_LOSS_SEED", "")

SHIFTS = (-2, -1, 0, 1, 2)


@pytest.mark.parametrize("order", [in_order, any_order], ids=["in_order", "any_order"])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_every_crash_of(workload: Workload, order: Order, place: Path) -> None:
    recording = recorded(workload, place)
    # The 64 lock files of a new log, each for itself, would be most of what is looked at.
    at_most = AT_MOST // 10 if workload in FROM_NOTHING and order is any_order else AT_MOST
    count = replay(recording, place / "survived", at_most=at_most, order=order, seed=SEED)
    print(f"{workload.__name__}, names {order.name}: {len(recording.ops)} operations, {count}")
    assert count.opened >= count.crashes


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


def test_a_writer_killed_anywhere_then_a_second_one_then_power_loss(place: Path) -> None:
    opened = 0
    for at in range(1, 10_000):
        recording = recorded(killed_at(at), place)
        count = replay(recording, place / "survived", at_most=AT_MOST // 10, order=any_order, seed=SEED, since=at)
        opened += count.opened
        if len(recorded(_never_killed, place).ops) <= at:
            break
    print(f"{at} places to die at, {opened} outcomes opened")
    assert at > 20


_never_killed = killed_at(10_000)


def test_a_process_killed_while_it_makes_a_log_then_a_second_one_then_power_loss(place: Path) -> None:
    made = len(recorded(creation, place).ops)
    opened = 0
    # Of the 64 lock files, two stand for all.
    for at in (*range(8), *range(66, made + 1)):
        recording = recorded(killed_while_making(at), place, from_nothing=True)
        count = replay(recording, place / "survived", at_most=AT_MOST // 10, order=any_order, seed=SEED, since=at)
        opened += count.opened
    print(f"{made} places to die at, {opened} outcomes opened")
