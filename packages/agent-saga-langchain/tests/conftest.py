"""What holds for every test of the LangChain adapter: nothing is traced anywhere, names and logs are the test's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2", "LANGCHAIN_TRACING"):
    os.environ[name] = "false"
os.environ.pop("AGENT_SAGA_LOG", None)

import pytest  # noqa: E402
from langchain_core.language_models import GenericFakeChatModel  # noqa: E402
from langchain_core.messages import AIMessage  # noqa: E402

from agent_saga_core import MemoryLog, compensator  # noqa: E402
from agent_saga_core.registry import isolated_registry  # noqa: E402


class ScriptedModel(GenericFakeChatModel):
    """Says what it is told to say, whatever tools it is bound to; keeps the schemas that it was shown."""

    shown: list[Any] = []

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        self.shown.append(list(tools))
        return self


class World:
    """Effects of a test's tools: what was done, and what was undone."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.undone: list[Any] = []

    @property
    def standing(self) -> list[Any]:
        left = list(self.done)
        for item in self.undone:
            left.remove(item)
        return left


@pytest.fixture
def world() -> Iterator[World]:
    with isolated_registry():
        made = World()

        @compensator("world.undo")
        def undo_it(item: Any) -> None:
            made.undone.append(item)

        yield made


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def say() -> Callable[..., ScriptedModel]:
    """A model that makes these calls, one turn each: a call is (tool, arguments, id); a list of calls is one turn."""

    def model(*turns: Any) -> ScriptedModel:
        return ScriptedModel(messages=iter([_message(turn) for turn in turns]), shown=[])

    return model


@pytest.fixture
def intents(log: MemoryLog) -> Callable[[str], list[dict[str, Any]]]:
    """What the log holds of the calls of a saga that were about to be made."""
    return lambda saga_id: [record.data for record in log.read(saga_id) if record.type == "INTENT"]


def _message(turn: Any) -> AIMessage:
    if isinstance(turn, str):
        return AIMessage(turn)
    calls = turn if isinstance(turn, list) else [turn]
    return AIMessage("", tool_calls=[{"name": n, "args": args, "id": i, "type": "tool_call"} for n, args, i in calls])
