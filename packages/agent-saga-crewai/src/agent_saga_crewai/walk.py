"""`coverage`: which tools a crew, a flow or an agent may call, and where nobody can look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, cast

from crewai.agents.agent_builder.base_agent import BaseAgent
from crewai.crew import Crew
from crewai.flow.flow import Flow
from crewai.flow.flow_wrappers import FlowMethod
from crewai.task import Task
from crewai.tools.base_tool import BaseTool
from crewai.tools.structured_tool import CrewStructuredTool

from agent_saga_core.coverage import CoverageEntry, CoverageManifest, entry_for, opaque, reach
from agent_saga_core.wrapping import ToolRunner, runner_of
from agent_saga_crewai.adapter import NAME
from agent_saga_crewai.calls import runner_in

__all__ = ["Seen", "coverage", "seen_in"]

_IDENTITY: Final = "place in its task"
_OPAQUE: Final = {
    "apps": "the tools of platform apps are fetched when the agent runs",
    "mcps": "the tools of MCP servers are fetched when the agent runs",
    "memory": "memory tools are added when the agent runs",
    "allow_code_execution": "the agent writes and runs code of its own",
    "skills": "skills may bring tools when the agent runs",
}
_CALLBACKS: Final = (
    "guardrail",
    "guardrails",
    "callback",
    "step_callback",
    "task_callback",
    "before_kickoff_callbacks",
    "after_kickoff_callbacks",
)


def coverage(found: Any) -> CoverageManifest:
    """Say of each tool that can be seen from here whether its calls are steps, and name each place that hides tools.

    Looked at are agents' and tasks' tools, the manager, what the callables of the crew reach, and for a flow what its
    methods reach. Memory, apps, MCP servers, code execution and the bodies of flows are opaque.

    Args:
        found: A `Crew`, `Flow`, `Agent`, `Task` or tool, or several.

    Raises:
        TypeError: It is none of these.
    """
    return CoverageManifest(framework=NAME, entries=tuple(_Walk().entries(found)))


class Seen(NamedTuple):
    """What a run has to know of what it runs."""

    runners: list[ToolRunner]
    """Those of all wrapped tools."""
    agents: list[Any]


def seen_in(found: Any) -> Seen:
    """What can be seen from here."""
    walk = _Walk()
    for _ in walk.entries(found):
        pass
    return Seen(walk.runners, walk.agents)


class _Walk:
    """One walk: each object once."""

    def __init__(self) -> None:
        self.seen: dict[int, object] = {}
        self.runners: list[ToolRunner] = []
        self.agents: list[Any] = []

    def entries(self, found: Any, path: str = "") -> Iterator[CoverageEntry]:
        if isinstance(found, list | tuple | set | frozenset):
            for n, item in enumerate(cast("Iterable[Any]", found)):
                yield from self.entries(item, f"{path}[{n}]")
            return
        walk = self._walk_of(found)
        if walk is None:
            raise TypeError(f"{type(found).__name__} is no crew, flow, agent, task or tool of CrewAI.")
        if self.fresh(found):
            yield from walk(found, path)

    def _walk_of(self, found: Any) -> Callable[[Any, str], Iterator[CoverageEntry]] | None:
        for kinds, walk in (
            ((BaseTool, CrewStructuredTool), self.tool),
            ((BaseAgent,), self.agent),
            ((Crew,), self.crew),
            ((Task,), self.task),
            ((Flow,), self.flow),
        ):
            if isinstance(found, kinds):
                return walk
        if _is_lite_agent(found):
            return self.agent
        return self.function if runner_of(found) is not None or callable(found) else None

    def fresh(self, found: object) -> bool:
        if id(found) in self.seen:
            return False
        self.seen[id(found)] = found
        return True

    def tool(self, tool: Any, path: str, visibility: Any = "declared") -> Iterator[CoverageEntry]:
        coworkers = _coworkers(tool)
        if coworkers is not None:  # it does nothing itself: it lets other agents work
            for agent in coworkers:
                yield from self.entries(agent, f"{path}agent:{_name(agent)}")
            return
        runner = runner_in(tool)
        if runner is not None and runner not in self.runners:
            self.runners.append(runner)
        carrier: object = next(
            (it for it in (tool, getattr(tool, "_original_tool", None), getattr(tool, "func", None)) if runner_of(it)),
            tool,
        )
        name = str(tool.name)
        yield entry_for(
            carrier, path=f"{path}/{name}".lstrip("/"), framework=NAME, identity=_IDENTITY, visibility=visibility,
            name=name,
        )  # fmt: skip

    def agent(self, agent: Any, path: str) -> Iterator[CoverageEntry]:
        self.agents.append(agent)
        path = path or f"agent:{_name(agent)}"
        yield from self.each(getattr(agent, "tools", None), path)
        for name, why in _OPAQUE.items():
            if getattr(agent, name, None):
                yield opaque(f"{path}/{name}", why, framework=NAME, remote=name in ("apps", "mcps"))
        yield from self.callbacks(agent, path)

    def crew(self, crew: Any, path: str) -> Iterator[CoverageEntry]:
        prefix = f"{path}/" if path else ""
        for n, agent in enumerate(crew.agents):
            yield from self.entries(agent, f"{prefix}agent:{_name(agent) or n}")
        if getattr(crew, "manager_agent", None) is not None:
            yield from self.entries(crew.manager_agent, f"{prefix}manager:{_name(crew.manager_agent)}")
        for n, task in enumerate(crew.tasks):
            yield from self.entries(task, f"{prefix}task:{n}")
        if getattr(crew, "memory", None):
            yield opaque(f"{prefix}memory", _OPAQUE["memory"], framework=NAME)
        yield from self.callbacks(crew, path or "crew")

    def task(self, task: Any, path: str) -> Iterator[CoverageEntry]:
        path = path or "task"
        yield from self.each(getattr(task, "tools", None), path)
        if getattr(task, "agent", None) is not None:
            yield from self.entries(task.agent, f"{path}/agent:{_name(task.agent)}")
        yield from self.callbacks(task, path)

    def each(self, tools: Any, path: str) -> Iterator[CoverageEntry]:
        for tool in cast("Iterable[Any]", tools or ()):
            yield from self.entries(tool, path)

    def flow(self, flow: Any, path: str) -> Iterator[CoverageEntry]:
        path = path or f"flow:{type(flow).__name__}"
        for name, method in _methods(flow):
            yield opaque(f"{path}.{name}", "the body of a flow's method may call any tool", framework=NAME)
            yield from self.reached(method, f"{path}.{name}")

    def callbacks(self, owner: Any, path: str) -> Iterator[CoverageEntry]:
        """What the user's own functions around a run reach."""
        for name in _CALLBACKS:
            held = getattr(owner, name, None)
            for fn in cast("list[Any]", held) if isinstance(held, list) else [held]:
                if callable(fn):
                    yield from self.reached(fn, f"{path}/{name}")

    def function(self, fn: Any, path: str) -> Iterator[CoverageEntry]:
        runner = runner_of(fn)
        if runner is None:
            yield from self.reached(fn, path or getattr(fn, "__name__", "function"))
            return
        if runner not in self.runners:
            self.runners.append(runner)
        yield entry_for(fn, path=path or runner.spec.tool, framework=NAME, identity=_IDENTITY)

    def reached(self, fn: Any, path: str) -> Iterator[CoverageEntry]:
        for label, found in reach(fn):
            is_tool = isinstance(found, BaseTool | CrewStructuredTool)
            if is_tool and self.fresh(found):
                yield from self.tool(found, f"{path}/{label}", "inferred")
            elif isinstance(found, BaseAgent | Crew | Task | Flow) or _is_lite_agent(found):
                yield from self.entries(found, f"{path}/{label}")
            elif not is_tool and runner_of(found) is not None and self.fresh(found):
                yield from self.function(found, f"{path}/{label}")


def _is_lite_agent(found: Any) -> bool:
    """Whether it is CrewAI's former agent without a crew, which only warns when it is named."""
    return type(found).__name__ == "LiteAgent" and type(found).__module__ == "crewai.lite_agent"


def _name(agent: Any) -> str:
    role = getattr(agent, "role", None)
    return role.strip() if isinstance(role, str) else ""


def _coworkers(tool: Any) -> list[Any] | None:
    """The agents that a delegation tool lets work; None if it is not one."""
    if "agent_tools" not in type(tool).__module__:
        return None
    agents = getattr(tool, "agents", None)
    return cast("list[Any]", agents) if isinstance(agents, list) else None


def _methods(flow: Any) -> Iterator[tuple[str, Any]]:
    """The steps of a flow, by the wrapper that CrewAI's decorators leave; the whole flow if none is found."""
    names = {
        name: None
        for kind in reversed(type(flow).__mro__)
        if kind.__module__.partition(".")[0] != "crewai"
        for name, member in vars(kind).items()
        if isinstance(member, FlowMethod)
    }
    for name in names:
        yield name, getattr(flow, name)
    if not names:
        yield "kickoff", flow.kickoff
