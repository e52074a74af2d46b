"""What `coverage` sees of a graph, what it infers, and what it says that it cannot see."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware, ToolRetryMiddleware
from langchain_core.tools import tool
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph_fakes import CHARGE, MAIL, Till, chain, hand_built, model, wrapped

from agent_saga_core import BoundaryRequired, CoverageManifest, DeclarationError, Log, saga_tool
from agent_saga_core.fleet import adapter_for
from agent_saga_langgraph import ToolCallHooks, coverage, saga_run


class Noted(TypedDict, total=False):
    noted: Annotated[list[Any], add]


def paths(found: Any) -> dict[str, str]:
    """Path and visibility of each entry."""
    return {entry.path: entry.visibility for entry in coverage(found).entries}


def test_an_agent_of_create_agent_is_seen_whole(till: Till) -> None:
    manifest = coverage(create_agent(model(), [wrapped(till.charge, CHARGE), tool(till.mail)]))
    assert [(one.path, one.wrapped, one.identity) for one in manifest.entries] == [
        ("node:tools/charge", True, "call-id"),
        ("node:tools/mail", False, None),
    ]
    with pytest.raises(AssertionError, match="node:tools/mail"):
        manifest.assert_fully_covered()
    coverage(create_agent(model(), [wrapped(till.charge, CHARGE)])).assert_fully_covered()
    assert adapter_for(create_agent(model(), [])).name == "langgraph"  # type: ignore[union-attr]


def test_langchains_own_middleware_hides_nothing_and_others_are_named(till: Till) -> None:
    class Mine(AgentMiddleware):
        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            return handler(request)

        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            return await handler(request)

        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(request)

        def before_model(self, state: Any, runtime: Any) -> None:
            return None

    charge = wrapped(till.charge, CHARGE)
    known: list[Any] = [ToolRetryMiddleware(), HumanInTheLoopMiddleware(interrupt_on={"charge": True})]
    coverage(create_agent(model(), [charge], middleware=known)).assert_fully_covered()
    found = coverage(create_agent(model(), [charge], middleware=[*known, Mine()]))
    named = {entry.path for entry in found.opaque}
    assert named == {
        "node:Mine.before_model",
        "node:model/wrap_model_call:Mine.wrap_model_call",
        "node:tools/wrap_tool_call:Mine.wrap_tool_call",
    }
    found.assert_fully_covered(acknowledge=named)


def test_what_runs_at_the_provider_is_opaque_and_remote(till: Till) -> None:
    found = coverage(create_agent(model(), [wrapped(till.charge, CHARGE), {"type": "web_search"}]))
    assert [(entry.path, entry.remote) for entry in found.opaque] == [("node:model/web_search", True)]


def test_nodes_of_ones_own_are_opaque_and_what_they_refer_to_is_inferred(till: Till) -> None:
    charge, mail, plain = wrapped(till.charge, CHARGE), tool(till.mail), saga_tool(**MAIL)(till.mail)

    def pay(state: Noted) -> None:
        charge.invoke({"amount": 1})
        helper()

    def helper() -> None:
        mail.invoke({"to": "a"})

    def tell(state: Noted) -> None:
        plain("a")

    found = coverage(chain(pay, tell, state=Noted))
    assert {entry.path: (entry.visibility, entry.wrapped) for entry in found.entries} == {
        "node:pay/charge": ("inferred", True),
        "node:pay/mail": ("inferred", False),
        "node:pay": ("opaque", False),
        "node:tell/mail": ("inferred", True),
        "node:tell": ("opaque", False),
    }
    with pytest.raises(AssertionError, match="node:pay/mail"):
        found.assert_fully_covered(acknowledge=["node:pay", "node:tell"])


def test_subgraphs_are_walked_and_graphs_that_are_called_by_hand_too(till: Till) -> None:
    inner = create_agent(model(), [wrapped(till.charge, CHARGE)])
    called = create_agent(model(), [wrapped(till.mail, MAIL)])

    def by_hand(state: MessagesState) -> Any:
        return called.invoke(state)

    graph = StateGraph(MessagesState).add_node("sub", inner).add_node(by_hand).add_edge(START, "sub")
    graph.add_edge("sub", "by_hand")
    expected = {
        "node:sub/node:tools/charge": "declared",
        "node:by_hand/graph/node:tools/mail": "inferred",
        "node:by_hand": "opaque",
    }
    assert paths(graph.compile()) == expected
    assert paths(graph) == expected, "before it is compiled"


def test_a_graph_that_its_own_node_refers_to_is_walked_once(till: Till) -> None:
    holder: list[Any] = []

    def node(state: Noted) -> None:
        if holder:
            holder[0].get_graph()

    holder.append(chain(node, state=Noted))
    assert paths(holder[0]) == {"node:node": "opaque"}


def test_conditional_edges_are_named_where_they_refer_to_tools(till: Till) -> None:
    charge = wrapped(till.charge, CHARGE)

    def node(state: Noted) -> None:
        return None

    def choose(state: Noted) -> str:
        charge.invoke({"amount": 1})
        return "__end__"

    graph = StateGraph(Noted).add_node(node).add_edge(START, "node").add_conditional_edges("node", choose)
    assert paths(graph.compile()) == {"node:node": "opaque", "edge:node/choose/charge": "inferred"}


def test_entrypoints_and_their_tasks(till: Till) -> None:
    charge = wrapped(till.charge, CHARGE)

    @task
    def pay(amount: int) -> Any:
        return charge.invoke({"amount": amount})

    @entrypoint()
    def flow(amount: int) -> Any:
        return pay(amount).result()

    assert paths(flow) == {"node:flow/charge": "inferred", "node:flow": "opaque"}


def test_an_unwrapped_tool_that_runs_an_agent_shows_the_agents_tools(till: Till) -> None:
    inner = create_agent(model(), [wrapped(till.charge, CHARGE)])

    @tool
    def delegate(what: str) -> str:
        """Let another agent do it."""
        return str(inner.invoke({"messages": [("user", what)]}))

    found = coverage([create_agent(model(), [delegate]), wrapped(till.mail, MAIL)])
    assert {entry.path: entry.wrapped for entry in found.entries} == {
        "node:tools/delegate": False,
        "mail": True,
        "node:tools/delegate/graph/node:tools/charge": True,
    }


def test_tool_nodes_by_themselves_and_behind_hooks(till: Till) -> None:
    assert paths(ToolNode([wrapped(till.charge, CHARGE)])) == {"tools/charge": "declared"}
    hooks = ToolCallHooks({"charge": CHARGE})
    node = ToolNode([tool(till.charge), tool(till.mail)], wrap_tool_call=hooks.wrap_tool_call)
    found = coverage(node)
    assert {entry.path: entry.wrapped for entry in found.entries} == {"tools/charge": True, "tools/mail": False}

    def around(request: Any, handler: Any) -> Any:
        return handler(request)

    (opaque,) = coverage(ToolNode([wrapped(till.charge, CHARGE)], wrap_tool_call=around)).opaque
    assert opaque.path.startswith("tools/wrap_tool_call:") and opaque.path.endswith("around")


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(DeclarationError, match="no graph and no tool"):
        coverage(object())


def test_inferred_tools_are_bound_to_the_run_and_no_longer_than_it(till: Till, log: Log) -> None:
    mail, plain = wrapped(till.mail, MAIL), saga_tool(name="plain", **MAIL)(till.mail)
    raised: list[BaseException] = []

    def astray() -> None:
        for stray in (lambda: mail.invoke({"to": "a"}), lambda: plain("b")):
            try:
                stray()
            except BoundaryRequired as boundary:
                raised.append(boundary)

    def node(state: Noted) -> None:
        runner = threading.Thread(target=astray)  # with no context: LangGraph's is lost, too
        runner.start()
        runner.join(30)

    saga_run(chain(node, state=Noted), {"noted": []}, log=log)
    assert len(raised) == 2 and till.mailed == []
    astray()
    assert till.mailed == ["a", "b"]


def test_hand_built_agents(till: Till) -> None:
    graph = hand_built(model(), [wrapped(till.charge, CHARGE)])
    coverage(graph).assert_fully_covered(acknowledge=["node:model"])


TRIP = """
from agent_saga_core import compensator, undo
from agent_saga_langgraph import wrap_tool
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

