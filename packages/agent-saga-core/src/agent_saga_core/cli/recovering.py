"""`recover`: finish what dead processes left, once or as a daemon."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from agent_saga_core.cli.failures import ATTENTION, DAMAGED, DONE, Complaint, complain
from agent_saga_core.cli.leases import Owner, await_leases, owner_on
from agent_saga_core.cli.options import Imports, LogUrl, import_modules, opened, stdout_kept
from agent_saga_core.cli.rounds import InDoubt, Round, in_doubt, merged
from agent_saga_core.cli.screen import console_on, counted, ink, plain, print_json, put
from agent_saga_core.cli.stopping import Stop
from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log.base import Log, WatchedLeases
from agent_saga_core.recovery import Recoverer, RecoveryReport, read_saga

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["exit_code", "recover_verb"]

INTERVAL = 5.0
"""Seconds between two looks of a watch, on average, unless told otherwise."""
LOOK_EVERY = 0.5
"""Seconds between two looks at what is waited for."""
SHOWN_WAITS = 5
MISSING_HANDLER = "Pass --import"
"""How recovery ends the reason of a saga that it left alone because this process lacks one of its handlers."""

SHOWN_LIVE = 20
"""Live sagas that get a line: nothing is to be done about them, and there may be as many as agents."""

_OUTCOMES = {
    "recovered": "green",
    "attention": "bold red",
    "untouched": "yellow",
    "live": "blue",
    "damaged": "bold red",
}
_FORETOLD = {"recovered": "would recover", "attention": "would need attention"}
"""What a dry run calls them."""


def recover_verb(
    log_url: LogUrl = None,
    sagas: Annotated[
        list[str] | None,
        typer.Option("--saga", metavar="SAGA", help="Only this saga. Repeatable.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, and tell what would be done.")] = False,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=1024, metavar="N", help="Sagas to roll back at once.")
    ] = 1,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until SIGTERM or SIGINT. Never retries NEEDS_ATTENTION.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            min=0.01,
            metavar="SECONDS",
            help=f"With --watch: time between two looks, on average. Default: {INTERVAL:g}.",
            show_default=False,
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="[HOST:]PORT",
            help="With --watch: serve Prometheus metrics there. Default host: 127.0.0.1.",
            show_default=False,
        ),
    ] = None,
    modules: Imports = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout; with --watch, JSON lines.")
    ] = False,
) -> int:
    """Roll back every saga whose process is gone, through compensators registered by name.

    Never touches a saga whose process lives. A call that died in the middle may still land: recovery waits for it as
    long as its tool says, and all those waits run at once.
    """
    for name, given in (("--metrics", metrics), ("--interval", interval)):
        if given is not None and not watch:
            raise Complaint(f"{name} goes with --watch")
    with Stop() as stop:
        if watch:
            from agent_saga_core.cli.watching import Watch

            return Watch(
                log_url,
                tuple(sagas or ()),
                modules=tuple(modules or ()),
                dry_run=dry_run,
                concurrency=concurrency,
                interval=INTERVAL if interval is None else interval,
                metrics=metrics,
                as_json=as_json,
                stop=stop,
            ).run()
        import_modules(modules)
        with opened(log_url) as log, stdout_kept():
            report = _recover_once(log, tuple(sagas or ()), dry_run, concurrency, stop, quiet=as_json)
            owner = owner_on(log)
    if as_json:
        print_json(report)
    else:
        _print_report(report, owner, dry_run=dry_run)
    if stop.requested:
        complain("stopped before the end; sagas that were begun are handed back as they stand")
        return 128 + stop.signal_number
    return exit_code(report)


def exit_code(report: RecoveryReport) -> int:
    """3 for damage, 1 if something is left for a person (a missing handler counts), else 0."""
    if report.damaged:
        return DAMAGED
    unable = any(MISSING_HANDLER in report.reasons.get(saga_id, "") for saga_id in report.untouched)
    return ATTENTION if report.attention or unable else DONE


def _recover_once(
    log: Log, sagas: tuple[str, ...], dry_run: bool, concurrency: int, stop: Stop, *, quiet: bool
) -> RecoveryReport:
    for saga_id in sagas if len(sagas) > 1 else ():  # an unknown one is heard of before the others are touched
        with suppress(LogCorrupted):  # the recovery itself reports it
            read_saga(log, saga_id)
    report = _round(log, sagas, dry_run, concurrency, stop, quiet=quiet)
    if not isinstance(log, WatchedLeases) or not report.live or stop.requested:
        return report
    # What can be recovered is not to wait for what may turn out to be live.
    await_leases(log, report.live, stop.wait, quiet=quiet)
    unfinished = set(log.unfinished().saga_ids)
    freed = tuple(saga_id for saga_id in report.live if saga_id in unfinished and not log.is_live(saga_id))
    if not freed or stop.requested:
        return report
    again = _round(log, freed, dry_run, concurrency, stop, quiet=quiet)
    return merged(
        [msgspec.structs.replace(report, live=tuple(each for each in report.live if each not in freed)), again]
    )


def _round(
    log: Log, sagas: tuple[str, ...], dry_run: bool, concurrency: int, stop: Stop, *, quiet: bool
) -> RecoveryReport:
    waiting = _Waiting(log, sagas)
    this = Round(
        log,
        sagas,
        halt=threading.Event(),
        recoverer=Recoverer(concurrency=concurrency),
        dry_run=dry_run,
        retry=True,
        progress=waiting.ended,
        at_end=stop.wake,
    )
    this.start()
    with waiting.shown(quiet=quiet):
        while not this.ended:
            if stop.wait(LOOK_EVERY):
                this.halt.set()
                this.join()  # a second signal ends the process
            else:
                waiting.look()
    if this.error is not None:
        raise this.error
    if this.report is None:
        raise Complaint("the recovery ended without a report")
    return this.report


class _Waiting:
    """What the recovery waits for, told on stderr: a moving picture on a terminal, else a line per step."""

    def __init__(self, log: Log, sagas: tuple[str, ...]) -> None:
        self._log = log
        self._pending = dict.fromkeys(sagas or log.unfinished().saga_ids)
        self._total = len(self._pending)
        self._since: dict[InDoubt, float] = {}
        self._lock = threading.Lock()
        self._tell = False

    def ended(self, saga_id: str, verdict: str, reason: str) -> None:
        """A saga has its verdict; called on the recovery's threads."""
        with self._lock:
            self._pending.pop(saga_id, None)
            for step in [step for step in self._since if step.saga_id == saga_id]:
                del self._since[step]

    def look(self) -> None:
        """See what is waited for now."""
        with self._lock:
            pending = list(self._pending)
        now = time.monotonic()
        for step in (step for saga_id in pending for step in in_doubt(self._log, saga_id)):
            with self._lock:
                if step.saga_id in self._pending and step not in self._since:
                    self._since[step] = now
                    if self._tell:
                        complain(f"waiting up to {step.seconds:g} s for {plain(step)}")

    @contextmanager
    def shown(self, *, quiet: bool) -> Generator[None]:
        """Show it while the block runs."""
        if quiet or not sys.stderr.isatty():
            self._tell = not quiet
            yield
            return
        from rich.live import Live

        with Live(console=console_on(sys.stderr), get_renderable=self._picture, transient=True, refresh_per_second=4):
            yield

    def _picture(self) -> Group:
        from rich.console import Group

        now = time.monotonic()
        with self._lock:
            done = self._total - len(self._pending)
            waits = sorted((max(0.0, since + step.seconds - now), str(step)) for step, since in self._since.items())
        lines = [ink(f"recovering: {done} of {counted(self._total, 'saga')}", "bold")]
        lines += [ink(f"  waiting {left:3.0f} s for {said}", "dim") for left, said in waits[:SHOWN_WAITS]]
        if len(waits) > SHOWN_WAITS:
            lines.append(ink(f"  and for {counted(len(waits) - SHOWN_WAITS, 'more step')}", "dim"))
        return Group(*lines)


