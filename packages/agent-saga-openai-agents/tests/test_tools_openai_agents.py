"""What a wrapped function tool keeps, records and refuses."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import pytest
from agents import (
    Agent,
    FunctionTool,
    RunContextWrapper,
    Runner,
    ToolGuardrailFunctionOutput,
    UserError,
    WebSearchTool,
    function_tool,
    tool_input_guardrail,
)
from agents import tool as framework
from agents.tool_context import ToolContext
from pydantic import BaseModel, Field

from agent_saga_core import DeclarationError, MemoryLog, StepStatus, inverse_of, read_saga, saga_scope, saga_tool
from agent_saga_core.registry import compensator, isolated_registry
from agent_saga_core.wrapping import runner_of
from agent_saga_openai_agents import asaga_run, wrap_tool

sys.path.insert(0, str(Path(__file__).parent))
from openai_agents_fakes import REFUND, RELEASE, Till, agent, ainvoke, call, invoke

LOOK: dict[str, Any] = {"semantics": "READ_ONLY"}


@pytest.fixture
def till(tmp_path: Path) -> Iterator[Till]:
    with isolated_registry():
        found = Till(tmp_path / "till")
        found.register()
        yield found


@pytest.fixture
def log() -> Iterator[MemoryLog]:
    with closing(MemoryLog()) as found:
        yield found


class NoMoney(Exception):
    pass


class Trip(BaseModel):
    city: str
    days: int = 2


def said(context: RunContextWrapper[Any], error: Exception) -> str:
    return f"sorry: {type(error).__name__}"


def intents(log: MemoryLog, saga_id: str = "s") -> list[Any]:
    return [record.data["args"] for record in log.read(saga_id) if record.type == "INTENT"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("formatter", ["default", said, None])
def test_the_saga_hears_what_was_raised_and_the_framework_what_it_always_hears(
    formatter: Any, is_async: bool, till: Till, log: MemoryLog
) -> None:
    def charge(what: str) -> str:
        """Charge for something."""
        raise NoMoney("the account is empty")

    async def acharge(what: str) -> str:
        """Charge for something."""
        raise NoMoney("the account is empty")

    more = {} if formatter == "default" else {"failure_error_function": formatter}
    plain = function_tool(acharge if is_async else charge, name_override="charge", **more)
    heard: list[Any] = []
    for in_saga in (False, True):
        bot = agent([wrap_tool(plain, **RELEASE) if in_saga else plain], [call("c1", "charge", what="x")])
        try:
            asyncio.run(asaga_run(bot, "go", saga_id="s", log=log) if in_saga else Runner.run(bot, "go"))
            heard.append(bot.model.heard)
        except UserError as error:
            assert formatter is None
            heard.append((type(error), str(error), type(error.__cause__), str(error.__cause__)))
    assert heard[0] == heard[1], "the wrapped tool is told of otherwise"
    unknown = next(record.data for record in log.read("s") if record.type == "UNKNOWN")
    assert "NoMoney" in unknown["error"]


@pytest.mark.parametrize("context", [ToolContext, RunContextWrapper])
def test_the_context_is_injected_and_nothing_of_it_is_recorded(context: Any, till: Till, log: MemoryLog) -> None:
    seen: list[Any] = []

    def charge(ctx: Any, what: str) -> str:
        """Charge for something."""
        seen.append(ctx.context)
        return till.charge(what)

    charge.__annotations__["ctx"] = context[Any]
    tool = wrap_tool(function_tool(charge), **REFUND)
    bot = agent([tool], [call("c1", "charge", what="x")])
    asyncio.run(asaga_run(bot, "go", context={"password": "hunter2"}, saga_id="s", log=log))
    assert seen == [{"password": "hunter2"}]
    assert intents(log) == [{"what": "x"}]


def test_a_model_and_its_bounds_stand_where_they_stood(log: MemoryLog) -> None:
    got: list[Any] = []

    @function_tool
    def plan(trip: Trip, stars: Annotated[int, Field(ge=1, le=5)] = 3, *, note: str = "none") -> str:
        """Plan."""
        got.append((trip, stars, note))
        return "planned"

    tool = wrap_tool(plan, **LOOK)
    assert tool.params_json_schema == plan.params_json_schema
    turns = [[call("c1", "plan", trip={"city": "Rome"})], [call("c2", "plan", trip={"city": "Rome"}, stars=9)]]
    bot = agent([tool], *turns)
    asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    assert got == [(Trip(city="Rome", days=2), 3, "none")]
    (recorded,) = intents(log)
    assert (recorded["stars"], recorded["note"]) == (3, "none")
    assert recorded["trip"]["$model"][1] == {"city": "Rome", "days": 2}
    plain = agent([plan], *turns)
    asyncio.run(Runner.run(plain, "go"))
    assert bot.model.heard == plain.model.heard, "what does not fit is refused as without a saga, and is no step"


@pytest.mark.parametrize("text", ["{", "[]", '{"what": 3.5, "what2": 1}'])
def test_unreadable_arguments_leave_no_step(text: str, till: Till, log: MemoryLog) -> None:
    plain = function_tool(till.charge)
    bad = call("c1", "charge")
    bad.arguments = text
    bots = [agent([plain], [bad]), agent([wrap_tool(plain, **REFUND)], [bad])]
    asyncio.run(Runner.run(bots[0], "go"))
    asyncio.run(asaga_run(bots[1], "go", saga_id="s", log=log))
    assert bots[0].model.heard == bots[1].model.heard
    assert read_saga(log, "s").steps == () and till.lines() == []


def test_a_guardrail_that_refuses_leaves_no_step(till: Till, log: MemoryLog) -> None:
    @tool_input_guardrail
    def never(data: Any) -> ToolGuardrailFunctionOutput:
        return ToolGuardrailFunctionOutput.reject_content("not today")

    tool = wrap_tool(function_tool(till.charge, tool_input_guardrails=[never]), **REFUND)
    bot = agent([tool], [call("c1", "charge", what="x")])
    asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    assert bot.model.heard == ["not today"] and read_saga(log, "s").steps == ()


class Desk:
    def __init__(self, till: Till) -> None:
        self.till = till

    def __call__(self, what: str) -> str:
        """Charge for something."""
        return self.till.charge(what)

    async def aside(self, ctx: ToolContext[Any], what: str, idempotency_key: str, *more: str) -> str:
        """Charge for something."""
        return self.till.charge(f"{what} {ctx.tool_call_id} {bool(idempotency_key)} {more}")


def test_methods_and_objects_that_are_called_are_tools_like_functions(till: Till, log: MemoryLog) -> None:
    desk = Desk(till)
    tools = [
        wrap_tool(function_tool(till.charge, name_override="method"), **REFUND),
        wrap_tool(function_tool(desk, name_override="object"), **REFUND),
    ]
    bot = agent(tools, [call("c1", "method", what="x")], [call("c2", "object", what="y")])
    asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    assert till.lines() == ["charge x", "charge y"]
    assert intents(log) == [{"what": "x"}, {"what": "y"}]


def test_a_key_by_position_before_nameless_arguments_is_refused(till: Till) -> None:
    with pytest.raises(DeclarationError, match="keyword-only"):
        wrap_tool(function_tool(Desk(till).aside, strict_mode=False), **REFUND)


def test_nameless_and_further_arguments_arrive_as_they_did(log: MemoryLog) -> None:
    got: list[Any] = []

    @function_tool(strict_mode=False)
    def note(first: str, *rest: str, idempotency_key: str, **more: Any) -> str:
        """Note."""
        got.append((first, rest, more))
        return idempotency_key

    tool = wrap_tool(note, **LOOK)
    assert "idempotency_key" not in json.dumps(tool.params_json_schema)
    bot = agent([tool], [call("c1", "note", first="a", rest=["b", "c"], more={"d": 1})])
    asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    assert got == [("a", ("b", "c"), {"d": 1})] and bot.model.heard != [""]
    assert intents(log) == [{"first": "a", "rest": {"$tuple": ["b", "c"]}, "d": 1}]


def test_a_key_in_the_middle_is_ours_to_give(till: Till, log: MemoryLog) -> None:
    @function_tool
    async def pay(ctx: ToolContext[Any], who: str, idempotency_key: str, amount: int = 3) -> str:
        """Pay."""
        return till.write("charge", f"{who} {amount} {idempotency_key}")

    tool = wrap_tool(pay, **REFUND)
    assert set(tool.params_json_schema["properties"]) == {"who", "amount"}
    assert "idempotency_key" in pay.params_json_schema["properties"], "the original is untouched"
    bot = agent([tool], [call("c1", "pay", who="a", amount=4, idempotency_key="forged")])
    asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    (step,) = read_saga(log, "s").steps
    assert till.lines() == [f"charge a 4 {step.forward_key}"]
    assert intents(log) == [{"who": "a", "amount": 4}]


def test_a_declared_output_type_is_still_held(log: MemoryLog) -> None:
    class Bill(BaseModel):
        amount: int

    good = function_tool(lambda: {"amount": 3}, name_override="bill", output_type=Bill)
    bad = function_tool(lambda: {"amount": "none"}, name_override="bad", output_type=Bill)
    for plain in (good, bad):
        heard: list[Any] = []
        for tool in (plain, wrap_tool(plain, **LOOK)):
            bot = agent([tool], [call("c1", plain.name)])
            asyncio.run(asaga_run(bot, "go", log=log))
            heard.append(bot.model.heard)
        assert heard[0] == heard[1] and len(heard[0]) == 1


def test_an_inverse_is_found_by_its_function(till: Till, log: MemoryLog) -> None:
    def order(what: str) -> str:
        """Order something."""
        return till.charge(what)

    @inverse_of(order)
    @compensator("orders.cancel")
    def cancel(what: str) -> None:
        till.write("refund", what)

    tool = wrap_tool(function_tool(order), semantics="COMPENSABLE")
    with pytest.raises(NoMoney), saga_scope("s", log=log):
        assert invoke_sync(tool, what="x") == "x"
        raise NoMoney
    assert till.lines() == ["charge x", "refund x"]


def invoke_sync(tool: FunctionTool, **args: Any) -> Any:
    return asyncio.run(ainvoke(tool, **args))


def test_the_function_itself_is_still_to_be_had_and_is_a_step(till: Till, log: MemoryLog) -> None:
    tool = wrap_tool(function_tool(till.charge), **REFUND)
    assert tool.__wrapped__("outside") == "outside"
    with saga_scope("s", log=log):
        assert tool.__wrapped__(what="x") == "x"
    assert [step.tool for step in read_saga(log, "s").steps] == ["charge"]
    with pytest.raises(DeclarationError, match="already"):
        wrap_tool(function_tool(tool.__wrapped__), **REFUND)


def test_a_copy_of_fields_alone_stays_wrapped_and_knows_its_runner(till: Till, log: MemoryLog) -> None:
    async def charge(what: str) -> str:
        """Charge for something."""
        return till.charge(what)

    tool = wrap_tool(function_tool(charge), **REFUND)
    copies = [copy.copy(tool), copy.deepcopy(tool), dataclasses.replace(tool, timeout_seconds=20.0)]
    for number, other in enumerate(copies):
        assert runner_of(other) is runner_of(tool)
        asyncio.run(asaga_run(agent([other], [call("c", "charge", what="x")]), "go", saga_id=str(number), log=log))
        assert [step.tool for step in read_saga(log, str(number)).steps] == ["charge"]


def test_a_sync_tool_still_takes_no_timeout_of_the_framework(till: Till) -> None:
    tool = wrap_tool(function_tool(till.charge), **REFUND)
    with pytest.raises(ValueError, match="async"):
        dataclasses.replace(tool, timeout_seconds=1.0)


# --- tools that function_tool did not make


def hand_made(handler: Any) -> FunctionTool:
    schema = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
    return FunctionTool(name="charge", description="Charge.", params_json_schema=schema, on_invoke_tool=handler)


def test_a_tool_made_by_hand_is_a_step_and_ends_the_run_as_it_did(till: Till, log: MemoryLog) -> None:
    async def handler(ctx: ToolContext[Any], text: str) -> str:
        what = json.loads(text)["what"]
        if what == "nothing":
            raise NoMoney("the account is empty")
        return till.charge(what)

    tool = wrap_tool(hand_made(handler), **RELEASE)
    asyncio.run(asaga_run(agent([tool], [call("c1", "charge", what="x")]), "go", saga_id="s", log=log))
    assert intents(log) == [{"what": "x"}] and till.lines() == ["charge x"]
    with pytest.raises(UserError) as raised:
        asyncio.run(asaga_run(agent([tool], [call("c1", "charge", what="nothing")]), "go", saga_id="t", log=log))
    assert isinstance(raised.value.__cause__, NoMoney)
    assert [step.status for step in read_saga(log, "t").steps] == [StepStatus.COMPENSATED]


@pytest.mark.parametrize("text", ['{"api_key": "sk-9"', '[{"api_key": "sk-9"}]', '{"api_key": "sk-9"}'])
def test_what_a_tool_made_by_hand_is_given_shows_no_secret_whatever_its_form(
    text: str, till: Till, log: MemoryLog
) -> None:
    async def handler(ctx: ToolContext[Any], given: str) -> str:
        return str(len(given))

    async def body() -> Any:
        async with saga_scope("s", log=log):
            context = ToolContext(context=None, tool_name="charge", tool_call_id="c", tool_arguments=text)
            return await wrap_tool(hand_made(handler), **REFUND).on_invoke_tool(context, text)

    assert asyncio.run(body()) == str(len(text))
    assert len(intents(log)) == 1 and "sk-9" not in repr(log.read("s"))


def test_a_tool_made_by_hand_is_given_the_context_that_it_asks_for(till: Till, log: MemoryLog) -> None:
    seen: list[type] = []

    async def handler(ctx: RunContextWrapper[Any], text: str) -> str:
        seen.append(type(ctx))
        return till.charge("x")

    plain = hand_made(handler)
    for tool in (plain, wrap_tool(plain, **REFUND)):
        asyncio.run(asaga_run(agent([tool], [call("c1", "charge", what="x")]), "go", log=log))
    assert seen[0] is seen[1] is RunContextWrapper


def test_a_copy_of_a_tool_that_is_its_own_invoker_acts_on_itself(till: Till, log: MemoryLog) -> None:
    class Counter(FunctionTool):
        def __init__(self) -> None:
            self.name_of_till = "first"
            schema: dict[str, Any] = {"type": "object", "properties": {}}
            super().__init__("count", "Count.", schema, self._count)

        async def _count(self, ctx: ToolContext[Any], text: str) -> str:
            return self.name_of_till

    wrapped = wrap_tool(Counter(), **LOOK)
    other = copy.copy(wrapped)
    other.name_of_till = "second"
    bot = agent([other], [call("c1", "count")])
    asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    assert isinstance(other, Counter) and bot.model.heard == ["second"] and len(read_saga(log, "s").steps) == 1


def test_of_a_tool_that_formats_by_itself_the_saga_hears_the_exception(till: Till, log: MemoryLog) -> None:
    async def implementation(ctx: ToolContext[Any], text: str) -> str:
        raise NoMoney("the account is empty")

    build = framework.with_function_tool_failure_error_handler
    plain = hand_made(build(implementation, lambda tool, error, text: None))
    bots = [
        agent([plain], [call("c1", "charge", what="x")]),
        agent([wrap_tool(plain, **RELEASE)], [call("c1", "charge", what="x")]),
    ]
    asyncio.run(Runner.run(bots[0], "go"))
    asyncio.run(asaga_run(bots[1], "go", saga_id="s", log=log))
    assert bots[0].model.heard == bots[1].model.heard and len(bots[0].model.heard) == 1
    assert "NoMoney" in next(record.data for record in log.read("s") if record.type == "UNKNOWN")["error"]


# --- what is refused


def test_what_is_no_function_tool_is_refused(till: Till) -> None:
    with pytest.raises(DeclarationError, match="WebSearchTool"):
        wrap_tool(WebSearchTool(), **LOOK)
    with pytest.raises(DeclarationError, match="an agent"):
        wrap_tool(Agent(name="b").as_tool("ask_b", "Ask."), **LOOK)
    with pytest.raises(DeclarationError, match="already"):
        wrap_tool(function_tool(saga_tool(**REFUND)(lambda what: what), name_override="charge"), **REFUND)

    def pages(what: str) -> Iterator[str]:
        """Page through something."""
        yield what

    with pytest.raises(DeclarationError, match="generator"):
        wrap_tool(function_tool(pages), **LOOK)


def test_a_saga_tool_in_a_function_tool_needs_no_wrapping(till: Till, log: MemoryLog) -> None:
    charge = saga_tool(**REFUND)(till.charge)
    bot = agent([function_tool(charge, name_override="charge")], [call("c1", "charge", what="x")])
    asyncio.run(asaga_run(bot, "go", saga_id="s", log=log))
    assert intents(log) == [{"what": "x"}] and bot.model.heard == ["x"]


def test_outside_of_a_saga_it_is_called_straight_through(till: Till) -> None:
    tool = wrap_tool(function_tool(till.charge), **REFUND)
    assert invoke(tool, what="x") == "x"
    bot = agent([tool], [call("c1", "charge", what="y")])
    asyncio.run(Runner.run(bot, "go"))
    assert till.lines() == ["charge x", "charge y"]
