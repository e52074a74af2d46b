"""One wrapped tool: what is declared about it, and the way every call of it takes, sync and async."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Required, TypedDict, cast

from agent_saga_core import registry
from agent_saga_core.declare import ActionSemantics, Inverse, NotAppliedRule, StepSpec
from agent_saga_core.drive import CURRENT_STEP, STRAIGHT
from agent_saga_core.engine.run import CallSite
from agent_saga_core.errors import BoundaryRequired, SagaNotRunning
from agent_saga_core.registry import accepts_key, annotations_of
from agent_saga_core.saga import Saga, current_saga

__all__ = ["REFUSALS", "Bound", "Declaration", "ToolRunner", "runner_of", "runner_under"]

REFUSALS = 3
"""Calls that a saga refuses before an adapter ends the run: its model does not listen."""


class Declaration(TypedDict, total=False):
    """What is declared about a tool: the arguments of `saga_tool` and of every `wrap_tool`, which has the name."""

    semantics: Required[ActionSemantics | str]
    compensate: Inverse
    key: str | Callable[[dict[str, Any]], str] | None
    timeout: float | None
    not_applied: NotAppliedRule | Iterable[NotAppliedRule]
    probe: Callable[[dict[str, Any], str], Any] | str | None
    in_doubt: float | None
    result_type: Any
    offload: bool
    require_saga: bool


class Bound(NamedTuple):
    """A running saga that a tool is bound to."""

    saga: Saga
    beats_context: bool


class ToolRunner:
    """One wrapped tool, shared by all copies of the tool object.

    Args:
        tool: The tool's name.
        declaration: What is declared about it.
        adapter: The framework's name; empty for a plain function.
        fn: The function underneath, if there is one: its annotations say how arguments and result are rebuilt, an
            inverse may be paired with it, and it may take an `idempotency_key`.
        hints: The annotations of the tool's parameters. Default: those of `fn`.
        result_type: The type that a recorded result is rebuilt through, unless one is declared. Default: what `fn` is
            annotated to return.
        interrupts: The exceptions by which the framework pauses a call, to make it again later.

    Raises:
        DeclarationError: The declaration could not keep the promises; its last sentence says what to write.
    """

    __slots__ = ("__weakref__", "adapter", "bound", "spec", "takes_key")

    def __init__(
        self,
        tool: str,
        declaration: Declaration,
        *,
        adapter: str = "",
        fn: Callable[..., Any] | None = None,
        hints: Mapping[str, Any] | None = None,
        result_type: Any = None,
        interrupts: tuple[type[BaseException], ...] = (),
    ) -> None:
        found = annotations_of(fn) if fn is not None else {}
        given = dict(declaration)
        if given.get("compensate") is None and fn is not None:
            given["compensate"] = registry.paired_inverse(fn)
        if given.get("result_type") is None:
            given["result_type"] = result_type if result_type is not None else found.get("return")
        self.spec = StepSpec.declared(
            tool, **cast(Any, given), hints=hints if hints is not None else found, interrupts=interrupts
        )
        self.adapter = adapter
        self.takes_key = fn is not None and accepts_key(fn)
        self.bound: tuple[Bound, ...] = ()

    def __copy__(self) -> ToolRunner:
        return self

    def __deepcopy__(self, memo: object) -> ToolRunner:
        return self  # copies of the tool object are the same tool, bound together

    def __repr__(self) -> str:
        return f"ToolRunner({self.spec.tool!r}, {self.spec.semantics})"

    def saga(self) -> Saga | None:
        """The saga that a call made here belongs to; None to call straight through.

        Raises:
            BoundaryRequired: The tool is bound to a running saga, and which one this call belongs to cannot be told.
            SagaNotRunning: There is none, and the declaration requires one.
        """
        current = current_saga()
        if self.bound:
            return self._bound_saga(current)
        if current is None and self.spec.require_saga and not STRAIGHT.get():
            raise SagaNotRunning(
                f"{self.spec.tool!r} was called outside of a saga and is declared with require_saga=True. "
                "Call it inside `with saga_scope():`."
            )
        return current

    def run(
        self,
        args: Mapping[str, Any],
        invoke: Callable[[str], Any],
        *,
        site: CallSite | None = None,
        approve: Callable[..., Any] | None = None,
    ) -> Any:
        """Make a call: a step of the saga it belongs to, or straight through where there is none.

        Args:
            args: The arguments by name that a caller can give: recorded, and what identity and undo are taken from.
            invoke: Makes the call, given its idempotency key; outside of a saga that is a fresh one if the function
                takes one, else empty. An awaitable that it returns inside of a saga is awaited.
            site: Where the framework made the call.
            approve: Asked instead of the scope's own gate.

        Raises:
            BoundaryRequired: See `saga`.
            SagaAborted: The saga is rollback-only: no further calls.
            Exception: The tool's own, unchanged; and what `Saga.execute` names.
        """
        saga = self.saga()
        if saga is None:
            return invoke(self._key_outside())
        return saga.run_step(self.spec, args, invoke, site=site, approve=approve)

    async def arun(
        self,
        args: Mapping[str, Any],
        invoke: Callable[[str], Any],
        *,
        site: CallSite | None = None,
        approve: Callable[..., Any] | None = None,
    ) -> Any:
        """`run` on the running loop; what `invoke` returns is awaited."""
        saga = self.saga()
        if saga is None:
            return await invoke(self._key_outside())
        return await saga.arun_step(self.spec, args, invoke, site=site, approve=approve)

    def _key_outside(self) -> str:
        """Where nobody gives a key: the compensation's own inside one (it repeats), else a fresh one."""
        if not self.takes_key:
            return ""
        step = CURRENT_STEP.get()
        return step.idempotency_key if step is not None else os.urandom(20).hex()

    def _bound_saga(self, current: Saga | None) -> Saga | None:
        if current is None and STRAIGHT.get():
            return None
        strong = [bound.saga for bound in self.bound if bound.beats_context]
        if not strong:
            if current is not None:
                return current
            raise BoundaryRequired(
                f"{self.spec.tool!r} belongs to a running saga and was called where that saga cannot be told. "
                "Submit the call through fleet.bind(executor), or wrap what calls it in carry(fn)."
            )
        if any(not saga.same_as(strong[0]) for saga in strong):
            raise BoundaryRequired(
                f"{self.spec.tool!r} is bound to two running sagas at once, and this call may belong to either. "
                "Give each run tools of its own: wrap the tool once for each."
            )
        # The innermost binding: a run inside of a run is a savepoint of it.
        return current if current is not None and current.same_as(strong[-1]) else strong[-1]


def runner_under(fn: object) -> ToolRunner | None:
    """`runner_of` a function, or of the one in a partial of it."""
    while fn is not None:
        found = runner_of(fn)
        if found is not None:
            return found
        fn = fn.func if isinstance(fn, partial) else None
    return None


def runner_of(tool: object) -> ToolRunner | None:
    """What a wrapped tool carries; None for one that is not wrapped."""
    found = getattr(tool, "__agent_saga__", None)
    return found if isinstance(found, ToolRunner) else None
