"""What the engine may ask a driver to do. Every effect is answered with a value; none raises into a generator."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

__all__ = [
    "Append",
    "Blocking",
    "Call",
    "CallKind",
    "CancelRunning",
    "CurrentStep",
    "Draft",
    "Effect",
    "Flow",
    "Flush",
    "Outcome",
    "Sleep",
    "Transition",
    "Wait",
    "Write",
]


class CurrentStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool or compensator body can know about the step it runs in."""

    saga_id: str
    number: int
    tool: str
    attempt: int
    direction: Literal["forward", "compensation"]
    idempotency_key: str


class Outcome:
    """How a call ended: a value, or an error."""

    __slots__ = ("around", "error", "never_started", "still_running", "value")

    def __init__(
        self,
        value: Any = None,
        error: BaseException | None = None,
        *,
        never_started: bool = False,
        still_running: bool = False,
        around: BaseException | None = None,
    ) -> None:
        self.value = value
        self.error = error
        self.never_started = never_started
        """The callable was not called at all: nothing can have happened."""
        self.still_running = still_running
        """The caller gave up waiting, the callable goes on in a thread; `Call.late` will hear how it ends."""
        self.around = around
        """What was being handled where the call was made: the context of `error`, and no part of it."""


Draft: TypeAlias = tuple[str, dict[str, Any]]
"""A record that has no number yet: its type and its data."""
Transition: TypeAlias = tuple[Sequence[Draft], Any]
"""What a decision comes to: the records to append, and the answer to the engine."""
Decision: TypeAlias = Callable[[], Transition]


class Append:
    """Decide, append, fold: one critical section under the saga's lock. Answered with the decision's second value.

    `decide` looks at the run and returns the records to append, as (type, data), and the answer.
    """

    __slots__ = ("decide",)

    def __init__(self, decide: Decision) -> None:
        self.decide = decide


class Flush:
    """Everything appended so far becomes durable.

    With `heed`, answered with the cancellation that came meanwhile, or None; without it the driver keeps the
    cancellation until the flow has ended.
    """

    __slots__ = ("heed",)

    def __init__(self, *, heed: bool = False) -> None:
        self.heed = heed


class Write:
    """Everything appended so far survives this process (`durability="relaxed"`)."""

    __slots__ = ()


CallKind: TypeAlias = Literal["forward", "compensation", "probe", "approve"]


class Call:
    """Call user code, awaiting what it returns if that is awaitable. Answered with an `Outcome`.

    Only a forward call sees the saga as the current one. `late` is driven with the outcome of a call that was given
    up and went on.
    """

    __slots__ = ("current", "fn", "kind", "late", "offload", "timeout", "token")

    def __init__(
        self,
        kind: CallKind,
        fn: Callable[[], Any],
        *,
        current: CurrentStep | None = None,
        timeout: float | None = None,
        offload: bool = False,
        token: object = None,
        late: Callable[[Outcome], Flow[Any]] | None = None,
    ) -> None:
        self.kind: CallKind = kind
        self.fn = fn
        self.current = current
        self.timeout = timeout
        self.offload = offload
        self.token = token
        self.late = late


class Sleep:
    """Let `seconds` pass on the log's clock; `why` is for the person who waits."""

    __slots__ = ("seconds", "why")

    def __init__(self, seconds: float, why: str = "") -> None:
        self.seconds = seconds
        self.why = why


class Wait:
    """Wait until `ready()` (looked at under the saga's lock, whenever a record or a running call changes something).

    Answered with whether it came true within `timeout` seconds. A step's wait that is cancelled is answered with the
    cancellation itself.
    """

    __slots__ = ("ready", "timeout")

    def __init__(self, ready: Callable[[], bool], timeout: float | None) -> None:
        self.ready = ready
        self.timeout = timeout


class CancelRunning:
    """Ask the running async forward calls of `scope`, and of savepoints inside it, to stop."""

    __slots__ = ("scope",)

    def __init__(self, scope: str) -> None:
        self.scope = scope


class Blocking:
    """Do the log's own blocking work (claim, release). Answered with an `Outcome`."""

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.fn = fn


Effect: TypeAlias = Append | Flush | Write | Call | Sleep | Wait | CancelRunning | Blocking
T = TypeVar("T")
Flow: TypeAlias = Generator[Effect, Any, T]
