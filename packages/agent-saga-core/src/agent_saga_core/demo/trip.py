"""The trip of the demo: its tools, how each is undone, and the agent that calls them.

`python -m agent_saga_core.demo.trip --customer cyd --log file:./log` runs the agent in a saga, in a process of
its own. Recovery imports this module for its compensators and its probe. The booking service's URL is in
`$AGENT_SAGA_DEMO_URL`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from agent_saga_core import (
    ActionSemantics,
    Observation,
    compensator,
    open_log,
    probe,
    recover,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.demo.client import Client, HTTPStatusError, nothing_happened

__all__ = ["PLAN", "URL_VARIABLE", "agent", "main", "saga_id"]

Json = dict[str, Any]

URL_VARIABLE = "AGENT_SAGA_DEMO_URL"


def _service() -> Client:
    return Client(os.environ[URL_VARIABLE])


# -- how each effect is undone, and looked up: found by name, in whichever process finishes the saga ------


@compensator("trip.cancel_booking")
def cancel_booking(booking_id: str, *, idempotency_key: str) -> None:
    """Cancel a booking that was answered."""
    _service().cancel(booking_id, key=idempotency_key)


@compensator("trip.void_charge")
def void_charge(charge_key: str, *, idempotency_key: str) -> None:
    """Give back what was charged under this key, or see to it that nothing ever is."""
    _service().cancel_key(charge_key, key=idempotency_key)


@probe("trip.find_booking")
def find_booking(args: Json, idempotency_key: str) -> Observation:
    """Look a booking up by the key that it was asked for with."""
    found = _service().lookup(idempotency_key)
    if found["landed"]:
        return Observation(landed=True, result=found["body"])
    return Observation(landed=False, final=found["tombstone"])


# -- the tools --------------------------------------------------------------------------------------------


@saga_tool(
    semantics=ActionSemantics.COMPENSABLE,
    compensate=undo(cancel_booking, booking_id="result.id"),
    probe="trip.find_booking",
    not_applied=nothing_happened,
)
def book_flight(customer: str, route: str, *, idempotency_key: str | None = None) -> Json:
    """Book a flight."""
    return _service().book("flight", customer=customer, what=route, key=idempotency_key)


@saga_tool(
    semantics=ActionSemantics.COMPENSABLE,
    compensate=undo(cancel_booking, booking_id="result.id"),
    probe="trip.find_booking",
    not_applied=nothing_happened,
)
def book_hotel(customer: str, city: str, *, idempotency_key: str | None = None) -> Json:
    """Book a hotel."""
    return _service().book("hotel", customer=customer, what=city, key=idempotency_key)


# Undone by its key rather than by its result: that also covers a charge of which no answer was heard.
@saga_tool(
    semantics=ActionSemantics.COMPENSABLE,
    compensate=undo(void_charge, charge_key="step.forward_key", if_absent="forbids"),
    not_applied=nothing_happened,
)
def charge(customer: str, amount: int, *, idempotency_key: str | None = None) -> Json:
    """Charge the customer's card; `amount` in cents."""
    return _service().charge(customer, amount, currency="eur", key=idempotency_key)


# -- the agent --------------------------------------------------------------------------------------------

PLAN: tuple[tuple[Callable[..., Json], Json], ...] = (
    (book_flight, {"route": "FRA-OPO"}),
    (book_hotel, {"city": "Porto"}),
    (charge, {"amount": 42000}),
    (book_flight, {"route": "OPO-FRA"}),
)
"""What a model would have decided to call, in its order."""


def agent(customer: str, heard: Callable[[str, Json, Json], None] | None = None) -> None:
    """Make the calls of the plan for one customer; give up at the first that fails.

    Args:
        customer: Whose trip it is.
        heard: Told of each answer: the tool's name, its arguments, its result.
    """
    for tool, args in PLAN:
        result = tool(customer=customer, **args)
        if heard is not None:
            heard(tool.__name__, args, result)


def saga_id(customer: str) -> str:
    """The id of the saga that this customer's trip is."""
    return f"trip-{customer}"


def main(argv: list[str]) -> int:
    """Run the agent in a saga, or recover a log; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m agent_saga_core.demo.trip", description=__doc__)
    parser.add_argument("--log", required=True, help="the log's URL")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--customer", help="run the agent for this customer, in a saga")
    what.add_argument("--recover", action="store_true", help="finish what dead processes left in the log")
    options = parser.parse_args(argv)
    if options.recover:
        report = recover(options.log)
        return 1 if report.attention or report.untouched or report.damaged else 0
    log = open_log(options.log)
    try:
        with saga_scope(saga_id(options.customer), name="trip", log=log):
            agent(options.customer)
    except HTTPStatusError as error:
        print(f"{options.customer}'s agent gave up: {error}", file=sys.stderr)
        return 1
    finally:
        log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
