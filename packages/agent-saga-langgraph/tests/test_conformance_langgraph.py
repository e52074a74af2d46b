"""The suite that every adapter passes, on LangGraph: agents of `create_agent`, and ones built by hand."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware, ToolRetryMiddleware
from langchain_core.messages import ToolMessage
from langchain_core.tools import StructuredTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import ToolRuntime
from langgraph.types import Command

from agent_saga_core.testing.adapters import AdapterConformance, AdapterHarness, Entry, Ran, Script
from agent_saga_langgraph import asaga_run, asaga_stream, coverage, saga_run, saga_stream, wrap_tool

sys.path.insert(0, str(Path(__file__).parent))  # a killed child loads this file by its path

from langgraph_fakes import ScriptedModel, hand_built

GO: dict[str, Any] = {"messages": [("user", "go")]}
RETRYING = Entry("retrying")


class AgentHarness(AdapterHarness):
    """`create_agent`: no node of it swallows an exception."""

    entries = (
        Entry("invoke"),
        Entry("stream", streams=True),
        Entry("ainvoke", is_async=True),
        Entry("astream", is_async=True, streams=True),
    )
    swallows: ClassVar[bool] = False

    def runs(self, entry: Entry, is_async: bool) -> bool:
        return entry.is_async or not is_async

    def tool(self, fn: Callable[..., Any], *, pauses: bool = False) -> Any:
        made = tool(fn)
        return made.model_copy(update={"metadata": {"pauses": True}}) if pauses else made

    def wrap(self, tool: Any, **declaration: Any) -> Any:
        return wrap_tool(tool, **declaration)

    def agent(self, tools: Sequence[Any], script: Script, *, saver: Any = None, retrying: bool = False) -> Any:
        asks = {one.name: True for one in tools if (one.metadata or {}).get("pauses")}
        middleware: list[Any] = [HumanInTheLoopMiddleware(interrupt_on=asks)] if asks else []
        if retrying:
            middleware.append(ToolRetryMiddleware(max_retries=1, initial_delay=0, jitter=False))
        return create_agent(ScriptedModel(script=script), tools, middleware=middleware, checkpointer=saver)

    def run(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        graph = self.agent(tools, script, **({"retrying": True} if entry is RETRYING else {}))
        if entry.streams:
            pieces = (
                saga_stream(graph, GO, stream_mode="values", **scope)
                if saga
                else graph.stream(GO, stream_mode="values")
            )
            return _streamed(list(pieces))
        return _ran(saga_run(graph, GO, **scope) if saga else graph.invoke(GO))

    async def arun(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        graph = self.agent(tools, script)
        if entry.streams:
            if saga:
                pieces = asaga_stream(graph, GO, stream_mode="values", **scope)
            else:
                pieces = graph.astream(GO, stream_mode="values")
            return _streamed([piece async for piece in pieces])
        return _ran(await (asaga_run(graph, GO, **scope) if saga else graph.ainvoke(GO)))

    def leave(self, entry: Entry, tools: Sequence[Any], script: Script, **scope: Any) -> None:
        graph = self.agent(tools, script)

        async def leave() -> None:
            async with aclosing(asaga_stream(graph, GO, stream_mode="values", **scope)) as pieces:
                async for piece in pieces:
                    if isinstance(piece["messages"][-1], ToolMessage):
                        return

        if entry.is_async:
            asyncio.run(leave())
            return
        with closing(saga_stream(graph, GO, stream_mode="values", **scope)) as pieces:
            next(piece for piece in pieces if isinstance(piece["messages"][-1], ToolMessage))

    def call(self, tool: Any, args: Mapping[str, Any]) -> Any:
        if getattr(tool, "func", None) is None and getattr(tool, "coroutine", None) is not None:
            return asyncio.run(tool.ainvoke(dict(args)))
        return tool.invoke(dict(args))

    def face(self, tool: Any) -> Mapping[str, object]:
        fields = {name: getattr(tool, name) for name in type(tool).model_fields if name not in ("func", "coroutine")}
        return {**fields, "args": tool.args, "openai": convert_to_openai_tool(tool)}

    def shown(self, tool: Any) -> set[str]:
        return set(convert_to_openai_tool(tool)["function"]["parameters"]["properties"])

    def coverage(self, agent: Any) -> Any:
        return coverage(agent)

    def results(self, ran: Ran) -> Sequence[object]:
        messages = (ran.raw[-1] if isinstance(ran.raw, list) else ran.raw)["messages"]
        return [(one.content, one.artifact, one.status) for one in messages if isinstance(one, ToolMessage)]

    def rich_tools(self) -> Sequence[tuple[Any, Mapping[str, Any]]]:
        def measure(item: str) -> tuple[str, dict[str, Any]]:
            """Measure an item."""
            return f"{item} is long", {"length": 3, "unit": "m"}

        def say(item: str, runtime: ToolRuntime) -> ToolMessage:
            """Say an item."""
            return ToolMessage(f"this is {item}", tool_call_id=runtime.tool_call_id, artifact=[item])

        return [
            (StructuredTool.from_function(measure, response_format="content_and_artifact"), {"item": "x"}),
            (tool(say), {"item": "y"}),
        ]

    def injected(self, seen: Callable[[object], object]) -> Any:
        def injected(item: str, runtime: ToolRuntime) -> str:
            """Take what is injected."""
            seen(runtime.tool_call_id)
            return item

        return tool(injected)

    @property
    def retrying(self) -> Entry:
        return RETRYING

    def pause(self, tools: Sequence[Any], script: Script, **scope: Any) -> Any:
        graph = self.agent(tools, script, saver=InMemorySaver())
        config: Any = {"configurable": {"thread_id": "t"}}
        paused = saga_run(graph, GO, config, **scope)
        assert paused["__interrupt__"]
        return graph, config

    def resume(
        self, paused: Any, tools: Sequence[Any], script: Script, *, args: Mapping[str, Any] | None = None, **scope: Any
    ) -> Ran:
        graph, config = paused
        decision: dict[str, Any] = {"type": "approve"}
        if args is not None:
            decision = {"type": "edit", "edited_action": {"name": "pay", "args": dict(args)}}
        return _ran(saga_run(graph, Command(resume={"decisions": [decision]}), config, **scope))


class ToolNodeHarness(AgentHarness):
    """A graph built by hand with a checkpointer, whose ToolNode tells the model of every exception."""

    swallows = True
    acknowledge = ("node:model",)

    def agent(self, tools: Sequence[Any], script: Script, *, saver: Any = None, retrying: bool = False) -> Any:
        if retrying or saver is not None:
            return super().agent(tools, script, saver=saver, retrying=retrying)
        return hand_built(ScriptedModel(script=script), tools, handle_tool_errors=True)


def _ran(state: Any) -> Ran:
    return Ran(text=state["messages"][-1].content, raw=state)


def _streamed(pieces: list[Any]) -> Ran:
    return Ran(text=pieces[-1]["messages"][-1].content, raw=pieces)


class TestAgents(AdapterConformance):
    """`create_agent`."""

    @pytest.fixture
    def harness(self) -> AgentHarness:
        return AgentHarness()


class TestToolNodes(AdapterConformance):
    """`ToolNode(handle_tool_errors=True)` in a graph of one's own."""

    @pytest.fixture
    def harness(self) -> ToolNodeHarness:
        return ToolNodeHarness()
