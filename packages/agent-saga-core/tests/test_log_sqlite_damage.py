"""Damage to a SQLite log: it is named, by saga where that can be told; it stops that saga and no other."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agent_saga_core.errors import LogCorrupted, LogUnavailable
from agent_saga_core.log.sqlite import SqliteLog
from agent_saga_core.records import Record

SAGAS = ("left", "hit", "right")
FILL = "x" * 900


def record(saga: str, n: int, kind: str = "INTENT", **data: object) -> Record:
    return Record(saga=saga, n=n, epoch=1, type=kind, time=1000.0, data=data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log with three unfinished sagas of four records, the middle one to be damaged, and a finished one."""
    log = SqliteLog(tmp_path / "log.db")
    for saga in (*SAGAS, "ended"):
        log.claim(saga, fresh=True)
        for n in range(1, 5):
            last = "COMMITTED" if (saga, n) == ("ended", 4) else "INTENT"
            log.append(record(saga, n, "START" if n == 1 else last, fill=FILL))
    log.close()
    return tmp_path / "log.db"


def damage(path: Path, *statements: str | tuple[str, tuple[Any, ...]]) -> None:
    raw = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        changed = raw.execute(*([statement] if isinstance(statement, str) else statement)).rowcount
        assert changed != 0, statement
    raw.close()


def one_bit(path: Path, saga: str, n: int, at: bytes) -> None:
    """Flip a bit of a record, somewhere in its line."""
    raw = sqlite3.connect(path, isolation_level=None)
    where = "r.saga = (SELECT seq FROM saga WHERE id = ?) AND r.n = ?"
    (body,) = raw.execute(f"SELECT r.body FROM record r WHERE {where}", (saga, n)).fetchone()
    spot = body.index(at) + len(at) - 1
    body = body[:spot] + bytes([body[spot] ^ 1]) + body[spot + 1 :]
    raw.execute(f"UPDATE record AS r SET body = ? WHERE {where}", (body, saga, n))
    raw.close()


def only_hit_is_stopped(path: Path, *, unfinished_names_it: bool, named: str = "hit") -> None:
    log = SqliteLog(path, create=False)
    for call in (log.read, log.claim):
        with pytest.raises(LogCorrupted) as caught:
            call(named)
        assert named in str(caught.value) and caught.value.saga_id == named and "\n" not in str(caught.value)
    assert not log.owned(named) and not log.is_live(named)
    found = log.verify()
    assert not found.intact and found.first_broken is not None and "hit" in found.first_broken
    assert {saga for one in found.damage for saga in one.saga_ids or ()} >= {"hit"}
    open_ones = log.unfinished()
    assert "hit" in open_ones.saga_ids
    assert [one.saga_ids is not None and "hit" in one.saga_ids for one in open_ones.damage] == (
        [True] if unfinished_names_it else []
    )
    for saga in ("left", "right"):
        assert saga in open_ones.saga_ids
        assert [one.n for one in log.claim(saga)] == [1, 2, 3, 4, 5]
        log.flush(log.append(record(saga, 6)))
    assert len(log.read("ended")) == 4
    log.close()


@pytest.mark.parametrize(
    "at",
    [b'"hash":"', b'"saga":"hit', b'"type":"IN', b'"time":1', b'"digest":"', b'"salt":"', b'"data":{"fill":"xx', b'"}'],
    ids=["hash", "saga", "type", "time", "digest", "salt", "data", "end"],
)  # fmt: skip
@pytest.mark.parametrize("n", [2, 4])
def test_a_flipped_bit_in_a_record_names_its_saga(path: Path, at: bytes, n: int) -> None:
    one_bit(path, "hit", n, at)
    only_hit_is_stopped(path, unfinished_names_it=False)


HIT = "(SELECT seq FROM saga WHERE id = 'hit')"


