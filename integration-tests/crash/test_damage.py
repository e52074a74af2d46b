"""Damage in a log with refundable charges: what it may concern is left alone, what it cannot is recovered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash_ledger import Ledger
from crash_log import segment_of
from crash_processes import Start

from agent_saga_core.demo.client import Client

Lines = list[bytes]
Damaged = tuple[str, Lines, set[int]]
"""What was done, the lines that it left, and the numbers of the lines that it touched."""


def flips(lines: Lines) -> Iterator[Damaged]:
    """One bit, at sampled places of every line: its hash, identity, digest, data, last brace and newline."""
    for number, line in enumerate(lines):
        places = {9, 40, line.find(b'"saga"') + 9, line.find(b'"n"') + 4, line.find(b'"digest"') + 20}
        places |= {line.find(b'"data"') + 12, len(line) * 3 // 4, len(line) - 2, len(line) - 1}
        for place in sorted(places):
            bit = 1 << (place % 8)
            flipped = line[:place] + bytes([line[place] ^ bit]) + line[place + 1 :]
            yield f"bit {bit:#x} of byte {place}", [*lines[:number], flipped, *lines[number + 1 :]], {number}


def overwrites(lines: Lines) -> Iterator[Damaged]:
    for number, line in enumerate(lines):
        middle = len(line) // 2
        torn = line[:middle] + b"\xff\xff" + line[middle + 2 :]
        yield "0xFF in the middle", [*lines[:number], torn, *lines[number + 1 :]], {number}


def deletions(lines: Lines) -> Iterator[Damaged]:
    """A line in the middle. Whole lines off the end of a log that was not closed cannot be missed: a stated limit."""
    for number in range(1, len(lines) - 1):
        yield "deleted", lines[:number] + lines[number + 1 :], {number}


def duplications(lines: Lines) -> Iterator[Damaged]:
    for number in range(len(lines)):
        yield "duplicated", [*lines[: number + 1], *lines[number:]], {number}


def swaps(lines: Lines) -> Iterator[Damaged]:
    for number in range(1, len(lines) - 1):
        swapped = [*lines[:number], lines[number + 1], lines[number], *lines[number + 2 :]]
        yield "swapped with the next", swapped, {number, number + 1}


def saga_of(line: bytes) -> str | None:
    found: str | None = json.loads(line).get("saga")
    return found


def tail(touched: set[int], lines: Lines) -> bool:
    return max(touched) == len(lines) - 1


@pytest.mark.promise("fail-closed", "no-false-clean", "compensate-once")
@pytest.mark.parametrize("damage", [flips, overwrites, deletions, duplications, swaps])
@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed cleanly"])
def test_recovery_stops_for_the_sagas_that_damage_may_concern_and_for_no_other(
    start: Start, world: Client, who: str, log_dir: Path, in_memory: Path,
    damage: Callable[[Lines], Iterator[Damaged]], closed: bool,
) -> None:  # fmt: skip
    sagas = [f"{name} {who}" for name in ("ann", "bob", "cyd")]
    assert start("open_many", sagas=sagas, close=closed).ends() < 0
    world.wait_quiet()
    lines = segment_of(log_dir).read_bytes().splitlines(keepends=True)
    assert len(lines) == 16 + closed
    recoverer = start("recover_each", sagas=sagas)
    runs = dict.fromkeys(sagas, 0)
    others_went_on = 0
    for number, (what, left, touched) in enumerate(damage(lines)):
        broken = in_memory / f"{number}"
        shutil.copytree(log_dir, broken)
        segment_of(broken).write_bytes(b"".join(left))
        recoverer.say(str(broken))
        said = recoverer.hear()
        case = f"line {sorted(touched)} {what}: {said}"
        report = said["report"]
        recovered, stopped = set(report["recovered"]), set(report["damaged"])
        assert recovered | stopped == set(sagas) and not recovered & stopped, case
        assert all("damage" in report["reasons"][saga] for saga in stopped), case
        for saga in recovered:
            runs[saga] += 1
        others_went_on += bool(recovered and stopped)
        concerned = {saga for number in touched if (saga := saga_of(lines[number])) is not None}
        if damage is duplications:
            concerned = set()  # the chain shows that it is a copy, and that nothing is lost
        assert not said["intact"], case
        assert stopped >= concerned, case
        if damage is flips and not tail(touched, lines):
            assert stopped == concerned, case  # of one bit, the chain always tells whose line it was
    assert others_went_on > 50 or damage is not flips
    # Of a saga that was left alone nothing was asked; of the others, each effect once per recovery.
    ledger = Ledger(world)
    for saga in sagas:
        assert ledger.undo_counts(saga) == [runs[saga]] * 2


@pytest.mark.promise("honest-store", "fail-closed")
@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed cleanly"])
def test_whole_lines_off_the_end_are_seen_only_in_a_log_that_was_closed(
    start: Start, world: Client, who: str, log_dir: Path, closed: bool
) -> None:
    """The limit as docs/design.md states it: of a killed writer's stream nobody knows where it ended."""
    sagas = [f"ann {who}"]
    start("open_many", sagas=sagas, close=closed).ends()
    segment = segment_of(log_dir)
    lines = segment.read_bytes().splitlines(keepends=True)
    record = -2 if closed else -1
    segment.write_bytes(b"".join(lines[:record] + lines[record + 1 :] if closed else lines[:-1]))
    recoverer = start("recover_each", sagas=sagas)
    recoverer.say(str(log_dir))
    said = recoverer.hear()
    assert said["intact"] is not closed
    assert said["report"]["damaged" if closed else "recovered"] == sagas
    assert Ledger(world).undo_counts(sagas[0]) == ([0, 0] if closed else [1, 1])
