"""What tools a graph can call: listed where the graph lists them, inferred from code, and named where nothing shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard, cast
from weakref import WeakKeyDictionary

from langchain_core.tools import BaseTool
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel  # pyright: ignore[reportMissingTypeStubs]

from agent_saga_core import ActionSemantics, CoverageManifest
from agent_saga_core.coverage import CoverageEntry, entry_for, opaque, reach
from agent_saga_core.errors import DeclarationError
from agent_saga_core.wrapping import ToolRunner, runner_of
from agent_saga_langgraph.adapter import NAME
from agent_saga_langgraph.hooks import hooks_of

__all__ = ["Inside", "coverage", "inside"]

BY_CALL = "call-id"
"""The model's id of the call, within the thread's task."""
OWN_CODE = ("langgraph.", "langchain.agents.", "langchain_core.", "agent_saga_langchain.", "agent_saga_langgraph.")
"""Modules whose functions call no tools but those that are listed beside them."""
PARTS = ("func", "afunc", "bound", "runnable", "first", "middle", "last", "steps", "steps__", "default", "fallbacks")
"""Where LangChain's runnables keep what they run."""
MAX_DEPTH = 12
"""Runnables in runnables, and graphs in graphs: how deep the walk goes."""


class _Spot(NamedTuple):
    """A tool, or (without one) a place that cannot be seen into."""

    path: str
    tool: object | None
    why: str = ""
    listed: bool = True
    identity: str = "occurrence"
    remote: bool = False


Spots = Iterator[_Spot]


class Inside(NamedTuple):
    """What a run has to know of what is in its graph.

    Attributes:
        runners: What the wrapped tools carry.
        unkept: The subgraphs that are compiled with `checkpointer=False`, each with the names of the wrapped tools in
            it whose calls nothing but their place can tell apart.
    """

    runners: list[ToolRunner]
    unkept: dict[str, list[str]]


def coverage(found: Any) -> CoverageManifest:
    """Every tool that a graph can be seen to call, and every place in it that cannot be seen into.

    Listed are the tools of `ToolNode`s, subgraphs included, and nodes that are tools. What the code of other nodes and
    of conditional edges refers to is inferred; since it may call more than that, each such node is one opaque entry,
    `"node:<name>"`. So is each function of the user's around tool calls or model calls (middleware).

    Args:
        found: A graph, compiled or not, an `@entrypoint`, a `ToolNode`, a tool, or a list of these.

    Raises:
        DeclarationError: It is none of these.
    """
    return CoverageManifest(framework=NAME, entries=tuple(_entry(spot) for spot in _spots(found)))


_known: WeakKeyDictionary[object, Inside] = WeakKeyDictionary()
_lock = threading.Lock()


def inside(graph: object) -> Inside:
    """What can be seen of what is in a graph. A compiled one is walked once.

    Raises:
        DeclarationError: It is no graph.
    """
    key = graph if _is_compiled(graph) else None
    with _lock:
        known = _known.get(key) if key is not None else None
    if known is None:
        walk = _Walk()
        found = [runner_of(spot.tool) for spot in _spots(graph, walk) if spot.tool is not None]
        known = Inside(list(dict.fromkeys(runner for runner in found if runner is not None)), walk.unkept)
        if key is not None:
            with _lock:
                _known[key] = known
    return known


def _entry(spot: _Spot) -> CoverageEntry:
    if spot.tool is None:
        return opaque(spot.path, spot.why, framework=NAME, remote=spot.remote)
    return entry_for(
        spot.tool,
        path=spot.path,
        framework=NAME,
        identity=spot.identity,
        visibility="declared" if spot.listed else "inferred",
    )


def _spots(found: object, walk: _Walk | None = None) -> Spots:
    """Everything in an object, each tool once: what is listed before what is inferred."""
    listed: list[_Spot] = []
    inferred: list[_Spot] = []
    for spot in (walk or _Walk()).look_at(found, ""):
        (listed if spot.listed else inferred).append(spot)
    seen: set[int] = set()
    for spot in (*listed, *inferred):
        if spot.tool is None:
            yield spot
        elif id(spot.tool) not in seen:
            seen.add(id(spot.tool))
            yield spot


