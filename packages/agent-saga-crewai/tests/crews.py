"""CrewAI's real objects around a model that plays a script, for the tests beside this file."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from typing import Any

from agent_saga_core.testing import Call, Script

home = os.environ.get("HOME", "")
with warnings.catch_warnings():
    # Its import warns ("Cannot set an attribute on 'crewai.rag' ..."), changes the filters, and writes into the home.
    warnings.simplefilter("ignore")
    os.environ["HOME"] = os.environ["CREWAI_STORAGE_DIR"]
    from crewai import LLM, Agent, BaseLLM, Crew, Process, Task
    from crewai.flow.flow import Flow, listen, start
    from crewai.llms.base_llm import llm_call_context
    from crewai.tools import BaseTool, tool
    from crewai.tools.base_tool import Tool
    from crewai.tools.tool_failure import ToolFailure, ToolFailurePolicy
    from crewai.utilities.agent_utils import convert_tools_to_openai_schema
    from pydantic import PrivateAttr

    from agent_saga_crewai import asaga_run, asaga_stream, coverage, saga_run, saga_stream, wrap_tool

    os.environ["HOME"] = home

__all__ = [
    "LLM", "Agent", "BaseTool", "Call", "Crew", "Flow", "Model", "Process", "Script", "Task", "Tool", "ToolFailure",
    "ToolFailurePolicy", "agent_of", "asaga_run", "asaga_stream", "coverage", "crew_of", "listen", "saga_run",
    "saga_stream", "shown_to_the_model", "start", "tool", "wrap_tool",
]  # fmt: skip


CRASH = "(crash)"
"""A turn at which the model cannot be reached."""


class Model(BaseLLM):
    """Plays a script, by native tool calls or by the text of ReAct."""

    _script: Script = PrivateAttr()
    _native: bool = PrivateAttr()

    def __init__(self, script: Script, native: bool = True) -> None:
        super().__init__(model="script")
        self._script, self._native = script, native

    def supports_function_calling(self) -> bool:
        return self._native

    def get_context_window_size(self) -> int:
        return 10_000_000

    def call(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        given = messages if isinstance(messages, list) else []
        heard = _heard(given)
        with llm_call_context():  # what a streaming crew is told of it
            self._emit_stream_chunk_event(f"heard {len(heard)};", kwargs.get("from_task"), kwargs.get("from_agent"))
        turn = self._script.play(heard)
        if turn == CRASH:
            raise ConnectionError("the model is down")
        if isinstance(turn, str):
            return turn if self._native else f"Thought: I now know the final answer\nFinal Answer: {turn}"
        if self._native:
            return [_native(call) for call in turn]
        (call,) = turn
        return f"Thought: so be it\nAction: {call.name}\nAction Input: {json.dumps(dict(call.args))}\n"

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _heard(messages: list[Any]) -> list[str]:
    heard: list[str] = []
    for message in messages:
        content = str(message.get("content"))
        if message.get("role") == "tool":
            heard.append(content)
        elif message.get("role") == "assistant" and "\nObservation:" in content:
            heard.append(content.partition("\nObservation:")[2].strip())
    return heard


def _native(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.args))}
    return {"id": call.id, "type": "function", "function": function}


def agent_of(tools: Sequence[Any], script: Script, *, native: bool = True, role: str = "clerk", **more: Any) -> Agent:
    return Agent(role=role, goal="book", backstory="old", llm=Model(script, native), tools=list(tools), **more)


def crew_of(
    tools: Sequence[Any], script: Script, *, native: bool = True, stream: bool = False, task: str = "book", **more: Any
) -> Crew:
    agent = agent_of(tools, script, native=native, **more)
    return Crew(agents=[agent], tasks=[Task(description=task, expected_output="text", agent=agent)], stream=stream)


def shown_to_the_model(found: Any) -> dict[str, Any]:
    return convert_tools_to_openai_schema([found])[0][0]
