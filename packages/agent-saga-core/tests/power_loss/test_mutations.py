"""What the replay is worth: logs that break a rule on purpose, each of them caught."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_saga_core.log import FileLog, osfile
from agent_saga_core.log.commit import Entry, GroupCommitLog
from agent_saga_core.log.history import History
from agent_saga_core.log.scan import Stream
from agent_saga_core.log.segments import SegmentBatch, SegmentWriter

from . import workloads
from .disk import Order, any_order, in_order
from .recording import Names, Recording
from .replay import Lost, replay
from .workloads import Workload, recorded

Break = Callable[[pytest.MonkeyPatch], None]


def nothing(*_: object) -> None:
    pass


def without_directory_syncs(of: Callable[[str], bool]) -> Break:
    def break_it(patch: pytest.MonkeyPatch) -> None:
        sync = osfile.sync_directory
        patch.setattr(osfile, "sync_directory", lambda path: None if of(os.path.basename(path)) else sync(path))

    return break_it


def without_file_syncs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(osfile, "sync_file", nothing)


def syncs_then_writes(patch: pytest.MonkeyPatch) -> None:
    write, sync = osfile.write_at, osfile.sync_file
    held: list[tuple[int, bytes, int]] = []

    def write_later(descriptor: int, data: bytes, offset: int) -> None:
        held.append((descriptor, data, offset))

    def sync_then_write(descriptor: int) -> None:
        sync(descriptor)
        while held:
            write(*held.pop(0))

    patch.setattr(osfile, "write_at", write_later)
    patch.setattr(osfile, "sync_file", sync_then_write)


def states_more_synced_than_is(patch: pytest.MonkeyPatch) -> None:
    prepare = SegmentWriter.prepare

    def too_large(self: Any, entries: Sequence[Entry]) -> SegmentBatch:
        durable, self._durable = self._durable, self.tail.position
        try:
            return prepare(self, entries)
        finally:
            self._durable = durable

    patch.setattr(SegmentWriter, "prepare", too_large)


def claims_without_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(History, "make_durable", lambda *_: False)


def claims_with_a_sync_of_contents_alone(patch: pytest.MonkeyPatch) -> None:
    whole = History.make_durable

    def contents_alone(self: History, saga_id: str, own: str | None) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(osfile, "sync_directory", nothing)
            return whole(self, saga_id, own)

    patch.setattr(History, "make_durable", contents_alone)


def turns_the_page_without(call: str) -> Break:
    def break_it(patch: pytest.MonkeyPatch) -> None:
        whole = SegmentWriter._descriptor  # pyright: ignore[reportPrivateUsage]

        def without(self: SegmentWriter, segment: int) -> int:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(osfile, call, nothing)
                return whole(self, segment)

        patch.setattr(SegmentWriter, "_descriptor", without)

    return break_it


def releases_before_it_flushes(patch: pytest.MonkeyPatch) -> None:
    def only_written(self: FileLog, saga_id: str) -> None:
        owner: Any = self._owned[saga_id]  # pyright: ignore[reportPrivateUsage]
        self.write(owner.last)
        self._let_go(saga_id, owner)  # pyright: ignore[reportPrivateUsage]

    patch.setattr(GroupCommitLog, "release", only_written)


def retires_before_its_copies_are_durable(patch: pytest.MonkeyPatch) -> None:
    whole = FileLog.compact

    def hasty(self: FileLog, *args: Any, **kwargs: Any) -> object:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(osfile, "sync_file", nothing)
            return whole(self, *args, **kwargs)

    patch.setattr(FileLog, "compact", hasty)


def removes_before_its_manifest_is_durable(patch: pytest.MonkeyPatch) -> None:
    whole = FileLog.compact

    def hasty(self: FileLog, *args: Any, **kwargs: Any) -> object:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(osfile, "sync_directory", nothing)
            return whole(self, *args, **kwargs)

    patch.setattr(FileLog, "compact", hasty)


def takes_every_hole_for_damage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stream, "_is_torn", lambda *_: False)


class Mutation(NamedTuple):
    name: str
    breaks: Break
    workload: Workload
    caught: str
    """What the replay says."""
    order: Order = in_order
    reader: bool = False
    """Whether it is the reader that is broken, not the writer."""


LOST = "were durable"

MUTATIONS = (
    Mutation("no sync of any directory", without_directory_syncs(lambda _: True), workloads.killed, LOST),
    Mutation(
        "no sync of a writer's directory",
        without_directory_syncs(lambda name: name[:2] == "w-"),
        workloads.killed,
        LOST,
    ),
    Mutation(
        "no sync of the log's directory", without_directory_syncs(lambda name: name == "log"), workloads.killed, LOST
    ),
    Mutation(
        "no sync of the lock files",
        without_directory_syncs(lambda name: name == "locks"),
        workloads.first_record,
        "lock file",
    ),
    Mutation(
        "no sync of the directories that lead to a new log",
        without_directory_syncs(lambda name: name in ("some", "where", "recorded")),
        workloads.creation,
        "there is no log",
    ),
    Mutation("log.json is linked before it is durable", without_file_syncs, workloads.creation, "log.json is damaged"),
    Mutation("no sync of any file", without_file_syncs, workloads.killed, LOST),
    Mutation("sync before write", syncs_then_writes, workloads.several_sagas, LOST),
    Mutation("synced stated too large", states_more_synced_than_is, workloads.relaxed, "taken for damaged"),
    Mutation("no sync at claim", claims_without_sync, workloads.handed_over, "(were durable|is missing)"),
    Mutation(
        "no sync of directories at claim",
        claims_with_a_sync_of_contents_alone,
        workloads.handed_over_unflushed,
        "(were durable|is missing)",
    ),
    Mutation(
        "the next segment before the last is durable",
        turns_the_page_without("sync_file"),
        workloads.rotation,
        "taken for damaged",
    ),
    Mutation(
        "the next segment before the last one's name is durable",
        turns_the_page_without("sync_directory"),
        workloads.rotation,
        "is missing",
        any_order,
    ),
    Mutation("release before flush", releases_before_it_flushes, workloads.released, LOST),
    Mutation(
        "copies retired from under",
        retires_before_its_copies_are_durable,
        workloads.compacted,
        "(damaged|durable|missing)",
    ),
    Mutation(
        "files removed before the manifest is durable",
        removes_before_its_manifest_is_durable,
        workloads.compacted,
        "(damaged|durable|missing)",
    ),
    Mutation(
        "a reader that takes every hole for damage",
        takes_every_hole_for_damage,
        workloads.killed,
        "taken for damaged",
        reader=True,
    ),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_replay_catches(mutation: Mutation, place: Path) -> None:
    @contextmanager
    def broken() -> Generator[None]:
        with pytest.MonkeyPatch.context() as patch:
            mutation.breaks(patch)
            yield

    if mutation.reader:
        recording = recorded(mutation.workload, place)
        with broken(), pytest.raises(Lost, match=mutation.caught) as caught:
            replay(recording, place / "survived", at_most=150, order=mutation.order)
    else:
        recording = recorded(mutation.workload, place, broken)
        with pytest.raises(Lost, match=mutation.caught) as caught:
            replay(recording, place / "survived", at_most=150, order=mutation.order)
    print(caught.value)


def test_the_replay_catches_a_forgotten_saga_that_comes_back(place: Path) -> None:
    """A claim that finds a saga forgotten, without making the manifest that forgot it durable."""

    @contextmanager
    def broken() -> Generator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(History, "make_durable", lambda *_: False)
            yield

    for at in range(100):
        recording = recorded(workloads.killed_while_compacting(at), place, broken)
        since = recording.killed_at
        assert since is not None
        last = recording.ops[since - 1]
        if isinstance(last, Names) and last.after[-1][0] == "manifest.json" and _manifests(recording, since) == 2:
            break
    with pytest.raises(Lost, match="came back"):
        replay(recording, place / "survived", at_most=150, since=since)


def _manifests(recording: Recording, at: int) -> int:
    return sum(isinstance(op, Names) and op.after[-1][0] == "manifest.json" for op in recording.ops[:at])
