"""The walk over a whole log."""

from __future__ import annotations

from collections.abc import Callable

from agent_saga_core.log.base import Damage, Verification
from agent_saga_core.log.manifest import Manifest, counts, parse_manifest, read_manifest
from agent_saga_core.log.scan import Found, Stream
from agent_saga_core.log.segments import stream_names
from agent_saga_core.records import FINAL

__all__ = ["verify"]

PROGRESS_EVERY = 10_000

_FINAL = frozenset(kind.encode() for kind in FINAL)


class _Runs:
    """Which record numbers of a saga were met: gapless runs, and whether a final record ended it."""

    __slots__ = ("final_n", "runs")

    def __init__(self, *runs: list[int]) -> None:
        self.runs = list(runs)  # [first, last], in order, never touching
        self.final_n = 0

    def add(self, n: int) -> bool:
        """Note a number; False if it was met before."""
        runs = self.runs
        if runs and runs[-1][1] == n - 1:  # nearly always
            runs[-1][1] = n
            return True
        at = 0
        while at < len(runs) and runs[at][1] < n:
            at += 1
        if at < len(runs) and runs[at][0] <= n:
            return False
        runs.insert(at, [n, n])
        for left in (at, at - 1):
            if 0 <= left < len(runs) - 1 and runs[left][1] + 1 == runs[left + 1][0]:
                runs[left][1] = runs.pop(left + 1)[1]
        return True


class _Walk:
    """What is remembered of the sagas: of a whole and finished one, eight bytes."""

    def __init__(self, progress: Callable[[int], None] | None) -> None:
        self.records = 0
        self.twice: set[str] = set()
        self.open: dict[str, _Runs] = {}
        self._whole: set[int] = set()
        self._growing: dict[str, int] = {}  # sagas that were met from 1 up to this number, and are not over
        self._progress = progress

    def note(self, segment: int, found: list[Found]) -> None:
        before, self.records = self.records, self.records + len(found)
        if self._progress is not None and self.records // PROGRESS_EVERY > before // PROGRESS_EVERY:
            self._progress(self.records)
        growing = self._growing
        for saga_id, n, kind, _, _ in found:
            if growing.get(saga_id, 0) == n - 1 and (n > 1 or self._is_new(saga_id)):  # nearly always
                if kind not in _FINAL:
                    growing[saga_id] = n
                else:
                    growing.pop(saga_id, None)
                    self._whole.add(hash(saga_id))
            else:
                self._note(saga_id, n, kind)

    def _is_new(self, saga_id: str) -> bool:
        return saga_id not in self.open and hash(saga_id) not in self._whole

    def _note(self, saga_id: str, n: int, kind: bytes) -> None:
        known = self._growing.pop(saga_id, 0)
        if known:
            self.open[saga_id] = _Runs([1, known])
        runs = self.open.get(saga_id)
        if runs is None:
            # Of 64 bits: two sagas of one log meet in one hash about as often as a disk lies.
            if hash(saga_id) in self._whole:
                self.twice.add(saga_id)
                return
            runs = self.open[saga_id] = _Runs()
        if not runs.add(n):
            self.twice.add(saga_id)
        if kind in _FINAL:
            runs.final_n = n
        if runs.final_n and runs.runs == [[1, runs.final_n]]:
            del self.open[saga_id]
            self._whole.add(hash(saga_id))

    def faults(self) -> dict[str, str]:
        """What is wrong with which saga."""
        found = dict.fromkeys(self.twice, "a record is there twice, or follows its final one")
        for saga_id, runs in self.open.items():
            if runs.runs[0][0] != 1 or len(runs.runs) > 1:
                found.setdefault(saga_id, f"record {1 if runs.runs[0][0] != 1 else runs.runs[0][1] + 1} is missing")
            elif runs.final_n:
                found.setdefault(saga_id, "records follow its final one")
        return found


def verify(directory: str, log_id: str, progress: Callable[[int], None] | None) -> Verification:
    """Read every line of a log that is not retired, and no index. Memory grows with the number of sagas, slowly.

    If a compaction ends meanwhile, the walk begins again.

    Raises:
        OSError: A segment cannot be read.
        LogCorrupted: The manifest is damaged.
    """
    while True:
        seen = read_manifest(directory)
        try:
            found = _walk(directory, log_id, parse_manifest(seen, directory, log_id), progress)
        except FileNotFoundError:
            if read_manifest(directory) == seen:
                raise
        else:
            if read_manifest(directory) == seen:
                return found


def _walk(directory: str, log_id: str, manifest: Manifest, progress: Callable[[int], None] | None) -> Verification:
    walk = _Walk(progress)
    damage: list[Damage] = []
    streams = [
        Stream(directory, name, log_id, skips=[run.skip() for run in manifest.retired.get(name, ())])
        for name in stream_names(directory)
        if counts(manifest, name)
    ]
    for stream in streams:
        stream.advance(walk.note)
    suspects = walk.faults()
    if suspects:
        # A live log: a writer read early may have written what seems to be missing before another's records came.
        for stream in streams:
            stream.advance(walk.note)
        suspects = {saga_id: fault for saga_id, fault in walk.faults().items() if saga_id in suspects}
    for stream in streams:
        damage += stream.damage()
    damage += [
        Damage(where=f"saga {saga_id!r}", reason=fault, saga_ids=(saga_id,)) for saga_id, fault in suspects.items()
    ]
    if progress is not None:
        progress(walk.records)
    first = f"{damage[0].where}: {damage[0].reason}" if damage else None
    return Verification(intact=not damage, records=walk.records, first_broken=first, damage=tuple(damage))
