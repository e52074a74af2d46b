"""`ToolCallHooks`: a ToolNode's calls as steps, by the tools' names."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt
from langgraph_fakes import CHARGE, MAIL, Till, call, hand_built, model, thread, wrapped

from agent_saga_core import DeclarationError, Log, SagaAborted, SagaStatus, StepStatus, list_sagas, read_saga
from agent_saga_core.wrapping import runner_of
from agent_saga_langgraph import ToolCallHooks, asaga_run, saga_run

GO: Any = {"messages": [("user", "go")]}


def both(hooks: ToolCallHooks) -> Any:
    return {"wrap_tool_call": hooks.wrap_tool_call, "awrap_tool_call": hooks.awrap_tool_call}


def the(log: Log) -> Any:
    (head,) = list_sagas(log)
    return read_saga(log, head.saga_id)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_declared_tools_are_steps_and_the_node_is_untouched(way: str, till: Till, log: Log) -> None:
    tools = [tool(till.charge), wrapped(till.mail, MAIL)]
    llm = model((call("charge", amount=1), call("mail", to="a")), call("charge", amount=2), "done")
    graph = hand_built(llm, tools, **both(ToolCallHooks({"charge": CHARGE})))
    if way == "sync":
        done = saga_run(graph, GO, log=log)
    else:
        done = asyncio.run(asaga_run(graph, GO, log=log))
    assert till.charged == [1, 2] and till.mailed == ["a"]
    assert sorted((step.tool, step.status) for step in the(log).steps) == [
        ("charge", StepStatus.DONE),
        ("charge", StepStatus.DONE),
        ("mail", StepStatus.DONE),
    ]
    assert all(message.status == "success" for message in done["messages"] if isinstance(message, ToolMessage))
    assert runner_of(tools[0]) is None and graph.nodes["tools"].bound.tools_by_name["charge"] is tools[0]


def test_what_is_not_declared_is_refused_before_anything_happens(till: Till, log: Log) -> None:
    hooks = ToolCallHooks({"charge": CHARGE})
    llm = model(call("charge", amount=1), call("mail", to="a"), "done")
    graph = hand_built(llm, [tool(till.charge), tool(till.mail)], **both(hooks))
    with pytest.raises(DeclarationError, match="'mail' has no declaration"):
        saga_run(graph, GO, log=log)
    assert till.mailed == [] and till.refunded == ["ch-1"] and the(log).status is SagaStatus.ROLLED_BACK


def test_what_is_allowed_is_called_outside_of_any_step(till: Till, log: Log) -> None:
    hooks = ToolCallHooks({"charge": CHARGE}, allow=["mail"])
    llm = model(call("mail", to="a"), call("nonsense"), "done")
    graph = hand_built(llm, [tool(till.charge), tool(till.mail)], **both(hooks))
    saga_run(graph, GO, log=log)
    assert till.mailed == ["a"] and the(log).steps == ()
    assert "nonsense" in llm.script.heard[1], "the node says itself that it knows no such tool"


def test_outside_of_a_saga_everything_is_called_straight_through(till: Till) -> None:
    llm = model((call("charge", amount=1), call("mail", to="a")), "done")
    hand_built(llm, [tool(till.charge), tool(till.mail)], **both(ToolCallHooks({"charge": CHARGE}))).invoke(GO)
    assert till.charged == [1] and till.mailed == ["a"]


def test_interrupts_pass_through(till: Till, log: Log) -> None:
    @tool
    def ask(question: str) -> str:
        """Ask a person."""
        return str(interrupt(question))

    hooks = ToolCallHooks({"charge": CHARGE}, allow=["ask"])
    llm = model((call("charge", amount=1), call("ask", question="sure?")), "done")
    graph = hand_built(llm, [tool(till.charge), ask], checkpointer=InMemorySaver(), **both(hooks))
    saga_run(graph, GO, thread(), log=log)
    assert the(log).status is SagaStatus.SUSPENDED
    saga_run(graph, Command(resume="yes"), thread(), log=log)
    assert till.charged == [1] and the(log).status is SagaStatus.COMMITTED


def test_a_failing_tool_is_undone_where_the_node_tells_the_model(till: Till, log: Log) -> None:
    def lose(amount: int) -> None:
        raise RuntimeError("no answer")

    till.after = lose
    llm = model(call("mail", to="a"), call("charge", amount=1), "done")
    tools = [tool(till.charge), tool(till.mail)]
    hooks = ToolCallHooks({"charge": {**CHARGE, "not_applied": RuntimeError}, "mail": MAIL})
    saga_run(hand_built(llm, tools, handle_tool_errors=True, **both(hooks)), GO, log=log)
    assert "no answer" in llm.script.heard[1]
    assert [step.status for step in the(log).steps] == [StepStatus.DONE, StepStatus.NOT_APPLIED]
    till.after = lambda amount: None


def test_contradictions_and_bad_declarations_are_refused(till: Till) -> None:
    with pytest.raises(DeclarationError, match="'mail'"):
        ToolCallHooks({"mail": MAIL}, allow=["mail"])
    hooks = ToolCallHooks({"charge": {"semantics": "COMPENSABLE"}})
    with pytest.raises(DeclarationError):
        hooks.wrapped(tool(till.charge))
    assert ToolCallHooks({}).wrapped(tool(till.charge)) is None
    assert issubclass(SagaAborted, Exception)
