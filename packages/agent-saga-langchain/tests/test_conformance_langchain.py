"""The adapter suite over `create_agent`, with LangChain's own way of exceptions and with one that swallows them.

No `from __future__ import annotations`: LangChain resolves annotations by a function's globals alone.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware, ToolRetryMiddleware
from langchain.tools import ToolRuntime
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphBubbleUp
from langgraph.types import Command

from agent_saga_core.testing.adapters import AdapterConformance, AdapterHarness, Entry, Ran, Script
from agent_saga_langchain import asaga_run, asaga_stream, coverage, saga_run, saga_stream, wrap_tool


class Player(BaseChatModel):
    """A model that plays the suite's script."""

    script: Any

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    @property
    def _llm_type(self) -> str:
        return "script"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        turn = self.script.play([m.text for m in messages if isinstance(m, ToolMessage)])
        if isinstance(turn, str):
            message = AIMessage(turn)
        else:
            calls = [{"name": c.name, "args": dict(c.args), "id": c.id, "type": "tool_call"} for c in turn]
            message = AIMessage("", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])


class Swallow(AgentMiddleware):
    """Tells the model of every exception, as many agents do."""

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        try:
            return handler(request)
        except GraphBubbleUp:
            raise
        except Exception as error:
            return self._told(request, error)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        try:
            return await handler(request)
        except GraphBubbleUp:
            raise
        except Exception as error:
            return self._told(request, error)

    def _told(self, request: Any, error: Exception) -> ToolMessage:
        call = request.tool_call
        return ToolMessage(str(error), name=call["name"], tool_call_id=call["id"], status="error")


