"""A disk that is full, read-only or broken: no effect without a durable intent, and recovery once it is mended."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_ledger import Ledger
from crash_log import Reader
from crash_processes import Start

from agent_saga_core import FileLog
from agent_saga_core.demo.client import Client

NOBODY = 65534


def no_effect_without_its_intent(world: Client, who: str, directory: Path) -> list[str]:
    """Every charge of the ledger has its INTENT in the log, under the key that it came with; returns the sagas."""
    log = FileLog(directory, create=False)
    sagas = list(log.saga_ids())
    intents = {r.data["key"] for saga in sagas for r in log.read(saga) if r.type == "INTENT"}
    assert log.verify().intact
    log.close()
    asked = [r for r in Ledger(world).all["journal"] if r["entry"] == "request" and r["body"].get("customer") == who]
    assert {r["key"] for r in asked} <= intents
    return sagas


def finished_by_recovery(start: Start, world: Client, who: str, directory: Path, done: int) -> None:
    """A recovery on a log that can be written leaves standing exactly the charges of the sagas that committed."""
    recoverer = start("recover", log=f"file:{directory}")
    recoverer.hear()
    recoverer.say("go")
    report = recoverer.hear()["report"]
    assert not (report["attention"] or report["damaged"] or report["live"]), report
    statuses = [Reader(directory).state(saga).status for saga in no_effect_without_its_intent(world, who, directory)]
    committed = statuses.count("COMMITTED")  # the last one may have been written and not acknowledged
    assert done <= committed <= done + 1
    assert set(statuses) <= {"COMMITTED", "ROLLED_BACK"}
    ledger = Ledger(world)
    assert len(ledger.standing(who)) == committed
    assert {len(ledger.undos(effect)) for effect in ledger.effects(who) if effect["status"] == "refunded"} <= {1}


@pytest.mark.promise("intent-first", "no-false-clean", "recover-anywhere")
@pytest.mark.parametrize("limit", range(1500, 3600, 97))
def test_a_file_that_may_not_grow(start: Start, world: Client, who: str, log_dir: Path, limit: int) -> None:
    """The limit is met at another byte of another record each time."""
    worker = start("until_broken", file_limit=limit)
    said = worker.hear()
    assert said["raised"] == "LogUnavailable" and "log" in said["message"], said
    assert worker.ends() == 0
    no_effect_without_its_intent(world, who, log_dir)
    finished_by_recovery(start, world, who, log_dir, said["done"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with little room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("this user may mount nothing; test_a_file_that_may_not_grow stands in for it")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.promise("intent-first", "no-false-clean", "recover-anywhere")
def test_a_full_disk(start: Start, world: Client, who: str, small_disk: Path) -> None:
    said = start("until_broken", log=f"file:{small_disk}/log").hear()
    assert said["raised"] == "LogUnavailable" and "No space left" in said["message"], said
    assert said["done"] > 3
    no_effect_without_its_intent(world, who, small_disk / "log")
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    finished_by_recovery(start, world, who, small_disk / "log", said["done"])


@pytest.mark.promise("intent-first", "no-false-clean", "recover-anywhere")
def test_a_disk_that_turns_read_only(start: Start, world: Client, who: str, small_disk: Path) -> None:
    """Whoever holds a file open for writing keeps a disk from being remounted; so a new process meets it."""
    before = start("until_broken", log=f"file:{small_disk}/log", most=2)
    assert before.hear()["done"] == 2
    before.ends()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    said = start("until_broken", log=f"file:{small_disk}/log", who=f"{who}!").hear()
    assert said["raised"] == "LogUnavailable" and "Read-only" in said["message"], said
    assert Ledger(world).effects(f"{who}!") == []
    no_effect_without_its_intent(world, who, small_disk / "log")  # it can still be read


@pytest.mark.promise("intent-first")
def test_a_directory_that_may_not_be_written(start: Start, world: Client, who: str) -> None:
    with tempfile.TemporaryDirectory() as base:
        directory = Path(base) / "log"
        start("until_broken", log=f"file:{directory}", most=2).hear()
        for path in (Path(base), directory, *directory.rglob("*")):
            if os.geteuid() == 0:
                os.chown(path, NOBODY, -1)
            path.chmod(0o500 if path.is_dir() else 0o400)
        drop = {"user": NOBODY} if os.geteuid() == 0 else {}
        said = start("until_broken", log=f"file:{directory}", who=f"{who}!", **drop).hear()
        for path in (Path(base), directory, *directory.rglob("*")):
            path.chmod(0o700)
    assert said["raised"] == "LogUnavailable" and "denied" in said["message"], said
    assert Ledger(world).effects(f"{who}!") == []


@pytest.mark.promise("intent-first", "no-false-clean", "recover-anywhere")
@pytest.mark.parametrize("nth", range(1, 9))
def test_a_sync_that_fails(start: Start, world: Client, who: str, log_dir: Path, nth: int) -> None:
    """A saga of one step syncs three times; the log takes nothing more once one has failed."""
    FileLog(log_dir).close()  # making it syncs as well
    said = start("until_broken", fail_sync=nth).hear()
    assert said["raised"] == "LogUnavailable" and "Input/output error" in said["message"], said
    assert said["done"] == (nth - 1) // 3
    heard = len(Ledger(world).effects(who))
    assert heard == said["done"] + (nth % 3 != 1), "an effect whose intent was never synced, or none where it was"
    no_effect_without_its_intent(world, who, log_dir)
    finished_by_recovery(start, world, who, log_dir, said["done"])


@pytest.mark.promise("intent-first", "no-false-clean", "compensate-once")
def test_a_recovery_that_meets_a_full_disk_leaves_it_to_the_next(
    start: Start, world: Client, who: str, log_dir: Path, recovered: Callable[..., dict[str, Any]]
) -> None:
    start("saga", body=["charge", "book", "heed"], die_at="after book").ends()
    world.wait_quiet()
    for limit in range(300, 2400, 150):
        recoverer = start("recover", file_limit=limit)
        recoverer.hear()
        recoverer.say("go")
        recoverer.ends()
        intents = [r for r in FileLog(log_dir, create=False).read("order-7") if r.type == "COMPENSATING"]
        assert len({undo["key"] for e in Ledger(world).effects(who) for undo in Ledger(world).undos(e)}) <= len(intents)
    assert recovered()["attention"] == []
    ledger = Ledger(world)
    assert ledger.undone_once_each(who)
    assert Reader(log_dir).state().status == "ROLLED_BACK" and Reader(log_dir).intact()
