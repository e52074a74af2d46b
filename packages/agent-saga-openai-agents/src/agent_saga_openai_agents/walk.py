"""`coverage`: what can be seen of an agent, its handoffs, and the agents that it calls as tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

from agents import FunctionTool, Handoff
from agents.agent import AgentBase

from agent_saga_core.coverage import CoverageEntry, CoverageManifest, entry_for, opaque
from agent_saga_core.errors import DeclarationError
from agent_saga_core.wrapping import ToolRunner, runner_of
from agent_saga_openai_agents.adapter import NAME
from agent_saga_openai_agents.sites import tells_runs_apart
from agent_saga_openai_agents.tools import agent_of, function_of, is_agent_tool

__all__ = ["coverage", "runners_of"]

_HERE: Final = frozenset({"ApplyPatchTool", "ComputerTool", "CustomTool", "LocalShellTool", "ShellTool"})
"""Tools that are no functions, and whose calls this process makes."""


def coverage(found: Any) -> CoverageManifest:
    """What can be seen of an agent, a tool, a handoff, or a list of them.

    Declared tools are those in `agent.tools`, those of the agents it hands off to and of those it calls as tools, each
    agent once. Hosted tools run at the provider, and MCP servers are asked for their tools only when the agent runs:
    each of them is an opaque entry. Nothing is seen of what guardrails, hooks, `on_handoff` functions and dynamic
    instructions call.

    Raises:
        DeclarationError: It is nothing of this framework.
    """
    walk = _Walk()
    walk.look(found, "")
    return CoverageManifest(framework=NAME, entries=tuple(walk.entries))


def runners_of(agent: Any) -> list[ToolRunner]:
    """The runners of all wrapped tools that can be seen of an agent."""
    walk = _Walk()
    walk.look(agent, "")
    return walk.runners


class _Walk:
    def __init__(self) -> None:
        self.entries: list[CoverageEntry] = []
        self.runners: list[ToolRunner] = []
        self._seen: dict[int, object] = {}

    def look(self, found: Any, path: str) -> None:
        if isinstance(found, AgentBase):
            self.agent(cast("AgentBase[Any]", found), path)
        elif isinstance(found, Handoff):
            self.handoff(cast("Handoff[Any, Any]", found), path)
        elif isinstance(found, list | tuple | set | frozenset):
            for item in cast("Iterable[Any]", found):
                self.look(item, path)
        elif isinstance(found, FunctionTool):
            self.function(found, f"{path}tools/{found.name}")
        elif type(found).__module__.partition(".")[0] == "agents":
            self.other(found, path)
        else:
            kind = cast("type[Any]", type(found))
            raise DeclarationError(
                f"{kind.__module__}.{kind.__qualname__} is no agent, tool or handoff of OpenAI Agents. Name an agent."
            )

    def agent(self, agent: AgentBase[Any], path: str) -> None:
        if id(agent) in self._seen:
            return
        self._seen[id(agent)] = agent
        inside = f"{path}agent:{agent.name}/"
        for tool in agent.tools:
            self.look(tool, inside)
        for server in agent.mcp_servers:
            self.opaque(f"{inside}mcp:{server.name}", "its tools are listed only while the agent runs")
        for handoff in cast("list[Any]", getattr(agent, "handoffs", None) or []):
            self.look(handoff, "")

    def handoff(self, handoff: Handoff[Any, Any], path: str) -> None:
        reference = getattr(handoff, "_agent_ref", None)
        target = reference() if reference is not None else None
        if target is not None:
            self.agent(target, path)
        else:
            self.opaque(f"{path}handoff:{handoff.agent_name}", "its agent is made when it is called", remote=False)

    def function(self, tool: FunctionTool, path: str) -> None:
        if is_agent_tool(tool):
            agent = agent_of(tool)
            if isinstance(agent, AgentBase):
                self.agent(cast("AgentBase[Any]", agent), "")
            else:
                self.opaque(path, "it runs an agent that it does not show", remote=False)
            return
        # What was wrapped may also be the function in it, by `@saga_tool`: its calls are counted, not told by their id.
        wrapped = runner_of(tool) is not None
        fn = function_of(tool)
        subject: object = fn if not wrapped and runner_of(fn) is not None else tool
        identity = "call-id" if wrapped and tells_runs_apart() else "occurrence"
        self.entries.append(entry_for(subject, path=path, framework=NAME, identity=identity, name=tool.name))
        runner = runner_of(subject)
        if runner is not None and runner not in self.runners:
            self.runners.append(runner)

    def other(self, tool: Any, path: str) -> None:
        kind = type(tool).__name__
        name = str(getattr(tool, "name", None) or kind)
        if kind in _HERE:
            self.opaque(f"{path}tools/{name}", f"{kind} acts here, and no step can be put around it", remote=False)
        else:
            self.opaque(f"{path}tools/{name}", f"{kind} is run by the provider")

    def opaque(self, path: str, why: str, *, remote: bool = True) -> None:
        self.entries.append(opaque(path, why, framework=NAME, remote=remote))
