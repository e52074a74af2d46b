"""A trip booked by a LangGraph agent over two processes, failing at its last step, and nothing of it left.

`python examples/langgraph_trip.py`. The booking service is a process of its own that knows nothing of sagas (that of
`agent-saga demo`). The agent is a graph with a SQLite checkpointer; its model plays a script instead of thinking.

The first process books a flight and a hotel at once, charges the card, and asks a person before the mail, which cannot
be taken back. Then it is gone. A second process finds the saga in the thread and answers yes; the service refuses the
mail; what both processes did is undone. Exits with 1 if anything is left.

Set `$AGENT_SAGA_DEMO_URL` to use a service that runs already.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command

from agent_saga_core import compensator, list_sagas, open_log, undo
from agent_saga_core.demo.client import Client, HTTPStatusError, Service, nothing_happened
from agent_saga_langgraph import approve, coverage, saga_run, wrap_tool

URL = "AGENT_SAGA_DEMO_URL"
CUSTOMER = "cyd"
THREAD: Any = {"configurable": {"thread_id": "trip-cyd"}}


def service() -> Client:
    return Client(os.environ[URL])


# -- how each effect is undone; found by name, in whichever process finishes the saga


@compensator("langgraph_trip.cancel")
def cancel(booking_id: str, *, idempotency_key: str) -> None:
    service().cancel(booking_id, key=idempotency_key)


@compensator("langgraph_trip.void")
def void(charge_key: str, *, idempotency_key: str) -> None:
    service().cancel_key(charge_key, key=idempotency_key)


# -- the tools, as LangChain makes them. The idempotency key is not shown to the model.


@tool
def book_flight(route: str, idempotency_key: str) -> dict[str, Any]:
    """Book a flight, such as FRA-OPO."""
    return service().book("flight", customer=CUSTOMER, what=route, key=idempotency_key)


@tool
def book_hotel(city: str, idempotency_key: str) -> dict[str, Any]:
    """Book a hotel for the week."""
    return service().book("hotel", customer=CUSTOMER, what=city, key=idempotency_key)


@tool
def charge(amount: int, idempotency_key: str) -> dict[str, Any]:
    """Charge the customer's card; the amount is in cents."""
    return service().charge(CUSTOMER, amount, currency="eur", key=idempotency_key)


@tool
def send_mail(subject: str, idempotency_key: str) -> dict[str, Any]:
    """Tell the customer."""
    return service().mail(CUSTOMER, subject, key=idempotency_key)


BOOKING: Any = {
    "semantics": "COMPENSABLE",
    "compensate": undo(cancel, booking_id="result.id"),
    "not_applied": nothing_happened,
}
# Undone by its key rather than by its result: that also covers a charge of which no answer was heard.
PAYING: Any = {
    "semantics": "COMPENSABLE",
    "compensate": undo(void, charge_key="step.forward_key", if_absent="forbids"),
    "not_applied": nothing_happened,
}
TOOLS = [
    wrap_tool(book_flight, **BOOKING),
    wrap_tool(book_hotel, **BOOKING),
    wrap_tool(charge, **PAYING),
    wrap_tool(send_mail, semantics="IRREVERSIBLE", not_applied=nothing_happened),
]


# -- the agent: a graph of one's own, around a model that says what the conversation calls for next


class ScriptedModel(BaseChatModel):
    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        turns: list[list[tuple[str, dict[str, Any]]]] = [
            [("book_flight", {"route": "FRA-OPO"}), ("book_hotel", {"city": "Porto"})],
            [("charge", {"amount": 42000})],
            [("send_mail", {"subject": "Your week in Porto"})],
        ]
        said = sum(isinstance(message, AIMessage) for message in messages)
        # The ids begin anew with each message, as those of some providers do.
        calls = [
            {"name": name, "args": args, "id": f"call_{n}", "type": "tool_call"}
            for n, (name, args) in enumerate(turns[said] if said < len(turns) else [])
        ]
        message = AIMessage("" if calls else "All is booked.", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])


def agent(saver: SqliteSaver) -> Any:
    model = ScriptedModel()

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode(TOOLS))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile(checkpointer=saver)


# -- the two processes


def begin(directory: Path) -> None:
    """The first process: until the agent has to ask."""
    with SqliteSaver.from_conn_string(str(directory / "threads")) as saver:
        trip = agent(saver)
        coverage(trip).assert_fully_covered(acknowledge=["node:think"])  # it calls the model and nothing else
        given = {"messages": [HumanMessage("Book a week in Porto.")]}
        result = saga_run(trip, given, THREAD, log=f"file:{directory}/log", name="trip")
        (question,) = result["__interrupt__"]
        print(f"process 1 asks for {question.value['tool']} {question.value['args']}, and ends")


def answer(directory: Path) -> None:
    """The second process: the person says yes."""
    with SqliteSaver.from_conn_string(str(directory / "threads")) as saver:
        trip = agent(saver)
        (question,) = trip.get_state(THREAD).interrupts
        try:
            saga_run(trip, Command(resume=approve(question)), THREAD, log=f"file:{directory}/log")
        except HTTPStatusError as refused:
            print(f"process 2 says yes, and the mail is refused: {refused}")
            print(f"process 2: {refused.__notes__[-1]}")


def left() -> list[str]:
    """What the service holds for the customer: bookings, charges that were not given back, mails."""
    ledger = service().ledger()
    bookings = [one["what"] for one in ledger["bookings"] if one["status"] == "booked"]
    charges = [f"{one['captured'] - one['refunded']} cents" for one in ledger["charges"]]
    return [*bookings, *(one for one in charges if one != "0 cents"), *("a mail" for _ in ledger["mails"])]


def main(argv: list[str]) -> int:
    if argv:
        {"begin": begin, "answer": answer}[argv[0]](Path(argv[1]))
        return 0
    with ExitStack() as stack:
        if URL not in os.environ:
            os.environ[URL] = stack.enter_context(Service.start()).url
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        service().fail("/mails", answer=422, error="no such address")
        for part in ("begin", "answer"):
            subprocess.run([sys.executable, __file__, part, directory], check=True)
            print(f"the customer has: {', '.join(left()) or 'nothing'}", flush=True)
        log = open_log(f"file:{directory}/log", create=False)
        stack.callback(log.close)
        for head in list_sagas(log):
            print(f"saga {head.name!r}: {head.status}, {head.steps} steps")
        return 1 if left() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
