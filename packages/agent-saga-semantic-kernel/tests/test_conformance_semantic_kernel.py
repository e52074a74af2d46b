"""The suite of all adapters, on Semantic Kernel's agents and on a kernel that runs a prompt.

No `from __future__ import annotations` here: `kernel_function` reads annotations as they are.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatMessageContent, FunctionResultContent, ImageContent
from semantic_kernel.filters import FilterTypes
from semantic_kernel.functions import KernelArguments, KernelFunction, KernelFunctionFromPrompt, kernel_function
from semantic_kernel.functions.kernel_function_from_method import KernelFunctionFromMethod

from agent_saga_core.testing.adapters import AdapterConformance, AdapterHarness, Call, Entry, Ran, Script
from agent_saga_semantic_kernel import asaga_invoke, asaga_run, asaga_stream, coverage, saga_run, wrap_tool

sys.path.insert(0, str(Path(__file__).parent))  # the suite loads this file in a process of its own, too
import semantic_kernel_fakes as fakes

GET, INVOKE = Entry("agent.get_response", is_async=True), Entry("agent.invoke", is_async=True)
STREAM = Entry("agent.invoke_stream", is_async=True, streams=True)
BLOCKING, PROMPT = Entry("saga_run"), Entry("kernel.invoke of a prompt", is_async=True)
PROMPT_STREAM = Entry("kernel.invoke_stream of a prompt", is_async=True, streams=True)
RETRYING = Entry("a filter that calls again", is_async=True)

NO_INTERRUPT = "Semantic Kernel has no interrupt that a function could raise. Ask a person in approve=."


class Harness(AdapterHarness):
    entries = (GET, INVOKE, STREAM, BLOCKING, PROMPT, PROMPT_STREAM)
    sync_tools_block = True
    retrying = RETRYING
    deferred = {
        "test_a_paused_run_is_suspended_and_goes_on_where_it_was": NO_INTERRUPT,
        "test_a_person_may_change_the_arguments_of_a_paused_call": NO_INTERRUPT,
    }

    def tool(self, fn: Callable[..., Any], *, pauses: bool = False) -> Any:
        if pauses:
            raise NotImplementedError("Semantic Kernel has no interrupt that a function could raise.")
        return KernelFunctionFromMethod(method=kernel_function(fn))

    def wrap(self, tool: Any, **declaration: Any) -> Any:
        return wrap_tool(tool, **declaration)

    def agent(self, tools: Sequence[Any], script: Script) -> Any:
        return fakes.agent(*tools, service=_service(script))

    def run(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        if saga:
            return _ran(saga_run(self.agent(tools, script), "go", **scope))
        return asyncio.run(self.arun(GET, tools, script, saga=False))

    async def arun(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        if entry in (PROMPT, PROMPT_STREAM):
            return await self._prompt(entry, tools, script, saga, scope)
        agent = self.agent(tools, script)
        if entry is RETRYING:
            agent.kernel.add_filter(FilterTypes.FUNCTION_INVOCATION, _again)
        if entry in (GET, RETRYING):
            return _ran(await (asaga_run(agent, "go", **scope) if saga else agent.get_response("go")))
        if entry is INVOKE:
            messages = asaga_invoke(agent, "go", **scope) if saga else agent.invoke("go")
        else:
            messages = asaga_stream(agent, "go", **scope) if saga else agent.invoke_stream("go")
        raw = [message async for message in messages]
        return Ran(text="".join(str(message) for message in raw), raw=raw)

    async def _prompt(
        self, entry: Entry, tools: Sequence[Any], script: Script, saga: bool, scope: dict[str, Any]
    ) -> Ran:
        kernel, function, arguments = _prompted(tools, script)
        if entry is PROMPT:
            return _ran(
                await (asaga_run(kernel, function, arguments, **scope) if saga else kernel.invoke(function, arguments))
            )
        stream = (
            asaga_stream(kernel, function, arguments, **scope) if saga else kernel.invoke_stream(function, arguments)
        )
        raw = [piece async for piece in stream]
        return Ran(text="".join(str(one) for piece in raw for one in piece), raw=raw)

    def leave(self, entry: Entry, tools: Sequence[Any], script: Script, **scope: Any) -> None:
        asyncio.run(self._leave(entry, tools, script, scope))

    async def _leave(self, entry: Entry, tools: Sequence[Any], script: Script, scope: dict[str, Any]) -> None:
        seen: list[object] = []

        async def look(message: ChatMessageContent) -> None:
            seen.extend(item for item in message.items if isinstance(item, FunctionResultContent))

        if entry is PROMPT_STREAM:
            stream = asaga_stream(*_prompted(tools, script), **scope)
        else:
            stream = asaga_stream(self.agent(tools, script), "go", on_intermediate_message=look, **scope)
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                if isinstance(piece, list):
                    seen.extend(item for one in piece for item in one.items if isinstance(item, FunctionResultContent))
                if seen:
                    return
        raise AssertionError("the stream has shown no result of a function")

    def call(self, tool: Any, args: Mapping[str, Any]) -> Any:
        return asyncio.run(Kernel().invoke(tool, KernelArguments(**args)))

    def face(self, tool: Any) -> Mapping[str, object]:
        fields = {name: getattr(tool, name) for name in type(tool).model_fields if name != "method"}
        kind = type(tool)
        return fields | {
            "properties": tool.metadata.additional_properties,
            "names": (tool.name, tool.plugin_name, tool.fully_qualified_name, tool.description, tool.is_prompt),
            "dump": tool.model_dump(),
            "class": (kind.__module__, kind.__qualname__, kind.__doc__),
            "schema": fakes.schema(tool),
        }

    def shown(self, tool: Any) -> set[str]:
        return set(fakes.schema(tool)["function"]["parameters"]["properties"])

    def coverage(self, agent: Any) -> Any:
        return coverage(agent)

    def rich_tools(self) -> Sequence[tuple[Any, Mapping[str, Any]]]:
        def draw(text: str) -> ImageContent:
            """Draw a text."""
            return ImageContent(uri=f"https://example.invalid/{text}")

        async def count(to: int) -> Any:
            """Count."""
            for number in range(to):
                yield number

        def spell(text: str) -> Any:
            """Spell."""
            yield from text

        rich = [(draw, {"text": "x"}), (count, {"to": 3}), (spell, {"text": "abc"})]
        return [(self.tool(fn), args) for fn, args in rich]

    def injected(self, seen: Callable[[object], object]) -> Any:
        def injected(
            item: str,
            kernel: Annotated[Kernel | None, "hidden", {"include_in_function_choices": False}] = None,
            arguments: Annotated[KernelArguments | None, "", {"include_in_function_choices": False}] = None,
        ) -> str:
            """Use what is injected."""
            seen(kernel if isinstance(arguments, KernelArguments) else None)
            return item

        return self.tool(injected)


def _service(script: Script) -> fakes.ScriptedChat:
    def answer(heard: list[str]) -> fakes.Said:
        turn = script.play(heard)
        return turn if isinstance(turn, str) else [_call(one) for one in turn]

    return fakes.ScriptedChat(ai_model_id="scripted", answer=answer)


def _call(one: Call) -> tuple[str, str, dict[str, Any]]:
    return one.id, one.name, dict(one.args)


def _prompted(tools: Sequence[Any], script: Script) -> tuple[Kernel, KernelFunction, KernelArguments]:
    settings = PromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=fakes.ATTEMPTS)
    )
    prompt = KernelFunctionFromPrompt(function_name="plan", plugin_name="plans", prompt="Book it.")
    return fakes.kernel(*tools, service=_service(script)), prompt, KernelArguments(settings=settings)


async def _again(context: Any, next: Callable[[Any], Any]) -> None:
    """What the framework's documentation shows as a retry: a filter that calls the function again."""
    try:
        await next(context)
    except Exception:
        await next(context)


def _ran(result: Any) -> Ran:
    return Ran(text=str(result), raw=result)


class TestSemanticKernel(AdapterConformance):
    @pytest.fixture
    def harness(self) -> AdapterHarness:
        return Harness()
