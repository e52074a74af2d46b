"""A model that says what it is told to, for the framework's own runner."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from agents import Agent, FunctionTool, Model, ModelResponse, Usage, function_tool
from agents.tool_context import ToolContext
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from agent_saga_core import compensator, undo
from agent_saga_openai_agents import wrap_tool

Said = list[ResponseFunctionToolCall] | str
BOUND = 30.0


def call(call_id: str, tool: str, **args: Any) -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(type="function_call", call_id=call_id, name=tool, arguments=json.dumps(args))


def message(text: str) -> ResponseOutputMessage:
    content = ResponseOutputText(type="output_text", text=text, annotations=[])
    return ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[content])


def outputs(items: Any) -> list[str]:
    """The texts of the tool results in a conversation."""
    return [
        str(item["output"]) for item in items if isinstance(item, dict) and item.get("type") == "function_call_output"
    ]


class Scripted(Model):
    """Says one turn after the other, then "done"; `heard` is what it was last told of its calls."""

    def __init__(self, turns: Iterable[Said] | Callable[[list[str]], Said]) -> None:
        self.turns = turns if callable(turns) else iter(turns)
        self.heard: list[str] = []
        self.asked = 0

    def __copy__(self) -> Scripted:
        return self

    def __deepcopy__(self, memo: object) -> Scripted:
        return self

    def answer(self, conversation: Any) -> list[Any]:
        self.heard = outputs(conversation)
        self.asked += 1
        said = self.turns(self.heard) if callable(self.turns) else next(self.turns, "done")
        return [message(said)] if isinstance(said, str) else said

    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:
        return ModelResponse(output=self.answer(input), usage=Usage(), response_id=None)

    async def stream_response(
        self, system_instructions: Any, input: Any, *args: Any, **more: Any
    ) -> AsyncIterator[Any]:
        response = Response(
            id="r", created_at=0, model="scripted", object="response", output=self.answer(input),
            parallel_tool_calls=True, tool_choice="auto", tools=[],
        )  # fmt: skip
        yield ResponseCompletedEvent(type="response.completed", sequence_number=0, response=response)


@contextmanager
def own_loop() -> Iterator[None]:
    """`Runner.run_sync` leaves its thread's event loop open; here it gets one that is closed."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        asyncio.set_event_loop(None)


def agent(tools: Iterable[Any], *turns: Said, name: str = "Trip", **more: Any) -> Agent[Any]:
    return Agent(name=name, tools=list(tools), **({"model": Scripted(turns)} | more))


async def ainvoke(tool: FunctionTool, call_id: str = "by_hand", **args: Any) -> Any:
    text = json.dumps(args)
    context = ToolContext(context=None, tool_name=tool.name, tool_call_id=call_id, tool_arguments=text)
    return await tool.on_invoke_tool(context, text)


def invoke(tool: FunctionTool, **args: Any) -> Any:
    return asyncio.run(ainvoke(tool, **args))


class Till:
    """Charges in a file of lines, shared by threads and processes; a refund is a line, too."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def write(self, act: str, what: str) -> str:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{act} {what}\n")
        return what

    def lines(self) -> list[str]:
        try:
            with open(self.path, encoding="utf-8") as file:
                return file.read().splitlines()
        except FileNotFoundError:
            return []

    def register(self) -> None:
        @compensator("till.refund")
        def refund(what: str) -> None:
            self.write("refund", what)

    def charge(self, what: str) -> str:
        """Charge for something."""
        return self.write("charge", what)


REFUND: dict[str, Any] = {"semantics": "COMPENSABLE", "compensate": undo("till.refund", what="result")}
"""Undone by what the call returned."""
RELEASE: dict[str, Any] = {
    "semantics": "COMPENSABLE",
    "compensate": undo("till.refund", if_absent="forbids", what="args.what"),
}
"""Undone by what it was given, landed or not."""


def traveller(till: Till) -> Agent[Any]:
    """An agent that books, and pays with a person's approval; made anew in each process."""
    book = wrap_tool(function_tool(till.charge, name_override="book"), **REFUND)
    pay = function_tool(till.charge, name_override="pay", needs_approval=True)
    turns: list[Said] = [[call("c1", "book", what="room")], [call("c2", "pay", what="bill")]]
    return Agent(name="Trip", model=Scripted(_behind(turns)), tools=[book, wrap_tool(pay, **REFUND)])


def _behind(turns: list[Said]) -> Callable[[list[str]], Said]:
    """Goes on from where the conversation is: as a real model, it keeps nothing."""
    return lambda heard: turns[len(heard)] if len(heard) < len(turns) else f"done: {', '.join(heard)}"


def approving(state: Any) -> Any:
    for item in state.get_interruptions():
        state.approve(item)
    return state
