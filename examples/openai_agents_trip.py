"""OpenAI Agents book a trip, fail at the last step, and leave nothing behind.

`python examples/openai_agents_trip.py`. The booking service is a process of its own that knows nothing of sagas (that
of `agent-saga demo`); the agents are OpenAI Agents', and their model plays a script instead of thinking. A planner asks
a hotel desk, which is an agent called as a tool, and hands off to a cashier. The connection breaks at the last booking:
nobody hears whether it was made. Set `$AGENT_SAGA_DEMO_URL` to use a service that runs already. Exits with 1 if
anything is left.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from agents import Agent, Model, ModelResponse, Usage, UserError, function_tool, set_tracing_disabled
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from agent_saga_core import compensator, open_log, read_saga, undo
from agent_saga_core.demo.client import Client, Service, nothing_happened
from agent_saga_openai_agents import coverage, saga_run, wrap_tool

set_tracing_disabled(True)  # traces would go to the provider

URL = "AGENT_SAGA_DEMO_URL"
CUSTOMER = "ada"


def service() -> Client:
    return Client(os.environ[URL])


# -- how each effect is undone; found by name, in whichever process finishes the saga


@compensator("openai_agents_trip.void")
def void(key: str, *, idempotency_key: str) -> None:
    """Undo what was done under a key, or see to it that nothing ever is: that also covers what nobody heard of."""
    service().cancel_key(key, key=idempotency_key)


# -- the tools: plain function tools. The idempotency key is not shown to the model.


@function_tool
def book_hotel(city: str, *, idempotency_key: str) -> dict[str, Any]:
    """Book a hotel for the week."""
    return service().book("hotel", customer=CUSTOMER, what=city, key=idempotency_key)


@function_tool
def charge(amount: int, *, idempotency_key: str) -> dict[str, Any]:
    """Charge the customer's card; the amount is in cents."""
    return service().charge(CUSTOMER, amount, currency="eur", key=idempotency_key)


@function_tool(failure_error_function=None)  # a flight that fails ends the run
async def book_flight(route: str, *, idempotency_key: str) -> dict[str, Any]:
    """Book a flight, such as FRA-OPO."""
    return await service().abook("flight", customer=CUSTOMER, what=route, key=idempotency_key)


VOID = undo(void, key="step.forward_key", if_absent="forbids")
HOTEL, CHARGE, FLIGHT = (
    wrap_tool(tool, semantics="COMPENSABLE", compensate=VOID, not_applied=nothing_happened)
    for tool in (book_hotel, charge, book_flight)
)


# -- the agents, with a model that plays a script


class Script(Model):
    """Says one turn after the other. Its call ids begin anew with every run, as those of some providers do."""

    def __init__(self, *turns: tuple[str, dict[str, Any]] | str, first: int = 0) -> None:
        self.turns = list(enumerate(turns, start=first))

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        number, turn = self.turns.pop(0)
        if isinstance(turn, str):
            text = ResponseOutputText(type="output_text", text=turn, annotations=[])
            said: Any = ResponseOutputMessage(
                id="message", type="message", role="assistant", status="completed", content=[text]
            )
        else:
            name, given = turn
            said = ResponseFunctionToolCall(
                type="function_call", call_id=f"call_{number}", name=name, arguments=json.dumps(given)
            )
        return ModelResponse(output=[said], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


def planner() -> Agent[Any]:
    desk = Agent[Any](
        name="Hotel desk", tools=[HOTEL], model=Script(("book_hotel", {"city": "Porto"}), "A room is booked.")
    )
    cashier = Agent[Any](
        name="Cashier",
        tools=[CHARGE, FLIGHT],
        # A handoff stays in the run, so its ids go on behind the planner's.
        model=Script(("charge", {"amount": 42000}), ("book_flight", {"route": "OPO-FRA"}), "Enjoy it.", first=3),
    )
    return Agent[Any](
        name="Planner",
        tools=[FLIGHT, desk.as_tool("ask_hotel_desk", "Ask for a hotel.")],
        handoffs=[cashier],
        model=Script(
            ("ask_hotel_desk", {"input": "a week in Porto"}),
            ("book_flight", {"route": "FRA-OPO"}),
            ("transfer_to_cashier", {}),
        ),
    )


def main() -> int:
    with ExitStack() as stack:
        if URL not in os.environ:
            os.environ[URL] = stack.enter_context(Service.start()).url
        client = service()
        client.fail("/bookings", exact=True, field={"what": "OPO-FRA"}, when="after", answer="drop", times=None)
        log = open_log(f"file:{stack.enter_context(tempfile.TemporaryDirectory())}/log")
        stack.callback(log.close)
        agent = planner()
        coverage(agent).assert_fully_covered()
        try:
            result = saga_run(agent, "Book a week in Porto.", saga_id="trip-ada", name="trip", log=log)
        except UserError as error:
            print(f"the run ended: {type(error.__cause__).__name__} at the last flight\n")
        else:
            print("the trip was booked after all:", result.final_output)
        for step in read_saga(log, "trip-ada").steps:
            print(f"{step.number}  {step.tool:<12} {step.status}")
        print(f"\n{read_saga(log, 'trip-ada').report}")
        remains = client.summary()
        print("open bookings:", remains["open_bookings"], " cents kept:", remains["charged_net"])
        return 1 if remains["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
