"""Runs of crews: what CrewAI executes how often, and what the saga makes of it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextvars import Context
from types import ModuleType
from typing import Any

import pytest

from agent_saga_core import FileLog, NotApplied, compensator, current_saga, read_saga, saga_scope, undo
from agent_saga_core.errors import DeclarationError, RollbackIncomplete, SagaAborted
from agent_saga_core.state import SagaStatus, StepStatus
from agent_saga_core.testing import Call, Script
from agent_saga_core.wrapping import REFUSALS

Done = list[tuple[str, Any]]
BOUND = 30.0
BOTH = pytest.mark.parametrize("native", [True, False], ids=["native", "react"])
BY_ARGS = {"semantics": "COMPENSABLE", "compensate": undo("unpay", if_absent="forbids", amount="args.amount")}
BY_RESULT = {"semantics": "COMPENSABLE", "compensate": undo("unpay", amount="result.amount")}


class Kaput(Exception):
    pass


def paying(crews: ModuleType, done: Done, fails: Callable[[int], None] = lambda amount: None) -> Any:
    @crews.tool("pay")
    def pay(amount: int) -> dict[str, int]:
        """Pay."""
        done.append(("pay", amount))
        fails(amount)
        return {"amount": amount, "number": len(done)}

    return pay


def fail(amount: int) -> None:
    raise Kaput("no such account")


def pays(*amounts: int) -> list[Call]:
    return [Call("pay", {"amount": amount}) for amount in amounts]


# --- failures


@pytest.mark.parametrize("policy", [None, "warn", "raise", "ignore"])
@BOTH
def test_the_saga_knows_the_exception_whatever_the_policy_makes_of_it(
    crews: ModuleType, done: Done, log: FileLog, native: bool, policy: str | None
) -> None:
    tools = [crews.wrap_tool(paying(crews, done, fail), **BY_RESULT)]
    script = Script([*pays(1), "all is paid"])
    crew = crews.crew_of(tools, script, native=native, tool_failure_policy=policy)
    with pytest.raises(RollbackIncomplete) as raised:
        crews.saga_run(crew, log=log, saga_id="s", drain_timeout=0)
    assert done == [("pay", 1)]
    assert [(step.tool, step.status, step.attempts) for step in raised.value.report.remaining] == [
        ("pay", StepStatus.UNKNOWN, 1)
    ]
    errors = [record.data["error"] for record in log.read("s") if record.type == "UNKNOWN"]
    assert len(errors) == 1 and "Kaput" in str(errors[0]) and "no such account" in str(errors[0])
    if policy == "raise":
        assert type(raised.value.__cause__).__name__ == "ToolExecutionFailedError"
        assert "no such account" in str(raised.value.__cause__)
    else:
        assert "no such account" in script.heard[0] and "rolled back" not in script.heard[0]


@pytest.mark.parametrize(("native", "times"), [(True, 1), (False, 6)])
def test_how_often_crewai_executes_a_failing_tool(crews: ModuleType, done: Done, native: bool, times: int) -> None:
    """The fact behind the one above: ReAct executes three times two times."""
    crews.crew_of([paying(crews, done, fail)], Script([*pays(1), "never mind"]), native=native).kickoff()
    assert done == [("pay", 1)] * times


@pytest.mark.promise("compensate-once")
@pytest.mark.parametrize("is_async", [False, True])
@BOTH
def test_a_failed_call_that_was_undone_is_executed_once(
    crews: ModuleType, done: Done, log: FileLog, native: bool, is_async: bool
) -> None:
    """Undone from its arguments it has left nothing: the model may make it again, and CrewAI by itself may not."""
    left = [Kaput("no such account")] * 6

    def lose(amount: int) -> None:
        if left:
            raise left.pop()

    plain = paying(crews, done, lose)
    if is_async:
        sync = plain.func

        @crews.tool("pay")
        async def pay(amount: int) -> dict[str, int]:
            """Pay."""
            return sync(amount)

        plain = pay
    script = Script([*pays(1), "never mind"])
    crew = crews.crew_of([crews.wrap_tool(plain, **BY_ARGS)], script, native=native)
    crews.saga_run(crew, log=log, saga_id="s")
    assert done == [("pay", 1), ("unpay", 1)] and "no such account" in script.heard[0]
    assert [(s.status, s.attempts) for s in read_saga(log, "s").steps] == [(StepStatus.COMPENSATED, 1)]
    # The model's own second call is the next attempt of that step. ReAct refuses one that equals the call just before.
    left[:] = [Kaput("no such account")]
    done.clear()
    turns = [*pays(1, 1)] if native else [*pays(1, 2, 1)]
    crew = crews.crew_of([crews.wrap_tool(plain, **BY_ARGS)], Script([*turns, "paid"]), native=native)
    crews.saga_run(crew, log=log, saga_id="t")
    assert done == [("pay", 1), ("unpay", 1), *(("pay", call.args["amount"]) for call in turns[1:])]
    assert read_saga(log, "t").status is SagaStatus.COMMITTED


def test_a_finished_call_that_crewai_executes_again_is_made_once(crews: ModuleType, done: Done, log: FileLog) -> None:
    """Under ReAct a `cache_function` that raises makes a tool that succeeded run again, with its arguments."""

    def broken(args: Any, result: Any) -> bool:
        raise Kaput("the cache is full")

    def crew(tool: Any) -> Any:
        tool.cache_function = broken
        return crews.crew_of([tool], Script([*pays(1), "paid"]), native=False)

    crew(paying(crews, done)).kickoff()
    assert done == [("pay", 1)] * 3
    done.clear()

    @crews.tool("pay")
    def pay(amount: int) -> dict[str, Any]:
        """Pay, and answer with what the log never holds, so that it could not give the answer back."""
        done.append(("pay", amount))
        return {"amount": amount, "token": "s3cr3t"}

    crews.saga_run(crew(crews.wrap_tool(pay, **BY_RESULT)), log=log, saga_id="s")
    assert done == [("pay", 1)] and [step.attempts for step in read_saga(log, "s").steps] == [1]


@BOTH
def test_a_call_that_left_nothing_is_made_again_as_the_same_step(
    crews: ModuleType, done: Done, log: FileLog, native: bool
) -> None:
    """And a replay meets the attempt that succeeded."""
    left = [NotApplied("closed"), NotApplied("closed")]

    def refuse(amount: int) -> None:
        if left:
            raise left.pop()

    tools = [crews.wrap_tool(paying(crews, done, refuse), **BY_RESULT)]
    turns = [*pays(1, 1, 1), "paid"] if native else [*pays(1), "paid"]
    crews.saga_run(crews.crew_of(tools, Script(turns), native=native), log=log, saga_id="s")
    assert [(s.status, s.attempts) for s in read_saga(log, "s").steps] == [(StepStatus.DONE, 3)]
    assert done == [("pay", 1)] * 3
    crews.saga_run(crews.crew_of(tools, Script([*pays(1), "paid"]), native=native), log=log, saga_id="s")
    assert done == [("pay", 1)] * 3


@pytest.mark.parametrize("kind", ["native", "react", "kickoff_async", "akickoff", "delegated", "flow"])
def test_a_model_that_never_stops_is_stopped(crews: ModuleType, done: Done, log: FileLog, kind: str) -> None:
    def calls() -> Iterator[Call]:
        for number in range(1000):
            yield Call("pay", {"amount": number})

    def delegations() -> Iterator[Call]:
        for number in range(1000):
            yield Call("delegate_work_to_coworker", {"task": f"pay {number}", "context": "", "coworker": "clerk"})

    script, boss = Script(calls()), Script(delegations())
    tools = [crews.wrap_tool(paying(crews, done, fail), **BY_RESULT)]
    crew = crews.crew_of(tools, script, native=kind != "react")
    if kind == "delegated":
        crew = hierarchical(crews, crew.agents[0], boss)

    class Paying(crews.Flow):
        @crews.start()
        def pay(self) -> str:
            return str(crew.kickoff())

    with pytest.raises(RollbackIncomplete) as raised:
        if kind in ("kickoff_async", "akickoff"):
            asyncio.run(crews.asaga_run(getattr(crew, kind), log=log, saga_id="s", drain_timeout=0))
        else:
            target = Paying(suppress_flow_events=True) if kind == "flow" else crew
            crews.saga_run(target, log=log, saga_id="s", drain_timeout=0)
    assert done == [("pay", 0)]
    assert isinstance(raised.value.__cause__, SagaAborted)
    # The failure, what was refused, and nothing more; under ReAct the failing call was refused its second execution.
    assert REFUSALS <= script.played <= 1 + REFUSALS and boss.played <= 1


def hierarchical(crews: ModuleType, worker: Any, boss: Script) -> Any:
    manager = crews.agent_of([], boss, role="boss", allow_delegation=True)
    task = crews.Task(description="have it paid", expected_output="text")
    return crews.Crew(agents=[worker], tasks=[task], manager_agent=manager, process=crews.Process.hierarchical)


def test_runs_in_a_saga_of_the_caller(crews: ModuleType, done: Done, log: FileLog) -> None:
    """The same crew twice is two calls; and an agent that has run before our hooks were there is ended, too."""
    from crewai.hooks import clear_all_llm_call_hooks

    tools = [crews.wrap_tool(paying(crews, done), **BY_RESULT)]
    script = Script(["hello", *pays(*range(50))])
    crew = crews.crew_of([], script)
    clear_all_llm_call_hooks()
    crew.kickoff()  # its executor keeps a list of hooks that is older than ours
    crew.agents[0].tools = tools
    with pytest.raises(SagaAborted, match="went on calling tools") as raised, saga_scope("s", log=log) as saga:
        for _ in range(2):
            crews.saga_run(crews.crew_of(tools, Script([*pays(1), "paid"])))
        assert done == [("pay", 1)] * 2
        saga.abort("changed our mind")
        crews.saga_run(crew)
    assert done[2:] == [("unpay", 1)] * 2 and raised.value.__cause__ is not None
    assert script.played == 1 + REFUSALS and read_saga(log, "s").report.clean


# --- equal calls


@pytest.mark.parametrize("cache", [False, True])
def test_list_mkdir_list(crews: ModuleType, log: FileLog, cache: bool) -> None:
    """With the agent's cache on CrewAI answers the second, equal call itself: it never comes to the tool."""
    made: list[str] = []
    looked: list[list[str]] = []

    @crews.tool("list_files")
    def list_files(path: str) -> list[str]:
        """List."""
        looked.append(list(made))
        return list(made)

    @crews.tool("mkdir")
    def mkdir(path: str) -> str:
        """Make."""
        made.append(path)
        return path

    tools = [
        crews.wrap_tool(list_files, semantics="READ_ONLY"),
        crews.wrap_tool(mkdir, semantics="COMPENSABLE", compensate=lambda result: None),
    ]
    calls = [Call(name, {"path": "x"}) for name in ("list_files", "mkdir", "list_files")]
    for native in (True, False):
        made.clear(), looked.clear()
        script = Script([*calls, "done"])
        crew = crews.crew_of(tools, script, native=native, cache=cache)
        crews.saga_run(crew, log=log, saga_id=f"s{native}")
        assert looked == ([[]] if cache else [[], ["x"]])
        assert script.heard[2].startswith("[]" if cache else "['x']")  # ReAct adds its instructions at times
        assert len(read_saga(log, f"s{native}").steps) == (2 if cache else 3)


