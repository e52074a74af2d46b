"""Models that play a script, a workflow written by hand, and a till: what the tests of this package run."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.tools import FunctionTool, ToolOutput
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step

from agent_saga_core import undo

Said = str | list[tuple[str, str, dict[str, Any]]]
"""A text, or calls: (id, tool, arguments)."""


def said(turn: Said) -> ChatMessage:
    """A model's answer."""
    if isinstance(turn, str):
        return ChatMessage(role="assistant", content=turn)
    blocks = [ToolCallBlock(tool_call_id=id, tool_name=tool, tool_kwargs=args) for id, tool, args in turn]
    return ChatMessage(role="assistant", blocks=blocks)


def heard_in(messages: Sequence[ChatMessage]) -> list[str]:
    """The results of tools in a conversation: those of one answer in the order in which the model made the calls."""
    heard: list[str] = []
    asked: list[str] = []
    results: list[tuple[int, str]] = []
    for message in [*messages, ChatMessage(role="assistant", content="")]:
        if message.role == "assistant":
            heard += [text for _, text in sorted(results)]
            asked = [str(block.tool_call_id) for block in message.blocks if isinstance(block, ToolCallBlock)]
            results = []
        elif message.role == "tool":
            results.append((asked.index(message.additional_kwargs["tool_call_id"]), message.content or ""))
    return heard


def model(play: Callable[[list[str]], Said]) -> MockFunctionCallingLLM:
    """A model with function calling that is told of the results so far and answers."""

    def answer(messages: Sequence[ChatMessage], **_: Any) -> ChatMessage:
        return said(play(heard_in(messages)))

    return MockFunctionCallingLLM(is_chat_model=True, response_generator=answer)


def saying(*turns: Said) -> MockFunctionCallingLLM:
    """A model that says these turns, one after the other, and then "done"."""
    left: Iterator[Said] = itertools.chain(turns, itertools.repeat("done"))
    return model(lambda _heard: next(left))


def reasoning(play: Callable[[list[str]], Said]) -> MockFunctionCallingLLM:
    """A model that writes its calls into its text, one in each answer, as a ReAct agent reads them."""
    left: list[tuple[str, str, dict[str, Any]]] = []

    def answer(messages: Sequence[ChatMessage], **_: Any) -> ChatMessage:
        texts = (message.content or "" for message in messages if message.role != "system")
        heard = [text.removeprefix("Observation: ") for text in texts if text.startswith("Observation: ")]
        turn: Said = [] if left else play(heard)
        if isinstance(turn, str):
            return said(f"Thought: I can answer without using any more tools.\nAnswer: {turn}")
        left.extend(turn)
        _, tool, args = left.pop(0)
        return said(f"Thought: a tool is needed.\nAction: {tool}\nAction Input: {json.dumps(args)}\n")

    return MockFunctionCallingLLM(is_chat_model=True, response_generator=answer)


def agent(tools: Iterable[Any], llm: Any, **fields: Any) -> FunctionAgent:
    return FunctionAgent(tools=list(tools), llm=llm, streaming=False, **fields)


def react(tools: Iterable[Any], llm: Any, **fields: Any) -> ReActAgent:
    return ReActAgent(tools=list(tools), llm=llm, streaming=False, **fields)


class Ask(Event):
    """The model is to be asked."""


class One(Event):
    """One call of the model."""

    id: str
    name: str
    args: dict[str, Any]


class Told(Event):
    """What it is to be told of a call."""

    id: str
    output: Any


