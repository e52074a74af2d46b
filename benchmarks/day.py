"""A day of a million sagas on the store of your choice, scaled down: `python -m benchmarks.day STORE`.

Runs a part of the day's sagas, three durable steps each, as fast as they go, and does the rest by arithmetic that it
shows. One saga in a hundred fails at its last step and is rolled back.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from agent_saga_core import Log, compensator, open_log, saga_scope, saga_tool, undo
from benchmarks import stores
from benchmarks.tables import machine

DAY = 86_400
SAGAS_OF_A_DAY = 1_000_000
STEPS = 3
PEAK = 10  # how many times the average the busiest minute is
AT_ONCE = 256
FAILS = 100  # one saga in so many

KINDS: dict[str, Callable[[Path], Any]] = {"file": stores.file} | {
    store.name.lower(): store.start for store in stores.STORES
}


class Full(Exception):
    """Why a saga of this day fails."""


@compensator("benchmarks.day.cancel")
async def cancel(booking: str, *, idempotency_key: str) -> None:
    """Undoes nothing: what is measured is the log."""


@saga_tool(semantics="COMPENSABLE", compensate=undo(cancel, booking="result.id"), not_applied=Full)
async def book(customer: str, n: int, fails: bool) -> dict[str, Any]:
    if fails:
        raise Full
    return {"id": f"bk_{customer}_{n}"}


async def sagas(log: Log, count: int) -> None:
    numbers = iter(range(count))

    async def customer() -> None:
        for n in numbers:
            try:
                async with saga_scope(log=log):
                    for step in range(STEPS):
                        await book(f"cus_{n}", step, step == STEPS - 1 and n % FAILS == 0)
            except Full:
                pass

    await asyncio.gather(*(customer() for _ in range(min(AT_ONCE, count))))


def told(kind: str, count: int, seconds: float, size: int) -> str:
    """What it comes to, with the arithmetic."""
    rate, scale = count * STEPS / seconds, SAGAS_OF_A_DAY // count
    average = SAGAS_OF_A_DAY * STEPS / DAY
    peak = average * PEAK
    gigabytes = size / count * SAGAS_OF_A_DAY / 1e9
    lines = [
        f"{kind}: {count:,} sagas of {STEPS} steps, 1/{scale} of a day, {AT_ONCE} at a time, 1 in {FAILS} rolled back",
        f"measured       {seconds:8.2f} s, {size / 1e6:,.1f} MB of log",
        f"rate           {count * STEPS:,} steps / {seconds:.2f} s = {rate:,.0f} steps/s from one process",
        f"a whole day    {seconds:.2f} s x {scale} = {seconds * scale:,.0f} s of work, "
        f"{100 * seconds * scale / DAY:.1f} % of {DAY:,} s",
        f"average        {SAGAS_OF_A_DAY:,} x {STEPS} / {DAY:,} s = {average:.1f} steps/s",
        f"busiest minute {PEAK} x {average:.1f} = {peak:.0f} steps/s, {100 * peak / rate:.0f} % of one such process",
        f"disk           {size / count / 1e3:.1f} kB a saga x {SAGAS_OF_A_DAY:,} = {gigabytes:.1f} GB a day, "
        f"{30 * gigabytes:,.0f} GB in 30 days",
    ]
    return "\n".join(lines)


def run(kind: str, count: int, directory: Path) -> str:
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="benchmark-") as folder,
        KINDS[kind](Path(folder).resolve()) as running,
    ):
        seconds: list[float] = []
        sizes: list[int] = []
        for part in (AT_ONCE, count):  # the first one warms up; closed, because some stores tidy up then
            with closing(open_log(running.url)) as log:
                begun = time.perf_counter()
                asyncio.run(sagas(log, part))
                seconds.append(time.perf_counter() - begun)
            sizes.append(running.size())
        return told(kind, count, seconds[-1], sizes[-1] - sizes[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.day", description=__doc__)
    parser.add_argument("store", choices=KINDS, nargs="+")
    parser.add_argument("--sagas", type=int, default=5_000, help="how many of the day's million are run")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where the logs are written")
    given = parser.parse_args()
    print(machine(given.directory))
    for kind in given.store:
        print(f"\n{run(kind, given.sagas, given.directory)}")


if __name__ == "__main__":
    main()