@pytest.mark.promise("replay-not-rerun", "no-silent-commit")
@pytest.mark.parametrize("of", ["agent", "crew"])
@BOTH
def test_a_cached_answer_is_none_once_what_it_tells_of_was_undone(
    crews: ModuleType, done: Done, log: FileLog, native: bool, of: str
) -> None:
    """The cache of an agent or a crew outlives the saga: the next one would commit without the payment."""
    tools = [crews.wrap_tool(paying(crews, done), **BY_RESULT)]
    script = Script([*pays(1), "paid"] * 5)
    crew = crews.crew_of(tools, script, native=native, **({"cache": True} if of == "agent" else {}))
    if of == "crew":
        crew = crews.Crew(agents=crew.agents, tasks=crew.tasks, cache=True)
    with pytest.raises(Kaput), saga_scope("undone", log=log):
        crew.kickoff()
        raise Kaput
    assert done == [("pay", 1), ("unpay", 1)]
    with saga_scope("savepoints", log=log) as saga:
        with pytest.raises(Kaput), saga.savepoint():
            crew.kickoff()
            raise Kaput
        crew.kickoff()
    assert done[2:] == [("pay", 1), ("unpay", 1), ("pay", 1)], "asked anew after each rollback"
    assert crew.kickoff().raw == "paid" and crews.saga_run(crew, log=log, saga_id="more").raw == "paid"
    assert len(done) == 5, "what a saga has committed is CrewAI's to remember"
    assert [(read_saga(log, one).status, len(read_saga(log, one).steps)) for one in ("savepoints", "more")] == [
        (SagaStatus.COMMITTED, 2),
        (SagaStatus.COMMITTED, 0),
    ]


