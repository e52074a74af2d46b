"""`prove_rollback`: run a scenario once for every way in which it can fail, and compare the world, not the report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from agent_saga_core.state import SagaStatus
from agent_saga_core.testing.blame import blame
from agent_saga_core.testing.inject import Label, Plan, Way
from agent_saga_core.testing.proof import Probe, Proof, Verdict, difference
from agent_saga_core.testing.running import KILLS, Do, Flow, Kit, Ran, adrive_flow, drive_flow, run

__all__ = ["aprove_rollback", "prove_rollback"]


def prove_rollback(
    scenario: Callable[[], Any],
    *,
    snapshot: Callable[[], Any],
    reset: Callable[[], Any],
    ways: Iterable[Way] | None = None,
    only: str | Iterable[str] | None = None,
    allow: Iterable[str] = (),
) -> Proof:
    """Prove that a scenario leaves nothing behind, wherever and however it fails.

    The scenario is run once as it is, which finds its steps, and then once per probe: one step made to fail in one
    way (`WAYS`), with the steps that run at the same time held in flight or ended. After each run, and after `recover`
    where something was left to it, the world must equal the snapshot taken before. A clean report does not count.

    Every scope that the scenario opens gets a log of the kit's own, whatever its `log=`, and a clock on which waiting
    for `in_doubt` takes no time. Probes that kill run in a forked child, on a file log in a temporary directory; where
    the world lives in this process's memory, which a killed child would take along, the death is simulated instead and
    the proof says so.

    Does not prove: failures of compensations, of the world itself, or of two steps at once; what `snapshot` does not
    see; steps that the scenario makes only on other paths; what happens in real time.

    Args:
        scenario: Opens its own sagas and calls tools in them; sync or async, the same steps each time. It must commit
            when nothing fails. What it raises in a probe is of no account. In a killed child it must not use what may
            not cross a fork, such as an open SQLite connection: let it open its own.
        snapshot: The state of the world, as something that can be compared with `==`. Copied at once.
        reset: Puts the world back; called before each run and at the end.
        ways: Some of `WAYS`. Default: all.
        only: Ids of probes to make, or patterns for them: `"charge/after"`, `"charge/*"`.
        allow: Tools whose effects may be left behind, if the report says so: those that are IRREVERSIBLE, say.

    Returns:
        The `Proof`: `proven`, `probes`, and a table as its `str()`.

    Raises:
        ValueError: The scenario makes no step, or does not commit when nothing fails; or no probe has such an id.
        RuntimeError: It is async, and this thread runs an event loop: use `aprove_rollback`.
    """
    return drive_flow(_proving(Kit(scenario, snapshot, reset, ways, only, allow)))


async def aprove_rollback(
    scenario: Callable[[], Any],
    *,
    snapshot: Callable[[], Any],
    reset: Callable[[], Any],
    ways: Iterable[Way] | None = None,
    only: str | Iterable[str] | None = None,
    allow: Iterable[str] = (),
) -> Proof:
    """Like `prove_rollback`, with scenario, snapshot and reset, each sync or async, on the running loop.

    A synchronous scenario runs in a thread. In a killed child the scenario runs on a loop of its own: it must not need
    objects that belong to this one.
    """
    return await adrive_flow(_proving(Kit(scenario, snapshot, reset, ways, only, allow)))


# --- the proof


def _proving(kit: Kit) -> Flow[Proof]:
    try:
        return (yield from _prove(kit))
    finally:
        yield Do(kit.reset)


def _prove(kit: Kit) -> Flow[Proof]:
    clean = yield from run(kit, Plan())
    _check_clean(clean)
    flaws: list[str] = []
    if clean.before == clean.after:
        flaws.append(
            "snapshot() is the same before and after the scenario, so nothing can be proved with it. "
            "Let it return what the scenario changes."
        )
    names = _names(clean.injector.order)
    plans = [
        (_id(names[plan.step], plan), plan)
        for plan in _plans(clean, kit.ways)
        if plan.step is not None
    ]  # fmt: skip
    if kit.only is not None:
        chosen = [(id_, plan) for id_, plan in plans if any(fnmatchcase(id_, pattern) for pattern in kit.only)]
        if not chosen:
            raise ValueError(
                f"no probe is called {' or '.join(kit.only)}. There are: {', '.join(id_ for id_, _ in plans)}."
            )
        plans = chosen
    notes: list[str] = []
    simulate = False
    if any(plan.way in KILLS for _, plan in plans):
        why = yield from _why_not_kill(kit, clean)
        simulate = why is not None
        if why is not None:
            notes.append(f"SIGKILL is simulated, by the death of the log: {why}")
    probes: list[Probe] = []
    for id_, plan in plans:
        assert plan.step is not None
        planned = replace(plan, simulate_death=simulate)
        probes.append((yield from _probe(kit, id_, names[plan.step], planned)))
    steps = tuple(dict.fromkeys(names[label] for label in clean.injector.order))
    return Proof(probes=tuple(probes), steps=steps, notes=tuple(notes), flaws=tuple(flaws))


def _check_clean(clean: Ran) -> None:
    if clean.error is not None:
        clean.error.add_note("prove_rollback: the scenario raised this although no failure was injected")
        raise clean.error
    if not clean.injector.order:
        raise ValueError(
            "The scenario made no step, so there is nothing to prove. Let it call tools in `with saga_scope():`."
        )
    for state in clean.states.values():
        if state.status is not SagaStatus.COMMITTED:
            raise ValueError(
                f"The scenario left saga {state.saga_id!r} {state.status} although no failure was injected. "
                "Let it commit when nothing fails."
            )


def _names(order: list[Label]) -> dict[Label, str]:
    sagas = {label.saga for label in order}
    often = {(label.saga, label.tool) for label in order if label.occurrence > 1}
    names: dict[Label, str] = {}
    for label in order:
        saga = f"{label.saga}:" if len(sagas) > 1 else ""
        count = f"#{label.occurrence}" if (label.saga, label.tool) in often else ""
        names[label] = f"{saga}{label.tool}{count}"
    return names


def _id(name: str, plan: Plan) -> str:
    return "/".join(part for part in (name, plan.way, f"others-{plan.beside}" if plan.beside else "") if part)


def _plans(clean: Ran, ways: tuple[Way, ...]) -> Iterator[Plan]:
    several = len({label.saga for label in clean.injector.order}) > 1
    for label in clean.injector.order:
        partners = frozenset(clean.injector.partners.get(label, ()))
        places: tuple[Literal["", "held", "done"], ...] = ("", "held", "done") if partners else ("",)
        for way in ways:
            for beside in places:
                yield Plan(step=label, way=way, partners=partners, beside=beside, own_before=several)


def _why_not_kill(kit: Kit, clean: Ran) -> Flow[str | None]:
    """Why the scenario cannot be run in a child process; None if it can, and the world shows it here."""
    if not hasattr(os, "fork"):
        return "this system has no fork"
    if clean.before == clean.after:
        return "no change of the world can be seen"
    ran = yield from run(kit, Plan(), child=True)
    if ran.said:
        return f"the scenario does not run in a forked process: {ran.said}"
    if ran.before == ran.after:
        return "the world lives in the memory of this process, and a killed child would take its copy along"
    return None


def _probe(kit: Kit, id_: str, name: str, plan: Plan) -> Flow[Probe]:
    ran = yield from run(kit, plan, child=plan.way in KILLS and not plan.simulate_death)
    verdict, detail, remaining = _judge(kit, ran)
    if verdict is None:  # the scenario went on and committed: what it undoes is seen if it may not
        plan = replace(plan, also_abort=True)
        ran = yield from run(kit, plan, child=plan.way in KILLS and not plan.simulate_death)
        verdict, detail, remaining = _judge(kit, ran)
        if verdict is None:
            verdict, detail = "broken", "the saga committed although it was aborted"
    culprits: tuple[str, ...] = ()
    if verdict == "lied" or (verdict == "allowed" and ran.before != ran.after):
        again = yield from run(kit, replace(plan, watch=True, simulate_death=True))
        state = again.states.get(again.struck or "")
        culprits = blame(plan, again.injector.seen, state)
        if verdict == "allowed":
            culprits = tuple(culprit for culprit in culprits if "changed nothing" in culprit)
            verdict = "lied" if culprits else "allowed"
    return Probe(
        id=id_,
        step=name,
        way=plan.way,
        beside=plan.beside,
        verdict=verdict,
        detail=detail,
        remaining=remaining,
        culprits=culprits,
    )


def _judge(kit: Kit, ran: Ran) -> tuple[Verdict | None, str, tuple[str, ...]]:
    """The verdict, a word about it, and the tools left behind; no verdict if the struck saga committed."""
    if ran.struck is None or ran.injector.missed:
        return "missed", ran.injector.missed or ran.said or "the step was not called in this run", ()
    state = ran.states.get(ran.struck)
    if state is None or state.status is SagaStatus.COMMITTED:
        return (None, "", ()) if state is not None else ("proved" if ran.before == ran.after else "lied", "", ())
    before = ran.injector.before[0] if ran.injector.before else ran.before
    report = state.report
    if state.status is SagaStatus.ROLLED_BACK and report is not None and report.clean:
        return ("proved", "", ()) if before == ran.after else ("lied", difference(before, ran.after), ())
    why = ran.reasons.get(ran.struck, "")
    if report is None:
        return "broken", f"saga {state.status}: {why or repr(ran.error)}", ()
    remaining = tuple(dict.fromkeys(step.tool for step in report.remaining))
    if remaining and kit.allow.issuperset(remaining):
        return "allowed", str(report), remaining
    return "reported", str(report), remaining
