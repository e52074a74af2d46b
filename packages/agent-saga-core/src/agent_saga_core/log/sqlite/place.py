"""Where a SQLite log is: the database, and beside it the directory of its locks."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from contextlib import suppress
from typing import Final

from agent_saga_core.errors import LogCorrupted, LogUnavailable
from agent_saga_core.log import osfile
from agent_saga_core.log.locks import LOCK_FILES

__all__ = ["Place", "WriteGate"]

WRITE: Final = "write"
COMPACT: Final = "compact"


class Place:
    """The paths of one log. The file of the database is never opened here.

    SQLite owns it with locks that belong to the process: whoever else in the process opens and closes that file drops
    them.
    """

    def __init__(self, path: str | os.PathLike[str], *, force: bool) -> None:
        # Two names of one database must come to one directory of locks.
        self.path: Final = os.path.realpath(path)
        self.locks: Final = f"{self.path}-locks"
        self.directory: Final = os.path.dirname(self.path)
        if not force:
            osfile.check_file_system(self.directory)

    @property
    def url(self) -> str:
        """What `open_log` takes."""
        from urllib.parse import quote  # 3 ms that the import of the core does not need

        return f"sqlite:///{quote(os.fsencode(self.path))}"

    def identity(self) -> tuple[int, int] | None:
        """Device and inode of the database; None if there is none.

        Raises:
            LogUnavailable: What is there is no file, or has a second name, whose locks would be others.
        """
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise LogUnavailable(f"{self.path} is no file; name a file of its own for the log")
        if status.st_nlink > 1:
            raise LogUnavailable(
                f"{self.path} has another name (a hard link), under which its locks would not hold; remove that one"
            )
        return status.st_dev, status.st_ino

    def is_empty(self) -> bool:
        """Whether there is no database, or one that nobody has written to."""
        try:
            # With a `-wal`, an empty file may only be one whose content is still there.
            return os.stat(self.path).st_size == 0 and not os.path.exists(f"{self.path}-wal")
        except FileNotFoundError:
            return True

    def make(self, scheme: str) -> None:
        """Make the directory of locks, and an empty file for the database; harmless if they are there.

        Raises:
            OSError: They cannot be made.
        """
        made: list[str] = []
        above = self.directory
        while not os.path.isdir(above):
            made.append(above)
            above = os.path.dirname(above)
        for path in (*reversed(made), self.locks):
            osfile.make_directory(path)
        names = [f"{number:02d}" for number in range(LOCK_FILES if scheme == "ofd" else 0)]
        for name in (*names, COMPACT, WRITE):
            path = f"{self.locks}/{name}"
            if not os.path.exists(path):
                os.close(osfile.create_file(path))
        with suppress(FileExistsError):
            descriptor = osfile.open_file(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(descriptor, 0o600)  # whatever the umask says; SQLite gives its own files the same mode
            finally:
                os.close(descriptor)
        for path in (self.locks, self.directory, *made[1:], above):
            osfile.sync_directory(path)

    def sync_wal(self) -> None:
        """Make durable what stands in the write-ahead file, and the names of all files.

        Raises:
            OSError: It cannot be.
        """
        try:
            descriptor = osfile.open_file(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            osfile.sync_file(descriptor)
        finally:
            os.close(descriptor)
        osfile.sync_directory(self.directory)


def gone(path: str, what: str) -> LogCorrupted:
    """What to raise where a file of an open log is another, or none."""
    return LogCorrupted(
        f"{path} {what} while the log is in use; stop all processes on this log, restore its files, then recover",
        where=path,
    )


class WriteGate:
    """`flock` on a side file, for every write and every checkpoint.

    SQLite's own way of waiting polls, and starves: under it a writer that comes back often keeps all others out. The
    kernel wakes whoever waits here. And as no two processes write or checkpoint at once, the WAL-reset bug of SQLite
    before 3.51.3 finds no occasion.

    For one thread at a time; the gate belongs to it from `enter` to `leave`. An interrupt between the two leaves it
    closed until the next `enter`.
    """

    def __init__(self, place: Place, patience: float) -> None:
        self._path = f"{place.locks}/{WRITE}"
        self._patience = patience
        self._descriptor: int | None = None
        self._file: tuple[int, int] | None = None

    def enter(self) -> None:
        """Wait for the gate.

        Raises:
            LogUnavailable: Somebody has it for longer than the patience of this log.
            LogCorrupted: Its file is missing or was replaced.
            OSError: Its file cannot be opened or locked.
        """
        self.leave()
        try:
            # Read and write: this fails before anything else does where the log is not ours to write.
            self._descriptor = descriptor = osfile.open_file(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise gone(self._path, "is missing") from None
        if not _locked(descriptor):
            self._wait(descriptor)
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            raise gone(self._path, "is missing") from None
        if self._file is None:
            ours = os.fstat(descriptor)
            self._file = ours.st_dev, ours.st_ino
        if self._file != (now.st_dev, now.st_ino):
            raise gone(self._path, "was replaced")

    def try_enter(self) -> bool:
        """Take the gate if it is free and there."""
        self.leave()
        with suppress(OSError):
            self._descriptor = osfile.open_file(self._path, os.O_RDWR | os.O_CLOEXEC)
            return _locked(self._descriptor)
        return False

    def leave(self) -> None:
        """Open the gate; harmless if it is not ours."""
        descriptor = self._descriptor
        if descriptor is not None:
            # Unlocked and not only closed: a child that C code forked has the descriptor, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            self._descriptor = None
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked child: close what was inherited, without unlocking what may be the parent's."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _wait(self, descriptor: int) -> None:
        """Let a thread wait that nobody has to interrupt: `flock` knows no time limit."""
        fate: dict[str, bool] = {}  # whether it was locked in time; the first to say so decides
        failed: list[OSError] = []
        done = threading.Event()

        def lock() -> None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                failed.append(error)
            if not fate.setdefault("", True):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)
            done.set()

        threading.Thread(target=lock, name="agent-saga gate", daemon=True).start()
        try:
            done.wait(self._patience)
        finally:
            if not fate.setdefault("", done.is_set()):
                self._descriptor = None  # that thread closes it
        if failed:
            raise failed[0]
        if not fate[""]:
            raise LogUnavailable(
                f"another process holds {self._path} for more than {self._patience:g} s; "
                "continue or end the process that does (fuser names it), then open the log again"
            )


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
