"""The file log: the default store, which needs no server."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from agent_saga_core.clock import SYSTEM_CLOCK, Clock
from agent_saga_core.errors import LogCorrupted, LogUnavailable, SagaError
from agent_saga_core.log import osfile
from agent_saga_core.log.base import KEEP_DAYS, Compaction, Unfinished, Verification, cutoff, readable_history
from agent_saga_core.log.commit import Entry, GroupCommitLog
from agent_saga_core.log.history import History
from agent_saga_core.log.index import INDEX_FROM
from agent_saga_core.log.lines import Adopted, Lines, Whole, adopt_owned, wholes_of
from agent_saga_core.log.locks import LOCK_FILES, Exclusion, FileLocks, RangeLocks, SagaLocks, best_scheme
from agent_saga_core.log.manifest import parse_manifest, read_manifest
from agent_saga_core.log.retire import adopt, compact
from agent_saga_core.log.segments import SegmentBatch, SegmentWriter, writer_names
from agent_saga_core.log.verify import verify
from agent_saga_core.records import FORMAT_VERSION, Encoded, Record

__all__ = ["FileLog"]

META: Final = "log.json"
LOCKS: Final = "locks"


class _Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What `log.json` says. It is the last thing that is made, and never changes."""

    format: int
    log: str
    locks: int
    lock: str


