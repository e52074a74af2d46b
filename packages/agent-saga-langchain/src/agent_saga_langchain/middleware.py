"""`SagaMiddleware`: a whole toolset of `create_agent`, wrapped by a mapping. Needs the extra `[agents]`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.tools import BaseTool

from agent_saga_core import DeclarationError, current_saga
from agent_saga_core.wrapping import Declaration, runner_of
from agent_saga_langchain.pauses import end_refused_run
from agent_saga_langchain.seats import made_for
from agent_saga_langchain.tools import WrappedOnce

try:
    from langchain.agents.middleware import AgentMiddleware
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "SagaMiddleware is middleware of create_agent, and langchain is not installed. "
        "Run: pip install 'agent-saga-langchain[agents]'",
        name=missing.name,
    ) from missing

if TYPE_CHECKING:
    from langchain.agents.middleware import ModelRequest, ToolCallRequest
    from langgraph.runtime import Runtime

__all__ = ["SagaMiddleware"]


class SagaMiddleware(AgentMiddleware[Any, Any, Any]):
    """Makes an agent's tool calls steps of the saga that the agent runs in; outside of one it changes nothing.

    Put it last among the agent's middleware: what stands behind it, nearer to the tools, is not seen by it.

    A tool that is neither wrapped nor in the mapping is refused inside a saga, before anything of it happens. When the
    saga has refused three calls because it is being rolled back, the run is ended before the model is asked again.

    What stands before it may make a call again, also after the tool has returned: that is the same call, and gives back
    what is recorded.

    Not seen: what tools, middleware and nodes call besides the agent's own tools.

    Args:
        tools: For each tool's name its declaration, or the tool, wrapped.
        unknown: `"allow"` lets tools run that nothing is declared about: outside of the saga, and never undone.

    Raises:
        DeclarationError: A tool in the mapping is not wrapped.
    """

    def __init__(
        self, tools: Mapping[str, Declaration | BaseTool], *, unknown: Literal["refuse", "allow"] = "refuse"
    ) -> None:
        super().__init__()
        if unknown not in ("refuse", "allow"):
            raise ValueError('unknown is "refuse" or "allow".')
        self.unknown = unknown
        self._declared: dict[str, Declaration | BaseTool] = dict(tools)
        self._wrapped = WrappedOnce()
        for name, declared in self._declared.items():
            if isinstance(declared, BaseTool) and runner_of(declared) is None:
                raise DeclarationError(f"{name!r} is not wrapped. Give its declaration, or wrap_tool(...) of it.")

    def wrapped(self, tool: BaseTool) -> BaseTool | None:
        """What runs in place of a tool of the agent; None if nothing is declared about it.

        Raises:
            DeclarationError: Its declaration could not keep the promises.
        """
        if runner_of(tool) is not None:
            return tool
        declared = self._declared.get(tool.name)
        if declared is None or isinstance(declared, BaseTool):
            return declared
        return self._wrapped.of(tool, declared)

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """Run a tool call as a step of the saga.

        Raises:
            DeclarationError: Inside a saga, of a tool that nothing is declared about.
        """
        with made_for(request.tool_call):
            return handler(self._framed(request))

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        """`wrap_tool_call` on the running loop."""
        with made_for(request.tool_call):
            return await handler(self._framed(request))

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        """Show the model the tools as they are wrapped: without the `idempotency_key`, which is ours to give."""
        return handler(self._shown(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]
    ) -> Any:
        """`wrap_model_call` on the running loop."""
        return await handler(self._shown(request))

    def before_model(self, state: Any, runtime: Runtime[Any]) -> None:
        """End the run of a model that calls on although it is refused.

        Raises:
            SagaAborted: The saga has refused three calls.
        """
        saga = current_saga()
        if saga is not None:
            end_refused_run(saga)

    async def abefore_model(self, state: Any, runtime: Runtime[Any]) -> None:
        """`before_model` on the running loop."""
        self.before_model(state, runtime)

    def _framed(self, request: ToolCallRequest) -> ToolCallRequest:
        tool = request.tool
        if tool is None:  # no tool of that name: the agent says so
            return request
        wrapped = self.wrapped(tool)
        if wrapped is None and self.unknown == "refuse" and current_saga() is not None:
            raise DeclarationError(
                f"{tool.name!r} is not a saga tool, and was not called. Declare it in SagaMiddleware({{{tool.name!r}: "
                "...}) or wrap it; if it has no effect, with semantics=ActionSemantics.READ_ONLY."
            )
        return request if wrapped is None or wrapped is tool else request.override(tool=wrapped)

    def _shown(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        shown = [self._shown_tool(tool) for tool in request.tools]
        changed = any(one is not other for one, other in zip(shown, request.tools, strict=True))
        return request.override(tools=shown) if changed else request

    def _shown_tool(self, tool: BaseTool | dict[str, Any]) -> BaseTool | dict[str, Any]:
        if not isinstance(tool, BaseTool):  # a provider's own tool
            return tool
        wrapped = self.wrapped(tool)
        runner = runner_of(wrapped)
        return wrapped if wrapped is not None and runner is not None and runner.takes_key else tool
