"""The world equals what the log says: how many sagas that were killed and recovered are held against their effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crash_ledger import Ledger
from crash_log import Reader

from agent_saga_core.records import Record


def next_saga(said: list[dict[str, Any]], first: int) -> int:
    """Where the heir of a killed worker goes on: behind the saga that it had begun last."""
    begun = [line["begun"] for line in said if "begun" in line]
    return max(begun, default=first - 1) + 1


def the_ledger_equals_the_log(ledger: Ledger, in_log: Reader, sagas: Sequence[str]) -> None:
    """Every effect stands in the log, and stands in the world if its saga committed; otherwise it was undone.

    Once; or again under the same key, where the process died between the undo and its record. What that is, the log
    tells: an undo was started again, by another owner.
    """
    assert in_log.intact()
    statuses: list[str] = []
    with in_log.opened() as log:
        assert log.unfinished().saga_ids == ()
        known = set(log.saga_ids())
        for saga in sagas:
            effects = ledger.effects(saga)
            if saga not in known:
                assert effects == [], f"{saga}: effects, and no record"
                continue
            records = log.read(saga)
            intents = {record.data["key"] for record in records if record.type == "INTENT"}
            assert {effect["key"] for effect in effects} <= intents, f"{saga}: an effect without its intent"
            statuses.append(records[-1].type)
            if records[-1].type == "COMMITTED":
                assert len(ledger.standing(saga)) == 3 and ledger.undo_counts(saga) == [0, 0, 0], saga
                assert int(saga.rpartition("-")[2]) % 3 != 2, f"{saga} was to fail"
            else:
                assert records[-1].type == "ROLLED_BACK" and records[-1].data["clean"], saga
                assert ledger.undone_once_each(saga), saga
                _each_undo_was_started(saga, ledger, effects, records)
    assert statuses.count("COMMITTED") > len(statuses) / 4 and statuses.count("ROLLED_BACK") > len(statuses) / 4


def _each_undo_was_started(saga: str, ledger: Ledger, effects: list[dict[str, Any]], records: Sequence[Record]) -> None:
    """No undo without its COMPENSATING before it, and none started twice by one owner."""
    started: dict[str, list[int]] = {}
    for record in records:
        if record.type == "COMPENSATING":
            started.setdefault(record.data["key"], []).append(record.epoch)
    for effect in effects:
        undos = ledger.undos(effect)
        (key,) = {undo["key"] for undo in undos}
        assert len(undos) <= len(started[key]), f"{saga}: undone more often than that was begun"
    for epochs in started.values():
        assert len(epochs) == len(set(epochs)), f"{saga}: one owner began an undo twice"
