"""The engine on a file log: steps, a whole saga, concurrency, import. Ratios to the floor of the same run."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_saga_core import FileLog, compensator, saga_scope, saga_tool, undo
from benchmarks.tables import Row, beside_floor, ratio

STEPS = 600
LINE = 600  # bytes of a typical record's line


@compensator("benchmarks.refund")
def refund(charge_id: str, *, idempotency_key: str) -> None:
    """Never called: every saga here commits."""


@saga_tool(semantics="READ_ONLY")
def look(customer: str, n: int) -> dict[str, Any]:
    return {"id": n}


@saga_tool(semantics="COMPENSABLE", compensate=undo(refund, charge_id="result.id"))
def charge(customer: str, n: int) -> dict[str, Any]:
    return {"id": f"ch_{n}"}


@saga_tool(semantics="COMPENSABLE", compensate=undo(refund, charge_id="result.id"))
async def acharge(customer: str, n: int) -> dict[str, Any]:
    return {"id": f"ch_{n}"}


class CountingLog(FileLog):
    """A file log that counts its syncs and records."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.syncs = 0
        self.records = 0

    def sync(self) -> None:
        self.syncs += 1
        super().sync()

    def append(self, record: Any) -> int:
        self.records += 1
        return super().append(record)


@contextmanager
def log_in(directory: Path) -> Iterator[CountingLog]:
    with tempfile.TemporaryDirectory(dir=directory, prefix="benchmark-") as folder:
        log = CountingLog(Path(folder) / "log")
        try:
            yield log
        finally:
            log.close()


def median_of(call: Callable[[int], object], times: int) -> float:
    taken: list[float] = []
    for n in range(times):
        begun = time.perf_counter()
        call(n)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def read_only_step(directory: Path) -> float:
    with log_in(directory) as log, saga_scope(log=log):
        return median_of(lambda n: look("cus_7", n), STEPS)


def durable_step(directory: Path) -> float:
    with log_in(directory) as log, saga_scope(log=log):
        return median_of(lambda n: charge("cus_7", n), STEPS)


def durable_async_step(directory: Path) -> float:
    async def run() -> float:
        taken: list[float] = []
        with log_in(directory) as log:
            async with saga_scope(log=log):
                for n in range(STEPS):
                    begun = time.perf_counter()
                    await acharge("cus_7", n)
                    taken.append(time.perf_counter() - begun)
        return statistics.median(taken)

    return asyncio.run(run())


def whole_saga(directory: Path) -> float:
    with log_in(directory) as log:

        def one(n: int) -> None:
            with saga_scope(log=log):
                charge("cus_7", n)

        return median_of(one, STEPS)


def concurrent_sagas(directory: Path, sagas: int = 256, steps: int = 8) -> tuple[float, float]:
    """Syncs and wall seconds per durable step of `sagas` async sagas at once."""

    async def run() -> tuple[float, float]:
        with log_in(directory) as log:

            async def one(n: int) -> None:
                async with saga_scope(log=log):
                    for step in range(steps):
                        await acharge("cus_7", n * 1000 + step)

            await asyncio.gather(*(one(n) for n in range(sagas)))  # warm
            log.syncs = 0
            begun = time.perf_counter()
            await asyncio.gather(*(one(n) for n in range(sagas)))
            return log.syncs / (sagas * steps), (time.perf_counter() - begun) / (sagas * steps)

    return asyncio.run(run())


def records_per_sync(directory: Path, threads: int = 32, steps: int = 40) -> float:
    with log_in(directory) as log, saga_scope(log=log) as saga:

        def work(thread: int) -> None:
            for n in range(steps):
                given = {"customer": "cus_7", "n": thread * 1000 + n}
                saga.run_step(charge.__agent_saga__.spec, given, lambda key: {"id": "x"})

        workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
        log.syncs = log.records = 0
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return log.records / log.syncs


def import_seconds() -> float:
    """Seconds that importing the core takes beyond starting Python, bytecode cached; the best of ten."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def best(code: str) -> float:
        taken: list[float] = []
        for _ in range(10):
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, env=environment)
            taken.append(time.perf_counter() - begun)
        return min(taken)

    best("import agent_saga_core")
    return best("import agent_saga_core") - best("pass")


def run(directory: Path) -> list[Row]:
    """Measure everything; takes about a minute."""
    rows: list[Row] = []
    step, before, after = beside_floor(directory, LINE, lambda: read_only_step(directory))
    shown = f"{before * 1e6:.0f} / {after * 1e6:.0f} us"
    rows.append(
        Row(
            what="step without durability, p50",
            measured=f"{step * 1e6:.1f} us",
            goal="<= 15 us",
            met=step <= 15e-6,
            floor=shown,
        )
    )
    rows.append(ratio("durable step, sync, strict, p50", 2.5, directory, LINE, lambda: durable_step(directory)))
    rows.append(ratio("durable step, async, strict, p50", 3.8, directory, LINE, lambda: durable_async_step(directory)))
    rows.append(ratio("whole saga with one durable step", 3.8, directory, LINE, lambda: whole_saga(directory)))
    counted: list[float] = []

    def sagas() -> float:
        syncs, seconds = concurrent_sagas(directory)
        counted.append(syncs)
        return seconds

    seconds, before, after = beside_floor(directory, LINE, sagas)
    shown = f"{before * 1e6:.0f} / {after * 1e6:.0f} us"
    rows.append(
        Row(
            what="256 concurrent async sagas: syncs per durable step",
            measured=f"{counted[0]:.4f}",
            goal="<= 0.02",
            met=counted[0] <= 0.02,
            floor=shown,
        )
    )
    rows.append(
        Row(
            what="256 concurrent async sagas: wall time per durable step",
            measured=f"{seconds * 1e6:.1f} us",
            goal="<= 30 us",
            met=seconds <= 30e-6,
            floor=shown,
        )
    )
    records, before, after = beside_floor(directory, LINE, lambda: records_per_sync(directory))
    rows.append(
        Row(
            what="32 threads in one saga, records per sync (with the engine's own work)",
            measured=f"{records:.1f}",
            goal=">= 15",
            met=records >= 15,
            floor=f"{before * 1e6:.0f} / {after * 1e6:.0f} us",
        )
    )
    imported = import_seconds()
    rows.append(
        Row(
            what="`import agent_saga_core` over bare Python",
            measured=f"{imported * 1e3:.0f} ms",
            goal="<= 60 ms",
            met=imported <= 0.06,
            floor="-",
        )
    )
    return rows
