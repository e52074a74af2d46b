"""What this adapter relies on in LangGraph, each fact by name: a version that moves breaks the one it has changed."""

from __future__ import annotations

import subprocess
import sys
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langgraph.callbacks import GraphCallbackHandler
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphBubbleUp, GraphDrained, GraphInterrupt
from langgraph.graph import START, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.runtime import get_runtime
from langgraph.types import Command, interrupt
from langgraph_fakes import Till, chain, hand_built, model, thread
from langgraph_fakes import call as make


class Noted(TypedDict, total=False):
    noted: Annotated[list[Any], add]


EMPTY: Any = {"noted": []}
NAMED: Any = {**thread(), "metadata": {"saga_id": "s"}}


def asking(ran: list[Any] | None = None, saver: Any = None) -> Any:
    def ask(state: Noted) -> Noted:
        if ran is not None:
            ran.append(get_runtime().execution_info.task_id)
        return {"noted": [interrupt("sure?")]}

    return chain(ask, state=Noted, checkpointer=saver if saver is not None else InMemorySaver())


def test_metadata_of_the_config_is_stored_with_every_checkpoint(saver: Any) -> None:
    graph = asking(saver=saver)
    graph.invoke(EMPTY, NAMED)
    history = list(graph.get_state_history(thread()))
    assert len(history) == 2 and {state.metadata["saga_id"] for state in history} == {"s"}
    assert len(list(graph.get_state_history(thread(), filter={"saga_id": "s"}))) == 2
    assert list(graph.get_state_history(thread(), filter={"saga_id": "other"})) == []


def test_update_state_writes_a_checkpoint_without_it(saver: Any) -> None:
    graph = asking(saver=saver)
    graph.invoke(EMPTY, NAMED)
    before = graph.get_state(thread()).config
    graph.update_state(thread(), {"noted": ["x"]})
    head = graph.get_state(thread())
    assert head.metadata["source"] == "update" and "saga_id" not in head.metadata
    assert head.parent_config["configurable"]["checkpoint_id"] == before["configurable"]["checkpoint_id"]


def test_a_task_keeps_its_id_over_a_resume_and_not_over_an_edit_or_a_fork(saver: Any) -> None:
    ran: list[Any] = []
    graph = asking(ran, saver)
    graph.invoke(EMPTY, thread())
    head = graph.get_state(thread()).config
    graph.invoke(None, thread())
    assert len(set(ran)) == 1
    graph.invoke(None, head)  # addressed: LangGraph forks, though it is the head
    assert len(set(ran)) == 2
    graph.update_state(thread(), {"noted": ["x"]}, as_node=START)
    graph.invoke(None, thread())
    assert len(set(ran)) == 3


def test_an_answer_to_the_past_gets_the_stored_answer(saver: Any) -> None:
    graph = asking(saver=saver)
    graph.invoke(EMPTY, thread())
    head = graph.get_state(thread()).config
    graph.invoke(Command(resume="yes"), thread())
    assert graph.invoke(Command(resume="NO"), head)["noted"] == ["yes"]


def test_an_edit_runs_finished_siblings_again(till: Till) -> None:
    @tool
    def ask(question: str) -> str:
        """Ask a person."""
        return str(interrupt(question))

    llm = model((make("charge", amount=1), make("ask", question="sure?")), "done")
    graph: Any = create_agent(llm, [tool(till.charge), ask], checkpointer=InMemorySaver())
    graph.invoke({"messages": [("user", "go")]}, thread())
    message = graph.get_state(thread()).values["messages"][1]
    graph.update_state(thread(), {"messages": [message]}, as_node="model")
    graph.invoke(Command(resume="yes"), thread())
    assert till.charged == [1, 1]


def test_interrupts_come_back_without_a_checkpointer_and_the_callback_hears_of_them() -> None:
    heard: list[Any] = []

    class Handler(GraphCallbackHandler):
        def on_interrupt(self, event: Any) -> None:
            heard.append(event)

    def ask(state: Noted) -> Noted:
        return {"noted": [interrupt("sure?")]}

    graph = chain(ask, state=Noted)
    assert "__interrupt__" in graph.invoke(EMPTY, {"callbacks": [Handler()]}) and len(heard) == 1


def test_a_breakpoint_is_seen_in_the_state_alone() -> None:
    graph = StateGraph(Noted).add_node("one", lambda state: None).add_edge(START, "one")
    compiled = graph.compile(checkpointer=InMemorySaver(), interrupt_before=["one"])
    assert "__interrupt__" not in compiled.invoke(EMPTY, thread())
    assert compiled.get_state(thread()).next == ("one",)