@pytest.mark.parametrize(
    ("statement", "unfinished_names_it"),
    [
        (f"DELETE FROM record WHERE saga = {HIT} AND n = 1", True),
        (f"DELETE FROM record WHERE saga = {HIT} AND n = 2", True),
        (f"DELETE FROM record WHERE saga = {HIT} AND n = 4", True),
        (f"DELETE FROM record WHERE saga = {HIT}", True),
        (f"UPDATE record SET n = 5 WHERE saga = {HIT} AND n = 4", True),
        (f"UPDATE record SET n = 'four' WHERE saga = {HIT} AND n = 4", True),
        ("UPDATE saga SET next = 4 WHERE id = 'hit'", True),
        ("UPDATE saga SET next = 'many' WHERE id = 'hit'", True),
        (f"UPDATE record SET body = 'text' WHERE saga = {HIT} AND n = 3", False),
        (f"UPDATE record SET body = x'' WHERE saga = {HIT} AND n = 3", False),
        (f"UPDATE record SET body = (SELECT body FROM record WHERE n = 3 LIMIT 1) WHERE saga = {HIT} AND n = 3", False),
        (f"UPDATE record SET body = (SELECT body FROM record WHERE saga = {HIT} AND n = 2)"
         f" WHERE saga = {HIT} AND n = 3", False),
    ],
)  # fmt: skip
def test_a_missing_or_misplaced_row_names_its_saga(path: Path, statement: str, unfinished_names_it: bool) -> None:
    damage(path, statement)
    only_hit_is_stopped(path, unfinished_names_it=unfinished_names_it)


def test_a_saga_that_only_says_that_it_has_ended_is_found_and_not_forgotten(path: Path) -> None:
    damage(path, "UPDATE saga SET ended = 1.0 WHERE id = 'hit'")
    log = SqliteLog(path)
    with pytest.raises(LogCorrupted, match="do not agree on whether it has ended"):
        log.read("hit")
    assert log.verify().damage[0].saga_ids == ("hit",)
    assert log.compact(keep_days=0.0).sagas == 1  # the one that has
    assert log.saga_ids() == SAGAS
    assert log.verify().damage[0].saga_ids == ("hit",)
    log.close()


def test_a_saga_that_ended_and_does_not_say_so_is_found(path: Path) -> None:
    damage(path, "UPDATE saga SET ended = NULL WHERE id = 'ended'")
    log = SqliteLog(path)
    for call in (log.read, log.claim):
        with pytest.raises(LogCorrupted, match="do not agree on whether it has ended"):
            call("ended")
    log.close()


def test_a_damaged_saga_is_not_compacted(path: Path) -> None:
    one_bit(path, "ended", 2, b'"data":{"fill":"xx')
    log = SqliteLog(path)
    assert log.compact(keep_days=0.0).sagas == 0
    assert [one.saga_ids for one in log.verify().damage] == [("ended",)]
    log.close()


def test_a_saga_whose_row_is_gone_is_named_by_its_records(path: Path) -> None:
    damage(path, "DELETE FROM saga WHERE id = 'hit'")
    found = SqliteLog(path).verify()
    assert [one.saga_ids for one in found.damage] == [("hit",)]
    assert "the row of saga 'hit' is missing" in str(found.first_broken)


def test_a_saga_of_another_name_is_named_by_both(path: Path) -> None:
    damage(path, "UPDATE saga SET id = 'hat' WHERE id = 'hit'")
    log = SqliteLog(path)
    assert set(log.verify().damage[0].saga_ids or ()) == {"hat", "hit"}
    with pytest.raises(LogCorrupted, match="'hat' is damaged"):
        log.read("hat")
    log.close()


def test_an_id_that_is_no_text_does_not_stop_the_others(path: Path) -> None:
    damage(path, "UPDATE saga SET id = CAST(x'ff' AS TEXT) WHERE id = 'hit'")
    log = SqliteLog(path)
    assert log.verify().damage[0].saga_ids == ("hit",)
    found = log.unfinished()
    assert set(found.saga_ids) == set(SAGAS) and [one.saga_ids for one in found.damage] == [("hit",)]
    assert [one.n for one in log.claim("left")] == [1, 2, 3, 4, 5]
    with pytest.raises(LogCorrupted, match="the id of a saga cannot be read"):
        log.saga_ids()
    log.close()


# --- pages


