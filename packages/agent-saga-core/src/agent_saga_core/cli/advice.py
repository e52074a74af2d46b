"""What a person should do next about a saga."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import join

from agent_saga_core.cli.credentials import shown, with_credentials
from agent_saga_core.cli.leases import Owner
from agent_saga_core.declare import ActionSemantics
from agent_saga_core.logs import default_url
from agent_saga_core.state import SagaState, SagaStatus, StepState, StepStatus

__all__ = ["next_steps"]


def next_steps(state: SagaState, *, owner: Owner | None, log: str | None = None) -> list[tuple[str, list[str]]]:
    """Pairs of (what to do, the commands that do it); empty if there is nothing to do.

    Args:
        state: The saga.
        owner: What is known of the process that owns it now; None if none does.
        log: The URL to name in commands; None where the default leads there.
    """
    recover = _command("recover", "--saga", state.saga_id, log=log)
    if owner is not None and not owner.todo:
        return [(f"{owner.said}: wait for its end.", [])]
    if owner is not None:
        return [(f"{owner.said}. {owner.todo}", [recover, _command("recover", "--watch", log=log)])]
    match state.status:
        case SagaStatus.RUNNING | SagaStatus.ROLLING_BACK:
            return [("No process owns it: its rollback can be finished from here.", [recover])]
        case SagaStatus.SUSPENDED:
            until = f" It is left alone until {state.deadline:%Y-%m-%d %H:%M:%S} UTC." if state.deadline else ""
            return [(f"It waits for a person; open it again by its id to go on.{until}", [])]
        case SagaStatus.MOVING:
            said = f"It is on its way to {_goal(state)}, or there already: nobody recovers it here. Finish the move."
            source = log or shown(default_url())
            return [(said, [_command("log", "copy", source, _goal(state), "--unfinished", log=None)])]
        case SagaStatus.MOVED:
            return [("It lives in another log.", [join(["agent-saga", "show", state.saga_id, "--log", _goal(state)])])]
        case SagaStatus.NEEDS_ATTENTION:
            return list(_attention(state, recover, log))
        case _:
            return []


def _goal(state: SagaState) -> str:
    return next((str(entry["to"]) for entry in reversed(state.timeline) if "to" in entry), "LOG")


def _attention(state: SagaState, recover: str, log: str | None) -> Iterator[tuple[str, list[str]]]:
    for step in state.report.remaining if state.report is not None else ():
        said, ways, again = _about(step)
        commands = [
            _command("resolve", state.saga_id, str(step.number), "--as", way, "--by", "NAME", "--note", "TEXT", log=log)
            for way in ways
        ]
        yield f"step {step.number} {step.tool}: {said}", [recover, *commands] if again else commands


def _about(step: StepState) -> tuple[str, tuple[str, ...], bool]:
    """What to find out about a step, the outcomes to resolve it with, and whether recovering again may help."""
    irreversible = step.semantics is ActionSemantics.IRREVERSIBLE
    match step.status:
        case StepStatus.DONE if irreversible:
            return "it cannot be undone; make good for it and accept it", ("accepted",), False
        case StepStatus.UNKNOWN | StepStatus.INTENDED if irreversible:
            return "find out whether it happened; if it did, accept it", ("not-applied", "accepted"), False
        case StepStatus.UNKNOWN | StepStatus.INTENDED:
            said = "recover again later, or find out whether it happened and say so"
            return said, ("landed", "not-applied", "compensated"), True
        case StepStatus.COMPENSATION_FAILED | StepStatus.COMPENSATING:
            return "mend what made its compensation fail and try again, or undo it by hand", ("compensated",), True
        case _:
            return "undo it by hand, or accept it", ("compensated", "accepted"), False


def _command(verb: str, *words: str, log: str | None) -> str:
    return with_credentials(join(["agent-saga", verb, *words, *(("--log", log) if log is not None else ())]))
