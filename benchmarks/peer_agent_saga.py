"""The figures of the unrelated distribution `agent-saga` 2.3: `python -I peer_agent_saga.py FIGURE DIRECTORY`.

It runs in an environment that `benchmarks.peers` makes for it, never in ours, and imports nothing of ours. What it
prints is one JSON object. The log is the peer's `FileWAL` with its defaults, which are its strongest: records chained
by hash, an fsync before a compensable effect and another one when its compensation is known.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agent_saga import ActionSemantics, Compensation, RecoveryDaemon, saga_scope, tool, verify_chain
from agent_saga.registry import compensator
from agent_saga.wal import FileWAL

STEPS = 300
SAGAS = 256
STEPS_OF_A_SAGA = 8
LIVE = 10
RECORDS_OF_A_SAGA = 4
CHUNK = 20_000  # the peer's buffer takes 100,000

syncs = 0
sync_file = os.fsync


def counted(fd: int) -> None:
    global syncs
    syncs += 1
    sync_file(fd)


@compensator("benchmarks.refund")
def refund(charge_id: str) -> None:
    """Never called: every saga here commits."""


def refunded(result: Any) -> Compensation:
    return Compensation(fn=refund, kwargs={"charge_id": result["id"]}, handler="benchmarks.refund")


@tool("look", semantics=ActionSemantics.REVERSIBLE, compensate=lambda result: Compensation(fn=refund))
async def look(customer: str, n: int) -> dict[str, Any]:
    return {"id": n}


@tool("charge", semantics=ActionSemantics.COMPENSABLE, compensate=refunded)
def charge(customer: str, n: int) -> dict[str, Any]:
    return {"id": f"ch_{n}"}


@tool("acharge", semantics=ActionSemantics.COMPENSABLE, compensate=refunded)
async def acharge(customer: str, n: int) -> dict[str, Any]:
    return {"id": f"ch_{n}"}


@asynccontextmanager
async def log_in(directory: Path) -> AsyncIterator[FileWAL]:
    log = FileWAL(directory / "peer.wal")
    await log.start()
    try:
        yield log
    finally:
        await log.close()


async def median_step(step: Any, directory: Path) -> dict[str, float]:
    taken: list[float] = []
    async with log_in(directory) as log, saga_scope(wal=log):
        before = syncs
        for n in range(STEPS):
            begun = time.perf_counter()
            await step(customer="cus_7", n=n)
            taken.append(time.perf_counter() - begun)
        made = syncs - before
    return {"seconds": statistics.median(taken), "syncs": made / STEPS}


async def plain_step(directory: Path) -> dict[str, float]:
    return await median_step(look, directory)


async def sync_step(directory: Path) -> dict[str, float]:
    return await median_step(charge, directory)


async def async_step(directory: Path) -> dict[str, float]:
    return await median_step(acharge, directory)


async def whole(directory: Path) -> dict[str, float]:
    taken: list[float] = []
    async with log_in(directory) as log:
        before = syncs
        for n in range(STEPS):
            begun = time.perf_counter()
            async with saga_scope(wal=log):
                await acharge(customer="cus_7", n=n)
            taken.append(time.perf_counter() - begun)
        made = syncs - before
    return {"seconds": statistics.median(taken), "syncs": made / STEPS}


async def concurrent(directory: Path) -> dict[str, float]:
    async with log_in(directory) as log:

        async def one(n: int) -> None:
            async with saga_scope(wal=log):
                for step in range(STEPS_OF_A_SAGA):
                    await acharge(customer="cus_7", n=n * 1000 + step)

        await asyncio.gather(*(one(n) for n in range(SAGAS)))  # warm
        before, begun = syncs, time.perf_counter()
        await asyncio.gather(*(one(n) for n in range(SAGAS)))
        seconds, made = time.perf_counter() - begun, syncs - before
    steps = SAGAS * STEPS_OF_A_SAGA
    return {"seconds": seconds / steps, "syncs": made / steps}


async def build(directory: Path) -> dict[str, float]:
    """A log of `sys.argv[3]` records: the lines that its own engine appends for sagas of one step, and 10 live ones."""
    records = int(sys.argv[3])
    made = 0
    async with log_in(directory) as log:

        def append(event: str, saga: str, **data: Any) -> None:
            nonlocal made
            log.append(event, {"saga_id": saga, **data})
            made += 1

        def begin(saga: str) -> None:
            append("SAGA_START", saga, pid=os.getpid(), lease_ttl=5.0)
            step = {"step_id": f"{saga}-1", "tool": "acharge", "semantics": "COMPENSABLE"}
            append("STEP_INTENT", saga, **step, kwargs={"customer": "cus_7", "amount": 4200})
            append("STEP_COMMITTED", saga, **step, compensation=refunded({"id": "ch_1"}).describe())

        for live in range(LIVE):
            begin(f"live-{live}")
        while made + RECORDS_OF_A_SAGA <= records:
            saga = f"order-{made:09d}"
            begin(saga)
            append("SAGA_COMPLETE", saga, clean=True)
            if made % CHUNK < RECORDS_OF_A_SAGA:
                await log.barrier()
        for extra in range(records - made):
            append("SAGA_LEASE", f"live-{extra}", pid=os.getpid())
        await log.barrier()
    return {"found": made}


def memory() -> float:
    """Kilobytes at the peak, of this program alone."""
    status = Path("/proc/self/status")
    lines = status.read_text("ascii").splitlines() if status.exists() else []
    return next((float(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0.0)


async def recover(directory: Path) -> dict[str, float]:
    """Open the log for writing and find the sagas that its daemon would roll back."""
    begun = time.perf_counter()
    async with log_in(directory) as log:
        found = RecoveryDaemon(log.path).dangling()
        seconds = time.perf_counter() - begun
    return {"seconds": seconds, "found": len(found), "kilobytes": memory()}


async def verify(directory: Path) -> dict[str, float]:
    begun = time.perf_counter()
    report = verify_chain(FileWAL(directory / "peer.wal").records())
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "found": report.checked if report.intact else -1, "kilobytes": memory()}


FIGURES = {
    figure.__name__: figure for figure in (plain_step, sync_step, async_step, whole, concurrent, build, recover, verify)
}

if __name__ == "__main__":
    os.fsync = counted
    print(json.dumps(asyncio.run(FIGURES[sys.argv[1]](Path(sys.argv[2])))))
