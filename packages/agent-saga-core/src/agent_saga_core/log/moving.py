"""Moving between logs: sagas that have ended are copied, sagas that have not are moved. `docs/log-copy.md`.

The rule under which no effect is undone twice, and none forgotten: a saga that has not ended may be recovered from one
log at a time. So it is marked in its old log, durably, before anything of it is in the new one (MOVING: it is still
unfinished, and nobody touches it here any more), and ends there when the new one has it (MOVED). Killed in between, the
next copy goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from agent_saga_core.errors import Fenced, LogCorrupted, SagaBusy, SagaError
from agent_saga_core.log.base import Leased, Log
from agent_saga_core.log.lines import Adopted, AnotherHistory, Lines, is_final, is_there, record_in, whole_of
from agent_saga_core.records import FINAL, Record, RecordType

__all__ = ["Copied", "copy_log"]

LOOK_EVERY: Final = 0.2
"""Seconds between two looks at what is owned."""

BATCH_SAGAS: Final = 10_000
BATCH_BYTES: Final = 32 * 2**20
"""What one call of `adopt` is given: so much shares a sync, and is held in memory."""


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy came to; of a dry run, what it would."""

    copied: int = 0
    """Sagas that had ended, stored now, and read back equal."""
    there: int = 0
    """Sagas that were there already, and read back equal."""
    records: int = 0
    """Of those, and of the moved ones."""
    moved: tuple[str, ...] = ()
    """Sagas that had not ended, and live in the target from now on."""
    away: int = 0
    """Sagas that were moved out of the source earlier."""
    unfinished: tuple[str, ...] = ()
    """Left in the source: they have not ended, and were not to be moved."""
    live: tuple[str, ...] = ()
    """Left in the source: a running process owns them."""
    refused: dict[str, str] = {}
    """Left in the source, and why: the target has something else under their id, or somebody owns it there."""
    damaged: dict[str, str] = {}
    """Left in the source, and why: it cannot tell their history, or this version does not know what is in it."""


