"""What a framework tells the saga of a run about the calls that are made in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from agent_saga_core.declare import StepSpec
from agent_saga_core.engine.run import CallSite
from agent_saga_core.errors import SagaAborted

if TYPE_CHECKING:
    from agent_saga_core.saga.scope import Saga

__all__ = ["Frame"]


class Frame(Protocol):
    """What the calls in a saga learn from the framework that runs its body.

    A wrapped tool of the framework brings its own place. A plain saga function, or `Saga.execute`, called in the
    framework's nodes or steps knows nothing of it: the frame of the saga says where the call is made, by which
    exceptions it may be paused, and whom to ask. Every savepoint has the frame of the scope around it.
    """

    @property
    def pauses(self) -> tuple[type[BaseException], ...]:
        """The exceptions by which the framework leaves a body that it will run again: no savepoint fails by one."""
        ...

    def place(
        self, saga: Saga, spec: StepSpec, args: Mapping[str, Any], site: CallSite | None, *, named: bool
    ) -> tuple[StepSpec, CallSite | None, Callable[..., Any] | None]:
        """The declaration, place and gate of a call that is about to be made.

        Args:
            saga: The scope that it is made in.
            spec: Its declaration.
            args: Its arguments by name.
            site: Its place, if whoever makes it knows one.
            named: Whether it has a key or id of its own, so that no place is needed.
        """
        ...

    def refuse(self, saga: Saga, refusal: SagaAborted) -> SagaAborted:
        """What the framework hears when a call is refused because the saga can no longer commit."""
        ...
