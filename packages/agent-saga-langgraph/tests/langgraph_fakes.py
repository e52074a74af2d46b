"""What the tests share: a model that plays a script, and graphs around it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from agent_saga_core import compensator, undo
from agent_saga_core.testing.adapters import Call as ScriptCall
from agent_saga_core.testing.adapters import Script, Turn
from agent_saga_langgraph import wrap_tool


class ScriptedModel(BaseChatModel):
    """A chat model that plays a script, and keeps what it heard of its calls."""

    script: Any

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        heard = [str(message.content) for message in messages if isinstance(message, ToolMessage)]
        return ChatResult(generations=[ChatGeneration(message=said(self.script.play(heard)))])


def said(turn: Turn) -> AIMessage:
    """A turn of a script as the message that a model sends."""
    if isinstance(turn, str):
        return AIMessage(turn)
    calls = [{"name": call.name, "args": dict(call.args), "id": call.id, "type": "tool_call"} for call in turn]
    return AIMessage("", tool_calls=calls)


def model(*turns: Turn | ScriptCall) -> ScriptedModel:
    """A model that says these turns, and then "done"."""
    return ScriptedModel(script=Script(turns))


def hand_built(llm: BaseChatModel, tools: Sequence[Any], *, checkpointer: Any = None, **node: Any) -> Any:
    """An agent made by hand: a model node, a ToolNode, and the way back."""

    def think(state: MessagesState) -> Any:
        return {"messages": [llm.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", think)
    graph.add_node("tools", ToolNode(tools, **node))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=checkpointer)


def chain(*nodes: Callable[..., Any], state: Any, checkpointer: Any = None, **node: Any) -> Any:
    """A graph of nodes in a row."""
    graph = StateGraph(state)
    before = START
    for fn in nodes:
        graph.add_node(fn.__name__, fn, **node)
        graph.add_edge(before, fn.__name__)
        before = fn.__name__
    return graph.compile(checkpointer=checkpointer)


@dataclass(frozen=True)
class Receipt:
    """What a charge gives back."""

    id: str
    amount: int


class Till:
    """Charges and mails, in lists. A test may make `charge` fail in between."""

    def __init__(self) -> None:
        self.charged: list[int] = []
        self.refunded: list[str] = []
        self.mailed: list[str] = []
        self.priced: list[int] = []
        self.unsent: list[str] = []
        self.after: Callable[[int], object] = lambda amount: None
        """Called when a charge stands."""
        self._lock = threading.Lock()

    def register(self) -> None:
        """Register the compensators."""
        compensator("till.refund")(self.refund)
        compensator("till.unsend")(self.unsend)

    def charge(self, amount: int) -> Receipt:
        """Charge an amount."""
        with self._lock:
            self.charged.append(amount)
            receipt = Receipt(id=f"ch-{len(self.charged)}", amount=amount)
        self.after(amount)
        return receipt

    def mail(self, to: str) -> str:
        """Send a mail."""
        with self._lock:
            self.mailed.append(to)
        return f"sent to {to}"

    def set_price(self, price: int) -> int:
        """Set the price, for good."""
        with self._lock:
            self.priced.append(price)
        return price

    def refund(self, id: str) -> None:
        with self._lock:
            self.refunded.append(id)

    def unsend(self, to: str) -> None:
        with self._lock:
            self.unsent.append(to)


CHARGE: Any = {"semantics": "COMPENSABLE", "compensate": undo("till.refund", id="result.id")}
"""Undone by its result alone: what became of a charge that failed, nobody knows."""
MAIL: Any = {"semantics": "COMPENSABLE", "compensate": undo("till.unsend", to="args.to", if_absent="forbids")}
PRICE: Any = {"semantics": "IRREVERSIBLE"}


def wrapped(fn: Callable[..., Any], declaration: Any, **more: Any) -> Any:
    """A LangChain tool made of a function, wrapped."""
    return wrap_tool(tool(fn), **{**declaration, **more})


def call(name: str, id: str = "", **args: Any) -> ScriptCall:
    """A call of the model."""
    return ScriptCall(name, args, id)


def thread(name: str = "t") -> Any:
    """The config of a thread."""
    return {"configurable": {"thread_id": name}}
