"""What `prove_rollback` comes to: the probes, and a table of them for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from agent_saga_core.testing.inject import WAYS, Way

__all__ = ["Probe", "Proof", "Verdict", "difference"]

Verdict = Literal["proved", "allowed", "reported", "lied", "missed", "broken"]
_MEANS: Final[dict[Verdict, str]] = {
    "proved": "the report is clean, and the world is what it was",
    "allowed": "left behind and reported: by a tool in allow=",
    "reported": "left behind, or not known, and reported: a person would have to look",
    "lied": "the world is NOT what it was, and no report says so",
    "missed": "the step was not reached as in the first run",
    "broken": "the saga did not end",
}
_NAMED = 8
"""Probes of one kind that are named."""
_LONGEST = 160
"""Characters of a value in a difference."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One run of the scenario with one failure.

    Attributes:
        id: What `only=` takes to make this probe again: `"charge/after"`.
        step: The step that failed: the tool's name, with a number if it is called more than once.
        way: How it failed.
        beside: `"held"`: the steps that run at the same time had had their effect and not yet returned; `"done"`:
            they had ended; empty: wherever they were.
        verdict: `"proved"`, `"allowed"`, `"reported"`, `"lied"`, `"missed"` or `"broken"`.
        detail: What is wrong, for people.
        remaining: The tools that the report names as left behind.
        culprits: Where the report was clean and the world was not: who is to blame, as far as can be told.
    """

    id: str
    step: str
    way: Way
    beside: Literal["", "held", "done"] = ""
    verdict: Verdict
    detail: str = ""
    remaining: tuple[str, ...] = ()
    culprits: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether it speaks for the scenario."""
        return self.verdict in ("proved", "allowed")


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What became of the world, failure by failure. `str()` of it is a table for people.

    Attributes:
        probes: Every run that was made to fail.
        steps: The scenario's steps in the order of its first run.
        notes: What to know about the whole: how a SIGKILL was made, for instance.
        flaws: What makes all of it worthless, such as a snapshot that does not see what the scenario does.
    """

    probes: tuple[Probe, ...]
    steps: tuple[str, ...]
    notes: tuple[str, ...] = ()
    flaws: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether every probe left the world as it was, or left what `allow=` permits and said so."""
        return bool(self.probes) and not self.flaws and all(probe.good for probe in self.probes)

    def __str__(self) -> str:
        counts = Counter(probe.verdict for probe in self.probes)
        ways = len({probe.way for probe in self.probes})
        said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _MEANS if counts[verdict])
        head = (
            f"rollback {'proven' if self.proven else 'NOT proven'}: {len(self.probes)} probes "
            f"({_many(len({probe.step for probe in self.probes}), 'step')}, {_many(ways, 'way')} to fail): {said}"
        )
        lines = [head, *(f"  !  {flaw}" for flaw in self.flaws), *(f"  -  {note}" for note in self.notes)]
        lines += ["", *self._table()]
        for group in self._groups():
            lines += ["", *_told(group)]
        return "\n".join(lines)

    def _groups(self) -> list[list[Probe]]:
        """Probes that say the same, worst first."""
        groups: dict[tuple[str, tuple[str, ...]], list[Probe]] = {}
        for probe in self.probes:
            if not probe.good:
                groups.setdefault((probe.verdict, probe.culprits or probe.remaining), []).append(probe)
        worst = list(_MEANS)[::-1]
        return sorted(groups.values(), key=lambda group: (group[0].verdict != "lied", worst.index(group[0].verdict)))

    def _table(self) -> list[str]:
        """One row per way to fail, one column per step; `n` probes of a kind are told as `n verdict`."""
        steps = [step for step in self.steps if any(probe.step == step for probe in self.probes)]
        rows = [["", *steps]]
        for way in WAYS:
            cells = [self._cell([p for p in self.probes if p.step == step and p.way == way]) for step in steps]
            if any(cells):
                rows.append([way, *cells])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

    @staticmethod
    def _cell(probes: Sequence[Probe]) -> str:
        counts = Counter(probe.verdict for probe in probes)
        return " ".join(f"{n} {verdict}" if len(probes) > 1 else verdict for verdict, n in counts.items())


def _told(group: list[Probe]) -> list[str]:
    first = group[0]
    lines = [f"{first.verdict}: {_MEANS[first.verdict]}"]
    lines += [f"  {culprit}" for culprit in first.culprits]
    lines += [f"  in {_many(len(group), 'probe')}: {_ids(group)}"]
    lines += [f"  as in {first.id} ({WAYS[first.way]}):"]
    lines += [f"    {line}" for line in first.detail.splitlines()]
    return [*lines, f'  again: prove_rollback(..., only="{first.id}")']


def _ids(group: list[Probe]) -> str:
    ids = [probe.id for probe in group]
    return ", ".join(ids if len(ids) <= _NAMED else [*ids[:_NAMED], f"and {len(ids) - _NAMED} more"])


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def difference(before: object, after: object) -> str:
    """Where two states of the world differ, in a few lines."""
    return "\n".join(_differences(before, after, "world"))


def _differences(before: object, after: object, where: str) -> list[str]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        one, other = dict(cast("Mapping[Any, Any]", before)), dict(cast("Mapping[Any, Any]", after))
        lines: list[str] = []
        for key in [*one, *(key for key in other if key not in one)]:
            place = f"{where}[{key!r}]"
            if key not in other:
                lines.append(f"{place}: {_short(one[key])} is gone")
            elif key not in one:
                lines.append(f"{place}: {_short(other[key])} is left")
            elif one[key] != other[key]:
                lines += _differences(one[key], other[key], place)
        if lines:
            return lines
    return [f"{where}: {_short(cast(object, before))} became {_short(cast(object, after))}"]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
