"""A saga in this process, or a savepoint in it: what it was made with, what it stands for, and what it tells."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from agent_saga_core import values
from agent_saga_core.engine.calls import site_in
from agent_saga_core.engine.run import CallSite, Options, Run
from agent_saga_core.errors import SagaNotRunning
from agent_saga_core.log.base import Log
from agent_saga_core.saga.frame import Frame
from agent_saga_core.state import Report, SagaStatus, StepState

if TYPE_CHECKING:
    import asyncio

__all__ = ["SagaBase"]

T = TypeVar("T")


class SagaBase:
    """What is known of a scope: its saga, its savepoint, its options. `Saga` makes steps in it and ends it."""

    def __init__(
        self,
        saga_id: str | None,
        *,
        name: str,
        log: Log | str | None,
        options: Options,
        orphan_after: float = 0.0,
        busy_timeout: float = 0.0,
        independent: bool = False,
        metadata: Mapping[str, Any] | None = None,
        parent: SagaBase | None = None,
    ) -> None:
        self._asked_id = saga_id
        self._name = name
        self._asked_log = log
        self._options = options
        self._orphan_after = orphan_after
        self._busy_timeout = busy_timeout
        self._independent = independent
        self._metadata = metadata
        self._parent: SagaBase | None = parent
        self._before: SagaBase | None = None
        self._around: tuple[Any, Any, Any] = (None, None, ())
        self._opened: Run | None = None
        self._pid = 0
        self._scope = ""
        self._child: SagaBase | None = None
        self._children = 0
        self._blocks: asyncio.AbstractEventLoop | None = None
        self._held: list[asyncio.CancelledError] = []
        self._own_report: Report | None = None
        self.frame: Frame | None = None
        """For adapters: set before the scope is entered. A savepoint takes over that of the scope around it."""

    # --- what it tells

    @property
    def id(self) -> str:
        """The saga's id; drawn when the scope is opened, if none was given.

        Raises:
            SagaNotRunning: It is not open yet and has no id.
        """
        if self._opened is not None:
            return self._opened.saga_id
        if self._asked_id is None:
            raise SagaNotRunning("This saga is not open yet. Enter the scope first: `with saga_scope() as saga:`.")
        return self._asked_id

    @property
    def status(self) -> SagaStatus:
        """Where the saga stands now."""
        run = self._run
        with run.lock:
            status = run.fold.status
            return SagaStatus.RUNNING if status is SagaStatus.SUSPENDED and not run.suspended else status

    @property
    def steps(self) -> tuple[StepState, ...]:
        """The steps of this scope as they stand now, in the order of their first intents."""
        run = self._run
        with run.lock:
            return tuple(found.view() for found in run.fold.steps if found.within(self._scope))

    @property
    def report(self) -> Report | None:
        """What the end of the scope came to; None until it has ended."""
        if self._opened is None:
            return None
        if self._scope:
            return self._own_report
        with self._opened.lock:
            return self._opened.fold.report()

    @property
    def scope(self) -> str:
        """The savepoint's path within the saga; empty for the saga itself."""
        return self._scope

    @property
    def takes_steps(self) -> bool:
        """Whether new steps may start in it, and it may still commit."""
        run = self._run
        with run.lock:
            return run.fold.rollback_only is None and not (run.replay_only or run.over or run.suspended)

    @property
    def has_gate(self) -> bool:
        """Whether this scope, or one around it, was opened with `approve=`."""
        return self._gate is not None

    @property
    def _gate(self) -> Callable[..., Any] | None:
        """The `approve=` of the nearest scope that was given one."""
        own = self._options.approve
        return own if own is not None or self._parent is None else self._parent._gate

    @property
    def _aborts(self) -> bool:
        return self._options.on_failure == "abort" or (self._parent is not None and self._parent._aborts)

    @property
    def goes_on(self) -> bool:
        """Whether it was opened with `resume="continue"`: the body does not run again from its top."""
        return self._run.options.resume == "continue"

    @property
    def rollback_only(self) -> str | None:
        """Why it can no longer commit; None if it can."""
        run = self._run
        with run.lock:
            return run.fold.rollback_only

    def recorded_sites(self, adapter: str) -> tuple[tuple[str, CallSite], ...]:
        """Tool and place of every call of this saga that an adapter has made, in the order of the first intents."""
        run = self._run
        with run.lock:
            found = [site_in(step.identity) for step in run.fold.steps]
        return tuple(one for one in found if one is not None and one[1].adapter == adapter)

    def shared(self, make: Callable[[], T]) -> T:
        """What `make` made when it was first asked for here: one for all savepoints, a new one at the next opening."""
        run = self._run
        with run.lock:
            if make not in run.shelf:
                run.shelf[make] = make()
            made: T = run.shelf[make]
            return made

    @property
    def refusals(self) -> int:
        """How many calls were refused because the saga takes no new step."""
        return self._run.refusals

    @property
    def metadata(self) -> dict[str, Any]:
        """The data stored with it, as they were given; `Redacted()` stands for a secret."""
        found = values.decode(self._run.fold.metadata, strict=False)
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    @property
    def _run(self) -> Run:
        if self._opened is None:
            raise SagaNotRunning("This saga is not open yet. Enter the scope first: `with saga_scope() as saga:`.")
        return self._opened

    def _is_open(self) -> bool:
        run = self._opened
        return run is not None and self._pid == os.getpid() and not run.over and not run.suspended

    def same_as(self, other: SagaBase) -> bool:
        """Whether both are the same saga, be it in different savepoints."""
        return self._opened is not None and self._opened is other._opened

    def _stepping(self) -> Run:
        run = self._run
        if self._pid != os.getpid():
            raise SagaNotRunning(
                f"saga {run.saga_id!r} belongs to the process that opened it, not to this forked child. "
                "Open a saga of its own in the child.",
                saga_id=run.saga_id,
            )
        return run
