"""Two trips by an agent of `create_agent`, which asks a person before it sends a mail: one says yes, the other no.

`python examples/langchain_create_agent.py`. The booking service is a process of its own that knows nothing of sagas
(that of `agent-saga demo`); the agent is LangChain's, and its model plays a script instead of thinking. A mail cannot
be taken back, so it is the last step and asks first. Ada's is sent, and her trip stays. Ben's is not, and nothing of
his trip is left. Set `$AGENT_SAGA_DEMO_URL` to use a service that runs already. Exits with 1 if it came out otherwise.

The agent has a checkpointer, as an agent that waits for a person needs one: agent-saga-langgraph runs it, and another
process could go on after the question.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from agent_saga_core import ApprovalRequired, Log, compensator, list_sagas, open_log, undo
from agent_saga_core.demo.client import Client, Service, nothing_happened
from agent_saga_langchain import coverage, wrap_tool
from agent_saga_langgraph import approve, reject, saga_run

URL = "AGENT_SAGA_DEMO_URL"


def service() -> Client:
    return Client(os.environ[URL])


# -- how each effect is undone; found by name, in whichever process finishes the saga


@compensator("langchain_trip.cancel")
def cancel(booking_id: str, *, idempotency_key: str) -> None:
    service().cancel(booking_id, key=idempotency_key)


@compensator("langchain_trip.void")
def void(charge_key: str, *, idempotency_key: str) -> None:
    service().cancel_key(charge_key, key=idempotency_key)


# -- the tools, as LangChain makes them. The idempotency key is not shown to the model.


@tool
def book_flight(customer: str, route: str, idempotency_key: str) -> dict[str, Any]:
    """Book a flight, such as FRA-OPO."""
    return service().book("flight", customer=customer, what=route, key=idempotency_key)


@tool
def book_hotel(customer: str, city: str, idempotency_key: str) -> dict[str, Any]:
    """Book a hotel for the week."""
    return service().book("hotel", customer=customer, what=city, key=idempotency_key)


@tool
def charge(customer: str, amount: int, idempotency_key: str) -> dict[str, Any]:
    """Charge the customer's card; the amount is in cents."""
    return service().charge(customer, amount, currency="eur", key=idempotency_key)


@tool
def send_mail(customer: str, subject: str, idempotency_key: str) -> dict[str, Any]:
    """Tell the customer."""
    return service().mail(customer, subject, key=idempotency_key)


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
    wrap_tool(send_mail, semantics="IRREVERSIBLE"),
]


# -- the agent, with a model that plays a script


class ScriptedModel(GenericFakeChatModel):
    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self


def agent(customer: str) -> Any:
    turns: list[list[tuple[str, dict[str, Any]]]] = [
        [("book_flight", {"route": "FRA-OPO"}), ("book_hotel", {"city": "Porto"})],
        [("charge", {"amount": 42000})],
        [("send_mail", {"subject": "Your week in Porto"})],
    ]
    # The ids begin anew with each message, as those of some providers do.
    said = [
        AIMessage("", tool_calls=[{"name": name, "args": {"customer": customer, **args}, "id": f"call_{n}"}
                                  for n, (name, args) in enumerate(turn)])
        for turn in turns
    ]  # fmt: skip
    model = ScriptedModel(messages=iter([*said, AIMessage("All is booked.")]))
    made = create_agent(model, TOOLS, checkpointer=InMemorySaver())
    coverage(made).assert_fully_covered()
    return made


def travel(customer: str, log: Log, yes: bool) -> None:
    """One trip, with a person who says yes or no to the mail."""
    trip, thread = agent(customer), {"configurable": {"thread_id": customer}}
    question = {"messages": [HumanMessage("Book a week in Porto.")]}
    result = saga_run(trip, question, thread, saga_id=f"trip-{customer}", log=log, name="trip")
    (asked,) = result["__interrupt__"]
    (head,) = [head for head in list_sagas(log) if head.saga_id == f"trip-{customer}"]
    print(f"{customer}: the agent asks for {asked.value['tool']} {asked.value['args']}; the saga is {head.status}")
    answer = approve(asked) if yes else reject(asked)
    try:
        result = saga_run(trip, Command(resume=answer), thread, log=log)
        print(f"{customer}: yes. {result['messages'][-1].text}")
    except ApprovalRequired as refused:
        print(f"{customer}: no. {refused.__notes__[-1]}")


def left(customer: str) -> list[str]:
    """What the service holds for a customer: bookings, charges that were not given back, mails."""
    ledger = service().ledger()
    bookings = [one for one in ledger["bookings"] if one["customer"] == customer and one["status"] == "booked"]
    charges = [one for one in ledger["charges"] if one["customer"] == customer and one["captured"] > one["refunded"]]
    mails = [one for one in ledger["mails"] if one["to"] == customer]
    paid = [f"{one['captured'] - one['refunded']} cents paid" for one in charges]
    return [*(one["what"] for one in bookings), *paid, *("a mail" for _ in mails)]


def main() -> int:
    with ExitStack() as stack:
        if URL not in os.environ:
            os.environ[URL] = stack.enter_context(Service.start()).url
        log = open_log(f"file:{stack.enter_context(tempfile.TemporaryDirectory())}/log")
        stack.callback(log.close)
        travel("ada", log, yes=True)
        travel("ben", log, yes=False)
        for head in list_sagas(log):
            print(f"{head.saga_id}: {head.status}")
        for customer in ("ada", "ben"):
            print(f"{customer} has: {', '.join(left(customer)) or 'nothing'}")
        return 0 if len(left("ada")) == 4 and not left("ben") else 1


if __name__ == "__main__":
    sys.exit(main())
