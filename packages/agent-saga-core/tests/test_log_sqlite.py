"""The SQLite log: the suite of all stores, and what is special about it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from agent_saga_core.errors import Fenced, LogCorrupted, LogUnavailable, SagaBusy
from agent_saga_core.log import open_log, osfile, sql
from agent_saga_core.log.locks import best_scheme, lock_whole
from agent_saga_core.log.sql import Version
from agent_saga_core.log.sqlite import SqliteLog, connection, init, migrate, schema
from agent_saga_core.log.sqlite.place import Place, WriteGate
from agent_saga_core.log.sqlite.writing import RowBatch
from agent_saga_core.records import Record
from agent_saga_core.testing import LogConformance


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one: for tests of many commits that are not about the disk."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    made = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


class TestSqliteLog(LogConformance):
    @pytest.fixture
    def open_log_again(self, tmp_path):
        self.kind = SqliteLog
        return lambda: self.kind(tmp_path / "log.db")

    @pytest.fixture
    def end_leases(self):
        def end_leases() -> None:
            self.kind = Lawless  # a process that lives keeps its locks: were they to fail, the numbers still fence

        return end_leases

    @pytest.fixture
    def spoil(self, tmp_path):
        def spoil(saga_id: str, n: int) -> None:
            raw = sqlite3.connect(tmp_path / "log.db", isolation_level=None)
            found = "FROM record WHERE n = ? AND saga = (SELECT seq FROM saga WHERE id = ?)"
            ((body,),) = raw.execute(f"SELECT body {found}", (n, saga_id)).fetchall()
            spoiled = body[:-20] + bytes([body[-20] ^ 1]) + body[-19:]
            raw.execute(f"UPDATE record SET body = ? {found[12:]}", (spoiled, n, saga_id))
            raw.close()

        return spoil


def record(saga: str, n: int, kind: str = "INTENT", *, epoch: int = 1, time: float = 1000.0, **data: object) -> Record:
    return Record(saga=saga, n=n, epoch=epoch, type=kind, time=time, data=data)


# --- interrupts


def interrupted_at(step: int, work: Callable[[], None], *, opcodes: bool) -> bool:
    """Run `work`, raising KeyboardInterrupt at the given step inside the log; whether it came to that."""
    inside = os.path.dirname(osfile.__file__)
    left = step
    fired = False

    def local(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left, fired
        if event == ("opcode" if opcodes else "line") and not fired:
            left -= 1
            if left < 0:
                fired = True
                raise KeyboardInterrupt
        return local

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if fired or not frame.f_code.co_filename.startswith(inside):
            return None
        frame.f_trace_opcodes = opcodes
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return fired


def insist(call: Callable[[], Any], gate: WriteGate) -> Any:
    """What a caller does that loops over an idempotent step; meanwhile nobody else is kept out."""
    for _ in range(3):
        try:
            return call()
        except KeyboardInterrupt:
            assert gate.try_enter()
            gate.leave()
    raise AssertionError("interrupted more than once")


def test_an_interrupt_anywhere_in_append_and_flush_does_no_harm(fast: Path) -> None:
    log = SqliteLog(fast / "log.db", busy_timeout=5.0)
    other = SqliteLog(fast / "log.db", busy_timeout=5.0)
    other.claim("other", fresh=True)
    log.claim("own", fresh=True)
    gate = WriteGate(Place(fast / "log.db", force=True), 5.0)
    expected = step = 0
    while True:
        saga = f"s{step}"
        log.claim(saga, fresh=True)

        def work(saga: str = saga) -> None:
            first = record(saga, 1, "START")
            ticket = insist(lambda: log.append(first), gate)
            insist(lambda: log.write(ticket), gate)
            ticket = insist(lambda: log.append(record(saga, 2)), gate)
            insist(lambda: log.flush(ticket), gate)
            insist(lambda: log.release(saga), gate)

        fired = interrupted_at(step, work, opcodes=True)
        expected += 4
        assert [entry.n for entry in log.read(saga)] == [1, 2], step
        for one, name in ((other, "other"), (log, "own")):  # nothing is held
            one.flush(one.append(record(name, expected // 4, "START" if expected == 4 else "INTENT")))
        if not fired:
            break
        # Every step at first, then strides that share no factor with the length of a loop.
        step += 1 if step < 300 else 13
    assert step > 1000
    found = log.verify()
    assert found.intact and found.records == expected
    assert not log._buffer and not log._unsynced and not log._leader and not log._batch  # pyright: ignore[reportPrivateUsage]
    assert not connection._using  # pyright: ignore[reportPrivateUsage]
    log.close()
    other.close()


def test_an_interrupt_anywhere_in_a_claim_leaves_the_saga_free_or_owned(fast: Path) -> None:
    log = SqliteLog(fast / "log.db", busy_timeout=5.0)
    other = SqliteLog(fast / "log.db", busy_timeout=5.0)
    for step in range(100_000):
        saga = f"s{step}"
        other.claim(saga)
        other.append(record(saga, 1, "START"))
        other.release(saga)
        owned = False

        def work(saga: str = saga) -> None:
            nonlocal owned
            try:
                log.claim(saga)
                owned = True
            except KeyboardInterrupt:
                owned = log.owned(saga)

        fired = interrupted_at(step, work, opcodes=False)
        assert step > 0 or fired
        assert log.owned(saga) == owned
        if owned:
            log.release(saga)
        numbers = [entry.n for entry in other.claim(saga)]  # nobody else has it
        assert numbers in ([1, 2], [1, 2, 3]), step
        other.release(saga)
        if not fired:
            break
    assert step > 100
    assert other.verify().intact
    log.close()
    other.close()


# --- compare-and-set


class Lawless(SqliteLog):
    """A log whose locks exclude nobody: what is left is the numbers."""

    def take(self, saga_id: str, token: object) -> None:
        return

    def give_up(self, saga_id: str, token: object) -> None:
        self._refusals.forget(token)


def begun(log: SqliteLog, saga: str, records: int = 1) -> None:
    log.claim(saga, fresh=True)
    for n in range(1, records + 1):
        log.append(record(saga, n, "START" if n == 1 else "INTENT"))
    log.flush(log.append(record(saga, records + 1)))


def test_a_former_owner_is_fenced_for_that_saga_alone(fast: Path) -> None:
    first, second = Lawless(fast / "log.db"), Lawless(fast / "log.db")
    for saga in ("a", "b", "c"):
        begun(first, saga)
    assert [one.type for one in second.claim("b")] == ["START", "INTENT", "CLAIM"]
    second.flush(second.append(record("b", 4, epoch=3)))
    tickets = {(saga, n): first.append(record(saga, n)) for n in (3, 4, 5) for saga in ("a", "b", "c")}
    first.flush(tickets["a", 5])
    first.flush(tickets["c", 5])
    for n in (3, 4, 5):
        with pytest.raises(Fenced, match="lost saga 'b'"):
            first.flush(tickets["b", n])
    late = first.append(record("b", 6))  # it would follow what the other owner has written by now
    second.flush(second.append(record("b", 5, epoch=3)))
    with pytest.raises(Fenced):
        first.flush(late)
    with pytest.raises(Fenced):
        first.write(late)
    with pytest.raises(Fenced):
        first.release("b")
    assert [one.epoch for one in first.read("b")] == [1, 1, 3, 3, 3]
    assert [len(first.read(saga)) for saga in ("a", "c")] == [5, 5]
    assert [one.n for one in first.claim("b")] == [1, 2, 3, 4, 5, 6]  # a new ownership is not fenced
    first.flush(first.append(record("b", 7, epoch=6)))
    first.close()
    second.close()
    assert SqliteLog(fast / "log.db").verify().intact


def test_of_two_that_begin_one_saga_one_is_fenced(fast: Path) -> None:
    first, second = Lawless(fast / "log.db"), Lawless(fast / "log.db")
    tickets: list[int] = []
    for log in (first, second):
        log.claim("a")
        tickets.append(log.append(record("a", 1, "START")))  # alike, but for the salt
    first.flush(tickets[0])
    with pytest.raises(Fenced):
        second.flush(tickets[1])
    assert len(first.read("a")) == 1
    first.close()
    second.close()


@pytest.mark.parametrize("again", ["whole", "overlap"])
def test_a_batch_that_was_stored_is_stored_once(fast: Path, monkeypatch: pytest.MonkeyPatch, again: str) -> None:
    """The acknowledgement is lost: the same records come again, alone or with more."""
    log = SqliteLog(fast / "log.db")
    for saga in ("a", "b"):
        begun(log, saga)
    write_batch = log.write_batch
    lost: list[RowBatch] = []

    def lose(batch: RowBatch) -> None:
        write_batch(batch)
        if not lost:
            lost.append(batch)
            raise KeyboardInterrupt

    monkeypatch.setattr(log, "write_batch", lose)
    log.append(record("a", 3))
    ticket = log.append(record("b", 3))
    with pytest.raises(KeyboardInterrupt):
        log.flush(ticket)
    if again == "overlap":
        log.append(record("a", 4))
        log._batch = None  # pyright: ignore[reportPrivateUsage]
    log.flush(log.append(record("b", 4)))
    assert [one.n for one in log.read("b")] == [1, 2, 3, 4]
    assert [one.n for one in log.read("a")] == ([1, 2, 3, 4] if again == "overlap" else [1, 2, 3])
    assert log.verify().intact
    log.close()


def test_a_row_in_the_way_refuses_its_saga_alone(fast: Path) -> None:
    log = SqliteLog(fast / "log.db")
    for saga in ("a", "b"):
        begun(log, saga)
    raw = sqlite3.connect(fast / "log.db", isolation_level=None)
    raw.execute("INSERT INTO record(saga, n, body) SELECT seq, 4, x'00' FROM saga WHERE id = 'a'")
    raw.close()
    tickets = [log.append(record(saga, n)) for saga in ("a", "b") for n in (3, 4)]
    log.flush(tickets[3])
    for ticket in tickets[:2]:
        with pytest.raises(LogCorrupted, match="'a' is damaged"):
            log.flush(ticket)
    assert len(log.read("b")) == 4
    assert [one.saga_ids for one in log.verify().damage] == [("a",)]
    log.close()


def test_a_database_that_is_behind_its_writer_takes_nothing_more_of_that_saga(fast: Path) -> None:
    """An older copy was put back: nothing may follow what it lacks, as if that had never been."""
    log = SqliteLog(fast / "log.db")
    for saga in ("a", "b"):
        begun(log, saga, 2)
    raw = sqlite3.connect(fast / "log.db", isolation_level=None)
    raw.execute("DELETE FROM record WHERE n = 3 AND saga = (SELECT seq FROM saga WHERE id = 'a')")
    raw.execute("UPDATE saga SET next = 3 WHERE id = 'a'")
    raw.close()
    tickets = {saga: log.append(record(saga, 4)) for saga in ("a", "b")}
    log.flush(tickets["b"])
    with pytest.raises(Fenced, match="its record 4 was refused, because the log is at record 2"):
        log.flush(tickets["a"])
    assert [[one.n for one in log.read(saga)] for saga in ("a", "b")] == [[1, 2], [1, 2, 3, 4]]
    assert log.verify().intact
    log.close()


# --- durability


def test_what_was_written_is_durable_at_once(fast: Path) -> None:
    log = SqliteLog(fast / "log.db")
    log.claim("a", fresh=True)
    with log._connections.writing() as used:  # pyright: ignore[reportPrivateUsage]
        for name, value in (("synchronous", 2), ("fullfsync", 1), ("journal_mode", b"wal"), ("mmap_size", 0)):
            assert used.execute(f"PRAGMA {name}").fetchone() == (value,)
    log.write(log.append(record("a", 1, "START")))
    copy = fast / "copy"
    copy.mkdir()
    for name in ("log.db", "log.db-wal"):  # as a dead machine leaves them
        shutil.copy(fast / name, copy / name)
    shutil.copytree(fast / "log.db-locks", copy / "log.db-locks")
    assert len(SqliteLog(copy / "log.db", create=False).read("a")) == 1
    log.close()


def test_a_claim_makes_durable_what_a_dead_owner_may_not_have_synced(
    fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = SqliteLog(fast / "log.db")  # keeps the write-ahead file
    begun(keeper, "a")
    keeper.release("a")
    synced: list[str] = []
    sync_file = osfile.sync_file

    def watched(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync_file(descriptor)

    log = SqliteLog(fast / "log.db")
    monkeypatch.setattr(osfile, "sync_file", watched)
    log.claim("a")
    assert synced == ["log.db-wal"]
    log.claim("b")
    assert synced == ["log.db-wal"]  # what others write from now on is durable before it is seen
    log.close()
    keeper.close()


def test_a_checkpoint_comes_by_itself_and_the_last_to_leave_makes_one(
    fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CHECKPOINT_PAGES", 50)
    log = SqliteLog(fast / "log.db")
    begun(log, "a")
    for n in range(3, 200):
        log.flush(log.append(record("a", n, fill="x" * 3000)))
    assert os.path.getsize(fast / "log.db-wal") < 100 * 4200
    assert os.path.getsize(fast / "log.db") > 100 * 3000
    log.close()
    assert sorted(part.name for part in fast.iterdir()) == ["log.db", "log.db-locks"]
    assert SqliteLog(fast / "log.db").verify().intact


def test_the_write_ahead_file_is_carried_over_by_the_writer_alone_and_not_before_32_mib(fast: Path) -> None:
    log = SqliteLog(fast / "log.db")
    connections = log._connections  # pyright: ignore[reportPrivateUsage]
    pages: list[int] = []
    for using in (connections.writing, connections.reading):
        with using() as used:
            (size,) = used.execute("PRAGMA page_size").fetchone()
            pages += [size * used.execute("PRAGMA wal_autocheckpoint").fetchone()[0]]
    assert pages == [32 * 2**20, 0]
    log.close()


def test_who_leaves_does_it_under_the_gate(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last connection that is closed makes a checkpoint, and nobody may write beside it."""
    log = SqliteLog(fast / "log.db")
    begun(log, "a")
    log.read("a")
    other = WriteGate(Place(fast / "log.db", force=True), 5.0)
    free: list[bool] = []

    def close(self: sqlite3.Connection) -> None:
        if (fast / "log.db-wal").exists():  # there is something to carry over
            free.append(other.try_enter())
            other.leave()
        sqlite3.Connection.close(self)

    monkeypatch.setattr(connection._Connection, "close", close)  # pyright: ignore[reportPrivateUsage]
    log.close()
    assert len(free) > 1 and not any(free) and not (fast / "log.db-wal").exists()
    assert other.try_enter()  # it has left
    other.leave()


