"""The processes that the tests kill, and those that go on after them: `langgraph_children.py KIND VERB DIRECTORY`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

sys.path.insert(0, str(Path(__file__).parent))

import langgraph_fakes
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command, interrupt

from agent_saga_core import FileLog, SagaBusy, StepUnknown, saga_tool, undo
from agent_saga_core.testing.adapters.desk import BOUND, BY_ITEM, BY_RESULT, Desk
from agent_saga_langgraph import saga_run, wrap_tool

BOOK = langgraph_fakes.call("book", "call_0", item="a")
HOLD = langgraph_fakes.call("hold", "call_1", item="b")
GO: Any = {"messages": [("user", "go")]}


class Noted(TypedDict, total=False):
    noted: Annotated[list[Any], add]


class Answering(langgraph_fakes.ScriptedModel):
    """A model whose answer is told by the conversation alone, so that any process may ask it."""

    turns: Any

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        said = sum(isinstance(message, AIMessage) for message in messages)
        turn = self.turns[said] if said < len(self.turns) else "all is booked"
        return ChatResult(generations=[ChatGeneration(message=langgraph_fakes.said(turn))])


class Watched(FileLog):
    """A log that tells when the outcome of a first call is durable."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.recorded = threading.Event()
        self.outcome: Any = None

    def append(self, record: Any) -> Any:
        ticket = super().append(record)
        if record.type == "DONE" and self.outcome is None:
            self.outcome = ticket
        return ticket

    def flush(self, ticket: Any) -> None:
        super().flush(ticket)
        if self.outcome is not None and ticket >= self.outcome:
            self.recorded.set()


def die() -> None:
    """kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def graph_of(kind: str, verb: str, desk: Desk, saver: Any, log: Watched) -> Any:
    def tools(held: Any) -> list[Any]:
        book = wrap_tool(tool(desk.function("book")), **BY_RESULT)
        return [book, wrap_tool(tool(desk.function("hold")), **held)]

    if kind in ("agent", "agent-unknown", "by-hand"):
        if verb == "begin":
            desk.then["hold"] = lambda item: log.recorded.wait(BOUND) and die()
        llm = Answering(script=None, turns=[(BOOK,), (HOLD,)] if kind == "agent-unknown" else [(BOOK, HOLD)])
        made = tools(BY_RESULT if kind == "agent-unknown" else BY_ITEM)
        if kind == "by-hand":
            return langgraph_fakes.hand_built(llm, made, checkpointer=saver)
        from langchain.agents import create_agent  # a second that the other kinds do without

        return create_agent(llm, made, checkpointer=saver)
    book, plain = (
        tools(BY_ITEM)[0],
        saga_tool(**{**BY_RESULT, "compensate": undo("conformance.unbook", id="result.id")}),
    )

    def node(state: Noted) -> Noted:
        first = book.invoke({"item": "a"})
        second = plain(desk.function("plain"))("b")
        if verb == "begin":
            die()
        return {"noted": [first, second]}

    def asking(state: Noted) -> Noted:
        answer = interrupt("go on?")
        if verb == "hold":
            desk.on["book"] = lambda item: (print("standing", flush=True), sys.stdin.readline())
        return {"noted": [answer, book.invoke({"item": "a"})]}

    return langgraph_fakes.chain(node if kind == "node" else asking, state=Noted, checkpointer=saver)


def main(kind: str, verb: str, directory: Path) -> None:
    desk = Desk(directory / "desk")
    desk.register()
    log = Watched(directory / "log")
    given: Any = {"begin": {"noted": []} if kind in ("node", "asking") else GO, "resume": None}.get(
        verb, Command(resume="yes")
    )
    with SqliteSaver.from_conn_string(str(directory / "checkpoints")) as saver:
        graph = graph_of(kind, verb, desk, saver, log)
        try:
            found = saga_run(graph, given, langgraph_fakes.thread(), log=log)
        except (SagaBusy, StepUnknown) as refused:
            print(type(refused).__name__, flush=True)
            return
        print("interrupted" if "__interrupt__" in found else "done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
