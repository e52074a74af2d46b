"""What can be seen of the tools in something of LangChain: lists, sequences, bindings, ToolNodes, agents.

Graphs are looked into as far as their ToolNodes; agent-saga-langgraph looks into their nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, cast

from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tools import BaseTool

from agent_saga_core import CoverageManifest, DeclarationError
from agent_saga_core.coverage import CoverageEntry, entry_for, opaque, reach
from agent_saga_core.wrapping import ToolRunner, runner_of
from agent_saga_langchain.adapter import NAME

__all__ = ["coverage", "kept_graphs_in", "runners_in"]

IN_GRAPH: Final = "call-id"
ANYWHERE: Final = "call-id in a graph, else occurrence"
_CONTAINERS: Final[tuple[type[Any], ...]] = (
    BaseTool, RunnableAssign, RunnableBindingBase, RunnableBranch, RunnableParallel, RunnableSequence,
    RunnableWithFallbacks,
)  # fmt: skip
_KNOWN_MODULES: Final = ("langchain.agents.", "langgraph.pregel.", "langgraph.graph.", "agent_saga_langchain.")
"""Whose own functions in a graph call a model, or nothing at all."""


def coverage(found: Any) -> CoverageManifest:
    """What can be seen of an agent, a runnable, a tool, or a list or mapping of tools: each tool, wrapped or not.

    A place that may call tools and cannot be seen into is an opaque entry: functions in a chain or a graph, and
    runnables that are not LangChain's own. What functions reach is listed as inferred.

    Not seen: tools that middleware adds at call time, and what tools call themselves.

    Args:
        found: What to look into.

    Raises:
        DeclarationError: It is nothing of LangChain.
    """
    if not (isinstance(found, Runnable | Mapping) or _is_list(found) or _nodes_of(found) is not None):
        raise DeclarationError(
            f"{type(found).__name__} is nothing of LangChain. Give an agent, a runnable, or a list of tools."
        )
    return CoverageManifest(framework=NAME, entries=tuple(_entries(found, "")))


def runners_in(found: Any) -> list[ToolRunner]:
    """The runners of all wrapped tools that can be seen, each once."""
    runners: dict[ToolRunner, None] = {}
    for tool in _tools(found, set()):
        runner = runner_of(tool)
        if runner is not None:
            runners[runner] = None
    return list(runners)


def kept_graphs_in(found: Any, bound: Mapping[str, Any] | None = None) -> list[tuple[Any, Mapping[str, Any]]]:
    """The graphs with a checkpointer that each run of a runnable goes through, and the `configurable` bound to each."""
    if isinstance(found, RunnableSequence):
        steps: list[Any] = cast("RunnableSequence[Any, Any]", found).steps
        return [graph for step in steps for graph in kept_graphs_in(step, bound)]
    config: Any = getattr(found, "config", None)
    own: Any = cast("Mapping[str, Any]", config).get("configurable") if isinstance(config, Mapping) else None
    bound = {**(own or {}), **(bound or {})}
    if isinstance(found, RunnableBindingBase):
        return kept_graphs_in(cast("RunnableBindingBase[Any, Any]", found).bound, bound)
    return [(found, bound)] if getattr(found, "checkpointer", None) and hasattr(found, "get_state") else []


# --- entries


def _entries(found: Any, path: str) -> Iterator[CoverageEntry]:
    if _is_list(found):
        yield from _listed(cast("Iterable[Any]", found), path)
    elif isinstance(found, Mapping):
        for key, item in cast("Mapping[object, Any]", found).items():
            yield from _element(item, path, str(key))
    elif isinstance(found, BaseTool):
        yield _entry(found, path or "tools")
    elif _is_tool_node(found):
        yield from _tool_node_entries(found, path or "tools")
    elif (nodes := _nodes_of(found)) is not None:
        for name, node in nodes.items():
            yield from _node(node, f"{path}/node:{name}" if path else f"node:{name}", name)
    else:
        yield from _runnable(found, path)


def _listed(found: Iterable[Any], path: str) -> Iterator[CoverageEntry]:
    for n, item in enumerate(found):
        yield from _element(item, path, f"[{n}]")


def _element(item: Any, path: str, label: str) -> Iterator[CoverageEntry]:
    if isinstance(item, BaseTool) or (callable(item) and not isinstance(item, Runnable)):
        yield _entry(item, path or "tools")
    elif isinstance(item, Mapping):  # a provider's own tool, run by the provider
        named = cast("Mapping[str, Any]", item)
        name = str(named.get("name") or named.get("type") or label)
        why = "a tool that the model's provider runs: it is in no saga"
        yield opaque(f"{path or 'tools'}/{name}", why, framework=NAME, remote=True, name=name)
    else:
        yield from _entries(item, f"{path}/{label}" if path else label)


def _entry(tool: Any, path: str, *, wrapped: Any = None, identity: str = ANYWHERE) -> CoverageEntry:
    name: str = getattr(tool, "name", None) or getattr(tool, "__name__", None) or type(tool).__name__
    detail = "wrapped by SagaMiddleware" if wrapped is not None and wrapped is not tool else ""
    return entry_for(
        wrapped if wrapped is not None else tool,
        path=f"{path}/{name}", name=name, framework=NAME, identity=identity, detail=detail,
    )  # fmt: skip


def _tool_node_entries(node: Any, path: str) -> Iterator[CoverageEntry]:
    """The entries of a ToolNode's tools, as `SagaMiddleware` wraps them if it stands before it."""
    middleware = _middleware_before(node)
    for tool in node.tools_by_name.values():
        wrapped = middleware.wrapped(tool) if middleware is not None else None
        yield _entry(tool, path, wrapped=wrapped, identity=IN_GRAPH)


