"""Group commit: all the concurrency of a log, once for every store.

Nothing here may be spoiled by an exception that strikes between two bytecodes, because a KeyboardInterrupt
does. So there is no lock that an interrupted thread could leave behind: every change of shared state is one
atomic operation of a dict, a deque or a name, each step may be repeated, and the leader's work in progress
stands in the log itself, where the next leader, or the same one again, repeats it.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agent_saga_core.clock import Clock
from agent_saga_core.errors import Fenced, LogCorrupted, LogUnavailable, SagaError
from agent_saga_core.lazy import LazyModule
from agent_saga_core.records import FINAL, Encoded, Record, RecordType, encode

if TYPE_CHECKING:
    import asyncio
else:
    asyncio = LazyModule("asyncio")

__all__ = ["Batch", "Entry", "GroupCommitLog", "Owned"]

RELAXED_SYNC_AFTER = 0.05
"""Seconds within which a record that was only written becomes durable: the promise of
`durability="relaxed"`."""

RECHECK_AFTER = 0.2
"""Seconds after which a waiting thread looks for itself. Only an interrupt inside a leader's last two lines
makes anybody wait that long."""


class Owned:
    """A saga that this process owns, as far as appending goes. Its identity is the token of the ownership."""

    __slots__ = ("base_ended", "base_n", "last")

    def __init__(self) -> None:
        # The saga's last record when it was claimed, and whether that is final.
        self.base_n = 0
        self.base_ended = False
        # One name, so that counting a record is one store: an interrupt comes before or after it.
        self.last: Entry | None = None

    @property
    def last_n(self) -> int:
        """Number of the saga's last record."""
        last = self.last
        return self.base_n if last is None else last.n

    @property
    def ended(self) -> bool:
        """Whether that record is final."""
        last = self.last
        return self.base_ended if last is None else last.final

    def count(self, entry: Entry) -> None:
        """Make `entry` the saga's last record, unless it is counted already."""
        if entry.n > self.last_n:
            self.last = entry


class Entry(int):
    """One appended record. As a number it is the ticket that `append` returns."""

    owner: Owned
    saga: str
    n: int
    final: bool
    encoded: Encoded
    written: bool
    durable: bool
    error: SagaError | None

    @classmethod
    def of(cls, ticket: int, owner: Owned, record: Record, encoded: Encoded) -> Entry:
        """Make the entry of a record that was just encoded."""
        self = cls(ticket)
        self.owner = owner
        self.saga = record.saga
        self.n = record.n
        self.final = record.type in FINAL
        self.encoded = encoded
        self.written = self.durable = False
        self.error = None
        return self


class Batch:
    """Some entries, and whatever the store needs to write them as often as it takes."""

    __slots__ = ("entries",)

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries


B = TypeVar("B", bound=Batch)
_Turn = list[tuple[Entry, "asyncio.Future[None]"]]