@BOTH
def test_a_cached_answer_is_none_while_another_saga_may_undo_it(
    crews: ModuleType, done: Done, log: FileLog, native: bool
) -> None:
    crew = crews.crew_of(
        [crews.wrap_tool(paying(crews, done), **BY_RESULT)], Script([*pays(1), "paid"] * 4), native=native, cache=True
    )
    with pytest.raises(Kaput), saga_scope("one", log=log):
        crew.kickoff()
        with saga_scope("other", log=log, independent=True):
            crew.kickoff()
        assert done == [("pay", 1)] * 2
        raise Kaput
    assert done[2:] == [("unpay", 1)] and len(read_saga(log, "other").steps) == 1
    suspended = saga_scope("later", log=log)
    with suspended:
        crew.kickoff()
        suspended.suspend("as if the process had died")
    count = len(done)
    with saga_scope("later", log=log):
        crew.kickoff()
    assert len(done) == count and read_saga(log, "later").status is SagaStatus.COMMITTED, "given back, by the log"


@BOTH
def test_a_cached_answer_is_none_outside_of_the_saga_that_may_undo_it(
    crews: ModuleType, done: Done, log: FileLog, native: bool
) -> None:
    crew = crews.crew_of(
        [crews.wrap_tool(paying(crews, done), **BY_RESULT)], Script([*pays(1), "paid"] * 2), native=native, cache=True
    )
    with pytest.raises(Kaput), saga_scope(log=log):
        crew.kickoff()
        Context().run(crew.kickoff)
        raise Kaput
    assert done == [("pay", 1), ("pay", 1), ("unpay", 1)]


def test_the_cache_is_read_as_we_fill_it(crews: ModuleType) -> None:
    from crewai.agents.cache.cache_handler import CacheHandler

    agent = crews.agent_of([], Script([]), cache=True)
    cache = agent.tools_handler.cache
    assert isinstance(cache, CacheHandler)
    cache.add("pay", '{"amount": 1}', "paid")
    assert cache.read("pay", '{"amount": 1}') == "paid"
    cache.add("pay", '{"amount": 1}', None)
    assert cache.read("pay", '{"amount": 1}') is None


def test_react_skips_a_call_that_equals_the_one_before(crews: ModuleType, done: Done, log: FileLog) -> None:
    tools = [crews.wrap_tool(paying(crews, done), **BY_RESULT)]
    script = Script([*pays(1, 1), "paid"])
    crews.saga_run(crews.crew_of(tools, script, native=False), log=log)
    assert done == [("pay", 1)] and "tried reusing the same input" in script.heard[1]


@pytest.mark.parametrize("key", [None, "args.amount"])
@pytest.mark.parametrize("again", ["guardrail", "retry"])
def test_a_task_that_is_done_again_pays_again_unless_a_key_says_otherwise(
    crews: ModuleType, done: Done, log: FileLog, key: str | None, again: str
) -> None:
    tools = [crews.wrap_tool(paying(crews, done), **BY_RESULT, key=key)]
    script = Script([*pays(1), crews.CRASH if again == "retry" else "bad", *pays(1), "good"])
    crew = crews.crew_of(tools, script, max_retry_limit=1)
    if again == "guardrail":
        guard = crews.Task(
            description="pay", expected_output="text", agent=crew.agents[0],
            guardrail=lambda output: (output.raw == "good", output.raw), guardrail_max_retries=1,
        )  # fmt: skip
        crew = crews.Crew(agents=crew.agents, tasks=[guard])
    assert crews.saga_run(crew, log=log, saga_id="s").raw == "good"
    assert done == [("pay", 1)] * (1 if key else 2)
    assert len(read_saga(log, "s").steps) == (1 if key else 2)