def copy_log(
    source: Log,
    target: Log,
    *,
    live: bool = False,
    unfinished: bool = False,
    dry_run: bool = False,
    patience: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Copied:
    """Copy the sagas of one log to another, exactly as they are; what is copied is read back and compared.

    When this returns, all that it counts is durable in the target. Interrupted or killed at any point, it can simply
    be made again: what is there is compared and left, and a move that was begun goes on. A saga that has ended stays in
    the source as well. One that has not is left alone, or moved: then it ends in the source, and nobody can recover it
    from both. One that a running process owns is never touched.

    Args:
        source: Where they are. Nothing is written to it, unless sagas are moved.
        target: Where they go.
        live: Copy the others although running processes own some; those stay.
        unfinished: Move the sagas that have not ended and that nobody owns.
        dry_run: Change nothing, and tell what would be done.
        patience: Seconds to wait until no process owns a saga of the source any more; a process that died owns its
            sagas, where there are leases, until its lease has run out.
        progress: Called with the number of sagas looked at and that of all, now and then.

    Raises:
        ValueError: Both are the same log.
        SagaBusy: Running processes own sagas of the source, and `live` was not told; or the target is being compacted.
        LogCorrupted: A log cannot be read, or the target does not give back what was stored.
        LogUnavailable: A log cannot be read or written.
    """
    if source.url == target.url:
        raise ValueError("source and target are the same log; name another target")
    owned = _owned(source, patience)
    if owned and not live:
        raise SagaBusy(_owners_of(source, owned), saga_id=owned[0])
    ids = list(source.saga_ids())
    known = set(ids)
    ids += [saga_id for saga_id in source.unfinished().saga_ids if saga_id not in known]
    copy = _Copy(source, target, move=unfinished, dry_run=dry_run)
    for some in copy.batches(ids):
        copy.batch(some)
        if progress is not None:
            progress(copy.read, len(ids))
    return copy.result()


def _owned(source: Log, patience: float) -> list[str]:
    """The sagas that processes own, after that many seconds or as soon as there are none."""
    until = source.clock.monotonic() + patience
    pause = threading.Event()
    while True:
        owned = [saga_id for saga_id in source.unfinished().saga_ids if source.is_live(saga_id)]
        left = until - source.clock.monotonic()
        if not owned or left <= 0:
            return owned
        source.clock.wait(pause, min(left, LOOK_EVERY))


def _owners_of(source: Log, owned: Sequence[str]) -> str:
    """What to say of them: only a lease outlives the process that has it."""
    if len(owned) == 1:
        what, who = f"saga {owned[0]!r} of {source.url} is", "a running process"
    else:
        what, who = f"{len(owned):,} sagas of {source.url}, such as {owned[0]!r}, are", "running processes"
    todo = "stop the agents, or wait for their end (--wait)"
    if isinstance(source, Leased):
        who += f", or by one that died less than its lease ({source.lease:g} s) ago"
        todo = "stop the agents and wait until their leases have run out (--wait)"
    return f"{what} owned by {who}; {todo}, or copy the others beside them (--live)"


class _Move:
    """A saga on its way: owned in the source, by this process."""

    def __init__(self, saga_id: str, claim: Record, to: str, last: int, *, resumed: bool) -> None:
        self.saga_id = saga_id
        self.epoch = claim.n
        self.n = claim.n  # of its last record in the source
        self.data: dict[str, object] = {"to": to, "last": last}
        self.resumed = resumed
        self.ticket = 0


class _Copy:
    """One copy: what is done with some sagas at a time, and what has come of them so far."""

    def __init__(self, source: Log, target: Log, *, move: bool, dry_run: bool) -> None:
        self._source = source
        self._target = target
        self._move = move
        self._dry_run = dry_run
        self.read = 0
        self._copied = self._there = self._records = self._away = 0
        self._moved: list[str] = []
        self._unfinished: list[str] = []
        self._live: list[str] = []
        self._refused: dict[str, str] = {}
        self._damaged: dict[str, str] = {}

    def result(self) -> Copied:
        return Copied(
            copied=self._copied,
            there=self._there,
            records=self._records,
            moved=tuple(self._moved),
            away=self._away,
            unfinished=tuple(self._unfinished),
            live=tuple(self._live),
            refused=self._refused,
            damaged=self._damaged,
        )

    # --- reading the source

    def batches(self, ids: Sequence[str]) -> Iterator[dict[str, Lines]]:
        """The sagas of the source, some at a time. Damaged ones are noted, forgotten ones left out."""
        some: dict[str, Lines] = {}
        size = 0
        for saga_id in ids:
            self.read += 1
            lines = self._lines(saga_id)
            if lines:
                some[saga_id] = lines
                size += sum(len(line.head) + len(line.rest) for line in lines)
            if len(some) == BATCH_SAGAS or size > BATCH_BYTES:
                yield some
                some, size = {}, 0
        yield some

    def _lines(self, saga_id: str) -> Lines:
        try:
            return self._source.lines(saga_id)
        except LogCorrupted as error:
            self._damaged[saga_id] = str(error)
            return ()

    # --- some sagas

    def batch(self, some: dict[str, Lines]) -> None:
        """Copy them, move them, or note why not."""
        goes: dict[str, Lines] = {}
        moves: dict[str, _Move] = {}
        try:
            for saga_id, lines in some.items():
                if is_final(lines[-1]):
                    self._copy(saga_id, lines, goes)
                elif not self._move:
                    self._leave(saga_id)
                elif self._dry_run:
                    self._would_move(saga_id, lines, goes)
                else:
                    self._begin_move(saga_id, lines, goes, moves)
            # From here on nobody recovers those that move from the source: only then may the target have them.
            self._flush(moves, goes)
            arrived = self._look(goes) if self._dry_run else self._store(goes, moves)
            for saga_id in moves.keys() & arrived.keys():
                self._append(moves[saga_id], RecordType.MOVED)
            self._flush({saga_id: move for saga_id, move in moves.items() if saga_id in arrived}, arrived)
            self._moved += [saga_id for saga_id in arrived if saga_id in moves]
        finally:
            for saga_id in moves:
                self._release(saga_id)

    def _copy(self, saga_id: str, lines: Lines, goes: dict[str, Lines]) -> None:
        """A saga that has ended goes as it is; one that was moved away is elsewhere already."""
        if record_in(saga_id, lines[-1]).type == RecordType.MOVED:
            self._away += 1
        elif self._knows(saga_id, lines):
            goes[saga_id] = lines

    def _leave(self, saga_id: str) -> None:
        (self._live if self._source.is_live(saga_id) else self._unfinished).append(saga_id)

    def _knows(self, saga_id: str, lines: Lines) -> bool:
        """Whether this version knows what a history says. If not, what may be done with it is not for it to say."""
        try:
            unknown = whole_of(saga_id, lines).unknown
        except ValueError as error:
            self._damaged[saga_id] = str(error)
            return False
        if unknown is None:
            return True
        self._damaged[saga_id] = (
            f"record {unknown[0]} is of the unknown critical type {unknown[1]!r}; copy the saga with the version of "
            "agent-saga that wrote it"
        )
        return False

    # --- those that move

    def _begin_move(self, saga_id: str, lines: Lines, goes: dict[str, Lines], moves: dict[str, _Move]) -> None:
        """Own a saga in the source and mark it as moving, unless it cannot go: then nothing is written anywhere."""
        if not self._may_go(saga_id, lines):
            return
        try:
            claimed = self._source.claim(saga_id)
        except SagaBusy:
            self._live.append(saga_id)
            return
        except LogCorrupted as error:
            self._damaged[saga_id] = str(error)
            return
        lines = self._lines(saga_id)  # as it stands now that nobody else can write it
        if not claimed or claimed[-1].type in FINAL or saga_id in self._damaged:
            self._release(saga_id)
            if claimed and saga_id not in self._damaged:
                self._copy(saga_id, lines, goes)
            return
        claim = claimed[-1]
        before = lines[: claim.n - 1]
        moving = _moving_in(saga_id, before)
        # What was true when it was looked at may not be any more: another copy may have taken it to another log.
        if not self._knows(saga_id, before) or (moving is not None and not self._goes_there(saga_id, moving)):
            self._release(saga_id)
            return
        if moving is not None:
            move = _Move(saga_id, claim, self._target.url, int(moving.data["last"]), resumed=True)
        else:
            move = _Move(saga_id, claim, self._target.url, len(before), resumed=False)
            self._append(move, RecordType.MOVING)
        moves[saga_id] = move
        goes[saga_id] = before[: int(moving.data["last"]) if moving is not None else len(before)]

    def _may_go(self, saga_id: str, lines: Lines) -> bool:
        """Whether nothing stands against the move of a saga that has not ended."""
        if not self._knows(saga_id, lines):
            return False
        moving = _moving_in(saga_id, lines)
        if moving is not None:
            return self._goes_there(saga_id, moving)
        # A saga of which the target has records already may be that log's own, or this very one: both addresses may
        # lead to one log.
        there = self._there_of(saga_id)
        if there is None or there:
            self._refused.setdefault(saga_id, str(AnotherHistory(saga_id)))
            return False
        if self._target.is_live(saga_id):
            self._refused[saga_id] = f"somebody owns saga {saga_id!r} in {self._target.url}"
            return False
        return True

    def _goes_there(self, saga_id: str, moving: Record) -> bool:
        last = moving.data.get("last")
        if not isinstance(last, int) or not 0 < last < moving.n:
            self._damaged[saga_id] = f"record {moving.n} does not say what is moved"
            return False
        if moving.data.get("to") != self._target.url:
            self._refused[saga_id] = (
                f"saga {saga_id!r} is on its way to {moving.data.get('to')}, where it may have arrived; finish that "
                "move first"
            )
            return False
        return True

    def _there_of(self, saga_id: str) -> Lines | None:
        """What the target has of it; None if it cannot tell."""
        try:
            return self._target.lines(saga_id)
        except (LogCorrupted, ValueError) as error:
            self._refused[saga_id] = str(error)
            return None

    def _would_move(self, saga_id: str, lines: Lines, goes: dict[str, Lines]) -> None:
        if self._source.is_live(saga_id):
            self._live.append(saga_id)
        elif self._may_go(saga_id, lines):
            moving = _moving_in(saga_id, lines)
            goes[saga_id] = lines if moving is None else lines[: moving.data["last"]]

    def _append(self, move: _Move, kind: RecordType, data: dict[str, object] | None = None) -> None:
        move.n += 1
        now = self._source.clock.time()
        said = dict(move.data if data is None else data)
        record = Record(saga=move.saga_id, n=move.n, epoch=move.epoch, type=kind, time=now, data=said)
        move.ticket = self._source.append(record)

    def _flush(self, moves: dict[str, _Move], goes: dict[str, Lines]) -> None:
        """Make durable what was appended. A saga that was lost meanwhile does not go on; its next owner takes it on."""
        for saga_id, move in moves.items():
            try:
                self._source.flush(move.ticket)
            except Fenced as error:
                goes.pop(saga_id, None)
                self._refused[saga_id] = str(error)

    def _release(self, saga_id: str) -> None:
        if self._source.owned(saga_id):
            with suppress(SagaError):  # given up all the same
                self._source.release(saga_id)

    def _stay(self, move: _Move) -> None:
        """The target has certainly nothing of it, so it can stay where it was."""
        if not move.resumed:
            self._append(move, RecordType.MOVING, {"to": None})
            with suppress(Fenced):  # then it is its next owner's to go on with
                self._source.flush(move.ticket)

    # --- the target

    def _store(self, goes: dict[str, Lines], moves: dict[str, _Move]) -> dict[str, Lines]:
        """Have the target adopt them, and read them back; those that are there now."""
        done = self._adopted(goes, moves)
        for saga_id, error in done.refused.items():
            self._refused[saga_id] = str(error)
            if isinstance(error, AnotherHistory) and saga_id in moves:
                self._stay(moves[saga_id])
        arrived = {saga_id: goes[saga_id] for saga_id in (*done.stored, *done.there)}
        for saga_id in done.stored:  # the others were read and compared before they were called there
            lines = goes[saga_id]
            back = self._target.lines(saga_id)
            if not lines or back[: len(lines)] != lines or (is_final(lines[-1]) and len(back) > len(lines)):
                raise LogCorrupted(
                    f"the log {self._target.url} does not give back saga {saga_id!r} as it was stored; it is whole in "
                    "the source: check both with agent-saga verify",
                    saga_id=saga_id,
                    where=self._target.url,
                )
        new = len([saga_id for saga_id in done.stored if saga_id not in moves])
        self._count(arrived, new=new, there=len([saga_id for saga_id in done.there if saga_id not in moves]))
        return arrived

    def _adopted(self, goes: dict[str, Lines], moves: dict[str, _Move]) -> Adopted:
        try:
            return self._target.adopt(goes)
        except ValueError:  # it cannot hold one of them, because of its id: which one, shows one by one
            parts: list[Adopted] = []
            for saga_id, lines in goes.items():
                try:
                    parts.append(self._target.adopt({saga_id: lines}))
                except ValueError as error:
                    self._refused[saga_id] = str(error)
                    if saga_id in moves:
                        self._stay(moves[saga_id])
            return Adopted(
                stored=tuple(saga_id for part in parts for saga_id in part.stored),
                there=tuple(saga_id for part in parts for saga_id in part.there),
                refused={saga_id: error for part in parts for saga_id, error in part.refused.items()},
            )

    def _look(self, goes: dict[str, Lines]) -> dict[str, Lines]:
        """What `_store` would come to, as far as can be told."""
        there: dict[str, Lines] = {}
        fresh: dict[str, Lines] = {}
        for saga_id, lines in goes.items():
            try:
                stored = self._target.lines(saga_id)
                (there if is_there(whole_of(saga_id, lines), stored) else fresh)[saga_id] = lines
            except (AnotherHistory, LogCorrupted, ValueError) as error:
                self._refused[saga_id] = str(error)
        both = {**there, **fresh}
        self._moved += [saga_id for saga_id in both if not is_final(both[saga_id][-1])]
        ended = {saga_id for saga_id in both if is_final(both[saga_id][-1])}
        self._count(both, new=len(ended & fresh.keys()), there=len(ended & there.keys()))
        return {}

    def _count(self, arrived: dict[str, Lines], *, new: int, there: int) -> None:
        self._copied += new
        self._there += there
        self._records += sum(map(len, arrived.values()))


def _moving_in(saga_id: str, lines: Lines) -> Record | None:
    """What says that a saga is on its way to another log; None if it is not. Only a CLAIM may follow it."""
    for line in reversed(lines):
        record = record_in(saga_id, line)
        if record.type == RecordType.MOVING and record.data.get("to") is not None:
            return record
        if record.type != RecordType.CLAIM:
            return None
    return None
