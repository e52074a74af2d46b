"""A NATS log whose every process died, and a command that is run once: nobody else has watched a lease run out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agent_saga_core.cli.app import app
from agent_saga_core.registry import isolated_registry

from ..servers.store import BOUND, also, begin, record

SHOP = """
from pathlib import Path
from agent_saga_core import compensator

@compensator("alone.refund")
def refund(charge_id: str, *, idempotency_key: str) -> None:
    with open("refunds", "a", encoding="utf-8") as refunds:
        refunds.write(charge_id + "\\n")
"""
DIES = """
import os, sys
import alone_shop
from agent_saga_core import ActionSemantics, open_log, saga_scope, undo

with saga_scope("dead", log=open_log(sys.argv[1])) as saga:
    how = {"semantics": ActionSemantics.COMPENSABLE, "compensate": undo(alone_shop.refund, charge_id="result.id")}
    saga.execute("charge", lambda: {"id": "ch_1"}, **how)
    os._exit(9)
"""


@pytest.fixture
def dead(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a log with a saga whose process was the only one, and died this moment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "alone_shop", raising=False)
    Path("alone_shop.py").write_text(SHOP, "utf-8")
    short = also(url, lease=1)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", DIES, short], env=environment, timeout=BOUND, check=False)
    assert done.returncode == 9
    return short


def agent_saga(*arguments: str) -> Result:
    with isolated_registry():
        sys.modules.pop("alone_shop", None)
        return CliRunner().invoke(app, arguments)


def test_recover_once_does_not_go_away_before_it_knows(dead: str) -> None:
    said = agent_saga("recover", "--log", dead, "--import", "alone_shop", "--json")
    assert said.exit_code == 0 and json.loads(said.stdout)["recovered"] == ["dead"]
    assert Path("refunds").read_text("utf-8") == "ch_1\n"


def test_resolve_does_not_call_a_dead_process_busy(dead: str) -> None:
    given = ("--as", "accepted", "--by", "ada", "--note", "kept")
    said = agent_saga("resolve", "dead", "charge", *given, "--log", dead)
    assert said.exit_code == 0, said.output


def test_a_process_that_lives_is_known_by_its_next_renewal(dead: str, opened: Callable[..., Any]) -> None:
    owner = opened(lease=1)
    begin(owner, "alive")
    said = agent_saga("recover", "--log", dead, "--import", "alone_shop", "--json")
    report = json.loads(said.stdout)
    assert (report["recovered"], report["live"]) == (["dead"], ["alive"])
    assert owner.holds("alive")
    owner.flush(owner.append(record("alive", 2)))