class _Walk:
    """One walk. A graph or a function is looked into once, wherever it is met: graphs are met in their own code."""

    def __init__(self) -> None:
        self.unkept: dict[str, list[str]] = {}
        self._seen: set[int] = set()
        self._paths: set[str] = set()  # of what is named once, though a node's sync and its async code lead to it

    def _first(self, found: object) -> bool:
        known = id(found) in self._seen
        self._seen.add(id(found))
        return not known

    def look_at(self, found: object, path: str) -> Spots:
        if isinstance(found, list | tuple):
            for item in cast("Iterable[object]", found):
                yield from self.look_at(item, path)
        elif isinstance(found, ToolNode):
            yield from self.tool_node(found, path or "tools")
        elif _is_tool(found):
            yield from self.tool(found, _join(path, _title(found)), listed=True)
        elif isinstance(getattr(found, "nodes", None), Mapping):
            yield from self.graph(found, path)
        else:
            raise DeclarationError(
                f"An object of type {type(found).__qualname__} is no graph and no tool. Pass a compiled graph, a "
                "ToolNode, tools, or a list of these."
            )

    def graph(self, graph: Any, path: str) -> Spots:
        if not self._first(graph):
            return
        told = None
        if path and getattr(graph, "checkpointer", None) is False:
            told = self.unkept.setdefault(path, [])
        for spot in self._within(graph, path):
            if told is not None and _is_told_by_place(spot.tool):
                told.append(_title(spot.tool))
            yield spot

    def _within(self, graph: Any, path: str) -> Spots:
        for name, node in graph.nodes.items():
            if name != "__start__":
                runs = getattr(node, "bound", None) or getattr(node, "runnable", None)
                yield from self.node(runs, _join(path, f"node:{name}"))
        yield from self.edges(graph, path)

    def node(self, runs: object, path: str) -> Spots:
        if isinstance(runs, ToolNode):
            yield from self.tool_node(runs, path)
        elif isinstance(runs, Pregel):
            yield from self.graph(runs, path)
        elif _is_tool(runs):
            yield from self.tool(runs, path, listed=True)
        else:
            code = list(_code(runs, 0))
            for fn in code:
                if _is_tool(fn):
                    yield from self.tool(fn, path, listed=True)
                elif isinstance(fn, Pregel):
                    yield from self.graph(fn, path)
                else:
                    yield from self.around_model(fn, path) if _is_agent_node(fn) else self.inferred(fn, path)
            if not code or any(not (_is_tool(fn) or isinstance(fn, Pregel) or _is_known(fn)) for fn in code):
                yield _Spot(path, None, "its code may call tools that nothing lists")

    def edges(self, graph: Any, path: str) -> Spots:
        """Conditional edges: mere choices as a rule, so that they are named only where they refer to tools."""
        builder = getattr(graph, "builder", graph)
        all_branches: Mapping[str, Mapping[str, Any]] = getattr(builder, "branches", None) or {}
        for source, branches in all_branches.items():
            for name, branch in branches.items():
                for fn in _code(getattr(branch, "path", None), 0):
                    if not _is_known(fn):
                        yield from self.inferred(fn, _join(path, f"edge:{source}/{name}"))

    def tool_node(self, node: ToolNode, path: str) -> Spots:
        if not self._first(node):
            return
        hooks = hooks_of(node)
        for name, tool in node.tools_by_name.items():
            declared = hooks.wrapped(tool) if hooks is not None else None
            yield from self.tool(declared or tool, f"{path}/{name}", listed=True, identity=BY_CALL)
        for attribute in ("_wrap_tool_call", "_awrap_tool_call"):
            if not hasattr(node, attribute):
                yield _Spot(f"{path}/wrap_tool_call", None, "this LangGraph does not show what is around its calls")
                return
            for leaf in _leaves(getattr(node, attribute)):
                where = f"{path}/wrap_tool_call:{_name(leaf).replace('.awrap_', '.wrap_')}"
                if not _is_known(leaf) and self._first_path(where):
                    yield _Spot(where, None, "it may call tools that are added when the graph runs")

    def tool(self, tool: Any, path: str, *, listed: bool, identity: str = "occurrence") -> Spots:
        yield _Spot(path, tool, listed=listed, identity=identity)
        if runner_of(tool) is None:  # what a wrapped tool calls is part of its step
            for attribute in ("func", "coroutine", "_run", "_arun"):
                fn = getattr(tool, attribute, None)
                if callable(fn) and not _is_known(fn):
                    yield from self.inferred(fn, path)

    def inferred(self, fn: object, path: str) -> Spots:
        """The tools and graphs that code refers to."""
        if not self._first(fn):
            return
        for _, found in reach(fn):
            if isinstance(found, Pregel):
                yield from (spot._replace(listed=spot.tool is None) for spot in self.graph(found, f"{path}/graph"))
            elif isinstance(found, ToolNode):
                yield from (spot._replace(listed=spot.tool is None) for spot in self.tool_node(found, path))
            elif _is_tool(found):
                yield _Spot(_join(path, _title(found)), found, listed=False)

    def around_model(self, fn: Any, path: str) -> Spots:
        """The node in which `create_agent` asks the model: LangChain's code, and whatever is put around it."""
        cells = _cells(fn)
        for handler in ("wrap_model_call_handler", "awrap_model_call_handler"):
            for leaf in _leaves(cells.get(handler)):
                where = f"{path}/wrap_model_call:{_name(leaf).replace('.awrap_', '.wrap_')}"
                if not _is_known(leaf) and self._first_path(where):
                    yield _Spot(where, None, "it may call tools, or offer others")
        if "default_tools" not in cells:
            yield _Spot(path, None, "this LangChain does not show what it offers to the model")
        for tool in cells.get("default_tools") or ():
            if isinstance(tool, Mapping):
                given = cast("Mapping[str, Any]", tool)
                where = f"{path}/{given.get('name') or given.get('type') or 'tool'}"
                if self._first_path(where):
                    yield _Spot(where, None, "it runs at the model's provider", remote=True)

    def _first_path(self, path: str) -> bool:
        known = path in self._paths
        self._paths.add(path)
        return not known


