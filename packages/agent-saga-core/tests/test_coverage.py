"""Coverage: what is read from a declaration, the manifest's verdict and JSON form, and the look into code."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_saga_core import (
    ActionSemantics,
    Compensation,
    CoverageManifest,
    Observation,
    compensator,
    delete_by,
    probe,
    saga_tool,
    undo,
)
from agent_saga_core.coverage import CoverageEntry, entry_for, opaque, reach
from agent_saga_core.registry import isolated_registry

READ_ONLY, COMPENSABLE = ActionSemantics.READ_ONLY, ActionSemantics.COMPENSABLE
IRREVERSIBLE, REVERSIBLE = ActionSemantics.IRREVERSIBLE, ActionSemantics.REVERSIBLE


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    with isolated_registry():
        yield


def pay(order: str) -> dict[str, str]:
    return {"id": order}


def declared(**declaration: Any) -> CoverageEntry:
    tool: Any = saga_tool(**declaration)(pay)
    return entry_for(tool, path="tools/pay", framework="python")


def local_refund(charge: str) -> None: ...


def refund_named(name: str = "pay.refund") -> Callable[..., None]:
    @compensator(name)
    def refund(charge: str) -> None: ...

    return refund


# --- what a declaration says


def test_a_named_inverse_survives_and_a_callable_does_not() -> None:
    named = declared(semantics=COMPENSABLE, compensate=undo(refund_named(), charge="result.id"))
    assert (named.wrapped, named.semantics, named.inverse, named.detail) == (True, COMPENSABLE, "named", "")
    assert (named.tool, named.identity, named.visibility, named.remote) == ("pay", "occurrence", "declared", False)
    local = declared(semantics=COMPENSABLE, compensate=undo(local_refund, charge="result.id"))
    assert local.inverse == "closure"


def test_a_compensator_that_is_not_registered_here_is_said() -> None:
    entry = declared(semantics=COMPENSABLE, compensate=undo("elsewhere.refund", charge="result.id"))
    assert entry.inverse == "named" and "'elsewhere.refund' is not registered here" in entry.detail


def test_a_handler_module_that_does_not_load_is_said_and_ends_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("secret")

    tool = saga_tool(semantics=COMPENSABLE, compensate=undo("gone.refund", charge="result.id"))(pay)
    monkeypatch.setattr("agent_saga_core.registry.compensator_named", broken)
    entry = entry_for(tool, path="p", framework="python")
    assert "ImportError" in entry.detail and "secret" not in entry.detail


def test_a_function_of_the_result_decides_at_each_call() -> None:
    entry = declared(semantics=COMPENSABLE, compensate=lambda result: Compensation(fn=local_refund))
    assert entry.inverse is None and not entry.covers_unknown and "at each call" in entry.detail


def test_no_inverse_and_nothing_to_undo_are_told_apart() -> None:
    assert declared(semantics=IRREVERSIBLE).inverse == "none"
    look = declared(semantics=READ_ONLY)
    assert look.inverse is None and look.covers_unknown
    state = declared(semantics=REVERSIBLE, compensate=undo(local_refund, charge="args.order"))
    assert state.inverse == "closure" and "gone with its process" in state.detail


def test_unknown_is_covered_by_a_safe_undo_or_a_probe() -> None:
    refund = refund_named()
    assert not declared(semantics=COMPENSABLE, compensate=undo(refund, charge="args.order")).covers_unknown
    assert declared(semantics=COMPENSABLE, compensate=delete_by(refund, charge="args.order")).covers_unknown
    assert not declared(semantics=COMPENSABLE, compensate=delete_by(refund, charge="result.id")).covers_unknown

    @probe("pay.look")
    def look(args: dict[str, Any], idempotency_key: str) -> Observation:
        return Observation(landed=None)

    named = declared(semantics=IRREVERSIBLE, probe="pay.look")
    assert named.covers_unknown and named.detail == ""
    local = declared(semantics=IRREVERSIBLE, probe=lambda args, idempotency_key: Observation(landed=None))
    assert local.covers_unknown and "only this process can ask it" in local.detail
    absent = declared(semantics=IRREVERSIBLE, probe="pay.gone")
    assert absent.covers_unknown and "'pay.gone' is not registered here" in absent.detail


def test_a_declared_key_comes_before_what_the_framework_gives() -> None:
    tool = saga_tool(semantics=READ_ONLY, key="args.order")(pay)
    assert entry_for(tool, path="p", framework="f", identity="call-id").identity == "key"
    plain = saga_tool(semantics=READ_ONLY)(pay)
    assert entry_for(plain, path="p", framework="f", identity="call-id").identity == "call-id"


def test_an_unwrapped_tool_says_nothing_of_itself() -> None:
    class Named:
        name = "lookup"

    for tool, name in ((pay, "pay"), (Named(), "lookup"), (functools.partial(pay), "partial")):
        entry = entry_for(tool, path="p", framework="f", remote=True, visibility="inferred")
        assert (entry.tool, entry.wrapped, entry.semantics, entry.identity) == (name, False, None, None)
        assert entry.remote and entry.visibility == "inferred"
    assert entry_for(Named(), path="p", framework="f", name="other").tool == "other"


# --- the manifest


def manifest() -> CoverageManifest:
    charge = saga_tool(semantics=COMPENSABLE, compensate=undo(refund_named(), charge="result.id"), name="charge")(pay)
    look = saga_tool(semantics=READ_ONLY, name="look")(pay)
    return CoverageManifest(
        framework="python",
        entries=(
            entry_for(charge, path="tools/charge", framework="python"),
            entry_for(look, path="tools/look", framework="python"),
            entry_for(pay, path="tools/pay", framework="python"),
            opaque("node:plan", "a function", framework="python"),
        ),
    )


def test_the_numbers() -> None:
    found = manifest()
    assert [entry.tool for entry in found.covered] == ["charge", "look"]  # READ_ONLY is covered
    assert [entry.tool for entry in found.uncovered] == ["pay"]
    assert [entry.path for entry in found.opaque] == ["node:plan"]
    assert found.percent == 50.0
    assert found.percent_with(["node:plan"]) == pytest.approx(200 / 3)
    assert found.percent_with("node:plan") == found.percent_with(["node:plan"])


def test_the_verdict_names_every_fault_with_its_path_and_the_way_out() -> None:
    with pytest.raises(AssertionError) as raised:
        manifest().assert_fully_covered(["node:gone", "tools/charge", "tools/pay"])
    first, pay_line, plan_line, *stale = str(raised.value).splitlines()
    assert first == "not fully covered (python):"
    assert "tools/pay: 'pay' is not wrapped" in pay_line and "READ_ONLY" in pay_line
    assert "node:plan: cannot be seen into (a function)" in plan_line and "acknowledge=['node:plan']" in plan_line
    assert ["matches nothing" in line for line in stale] == [True, False, False]
    assert "is a wrapped tool" in stale[1] and "Wrap the tool" in stale[2]


def test_full_coverage_passes_with_what_is_acknowledged_and_only_then() -> None:
    found = manifest()
    whole = CoverageManifest(framework="python", entries=(*found.covered, *found.opaque))
    whole.assert_fully_covered(["node:plan"])
    whole.assert_fully_covered("node:plan")
    with pytest.raises(AssertionError, match="node:plan"):
        whole.assert_fully_covered()
    with pytest.raises(AssertionError, match=r"acknowledge=\['node:plan'\] matches nothing"):
        CoverageManifest(framework="python", entries=found.covered).assert_fully_covered(["node:plan"])


def test_nothing_found_is_not_fully_covered() -> None:
    empty = CoverageManifest(framework="python")
    assert empty.percent == 0.0 and str(empty) == "no tool was found"
    with pytest.raises(AssertionError, match="no tool was found"):
        empty.assert_fully_covered()
    hidden = CoverageManifest(framework="f", entries=(opaque("all", "a server", framework="f"),))
    assert (hidden.percent, hidden.percent_with(["all"])) == (0.0, 100.0)


def test_equal_paths_are_told_apart_so_that_one_word_never_acknowledges_two() -> None:
    entries = [opaque(path, "a function", framework="f") for path in ("n", "n", "n#2", "n")]
    found = CoverageManifest(framework="f", entries=tuple(entries))
    assert [entry.path for entry in found.opaque] == ["n", "n#3", "n#2", "n#4"]
    twice = CoverageManifest.merged([found, found])
    assert len({entry.path for entry in twice.entries}) == 8
    with pytest.raises(AssertionError, match=r"n#3: cannot be seen into"):
        found.assert_fully_covered(["n", "n#2", "n#4"])


def test_manifests_are_put_under_a_name_and_together() -> None:
    other = CoverageManifest(framework="toyframe", entries=(opaque("planner", "a function", framework="toyframe"),))
    one = manifest()
    both = CoverageManifest.merged([one, other.under("crew"), one])
    assert both.framework == "python, toyframe"
    assert [entry.path for entry in both.opaque] == ["node:plan", "crew/planner", "node:plan#2"]
    assert len(both.covered) == 4


def test_json_gives_back_the_same_and_is_plain_data() -> None:
    found = manifest()
    data = json.loads(json.dumps(found.to_json()))
    assert data["version"] == 1 and set(data) == {"version", "framework", "entries"}
    assert set(data["entries"][0]) == set(CoverageEntry.__struct_fields__)
    assert CoverageManifest.from_json(data) == found
    data["percent"] = 12.5
    data["entries"][0]["of a later release"] = 1
    assert CoverageManifest.from_json(data) == found


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"entries": [{}]}, {"framework": None}, {"entries": [{"path": "a", "visibility": "x"}]}]
)
def test_what_is_no_manifest_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no coverage manifest of version 1"):
        CoverageManifest.from_json({**manifest().to_json(), **change})


def test_it_reads_as_a_table() -> None:
    lines = str(manifest()).splitlines()
    assert lines[0].split("  ")[0] == "path" and "covers unknown" in lines[0]
    assert lines[1].split() == ["tools/charge", "charge", "yes", "COMPENSABLE", "named", "no", "occurrence"]
    assert lines[2].split() == ["tools/look", "look", "yes", "READ_ONLY", "-", "-", "occurrence"]
    assert lines[3].split() == ["tools/pay", "pay", "no", "-", "-", "-", "-"]
    assert lines[4:] == ["node:plan: opaque, a function", "2 of 3 tools covered, 1 opaque: 50%"]
    only = CoverageManifest(framework="f", entries=(opaque("all", "a server", framework="f"),))
    assert str(only) == "all: opaque, a server\n0 of 0 tools covered, 1 opaque: 0%"


def test_a_percentage_is_never_rounded_up_to_all() -> None:
    look = saga_tool(semantics=READ_ONLY)(pay)
    entries = [entry_for(look, path=str(n), framework="f") for n in range(999)]
    almost = CoverageManifest(framework="f", entries=(*entries, entry_for(pay, path="x", framework="f")))
    assert str(almost).endswith("999 of 1000 tools covered: 99%")


# --- the look into code


class Marker:
    """Something to be found."""

    def __init__(self, name: str) -> None:
        self.name = name


A, B, C = Marker("a"), Marker("b"), Marker("c")
TABLE = {"pay": [A], 1: B}


def found_by(fn: object) -> dict[str, str]:
    """Name of each marker, by how it is reached."""
    return {path: item.name for path, item in reach(fn) if type(item) is Marker}


def test_closures_globals_defaults_and_nested_functions() -> None:
    inner = Marker("inner")

    def node(state: object, extra: Marker = C, *, named: Marker = B) -> object:
        def later() -> object:
            return [A for _ in range(3)]

        return inner, later

    assert found_by(node) == {"closure:inner": "inner", "default:extra": "c", "default:named": "b", "global:A": "a"}


def test_a_cell_that_is_not_filled_yet_is_no_error() -> None:
    def node() -> object:
        return late

    assert found_by(node) == {}
    late = A
    assert found_by(node) == {"closure:late": "a"}


def test_a_name_in_builtins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.everywhere", A, raising=False)

    def node() -> object:
        return everywhere  # type: ignore[name-defined]  # noqa: F821

    assert found_by(node) == {"builtin:everywhere": "a"}


def test_containers() -> None:
    several = (A, {B}, {"x": C})

    def node() -> object:
        return several

    assert found_by(node) == {"closure:several[0]": "a", "closure:several[1][0]": "b", "closure:several[2]['x']": "c"}

    def table() -> object:
        return TABLE

    assert found_by(table) == {"global:TABLE['pay'][0]": "a", "global:TABLE[1]": "b"}


def helper(depth: int) -> object:
    return helper(depth - 1) or other_helper()


def other_helper() -> object:
    return helper(1) or A


def test_functions_that_are_called_are_followed_even_in_a_circle() -> None:
    def node() -> object:
        return helper(2)

    assert found_by(node) == {"global:helper/global:other_helper/global:A": "a"}


def test_partials_and_methods() -> None:
    class Till:
        def __init__(self) -> None:
            self.tools = [A]
            self.unnamed = B

        def run(self, extra: object = None, **more: object) -> object:
            return self.help()

        def help(self) -> object:
            return C

    till = Till()
    assert found_by(till.run) == {"self.tools[0]": "a", "self.unnamed": "b", "self.help/global:C": "c"}
    assert found_by(functools.partial(pay, A, more=B)) == {"partial:0": "a", "partial:more": "b"}
    assert set(found_by(functools.partial(till.run, A, more=B)).values()) == {"a", "b", "c"}


def test_objects_are_searched_for_what_the_code_names() -> None:
    class Box:
        shared = C

        def __init__(self) -> None:
            self.tool, self.secret = A, B

    box = Box()

    def node() -> object:
        return box.tool, box.shared

    assert found_by(node) == {"closure:box.tool": "a", "closure:box.shared": "c"}


def test_slots_properties_static_methods_and_callable_objects() -> None:
    class Slotted:
        __slots__ = ("empty", "tool")

        def __init__(self) -> None:
            self.tool = A

        def __call__(self) -> object:
            return self.lazy, self.static()

        @property
        def lazy(self) -> object:
            return B

        @staticmethod
        def static() -> object:
            return C

    assert set(found_by(Slotted()).values()) == {"a", "b", "c"}


def test_classes_that_are_made_and_cached_functions() -> None:
    class Job:
        def __init__(self) -> None:
            self.tool = A

        @functools.cached_property
        def cached(self) -> object:
            return B

    @functools.lru_cache
    def remembered() -> object:
        return C

    def node() -> object:
        return Job().cached, remembered()

    assert set(found_by(node).values()) == {"a", "b", "c"}


def test_modules_are_searched_and_installed_ones_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "reach_library.py").write_text(
        "HIDDEN = []\n"
        "def wraps(fn):\n"
        "    def wrapper():\n"
        "        return HIDDEN, fn()\n"
        "    return wrapper\n"
        "def plain():\n"
        "    return HIDDEN\n",
        "utf-8",
    )
    (tmp_path / "reach_shop.py").write_text("def charge():\n    return TOOL\nTOOL = OTHER = None\n", "utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(installed), *sys.path])
    library, shop = importlib.import_module("reach_library"), importlib.import_module("reach_shop")
    library.HIDDEN.append(A)
    shop.TOOL, shop.OTHER = B, C

    @library.wraps
    def decorated() -> object:
        return shop.charge(), library.plain()

    def node() -> object:
        return decorated()

    paths = found_by(node)
    assert paths == {"closure:decorated/closure:fn/closure:shop.charge/global:TOOL": "b"}


def test_what_is_declared_is_found_and_not_followed() -> None:
    @saga_tool(semantics=READ_ONLY)
    def look() -> object:
        return A

    def node() -> object:
        return look()

    assert found_by(node) == {}
    assert [item for _, item in reach(node) if item is look] == [look]


def test_no_code_of_the_users_is_run() -> None:
    ran: list[str] = []

    def run(*_: object) -> Any:
        ran.append("ran")
        raise RuntimeError("a scan must not get here")

    class Meta(type):
        __getattribute__ = __instancecheck__ = __subclasscheck__ = run

    special = dict.fromkeys("getattribute eq hash bool len iter repr get".split(), run)
    special = {f"__{name}__": fn for name, fn in special.items()}
    hostile: Any = type.__call__(Meta, "Hostile", (), {**special, "__class__": property(run), "lazy": property(run)})
    trap = object.__new__(hostile)
    bases: tuple[Any, ...] = (list, dict, tuple, set)
    traps = [trap, *(base.__new__(type.__call__(Meta, "Trap", (base,), dict(special))) for base in bases)]
    hides = type("Hides", (), {"__dict__": property(run), "tool": A})()

    def node() -> object:
        return trap.lazy, traps, hides.tool, hostile.lazy

    assert found_by(node) == {"closure:hides.tool": "a"}
    assert found_by(functools.partial(node, trap)) == {"partial:func/closure:hides.tool": "a"}
    assert ran == []


def test_no_code_of_the_users_is_run_by_the_names_of_things() -> None:
    ran: list[str] = []

    def run(*_: object) -> Any:
        ran.append("ran")
        raise RuntimeError("a scan must not get here")

    special = dict.fromkeys(
        ["__eq__", "__str__", "__format__", "__lt__", "partition", "startswith", "get", "items"], run
    )
    name: Any = type("Name", (str,), {**special, "__hash__": str.__hash__})
    space: Any = type("Space", (dict,), {**special, "__getitem__": run})
    made: Any = type("Made", (), {"__module__": name("nowhere"), "__call__": lambda self: self.tool})()
    made.__dict__[name("tool")] = A
    globals_ = space(tool=A, __name__=name("mine"), __file__=name("/mine.py"))
    exec("def node(): return tool", globals_)
    node: Any = dict[str, Any].get(globals_, "node")

    assert found_by(made) == {"self.tool": "a"}
    assert found_by(node) == {"global:tool": "a"}
    assert found_by(functools.partial(print, **{name("tool"): A})) == {"partial:tool": "a"}
    assert ran == []


def test_a_scan_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_saga_core.coverage.scan.MAX_OBJECTS", 500)
    monkeypatch.setattr("agent_saga_core.coverage.scan.MAX_ITEMS", 100)
    many = [[object() for _ in range(1000)] for _ in range(1000)]
    knot: list[object] = []
    knot.append(knot)

    def node() -> object:
        return knot, many

    assert 100 < len(list(reach(node))) <= 500


def test_objects_that_name_each_other_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the ways through them multiply, and use up what a scan may look at before it gets to the end."""
    monkeypatch.setattr("agent_saga_core.coverage.scan.MAX_OBJECTS", 300)

    class Knot:
        def __init__(self, behind: object) -> None:
            self.a = self.b = self.c = self.d = behind

    first = Knot(None)
    first.d = A
    for _ in range(8):
        first = Knot(first)

    def node() -> object:
        return first.a.b.c.d  # type: ignore[union-attr]

    assert found_by(node) == {"closure:first" + ".a" * 8 + ".d": "a"}