class GroupCommitLog(ABC, Generic[B]):
    """Appending and flushing, for a store that can write a batch and sync.

    A store supplies `prepare`, `write_batch`, `accept` and `sync`, which only the leader calls, one call at a
    time. It enters a saga in `_owned` when it is claimed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._owned: dict[str, Owned] = {}
        self._leaving: dict[str, Owned] = {}
        self._numbers = count(1)
        # Appended and not yet durable, in order. The key makes a repeated append harmless.
        self._buffer: dict[tuple[str, int], Entry] = {}
        self._leader: dict[str, int] = {}
        self._batch: B | None = None
        self._unsynced: dict[int, B] = {}
        self._waiting: dict[threading.Lock, tuple[Entry | None, bool]] = {}
        self._turns: dict[asyncio.AbstractEventLoop, _Turn] = {}
        self._inbox: deque[tuple[asyncio.AbstractEventLoop, _Turn]] = deque()
        self._wake = threading.Event()
        self._flusher: threading.Thread | None = None
        self._broken: BaseException | None = None
        self._closing = False
        self._closed: str | None = None
        _open_logs.add(self)

    # --- what a store supplies

    @abstractmethod
    def prepare(self, entries: Sequence[Entry]) -> B:
        """Make a batch of the first of `entries`, at least one. No I/O: what it makes may be thrown away."""

    @abstractmethod
    def write_batch(self, batch: B) -> None:
        """Store the batch. Called again with the same batch if it was interrupted; the outcome is the same.

        An entry that the store refuses (another owner) gets its `error` set; the others are stored.

        Raises:
            OSError: It cannot be stored. The log is poisoned.
        """

    @abstractmethod
    def accept(self, batch: B) -> None:
        """The batch is written: the next one goes behind it.

        May come twice for one batch, and late: it must never move the end of the stream back.
        """

    @abstractmethod
    def sync(self) -> None:
        """Make everything written durable.

        Raises:
            OSError: It cannot be synced. The log is poisoned.
        """

    @abstractmethod
    def take(self, saga_id: str, token: object) -> None:
        """Exclude everybody else from the saga, under `token`.

        Raises:
            SagaBusy: Somebody has it.
        """

    @abstractmethod
    def give_up(self, saga_id: str, token: object) -> None:
        """End what `take` began under `token`, even if that was interrupted. Harmless where it is over."""

    @abstractmethod
    def durable_history(self, saga_id: str) -> tuple[tuple[Record, ...], int]:
        """Every record of the saga, each durable, and the number of the last.

        Called between `take` and `give_up`.

        Raises:
            LogCorrupted: Damage may concern this saga.
        """

    @abstractmethod
    def shut(self, *, clean: bool) -> None:
        """Close the store. `clean` says that everything appended is durable."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child: close what was inherited, without touching the parent's store or locks."""

    # --- the log protocol

    @property
    def clock(self) -> Clock:
        """See `Log.clock`."""
        return self._clock

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the parent of this forked process."""
        return self._closed is not None

    @property
    def poisoned(self) -> BaseException | None:
        """Why it takes no more records; None if it does. Opening it again may help."""
        return self._broken

    @property
    def owns_any(self) -> bool:
        """Whether some saga is owned through it, or is being given up."""
        return bool(self._owned or self._leaving)

    def owned(self, saga_id: str) -> bool:
        """See `Log.owned`."""
        return saga_id in self._owned

    def append(self, record: Record) -> int:
        """See `Log.append`.

        Raises:
            ValueError: The record cannot be encoded, or its number does not follow the saga's last.
            Fenced: This process does not own the saga.
            LogUnavailable: The log is poisoned or closed.
        """
        self._check(appending=True)
        owner = self._owned.get(record.saga)
        if owner is None:
            raise Fenced(f"this process does not own saga {record.saga!r}; claim it before appending to it")
        encoded = encode(record)
        last = owner.last
        if last is not None and record.n == last.n and encoded.same_content(last.encoded):
            return last
        if record.n != owner.last_n + 1 or owner.ended:
            state = "has ended with" if owner.ended else "is at"
            raise ValueError(
                f"saga {record.saga!r} {state} record {owner.last_n}; this record {record.n} cannot follow"
            )
        new = Entry.of(next(self._numbers), owner, record, encoded)
        entry = self._buffer.setdefault((record.saga, record.n), new)
        owner.count(entry)
        if entry is not new and not encoded.same_content(entry.encoded):
            raise ValueError(f"saga {record.saga!r} holds another record {record.n} already")
        return entry

    def flush(self, ticket: int) -> None:
        """See `Log.flush`."""
        self._flush(ticket)

    def _flush(self, ticket: int) -> None:
        # What a store's own `flush` asks for beyond durability does not concern who only wants to leave.
        entry = self._entry(ticket)
        if entry is not None:
            while not entry.durable:
                self._lead_or_wait(entry, sync=True)
            if entry.error is not None:
                raise entry.error

    async def aflush(self, ticket: int) -> None:
        """See `Log.aflush`."""
        entry = self._entry(ticket)
        if entry is None:
            return
        while not entry.durable:
            self._check()
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            turn = self._turns.get(loop)
            if turn is None:
                turn = self._turns[loop] = []
                # Behind everything that is ready now, so that the whole turn of the loop shares one flush.
                loop.call_soon(self._end_turn, loop)
            turn.append((entry, future))
            await future
        if entry.error is not None:
            raise entry.error

    def write(self, ticket: int) -> None:
        """See `Log.write`."""
        entry = self._entry(ticket)
        if entry is not None:
            while not entry.written:
                self._lead_or_wait(entry, sync=False)
            if entry.error is not None:
                raise entry.error
            if not entry.durable:
                self._check()
                self._start_flusher()
                self._wake.set()

    def claim(self, saga_id: str, *, fresh: bool = False) -> tuple[Record, ...]:
        """See `Log.claim`."""
        self._check(appending=True)
        owner = Owned()
        try:
            self.take(saga_id, owner)
            records, owner.base_n = ((), 0) if fresh else self.durable_history(saga_id)
            owner.base_ended = any(record.type in FINAL for record in records)
            self._owned[saga_id] = owner
            if not owner.base_n or owner.base_ended:
                return records
            n = owner.base_n + 1
            now = self._clock.time()
            claim = Record(saga=saga_id, n=n, epoch=n, type=RecordType.CLAIM, time=now, data={})
            self.append(claim)
            return (*records, claim)
        except BaseException:
            if self._owned.get(saga_id) is owner:
                self.release(saga_id)  # the CLAIM may be in the buffer, so this flushes
            else:
                self.give_up(saga_id, owner)
            raise

    def release(self, saga_id: str) -> None:
        """See `Log.release`."""
        owner = self._owned.get(saga_id)
        if owner is None or self._closed is not None:
            self._let_go(saga_id, None)
            return
        left = self._buffer.get((saga_id, owner.last_n + 1))  # its append was interrupted
        if left is not None:
            owner.count(left)
        broken = self._broken is not None
        try:
            if owner.last is not None:
                self._flush(owner.last)
        except SagaError:
            self._let_go(saga_id, owner)
            if not broken:
                raise
        else:
            self._let_go(saga_id, owner)

    def _let_go(self, saga_id: str, owner: Owned | None) -> None:
        # An interrupt leaves the owner in `_leaving`, where the repeated call finds it.
        if owner is not None:
            self._leaving[saga_id] = owner
        leaving = self._leaving.get(saga_id)
        if leaving is not None:
            self._owned.pop(saga_id, None)
            self.give_up(saga_id, leaving)
            self._leaving.pop(saga_id, None)

    def close(self) -> None:
        """See `Log.close`."""
        if self._closed is not None:
            return
        self._closing = True
        failure: SagaError | None = None
        if self._broken is None:
            try:
                self._flush(next(self._numbers))
            except SagaError as error:
                failure = error
        for saga_id, owner in list(self._owned.items()):
            self._let_go(saga_id, owner)
        while not self._sit():
            self._wait(None)
        try:
            if self._closed is None:
                self.shut(clean=self._broken is None)
        except OSError as error:
            failure = LogUnavailable(f"the log did not close cleanly ({error}); nothing that was flushed is lost")
            failure.__cause__ = error
        finally:
            self._closed = "by this process"
            self._leave()
            self._wake.set()
        if failure is not None:
            raise failure

    # --- leading

    def _check(self, *, appending: bool = False) -> None:
        """Raise if the log takes no more."""
        if self._broken is not None:
            if isinstance(self._broken, LogCorrupted):
                raise LogCorrupted(str(self._broken), where=self._broken.where) from self._broken
            raise LogUnavailable(
                f"the log takes no more records ({self._broken}); "
                "mend the cause and open it again, recovery finishes what is left"
            ) from self._broken
        if self._closed is not None or (appending and self._closing):
            raise LogUnavailable(f"the log is closed ({self._closed or 'closing'}); open it again")

    def _entry(self, ticket: int) -> Entry | None:
        """The entry to wait for until all up to `ticket` is durable; None if nothing is left to do."""
        if isinstance(ticket, Entry):
            return ticket
        pending = [entry for entry in self._buffer.copy().values() if entry <= ticket and not entry.durable]
        return pending[-1] if pending else None

    def _sit(self) -> bool:
        """Take the leader's seat, or find oneself in it, left by an interrupt in the last lines."""
        me = threading.get_ident()
        return self._leader.setdefault("", me) == me

    def _leave(self) -> None:
        # First the seat, then the waiters; a waiter first registers, then tries the seat: one sees the other.
        self._leader.pop("", None)
        if self._waiting:
            self._wake_waiters(everyone=self._broken is not None or self._closed is not None)

    def _lead_or_wait(self, entry: Entry, *, sync: bool) -> None:
        """Bring `entry` one round nearer, as leader or by waiting for one. Raises if the log is broken."""
        if self._broken is not None or self._closed is not None:
            self._check()
        if self._sit():
            try:
                self._commit(sync)
            except (OSError, LogCorrupted, LogUnavailable) as error:
                self._broken = error
                self._check()
            finally:
                self._leave()
        else:
            self._wait(entry, sync=sync)

    def _wait(self, entry: Entry | None, *, sync: bool = True) -> None:
        """Wait for the leader: until `entry` is done, or this thread may lead, or something may be amiss."""
        turn = threading.Lock()
        turn.acquire()
        self._waiting[turn] = (entry, sync)
        try:
            if self._leader:
                turn.acquire(timeout=RECHECK_AFTER)
        finally:
            self._waiting.pop(turn, None)

    def _commit(self, sync: bool) -> None:
        """Write what is buffered and, if asked, make everything written durable.

        An interrupt may end this anywhere. The next leader then starts at the top, and nothing here minds
        being done twice: the batch in hand is written to the same place again.
        """
        while True:
            batch = self._batch
            if batch is None:
                entries = [entry for entry in self._buffer.copy().values() if not entry.written]
                if not entries:
                    break
                batch = self._batch = self.prepare(entries)
            self.write_batch(batch)
            self._unsynced[batch.entries[0]] = batch
            self.accept(batch)
            for entry in batch.entries:
                entry.written = True
            self._batch = None
        if sync and self._unsynced:
            batches = self._unsynced.copy()
            self.sync()
            for batch in batches.values():
                for entry in batch.entries:
                    entry.durable = True
            # An entry that its saga does not count yet stays: its append was interrupted and will be
            # repeated.
            for key, entry in self._buffer.copy().items():
                if entry.durable and entry.owner.last_n >= entry.n:
                    self._buffer.pop(key, None)
            for first in batches:
                self._unsynced.pop(first, None)

    def _wake_waiters(self, *, everyone: bool) -> None:
        """Wake the threads that are done, and one that is not, to lead."""
        promoted = False
        for turn, (entry, sync) in self._waiting.copy().items():
            done = entry is not None and (entry.durable if sync else entry.written)
            if done or everyone or not promoted:
                promoted = promoted or not done
                if self._waiting.pop(turn, None) is not None:
                    turn.release()

    # --- serving event loops, and `write`

    def _end_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = self._turns.pop(loop, None)
        if turn:
            self._inbox.append((loop, turn))
            self._start_flusher()
            self._wake.set()

    def _start_flusher(self) -> None:
        flusher = self._flusher
        if flusher is None or not flusher.is_alive():
            # Two may be started at once: they share the inbox, and each delivers what it took.
            flusher = threading.Thread(target=self._serve, name="agent-saga flusher", daemon=True)
            flusher.start()
            self._flusher = flusher

    def _serve(self) -> None:
        while True:
            # A broken log syncs nothing any more: then only a waiter or the log's end wakes this thread.
            pending = self._unsynced and self._broken is None
            self._clock.wait(self._wake, RELAXED_SYNC_AFTER if pending else None)
            woken = self._wake.is_set()
            self._wake.clear()
            turns: list[tuple[asyncio.AbstractEventLoop, _Turn]] = []
            while self._inbox:
                turns.append(self._inbox.popleft())
            if turns:
                self._serve_turns(turns)
            elif self._closed is not None:
                return
            elif not woken:
                self._sync_written()

    def _serve_turns(self, turns: list[tuple[asyncio.AbstractEventLoop, _Turn]]) -> None:
        error: BaseException | None = None
        try:
            for _, turn in turns:
                for entry, _ in turn:
                    while not entry.durable:
                        self._lead_or_wait(entry, sync=True)
        except (LogUnavailable, LogCorrupted):
            pass  # every waiter finds the log broken and says so in its own exception
        except BaseException as raised:  # belongs to the waiters: this thread must go on serving the others
            error = raised
        for loop, turn in turns:
            try:
                loop.call_soon_threadsafe(_settle, turn, error)
            except RuntimeError:  # that loop is closed: nobody waits there any more
                continue

    def _sync_written(self) -> None:
        batches = self._unsynced.copy()
        try:
            for batch in batches.values():
                while not batch.entries[-1].durable:
                    self._lead_or_wait(batch.entries[-1], sync=True)
        except (LogUnavailable, LogCorrupted):
            return  # whoever uses the log next hears of it

    # --- fork

    def _abandon(self) -> None:
        """In a forked child: forget everything and close, without a write and without an unlock."""
        self._closed = "it belongs to the parent of this forked process"
        self._buffer.clear()
        self._owned.clear()
        self._unsynced.clear()
        self._waiting.clear()
        self._turns.clear()
        self._inbox.clear()
        self._batch = None
        self.abandon()


def _settle(turn: _Turn, error: BaseException | None) -> None:
    for _, future in turn:
        if not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


_open_logs: weakref.WeakSet[GroupCommitLog[Any]] = weakref.WeakSet()


def _abandon_all() -> None:
    for log in list(_open_logs):
        log._abandon()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_abandon_all)
