"""The frameworks, each through the harness that its adapter's own tests use; imported when they are first needed."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from agent_saga_core.testing import AdapterHarness, Call, Entry, Ran, Script

PACKAGES = Path(__file__).parents[2] / "packages"


class Framework(NamedTuple):
    """One framework: where its harness stands, and the ways in that are taken here."""

    harness: str
    sync: str
    native: str
    """An async entry, which this suite takes without anything of the adapter but the wrapped tools."""


FRAMEWORKS: dict[str, Framework] = {
    "langchain": Framework("Harness", "invoke", "ainvoke"),
    "langgraph": Framework("AgentHarness", "invoke", "ainvoke"),
    "openai_agents": Framework("Harness", "run_sync", "run"),
    "crewai": Framework("CrewaiHarness", "kickoff", "akickoff"),
    "autogen": Framework("AutoGenHarness", "saga_run", "RoundRobinGroupChat.run"),
    "llamaindex": Framework("Harness", "FunctionAgent, saga_run", "FunctionAgent"),
    "semantic_kernel": Framework("Harness", "saga_run", "agent.get_response"),
}
"""By the names of the adapters, in the order in which the suite lets them act."""


@cache
def harness_of(name: str) -> AdapterHarness:
    """The framework's harness; this imports the framework."""
    file = PACKAGES / f"agent-saga-{name.replace('_', '-')}" / "tests" / f"test_conformance_{name}.py"
    spec = importlib.util.spec_from_file_location(f"cross_{name}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: AdapterHarness = getattr(module, FRAMEWORKS[name].harness)()
    return made


def _entry(name: str, entry: str) -> Entry:
    (found,) = [one for one in harness_of(name).entries if one.name == entry]
    return found


class Team:
    """One framework's agent with one tool, which its model calls once."""

    def __init__(self, name: str, fn: Callable[..., Any], declaration: dict[str, Any], *, tool: Any = None) -> None:
        harness = harness_of(name)
        self.name = name
        self.tool = harness.wrap(harness.tool(fn), **declaration) if tool is None else tool
        self.script = Script([Call(fn.__name__, {"item": "room"})])

    def run(self) -> Ran:
        """Run it through the adapter's sync entry, inside whatever saga is open here."""
        return harness_of(self.name).run(_entry(self.name, FRAMEWORKS[self.name].sync), [self.tool], self.script)

    async def native(self, *, adapted: bool = False) -> Ran:
        """Run it through an async entry of the framework itself, on this loop; `adapted`: through the adapter's."""
        entry = _entry(self.name, FRAMEWORKS[self.name].native)
        return await harness_of(self.name).arun(entry, [self.tool], self.script, saga=adapted)


def on_a_loop(main: Callable[[], Any]) -> Any:
    """`asyncio.run`, bounded."""

    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await main()

    return asyncio.run(bounded())
