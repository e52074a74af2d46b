"""The suite of all adapters, on the framework's own runner."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, FunctionTool, RunContextWrapper, Runner, ToolOutputImage, function_tool
from agents.tool_context import ToolContext

from agent_saga_core.testing.adapters import AdapterConformance, AdapterHarness, Call, Entry, Ran, Script
from agent_saga_openai_agents import asaga_run, asaga_stream, coverage, dump_state, load_state, saga_run, wrap_tool

sys.path.insert(0, str(Path(__file__).parent))  # the suite loads this file in a process of its own, too
import openai_agents_fakes as fakes

RUN_SYNC, RUN, STREAMED = Entry("run_sync"), Entry("run", is_async=True), Entry("run_streamed", True, True)


def _told(context: RunContextWrapper[Any], error: Exception) -> str:
    # The default formatter keeps exceptions from the model, from 0.24 on.
    return f"An error occurred while running the tool: {error}"


class Harness(AdapterHarness):
    entries = (RUN_SYNC, RUN, STREAMED)
    deferred = {
        "test_call_ids_that_begin_anew_in_each_message_conflict_with_nothing": (
            "OpenAI Agents itself ends a run in which a call id comes again for another call (ModelBehaviorError)."
        ),
        "test_call_ids_that_begin_anew_in_each_message_hide_no_call": (
            "OpenAI Agents itself takes a call id that comes again with the same arguments for the same call, and "
            "does not make it again."
        ),
        "test_a_call_that_the_framework_tries_again_is_one_step": "OpenAI Agents never makes a failed call again.",
        "test_a_person_may_change_the_arguments_of_a_paused_call": (
            "A RunState is approved or rejected; OpenAI Agents has no way to change the arguments of a call."
        ),
    }

    def tool(self, fn: Callable[..., Any], *, pauses: bool = False) -> FunctionTool:
        return function_tool(fn, needs_approval=pauses, failure_error_function=_told)

    def wrap(self, tool: Any, **declaration: Any) -> Any:
        return wrap_tool(tool, **declaration)

    def agent(self, tools: Sequence[Any], script: Script) -> Agent[Any]:
        return Agent(name="Conformance", model=fakes.Scripted(_played(script)), tools=list(tools))

    def run(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        agent = self.agent(tools, script)
        with fakes.own_loop():
            return _ran(saga_run(agent, "go", **_turns, **scope) if saga else Runner.run_sync(agent, "go", **_turns))

    async def arun(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        agent = self.agent(tools, script)
        if not entry.streams:
            run = asaga_run(agent, "go", **_turns, **scope) if saga else Runner.run(agent, "go", **_turns)
            return _ran(await run)
        stream = asaga_stream(agent, "go", **_turns, **scope) if saga else Runner.run_streamed(agent, "go", **_turns)
        events = [event async for event in stream.stream_events()]
        return Ran(text=str(stream.final_output), raw=events)

    def leave(self, entry: Entry, tools: Sequence[Any], script: Script, **scope: Any) -> None:
        asyncio.run(self._leave(tools, script, scope))

    async def _leave(self, tools: Sequence[Any], script: Script, scope: dict[str, Any]) -> None:
        async with asaga_stream(self.agent(tools, script), "go", **scope) as run:
            async for event in run.stream_events():
                if getattr(event, "name", None) == "tool_output":
                    return
        raise AssertionError("the stream has shown no result of a tool")

    def call(self, tool: Any, args: Mapping[str, Any]) -> Any:
        return fakes.invoke(tool, **args)

    def face(self, tool: Any) -> Mapping[str, object]:
        fields = {field.name: getattr(tool, field.name) for field in dataclasses.fields(tool)}
        return {name: value for name, value in fields.items() if name != "on_invoke_tool"}

    def shown(self, tool: Any) -> set[str]:
        return set(tool.params_json_schema["properties"])

    def coverage(self, agent: Any) -> Any:
        return coverage(agent)

    def results(self, ran: Ran) -> Sequence[object]:
        streamed = isinstance(ran.raw, list)
        items = [event.item for event in ran.raw if hasattr(event, "item")] if streamed else ran.raw.new_items
        return [item.output for item in items if item.type == "tool_call_output_item"]

    def rich_tools(self) -> Sequence[tuple[Any, Mapping[str, Any]]]:
        @function_tool
        def draw(text: str) -> ToolOutputImage:
            """Draw a text."""
            return ToolOutputImage(image_url=f"https://example.invalid/{text}")

        return [(draw, {"text": "x"})]

    def injected(self, seen: Callable[[object], object]) -> FunctionTool:
        @function_tool
        def injected(ctx: RunContextWrapper[Any], item: str) -> str:
            """Use what is injected."""
            seen(ctx if isinstance(ctx, ToolContext) else None)
            return item

        return injected

    def pause(self, tools: Sequence[Any], script: Script, **scope: Any) -> Any:
        with fakes.own_loop():
            result = saga_run(self.agent(tools, script), "go", **scope)
        assert [item.name for item in result.interruptions] == ["pay"]
        return dump_state(result)

    def resume(
        self, paused: Any, tools: Sequence[Any], script: Script, *, args: Mapping[str, Any] | None = None, **scope: Any
    ) -> Ran:
        assert args is None, "no way to change the arguments"
        agent = self.agent(tools, script)
        with fakes.own_loop():
            state = load_state(agent, paused)
            for item in state.get_interruptions():
                state.approve(item)
            return _ran(saga_run(agent, state, **scope))


_turns: dict[str, Any] = {"max_turns": 40}


def _played(script: Script) -> Callable[[list[str]], Any]:
    def said(heard: list[str]) -> Any:
        turn = script.play(heard)
        return turn if isinstance(turn, str) else [_call(one) for one in turn]

    return said


def _call(one: Call) -> Any:
    return fakes.call(one.id, one.name, **one.args)


def _ran(result: Any) -> Ran:
    return Ran(text=str(result.final_output), raw=result)


class TestOpenAIAgents(AdapterConformance):
    @pytest.fixture
    def harness(self) -> AdapterHarness:
        return Harness()
