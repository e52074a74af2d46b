"""`recover` and `arecover`: a recovery driven by threads, or on a loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from agent_saga_core.drive import adrive, asleep, drive
from agent_saga_core.engine.effects import Flow
from agent_saga_core.lazy import LazyModule
from agent_saga_core.log.base import Log
from agent_saga_core.recovery.job import Job
from agent_saga_core.recovery.recoverer import Heard, Look, Progress, Recoverer, Recovery, Stage
from agent_saga_core.recovery.report import RecoveryReport, log_of
from agent_saga_core.signals import SignalHold

if TYPE_CHECKING:
    import asyncio
    from concurrent import futures
else:
    asyncio = LazyModule("asyncio")
    futures = LazyModule("concurrent.futures")

__all__ = ["arecover", "recover", "recover_as"]


def recover(
    log: Log | str,
    *,
    saga_id: str | None = None,
    dry_run: bool = False,
    concurrency: int = 1,
    retry: bool = True,
    stop: threading.Event | None = None,
    progress: Progress | None = None,
) -> RecoveryReport:
    """Finish what dead processes left: roll back every saga that nobody owns.

    Never touches a saga whose owner lives. A call whose process died in it may still land: recovery waits `in_doubt`
    seconds, counted from its own claim, before it calls such a step absent; all those waits run at once. Compensators
    are found by name, so the modules that register them must have been imported; a saga with a missing one is left
    untouched. When this raises, sagas that were begun are handed back as they stand.

    On the main thread, SIGINT and SIGTERM are heard between two sagas and during the wait for what is in doubt, not in
    the middle of a rollback.

    Args:
        log: A log, or the URL of one that exists.
        saga_id: Only this saga.
        dry_run: Change nothing, and tell what would be done. As far as it can be known: what is recorded may say that a
            person is needed, but no compensator and no probe is called to see whether it works.
        concurrency: How many sagas to roll back at once. Those that only wait do not count.
        retry: Give what needs attention three new tries, and call every compensator at once. Without it, as in
            `recover --watch`, a compensator that failed in other sagas is given time first.
        stop: When set, no further saga is begun, and those that wait are handed back.
        progress: Called with (saga id, verdict, reason) as each saga ends; from any thread, one call at a time.

    Raises:
        SagaNotFound: There is no such saga.
        LogUnavailable: The log cannot be read or written.
    """
    opened, ours = log_of(log)
    try:
        return recover_as(
            Recoverer(concurrency=concurrency),
            opened,
            saga_id=saga_id,
            dry_run=dry_run,
            retry=retry,
            stop=stop,
            progress=progress,
        )
    finally:
        if ours:
            opened.close()


def recover_as(
    recoverer: Recoverer,
    log: Log,
    *,
    saga_id: str | None = None,
    dry_run: bool = False,
    retry: bool = False,
    stop: threading.Event | None = None,
    progress: Progress | None = None,
    taken: Callable[[], None] | None = None,
    heard: Callable[[Heard], None] | None = None,
) -> RecoveryReport:
    """One round of a recoverer. See `recover`.

    `taken` is called, on any thread, when every saga that may be begun has its turn: from then on this round holds up
    no other. `heard` is called, on any thread, with what the log has answered.
    """
    stopped = stop if stop is not None else threading.Event()
    recovery: Recovery | None = None
    try:
        recovery = Recovery(
            log, saga_id, recoverer=recoverer, dry_run=dry_run, retry=retry, progress=progress, heard=heard
        )
        for stage in recovery.stages():
            match stage:
                case Look(look, jobs):
                    _each(partial(_look, look, stopped), jobs, recoverer)
                case Stage(flow, jobs):
                    turns = _Turns(recoverer, len(jobs), taken)
                    _each(partial(_roll_back, flow, turns, stopped), jobs, recoverer)
                case seconds:
                    log.clock.wait(stopped, seconds)
            if stopped.is_set():
                break
        return recovery.report()
    finally:
        if recovery is not None:
            recovery.hand_back()


class _Turns:
    """The turns of one stage: tells when the last of its jobs has got one."""

    def __init__(self, recoverer: Recoverer, jobs: int, taken: Callable[[], None] | None) -> None:
        self._turns = recoverer.turns
        self._left = threading.Semaphore(jobs - 1) if jobs else None
        self._taken = taken

    @contextmanager
    def one(self) -> Generator[None]:
        with self._turns:
            if self._taken is not None and self._left is not None and not self._left.acquire(blocking=False):
                self._taken()
            yield


def _each(work: Callable[[Job], None], jobs: list[Job], recoverer: Recoverer) -> None:
    threads = min(recoverer.concurrency, len(jobs))
    if threads <= 1:
        for job in jobs:
            work(job)
        return
    with futures.ThreadPoolExecutor(max_workers=threads, thread_name_prefix="agent-saga-recover") as pool:
        for _ in pool.map(work, jobs):
            pass


def _look(look: Callable[[Job], None], stopped: threading.Event, job: Job) -> None:
    if not stopped.is_set():
        look(job)


def _roll_back(flow: Callable[[Job], Flow[None]], turns: _Turns, stopped: threading.Event, job: Job) -> None:
    with turns.one():
        if stopped.is_set():
            return
        interruptions: list[BaseException] = []
        with SignalHold(interruptions):  # a Ctrl-C in a compensator is no failure of the compensation
            drive(flow(job), job.run)
        if job.run.exit_by is not None:
            interruptions.insert(0, job.run.exit_by)
        if interruptions:
            raise interruptions[0]


async def arecover(
    log: Log | str,
    *,
    saga_id: str | None = None,
    dry_run: bool = False,
    concurrency: int = 1,
    retry: bool = True,
    progress: Progress | None = None,
) -> RecoveryReport:
    """Like `recover`, with compensators called and awaited on the running loop.

    A cancellation is heard between two compensations' records, never in the middle of one; sagas that were begun are
    then handed back as they stand.
    """
    opened, ours = (await asyncio.to_thread(log_of, log)) if isinstance(log, str) else (log, False)
    recovery: Recovery | None = None
    try:
        recoverer = Recoverer(concurrency=concurrency)
        make = partial(Recovery, recoverer=recoverer, dry_run=dry_run, retry=retry, progress=progress)
        recovery = await asyncio.to_thread(partial(make, opened, saga_id))
        for stage in recovery.stages():
            match stage:
                case Look(look, jobs):
                    await _aeach(partial(asyncio.to_thread, look), jobs, concurrency)
                case Stage(flow, jobs):
                    await _aeach(partial(_aroll_back, flow), jobs, concurrency)
                case seconds:
                    await asleep(seconds, opened.clock)
        return recovery.report()
    finally:
        if recovery is not None:
            recovery.hand_back()
        if ours:
            opened.close()


async def _aeach(work: Callable[[Job], Coroutine[Any, Any, None]], jobs: list[Job], concurrency: int) -> None:
    turns = asyncio.Semaphore(max(1, concurrency))

    async def one(job: Job) -> None:
        async with turns:
            await work(job)

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(one(job))


async def _aroll_back(flow: Callable[[Job], Flow[None]], job: Job) -> None:
    held: list[asyncio.CancelledError] = []
    await adrive(flow(job), job.run, held, shield=True)
    if held:
        raise held[0]