def pages_of(path: Path) -> list[int]:
    return list(range(os.path.getsize(path) // 4096))


@pytest.mark.parametrize("fill", [b"\0" * 4096, b"\xff" * 4096, b"saga" * 1024], ids=["zeros", "ones", "text"])
def test_no_broken_page_goes_unnoticed(path: Path, fill: bytes) -> None:
    """Whichever page it is: verify says so, and what is read is what was written or an error."""
    whole = path.read_bytes()
    before = SqliteLog(path)
    written = {saga: before.read(saga) for saga in (*SAGAS, "ended")}
    before.close()
    noticed = 0
    for page in pages_of(path):
        path.write_bytes(whole[: page * 4096] + fill + whole[(page + 1) * 4096 :])
        try:
            log = SqliteLog(path, create=False)
        except (LogCorrupted, LogUnavailable):
            noticed += 1
            continue
        try:
            found = log.verify()
            noticed += not found.intact
            assert not found.intact, page
            for saga, records in written.items():
                try:
                    assert log.read(saga) == records, (page, saga)
                except LogCorrupted:
                    continue
            try:
                open_ones = log.unfinished()
                assert set(open_ones.saga_ids) >= set(SAGAS) or open_ones.damage, page
            except LogCorrupted:
                continue
        finally:
            log.close()
    assert noticed == len(pages_of(path)) > 8


def test_no_flipped_bit_goes_unnoticed_or_changes_a_record(path: Path) -> None:
    """Bits all over the file: what is read is what was written, or an error that says so."""
    whole = path.read_bytes()
    written: dict[str, Any] = {}
    before = SqliteLog(path)
    for saga in (*SAGAS, "ended"):
        written[saga] = before.read(saga)
    before.close()
    for spot in range(100, len(whole), 509):
        path.write_bytes(whole[:spot] + bytes([whole[spot] ^ 0x10]) + whole[spot + 1 :])
        try:
            log = SqliteLog(path, create=False)
        except (LogCorrupted, LogUnavailable):
            continue
        try:
            intact = log.verify().intact
            for saga, records in written.items():
                try:
                    found = log.read(saga)
                except LogCorrupted:
                    assert not intact, spot
                else:
                    assert found == records or (not intact and found == ()), spot
        finally:
            log.close()


# --- what is no log of ours


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON record BEGIN DELETE FROM record; END",
        "CREATE VIEW v AS SELECT * FROM record",
        "CREATE VIRTUAL TABLE f USING fts5(x)",
    ],
)
def test_what_runs_by_itself_is_refused(path: Path, statement: str) -> None:
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute(statement)
    raw.close()
    with pytest.raises(LogCorrupted, match="agent-saga did not put there"):
        SqliteLog(path)


def test_a_lost_table_or_meta_is_damage(path: Path) -> None:
    whole = path.read_bytes()
    for statement in ("DROP TABLE record", "DELETE FROM meta WHERE name = 'log'", "UPDATE meta SET value = 'x'",
                      "DELETE FROM migration", "UPDATE meta SET value = x'ff' WHERE name = 'locks'"):  # fmt: skip
        path.write_bytes(whole)
        raw = sqlite3.connect(path, isolation_level=None)
        raw.execute(statement)
        raw.close()
        with pytest.raises(LogCorrupted, match="is damaged"):
            SqliteLog(path)


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no database, and longer than any header of one would have to be" * 20, "utf-8")
    before = text.read_bytes()
    with pytest.raises(LogCorrupted, match="not a database"):
        SqliteLog(text)
    assert text.read_bytes() == before
    raw = sqlite3.connect(tmp_path / "shop.db")
    raw.execute("CREATE TABLE orders(id)")
    raw.close()
    with pytest.raises(LogUnavailable, match="a database of something else"):
        SqliteLog(tmp_path / "shop.db")
    (tmp_path / "directory").mkdir()
    with pytest.raises(LogUnavailable, match="is no file"):
        SqliteLog(tmp_path / "directory")


def test_a_second_name_of_the_file_is_refused_and_a_symbolic_link_followed(path: Path) -> None:
    link = path.with_name("link.db")
    link.symlink_to(path)
    log = SqliteLog(link)
    log.claim("left")
    assert SqliteLog(path).is_live("left")
    log.close()
    link.unlink()
    os.link(path, link)
    for name in (path, link):
        with pytest.raises(LogUnavailable, match="hard link"):
            SqliteLog(name)
