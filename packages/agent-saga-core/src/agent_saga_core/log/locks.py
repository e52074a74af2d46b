"""Ownership by kernel locks: who holds one is alive, and alone.

A lock belongs to an open file description, so it ends with the last descriptor of it: at the latest when the process
dies. Never POSIX process locks, which any `close` of the same file drops behind the owner's back.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from typing import Final

from agent_saga_core.errors import LogCorrupted, LogUnavailable, SagaBusy
from agent_saga_core.log import osfile

__all__ = [
    "LOCK_FILES",
    "Exclusion",
    "FileLocks",
    "RangeLocks",
    "SagaLocks",
    "best_scheme",
    "is_locked",
    "lock_whole",
    "opening",
    "unlock_whole",
]

LOCK_FILES: Final = 64
"""The kernel looks through all locks of a file for each new one; over this many files, ten thousand cost 2 us."""

HELD_AT_MOST: Final = 5.0
"""Seconds. Nothing that is done under an `Exclusion` takes a hundredth of that."""


class Exclusion:
    """Mutual exclusion that an interrupted thread cannot leave locked for ever. Not to be nested in itself.

    A `with` statement can be interrupted between its last line and its end. What that leaves behind, the same thread
    takes over at its next entry and gives up at its next exit; other threads wait `HELD_AT_MOST` for it, and then go
    on: what they risk is a descriptor that a child forked in this very moment keeps, or a writer too many.
    """

    def __init__(self) -> None:
        self._holder: dict[str, int] = {}

    def __enter__(self) -> None:
        me = threading.get_ident()
        pause = threading.Event()
        for _ in range(int(HELD_AT_MOST / 0.001)):
            if self._holder.setdefault("", me) == me:
                return
            pause.wait(0.001)

    def __exit__(self, *_: object) -> None:
        if self._holder.get("") == threading.get_ident():
            self._holder.pop("", None)

    def forget(self) -> None:
        """In a forked child: whoever held it is not there."""
        self._holder.clear()


opening = Exclusion()
"""Held while a descriptor is opened and noted, and over a fork: so a child knows every descriptor it has to close."""

_OFD: Final = sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")

# Everything owned in this process, over all its logs: (device, inode, offset) of the lock. It keeps a second scope
# out, which the kernel would let in through the same description, and makes two ids with one offset exclude each other.
# The value is the token that `acquire` was given.
_owned: dict[tuple[int, int, int], object] = {}


os.register_at_fork(before=opening.__enter__, after_in_parent=opening.__exit__, after_in_child=opening.forget)
os.register_at_fork(after_in_child=_owned.clear)


def best_scheme() -> str:
    """The better lock scheme of this platform: `"ofd"` or `"flock"`. A log keeps the one it was made with."""
    return "ofd" if _OFD else "flock"


def _range(kind: int, offset: int) -> bytes:
    # struct flock of Linux: type, whence, start, length, pid. The pid must be 0 for these locks.
    return struct.pack("hhqqi", kind, os.SEEK_SET, offset, 1, 0)


def lock_whole(descriptor: int, scheme: str) -> bool:
    """Lock the file behind `descriptor`, through byte 0; False if another description holds it."""
    try:
        if scheme == "ofd":
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, 0))
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock_whole(descriptor: int, scheme: str) -> None:
    """End `lock_whole`, for whoever inherited the descriptor as well."""
    if scheme == "ofd":
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, 0))
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: str, scheme: str) -> bool:
    """Whether somebody holds `lock_whole` of `path`. A missing file is not locked."""
    try:
        descriptor = osfile.open_file(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if scheme == "ofd":
            return _taken(descriptor, 0)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    finally:
        os.close(descriptor)


def _taken(descriptor: int, offset: int) -> bool:
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, offset))
    return struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK


@lru_cache(maxsize=4096)
def _file_and_offset(saga_id: str) -> tuple[int, int]:
    digest = sha256(saga_id.encode()).digest()
    return digest[8], int.from_bytes(digest[:8], "big") >> 2


class SagaLocks(ABC):
    """One exclusive lock per owned saga.

    Attributes:
        at_once: How many may well be held at one time.
    """

    at_once: int = 100_000

    def __init__(self, directory: str) -> None:
        self._directory = directory

    @abstractmethod
    def acquire(self, saga_id: str, token: object) -> None:
        """Take the lock of a saga under `token`. An interrupted call is undone by `release` with the same token.

        Raises:
            SagaBusy: It is taken, in this process or another.
            LogCorrupted: A lock file is missing or was replaced: exclusion cannot be relied on.
            LogUnavailable: The lock files cannot be opened or locked.
        """

    @abstractmethod
    def release(self, saga_id: str, token: object) -> None:
        """Give up the lock of a saga; harmless if it is not held under `token`."""

    @abstractmethod
    def check(self, saga_ids: Iterable[str]) -> None:
        """Make sure that the locks held for these sagas still exclude others.

        Raises:
            LogCorrupted: A lock file is missing or was replaced.
        """

    @abstractmethod
    def is_held(self, saga_id: str) -> bool:
        """Whether anybody holds the lock of the saga now."""

    @abstractmethod
    def abandon(self) -> None:
        """Close every descriptor without unlocking; in a forked child the parent's locks stay."""

    def _busy(self, saga_id: str) -> SagaBusy:
        return SagaBusy(f"saga {saga_id!r} is owned; wait until its owner is done or has died", saga_id=saga_id)


