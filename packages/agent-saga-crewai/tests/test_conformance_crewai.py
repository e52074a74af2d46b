"""CrewAI against the suite of all adapters."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agent_saga_core.testing import AdapterConformance, AdapterHarness, Call, Entry, Ran, Script

REACT = Entry("react")


def crews() -> Any:
    """The helper beside this file, which imports CrewAI; this file is loaded in another process, too."""
    for name in ("agent_saga_crewai_conftest", "agent_saga_crewai_crews"):
        if name not in sys.modules:
            file = Path(__file__).with_name(f"{name.removeprefix('agent_saga_crewai_')}.py")
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None and spec.loader is not None
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    return sys.modules["agent_saga_crewai_crews"]


class CrewaiHarness(AdapterHarness):
    entries: ClassVar[tuple[Entry, ...]] = (
        Entry("kickoff"),
        Entry("kickoff_async", is_async=True),
        Entry("akickoff", is_async=True),
        Entry("stream", streams=True),
        Entry("astream", is_async=True, streams=True),
    )
    cancels_async_tools: ClassVar[bool] = False
    deferred: ClassVar[Mapping[str, str]] = {
        "test_injected_arguments_are_injected_and_not_logged": "CrewAI injects nothing into a tool",
        "test_a_paused_run_is_suspended_and_goes_on_where_it_was": "CrewAI cannot pause at the call of a tool",
        "test_a_person_may_change_the_arguments_of_a_paused_call": "CrewAI cannot pause at the call of a tool",
    }

    def tool(self, fn: Callable[..., Any], *, pauses: bool = False) -> Any:
        if pauses:
            raise NotImplementedError("CrewAI cannot pause at the call of a tool")
        return crews().tool(fn.__name__)(fn)

    def wrap(self, tool: Any, **declaration: Any) -> Any:
        return crews().wrap_tool(tool, **declaration)

    def agent(self, tools: Sequence[Any], script: Script) -> Any:
        return crews().crew_of(tools, script)

    def run(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        helper = crews()
        crew = helper.crew_of(tools, script, native=entry != REACT, stream=entry.streams)
        if not entry.streams:
            raw = helper.saga_run(crew, **scope) if saga else crew.kickoff()
            return Ran(text=raw.raw, raw=raw)
        pieces = helper.saga_stream(crew, **scope) if saga else crew.kickoff()
        list(pieces)
        return Ran(text=pieces.result.raw, raw=pieces.result)

    async def arun(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        helper = crews()
        crew = helper.crew_of(tools, script, stream=entry.streams)
        if not entry.streams:
            kickoff = getattr(crew, entry.name)
            raw = await (helper.asaga_run(kickoff, **scope) if saga else kickoff())
            return Ran(text=raw.raw, raw=raw)
        pieces = helper.asaga_stream(crew, **scope) if saga else await crew.akickoff()
        try:
            async for _ in pieces:
                pass
        finally:
            await pieces.aclose()
        return Ran(text=pieces.result.raw, raw=pieces.result)

    def leave(self, entry: Entry, tools: Sequence[Any], script: Script, **scope: Any) -> None:
        helper = crews()
        crew = helper.crew_of(tools, script, stream=True)
        if not entry.is_async:
            with helper.saga_stream(crew, **scope) as pieces:
                assert any("heard 1" in piece.content for piece in pieces)
            return

        async def leave() -> None:
            async with helper.asaga_stream(crew, **scope) as pieces:
                async for piece in pieces:
                    if "heard 1" in piece.content:
                        break

        asyncio.run(leave())

    def call(self, tool: Any, args: Mapping[str, Any]) -> Any:
        return tool.run(**args)

    def face(self, tool: Any) -> Mapping[str, object]:
        # `func` makes the call; how often that was done is not the tool's face.
        left_out = ("func", "current_usage_count")
        fields = {name: getattr(tool, name) for name in type(tool).model_fields if name not in left_out}
        shown = crews().shown_to_the_model(tool)
        return {**fields, "shown": shown, "prompt": tool.formatted_description, "type": tool.tool_type}

    def shown(self, tool: Any) -> set[str]:
        return set(crews().shown_to_the_model(tool)["function"]["parameters"]["properties"])

    def results(self, ran: Ran) -> Sequence[object]:
        return [json.loads(f.failure.model_dump_json()) for task in ran.raw.tasks_output for f in task.tool_failures]

    def coverage(self, agent: Any) -> Any:
        return crews().coverage(agent)

    def copies(self) -> Mapping[str, Callable[[Any], Any]]:
        return {**super().copies(), "model_copy": lambda tool: tool.model_copy()}

    @property
    def retrying(self) -> Entry:
        return REACT


class TestCrewaiConformance(AdapterConformance):
    @pytest.fixture
    def harness(self) -> CrewaiHarness:
        return CrewaiHarness()


def test_a_killed_run_made_again_goes_on_from_what_is_recorded(tmp_path: Path) -> None:
    """The model of another process makes the same calls: they are the same calls, by their place."""
    from agent_saga_core import FileLog, read_saga
    from agent_saga_core.registry import isolated_registry
    from agent_saga_core.testing.adapters.desk import BY_ITEM, BY_RESULT, Desk

    arguments = ["run", str(tmp_path), str(Path(__file__).resolve()), "CrewaiHarness", "kickoff", "sync"]
    child = subprocess.Popen(
        [sys.executable, "-m", "agent_saga_core.testing.adapters.child", *arguments],
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"standing\n"
        child.kill()
    harness, desk = CrewaiHarness(), Desk(tmp_path / "desk")
    assert desk.booked() == ["a", "b"]
    with isolated_registry(), closing(FileLog(tmp_path / "log")) as log:
        desk.register()
        tools = [
            harness.wrap(harness.tool(desk.function("book")), **BY_RESULT),
            harness.wrap(harness.tool(desk.function("hold")), **BY_ITEM),
        ]
        script = Script([Call("book", {"item": "a"}), Call("hold", {"item": "b"}), "all is booked"])
        ran = harness.run(harness.entries[0], tools, script, log=log, saga_id="s")
        steps = read_saga(log, "s").steps
    assert ran.text == "all is booked" and "a/1" in script.heard[0]
    assert desk.booked() == ["a", "b", "b"] and desk.standing() == ["a", "b"]
    assert [(step.tool, step.attempts) for step in steps] == [("book", 1), ("hold", 2)]