# --- which call it is


def test_parallel_calls_of_one_turn_are_numbered_as_they_stand_there(
    crews: ModuleType, done: Done, log: FileLog
) -> None:
    """Whichever thread comes first: a replay gives each call its own result."""
    heard: list[list[str]] = []
    for order in ([1, 2, 3], [3, 2, 1]):
        turn = threading.Condition()
        waiting = list(order)

        def in_order(context: Any, turn: Any = turn, waiting: list[int] = waiting) -> None:
            with turn:
                turn.wait_for(lambda: waiting[:1] == [context.tool_input["amount"]], BOUND)

        def next_one(context: Any, turn: Any = turn, waiting: list[int] = waiting) -> None:
            with turn:
                waiting.pop(0)
                turn.notify_all()

        from crewai.hooks.dispatch import InterceptionPoint, scoped_hooks
        from crewai.hooks.dispatch import get_global_hook_list as hooks_at

        tools = [crews.wrap_tool(paying(crews, done), **BY_RESULT)]
        script = Script([tuple(pays(1, 2, 3)), "paid"])
        before = hooks_at(InterceptionPoint.PRE_TOOL_CALL)
        before.insert(0, in_order)  # ahead of ours
        try:
            with scoped_hooks({InterceptionPoint.POST_TOOL_CALL: [next_one]}):
                crews.saga_run(crews.crew_of(tools, script), log=log, saga_id="s")
        finally:
            before.remove(in_order)
        heard.append(script.heard)
    assert heard[0] == heard[1] and done == [("pay", 1), ("pay", 2), ("pay", 3)]


class Held(Script):
    """Begins when the gate is open, and opens it when the first call was made."""

    def __init__(self, turns: Any, gate: threading.Event, *, waits: bool) -> None:
        super().__init__(turns)
        self.gate, self.waits = gate, waits

    def play(self, heard: Any) -> Any:
        if not self.played and self.waits:
            assert self.gate.wait(BOUND)
        if self.played:
            self.gate.set()
        return super().play(heard)


def test_async_tasks_keep_their_own_calls(crews: ModuleType, done: Done, log: FileLog) -> None:
    """Two tasks at once call one tool; run again with the other one first, each is given back its own."""
    heard: list[list[list[str]]] = []
    for first in (1, 2):
        gate = threading.Event()
        scripts = [Held([*pays(n), "paid"], gate, waits=n != first) for n in (1, 2)]
        tool = crews.wrap_tool(paying(crews, done), **BY_RESULT)
        agents = [crews.agent_of([tool], script, role=f"clerk {n}") for n, script in enumerate(scripts)]
        tasks = [
            crews.Task(description="pay", expected_output="text", agent=agent, async_execution=True) for agent in agents
        ]
        closing = crews.agent_of([], Script(["closed"]))
        last = crews.Task(description="close", expected_output="text", agent=closing)
        crews.saga_run(crews.Crew(agents=[*agents, closing], tasks=[*tasks, last]), log=log, saga_id="s")
        heard.append([script.heard for script in scripts])
    assert sorted(done) == [("pay", 1), ("pay", 2)] and heard[0] == heard[1]


def test_a_crew_for_each_input_is_one_saga(crews: ModuleType, done: Done, log: FileLog) -> None:
    tools = [crews.wrap_tool(paying(crews, done), **BY_RESULT)]
    inputs = [{"what": "rent"}, {"what": "gas"}]
    crew = crews.crew_of(tools, Script([*pays(1), "paid", *pays(1), "paid"]), task="pay {what}")
    assert [out.raw for out in crews.saga_run(crew, inputs, log=log, saga_id="s")] == ["paid", "paid"]
    assert done == [("pay", 1), ("pay", 1)] and len(read_saga(log, "s").steps) == 2
    done.clear()
    turns = [*pays(1), "paid", *pays(2), *[crews.CRASH] * 3]
    with pytest.raises(ConnectionError):
        crews.saga_run(crews.crew_of(tools, Script(turns), task="pay {what}"), inputs=inputs, log=log, saga_id="t")
    assert done == [("pay", 1), ("pay", 2), ("unpay", 2), ("unpay", 1)]


def test_the_copies_of_a_crew_are_told_apart_by_their_inputs(crews: ModuleType, done: Done, log: FileLog) -> None:
    """They share keys, tools and model, and run at the same time; whichever comes first, each has its own calls."""
    heard: list[dict[str, list[str]]] = []
    for first in ("rent", "gas"):
        gate = threading.Event()
        scripts = {
            what: Held([*pays(amount), "paid"], gate, waits=what != first) for what, amount in (("rent", 1), ("gas", 2))
        }

        class ByInput(crews.Model):
            def call(self, messages: Any, *args: Any, scripts: Any = scripts, **kwargs: Any) -> Any:
                what = "rent" if "pay rent" in str(messages) else "gas"
                return crews.Model(scripts[what]).call(messages, *args, **kwargs)

        crew = crews.crew_of([crews.wrap_tool(paying(crews, done), **BY_RESULT)], Script([]), task="pay {what}")
        crew.agents[0].llm = ByInput(Script([]))
        run = crews.asaga_run(crew.kickoff_for_each_async, [{"what": what} for what in scripts], log=log, saga_id="s")
        asyncio.run(run)
        heard.append({what: script.heard for what, script in scripts.items()})
    assert sorted(done) == [("pay", 1), ("pay", 2)] and heard[0] == heard[1]