def _node(node: Any, path: str, name: str) -> Iterator[CoverageEntry]:
    inner = _inner(node)
    if _is_tool_node(inner) or _nodes_of(inner) is not None or isinstance(inner, _CONTAINERS):
        yield from _entries(inner, path)
    elif name != "__start__" and not _is_known_node(inner):
        why = "a node of its own; agent_saga_langgraph.coverage looks into it"
        yield opaque(path, why, framework=NAME, name=name)


def _is_known_node(node: Any) -> bool:
    """Whether the code of a node is LangChain's, LangGraph's or ours, and calls no tool by itself."""
    functions = [fn for fn in (getattr(node, "func", None), getattr(node, "afunc", None)) if fn is not None]
    return bool(functions) and all(_module_of(fn).startswith(_KNOWN_MODULES) for fn in functions)


def _runnable(found: Any, path: str) -> Iterator[CoverageEntry]:
    if _calls_no_tool(found):
        return
    parts = _parts(found)
    if parts is not None:
        for label, part in parts:
            yield from _entries(part, f"{path}/{label}" if path else label)
        return
    place = path or getattr(found, "name", None) or type(found).__name__
    if isinstance(found, RunnableLambda):
        fn = _function_of(found)
        seen = [(where, tool) for where, tool in reach(fn) if isinstance(tool, BaseTool)]
        for where, tool in seen:
            name = tool.name
            yield entry_for(
                tool, path=f"{place}/{where}", name=name, framework=NAME, identity=ANYWHERE, visibility="inferred"
            )
        yield opaque(place, "a function, which may call tools that it names nowhere", framework=NAME)
        return
    yield opaque(place, f"a runnable of type {type(found).__qualname__}", framework=NAME)


def _calls_no_tool(found: Any) -> bool:
    # Prompts bring a YAML parser with them, which those who only run agents need not wait for.
    from langchain_core.language_models import BaseLanguageModel
    from langchain_core.output_parsers import BaseOutputParser
    from langchain_core.prompts import BasePromptTemplate

    kinds = (BaseLanguageModel, BasePromptTemplate, BaseOutputParser, RunnablePassthrough, RunnablePick)
    return isinstance(found, kinds)


# --- what is in what


