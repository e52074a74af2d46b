"""`agent-saga coverage`: what it finds, what it prints, its exit codes."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_saga_core import CoverageManifest
from agent_saga_core.cli.app import app
from agent_saga_core.fleet.adapters import _announced
from agent_saga_core.registry import isolated_registry

SHOP = """
from agent_saga_core import SagaFleet, compensator, saga_tool, undo
from agent_saga_core.coverage import CoverageManifest, opaque

print("a module that talks")

@compensator("coverage.refund")
def refund(charge_id: str) -> None: ...

@saga_tool(semantics="COMPENSABLE", compensate=undo(refund, charge_id="result.id"))
def charge(amount: int) -> dict: ...

def release(amount: int) -> None: ...

@saga_tool(semantics="COMPENSABLE", compensate=undo(release, amount="args.amount"))
def hold(amount: int) -> dict: ...

@saga_tool(semantics="READ_ONLY")
def look() -> None: ...

def mail(to: str) -> None: ...

class Desk:
    tools = [charge, mail]
    @property
    def broken(self):
        raise RuntimeError("nobody-must-see-this")
    def __call__(self): ...

desk, nothing, number = Desk(), [], 7
covered = (charge, look)
hidden = [charge, CoverageManifest(framework="web", entries=(opaque("plan\\x1b[31m", "a server", framework="web"),))]
fleet = SagaFleet("orders")
fleet.register(charge)

def build():
    print("a factory that talks")
    return [look, hold]

async def abuild():
    return [look]

def broken():
    raise RuntimeError("nobody-must-see-this")

def leaves():
    raise SystemExit(3)
