"""What others take for the same: each peer in an environment of its own, the floor beside every figure.

A peer is installed by `uv` into a fresh environment with our interpreter and runs its own script there, one process for
each figure. Nothing of it ever enters our environment. Whatever cannot be installed, run or finished in time is a row
of the table all the same, with the reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import log
from benchmarks.tables import beside_floor

RECORDS = 100_000
LIVE = 10
LINE = 600  # bytes of a typical record's line
SECONDS_IN_ALL = 225.0
SECONDS_OF_ONE = 80.0
FASTEST_OF = 3
STEADY = 1.5  # times that the floor may differ before and after
OURS = "agent-saga-core"
UV = os.environ.get("UV", "uv")
# A traced program marks the part whose syncs count by syncing a descriptor that nobody has.
MARKED = re.compile(r"fsync\(1073741824\)")
SYNC = re.compile(r"^\d+ +(?:fsync|fdatasync|msync|sync_file_range)\(")


class NotMeasured(Exception):
    """Why a figure is not there, in words for the table."""


@dataclass(frozen=True, kw_only=True)
class PeerRow:
    """One figure of one peer, or why there is none."""

    what: str
    peer: str
    measured: str
    syncs: str = "-"
    floor: str = "-"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A distribution, its script beside this module, and what it has no notion of."""

    name: str
    requirement: str
    module: str
    script: str
    shown: str
    lacks: dict[str, str] = field(default_factory=dict[str, str])


PEERS = (
    Peer(
        name="agent-saga",
        requirement="agent-saga==2.3.*",
        module="agent_saga",
        script="peer_agent_saga.py",
        shown="agent-saga {version}, `FileWAL`",
    ),
    Peer(
        name="dbos",
        requirement="dbos",
        module="dbos",
        script="peer_dbos.py",
        shown="dbos {version}, SQLite",
        lacks={
            "plain_step": "no such notion: every step is checkpointed",
            "verify": "no such notion: its rows carry no check of their own",
        },
    ),
)

PLAIN, OPENING, VERIFYING = "plain_step", "recover", "verify"
CONCURRENT = "concurrent"
TITLES = {
    PLAIN: "step without durability, p50",
    "sync_step": "durable step, sync function, p50",
    "async_step": "durable step, async, p50",
    "whole": "whole saga (workflow) with one durable step, p50",
    CONCURRENT: "256 concurrent async sagas, 8 durable steps each: per durable step",
    "import": "import over bare Python",
    OPENING: f"opening + recovery scan, {RECORDS:,} records, {LIVE} live sagas",
    VERIFYING: f"verify, {RECORDS:,} records",
}


