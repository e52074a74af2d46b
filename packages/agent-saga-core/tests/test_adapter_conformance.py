"""The suite of adapters, held against a small framework of its own: one that keeps every promise, and ones that do not.

The framework below has what real ones have: parallel calls, sync and async tools on other threads and loops, streams,
injected arguments, retries, and a person who is asked.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest

from agent_saga_core import Compensation, DeclarationError, SagaError, saga_scope
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

    def leave(self, entry, tools, script, **scope):
        agent = self.agent(tools, script)

        async def read_one():
            async with aclosing(asaga_stream(agent, State(), **scope)) as stream:
                await anext(stream)

        if entry.is_async:
            asyncio.run(read_one())
            return
        with closing(saga_stream(agent, State(), **scope)) as stream:
            next(stream)

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


# --- adapters that break one promise each, and the test that says so


class LogsLate(SagaTool):
    """The effect first."""

    def call(self, args, context):
        answer = Tool.call(self, args, context)
        runner = self.__agent_saga__
        if inspect.isawaitable(answer):
            return runner.arun(args, lambda key: answer, site=self.site(context))
        return runner.run(args, lambda key: answer, site=self.site(context))


class DropsCallIds(SagaTool):
    def site(self, context):
        return CallSite("plain", context.scope, None, object())


class DropsScopes(SagaTool):
    def site(self, context):
        return CallSite("plain", "", context.call_id)


class SwallowsFailures(SagaTool):
    """The saga hears of a success."""

    def call(self, args, context):
        fn = self.fn
        mute = copy.copy(self)
        if inspect.iscoroutinefunction(fn):

            async def act(**given):
                try:
                    return await fn(**given)
                except Exception as error:
                    return {"id": "?/1", "error": str(error)}
        else:

            def act(**given):
                try:
                    return fn(**given)
                except Exception as error:
                    return {"id": "?/1", "error": str(error)}

        mute.fn = act
        return SagaTool.call(mute, args, context)


class LosesContext(SagaTool):
    def call(self, args, context):
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(contextvars.Context().run, super().call, args, context).result()
            if not inspect.isawaitable(answer):
                return answer
        return asyncio.get_running_loop().create_task(_value(answer), context=contextvars.Context())


class TellsOtherwise(SagaTool):
    def call(self, args, context):
        answer = super().call(args, context)
        if inspect.isawaitable(answer):
            return self.told(answer)
        return str(answer).upper()

    async def told(self, answer):
        return str(await answer).upper()


class LogsInjected(SagaTool):
    def call(self, args, context):
        runner = self.__agent_saga__
        args = {**self.validated(args), **dict.fromkeys(self.injected, context)}
        if inspect.iscoroutinefunction(self.fn):
            return runner.arun(args, lambda key: self.fn(**args), site=self.site(context))
        return runner.run(args, lambda key: self.fn(**args), site=self.site(context))


class LogsNothing(SagaTool):
    def call(self, args, context):
        runner = self.__agent_saga__
        if inspect.iscoroutinefunction(self.fn):
            return runner.arun({}, lambda key: self.fn(**self.validated(args)), site=self.site(context))
        return runner.run({}, lambda key: self.fn(**self.validated(args)), site=self.site(context))


class Reruns(SagaTool):
    """Every call is a new one."""

    def site(self, context):
        return CallSite("plain", context.scope, f"{context.call_id} {uuid.uuid4()}")


class RecordsMessages(SagaTool):
    """What the framework makes of a result, in the place of the result."""

    def call(self, args, context):
        fn, other = self.fn, copy.copy(self)
        if inspect.iscoroutinefunction(fn):

            async def act(**given):
                return {"content": str(await fn(**given))}
        else:

            def act(**given):
                return {"content": str(fn(**given))}

        other.fn = act
        return SagaTool.call(other, args, context)


class FallsThrough(SagaTool):
    """What the saga refuses is made without it."""

    def call(self, args, context):
        if inspect.iscoroutinefunction(self.fn):
            return self.acall(args, context)
        try:
            return super().call(args, context)
        except SagaError:
            return self.fn(**self.validated(args))

    async def acall(self, args, context):
        try:
            return await super().call(args, context)
        except SagaError:
            return await self.fn(**self.validated(args))


class FallsAfresh(FallsThrough, Reruns):
    pass


class CopiesUnwrapped(SagaTool):
    def __copy__(self):
        other = object.__new__(Tool)
        other.__dict__.update({name: value for name, value in vars(self).items() if name != "__agent_saga__"})
        return other


class NeverStops(Agent):
    @property
    def stop(self):
        return lambda: False

    @stop.setter
    def stop(self, _):
        pass


class HidesCancellation(Agent):
    async def astream(self, state):
        try:
            async for piece in super().astream(state):
                yield piece
        except asyncio.CancelledError:
            yield "text", "cancelled"


class PlainChanged(PlainHarness):
    def wrap(self, tool, **declaration):
        wrapped = super().wrap(tool, **declaration)
        wrapped.description = f"[saga] {wrapped.description}"
        return wrapped


class WrapsInPlace(PlainHarness):
    def wrap(self, tool, **declaration):
        wrapped = super().wrap(tool, **declaration)
        tool.__class__, tool.__dict__ = wrapped.__class__, wrapped.__dict__
        return wrapped


class ShowsTheKey(PlainHarness):
    def wrap(self, tool, **declaration):
        wrapped = super().wrap(tool, **declaration)
        wrapped.schema = tool.schema
        return wrapped


class CoversNothing(PlainHarness):
    def _run(self, agent, state, saga, scope):
        if not saga:
            return super()._run(agent, state, saga, scope)
        with _scope(**scope):
            return super()._run(agent, state, False, {})


class CommitsPauses(PlainHarness):
    def pause(self, tools, script, **scope):
        with _scope(**scope) as saga:
            paused = list(self.agent(tools, script).stream(State()))[-1][1]
        return replace(paused, saga_id=saga.id)


class SharesOneSaga(PlainHarness):
    """The saga of the process: whoever came first."""

    current: list[Any] = []

    def _run(self, agent, state, saga, scope):
        if not saga or not self.current:
            with _scope(**scope) as opened:
                self.current.append(opened)
                try:
                    return super()._run(agent, state, False, {})
                finally:
                    self.current.remove(opened)
        with self.current[0].attached():
            return super()._run(agent, state, False, {})


class NoKeys(PlainHarness):
    tool_type = Reruns

    def wrap(self, tool, *, key=None, **declaration):
        return super().wrap(tool, **declaration)


class AsksInVain(PlainHarness):
    def resume(self, paused, tools, script, *, args=None, **scope):
        return super().resume(paused, tools, script, **scope)


class CommitsWhatIsLeft(PlainHarness):
    def leave(self, entry, tools, script, **scope):
        with _scope(**scope):
            next(self.agent(tools, script).stream(State()))


class SeesNothing(PlainHarness):
    def coverage(self, agent):
        wrapped = [tool for tool in agent.tools.values() if runner_of(tool) is not None]
        return super().coverage(self.agent(wrapped, agent.script))


class NeverJoins(PlainHarness):
    def _run(self, agent, state, saga, scope):
        return super()._run(agent, state, saga, {**scope, "independent": True})


class ForgetsItsDead(PlainHarness):
    """Its wrapper remembers the undo in this process only."""

    def wrap(self, tool, **declaration):
        desk_undo = declaration["compensate"]
        return super().wrap(
            tool, **{**declaration, "compensate": lambda result: Compensation(fn=print, kwargs=desk_undo.paths)}
        )


def _with(**kinds: Any) -> type[PlainHarness]:
    return type("Broken", (PlainHarness,), {**kinds, "__module__": __name__})


IDS = "test_call_ids_that_begin_anew_in_each_message"
BROKEN: dict[str, tuple[type[PlainHarness], tuple[str, ...]]] = {
    "LogsLate": (_with(tool_type=LogsLate), ("test_the_intent_is_in_the_log_before_the_effect",
                                             "test_what_cannot_be_logged_does_not_happen")),
    "DropsCallIds": (_with(tool_type=DropsCallIds), ("test_two_intended_identical_calls_both_run",
                                                     "test_parallel_calls_are_steps_of_their_own_at_the_same_time")),
    "DropsScopes": (_with(tool_type=DropsScopes), (f"{IDS}_conflict_with_nothing", f"{IDS}_hide_no_call")),
    "SwallowsFailures": (_with(tool_type=SwallowsFailures), (
        "test_an_unsettled_failure_ends_in_a_rollback_whatever_the_model_says",
        "test_a_failure_is_told_as_without_a_saga",
        "test_the_sibling_of_a_failed_call_is_undone",
        "test_a_call_that_did_nothing_may_be_made_again",
    )),
    "LosesContext": (_with(tool_type=LosesContext), ("test_sync_and_async_tools_are_steps_through_every_entry",)),
    "TellsOtherwise": (_with(tool_type=TellsOtherwise), (
        "test_what_the_model_hears_and_the_caller_gets_is_unchanged",
        "test_results_that_only_this_framework_has_are_unchanged",
        "test_outside_of_a_saga_a_wrapped_tool_calls_straight_through",
    )),
    "LogsInjected": (_with(tool_type=LogsInjected), ("test_injected_arguments_are_injected_and_not_logged",)),
    "LogsNothing": (_with(tool_type=LogsNothing), ("test_arguments_are_recorded_by_name_and_secrets_are_not",)),
    "Reruns": (_with(tool_type=Reruns), ("test_a_call_that_the_framework_tries_again_is_one_step",)),
    "RecordsMessages": (_with(tool_type=RecordsMessages), (
        "test_what_is_recorded_is_what_the_function_returned",
    )),
    "FallsThrough": (_with(tool_type=FallsThrough), (
        "test_require_saga_refuses_outside_of_one",
        "test_an_unsettled_failure_ends_in_a_rollback_whatever_the_model_says",
    )),
    "FallsAfresh": (_with(tool_type=FallsAfresh), (
        "test_a_committed_run_made_again_without_keys_reruns_nothing",
    )),
    "CopiesUnwrapped": (_with(tool_type=CopiesUnwrapped), (
        "test_copies_stay_wrapped_where_the_original_can_be_copied",
    )),
    "NeverStops": (_with(agent_type=NeverStops), ("test_a_model_that_never_stops_is_stopped",)),
    "HidesCancellation": (_with(agent_type=HidesCancellation), (
        "test_a_cancelled_run_is_rolled_back_and_stays_cancelled",
    )),
    "PlainChanged": (PlainChanged, ("test_the_face_of_a_tool_is_unchanged",)),
    "WrapsInPlace": (WrapsInPlace, ("test_wrapping_leaves_the_original_alone_and_is_done_once",)),
    "ShowsTheKey": (ShowsTheKey, ("test_a_tool_that_asks_for_the_idempotency_key_gets_it",)),
    "CoversNothing": (CoversNothing, ("test_a_covered_tool_is_never_called_unprotected",)),
    "CommitsPauses": (CommitsPauses, ("test_a_paused_run_is_suspended_and_goes_on_where_it_was",)),
    "SharesOneSaga": (SharesOneSaga, ("test_two_sagas_at_once_never_mix",)),
    "NoKeys": (NoKeys, ("test_a_committed_run_made_again_gives_back_what_is_recorded",)),
    "AsksInVain": (AsksInVain, ("test_a_person_may_change_the_arguments_of_a_paused_call",)),
    "CommitsWhatIsLeft": (CommitsWhatIsLeft, ("test_a_stream_that_is_left_early_is_rolled_back",)),
    "SeesNothing": (SeesNothing, ("test_coverage_of_an_agent_names_what_is_not_wrapped",)),
    "NeverJoins": (NeverJoins, ("test_a_run_inside_of_a_saga_ends_with_that_saga",)),
    "ForgetsItsDead": (ForgetsItsDead, (
        "test_a_run_killed_in_mid_call_is_undone_by_another_process",
        "test_calls_are_undone_in_reverse_order",
    )),
}  # fmt: skip


class Promising(PlainHarness):
    """It defers what it keeps, what nobody asks for, and, rightly, one thing that it does not do."""

    deferred = {
        "test_the_face_of_a_tool_is_unchanged": "we thought so",
        "test_nobody_has_written": "a typing error",
        "test_a_person_may_change_the_arguments_of_a_paused_call": "this framework shows a person no arguments",
        "test_a_cancelled_run_is_rolled_back_and_stays_cancelled": "cancelling this framework hangs for ever",
    }
    hangs = frozenset({"test_a_cancelled_run_is_rolled_back_and_stays_cancelled"})

    def resume(self, paused, tools, script, *, args=None, **scope):
        if args is not None:
            raise NotImplementedError
        return super().resume(paused, tools, script, **scope)

    async def arun(self, *args, **more):
        raise AssertionError("this test was to be left alone")


SUITES = """
import importlib.util, sys
import pytest
from agent_saga_core.testing import AdapterConformance, AdapterHarness

