"""The suite of adapters, held against a small framework of its own: one that keeps every promise, and ones that do not.

The framework below has what real ones have: parallel calls, sync and async tools on other threads and loops, streams,
injected arguments, retries, and a person who is asked.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest

from agent_saga_core import DeclarationError, saga_scope
from agent_saga_core.coverage import CoverageManifest, entry_for
from agent_saga_core.testing import AdapterConformance, AdapterHarness, Call, Entry, Ran, Script
from agent_saga_core.wrapping import (
    REFUSALS,
    AsyncSagaStream,
    CallSite,
    SagaStream,
    ToolRunner,
    covered,
    runner_of,
)

# --- the framework


class Context(NamedTuple):
    """What it tells a tool of a call; injected into a parameter that is annotated with it."""

    scope: str
    call_id: str


class Tool:
    """A function that a model may call."""

    def __init__(self, fn: Callable[..., Any], *, gated: bool = False) -> None:
        self.name = fn.__name__
        self.description = inspect.getdoc(fn) or ""
        parameters = inspect.signature(fn).parameters.values()
        hints = fn.__annotations__
        self.injected = [p.name for p in parameters if hints.get(p.name) in (Context, "Context")]
        self.schema = {p.name: p.default is p.empty for p in parameters if p.name not in self.injected}
        self.gated = gated
        self.fn = fn

    def validated(self, args: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(args.keys() - self.schema.keys()):
            raise TypeError(f"{self.name} takes no {unknown}")
        defaults = {n: p.default for n, p in inspect.signature(self.fn).parameters.items() if p.default is not p.empty}
        given = {**{name: value for name, value in defaults.items() if name in self.schema}, **args}
        if missing := sorted(self.schema.keys() - given.keys()):
            raise TypeError(f"{self.name} needs {missing}")
        return given

    def call(self, args: dict[str, Any], context: Context) -> Any:
        return self.fn(**self.validated(args), **dict.fromkeys(self.injected, context))


@dataclass
class State:
    """A run of an agent, as it is stored while a person thinks."""

    results: list[list[str]] = field(default_factory=list)
    pending: tuple[Call, ...] = ()
    approved: bool = False
    text: str = ""
    saga_id: str = ""


Piece = tuple[str, Any]


class Agent:
    """A loop over a model's answers."""

    swallows = True
    retries = 0
    calls_at_once = True

    def __init__(self, tools: list[Tool], script: Script) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.script = script
        self.stop: Callable[[], bool] = lambda: False

    def ask(self, state: State) -> bool:
        """Whether there are calls to make now."""
        if not state.pending:
            turn = self.script.play([text for texts in state.results for text in texts])
            if isinstance(turn, str):
                state.text = turn
                return False
            state.pending, state.approved = turn, False
        return not self.stop()

    def piece(self, state: State) -> Piece | None:
        waits = any(self.tools[call.name].gated for call in state.pending) and not state.approved
        return ("paused", copy.deepcopy(state)) if waits else None

    def take(self, state: State, texts: list[str]) -> Piece:
        state.results.append(texts)
        state.pending = ()
        return "results", texts

    def stream(self, state: State):
        while self.ask(state):
            if piece := self.piece(state):
                yield piece
                return
            with ThreadPoolExecutor(max_workers=len(state.pending)) as pool:
                runs = [
                    pool.submit(contextvars.copy_context().run, self.one, call, len(state.results))
                    for call in state.pending
                ]
            yield self.take(state, [run.result() for run in runs])
        yield "text", state.text

    async def astream(self, state: State):
        while self.ask(state):
            if piece := self.piece(state):
                yield piece
                return
            tasks = [asyncio.ensure_future(self.aone(call, len(state.results))) for call in state.pending]
            try:
                texts = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            yield self.take(state, list(texts))
        yield "text", state.text

    def one(self, call: Call, turn: int) -> str:
        for tries_left in reversed(range(self.retries + 1)):
            try:
                answer = self.tools[call.name].call(dict(call.args), Context(f"turn {turn}", call.id))
                return str(asyncio.run(_value(answer)) if inspect.isawaitable(answer) else answer)
            except Exception as error:
                if not tries_left:
                    if not self.swallows:
                        raise
                    return f"Error: {error}"
        raise AssertionError

    async def aone(self, call: Call, turn: int) -> str:
        tool = self.tools[call.name]
        context = Context(f"turn {turn}", call.id)
        try:
            if inspect.iscoroutinefunction(tool.fn):
                return str(await tool.call(dict(call.args), context))
            return str(await asyncio.to_thread(tool.call, dict(call.args), context))
        except Exception as error:
            if not self.swallows:
                raise
            return f"Error: {error}"


async def _value(awaitable: Any) -> Any:
    return await awaitable


# --- its adapter


class SagaTool(Tool):
    """A wrapped tool."""

    __agent_saga__: ToolRunner

    def call(self, args: dict[str, Any], context: Context) -> Any:
        runner = self.__agent_saga__
        args = self.validated({name: value for name, value in args.items() if name != "idempotency_key"})
        more = dict.fromkeys(self.injected, context)

        def invoke(key: str) -> Any:
            return self.fn(**args, **more, **({"idempotency_key": key} if runner.takes_key else {}))

        site = self.site(context)
        if inspect.iscoroutinefunction(self.fn):
            return runner.arun(args, invoke, site=site)
        return runner.run(args, invoke, site=site)

    def site(self, context: Context) -> CallSite | None:
        return CallSite("plain", context.scope, context.call_id)


