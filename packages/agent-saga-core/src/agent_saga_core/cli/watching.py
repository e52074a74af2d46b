"""`recover --watch`: the daemon."""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, Final, TextIO, get_args

import msgspec

from agent_saga_core.cli.failures import DONE, Complaint, line_of
from agent_saga_core.cli.metrics import Metrics
from agent_saga_core.cli.options import import_modules, open_existing, stdout_kept
from agent_saga_core.cli.rounds import Round
from agent_saga_core.cli.screen import counted, plain
from agent_saga_core.cli.stopping import Stop
from agent_saga_core.errors import LogCorrupted, SagaNotFound
from agent_saga_core.log.base import Log
from agent_saga_core.recovery import Heard, Recoverer, Standing

__all__ = ["Watch"]

MAX_ROUNDS: Final = 16
"""Rounds at once. Each of them but one waits for something in doubt; new sagas are not to wait behind those."""
MAX_BACKOFF: Final = 60.0
"""Longest pause between two tries to reach the log, in seconds."""

MAX_REASONS: Final = 16
"""Reasons told of one outage. Whatever else a message holds that changes each time must not fill a journal."""
_NONCE: Final = re.compile(r"\b(?=[\w-]*\d)[\w-]{8,}|\d{5,}")
"""What tells two messages apart that have one reason: names drawn by a process, and counters."""

_logger = logging.getLogger("agent_saga")
_LASTING = (Complaint, SagaNotFound, LogCorrupted)
"""What trying again does not mend."""
_LEVELS: Final = {"attention": logging.WARNING, "damaged": logging.ERROR}