def test_delegated_work_belongs_to_the_call_that_delegated_it(crews: ModuleType, done: Done, log: FileLog) -> None:
    """The delegated task's text is the model's: another text after a restart is the same call."""
    heard: list[list[str]] = []
    for text in ("pay the rent", "please pay the rent"):
        tool = crews.wrap_tool(paying(crews, done), **BY_RESULT)
        script = Script([*pays(1), "paid", *pays(1), "paid"])
        worker = crews.agent_of([tool], script)
        delegate = Call("delegate_work_to_coworker", {"task": text, "context": "", "coworker": "clerk"})
        boss = Script([delegate, delegate, "ok"])
        assert crews.saga_run(hierarchical(crews, worker, boss), log=log, saga_id="s").raw == "ok"
        assert len(boss.heard) == 2
        heard.append(script.heard)
    assert done == [("pay", 1), ("pay", 1)], "two, each given back when the crew ran again"
    assert heard[0] == heard[1] and "amount" in heard[0][0]


@pytest.mark.promise("lifo")
@pytest.mark.parametrize("manager", ["manager_llm", "manager_agent"])
def test_what_coworkers_of_a_hierarchical_crew_did_is_undone(
    crews: ModuleType, done: Done, log: FileLog, manager: str
) -> None:
    """The manager that CrewAI makes of a model, and one of the user's own."""
    tool = crews.wrap_tool(paying(crews, done), **BY_RESULT)
    workers = [crews.agent_of([tool], Script([*pays(n), "paid"]), role=f"clerk {n}") for n in (1, 2)]
    asked = [{"task": "pay", "context": "", "coworker": f"clerk {n}"} for n in (1, 2)]
    boss = Script([*(Call("delegate_work_to_coworker", one) for one in asked), *[crews.CRASH] * 9])
    made = (
        crews.Model(boss) if manager == "manager_llm" else crews.agent_of([], boss, role="boss", allow_delegation=True)
    )
    crew = crews.Crew(
        agents=workers, tasks=[crews.Task(description="have it paid", expected_output="text")],
        process=crews.Process.hierarchical, **{manager: made},
    )  # fmt: skip
    with pytest.raises(ConnectionError):
        crews.saga_run(crew, log=log, saga_id="s")
    assert done == [("pay", 1), ("pay", 2), ("unpay", 2), ("unpay", 1)]
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


def test_tools_that_call_tools_and_crews(crews: ModuleType, done: Done, log: FileLog) -> None:
    pay = crews.wrap_tool(paying(crews, done), **BY_RESULT)

    @crews.tool("pay_twice")
    def pay_twice(amount: int) -> str:
        """Pay two times, and let others pay."""
        pay.run(amount=amount), pay.run(amount=amount)
        return str(crews.crew_of([pay], Script([*pays(amount), "paid by others"])).kickoff())

    for _ in range(2):
        script = Script([Call("pay_twice", {"amount": 1}), *pays(1), "done"])
        crews.saga_run(crews.crew_of([pay_twice, pay], script), log=log, saga_id="s")
        assert script.heard[0] == "paid by others"
    assert done == [("pay", 1)] * 4, "four intended calls, made once each"


def test_what_a_tool_calls_is_met_again_when_the_tool_is_executed_again(
    crews: ModuleType, done: Done, log: FileLog
) -> None:
    pay = crews.wrap_tool(paying(crews, done), **BY_RESULT)
    left = [NotApplied("not yet")] * 2

    @crews.tool("pay_all")
    def pay_all(amount: int) -> str:
        """Pay, two times, and be unsure of it."""
        numbers = [pay.run(amount=amount)["number"] for _ in range(2)]
        if left:
            raise left.pop()
        return str(numbers)

    script = Script([Call("pay_all", {"amount": 1}), "done"])
    tools = [crews.wrap_tool(pay_all, semantics="COMPENSABLE", compensate=lambda result: None)]
    crews.saga_run(crews.crew_of(tools, script, native=False), log=log, saga_id="s")
    assert done == [("pay", 1)] * 2 and script.heard[0].startswith("[1, 2]")


@pytest.mark.promise("no-false-clean")
@pytest.mark.parametrize("kind", ["function", "async", "_run", "run", "both"])
@BOTH
def test_a_tool_that_calls_itself_makes_a_step_of_each_call(
    crews: ModuleType, done: Done, log: FileLog, native: bool, kind: str
) -> None:
    def dig(amount: int) -> dict[str, int]:
        """Dig."""
        done.append(("pay", amount))
        if amount < 3:
            held[0].run(amount=amount + 1)
        return {"amount": amount}

    async def adig(amount: int) -> dict[str, int]:
        """Dig."""
        done.append(("pay", amount))
        if amount < 3:
            await held[0].arun(amount=amount + 1)
        return {"amount": amount}

    class Dig(crews.BaseTool):
        name: str = "dig"
        description: str = "Dig."

        def _run(self, amount: int) -> dict[str, int]:
            return dig(amount)

    class Entered(Dig):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            return super().run(*args, **kwargs)

    class Both(Dig):
        async def _arun(self, amount: int) -> dict[str, int]:
            return self._run(amount)

    plain = {
        "function": lambda: crews.tool("dig")(dig), "async": lambda: crews.tool("dig")(adig), "_run": Dig,
        "run": Entered, "both": Both,
    }[kind]()  # fmt: skip
    held = [crews.wrap_tool(plain, **BY_RESULT)]
    for again in (False, True):  # and each is met again
        script = Script([Call("dig", {"amount": 1}), "done"])
        with pytest.raises(SystemExit) if not again else pytest.raises(Kaput), saga_scope("s", log=log) as saga:
            crews.saga_run(crews.crew_of(held, script, native=native))
            assert len(saga.steps) == 3 and done == [("pay", 1), ("pay", 2), ("pay", 3)]
            if not again:
                saga.suspend("as if the process had died")
                raise SystemExit
            raise Kaput
    assert sorted(done[3:]) == [("unpay", 1), ("unpay", 2), ("unpay", 3)]


