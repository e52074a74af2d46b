"""A team of AutoGen agents books a trip, fails at the last step, and leaves nothing behind.

`python examples/autogen_trip.py`. The booking service is a process of its own that knows nothing of sagas (that of
`agent-saga demo`); the agents are AutoGen's, and their models play a script instead of thinking. Set
`$AGENT_SAGA_DEMO_URL` to use a service that runs already. Exits with 1 if anything is left.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMessageTermination
from autogen_agentchat.messages import ToolCallExecutionEvent, ToolCallRequestEvent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import FunctionCall
from autogen_core.models import CreateResult, ModelFamily, RequestUsage
from autogen_ext.models.replay import ReplayChatCompletionClient

from agent_saga_autogen import asaga_stream, coverage, wrap_tool
from agent_saga_core import SagaAborted, compensator, open_log, saga_scope, undo
from agent_saga_core.demo.client import Client, Service, nothing_happened

# The client that plays the script logs that it cannot count the tokens of calls.
logging.getLogger("autogen_core").setLevel(logging.ERROR)

URL = "AGENT_SAGA_DEMO_URL"
CUSTOMER = "ada"


def service() -> Client:
    return Client(os.environ[URL])


# -- how each effect is undone; found by name, in whichever process finishes the saga


@compensator("autogen_trip.cancel")
def cancel(booking_id: str, *, idempotency_key: str) -> None:
    service().cancel(booking_id, key=idempotency_key)


@compensator("autogen_trip.void")
def void(charge_key: str, *, idempotency_key: str) -> None:
    service().cancel_key(charge_key, key=idempotency_key)


# -- the tools: plain functions, as AutoGen takes them. The idempotency key is not shown to the model.


def book_flight(route: str, *, idempotency_key: str) -> dict[str, Any]:
    """Book a flight, such as FRA-OPO."""
    return service().book("flight", customer=CUSTOMER, what=route, key=idempotency_key)


def book_hotel(city: str, *, idempotency_key: str) -> dict[str, Any]:
    """Book a hotel for the week."""
    return service().book("hotel", customer=CUSTOMER, what=city, key=idempotency_key)


def charge(amount: int, *, idempotency_key: str) -> dict[str, Any]:
    """Charge the customer's card; the amount is in cents."""
    return service().charge(CUSTOMER, amount, currency="eur", key=idempotency_key)


def tools() -> list[Any]:
    booking: Any = {
        "semantics": "COMPENSABLE",
        "compensate": undo(cancel, booking_id="result.id"),
        "not_applied": nothing_happened,
    }
    # Undone by its key rather than by its result: that also covers a charge of which no answer was heard.
    paying: Any = {
        "semantics": "COMPENSABLE",
        "compensate": undo(void, charge_key="step.forward_key", if_absent="forbids"),
        "not_applied": nothing_happened,
    }
    return [wrap_tool(book_flight, **booking), wrap_tool(book_hotel, **booking), wrap_tool(charge, **paying)]


# -- the agents, with models that play a script


def model(*turns: list[tuple[str, dict[str, Any]]] | str) -> ReplayChatCompletionClient:
    """A model that says these turns; its ids begin anew with every agent, as those of some providers do."""
    said: list[Any] = []
    for turn in turns:
        if isinstance(turn, str):
            said.append(turn)
            continue
        calls = [FunctionCall(f"call_{n}", json.dumps(args), name) for n, (name, args) in enumerate(turn)]
        usage = RequestUsage(prompt_tokens=1, completion_tokens=1)
        said.append(CreateResult(finish_reason="function_calls", content=calls, usage=usage, cached=False))
    info: Any = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": ModelFamily.UNKNOWN,
        "structured_output": False,
    }
    return ReplayChatCompletionClient(said, model_info=info)


def team() -> RoundRobinGroupChat:
    flight, hotel, card = tools()
    out = model([("book_flight", {"route": "FRA-OPO"}), ("book_hotel", {"city": "Porto"})])
    back = model([("charge", {"amount": 42000})], [("book_flight", {"route": "OPO-FRA"})], "There is no flight home.")
    return RoundRobinGroupChat(
        [
            AssistantAgent("planner", out, tools=[flight, hotel]),
            AssistantAgent("cashier", back, tools=[card, flight], max_tool_iterations=5),
        ],
        termination_condition=TextMessageTermination("cashier"),
    )


async def travel(log: Any) -> None:
    agents = team()
    coverage(agents).assert_fully_covered()
    # The saga is opened around the run, because it is we who decide what a finished trip is: the model was told that
    # the last flight is sold out, and ended its turn like any other.
    async with saga_scope("trip-ada", name="trip", log=log) as saga:
        stream = asaga_stream(agents, "Book a week in Porto, and the flights there and back.")
        async for piece in stream:
            if isinstance(piece, ToolCallRequestEvent):
                print(f"{piece.source} asks for", ", ".join(f"{call.name} {call.arguments}" for call in piece.content))
            elif isinstance(piece, ToolCallExecutionEvent):
                print(f"{piece.source} hears", "; ".join("an error" if r.is_error else "done" for r in piece.content))
        booked = sum(step.status == "DONE" for step in saga.steps)
        if booked < 4:
            saga.abort(f"{booked} of 4 bookings are not a trip")


def main() -> int:
    with ExitStack() as stack:
        if URL not in os.environ:
            os.environ[URL] = stack.enter_context(Service.start()).url
        client = service()
        client.fail("/bookings", exact=True, field={"what": "OPO-FRA"}, answer=422, error="sold_out", times=None)
        log = open_log(f"file:{stack.enter_context(tempfile.TemporaryDirectory())}/log")
        stack.callback(log.close)
        try:
            asyncio.run(travel(log))
        except SagaAborted as aborted:
            print(f"\n{aborted.report}")
        else:
            print("the trip was committed, although a flight is missing")
            return 1
        remains = client.summary()
        print("open bookings:", remains["open_bookings"], " cents kept:", remains["charged_net"])
        return 1 if remains["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
