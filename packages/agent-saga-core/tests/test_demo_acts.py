"""The demo performs, tells the truth about the ledger, fails loudly when it would not, and leaves nothing."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_saga_core.demo import acts, trip
from agent_saga_core.demo.account import Account
from agent_saga_core.demo.client import Client, Service
from agent_saga_core.demo.screen import Cell, Screen

BOUND = 90


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with Service.start() as service:
        monkeypatch.setenv(trip.URL_VARIABLE, service.url)
        yield service


class Output(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]


class Terminal(Output):
    def isatty(self) -> bool:
        return True


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a performance: rows of cells, headings first."""
    found: list[list[list[str]]] = []
    for line in text.splitlines():
        if "┌" in line:
            found.append([])
        elif "│" in line:
            found[-1].append([cell.strip() for cell in line.strip().strip("│").split("│")])
    return found


def running_with(marker: str) -> list[str]:
    """The processes that have this in their environment, as far as this system shows it."""
    found: list[str] = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in environ.read_bytes():
                found.append((environ.parent / "cmdline").read_text("utf-8").replace("\0", " "))
        except OSError:
            continue  # it ended meanwhile, or is somebody else's
    return found


def test_the_demo_as_a_process(tmp_path: Path) -> None:
    marker = f"demo-{uuid.uuid4().hex}"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "AGENT_SAGA_DEMO_MARKER": marker, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "agent_saga_core.demo.acts"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=BOUND,
        check=False,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert (done.returncode, err) == (0, ""), out + err
    assert running_with(marker) == []
    assert list(tmp_path.iterdir()) == []
    assert "\x1b" not in out
    *_, last = tables(out)
    assert last == [
        ["", "how it ran", "paid", "booked", "undone", "refund attempts"],
        ["Ada", "no saga", "420.00 EUR", "2", "0", "0"],
        ["Ben", "saga", "0.00 EUR", "0", "3", "1"],
        ["Cyd", "killed after the charge, recovered", "0.00 EUR", "0", "3", "1"],
        ["Dan", "killed before the charge, recovered", "0.00 EUR", "0", "2", "never charged"],
    ]
    dead = re.search(r"processes (\d+) and (\d+)", out)
    recovered_by = re.search(r"Process (\d+):", out)
    assert dead and recovered_by and len({*dead.groups(), *recovered_by.groups()}) == 3