# --- the files


def test_files_are_private_whatever_the_umask(fast: Path) -> None:
    before = os.umask(0o277)
    try:
        log = SqliteLog(fast / "deep" / "er" / "log.db")
        begun(log, "a")
    finally:
        os.umask(before)
    seen = 0
    for part in (fast / "deep").rglob("*"):
        assert stat.S_IMODE(part.stat().st_mode) == (0o700 if part.is_dir() else 0o600), part
        seen += 1
    assert seen > 66
    log.close()


@pytest.mark.parametrize("name", ["log.db", "log.db-wal", "log.db-locks/write"])
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_is_another_or_gone_stops_the_log(fast: Path, name: str, how: str) -> None:
    log = SqliteLog(fast / "log.db")
    begun(log, "a")
    part = fast / name
    content = part.read_bytes()
    part.unlink()
    if how == "replaced":
        part.write_bytes(content)
    ticket = log.append(record("a", 3))
    with pytest.raises(LogCorrupted, match="is missing|was replaced") as caught:
        log.flush(ticket)
    assert caught.value.where == str(part)
    log.close()


def test_a_lock_file_that_was_replaced_stops_the_log(fast: Path) -> None:
    log = SqliteLog(fast / "log.db")
    begun(log, "a")
    for part in (fast / "log.db-locks").iterdir():
        if part.name.isdigit():
            part.unlink()
            part.touch()
    with pytest.raises(LogCorrupted, match="two processes may own one saga"):
        log.flush(log.append(record("a", 3)))
    log.close()


