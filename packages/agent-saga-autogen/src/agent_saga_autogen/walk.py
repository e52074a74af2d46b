"""What an agent or team can be seen to hold: tools, workbenches, other agents. By private attributes, each asked for.

Nothing here imports `autogen_agentchat`: what is walked has it imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from autogen_core.tools import BaseTool, StaticWorkbench, Workbench

from agent_saga_autogen.tools import function_in
from agent_saga_autogen.workbench import SagaWorkbench
from agent_saga_core.coverage import reach
from agent_saga_core.wrapping import ToolRunner, runner_of

__all__ = ["Seen", "idle_runtimes", "runners_in", "walk"]


CHOOSES = "it chooses speakers by code of yours"


class Seen(NamedTuple):
    """One thing found: a tool, a workbench whose tools nobody wrapped, an agent, or a place that hides something."""

    path: str
    kind: str
    """`tool`, `workbench` (a `SagaWorkbench`), `team`, `code` (a function that may call anything), or `opaque`."""
    found: Any
    why: str = ""


def walk(found: object) -> Iterator[Seen]:
    """Everything that can be seen of an agent, team, tool, workbench, tool agent, or a list of them; each once."""
    yield from _Walk().any("", found)


def runners_in(found: object) -> list[ToolRunner]:
    """The wrapped tools that can be seen of it: tools, saga tools made into tools, those of workbenches and in code."""
    runners: dict[int, ToolRunner] = {}
    for seen in walk(found):
        runners.update((id(runner), runner) for runner in _held(seen))
    return list(runners.values())


def _held(seen: Seen) -> Iterator[ToolRunner]:
    if seen.kind == "workbench":
        yield from cast(SagaWorkbench, seen.found).runners.values()
        return
    near: list[object] = [found for _, found in reach(seen.found)] if seen.kind == "code" else [seen.found]
    for found in near:
        if isinstance(found, SagaWorkbench):
            yield from found.runners.values()
        for runner in (runner_of(found), runner_of(function_in(found))):
            if runner is not None:
                yield runner


def idle_runtimes(found: object) -> list[Any]:
    """The runtimes that the teams in it have to themselves, of the teams that do not run now."""
    teams = [seen.found for seen in walk(found) if seen.kind == "team"]
    idle = [t for t in teams if getattr(t, "_embedded_runtime", False) and not getattr(t, "_is_running", True)]
    return [runtime for team in idle if (runtime := getattr(team, "_runtime", None)) is not None]


class _Walk:
    def __init__(self) -> None:
        self.seen: dict[int, object] = {}

    def any(self, path: str, found: object) -> Iterator[Seen]:
        if id(found) in self.seen and not isinstance(found, str | int):
            return
        self.seen[id(found)] = found
        if isinstance(found, Mapping):
            named = cast("Mapping[object, object]", found)
            for key, item in named.items():
                yield from self.any(_join(path, str(key)), item)
        elif isinstance(found, list | tuple | set | frozenset):
            for item in cast("Sequence[object]", found):
                yield from self.any(path, item)
        elif isinstance(found, BaseTool):
            yield from self.tool(path, cast("BaseTool[Any, Any]", found))
        elif isinstance(found, Workbench):
            yield from self.workbench(path, found)
        elif _is_a(found, "autogen_core.tool_agent", "ToolAgent"):
            yield from self.any(_join(path, "tools"), cast(Any, found).tools)
        elif _is_a(found, "autogen_agentchat.base", "Team"):
            yield from self.team(path, found)
        elif _is_a(found, "autogen_agentchat.base", "ChatAgent"):
            yield from self.agent(path, found)
        elif callable(found) and not isinstance(found, type):
            yield Seen(_join(path, getattr(found, "__name__", type(found).__name__)), "tool", found)
        else:
            name = f"{type(found).__module__}.{type(found).__qualname__}"
            yield Seen(path or name, "opaque", found, f"an object of type {name} tells nothing of its tools")

    def tool(self, path: str, tool: BaseTool[Any, Any]) -> Iterator[Seen]:
        here = _join(path, tool.name)
        runner = getattr(tool, "_task_runner", None)  # AgentTool, TeamTool: they run what is in them, and nothing else
        if runner is None:
            yield Seen(here, "tool", tool)
            return
        if runner_of(tool) is not None:
            yield Seen(here, "tool", tool)
        yield from self.any(here, runner)

    def workbench(self, path: str, workbench: Workbench) -> Iterator[Seen]:
        if isinstance(workbench, SagaWorkbench):
            yield Seen(path or "workbench", "workbench", workbench)
        elif isinstance(workbench, StaticWorkbench) and hasattr(workbench, "_tools"):
            yield from self.any(path, cast(Any, workbench)._tools)
        else:
            kind = type(workbench).__name__
            why = f"{kind} makes its list of tools when it is asked; put it into SagaWorkbench"
            yield Seen(_join(path, kind), "opaque", workbench, why)

    def team(self, path: str, team: Any) -> Iterator[Seen]:
        here = _join(path, f"team:{team.name}")
        yield Seen(here, "team", team)
        participants = getattr(team, "_participants", None)
        if participants is None:
            yield Seen(here, "opaque", team, "its participants do not show")
        else:
            for participant in participants:
                yield from self.any(here, participant)
        for attribute in ("_selector_func", "_candidate_func"):
            if (function := getattr(team, attribute, None)) is not None:
                yield Seen(_join(here, attribute.lstrip("_")), "code", function, CHOOSES)
        for name, condition in _conditions(team):
            yield Seen(_join(here, f"condition:{name}"), "code", condition, CHOOSES)

    def agent(self, path: str, agent: Any) -> Iterator[Seen]:
        here = _join(path, f"agent:{agent.name}")
        if _is_a(agent, "autogen_agentchat.agents", "AssistantAgent"):
            yield from self.assistant(here, agent)
        elif _is_a(agent, "autogen_agentchat.agents", "SocietyOfMindAgent") and hasattr(agent, "_team"):
            yield from self.any(here, agent._team)
        elif _is_a(agent, "autogen_agentchat.agents", "MessageFilterAgent") and hasattr(agent, "_wrapped_agent"):
            yield from self.any(here, agent._wrapped_agent)
        elif _is_a(agent, "autogen_agentchat.agents", "UserProxyAgent"):
            if (asks := getattr(agent, "input_func", None)) is not None and not _is_autogens(asks):
                yield Seen(_join(here, "input_func"), "code", asks, "it asks a person by code of yours")
        elif _is_a(agent, "autogen_agentchat.agents", "CodeExecutorAgent"):
            yield Seen(here, "opaque", agent, "it runs code that a model writes")
        else:
            kind = type(agent).__name__
            yield Seen(here, "code", agent.on_messages, f"{kind} answers messages by code of its own")

    def assistant(self, here: str, agent: Any) -> Iterator[Seen]:
        workbenches = getattr(agent, "_workbench", None)
        tools = getattr(agent, "_tools", None)
        if workbenches is None or tools is None:
            yield Seen(here, "opaque", agent, "its tools do not show")
        yield from self.any(here, tools or [])
        for workbench in workbenches or ():
            yield from self.any(here, workbench)
        for handoff in getattr(agent, "_handoff_tools", None) or ():
            if not _is_autogens(function_in(handoff)):
                yield from self.any(here, handoff)
        if not type(agent).__module__.startswith("autogen_agentchat."):
            own = [name for name in ("on_messages", "on_messages_stream") if _own(agent, name)]
            for name in own:
                yield Seen(_join(here, name), "code", getattr(agent, name), f"{type(agent).__name__} overrides it")


def _conditions(team: Any) -> Iterator[tuple[str, Any]]:
    """The functions of a `GraphFlow` that say which edges are taken."""
    nodes: Mapping[str, Any] = getattr(getattr(team, "_graph", None), "nodes", {})
    for name, node in nodes.items():
        for edge in node.edges:
            function = getattr(edge, "condition_function", None)
            if function is not None:
                yield f"{name}-{edge.target}", function


def _own(agent: Any, method: str) -> bool:
    definer = next(kind for kind in type(agent).__mro__ if method in vars(kind))
    return not definer.__module__.startswith("autogen_agentchat.")


def _is_autogens(fn: object) -> bool:
    """Whether a function is AutoGen's own: of a handoff, it tells who speaks next, and does nothing."""
    module = getattr(fn, "__module__", None)
    return isinstance(module, str) and module.startswith("autogen_agentchat.")


def _is_a(found: object, module: str, name: str) -> bool:
    """Whether it is of a class that only a loaded module can have made."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(found, kind)


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
