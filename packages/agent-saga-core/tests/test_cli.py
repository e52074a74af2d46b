"""The command line, in this process: what each verb prints and which code it ends with."""

import contextlib
import contextvars
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agent_saga_core import ActionSemantics, FileLog, read_saga, saga_scope
from agent_saga_core.cli.app import app
from agent_saga_core.registry import isolated_registry

SHOP = """
import os
from pathlib import Path

from agent_saga_core import ActionSemantics, compensator, saga_tool, undo

def note(line):
    with open("ledger", "a", encoding="utf-8") as ledger:
        ledger.write(line + "\\n")

@compensator("cli.refund")
def refund(charge_id: str, *, idempotency_key: str) -> None:
    print("a compensator that talks")
    if Path("down").exists():
        raise ConnectionError("payments are down")
    note(f"refund {charge_id}")

@compensator("cli.cancel")
def cancel(room: int) -> None:
    note(f"cancel {room}")

@saga_tool(semantics=ActionSemantics.COMPENSABLE, compensate=undo(refund, charge_id="result.id"))
def charge(amount: int) -> dict:
    return {"id": f"ch_{amount}"}

def book(in_doubt):
    @saga_tool(
        name="book",
        semantics=ActionSemantics.COMPENSABLE,
        compensate=undo(cancel, room="args.room", if_absent="noop"),
        in_doubt=in_doubt,
    )
    def book(room: int) -> None:
        os._exit(9)
    return book

@saga_tool(semantics=ActionSemantics.IRREVERSIBLE)
def mail(to: str) -> str:
    return "sent to nobody-must-see-this"
"""

DIE = """
import contextvars
import os
import sys

import shop
from agent_saga_core import saga_scope

URL = sys.argv[1]

scopes = []

def opened(saga_id, **more):
    scopes.append(saga_scope(saga_id, log=URL, approve=lambda request: True, **more))
    scopes[-1].__enter__()

def act(kind, saga_id):
    if kind == "committed":
        with saga_scope(saga_id, log=URL, name="order"):
            shop.charge(1)
    elif kind == "dead":
        opened(saga_id, name="order")
        shop.charge(4200)
    elif kind == "mailed":
        opened(saga_id, name="evil \\x1b[31m[bold]name", metadata={"customer": "cus_7"})
        shop.charge(7)
        shop.mail("secret-recipient@example.org")
    elif kind == "suspended":
        with saga_scope(saga_id, log=URL) as saga:
            shop.charge(3)
            saga.suspend("ask ada")
    elif kind.startswith("doubt"):
        opened(saga_id)
        shop.book(float(kind.removeprefix("doubt")))(12)

for what in sys.argv[2:]:
    contextvars.copy_context().run(act, *what.split("="))
os._exit(9)
"""

ALL = ("committed=ok-1", "dead=dead-1", "mailed=mail-1", "suspended=wait-1", "doubt0.05=doubt-1")


def write_shop(directory: Path) -> None:
    (directory / "shop.py").write_text(SHOP, "utf-8")
    (directory / "die.py").write_text(DIE, "utf-8")


def leave_behind(directory: Path, *sagas: str, log: str = "log") -> None:
    """Let a process open these sagas in `directory` and die in the middle of them."""
    command = [sys.executable, "die.py", f"file:./{log}", *sagas]
    died = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60, check=False)
    assert died.returncode == 9, died.stderr


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("world")
    write_shop(directory)
    leave_behind(directory, *ALL)
    return directory


