"""What one run is about: the body, how its scope is opened, who comes by, and which faults may strike."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simulation.tools import KINDS

__all__ = ["FAULTS", "Call", "Lane", "Plan", "Savepoint", "Visitor", "drawn", "focused", "simpler"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One intended call. `again` says how often it is made again after an error."""

    kind: str
    amount: int
    key: str | None = None
    again: int = 0
    raises: bool = True
    """Whether its error, in the end, is the lane's."""

    def __str__(self) -> str:
        said = f"{self.kind}({self.amount}{f', key={self.key}' if self.key else ''})"
        return said + (f" x{self.again + 1}" if self.again else "") + ("" if self.raises else " caught")


@dataclass(frozen=True, kw_only=True)
class Savepoint:
    """Calls that are undone together if `fails`, or if one of them raises."""

    calls: tuple[Call, ...]
    fails: bool = False

    def __str__(self) -> str:
        return f"savepoint[{', '.join(map(str, self.calls))}]{' fails' if self.fails else ''}"


Lane = tuple[Call | Savepoint, ...]


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """Another process: a recoverer, or one that opens the saga again with `body`: the same, fewer or more calls."""

    role: str = "recover"
    body: str = "same"
    asked: bool = False
    poor: bool = False

    def __str__(self) -> str:
        if self.role == "recover":
            return f"recover{' asked' if self.asked else ''}{' with a handler missing' if self.poor else ''}"
        return f"open again, {self.body} calls"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. Everything else is decided by the schedule."""

    lanes: tuple[Lane, ...]
    visitors: tuple[Visitor, ...] = ()
    is_async: bool = False
    durability: str = "strict"
    on_failure: str = "settle"
    resume: str = "replay"
    drain: float = 30.0
    raises: bool = False
    suspends: bool = False
    heeds: bool = True
    """Whether a body whose call was paused suspends the saga; else it ends as if nothing were."""
    orphan_after: float = 0.0
    skew: float = 0.0
    kills: int = 0
    faults: dict[str, float] = field(default_factory=dict[str, float])
    """Weights of what may go wrong; what is not named does not happen."""

    def lines(self) -> Iterator[str]:
        """The plan for people."""
        for number, lane in enumerate(self.lanes):
            yield f"lane {number}: " + "; ".join(map(str, lane))
        plain = Plan(lanes=())
        names = (
            "is_async",
            "durability",
            "on_failure",
            "resume",
            "drain",
            "raises",
            "suspends",
            "heeds",
            "orphan_after",
        )
        for name in names:
            if getattr(self, name) != getattr(plain, name):
                yield f"{name} = {getattr(self, name)!r}"


FAULTS = {
    "cut": 1.0,  # a call is given up
    "wrong": 1.0,  # an error for an answer
    "slow": 1.0,  # requests are long on their way
    "lose": 0.4,  # a request is lost on its way
    "undo": 1.0,  # the same for compensations
    "blind": 0.5,  # a probe cannot see, a gate says no
    "kill": 0.5,
    "power": 0.3,  # every process dies, and what was not synced is gone
    "flush": 0.6,  # death between a write and its sync
    "interrupt": 0.7,
    "disk": 0.15,
    "early": 0.4,  # the body ends while calls are in the air
    "abort": 0.15,
    "cancel": 0.5,
    "sleep": 0.1,  # a long time passes
    "compact": 0.2,
    "hasty": 1.0,  # time passes although something could happen now
    "fork": 0.03,
    "crowd": 0.2,  # others come by although the saga is owned
}
PAUSE = 0.6
"""The weight of a framework that interrupts a call, before or after it acted."""


def drawn(chance: random.Random) -> Plan:
    """A plan of chance."""
    kinds = KINDS if chance.random() < 0.3 else chance.sample(KINDS[:-3] + ("pay, looked", "book"), 3)
    amounts = iter(range(1, 100))

    def call() -> Call:
        kind, amount = chance.choice(kinds), next(amounts)
        keyed = chance.random() < 0.3
        return Call(
            kind=kind,
            amount=amount,
            key=f"k{amount}" if keyed else None,
            again=chance.choice((0, 0, 1, 1, 2)),
            raises=chance.random() < 0.5,
        )

    lanes: list[Lane] = []
    for _ in range(chance.choice((1, 1, 2, 2, 3))):
        lane: list[Call | Savepoint] = []
        for _ in range(chance.choice((1, 1, 2, 3))):
            made = call()
            lane.append(made)
            if made.key is None and chance.random() < 0.15:
                lane.append(made)  # two intended equal calls
        if not lanes and chance.random() < 0.2:
            lane.insert(
                chance.randrange(len(lane) + 1),
                Savepoint(
                    calls=tuple(call() for _ in range(chance.choice((1, 2)))),
                    fails=chance.random() < 0.6,
                ),
            )
        lanes.append(tuple(lane))
    skew = chance.choice((0.0, 0.0, 0.0, 7200.0))
    faults = {
        name: weight * chance.choice((0.3, 1.0, 3.0))
        for name, weight in FAULTS.items()
        if chance.random() < 0.55 and not (name == "sleep" and skew)
    }
    visitors = tuple(
        Visitor(asked=chance.random() < 0.5, poor=chance.random() < 0.15)
        if chance.random() < 0.5
        else Visitor(role="open", body=chance.choice(("same", "same", "fewer", "more")))
        for _ in range(chance.choice((0, 1, 2, 3, 4)))
    )
    plan = Plan(
        lanes=tuple(lanes),
        visitors=visitors,
        is_async=chance.random() < 0.5,
        durability="relaxed" if chance.random() < 0.25 else "strict",
        on_failure="abort" if chance.random() < 0.15 else "settle",
        resume="continue" if chance.random() < 0.15 else "replay",
        drain=chance.choice((2.0, 30.0, 30.0, 100.0)),
        raises=chance.random() < 0.3,
        suspends=chance.random() < 0.1,
        orphan_after=chance.choice((0.0, 0.0, 0.0, 60.0)),
        skew=skew,
        kills=chance.choice((0, 1, 1, 2, 3, 6)),
        faults=faults,
    )
    if chance.random() < 0.4:
        plan.faults["pause"] = PAUSE * chance.choice((0.3, 1.0, 3.0))
        plan = replace(plan, heeds=chance.random() < 0.8)
    return plan


def focused(plan: Plan, focus: Mapping[str, Any]) -> Plan:
    """The plan, bent towards one kind of trouble: any of its fields; `faults` are added, `kinds` replace the tools."""
    more = dict(focus)
    kinds: tuple[str, ...] = more.pop("kinds", ())
    if kinds:

        def other(call: Call) -> Call:
            return replace(call, kind=kinds[call.amount % len(kinds)])

        def op(it: Call | Savepoint) -> Call | Savepoint:
            return other(it) if isinstance(it, Call) else replace(it, calls=tuple(map(other, it.calls)))

        plan = replace(plan, lanes=tuple(tuple(map(op, lane)) for lane in plan.lanes))
    more["faults"] = {**plan.faults, **more.get("faults", {})}
    return replace(plan, **more)


def simpler(plan: Plan) -> Iterator[Plan]:
    """Plans with one thing less, the greatest first."""
    for number in range(len(plan.lanes)):
        if len(plan.lanes) > 1:
            yield replace(plan, lanes=plan.lanes[:number] + plan.lanes[number + 1 :])
    for number, lane in enumerate(plan.lanes):
        for at, op in enumerate(lane):
            less = [lane[:at] + lane[at + 1 :]] if len(lane) > 1 else []
            if isinstance(op, Savepoint):
                less.append(lane[:at] + op.calls + lane[at + 1 :])
            elif op.again:
                less.append((*lane[:at], replace(op, again=op.again - 1), *lane[at + 1 :]))
            for shorter in less:
                yield replace(plan, lanes=(*plan.lanes[:number], shorter, *plan.lanes[number + 1 :]))
    for number in range(len(plan.visitors)):
        yield replace(plan, visitors=plan.visitors[:number] + plan.visitors[number + 1 :])
    plain = Plan(lanes=())
    for name in ("durability", "on_failure", "resume", "drain", "raises", "suspends", "heeds", "orphan_after", "skew"):
        if getattr(plan, name) != getattr(plain, name):
            yield replace(plan, **{name: getattr(plain, name)})
