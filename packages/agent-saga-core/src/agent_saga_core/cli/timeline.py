"""`show`, drawn: the steps, everything that happened, the verdict, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from agent_saga_core.cli.advice import next_steps
from agent_saga_core.cli.screen import (
    SAGA_STYLES,
    counted,
    fitted,
    ink,
    mark,
    moment,
    step_mark,
    table,
)
from agent_saga_core.records import RecordType
from agent_saga_core.state import SagaState, StepState, StepStatus

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
_ENDS = (RecordType.COMMITTED, RecordType.ROLLED_BACK, RecordType.NEEDS_ATTENTION)


def draw(console: Console, state: SagaState, *, live: bool, log: str | None) -> Iterator[RenderableType]:
    """The pieces of the picture, top to bottom. No argument or result of a tool is among them."""
    yield from _head(state, live)
    if state.steps:
        yield ink("")
        yield _steps(console, state)
    if state.timeline:
        yield ink("")
        yield _records(console, state)
    yield from _verdict(console, state)
    advice = next_steps(state, live=live, log=log)
    if advice:
        yield ink("")
        yield ink("next", "bold")
        for said, commands in advice:
            yield _indented(said)
            for command in commands:
                yield _indented(f"  {command}", "bold")


def _head(state: SagaState, live: bool) -> Iterator[RenderableType]:
    title = ink(state.saga_id, "bold").append_text(ink(f"  {state.name}  "))
    title.append_text(ink(state.status, SAGA_STYLES[state.status]))
    yield title.append_text(ink("  live" if live else "", "green"))
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


def _steps(console: Console, state: SagaState) -> RenderableType:
    made = table(("", False), ("step", False), ("semantics", False), ("status", False), ("attempts and keys", True))
    for step in state.steps:
        named = ink(f"{step.number} {step.tool}", "bold")
        if step.scope:
            named.append_text(ink(f" in {step.scope}", "dim"))
        made.add_row(
            step_mark(console, step.status), named, ink(step.semantics, "dim"), ink(step.status), _attempts(step)
        )
    return fitted(console, made)


def _attempts(step: StepState) -> Text:
    """A line or more for each attempt: how it ended, why, and under which keys."""
    lines: list[Text] = []
    for attempt in step.history:
        if len(step.history) > 1:
            lines.append(ink(f"attempt {attempt.number} {attempt.status}"))
        if attempt.detail:
            lines.append(ink(attempt.detail, "yellow"))
        if attempt.compensations > 1:
            lines.append(ink(f"compensation started {attempt.compensations} times"))
        lines.append(ink(f"key  {attempt.forward_key}", "dim"))
        if attempt.compensations and attempt.compensation_key:
            lines.append(ink(f"undo {attempt.compensation_key}", "dim"))
    return ink("\n").join(lines) if not lines else _joined(lines)


def _joined(lines: list[Text]) -> Text:
    from rich.text import Text

    return Text("\n").join(lines)


def _records(console: Console, state: SagaState) -> RenderableType:
    made = table(("#", False), ("time", False), ("", False), ("record", False), ("step", False), ("", True))
    made.columns[0].justify = "right"
    tools = {step.number: step.tool for step in state.steps}
    day = ""
    for entry in state.timeline:
        at = datetime.fromisoformat(entry["time"])
        shown = f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}"
        if f"{at:%Y-%m-%d}" != day:
            day = f"{at:%Y-%m-%d}"
            shown = f"{day} {shown}"
        number = entry.get("step")
        made.add_row(
            ink(entry["n"], "dim"),
            ink(shown.rjust(23), "dim"),
            _line_mark(console, entry),
            ink(entry["type"], _style(entry)),
            ink(f"{number} {tools.get(number, '')}" if number is not None else ""),
            ink(_said(entry)),
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


def _indented(text: str, style: str = "") -> RenderableType:
    from rich.padding import Padding

    return Padding(ink(text, style), (0, 0, 0, 2), expand=False)