@pytest.fixture
def world(left_behind: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a log of dead processes' sagas, and nothing of it imported yet."""
    here = tmp_path / "world"
    shutil.copytree(left_behind, here)
    monkeypatch.chdir(here)
    monkeypatch.setenv("AGENT_SAGA_LOG", "file:./log")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    with isolated_registry():
        yield here
    sys.modules.pop("shop", None)


def saga(*words: str, env: dict[str, str] | None = None) -> Result:
    result = CliRunner().invoke(app, list(words), env=env, catch_exceptions=False)
    assert "Traceback" not in result.output
    return result


def one_line(result: Result) -> str:
    """The only line on stderr."""
    (line,) = result.stderr.splitlines()
    assert line.startswith("agent-saga: ")
    return line


def ledger(world: Path) -> list[str]:
    path = world / "ledger"
    return path.read_text("utf-8").splitlines() if path.exists() else []


# --- list


def test_list_shows_every_saga_on_a_line_of_its_own_without_a_terminal(world: Path) -> None:
    result = saga("list")
    assert result.exit_code == 0 and result.stderr == ""
    head, *lines = result.stdout.splitlines()
    assert head.split() == ["saga", "name", "status", "started", "steps", "attention"]
    assert [(line.split()[0]) for line in lines] == ["ok-1", "dead-1", "mail-1", "wait-1", "doubt-1"]
    assert all(line == line.rstrip() for line in lines)
    assert "\x1b" not in result.stdout and r"evil \x1b[31m[bold]name" in lines[2]


def test_list_as_json_is_the_heads(world: Path) -> None:
    heads = json.loads(saga("list", "--json").stdout)
    assert [head["saga_id"] for head in heads] == ["ok-1", "dead-1", "mail-1", "wait-1", "doubt-1"]
    assert set(heads[0]) == {"saga_id", "name", "status", "started", "steps", "attention"}


def test_list_chooses_by_status(world: Path) -> None:
    heads = json.loads(saga("list", "--json", "--status", "committed", "--status", "SUSPENDED").stdout)
    assert [head["saga_id"] for head in heads] == ["ok-1", "wait-1"]
    wrong = saga("list", "--status", "gone")
    assert wrong.exit_code == 2 and "NEEDS_ATTENTION" in one_line(wrong)


def test_list_attention_is_the_dead_letters(world: Path) -> None:
    assert "none of 5 sagas" in saga("list", "--attention").stdout
    assert saga("recover", "--import", "shop").exit_code == 1
    assert [head["saga_id"] for head in json.loads(saga("list", "--attention", "--json").stdout)] == ["mail-1"]


def test_a_log_without_sagas(world: Path) -> None:
    FileLog("empty").close()
    result = saga("list", "--log", "file:./empty")
    assert result.exit_code == 0 and result.stdout.startswith("no sagas in file:")
    assert json.loads(saga("list", "--log", "file:./empty", "--json").stdout) == []
    assert saga("recover", "--log", "file:./empty").stdout == "nothing to recover\n"
    assert saga("verify", "--log", "file:./empty").stdout == "intact: 0 records\n"


def test_identifiers_are_folded_on_a_narrow_screen_and_never_cut(world: Path) -> None:
    long = "an-identifier-" + "x" * 50 + "-end"
    with saga_scope(long, log="file:./log"):
        pass
    shown = saga("list", env={"COLUMNS": "40"}).stdout
    assert max(map(len, shown.splitlines())) <= 40
    assert "…" not in shown
    pieces = [line.split()[0] for line in shown.splitlines() if line and not line.startswith(" ")]
    assert long in "".join(pieces)


# --- show


def test_show_tells_the_whole_story_and_what_to_do_next(world: Path) -> None:
    (world / "down").touch()
    saga("recover", "--import", "shop", "--saga", "mail-1")
    shown = saga("show", "mail-1")
    assert shown.exit_code == 0
    text = shown.stdout
    state = read_saga("file:./log", "mail-1")
    for step in state.steps:
        assert step.forward_key in text
    assert state.steps[0].compensation_key in text
    for expected in (
        "mail-1",
        "NEEDS_ATTENTION; 2 steps remaining",
        "customer: cus_7",
        "✗ 1 charge",
        "ConnectionError: payments are down",
        "cli.refund try 3",
        "a new owner took over",
        "agent-saga recover --saga mail-1",
        "agent-saga resolve mail-1 1 --as compensated --by NAME --note TEXT",
        "agent-saga resolve mail-1 2 --as accepted --by NAME --note TEXT",
    ):
        assert expected in text, expected
    assert "secret-recipient" not in text and "nobody-must-see-this" not in text
    assert "\x1b" not in text


def test_show_names_the_log_in_its_commands_if_it_was_named(world: Path) -> None:
    assert (
        f"agent-saga recover --saga dead-1 --log file://{world}/log"
        in saga("show", "dead-1", "--log", "file:./log").stdout
    )


def test_show_speaks_ascii_where_there_is_nothing_else(world: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "agent_saga_core", "show", "dead-1"]
    shown = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True)
    assert b"| +" in shown.stdout and shown.stdout.isascii()


