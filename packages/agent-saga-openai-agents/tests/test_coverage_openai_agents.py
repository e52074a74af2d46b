"""What `coverage` sees of agents, and what it says that it cannot see."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    CodeInterpreterTool,
    FunctionTool,
    HostedMCPTool,
    LocalShellTool,
    WebSearchTool,
    function_tool,
    handoff,
)
from agents.mcp import MCPServerStdio

import agent_saga_openai_agents as face
from agent_saga_core import DeclarationError, SagaFleet, compensator, saga_tool, undo
from agent_saga_core.fleet import adapter_for
from agent_saga_core.registry import isolated_registry
from agent_saga_openai_agents import coverage, wrap_tool
from agent_saga_openai_agents.walk import runners_of

sys.path.insert(0, str(Path(__file__).parent))
from openai_agents_fakes import agent

LOOK: dict[str, Any] = {"semantics": "READ_ONLY"}


def look(city: str) -> str:
    """Look."""
    return city


@pytest.fixture(autouse=True)
def refund() -> Iterator[Any]:
    with isolated_registry():

        @compensator("till.refund")
        def refund(what: str) -> None: ...

        yield refund


def named(name: str) -> FunctionTool:
    return function_tool(look, name_override=name)


def test_tools_handoffs_and_agents_called_as_tools_are_declared() -> None:
    charge = wrap_tool(
        named("charge"),
        semantics="COMPENSABLE",
        compensate=undo("till.refund", if_absent="forbids", what="args.city"),
        key="args.city",
    )
    inner = agent([wrap_tool(named("inner"), **LOOK)], name="Inner")
    far = agent([named("bare")], name="Far")
    near = agent([charge], name="Near", handoffs=[far])
    near.handoffs.append(near)  # a circle
    top = agent([inner.as_tool("ask", "Ask."), wrap_tool(named("top"), **LOOK)], name="Top", handoffs=[handoff(near)])
    manifest = coverage(top)
    assert {entry.path: entry.wrapped for entry in manifest.entries} == {
        "agent:Inner/tools/inner": True,
        "agent:Top/tools/top": True,
        "agent:Near/tools/charge": True,
        "agent:Far/tools/bare": False,
    }
    by_name = {entry.tool: entry for entry in manifest.entries}
    found = by_name["charge"]
    assert (found.semantics, found.inverse, found.covers_unknown, found.identity) == (
        "COMPENSABLE",
        "named",
        True,
        "key",
    )
    assert by_name["top"].identity == "call-id" and by_name["top"].visibility == "declared"
    with pytest.raises(AssertionError, match="bare"):
        manifest.assert_fully_covered()
    assert sorted(runner.spec.tool for runner in runners_of(top)) == ["charge", "inner", "top"]


def test_hosted_tools_and_servers_are_opaque_and_remote() -> None:
    hosted = [
        WebSearchTool(),
        CodeInterpreterTool(tool_config={"type": "code_interpreter", "container": {"type": "auto"}}),
        HostedMCPTool(
            tool_config={"type": "mcp", "server_label": "x", "server_url": "https://x", "require_approval": "never"}
        ),
    ]
    server = MCPServerStdio(params={"command": "true"}, name="files")
    local = LocalShellTool(executor=lambda request: "")
    manifest = coverage(agent([*hosted, local, wrap_tool(named("look"), **LOOK)], name="A", mcp_servers=[server]))
    remote = {entry.path for entry in manifest.opaque if entry.remote}
    assert len(remote) == 4 and "agent:A/mcp:files" in remote
    (here,) = [entry for entry in manifest.opaque if not entry.remote]
    assert "local_shell" in here.path and "acts here" in here.detail
    with pytest.raises(AssertionError, match="mcp:files"):
        manifest.assert_fully_covered()
    manifest.assert_fully_covered(acknowledge=[entry.path for entry in manifest.opaque])


def test_an_agent_that_does_not_show_is_opaque_and_never_absent() -> None:
    made = handoff(Agent(name="Gone"))
    made._agent_ref = None
    tool = Agent(name="Hidden").as_tool("ask", "Ask.")
    tool._agent_instance = None
    manifest = coverage(agent([tool], name="A", handoffs=[made]))
    assert [entry.path for entry in manifest.opaque] == ["agent:A/tools/ask", "handoff:Gone"]


def test_a_saga_tool_inside_is_covered_and_counted() -> None:
    inside = function_tool(saga_tool(**LOOK)(look), name_override="inside")
    (entry,) = coverage([inside]).entries
    assert (entry.path, entry.wrapped, entry.identity) == ("tools/inside", True, "occurrence")
    assert len(runners_of([inside])) == 1


def test_what_is_nothing_of_the_framework_is_refused() -> None:
    with pytest.raises(DeclarationError, match="builtins.int"):
        coverage(7)


def test_a_fleet_wraps_and_covers_its_tools() -> None:
    adapter = adapter_for(named("charge"))
    assert adapter is not None and adapter.load() is face
    fleet = SagaFleet("trip")
    tool = fleet.register(named("charge"), **LOOK)
    assert isinstance(tool, FunctionTool)
    fleet.coverage().assert_fully_covered()


def test_the_names_are_there_and_announcing_them_imports_no_framework() -> None:
    assert set(face.__all__) == {
        "StreamedSaga", "aload_state", "asaga_run", "asaga_stream", "coverage", "dump_state", "load_state", "saga_run",
        "wrap_tool",
    }  # fmt: skip
    for name in face.__all__:
        assert getattr(face, name) is not None
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = face.nothing_such
    code = (
        "import sys; from agent_saga_openai_agents.adapter import ADAPTER; "
        "sys.exit('agents' in sys.modules or ADAPTER.name != 'openai-agents')"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
