from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_saga_core.errors import DeclarationError
from agent_saga_core.paths import ROOTS, Path, PathMissing, parse
from agent_saga_core.values import Redaction


@dataclass
class Order:
    id: str
    _token: str = "hidden"

    @property
    def broken(self) -> str:
        raise RuntimeError("boom")


ROOT_VALUES = {
    "result": Order("ch_1"),
    "args": {"items": [{"sku": "a"}, {"sku": "b"}], "_id": 7, "x-y": 1, "first name": 2, "none": None},
    "saga": SimpleNamespace(id="order-402"),
    "step": {"forward_key": "f", "compensation_key": "c"},
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("result.id", "ch_1"),
        ("args.items[0].sku", "a"),
        ("args.items[-1].sku", "b"),
        ("args._id", 7),
        ("args.x-y", 1),
        ("args.none", None),
        ("saga.id", "order-402"),
        ("step.forward_key", "f"),
        ("step.compensation_key", "c"),
        ("result", ROOT_VALUES["result"]),
    ],
)
def test_a_path_leads_to_a_value(text: str, value: object) -> None:
    path = parse(text)
    assert path.get(ROOT_VALUES) == value
    assert str(path) == text


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("result.charge_id", "result.charge_id"),
        ("args.items[2].sku", "args.items[2]"),
        ("args.items.sku", "args.items.sku"),
        ("args.missing.deeper", "args.missing"),
        ("result.id[0]", "result.id[0]"),  # a character of an id is never what was meant
        ("args[0]", "args[0]"),
        ("result._token", "result._token"),
        ("args.get", "args.get"),  # a method of dict is not data
        ("saga.id.x", "saga.id.x"),
    ],
)
def test_a_missing_place_is_named_without_values(text: str, at: str) -> None:
    with pytest.raises(PathMissing) as caught:
        parse(text).get(ROOT_VALUES)
    assert (caught.value.path, caught.value.at_segment) == (text, at)
    assert "ch_1" not in str(caught.value) and "hidden" not in str(caught.value)


def test_a_missing_root_is_named() -> None:
    with pytest.raises(PathMissing, match="'result'"):
        parse("result.id").get({"args": {}})


def test_private_attributes_say_that_they_are_private() -> None:
    with pytest.raises(PathMissing, match="not reachable"):
        parse("result._token").get(ROOT_VALUES)


def test_a_lookup_never_creates_a_key() -> None:
    counts: defaultdict[str, int] = defaultdict(int)
    with pytest.raises(PathMissing):
        parse("args.a").get({"args": counts})
    assert not counts


def test_what_a_property_raises_comes_through() -> None:
    with pytest.raises(RuntimeError, match="boom"):
        parse("result.broken").get(ROOT_VALUES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (4200, "int"),
        (None, "NoneType"),
        (b"result.id", "bytes"),
        ("", "position 0"),
        ("charge_id", "position 0"),
        ("results.id", "position 0"),
        (" result.id", "position 0"),
        ("result.", "position 6"),
        ("result..id", "position 6"),
        ("result.id ", "position 9"),
        ("result.items[a]", "position 12"),
        ("result.items[0", "position 12"),
        ("result.items[]", "position 12"),
        ("result.a b", "position 8"),
        ("result.items[0]sku", "position 15"),
        ("result.__class__", "not reachable"),
        ("args.x.__dict__.y", "position 7"),
    ],
)
def test_what_is_no_path_says_where_and_what_to_write(text: object, says: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert str(caught.value).rstrip().endswith(".")


def test_names_secret() -> None:
    redaction = Redaction()
    assert parse("args.card.api_key").names_secret(redaction)
    assert parse("result.token.id").names_secret(redaction)
    assert not parse("result.max_tokens").names_secret(redaction)
    assert not parse("args.items[0].sku").names_secret(redaction)


segments = st.lists(
    st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True).filter(lambda name: not name.startswith("__"))
    | st.integers(-(10**6), 10**6)
)


@given(st.sampled_from(ROOTS), segments)
def test_text_and_path_are_the_same_thing(root: str, parts: list[str | int]) -> None:
    path = Path(root, tuple(parts))
    assert parse(str(path)) == path


@given(st.text())
def test_any_text_is_a_path_or_a_declaration_error(text: str) -> None:
    try:
        assert str(parse(text)).startswith(ROOTS)
    except DeclarationError:
        pass
