"""The floor, the rows, and how they are shown."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

FLOOR_WRITES = 400
PEER = "(a peer)"
"""In place of a goal."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured figure beside its goal."""

    what: str
    measured: str
    goal: str
    met: bool
    floor: str

    @property
    def verdict(self) -> str:
        """Whether the goal is met; a peer has none."""
        return "-" if self.goal == PEER else "yes" if self.met else "no"


def floor(directory: Path, size: int) -> float:
    """Median seconds of a bare append of `size` bytes and its fdatasync, on the disk of `directory`."""
    path = directory / f"floor-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    data = b"x" * (size - 1) + b"\n"
    try:
        times: list[float] = []
        for _ in range(FLOOR_WRITES):
            begun = time.perf_counter()
            os.write(fd, data)
            os.fdatasync(fd)
            times.append(time.perf_counter() - begun)
        return statistics.median(times)
    finally:
        os.close(fd)
        path.unlink()


def beside_floor(directory: Path, size: int, measure: Callable[[], float]) -> tuple[float, float, float]:
    """What `measure` gives, with the floor just before and just after it."""
    before = floor(directory, size)
    measured = measure()
    return measured, before, floor(directory, size)


def ratio(what: str, goal: float, directory: Path, size: int, measure: Callable[[], float]) -> Row:
    """A row whose figure is a multiple of the floor."""
    measured, before, after = beside_floor(directory, size, measure)
    times = measured / ((before + after) / 2)
    return Row(
        what=what,
        measured=f"{times:.2f} x floor ({measured * 1e6:.0f} us)",
        goal=f"<= {goal:g} x floor",
        met=times <= goal,
        floor=f"{before * 1e6:.0f} / {after * 1e6:.0f} us",
    )


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| what | measured | goal | met | floor before / after |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {r.what} | {r.measured} | {r.goal} | {r.verdict} | {r.floor} |" for r in rows]
    return "\n".join(lines)


def machine(directory: Path) -> str:
    """A line that says where and when."""
    kind = os.popen(f"stat -f -c %T {directory}").read().strip() or "unknown"
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {platform.machine()}, {platform.system()} "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}, file system {kind}."
    )