def test_an_async_tool_that_calls_itself_makes_a_step_of_each_call(crews: ModuleType, done: Done, log: FileLog) -> None:
    class Dig(crews.BaseTool):
        name: str = "dig"
        description: str = "Dig."

        def _run(self, amount: int) -> int:
            raise AssertionError("never called")

        async def _arun(self, amount: int) -> int:
            done.append(("pay", amount))
            if amount < 3:
                await held.arun(amount=amount + 1)
            return amount

        async def arun(self, *args: Any, **kwargs: Any) -> Any:
            return await super().arun(*args, **kwargs)

    held = crews.wrap_tool(Dig(), semantics="COMPENSABLE", compensate=undo("unpay", amount="result"))

    async def main() -> None:
        async with saga_scope(log=log) as saga:
            await held.arun(amount=1)
            assert len(saga.steps) == 3
            raise Kaput

    with pytest.raises(Kaput):
        asyncio.run(main())
    assert sorted(done) == [("pay", 1), ("pay", 2), ("pay", 3), ("unpay", 1), ("unpay", 2), ("unpay", 3)]


def test_a_plain_tool_with_the_name_of_a_wrapped_one_makes_each_of_its_calls(
    crews: ModuleType, done: Done, log: FileLog
) -> None:
    inner = crews.wrap_tool(paying(crews, done), **BY_RESULT)

    @crews.tool("pay")
    def outer(amount: int) -> str:
        """Pay two times."""
        return str([inner.run(amount=amount)["number"] for _ in range(2)])

    for native in (True, False):
        script = Script([*pays(1), "paid"])
        crews.saga_run(crews.crew_of([outer], script, native=native), log=log, saga_id=str(native))
        assert len(read_saga(log, str(native)).steps) == 2
    assert script.heard[0].startswith("[3, 4]") and len(done) == 4


@pytest.mark.parametrize("is_async", [False, True])
@BOTH
def test_an_inverse_that_is_a_wrapped_tool_is_no_part_of_the_call_that_it_undoes(
    crews: ModuleType, done: Done, log: FileLog, native: bool, is_async: bool
) -> None:
    """It runs in the middle of that call, which then left nothing: made again it is the same step."""
    left = [Kaput("unclear")]

    def transfer(amount: int) -> int:
        """Transfer."""
        done.append(("transfer", amount))
        if left and amount > 0:
            raise left.pop()
        return amount

    async def atransfer(amount: int) -> int:
        """Transfer."""
        return transfer(amount)

    def back(amount: int) -> None:
        wrapped.run(amount=-amount)

    async def aback(amount: int) -> None:
        await wrapped.arun(amount=-amount)

    compensator("transfer back")(aback if is_async else back)
    plain = crews.tool("transfer")(atransfer if is_async else transfer)

    by_args = undo("transfer back", if_absent="forbids", amount="args.amount")
    wrapped = crews.wrap_tool(plain, semantics="COMPENSABLE", compensate=by_args)
    call = Call("transfer", {"amount": 1})
    script = Script([call, call, "done"] if native else [call, Call("transfer", {"amount": 2}), call, "done"])
    crews.saga_run(crews.crew_of([wrapped], script, native=native), log=log, saga_id="s")
    steps = [(step.tool, step.status) for step in read_saga(log, "s").steps]
    assert steps == [("transfer", StepStatus.DONE)] * (1 if native else 2)
    intents = [record.data["identity"] for record in log.read("s") if record.type == "INTENT"]
    assert len(set(intents)) == len(steps)


# --- flows


def test_a_flow_is_one_saga(crews: ModuleType, done: Done, log: FileLog) -> None:
    pay = crews.wrap_tool(paying(crews, done), **BY_RESULT)
    breaks = [False, True, False]

    class Paying(crews.Flow):
        @crews.start()
        def deposit(self) -> str:
            pay.run(amount=1)
            return str(crews.crew_of([pay], Script([*pays(1), "paid"])).kickoff())

        @crews.listen(deposit)
        async def rest(self, paid: str) -> str:
            await asyncio.to_thread(pay.run, amount=2)
            if broken:
                raise Kaput("the flow broke")
            return paid

    for broken in breaks[:2]:
        flow = Paying(suppress_flow_events=True)
        if broken:
            with pytest.raises(Kaput):
                crews.saga_run(flow, log=log, saga_id="broken")
        else:
            assert crews.saga_run(flow, log=log, saga_id="s") == "paid"
    acts = [("pay", 1), ("pay", 1), ("pay", 2)]
    assert done == [*acts, *acts, ("unpay", 2), ("unpay", 1), ("unpay", 1)]
    broken = False
    assert asyncio.run(crews.asaga_run(Paying(suppress_flow_events=True), log=log, saga_id="s")) == "paid"
    assert len(done) == 9, "given back"


