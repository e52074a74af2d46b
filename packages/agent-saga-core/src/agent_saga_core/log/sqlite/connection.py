"""Connections to the database of a log: how they are opened, used, kept over a fork, and what their errors mean."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final
from urllib.parse import quote

from agent_saga_core.errors import LogCorrupted, LogUnavailable
from agent_saga_core.log.sqlite.place import Place, WriteGate, gone

__all__ = ["Connections", "translated"]

PATIENCE: Final = 60.0
"""Seconds to wait for a writer who does not finish. A process that was stopped in the middle of a write holds it up."""

CHECKPOINT_PAGES: Final = 8192
"""How far the write-ahead file grows before its content is carried into the database: 32 MiB, some thousand steps.
Smaller costs more syncs, larger a longer read when the log is opened after a crash."""

_BUSY_MS: Final = 250  # SQLite waits without hearing of an interrupt, so it waits in pieces
_READERS: Final = 8  # kept open; as many threads as want to read at once have one each
_FORK_PATIENCE: Final = 5.0
_BEHIND: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_DAMAGE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_REFUSED: Final = frozenset(
    {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH}
)


def _code(error: sqlite3.Error) -> int:
    """The primary result code, 0 if the error is of the module and not of SQLite."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def translated(path: str) -> Generator[None]:
    """Turn what SQLite and the system raise into what a log raises."""
    try:
        yield
    except sqlite3.Error as error:
        code = _code(error)
        if code in _DAMAGE:
            raise LogCorrupted(f"the log at {path} is damaged ({error}); restore it from a copy", where=path) from error
        if code in _REFUSED:
            raise LogUnavailable(
                f"the log at {path} cannot be used ({error}); the file and its directory must be writable"
            ) from error
        if code in _BEHIND:
            raise LogUnavailable(
                f"another program holds the database {path} locked; end it, then open the log again"
            ) from error
        raise LogUnavailable(f"the log at {path} cannot be used: {error}") from error
    except UnicodeDecodeError as error:  # SQLite's own message quotes what stands in the file
        raise LogCorrupted(f"the log at {path} is damaged; restore it from a copy", where=path) from error
    except OSError as error:
        raise LogUnavailable(f"the log at {path} cannot be used: {error.filename or path}: {error.strerror}") from error


# --- fork

# SQLite keeps a table per process of who has locked what in which file. A child that inherited one believes that it
# holds the locks of its parent. So no connection is open while this process forks: those who use one come to an end
# first, those who want one wait. A token stands here for each use.
_using: dict[object, int] = {}
_forking: dict[str, int] = {}
_all: weakref.WeakSet[Connections] = weakref.WeakSet()
_tainted: set[tuple[int, int]] = set()


@contextmanager
def _in_use() -> Generator[None]:
    me = threading.get_ident()
    token = object()
    try:
        try:
            _using[token] = me
            # A use within a use goes on: the fork waits for the outer one.
            while _forking and _forking.get("") != me and list(_using.values()).count(me) == 1:
                _using.pop(token, None)
                _wait_for_fork()
                _using[token] = me
            yield
        finally:
            _using.pop(token, None)
    finally:
        _using.pop(token, None)  # an interrupt that struck in the first would make every fork wait


def _wait_for_fork() -> None:
    pause = threading.Event()
    for _ in range(int(2 * _FORK_PATIENCE / 0.001)):
        if not _forking:
            return
        pause.wait(0.001)
    _forking.clear()  # left by an interrupt: no fork takes that long


def _before_fork() -> None:
    me = threading.get_ident()
    _forking[""] = me
    pause = threading.Event()
    until = time.monotonic() + _FORK_PATIENCE
    while _using and me not in _using.values() and time.monotonic() < until:
        pause.wait(0.001)
    if not _using:
        for connections in list(_all):
            with suppress(sqlite3.Error, OSError):
                connections.close()


def _after_fork_in_child() -> None:
    for connections in list(_all):
        connections.abandon()
    _forking.clear()
    _using.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_forking.clear, after_in_child=_after_fork_in_child)


