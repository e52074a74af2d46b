"""For a `ToolNode` whose tools cannot be wrapped one by one: wraps each where it is called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from langchain_core.tools import BaseTool
from langgraph.prebuilt.tool_node import ToolCallRequest

from agent_saga_core import current_saga
from agent_saga_core.errors import DeclarationError
from agent_saga_core.wrapping import Declaration, runner_of
from agent_saga_langchain.seats import made_for
from agent_saga_langchain.tools import WrappedOnce

__all__ = ["ToolCallHooks", "hooks_of"]


class ToolCallHooks:
    """Makes every call of a `ToolNode` inside of a saga a step, by the tool's name.

    `ToolNode(tools, wrap_tool_call=hooks.wrap_tool_call, awrap_tool_call=hooks.awrap_tool_call)`. Each call is made
    with a wrapped copy of its tool, so that everything that holds for `wrap_tool` holds here; the node and its tools
    are untouched. A tool that is wrapped already is called as it is.

    Args:
        declarations: What is declared about each tool, by its name.
        allow: Names of tools that may be called as they are, outside of any step. Inside of a saga, all others that
            have no declaration are refused.

    Raises:
        DeclarationError: A tool stands in both.
    """

    def __init__(self, declarations: Mapping[str, Declaration], *, allow: Iterable[str] = ()) -> None:
        self._declarations = dict(declarations)
        self._allowed = frozenset(allow)
        self._wrapped = WrappedOnce()
        both = sorted(self._allowed & self._declarations.keys())
        if both:
            raise DeclarationError(f"{', '.join(map(repr, both))}: declared and allowed. Leave one of the two out.")

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """The hook for `ToolNode(wrap_tool_call=...)`.

        Raises:
            DeclarationError: Inside of a saga, the tool has no declaration and is not allowed without one. Nothing was
                called.
        """
        with made_for(request.tool_call):
            return handler(self._with_wrapped(request))

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        """The hook for `ToolNode(awrap_tool_call=...)`; as `wrap_tool_call`."""
        with made_for(request.tool_call):
            return await handler(self._with_wrapped(request))

    def wrapped(self, tool: BaseTool) -> BaseTool | None:
        """The tool that a call of this one is made with; None if such a call is refused.

        Raises:
            DeclarationError: Its declaration could not keep the promises.
        """
        if runner_of(tool) is not None or tool.name in self._allowed:
            return tool
        declaration = self._declarations.get(tool.name)
        return self._wrapped.of(tool, declaration) if declaration is not None else None

    def _with_wrapped(self, request: ToolCallRequest) -> ToolCallRequest:
        tool = request.tool
        if tool is None:  # the model has invented it, and the node will say so
            return request
        found = self.wrapped(tool)
        if found is None and current_saga() is None:
            return request
        if found is None:
            raise DeclarationError(
                f"{tool.name!r} has no declaration here, and was not called. Declare it, with "
                "semantics=ActionSemantics.READ_ONLY if it has no effect, or name it in allow=."
            )
        return request if found is tool else request.override(tool=found)


def hooks_of(node: Any) -> ToolCallHooks | None:
    """The hooks that are around a `ToolNode`'s calls, sync or async; None for others."""
    for attribute in ("_wrap_tool_call", "_awrap_tool_call"):
        owner = getattr(getattr(node, attribute, None), "__self__", None)
        if isinstance(owner, ToolCallHooks):
            return owner
    return None
