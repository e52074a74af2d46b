"""Who is to blame when a report is clean and the world is not."""

from __future__ import annotations

from agent_saga_core.state import SagaState, StepStatus
from agent_saga_core.testing.inject import Plan, Seen

__all__ = ["blame"]

_LANDED = ("after", "timeout-landed", "timeout-late", "cancelled-after", "killed-after")


def blame(plan: Plan, seen: list[Seen], state: SagaState | None) -> tuple[str, ...]:
    """Say on whose word the clean report wrongly rests, from a run in which the world was looked at around calls."""
    steps = {step.number: step for step in state.steps} if state is not None else {}
    effects = {look.number: look for look in seen if look.kind == "forward" and look.changed}
    undone = [look for look in seen if look.kind == "compensation" and not look.failed]
    told: list[str] = []
    for number, step in steps.items():
        struck = plan.step is not None and step.tool == plan.step.tool and plan.way in _LANDED
        if step.status is StepStatus.NOT_APPLIED and (number in effects or struck):
            told.append(
                f"{step.tool}: counts as not applied ({step.detail}), and its effect is there. "
                "Look at its not_applied= and its probe."
            )
        if step.semantics == "READ_ONLY" and number in effects:
            told.append(f"{step.tool}: is declared READ_ONLY, and changed the world.")
    for look in undone:
        acted = any(other.kind == "forward" and other.changed for other in _before(seen, look))
        if acted and look.changed is False and not any(other.changed for other in _before(undone, look)):
            told.append(f"{look.tool}: its compensation returned and changed nothing.")
    if not told and plan.way == "timeout-late" and plan.step is not None:
        told.append(
            f"{plan.step.tool}: its effect landed after its compensation, which did not forbid it. "
            'Declare if_absent="noop", or make the compensation leave a tombstone.'
        )
    if not told:
        # In the order of undo, the first after which the world is not what it was before the step.
        partial = next((look for look in undone if look.restored is False), None)
        if partial is not None:
            told.append(f"{partial.tool}: its compensation returned and did not restore what was there before.")
    if not told and all(look.restored for look in undone):
        told.append("Every compensation did its part: something outside of any step changed the world.")
    if not told:
        tools = " or ".join(dict.fromkeys(look.tool for look in undone))
        told.append(f"{tools}: a compensation that returned did not undo what its step did.")
    return tuple(dict.fromkeys(told))


def _before(looks: list[Seen], look: Seen) -> list[Seen]:
    """What was seen of the same step before this."""
    at = next(i for i, other in enumerate(looks) if other is look)
    return [other for other in looks[:at] if other.number == look.number]