def wrap_tool(tool: Tool, kind: type[SagaTool] = SagaTool, **declaration: Any) -> Tool:
    if runner_of(tool) is not None:
        raise DeclarationError(f"{tool.name} is wrapped already. Wrap the original.")
    wrapped: Any = copy.copy(tool)
    wrapped.__class__ = kind
    wrapped.__agent_saga__ = ToolRunner(tool.name, declaration, adapter="plain", fn=tool.fn)
    if wrapped.__agent_saga__.takes_key:
        wrapped.schema = {name: needed for name, needed in tool.schema.items() if name != "idempotency_key"}
    return wrapped


def _scope(saga_id: str | None = None, log: Any = None, **scope: Any) -> Any:
    return saga_scope(saga_id, log=log, resume="continue", **scope)


def _covering(agent: Agent) -> Callable[[Any], Any]:
    return lambda saga: covered(saga, [tool for tool in agent.tools.values() if runner_of(tool) is not None])


def saga_stream(agent: Agent, state: State, **scope: Any) -> SagaStream[Piece]:
    saga = _scope(**scope)

    def start() -> Any:
        agent.stop = lambda: saga.refusals >= REFUSALS
        return agent.stream(state)

    def at_end(_: Any, last: Piece) -> None:
        if last[0] == "paused":
            last[1].saga_id = saga.id
            saga.suspend("a person is asked")

    return SagaStream(saga, start, at_end=at_end, around=_covering(agent))


def asaga_stream(agent: Agent, state: State, **scope: Any) -> AsyncSagaStream[Piece]:
    saga = _scope(**scope)

    def start() -> Any:
        agent.stop = lambda: saga.refusals >= REFUSALS
        return agent.astream(state)

    return AsyncSagaStream(saga, start, around=_covering(agent))


# --- its harness


class PlainHarness(AdapterHarness):
    entries = (
        Entry("run"),
        Entry("stream", streams=True),
        Entry("arun", is_async=True),
        Entry("astream", is_async=True, streams=True),
    )
    agent_type: type[Agent] = Agent
    tool_type: type[SagaTool] = SagaTool
    retrying = Entry("retrying")

    def tool(self, fn, *, pauses=False):
        return Tool(fn, gated=pauses)

    def wrap(self, tool, **declaration):
        return wrap_tool(tool, self.tool_type, **declaration)

    def agent(self, tools, script):
        return self.agent_type(list(tools), script)

    def run(self, entry, tools, script, *, saga=True, **scope):
        agent = self.agent(tools, script)
        agent.retries = int(entry == self.retrying)
        return self._run(agent, State(), saga, scope)

    def _run(self, agent, state, saga, scope):
        with closing(saga_stream(agent, state, **scope) if saga else agent.stream(state)) as stream:
            pieces = list(stream)
        return Ran(text=str(pieces[-1][1]), raw=pieces)

    async def arun(self, entry, tools, script, *, saga=True, **scope):
        agent, state = self.agent(tools, script), State()
        async with aclosing(asaga_stream(agent, state, **scope) if saga else agent.astream(state)) as stream:
            pieces = [piece async for piece in stream]
        return Ran(text=pieces[-1][1], raw=pieces)

    def call(self, tool, args):
        answer = tool.call(dict(args), Context("", ""))
        return asyncio.run(_value(answer)) if inspect.isawaitable(answer) else answer

    def face(self, tool):
        return {name: value for name, value in vars(tool).items() if name not in ("fn", "__agent_saga__")}

    def shown(self, tool):
        return set(tool.schema)

    def coverage(self, agent):
        entries = [entry_for(tool, path=f"tool:{name}", framework="plain") for name, tool in agent.tools.items()]
        return CoverageManifest(framework="plain", entries=tuple(entries))

    def results(self, ran):
        return [texts for kind, texts in ran.raw if kind == "results"]

    def rich_tools(self):
        def picture(item: str) -> bytes:
            """A picture."""
            return b"\x89PNG"

        return [(Tool(picture), {"item": "x"})]

    def injected(self, seen):
        def injected(item: str, context: Context) -> str:
            """Ask for the context."""
            seen(context)
            return item

        return Tool(injected)

    def pause(self, tools, script, **scope):
        agent = self.agent(tools, script)
        with closing(saga_stream(agent, State(), **scope)) as stream:
            return list(stream)[-1][1]

    def resume(self, paused, tools, script, *, args=None, **scope):
        state = copy.deepcopy(paused)
        state.approved = True
        if args is not None:
            state.pending = tuple(replace(call, args=args) for call in state.pending)
        agent = self.agent(tools, script)
        return self._run(agent, state, True, {**scope, "saga_id": paused.saga_id})


class TestPlain(AdapterConformance):
    @pytest.fixture
    def harness(self):
        return PlainHarness()


class RaisingAgent(Agent):
    swallows = False


class RaisingHarness(PlainHarness):
    swallows = False
    agent_type = RaisingAgent


class TestRaising(AdapterConformance):
    """A framework that ends its run with the tool's exception."""

    @pytest.fixture
    def harness(self):
        return RaisingHarness()