class Harness(AdapterHarness):
    entries = (
        Entry("invoke"),
        Entry("stream", streams=True),
        Entry("ainvoke", is_async=True),
        Entry("astream", is_async=True, streams=True),
    )
    swallows = False
    retrying = Entry("retry")
    middleware: Sequence[Any] = ()

    def runs(self, entry: Entry, is_async: bool) -> bool:
        return entry.is_async or not is_async

    def tool(self, fn: Callable[..., Any], *, pauses: bool = False) -> BaseTool:
        made = tool(fn)
        if pauses:
            made.metadata = {"pauses": True}
        return made

    def wrap(self, tool: BaseTool, **declaration: Any) -> BaseTool:
        return wrap_tool(tool, **declaration)

    def agent(self, tools: Sequence[Any], script: Script, **more: Any) -> Any:
        more.setdefault("middleware", [*self.middleware])
        return create_agent(Player(script=script), list(tools), **more)

    def run(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        retry = ToolRetryMiddleware(max_retries=2, initial_delay=0, jitter=False, on_failure="error")
        more = {"middleware": [retry]} if entry.name == "retry" else {}
        agent, given = self.agent(tools, script, **more), {"messages": [HumanMessage("go")]}
        if entry.streams:
            stream = saga_stream(agent, given, **scope, stream_mode="values") if saga else agent.stream(
                given, stream_mode="values"
            )  # fmt: skip
            return self._streamed(list(stream))
        return self._ran(saga_run(agent, given, **scope) if saga else agent.invoke(given))

    async def arun(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        agent, given = self.agent(tools, script), {"messages": [HumanMessage("go")]}
        if entry.streams:
            stream = asaga_stream(agent, given, **scope, stream_mode="values") if saga else agent.astream(
                given, stream_mode="values"
            )  # fmt: skip
            return self._streamed([piece async for piece in stream])
        return self._ran(await asaga_run(agent, given, **scope) if saga else await agent.ainvoke(given))

    def _ran(self, result: Any) -> Ran:
        return Ran(text=result["messages"][-1].text, raw=result)

    def _streamed(self, pieces: list[Any]) -> Ran:
        return Ran(text=pieces[-1]["messages"][-1].text, raw=pieces)

    def leave(self, entry: Entry, tools: Sequence[Any], script: Script, **scope: Any) -> None:
        agent, given = self.agent(tools, script), {"messages": [HumanMessage("go")]}
        if not entry.is_async:
            with closing(saga_stream(agent, given, **scope, stream_mode="values")) as stream:
                next(piece for piece in stream if isinstance(piece["messages"][-1], ToolMessage))
            return

        async def leave() -> None:
            async with aclosing(asaga_stream(agent, given, **scope, stream_mode="values")) as stream:
                async for piece in stream:
                    if isinstance(piece["messages"][-1], ToolMessage):
                        break

        asyncio.run(leave())

    def call(self, tool: BaseTool, args: Mapping[str, Any]) -> Any:
        if getattr(tool, "coroutine", None) is not None:
            return asyncio.run(tool.ainvoke(dict(args)))
        return tool.invoke(dict(args))

    def face(self, tool: BaseTool) -> Mapping[str, object]:
        fields = {name: getattr(tool, name) for name in type(tool).model_fields if name not in ("func", "coroutine")}
        return {**fields, "shown to the model": convert_to_openai_tool(tool), "args": tool.args}

    def shown(self, tool: BaseTool) -> set[str]:
        return set(convert_to_openai_tool(tool)["function"]["parameters"]["properties"])

    def coverage(self, agent: Any) -> Any:
        return coverage(agent)

    def results(self, ran: Ran) -> Sequence[object]:
        messages = (ran.raw[-1] if isinstance(ran.raw, list) else ran.raw)["messages"]
        return [(m.content, m.artifact, m.status, m.name) for m in messages if isinstance(m, ToolMessage)]

    def rich_tools(self) -> Sequence[tuple[Any, Mapping[str, Any]]]:
        return [
            (StructuredTool.from_function(picture, response_format="content_and_artifact"), {"item": "x"}),
            (StructuredTool.from_function(blocks), {"item": "x"}),
            (StructuredTool.from_function(commanding), {"item": "x"}),
        ]

    def injected(self, seen: Callable[[object], object]) -> BaseTool:
        @tool
        def injected(item: str, runtime: ToolRuntime) -> str:
            """Be given the runtime."""
            seen(runtime)
            return item

        return injected

    def pause(self, tools: Sequence[Any], script: Script, **scope: Any) -> Any:
        pausing = {tool.name: True for tool in tools if tool.metadata}
        more = {"middleware": [HumanInTheLoopMiddleware(interrupt_on=pausing)], "checkpointer": InMemorySaver()}
        agent = self.agent(tools, script, **more)
        config: Any = {"configurable": {"thread_id": uuid.uuid4().hex}}
        result = saga_run(agent, {"messages": [HumanMessage("go")]}, config, **scope)
        assert "__interrupt__" in result
        return agent, config, scope["saga_id"]

    def resume(
        self, paused: Any, tools: Sequence[Any], script: Script, *, args: Mapping[str, Any] | None = None, **scope: Any
    ) -> Ran:
        agent, config, saga_id = paused
        decision: dict[str, Any] = {"type": "approve"}
        if args is not None:
            decision = {"type": "edit", "edited_action": {"name": "pay", "args": dict(args)}}
        answer: Any = Command(resume={"decisions": [decision]})
        return self._ran(saga_run(agent, answer, config, saga_id=saga_id, resume="continue", **scope))


def picture(item: str) -> tuple[str, dict[str, Any]]:
    """Draw an item."""
    return f"a picture of {item}", {"bytes": [1, 2, 3], "item": item}


def blocks(item: str) -> list[dict[str, Any]]:
    """Describe an item in blocks."""
    return [{"type": "text", "text": item}, {"type": "text", "text": "and no more"}]


def commanding(item: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
    """Change the agent's state."""
    return Command(update={"messages": [ToolMessage(f"took {item}", tool_call_id=tool_call_id, name="commanding")]})


class SwallowingHarness(Harness):
    swallows = True
    middleware = (Swallow(),)


class TestLangchain(AdapterConformance):
    @pytest.fixture
    def harness(self) -> AdapterHarness:
        return Harness()


class TestLangchainThatSwallowsExceptions(AdapterConformance):
    @pytest.fixture
    def harness(self) -> AdapterHarness:
        return SwallowingHarness()
