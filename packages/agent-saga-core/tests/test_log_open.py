"""From an address to a log: what is made, what is refused, and in which words."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_saga_core.errors import LogCorrupted, LogUnavailable
from agent_saga_core.log import FileLog, Log, MemoryLog, open_log, osfile
from agent_saga_core.log.open import init_log, migrate_log
from agent_saga_core.records import Record


def start(saga: str) -> Record:
    return Record(saga=saga, n=1, epoch=1, type="START", time=1.0, data={})


@pytest.fixture
def odd_umask() -> Iterator[None]:
    before = os.umask(0o277)
    yield
    os.umask(before)


def test_a_file_url_opens_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, path in (
        ("file:./one", "one"),
        ("file:two", "two"),
        (f"file://{tmp_path}/three", "three"),
        ("file:./with%20space", "with space"),
        ("file:deep/er", "deep/er"),
    ):
        log = open_log(url)
        assert isinstance(log, FileLog) and isinstance(log, Log)
        assert log.directory == str(tmp_path / path)
        again = open_log(log.url, create=False)
        assert isinstance(again, FileLog) and again.directory == log.directory
        log.claim("a")
        log.flush(log.append(start("a")))
        assert again.read("a") == log.read("a")
        log.close()
        again.close()


def test_options(tmp_path: Path) -> None:
    assert open_log(f"file://{tmp_path}/log").max_result_bytes == 1_048_576
    assert open_log(f"file://{tmp_path}/log?max_result_bytes=10&force=1").max_result_bytes == 10
    memory = open_log("memory:?max_result_bytes=7")
    assert isinstance(memory, MemoryLog) and memory.max_result_bytes == 7


@pytest.mark.parametrize(
    "url",
    [
        "",
        "./log",
        "/var/log",
        "log",
        "C:/log",
        "http://example/log",
        "file:",
        "file://",
        "file://host/log",
        "file:./log?what=1",
        "file:./log?force=yes",
        "file:./log?max_result_bytes=-1",
        "file:./log?max_result_bytes=x",
        "file:./log?garbage",
        "memory:name",
        "memory:?force=1",
    ],
)
def test_what_is_no_address_says_what_to_write(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        open_log(url)
    assert "file:" in str(caught.value) or "memory:" in str(caught.value) or "max_result_bytes" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@127.0.0.1:1/0",
        "rediss://user:hunter2@127.0.0.1:1/0",
        "nats://user:hunter2@127.0.0.1:1/log",
        "postgresql://user:hunter2@127.0.0.1:1/db",
    ],
)
def test_a_server_that_is_not_there_is_said_in_one_line_without_the_password(url: str) -> None:
    with pytest.raises(LogUnavailable) as caught:
        open_log(url)
    said: BaseException | None = caught.value
    assert str(said).count("\n") == 0 and "127.0.0.1" in str(said)
    while said is not None:
        assert "hunter2" not in f"{said!r}{said.args}{vars(said)}"
        said = said.__cause__ or said.__context__


@pytest.mark.parametrize(
    "url",
    [
        "user:hunter2@host/db",
        "postgres//user:hunter2@host",
        "mysql://user:hunter2@host",
        "file://user:hunter2@host/db",
        "file://user:hunter2@host/db?garbage",
        "file:log?password=hunter2",
        "file:log?max_result_bytes=hunter2",
        "sqlite://user:hunter2@host/db",
        "sqlite:///log.db?password=hunter2",
        "memory:user:hunter2@host",
        "postgresql:user:hunter2@host",
        "nats:/user:hunter2@host",
        "redis:user:hunter2@host",
        "postgresql://user:hunter2%zz@host/db",
        "postgresql://user:hunter2@[host/db",
        "nats://user:hunter2%zz@host",
        "redis://user:hunter2%zz@host",
    ],
)
def test_what_is_no_address_is_not_repeated_where_it_may_hold_a_password(url: str) -> None:
    for use in (open_log, init_log, migrate_log):
        with pytest.raises(ValueError) as caught:
            use(url)
        said: BaseException | None = caught.value
        while said is not None:
            assert "hunter2" not in f"{said!r}{said.args}"
            said = said.__cause__ or said.__context__


def test_readers_never_create(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(LogUnavailable, match="there is no log at"):
            FileLog(path, create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogUnavailable) as caught:
        FileLog(tmp_path / "file" / "log")
    assert "\n" not in str(caught.value) and str(tmp_path / "file") in str(caught.value)


def test_files_are_private_whatever_the_umask(tmp_path: Path, odd_umask: None) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    log.flush(log.append(start("a")))
    seen = 0
    for path in (tmp_path / "log", *(tmp_path / "log").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        seen += 1
    assert seen > 68
    log.close()


def test_what_a_directory_says_of_itself_is_checked(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    log.flush(log.append(start("a")))
    log.close()
    meta = tmp_path / "log" / "log.json"
    good = meta.read_text(encoding="utf-8")
    for change, error, words in (
        ({"format": 2}, LogUnavailable, "newer version"),
        ({"locks": 0}, LogCorrupted, "damaged"),
        ({"locks": 10**9}, LogCorrupted, "damaged"),
        ({"lock": "fcntl"}, LogCorrupted, "damaged"),
        ({"format": "1"}, LogCorrupted, "damaged"),
        ({"log": None}, LogCorrupted, "damaged"),
    ):
        meta.write_text(json.dumps({**json.loads(good), **change}), encoding="utf-8")
        with pytest.raises(error, match=words):
            FileLog(tmp_path / "log", create=False)
    for text in ("", "[" * 100_000, "\x00", "9" * 5000):
        meta.write_text(text, encoding="utf-8")
        with pytest.raises(LogCorrupted):
            FileLog(tmp_path / "log")
    meta.unlink()
    with pytest.raises(LogCorrupted, match="is missing"):
        FileLog(tmp_path / "log")  # never a new log over the streams of an old one
    meta.write_text(good, encoding="utf-8")
    manifest = tmp_path / "log" / "manifest.json"
    for text in ("", "{}", '{"format":1', "[" * 100_000, '{"digest":"' + "0" * 64 + '","format":1,"log":"x"}'):
        manifest.write_text(text, encoding="utf-8")
        with pytest.raises(LogCorrupted, match="damaged"):
            FileLog(tmp_path / "log")
    manifest.write_text('{"format":2,"anything":[]}', encoding="utf-8")
    with pytest.raises(LogUnavailable, match="newer version"):
        FileLog(tmp_path / "log")


def test_logs_made_at_once_are_one_log(tmp_path: Path) -> None:
    # The other process decides between this one's look and its own decision.
    first = FileLog(tmp_path / "log")
    (tmp_path / "log" / "log.json").rename(tmp_path / "kept")
    link = os.link

    def late(source: str, target: str) -> None:
        (tmp_path / "kept").rename(target)
        link(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", late)
        second = FileLog(tmp_path / "log")
    first.claim("a")
    first.flush(first.append(start("a")))
    assert second.read("a") == first.read("a")
    assert not [path for path in (tmp_path / "log").iterdir() if path.name.startswith("new-")]


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "9p", "virtiofs", "cifs", None])
def test_file_systems_that_are_not_known_are_refused_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    monkeypatch.setattr(osfile, "file_system_of", lambda path: kind)
    with pytest.raises(LogUnavailable, match="force=1"):
        open_log(f"file://{tmp_path}/log")
    assert not (tmp_path / "log").exists()
    open_log(f"file://{tmp_path}/log?force=1").close()


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="reads the mounts of Linux")
def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    assert osfile.file_system_of("/proc/self") == "proc"
    assert osfile.file_system_of("/proc/self/not-there/at-all") == "proc"
    assert osfile.file_system_of(str(tmp_path)) in osfile.KNOWN_FILE_SYSTEMS


def test_large_records_have_room(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    text = "x" * (10 * 1024 * 1024)
    for n in range(1, 4):
        data = {"text": text} if n == 2 else {}
        log.append(Record(saga="a", n=n, epoch=1, type="INTENT", time=1.0, data=data))
    log.release("a")
    reader = FileLog(tmp_path / "log", create=False)
    assert reader.read("a")[1].data == {"text": text}
    assert reader.verify().records == 3
    sizes = [path.stat().st_size for path in sorted((tmp_path / "log").glob("w-*/*.jsonl"))]
    assert len(sizes) == 3 and sizes[0] < 2000 and sizes[2] < 2000
    log.close()
