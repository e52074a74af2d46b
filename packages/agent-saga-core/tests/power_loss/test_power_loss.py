"""Whatever a loss of power leaves of a log: what was told durable is there, and torn is told from damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .disk import Disk, in_order
from .recording import Recording
from .replay import replay
from .workloads import WORKLOADS, Workload

# How many outcomes of one crash are opened at most. `just power-loss` asks for more.
AT_MOST = int(os.environ.get("AGENT_SAGA_POWER_LOSS", "60"))
SEED = os.environ.get("AGENT_SAGA_POWER_LOSS_SEED", "")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: thousands of logs are opened here."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    directory = memory / f"agent-saga-power-{os.getpid()}-{tmp_path.name}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def record(workload: Workload, place: Path) -> Recording:
    (place / "recorded").mkdir()
    recording = Recording(place / "recorded")
    with recording.running():
        workload(recording)
    disk = Disk(recording.start, in_order)
    for op in recording.ops:
        disk.apply(op)
    recording.check(disk.whole())
    return recording


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_every_crash_of(workload: Workload, place: Path) -> None:
    recording = record(workload, place)
    count = replay(recording, place / "survived", at_most=AT_MOST, seed=SEED)
    print(f"{workload.__name__}: {len(recording.ops)} operations, {count}")
    assert count.opened > count.crashes