def test_show_as_json_is_the_state(world: Path) -> None:
    shown = json.loads(saga("show", "dead-1", "--json").stdout)
    assert shown["saga_id"] == "dead-1" and shown["status"] == "RUNNING" and shown["report"] is None
    assert [entry["type"] for entry in shown["timeline"]] == ["START", "INTENT", "DONE"]
    assert shown["steps"][0]["tool"] == "charge"


def test_show_of_a_live_saga_says_so(world: Path) -> None:
    with saga_scope("living", log="file:./log") as living:
        living.execute("look", lambda: 1, semantics=ActionSemantics.COMPENSABLE, compensate=lambda result: None)
        assert "A running process owns it" in saga("show", "living").stdout


def test_show_of_a_suspended_saga_says_until_when(world: Path) -> None:
    assert "waits for a person until" in saga("show", "wait-1").stdout


# --- recover


def test_recover_finishes_what_it_can(world: Path) -> None:
    result = saga("recover", "--import", "shop")
    assert result.exit_code == 1  # a mail cannot be taken back
    assert ledger(world) == ["refund ch_4200", "refund ch_7", "cancel 12"]
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["recovered", "dead-1"] and lines[1].split() == ["recovered", "doubt-1"]
    assert lines[2].split() == ["attention", "mail-1"] and "2 mail" in lines[3]
    assert "a compensator that talks" not in result.stdout
    again = saga("recover", "--import", "shop", "--json")
    assert again.exit_code == 1 and json.loads(again.stdout)["attention"] == ["mail-1"]
    assert ledger(world) == ["refund ch_4200", "refund ch_7", "cancel 12"]


def test_recover_as_json_is_the_report_and_nothing_else(world: Path) -> None:
    result = saga("recover", "--import", "shop", "--json", "--concurrency", "4")
    report = json.loads(result.stdout)
    assert sorted(report["recovered"]) == ["dead-1", "doubt-1"]
    assert (report["attention"], report["untouched"]) == (["mail-1"], ["wait-1"])
    assert (report["live"], report["damaged"]) == ([], [])
    assert "suspended" in report["reasons"]["wait-1"]


def test_recover_only_the_sagas_named(world: Path) -> None:
    result = saga("recover", "--import", "shop", "--saga", "dead-1", "--saga", "doubt-1", "--json")
    assert result.exit_code == 0
    assert sorted(json.loads(result.stdout)["recovered"]) == ["dead-1", "doubt-1"]
    assert sorted(ledger(world)) == ["cancel 12", "refund ch_4200"]
    unknown = saga("recover", "--saga", "nobody")
    assert unknown.exit_code == 2 and "'nobody'" in one_line(unknown)


def test_an_unknown_saga_is_heard_of_before_the_others_are_touched(world: Path) -> None:
    result = saga("recover", "--import", "shop", "--saga", "dead-1", "--saga", "nobody", "--json")
    assert result.exit_code == 2 and "'nobody'" in one_line(result)
    assert ledger(world) == []
    assert json.loads(saga("show", "dead-1", "--json").stdout)["status"] == "RUNNING"