class Watch:
    """Recovers again and again until it is asked to stop.

    A round that waits for something in doubt does not hold up the others: the next one is started beside it, once every
    saga of the earlier ones has its turn. All rounds together roll back `concurrency` sagas at once. Pauses, and the
    order in which sagas are taken, are drawn anew by each process, so that several watches of one log spread out. Each
    finding is told once, and again only when it has changed. A log that cannot be used is tried again after growing
    pauses; each reason for it is said once, and once that it can be used again. It can as soon as it has told what is
    unfinished. Where it told that and then let nobody write, it must have let a saga be claimed, or have nothing to do.
    """

    def __init__(
        self,
        url: str | None,
        sagas: tuple[str, ...],
        *,
        modules: tuple[str, ...],
        dry_run: bool,
        concurrency: int,
        interval: float,
        metrics: str | None,
        as_json: bool,
        stop: Stop,
    ) -> None:
        self._url = url
        self._sagas = sagas
        self._modules = modules
        self._dry_run = dry_run
        # Drawn by the process: machines that were started by one command have one time, and often equal process ids.
        seed = os.urandom(16)
        self._recoverer = Recoverer(concurrency=concurrency, seed=seed)
        self._draw = random.Random(seed)
        self._interval = interval
        self._metrics = metrics
        self._as_json = as_json
        self._stop = stop
        # A log per round at work: an ownership belongs to a log, so that rounds exclude each other as processes do.
        self._idle: list[Log] = []
        self._halt = threading.Event()
        self._rounds: list[Round] = []
        self._begun = self._newest = 0  # rounds, and the newest of them that has ended
        self._told: dict[str, tuple[str, str]] = {}
        self._telling = threading.Lock()
        self._started = False
        # Whether the log can be used. Rounds hear that it can on their threads, the main thread that it cannot.
        self._standing = threading.Lock()
        self._failures = 0
        self._refused = False  # it lets this process look, and has not let it write
        self._reasons: set[str] = set()
        self._reachable: bool | None = None
        self._looked = False

    def run(self) -> int:
        """Watch; return the exit code.

        Raises:
            Complaint: An argument is wrong.
            SagaNotFound: A saga that was named is not there.
            LogCorrupted: What is there is no log any more.
        """
        with _logging_to(sys.stdout if self._as_json else sys.stderr, self._as_json), stdout_kept():
            import_modules(self._modules)
            with ExitStack() as opened:
                if self._metrics is not None:
                    served = opened.enter_context(Metrics(self._metrics, self._recoverer, lambda: self._reachable))
                    _say(logging.INFO, "serving", f"metrics are at {served.url}", metrics=served.url)
                try:
                    self._loop()
                finally:
                    self._end()
            _say(logging.INFO, "stopped", "stopped")
        return DONE

    def _loop(self) -> None:
        due = 0.0
        while not self._stop.requested:
            try:
                self._collect()
                if time.monotonic() >= due:
                    due = time.monotonic() + self.pause()
                    self._start_round()
            except _LASTING:
                raise
            except Exception as error:
                due = time.monotonic() + self._failed(error)
            self._stop.wait(max(0.0, due - time.monotonic()))

    def pause(self) -> float:
        """Seconds until the next round: `interval` on average, and never what another process draws."""
        return self._interval * self._draw.uniform(0.5, 1.5)

    def _start_round(self) -> None:
        if len(self._rounds) >= MAX_ROUNDS or not all(each.taken for each in self._rounds):
            return
        log = self._idle.pop() if self._idle else open_existing(self._url)
        if not self._started:
            self._started = True
            _say(logging.INFO, "watching", f"watching {log.url}", log=log.url, pid=os.getpid())
        this = Round(
            log,
            self._sagas,
            halt=self._halt,
            recoverer=self._recoverer,
            dry_run=self._dry_run,
            retry=False,
            progress=self._found,
            at_end=self._stop.wake,
            number=self._begun + 1,
            heard=self._heard,
            decide=self._refused and not self._dry_run,
        )
        self._begun += 1
        self._rounds.append(this)
        this.start()

    def _collect(self) -> None:
        """Take the rounds that have ended; raise what ended one of them, if it was no report."""
        failure: BaseException | None = None
        for each in [each for each in self._rounds if each.ended]:
            self._rounds.remove(each)
            if each.report is None:
                failure = failure or each.error
                self._refused = self._refused or (each.listed and not each.claimed and not self._dry_run)
                _close(each.log)
                continue
            self._idle.append(each.log)
            if not self._refused or each.claimed or each.decided:
                self._usable()
            if each.number > self._newest:  # one that waited long has seen less than those after it
                self._newest = each.number
                self._forget({*each.report.attention, *each.report.untouched, *each.report.live, *each.report.damaged})
        while len(self._idle) > 1:
            _close(self._idle.pop())
        if failure is not None:
            raise failure if isinstance(failure, Exception) else RuntimeError(type(failure).__name__)

    # --- whether the log can be used

    def _heard(self, what: Heard) -> None:
        """What the log has answered a round; called on the threads of the rounds."""
        if what == "claimed" or not self._refused:
            self._usable()
        if what == "looked":
            with self._standing:
                first, self._looked = not self._looked, True
            if first:
                self._say_backlog()

    def _usable(self) -> None:
        with self._standing:
            again = self._failures > 0
            self._failures = 0
            self._refused = False
            self._reachable = True
            self._reasons.clear()
            if again:
                _say(logging.INFO, "available", "the log can be used again")

    def _failed(self, error: Exception) -> float:
        """Something failed that may pass: say so once for each reason; return the seconds until the next try."""
        line = line_of(error)
        reason = _NONCE.sub("#", line)
        with self._standing:
            self._failures = min(self._failures + 1, 16)
            self._reachable = False
            longest = min(MAX_BACKOFF, self._interval * 2.0 ** (self._failures - 1))
            if reason not in self._reasons and len(self._reasons) < MAX_REASONS:
                self._reasons.add(reason)
                _say(logging.ERROR, "unavailable", f"{line}; trying again", error=type(error).__name__)
        return longest * self._draw.uniform(0.5, 1.0)

    def _say_backlog(self) -> None:
        """What the first look has found."""
        backlog = self._recoverer.tally.numbers().backlog
        by_status = {each: backlog.get(each, 0) for each in get_args(Standing)}
        unfinished = sum(by_status.values())
        found = ", ".join(f"{count:,} {each}" for each, count in by_status.items() if count)
        said = f"{counted(unfinished, 'saga')} not ended: {found}" if unfinished else "every saga has ended"
        _say(logging.INFO, "looked", said, unfinished=unfinished, by_status=by_status)

    # --- findings

    def _found(self, saga_id: str, verdict: str, reason: str) -> None:
        """A saga has a verdict; called on the threads of the rounds."""
        if verdict == "live":  # perhaps our own, in a round that waits
            return
        with self._telling:
            if self._told.get(saga_id) == (verdict, reason):
                return
            if verdict != "recovered" or self._dry_run:
                self._told[saga_id] = (verdict, reason)
        word = "would recover" if verdict == "recovered" and self._dry_run else verdict
        said = f"{word} {saga_id}: {reason}" if reason else f"{word} {saga_id}"
        _say(_LEVELS.get(verdict, logging.INFO), verdict, said, saga=saga_id, reason=reason, dry_run=self._dry_run)

    def _forget(self, still: set[str]) -> None:
        """What a round no longer met is told anew if it comes back."""
        if not self._dry_run:
            with self._telling:
                self._told = {saga_id: told for saga_id, told in self._told.items() if saga_id in still}

    # --- ending

    def _end(self) -> None:
        """Finish what is in hand, hand back what waits, close."""
        self._halt.set()
        for each in self._rounds:
            each.join()
        for log in (*self._idle, *(each.log for each in self._rounds)):
            _close(log)


def _close(log: Log) -> None:
    try:
        log.close()
    except Exception as error:  # one that failed says so once more when it is closed
        _logger.debug("closing: %s", line_of(error))


def _say(level: int, event: str, message: str, **facts: Any) -> None:
    _logger.log(level, "%s", plain(message), extra={"event": event, "facts": facts})


class _Lines(logging.Formatter):
    """A line per event, for people."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`; no line is ever broken."""
        return f"{_time(record)} {record.levelname} {plain(record.getMessage())}"


class _JsonLines(logging.Formatter):
    """A JSON object per event."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        line = {"time": _time(record), "level": record.levelname, "event": getattr(record, "event", "log")}
        facts: dict[str, Any] = getattr(record, "facts", {})
        return msgspec.json.encode({**line, **facts, "message": record.getMessage()}).decode()


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def _logging_to(stream: TextIO, as_json: bool) -> Generator[None]:
    """Everything that agent-saga logs goes to `stream`, once, whatever the imported modules configure."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonLines() if as_json else _Lines())
    former = _logger.level, _logger.propagate
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    _logger.propagate = False
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        _logger.level, _logger.propagate = former
