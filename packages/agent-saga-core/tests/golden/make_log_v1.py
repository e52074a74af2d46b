"""Writes the golden log of format 1. Run it only to make the golden log of a NEW format, under a new name.

What it wrote once, `log-v1/`, is checked in and must be read and recovered for ever.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agent_saga_core.log import FileLog, segments
from agent_saga_core.records import Record


def main(directory: Path) -> None:
    segments.SEGMENT_BYTES = 2000  # several segments, small enough to read

    def record(saga: str, n: int, kind: str, epoch: int = 1, **data: object) -> Record:
        return Record(saga=saga, n=n, epoch=epoch, type=kind, time=1_700_000_000.25 + n, data=data)

    first = FileLog(directory)
    for saga in ("order-1", "order-2", 'naïve "id"\t€'):
        first.claim(saga)
    first.append(record("order-1", 1, "START", name="order"))
    first.flush(first.append(record("order-1", 2, "INTENT", tool="charge", args={"amount": 4200, "customer": "cus_7"})))
    first.append(record("order-2", 1, "START", name="order"))
    first.flush(first.append(record("order-2", 2, "INTENT", tool="book", args={"seat": "12A"})))
    first.flush(first.append(record("order-1", 3, "DONE", result={"id": "ch_1", "exact": 0.1, "big": 2**70})))
    first.flush(first.append(record("order-1", 4, "COMMITTED")))
    first.append(record('naïve "id"\t€', 1, "START", name="odd"))
    hint = Record(saga='naïve "id"\t€', n=2, epoch=1, type="HINT", time=1_700_000_002.0, data={}, critical=False)
    first.flush(first.append(hint))
    first.flush(first.append(record("order-2", 3, "DONE", result={"id": "bk_9"})))
    first.abandon()  # killed: no end line

    second = FileLog(directory)
    (*_, claim) = second.claim("order-2")
    second.append(record("order-2", 5, "ROLLING_BACK", claim.epoch, reason="owner died"))
    second.flush(second.append(record("order-2", 6, "COMPENSATING", claim.epoch, handler="bookings.cancel")))
    second.release("order-2")
    second.close()

    # A third writer was killed in the middle of a write.
    third = FileLog(directory)
    third.claim("order-3")
    third.flush(third.append(record("order-3", 1, "START", name="order")))
    third.flush(third.append(record("order-3", 2, "INTENT", tool="email", args={})))
    third.abandon()
    path = max(directory.glob("w-00000003-*/*.jsonl"))
    path.write_bytes(path.read_bytes()[:-40])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