def test_a_flow_that_waits_for_a_person_is_suspended(
    crews: ModuleType, done: Done, log: FileLog, tmp_path: Any
) -> None:
    from crewai.flow.async_feedback import HumanFeedbackPending, HumanFeedbackProvider
    from crewai.flow.human_feedback import human_feedback
    from crewai.flow.persistence import SQLiteFlowPersistence

    pay = crews.wrap_tool(paying(crews, done), **BY_RESULT)

    class Later(HumanFeedbackProvider):
        def request_feedback(self, context: Any, flow: Any) -> str:
            raise HumanFeedbackPending(context=context)

    class Paying(crews.Flow):
        @crews.start()
        @human_feedback(message="Shall I?", provider=Later())
        def deposit(self) -> str:
            return str(crews.crew_of([pay], Script([*pays(1), "paid"])).kickoff())

        @crews.listen(deposit)
        def rest(self, answer: Any) -> str:
            crews.crew_of([pay], Script([*pays(1), "paid"])).kickoff()  # the same place, in a later part of the flow
            return str(answer.feedback)

    store = SQLiteFlowPersistence(str(tmp_path / "flows.db"))
    pending = crews.saga_run(Paying(persistence=store, suppress_flow_events=True), log=log, saga_id="s")
    assert isinstance(pending, HumanFeedbackPending) and done == [("pay", 1)]
    assert read_saga(log, "s").status is SagaStatus.SUSPENDED
    flow = Paying.from_pending(pending.context.flow_id, store)
    assert crews.saga_run(flow.resume, "yes", log=log, saga_id="s") == "yes"
    assert read_saga(log, "s").status is SagaStatus.COMMITTED and done == [("pay", 1), ("pay", 1)]


@pytest.mark.parametrize("way", ["run", "arun", "stream", "astream"])
def test_a_flow_that_waits_inside_of_an_open_saga_leaves_that_to_who_opened_it(
    way: str, crews: ModuleType, done: Done, log: FileLog, tmp_path: Any
) -> None:
    from crewai.flow.async_feedback import HumanFeedbackPending, HumanFeedbackProvider
    from crewai.flow.human_feedback import human_feedback
    from crewai.flow.persistence import SQLiteFlowPersistence

    pay = crews.wrap_tool(paying(crews, done), **BY_RESULT)

    class Later(HumanFeedbackProvider):
        def request_feedback(self, context: Any, flow: Any) -> str:
            raise HumanFeedbackPending(context=context)

    class Paying(crews.Flow):
        @crews.start()
        @human_feedback(message="Shall I?", provider=Later())
        def deposit(self) -> str:
            return str(crews.crew_of([pay], Script([*pays(1), "paid"])).kickoff())

    store = SQLiteFlowPersistence(str(tmp_path / "flows.db"))
    flow = Paying(persistence=store, suppress_flow_events=True, stream="stream" in way)

    async def run() -> Any:
        async with saga_scope("s", log=log):
            if way == "arun":
                return await crews.asaga_run(flow)
            async with crews.asaga_stream(flow) as pieces:
                _ = [piece async for piece in pieces]
            return pieces.result

    if way in ("arun", "astream"):
        pending = asyncio.run(run())
    else:
        with saga_scope("s", log=log):
            pieces = crews.saga_run(flow) if way == "run" else crews.saga_stream(flow)
            pending = pieces if way == "run" else ([*pieces], pieces.result)[1]
    assert isinstance(pending, HumanFeedbackPending) and done == [("pay", 1)]
    assert read_saga(log, "s").status is SagaStatus.COMMITTED


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_closed_inside_of_an_open_saga_is_undone_alone(
    is_async: bool, crews: ModuleType, done: Done, log: FileLog
) -> None:
    script = Script([*pays(1, 2, 3), "paid"])
    crew = crews.crew_of([crews.wrap_tool(paying(crews, done), **BY_RESULT)], script, stream=True)

    def own(saga: Any) -> None:
        saga.execute("own", lambda: {"amount": 7}, **BY_RESULT)

    async def run() -> None:
        async with saga_scope("s", log=log) as saga:
            own(saga)
            async with crews.asaga_stream(crew) as pieces:
                while not done:
                    await anext(pieces)

    if is_async:
        asyncio.run(run())
    else:
        with saga_scope("s", log=log) as saga:
            own(saga)
            with crews.saga_stream(crew) as pieces:
                while not done:
                    next(pieces)
    paid, unpaid = (sorted(amount for act, amount in done if act == name) for name in ("pay", "unpay"))
    assert paid and paid == unpaid, "what the stream did is undone, and nothing else"
    state = read_saga(log, "s")
    assert state.status is SagaStatus.COMMITTED and state.steps[0].status is StepStatus.DONE


def test_a_run_that_is_over_calls_no_tool_that_its_model_still_wanted(
    crews: ModuleType, done: Done, log: FileLog
) -> None:
    from agent_saga_crewai.hooks import stop_run

    def close(amount: int) -> None:
        scope = current_saga()
        assert scope is not None
        stop_run(scope)

    at_once = tuple(pays(*range(40)))  # CrewAI makes eight of them at a time
    crew = crews.crew_of([crews.wrap_tool(paying(crews, done, close), **BY_RESULT)], Script([at_once, *pays(99)]))
    with pytest.raises(SagaAborted, match="ended"):
        crews.saga_run(crew, log=log, saga_id="s")
    paid, unpaid = (sorted(amount for act, amount in done if act == name) for name in ("pay", "unpay"))
    assert 0 < len(paid) <= 8 and paid == unpaid


# --- around the run


