"""The figures of DBOS: `python -I peer_dbos.py FIGURE DIRECTORY`.

It runs in an environment that `benchmarks.peers` makes for it, never in ours, and imports nothing of ours. What it
prints is one JSON object. The system database is a SQLite file with what DBOS sets: neither a journal mode nor
`synchronous` is touched, so that they are SQLite's own (a rollback journal, `FULL`). Where `PEER_DBOS_DATABASE` holds
the URL of a PostgreSQL database, that is used, with what its server has set.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from dbos import DBOS, SetWorkflowID

STEPS = 200
SAGAS = 256
STEPS_OF_A_SAGA = 8
LIVE = 10
ROWS_OF_A_WORKFLOW = 5  # its status, its input, its output and two steps
TABLES = ("workflow_status", "workflow_input", "workflow_output", "operation_outputs")
NOWHERE = 2**30  # a file descriptor that nobody has
PATIENCE = 20.0  # seconds for the recovered workflows to run

resumed = threading.Semaphore(0)


@DBOS.step()
def charge(customer: str, n: int) -> dict[str, Any]:
    return {"id": f"ch_{n}"}


@DBOS.step()
async def acharge(customer: str, n: int) -> dict[str, Any]:
    return {"id": f"ch_{n}"}


@DBOS.workflow()
def timed(steps: int) -> list[float]:
    taken: list[float] = []
    mark()
    for n in range(steps):
        begun = time.perf_counter()
        charge("cus_7", n)
        taken.append(time.perf_counter() - begun)
    mark()
    return taken


@DBOS.workflow()
async def atimed(steps: int) -> list[float]:
    taken: list[float] = []
    mark()
    for n in range(steps):
        begun = time.perf_counter()
        await acharge("cus_7", n)
        taken.append(time.perf_counter() - begun)
    mark()
    return taken


@DBOS.workflow()
def order(customer: str, steps: int) -> None:
    for n in range(steps):
        charge(customer, n)
    resumed.release()


@DBOS.workflow()
async def aorder(customer: str, steps: int) -> None:
    for n in range(steps):
        await acharge(customer, n)


def mark() -> None:
    """A sync that fails: between two of these, whoever traces this program counts its syncs."""
    with suppress(OSError):
        os.fsync(NOWHERE)


def database(directory: Path) -> Path:
    return directory / "peer.sqlite"


@contextmanager
def launched(directory: Path) -> Iterator[float]:
    """Give the seconds that opening took, the reading of what is to be recovered included."""
    begun = time.perf_counter()
    DBOS(
        config={
            "name": "benchmark",
            "application_version": "1",
            "system_database_url": os.environ.get("PEER_DBOS_DATABASE") or f"sqlite:///{database(directory)}",
            "log_level": "ERROR",
            "console_log_level": "ERROR",
        }
    )
    DBOS.launch()
    seconds = time.perf_counter() - begun
    try:
        yield seconds
    finally:
        DBOS.destroy()


def sync_step(directory: Path) -> dict[str, float]:
    with launched(directory):
        return {"seconds": statistics.median(timed(STEPS)), "per": STEPS}


def async_step(directory: Path) -> dict[str, float]:
    with launched(directory):
        return {"seconds": statistics.median(asyncio.run(atimed(STEPS))), "per": STEPS}


def whole(directory: Path) -> dict[str, float]:
    taken: list[float] = []
    with launched(directory):
        order("cus_7", 1)  # warm
        mark()
        for _ in range(STEPS):
            begun = time.perf_counter()
            order("cus_7", 1)
            taken.append(time.perf_counter() - begun)
        mark()
    return {"seconds": statistics.median(taken), "per": STEPS}


def concurrent(directory: Path) -> dict[str, float]:
    sagas = int(sys.argv[3]) if len(sys.argv) > 3 else SAGAS

    async def run() -> float:
        await asyncio.gather(*(aorder("cus_7", 1) for _ in range(4)))  # warm
        begun = time.perf_counter()
        mark()
        await asyncio.gather(*(aorder("cus_7", STEPS_OF_A_SAGA) for _ in range(sagas)))
        mark()
        return time.perf_counter() - begun

    steps = sagas * STEPS_OF_A_SAGA
    with launched(directory):
        return {"seconds": asyncio.run(run()) / steps, "per": steps}


def build(directory: Path) -> dict[str, float]:
    """A database of `sys.argv[3]` rows: one real workflow of two steps, copied row by row, and 10 that did not end."""
    records = int(sys.argv[3])
    with launched(directory), SetWorkflowID("pattern"):
        order("cus_7", 2)
    with closing(sqlite3.connect(database(directory))) as db, db:

        def copies(table: str, names: list[str]) -> None:
            columns = [row[1] for row in db.execute(f"pragma table_info({table})")]
            others = ", ".join(column for column in columns if column != "workflow_uuid")
            db.executemany(
                f"insert into {table} (workflow_uuid, {others}) select ?, {others} from {table} "
                "where workflow_uuid = 'pattern'",
                [(name,) for name in names],
            )

        live = [f"live-{n}" for n in range(LIVE)]
        copies("workflow_status", live)
        copies("workflow_input", live)
        db.execute(
            "update workflow_status set status = 'PENDING', completed_at = null, output = null "
            "where workflow_uuid like 'live-%'"
        )
        ended = [f"order-{n:09d}" for n in range((records - 2 * LIVE) // ROWS_OF_A_WORKFLOW - 1)]
        for table in TABLES:
            copies(table, ended)
        return {"found": sum(db.execute(f"select count(*) from {table}").fetchone()[0] for table in TABLES)}


def memory() -> float:
    """Kilobytes at the peak, of this program alone."""
    status = Path("/proc/self/status")
    lines = status.read_text("ascii").splitlines() if status.exists() else []
    return next((float(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0.0)


def recover(directory: Path) -> dict[str, float]:
    """Launch on a built database; what was recovered has to run as well, which is waited for but not counted."""
    with launched(directory) as seconds:
        kilobytes = memory()
        found = sum(resumed.acquire(timeout=PATIENCE) for _ in range(LIVE))
    return {"seconds": seconds, "found": found, "kilobytes": kilobytes}


FIGURES = {figure.__name__: figure for figure in (sync_step, async_step, whole, concurrent, build, recover)}

if __name__ == "__main__":
    print(json.dumps(FIGURES[sys.argv[1]](Path(sys.argv[2]))))
