"""What LangChain and LangGraph do by themselves and the adapter rests on: each fact fails by name when it moves."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool, StructuredTool, Tool, tool
from langchain_core.tools import base as tools_base
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphBubbleUp, GraphDrained, GraphInterrupt, ParentCommand

from agent_saga_core import saga_scope
from agent_saga_langchain import places, saga_run, wrap_tool

GO = {"messages": [HumanMessage("go")]}
WHERE: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_sync_tools_run_on_other_threads_in_the_context_of_the_caller(way, say):
    seen: list[Any] = []

    @tool
    def look(item: str) -> str:
        """Look."""
        seen.append((threading.get_ident(), WHERE.get()))
        return item

    agent = create_agent(say(("look", {"item": "a"}, "c"), "done"), [look])
    token = WHERE.set("caller")
    try:
        agent.invoke(GO) if way == "invoke" else asyncio.run(agent.ainvoke(GO))
    finally:
        WHERE.reset(token)
    ((thread, where),) = seen
    assert thread != threading.get_ident() and where == "caller"


def test_async_tools_run_on_the_loop_and_not_under_invoke(say):
    seen: list[Any] = []

    @tool
    async def look(item: str) -> str:
        """Look."""
        seen.append(asyncio.get_running_loop())
        return item

    def agent() -> Any:
        return create_agent(say(("look", {"item": "a"}, "c"), "done"), [look])

    with pytest.raises(NotImplementedError):
        agent().invoke(GO)

    async def main() -> bool:
        await agent().ainvoke(GO)
        return seen == [asyncio.get_running_loop()]

    assert asyncio.run(main())


def test_an_exception_ends_the_run_and_a_validation_error_or_an_unknown_tool_does_not(say):
    @tool
    def fail(item: str) -> str:
        """Fail."""
        raise KeyError(item)

    with pytest.raises(KeyError):
        create_agent(say(("fail", {"item": "a"}, "c"), "done"), [fail]).invoke(GO)
    turns = (("fail", {"item": [1]}, "c1"), ("nosuch", {}, "c2"), "done")
    messages = create_agent(say(*turns), [fail]).invoke(GO)["messages"]
    assert [m.status for m in messages if m.type == "tool"] == ["error", "error"]


def test_when_a_parallel_call_fails_a_sync_sibling_finishes_and_an_async_one_is_cancelled(say):
    ended: list[str] = []
    failed = threading.Event()

    @tool
    def fail(item: str) -> str:
        """Fail."""
        failed.set()
        raise KeyError(item)

    @tool
    def wait(item: str) -> str:
        """Wait for the failure."""
        assert failed.wait(30)
        ended.append("finished")
        return item

    @tool
    async def await_it(item: str) -> str:
        """Wait for ever."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return item

    with pytest.raises(KeyError):
        create_agent(say([("fail", {"item": "a"}, "1"), ("wait", {"item": "b"}, "2")]), [fail, wait]).invoke(GO)
    turn = [("await_it", {"item": "b"}, "2"), ("fail", {"item": "a"}, "1")]
    with pytest.raises(KeyError):
        asyncio.run(asyncio.wait_for(create_agent(say(turn), [fail, await_it]).ainvoke(GO), 30))
    assert ended == ["finished", "cancelled"]


def test_tools_have_the_seams_that_wrapping_uses(say):
    async def act(item: str) -> str:
        """Act."""
        return item

    for kind in (StructuredTool, Tool):
        assert {"func", "coroutine"} <= set(kind.model_fields)
    heard: list[Any] = []

    class Hears(StructuredTool):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            heard.append(("run", kwargs["tool_call_id"]))
            return super().run(*args, **kwargs)

        async def arun(self, *args: Any, **kwargs: Any) -> Any:
            heard.append(("arun", kwargs["tool_call_id"]))
            return await super().arun(*args, **kwargs)

    hears = Hears.from_function(lambda item: item, coroutine=act, name="act", description="d")
    create_agent(say(("act", {"item": "a"}, "c1"), "done"), [hears]).invoke(GO)
    asyncio.run(create_agent(say(("act", {"item": "a"}, "c2"), "done"), [hears]).ainvoke(GO))
    hears.invoke({"item": "a"})
    assert heard == [("run", "c1"), ("arun", "c2"), ("run", None)]
    # Looked up where they are there, and done without where they are not.
    assert isinstance(tools_base._DirectlyInjectedToolArg, type)
    assert hears._injected_args_keys == frozenset()
    assert issubclass(StructuredTool, BaseTool)


def test_langgraph_takes_calls_out_of_nodes_by_these_exceptions():
    assert issubclass(GraphInterrupt, GraphBubbleUp) and issubclass(GraphDrained, GraphBubbleUp)
    assert issubclass(ParentCommand, GraphBubbleUp) and issubclass(GraphBubbleUp, Exception)


def test_what_is_numbered_for_a_saga_goes_with_it(log, say):
    @tool
    def look(item: str) -> str:
        """Look."""
        return item

    wrapped = wrap_tool(look, semantics="READ_ONLY")

    def kept() -> int:
        gc.collect()
        return sum(isinstance(found, places._Numbers) for found in gc.get_objects())

    before = kept()
    for more in ({}, {"checkpointer": InMemorySaver()}):
        agent = create_agent(say(("look", {"item": "a"}, "c"), "done"), [wrapped], **more)
        with saga_scope(log=log) as saga:
            saga_run(agent, GO, {"configurable": {"thread_id": "t"}})
            assert kept() == before + 1, "the agent's calls were numbered"
        del agent, saga
        assert kept() == before


def test_importing_the_package_imports_nothing_of_langchain():
    code = (
        "import sys, agent_saga_langchain, agent_saga_langchain.adapter\n"
        "print([m for m in sys.modules if 'langchain_core' in m])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