def _lost(path: str, what: str) -> LogCorrupted:
    return LogCorrupted(
        f"the lock file {path} {what}: two processes may own one saga; "
        "stop all processes on this log, restore the directory, then recover",
        where=path,
    )


def _unusable(path: str, error: OSError) -> LogUnavailable:
    return LogUnavailable(
        f"sagas in this log cannot be owned: {path}: {error.strerror}; the directory must be writable"
    )


class RangeLocks(SagaLocks):
    """Byte-range locks of open file descriptions, spread over a fixed set of files."""

    def __init__(self, directory: str, files: int) -> None:
        super().__init__(directory)
        self._files = files
        self._open: dict[int, tuple[int, int, int]] = {}  # file number -> descriptor, device, inode
        self._held: dict[object, tuple[int, int, int]] = {}  # what of `_owned` is, or was tried to be, this object's

    def acquire(self, saga_id: str, token: object) -> None:
        """See `SagaLocks.acquire`."""
        number, offset = self._place(saga_id)
        descriptor, device, inode = self._file(number)
        key = (device, inode, offset)
        self._held[token] = key
        try:
            if _owned.setdefault(key, token) is not token:
                raise self._busy(saga_id)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, offset))
            # After locking: a lock on a file that is no longer the one at this path excludes nobody.
            self._check_file(number)
        except BaseException as error:
            self.release(saga_id, token)
            if not isinstance(error, OSError):
                raise
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise self._busy(saga_id) from None
            raise _unusable(self._path(number), error) from error

    def release(self, saga_id: str, token: object) -> None:
        """See `SagaLocks.release`."""
        number, offset = self._place(saga_id)
        known = self._open.get(number)
        if known is None:
            return
        descriptor, device, inode = known
        key = (device, inode, offset)
        if _owned.get(key) is token:
            # First the kernel: as long as the table says owned, no other scope takes the lock that this ends.
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, offset))
            _owned.pop(key, None)
        self._held.pop(token, None)

    def check(self, saga_ids: Iterable[str]) -> None:
        """See `SagaLocks.check`."""
        for number in {self._place(saga_id)[0] for saga_id in saga_ids}:
            self._check_file(number)

    def is_held(self, saga_id: str) -> bool:
        """See `SagaLocks.is_held`."""
        number, offset = self._place(saga_id)
        try:
            descriptor = osfile.open_file(self._path(number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _lost(self._path(number), "is missing") from None
        try:
            # Through a description of its own, which sees this log's locks as well.
            return _taken(descriptor, offset)
        finally:
            os.close(descriptor)

    def abandon(self) -> None:
        """See `SagaLocks.abandon`."""
        while self._open:
            _, (descriptor, _, _) = self._open.popitem()
            os.close(descriptor)
        for token, key in self._held.items():
            if _owned.get(key) is token:
                _owned.pop(key, None)
        self._held.clear()

    def _place(self, saga_id: str) -> tuple[int, int]:
        file, offset = _file_and_offset(saga_id)
        return file % self._files, offset

    def _path(self, number: int) -> str:
        return f"{self._directory}/{number:02d}"

    def _file(self, number: int) -> tuple[int, int, int]:
        known = self._open.get(number)
        if known is None:
            path = self._path(number)
            with opening:
                known = self._open.get(number)
                if known is None:
                    try:
                        descriptor = osfile.open_file(path, os.O_RDWR | os.O_CLOEXEC)
                    except FileNotFoundError:
                        raise _lost(path, "is missing") from None
                    except OSError as error:
                        raise _unusable(path, error) from error
                    status = os.fstat(descriptor)
                    known = self._open[number] = (descriptor, status.st_dev, status.st_ino)
        return known

    def _check_file(self, number: int) -> None:
        _, device, inode = self._file(number)
        try:
            status = os.stat(self._path(number))
        except FileNotFoundError:
            raise _lost(self._path(number), "is missing") from None
        if (status.st_dev, status.st_ino) != (device, inode):
            raise _lost(self._path(number), "was replaced")


class FileLocks(SagaLocks):
    """`flock` on one file per saga, for platforms without locks of open file descriptions.

    A file exists while its saga is owned, and stays behind when the owner dies.
    """

    at_once = 64  # each takes a descriptor

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._open: dict[str, tuple[int, int, int, object]] = {}  # saga -> descriptor, device, inode, token

    def acquire(self, saga_id: str, token: object) -> None:
        """See `SagaLocks.acquire`."""
        path = self._path(saga_id)
        with opening:
            if saga_id in self._open:
                raise self._busy(saga_id)
            while True:
                try:
                    descriptor = osfile.create_file(path)
                except OSError as error:
                    raise _unusable(path, error) from error
                try:
                    locked = lock_whole(descriptor, "flock")
                    status = os.fstat(descriptor)
                    if locked and self._is_at(path, status.st_dev, status.st_ino):
                        self._open[saga_id] = (descriptor, status.st_dev, status.st_ino, token)
                        return
                except OSError as error:
                    raise _unusable(path, error) from error
                finally:
                    if saga_id not in self._open:
                        os.close(descriptor)
                if not locked:
                    raise self._busy(saga_id)
                # The former owner removed this file between our opening and our locking it: again.

    def release(self, saga_id: str, token: object) -> None:
        """See `SagaLocks.release`."""
        known = self._open.get(saga_id)
        if known is not None and known[3] is token:
            descriptor, device, inode, _ = known
            if self._is_at(self._path(saga_id), device, inode):
                os.unlink(self._path(saga_id))
            self._open.pop(saga_id, None)
            os.close(descriptor)

    def check(self, saga_ids: Iterable[str]) -> None:
        """See `SagaLocks.check`."""
        for saga_id in set(saga_ids):
            known = self._open.get(saga_id)
            if known is not None and not self._is_at(self._path(saga_id), known[1], known[2]):
                raise _lost(self._path(saga_id), "is missing or was replaced")

    def is_held(self, saga_id: str) -> bool:
        """See `SagaLocks.is_held`."""
        return is_locked(self._path(saga_id), "flock")

    def abandon(self) -> None:
        """See `SagaLocks.abandon`."""
        while self._open:
            _, (descriptor, _, _, _) = self._open.popitem()
            os.close(descriptor)

    def _path(self, saga_id: str) -> str:
        return f"{self._directory}/{sha256(saga_id.encode()).hexdigest()[:32]}"

    def _is_at(self, path: str, device: int, inode: int) -> bool:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == (device, inode)