class FileLog(GroupCommitLog[SegmentBatch]):
    """A log in a directory of one machine, shared by the processes of that machine.

    What `flush` returned for survives the death of the process and, as far as the disk keeps its word, of the
    machine; not the loss of the disk. A saga belongs to its owner as long as that process lives, even stopped, and to
    nobody from the moment it dies. A process that only reads writes nothing.

    It does not protect against: a directory shared between machines or between kernels; a child that C code forked,
    which keeps what its parent owned for as long as it lives; whole lines cut off the end of a stream that was not
    closed.

    Args:
        directory: Where the log is. Only the user who made it can read it.
        create: Whether to make it if there is none.
        clock: What records are stamped with and waits are measured by.
        max_result_bytes: Results longer than this are stored as digest and length.
        force: Use a file system whose locks and syncs are not known to hold.

    Raises:
        LogUnavailable: There is no log and none may or can be made, or it is of a newer version.
        LogCorrupted: What is there is no log any more.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        create: bool = True,
        clock: Clock = SYSTEM_CLOCK,
        max_result_bytes: int = 1_048_576,
        force: bool = False,
    ) -> None:
        super().__init__(clock)
        self._directory: str = os.path.abspath(directory)
        self._max_result_bytes = max_result_bytes
        if not force:
            osfile.check_file_system(self._directory)
        with _readable(self._directory):
            meta = _read_meta(self._directory)
            if meta is None:
                if not create:
                    raise LogUnavailable(
                        f"there is no log at {self._directory}; check the path, or make one: agent-saga log init "
                        f"{self.url}"
                    )
                meta = _create(self._directory)
            parse_manifest(read_manifest(self._directory), self._directory, meta.log)
        self._meta = meta
        locks = f"{self._directory}/{LOCKS}"
        self._locks: SagaLocks = RangeLocks(locks, meta.locks) if meta.lock == "ofd" else FileLocks(locks)
        self._history = History(self._directory, meta.log, meta.lock)
        self._writer: SegmentWriter | None = None
        self._making = Exclusion()
        self._sealed = 0  # of our own segments, those that are left behind and known to be

    @property
    def url(self) -> str:
        """See `Log.url`."""
        from urllib.parse import quote  # 3 ms that the import of the core does not need

        return f"file://{quote(self._directory)}"

    @property
    def max_result_bytes(self) -> int:
        """See `Log.max_result_bytes`."""
        return self._max_result_bytes

    @property
    def directory(self) -> str:
        """Where the log is, as an absolute path."""
        return self._directory

    def read(self, saga_id: str) -> tuple[Record, ...]:
        """See `Log.read`."""
        self._check_readable()
        with _readable(self._directory):
            self._history.refresh()
            return readable_history(saga_id, self._history.records(saga_id))

    def is_live(self, saga_id: str) -> bool:
        """See `Log.is_live`."""
        self._check_readable()
        with _readable(self._directory):
            return self._locks.is_held(saga_id)

    def saga_ids(self) -> tuple[str, ...]:
        """See `Log.saga_ids`."""
        self._check_readable()
        with _readable(self._directory):
            self._history.refresh()
            return tuple(self._history.saga_ids())

    def unfinished(self) -> Unfinished:
        """See `Log.unfinished`."""
        self._check_readable()
        with _readable(self._directory):
            self._history.refresh()
            saga_ids, damage = self._history.unfinished()
            return Unfinished(saga_ids=tuple(saga_ids), damage=tuple(damage))

    def verify(self, progress: Callable[[int], None] | None = None) -> Verification:
        """See `Log.verify`."""
        self._check_readable()
        with _readable(self._directory):
            return verify(self._directory, self._meta.log, progress)

    def compact(
        self,
        progress: Callable[[int], None] | None = None,
        *,
        keep_days: float = KEEP_DAYS,
        dry_run: bool = False,
    ) -> Compaction:
        """See `Log.compact`."""
        self._check_readable()
        with _readable(self._directory):
            return compact(
                self._history,
                self._directory,
                self._meta.log,
                self._meta.lock,
                cutoff=cutoff(self._clock, keep_days),
                dry_run=dry_run,
                progress=progress,
            )

    # --- moving

    def lines(self, saga_id: str) -> Lines:
        """See `Log.lines`."""
        self._check_readable()
        with _readable(self._directory):
            return tuple(self._history.lines(saga_id))

    def adopt(self, histories: Mapping[str, Sequence[Encoded]]) -> Adopted:
        """See `Log.adopt`. One call is one stream of segments, which counts from one moment to the other."""
        self._check(appending=True)
        wholes = wholes_of(histories)
        with _readable(self._directory):
            return adopt_owned(
                wholes,
                take=self._locks.acquire,
                look=self.lines,
                put=self._put_whole,
                give_up=self._locks.release,
                at_once=self._locks.at_once,
            )

    def _put_whole(self, wholes: Sequence[Whole]) -> None:
        self._locks.check(whole.saga_id for whole in wholes)
        adopt(self._directory, self._meta.log, self._meta.lock, wholes)
        self._history.refresh()
        self._seal(look=False)

    # --- the store's part of group commit

    def take(self, saga_id: str, token: object) -> None:
        """See `GroupCommitLog.take`."""
        if self._writer is None:
            with self._making, _readable(self._directory):
                if self._writer is None:
                    self._writer = SegmentWriter(self._directory, self._meta.log, self._meta.lock)
        self._locks.acquire(saga_id, token)

    def give_up(self, saga_id: str, token: object) -> None:
        """See `GroupCommitLog.give_up`."""
        self._locks.release(saga_id, token)

    def durable_history(self, saga_id: str) -> tuple[tuple[Record, ...], int]:
        """See `GroupCommitLog.durable_history`."""
        with _readable(self._directory):
            self._history.refresh()
            own = None if self._writer is None else self._writer.name
            if self._history.make_durable(saga_id, own):
                # A power loss now loses none of what this second look finds.
                self._history.refresh()
            records = self._history.records(saga_id)
        return readable_history(saga_id, records), max((record.n for record in records), default=0)

    def prepare(self, entries: Sequence[Entry]) -> SegmentBatch:
        """See `GroupCommitLog.prepare`."""
        return self._stream().prepare(entries)

    def write_batch(self, batch: SegmentBatch) -> None:
        """See `GroupCommitLog.write_batch`."""
        self._locks.check(entry.saga for entry in batch.entries)
        self._stream().write(batch)

    def accept(self, batch: SegmentBatch) -> None:
        """See `GroupCommitLog.accept`."""
        self._stream().accept(batch)

    def sync(self) -> None:
        """See `GroupCommitLog.sync`."""
        writer = self._stream()
        writer.sync()
        if writer.full > self._sealed:
            self._sealed = writer.full
            threading.Thread(target=self._seal, name="agent-saga index", daemon=True).start()

    def _seal(self, *, look: bool = True) -> None:
        """Write the indexes that are missing. They are a cache: where that fails, whoever reads next does it."""
        with suppress(OSError, SagaError):
            self._history.seal(look=look)

    def shut(self, *, clean: bool) -> None:
        """See `GroupCommitLog.shut`."""
        writer = self._writer
        try:
            if writer is not None and clean:
                writer.end()
                self._seal(look=writer.tail.offset >= INDEX_FROM)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """See `GroupCommitLog.abandon`."""
        self._locks.abandon()
        if self._writer is not None:
            self._writer.close()

    def _stream(self) -> SegmentWriter:
        writer = self._writer
        if writer is None:  # only owners append, and `take` made it
            raise LogUnavailable("this log has not claimed any saga")
        return writer

    def _check_readable(self) -> None:
        if self._closed is not None:
            self._check()


@contextmanager
def _readable(directory: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or directory
        raise LogUnavailable(f"the log at {directory} cannot be used: {where}: {error.strerror}") from error


def _read_meta(directory: str) -> _Meta | None:
    """What the directory says of itself; None if no log is there yet."""
    path = f"{directory}/{META}"
    try:
        with open(path, "rb") as file:
            text = file.read(65536)
    except FileNotFoundError:
        if os.path.isdir(directory) and writer_names(directory):
            raise LogCorrupted(
                f"{path} is missing, but there are writers; restore it from a copy", where=path
            ) from None
        return None
    try:
        meta = msgspec.json.decode(text, type=_Meta)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        raise LogCorrupted(f"{path} is damaged; restore it from a copy", where=path) from None
    if meta.format > FORMAT_VERSION:
        raise LogUnavailable(f"the log at {directory} was written by a newer version of agent-saga; upgrade to read it")
    if meta.format < 1 or not 0 < meta.locks <= 99 or meta.lock not in ("ofd", "flock"):
        raise LogCorrupted(f"{path} is damaged; restore it from a copy", where=path)
    if meta.lock != best_scheme() and meta.lock == "ofd":
        raise LogUnavailable(f"the log at {directory} needs open-file-description locks, which this system lacks")
    return meta


def _create(directory: str) -> _Meta:
    """Make a log. Of several processes that do so at once, one decides what `log.json` says."""
    made = [directory]
    while not os.path.isdir(os.path.dirname(made[-1])):
        made.append(os.path.dirname(made[-1]))
    for path in reversed(made):
        osfile.make_directory(path)
    locks = f"{directory}/{LOCKS}"
    osfile.make_directory(locks)
    scheme = best_scheme()
    for number in range(LOCK_FILES if scheme == "ofd" else 0):
        os.close(osfile.create_file(f"{locks}/{number:02d}"))
    meta = _Meta(format=FORMAT_VERSION, log=os.urandom(16).hex(), locks=LOCK_FILES, lock=scheme)
    draft = f"{directory}/new-{os.urandom(8).hex()}"
    descriptor = osfile.create_file(draft)
    try:
        osfile.write_at(descriptor, msgspec.json.encode(meta) + b"\n", 0)
        osfile.sync_file(descriptor)
    finally:
        os.close(descriptor)
    # Whoever sees `log.json` relies on the locks and on the way here, so these are durable first.
    above = os.path.dirname(made[-1])
    for path in (locks, *made, above):
        osfile.sync_directory(path)
    # A process that was killed while it did this may have made those further up. What cannot be synced is not ours.
    while above != os.path.dirname(above):
        above = os.path.dirname(above)
        with suppress(OSError):
            osfile.sync_directory(above)
    try:
        os.link(draft, f"{directory}/{META}")  # unlike rename, it never replaces what another process decided
    except FileExistsError:
        pass
    finally:
        os.unlink(draft)
    osfile.sync_directory(directory)
    decided = _read_meta(directory)
    if decided is None:
        raise LogCorrupted(f"{directory}/{META} vanished while the log was made", where=directory)
    return decided
