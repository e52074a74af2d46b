"""`SagaWorkbench`: any workbench, whose calls are steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Literal, Self, cast

from autogen_core import CancellationToken, ComponentModel
from autogen_core.tools import (
    BaseStreamTool,
    StaticStreamWorkbench,
    StaticWorkbench,
    TextResultContent,
    ToolResult,
    ToolSchema,
    Workbench,
)

from agent_saga_autogen.adapter import NAME
from agent_saga_autogen.calls import in_saga, make_call, saga_of
from agent_saga_core import DeclarationError, SagaError
from agent_saga_core.wrapping import Declaration, ToolRunner, runner_of

__all__ = ["SagaWorkbench", "WorkbenchToolFailed"]


class WorkbenchToolFailed(Exception):
    """A workbench answered a call with an error result; what the step of the call ended with.

    A declaration's `not_applied` may look at it. The agent gets the result as it is.

    Attributes:
        result: What the workbench answered.
    """

    def __init__(self, result: ToolResult) -> None:
        super().__init__(result.to_text(replace_image="[image]"))
        self.result = result


class SagaWorkbench(Workbench):
    """A workbench whose calls are steps of the saga that they are made in.

    Inside a saga, a tool with a declaration is called as a step, and one without is refused. Whatever goes wrong is an
    error result: an agent waits for ever for a workbench that raises. Outside of a saga, every call and every exception
    is the other workbench's own. Its tools, state, start and stop are the other one's, and so is its component:
    `load_component` gives the other workbench, not wrapped.

    The step's result is the `ToolResult`: an inverse says `undo(..., id="args.id")`, or `"result.result[0].content"`.
    Where a workbench is made of tools of your own, wrap those instead.

    Args:
        workbench: Any workbench; used, not copied.
        tools: What is declared of each tool, by the name under which the workbench lists it.
        undeclared: What happens inside a saga to a tool without a declaration: `"refuse"`, or `"allow"` to call it
            straight through, as no step of anything.

    Raises:
        DeclarationError: A declaration could not keep the promises, the workbench is wrapped already, or one of its
            tools is.
    """

    def __new__(cls, workbench: Workbench, *_: Any, **__: Any) -> Self:
        """Make one that an agent reads piece by piece, if it would do so with `workbench`."""
        if cls is SagaWorkbench and isinstance(workbench, StaticStreamWorkbench):
            return cast(Self, object.__new__(_StaticSagaWorkbench))
        return object.__new__(cls)

    def __init__(
        self,
        workbench: Workbench,
        tools: Mapping[str, Declaration],
        *,
        undeclared: Literal["refuse", "allow"] = "refuse",
    ) -> None:
        if isinstance(workbench, SagaWorkbench):
            raise DeclarationError("This workbench is wrapped already. Wrap the plain workbench once.")
        if undeclared not in ("refuse", "allow"):
            raise ValueError('undeclared is "refuse" or "allow".')
        wrapped = [tool.name for tool in _static_tools(workbench) if runner_of(tool) is not None and tool.name in tools]
        if wrapped:
            raise DeclarationError(f"The tools {wrapped} of this workbench are wrapped already. Declare each once.")
        self.workbench = workbench
        self.undeclared = undeclared
        self.runners = {
            name: ToolRunner(name, declaration, adapter=NAME, result_type=ToolResult)
            for name, declaration in tools.items()
        }

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        cancellation_token: CancellationToken | None = None,
        call_id: str | None = None,
    ) -> ToolResult:
        """Call a tool: a step inside a saga, straight through outside of one."""
        token = cancellation_token if cancellation_token is not None else CancellationToken()

        async def call() -> ToolResult:
            return await self.workbench.call_tool(name, arguments, token, call_id)

        return await self._called(name, arguments or {}, token, call_id, call)

    async def call_tool_stream(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        cancellation_token: CancellationToken | None = None,
        call_id: str | None = None,
    ) -> AsyncGenerator[Any | ToolResult, None]:
        """Call a tool and read what it yields, the `ToolResult` last; one that cannot stream yields only that."""
        token = cancellation_token if cancellation_token is not None else CancellationToken()
        pieces: asyncio.Queue[Any] = asyncio.Queue()

        async def call() -> ToolResult:
            result: ToolResult | None = None
            async with aclosing(_stream(self.workbench, name, arguments, token, call_id)) as stream:
                async for piece in stream:
                    if isinstance(piece, ToolResult):
                        result = piece
                    else:
                        pieces.put_nowait(piece)
            if result is None:
                raise TypeError(f"The workbench gave no ToolResult for {name!r}.")
            return result

        ended = object()
        step = asyncio.ensure_future(self._called(name, arguments or {}, token, call_id, call, streams=True))
        step.add_done_callback(lambda _: pieces.put_nowait(ended))
        try:
            while (piece := await pieces.get()) is not ended:
                yield piece
            yield step.result()
        finally:
            if not step.done():
                step.cancel()
                await asyncio.wait({step})

    async def _called(
        self,
        name: str,
        arguments: Mapping[str, Any],
        token: CancellationToken,
        call_id: str | None,
        call: Callable[[], Any],
        *,
        streams: bool = False,
    ) -> ToolResult:
        runner = self.runners.get(name)
        if runner is None:
            if self.undeclared == "refuse" and (in_saga(token) or any(held.bound for held in self.runners.values())):
                return _error(name, f"{name!r} is not declared: inside a saga, only declared tools are called.")
            return cast(ToolResult, await call())
        try:
            saga = saga_of(runner, token)
        except SagaError as refused:
            return _error(name, str(refused))
        if saga is None or not self._is_callable(name, arguments, streams):
            return cast(ToolResult, await call())

        async def checked() -> ToolResult:
            result: ToolResult = await call()
            if result.is_error:
                raise WorkbenchToolFailed(result)
            return result

        try:
            made: Any = await make_call(runner, arguments, lambda _key: checked(), token=token, call_id=call_id)
        except WorkbenchToolFailed as failed:
            return failed.result
        except Exception as error:
            return _error(name, str(error) or type(error).__name__)
        return cast(ToolResult, made)

    def _is_callable(self, name: str, arguments: Mapping[str, Any], streams: bool) -> bool:
        """Whether the workbench would get as far as calling the tool; False leaves no step.

        Known only where AutoGen's own code comes before the tool: in a static workbench, of a tool that it validates.
        """
        called = "call_tool_stream" if streams and isinstance(self.workbench, StaticStreamWorkbench) else "call_tool"
        if not _is_autogens(self.workbench, called, StaticStreamWorkbench):
            return True
        renamed: Mapping[str, str] = getattr(self.workbench, "_override_name_to_original", {})
        # AutoGen's streaming call does not know the names that a workbench gives its tools.
        original = name if called == "call_tool_stream" else renamed.get(name, name)
        tool = next((tool for tool in _static_tools(self.workbench) if tool.name == original), None)
        if tool is None:
            return False
        called = "run_json_stream" if called == "call_tool_stream" and isinstance(tool, BaseStreamTool) else "run_json"
        if not _is_autogens(cast(Any, tool), called, BaseStreamTool):
            return True
        try:
            tool.args_type().model_validate(arguments)
        except Exception:
            return False
        return True

    async def list_tools(self) -> list[ToolSchema]:
        """The tools of the other workbench, as it lists them now."""
        return await self.workbench.list_tools()

    async def start(self) -> None:
        """Start the other workbench."""
        await self.workbench.start()

    async def stop(self) -> None:
        """Stop the other workbench."""
        await self.workbench.stop()

    async def reset(self) -> None:
        """Reset the other workbench."""
        await self.workbench.reset()

    async def save_state(self) -> Mapping[str, Any]:
        """The state of the other workbench."""
        return await self.workbench.save_state()

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the other workbench."""
        await self.workbench.load_state(state)

    def dump_component(self) -> ComponentModel:
        """The component of the other workbench."""
        return self.workbench.dump_component()


