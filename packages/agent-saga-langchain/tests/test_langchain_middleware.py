"""`SagaMiddleware`: a toolset wrapped by a mapping."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ToolRetryMiddleware
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.types import Command

from agent_saga_core import (
    ActionSemantics,
    DeclarationError,
    NotApplied,
    RollbackIncomplete,
    SagaAborted,
    read_saga,
    saga_scope,
    undo,
)
from agent_saga_core.wrapping import REFUSALS, runner_of
from agent_saga_langchain import SagaMiddleware, saga_run, wrap_tool

C, R = ActionSemantics.COMPENSABLE, ActionSemantics.READ_ONLY
BY_RESULT: Any = {"semantics": C, "compensate": undo("world.undo", item="result")}
GO = {"messages": [HumanMessage("go")]}


@pytest.fixture
def pay(world):
    @tool
    def pay(item: str) -> str:
        """Pay for an item."""
        world.done.append(item)
        return item

    return pay


@pytest.fixture
def order(world):
    @tool
    def order(item: str, idempotency_key: str) -> str:
        """Order an item."""
        world.done.append(idempotency_key)
        return item

    return order


def run(agent: Any, way: str, **scope: Any) -> Any:
    from agent_saga_langchain import asaga_run

    return saga_run(agent, GO, **scope) if way == "invoke" else asyncio.run(asaga_run(agent, GO, **scope))


@pytest.mark.promise("drop-in", "replay-not-rerun")
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_a_toolset_is_wrapped_by_a_mapping(way, world, log, say, pay, order, intents):
    model = say([("pay", {"item": "a"}, "c1"), ("pay", {"item": "b"}, "c2")], ("order", {"item": "c"}, "c3"), "done")
    declared = SagaMiddleware({"pay": BY_RESULT, "order": wrap_tool(order, semantics=R)})
    agent = create_agent(model, [pay, order], middleware=[declared])
    result = run(agent, way, log=log, saga_id="s")
    assert [m.content for m in result["messages"] if isinstance(m, ToolMessage)] == ["a", "b", "c"]
    assert [(i["tool"], i["args"]) for i in sorted(intents("s"), key=lambda i: str(i["args"]))] == [
        ("pay", {"item": "a"}), ("pay", {"item": "b"}), ("order", {"item": "c"}),
    ]  # fmt: skip
    assert sorted(world.done[:2]) == ["a", "b"] and world.done[2] == [i["key"] for i in intents("s")][-1]
    shown = {tool.name: set(tool.args) for tool in model.shown[-1]}
    assert shown == {"pay": {"item"}, "order": {"item"}}, "the model is not asked for the key"
    assert runner_of(pay) is None and declared.wrapped(pay) is declared.wrapped(pay)


class Again(AgentMiddleware):
    """Makes each call once more after it has returned, or has it retried by raising then."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.left = 2

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        result = handler(request)
        if self.how == "calls":
            return handler(request)
        return self._judged(result)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        result = await handler(request)
        if self.how == "calls":
            return await handler(request)
        return self._judged(result)

    def _judged(self, result: Any) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise ConnectionError("the audit is down")
        return result


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("how", ["calls", "raises", "command"])
def test_what_middleware_calls_again_after_its_end_is_the_same_call(how, way, world, log, say):
    """The next message makes another one, with the same id and arguments."""

    @tool
    def pay(item: str) -> Any:
        """Pay for an item; a Command without an answer is refused by the ToolNode, after the call."""
        world.done.append(item)
        return Command(update={}) if how == "command" else item

    turn = ("pay", {"item": "a"}, "call_0")
    retry = ToolRetryMiddleware(max_retries=3, initial_delay=0, jitter=False, on_failure="continue")
    by_args: Any = {"semantics": C, "compensate": undo("world.undo", item="args.item")}
    if how == "command":
        by_args["result_type"] = Command
    middleware = [retry, *([] if how == "command" else [Again(how)]), SagaMiddleware({"pay": by_args})]
    run(create_agent(say(turn, turn, "done"), [pay], middleware=middleware), way, log=log, saga_id="s")
    assert world.done == ["a", "a"] and len(read_saga(log, "s").steps) == 2


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_middleware_calls_twice_at_once_is_the_same_call(fails, way, world, log, say):
    class Hedged(AgentMiddleware):
        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            with ThreadPoolExecutor(2) as pool:
                tries = [pool.submit(copy_context().run, handler, request) for _ in range(2)]
                return [found.result(30) for found in tries][1]

        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            return (await asyncio.gather(handler(request), handler(request)))[1]

    left = [NotApplied("not yet")] * fails

    @tool
    def pay(item: str) -> str:
        """Pay for an item."""
        if left:
            raise left.pop()
        world.done.append(item)
        return item

    turn = ("pay", {"item": "a"}, "call_0")
    retry = ToolRetryMiddleware(max_retries=3, initial_delay=0, jitter=False, on_failure="continue")
    agent = create_agent(
        say(turn, turn, "done"), [pay], middleware=[retry, Hedged(), SagaMiddleware({"pay": BY_RESULT})]
    )
    run(agent, way, log=log, saga_id="s")
    assert world.done == ["a", "a"] and len(read_saga(log, "s").steps) == 2


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_what_a_tool_calls_is_not_the_call_that_the_model_made(way, world, log, say, pay):
    inner = wrap_tool(pay, **BY_RESULT)

    @tool
    def pay_twice(item: str) -> str:
        """Pay two times, each time in the words of a message of its own."""
        for _ in range(2):
            inner.invoke({"name": "pay", "args": {"item": item}, "id": "call_0", "type": "tool_call"})
        return item

    declared = SagaMiddleware({"pay_twice": {"semantics": R}})
    agent = create_agent(say(("pay_twice", {"item": "a"}, "call_0"), "done"), [pay_twice], middleware=[declared])
    run(agent, way, log=log, saga_id="s")
    assert world.done == ["a", "a"] and len(read_saga(log, "s").steps) == 3


