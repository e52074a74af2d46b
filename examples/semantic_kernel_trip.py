"""Semantic Kernel agents book a trip, fail at the last step, and leave nothing behind.

`python examples/semantic_kernel_trip.py`. The booking service is a process of its own that knows nothing of sagas (that
of `agent-saga demo`); the agents are Semantic Kernel's, and their models play a script instead of thinking. A planner
asks a hotel desk, which is an agent among its functions. The connection breaks at the last booking: nobody hears
whether it was made. Set `$AGENT_SAGA_DEMO_URL` to use a service that runs already. Exits with 1 if anything is left.
"""

# No `from __future__ import annotations`: `kernel_function` reads annotations as they are.

import asyncio
import json
import logging
import os
import sys
import tempfile
from contextlib import ExitStack
from typing import Any, ClassVar

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import AuthorRole, ChatMessageContent, FunctionCallContent, TextContent
from semantic_kernel.functions import kernel_function

from agent_saga_core import SagaAborted, compensator, open_log, saga_scope, undo
from agent_saga_core.demo.client import Client, Service, nothing_happened
from agent_saga_semantic_kernel import asaga_run, coverage, wrap_plugin

logging.getLogger("semantic_kernel").setLevel(logging.CRITICAL)  # it logs a traceback for what the model hears anyway

URL = "AGENT_SAGA_DEMO_URL"
CUSTOMER = "ada"


def service() -> Client:
    return Client(os.environ[URL])


# -- how each effect is undone; found by name, in whichever process finishes the saga


@compensator("semantic_kernel_trip.void")
def void(key: str, *, idempotency_key: str) -> None:
    """Undo what was done under a key, or see to it that nothing ever is: that also covers what nobody heard of."""
    service().cancel_key(key, key=idempotency_key)


# -- the functions: plain kernel functions. The idempotency key is not shown to the model.


class Travel:
    @kernel_function
    async def book_flight(self, route: str, *, idempotency_key: str) -> dict[str, Any]:
        """Book a flight, such as FRA-OPO."""
        return await service().abook("flight", customer=CUSTOMER, what=route, key=idempotency_key)

    @kernel_function
    def charge(self, amount: int, *, idempotency_key: str) -> dict[str, Any]:
        """Charge the customer's card; the amount is in cents."""
        return service().charge(CUSTOMER, amount, currency="eur", key=idempotency_key)


class Hotels:
    @kernel_function
    async def book_hotel(self, city: str, *, idempotency_key: str) -> dict[str, Any]:
        """Book a hotel for the week."""
        return await service().abook("hotel", customer=CUSTOMER, what=city, key=idempotency_key)


BOOKED: Any = {
    "semantics": "COMPENSABLE",
    "compensate": undo(void, key="step.forward_key", if_absent="forbids"),
    "not_applied": nothing_happened,
    "in_doubt": 0.0,  # the service answers for a key from the moment it is voided
}


# -- the agents, with models that play a script


class Script(ChatCompletionClientBase):
    """Says one turn after the other. Its call ids begin anew with every message, as those of some providers do."""

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = True
    turns: list[Any]

    def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
        return PromptExecutionSettings

    def _update_function_choice_settings_callback(self) -> Any:
        return lambda *_: None

    def _reset_function_choice_settings(self, settings: Any) -> None: ...

    def _verify_function_choice_settings(self, settings: Any) -> None: ...

    async def _inner_get_chat_message_contents(self, chat_history: Any, settings: Any) -> list[ChatMessageContent]:
        turn = self.turns.pop(0)
        calls = [] if isinstance(turn, str) else turn
        items: list[Any] = [
            FunctionCallContent(id=f"call_{n}", name=name, arguments=json.dumps(given))
            for n, (name, given) in enumerate(calls)
        ]
        return [ChatMessageContent(role=AuthorRole.ASSISTANT, items=items or [TextContent(text=turn)])]


def planner() -> ChatCompletionAgent:
    desk = ChatCompletionAgent(
        name="hotel_desk",
        description="Ask for a hotel.",
        service=Script(ai_model_id="script", turns=[[("hotels-book_hotel", {"city": "Porto"})], "A room is booked."]),
        plugins=[wrap_plugin(Hotels(), {"book_hotel": BOOKED}, plugin_name="hotels")],
    )
    turns = [
        [("hotel_desk-hotel_desk", {"messages": "a week in Porto", "instructions_override": ""})],
        [("travel-book_flight", {"route": "FRA-OPO"}), ("travel-charge", {"amount": 42000})],
        [("travel-book_flight", {"route": "OPO-FRA"})],
        "There is no flight home.",
    ]
    return ChatCompletionAgent(
        name="planner",
        service=Script(ai_model_id="script", turns=turns),
        plugins=[wrap_plugin(Travel(), {"book_flight": BOOKED, "charge": BOOKED}, plugin_name="travel"), desk],
    )


async def travel(log: Any) -> None:
    agent = planner()
    coverage(agent).assert_fully_covered()
    # The saga is opened around the run, because it is we who decide what a finished trip is: the model heard that the
    # last flight failed, and ended its turn like any other.
    async with saga_scope("trip-ada", name="trip", log=log) as saga:
        answer = await asaga_run(agent, "Book a week in Porto, and the flights there and back.")
        print(f"planner: {answer}\n\nbefore the trip is called off:")
        for step in saga.steps:
            print(f"{step.number}  {step.tool:<12} {step.status}")
        booked = sum(step.status == "DONE" for step in saga.steps)
        if booked < 4:
            saga.abort(f"{booked} of 4 bookings are not a trip")


def main() -> int:
    with ExitStack() as stack:
        if URL not in os.environ:
            os.environ[URL] = stack.enter_context(Service.start()).url
        client = service()
        client.fail("/bookings", exact=True, field={"what": "OPO-FRA"}, when="after", answer="drop", times=None)
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