# --- code


def _code(runs: object, depth: int) -> Iterator[Any]:
    """The functions that a runnable runs, and tools among them."""
    if runs is None or depth > MAX_DEPTH:
        return
    if _is_tool(runs) or isinstance(runs, Pregel) or _is_function(runs):
        yield runs
        return
    if isinstance(runs, Mapping):
        runs = list(cast("Mapping[str, object]", runs).values())
    if isinstance(runs, list | tuple):
        for item in cast("Iterable[object]", runs):
            yield from _code(item, depth + 1)
        return
    parts = [getattr(runs, part) for part in PARTS if getattr(runs, part, None) is not None]
    if parts and type(runs).__module__.startswith(("langgraph.", "langchain_core.")):
        seen: list[object] = []
        for part in parts:
            if part not in seen:
                seen.append(part)
                yield from _code(part, depth + 1)
    elif callable(runs) or hasattr(runs, "invoke"):
        yield runs


def _leaves(around: Any, depth: int = 0) -> Iterator[Any]:
    """The functions that LangChain has put one inside of the other around a call."""
    if around is None or depth > MAX_DEPTH:
        return
    if getattr(around, "__module__", "") != "langchain.agents.factory":
        yield around
        return
    for cell in _cells(around).values():
        if callable(cell):
            yield from _leaves(cell, depth + 1)


def _cells(fn: Any) -> dict[str, Any]:
    """What a function has closed over."""
    code, closure = getattr(fn, "__code__", None), getattr(fn, "__closure__", None) or ()
    cells: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars if code is not None else (), closure, strict=False):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not assigned
            continue
    return cells


def _join(path: str, label: str) -> str:
    return f"{path}/{label}" if path else label


def _title(tool: object) -> str:
    return str(getattr(tool, "name", None) or getattr(tool, "__name__", type(tool).__name__))


def _is_tool(found: object) -> TypeGuard[Any]:
    return isinstance(found, BaseTool) or runner_of(found) is not None


def _is_told_by_place(tool: object) -> bool:
    runner = runner_of(tool)
    return runner is not None and runner.spec.key is None and runner.spec.semantics is not ActionSemantics.READ_ONLY


def _is_compiled(found: object) -> bool:
    return isinstance(found, Pregel)


def _is_function(found: object) -> TypeGuard[Callable[..., Any]]:
    return hasattr(found, "__code__") or hasattr(found, "__func__")


def _is_agent_node(fn: Any) -> bool:
    return getattr(fn, "__module__", "") == "langchain.agents.factory"


def _is_known(fn: Any) -> bool:
    module = getattr(fn, "__module__", None) or type(fn).__module__
    return f"{module}.".startswith(OWN_CODE)


def _name(fn: Any) -> str:
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    return name.rpartition("<locals>.")[2]