def test_without_its_locks_a_log_is_not_opened_until_they_are_made_anew(fast: Path) -> None:
    log = SqliteLog(fast / "log.db")
    begun(log, "a")
    log.close()
    shutil.rmtree(fast / "log.db-locks")
    for create in (True, False):
        with pytest.raises(LogCorrupted, match="agent-saga log init"):
            SqliteLog(fast / "log.db", create=create)
    assert not init(str(fast / "log.db")).made
    log = SqliteLog(fast / "log.db", create=False)
    assert [one.n for one in log.claim("a")] == [1, 2, 3]
    log.close()


def test_readers_never_create(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.db", tmp_path / "no" / "missing.db"):
        with pytest.raises(LogUnavailable, match="there is no log"):
            SqliteLog(path, create=False)
    (tmp_path / "empty.db").touch()
    with pytest.raises(LogUnavailable, match="is no log yet"):
        SqliteLog(tmp_path / "empty.db", create=False)
    assert [part.name for part in tmp_path.iterdir()] == ["empty.db"]
    log = SqliteLog(tmp_path / "empty.db")
    begun(log, "a")
    log.close()


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, name in (
        ("sqlite:///one.db", "one.db"),
        ("sqlite:///deep/er/two.db", "deep/er/two.db"),
        (f"sqlite:///{tmp_path}/three.db", "three.db"),
        ("sqlite:///with%20space%3F%23%25.db", "with space?#%.db"),
        ("sqlite:///%C3%BCml%C3%A4ut.db?force=1&busy_timeout=7", "\u00fcml\u00e4ut.db"),
    ):
        log = open_log(url)
        assert isinstance(log, SqliteLog) and log.path == str(tmp_path / name) and os.path.exists(tmp_path / name)
        begun(log, "a")
        again = open_log(log.url, create=False)
        assert isinstance(again, SqliteLog) and again.path == log.path
        assert again.read("a") == log.read("a") != ()
        again.close()
        log.close()
    small = open_log("sqlite:///one.db?max_result_bytes=10")
    assert small.max_result_bytes == 10
    small.close()


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:",
        "sqlite:log.db",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite://host/log.db",
        "sqlite:///log.db?what=1",
        "sqlite:///log.db?busy_timeout=-1",
        "sqlite:///log.db?busy_timeout=soon",
        "sqlite:///log.db?force=yes",
    ],
)
def test_what_is_no_address_says_what_to_write(url: str) -> None:
    with pytest.raises(ValueError, match=r"sqlite:///|options of a SQLite log|number of seconds"):
        open_log(url)