def test_a_dry_run_changes_nothing(world: Path) -> None:
    before = read_saga("file:./log", "dead-1")
    result = saga("recover", "--import", "shop", "--dry-run", "--saga", "dead-1", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["recovered"] == ["dead-1"]
    assert read_saga("file:./log", "dead-1") == before and ledger(world) == []
    told = saga("recover", "--import", "shop", "--dry-run")
    lines = [line for line in told.stdout.splitlines() if not line.startswith(" ")]
    assert [line.split("  ")[0] for line in lines[:4]] == [
        "would recover", "would recover", "would need attention", "untouched",
    ]  # fmt: skip
    assert lines[4] == "2 would recover, 1 would need attention, 1 untouched (dry run: nothing was changed)"
    assert told.exit_code == 1 and "would end as NEEDS_ATTENTION; remaining: step 2 mail" in told.stdout
    (line, reason, counts) = saga("recover", "--import", "shop", "--dry-run", "--saga", "dead-1").stdout.splitlines()
    assert (line.split(), reason.strip()) == (["would", "recover", "dead-1"], "would be rolled back")
    assert counts == "1 would recover (dry run: nothing was changed)"


def test_a_dry_run_calls_no_dead_letter_recovered(world: Path) -> None:
    saga("recover", "--import", "shop", "--saga", "mail-1")
    before = read_saga("file:./log", "mail-1")
    dry = saga("recover", "--import", "shop", "--saga", "mail-1", "--dry-run", "--json")
    report = json.loads(dry.stdout)
    assert (dry.exit_code, report["attention"], report["recovered"]) == (1, ["mail-1"], [])
    assert "step 2 mail: DONE (irreversible" in report["reasons"]["mail-1"]
    assert read_saga("file:./log", "mail-1") == before


def living(*saga_ids: str) -> contextlib.ExitStack:
    """Sagas that this process owns until the stack is closed."""
    ended = contextlib.ExitStack()
    for saga_id in saga_ids:
        within = contextvars.copy_context()
        scope = saga_scope(saga_id, log="file:./log")
        within.run(scope.__enter__)
        ended.callback(within.run, scope.__exit__, None, None, None)
        within.run(
            scope.execute, "look", lambda: 1, semantics=ActionSemantics.COMPENSABLE, compensate=lambda result: None
        )
    return ended


def test_of_many_live_sagas_some_get_a_line(world: Path) -> None:
    with living(*(f"living-{n}" for n in range(23))):
        shown, told = saga("recover", "--import", "shop"), saga("recover", "--import", "shop", "--json")
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert [line[0] for line in lines].count("live") == 20
    assert lines[lines.index(["live", "living-19"]) + 1] == ["...", "and", "3", "more"]
    assert "2 recovered, 1 attention, 1 untouched, 23 live" in shown.stdout.splitlines()
    assert "lease" not in shown.stdout
    assert json.loads(told.stdout)["live"] == [f"living-{n}" for n in range(23)]


LEASES = {
    "a lease that the server ends": (
        "Its owner runs, or died less than its lease (30 s) ago",
        "once the lease is over",
    ),
    "a lease that is watched": (
        "Its owner runs, or died: that shows once some process has watched its lease (30 s) run out",
        "recover waits for that",
    ),
}


@pytest.mark.parametrize("kind", list(LEASES))
def test_where_sagas_are_owned_under_a_lease_nobody_says_that_the_owner_runs(
    world: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    who, todo = LEASES[kind]
    monkeypatch.setattr(FileLog, "lease", 30.0, raising=False)
    if kind == "a lease that is watched":
        monkeypatch.setattr(FileLog, "undecided", lambda self, saga_ids: 0.0, raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    with living("living"):
        shown = saga("show", "living").stdout
        assert "living  saga  RUNNING  owned" in shown and "running process" not in shown
        assert who in shown and todo in shown
        assert "agent-saga recover --saga living" in shown and "agent-saga recover --watch" in shown
        recovered = saga("recover", "--saga", "living")
        assert recovered.exit_code == 0 and recovered.stdout.split()[:2] == ["owned", "living"]
        assert f"owned: i{who[1:]}" in recovered.stdout and todo in recovered.stdout
        resolved = saga("resolve", "living", "1", "--as", "accepted", "--by", "a", "--note", "b")
        assert resolved.exit_code == 4 and who in one_line(resolved) and "its lease is over" in one_line(resolved)


def test_a_missing_handler_is_not_a_success(world: Path) -> None:
    result = saga("recover", "--saga", "dead-1", "--json")
    report = json.loads(result.stdout)
    assert report["untouched"] == ["dead-1"] and "cli.refund" in report["reasons"]["dead-1"]
    assert result.exit_code == 1
    assert saga("recover", "--saga", "wait-1").exit_code == 0  # suspended: as it should be


def test_recover_leaves_a_live_saga_alone(world: Path) -> None:
    with saga_scope("living", log="file:./log") as living:
        living.execute("look", lambda: 1, semantics=ActionSemantics.COMPENSABLE, compensate=lambda result: None)
        result = saga("recover", "--saga", "living", "--json")
        assert result.exit_code == 0 and json.loads(result.stdout)["live"] == ["living"]
    assert living.report is not None and living.report.clean


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("raise KeyError('hunter2')", "KeyError at"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit at"),
    ],
)
def test_a_module_that_cannot_be_imported(world: Path, source: str, said: str) -> None:
    (world / "unusable.py").write_text(source, "utf-8")
    result = saga("recover", "--import", "unusable")
    line = one_line(result)
    assert result.exit_code == 2 and "unusable" in line and said in line
    assert "hunter2" not in line
    sys.modules.pop("unusable", None)


def test_a_file_is_no_module_name(world: Path) -> None:
    for name in ("shop.py", "./shop", "shop:refund"):
        result = saga("recover", "--import", name)
        assert result.exit_code == 2 and "dotted module name" in one_line(result)


# --- resolve


def test_resolve_settles_and_says_who(world: Path) -> None:
    saga("recover", "--import", "shop", "--saga", "mail-1")
    words = ("mail-1", "mail", "--as", "accepted", "--by", "ada", "--note", "told the customer")
    result = saga("resolve", *words)
    assert result.exit_code == 0, result.output
    assert "ROLLED_BACK; remaining: step 2 mail" in result.stdout
    assert "accepted, says ada: told the customer" in saga("show", "mail-1").stdout
    again = saga("resolve", *words)
    assert again.exit_code == 2 and "nothing to resolve" in one_line(again)


def test_resolve_of_one_of_two_leaves_attention(world: Path) -> None:
    (world / "down").touch()
    saga("recover", "--import", "shop", "--saga", "mail-1")
    words = ("--by", "ada", "--note", "by hand", "--import", "shop", "--json")
    first = saga("resolve", "mail-1", "1", "--as", "compensated", *words)
    assert (first.exit_code, json.loads(first.stdout)["status"]) == (1, "NEEDS_ATTENTION")
    second = saga("resolve", "mail-1", "2", "--as", "accepted", *words)
    assert (second.exit_code, json.loads(second.stdout)["status"]) == (0, "ROLLED_BACK")


def test_resolve_with_a_result_lets_the_undo_be_derived(world: Path) -> None:
    words = ("--by", "ada", "--note", "seen in the ledger", "--result", '{"id": "ch_9"}')
    landed = saga("resolve", "doubt-1", "1", "--as", "landed", *words)
    assert landed.exit_code == 0, landed.output
    assert read_saga("file:./log", "doubt-1").steps[0].status == "DONE"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nobody", "1", "--as", "accepted", "--by", "a", "--note", "b"), "no saga 'nobody'"),
        (("mail-1", "9", "--as", "accepted", "--by", "a", "--note", "b"), "no step '9'"),
        (("mail-1", "pay", "--as", "accepted", "--by", "a", "--note", "b"), "no step 'pay'"),
        (("mail-1", "2", "--as", "accepted", "--by", "a"), "--note"),
        (("mail-1", "2", "--as", "accepted", "--note", "b"), "--by"),
        (("mail-1", "2", "--as", "accepted", "--by", " ", "--note", "b"), "signed"),
        (("mail-1", "2", "--as", "perhaps", "--by", "a", "--note", "b"), "--as"),
        (("mail-1", "2", "--as", "landed", "--by", "a", "--note", "b", "--result", "{"), "not JSON"),
        (("mail-1", "2", "--as", "accepted", "--by", "a", "--note", "b", "--result", "1"), "result"),
    ],
)
def test_resolve_refuses(world: Path, words: tuple[str, ...], said: str) -> None:
    before = read_saga("file:./log", "mail-1").steps
    result = saga("resolve", *words)
    assert result.exit_code == 2 and said in one_line(result)
    assert read_saga("file:./log", "mail-1").steps == before


