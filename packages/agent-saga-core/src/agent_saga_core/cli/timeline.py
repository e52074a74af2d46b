"""`show`, drawn: the steps, everything that happened, the verdict, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from agent_saga_core.cli.advice import next_steps
from agent_saga_core.cli.leases import Owner
from agent_saga_core.cli.screen import (
    SAGA_STYLES,
    counted,
    fitted,
    ink,
    mark,
    moment,
    step_mark,
    step_style,
    table,
)
from agent_saga_core.records import RecordType
from agent_saga_core.state import SagaState, StepStatus

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

__all__ = ["draw"]

_RESOLUTIONS = {
    "landed": StepStatus.DONE,
    "not-applied": StepStatus.NOT_APPLIED,
    "compensated": StepStatus.COMPENSATED,
}
_OF_STEPS = {
    RecordType.INTENT: StepStatus.INTENDED,
    RecordType.DONE: StepStatus.DONE,
    RecordType.NOT_APPLIED: StepStatus.NOT_APPLIED,
    RecordType.UNKNOWN: StepStatus.UNKNOWN,
    RecordType.PAUSED: StepStatus.PAUSED,
    RecordType.COMPENSATING: StepStatus.COMPENSATING,
    RecordType.COMPENSATED: StepStatus.COMPENSATED,
    RecordType.COMPENSATION_FAILED: StepStatus.COMPENSATION_FAILED,
}
_ENDS = (RecordType.COMMITTED, RecordType.ROLLED_BACK, RecordType.NEEDS_ATTENTION, RecordType.MOVED)


def draw(console: Console, state: SagaState, *, owner: Owner | None, log: str | None) -> Iterator[RenderableType]:
    """The pieces of the picture, top to bottom. No argument or result of a tool is among them."""
    yield from _head(state, owner)
    if state.steps:
        yield ink("")
        yield from _steps(console, state)
    if state.timeline:
        yield ink("")
        yield _records(console, state)
    yield from _verdict(console, state)
    advice = next_steps(state, owner=owner, log=log)
    if advice:
        yield ink("")
        yield ink("next", "bold")
        for said, commands in advice:
            yield _indented(said)
            for command in commands:
                yield _indented(f"  {command}", "bold")


def _head(state: SagaState, owner: Owner | None) -> Iterator[RenderableType]:
    title = ink(state.saga_id, "bold").append_text(ink(f"  {state.name}  "))
    title.append_text(ink(state.status, SAGA_STYLES[state.status]))
    yield title.append_text(ink("" if owner is None else f"  {owner.word}", "green"))
    facts = [counted(len(state.steps), "step"), counted(len(state.timeline), "record")]
    if state.started is not None:
        facts.insert(0, f"started {moment(state.started)}")
    yield ink(", ".join(facts), "dim")
    if state.rollback_only is not None:
        yield ink(f"cannot commit: {state.rollback_only}")
    if state.deadline is not None:
        yield ink(f"waits for a person until {moment(state.deadline)}")
    for name, value in state.metadata.items():
        if isinstance(value, str | int | float):
            yield ink(f"{name}: {value}", "dim")


def _steps(console: Console, state: SagaState) -> Iterator[RenderableType]:
    """A line per step, and beneath it how each attempt ended, why, and under which keys."""
    named = {step.number: " in ".join(filter(None, (f"{step.number} {step.tool}", step.scope))) for step in state.steps}
    widest = min(max(map(len, named.values())), 40)
    for step in state.steps:
        line = (
            ink("")
            .append_text(step_mark(console, step.status))
            .append_text(ink(f" {named[step.number]:<{widest}}", "bold"))
        )
        line.append_text(ink(f"  {step.semantics:<12}", "dim"))
        yield line.append_text(ink(f"  {step.status}", step_style(step.status)))
        for attempt in step.history:
            if len(step.history) > 1:
                yield _indented(f"attempt {attempt.number}: {attempt.status}", by=4)
            if attempt.detail:
                yield _indented(attempt.detail, "yellow", by=4)
            if attempt.compensations > 1:
                yield _indented(f"its compensation was started {attempt.compensations} times", by=4)
            yield _indented(f"key  {attempt.forward_key}", "dim", by=4)
            if attempt.compensations and attempt.compensation_key:
                yield _indented(f"undo {attempt.compensation_key}", "dim", by=4)


def _records(console: Console, state: SagaState) -> RenderableType:
    made = table(("", False), ("", False), ("", False), ("", False), ("", True), header=False)
    made.columns[0].justify = "right"
    tools = {step.number: step.tool for step in state.steps}
    day = ""
    for entry in state.timeline:
        at = datetime.fromisoformat(entry["time"])
        if f"{at:%Y-%m-%d}" != day:
            day = f"{at:%Y-%m-%d}"
            made.add_row("", ink(day, "dim"))
        number = entry.get("step")
        told = ink("" if number is None else f"{number} {tools.get(number, '')}")
        said = _said(entry)
        made.add_row(
            ink(entry["n"], "dim"),
            ink(f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}", "dim"),
            _line_mark(console, entry),
            ink(entry["type"], _style(entry)),
            told.append_text(ink(f"  {said}" if told and said else said, "dim" if told else "")),
        )
    return fitted(console, made)


def _line_mark(console: Console, entry: Mapping[str, Any]) -> Text:
    """The piece of the line that runs down the picture."""
    kind = entry["type"]
    if kind == RecordType.START:
        return ink(mark(console, "●"))
    if kind in _ENDS:
        return ink(mark(console, "■"), _style(entry))
    line = ink(mark(console, "├" if kind in (RecordType.CLAIM, RecordType.RESOLVED) else "│"))
    status = _RESOLUTIONS.get(entry.get("outcome", "")) if kind == RecordType.RESOLVED else _OF_STEPS.get(kind)
    return line.append_text(ink(" ")).append_text(step_mark(console, status)) if status is not None else line


def _style(entry: Mapping[str, Any]) -> str:
    return SAGA_STYLES.get(entry["type"], "bold" if entry["type"] in (RecordType.CLAIM, RecordType.RESOLVED) else "")


def _said(entry: Mapping[str, Any]) -> str:
    """What a record adds, in words."""
    match entry["type"]:
        case RecordType.CLAIM:
            return f"a new owner took over (epoch {entry['n']})"
        case RecordType.MOVING | RecordType.MOVED:
            return f"to {entry.get('to')}"
        case RecordType.RESOLVED:
            return f"{entry.get('outcome')}, says {entry.get('by')}: {entry.get('note')}"
        case RecordType.COMPENSATING:
            return " ".join(filter(None, (entry.get("handler"), f"try {entry['try']}" if "try" in entry else "")))
        case RecordType.COMPENSATED if "by" in entry:
            return f"known by {entry['by']}"
        case RecordType.INTENT if entry.get("attempt", 1) > 1:
            return f"attempt {entry['attempt']}"
        case _:
            return str(entry.get("error") or entry.get("reason") or "")


def _verdict(console: Console, state: SagaState) -> Iterator[RenderableType]:
    report = state.report
    if report is None:
        return
    yield ink("")
    if report.clean:
        yield ink(f"{report.status}, clean: nothing remains", SAGA_STYLES[report.status])
        return
    yield ink(f"{report.status}; {counted(len(report.remaining), 'step')} remaining", SAGA_STYLES[report.status])
    for step in report.remaining:
        yield _indented(str(step))


def _indented(text: str, style: str = "", *, by: int = 2) -> RenderableType:
    from rich.padding import Padding

    return Padding(ink(text, style), (0, 0, 0, by), expand=False)