@compensator("trip.cancel")
def cancel(seat: str) -> None: ...

@tool
def book(flight: str) -> str:
    "Book a seat."
    return flight

@tool
def mail(to: str) -> str:
    "Send a mail."
    return to

def think(state: MessagesState) -> None: ...

def build(*more):
    booking = wrap_tool(book, semantics="COMPENSABLE", compensate=undo(cancel, seat="result"))
    graph = StateGraph(MessagesState).add_node(think).add_node("tools", ToolNode([booking, *more]))
    return graph.add_edge(START, "think").add_edge("think", "tools").compile()

graph, leaky = build(), build(mail)
"""


def test_the_command_looks_into_a_graph(tmp_path: Path) -> None:
    (tmp_path / "trip.py").write_text(TRIP, "utf-8")

    def ran(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-W", "ignore", "-m", "agent_saga_core", "coverage", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr == "", done.stderr
        return done.returncode, done.stdout

    code, shown = ran("trip:graph")
    assert code == 1 and "node:think" in shown and "1 of 1 tool covered, 1 opaque: 50%" in shown
    assert ran("trip:graph", "--fail-under", "50")[0] == 0
    code, shown = ran("trip:graph", "--json", "--fail-under", "100", "--acknowledge", "node:think")
    document = json.loads(shown)
    assert code == 0 and document["acknowledged"] == ["node:think"] and document["percent"] == 100.0
    (entry,) = CoverageManifest.from_json(document).covered
    assert (entry.path, entry.tool) == ("node:tools/book", "book")
    code, shown = ran("trip:leaky", "--acknowledge", "node:think")
    assert code == 1 and "mail" in shown, "what is not wrapped cannot be acknowledged away"