def test_hooks_are_registered_once_and_others_are_left_alone(crews: ModuleType, done: Done, log: FileLog) -> None:
    from crewai.hooks import (
        clear_all_tool_call_hooks,
        get_after_tool_call_hooks,
        get_before_llm_call_hooks,
        get_before_tool_call_hooks,
        register_before_tool_call_hook,
        unregister_before_tool_call_hook,
    )

    from agent_saga_crewai.numbers import Numbers

    def kept() -> int:
        gc.collect()
        return sum(isinstance(found, Numbers) for found in gc.get_objects())

    before = kept()
    seen: list[str] = []

    def theirs(context: Any) -> None:
        seen.append(context.tool_name)

    def registered() -> list[list[str]]:
        kinds = (get_before_tool_call_hooks(), get_after_tool_call_hooks(), get_before_llm_call_hooks())
        return [sorted(hook.__name__ for hook in hooks) for hooks in kinds]

    tool = crews.wrap_tool(paying(crews, done), **BY_RESULT)
    register_before_tool_call_hook(theirs)
    try:
        for n in range(2):
            crews.wrap_tool(paying(crews, done), **BY_RESULT)
            crews.saga_run(crews.crew_of([tool], Script([*pays(1), "paid"])), log=log, saga_id=f"s{n}")
        assert registered() == [["_before_tool_call", "theirs"], ["_after_tool_call"], ["_before_llm_call"]]
        crews.crew_of([tool], Script([*pays(1), "paid"])).kickoff()
        assert seen == ["pay"] * 3 and len(done) == 3
        clear_all_tool_call_hooks()
        crews.saga_run(crews.crew_of([tool], Script([*pays(1), "paid"])), log=log, saga_id="cleared")
        assert registered()[0] == ["_before_tool_call"], "back for the run; theirs is their own matter"
    finally:
        unregister_before_tool_call_hook(theirs)

    assert kept() < before + 3, "kept of sagas that are over, but for what a thread of CrewAI's still holds"


def test_what_is_run_and_what_is_refused(crews: ModuleType, done: Done, log: FileLog) -> None:
    from crewai.state.checkpoint_config import CheckpointConfig

    tool = crews.wrap_tool(paying(crews, done), **BY_RESULT)
    agent = crews.agent_of([tool], Script([*pays(1), "paid"]))
    assert crews.saga_run(agent, "pay", log=log, saga_id="agent").raw == "paid" and done == [("pay", 1)]
    crew = crews.crew_of([tool], Script(["hello"]), stream=True)
    with pytest.raises(DeclarationError, match="saga_stream"):
        crews.saga_run(crew, log=log)
    crew.stream = False
    with pytest.raises(DeclarationError, match="stream=True"):
        crews.saga_stream(crew, log=log)
    with pytest.raises(TypeError, match="asaga_run"):
        crews.saga_run(crew.akickoff, log=log)
    with pytest.raises(TypeError, match="kickoff"):
        crews.saga_run(object(), log=log)
    with pytest.raises(DeclarationError, match="from_checkpoint"):
        crews.saga_run(crew, from_checkpoint=CheckpointConfig(restore_from="somewhere"), log=log)
    assert done == [("pay", 1)]


def test_coverage_of_crews_and_flows(crews: ModuleType, done: Done) -> None:
    plain, other = paying(crews, done), paying(crews, done)
    wrapped = crews.wrap_tool(paying(crews, done), **BY_RESULT)
    plain.name, other.name = "plain", "other"
    worker = crews.agent_of([wrapped], Script([]), allow_code_execution=False, allow_delegation=True)
    crew = hierarchical(crews, worker, Script([]))
    crew.tasks[0].tools = [plain]
    crew.task_callback = lambda output: other.run(amount=1)
    crew.memory = True
    found = crews.coverage(crew)
    assert {(entry.path, entry.tool) for entry in found.covered} == {("agent:clerk/pay", "pay")}
    assert {(entry.path, entry.visibility) for entry in found.uncovered} == {
        ("task:0/plain", "declared"),
        ("crew/task_callback/closure:other/other", "inferred"),
    }
    assert [entry.path for entry in found.opaque] == ["memory"]
    (entry,) = found.covered
    assert entry.inverse == "named" and entry.identity == "place in its task"

    class Paying(crews.Flow):
        @crews.start()
        def go(self) -> str:
            return str(crew.kickoff())

    flow = crews.coverage(Paying(suppress_flow_events=True))
    assert flow.opaque[0].path == "flow:Paying.go" and len(flow.opaque) == 2
    assert {entry.tool for entry in flow.covered} == {"pay"}
    with pytest.raises(TypeError):
        crews.coverage(3)


@pytest.mark.filterwarnings("ignore:allow_code_execution is deprecated")
@pytest.mark.parametrize(
    ("given", "remote"),
    [
        ({"apps": ["gmail"]}, True),
        ({"mcps": ["https://mcp.example.invalid/mcp"]}, True),
        ({"memory": True}, False),
        ({"allow_code_execution": True}, False),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_an_agent_gets_when_it_runs_is_opaque(
    crews: ModuleType, done: Done, given: dict[str, Any], remote: bool
) -> None:
    wrapped = crews.wrap_tool(paying(crews, done), **BY_RESULT)
    found = crews.coverage(crews.crew_of([wrapped], Script([]), **given))
    (entry,) = found.opaque
    assert (entry.path, entry.remote) == (f"agent:clerk/{next(iter(given))}", remote)
    assert [one.tool for one in found.covered] == ["pay"]
    with pytest.raises(AssertionError, match=entry.path):
        found.assert_fully_covered()
    found.assert_fully_covered(acknowledge=[entry.path])