def _print_report(report: RecoveryReport, owner: Owner, *, dry_run: bool) -> None:
    from rich.padding import Padding

    console = console_on(sys.stdout)
    words = {outcome: _FORETOLD.get(outcome, outcome) if dry_run else outcome for outcome in _OUTCOMES}
    words["live"] = owner.word
    shown = [outcome for outcome in _OUTCOMES if getattr(report, outcome)]
    if not shown:
        print("nothing to recover")
        return
    width = max(9, *(len(words[outcome]) for outcome in shown)) + 2
    for outcome in shown:
        sagas: tuple[str, ...] = getattr(report, outcome)
        listed = sagas[:SHOWN_LIVE] if outcome == "live" else sagas
        for saga_id in listed:
            put(console, ink(f"{words[outcome]:<{width}}", _OUTCOMES[outcome]).append_text(ink(saga_id, "bold")))
            if reason := report.reasons.get(saga_id):
                put(console, Padding(ink(reason, "dim"), (0, 0, 0, width), expand=False))
        if len(sagas) > len(listed):
            put(console, Padding(ink(f"... and {len(sagas) - len(listed):,} more", "dim"), (0, 0, 0, width)))
    if dry_run or len(shown) > 1 or len(report.recovered) > 1 or len(report.live) > 1:
        counts = ", ".join(f"{len(getattr(report, outcome)):,} {words[outcome]}" for outcome in shown)
        put(console, ink(f"{counts}{' (dry run: nothing was changed)' if dry_run else ''}"))
    if report.live and owner.todo:
        put(console, ink(f"{owner.word}: {owner.said[0].lower()}{owner.said[1:]}. {owner.todo}"))
    if report.attention:
        put(console, ink("agent-saga show SAGA says what to do about each"))
    if report.damaged:
        put(console, ink("agent-saga verify names the damaged places"))