STANDING_IN_ACT_3 = """
import signal, sys
from agent_saga_core.demo import acts

signal.signal(signal.SIGINT, signal.default_int_handler)
wait = acts.Play._wait_held

def stand(self, processes):
    wait(self, processes)
    print("HELD", flush=True)
    signal.pause()

acts.Play._wait_held = stand
sys.exit(acts.main())
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_demo_that_is_interrupted_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    marker = f"demo-{uuid.uuid4().hex}"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "AGENT_SAGA_DEMO_MARKER": marker, "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(
        [sys.executable, "-c", STANDING_IN_ACT_3],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert any(line == "HELD\n" for line in process.stdout)
            if Path("/proc/self/environ").exists():
                assert len(running_with(marker)) == 4  # the demo, the service and two agents
            process.send_signal(number)
            process.communicate(timeout=BOUND)
        finally:
            process.kill()
    assert process.returncode == code
    assert running_with(marker) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cli", [True, False], ids=["with the CLI", "core alone"])
def test_what_is_printed_is_what_the_ledger_says(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: bool
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: find(name, *rest) if cli or name != "typer" else None
    )
    out = Output()
    acts.Play(service, tmp_path, Screen(out)).perform()
    client = service.client()
    assert client.summary() == {
        "charged_net": 42000, "open_charges": 1, "open_bookings": 2, "mails_sent": 0, "balances": {},
        "left": ["ch_1", "bk_1", "bk_2"],
    }  # fmt: skip
    ledger = client.ledger()
    assert [(c["customer"], c["refunded"]) for c in ledger["charges"]] == [("ada", 0), ("ben", 42000), ("cyd", 42000)]
    assert [r["charge_id"] for r in ledger["refunds"]] == ["ch_2", "ch_3"]
    assert sorted(c["booking_id"] for c in ledger["cancellations"]) == [f"bk_{n}" for n in range(3, 9)]
    assert len(ledger["cancellation_attempts"]) == 6
    keys = {c["customer"]: c["key"] for c in ledger["charges"]}
    charges = [e for e in ledger["journal"] if e["entry"] == "request" and e["path"] == "/charges"]
    (late,) = [e for e in charges if e["body"]["customer"] == "dan"]
    assert (late["outcome"], late["status"]) == ("refused", 410)
    voided = sorted(a["path"].split("/")[2] for a in ledger["key_cancel_attempts"])
    assert voided == sorted([keys["ben"], keys["cyd"], late["key"]])

    _, _, dead, _, last = tables(out.getvalue())
    assert [row[2:4] for row in dead[1:]] == [
        [made, now] for made, now in zip(
            [*_ids(ledger, "cyd"), *_ids(ledger, "dan"), "-"],
            ["booked", "booked", "paid", "booked", "booked", "on its way"], strict=True,
        )
    ]  # fmt: skip
    for row in last[1:]:
        theirs = [c for c in ledger["charges"] if c["customer"] == row[0].lower()]
        open_bookings = [b for b in ledger["bookings"] if b["customer"] == row[0].lower() and b["status"] == "booked"]
        assert row[2] == f"{sum(c['captured'] - c['refunded'] for c in theirs) / 100:.2f} EUR"
        assert row[3] == str(len(open_bookings))


def _ids(ledger: dict[str, Any], customer: str) -> list[str]:
    return [made["id"] for made in (*ledger["bookings"], *ledger["charges"]) if made["customer"] == customer]


def test_the_figures_as_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert acts.main(["--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    figures = json.loads(said.out)["customers"]
    assert [(f["customer"], f["paid"], f["booked"], f["undone"], f["refund_attempts"]) for f in figures] == [
        ("ada", 42000, 2, 0, [0]),
        ("ben", 0, 0, 3, [1]),
        ("cyd", 0, 0, 3, [1]),
        ("dan", 0, 0, 2, []),
    ]
    assert [asked["now"] for asked in figures[3]["asked"]] == ["cancelled", "cancelled", "refused (410)"]


def test_an_undo_that_only_our_log_believes_in_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Client, "cancel_key", lambda *args, **kwargs: {})
    assert acts.main() == 1
    said = capsys.readouterr()
    assert said.err == "agent-saga demo: the ledger does not show that nothing of ben's is left\n"
    assert "Act 2" in said.out and "Act 3" not in said.out
    assert trip.URL_VARIABLE not in os.environ


def test_an_undo_asked_for_twice_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once = Client.cancel_key

    def twice(self: Client, cancelled: str, *, key: str | None = None) -> dict[str, Any]:
        once(self, cancelled, key=key)
        return once(self, cancelled, key=key)

    monkeypatch.setattr(Client, "cancel_key", twice)
    assert acts.main() == 1
    assert capsys.readouterr().err.endswith("each effect of ben's is asked to be undone once\n")


def test_an_agent_that_ends_too_early_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def agent_process(self: acts.Play, customer: str) -> Any:
        return self._process([sys.executable, "-c", "import sys; sys.exit('no such trip')"])

    monkeypatch.setattr(acts.Play, "_agent_process", agent_process)
    assert acts.main() == 1
    assert "an agent ended too early" in capsys.readouterr().err


def test_a_customers_account(service: Service) -> None:
    client = service.client()
    client.charge("eve", 500, key="one")
    client.book("hotel", customer="eve", what="Porto", key="two")
    client.charge("mallory", 900)
    client.refund("ch_1", 200)
    client.cancel_key("one")
    client.cancel("bk_1")
    rule = client.land_late("/charges", field={"customer": "eve"})
    with pytest.raises(ConnectionError):
        client.charge("eve", 1, key="three")
    account = Account.of(client.ledger(), "eve")
    assert [(a.what, a.id, a.now, a.paid, a.undo_requests) for a in account.asked] == [
        ("charge 5.00 EUR", "ch_1", "refunded", 0, 2),
        ("hotel Porto", "bk_1", "cancelled", 0, 1),
        ("charge 0.01 EUR", "", "on its way", 0, 0),
    ]
    assert [a.id for a in account.undone] == ["ch_1", "bk_1"]
    client.cancel_key("three")
    assert Account.of(client.ledger(), "eve").asked[-1].now == "forbidden"
    client.release(rule=rule)
    assert Account.of(client.ledger(), "eve").asked[-1].now == "refused (410)"
    assert Account.of(client.ledger(), "eve").paid == 0
    assert Account.of(client.ledger(), "mallory").paid == 900


def test_tables_are_drawn_and_coloured_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def shown(out: io.StringIO) -> str:
        Screen(out).table(("id", "now"), [("bk_1", Cell("booked", "yellow"))])
        return out.getvalue()

    plain = shown(Output())
    assert plain.splitlines() == [
        "  ┌──────┬────────┐",
        "  │ id   │ now    │",
        "  ├──────┼────────┤",
        "  │ bk_1 │ booked │",
        "  └──────┴────────┘",
    ]
    coloured = shown(Terminal())
    assert "\x1b[33m booked \x1b[0m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(Terminal()) == plain


def test_an_output_without_box_drawing_gets_plain_characters() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Screen(out).table(("id",), [("bk_1",)])
    assert raw.getvalue().decode() == "  +------+\n  | id   |\n  +------+\n  | bk_1 |\n  +------+\n"