@pytest.mark.promise("no-unprotected-call")
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_a_tool_that_nothing_is_declared_about_is_refused_in_a_saga(way, world, log, say, pay):
    def agent(**options: Any) -> Any:
        declared = SagaMiddleware({}, **options)
        return create_agent(say(("pay", {"item": "a"}, "c1"), "done"), [pay], middleware=[declared])

    with pytest.raises(DeclarationError, match=r"'pay' is not a saga tool.*SagaMiddleware\(\{'pay'"):
        run(agent(), way, log=log)
    assert world.done == []
    agent().invoke(GO) if way == "invoke" else asyncio.run(agent().ainvoke(GO))
    run(agent(unknown="allow"), way, log=log)
    assert world.done == ["a", "a"]


def test_a_tool_of_no_such_name_is_told_to_the_model_as_before(log, say, pay):
    turns = (("nosuch", {"item": "a"}, "c1"), "done")
    plain = create_agent(say(*turns), [pay]).invoke(GO)
    result = saga_run(create_agent(say(*turns), [pay], middleware=[SagaMiddleware({})]), GO, log=log)
    assert result["messages"][-2].content == plain["messages"][-2].content


@pytest.mark.promise("no-silent-commit")
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_the_run_of_a_model_that_does_not_stop_is_ended_after_three_refusals(way, world, log, say, pay):
    class Swallow(AgentMiddleware):
        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            try:
                return handler(request)
            except Exception as error:
                return ToolMessage(str(error), tool_call_id=request.tool_call["id"], status="error")

        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            try:
                return await handler(request)
            except Exception as error:
                return ToolMessage(str(error), tool_call_id=request.tool_call["id"], status="error")

    @tool
    def fail(item: str) -> str:
        """Fail."""
        raise RuntimeError("no idea")

    model = say(("fail", {"item": "x"}, "c"), *(("pay", {"item": str(n)}, "c") for n in range(30)))
    declared = SagaMiddleware({"pay": BY_RESULT, "fail": BY_RESULT})
    agent = create_agent(model, [pay, fail], middleware=[Swallow(), declared])

    async def main() -> None:
        async with saga_scope(log=log):
            await agent.ainvoke(GO)

    with pytest.raises(RollbackIncomplete) as raised:
        if way == "ainvoke":
            asyncio.run(main())
        else:
            with saga_scope(log=log):
                agent.invoke(GO)
    assert isinstance(raised.value.__cause__, SagaAborted) and world.done == []
    assert 31 - sum(1 for _ in model.messages) == 1 + REFUSALS


def test_what_is_declared_wrongly_is_refused(pay):
    with pytest.raises(DeclarationError, match="'pay' is not wrapped"):
        SagaMiddleware({"pay": pay})
    with pytest.raises(ValueError, match="refuse"):
        SagaMiddleware({}, unknown="perhaps")  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="has no inverse"):
        SagaMiddleware({"pay": {"semantics": C}}).wrapped(pay)


def test_without_langchain_the_middleware_says_what_to_install():
    code = (
        "import sys; sys.modules['langchain'] = None\n"
        "from agent_saga_langchain import wrap_tool\n"
        "try:\n    from agent_saga_langchain import SagaMiddleware\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
        "assert 'langgraph' not in sys.modules, 'a user of langchain-core alone pays for no graph'\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "pip install 'agent-saga-langchain[agents]'" in ran.stdout
