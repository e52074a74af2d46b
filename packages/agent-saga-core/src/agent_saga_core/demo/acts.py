"""The demo in three acts: unprotected, in a saga, and killed in the middle and finished by another process.

`agent-saga demo`, or `python -m agent_saga_core.demo.acts`. The booking service is a process of its own that
knows nothing of sagas, and every figure that is printed comes out of its ledger. The demo checks each claim it
makes against that ledger before it goes on, and exits with 1 if one does not hold. It needs no network but
loopback and no keys, and leaves no process and no file behind.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from agent_saga_core import SagaStatus, StepStatus, open_log, read_saga, saga_scope
from agent_saga_core.demo import trip
from agent_saga_core.demo.account import Account, Asked, money
from agent_saga_core.demo.client import HTTPStatusError, Service
from agent_saga_core.demo.screen import Cell, Screen, Style

__all__ = ["main"]

BOUND: Final = 30.0
"""Seconds that any single wait may last."""

_LOOKS: dict[str, Style] = {
    "booked": "yellow",
    "paid": "yellow",
    "on its way": "red",
    "cancelled": "green",
    "refunded": "green",
    "forbidden": "green",
}
_ORDER = ("1st", "2nd", "3rd")
_RUNS = {
    "ada": "no saga",
    "ben": "saga",
    "cyd": "killed after the charge, recovered",
    "dan": "killed before the charge, recovered",
}
"""The customers, and how the agent of each ran."""


class Untrue(Exception):
    """The ledger does not show what the demo is about to say."""


def _claim(holds: bool, claim: str) -> None:
    if not holds:
        raise Untrue(claim)


class Play:
    """One performance.

    Args:
        service: The booking service, with an empty ledger.
        directory: Where the log goes.
        screen: Where the story goes.
    """

    def __init__(self, service: Service, directory: Path, screen: Screen) -> None:
        self._service = service
        self._client = service.client(timeout=BOUND)
        self._directory = directory
        self._log = f"file:{quote(str(directory))}/log"
        self._screen = screen

    # -- what the ledger says ----------------------------------------------------------------------------

    def _accounts(self, *customers: str) -> list[Account]:
        ledger = self._client.ledger()
        return [Account.of(ledger, customer) for customer in customers]

    def _show(self, said: str, *accounts: Account) -> None:
        """Draw what the ledger says of each account."""
        rows: list[Sequence[Cell | str]] = []
        for account in accounts:
            place = {asked.undone: _ORDER[i] for i, asked in enumerate(account.undone)}
            for number, asked in enumerate(account.asked):
                whose = "" if number else account.customer.capitalize()
                undone = place.get(asked.undone, "-")
                rows.append((whose, asked.what, asked.id or "-", _now(asked), str(asked.undo_requests), undone))
        self._screen.line(f"  {said}:")
        self._screen.table(("", "asked for", "id", "now", "undo requests", "undone"), rows)

    def _sum_up(self, *accounts: Account) -> None:
        for account in accounts:
            left = bool(account.paid or account.booked)
            self._screen.line(
                "  ", Cell("Left behind:" if left else "Nothing left behind:", "red" if left else "green"),
                f" {account.customer.capitalize()} has paid ", Cell(money(account.paid), "bold"), " and holds ",
                Cell(f"{account.booked} booking{'' if account.booked == 1 else 's'}", "bold"), ".",
            )  # fmt: skip

    # -- the acts ----------------------------------------------------------------------------------------

    def perform(self) -> None:
        """Play all acts and close with what each customer is left with."""
        self._client.fail("/bookings", exact=True, field={"what": "OPO-FRA"}, answer=422, error="sold_out", times=None)
        self._screen.line(
            Cell("A travel agent made of tool calls: ", "bold"),
            "flight out, hotel, charge the card, flight home.",
        )
        self._screen.line("The flight home is sold out. All figures are read from the ledger of the booking")
        self._screen.line("service, which runs in a process of its own and knows nothing of agent-saga.")
        self._unprotected("ada")
        self._in_a_saga("ben")
        self._killed("cyd", "dan")
        self._close()

    def _unprotected(self, customer: str) -> None:
        self._screen.act("Act 1: no saga")
        self._give_up(customer)
        (account,) = self._accounts(customer)
        _claim(account.paid == 42000 and account.booked == 2, "act 1 leaves a charge and two bookings")
        _claim(account.undo_requests == (0, 0, 0), "nobody undoes anything in act 1")
        self._show("The ledger afterwards", account)
        self._sum_up(account)

    def _in_a_saga(self, customer: str) -> None:
        self._screen.act("Act 2: the same calls in a saga")
        log = open_log(self._log)
        try:
            saga = saga_scope(trip.saga_id(customer), name="trip", log=log)
            self._give_up(customer, saga)
        finally:
            log.close()
        (account,) = self._accounts(customer)
        _nothing_left(account)
        _claim(len(account.landed) == 3, "three calls of act 2 had an effect")
        _claim(account.undone == account.landed[::-1], "act 2 is undone in reverse order")
        self._show("The ledger afterwards, the same exception having left `with saga_scope(...)`", account)
        self._sum_up(account)

    def _give_up(self, customer: str, scope: Any = None) -> None:
        """Run the agent until its tool fails; its own exception must come out."""
        try:
            with ExitStack() as stack:
                if scope is not None:
                    stack.enter_context(scope)
                trip.agent(customer)
        except HTTPStatusError as error:
            _claim(error.code == "sold_out", "the agent gives up because its flight home is sold out")
            self._screen.line(
                f"  {customer.capitalize()}'s agent calls its {len(trip.PLAN)} tools. The last one raises: ",
                Cell(f"{error.status} {error.code}", "bold"), ".",
            )  # fmt: skip
        else:
            raise Untrue("the flight home is sold out")

    def _killed(self, heard_nothing: str, not_there_yet: str) -> None:
        self._screen.act("Act 3: the same saga, killed with SIGKILL and finished by another process")
        customers = (heard_nothing, not_there_yet)
        self._client.hold("/charges", when="after", field={"customer": heard_nothing})
        late = self._client.hold("/charges", when="before", field={"customer": not_there_yet})
        with ExitStack() as stack:
            processes = [stack.enter_context(self._agent_process(customer)) for customer in customers]
            self._wait_held(processes)
            for process in processes:
                process.kill()
                _claim(process.wait(BOUND) == -signal.SIGKILL, "the agent died of SIGKILL")
        pids = " and ".join(str(process.pid) for process in processes)
        self._screen.line(f"  Two agents (processes {pids}) are killed inside `charge`: one after the service")
        self._screen.line("  took the money, one while the request is still on its way. No answer was heard.")
        before = self._accounts(*customers)
        _claim(before[0].paid == 42000 and before[0].booked == 2, "the first charge has landed")
        _claim(before[1].paid == 0 and before[1].booked == 2, "the second has not")
        _claim(before[1].asked[-1].now == "on its way", "but its request is on its way")
        self._show("The ledger, both agents dead", *before)
        self._sum_up(*before)
        self._look_at_the_log(customers)
        self._recover(customers)
        after = self._accounts(*customers)
        for account in after:
            _nothing_left(account)
        self._show("The ledger, that process having ended", *after)
        self._client.release(rule=late, timeout=BOUND)
        after = self._accounts(*customers)
        for account in after:
            _nothing_left(account)
        answer = after[1].asked[-1].now
        _claim(answer == "refused (410)", "the late charge is refused")
        self._screen.line(f"  {after[1].customer.capitalize()}'s charge arrives at last, from a process long dead:")
        self._screen.line("  ", Cell(answer, "green"), ", because recovery cancelled its key.")
        self._sum_up(*after)

    def _look_at_the_log(self, customers: Sequence[str]) -> None:
        """Say what a recoverer has to go by: the same for both, so neither may be guessed."""
        histories = {
            tuple((step.tool, step.status) for step in read_saga(self._log, trip.saga_id(customer)).steps)
            for customer in customers
        }
        _claim(len(histories) == 1, "both logs say the same")
        (steps,) = histories
        _claim(
            [status for _, status in steps] == [StepStatus.DONE, StepStatus.DONE, StepStatus.INTENDED],
            "two steps are done and one was only intended",
        )
        written = ", ".join(f"{tool} {status}" for tool, status in steps)
        self._screen.line("  The log says the same of both: ", Cell(written, "bold"), ".")
        self._screen.line("  From the log alone nobody can tell whether they were charged: that is UNKNOWN, and has to")
        self._screen.line("  be settled with the service, not guessed.")

    def _recover(self, customers: Sequence[str]) -> None:
        command, shown = _recovery(self._log)
        with self._process(command) as process:
            self._screen.line()
            self._screen.line(f"  Process {process.pid}: ", Cell(shown, "bold"))
            self._screen.line()
            said, complained = process.communicate(timeout=BOUND)
        _claim(process.returncode == 0, f"recovery exits with 0:\n{said}{complained}")
        for customer in customers:
            state = read_saga(self._log, trip.saga_id(customer))
            _claim(state.status is SagaStatus.ROLLED_BACK, f"the saga of {customer} is rolled back")

    def _close(self) -> None:
        self._screen.act("What it came to")
        rows: list[Sequence[Cell | str]] = []
        for account in self._accounts(*_RUNS):
            look: Style = "yellow" if account.paid or account.booked else "green"
            rows.append((
                account.customer.capitalize(), _RUNS[account.customer], Cell(money(account.paid), look),
                Cell(str(account.booked), look), str(len(account.undone)),
                ", ".join(map(str, _refunds(account))) or "never charged",
            ))  # fmt: skip
        heads = ("", "how it ran", "paid", "booked", "undone", "refund attempts")
        self._screen.table(heads, rows)

    def figures(self) -> dict[str, Any]:
        """What it came to, as plain data: the ledger's word on each customer."""
        return {
            "customers": [
                {
                    "customer": account.customer,
                    "how": _RUNS[account.customer],
                    "paid": account.paid,
                    "booked": account.booked,
                    "undone": len(account.undone),
                    "refund_attempts": _refunds(account),
                    "asked": [asdict(asked) for asked in account.asked],
                }
                for account in self._accounts(*_RUNS)
            ]
        }

    # -- processes ---------------------------------------------------------------------------------------

    @contextmanager
    def _process(self, command: Sequence[str]) -> Generator[subprocess.Popen[str]]:
        """Run a Python process in the demo's directory; it is gone when the block is left."""
        process = subprocess.Popen(
            command, cwd=self._directory, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        with process:
            try:
                yield process
            finally:
                process.kill()

    def _agent_process(self, customer: str) -> Any:
        module = [sys.executable, "-m", "agent_saga_core.demo.trip"]
        return self._process([*module, "--log", self._log, "--customer", customer])

    def _wait_held(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        """Return when each of the processes stands in a request that the service holds."""
        deadline = time.monotonic() + BOUND
        while time.monotonic() < deadline:
            try:
                self._client.wait_held(len(processes), timeout=1.0)
                return
            except TimeoutError:
                for process in processes:
                    if process.poll() is not None:
                        raise Untrue(f"an agent ended too early: {process.communicate()}") from None
        raise Untrue(f"the agents reach their charge within {BOUND:g} s")


def _nothing_left(account: Account) -> None:
    """Check that everything of a customer is undone, and was asked to be undone once."""
    whose = f"of {account.customer}'s"
    _claim(account.paid == 0 and account.booked == 0, f"nothing {whose} is left")
    _claim(len(account.landed) == len(account.undone), f"every effect {whose} is undone")
    _claim(set(account.undo_requests) == {1}, f"each effect {whose} is asked to be undone once")


def _refunds(account: Account) -> list[int]:
    """How often the refund of each charge was asked for."""
    return [asked.undo_requests for asked in account.landed if asked.what.startswith("charge")]


def _now(asked: Asked) -> Cell:
    return Cell(asked.now, _LOOKS.get(asked.now, "dim"))


def _recovery(log: str) -> tuple[list[str], str]:
    """The command of the recovering process, and how a person writes it; the CLI needs an extra."""
    here = "agent_saga_core.demo.trip"
    if importlib.util.find_spec("typer") is None:
        words = ["-m", here, "--log", log, "--recover"]
        return [sys.executable, *words], " ".join(["python", *words])
    words = ["recover", "--log", log, "--import", here]
    return [sys.executable, "-m", "agent_saga_core", *words], " ".join(["agent-saga", *words])


@contextmanager
def _environment(service: Service) -> Generator[None]:
    """Name the service to the tools, here and in the processes that are started."""
    former = os.environ.get(trip.URL_VARIABLE)
    os.environ[trip.URL_VARIABLE] = service.url
    try:
        yield
    finally:
        del os.environ[trip.URL_VARIABLE]
        if former is not None:
            os.environ[trip.URL_VARIABLE] = former


@contextmanager
def _tidy_after_sigterm() -> Generator[None]:
    """Turn SIGTERM into an exit that leaves every `with` block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are not this thread's to take
        return

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    former = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def main(argv: list[str] | None = None) -> int:
    """Perform the demo on stdout; with `--json`, print what it came to as one JSON document instead of the story.

    Returns:
        0 if the ledger showed everything that was claimed, else 1, with what was untrue on stderr.
    """
    parser = argparse.ArgumentParser(prog="agent-saga demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print what it came to as one JSON document")
    as_json: bool = parser.parse_args(argv or []).json
    screen = Screen(io.StringIO() if as_json else sys.stdout)
    started = time.monotonic()
    try:
        with (
            _tidy_after_sigterm(),
            tempfile.TemporaryDirectory(prefix="agent-saga-demo-") as directory,
            Service.start(Path(directory) / "ledger.db", ready_timeout=BOUND) as service,
            _environment(service),
        ):
            play = Play(service, Path(directory), screen)
            play.perform()
            if as_json:
                print(json.dumps(play.figures(), indent=2))
    except Untrue as untrue:
        print(f"agent-saga demo: the ledger does not show that {untrue}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    screen.line(Cell(f"  {seconds:.1f} s. Every process has ended, the log and the ledger are deleted.", "dim"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
