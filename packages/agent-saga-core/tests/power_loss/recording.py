"""What a log did to its directory, operation by operation, and what it told its callers in between.

The log runs for real, on a directory of this machine. Each call that changes the directory is made and then noted, in
the order in which the calls returned. A call that goes around this layer does not go unnoticed: `Recording.check` holds
the directory against the notes.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_saga_core.clock import SystemClock
from agent_saga_core.log import FileLog, osfile
from agent_saga_core.records import FINAL, Record

WAIT = 20.0
ROOT = 0


class Write(NamedTuple):
    """Bytes were put into a file, in the page cache."""

    file: int
    offset: int
    data: bytes


class Cut(NamedTuple):
    """A file was given a length."""

    file: int
    size: int


class SyncFile(NamedTuple):
    """`fsync` or `fdatasync` of a file returned; it covers what was noted before it began."""

    file: int
    covers: int


class Names(NamedTuple):
    """Entries of one directory changed, in one step: `after` holds what each name is then, None for gone."""

    directory: int
    after: tuple[tuple[str, int | None], ...]
    new: str = ""
    """What the entry is that was made with its name: `"file"`, `"directory"`; empty if nothing was made."""


class SyncNames(NamedTuple):
    """`fsync` of a directory returned."""

    directory: int
    covers: int


class Told(NamedTuple):
    """A log told its caller that these records (numbers up to the one given) are durable."""

    durable: tuple[tuple[str, int], ...]
    made: bool = False
    """Whether it also said that the log exists."""
    may_forget: tuple[str, ...] = ()
    """Sagas that a compaction was allowed to forget just now, each as a whole."""
    absent: tuple[tuple[str, int], ...] = ()
    """Sagas that a claim found without any record, and how often that was so up to now."""


class Promises(NamedTuple):
    """What was told so far."""

    durable: dict[str, int]
    """Up to which number each saga is there."""
    made: bool
    """Whether the log exists."""
    may_be_gone: frozenset[str]
    """Sagas that may be gone as a whole."""
    absent: dict[str, int]
    """How often each saga was found absent: of what was appended before, nothing may come back."""


Op = Write | Cut | SyncFile | Names | SyncNames | Told


class Tree(NamedTuple):
    """Directories and files: each object by number, the root under `ROOT`."""

    directories: dict[int, dict[str, int]]
    files: dict[int, bytes]


class Killed(BaseException):
    """The process that makes calls is dead: whatever it tries, nothing happens any more."""


class Recording:
    """Operations on everything below `root`, and the records that were appended meanwhile."""

    def __init__(self, root: Path, log: str = "log") -> None:
        self.root = root
        self.log = log  # where the log is, below the root
        self.ops: list[Op] = []
        self.records: dict[tuple[str, int], list[tuple[int, Record]]] = {}  # each with the life of its saga
        self.lives: dict[str, int] = {}  # how often a saga was found absent
        self.promised: dict[str, int] = {}  # up to which number each saga was durable before this began
        self.before_sync: Callable[[], None] | None = None
        self.kill_at: int | None = None  # with so many notes, no call is made any more
        self.killed_at: int | None = None  # with so many, one was tried
        self._noting = threading.RLock()
        self._objects: dict[tuple[int, int], int] = {}
        self._count = 0
        self.start = Tree({}, {})
        self._take_stock(str(root))

    def _must_live(self) -> None:
        if self.kill_at is not None and len(self.ops) >= self.kill_at:
            self.killed_at = len(self.ops)
            raise Killed

    @property
    def sagas(self) -> list[str]:
        """Every saga that anything was appended to."""
        return sorted({saga for saga, _ in self.records})

    def segments(self) -> list[Path]:
        """The segments that are there now, by writer and number."""
        return sorted((self.root / self.log).glob("w-*/*.jsonl"))

    def tell(
        self,
        *durable: tuple[str, int],
        made: bool = False,
        may_forget: tuple[str, ...] = (),
        absent: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """Note what a caller was told just now."""
        with self._noting:
            self.ops.append(Told(durable, made, may_forget, absent))

    def told(self, at: int) -> Promises:
        """What was told within the first so many operations."""
        durable, made, may_be_gone, absent = dict(self.promised), False, set[str](), dict[str, int]()
        for op in self.ops[:at]:
            if isinstance(op, Told):
                made = made or op.made
                may_be_gone.update(op.may_forget)
                absent.update(op.absent)
                for saga, _ in op.absent:
                    may_be_gone.discard(saga)
                    durable[saga] = 0
                for saga, n in op.durable:
                    durable[saga] = max(n, durable.get(saga, 0))
        return Promises(durable, made, frozenset(may_be_gone), absent)

    def check(self, whole: Tree) -> None:
        """Make sure that the directory holds exactly what the notes come to: no call went around them."""
        assert whole == stock_of(self.root, self._objects)

    # --- objects

    def _take_stock(self, path: str) -> None:
        number = self._new(os.stat(path))
        entries = self.start.directories[number] = {}
        with os.scandir(path) as found:
            for entry in found:
                if entry.is_dir():
                    entries[entry.name] = self._count
                    self._take_stock(entry.path)
                else:
                    entries[entry.name] = number = self._new(entry.stat())
                    self.start.files[number] = Path(entry.path).read_bytes()

    def _new(self, status: os.stat_result) -> int:
        number = self._objects[status.st_dev, status.st_ino] = self._count
        self._count += 1
        return number

    def _known(self, status: os.stat_result) -> int | None:
        return self._objects.get((status.st_dev, status.st_ino))

    def _place(self, path: Any) -> tuple[int, str] | None:
        """The directory and the name of a path; None outside of the root."""
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path).startswith(f"{self.root}/"):
            return None
        parent, name = os.path.split(os.fspath(path))
        directory = self._known(os.stat(parent))
        assert directory is not None, parent
        self._must_live()
        return directory, name

    # --- the calls

    @contextmanager
    def running(self) -> Generator[Recording]:
        """Note what is done meanwhile, through `os` and through the names that the file log's seam took from it."""
        wrapped: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "pwrite": self._pwrite,
            "write": self._write,
            "ftruncate": self._ftruncate,
            "fsync": self._sync,
            "fdatasync": self._sync,
            "mkdir": self._mkdir,
            "rename": self._rename,
            "replace": self._rename,
            "link": self._link,
            "unlink": self._unlink,
            "remove": self._unlink,
            "rmdir": self._unlink,
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, wrapper in wrapped.items():
                call = getattr(os, name)
                replacement = _bind(wrapper, call)
                patch.setattr(os, name, replacement)
                for alias, value in list(vars(osfile).items()):
                    if value is call:
                        patch.setattr(osfile, alias, replacement)
            yield self

    def _open(self, call: Callable[..., int], path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not flags & os.O_CREAT or self._place(path) is None:
            assert not flags & os.O_TRUNC or self._place(path) is None, "not in the model: truncating on opening"
            return call(path, flags, *args, **kwargs)
        with self._noting:
            place = self._place(path)
            is_new = not os.path.exists(path)
            descriptor = call(path, flags, *args, **kwargs)
            if is_new and place is not None:
                number = self._new(os.fstat(descriptor))
                self.ops.append(Names(place[0], ((place[1], number),), "file"))
            return descriptor

    def _pwrite(self, call: Callable[..., int], descriptor: int, data: Any, offset: int) -> int:
        with self._noting:
            number = self._known(os.fstat(descriptor))
            if number is not None:
                self._must_live()
            done = call(descriptor, data, offset)
            if number is not None:
                self.ops.append(Write(number, offset, bytes(data)[:done]))
            return done

    def _write(self, call: Callable[..., int], descriptor: int, data: Any) -> int:
        assert self._known(os.fstat(descriptor)) is None, "not in the model: a write without a place"
        return call(descriptor, data)

    def _ftruncate(self, call: Callable[..., None], descriptor: int, size: int) -> None:
        with self._noting:
            number = self._known(os.fstat(descriptor))
            if number is not None:
                self._must_live()
            call(descriptor, size)
            if number is not None:
                self.ops.append(Cut(number, size))

    def _sync(self, call: Callable[..., None], descriptor: int) -> None:
        number = self._known(os.fstat(descriptor))
        if number is not None:
            self._must_live()
            if self.before_sync is not None:
                self.before_sync()
        covers = len(self.ops)
        call(descriptor)
        if number is not None:
            with self._noting:
                is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
                self.ops.append((SyncNames if is_directory else SyncFile)(number, covers))

    def _mkdir(self, call: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
        with self._noting:
            place = self._place(path)
            call(path, *args, **kwargs)
            if place is not None:
                self.ops.append(Names(place[0], ((place[1], self._new(os.stat(path))),), "directory"))

    def _rename(self, call: Callable[..., None], old: Any, new: Any, **kwargs: Any) -> None:
        with self._noting:
            source, target = self._place(old), self._place(new)
            call(old, new, **kwargs)
            if source is not None and target is not None:
                assert source[0] == target[0], "not in the model: a rename from one directory to another"
                number = self._known(os.stat(new))
                self.ops.append(Names(source[0], ((source[1], None), (target[1], number))))

    def _link(self, call: Callable[..., None], old: Any, new: Any, **kwargs: Any) -> None:
        with self._noting:
            place = self._place(new)
            call(old, new, **kwargs)
            if place is not None:
                self.ops.append(Names(place[0], ((place[1], self._known(os.stat(new))),)))

    def _unlink(self, call: Callable[..., None], path: Any, **kwargs: Any) -> None:
        with self._noting:
            place = self._place(path)
            call(path, **kwargs)
            if place is not None:
                self.ops.append(Names(place[0], ((place[1], None),)))


def _bind(wrapper: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(call, *args, **kwargs)

    return replacement


def stock_of(root: Path, objects: dict[tuple[int, int], int]) -> Tree:
    """What a directory holds now, with the numbers that the objects were given."""
    found = Tree({}, {})

    def look(path: Path) -> int:
        status = path.stat()
        number = objects[status.st_dev, status.st_ino]
        if path.is_dir():
            found.directories[number] = {entry.name: look(entry) for entry in path.iterdir()}
        else:
            found.files[number] = path.read_bytes()
        return number

    look(root)
    return found


class StillClock(SystemClock):
    """A clock whose time stands still. A wait that would end by itself goes on until it is ended."""

    def time(self) -> float:
        return 1000.0

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        del timeout  # so that the log's own thread syncs nothing of its own accord, and recordings are repeatable
        return event.wait()


class Process:
    """One process's log, as far as these tests need a process: what it is told is noted, and it can die."""

    def __init__(self, recording: Recording, *, makes: bool = True) -> None:
        self._recording = recording
        self._numbers: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._appended: list[tuple[int, str, int]] = []
        self.log = FileLog(recording.root / recording.log, clock=StillClock())
        recording.tell(made=makes)  # who finds a log is told nothing of how durable it is

    def claim(self, saga: str) -> tuple[Record, ...]:
        """Claim a saga. What was there before is durable when this returns; a CLAIM rides with the next flush."""
        records = self.log.claim(saga)
        self._numbers[saga] = records[-1].n if records else 0
        self._epochs[saga] = records[-1].epoch if records else 1
        known = len(records)
        if records and records[-1].type not in FINAL:
            known -= 1
            self._note(records[-1])
        if not records:
            lives = self._recording.lives[saga] = self._recording.lives.get(saga, 0) + 1
            self._recording.tell(absent=((saga, lives),))
        self._recording.tell((saga, known))
        return records

    def append(self, saga: str, kind: str = "INTENT", *, size: int = 0) -> int:
        """Append the saga's next record, with `size` bytes of data and a little more; return its ticket."""
        n = self._numbers[saga] + 1
        data = {"x": "x" * size, "of": saga}
        record = Record(saga=saga, n=n, epoch=self._epochs[saga], type=kind, time=1000.0, data=data)
        self._numbers[saga] = n
        self._note(record)
        ticket = self.log.append(record)
        self._appended.append((int(ticket), saga, n))
        return ticket

    def compact(self) -> int:
        """Let every saga go that is over; return how many segments were retired."""
        over = {record.saga for of in self._recording.records.values() for _, record in of if record.type in FINAL}
        self._recording.tell(may_forget=tuple(sorted(over)))
        retired = self.log.compact(keep_days=0).retired
        _indexes_written()
        return retired

    def flush(self, ticket: int) -> None:
        """Flush up to a ticket."""
        self.log.flush(ticket)
        _indexes_written()
        durable = [(saga, n) for number, saga, n in self._appended.copy() if number <= int(ticket)]
        self._recording.tell(*durable)

    def record(self, saga: str, kind: str = "INTENT", *, size: int = 0) -> None:
        """Append a record and flush it."""
        self.flush(self.append(saga, kind, size=size))

    def write(self, saga: str, kind: str = "INTENT", *, size: int = 0) -> None:
        """Append a record and hand it to the operating system: it survives this process, not the machine."""
        self.log.write(self.append(saga, kind, size=size))

    def release(self, saga: str) -> None:
        """Release a saga; everything of it is durable then."""
        self.log.release(saga)
        self._recording.tell((saga, self._numbers[saga]))

    def close(self) -> None:
        """Close the log cleanly; everything is durable then."""
        self.log.close()
        self._recording.tell(*self._numbers.items())

    def go_on(self, saga: str) -> None:
        """Claim a saga, as recovery does, and add a record to what is there; nothing if it is over."""
        records = self.claim(saga)
        if not records or records[-1].type not in FINAL:
            self.record(saga, "INTENT" if records else "START", size=222)

    def die(self) -> None:
        """What a kill leaves: no line more, no lock. The page cache lives on."""
        self.log._abandon()  # pyright: ignore[reportPrivateUsage]
        self.log._wake.set()  # pyright: ignore[reportPrivateUsage]

    def _note(self, record: Record) -> None:
        life = self._recording.lives.get(record.saga, 0)
        self._recording.records.setdefault((record.saga, record.n), []).append((life, record))


def _indexes_written() -> None:
    """Wait for what the log does in the background, so that a recording is the same every time."""
    for thread in threading.enumerate():
        if thread.name == "agent-saga index":
            thread.join(WAIT)
            assert not thread.is_alive()
