"""`coverage`: the tools of agents and workflows, and the places in them that cannot be seen into."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from llama_index.core.agent.workflow import AgentWorkflow, CodeActAgent
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.tools import BaseTool
from workflows import Workflow

from agent_saga_core.coverage import CoverageEntry, CoverageManifest, entry_for, opaque, reach
from agent_saga_core.wrapping import ToolRunner, runner_of
from agent_saga_llamaindex.adapter import NAME
from agent_saga_llamaindex.inside import names_work

__all__ = ["coverage", "runners_in"]


def coverage(found: object) -> CoverageManifest:
    """Which tools of an agent, a workflow, a tool or a list of these are wrapped, and where nobody can look.

    A tool retriever, the body of every step that is not LlamaIndex's own, and whatever runs code that a model wrote is
    one opaque entry each; tools that such a body can be seen to reach are listed beside it as inferred.

    Args:
        found: A `BaseTool`, a function declared with `@saga_tool`, an agent, an `AgentWorkflow`, any `Workflow`, or a
            list or tuple of them.
    """
    return CoverageManifest(framework=NAME, entries=tuple(_entries(found, "")))


def runners_in(workflow: object) -> list[ToolRunner]:
    """The wrapped tools that can be seen in what is about to run."""
    runners = (runner_of(tool) for tool in _tools_in(workflow))
    return list(dict.fromkeys(runner for runner in runners if runner is not None))


def _entries(found: object, at: str) -> Iterator[CoverageEntry]:
    if isinstance(found, list | tuple):
        for n, item in enumerate(cast("Iterable[object]", found)):
            bare = isinstance(item, Workflow) and not isinstance(item, BaseWorkflowAgent)
            yield from _entries(item, f"{at}{n}/" if bare else at)
    elif isinstance(found, AgentWorkflow):
        for agent in found.agents.values():
            yield from _entries(agent, at)
        yield from _steps(found, at)
    elif isinstance(found, BaseWorkflowAgent):
        yield from _of_agent(found, f"{at}agent:{found.name}/")
    elif isinstance(found, Workflow):
        yield from _steps(found, at)
    elif isinstance(found, BaseTool):
        yield _of_tool(found, f"{at}tools/{_name(found)}")
    elif runner_of(found) is not None:
        yield entry_for(found, path=f"{at}tools/{_name(found)}", framework=NAME, identity=_identity())
    else:
        yield opaque(f"{at}{type(found).__name__}", "it is no tool, agent or workflow of LlamaIndex", framework=NAME)


def _of_agent(agent: BaseWorkflowAgent, at: str) -> Iterator[CoverageEntry]:
    for tool in _listed(agent):
        yield from _entries(tool, at)
    if cast(Any, agent).tool_retriever is not None:
        yield opaque(f"{at}tool_retriever", "it finds tools while the agent runs", framework=NAME)
    if isinstance(agent, CodeActAgent):
        yield opaque(f"{at}code_execute_fn", "it runs code that the model writes", framework=NAME)
    if agent.structured_output_fn is not None:
        yield from _of_code(
            agent.structured_output_fn, f"{at}structured_output_fn", "it is a function of the user's", set()
        )
    if not _is_llamaindex(type(agent)):
        yield opaque(f"{at}class:{type(agent).__name__}", "what it overrides may call tools itself", framework=NAME)
    yield from _steps(agent, at)


def _listed(agent: BaseWorkflowAgent) -> Iterable[object]:
    return cast("Iterable[object]", cast(Any, agent).tools or ())


def _steps(workflow: Workflow, at: str) -> Iterator[CoverageEntry]:
    steps = _steps_of(workflow)
    if not steps:
        yield opaque(f"{at}steps", "its steps cannot be listed", framework=NAME)
    seen: set[int] = set()
    for name, step in steps.items():
        if not _is_llamaindex(step):
            yield from _of_code(step, f"{at}step:{name}", "a step's body calls what it likes", seen)


def _of_code(code: Callable[..., Any], path: str, why: str, seen: set[int]) -> Iterator[CoverageEntry]:
    """A place with code in it, and the tools that it reaches, but for those that were `seen` before."""
    for way, tool in _reached(code):
        if id(tool) in seen:
            continue
        seen.add(id(tool))
        name = _name(tool)
        if isinstance(tool, BaseTool):
            yield _of_tool(tool, f"{path}/{way}", inferred=True)
        else:
            yield entry_for(
                tool, path=f"{path}/{way}", framework=NAME, identity=_identity(), visibility="inferred", name=name
            )
    yield opaque(path, why, framework=NAME)


def _of_tool(tool: BaseTool, path: str, *, inferred: bool = False) -> CoverageEntry:
    return entry_for(
        _wrapped_in(tool),
        path=path,
        framework=NAME,
        identity=_identity(),
        name=_name(tool),
        visibility="inferred" if inferred else "declared",
    )


def _identity() -> str:
    return "the step and its work item" if names_work() else "occurrence"


def _wrapped_in(tool: BaseTool) -> object:
    """What of a tool is declared: itself, the function it was made from, or the sync tool in an async one."""
    inner = (getattr(tool, name, None) for name in ("real_fn", "fn", "async_fn", "base_tool"))
    return next((part for part in (tool, *inner) if runner_of(part) is not None), tool)


def _name(tool: object) -> str:
    if isinstance(tool, BaseTool):
        return str(tool.metadata.name or type(tool).__name__)
    runner = runner_of(tool)
    return runner.spec.tool if runner is not None else type(tool).__name__


def _reached(code: Callable[..., Any]) -> Iterator[tuple[str, object]]:
    for way, found in reach(code):
        if isinstance(found, BaseTool) or (callable(found) and runner_of(found) is not None):
            yield way, found


def _tools_in(found: object) -> Iterator[object]:
    """Every tool that `coverage` would list, wrapped or not."""
    if isinstance(found, AgentWorkflow):
        for agent in found.agents.values():
            yield from _tools_in(agent)
    if isinstance(found, BaseWorkflowAgent):
        yield from (_wrapped_in(tool) for tool in _listed(found) if isinstance(tool, BaseTool))
    if isinstance(found, Workflow):
        for step in _steps_of(found).values():
            if not _is_llamaindex(step):
                for _, tool in _reached(step):
                    yield _wrapped_in(tool) if isinstance(tool, BaseTool) else tool


def _steps_of(workflow: Workflow) -> dict[str, Callable[..., Any]]:
    """Methods and functions that are steps, which `@step` marks; bound to the workflow, so that a scan sees into it."""
    marked: dict[str, Callable[..., Any]] = {}
    for name, _ in inspect.getmembers_static(type(workflow), lambda member: hasattr(member, "_step_config")):
        marked[name] = getattr(workflow, name)
    added: Any = getattr(type(workflow), "_step_functions", {})
    return {**marked, **added}


def _is_llamaindex(found: object) -> bool:
    return getattr(found, "__module__", "").partition(".")[0] in ("llama_index", "workflows")
