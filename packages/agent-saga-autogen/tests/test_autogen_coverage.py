"""What `coverage` sees of agents and teams, and the private attributes that it and the runs read."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from autogen_agentchat.agents import (
    AssistantAgent,
    BaseChatAgent,
    MessageFilterAgent,
    MessageFilterConfig,
    SocietyOfMindAgent,
    UserProxyAgent,
)
from autogen_agentchat.base import Handoff, Response
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import AgentId, SingleThreadedAgentRuntime
from autogen_core.tool_agent import ToolAgent
from autogen_core.tools import FunctionTool, StaticStreamWorkbench, StaticWorkbench, Workbench

from agent_saga_autogen import SagaWorkbench, coverage, wrap_tool
from agent_saga_core import saga_tool
from agent_saga_core.fleet import adapter_for, coverage_of


class Hidden(Workbench):
    """Lists its tools when it is asked."""

    component_type = "workbench"
    list_tools = call_tool = start = stop = reset = save_state = load_state = None  # type: ignore[assignment]


def paths(found: Any) -> list[tuple[str, bool]]:
    return [(entry.path, entry.wrapped) for entry in coverage(found).entries]


def opaque(found: Any) -> list[str]:
    return [entry.path for entry in coverage(found).opaque]


def test_the_private_attributes_that_are_read_are_there(world: Any, model: Any) -> None:
    agent = model.agent("a", [world.tool()], "x")
    assert agent._tools and isinstance(agent._workbench[0], StaticStreamWorkbench)
    assert agent._workbench[0]._tools == agent._tools and agent._handoff_tools == []
    team = RoundRobinGroupChat([agent])
    assert team._participants == [agent] and team._is_running is False and team._embedded_runtime is True
    assert isinstance(team._runtime, SingleThreadedAgentRuntime) and team._runtime._background_tasks == set()
    assert AgentTool(agent)._task_runner is agent and TeamTool(team, "t", "d")._task_runner is team
    tool: Any = agent._tools[0]
    assert callable(tool._func) and tool._signature.parameters and tool._has_cancellation_support is False
    assert StaticWorkbench([])._override_name_to_original == {}


def test_tools_of_an_agent(world: Any, model: Any, by_item: Any, by_result: Any) -> None:
    tools = [wrap_tool(world.tool("one"), **by_item), wrap_tool(world.tool("two"), **by_result, key="args.item")]
    manifest = coverage(model.agent("a", [*tools, world.tool("three")], "x"))
    one, two, three = manifest.entries
    assert (one.path, one.wrapped, one.identity, one.covers_unknown) == ("agent:a/one", True, "call-id", True)
    assert (two.identity, two.covers_unknown, two.inverse) == ("key", False, "named")
    assert not three.wrapped and three.tool == "three"
    with pytest.raises(AssertionError, match="three"):
        manifest.assert_fully_covered()


def test_a_loaded_component_is_not_covered(world: Any, by_item: Any) -> None:
    def book(item: str) -> str:
        return item

    wrapped = wrap_tool(book, **by_item)
    with pytest.warns(UserWarning, match="SECURITY WARNING"):
        loaded = FunctionTool.load_component(wrapped.dump_component())
    assert paths([wrapped]) == [("book", True)] and paths([loaded]) == [("book", False)]


def test_a_saga_tool_made_into_a_tool_is_covered(world: Any, model: Any, by_item: Any) -> None:
    manifest = coverage(model.agent("a", [saga_tool(**by_item)(world.tool())], "x"))
    assert [(entry.tool, entry.wrapped) for entry in manifest.entries] == [("book", True)]
    assert "saga tool" in manifest.entries[0].detail


def test_teams_in_teams_and_tools_that_run_agents(world: Any, model: Any, by_item: Any) -> None:
    def agent(name: str, **more: Any) -> Any:
        return model.agent(name, [wrap_tool(world.tool(f"of_{name}"), **by_item)], "x", **more)

    nested = RoundRobinGroupChat([agent("deep")], name="nested")
    society = SocietyOfMindAgent("society", RoundRobinGroupChat([agent("member")], name="minds"), model.client("x"))
    filtered = MessageFilterAgent("filtered", agent("behind"), MessageFilterConfig(per_source=[]))
    tooled = model.agent(
        "tooled", [AgentTool(agent("inner")), TeamTool(RoundRobinGroupChat([agent("group")]), "t", "d")]
    )
    team = SelectorGroupChat([nested, society, filtered, tooled], model.client("x"))
    found = coverage(team)
    assert {entry.tool for entry in found.covered} == {
        f"of_{n}" for n in ("deep", "member", "behind", "inner", "group")
    }
    found.assert_fully_covered()
    assert found.entries[0].path == f"team:{team.name}/team:nested/agent:deep/of_deep"


def test_handoffs_of_autogen_s_own_are_no_tools_and_others_are(world: Any, model: Any, by_item: Any) -> None:
    class Loud(Handoff):
        @property
        def handoff_tool(self) -> Any:
            def shout(item: str) -> str:
                return world.book(item)["id"]

            return FunctionTool(shout, "Shout.", name=self.name)

    tools = [wrap_tool(world.tool(), **by_item)]
    plain = model.agent("a", tools, "x", handoffs=["b", Handoff(target="c")])
    coverage(Swarm([plain])).assert_fully_covered()
    loud = model.agent("a", tools, "x", handoffs=[Loud(target="b", name="loud")])
    assert paths(loud) == [("agent:a/book", True), ("agent:a/loud", False)]


def test_workbenches(world: Any, model: Any, by_item: Any) -> None:
    def agent(workbench: Any) -> Any:
        return model.agent("a", [], "x", workbench=workbench)

    hidden: Any = Hidden()
    assert opaque(agent(hidden)) == ["agent:a/Hidden"]
    assert paths(agent(SagaWorkbench(hidden, {"book": by_item}))) == [("agent:a/book", True)]
    allowed = agent([SagaWorkbench(hidden, {"book": by_item}, undeclared="allow")])
    assert paths(allowed) == [("agent:a/book", True), ("agent:a/*", False)] and opaque(allowed) == ["agent:a/*"]
    static = StaticStreamWorkbench([FunctionTool(world.tool(n), "d") for n in ("book", "pay")])
    assert paths(agent(SagaWorkbench(static, {"book": by_item}))) == [("agent:a/book", True)]
    both = [("agent:a/book", True), ("agent:a/pay", False)]
    assert paths(agent(SagaWorkbench(static, {"book": by_item}, undeclared="allow"))) == both
    assert paths(agent(static)) == [("agent:a/book", False), ("agent:a/pay", False)]


def test_code_of_the_user_s_own_is_opaque_and_its_tools_are_inferred(world: Any, model: Any, by_item: Any) -> None:
    tool = wrap_tool(world.tool(), **by_item)

    class Own(BaseChatAgent):
        produced_message_types = (TextMessage,)

        async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
            return Response(chat_message=TextMessage(content=str(tool), source=self.name))

        async def on_reset(self, cancellation_token: Any) -> None: ...

    class Overridden(AssistantAgent):
        async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
            return await super().on_messages(messages, cancellation_token)

    found = coverage(Own("own", "d"))
    assert [entry.path for entry in found.opaque] == ["agent:own"]
    assert [(entry.tool, entry.visibility) for entry in found.covered] == [("book", "inferred")]
    assert opaque(Overridden("over", model.client("x"))) == ["agent:over/on_messages"]
    assert opaque(UserProxyAgent("person")) == []
    assert opaque(UserProxyAgent("person", input_func=lambda _: world.book("a")["id"])) == ["agent:person/input_func"]
    team = SelectorGroupChat(
        [model.agent("a", [tool], "x"), Own("own", "d")], model.client("x"), selector_func=lambda _: None
    )
    assert sorted(opaque(team)) == [f"team:{team.name}/agent:own", f"team:{team.name}/selector_func"]
    assert opaque(object()) == ["builtins.object"]


def test_conditions_of_a_graph_are_code(world: Any, model: Any, by_item: Any) -> None:
    one, two = (model.agent(n, [wrap_tool(world.tool(f"of_{n}"), **by_item)], "x") for n in ("one", "two"))
    graph = DiGraphBuilder()
    graph.add_node(one).add_node(two).add_edge(one, two, condition=lambda message: bool(message))
    flow = GraphFlow([one, two], graph.build())
    assert opaque(flow) == [f"team:{flow.name}/condition:one-two"]
    assert {entry.tool for entry in coverage(flow).covered} == {"of_one", "of_two"}


async def test_tool_agents_lists_and_the_command_line(world: Any, by_item: Any) -> None:
    tool = wrap_tool(world.tool(), **by_item)
    made: list[ToolAgent] = []
    runtime = SingleThreadedAgentRuntime()
    await ToolAgent.register(runtime, "tools", lambda: made.append(ToolAgent("t", [tool])) or made[0])
    await runtime.agent_metadata(AgentId("tools", "default"))
    assert paths(made[0]) == [("tools/book", True)]
    assert paths({"mine": [tool], "yours": (world.tool("pay"),)}) == [("mine/book", True), ("yours/pay", False)]
    adapter = adapter_for(tool)
    assert adapter is not None and adapter.name == "autogen"
    assert [entry.tool for entry in coverage_of([tool]).covered] == ["book"]


def test_the_adapter_announces_itself_without_importing_autogen() -> None:
    code = (
        "import sys; from agent_saga_autogen.adapter import ADAPTER; import agent_saga_autogen; "
        "assert not [m for m in sys.modules if m.startswith('autogen')], 'AutoGen was imported'; "
        "assert set(agent_saga_autogen.__all__) <= set(dir(agent_saga_autogen)); "
        "[getattr(agent_saga_autogen, name) for name in agent_saga_autogen.__all__]; "
        "assert 'autogen_agentchat' not in sys.modules, 'the extra is not needed for core'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