def test_interrupts_are_numbered_in_a_task_and_may_be_raised_by_any_code_in_it() -> None:
    assert issubclass(GraphInterrupt, GraphBubbleUp) and issubclass(GraphDrained, GraphBubbleUp)

    def ask(state: Noted) -> Noted:
        return {"noted": [interrupt("one"), interrupt("two")]}

    graph = chain(ask, state=Noted, checkpointer=InMemorySaver())
    graph.invoke(EMPTY, thread())
    graph.invoke(Command(resume=1), thread())
    assert graph.invoke(Command(resume=2), thread())["noted"] == [1, 2]


def test_exceptions_of_control_pass_a_tool_node_that_tells_the_model_of_errors() -> None:
    class Mixed(ValueError, GraphBubbleUp):
        """A failure that LangGraph takes for its own."""

    @tool
    def fail(how: str) -> str:
        """Fail."""
        raise Mixed(how)

    graph = hand_built(model(make("fail", how="now"), "done"), [fail], handle_tool_errors=True)
    with pytest.raises(Mixed):
        graph.invoke({"messages": [("user", "go")]})


def test_a_tool_node_calls_the_tool_of_the_request(till: Till) -> None:
    @tool
    def charge(amount: int) -> str:
        """Charge something else."""
        return "another"

    def around(request: Any, handler: Any) -> Any:
        return handler(request.override(tool=charge))

    llm = model(make("charge", amount=1), "done")
    hand_built(llm, [tool(till.charge)], wrap_tool_call=around).invoke({"messages": [("user", "go")]})
    assert llm.script.heard == ["another"] and till.charged == []


def test_the_places_that_coverage_looks_at_are_there(till: Till) -> None:
    graph: Any = create_agent(model(), [tool(till.charge)])
    assert isinstance(graph.nodes["tools"].bound, ToolNode)
    assert set(graph.nodes["tools"].bound.tools_by_name) == {"charge"}
    assert hasattr(graph.nodes["tools"].bound, "_wrap_tool_call")
    node = graph.nodes["model"].bound
    assert node.func.__module__ == node.afunc.__module__ == "langchain.agents.factory"
    assert {"default_tools", "wrap_model_call_handler"} <= set(node.func.__code__.co_freevars)
    assert graph.builder.branches


def test_importing_the_package_imports_no_langgraph() -> None:
    code = (
        "import sys, agent_saga_langgraph; print([m for m in sys.modules if m.startswith(('langgraph', 'langchain'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_a_write_of_no_task_beside_a_checkpoint_is_passed_over(saver: Any) -> None:
    graph = asking(saver=saver)
    graph.invoke(EMPTY, thread())
    before = graph.get_state(thread())
    saver.put_writes(before.config, [("__of_others__", "first")], "of others:1")
    saver.put_writes(before.config, [("__of_others__", "second")], "of others:1")  # the first one is kept
    writes = [write for write in saver.get_tuple(thread()).pending_writes if write[1] == "__of_others__"]
    assert writes == [("of others:1", "__of_others__", "first")]
    assert graph.get_state(thread()) == before
    assert graph.invoke(Command(resume="yes"), thread())["noted"] == ["yes"]


def test_the_state_does_not_show_what_a_command_brought_to_a_finished_thread(saver: Any) -> None:
    graph = asking(saver=saver)
    graph.invoke(EMPTY, thread())
    graph.invoke(Command(resume="yes"), thread())
    assert graph.invoke(Command(goto="ask"), thread())["__interrupt__"]
    state = graph.get_state(thread())
    assert state.next == () and state.tasks == () and state.interrupts == ()


def test_the_tasks_of_a_subgraph_without_checkpoints_are_new_each_time(saver: Any) -> None:
    ran: list[Any] = []

    def inner(state: Noted) -> None:
        ran.append(get_runtime().execution_info.task_id)

    sub = chain(inner, state=Noted, checkpointer=False)

    def ask(state: Noted) -> Noted:
        sub.invoke(EMPTY)
        return {"noted": [interrupt("sure?")]}

    graph = chain(ask, state=Noted, checkpointer=saver)
    graph.invoke(EMPTY, thread())
    graph.invoke(Command(resume="yes"), thread())
    assert len(set(ran)) == 2


def test_input_with_the_heads_run_id_resumes(saver: Any) -> None:
    ran: list[Any] = []
    graph, config = asking(ran, saver), {**thread(), "metadata": {"run_id": "r"}}
    graph.invoke(EMPTY, config)
    graph.invoke(EMPTY, config)
    assert len(ran) == 2 and len(set(ran)) == 1
