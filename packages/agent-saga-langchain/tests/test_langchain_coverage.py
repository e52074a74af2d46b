"""What is seen of the tools of an agent, a chain, a list; and what is said not to be seen."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda, RunnablePassthrough, RunnableSerializable
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from agent_saga_core import ActionSemantics, DeclarationError, undo
from agent_saga_core.fleet import adapter_for, coverage_of
from agent_saga_core.wrapping import runner_of
from agent_saga_langchain import SagaMiddleware, coverage, wrap_tool
from agent_saga_langchain.walk import runners_in

C, R = ActionSemantics.COMPENSABLE, ActionSemantics.READ_ONLY


@tool
def pay(item: str) -> str:
    """Pay."""
    return item


@tool
def look(item: str) -> str:
    """Look."""
    return item


WRAPPED = wrap_tool(look, semantics=R)


@pytest.fixture
def paid(world):
    return wrap_tool(pay, semantics=C, compensate=undo("world.undo", item="result"))


def uses_wrapped(x: Any) -> Any:
    return WRAPPED.invoke(x)


def seen(found: Any) -> list[tuple[str, str, bool, str]]:
    return [(e.path, e.tool, e.wrapped, e.visibility) for e in coverage(found).entries]


def test_a_list_of_tools_is_listed_and_its_provider_tools_are_opaque(paid):
    manifest = coverage([paid, look, {"type": "web_search"}, pay.func])
    assert [(e.path, e.wrapped, e.visibility, e.remote) for e in manifest.entries] == [
        ("tools/pay", True, "declared", False),
        ("tools/look", False, "declared", False),
        ("tools/web_search", False, "opaque", True),
        ("tools/pay#2", False, "declared", False),
    ]
    one = manifest.entries[0]
    assert (one.framework, one.semantics, one.inverse, one.covers_unknown) == ("langchain", C, "named", False)
    assert one.identity == "call-id in a graph, else occurrence"
    with pytest.raises(AssertionError, match="look"):
        manifest.assert_fully_covered()
    assert seen({"a": paid, "b": [look]}) == [
        ("tools/pay", "pay", True, "declared"), ("b/look", "look", False, "declared"),
    ]  # fmt: skip


def test_an_agent_shows_its_tools_and_those_that_the_middleware_wraps(paid, say):
    bare = create_agent(say("done"), [paid, look])
    assert seen(bare) == [
        ("node:tools/pay", "pay", True, "declared"), ("node:tools/look", "look", False, "declared"),
    ]  # fmt: skip
    assert coverage(bare).entries[0].identity == "call-id"
    by_mapping = SagaMiddleware({"look": {"semantics": R}})
    agent = create_agent(say("done"), [paid, look], middleware=[by_mapping])
    manifest = coverage(agent)
    manifest.assert_fully_covered()
    assert [(e.tool, e.detail) for e in manifest.tools] == [("pay", ""), ("look", "wrapped by SagaMiddleware")]
    assert set(runners_in(agent)) == {runner_of(paid), runner_of(by_mapping.wrapped(look))}


def test_nodes_of_ones_own_are_opaque_and_their_graphs_are_looked_into(paid, say):
    class Own(AgentMiddleware):
        def before_model(self, state: Any, runtime: Any) -> None:
            return None

    agent = create_agent(say("done"), [paid], middleware=[Own()])
    assert [e.path for e in coverage(agent).opaque] == ["node:Own.before_model"]
    built = StateGraph(MessagesState)
    built.add_node("mine", lambda state: state)
    built.add_node("tools", ToolNode([paid]))
    built.add_node("agent", create_agent(say("done"), [look]))
    built.add_edge(START, "mine")
    for graph in (built, built.compile()):
        assert seen(graph) == [
            ("node:mine", "mine", False, "opaque"),
            ("node:tools/pay", "pay", True, "declared"),
            ("node:agent/node:tools/look", "look", False, "declared"),
        ]
    assert runners_in(built) == [runner_of(paid)]


def test_chains_are_taken_apart_and_functions_in_them_are_opaque(paid, say):
    chain = (
        RunnablePassthrough.assign(x=paid)
        | say("x").bind(stop=["."])
        | RunnableBranch((lambda x: True, WRAPPED), RunnablePassthrough())
        | RunnableLambda(uses_wrapped).with_fallbacks([RunnablePassthrough()]).with_retry()
    )
    found = seen(chain)
    assert [one for one in found if one[3] == "declared"] == [
        ("step:0/mapper/x/pay", "pay", True, "declared"), ("step:2/then:0/look", "look", True, "declared"),
    ]  # fmt: skip
    assert ("step:3/bound/runnable/global:WRAPPED", "look", True, "inferred") in found
    assert [path for path, _, _, how in found if how == "opaque"] == ["step:2/if:0", "step:3/bound/runnable"]
    assert set(runners_in(chain)) == {runner_of(paid), runner_of(WRAPPED)}


def test_what_holds_tools_and_runs_them_is_looked_into(paid):
    class AgentExecutor(RunnableSerializable):
        tools: Any
        agent: Any = None

        def invoke(self, input: Any, config: Any = None, **_: Any) -> Any:
            return input

    found = AgentExecutor(tools=[paid, look], agent=RunnablePassthrough())
    assert seen(found) == [("tools/pay", "pay", True, "declared"), ("tools/look", "look", False, "declared")]
    assert runners_in(found) == [runner_of(paid)]


def test_a_runnable_of_ones_own_and_things_of_others(paid):
    class Own(Runnable):
        def invoke(self, input: Any, config: Any = None, **_: Any) -> Any:
            return input

    assert seen(Own()) == [("Own", "Own", False, "opaque")]
    bound = seen(RunnableLambda(partial(uses_wrapped, 1)))
    assert bound[0][:2] == ("RunnableLambda/partial:func/global:WRAPPED", "look")
    with pytest.raises(DeclarationError, match="nothing of LangChain"):
        coverage(object())


def test_the_adapter_owns_its_tools(paid):
    adapter = adapter_for(paid)
    assert adapter is not None and adapter.name == "langchain"
    assert [(e.tool, e.framework, e.wrapped) for e in coverage_of([paid, look]).entries] == [
        ("pay", "langchain", True), ("look", "langchain", False),
    ]  # fmt: skip
