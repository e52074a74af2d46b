"""A writer that fills its segments beforehand: what the replay says of it, and why version 1 has none.

`docs/log-format.md`, "Preallocated tail", rests on these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_saga_core.log import FileLog, osfile
from agent_saga_core.log.segments import SegmentWriter
from agent_saga_core.records import Record

from . import workloads
from .disk import any_order
from .replay import Lost, replay
from .workloads import Workload, recorded

FILLED = 8192


def filled(with_byte: bytes, *, cut: str) -> Callable[[], AbstractContextManager[None]]:
    """Writers that fill each segment first, and cut what is left `"before"` what ends it, `"after"`, or `"never"`."""
    descriptor_of: Callable[[Any, int], int] = SegmentWriter._descriptor  # pyright: ignore[reportPrivateUsage]
    end_of: Callable[[Any], None] = SegmentWriter.end

    def cut_off(descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)
        osfile.sync_file(descriptor)

    def descriptor(self: Any, segment: int) -> int:
        before = self._file
        if before is not None and before[0] != segment and cut == "before":
            cut_off(before[1], self.tail.offset)
        found = descriptor_of(self, segment)
        if before is None or before[0] != segment:
            os.pwrite(found, with_byte * FILLED, 0)
            osfile.sync_file(found)
        return found

    def end(self: Any) -> None:
        if self._file is not None and cut == "before":
            cut_off(self._file[1], self.tail.offset)
        end_of(self)
        if self._file is not None and cut == "after":
            written = os.pread(self._file[1], 2 * FILLED, 0).rstrip(with_byte)
            cut_off(self._file[1], len(written) + (with_byte == b"\n"))

    @contextmanager
    def broken() -> Generator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SegmentWriter, "_descriptor", descriptor)
            patch.setattr(SegmentWriter, "end", end)
            yield

    return broken


@pytest.mark.parametrize(
    "workload",
    [workloads.killed, workloads.relaxed, workloads.several_sagas, workloads.rotation, workloads.handed_over],
    ids=lambda workload: workload.__name__,
)
def test_zeros_that_are_cut_off_first_keep_torn_apart_from_damaged(workload: Workload, place: Path) -> None:
    recording = recorded(workload, place, filled(b"\0", cut="before"))
    count = replay(recording, place / "survived", at_most=60, order=any_order)
    assert count.opened > 30


@pytest.mark.parametrize("cut", ["after", "never"])
def test_zeros_that_are_still_there_behind_the_end_read_as_damage(cut: str, place: Path) -> None:
    recording = recorded(workloads.several_sagas, place, filled(b"\0", cut=cut))
    with pytest.raises(Lost, match="something follows the line that ends the stream"):
        replay(recording, place / "survived", at_most=60)


def test_zeros_that_are_still_there_before_another_segment_read_as_damage(place: Path) -> None:
    recording = recorded(workloads.rotation, place, filled(b"\0", cut="never"))
    with pytest.raises(Lost, match="another segment follows"):
        replay(recording, place / "survived", at_most=60)


def test_newlines_read_as_damage(place: Path) -> None:
    recording = recorded(workloads.killed, place, filled(b"\n", cut="before"))
    with pytest.raises(Lost, match="lines are not what was written there"):
        replay(recording, place / "survived", at_most=60)


def test_a_reader_does_not_notice_what_is_written_into_space_that_was_there(place: Path) -> None:
    def record(n: int) -> Record:
        return Record(saga="a", n=n, epoch=1, type="INTENT", time=1.0, data={})

    with filled(b"\0", cut="before")():
        log = FileLog(place / "log")
        log.claim("a")
        log.flush(log.append(record(1)))
        reader = FileLog(place / "log", create=False)
        assert len(reader.read("a")) == 1
        log.flush(log.append(record(2)))
        assert len(reader.read("a")) == 1
        assert len(FileLog(place / "log", create=False).read("a")) == 2
        log.close()