class _StaticSagaWorkbench(SagaWorkbench, StaticStreamWorkbench):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """An agent streams the calls of this class of workbench, and of no other."""

    def __getattr__(self, name: str) -> Any:
        if name == "workbench":  # not made yet
            raise AttributeError(name)
        return getattr(self.workbench, name)


def _is_autogens(found: object, method: str, framework: type[Any]) -> bool:
    """Whether a method is the one that `framework` has, not one of a class (or an object) of somebody else's."""
    return getattr(getattr(found, method, None), "__func__", None) is getattr(framework, method)


def _static_tools(workbench: Workbench) -> list[Any]:
    found: Any = getattr(workbench, "_tools", None) if isinstance(workbench, StaticWorkbench) else None
    return list(found or ())


def _error(name: str, text: str) -> ToolResult:
    return ToolResult(name=name, result=[TextResultContent(content=text)], is_error=True)


async def _stream(
    workbench: Workbench,
    name: str,
    arguments: Mapping[str, Any] | None,
    token: CancellationToken,
    call_id: str | None,
) -> AsyncGenerator[Any, None]:
    streaming: Any = getattr(workbench, "call_tool_stream", None)
    if streaming is None:
        yield await workbench.call_tool(name, arguments, token, call_id)
        return
    async with aclosing(cast("AsyncGenerator[Any, None]", streaming(name, arguments, token, call_id))) as stream:
        async for piece in stream:
            yield piece