class Environment:
    """One peer installed by itself under a directory. Every call ends by `deadline`, or raises `NotMeasured`."""

    def __init__(self, peer: Peer, folder: Path, deadline: float) -> None:
        self.peer = peer
        self.deadline = deadline
        self.folder = folder
        self.python = folder / "environment" / ("Scripts" if os.name == "nt" else "bin") / "python"
        self.call([UV, "venv", "--quiet", "--no-project", "--python", sys.executable, str(folder / "environment")])
        # --no-sources: what this workspace says about its own packages is not for this environment.
        install = [UV, "pip", "install", "--quiet", "--no-sources", "--python", str(self.python)]
        self.call([*install, peer.requirement], "its installation")
        self.version = self.call(
            [str(self.python), "-I", "-c", f"from importlib.metadata import version; print(version({peer.name!r}))"]
        ).strip()
        self.shown = peer.shown.format(version=self.version)
        self.made = 0

    def call(self, command: list[str], what: str = "it") -> str:
        left = min(SECONDS_OF_ONE, self.deadline - time.monotonic())
        if left <= 0:
            raise NotMeasured(f"left out: the {SECONDS_IN_ALL:.0f} s for all peers were over")
        try:
            # A session of its own: what a tracer started ends with the tracer.
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise NotMeasured(f"{Path(command[0]).name} does not start: {error.strerror}") from error
        with process:
            try:
                out, err = process.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                raise NotMeasured(f"not done within {left:.0f} s") from None
        if process.returncode:
            print(err, file=sys.stderr)
            raise NotMeasured(f"{what} failed with exit status {process.returncode}")
        return out

    def folder_for(self, figure: str) -> Path:
        self.made += 1
        folder = self.folder / f"{figure}-{self.made}"
        folder.mkdir()
        return folder

    def figure(self, figure: str, folder: Path, *more: str, tracer: tuple[str, ...] = ()) -> dict[str, float]:
        script = Path(__file__).with_name(self.peer.script)
        return json.loads(self.call([*tracer, str(self.python), "-I", str(script), figure, str(folder), *more]))

    def syncs(self, figure: str) -> float:
        """Syncs of one step of a figure, counted by running it once more under strace."""
        strace = shutil.which("strace")
        if strace is None:
            raise NotMeasured("not counted: no strace here")
        trace = self.folder / f"{figure}.trace"
        kinds = "trace=fsync,fdatasync,msync,sync_file_range"
        tracer = (strace, "-f", "--seccomp-bpf", "-qq", "-e", kinds, "-o", str(trace))
        found = self.figure(figure, self.folder_for(figure), tracer=tracer)
        parts = MARKED.split(trace.read_text("utf-8", errors="replace"))
        if len(parts) != 3:
            raise NotMeasured("not counted: the trace has no marks")
        return sum(bool(SYNC.match(line)) for line in parts[1].splitlines()) / found["per"]

    def seconds_to_import(self) -> float:
        def fastest(code: str) -> float:
            taken: list[float] = []
            for _ in range(5):
                begun = time.perf_counter()
                self.call([str(self.python), "-I", "-c", code])
                taken.append(time.perf_counter() - begun)
            return min(taken)

        fastest(f"import {self.peer.module}")  # bytecode
        return fastest(f"import {self.peer.module}") - fastest("pass")


def steps(environment: Environment, figure: str, directory: Path) -> PeerRow:
    """Time and syncs of one of the figures of steps, with the floor around the timing.

    A floor that moved in between says nothing about the figure: then it is measured once more, and if the floor moved
    again the row has no ratio.
    """
    found: dict[str, float] = {}

    def measure() -> float:
        found.update(environment.figure(figure, environment.folder_for(figure)))
        return found["seconds"]

    against_floor = figure not in (PLAIN, CONCURRENT)
    seconds, before, after = beside_floor(directory, LINE, measure)
    if against_floor and not steady(before, after):
        seconds, before, after = beside_floor(directory, LINE, measure)
    measured = f"{seconds * 1e6:.1f} us" if seconds < 1e-4 else f"{seconds * 1e6:,.0f} us"
    if against_floor:
        ratio = f"{seconds / ((before + after) / 2):.2f} x floor" if steady(before, after) else "the floor moved"
        measured = f"{ratio} ({measured})"
    return PeerRow(
        what=TITLES[figure],
        peer=environment.shown,
        measured=measured,
        syncs=shown_syncs(environment, figure, found),
        floor=f"{before * 1e6:.0f} / {after * 1e6:.0f} us",
    )


def steady(before: float, after: float) -> bool:
    return max(before, after) <= STEADY * min(before, after)


def shown_syncs(environment: Environment, figure: str, found: dict[str, float]) -> str:
    """What the script counted itself, or else what a tracer counts."""
    try:
        return f"{found['syncs'] if 'syncs' in found else environment.syncs(figure):.3g}"
    except NotMeasured as reason:
        return str(reason)