class Loop(Workflow):
    """An agent written by hand: steps that ask the model, make its calls at once, and tell it of them."""

    def __init__(self, tools: Iterable[Any], llm: Any) -> None:
        super().__init__(timeout=None)
        self.tools = {tool.metadata.name: tool for tool in tools}
        self.llm = llm

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> Ask:
        await ctx.store.set("messages", [ChatMessage(role="user", content="go")])
        await ctx.store.set("outputs", [])
        return Ask()

    @step
    async def ask(self, ctx: Context, ev: Ask) -> One | StopEvent | None:
        messages = await ctx.store.get("messages")
        answer = (await self.llm.achat(messages)).message
        await ctx.store.set("messages", [*messages, answer])
        calls = [block for block in answer.blocks if isinstance(block, ToolCallBlock)]
        if not calls:
            return StopEvent(result=answer.content)
        await ctx.store.set("calls", len(calls))
        for block in calls:
            ctx.send_event(One(id=str(block.tool_call_id), name=block.tool_name, args=dict(block.tool_kwargs)))
        return None

    @step
    async def make(self, ctx: Context, ev: One) -> Told:
        return Told(id=ev.id, output=await self.made(ctx, ev))

    @step
    async def tell(self, ctx: Context, ev: Told) -> Ask | None:
        told = ctx.collect_events(ev, [Told] * await ctx.store.get("calls"))
        if told is None:
            return None
        outputs = [one.output for one in told]
        messages = [
            ChatMessage(role="tool", content=one.output.content, additional_kwargs={"tool_call_id": one.id})
            for one in told
        ]
        await ctx.store.set("messages", [*await ctx.store.get("messages"), *messages])
        await ctx.store.set("outputs", [*await ctx.store.get("outputs"), *outputs])
        return Ask()

    async def made(self, ctx: Context, ev: One) -> ToolOutput:
        tool, args = self.tools[ev.name], dict(ev.args)
        if isinstance(tool, FunctionTool) and tool.requires_context:
            args[str(tool.ctx_param_name)] = ctx
        try:
            output: ToolOutput = await tool.acall(**args)
        except Exception as error:
            return self.failed(ev, error)
        return output

    def failed(self, ev: One, error: Exception) -> ToolOutput:
        return ToolOutput(content=str(error), tool_name=ev.name, raw_input=ev.args, raw_output=None, is_error=True)


class AtOnce:
    """Three tries, with nothing between them."""

    def next(self, elapsed_time: float, attempts: int, error: Exception, **_: Any) -> float | None:
        return 0.0 if attempts < 3 else None


class Retrying(Loop):
    """The same, whose call is made again by the step's own policy."""

    @step(retry_policy=AtOnce())
    async def make(self, ctx: Context, ev: One) -> Told:
        return Told(id=ev.id, output=await self.made(ctx, ev))

    def failed(self, ev: One, error: Exception) -> ToolOutput:
        raise error


class Till:
    """Charges and refunds, and the functions that make them; `on` is called inside of a charge, after its effect."""

    def __init__(self) -> None:
        self.acts: list[tuple[str, int]] = []
        self.on: Callable[[int], Any] = lambda _amount: None

    @property
    def charged(self) -> list[int]:
        return [amount for act, amount in self.acts if act == "charge"]

    @property
    def refunded(self) -> list[int]:
        return [amount for act, amount in self.acts if act == "refund"]

    def refund(self, amount: int) -> None:
        self.acts.append(("refund", amount))

    def function(self) -> Callable[..., Any]:
        def charge(amount: int) -> dict[str, Any]:
            """Charge an amount."""
            self.acts.append(("charge", amount))
            self.on(amount)
            return {"amount": amount}

        return charge

    def afunction(self) -> Callable[..., Any]:
        async def charge(amount: int) -> dict[str, Any]:
            """Charge an amount."""
            self.acts.append(("charge", amount))
            heard = self.on(amount)
            if inspect.isawaitable(heard):
                await heard
            return {"amount": amount}

        return charge


BY_RESULT: dict[str, Any] = {"semantics": "COMPENSABLE", "compensate": undo("till.refund", amount="result.amount")}
BY_AMOUNT: dict[str, Any] = {
    "semantics": "COMPENSABLE",
    "compensate": undo("till.refund", if_absent="forbids", amount="args.amount"),
}


def bounded(test: Callable[..., Any]) -> Callable[..., Any]:
    """An async test that ends."""

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(60):
            await test(*args, **kwargs)

    return run