def _tools(found: Any, seen: set[int]) -> Iterator[Any]:
    """Every tool that a walk meets, wrapped ones in place of those that `SagaMiddleware` wraps."""
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, BaseTool) or runner_of(found) is not None:
        yield found
    elif _is_tool_node(found):
        middleware = _middleware_before(found)
        for tool in found.tools_by_name.values():
            yield (middleware.wrapped(tool) if middleware is not None else None) or tool
    elif (nodes := _nodes_of(found)) is not None:
        for node in nodes.values():
            yield from _tools(_inner(node), seen)
    elif isinstance(found, RunnableLambda):
        fn = _function_of(found)
        yield from (tool for _, tool in reach(fn) if runner_of(tool) is not None)
    else:
        yield from _inside(found, seen)


def _inside(found: Any, seen: set[int]) -> Iterator[Any]:
    if _is_list(found):
        parts: Iterable[Any] = found
    elif isinstance(found, Mapping):
        parts = cast("Mapping[object, Any]", found).values()
    else:
        parts = [part for _, part in _parts(found) or ()]
    for part in parts:
        yield from _tools(part, seen)


def _parts(found: Any) -> list[tuple[str, Any]] | None:
    """What a runnable of LangChain's own is made of; None for one that cannot be taken apart."""
    if isinstance(found, RunnableSequence):
        steps = cast("RunnableSequence[Any, Any]", found).steps
        return [(f"step:{n}", step) for n, step in enumerate(steps)]
    if isinstance(found, RunnableBindingBase):  # with_config, bind, with_retry
        return [("bound", cast("RunnableBindingBase[Any, Any]", found).bound)]
    if isinstance(found, RunnableParallel):
        return list(cast("RunnableParallel[Any]", found).steps__.items())
    if isinstance(found, RunnableAssign):
        return [("mapper", cast(Any, found).mapper)]
    if isinstance(found, RunnableBranch):
        branches = cast("RunnableBranch[Any, Any]", found)
        whens = [(f"if:{n}", when) for n, (when, _) in enumerate(branches.branches)]
        thens = [(f"then:{n}", then) for n, (_, then) in enumerate(branches.branches)]
        return [*whens, *thens, ("else", branches.default)]
    if isinstance(found, RunnableWithFallbacks):
        tried = cast("RunnableWithFallbacks[Any, Any]", found)
        return [("runnable", tried.runnable), *((f"fallback:{n}", one) for n, one in enumerate(tried.fallbacks))]
    executes = getattr(found, "tools", None)  # AgentExecutor and its like: an agent that plans, tools that are run
    if isinstance(found, Runnable) and _is_list(executes):
        planner = getattr(cast(Any, found), "agent", None)
        return [("tools", executes)] if planner is None else [("tools", executes), ("agent", _planner(planner))]
    return None


def _function_of(found: Any) -> Any:
    """What a `RunnableLambda` calls."""
    return getattr(found, "func", None) or getattr(found, "afunc", None)


def _planner(agent: Any) -> Any:
    """The runnable of an agent that only plans; the agent itself where there is none."""
    return getattr(agent, "runnable", agent)


def _is_list(found: Any) -> bool:
    return isinstance(found, list | tuple | set | frozenset)


def _is_tool_node(found: Any) -> bool:
    return isinstance(getattr(found, "tools_by_name", None), Mapping)


def _nodes_of(found: Any) -> Mapping[str, Any] | None:
    """The nodes of a graph, compiled or not."""
    nodes = getattr(found, "nodes", None)
    is_graph = isinstance(nodes, Mapping) and type(found).__module__.startswith("langgraph.")
    return cast("Mapping[str, Any]", nodes) if is_graph else None


def _inner(node: Any) -> Any:
    """What a node runs: of a compiled graph `bound`, of a builder `runnable`."""
    return getattr(node, "bound", None) or getattr(node, "runnable", None) or node


def _middleware_before(node: Any) -> Any:
    """The `SagaMiddleware` that a ToolNode's calls go through, if there is one."""
    wraps: list[Any] = [getattr(node, name, None) for name in ("_wrap_tool_call", "_awrap_tool_call")]
    for fn in wraps:
        for _, one in reach(fn) if fn is not None else ():
            if type(one).__name__ == "SagaMiddleware" and hasattr(one, "wrapped"):
                return one
    return None


def _module_of(fn: Any) -> str:
    while isinstance(fn, partial):
        fn = cast("partial[Any]", fn).func
    return str(getattr(fn, "__module__", "")) + "."
