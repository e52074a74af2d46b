"""What the file log does to files: the one place where its system calls stand, and where tests make them fail."""

from __future__ import annotations

import fcntl
import os
import re
import sys
from os import fdatasync, fsync, pread, pwrite, rename, rmdir, unlink
from os import open as open_file

from agent_saga_core.errors import LogUnavailable

__all__ = [
    "KNOWN_FILE_SYSTEMS",
    "check_file_system",
    "create_file",
    "file_system_of",
    "make_directory",
    "open_file",
    "pread",
    "read_whole",
    "remove_file",
    "rename",
    "rmdir",
    "sync_directory",
    "sync_file",
    "unlink",
    "write_at",
    "write_whole",
]

# Locks and syncs do what they say on these. Elsewhere an owner may not exclude another, or a sync may not last.
KNOWN_FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "apfs"})


_OCTAL = re.compile(r"\\([0-7]{3})")  # how the kernel writes a space in a mount point


def create_file(path: str) -> int:
    """Open `path` for reading and writing, creating it if need be, readable by its owner alone."""
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)  # whatever the umask says
    return descriptor


def make_directory(path: str) -> None:
    """Create `path` for its owner alone. Harmless if it exists; its mode is then left as it is."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    os.chmod(path, 0o700)  # whatever the umask says


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data` at `offset`, in as many writes as it takes.

    Raises:
        OSError: A write failed; a part of `data` may be there.
    """
    done = pwrite(descriptor, data, offset)
    while done < len(data):
        with memoryview(data) as view:
            done += pwrite(descriptor, view[done:], offset + done)


def read_whole(path: str, limit: int) -> bytes:
    """The content of a file, or as much of it as `limit` allows and one byte more.

    Raises:
        OSError: It cannot be read.
    """
    descriptor = open_file(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts: list[bytes] = []
        done = 0
        while done <= limit and (part := pread(descriptor, min(limit + 1 - done, 1 << 24), done)):
            parts.append(part)
            done += len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def write_whole(path: str, data: bytes, *, sync: bool) -> None:
    """Put a file of this content at `path`, in one step: whoever looks sees what was there before, or all of it.

    Args:
        path: Where.
        data: The content.
        sync: Whether it must be durable before it appears. That it appears is not, until its directory is synced.

    Raises:
        OSError: It is not there; a draft named `new-...` may be left beside it.
    """
    draft = f"{os.path.dirname(path)}/new-{os.urandom(8).hex()}"
    descriptor = create_file(draft)
    try:
        write_at(descriptor, data, 0)
        if sync:
            sync_file(descriptor)
    finally:
        os.close(descriptor)
    rename(draft, path)


def remove_file(path: str) -> None:
    """Remove a file. Harmless if it is gone."""
    try:
        unlink(path)
    except FileNotFoundError:
        return


def sync_file(descriptor: int) -> None:
    """Make what was written durable, the file's size included."""
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # its fsync stops at the drive's cache
    else:
        fdatasync(descriptor)


def sync_directory(path: str) -> None:
    """Make the entries of a directory durable."""
    descriptor = open_file(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def check_file_system(path: str) -> None:
    """Refuse a directory on a file system whose locks or syncs are not known to hold.

    Raises:
        LogUnavailable: It is not on the list.
    """
    kind = file_system_of(path)
    if kind not in KNOWN_FILE_SYSTEMS:
        raise LogUnavailable(
            f"{path} is on a {kind or 'unknown'} file system, whose locks and syncs are not known to hold; "
            "put the log on a local disk, or write force=True (?force=1) if you know that they do"
        )


def file_system_of(path: str) -> str | None:
    """The type of the file system that holds `path`, or would hold it; None if that cannot be told."""
    path = os.path.realpath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    if sys.platform == "darwin":
        return _darwin_file_system(path)
    best, kind = "", None
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for mount in mounts:
                fields, _, rest = mount.partition(" - ")
                point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields.split(" ")[4])
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                # The later of two mounts on one point hides the earlier.
                if inside and len(point) >= len(best):
                    best, kind = point, rest.split(" ")[0]
    except OSError:
        return None
    return kind


def _darwin_file_system(path: str) -> str | None:
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(4096)
    if library.statfs(os.fsencode(path), answer) != 0:
        return None
    return answer.raw[72:88].split(b"\0")[0].decode("ascii", "replace")  # f_fstypename
