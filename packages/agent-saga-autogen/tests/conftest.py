"""AutoGen without a network and without a model: a client that plays turns, and tools that book in a list."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from agent_saga_core import MemoryLog, compensator, undo
from agent_saga_core.registry import isolated_registry

# Spans go nowhere, and nothing looks for a place to send them.
os.environ["OTEL_SDK_DISABLED"] = "true"

BOUND = 20.0
"""Seconds of real time after which a wait that does not end has failed the test."""


class World:
    """What the tools of a test have done, and what they wait for."""

    def __init__(self) -> None:
        self.acts: list[str] = []
        self.entered: dict[str, threading.Event] = {}
        self.released = threading.Event()
        self.lock = threading.Lock()

    def book(self, item: str) -> dict[str, str]:
        with self.lock:
            self.acts.append(f"book {item}")
        return {"id": item}

    def unbook(self, id: str) -> None:
        with self.lock:
            self.acts.append(f"undo {id}")

    @property
    def standing(self) -> list[str]:
        left = [act.removeprefix("book ") for act in self.acts if act.startswith("book ")]
        for act in self.acts:
            if act.startswith("undo "):
                left.remove(act.removeprefix("undo "))
        return left

    def inside(self, item: str) -> threading.Event:
        """Set when a tool that holds is inside with this item."""
        return self.entered.setdefault(item, threading.Event())

    async def until_inside(self, item: str) -> None:
        """Return when a tool that holds is inside with this item."""
        assert await asyncio.to_thread(self.inside(item).wait, BOUND)

    def tool(self, name: str = "book", *, is_async: bool = True) -> Callable[..., Any]:
        """A function that books an item; if the item begins with `hold`, it then waits until it is released."""

        def act(item: str) -> dict[str, str]:
            """Book an item."""
            found = self.book(item)
            if item.startswith("hold"):
                self.inside(item).set()
                assert self.released.wait(BOUND)
            return found

        async def aact(item: str) -> dict[str, str]:
            """Book an item."""
            found = self.book(item)
            if item.startswith("hold"):
                self.inside(item).set()
                assert await asyncio.to_thread(self.released.wait, BOUND)
            return found

        fn: Callable[..., Any] = aact if is_async else act
        fn.__name__ = fn.__qualname__ = name
        return fn


@pytest.fixture
def world() -> Iterator[World]:
    """A world whose two compensators are registered."""
    world = World()
    with isolated_registry():
        compensator("test.unbook")(world.unbook)
        yield world
    world.released.set()


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def by_item() -> dict[str, Any]:
    """A declaration whose undo needs the arguments only, and is safe if nothing landed."""
    return {
        "semantics": "COMPENSABLE",
        "compensate": undo("test.unbook", if_absent="forbids", id="args.item"),
    }


@pytest.fixture
def by_result() -> dict[str, Any]:
    """A declaration whose undo needs the result."""
    return {"semantics": "COMPENSABLE", "compensate": undo("test.unbook", id="result.id")}


class Model:
    """Makes agents whose model says the given turns: a list of calls `(id, tool, arguments)`, or a text."""

    def agent(self, name: str, tools: Sequence[Any], *turns: Any, **more: Any) -> Any:
        from autogen_agentchat.agents import AssistantAgent

        options = {"tools": list(tools) or None, "max_tool_iterations": 20, **more}
        return AssistantAgent(name, self.client(*turns), **options)

    def client(self, *turns: Any) -> Any:
        from autogen_core import FunctionCall
        from autogen_core.models import CreateResult, ModelFamily, RequestUsage
        from autogen_ext.models.replay import ReplayChatCompletionClient

        info: Any = {
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "family": ModelFamily.UNKNOWN,
            "structured_output": False,
        }
        results: list[Any] = [
            turn
            if isinstance(turn, str)
            else CreateResult(
                finish_reason="function_calls",
                content=[FunctionCall(id=i, name=n, arguments=json.dumps(a)) for i, n, a in turn],
                usage=RequestUsage(prompt_tokens=1, completion_tokens=1),
                cached=False,
            )
            for turn in turns
        ]
        return ReplayChatCompletionClient(results, model_info=info)

    def team(self, *agents: Any, speaker: str | None = None, **more: Any) -> Any:
        from autogen_agentchat.conditions import TextMessageTermination
        from autogen_agentchat.teams import RoundRobinGroupChat

        ending = TextMessageTermination(speaker if speaker is not None else agents[-1].name)
        return RoundRobinGroupChat(list(agents), termination_condition=ending, **more)


@pytest.fixture
def model() -> Model:
    return Model()


def executions(result: Any) -> list[tuple[str, bool]]:
    """(text, is it an error) of every tool call in a `TaskResult`."""
    from autogen_agentchat.messages import ToolCallExecutionEvent

    return [
        (call.content, call.is_error)
        for message in result.messages
        if isinstance(message, ToolCallExecutionEvent)
        for call in message.content
    ]


@pytest.fixture
def told() -> Callable[[Any], list[tuple[str, bool]]]:
    """(text, is it an error) of every tool call in a `TaskResult`."""
    return executions
