"""`coverage`: what is seen of agents and workflows, and what is said to be out of sight."""

import subprocess
import sys
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow, CodeActAgent, FunctionAgent
from llama_index.core.objects import ObjectRetriever
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from llamaindex_fakes import BY_AMOUNT, BY_RESULT, Loop, Till, agent, saying

from agent_saga_core import saga_tool
from agent_saga_core.fleet import adapter_for
from agent_saga_llamaindex import coverage, wrap_tool
from agent_saga_llamaindex.adapter import ADAPTER
from agent_saga_llamaindex.walk import runners_in


def look(topic: str) -> str:
    """Look something up."""
    return topic


def rows(found: object) -> list[tuple[str, str, bool, str]]:
    return [(entry.path, entry.tool, entry.wrapped, entry.visibility) for entry in coverage(found).entries]


def test_the_tools_of_an_agent_are_listed(till: Till) -> None:
    wrapped = wrap_tool(FunctionTool.from_defaults(till.function()), **BY_AMOUNT)
    keyed = wrap_tool(FunctionTool.from_defaults(till.function(), name="pay"), **BY_RESULT, key="args.amount")
    declared = FunctionTool.from_defaults(saga_tool(semantics="READ_ONLY", name="look")(look))
    manifest = coverage(agent([wrapped, keyed, declared, look], saying()))
    found = {entry.path: entry for entry in manifest.entries}
    assert list(found) == [f"agent:Agent/tools/{name}" for name in ("charge", "pay", "look", "look#2")]
    charge = found["agent:Agent/tools/charge"]
    assert (charge.framework, charge.wrapped, charge.semantics, charge.inverse) == (
        "llamaindex", True, "COMPENSABLE", "named",
    )  # fmt: skip
    assert charge.covers_unknown and charge.identity == "the step and its work item"
    assert found["agent:Agent/tools/pay"].identity == "key" and not found["agent:Agent/tools/pay"].covers_unknown
    assert found["agent:Agent/tools/look"].wrapped and not found["agent:Agent/tools/look#2"].wrapped
    with pytest.raises(AssertionError, match="look#2"):
        manifest.assert_fully_covered()


def test_a_list_of_tools_and_agents_is_looked_through(till: Till) -> None:
    wrapped = wrap_tool(FunctionTool.from_defaults(till.function()), **BY_RESULT)
    declared = saga_tool(semantics="READ_ONLY")(look)
    assert rows([wrapped, declared, agent([wrapped], saying(), name="clerk")]) == [
        ("tools/charge", "charge", True, "declared"),
        ("tools/look", "look", True, "declared"),
        ("agent:clerk/tools/charge", "charge", True, "declared"),
    ]
    assert coverage(wrapped).percent == 100.0
    assert [entry.visibility for entry in coverage(object()).entries] == ["opaque"]


def test_every_agent_of_a_team_is_listed(till: Till) -> None:
    wrapped = wrap_tool(FunctionTool.from_defaults(till.function()), **BY_RESULT)
    members = [
        FunctionAgent(name=name, description=name, tools=[tool], llm=saying())
        for name, tool in (("buyer", wrapped), ("reader", FunctionTool.from_defaults(look)))
    ]
    team = AgentWorkflow(agents=members, root_agent="buyer")
    assert rows(team) == [
        ("agent:buyer/tools/charge", "charge", True, "declared"),
        ("agent:reader/tools/look", "look", False, "declared"),
    ]
    assert [runner.spec.tool for runner in runners_in(team)] == ["charge"]


def test_what_finds_or_runs_tools_by_itself_is_opaque(till: Till) -> None:
    class Finding(ObjectRetriever[Any]):
        """Finds nothing."""

        def __init__(self) -> None:
            pass

    def run_code(code: str) -> dict[str, Any]:
        """Run it."""
        return {}

    assert rows(FunctionAgent(tools=[], llm=saying(), tool_retriever=Finding()))[0][0] == "agent:Agent/tool_retriever"
    coding = CodeActAgent(code_execute_fn=run_code, llm=saying())
    assert ("agent:code_act_agent/code_execute_fn", "opaque") in [(row[0], row[3]) for row in rows(coding)]
    shaped = FunctionAgent(tools=[], llm=saying(), structured_output_fn=lambda _messages: {})
    assert rows(shaped) == [("agent:Agent/structured_output_fn",) * 2 + (False, "opaque")]

    class Overriding(FunctionAgent):
        """May do anything."""

    assert rows(Overriding(tools=[], llm=saying())) == [("agent:Agent/class:Overriding",) * 2 + (False, "opaque")]


charge_here = saga_tool(**BY_RESULT)(Till().function())


class ByHand(Workflow):
    """Steps that reach tools through a global, an attribute and an attribute of an attribute."""

    def __init__(self, tool: Any) -> None:
        super().__init__()
        self.tool = tool

    @step
    async def only(self, ev: StartEvent) -> StopEvent:
        charge_here(1)
        return StopEvent(result=await self.tool.acall(topic="x"))


def test_a_step_written_by_hand_is_opaque_and_looked_into(till: Till) -> None:
    tool = wrap_tool(FunctionTool.from_defaults(look), semantics="READ_ONLY")
    running = ByHand(tool)
    found = rows(running)
    assert ("step:only", "step:only", False, "opaque") in found
    inferred = {(name, wrapped) for _, name, wrapped, visibility in found if visibility == "inferred"}
    assert inferred == {("charge", True), ("look", True)}
    coverage(running).assert_fully_covered(acknowledge=["step:only"])
    assert {runner.spec.tool for runner in runners_in(running)} == {"charge", "look"}
    unwrapped = ByHand(FunctionTool.from_defaults(look))
    with pytest.raises(AssertionError, match="look"):
        coverage(unwrapped).assert_fully_covered(acknowledge=["step:only"])


def test_a_step_that_was_added_is_seen() -> None:
    class Open(Workflow):
        """Has no step of its own."""

    @step(workflow=Open)
    async def only(ev: StartEvent) -> StopEvent:
        charge_here(1)
        return StopEvent()

    assert ("step:only", "opaque") in [(row[0], row[3]) for row in rows(Open())]
    assert [runner.spec.tool for runner in runners_in(Open())] == ["charge"]


def test_a_workflow_that_keeps_its_tools_in_a_dict_binds_them(till: Till) -> None:
    wrapped = wrap_tool(FunctionTool.from_defaults(till.function()), **BY_RESULT)
    loop = Loop([wrapped], saying())
    assert [runner.spec.tool for runner in runners_in(loop)] == ["charge"]
    assert [entry.tool for entry in coverage(loop).tools] == ["charge"], "once, however many steps reach it"


def test_the_adapter_announces_itself_and_imports_nothing() -> None:
    assert adapter_for(agent([], saying())) == ADAPTER and adapter_for(Loop([], saying())) == ADAPTER
    assert ADAPTER.owns(FunctionTool.from_defaults(look)) and ADAPTER.owns(object.__new__(QueryEngineTool))
    program = (
        "import sys, agent_saga_llamaindex, agent_saga_llamaindex.adapter;"
        "sys.exit(any(name.partition('.')[0] in ('llama_index', 'workflows', 'pydantic') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_public_names() -> None:
    import agent_saga_llamaindex as package

    assert package.__all__ == sorted(package.__all__) and len(package.__all__) == 8
    assert {"wrap_tool", "saga_run", "asaga_run", "asaga_stream", "coverage"} <= set(package.__all__)
    assert all(callable(getattr(package, name)) for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError):
        _ = package.nothing