def test_an_unknown_file_system_is_refused_unless_forced(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(osfile, "file_system_of", lambda path: "nfs")
    with pytest.raises(LogUnavailable, match=r"\?force=1"):
        open_log(f"sqlite:///{fast}/log.db")
    assert list(fast.iterdir()) == []
    open_log(f"sqlite:///{fast}/log.db?force=1").close()


# --- versions


def migrations(monkeypatch: pytest.MonkeyPatch, known: Version, *more: tuple[Version, tuple[str, ...]]) -> None:
    monkeypatch.setattr(schema, "MIGRATIONS", (schema.MIGRATIONS[0], *more))
    monkeypatch.setattr(schema, "SCHEMA", known)
    monkeypatch.setattr(sql.check_version, "__kwdefaults__", {"known": known})


NEXT = (Version(1, 1), ("ALTER TABLE saga ADD COLUMN shard INTEGER NOT NULL DEFAULT 0", "CREATE TABLE shard(id TEXT)"))


def test_a_newer_minor_version_is_used_and_a_newer_major_one_refused(
    fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        migrations(newer, Version(1, 1), NEXT)
        log = SqliteLog(fast / "log.db")
        begun(log, "a")
        log.close()
    log = SqliteLog(fast / "log.db", create=False)
    assert [one.n for one in log.claim("a")] == [1, 2, 3]
    begun(log, "b")
    assert log.verify().intact
    log.close()
    assert migrate(str(fast / "log.db")).version == "1.1"
    raw = sqlite3.connect(fast / "log.db", isolation_level=None)
    raw.execute("INSERT INTO migration VALUES(2, 0, 0)")
    raw.close()
    for use in (SqliteLog, init, migrate):
        with pytest.raises(LogUnavailable, match=r"schema 2\.0, of a newer version .* upgrade agent-saga") as caught:
            use(str(fast / "log.db"))
        assert "\n" not in str(caught.value)


def test_an_older_version_is_migrated_by_hand(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(fast / "log.db")
    log = SqliteLog(path)
    begun(log, "a")
    log.close()
    migrations(monkeypatch, Version(1, 1), NEXT)
    for use in (SqliteLog, init):
        with pytest.raises(LogUnavailable, match=r"schema 1\.0, of an older .* agent-saga log migrate sqlite:////"):
            use(path)
    done = migrate(path)
    assert (done.version, done.applied, done.made) == ("1.1", ("1.1",), False)
    assert migrate(path).applied == ()
    log = SqliteLog(path, create=False)
    assert [one.n for one in log.claim("a")] == [1, 2, 3] and log.verify().intact
    log.close()


def test_a_migration_is_applied_as_a_whole_or_not_at_all(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(fast / "log.db")
    SqliteLog(path).close()
    with monkeypatch.context() as broken:
        migrations(broken, Version(1, 1), (Version(1, 1), (*NEXT[1], "CREATE TABLE shard(id TEXT)")))
        with pytest.raises(LogUnavailable, match="already exists"):
            migrate(path)
    log = SqliteLog(path, create=False)
    begun(log, "a")
    log.close()
    with pytest.raises(LogUnavailable, match="there is no log"):
        migrate(str(fast / "none.db"))


@pytest.mark.parametrize(
    ("version", "warned"),
    [((3, 6, 23), 0), ((3, 7, 0), 1), ((3, 40, 1), 1), ((3, 51, 2), 1), ((3, 51, 3), 0), ((3, 53, 0), 0)],
)
def test_the_versions_with_the_wal_reset_bug_are_warned_about(version: tuple[int, ...], warned: int) -> None:
    warnings = schema.warnings_about(version)
    assert len(warnings) == warned
    assert all("WAL-reset bug" in warning and ".".join(map(str, version)) in warning for warning in warnings)


# --- many sagas


def filled(log: SqliteLog, finished: int, unfinished: int, *, kind: str = "COMMITTED", prefix: str = "") -> None:
    ids = [(f"{prefix}ended-{at}", True) for at in range(finished)]
    ids += [(f"{prefix}open-{at}", False) for at in range(unfinished)]
    for saga, ends in ids:
        log.claim(saga, fresh=True)
        log.append(record(saga, 1, "START"))
        last = log.append(record(saga, 2, kind if ends else "INTENT", fill="x" * 200))
    log.flush(last)
    for saga, _ in ids:
        log.release(saga)


def steps_of(log: SqliteLog, work: Callable[[], object]) -> int:
    """How many instructions SQLite takes for it, in hundreds."""
    counted = [0]

    def count() -> int:
        counted[0] += 1
        return 0

    for reader in log._connections._readers:  # pyright: ignore[reportPrivateUsage]
        reader.set_progress_handler(count, 100)
    work()
    return counted[0]


def test_the_unfinished_cost_what_they_are_and_not_what_ended(fast: Path) -> None:
    log = SqliteLog(fast / "log.db")
    filled(log, 20, 50)
    few = steps_of(log, log.unfinished)
    filled(log, 2000, 0, prefix="more-")
    assert len(log.unfinished().saga_ids) == 50
    assert 0 < steps_of(log, log.unfinished) < few + 5
    found = log.read("open-7")
    assert steps_of(log, lambda: log.read("open-7")) < 5 and len(found) == 2
    log.close()


def test_ten_thousand_unfinished(fast: Path) -> None:
    log = SqliteLog(fast / "log.db")
    filled(log, 0, 10_000)
    found = log.unfinished()
    assert len(found.saga_ids) == 10_000 and found.damage == () and found.saga_ids[4711] == "open-4711"
    told: list[int] = []
    assert log.verify(told.append).records == 20_000 and told == [10_000, 20_000]
    log.close()


# --- compaction


def test_what_ended_leaves_and_gives_back_its_space(fast: Path) -> None:
    log = SqliteLog(fast / "log.db")
    filled(log, 3000, 20)
    planned = log.compact(keep_days=0.0, dry_run=True)
    assert (planned.sagas, planned.kept) == (3000, 20) and planned.freed > 0
    assert len(log.saga_ids()) == 3020
    told: list[int] = []
    done = log.compact(told.append, keep_days=0.0)
    assert (done.sagas, done.kept, told[-1]) == (3000, 20, 6000) and done.freed > 1_000_000
    assert list(log.saga_ids()) == [f"open-{at}" for at in range(20)] and log.verify().intact
    log.close()
    assert os.path.getsize(fast / "log.db") < 100_000
    log = SqliteLog(fast / "log.db")
    assert log.claim("ended-7") == ()
    assert log.compact(keep_days=0.0).sagas == 0
    log.close()


def test_what_is_owned_stays_until_it_is_released(fast: Path) -> None:
    log, other = SqliteLog(fast / "log.db"), SqliteLog(fast / "log.db")
    filled(log, 2, 0, kind="ROLLED_BACK")
    log.claim("ended-1")
    assert other.compact(keep_days=0.0).sagas == 1
    assert log.compact(keep_days=0.0).sagas == 0
    log.release("ended-1")
    assert other.compact(keep_days=0.0).sagas == 1
    log.close()
    other.close()


def test_one_compaction_at_a_time(fast: Path) -> None:
    log = SqliteLog(fast / "log.db")
    filled(log, 1, 0)
    with open(fast / "log.db-locks" / "compact", "r+b") as file:
        assert lock_whole(file.fileno(), best_scheme())
        with pytest.raises(SagaBusy, match="another compaction"):
            log.compact(keep_days=0.0)
    assert log.compact(keep_days=0.0).sagas == 1
    log.close()


def test_writers_go_on_beside_a_compaction(fast: Path) -> None:
    log = SqliteLog(fast / "log.db")
    filled(log, 3000, 0)
    begun(log, "live")
    written = [2]

    def beside(_: int) -> None:  # between two chunks, as another process would
        written[0] += 1
        log.flush(log.append(record("live", written[0])))

    log.compact(beside, keep_days=0.0)
    assert written[0] > 10 and len(log.read("live")) == written[0] and log.saga_ids() == ("live",)
    log.close()
