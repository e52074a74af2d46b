"""`wrap_tool`: what stays of the tool, and what of a call becomes a step."""

import asyncio
import copy
import functools
from typing import Any

import pytest
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import Response
from llama_index.core.callbacks import CallbackManager
from llama_index.core.tools import AsyncBaseTool, BaseTool, FunctionTool, QueryEngineTool, ToolMetadata, ToolOutput
from llama_index.core.tools.calling import acall_tool, call_tool
from llama_index.core.workflow import Context
from llamaindex_fakes import BY_AMOUNT, BY_RESULT, Till, agent, bounded, saying
from pydantic import BaseModel, Field, SecretStr

from agent_saga_core import (
    DeclarationError,
    MemoryLog,
    NotApplied,
    RollbackIncomplete,
    SagaAborted,
    Secret,
    StepStatus,
    read_saga,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.wrapping import runner_of
from agent_saga_llamaindex import asaga_run, wrap_tool


class Amount(BaseModel):
    """One argument."""

    amount: int


class ByMethod(AsyncBaseTool):
    """A tool that is no function, whose async call is its sync one, as LlamaIndex's own examples write it."""

    def __init__(self, till: Till) -> None:
        self.till = till

    @property
    def metadata(self) -> ToolMetadata:
        return ToolMetadata(name="charge", description="Charge an amount.", fn_schema=Amount)

    def call(self, *args: Any, **kwargs: Any) -> ToolOutput:
        amount = int(args[0]) if args else int(kwargs["amount"])
        made = self.till.function()(amount)
        return ToolOutput(content=f"charged {amount}", tool_name="charge", raw_input=kwargs, raw_output=made)

    async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
        return self.call(*args, **kwargs)


class ByCalling(BaseTool):
    """A tool of the oldest kind: nothing but a call."""

    def __init__(self, till: Till) -> None:
        self.till = till

    @property
    def metadata(self) -> ToolMetadata:
        return ToolMetadata(name="charge", description="Charge an amount.")

    def __call__(self, input: Any) -> ToolOutput:
        made = self.till.function()(int(input))
        return ToolOutput(content=f"charged {input}", tool_name="charge", raw_input={}, raw_output=made)


def steps(log: MemoryLog, saga_id: str = "s") -> list[tuple[str, StepStatus]]:
    return [(step.tool, step.status) for step in read_saga(log, saga_id).steps]


def recorded(log: MemoryLog, kind: str, saga_id: str = "s") -> list[dict[str, Any]]:
    return [record.data for record in log.read(saga_id) if record.type == kind]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_wrapped_tool_has_the_same_metadata(till: Till, is_async: bool) -> None:
    fn = till.afunction() if is_async else till.function()
    tool = FunctionTool.from_defaults(fn, name="pay", description="Pay.", return_direct=True)
    wrapped = wrap_tool(tool, **BY_RESULT)
    assert isinstance(wrapped, FunctionTool) and type(wrapped).__qualname__ == "FunctionTool"
    assert wrapped.metadata is tool.metadata and wrapped.metadata.fn_schema is tool.metadata.fn_schema
    assert wrapped.metadata.return_direct is True
    assert wrapped.real_fn is fn and tool.real_fn is fn and runner_of(tool) is None
    runner = runner_of(wrapped)
    assert runner is not None and runner.spec.tool == "pay"
    for copied in (copy.copy(wrapped), copy.deepcopy(wrapped)):
        assert runner_of(copied) is runner


@bounded
async def test_a_tool_that_returns_directly_ends_the_run(till: Till, log: MemoryLog) -> None:
    tool = FunctionTool.from_defaults(till.function(), return_direct=True)
    llm = saying([("c", "charge", {"amount": 5})], "not asked again")
    result = await asaga_run(agent([wrap_tool(tool, **BY_RESULT)], llm), "go", saga_id="s", log=log)
    assert str(result) == "{'amount': 5}"
    assert steps(log) == [("charge", StepStatus.DONE)]


@bounded
async def test_every_way_to_the_function_is_a_step(till: Till, log: MemoryLog) -> None:
    sync = wrap_tool(FunctionTool.from_defaults(till.function()), **BY_RESULT)
    asynchronous = wrap_tool(FunctionTool.from_defaults(till.afunction()), **BY_RESULT)
    async with saga_scope("s", log=log):
        await sync.acall(amount=1)
        assert await sync.async_fn(2) == {"amount": 2}
        await asynchronous.acall(amount=3)
        assert await asynchronous.async_fn(amount=4) == {"amount": 4}
        assert asynchronous.call(amount=5).raw_output == {"amount": 5}, "on a loop of its own, in a thread"
    with saga_scope("t", log=log):
        sync.call(amount=6)
        assert sync.fn(amount=7) == {"amount": 7}
    assert steps(log) == [("charge", StepStatus.DONE)] * 5 and steps(log, "t") == [("charge", StepStatus.DONE)] * 2
    assert [intent["args"] for intent in recorded(log, "INTENT")] == [{"amount": n} for n in range(1, 6)]
    assert till.charged == [1, 2, 3, 4, 5, 6, 7]


def test_both_functions_of_a_tool_are_steps(till: Till, log: MemoryLog) -> None:
    tool = FunctionTool.from_defaults(till.function(), async_fn=till.afunction())
    wrapped = wrap_tool(tool, **BY_RESULT)
    with saga_scope("s", log=log):
        wrapped.call(amount=1)

    async def other() -> None:
        async with saga_scope("t", log=log):
            await wrapped.acall(amount=2)

    asyncio.run(other())
    assert steps(log) == steps(log, "t") == [("charge", StepStatus.DONE)] and till.charged == [1, 2]


def test_outside_of_a_saga_it_calls_straight_through(till: Till) -> None:
    assert wrap_tool(FunctionTool.from_defaults(till.function()), **BY_RESULT).call(amount=3).content == "{'amount': 3}"
    assert till.charged == [3]


def test_what_a_callback_makes_of_a_result_is_not_what_is_recorded(till: Till, log: MemoryLog) -> None:
    tool = FunctionTool.from_defaults(till.function(), callback=lambda made: f"paid {made['amount']}")
    with saga_scope("s", log=log):
        assert wrap_tool(tool, **BY_RESULT).call(amount=3).content == "paid 3"
    assert [data["result"] for data in recorded(log, "DONE")] == [{"amount": 3}]


def test_neither_context_nor_partial_params_are_recorded(log: MemoryLog) -> None:
    def pay(ctx: Context, amount: int, tenant: str = "", fee: int = Field(default=2)) -> int:  # type: ignore[assignment]
        return amount + fee

    tool = FunctionTool.from_defaults(pay, partial_params={"tenant": "t-1"})
    wrapped = wrap_tool(tool, semantics="READ_ONLY")
    assert (wrapped.requires_context, wrapped.ctx_param_name) == (True, "ctx")
    assert set(wrapped.metadata.get_parameters_dict()["properties"]) == {"amount", "fee"}
    with saga_scope("s", log=log):
        assert wrapped.call(ctx=object(), amount=3).raw_output == 5
        with pytest.raises(ValueError, match="Context is required"):
            wrapped.call(amount=3)
    assert [intent["args"] for intent in recorded(log, "INTENT")] == [{"amount": 3, "fee": 2}]


def test_the_key_is_given_and_not_shown(log: MemoryLog) -> None:
    def order(item: str, *, idempotency_key: str) -> str:
        """Order one item."""
        return idempotency_key

    tool = FunctionTool.from_defaults(order)
    wrapped = wrap_tool(tool, semantics="READ_ONLY")
    assert "idempotency_key" in tool.metadata.description, "LlamaIndex writes the signature into the description"
    assert "idempotency_key" not in str(wrapped.metadata.to_openai_tool())
    assert wrapped.metadata.description == "order(item: str) -> str\nOrder one item."
    assert set(wrapped.metadata.get_parameters_dict()["properties"]) == {"item"}
    assert "idempotency_key" in tool.metadata.get_parameters_dict()["properties"], "the original is untouched"
    with saga_scope("s", log=log) as saga:
        given = wrapped.call(item="a", idempotency_key="the model's").raw_output
        assert given == saga.steps[0].forward_key
    assert wrapped.call(item="a").raw_output != given, "outside, one is drawn"


def test_a_call_that_cannot_begin_is_no_step(till: Till, log: MemoryLog) -> None:
    tool = FunctionTool.from_defaults(till.function())
    wrapped = wrap_tool(tool, **BY_RESULT)
    for arguments in ({}, {"amount": 1, "currency": "EUR"}):
        with pytest.raises(TypeError) as plain:
            tool.call(**arguments)
        with saga_scope(log=log) as saga, pytest.raises(TypeError) as made:
            wrapped.call(**arguments)
        assert str(made.value) == str(plain.value) and saga.steps == ()


def test_a_decorated_function_is_called_with_what_it_takes(till: Till, log: MemoryLog) -> None:
    def with_account(fn: Any) -> Any:
        @functools.wraps(fn)
        def inner(amount: int) -> Any:
            return fn("account", amount)

        return inner

    @with_account
    def pay(account: str, amount: int) -> dict[str, int]:
        return {"amount": till.function()(amount)["amount"]}

    wrapped = wrap_tool(FunctionTool.from_defaults(pay, name="pay"), **BY_RESULT)
    with pytest.raises(SagaAborted), saga_scope("s", log=log) as saga:
        assert wrapped.call(amount=4).raw_output == {"amount": 4}
        saga.abort("no")
    assert recorded(log, "INTENT")[0]["args"] == {"amount": 4} and till.refunded == [4]


def test_what_is_a_saga_tool_already_is_refused(till: Till) -> None:
    declared = saga_tool(**BY_RESULT)(till.function())
    with pytest.raises(DeclarationError, match="saga tool already"):
        wrap_tool(FunctionTool.from_defaults(declared), **BY_RESULT)
    wrapped = wrap_tool(FunctionTool.from_defaults(till.function()), **BY_RESULT)
    for again in (
        wrapped,
        FunctionTool.from_defaults(wrapped.fn),
        FunctionTool.from_defaults(async_fn=wrapped.async_fn),
    ):
        with pytest.raises(DeclarationError, match="saga tool already"):
            wrap_tool(again, **BY_RESULT)
    with pytest.raises(DeclarationError, match="from_defaults"):
        wrap_tool(till.function(), **BY_RESULT)


class Echo(BaseQueryEngine):
    """A query engine that answers with the question."""

    def __init__(self) -> None:
        super().__init__(CallbackManager([]))

    def _query(self, query_bundle: Any) -> Response:
        return Response(response=f"about {query_bundle.query_str}")

    async def _aquery(self, query_bundle: Any) -> Response:
        return self._query(query_bundle)

    def _get_prompt_modules(self) -> dict[str, Any]:
        return {}


@bounded
async def test_a_query_engine_tool_is_a_step(log: MemoryLog) -> None:
    tool = QueryEngineTool.from_defaults(Echo(), name="ask", description="Ask.", return_direct=True)
    wrapped = wrap_tool(tool, semantics="READ_ONLY")
    assert isinstance(wrapped, QueryEngineTool) and wrapped.metadata is tool.metadata
    assert wrapped.query_engine is tool.query_engine and runner_of(tool) is None
    llm = saying([("c", "ask", {"input": "tides"})], "not asked again")
    result = await asaga_run(agent([wrapped], llm), "go", saga_id="s", log=log)
    assert str(result) == "about tides"
    assert [intent["args"] for intent in recorded(log, "INTENT")] == [{"input": "tides"}]
    async with saga_scope("t", log=log):
        assert wrapped("rain").content == (await wrapped.acall(input="rain")).content == "about rain"
    assert steps(log, "t") == [("ask", StepStatus.DONE)] * 2


@bounded
async def test_a_query_engine_with_an_effect_is_undone(till: Till, log: MemoryLog) -> None:
    class Metered(Echo):
        """Charges for each answer."""

        async def _aquery(self, query_bundle: Any) -> Response:
            made = till.function()(len(query_bundle.query_str))
            return Response(response=f"about {query_bundle.query_str}", metadata=made)

    by_answer = undo("till.refund", amount="result.raw_output.metadata.amount")
    tool = QueryEngineTool.from_defaults(Metered(), name="ask", description="Ask.")
    wrapped = wrap_tool(tool, semantics="COMPENSABLE", compensate=by_answer)
    with pytest.raises(SagaAborted):
        async with saga_scope("s", log=log) as saga:
            result = await asaga_run(agent([wrapped], saying([("c", "ask", {"input": "tides"})], "told")), "go")
            assert [call.tool_output.content for call in result.tool_calls] == ["about tides"]
            saga.abort("no")
    assert till.acts == [("charge", 5), ("refund", 5)]


@bounded
async def test_a_method_that_calls_another_is_one_step(till: Till, log: MemoryLog) -> None:
    declaration = {"semantics": "COMPENSABLE", "compensate": undo("till.refund", amount="result.raw_output.amount")}
    wrapped = wrap_tool(ByMethod(till), **declaration)
    with pytest.raises(SagaAborted):
        async with saga_scope("s", log=log) as saga:
            assert (await wrapped.acall(amount=1)).content == "charged 1"
            assert wrapped.call(2).content == "charged 2"
            assert wrapped(amount=3).content == "charged 3"
            saga.abort("no")
    assert till.charged == [1, 2, 3] and till.refunded == [3, 2, 1]
    assert [intent["args"] for intent in recorded(log, "INTENT")] == [{"amount": n} for n in (1, 2, 3)]
    assert isinstance(wrapped, ByMethod)


@bounded
async def test_a_tool_that_can_only_be_called_is_a_step(till: Till, log: MemoryLog) -> None:
    wrapped = wrap_tool(ByCalling(till), semantics="READ_ONLY")
    llm = saying([("c", "charge", {"input": "7"})])
    await asaga_run(agent([wrapped], llm), "go", saga_id="s", log=log)
    assert till.charged == [7] and steps(log) == [("charge", StepStatus.DONE)]


class Doubling(FunctionTool):
    """A function tool that calls in its own way."""

    async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
        await super().acall(*args, **kwargs)
        return await super().acall(*args, **kwargs)


@bounded
async def test_a_function_tool_that_calls_in_its_own_way_is_one_step(till: Till, log: MemoryLog) -> None:
    wrapped = wrap_tool(Doubling.from_defaults(till.function()), **BY_AMOUNT)
    async with saga_scope("s", log=log):
        assert (await wrapped.acall(amount=2)).content == "{'amount': 2}"
    assert till.charged == [2, 2] and steps(log) == [("charge", StepStatus.DONE)]


# --- LlamaIndex calls a tool with one argument that is no FunctionTool again if the first call raised


class Card(BaseModel):
    """The arguments of a payment."""

    amount: int
    code: SecretStr


class ByCard(ByMethod):
    """A tool that is no function and is given a secret, as its schema says."""

    @property
    def metadata(self) -> ToolMetadata:
        return ToolMetadata(name="charge", description="Charge an amount.", fn_schema=Card)


class Traced(FunctionTool):
    """A function tool that calls in a way of its own."""

    async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
        return await super().acall(*args, **kwargs)


@pytest.mark.parametrize("kind", ["schema", "function", "result"])
@bounded
async def test_a_marked_secret_is_in_no_record_of_a_tool_called_by_its_methods(
    till: Till, log: MemoryLog, kind: str
) -> None:
    def charge(amount: int, code: Secret[str] = "") -> dict[str, int]:
        return till.function()(amount)

    def issue(amount: int, code: str) -> Secret[str]:
        till.function()(amount)
        return code

    made: dict[str, Any] = {
        "schema": ByCard(till), "function": Traced.from_defaults(charge), "result": Traced.from_defaults(issue)
    }  # fmt: skip
    wrapped = wrap_tool(made[kind], **BY_AMOUNT)
    async with saga_scope("s", log=log):
        output = await wrapped.acall(amount=1, code="c0de")
    assert till.charged == [1] and isinstance(output, ToolOutput)
    (done,), (intent,) = recorded(log, "DONE"), recorded(log, "INTENT")
    assert "c0de" not in str(done)
    assert kind == "result" or "c0de" not in str(intent)


@bounded
async def test_the_second_call_of_one_that_left_nothing_is_its_next_attempt(till: Till, log: MemoryLog) -> None:
    left = [NotApplied("nothing was charged")]

    class Refusing(ByMethod):
        def call(self, *args: Any, **kwargs: Any) -> ToolOutput:
            if left:
                raise left.pop()
            return super().call(*args, **kwargs)

    wrapped = wrap_tool(Refusing(till), **BY_AMOUNT)
    async with saga_scope("s", log=log) as saga:
        output = await acall_tool(wrapped, {"amount": 3})
        assert not output.is_error and [step.attempts for step in saga.steps] == [2]
    assert till.charged == [3]


@pytest.mark.parametrize("is_async", [False, True])
@bounded
async def test_the_second_call_of_one_in_doubt_is_refused(till: Till, log: MemoryLog, is_async: bool) -> None:
    class Lost(Exception):
        pass

    def lose(_amount: int) -> None:
        raise Lost("the connection broke after the charge")

    till.on = lose
    declaration = {"semantics": "COMPENSABLE", "compensate": undo("till.refund", amount="result.raw_output.amount")}
    wrapped = wrap_tool(ByMethod(till), **declaration)
    with pytest.raises(RollbackIncomplete):
        async with saga_scope("s", log=log):
            tool: Any = wrapped
            output = await acall_tool(tool, {"amount": 3}) if is_async else call_tool(tool, {"amount": 3})
            assert output.is_error and isinstance(output.exception, SagaAborted)
    assert till.charged == [3], "charged once"


def test_llamaindex_makes_the_second_call(till: Till) -> None:
    """The fact that the two tests above rest on."""

    def fail(_amount: int) -> None:
        raise RuntimeError

    till.on = fail
    call_tool(ByMethod(till), {"amount": 3})
    assert till.charged == [3, 3]
