"""A recovery of a log: which sagas, in which order, how many at once, and which have to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Literal, NamedTuple

from agent_saga_core.engine.effects import Blocking, Flow, Outcome
from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log.base import BatchClaims, Log, Unfinished
from agent_saga_core.records import FINAL
from agent_saga_core.recovery.backoff import LONGEST_DELAY, Backoff
from agent_saga_core.recovery.claims import Claims
from agent_saga_core.recovery.handlers import Try, needs_of, tries_of
from agent_saga_core.recovery.job import Job, Seen, begin, found_live, go_on, look
from agent_saga_core.recovery.report import RecoveryReport, Verdict, check_known
from agent_saga_core.recovery.tally import Tally
from agent_saga_core.registry import compensator_named

__all__ = ["Heard", "Look", "Progress", "Recoverer", "Recovery", "Stage"]

Progress = Callable[[str, str, str], None]
Heard = Literal["listed", "looked", "claimed"]
"""What a recovery has had from its log: the list of what is unfinished, a look at all of that, a saga to write to."""


class Recoverer:
    """One process that recovers, over all its rounds and logs.

    Attributes:
        turns: What a saga needs to be rolled back: all rounds together roll back `concurrency` at once. One that only
            waits for what is in doubt needs none.
        backoff: The compensators that fail, as far as this process knows.
        tally: What it has seen and done.

    Args:
        concurrency: How many sagas to roll back at once.
        seed: What its own order of sagas is drawn from; None: the order of the log. With an order of their own, many
            recoverers of one log do not all reach for the same saga.
    """

    def __init__(self, *, concurrency: int = 1, seed: bytes | None = None) -> None:
        self.concurrency = max(1, concurrency)
        self.turns = threading.Semaphore(self.concurrency)
        self.backoff = Backoff()
        self.tally = Tally()
        self._draw = None if seed is None else Random(seed)
        self._lock = threading.Lock()
        self._waited: dict[str, _Waited] = {}

    def ordered(self, jobs: list[Job]) -> list[Job]:
        """The jobs in this process's own order."""
        if self._draw is None:
            return jobs
        own = list(jobs)
        with self._lock:
            self._draw.shuffle(own)
        return own

    def seen(self, log: Log, seen: Seen) -> None:
        """A compensation was recorded here."""
        self.tally.compensated(seen)
        if seen.called:
            now = log.clock.time()
            self.backoff.ended(Try(seen.saga_id, seen.n, seen.handler, seen.outcome == "compensated", now), log.clock)

    def waits(self, job: Job) -> None:
        """The saga waits for a compensator that fails."""
        with self._lock:
            self._waited.setdefault(job.saga_id, _Waited(job.needs))

    def takes(self, saga_id: str) -> None:
        """This process begins the saga: what becomes of it is known here."""
        with self._lock:
            self._waited.pop(saga_id, None)

    def compare(self, log: Log, jobs: list[Job]) -> frozenset[str]:
        """What became of the sagas that waited when this process last looked.

        One that is over may tell that its compensator works again. One that is live is being tried by somebody else:
        the compensators that it needs are returned, for no longer than the longest delay.
        """
        now = log.clock.monotonic()
        by_id = {job.saga_id: job for job in jobs}
        elsewhere: set[str] = set()
        over: dict[str, str] = {}
        with self._lock:
            for saga_id, waited in list(self._waited.items()):
                job = by_id.get(saga_id)
                if job is None or job.gone:
                    del self._waited[saga_id]
                    over.update(dict.fromkeys(waited.needs, saga_id))
                elif job.standing != "live":
                    del self._waited[saga_id]  # it is known anew
                else:
                    waited.live_since = now if waited.live_since is None else waited.live_since
                    if now - waited.live_since < LONGEST_DELAY:
                        elsewhere |= waited.needs
        failing = self.backoff.failing()
        for saga_id in {saga_id for handler, saga_id in over.items() if handler in failing}:
            self.learn(log, saga_id)
        return frozenset(elsewhere)

    def learn(self, log: Log, saga_id: str) -> None:
        """Read a saga that is over for the compensators that worked in it."""
        try:
            records = log.read(saga_id)
        except LogCorrupted:
            return
        if not records or records[-1].type not in FINAL:
            return
        for done in {each.handler: each for each in tries_of(saga_id, records) if each.ok}.values():
            if compensator_named(done.handler) is not None:
                self.backoff.ended(done, log.clock)


