"""LlamaIndex agents book a trip, fail at the last step, and leave nothing behind.

`python examples/llamaindex_trip.py`. The booking service is a process of its own that knows nothing of sagas (that of
`agent-saga demo`); the agents are LlamaIndex's, and their models play scripts instead of thinking. A planner books a
hotel, waits for a person, and hands over to a cashier, who charges the card and books the flights. The connection
breaks at the last flight: nobody hears whether it was booked. Set `$AGENT_SAGA_DEMO_URL` to use a service that runs
already. Exits with 1 if anything is left.
"""

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context, HumanResponseEvent, InputRequiredEvent

from agent_saga_core import SagaAborted, compensator, open_log, read_saga, undo
from agent_saga_core.demo.client import Client, Service, nothing_happened
from agent_saga_llamaindex import SuspendedRun, coverage, dump_state, saga_run, wrap_tool

URL = "AGENT_SAGA_DEMO_URL"
CUSTOMER = "ada"


def service() -> Client:
    return Client(os.environ[URL])


# -- how each effect is undone; found by name, in whichever process finishes the saga


@compensator("llamaindex_trip.cancel")
def cancel(booking_id: str, *, idempotency_key: str) -> None:
    """Cancel a booking that was answered."""
    service().cancel(booking_id, key=idempotency_key)


@compensator("llamaindex_trip.void")
def void(charge_key: str, *, idempotency_key: str) -> None:
    """Give back what was charged under a key, or see to it that nothing ever is."""
    service().cancel_key(charge_key, key=idempotency_key)


@compensator("llamaindex_trip.unbook")
def unbook(booking_key: str, *, idempotency_key: str) -> None:
    """Cancel what was booked under a key, or see to it that nothing ever is."""
    service().cancel_key(booking_key, key=idempotency_key)


# -- the tools: plain function tools. The idempotency key is not shown to the model.


def book_hotel(city: str, *, idempotency_key: str) -> dict[str, Any]:
    """Book a hotel for the week."""
    return service().book("hotel", customer=CUSTOMER, what=city, key=idempotency_key)


def charge(amount: int, *, idempotency_key: str) -> dict[str, Any]:
    """Charge the customer's card; the amount is in cents."""
    return service().charge(CUSTOMER, amount, currency="eur", key=idempotency_key)


async def book_flight(route: str, *, idempotency_key: str) -> dict[str, Any]:
    """Book a flight, such as FRA-OPO."""
    return await service().abook("flight", customer=CUSTOMER, what=route, key=idempotency_key)


async def confirm(ctx: Context, question: str) -> str:
    """Ask the customer."""
    answer = await ctx.wait_for_event(HumanResponseEvent, waiter_event=InputRequiredEvent(prefix=question))
    return str(answer.response)


HOTEL = wrap_tool(
    FunctionTool.from_defaults(book_hotel), semantics="COMPENSABLE", compensate=undo(cancel, booking_id="result.id")
)
CHARGE = wrap_tool(
    FunctionTool.from_defaults(charge),
    semantics="COMPENSABLE",
    compensate=undo(void, charge_key="step.forward_key", if_absent="forbids"),
    not_applied=nothing_happened,
)
FLIGHT = wrap_tool(
    FunctionTool.from_defaults(async_fn=book_flight),
    semantics="COMPENSABLE",
    compensate=undo(unbook, booking_key="step.forward_key", if_absent="forbids"),
    not_applied=nothing_happened,
)
CONFIRM = wrap_tool(FunctionTool.from_defaults(confirm), semantics="READ_ONLY")


# -- the agents, whose models play scripts


def scripted(*turns: str | tuple[str, dict[str, Any]]) -> MockFunctionCallingLLM:
    """A model that says one turn after the other; its call ids begin anew in each, as those of some providers do."""
    left = list(turns)

    def answer(messages: Any, **_: Any) -> ChatMessage:
        turn = left.pop(0)
        if isinstance(turn, str):
            return ChatMessage(role="assistant", content=turn)
        name, given = turn
        blocks = [ToolCallBlock(tool_call_id="call_0", tool_name=name, tool_kwargs=given)]
        return ChatMessage(role="assistant", blocks=blocks)

    return MockFunctionCallingLLM(is_chat_model=True, response_generator=answer)


def team(planner: MockFunctionCallingLLM, cashier: MockFunctionCallingLLM) -> AgentWorkflow:
    return AgentWorkflow(
        agents=[
            FunctionAgent(
                name="planner", description="Plans trips.", tools=[HOTEL, CONFIRM], llm=planner, streaming=False
            ),
            FunctionAgent(
                name="cashier", description="Pays and books.", tools=[CHARGE, FLIGHT], llm=cashier, streaming=False
            ),
        ],
        root_agent="planner",
    )


def main() -> int:
    with ExitStack() as stack:
        if URL not in os.environ:
            os.environ[URL] = stack.enter_context(Service.start()).url
        client = service()
        client.fail("/bookings", exact=True, field={"what": "OPO-FRA"}, when="after", answer="drop", times=None)
        log = open_log(f"file:{stack.enter_context(tempfile.TemporaryDirectory())}/log")
        stack.callback(log.close)

        planner = scripted(("book_hotel", {"city": "Porto"}), ("confirm", {"question": "A week in Porto for 420?"}))
        agents = team(planner, scripted())
        coverage(agents).assert_fully_covered()
        waiting = saga_run(agents, "Book a week in Porto.", saga_id="trip-ada", name="trip", log=log)
        assert isinstance(waiting, SuspendedRun)
        print("the run asks:", waiting.waiting[0].prefix)
        stored = json.dumps(dump_state(waiting))  # and this process may end here
        print(f"its saga is {read_saga(log, 'trip-ada').status}\n")

        agents = team(
            scripted(("handoff", {"to_agent": "cashier", "reason": "to pay"})),
            scripted(
                ("charge", {"amount": 42000}),
                ("book_flight", {"route": "FRA-OPO"}),
                ("book_flight", {"route": "OPO-FRA"}),
                "The way back could not be booked.",
            ),
        )
        try:
            # Without the way back the trip makes no sense: the first call that may have failed calls all of it off.
            answer = HumanResponseEvent(response="yes")
            result = saga_run(agents, json.loads(stored), answer, log=log, on_failure="abort")
            print("the trip was booked after all:", result)
        except SagaAborted as error:
            print(f"the trip was called off: {error}\n")

        for step in read_saga(log, "trip-ada").steps:
            print(f"{step.number}  {step.tool:<12} {step.status}")
        print(f"\n{read_saga(log, 'trip-ada').report}")
        remains = client.summary()
        print("open bookings:", remains["open_bookings"], " cents kept:", remains["charged_net"])
        return 1 if remains["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
