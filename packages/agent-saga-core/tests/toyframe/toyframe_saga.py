"""The adapter's package: `wrap_tool` and `coverage`."""

from __future__ import annotations

import copy
from typing import Any, Unpack

import toyframe

from agent_saga_core import CoverageManifest
from agent_saga_core.coverage import entry_for, opaque, reach
from agent_saga_core.wrapping import CallSite, Declaration, ToolRunner, runner_of


class _Wrapped(toyframe.Tool):
    __agent_saga__: ToolRunner

    def run(self, call_id: str, **args: Any) -> Any:
        site = CallSite("toyframe", "run", call_id)
        return self.__agent_saga__.run(args, lambda key: super(_Wrapped, self).run(call_id, **args), site=site)


def wrap_tool(tool: toyframe.Tool, **declaration: Unpack[Declaration]) -> toyframe.Tool:
    wrapped = copy.copy(tool)
    wrapped.__class__ = _Wrapped
    wrapped.__agent_saga__ = ToolRunner(tool.name, declaration, adapter="toyframe", fn=tool.fn)  # type: ignore[attr-defined]
    return wrapped


def _entry(tool: toyframe.Tool, path: str, **more: Any) -> Any:
    return entry_for(tool, path=path, framework="toyframe", identity="call-id", **more)


def coverage(found: Any) -> CoverageManifest:
    entries: list[Any] = []
    for item in found if isinstance(found, list) else [found]:
        if isinstance(item, toyframe.Agent):
            entries += [_entry(tool, f"agent/{name}") for name, tool in item.tools.items()]
            if item.planner is not None:
                entries.append(opaque("agent/planner", "it is a function", framework="toyframe"))
                for how, reached in reach(item.planner):
                    if isinstance(reached, toyframe.Tool):
                        entries.append(_entry(reached, f"agent/planner/{how}", visibility="inferred"))
        else:
            entries.append(_entry(item, f"tool/{item.name}"))
    return CoverageManifest(framework="toyframe", entries=tuple(entries))


assert runner_of(toyframe.Tool("x", print)) is None
