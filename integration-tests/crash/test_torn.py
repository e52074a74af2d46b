"""The torn tail of a dead writer, at every byte of its last record; then a new run in the same log."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_ledger import Ledger
from crash_log import Reader, segment_of
from crash_processes import Start

from agent_saga_core import FileLog
from agent_saga_core.demo.client import Client

GARBAGE = random.Random(7).randbytes(4096).replace(b"\n", b"\xff")


def cut(line: bytes, at: int) -> bytes:
    return line[:at]


def garbage(line: bytes, at: int) -> bytes:
    return line[:at] + GARBAGE[: len(line) - at]


def nul_filled(line: bytes, at: int) -> bytes:
    return line[:at] + bytes(len(line) - at)


def nul_filled_beyond(line: bytes, at: int) -> bytes:
    """What an unclean file system may leave: a size that was promised and never filled."""
    return line[:at] + bytes(8192)


@pytest.mark.promise("fail-closed", "recover-anywhere", "compensate-once")
@pytest.mark.parametrize(("tear", "every"), [(cut, 1), (garbage, 5), (nul_filled, 5), (nul_filled_beyond, 11)])
@pytest.mark.parametrize("last", ["INTENT", "DONE"])
def test_a_torn_tail_costs_nothing(
    start: Start, world: Client, who: str, log_dir: Path, in_memory: Path, last: str,
    tear: Callable[[bytes, int], bytes], every: int,
) -> None:  # fmt: skip
    """The last record may be lost, and nothing before it: what it stood for is settled by its probe."""
    saga = "order-7"
    body = ["charge", "book", "heed"]
    victim = start("saga", body=body, die_at="before book" if last == "INTENT" else 0)
    if last == "DONE":
        victim.hear()
        victim.kill()
    victim.ends()
    lines = segment_of(log_dir).read_bytes().splitlines(keepends=True)
    assert f'"type":"{last}"'.encode() in lines[-1]
    recoverer = start("recover_each", sagas=[saga])
    # A whole record with another byte where its newline was is no tear: test_damage has it.
    for at in range(0, len(lines[-1]) - (tear is garbage), every):
        torn = in_memory / "log"
        shutil.copytree(log_dir, torn)
        segment_of(torn).write_bytes(b"".join(lines[:-1]) + tear(lines[-1], at))
        log = FileLog(torn, create=False)
        assert [record.n for record in log.read(saga)] == list(range(1, len(lines) - 1)), f"torn at {at}"
        assert log.verify().intact, f"torn at {at}"
        log.close()
        recoverer.say(str(torn))
        said = recoverer.hear()
        assert said["report"]["recovered"] == [saga], f"torn at {at}: {said}"
        assert said["intact"] and said["records"][saga] > len(lines) - 1
        assert Reader(torn).state(saga).report.clean
        shutil.rmtree(torn)
    # One world saw all of it: under one key, whatever was torn, each effect was undone, and undone once.
    ledger = Ledger(world)
    assert ledger.undone_once_each(who)
    assert len(ledger.effects(who)) == (1 if last == "INTENT" else 2)


@pytest.mark.promise("fail-closed", "one-owner")
def test_a_new_run_in_the_same_log_glues_nothing_to_a_torn_tail(
    start: Start, world: Client, who: str, log_dir: Path, in_log: Reader
) -> None:
    start("saga", body=["charge", "heed"], die_at="after charge").ends()
    torn = segment_of(log_dir)
    torn.write_bytes(torn.read_bytes()[:-7])
    left = torn.read_bytes()
    assert start("saga", saga="order-8", who=f"{who} again", body=["charge"]).hear()["status"] == "COMMITTED"
    assert torn.read_bytes() == left
    assert in_log.types("order-8") == ["START", "INTENT", "DONE", "COMMITTED"]
    assert in_log.intact()
    assert in_log.state().steps == (), "the torn record is gone; what stands before it is not"