spec = importlib.util.spec_from_file_location("pseudo", {path!r})
pseudo = importlib.util.module_from_spec(spec)
sys.modules["pseudo"] = pseudo
spec.loader.exec_module(pseudo)

def suite(kind):
    class Suite(AdapterConformance):
        @pytest.fixture
        def harness(self):
            return kind()
    return Suite

for name, (kind, _) in pseudo.BROKEN.items():
    globals()["Test" + name] = suite(kind)

TestPromising = suite(pseudo.Promising)
TestEmpty = suite(AdapterHarness)

class TestForgotten(AdapterConformance):
    pass
"""


def _pytest(tmp_path, *chosen: str) -> tuple[int, str]:
    (tmp_path / "test_broken.py").write_text(SUITES.format(path=__file__), "utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "--tb=line", "--strict-markers",
         *(f"test_broken.py::{one}" for one in chosen)],
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    return ran.returncode, ran.stdout


def test_broken_adapters_do_not_pass(tmp_path):
    chosen = [f"Test{name}::{test}" for name, (_, tests) in BROKEN.items() for test in tests]
    code, said = _pytest(tmp_path, *chosen)
    assert code == 1, said
    assert [one for one in chosen if f"FAILED test_broken.py::{one}" not in said] == [], said


def test_what_is_deferred_is_said_and_what_is_deferred_wrongly_fails(tmp_path):
    own = [f"TestPromising::{test}" for test in Promising.deferred if test != "test_nobody_has_written"]
    code, said = _pytest(tmp_path, *own, "TestPromising::test_every_deferral_names_a_test")
    assert code == 1, said
    assert "FAILED test_broken.py::TestPromising::test_the_face_of_a_tool_is_unchanged" in said
    assert "FAILED test_broken.py::TestPromising::test_every_deferral_names_a_test" in said
    assert "2 failed, 2 xfailed" in said
    section = said[said.index("deferred by adapters") :]
    for test, reason in list(Promising.deferred.items())[2:]:
        assert f"test_broken.py::TestPromising: {test}: {reason}" in section


def test_a_harness_that_supplies_nothing_passes_nothing(tmp_path):
    code, said = _pytest(tmp_path, "TestEmpty", "TestForgotten::test_the_face_of_a_tool_is_unchanged")
    assert code == 1, said
    assert "1 passed" in said and "PASSED test_broken.py::TestEmpty::test_every_deferral_names_a_test" in said
    assert "ERROR test_broken.py::TestForgotten::test_the_face_of_a_tool_is_unchanged" in said
