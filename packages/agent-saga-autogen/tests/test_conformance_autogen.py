"""The suite that every adapter passes, on AutoGen: agents and teams, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import TextMessageTermination
from autogen_agentchat.messages import ToolCallExecutionEvent
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_core import CancellationToken, FunctionCall
from autogen_core.models import (
    ChatCompletionClient,
    CreateResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelFamily,
    RequestUsage,
)
from autogen_core.tools import BaseTool, FunctionTool
from autogen_ext.models.replay import ReplayChatCompletionClient
from pydantic import BaseModel

from agent_saga_autogen import asaga_run, asaga_stream, coverage, saga_run, wrap_tool
from agent_saga_core.testing.adapters import AdapterConformance, AdapterHarness, Entry, Ran, Script

INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "family": ModelFamily.UNKNOWN,
    "structured_output": False,
}


class ScriptedClient(ReplayChatCompletionClient):
    """A model that plays a script, and keeps what it heard of its calls. It pays no heed to cancellation."""

    def __init__(self, script: Script) -> None:
        super().__init__([], model_info=INFO)
        self.script = script

    async def create(self, messages: Sequence[LLMMessage], **_: Any) -> CreateResult:
        heard = [
            result.content
            for message in messages
            if isinstance(message, FunctionExecutionResultMessage)
            for result in message.content
        ]
        turn = self.script.play(heard)
        content: Any = turn
        if not isinstance(turn, str):
            content = [FunctionCall(id=c.id, name=c.name, arguments=json.dumps(dict(c.args))) for c in turn]
        return CreateResult(
            finish_reason="stop" if isinstance(turn, str) else "function_calls",
            content=content,
            usage=RequestUsage(prompt_tokens=1, completion_tokens=1),
            cached=False,
        )


class Doubled(BaseModel):
    twice: int
    of: str


class Args(BaseModel):
    text: str
    number: int = 4


class Double(BaseTool[Args, Doubled]):
    """A tool with models for its arguments and its result."""

    def __init__(self) -> None:
        super().__init__(Args, Doubled, "double", "Double a number.")

    async def run(self, args: Args, cancellation_token: CancellationToken) -> Doubled:
        return Doubled(twice=2 * args.number, of=args.text)


class AutoGenHarness(AdapterHarness):
    entries = (
        Entry("saga_run"),
        Entry("AssistantAgent.run", is_async=True),
        Entry("AssistantAgent.run_stream", is_async=True, streams=True),
        Entry("RoundRobinGroupChat.run", is_async=True),
        Entry("RoundRobinGroupChat.run_stream", is_async=True, streams=True),
        Entry("SelectorGroupChat.run", is_async=True),
    )
    swallows = True
    cancels_async_tools = False
    shares_tools = True
    deferred = {
        "test_a_call_that_the_framework_tries_again_is_one_step": "AutoGen calls no tool a second time by itself.",
        "test_a_paused_run_is_suspended_and_goes_on_where_it_was": "AutoGen has no interrupt that a tool could raise.",
        "test_a_person_may_change_the_arguments_of_a_paused_call": "AutoGen has no interrupt that a tool could raise.",
    }

    def tool(self, fn: Callable[..., Any], *, pauses: bool = False) -> Any:
        if pauses:
            raise NotImplementedError("AutoGen has no interrupt that a tool could raise.")
        return FunctionTool(fn, description=fn.__doc__ or "")

    def wrap(self, tool: Any, **declaration: Any) -> Any:
        return wrap_tool(tool, **declaration)

    def agent(self, tools: Sequence[Any], script: Script) -> Any:
        return AssistantAgent("clerk", ScriptedClient(script), tools=list(tools), max_tool_iterations=1_000_000)

    def team(self, entry: Entry, tools: Sequence[Any], script: Script) -> Any:
        clerk = self.agent(tools, script)
        if entry.name.startswith("RoundRobin"):
            return RoundRobinGroupChat([clerk], termination_condition=TextMessageTermination("clerk"))
        if entry.name.startswith("Selector"):
            other = AssistantAgent("other", ScriptedClient(Script(["nothing to say"])))
            return SelectorGroupChat(
                [clerk, other],
                ScriptedClient(Script(["clerk"] * 100)),
                termination_condition=TextMessageTermination("clerk"),
            )
        return clerk

    def run(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        clerk = self.agent(tools, script)
        if saga:
            return _ran(saga_run(clerk, "go", **scope))
        return _ran(asyncio.run(clerk.run(task="go")))

    async def arun(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        agent = self.team(entry, tools, script)
        if not entry.streams:
            return _ran(await (asaga_run(agent, "go", **scope) if saga else agent.run(task="go")))
        stream = asaga_stream(agent, "go", **scope) if saga else agent.run_stream(task="go")
        async with aclosing(stream):
            pieces = [piece async for piece in stream]
        return Ran(text=_ran(pieces[-1]).text, raw=pieces)

    def leave(self, entry: Entry, tools: Sequence[Any], script: Script, **scope: Any) -> None:
        async def read() -> None:
            async with aclosing(asaga_stream(self.team(entry, tools, script), "go", **scope)) as stream:
                async for piece in stream:
                    if isinstance(piece, ToolCallExecutionEvent):
                        break

        asyncio.run(read())

    def call(self, tool: Any, args: Mapping[str, Any]) -> Any:
        return asyncio.run(tool.run_json(args, CancellationToken()))

    def face(self, tool: Any) -> Mapping[str, object]:
        return {
            "name": tool.name,
            "description": tool.description,
            "schema": tool.schema,
            "args_type": tool.args_type(),
            "return_type": tool.return_type(),
            "state_type": tool.state_type(),
            "class name": type(tool).__qualname__,
            "module": type(tool).__module__,
            "doc": type(tool).__doc__,
            "component label": tool.component_label,
            "component provider": tool.component_provider_override,
        }

    def shown(self, tool: Any) -> set[str]:
        return set(tool.schema["parameters"]["properties"])

    def coverage(self, agent: Any) -> Any:
        return coverage(agent)

    def results(self, ran: Ran) -> Sequence[object]:
        messages = ran.raw.messages if isinstance(ran.raw, TaskResult) else ran.raw
        return [
            (result.name, result.content, result.is_error)
            for message in messages
            if isinstance(message, ToolCallExecutionEvent)
            for result in message.content
        ]

    def rich_tools(self) -> Sequence[tuple[Any, Mapping[str, Any]]]:
        return [(Double(), {"text": "x"})]

    def injected(self, seen: Callable[[object], object]) -> Any:
        def injected(item: str, cancellation_token: CancellationToken) -> str:
            """Take a token that the model does not see."""
            seen(cancellation_token)
            return item

        return FunctionTool(injected, description="Take a token that the model does not see.")


def _ran(result: TaskResult) -> Ran:
    return Ran(text=result.messages[-1].to_text(), raw=result)


assert issubclass(ScriptedClient, ChatCompletionClient)


class TestAutoGen(AdapterConformance):
    @pytest.fixture
    def harness(self) -> AdapterHarness:
        return AutoGenHarness()