def test_resolve_of_a_live_saga(world: Path) -> None:
    with saga_scope("living", log="file:./log") as living:
        living.execute("look", lambda: 1, semantics=ActionSemantics.COMPENSABLE, compensate=lambda result: None)
        result = saga("resolve", "living", "1", "--as", "accepted", "--by", "a", "--note", "b")
        assert result.exit_code == 4 and "'living'" in one_line(result)


# --- verify, and damage


def damage(world: Path) -> None:
    """Change a byte inside the record of the charge of saga dead-1."""
    (segment,) = world.glob("log/w-*/*.jsonl")
    text = segment.read_bytes()
    assert b"ch_4200" in text
    segment.write_bytes(text.replace(b"ch_4200", b"ch_4201", 1))


def test_verify_of_an_intact_log(world: Path) -> None:
    result = saga("verify", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found == {"intact": True, "records": found["records"], "first_broken": None} and found["records"] > 10


def test_damage_is_named_and_stops_what_it_may_concern(world: Path) -> None:
    damage(world)
    result = saga("verify", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and set(found) == {"intact", "records", "first_broken"}
    assert found["intact"] is False and "jsonl" in found["first_broken"]
    assert found["first_broken"] in saga("verify").stdout.replace("\n", "")

    report = saga("recover", "--import", "shop", "--json")
    assert report.exit_code == 3 and "dead-1" in json.loads(report.stdout)["damaged"]
    assert "refund ch_4201" not in ledger(world)

    shown = saga("show", "dead-1")
    assert shown.exit_code == 3 and "dead-1" in one_line(shown)
    listed = saga("list")
    assert listed.exit_code == 0 and "verify" in one_line(listed)


def test_what_is_no_log_any_more_is_damage(world: Path) -> None:
    (world / "log/log.json").write_text("{", "utf-8")
    result = saga("verify", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["intact"] is False
    listed = saga("list")
    assert listed.exit_code == 3 and "log.json" in one_line(listed)


# --- the log's address


@pytest.mark.parametrize("verb", [("list",), ("show", "x"), ("verify",), ("recover",), ("recover", "--watch")])
@pytest.mark.parametrize("url", ["nowhere", "ftp:x", "memory:", "file:"])
def test_an_address_that_is_none(world: Path, verb: tuple[str, ...], url: str) -> None:
    result = saga(*verb, "--log", url)
    assert result.exit_code == 2 and one_line(result)


@pytest.mark.parametrize("verb", [("list",), ("show", "x"), ("verify",), ("recover",)])
def test_nothing_is_created_by_looking(world: Path, verb: tuple[str, ...]) -> None:
    for url in ("file:./nowhere", "file:./shop.py"):
        result = saga(*verb, "--log", url)
        assert result.exit_code == 2 and one_line(result)
    assert not (world / "nowhere").exists()


def test_the_log_is_found_by_default_in_the_working_directory(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENT_SAGA_LOG")
    missing = saga("list")
    assert missing.exit_code == 2 and ".agent-saga" in one_line(missing)
    (world / "log").rename(world / ".agent-saga")
    assert "dead-1" in saga("list").stdout


# --- usage


@pytest.mark.parametrize(
    "words", [(), ("perhaps",), ("show",), ("list", "--perhaps"), ("recover", "--concurrency", "0")]
)
def test_usage_errors_are_one_line(words: tuple[str, ...]) -> None:
    result = saga(*words)
    assert result.exit_code == 2 and "--help" in one_line(result)


def test_what_is_not_utf8_is_nothing_that_a_log_could_hold(world: Path) -> None:
    for words in (("show", "order-\udcff"), ("recover", "--saga", "\udcff"), ("list", "--log", "file:\udcff")):
        result = saga(*words)
        assert result.exit_code == 2 and "is not UTF-8" in one_line(result)


def test_version() -> None:
    shown = json.loads(saga("version", "--json").stdout)
    line = saga("version").stdout
    assert shown["format"] == 1 and shown["version"] in line and shown["python"] in line
    assert saga("--version").stdout == line


def test_demo_ends_with_the_code_of_its_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("agent_saga_core.demo.acts.main", lambda words: asked.append(words) or 7)
    assert saga("demo").exit_code == saga("demo", "--json").exit_code == 7
    assert asked == [[], ["--json"]]


def test_what_nobody_foresaw_is_one_line_too(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(log: object) -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr("agent_saga_core.cli.reading.list_sagas", fail)
    result = saga("list")
    assert result.exit_code == 70 and "ZeroDivisionError at" in one_line(result)
    traced = CliRunner().invoke(app, ["--traceback", "list"])
    assert traced.exit_code == 70 and "Traceback" in traced.stderr
