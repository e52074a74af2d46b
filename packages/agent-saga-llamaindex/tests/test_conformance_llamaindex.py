"""The suite of all adapters, on LlamaIndex's own agents and workflows.

No `from __future__ import annotations` here: LlamaIndex injects a context only where the annotation is the class.
"""

import asyncio
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow, ToolCallResult
from llama_index.core.base.llms.types import ImageBlock
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context, HumanResponseEvent, InputRequiredEvent

from agent_saga_core.testing.adapters import AdapterConformance, AdapterHarness, Call, Entry, Ran, Script
from agent_saga_llamaindex import (
    SuspendedRun,
    asaga_run,
    asaga_stream,
    coverage,
    dump_state,
    saga_run,
    wrap_tool,
)

sys.path.insert(0, str(Path(__file__).parent))  # the suite loads this file in a process of its own, too
import llamaindex_fakes as fakes

AGENT, TEAM = Entry("FunctionAgent", is_async=True), Entry("AgentWorkflow", is_async=True)
STREAM, BLOCKING = Entry("FunctionAgent, streamed", is_async=True, streams=True), Entry("FunctionAgent, saga_run")
LOOP, RETRYING = Entry("a workflow written by hand", is_async=True), Entry("a step that is retried", is_async=True)
REACT, REACT_STREAM = Entry("ReActAgent", is_async=True), Entry("ReActAgent, streamed", is_async=True, streams=True)