class _Connection(sqlite3.Connection):
    """One to which weak references can be had, and that an interrupted thread may lose without a warning."""

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


class Connections:
    """The connections of one log: one that writes, used by one thread at a time, and as many that read as are needed.

    They are opened when they are first needed, also again after a fork.
    """

    def __init__(self, place: Place, *, patience: float = PATIENCE) -> None:
        self.place: Final = place
        self.gate: Final = WriteGate(place, patience)
        self._patience = patience
        self._writer: _Connection | None = None
        self._readers: deque[_Connection] = deque()
        self._file: tuple[int, int] | None = None
        self._wal: tuple[int, int] | None = None
        self._synced = False
        self._abandoned = False
        self._open: weakref.WeakSet[_Connection] = weakref.WeakSet()  # those in use as well
        _all.add(self)

    def __del__(self) -> None:
        # Of a log that nobody closed: under the gate, and not one by one.
        with suppress(Exception):
            self.close()

    def beside(self) -> Connections:
        """Others to the same database, for a thread that writes beside the leader."""
        others = Connections(self.place, patience=self._patience)
        others._file = self._file
        return others

    # --- reading

    @contextmanager
    def reading(self) -> Generator[_Connection]:
        """A connection in a transaction of its own: everything that is read in it is of one moment.

        Raises:
            LogUnavailable: The database cannot be read.
            LogCorrupted: It is damaged, or not the one that was opened.
        """
        with translated(self.place.path), _in_use():
            try:
                connection = self._readers.pop()
            except IndexError:
                connection = self._connect(write=False)
            try:
                self._begin(connection, "BEGIN")
                self._retry(connection, "SELECT 1 FROM sqlite_master LIMIT 1")  # from here on it sees one moment
                yield connection
            finally:
                if not self._abandoned:
                    self._put_back(connection)

    def _put_back(self, connection: _Connection) -> None:
        with suppress(sqlite3.Error):  # what the body raised counts
            connection.execute("ROLLBACK")
        if len(self._readers) < _READERS:
            self._readers.append(connection)
        else:
            self._close(connection)

    def settle(self) -> None:
        """Make durable everything that can be read.

        A commit is durable before anybody sees it. But who opens the log after a crash may find one that its writer
        had written and not yet synced.

        Raises:
            LogUnavailable: It cannot be synced.
        """
        if not self._synced:
            with self.reading() as connection:
                connection.execute("SELECT count(*) FROM meta").fetchone()  # finds what the crash left
                self.place.sync_wal()
                self._synced = True

    # --- writing

    @contextmanager
    def writing(self) -> Generator[_Connection]:
        """The writing connection, in a transaction that is durable when this ends, and undone when it raises.

        Raises:
            LogUnavailable: The database cannot be written.
            LogCorrupted: It is damaged, or not the one that was opened.
        """
        with translated(self.place.path), _in_use():
            try:
                try:
                    self.gate.enter()
                    connection = self._writer
                    if connection is None:
                        connection = self._writer = self._connect(write=True)
                    self._check_files()
                    self._begin(connection, "BEGIN IMMEDIATE")
                    yield connection
                    connection.execute("COMMIT")
                finally:
                    self._end()
            finally:
                self._end()  # an interrupt that struck in the first would keep every other process out

    def _end(self) -> None:
        """Undo what is not committed, and open the gate; harmless twice."""
        if self._abandoned:
            return
        try:
            writer = self._writer
            if writer is not None and writer.in_transaction:
                writer.execute("ROLLBACK")
        finally:
            self.gate.leave()

    def close(self) -> None:
        """Close all connections; they are opened again when they are needed.

        The last one that leaves a database carries the write-ahead file into it, so this is done under the gate, unless
        somebody else has it, who then is not gone.
        """
        if self._abandoned:
            return
        try:
            self.gate.try_enter()
            self._synced = False
            while self._readers:
                self._close(self._readers.pop())
            writer, self._writer = self._writer, None
            if writer is not None:
                self._close(writer)
        finally:
            self.gate.leave()

    def _close(self, connection: _Connection) -> None:
        connection.close()
        self._open.discard(connection)

    def abandon(self) -> None:
        """In a forked child: forget the connections, if there are any, without closing them.

        There are some only if the parent could not come to rest before it forked. Closing one here could carry the
        write-ahead file into the database beside the parent.
        """
        self._abandoned = True
        left = list(self._open)
        self._readers.clear()
        self._writer = None
        self.gate.forget()
        if left:
            import ctypes

            for connection in left:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
            self._open.clear()
            if self._file is not None:
                _tainted.add(self._file)

    # --- opening

    def _connect(self, *, write: bool) -> _Connection:
        file = self.place.identity()
        if file is None:
            path = self.place.path
            raise LogUnavailable(
                f"there is no log at {path}; check the path, or make it: agent-saga log init sqlite:///{quote(path)}"
            )
        if self._file is not None and file != self._file:
            raise gone(self.place.path, "was replaced")
        if file in _tainted:
            raise LogUnavailable(
                f"this process was forked while its parent used the log {self.place.path}, and cannot use it: "
                "start it as a program of its own (multiprocessing: the start method spawn)"
            )
        connection = sqlite3.connect(
            f"file:{quote(os.fsencode(self.place.path))}?mode=rw",
            uri=True,
            timeout=_BUSY_MS / 1000,
            isolation_level=None,  # transactions are ours
            check_same_thread=False,  # one thread at a time, whichever
            cached_statements=64,
            factory=_Connection,
        )
        try:
            connection.text_factory = bytes  # text may be no UTF-8
            for pragma in _PRAGMAS:
                self._retry(connection, f"PRAGMA {pragma}")
            if write:
                # Of a new database, and before its first page: what leaves it gives back its space.
                self._retry(connection, "PRAGMA auto_vacuum=INCREMENTAL")
                if self._retry(connection, "PRAGMA journal_mode=WAL") != (b"wal",):
                    raise LogUnavailable(f"the database {self.place.path} cannot be put into WAL mode on this system")
                connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
            else:
                connection.execute("PRAGMA query_only=ON")
                connection.execute("PRAGMA wal_autocheckpoint=0")
            self._retry(connection, "SELECT count(*) FROM sqlite_master")
            if self.place.identity() != file:
                raise gone(self.place.path, "was replaced")
            self._open.add(connection)
            self._file = file
            self._wal = _file_at(f"{self.place.path}-wal") if write else self._wal
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_files(self) -> None:
        """Make sure that what is written goes to where it will be looked for."""
        if _file_at(self.place.path) != self._file:
            raise gone(self.place.path, "is missing or was replaced")
        wal = f"{self.place.path}-wal"
        if _file_at(wal) != self._wal:
            raise gone(wal, "is missing or was replaced")

    def _begin(self, connection: _Connection, statement: str) -> None:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        self._retry(connection, statement)

    def _retry(self, connection: _Connection, statement: str) -> object:
        """Execute what may find the database locked by a program that knows nothing of the gate; its first row."""
        until = time.monotonic() + self._patience
        while True:
            try:
                return connection.execute(statement).fetchone()
            except sqlite3.OperationalError as error:
                if _code(error) not in _BEHIND or time.monotonic() > until:
                    raise
                threading.Event().wait(0.001)  # where SQLite sees no use in waiting


_PRAGMAS: Final = (
    "trusted_schema=OFF",  # what stands in the schema runs nothing but what is built in
    "cell_size_check=ON",  # a damaged page is met as early as possible
    "mmap_size=0",  # a stray write to memory must not become a write to the log
    "synchronous=FULL",  # a commit is durable when it returns
    "fullfsync=ON",  # of Darwin, whose fsync stops at the drive's cache
    "checkpoint_fullfsync=ON",
    "secure_delete=ON",  # what was forgotten is not to be read in a free page
    "temp_store=MEMORY",  # nothing of the log in other files
)


def _file_at(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
