"""`coverage`: what can be seen of an agent or team, and what of it is wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from autogen_core.tools import StaticWorkbench

from agent_saga_autogen.adapter import NAME
from agent_saga_autogen.tools import function_in
from agent_saga_autogen.walk import Seen, walk
from agent_saga_autogen.workbench import SagaWorkbench
from agent_saga_core.coverage import CoverageEntry, CoverageManifest, entry_for, opaque, reach
from agent_saga_core.wrapping import runner_of

__all__ = ["coverage"]

IDENTITY = "call-id"


def coverage(agent_or_tools: object) -> CoverageManifest:
    """What can be seen of an agent, a team, a tool agent, a workbench, a tool, or a list of them.

    Tools are read from private attributes of AutoGen's classes; where one is missing, and where a workbench lists its
    tools only when it is asked, the entry is opaque. An agent with code of its own is opaque as well, beside whatever
    tools its code can be seen to reach. A tool that runs an agent or a team (`AgentTool`, `TeamTool`) stands for what
    is in that. AutoGen's own handoffs are left out: they say who speaks next, and do nothing.

    A tool that came from `load_component` is not wrapped, whatever it was dumped from, and is reported so.
    """
    entries: list[CoverageEntry] = []
    for seen in walk(agent_or_tools):
        entries.extend(_entries(seen))
    return CoverageManifest(framework=NAME, entries=tuple(entries))


def _entries(seen: Seen) -> Iterator[CoverageEntry]:
    if seen.kind == "tool":
        yield _tool(seen.found, seen.path)
    elif seen.kind == "workbench":
        yield from _workbench(seen.path, seen.found)
    elif seen.kind == "opaque":
        yield opaque(seen.path, seen.why, framework=NAME)
    elif seen.kind == "code":
        yield opaque(seen.path, seen.why, framework=NAME)
        for path, found in reach(seen.found):
            if runner_of(found) is not None or (not isinstance(found, type) and hasattr(found, "run_json")):
                yield entry_for(
                    found, path=f"{seen.path}/{path}", framework=NAME, identity=IDENTITY, visibility="inferred"
                )


def _tool(tool: Any, path: str) -> CoverageEntry:
    fn = function_in(tool)
    if runner_of(tool) is None and runner_of(fn) is not None:
        # Its calls are steps, but AutoGen runs a sync one where only the binding of a run can tell the saga.
        return entry_for(
            fn,
            path=path,
            framework=NAME,
            name=tool.name,
            detail="a saga tool made into an AutoGen tool: wrap the plain function with wrap_tool to use call ids",
        )
    return entry_for(tool, path=path, framework=NAME, identity=IDENTITY)


def _workbench(path: str, workbench: SagaWorkbench) -> Iterator[CoverageEntry]:
    for name, runner in workbench.runners.items():
        yield entry_for(_Declared(runner), path=f"{path}/{name}", framework=NAME, identity=IDENTITY)
    if workbench.undeclared == "refuse":
        return
    inner = workbench.workbench
    if isinstance(inner, StaticWorkbench) and hasattr(inner, "_tools"):
        for tool in cast(Any, inner)._tools:
            if tool.name not in workbench.runners:
                yield _tool(tool, f"{path}/{tool.name}")
    else:
        why = f'{type(inner).__name__} with undeclared="allow" calls tools that nothing lists'
        yield opaque(f"{path}/*", why, framework=NAME)


class _Declared:
    """A declaration without a tool object."""

    def __init__(self, runner: object) -> None:
        self.__agent_saga__ = runner
