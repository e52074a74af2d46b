"""A log that fails where a test says so."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agent_saga_core.clock import Clock
from agent_saga_core.errors import LogUnavailable
from agent_saga_core.log.base import KEEP_DAYS, Compaction, Log, Unfinished, Verification
from agent_saga_core.log.lines import Adopted, Lines
from agent_saga_core.records import Encoded, Record

__all__ = ["Fault", "FaultyLog"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One failure of a log.

    Attributes:
        on: Which call: `"append"`, `"flush"` (`aflush` and `write` count as well), `"claim"`, `"release"`, `"adopt"` or
            `"read"` (`lines` counts as well).
        nth: The how-manieth of them, from 1. With `record`, of those appends, or flushes behind such an append.
        record: Count only appends of this record type, or flushes and writes after one was appended.
        how: `"fails"`: this call raises `LogUnavailable` and does nothing; the next one works. `"breaks"`: it does
            nothing and raises, and so does everything after it, as after a failed write. `"breaks-after"`: the same,
            but it did what it was asked to: the answer was lost. `"crashes"`: the process dies before it.
            `"crashes-after"`: after it.
    """

    on: Literal["append", "flush", "claim", "release", "adopt", "read"]
    nth: int = 1
    record: str | None = None
    how: Literal["fails", "breaks", "breaks-after", "crashes", "crashes-after"] = "breaks"


class FaultyLog:
    """A `Log` that passes everything to `inner`, but for what `plan` says.

    A crash of a log that has a `crash` method, such as `MemoryLog`, is its death: it loses what was not flushed and
    all ownership, and every call raises. Any other log dies with the process, by SIGKILL. A broken log still gives up
    ownership.

    Args:
        inner: The log.
        plan: The faults. Each strikes once.
    """

    def __init__(self, inner: Log, plan: Iterable[Fault] = ()) -> None:
        self._inner = inner
        self._plan = list(plan)
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}
        self._appended: set[str] = set()
        self._broken: str | None = None
        self.struck: list[Fault] = []
        """The faults that have struck."""

    @property
    def url(self) -> str:
        """See `Log.url`."""
        return self._inner.url

    @property
    def clock(self) -> Clock:
        """See `Log.clock`."""
        return self._inner.clock

    @property
    def max_result_bytes(self) -> int:
        """See `Log.max_result_bytes`."""
        return self._inner.max_result_bytes

    def append(self, record: Record) -> int:
        """See `Log.append`."""

        def act() -> int:
            ticket = self._inner.append(record)
            self._appended.add(record.type)
            return ticket

        return self._with_faults("append", act, {record.type})

    def flush(self, ticket: int) -> None:
        """See `Log.flush`."""
        self._with_faults("flush", lambda: self._inner.flush(ticket), self._appended)

    async def aflush(self, ticket: int) -> None:
        """See `Log.aflush`."""
        fault = self._due("flush", self._appended)
        self._before(fault)
        await self._inner.aflush(ticket)
        self._after(fault)

    def write(self, ticket: int) -> None:
        """See `Log.write`."""
        self._with_faults("flush", lambda: self._inner.write(ticket), self._appended)

    def claim(self, saga_id: str, *, fresh: bool = False) -> tuple[Record, ...]:
        """See `Log.claim`."""
        return self._with_faults("claim", lambda: self._inner.claim(saga_id, fresh=fresh))

    def release(self, saga_id: str) -> None:
        """See `Log.release`."""
        if self._broken is not None:
            self._inner.release(saga_id)
        else:
            self._with_faults("release", lambda: self._inner.release(saga_id))

    def owned(self, saga_id: str) -> bool:
        """See `Log.owned`."""
        return self._inner.owned(saga_id)

    def read(self, saga_id: str) -> tuple[Record, ...]:
        """See `Log.read`."""
        return self._with_faults("read", lambda: self._inner.read(saga_id))

    def is_live(self, saga_id: str) -> bool:
        """See `Log.is_live`."""
        return self._inner.is_live(saga_id)

    def saga_ids(self) -> tuple[str, ...]:
        """See `Log.saga_ids`."""
        return self._with_faults("read", self._inner.saga_ids)

    def unfinished(self) -> Unfinished:
        """See `Log.unfinished`."""
        return self._with_faults("read", self._inner.unfinished)

    def verify(self, progress: Callable[[int], None] | None = None) -> Verification:
        """See `Log.verify`."""
        return self._with_faults("read", lambda: self._inner.verify(progress))

    def compact(
        self,
        progress: Callable[[int], None] | None = None,
        *,
        keep_days: float = KEEP_DAYS,
        dry_run: bool = False,
    ) -> Compaction:
        """See `Log.compact`. Never fails by plan, but on a broken log."""
        if self._broken is not None:
            raise LogUnavailable(f"the log takes no more records ({self._broken}); open it again")
        return self._inner.compact(progress, keep_days=keep_days, dry_run=dry_run)

    def lines(self, saga_id: str) -> Lines:
        """See `Log.lines`."""
        return self._with_faults("read", lambda: self._inner.lines(saga_id))

    def adopt(self, histories: Mapping[str, Sequence[Encoded]]) -> Adopted:
        """See `Log.adopt`."""
        return self._with_faults("adopt", lambda: self._inner.adopt(histories))

    def close(self) -> None:
        """See `Log.close`. Never fails by plan."""
        self._inner.close()

    # --- faults

    def _with_faults(self, on: str, act: Callable[[], Any], records: set[str] | frozenset[str] = frozenset()) -> Any:
        fault = self._due(on, records)
        self._before(fault)
        value = act()
        self._after(fault)
        return value

    def _due(self, on: str, records: set[str] | frozenset[str]) -> Fault | None:
        """The fault that strikes this call, counted now; raises if the log is broken already."""
        with self._lock:
            if self._broken is not None:
                raise LogUnavailable(f"the log takes no more records ({self._broken}); open it again")
            due: Fault | None = None
            for at, fault in enumerate(self._plan):
                if fault.on == on and (fault.record is None or fault.record in records):
                    self._counts[at] = self._counts.get(at, 0) + 1
                    if self._counts[at] == fault.nth:
                        due = due or fault
            if due is not None:
                self.struck.append(due)
            return due

    def _before(self, fault: Fault | None) -> None:
        if fault is None:
            return
        said = f"a fault was planned on {fault.on} {fault.nth}"
        if fault.how in ("fails", "breaks"):
            self._broken = said if fault.how == "breaks" else None
            raise LogUnavailable(f"the log cannot be used ({said})")
        if fault.how == "crashes":
            self._crash(said)

    def _after(self, fault: Fault | None) -> None:
        if fault is None:
            return
        said = f"a fault was planned on {fault.on} {fault.nth}"
        if fault.how == "breaks-after":
            self._broken = said
            raise LogUnavailable(f"the log cannot be used ({said})")
        if fault.how == "crashes-after":
            self._crash(said)

    def _crash(self, said: str) -> None:
        crash: Callable[[], None] | None = getattr(self._inner, "crash", None)
        if crash is None:
            os.kill(os.getpid(), signal.SIGKILL)
            return
        crash()
        self._broken = said
        raise LogUnavailable(f"the process has died ({said})")
