"""The file log by itself: a million records, ten live sagas. What opening and checking take of time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from agent_saga_core.log import FileLog
from agent_saga_core.log.commit import Entry, Owned
from agent_saga_core.records import Record, encode
from benchmarks.tables import Row, beside_floor

RECORDS = 1_000_000
LIVE = 10
THREADS = 32
LINE = 600  # bytes of a typical record's line
CHUNK = 5_000

STEP = {"tool": "charge", "number": 1, "args": {"customer": "cus_7", "amount": 4200}, "key": "0f" * 16}

# Each is measured in a process of its own, so that its memory is its own. VmHWM, because ru_maxrss starts from what the
# parent had when it forked.
OPENING = """
import json, re, resource, sys, time
from agent_saga_core.log import FileLog
begun = time.perf_counter()
log = FileLog(sys.argv[1], create=False)
found = log.unfinished()
seconds = time.perf_counter() - begun
histories = [log.read(saga_id) for saga_id in found.saga_ids]
with_reading = time.perf_counter() - begun
print(json.dumps({"seconds": seconds, "with_reading": with_reading, "found": len(histories),
                  "kilobytes": int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])}))
"""
VERIFYING = """
import json, re, resource, sys, time
from agent_saga_core.log import FileLog
begun = time.perf_counter()
found = FileLog(sys.argv[1], create=False).verify()
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps({"seconds": time.perf_counter() - begun, "found": found.records if found.intact else -1,
                  "kilobytes": int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) + children}))
"""


def history(records: int, live: int) -> Iterator[Record]:
    """Sagas of five records, four at a time, that all end, and now and then a record of `live` ones that do not."""
    now = time.time()

    def record(saga: str, n: int, kind: str) -> Record:
        return Record(saga=saga, n=n, epoch=1, type=kind, time=now, data=STEP)

    numbers = [0] * live
    every = max(records // (live * 20), 1)
    for at in count():
        for kind_n, kind in enumerate(("START", "INTENT", "DONE", "INTENT", "COMMITTED"), 1):
            for saga in range(4):
                yield record(f"order-{at:07d}-{saga}", kind_n, kind)
        if at * 20 // every != (at * 20 - 20) // every:
            which = at * 20 // every % live
            numbers[which] += 1
            yield record(f"live-{which}", numbers[which], "START" if numbers[which] == 1 else "INTENT")


def build(directory: Path, records: int = RECORDS, live: int = LIVE) -> None:
    """Make a log of so many records: the lines that a process would have written, in few writes and one sync."""
    log = FileLog(directory)
    log.claim("builder", fresh=True)
    writer = log._stream()  # pyright: ignore[reportPrivateUsage]
    owner = Owned()
    source, made = history(records, live), 0
    while made < records:
        entries: list[Entry] = []
        for record in source:
            entries.append(Entry.of(made, owner, record, encode(record)))
            made += 1
            if len(entries) == CHUNK or made == records:
                break
        while entries:
            batch = writer.prepare(entries)
            writer.write(batch)
            writer.accept(batch)
            entries = entries[len(batch.entries) :]
    log.sync()
    log.close()


def measured(script: str, directory: Path) -> dict[str, float]:
    """The best of three."""
    tries = [
        json.loads(
            subprocess.run([sys.executable, "-c", script, str(directory)], check=True, capture_output=True).stdout
        )
        for _ in range(3)
    ]
    return min(tries, key=lambda found: found["seconds"])


def records_per_sync(directory: Path, threads: int = THREADS, each: int = 200) -> float:
    """Threads that append a record and flush it, over and over: how many records share a sync."""
    syncs = 0

    class Counting(FileLog):
        def sync(self) -> None:
            nonlocal syncs
            syncs += 1
            super().sync()

    with tempfile.TemporaryDirectory(dir=directory, prefix="benchmark-") as folder:
        log = Counting(Path(folder) / "log")

        def work(thread: int) -> None:
            saga = f"t{thread}"
            log.claim(saga, fresh=True)
            for n in range(1, each + 1):
                log.flush(log.append(Record(saga=saga, n=n, epoch=1, type="INTENT", time=1.0, data=STEP)))

        workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        log.close()
    return threads * each / syncs


def run(directory: Path) -> list[Row]:
    """Measure everything; takes about a minute, and a gigabyte of disk for so long."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=directory, prefix="benchmark-") as folder:
        log = Path(folder) / "log"
        build(log)
        opening = measured(OPENING, log)
        megabytes = opening["kilobytes"] / 1024
        assert opening["found"] == LIVE, opening
        rows.append(
            Row(
                what="opening + recovery scan, 1 M records, 10 live sagas",
                measured=f"{opening['seconds']:.3f} s, {megabytes:.0f} MB "
                f"({opening['with_reading']:.3f} s with reading them)",
                goal="<= 0.2 s, <= 80 MB",
                met=opening["seconds"] <= 0.2 and megabytes <= 80,
                floor="-",
            )
        )
        verifying = measured(VERIFYING, log)
        megabytes = verifying["kilobytes"] / 1024
        assert verifying["found"] == RECORDS, verifying
        rows.append(
            Row(
                what="verify, 1 M records",
                measured=f"{verifying['seconds']:.2f} s, {megabytes:.0f} MB",
                goal="<= 3 s, <= 80 MB",
                met=verifying["seconds"] <= 3 and megabytes <= 80,
                floor="-",
            )
        )
    shared, before, after = beside_floor(directory, LINE, lambda: records_per_sync(directory))
    rows.append(
        Row(
            what="the log alone, 32 threads: records per sync",
            measured=f"{shared:.1f}",
            goal=">= 15",
            met=shared >= 15,
            floor=f"{before * 1e6:.0f} / {after * 1e6:.0f} us",
        )
    )
    return rows
