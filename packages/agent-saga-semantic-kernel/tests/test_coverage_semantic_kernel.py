"""What `coverage` sees of kernels and agents, and what it says that it does not see.

No `from __future__ import annotations` here: `kernel_function` reads annotations as they are.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import semantic_kernel_fakes as fakes
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.filters import FilterTypes
from semantic_kernel.functions import (
    KernelFunctionFromMethod,
    KernelFunctionFromPrompt,
    KernelPlugin,
    kernel_function,
)

from agent_saga_core import SagaFleet
from agent_saga_core.fleet import adapter_for
from agent_saga_core.wrapping import runner_of
from agent_saga_semantic_kernel import coverage, wrap_tool
from agent_saga_semantic_kernel.adapter import ADAPTER

READ = {"semantics": "READ_ONLY"}


def function(name: str) -> KernelFunctionFromMethod:
    def find(item: str) -> str:
        """Find."""
        return item

    return KernelFunctionFromMethod(method=kernel_function(find, name=name))


def paths(found: object) -> list[tuple[str, str]]:
    """Path and state of each entry."""
    state: Callable[[Any], str] = lambda entry: (  # noqa: E731
        "opaque" if entry.is_opaque else "wrapped" if entry.wrapped else "bare"
    )
    return [(entry.path, state(entry)) for entry in coverage(found).entries]


def test_all_functions_of_all_plugins_are_listed() -> None:
    kernel = Kernel(
        plugins=[
            KernelPlugin(name="one", functions=[wrap_tool(function("a"), **READ), function("b")]),
            KernelPlugin(name="two", functions=[wrap_tool(function("a"), key="args.item", **READ)]),
        ]
    )
    assert paths(kernel) == [("plugin:one/a", "wrapped"), ("plugin:one/b", "bare"), ("plugin:two/a", "wrapped")]
    assert [entry.identity for entry in coverage(kernel).entries] == ["call-id", None, "key"]
    with pytest.raises(AssertionError, match="b"):
        coverage(kernel).assert_fully_covered()
    kernel.add_function("three", function("later"))
    assert ("plugin:three/later", "bare") in paths(kernel)


def test_an_agent_is_its_kernel_and_the_agents_among_its_functions_once_each() -> None:
    inner = fakes.agent(wrap_tool(function("pay"), **READ), service=fakes.playing(), name="inner")
    outer = fakes.agent(function("book"), service=fakes.playing(), name="outer")
    outer.kernel.add_plugin(fakes.team(inner))
    expected = [("agent:outer/plugin:desk/book", "bare"), ("agent:inner/plugin:desk/pay", "wrapped")]
    assert paths(outer) == expected
    assert paths([outer, inner, outer]) == expected
    inner.kernel.add_plugin(outer.kernel.plugins["team"])  # agents that call each other
    assert paths(outer) == expected


def test_what_cannot_be_seen_into_is_said() -> None:
    bare, wrapped = function("bare"), wrap_tool(function("wrapped"), **READ)

    async def uses(context: Any, next: Any) -> None:
        await context.kernel.invoke(bare if context is None else wrapped)

    class Own(ChatCompletionAgent):
        pass

    kernel = fakes.kernel(KernelFunctionFromPrompt(function_name="plan", plugin_name="p", prompt="x"))
    kernel.add_filter(FilterTypes.FUNCTION_INVOCATION, uses)
    found = coverage(Own(name="own", kernel=kernel))
    assert {entry.path for entry in found.opaque} == {
        "agent:own/plugin:desk/plan",
        "agent:own/filter:uses",
        "agent:own/class:Own",
    }
    inferred = {(entry.tool, entry.wrapped) for entry in found.tools if entry.visibility == "inferred"}
    assert inferred == {("bare", False), ("wrapped", True)}
    assert paths([object()]) == [("object", "opaque")]


def test_functions_and_plugins_stand_for_themselves() -> None:
    wrapped = wrap_tool(function("a"), **READ)
    plugin = KernelPlugin(name="p", functions=[wrapped])
    assert paths([wrapped, plugin]) == [("function:a", "wrapped"), ("plugin:p/a", "wrapped")]
    assert paths({"x": plugin}) == [("x/plugin:p/a", "wrapped")]
    assert paths(kernel_function(lambda item: item, name="f")) == [("function:<lambda>", "bare")]


def test_the_adapter_knows_its_own_objects() -> None:
    agent = fakes.agent(service=fakes.playing())
    for found in (Kernel(), agent, function("a"), wrap_tool(function("a"), **READ), KernelPlugin(name="p")):
        assert adapter_for(found) == ADAPTER


def test_a_fleet_registers_functions() -> None:
    fleet = SagaFleet("trip")
    wrapped = fleet.register(function("a"), **READ)
    assert runner_of(wrapped) is not None and isinstance(wrapped, KernelFunctionFromMethod)
    fleet.assert_fully_covered()


def test_announcing_the_adapter_imports_no_framework() -> None:
    code = (
        "import sys, agent_saga_semantic_kernel.adapter, agent_saga_semantic_kernel as a; dir(a);"
        "sys.exit(any(name.partition('.')[0] in ('semantic_kernel', 'pydantic', 'openai') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