class Harness(AdapterHarness):
    entries = (AGENT, TEAM, STREAM, BLOCKING, LOOP)
    retrying = RETRYING
    deferred = {
        "test_a_person_may_change_the_arguments_of_a_paused_call": (
            "A tool of LlamaIndex that waits for an event is run again with the arguments that the model gave."
        ),
    }

    def tool(self, fn: Callable[..., Any], *, pauses: bool = False) -> FunctionTool:
        return FunctionTool.from_defaults(_pausing(fn) if pauses else fn)

    def wrap(self, tool: Any, **declaration: Any) -> Any:
        return wrap_tool(tool, **declaration)

    def agent(self, tools: Sequence[Any], script: Script) -> Any:
        return self.made(AGENT, tools, script)

    def made(self, entry: Entry, tools: Sequence[Any], script: Script) -> Any:
        if entry in (LOOP, RETRYING):
            kind = fakes.Loop if entry is LOOP else fakes.Retrying
            return kind(tools, fakes.model(_played(script)))
        agent = fakes.agent(tools, fakes.model(_played(script)))
        return AgentWorkflow(agents=[agent]) if entry is TEAM else agent

    def run(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        if saga:
            return _ran(saga_run(self.made(entry, tools, script), "go", **scope))
        return asyncio.run(self.arun(entry, tools, script, saga=False))

    async def arun(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        workflow = self.made(entry, tools, script)
        given: dict[str, Any] = {} if entry in (LOOP, RETRYING) else {"user_msg": "go"}
        if entry.streams and saga:
            stream = asaga_stream(workflow, **given, **scope)
            events = [event async for event in stream]
            return Ran(text=str(stream.result), raw=events)
        if entry.streams:
            handler = workflow.run(**given)
            events = [event async for event in handler.stream_events()]
            return Ran(text=str(await handler), raw=events)
        return _ran(await (asaga_run(workflow, **given, **scope) if saga else workflow.run(**given)))

    def leave(self, entry: Entry, tools: Sequence[Any], script: Script, **scope: Any) -> None:
        asyncio.run(self._leave(self.made(entry, tools, script), scope))

    async def _leave(self, workflow: Any, scope: dict[str, Any]) -> None:
        async with aclosing(asaga_stream(workflow, "go", **scope)) as stream:
            async for event in stream:
                if isinstance(event, ToolCallResult):
                    return
        raise AssertionError("the stream has shown no result of a tool")

    def call(self, tool: Any, args: Mapping[str, Any]) -> Any:
        return tool.call(**args)

    def face(self, tool: Any) -> Mapping[str, object]:
        fields = ("metadata", "requires_context", "ctx_param_name", "partial_params", "real_fn")
        shown = {"openai": tool.metadata.to_openai_tool(), "class": (type(tool).__module__, type(tool).__qualname__)}
        return {**{name: getattr(tool, name) for name in fields}, **vars(tool.metadata), **shown}

    def shown(self, tool: Any) -> set[str]:
        return set(tool.metadata.get_parameters_dict()["properties"])

    def coverage(self, agent: Any) -> Any:
        return coverage(agent)

    def results(self, ran: Ran) -> Sequence[object]:
        calls = ran.raw if isinstance(ran.raw, list) else getattr(ran.raw, "tool_calls", [])
        outputs = [call.tool_output for call in calls if isinstance(call, ToolCallResult)]
        return [(output.blocks, output.raw_input, output.raw_output, output.is_error) for output in outputs]

    def rich_tools(self) -> Sequence[tuple[Any, Mapping[str, Any]]]:
        def draw(text: str) -> ImageBlock:
            """Draw a text."""
            return ImageBlock(url=f"https://example.invalid/{text}")

        return [(FunctionTool.from_defaults(draw), {"text": "x"})]

    def injected(self, seen: Callable[[object], object]) -> FunctionTool:
        async def injected(ctx: Context, item: str) -> str:
            """Use what is injected."""
            seen(ctx if isinstance(ctx, Context) else None)
            return item

        return FunctionTool.from_defaults(injected)

    def pause(self, tools: Sequence[Any], script: Script, **scope: Any) -> Any:
        suspended = saga_run(self.agent(tools, script), "go", **scope)
        assert isinstance(suspended, SuspendedRun) and len(suspended.waiting) == 1
        return json.dumps(dump_state(suspended))

    def resume(
        self, paused: Any, tools: Sequence[Any], script: Script, *, args: Mapping[str, Any] | None = None, **scope: Any
    ) -> Ran:
        agent = self.agent(tools, script)
        return _ran(saga_run(agent, json.loads(paused), HumanResponseEvent(response="yes"), **scope))


class ReActHarness(Harness):
    """The agent that reads its calls from the model's text: one at a time, each with an id of its own."""

    entries = (REACT, REACT_STREAM)
    parallel = False

    def agent(self, tools: Sequence[Any], script: Script) -> Any:
        return self.made(REACT, tools, script)

    def made(self, entry: Entry, tools: Sequence[Any], script: Script) -> Any:
        if entry is RETRYING:
            return super().made(entry, tools, script)
        return fakes.react(tools, fakes.reasoning(_played(script)))


def _pausing(fn: Callable[..., Any]) -> Callable[..., Any]:
    async def pausing(ctx: Context, item: str) -> dict[str, Any]:
        asked = InputRequiredEvent(prefix=f"{fn.__name__} {item}?")
        await ctx.wait_for_event(HumanResponseEvent, waiter_event=asked)
        booked = fn(item)
        return await booked if asyncio.iscoroutine(booked) else booked

    # No `functools.wraps`: LlamaIndex would read the signature of what it wraps, which has no context.
    functools.update_wrapper(pausing, fn, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    del pausing.__wrapped__
    return pausing


def _played(script: Script) -> Callable[[list[str]], fakes.Said]:
    def answer(heard: list[str]) -> fakes.Said:
        turn = script.play(heard)
        return turn if isinstance(turn, str) else [_call(one) for one in turn]

    return answer


def _call(one: Call) -> tuple[str, str, dict[str, Any]]:
    return one.id, one.name, dict(one.args)


def _ran(result: Any) -> Ran:
    return Ran(text=str(result), raw=result)


class TestLlamaIndex(AdapterConformance):
    @pytest.fixture
    def harness(self) -> AdapterHarness:
        return Harness()


class TestReAct(AdapterConformance):
    @pytest.fixture
    def harness(self) -> AdapterHarness:
        return ReActHarness()