def scans(environment: Environment, figure: str, built: Path, expected: int) -> PeerRow:
    """Seconds and memory of opening or verifying: the fastest of three, each on a copy, since opening changes a log."""
    tries: list[dict[str, float]] = []
    for _ in range(FASTEST_OF):
        folder = environment.folder_for(figure)
        shutil.copytree(built, folder, dirs_exist_ok=True)
        tries.append(environment.figure(figure, folder))
        shutil.rmtree(folder)
    best = min(tries, key=lambda found: found["seconds"])
    if best["found"] != expected:
        raise NotMeasured(f"it found {best['found']:.0f} and not {expected:,}")
    return PeerRow(what=TITLES[figure], peer=environment.shown, measured=seconds_and_memory(best))


def seconds_and_memory(found: dict[str, float]) -> str:
    return f"{found['seconds']:.3f} s, {found['kilobytes'] / 1024:.0f} MB"


def imported(environment: Environment) -> PeerRow:
    seconds = environment.seconds_to_import()
    return PeerRow(what=TITLES["import"], peer=environment.shown, measured=f"{seconds * 1e3:.0f} ms")


def of_peer(peer: Peer, folder: Path, deadline: float, directory: Path) -> dict[str, PeerRow]:
    """Every figure of one peer, or the reason, by figure."""
    rows: dict[str, PeerRow] = {}
    shown = peer.shown.format(version=peer.requirement.removeprefix(peer.name).strip("=") or "(latest)")
    try:
        environment = Environment(peer, folder, deadline)
    except NotMeasured as reason:
        return {figure: PeerRow(what=what, peer=shown, measured=str(reason)) for figure, what in TITLES.items()}

    def built() -> Path:
        made = folder / "built"
        if not made.exists():
            made.mkdir()
            if environment.figure("build", made, str(RECORDS))["found"] != RECORDS:
                raise NotMeasured("its log was not built")
        return made

    measures: dict[str, Callable[[], PeerRow]] = {
        figure: lambda figure=figure: steps(environment, figure, directory)
        for figure in (PLAIN, "sync_step", "async_step", "whole")
    }
    measures["import"] = lambda: imported(environment)
    measures[OPENING] = lambda: scans(environment, OPENING, built(), LIVE)
    measures[VERIFYING] = lambda: scans(environment, VERIFYING, built(), RECORDS)
    measures[CONCURRENT] = lambda: steps(environment, CONCURRENT, directory)  # last: it may take the time that is left
    for figure, measure in measures.items():
        try:
            if figure in peer.lacks:
                raise NotMeasured(peer.lacks[figure])
            rows[figure] = measure()
        except NotMeasured as reason:
            rows[figure] = PeerRow(what=TITLES[figure], peer=environment.shown, measured=str(reason))
    return rows


def ours(folder: Path) -> dict[str, PeerRow]:
    """Our own log of as many records, beside those of the peers."""
    log.build(folder / "log", RECORDS, LIVE)
    found = {OPENING: log.measured(log.OPENING, folder / "log"), VERIFYING: log.measured(log.VERIFYING, folder / "log")}
    return {
        figure: PeerRow(what=TITLES[figure], peer=OURS, measured=seconds_and_memory(best))
        for figure, best in found.items()
    }


def run(directory: Path) -> list[PeerRow]:
    """Measure every peer, within four minutes. A row for each peer and figure, whatever happens."""
    deadline = time.monotonic() + SECONDS_IN_ALL
    with tempfile.TemporaryDirectory(dir=directory, prefix="benchmark-peers-") as name:
        folder = Path(name).resolve()
        columns: list[dict[str, PeerRow]] = []
        for peer in PEERS:
            (folder / peer.name).mkdir()
            columns.append(of_peer(peer, folder / peer.name, deadline, directory))
        columns.append(ours(folder))
    return [column[figure] for figure in TITLES for column in columns if figure in column]


def table(rows: list[PeerRow]) -> str:
    """Markdown."""
    lines = ["| what | who | measured | syncs | floor before / after |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {r.what} | {r.peer} | {r.measured} | {r.syncs} | {r.floor} |" for r in rows]
    return "\n".join(lines)
