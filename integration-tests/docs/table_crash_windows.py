"""The table of docs/crash-windows.md: a process killed with SIGKILL in every window of a call, and what comes of it.

Each cell is a saga of one step in a child process, on a file log, against the demo service. The child is killed where
the window says, this process recovers, and the row is read from the log, the report and the service's ledger. The
waits of the recovery pass on a clock that moves by itself.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_saga_core import (
    FileLog,
    Observation,
    RollbackIncomplete,
    SagaNotFound,
    compensator,
    probe,
    read_saga,
    recover,
    saga_scope,
    undo,
)
from agent_saga_core.demo.client import Client, Service
from agent_saga_core.records import Record
from agent_saga_core.testing import ManualClock
from agent_saga_core.wrapping import CallSite, ToolRunner

Json = dict[str, Any]
WEEK = 7 * 86400.0
UNREPORTED = "**unreported**"
WORLD: list[Client] = []
"""The service that the children and the recovery act on."""


def world() -> Client:
    return WORLD[-1]


# -- how things are undone, by name


@compensator("windows.refund")
def refund(charge_id: str, *, idempotency_key: str) -> None:
    at("undo: not called yet")
    world().refund(charge_id, key=idempotency_key)
    at("undo: done")


@compensator("windows.void")
def void(key: str, *, idempotency_key: str) -> None:
    at("undo: not called yet")
    world().cancel_key(key, key=idempotency_key)
    at("undo: done")


@compensator("windows.refund_if_there")
def refund_if_there(key: str, *, idempotency_key: str) -> None:
    at("undo: not called yet")
    found = world().lookup(key)
    if found["landed"]:
        world().refund(found["id"], key=idempotency_key)
    at("undo: done")


@compensator("windows.move_back")
def move_back(customer: str, *, idempotency_key: str) -> None:
    at("undo: not called yet")
    world().transfer("shop", customer, 100, key=idempotency_key)
    at("undo: done")


@compensator("windows.restore")
def restore(customer: str) -> None:
    at("undo: not called yet")
    MEMORY.discard(customer)
    at("undo: done")


@probe("windows.look")
def look(args: Json, idempotency_key: str) -> Observation:
    found = world().lookup(idempotency_key)
    return Observation(landed=found["landed"], result=found["body"], final=found["tombstone"])


# -- the kinds of declaration

MEMORY: set[str] = set()


def charge(customer: str, *, idempotency_key: str) -> Any:
    return world().charge(customer, 100, key=idempotency_key)


def move(customer: str, *, idempotency_key: str) -> Any:
    return world().transfer(customer, "shop", 100, key=idempotency_key)


def mail(customer: str, *, idempotency_key: str) -> Any:
    return world().mail(customer, "hello", key=idempotency_key)


def remember(customer: str, *, idempotency_key: str) -> Any:
    MEMORY.add(customer)


def prices(customer: str, *, idempotency_key: str) -> Any:
    return world().find("charges", key=idempotency_key)


BY_RESULT = undo("windows.refund", charge_id="result.id")
KINDS: dict[str, tuple[Callable[..., Any], Json]] = {
    "READ_ONLY": (prices, {"semantics": "READ_ONLY"}),
    "REVERSIBLE": (
        remember,
        {"semantics": "REVERSIBLE", "compensate": undo("windows.restore", customer="args.customer")},
    ),
    "by result": (charge, {"semantics": "COMPENSABLE", "compensate": BY_RESULT}),
    "unsafe": (move, {"semantics": "COMPENSABLE", "compensate": undo("windows.move_back", customer="args.customer")}),
    "with probe": (charge, {"semantics": "COMPENSABLE", "compensate": BY_RESULT, "probe": "windows.look"}),
    "noop": (
        charge,
        {
            "semantics": "COMPENSABLE",
            "compensate": undo("windows.refund_if_there", if_absent="noop", key="step.forward_key"),
        },
    ),
    "forbids": (
        charge,
        {"semantics": "COMPENSABLE", "compensate": undo("windows.void", if_absent="forbids", key="step.forward_key")},
    ),
    "IRREVERSIBLE": (mail, {"semantics": "IRREVERSIBLE"}),
}
"""By the short names that the page explains: the tool function and its declaration."""


# -- the windows


@dataclass(frozen=True, kw_only=True)
class Window:
    """A place in the life of a call at which the process dies.

    Attributes:
        title: What the page calls it.
        dies: The point at which the child kills itself; empty: it is killed when the service holds its request.
        body: How the saga would go on: `returns`, `raises`, `pauses` (then it suspends the saga), `resumes` (it is
            opened again after that, and the call is made again).
        held: Its request is held by the service on this side of its effect.
        lands: When a held request goes on: while the recovery waits, or after its verdict.
        promises: Of docs/design.md.
    """

    title: str
    dies: str = ""
    body: str = "returns"
    held: str = ""
    lands: str = ""
    promises: tuple[str, ...]


WINDOWS = (
    Window(title="Before INTENT is durable", dies="before flush of INTENT", promises=("intent-first",)),
    Window(
        title="INTENT is durable, nothing is sent",
        dies="call: not sent yet",
        promises=("in-flight-is-unknown", "no-false-clean"),
    ),
    Window(
        title="Sent, and lands while recovery waits, or after it if it does not wait",
        held="before",
        lands="meanwhile",
        promises=("in-flight-is-unknown", "no-false-clean"),
    ),
    Window(
        title="Sent, and lands after recovery's verdict",
        held="before",
        lands="afterwards",
        promises=("in-flight-is-unknown",),
    ),
    Window(
        title="Landed, no answer heard",
        held="after",
        lands="afterwards",
        promises=("in-flight-is-unknown", "no-false-clean"),
    ),
    Window(
        title="Answered, DONE is not durable",
        dies="before flush of DONE",
        promises=("in-flight-is-unknown", "no-false-clean"),
    ),
    Window(title="DONE is durable", dies="body: called", promises=("recover-anywhere", "no-false-clean")),
    Window(
        title="Paused, PAUSED is not durable",
        dies="before flush of PAUSED",
        body="pauses",
        promises=("in-flight-is-unknown", "no-false-clean"),
    ),
    Window(
        title="Paused, SUSPENDED is not durable",
        dies="before flush of SUSPENDED",
        body="pauses",
        promises=("in-flight-is-unknown", "no-false-clean"),
    ),
    Window(
        title="Suspended, until the deadline", dies="body: suspended", body="pauses", promises=("recover-anywhere",)
    ),
    Window(
        title="Suspended, after the deadline",
        dies="body: suspended",
        body="pauses",
        lands="after the deadline",
        promises=("no-false-clean",),
    ),
    Window(
        title="Opened again, INTENT is durable again, nothing is sent",
        dies="call: not sent yet",
        body="resumes",
        promises=("in-flight-is-unknown", "no-false-clean"),
    ),
    Window(
        title="Rolling back, COMPENSATING is not durable",
        dies="before flush of COMPENSATING",
        body="raises",
        promises=("compensate-once", "recover-anywhere"),
    ),
    Window(
        title="COMPENSATING is durable, the undo is not called",
        dies="undo: not called yet",
        body="raises",
        promises=("compensate-once",),
    ),
    Window(
        title="Undone, not recorded", dies="undo: done", body="raises", promises=("compensate-once", "no-false-clean")
    ),
    Window(
        title="Rolled back, the verdict is not durable",
        dies="before flush of ROLLED_BACK",
        body="raises",
        promises=("compensate-once",),
    ),
    Window(
        title="The body has ended, COMMITTED is not durable",
        dies="before flush of COMMITTED",
        promises=("no-silent-commit", "recover-anywhere"),
    ),
    Window(title="COMMITTED is durable", dies="after flush of COMMITTED", promises=("closed-means-closed",)),
)


# -- the child


class Pause(Exception):
    """The framework of this page asks a person."""


class OutOfStock(Exception):
    pass


DIES_AT: list[str] = []


def at(point: str) -> None:
    """The process dies here, if that is where it has to."""
    if point in DIES_AT:
        os.kill(os.getpid(), signal.SIGKILL)


class PointedLog(FileLog):
    """A file log that says which records its next flush makes durable."""

    appended: tuple[str, ...] = ()

    def append(self, record: Record) -> int:
        self.appended += (record.type,)
        return super().append(record)

    def flush(self, ticket: int) -> None:
        types, self.appended = self.appended, ()
        for kind in types:
            at(f"before flush of {kind}")
        super().flush(ticket)
        for kind in types:
            at(f"after flush of {kind}")


def child(directory: Path, kind: str, window: Window, customer: str) -> None:
    """One saga of one step; dies on its way, or does not come by the window."""
    if window.dies:
        DIES_AT.append(window.dies)
    fn, declaration = KINDS[kind]
    runner = ToolRunner(fn.__name__, declaration, adapter="page", fn=fn, interrupts=(Pause,))

    log = PointedLog(directory)
    site = CallSite("page", call_id="call_0")
    asks = window.body in ("pauses", "resumes")

    def invoke(key: str) -> Any:
        if asks:
            raise Pause
        at("call: not sent yet")
        return fn(customer, idempotency_key=key)

    with suppress(OutOfStock, RollbackIncomplete), saga_scope("s", log=log, approve=lambda _: True) as saga:
        try:
            runner.run({"customer": customer}, invoke, site=site)
        except Pause:
            saga.suspend("a person is asked")
            at("body: suspended")
        at("body: called")
        if window.body == "raises":
            raise OutOfStock
    asks = False
    if window.body == "resumes":
        with saga_scope("s", log=log, approve=lambda _: True, resume="continue"):
            runner.run({"customer": customer}, invoke, site=site)


# -- the parent: one cell


class Clock(ManualClock):
    """Time passes by itself; the first who waits lets held requests go."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__(wall=time.time(), auto=True)
        self._meanwhile = meanwhile
        self.began = self.monotonic()

    def wait(self, event: Any, timeout: float | None) -> bool:
        if timeout is not None and timeout >= 1.0:
            self._meanwhile()
        return super().wait(event, timeout)

    @property
    def waited(self) -> float:
        return self.monotonic() - self.began


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one kind of declaration in one window."""

    log: str
    recovery: str
    undo: str
    left: str


def cell(kind: str, window: Window, customer: str) -> Row | None:
    """Kill, recover, look; None if such a step does not come by this window."""
    client = world()
    with tempfile.TemporaryDirectory(prefix="agent-saga-page-") as name:
        directory = Path(name) / "log"
        FileLog(directory).close()
        if window.held:
            client.hold("/", when="before" if window.held == "before" else "after")
        if not _killed(directory, kind, window, customer):
            client.reset()
            return None
        client.reset()
        log_says = _log_says(directory)
        let_go = client.release if window.held else lambda: []

        def meanwhile() -> None:
            if window.lands == "meanwhile":
                let_go()

        said, waited = _recovered(directory, meanwhile, window.lands == "after the deadline")
        let_go()
        client.wait_quiet()
        return Row(
            log=log_says,
            recovery=f"{said}, after {waited:.0f} s" if waited >= 1 else said,
            undo=_undo(directory),
            left=_left(customer, said),
        )


def _killed(directory: Path, kind: str, window: Window, customer: str) -> bool:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            logging.disable()
            child(directory, kind, window, customer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if window.held and kind not in ("READ_ONLY", "REVERSIBLE"):
        world().wait_held()
        os.kill(pid, signal.SIGKILL)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if ended not in (0, -signal.SIGKILL):
        raise AssertionError(f"{kind} in {window.title!r}: the child ended with {ended}")
    return ended == -signal.SIGKILL


def _log_says(directory: Path) -> str:
    log = FileLog(directory)
    try:
        return " ".join(record.type for record in log.read("s")) or "nothing"
    finally:
        log.close()


def _recovered(directory: Path, meanwhile: Callable[[], None], late: bool) -> tuple[str, float]:
    """What the recovery came to, and how long it waited."""
    clock = Clock(meanwhile)
    if late:
        clock.advance(WEEK + 1)
        clock.began = clock.monotonic()
    log = FileLog(directory, clock=clock)
    try:
        report = recover(log)
        if "s" in report.untouched:
            return f"left alone: {read_saga(log, 's').status}", clock.waited
        state = read_saga(log, "s")
        assert state.report is not None, report
        if not ({"s"} & {*report.recovered, *report.attention}):
            return f"nothing to do: {state.status}", clock.waited
        return f"{state.status}{', clean' if state.report.clean else ''}", clock.waited
    except SagaNotFound:
        return "nothing to do", clock.waited
    finally:
        log.close()


def _undo(directory: Path) -> str:
    """How often somebody asked the service to undo this step."""
    log = FileLog(directory)
    try:
        keys = {attempt.compensation_key for step in read_saga(log, "s").steps for attempt in step.history}
    except SagaNotFound:
        return "-"
    finally:
        log.close()
    journal = world().ledger()["journal"]
    asked = [one["key"] for one in journal if one["entry"] == "request" and one["key"] in keys - {None}]
    if len(asked) < 2:
        return "once" if asked else "-"
    return f"{len(asked)} times, {len(set(asked))} key{'s' if len(set(asked)) > 1 else ''}"


def _left(customer: str, said: str) -> str:
    ledger = world().ledger()
    left = any(one["customer"] == customer and one["captured"] > one["refunded"] for one in ledger["charges"])
    left = left or any(one["to"] == customer for one in ledger["mails"]) or bool(ledger["balances"].get(customer))
    if said.startswith("nothing to do: COMMITTED"):
        return "what was committed" if left else "nothing"
    if not left:
        return "nothing" if "NEEDS_ATTENTION" not in said else "nothing, but nobody can tell: reported"
    return f"the effect, {UNREPORTED}" if "clean" in said else "the effect, reported"


# -- the page


def table() -> str:
    """The whole generated part of the page."""
    with Service.start() as service:
        WORLD.append(service.client(timeout=30.0))
        try:
            return "\n".join(_page())
        finally:
            WORLD.pop()


def _page() -> Iterator[str]:
    for number, window in enumerate(WINDOWS, start=1):
        rows = {kind: cell(kind, window, f"{kind} {number}") for kind in KINDS}
        yield f"### {number}. {window.title}\n"
        yield f"Held by: {', '.join(f'`{promise}`' for promise in window.promises)}.\n"
        yield "| declared | on disk | recovery | undo asked for | left |"
        yield "| --- | --- | --- | --- | --- |"
        for row, kinds in _merged(rows).items():
            if UNREPORTED in row.left and (window.held, window.lands) != ("before", "afterwards"):
                raise AssertionError(f"{kinds} in {window.title!r}: a rollback was called clean over an effect")
            yield f"| {', '.join(kinds)} | {row.log} | {row.recovery} | {row.undo} | {row.left} |"
        away = [kind for kind, row in rows.items() if row is None]
        yield f"\nNever here: {', '.join(away)}.\n" if away else ""


def _merged(rows: dict[str, Row | None]) -> dict[Row, list[str]]:
    merged: dict[Row, list[str]] = {}
    for kind, row in rows.items():
        if row is not None:
            merged.setdefault(row, []).append(kind)
    return merged