"""


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "coverage_shop.py").write_text(SHOP, "utf-8")
    (tmp_path / "coverage_breaks.py").write_text("raise RuntimeError('nobody-must-see-this')\n", "utf-8")
    declares = "from agent_saga_core import saga_tool\nsaga_tool(semantics='COMPENSABLE')(print)\n"
    (tmp_path / "coverage_declares.py").write_text(declares, "utf-8")
    (tmp_path / "coverage_first.py").write_text("import builtins\nbuiltins.imported_first = True\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("COLUMNS", raising=False)
    entries = [EntryPoint("toyframe", "toyframe_adapter:ADAPTER", "agent_saga.adapters")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: entries)
    sys.path.append(str(Path(__file__).parent / "toyframe"))
    _announced.cache_clear()
    with isolated_registry():
        yield
    _announced.cache_clear()
    for name in ("coverage_shop", "coverage_first", "toyframe", "toyframe_adapter", "toyframe_saga", "coverage_toy"):
        sys.modules.pop(name, None)


def coverage(*arguments: str) -> tuple[int, list[str], list[str]]:
    result = CliRunner().invoke(app, ["coverage", *arguments])
    assert "nobody-must-see-this" not in result.output
    talk = ("a module that talks", "a factory that talks")
    return result.exit_code, result.stdout.splitlines(), [it for it in result.stderr.splitlines() if it not in talk]


def test_tools_are_shown_and_the_limit_decides() -> None:
    code, lines, complaints = coverage("coverage_shop:desk.tools")
    assert (code, complaints) == (1, [])
    assert lines[0].split() == ["path", "tool", "wrapped", "semantics", "inverse", "covers", "unknown", "identity"]
    assert lines[1].split() == ["tools/charge", "charge", "yes", "COMPENSABLE", "named", "no", "occurrence"]
    assert lines[2].split() == ["tools/mail", "mail", "no", "-", "-", "-", "-"]
    assert lines[3:] == ["", "1 of 2 tools covered: 50%"]
    assert coverage("coverage_shop:desk.tools", "--fail-under", "50")[0] == 0
    assert coverage("coverage_shop:desk.tools", "--fail-under", "50.1")[0] == 1
    assert coverage("coverage_shop:covered")[0] == 0
    assert coverage("coverage_shop:charge")[0] == 0


def test_what_a_module_prints_stays_out_of_the_report() -> None:
    result = CliRunner().invoke(app, ["coverage", "coverage_shop:build()", "--json"])
    assert result.stderr.splitlines() == ["a module that talks", "a factory that talks"]
    assert json.loads(result.stdout)["version"] == 1


def test_opaque_entries_come_last_and_can_be_acknowledged() -> None:
    code, lines, _ = coverage("coverage_shop:hidden")
    assert code == 1
    assert lines[3].split() == ["opaque", "why"] and lines[4] == "[1]/plan\\x1b[31m  a server"
    assert lines[-1] == "1 of 1 tool covered, 1 opaque: 50%"
    code, lines, complaints = coverage("coverage_shop:hidden", "--acknowledge", "[1]/plan\x1b[31m")
    assert (code, complaints) == (0, [])
    assert lines[4].endswith("a server  acknowledged")
    assert lines[-1] == "1 of 1 tool covered, 1 opaque (1 acknowledged): 100%"


def test_an_acknowledged_path_that_is_not_there_is_a_fault() -> None:
    code, lines, complaints = coverage("coverage_shop:covered", "--acknowledge", "node:gone", "--fail-under", "0")
    assert code == 2 and lines[-1] == "2 of 2 tools covered: 100%"
    assert complaints == [
        "agent-saga: nothing opaque has the path node:gone; leave --acknowledge out for it",
    ]


def test_json_is_one_document_that_reads_back() -> None:
    code, lines, _ = coverage("coverage_shop:hidden", "--json", "--fail-under", "40")
    document = json.loads("\n".join(lines))
    assert code == 0 and document["version"] == 1
    assert (document["percent"], document["fail_under"], document["enough"]) == (50.0, 40.0, True)
    assert document["acknowledged"] == []
    found = CoverageManifest.from_json(document)
    assert [entry.path for entry in found.entries] == ["tools/charge", "[1]/plan\x1b[31m"]
    assert found.framework == "python, web"


def test_a_factory_is_called_only_if_it_is_written_so() -> None:
    code, lines, _ = coverage("coverage_shop:build()")
    assert code == 0 and lines[-1] == "2 of 2 tools covered: 100%"
    assert [line.split()[4] for line in lines[1:3]] == ["-", "closure"]
    code, lines, _ = coverage("coverage_shop:build")
    assert code == 1
    assert lines[-1] == "this function was taken for a tool; if it makes the object, write coverage_shop:build()"


def test_a_fleet_and_a_framework_are_looked_into() -> None:
    assert coverage("coverage_shop:fleet")[:2] == (0, coverage("coverage_shop:charge")[1])
    Path("coverage_toy.py").write_text(
        "import toyframe\nagent = toyframe.Agent([toyframe.Tool('pay', print)], planner=print)\n", "utf-8"
    )
    code, lines, _ = coverage("coverage_toy:agent")
    assert code == 1 and lines[1].split()[:3] == ["agent/pay", "pay", "no"]
    assert "agent/planner" in "\n".join(lines) and lines[-1] == "0 of 1 tool covered, 1 opaque: 0%"


def test_nothing_found_is_below_every_limit_but_none() -> None:
    assert coverage("coverage_shop:nothing") == (1, ["no tool was found"], [])
    assert coverage("coverage_shop:nothing", "--fail-under", "0")[0] == 0


def test_other_modules_are_imported_first() -> None:
    import builtins

    try:
        assert coverage("coverage_shop:covered", "--import", "coverage_first")[0] == 0
        assert builtins.imported_first  # type: ignore[attr-defined]
    finally:
        del builtins.imported_first  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["coverage_shop"], "coverage takes MODULE:OBJECT"),
        (["coverage_shop:"], "coverage takes MODULE:OBJECT"),
        (["coverage_shop:charge("], "coverage takes MODULE:OBJECT"),
        (["coverage_shop.py:charge"], "coverage takes a dotted module name"),
        (["no_such_shop:charge"], "No module named 'no_such_shop'"),
        (["coverage_breaks:charge"], "coverage coverage_breaks: RuntimeError at "),
        (["coverage_declares:charge"], "DeclarationError: 'print' is COMPENSABLE and has no inverse. Write comp"),
        (["coverage_shop:desk.none"], "there is no 'none'"),
        (["coverage_shop:desk.broken"], "coverage_shop:desk.broken: RuntimeError at "),
        (["coverage_shop:broken()"], "coverage_shop:broken(): RuntimeError at "),
        (["coverage_shop:leaves()"], "SystemExit at "),
        (["coverage_shop:abuild()"], "is async"),
        (["coverage_shop:number"], "No adapter knows an object of type builtins.int"),
        (["coverage_shop:number()"], "TypeError at "),
        (["coverage_shop:charge", "--import", "no_such_module"], "--import no_such_module"),
        (["coverage_shop:charge", "--fail-under", "101"], "--fail-under"),
        ([], "MODULE:OBJECT"),
    ],
)
def test_what_cannot_be_looked_into_is_said_in_one_line(arguments: list[str], said: str) -> None:
    code, lines, complaints = coverage(*arguments)
    assert (code, lines) == (2, [])
    (line,) = complaints
    assert line.startswith("agent-saga: ") and said in line


def test_an_adapter_that_fails_is_said_in_one_line() -> None:
    Path("coverage_toy.py").write_text("import toyframe\nagent = toyframe.Base()\n", "utf-8")
    code, lines, complaints = coverage("coverage_toy:agent")
    assert (code, lines) == (2, [])
    (line,) = complaints
    assert "coverage_toy:agent could not be looked into: AttributeError at " in line


def test_no_framework_is_imported_that_the_object_does_not_bring() -> None:
    code = (
        "import sys; from agent_saga_core.cli.app import app;"
        "code = app(['coverage', 'coverage_shop:covered'], standalone_mode=False);"
        "print(code, sorted({m.partition('.')[0] for m in sys.modules} & set(sys.argv[1:])), file=sys.stderr)"
    )
    frameworks = ["langchain_core", "langgraph", "crewai", "autogen_core", "llama_index", "agents", "semantic_kernel"]
    run = subprocess.run(
        [sys.executable, "-c", code, *frameworks], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stderr.splitlines()[-1] == "0 []"
