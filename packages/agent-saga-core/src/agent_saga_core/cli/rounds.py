"""One recovery on a thread of its own, so that the main thread is free for signals and for the screen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from agent_saga_core.errors import SagaError
from agent_saga_core.log.base import Log, WatchedLeases
from agent_saga_core.recovery import Heard, Recoverer, RecoveryReport, recover_as
from agent_saga_core.state import StepStatus, fold

__all__ = ["InDoubt", "Round", "in_doubt", "merged"]


class Round(threading.Thread):
    """A recovery under way. A daemon thread: a compensator that never returns does not keep the process.

    Attributes:
        log: The log it works on; nothing else may use it meanwhile.
        halt: When set, no further saga is begun and those that wait are handed back.
        report: What it came to, once it has ended.
        error: What ended it instead.
        ended: Whether there will be no more of it.
        taken: Whether every saga that it may begin has its turn: then it holds up no other round.
        number: Which one it is, of those of a watch.
        listed: Whether the log has answered it: it has heard what is unfinished.
        claimed: Whether it has owned a saga, and so written to the log.
        decided: Whether it has found out, if it was to, that every saga that it left as live has an owner that lives.
    """

    def __init__(
        self,
        log: Log,
        sagas: Sequence[str] = (),
        *,
        halt: threading.Event,
        recoverer: Recoverer,
        dry_run: bool,
        retry: bool,
        progress: Callable[[str, str, str], None],
        at_end: Callable[[], None],
        number: int = 0,
        heard: Callable[[Heard], None] | None = None,
        decide: bool = False,
    ) -> None:
        super().__init__(name="agent-saga-recovery", daemon=True)
        self.log = log
        self.number = number
        self.halt = halt
        self.report: RecoveryReport | None = None
        self.error: BaseException | None = None
        self.ended = False
        self.listed = self.claimed = self.decided = False
        self._heard = heard
        self._decide = decide
        self._sagas: Sequence[str] = tuple(dict.fromkeys(sagas))
        # Several that are named are taken one after the other, waits included: the next round goes on beside them.
        self.taken = len(self._sagas) > 1
        self._concurrency = recoverer.concurrency
        self._recover = partial(
            recover_as,
            recoverer,
            log,
            dry_run=dry_run,
            retry=retry,
            stop=halt,
            progress=progress,
            taken=self._all_taken,
            heard=self._hear,
        )
        self._at_end = at_end

    def run(self) -> None:
        """Recover; whatever happens is kept for the main thread."""
        try:
            report = self._run()
            self.decided = self._decide and not _undecided(self.log, report.live)
            self.report = report
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._at_end()

    def _all_taken(self) -> None:
        self.taken = True

    def _hear(self, what: Heard) -> None:
        self.listed = True
        self.claimed = self.claimed or what == "claimed"
        if self._heard is not None:
            self._heard(what)

    def _run(self) -> RecoveryReport:
        match self._sagas:
            case ():
                return self._recover()
            case (saga_id,):
                return self._recover(saga_id=saga_id)
            case several:
                with ThreadPoolExecutor(max_workers=min(self._concurrency, len(several))) as pool:
                    return merged(list(pool.map(self._one, several)))

    def _one(self, saga_id: str) -> RecoveryReport:
        return self._recover(saga_id=saga_id)


def _undecided(log: Log, live: Sequence[str]) -> bool:
    """Whether some of them may be called live only because nobody has watched their owners' leases yet."""
    return bool(live) and isinstance(log, WatchedLeases) and log.undecided(live) > 0


def merged(reports: Sequence[RecoveryReport]) -> RecoveryReport:
    """One report of several, whose sagas are different ones."""
    return RecoveryReport(
        recovered=tuple(found for report in reports for found in report.recovered),
        attention=tuple(found for report in reports for found in report.attention),
        untouched=tuple(found for report in reports for found in report.untouched),
        live=tuple(found for report in reports for found in report.live),
        damaged=tuple(found for report in reports for found in report.damaged),
        reasons={saga_id: reason for report in reports for saga_id, reason in report.reasons.items()},
    )


class InDoubt(msgspec.Struct, frozen=True):
    """A step whose call may still land, so that its saga is waited for."""

    saga_id: str
    step: int
    tool: str
    seconds: float
    """How long its recoverer waits, from its claim on."""

    def __str__(self) -> str:
        return f"saga {self.saga_id!r}: step {self.step} {self.tool} may still land"


def in_doubt(log: Log, saga_id: str) -> Iterator[InDoubt]:
    """What a recovery of this process waits for in a saga that it owns; nothing while it can go on."""
    if not log.owned(saga_id):
        return
    try:
        folded = fold(log.read(saga_id), saga_id)
    except SagaError:
        return  # the recovery meets it too, and reports it
    for step, attempt in folded.open_attempts():
        if attempt.status in (StepStatus.INTENDED, StepStatus.UNKNOWN) and not attempt.accepted:
            yield InDoubt(saga_id, step.number, step.tool, attempt.in_doubt)
