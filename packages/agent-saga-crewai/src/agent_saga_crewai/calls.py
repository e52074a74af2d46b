"""One call that CrewAI makes of a wrapped tool, and what becomes of it: a step, once, however often it is executed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from crewai.flow.flow_context import current_flow_method_name, current_flow_name
from crewai.tools.tool_failure import ToolFailure
from crewai.utilities.string_utils import sanitize_tool_name

from agent_saga_core import current_saga
from agent_saga_core.errors import SagaAborted, SagaNotRunning
from agent_saga_core.state import StepStatus
from agent_saga_core.wrapping import CallSite, ToolRunner, equal_args, runner_of
from agent_saga_crewai.adapter import NAME
from agent_saga_crewai.numbers import Numbers, numbers_of

__all__ = ["CALL", "FrameworkCall", "ToolReportedFailure", "aperform", "perform", "runner_in"]


class ToolReportedFailure(Exception):
    """A tool returned CrewAI's `ToolFailure` instead of raising: to the saga, its call failed.

    Only a declaration's `not_applied=` predicate meets it; the framework gets the tool's own `ToolFailure`.

    Attributes:
        failure: What the tool returned.
    """

    def __init__(self, failure: ToolFailure) -> None:
        super().__init__(failure.as_agent_message())
        self.failure = failure


class FrameworkCall:
    """One call that the framework makes of a tool, however often it then executes it."""

    __slots__ = (
        "_error",
        "_execution",
        "_failed_with",
        "_finished",
        "_key",
        "_numbers",
        "_refused",
        "_running",
        "done",
        "entered",
        "kept",
        "known",
        "name",
        "number",
        "parent",
        "runner",
        "scope",
    )

    def __init__(
        self,
        name: str,
        runner: ToolRunner | None,
        scope: str,
        number: int,
        numbers: Numbers,
        parent: FrameworkCall | None,
        *,
        known: bool,
    ) -> None:
        self.name = name
        self.runner = runner
        self.scope = scope
        self.number = number
        self.parent = parent
        self.known = known  # the framework has said which tool it calls
        self.done = False
        self.entered = False  # a wrapped tool was executed for it
        self.kept = False  # its number names the scope of other calls
        self._numbers = numbers
        self._execution: object = None
        self._running = False
        self._key: str | None = None
        self._finished: tuple[Mapping[str, Any], Any] | None = None
        self._error: Exception | None = None
        self._failed_with: Mapping[str, Any] | None = None
        self._refused: Exception | None = None

    def is_of(self, runner: ToolRunner) -> bool:
        """Whether it is this tool that the framework is calling, and not the tool that is calling it."""
        if self.done or self._running:
            return False
        if self.known:
            return self.runner is runner
        return self.name == sanitize_tool_name(runner.spec.tool)

    @property
    def path(self) -> str:
        """The scope of what is called inside of this call."""
        return f"{self.scope}/{self.name}#{self.number}"

    @property
    def site(self) -> CallSite:
        """Where the call is made."""
        return CallSite(NAME, self.scope, call_id=str(self.number))

    @property
    def inner_site(self) -> CallSite:
        """Where a tool that this one calls by itself is called."""
        return CallSite(NAME, self.path, body=self._execution)

    def begin(self, args: Mapping[str, Any]) -> tuple[Any] | None:
        """Begin to execute the tool; what it returned if the framework executes a finished call once more.

        Raises:
            Exception: It was refused before, or it failed and was undone. The framework tries three times and more; the
                model is told once, and it counts once.
        """
        self.entered = True
        if self._refused is not None:
            raise self._error if self._error is not None else self._refused
        if self._error is not None and self._was_undone(args):
            raise self._error
        if self._finished is not None and equal_args(self._finished[0], args):
            return (self._finished[1],)
        self._failed_with = args
        self._execution = object()
        self._running = True
        return None

    def refuse(self, refusal: Exception) -> None:
        """Let the tool not be executed, whatever the framework tries."""
        self._refused = refusal

    def finish(self, args: Mapping[str, Any], result: Any) -> Any:
        """Remember what the tool returned."""
        self._running = False
        self._finished, self._error = (args, result), None
        return result

    def failed(self, error: Exception) -> Exception:
        """What the framework is to hear of a failed execution: of a refusal behind a failure, the failure."""
        self._running = False
        if isinstance(error, SagaAborted | SagaNotRunning):
            self._refused = error
            return self._error if self._error is not None else error
        self._error = error
        return error

    def made(self, key: str) -> None:
        """The tool is being called, under this idempotency key."""
        self._key = key

    @property
    def forward_key(self) -> str | None:
        """Under which key it was made, if it has returned; empty if the log has given its result back."""
        return (self._key or "") if self._finished is not None else None

    def end(self) -> None:
        """The framework is done with this call."""
        self.done = True
        if not self.kept and self._finished is None and self._left_nothing():
            self._numbers.give_back(self.scope, self.name, self.number)

    def _left_nothing(self) -> bool:
        """Whether made again it is the next attempt of the same step: never made, or settled as if it had not been."""
        if not self.entered or self._key is None:
            return True
        return self._status() in (StepStatus.NOT_APPLIED, StepStatus.COMPENSATED)

    def _was_undone(self, args: Mapping[str, Any]) -> bool:
        """Whether its last execution failed and was undone: it is not made once more unless somebody asks for it."""
        failed = self._failed_with
        return failed is not None and equal_args(failed, args) and self._status() is StepStatus.COMPENSATED

    def _status(self) -> StepStatus | None:
        """What became of the step that it made last."""
        saga = current_saga()
        steps = saga.steps if saga is not None else ()
        return next((step.status for step in steps if step.forward_key == self._key), None)


CALL: ContextVar[FrameworkCall | None] = ContextVar("agent_saga_crewai_call", default=None)


def _site_of(call: FrameworkCall | None) -> CallSite | None:
    """Where a tool is called that the framework is not calling: from another tool, or from the body of a flow."""
    if call is not None and not call.done:
        call.kept = True
        return call.inner_site
    flow, method = current_flow_name.get(), current_flow_method_name.get()
    saga = current_saga()
    if not flow or saga is None:
        return None
    return CallSite(NAME, f"{numbers_of(saga).prefix}flow:{flow}.{method}")


def perform(runner: ToolRunner, args: Mapping[str, Any], invoke: Callable[[str], Any]) -> Any:
    """Make a call as a step of the open saga, or straight through where there is none.

    A `ToolFailure` that the tool returns is a failed call to the saga, and is returned all the same.
    """
    if runner.saga() is None:  # a compensation, too, which runs in the middle of the call that it settles
        return runner.run(args, invoke)
    call = CALL.get()
    try:
        if call is None or not call.is_of(runner):
            return runner.run(args, _reporting(invoke), site=_site_of(call))
        again = call.begin(args)
        if again is not None:
            return again[0]
        try:
            return call.finish(args, runner.run(args, _reporting(invoke, call), site=call.site))
        except Exception as error:
            heard = call.failed(error)
            if heard is error:
                raise
            raise heard from None
    except ToolReportedFailure as reported:
        return reported.failure


async def aperform(runner: ToolRunner, args: Mapping[str, Any], invoke: Callable[[str], Awaitable[Any]]) -> Any:
    """`perform` on the running loop."""
    if runner.saga() is None:
        return await runner.arun(args, invoke)
    call = CALL.get()
    try:
        if call is None or not call.is_of(runner):
            return await runner.arun(args, _areporting(invoke), site=_site_of(call))
        again = call.begin(args)
        if again is not None:
            return again[0]
        try:
            return call.finish(args, await runner.arun(args, _areporting(invoke, call), site=call.site))
        except Exception as error:
            heard = call.failed(error)
            if heard is error:
                raise
            raise heard from None
    except ToolReportedFailure as reported:
        return reported.failure


def _reporting(invoke: Callable[[str], Any], call: FrameworkCall | None = None) -> Callable[[str], Any]:
    def report(key: str) -> Any:
        if call is not None:
            call.made(key)
        result = invoke(key)
        if isinstance(result, ToolFailure):
            raise ToolReportedFailure(result)
        return result

    return report


def _areporting(
    invoke: Callable[[str], Awaitable[Any]], call: FrameworkCall | None = None
) -> Callable[[str], Awaitable[Any]]:
    async def report(key: str) -> Any:
        if call is not None:
            call.made(key)
        result = await invoke(key)
        if isinstance(result, ToolFailure):
            raise ToolReportedFailure(result)
        return result

    return report


def runner_in(tool: object) -> ToolRunner | None:
    """The runner of a tool, in whatever form CrewAI has brought it."""
    found = runner_of(tool)
    if found is None:
        found = runner_of(getattr(tool, "_original_tool", None)) or runner_of(getattr(tool, "func", None))
    return found
