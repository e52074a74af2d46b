"""A crew books a trip, fails at the last step, and leaves nothing behind.

`python examples/crewai_trip.py`. The booking service is a process of its own that knows nothing of sagas (that of
`agent-saga demo`); the crew is CrewAI's, with two tasks and a manager who delegates, and its models play a script
instead of thinking. The connection breaks at the last booking: nobody hears whether it was made. CrewAI would book five
times more, because it reads this agent's calls from its text, and the crew ends with the answer of a model that makes
the best of it. Set `$AGENT_SAGA_DEMO_URL` to use a service that runs already. Exits with 1 if anything is left.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from contextlib import ExitStack
from typing import Any

warnings.simplefilter("ignore")  # CrewAI's, about CrewAI
logging.getLogger("crewai").setLevel(logging.ERROR)
# It reports to its makers and asks questions unless it is told not to, before it is imported.
os.environ.update(
    CREWAI_DISABLE_TELEMETRY="true",
    CREWAI_DISABLE_VERSION_CHECK="true",
    CREWAI_TRACING_ENABLED="false",
    OTEL_SDK_DISABLED="true",
)

from crewai import Agent, BaseLLM, Crew, Process, Task  # noqa: E402
from crewai.tools import BaseTool, tool  # noqa: E402
from pydantic import PrivateAttr  # noqa: E402

from agent_saga_core import SagaAborted, compensator, open_log, read_saga, undo  # noqa: E402
from agent_saga_core.demo.client import Client, Service, nothing_happened  # noqa: E402
from agent_saga_crewai import coverage, saga_run, wrap_tool  # noqa: E402

URL = "AGENT_SAGA_DEMO_URL"
CUSTOMER = "ada"


def service() -> Client:
    return Client(os.environ[URL])


# -- how each effect is undone; found by name, in whichever process finishes the saga


@compensator("crewai_trip.void")
def void(key: str, *, idempotency_key: str) -> None:
    """Undo what was done under a key, or see to it that nothing ever is: that also covers what nobody heard of."""
    service().cancel_key(key, key=idempotency_key)


# -- the tools: CrewAI's own. The idempotency key is not shown to the model.


@tool("book_hotel")
def book_hotel(city: str, idempotency_key: str) -> dict[str, Any]:
    """Book a hotel for the week."""
    return service().book("hotel", customer=CUSTOMER, what=city, key=idempotency_key)


@tool("charge")
def charge(amount: int, idempotency_key: str) -> dict[str, Any]:
    """Charge the customer's card; the amount is in cents."""
    return service().charge(CUSTOMER, amount, currency="eur", key=idempotency_key)


class BookFlight(BaseTool):
    """A tool of the class kind."""

    name: str = "book_flight"
    description: str = "Book a flight, such as FRA-OPO."

    def _run(self, route: str, idempotency_key: str) -> dict[str, Any]:
        print(f"   a flight is asked for: {route}")
        return service().book("flight", customer=CUSTOMER, what=route, key=idempotency_key)


VOID = undo(void, key="step.forward_key", if_absent="forbids")
HOTEL, CHARGE, FLIGHT = (
    wrap_tool(it, semantics="COMPENSABLE", compensate=VOID, not_applied=nothing_happened)
    for it in (book_hotel, charge, BookFlight())
)


# -- the crew, with models that play scripts


class Script(BaseLLM):
    """Says one turn after the other: by native calls, or by the text that CrewAI calls ReAct."""

    _turns: list[Any] = PrivateAttr()
    _native: bool = PrivateAttr()

    def __init__(self, *turns: tuple[str, dict[str, Any]] | str, native: bool = True) -> None:
        super().__init__(model="script")
        self._turns, self._native = list(turns), native

    def supports_function_calling(self) -> bool:
        return self._native

    def get_context_window_size(self) -> int:
        return 1_000_000

    def call(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        turn = self._turns.pop(0) if self._turns else "That did not work."
        if isinstance(turn, str):
            return turn if self._native else f"Thought: I now know the final answer\nFinal Answer: {turn}"
        name, given = turn
        if not self._native:
            return f"Thought: so be it\nAction: {name}\nAction Input: {json.dumps(given)}\n"
        return [{"id": "call_0", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}]


def trip() -> Crew:
    desk = Agent(
        role="hotel desk", goal="book hotels", backstory="", tools=[HOTEL],
        llm=Script(("book_hotel", {"city": "Porto"}), "A room is booked."),
    )  # fmt: skip
    cashier = Agent(
        role="cashier", goal="charge, and book flights", backstory="", tools=[CHARGE, FLIGHT],
        llm=Script(
            ("book_flight", {"route": "FRA-OPO"}), ("charge", {"amount": 42000}), ("book_flight", {"route": "OPO-FRA"}),
            "All is booked.",  # says the model
            native=False,
        ),
    )  # fmt: skip
    ask = "delegate_work_to_coworker"
    manager = Agent(
        role="planner", goal="plan trips", backstory="", allow_delegation=True,
        llm=Script(
            (ask, {"coworker": "hotel desk", "task": "a room in Porto", "context": "a week"}), "There is a room.",
            (ask, {"coworker": "cashier", "task": "flights to Porto and back", "context": "a week"}), "Enjoy the trip.",
        ),
    )  # fmt: skip
    tasks = [Task(description=what, expected_output="a sentence") for what in ("Find a room.", "Pay and book flights.")]
    return Crew(agents=[desk, cashier], tasks=tasks, manager_agent=manager, process=Process.hierarchical)


def main() -> int:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["CREWAI_STORAGE_DIR"] = directory
        if URL not in os.environ:
            os.environ[URL] = stack.enter_context(Service.start()).url
        client = service()
        client.fail("/bookings", exact=True, field={"what": "OPO-FRA"}, when="after", answer="drop", times=None)
        log = open_log(f"file:{directory}/log")
        stack.callback(log.close)
        crew = trip()
        coverage(crew).assert_fully_covered()
        try:
            # A failure that may have had an effect is the end of this trip, also where it could be undone on the spot.
            result = saga_run(crew, saga_id="trip-ada", name="trip", log=log, on_failure="abort")
        except SagaAborted as error:
            print(f"\nthe crew said all is well; the saga knew better: {error}\n")
        else:
            print("the trip was booked after all:", result.raw)
        for step in read_saga(log, "trip-ada").steps:
            print(f"{step.number}  {step.tool:<12} {step.status}")
        print(f"\n{read_saga(log, 'trip-ada').report}")
        remains = client.summary()
        print("open bookings:", remains["open_bookings"], " cents kept:", remains["charged_net"])
        return 1 if remains["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