class _Waited:
    """A saga that waited for compensators that fail."""

    def __init__(self, needs: frozenset[str]) -> None:
        self.needs = needs
        self.live_since: float | None = None


class Look(NamedTuple):
    """Jobs to look at, in whatever order."""

    look: Callable[[Job], None]
    jobs: list[Job]


class Stage(NamedTuple):
    """Jobs to drive through a flow, in this order; each takes a turn."""

    flow: Callable[[Job], Flow[None]]
    jobs: list[Job]


class Recovery:
    """The jobs of one recovery, and the order in which they are taken. Somebody else drives them.

    An explicit one (`retry`) begins them all. One of a watch first looks at all of them, learns which compensators
    fail, and then begins those that need none of these; of the others, one for each that is due.
    """

    def __init__(
        self,
        log: Log,
        saga_id: str | None,
        *,
        recoverer: Recoverer,
        dry_run: bool,
        retry: bool,
        progress: Progress | None,
        heard: Callable[[Heard], None] | None = None,
    ) -> None:
        self.log = log
        self._recoverer = recoverer
        self._dry_run = dry_run
        self._retry = retry
        self._progress = progress
        self._heard = heard
        self._telling = threading.Lock()
        self._began = log.clock.monotonic()
        self._elsewhere: frozenset[str] = frozenset()
        self._mine: dict[str, str] = {}
        self._named = saga_id is not None
        if saga_id is not None:
            check_known(log, saga_id)
            unfinished = Unfinished(saga_ids=(saga_id,), live=frozenset())
        else:
            unfinished = log.unfinished()
        self._hear("listed")
        claims = Claims(log) if isinstance(log, BatchClaims) and recoverer.concurrency > 1 else None
        make = partial(
            Job,
            log,
            asked=retry,
            named=self._named,
            claims=claims,
            tell=partial(recoverer.seen, log),
            claimed=partial(self._hear, "claimed"),
        )
        # In the order of the log: where all recoverers have to choose the same saga, they choose by that.
        self.jobs = [make(found) for found in dict.fromkeys(unfinished.saga_ids)]
        self._ask = not self._named and unfinished.live is None
        live = _trusted(unfinished)
        for job in self.jobs:
            if job.saga_id in live:
                job.standing = "live"
                job.ends("live")

    def stages(self) -> Iterator[Look | Stage | float]:
        """What to do, one after the other: jobs to take, or seconds to let pass. Ask for the next when that is done."""
        for job in self.jobs:
            if job.verdict is not None:
                self._tell(job)
        if not self._retry:
            yield Look(self._look, [job for job in self.jobs if job.verdict is None])
            self._looked()
        while ready := self._ready():
            yield Stage(self._first, self._recoverer.ordered(ready))
        while (pause := self._pause()) is not None:
            yield pause
            yield Stage(self._again, self._due())
        self._recoverer.tally.round_over()

    # --- looking

    def _look(self, job: Job) -> None:
        look(job, ask=self._ask)
        self._tell(job)

    def _looked(self) -> None:
        recoverer, clock = self._recoverer, self.log.clock
        if not self._named:
            self._elsewhere = recoverer.compare(self.log, self.jobs)
        # Only of names that are known here: whatever else a log names must not fill this process.
        tries = [each for job in self.jobs for each in job.tries if compensator_named(each.handler) is not None]
        everything = None if self._named else {job.saga_id for job in self.jobs}
        recoverer.backoff.heard(tries, clock, began=self._began, everything=everything)
        recoverer.tally.looked(self.jobs, clock.time(), all_of_them=not self._named)
        for job in self.jobs:
            job.tries = ()
        if not self._named:
            self._hear("looked")

    # --- beginning

    def _ready(self) -> list[Job]:
        """The sagas that may be begun now. If there are none, those that wait for a compensator are told so."""
        waiting = [job for job in self.jobs if job.verdict is None and not job.begun]
        if self._retry:
            return waiting
        held, due = self._recoverer.backoff.state(self.log.clock)
        held |= self._elsewhere
        self._mine = {}
        # Certain ones first: the one that tries is not to wait for what may still land before it can tell.
        ready = [job for job in sorted(waiting, key=lambda job: job.doubtful) if self._may_begin(job, held, due)]
        for job in [] if ready else waiting:
            self._wait(job)
        return ready

    def _may_begin(self, job: Job, held: frozenset[str], due: frozenset[str]) -> bool:
        """Whether none of its compensators fails, or it is the first that needs those that are due."""
        tries = job.needs & due
        if job.needs & held or (not self._dry_run and any(name in self._mine for name in tries)):
            return False
        self._mine.update(dict.fromkeys(tries, job.saga_id))
        return True

    def _first(self, job: Job) -> Flow[None]:
        recoverer = self._recoverer
        mine = frozenset(name for name, saga_id in self._mine.items() if saga_id == job.saga_id)
        if self._retry:
            asked: Outcome = yield Blocking(partial(self._found_live, job))
            if asked.error is not None:
                raise asked.error
            if asked.value:
                self._tell(job)
                return
        elif not (self._dry_run or recoverer.backoff.enter(job.needs, job.saga_id, self.log.clock, mine=mine)):
            return  # it began to fail a moment ago: this one waits, too
        job.begun = True
        recoverer.takes(job.saga_id)
        try:
            yield from begin(job, dry_run=self._dry_run)
        finally:
            recoverer.backoff.leave(job.saga_id)
        if mine and job.verdict == "live":
            self._elsewhere |= mine  # another recoverer tries it
        elif mine and job.gone:
            yield Blocking(partial(recoverer.learn, self.log, job.saga_id))
        self._tell(job)

    def _found_live(self, job: Job) -> bool:
        return self._ask and found_live(job)

    # --- waiting

    def _again(self, job: Job) -> Flow[None]:
        recoverer = self._recoverer
        if not self._retry:
            job.needs = needs_of(job.run.fold)
            if not recoverer.backoff.enter(job.needs, job.saga_id, self.log.clock):
                yield Blocking(job.hand_back)
                self._wait(job)
                return
        try:
            yield from go_on(job)
        finally:
            recoverer.backoff.leave(job.saga_id)
        self._tell(job)

    def _wait(self, job: Job) -> None:
        job.standing = "waiting"
        job.ends("untouched", self._recoverer.backoff.reason(job.needs))
        self._recoverer.waits(job)
        self._recoverer.tally.stands(job.saga_id, "waiting")
        self._tell(job)

    def _pause(self) -> float | None:
        """Seconds until the next saga that waits is due; None if none waits."""
        wakes = [job.wake for job in self.jobs if job.verdict is None and job.wake is not None]
        return max(0.0, min(wakes) - self.log.clock.monotonic()) if wakes else None

    def _due(self) -> list[Job]:
        now = self.log.clock.monotonic()
        return [job for job in self.jobs if job.verdict is None and job.wake is not None and job.wake <= now]

    # --- ending

    def _hear(self, what: Heard) -> None:
        if self._heard is not None:
            self._heard(what)

    def _tell(self, job: Job) -> None:
        recoverer = self._recoverer
        if job.verdict is None:
            if job.wake is not None:
                recoverer.tally.stands(job.saga_id, "waiting")
            return
        if job.begun and not self._dry_run:
            recoverer.tally.ended(job)
        if self._progress is not None and not job.gone:
            with self._telling:
                self._progress(job.saga_id, job.verdict, job.reason)

    def hand_back(self) -> None:
        """Give up everything that is owned, as it stands."""
        for job in self.jobs:
            job.hand_back()

    def report(self) -> RecoveryReport:
        """What it came to."""

        def of(verdict: Verdict) -> tuple[str, ...]:
            return tuple(job.saga_id for job in self.jobs if job.verdict == verdict and not job.gone)

        return RecoveryReport(
            recovered=of("recovered"),
            attention=of("attention"),
            untouched=of("untouched"),
            live=of("live"),
            damaged=of("damaged"),
            reasons={job.saga_id: job.reason for job in self.jobs if job.reason and not job.gone},
        )


def _trusted(unfinished: Unfinished) -> frozenset[str]:
    """The live ones that need not be looked at: not those that damage may concern, which is said of them."""
    live = unfinished.live or frozenset()
    suspects = [damage.saga_ids for damage in unfinished.damage]
    if any(ids is None for ids in suspects):
        return frozenset()
    return live - {saga_id for ids in suspects for saga_id in ids or ()}
