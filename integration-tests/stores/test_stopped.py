"""An owner that is stopped for longer than its lease, while a recoverer takes over, and then goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from crash_ledger import Ledger
from crash_log import Reader
from crash_processes import Start
from crash_stores import Store

from agent_saga_core import SagaStatus
from agent_saga_core.demo.client import Client

LEASED = ["postgres", "nats", "redis"]


@pytest.mark.promise("one-owner", "closed-means-closed", "compensate-once", "no-false-clean")
@pytest.mark.parametrize("store", LEASED, indirect=True)
@pytest.mark.parametrize("where", ["between steps", "in a request", "in a request that has landed", "in the rollback"])
def test_an_owner_that_is_stopped_past_its_lease_does_nothing_more(
    start: Start, world: Client, who: str, store: Store, log_url: str, in_log: Reader,
    recovered: Callable[..., dict[str, Any]], where: str,
) -> None:  # fmt: skip
    """No append of it is accepted, no effect starts; what was on its way carries its key, and is undone or refused."""
    body = {"between steps": ["charge", "heed", "pay"], "in the rollback": ["charge", "pay", "raise"]}
    if where == "in the rollback":
        world.hold("/refunds", when="after")
    elif where != "between steps":
        world.hold("/charges", when="after" if "landed" in where else "before", field={"customer": who, "amount": 2})
    owner = start("saga", body=body.get(where, ["charge", "pay", "book"]))
    owner.hear() if where == "between steps" else world.wait_held()
    owner.signal(signal.SIGSTOP)
    owner.wait_until_it_is("T")

    assert recovered()["live"] == ["order-7"], "its lease runs"
    assert store.lapse is not None
    store.lapse(log_url)
    if where == "in the rollback":
        world.reset()  # the next refund is not held
    assert recovered()["recovered"] == ["order-7"]
    state, records = in_log.state(), in_log.types()
    assert (state.status, state.report and state.report.clean) == (SagaStatus.ROLLED_BACK, True)
    requests = len(Ledger(world).all["journal"]) if where == "between steps" else None

    world.release()
    owner.signal(signal.SIGCONT)
    if where == "between steps":
        owner.say("go on")
    said = owner.hear()
    assert said.get("status") != "COMMITTED" and said["raised"] in ("Fenced", "RollbackIncomplete", "SoldOut"), said
    assert owner.ends() == 0, owner.errors()
    ledger = Ledger(world)
    assert in_log.types() == records, "something was appended behind the recoverer's last record"
    assert ledger.standing(who) == []
    for effect in ledger.effects(who):
        assert [undo["outcome"] for undo in ledger.undos(effect)].count("executed") == 1
        assert len({undo["key"] for undo in ledger.undos(effect)}) == 1
    assert not [found for found in ledger.all["bookings"] if found["customer"] == who], "an effect that came after"
    assert requests is None or len(ledger.all["journal"]) == requests, "it asked for something"
    assert in_log.intact()
