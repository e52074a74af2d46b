"""`wrap_tool`: CrewAI's kinds of tools, what they keep, and where their step begins and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from agent_saga_core import FileLog, current_step, delete_by, read_saga, saga_scope, saga_tool, undo
from agent_saga_core.errors import DeclarationError, SagaNotRunning
from agent_saga_core.testing import Call, Script
from agent_saga_core.wrapping import runner_of

Done = list[tuple[str, Any]]


def declared(**more: Any) -> dict[str, Any]:
    return {"semantics": "COMPENSABLE", "compensate": undo("unpay", if_absent="noop", amount="args.amount"), **more}


def never(args: Any, result: Any) -> bool:
    return False


def pay_class(crews: ModuleType, done: Done) -> Any:
    class Pay(crews.BaseTool):
        name: str = "pay"
        description: str = "Pay."

        def _run(self, amount: int, note: str = "none") -> dict[str, Any]:
            done.append(("pay", amount))
            return {"id": amount, "note": note}

    return Pay


@pytest.mark.parametrize("native", [True, False], ids=["native", "react"])
def test_a_tool_class_keeps_everything_and_is_one_step(
    crews: ModuleType, done: Done, log: FileLog, native: bool
) -> None:
    from crewai.tools.base_tool import _TOOL_TYPE_REGISTRY  # where a checkpoint looks a tool's class up

    kind = pay_class(crews, done)

    tool = kind(cache_function=never, result_as_answer=True, max_usage_count=2, tool_failure_policy="raise")
    wrapped = crews.wrap_tool(tool, **declared())
    assert isinstance(wrapped, kind) and type(tool) is kind and runner_of(tool) is None
    assert wrapped.tool_type == tool.tool_type and _TOOL_TYPE_REGISTRY[tool.tool_type] is kind
    assert wrapped.model_dump() == tool.model_dump() and wrapped.model_dump_json() == tool.model_dump_json()
    assert wrapped.args_schema is tool.args_schema and wrapped.cache_function is never
    crew = crews.crew_of([wrapped], Script([Call("pay", {"amount": 5}), "never asked"]), native=native)
    result = crews.saga_run(crew, log=log, saga_id="s")
    assert result.raw == "{'id': 5, 'note': 'none'}", "result_as_answer"
    assert [r.data["args"] for r in log.read("s") if r.type == "INTENT"] == [{"amount": 5, "note": "none"}]
    assert [r.data["result"] for r in log.read("s") if r.type == "DONE"] == [{"id": 5, "note": "none"}]
    assert done == [("pay", 5)]


def test_a_spent_limit_and_arguments_that_do_not_fit_are_no_steps(crews: ModuleType, done: Done, log: FileLog) -> None:
    wrapped = crews.wrap_tool(pay_class(crews, done)(max_usage_count=1), **declared())
    plain = pay_class(crews, done)(max_usage_count=1)
    with saga_scope("s", log=log) as saga:
        texts = []
        for tool in (wrapped, plain):
            with pytest.raises(ValueError, match="validation failed") as failed:
                tool.run(amount="much")
            texts.append(str(failed.value))
        assert texts[0] == texts[1] and saga.steps == ()
        assert wrapped.run(amount=1) == plain.run(amount=1)
        assert all(isinstance(tool.run(amount=1), crews.ToolFailure) for tool in (wrapped, plain))
        assert len(saga.steps) == 1


def test_run_and_the_methods_that_call_each_other_are_one_step(crews: ModuleType, done: Done, log: FileLog) -> None:
    class Direct(crews.BaseTool):
        name: str = "direct"
        description: str = "Does all in run."

        def run(self, *args: Any, **kwargs: Any) -> Any:
            done.append(("pay", kwargs["amount"]))
            return {"id": 1}

        def _run(self, amount: int) -> Any:
            raise AssertionError("never called")

    class Around(crews.BaseTool):
        name: str = "around"
        description: str = "Does something around run."

        def run(self, *args: Any, **kwargs: Any) -> Any:
            done.append(("before", 0))
            return super().run(*args, **kwargs)

        def _run(self, amount: int, *, idempotency_key: str) -> Any:
            step = current_step()
            assert step is None or step.idempotency_key == idempotency_key
            done.append(("pay", amount))
            return {"id": 2}

        async def _arun(self, amount: int) -> Any:
            return self._run(amount)

    direct, around = (crews.wrap_tool(tool, **declared()) for tool in (Direct(), Around()))
    assert "idempotency_key" not in crews.shown_to_the_model(around)["function"]["parameters"]["properties"]
    with saga_scope("s", log=log) as saga:
        assert direct.run(amount=1) == {"id": 1}
        assert around.run(amount=2) == {"id": 2}
        assert around.to_structured_tool().invoke({"amount": 3}) == {"id": 2}
        assert asyncio.run(around.arun(amount=4)) == {"id": 2}
        assert [step.tool for step in saga.steps] == ["direct", "around", "around", "around"]
        assert [r.data["args"] for r in log.read("s") if r.type == "INTENT"] == [{"amount": n} for n in (1, 2, 3, 4)]
    assert around.run(amount=5) == {"id": 2} and direct.run(amount=5) == {"id": 1}


def test_structured_tools_and_what_is_made_of_a_wrapped_tool(crews: ModuleType, done: Done, log: FileLog) -> None:
    from crewai.tools.structured_tool import CrewStructuredTool

    def pay(amount: int) -> dict[str, Any]:
        """Pay."""
        done.append(("pay", amount))
        return {"id": amount}

    structured = crews.wrap_tool(CrewStructuredTool.from_function(pay), **declared())
    assert isinstance(structured, CrewStructuredTool) and runner_of(structured) is not None
    converted = crews.Tool.from_langchain(structured)  # what an agent makes of it
    made = crews.wrap_tool(crews.tool("pay")(pay), **declared()).to_structured_tool()
    with saga_scope("s", log=log) as saga:
        assert structured.invoke({"amount": 1}) == {"id": 1} and converted.run(amount=2) == {"id": 2}
        assert made.invoke({"amount": 3}) == {"id": 3} and asyncio.run(made.ainvoke({"amount": 4}))["id"] == 4
        # The framework's `ainvoke` runs a sync function on a thread that knows of no saga: outside of a run, straight.
        assert len(saga.steps) == 3
    assert {entry.tool for entry in crews.coverage([structured, converted, made]).covered} == {"pay"}
    for tool in (structured, converted, made):
        with pytest.raises(DeclarationError, match="saga tool already"):
            crews.wrap_tool(tool, **declared())


def test_the_key_is_ours_to_give(crews: ModuleType, done: Done, log: FileLog) -> None:
    from pydantic import BaseModel, field_validator

    @crews.tool("pay")
    def pay(amount: int, idempotency_key: str) -> str:
        """Pay."""
        done.append(("pay", idempotency_key))
        return "paid"

    wrapped = crews.wrap_tool(pay, **declared())
    assert "idempotency_key" in pay.args_schema.model_fields, "the original is left alone"
    for native in (True, False):
        given = Call("pay", {"amount": 1, "idempotency_key": "the model's"})
        crews.saga_run(crews.crew_of([wrapped], Script([given]), native=native), log=log, saga_id=f"s{native}")
    keys = [key for _, key in done]
    assert len(set(keys)) == 2 and "the model's" not in keys
    assert keys == [read_saga(log, saga_id).steps[0].forward_key for saga_id in ("sTrue", "sFalse")]

    class Checked(BaseModel):
        amount: int
        idempotency_key: str

        @field_validator("amount")
        @classmethod
        def fits(cls, value: int) -> int:
            return value

    with pytest.raises(DeclarationError, match="args_schema"):
        crews.wrap_tool(pay.model_copy(update={"args_schema": Checked}), **declared())


def test_what_is_refused(crews: ModuleType, done: Done) -> None:
    def pay(amount: int) -> None:
        """Pay."""

    def stream(amount: int) -> Iterator[int]:
        """Pay."""
        yield amount

    class Odd(crews.Tool):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            return None

    with pytest.raises(DeclarationError, match="no CrewAI tool"):
        crews.wrap_tool(pay, **declared())
    with pytest.raises(DeclarationError, match="saga tool already"):
        crews.wrap_tool(crews.tool("pay")(saga_tool(**declared())(pay)), **declared())
    with pytest.raises(DeclarationError, match="generator"):
        crews.wrap_tool(crews.tool("stream")(stream), **declared())
    with pytest.raises(DeclarationError, match="cannot be told"):
        crews.wrap_tool(Odd(name="odd", description="Odd.", func=pay), **declared())
    with pytest.raises(SagaNotRunning):
        crews.wrap_tool(crews.tool("pay")(pay), **declared(require_saga=True)).run(amount=1)


@pytest.mark.parametrize("native", [True, False], ids=["native", "react"])
def test_a_reported_failure_is_a_failed_call(crews: ModuleType, done: Done, log: FileLog, native: bool) -> None:
    """CrewAI's `ToolFailure` is returned, not raised; the framework gets it, and the saga a failure."""
    seen: list[Any] = []

    @crews.tool("pay")
    def pay(amount: int) -> Any:
        """Pay."""
        done.append(("pay", amount))
        return crews.ToolFailure(message="declined", code="card") if amount < 3 else {"id": amount}

    def declined(error: BaseException) -> bool:
        seen.append(error)
        return error.failure.code == "card"

    by_result = {"semantics": "COMPENSABLE", "compensate": delete_by("unpay", amount="result.id")}
    calls = [Call("pay", {"amount": n}) for n in (1, 3)]
    crew = crews.crew_of([crews.wrap_tool(pay, **by_result, not_applied=declined)], Script(calls), native=native)
    result = crews.saga_run(crew, log=log, saga_id="absent")
    assert [(f.tool_name, f.failure.code) for f in result.tasks_output[0].tool_failures] == [("pay", "card")]
    assert [type(error).__name__ for error in seen] == ["ToolReportedFailure"] and done == [("pay", 1), ("pay", 3)]

    crew = crews.crew_of([crews.wrap_tool(pay, **declared())], Script(calls), native=native)
    crews.saga_run(crew, log=log, saga_id="undone")
    assert done[2:] == [("pay", 1), ("unpay", 1), ("pay", 3)], "not known to be absent, so it was undone"


def test_importing_the_adapter_imports_no_framework() -> None:
    import subprocess
    import sys

    code = (
        "import sys, agent_saga_crewai, agent_saga_crewai.adapter as a; "
        "assert 'crewai' not in sys.modules; assert a.ADAPTER.name == 'crewai'; print(len(agent_saga_crewai.__all__))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
