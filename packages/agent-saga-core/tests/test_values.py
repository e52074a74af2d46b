from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import io
import ipaddress
import math
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import threading
import types
import typing
import uuid
import zoneinfo
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_saga_core import values
from agent_saga_core.errors import DeclarationError
from agent_saga_core.values import (
    MAX_DEPTH,
    Credential,
    DigestedValue,
    Redacted,
    RedactedValue,
    Redaction,
    Secret,
    Undecodable,
    Unstorable,
    credential,
    decode,
    decode_args,
    describe_error,
    digested,
    display,
    encode,
    encode_args,
    fingerprint,
    json_bytes,
    resolve_credentials,
    scrub,
    set_credential_resolver,
    set_redaction,
)

NO_NAMES = Redaction(())


class Color(enum.Enum):
    RED = "red"
    GREEN = ("not", "json")


class Status(enum.StrEnum):
    OK = "ok"


class Level(enum.IntEnum):
    LOW = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


T = typing.TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Item:
    sku: str
    price: decimal.Decimal = decimal.Decimal(0)


@dataclasses.dataclass
class Order:
    id: str
    items: list[Item] = dataclasses.field(default_factory=list)
    parent: Order | None = None
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(slots=True)
class Box(typing.Generic[T]):
    content: T


class ItemBox(Box[Item]):
    pass


class Struct(msgspec.Struct, rename="camel"):
    order_id: str
    item: Item | None = None
    note: str | msgspec.UnsetType = msgspec.UNSET
    count: int = 0

    def __post_init__(self) -> None:
        self.count += 1


class Point(typing.NamedTuple):
    x: int
    color: Color = Color.RED


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")

    name: str = pydantic.Field(alias="displayName")
    item: Item
    url: pydantic.HttpUrl | None = None
    when: dt.datetime | None = None
    _seen: int = pydantic.PrivateAttr(default=0)

    @pydantic.field_validator("name")
    @classmethod
    def louder(cls, value: str) -> str:
        return value + "!"  # not idempotent: reading must not validate again


class Wrapped(pydantic.BaseModel, typing.Generic[T]):
    inner: T


class Root(pydantic.RootModel[list[Item]]):
    pass


class Name(str):
    pass


class Tags(list[Item]):
    pass


class Account(dict[str, Any]):
    pass


class Typed(typing.TypedDict):
    item: Item
    rest: typing.NotRequired[list[Item]]


def stored(data: Any) -> Any:
    """Through bytes and back, as a log does it."""
    return msgspec.json.decode(msgspec.json.encode(data))


def there_and_back(value: Any, hint: Any = None, *, redaction: Redaction = NO_NAMES) -> Any:
    return decode(stored(encode(value, hint=hint, redaction=redaction).data), hint)


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type, at every depth; NaN equals NaN, and 0.0 does not equal -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return (
            math.isnan(left)
            and math.isnan(right)
            or (left == right and math.copysign(1, left) == math.copysign(1, right))
        )
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) for x, y in zip(left.items(), right.items(), strict=True) for a, b in zip(x, y, strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, (set, frozenset)):
        return left == right and {(type(x), x) for x in left} == {(type(x), x) for x in right}
    return bool(left == right)


# --- what is carried ---------------------------------------------------------------------------------------------

CARRIED = [
    None, True, False, 0, -1, 2**53, 2**53 + 1, -(2**63), 2**64, 10**400, -(1 << 100_000), "", "x", "ä€𝄞",
    0.0, -0.0, 1.0, 1e16, 1e300, 5e-324, math.nan, math.inf, -math.inf, 1j, complex(-0.0, math.inf),
    "\ud800", "a\udc80b", {"\ud800": "\udfff"}, b"", b"\x00\xff", bytearray(b"ab"),
    (), (1, (2, [3])), [], [()], {1, 2}, set(), frozenset({(1, 2), "a"}), {frozenset({1}): {2}},
    {}, {"a": {"b": [1]}}, {1: "a", "1": "b"}, {None: 1, True: 2, 2.5: 3, (1,): 4, b"k": 5}, {"b": 1, "a": 2, 3: 4},
    {"$map": []}, {"$redacted": True}, {"$digest": {}}, {"$tuple": [1]}, {"$credential": "x"}, {"$": 1},
    {"__class__": "os.system"}, {"$dataclass": ["subprocess.Popen", {"args": "id"}]}, {"a": 1, "$str": "eA=="},
    decimal.Decimal("1.10"), decimal.Decimal("-0"), decimal.Decimal("1E+999999"), decimal.Decimal("Infinity"),
    uuid.UUID(int=7), dt.date(1, 1, 1), dt.timedelta(-1, 2, 3), dt.timedelta.max,
    dt.datetime(2024, 1, 2, 3, 4, 5, 6), dt.datetime(2024, 1, 2, fold=1), dt.datetime(2024, 1, 2, tzinfo=dt.UTC),
    dt.datetime(2024, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=-5, microseconds=1))),
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    dt.datetime(2024, 3, 31, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    dt.time(1, 2, 3), dt.time(1, 2, fold=1), dt.time(1, 2, tzinfo=dt.UTC), dt.time(3, tzinfo=zoneinfo.ZoneInfo("UTC")),
    pathlib.Path("/a/b"), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path("a\udcff"),
    ipaddress.ip_address("10.0.0.1"), ipaddress.ip_address("::1"), range(1, 10, 2), range(2**70, 2**71),
    collections.deque([1, (2,)]), collections.deque([1], maxlen=3), collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.Counter("aab"), types.MappingProxyType({"a": (1,)}), types.SimpleNamespace(id="ch_1", n=(1,)),
    msgspec.UNSET, Credential("payments"), {"nested": [Credential("x")]},
]  # fmt: skip


@pytest.mark.parametrize("value", CARRIED, ids=lambda value: type(value).__name__)
def test_carried_without_a_hint(value: Any) -> None:
    assert same(there_and_back(value), value)
    assert same(there_and_back({"in": [value]}), {"in": [value]})
    msgspec.json.encode(display(encode(value, redaction=NO_NAMES).data))


def test_time_zones_keep_their_names_and_folds() -> None:
    berlin = there_and_back(dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")))
    assert berlin.tzinfo is zoneinfo.ZoneInfo("Europe/Berlin") and berlin.fold == 1
    named = there_and_back(dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")))
    assert named.tzname() == "CET" and named.utcoffset() == dt.timedelta(hours=1)


MODEL = Model(
    displayName="n",
    item=Item("a", decimal.Decimal("1.10")),
    url="https://x.example/y",
    when="2024-01-01T00:00:00",
    more={"$a": (1,)},
)
MODEL._seen = 3
ORDER = Order("o", [Item("a", decimal.Decimal("1.10"))], Order("p"))

OWN = [
    (Color.RED, Color), (Color.GREEN, Color | None), (Status.OK, Status), (Level.LOW, int | Level),
    (Rights.READ | Rights.WRITE, Rights), (Rights(0), Rights), (Color.RED, typing.Literal[Color.RED]),
    (Item("a"), Item), ([Item("a")], list[Item]), ({"k": (Item("a"), 1)}, dict[str, tuple[Item, int]]),
    ((Item("a"), Item("b")), tuple[Item, ...]), ({Item("a")}, set[Item]), ({Item("a"): Point(1)}, dict[Item, Point]),
    (collections.deque([Item("a")]), collections.deque[Item]), (ORDER, Order), ([ORDER, None], list[Order | None]),
    (Item("a"), typing.Annotated[Item | Order, "doc"]), (Order("a"), typing.Union[Item, Order]),  # noqa: UP007
    (Box(Item("a")), Box[Item]), ([Box([Item("a")])], list[Box[list[Item]]]), (ItemBox(Item("a")), ItemBox),
    (Struct("o", Item("a")), Struct), (Point(1), Point), (Point(1, Color.GREEN), Point | None), (MODEL, Model),
    (Wrapped[Item](inner=Item("a")), Wrapped[Item]), (Root([Item("a")]), Root),
    (Model.model_construct(name="n", item=Item("b")), Model),
    (Name("x"), Name), (Tags([Item("a")]), Tags), (Account(a=1), Account),
    ({"item": Item("a"), "rest": [Item("b")]}, Typed),
    (pydantic.AnyUrl("https://a.example/b"), pydantic.AnyUrl),
]  # fmt: skip


@pytest.mark.parametrize(("value", "hint"), OWN, ids=lambda value: type(value).__name__)
def test_the_programs_classes_are_carried_through_a_hint(value: Any, hint: Any) -> None:
    back = there_and_back(value, hint)
    assert same(back, value)
    assert repr(back) == repr(value)
    data = encode(value, redaction=NO_NAMES).data
    with pytest.raises(Undecodable):
        decode(data)
    msgspec.json.encode(display(data))
    decode(data, strict=False)


def test_the_fixed_offset_of_pydantic_becomes_that_of_the_library() -> None:
    model = Model(displayName="n", item=Item("a"), when="2024-01-01T00:00:00+01:00")
    back = there_and_back(model, Model)
    assert back == model and type(back.when.tzinfo) is dt.timezone


def test_state_is_restored_not_computed_again() -> None:
    assert there_and_back(ORDER, Order).made == 1
    assert there_and_back(Struct("o"), Struct).count == 1
    back = there_and_back(MODEL, Model)
    assert back.name == "n!" and back._seen == 3
    assert back.model_fields_set == MODEL.model_fields_set
    assert back.model_extra == {"more": {"$a": (1,)}}


def test_attributes_beside_the_fields_survive() -> None:
    item = Order("o")
    item.cache = {"a": (1,)}  # type: ignore[attr-defined]
    assert there_and_back(item, Order).cache == {"a": (1,)}


def test_a_field_that_the_class_gained_takes_its_default() -> None:
    row = encode(Item("a")).data["$dataclass"]
    assert decode({"$dataclass": [row[0], {"sku": "a"}]}, Item) == Item("a")
    with pytest.raises(Undecodable, match="was not stored"):
        decode({"$dataclass": [row[0], {"price": 1}]}, Item)
    with pytest.raises(Undecodable, match="no longer has"):
        decode({"$dataclass": [row[0], {"sku": "a", "gone": 1}]}, Item)


def test_a_script_and_the_module_it_is_imported_as_are_the_same_class() -> None:
    data = stored(encode(Item("a")).data)
    data["$dataclass"][0] = "__main__.Item"
    assert decode(data, Item) == Item("a")
    data["$dataclass"][0] = "another_module.Item"
    with pytest.raises(Undecodable, match="another_module.Item"):
        decode(data, Item)


def test_a_subclass_is_not_rebuilt_as_its_base() -> None:
    with pytest.raises(Undecodable, match="ItemBox"):
        decode(encode(ItemBox(Item("a"))).data, Box[Item])


@pytest.mark.parametrize("name", sorted(values.plain.NUMPY))
def test_numpy_scalars(name: str) -> None:
    value = getattr(numpy, name)(1)
    back = there_and_back([value])[0]
    assert type(back) is type(value) and back == value


@pytest.mark.parametrize("value", [numpy.float32("nan"), numpy.float64("-inf"), numpy.float32(0.1), numpy.int64(2**62)])
def test_numpy_edges(value: Any) -> None:
    back = there_and_back(value)
    assert type(back) is type(value) and (back == value or back != back)


def test_true_is_not_one() -> None:
    assert there_and_back([True, 1, 1.0]) == [True, 1, 1.0]
    assert [type(item) for item in there_and_back([True, 1, 1.0])] == [bool, int, float]
    assert len({fingerprint("t", encode({"a": item}).data) for item in (True, 1, 1.0, "1")}) == 4


def test_a_big_string() -> None:
    big = "ä" * 10_000_000
    assert there_and_back({"text": big})["text"] == big


# --- what is not carried -----------------------------------------------------------------------------------------


def generator() -> Iterator[int]:
    yield 1


def cyclic() -> list[Any]:
    loop: list[Any] = []
    loop.extend([loop, loop])
    return loop


def nested(levels: int) -> Any:
    value: Any = "end"
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    "make",
    [
        lambda: io.StringIO("x"), lambda: len, lambda: lambda: 0, generator, lambda: threading.Lock(), object,
        lambda: type, lambda: sys, lambda: memoryview(b"x"), lambda: collections.defaultdict(list), cyclic,
        lambda: numpy.array([1]), lambda: numpy.longdouble(1), lambda: ValueError("x"), lambda: iter([1]),
        lambda: msgspec.Raw(b"1"), lambda: Model.model_construct(name="x"), lambda: nested(MAX_DEPTH + 1),
        lambda: dt.datetime(2024, 1, 1, tzinfo=type("Z", (dt.tzinfo,), {"utcoffset": lambda s, d: dt.timedelta(0)})()),
    ],
)  # fmt: skip
def test_refused_by_place_and_type_without_values(make: Any) -> None:
    value = make()
    with pytest.raises(Unstorable) as caught:
        encode({"items": [{"f": value}]})
    assert caught.value.path.startswith("args.items[0].f")
    assert len(str(caught.value)) < 400
    with pytest.raises(Unstorable):
        encode_args({"f": value}, {"f": Any})


def test_a_socket_is_refused() -> None:
    with socket.socket() as connection, pytest.raises(Unstorable, match="open resource"):
        encode(connection)


def test_messages_hold_neither_values_nor_odd_keys() -> None:
    with pytest.raises(Unstorable) as caught:
        encode({"jane@example.com": {"ok": [len]}})
    assert str(caught.value).startswith("args[…].ok[0] (builtin_function_or_method)")


def test_depth() -> None:
    deep = nested(MAX_DEPTH)
    assert there_and_back(deep) == deep
    as_pairs: Any = 1
    for _ in range(MAX_DEPTH):
        as_pairs = {1: as_pairs}  # the form that takes most JSON levels
    assert there_and_back(as_pairs) == as_pairs
    with pytest.raises(Undecodable, match="nested deeper"):
        decode(nested(MAX_DEPTH + 1))
    assert display(nested(5000)) is not None


def test_a_stack_that_is_nearly_used_up_is_no_crash() -> None:
    value = nested(MAX_DEPTH)

    def at_the_bottom(use: typing.Callable[[], Any]) -> Any:
        try:
            return at_the_bottom(use)
        except RecursionError:
            return use()

    with pytest.raises(Unstorable, match="stack"):
        at_the_bottom(lambda: encode(value))
    with pytest.raises(Undecodable, match="stack"):
        at_the_bottom(lambda: decode(value))


def test_odd_keys_at_every_level_cost_linear_time() -> None:
    value: Any = {}
    for _ in range(MAX_DEPTH - 1):
        value = {"a": value, "$x": 1}  # were the first members written twice, this would never end
    assert there_and_back(value) == value


HOSTILE = [
    {"$unknown": 1}, {"$int": "1_000"}, {"$int": " 1"}, {"$int": 5}, {"$int": "0x1"}, {"$float": "1e999x"},
    {"$str": "!!"}, {"$str": "eA==" * 2}, {"$bytes": 1}, {"$set": [[1]]}, {"$set": [1, 1]}, {"$map": [[1]]},
    {"$map": [[[1], 2]]}, {"$map": [["a", 1], ["a", 2]]}, {"$map": {}}, {"$datetime": "now"}, {"$time": 5},
    {"$datetime": ["2024-01-01T00:00:00", 7, None, None]}, {"$timedelta": [1e9, 0, 0]}, {"$timedelta": [10**10, 0, 0]},
    {"$datetime": ["2024-01-01T00:00:00", 0, "../../etc/passwd", None]},
    {"$uuid": "{00000000-0000-0000-0000-000000000007}"},
    {"$datetime": ["2024-01-01T00:00:00", 0, "os/path", None]}, {"$decimal": "1_0"}, {"$deque": [[1, 2], 1]},
    {"$range": [0, 1, 0]}, {"$numpy": ["void", 1]}, {"$numpy": ["int8", []]}, {"$numpy": ["__import__", "os"]},
    {"$tuple": 1}, {"$tuple": {"$map": []}}, {"$counter": 5}, {"$namespace": {"$map": [[1, 2]]}}, {"$credential": 5},
    {"a": 1, "$map": []}, {"$map": [], "$set": []}, {"$dataclass": "os.system"}, {"$dataclass": ["os.system", {}]},
    {"$model": [5, 5]}, {"$enum": ["os.O_RDONLY", "x"]}, {"$subclass": ["builtins.type", {}]}, {"$digest": []},
    {"$dataclass": [{"$str": "!"}, {}]}, object(), (1,), {"a": b""},
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: type(data).__name__)
@pytest.mark.parametrize("hint", [None, Item, Order | Color | Model, list[Item]])
def test_hostile_data_is_refused_cleanly(data: Any, hint: Any) -> None:
    for wrapped in (data, [data], {"a": data}):
        with pytest.raises(Undecodable):
            decode(wrapped, hint)
        display(wrapped)
    decode_args({"a": data}, {"a": hint}, strict=False)


@pytest.mark.parametrize(
    "state",
    [
        5, [], {"sku": 1, "__class__": "x"}, {"sku": "a", "price": {"$unknown": 1}}, {"$map": [[1, 2]]},
    ],
)  # fmt: skip
def test_hostile_state_of_a_known_class(state: Any) -> None:
    for tag, hint in (("$dataclass", Item), ("$struct", Struct), ("$model", Model), ("$namedtuple", Point)):
        with pytest.raises(Undecodable):
            decode({tag: [f"{__name__}.{hint.__qualname__}", state]}, hint)
        with pytest.raises(Undecodable):
            decode({tag: [f"{__name__}.{hint.__qualname__}", {}, state]}, hint)


def test_reading_imports_nothing_that_data_names() -> None:
    code = """
import sys
from agent_saga_core.values import Undecodable, decode, display
before = set(sys.modules)
for name in ("antigravity.x", "this.s", "wsgiref.simple_server.WSGIServer"):
    for tag in ("model", "dataclass", "struct", "namedtuple", "enum", "subclass", "url"):
        data = {"$" + tag: [name, {"a": 1}]}
        display(data)
        decode(data, strict=False)
        try:
            decode(data)
        except Undecodable:
            continue
        raise SystemExit("decoded")
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_a_zone_is_looked_for_only_where_zones_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "zones").mkdir()
    (tmp_path / "outside").write_bytes(b"x")
    monkeypatch.setattr(zoneinfo, "TZPATH", (str(tmp_path / "zones"),))
    assert not values.plain.zone_known("../outside")
    assert not values.plain.zone_known(str(tmp_path / "outside"))
    assert not values.plain.zone_known("antigravity/Nowhere")
    (tmp_path / "zones" / "Here").write_bytes(b"x")
    assert values.plain.zone_known("Here")


def test_importing_costs_no_framework() -> None:
    code = "import sys, agent_saga_core.values, agent_saga_core.paths; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert "msgspec" in loaded
    assert loaded.isdisjoint({"pydantic", "numpy", "pydantic_core"})


# --- properties --------------------------------------------------------------------------------------------------

tag_like = st.sampled_from(
    ["$map", "$redacted", "$tuple", "$digest", "$", "$$", "$dataclass", "__class__", "$credential"]
)
keys = st.text(max_size=5) | tag_like | st.integers() | st.booleans() | st.none() | st.binary(max_size=3)
keys = keys | st.text(st.characters(categories=["Cs"]), max_size=2) | st.tuples(st.integers(), st.text(max_size=2))
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10)
    | st.binary(max_size=9)
    | st.decimals(allow_nan=False) | st.datetimes() | st.datetimes(timezones=st.timezones()) | st.times() | st.dates()
    | st.timedeltas() | st.uuids() | st.text(st.characters(categories=["Cs", "L"]), max_size=3) | tag_like
    | st.complex_numbers(allow_nan=False)
)  # fmt: skip
everything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(scalars, max_size=3) | st.sets(scalars, max_size=3)
        | st.dictionaries(tag_like, inner, min_size=1, max_size=2) | st.lists(inner, max_size=3).map(collections.deque)
    ),
    max_leaves=12,
)  # fmt: skip


@given(everything)
@settings(max_examples=300, deadline=None)
def test_any_value_comes_back(value: Any) -> None:
    encoded = encode(value, redaction=NO_NAMES)
    assert encoded.redacted == ()
    assert same(decode(stored(encoded.data)), value)
    msgspec.json.encode(display(encoded.data))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | tag_like, inner, max_size=3)
        | st.dictionaries(st.sampled_from(sorted(values.reading.READERS)), inner, min_size=1, max_size=1)
    ),
    max_leaves=10,
)  # fmt: skip


@given(plain)
@settings(max_examples=300, deadline=None)
def test_any_data_is_read_or_refused(data: Any) -> None:
    for hint in (None, Item, list[Order | Color] | dict[str, Model]):
        try:
            decode(data, hint)
        except Undecodable:
            pass
    msgspec.json.encode(display(data))
    assert isinstance(decode_args(data, {}, strict=False), dict)


@given(plain)
@settings(deadline=None)
def test_user_data_never_reads_as_something_else(data: Any) -> None:
    """Data that looks like an encoding is data: what went in comes out, whatever it imitates."""
    assert same(there_and_back(data), data)


@given(st.dictionaries(st.text(max_size=4) | tag_like, st.integers(), max_size=5))
def test_the_order_of_string_keys_does_not_matter_to_a_fingerprint(args: dict[str, int]) -> None:
    turned = dict(reversed(args.items()))
    assert fingerprint("t", encode(args).data) == fingerprint("t", encode(turned).data)
    assert fingerprint("t", encode({"a": [args]}).data) == fingerprint("t", encode({"a": [turned]}).data)


def test_fingerprints() -> None:
    data = encode({"customer": "cus_7", "amount": 4200}).data
    assert (
        fingerprint("charge", data)
        == "1:" + __import__("hashlib").sha256(b'["charge",{"amount":4200,"customer":"cus_7"}]').hexdigest()
    )
    assert fingerprint("charge", data) != fingerprint("refund", data)
    assert fingerprint("t", encode({"password": "a"}).data) == fingerprint("t", encode({"password": "b"}).data)
    assert json_bytes({"b": 1, "a": [{"d": 1, "c": 2}]}) == b'{"a":[{"c":2,"d":1}],"b":1}'
    assert stored(encode({"b": 1, "a": 2}).data) != {} and list(stored(encode({"b": 1, "a": 2}).data)) == ["b", "a"]


def test_sets_have_one_encoding_in_every_process() -> None:
    code = "from agent_saga_core.values import *; print(json_bytes(encode({'abc','x','y',(1,'z')}).data))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            timeout=60,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1


# --- redaction ---------------------------------------------------------------------------------------------------


@pytest.fixture
def redaction_restored() -> Iterator[None]:
    before = values.current_redaction()
    yield
    set_redaction(names=before.names)


@pytest.mark.parametrize(
    "name",
    [
        "password", "user_password", "PASSWORD", "userPassword", "dbPassword2", "passwd", "passphrase", "client-secret",
        "token", "access_token", "accessToken", "Authorization", "Set-Cookie", "cookie", "cvv", "cardCVC", "api_key",
        "apiKey", "APIKey", "X-Api-Key", "openai_api_key", "apikey", "private_key", "privateKey", "AWS_ACCESS_KEY",
        "card_number", "cardNumber", "passwords", "secrets", "cookies", "api_keys",
    ],
)  # fmt: skip
def test_names_that_are_secret(name: str) -> None:
    assert Redaction().matches(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "tokens", "tokenizer", "secretary", "key", "access", "api", "number", "card",
     "cookieless", "customer",
     "", "_", "passing", "author", "keyboard", "private"],
)  # fmt: skip
def test_names_that_are_not(name: str) -> None:
    assert not Redaction().matches(name)


def test_a_redaction_is_immutable_and_its_memory_bounded() -> None:
    rule = Redaction({"iban"})
    with pytest.raises(AttributeError):
        rule.names = frozenset()  # type: ignore[misc]
    assert rule == Redaction(["iban"]) and hash(rule) == hash(Redaction(["iban"])) and rule.matches("customerIban")
    for number in range(6000):
        rule.matches(f"key{number}x")
    assert len(rule._seen) <= 4096
    assert rule.matches("iban")


def test_set_redaction(redaction_restored: None) -> None:
    set_redaction(add={"iban"})
    assert encode({"iban": 1, "token": 2}).redacted == ("args.iban", "args.token")
    set_redaction(names={"iban"})
    assert encode({"iban": 1, "token": 2}).redacted == ("args.iban",)
    set_redaction(names=())
    assert encode({"iban": 1, "token": 2}).redacted == ()
    for wrong in ("token", [5], [""], {"-"}):
        with pytest.raises(DeclarationError):
            set_redaction(names=wrong)  # type: ignore[arg-type]
    assert encode({"iban": 1}).redacted == ()


@dataclasses.dataclass
class Login:
    user: str
    password: str
    pin: Secret[str] = "4711"


class Pay(pydantic.BaseModel):
    key: str = pydantic.Field("k-secret-1", alias="apiKey")
    marked: Secret[str] = "k-secret-2"
    strict: pydantic.SecretStr = pydantic.SecretStr("k-secret-3")
    raw: pydantic.SecretBytes = pydantic.SecretBytes(b"k-secret-4")
    many: list[Secret[str]] = ["k-secret-5"]


class Wire(msgspec.Struct, rename={"value": "access_token"}):
    value: str
    inner: Secret[dict[str, str]]


class Keyed(typing.TypedDict):
    pin: Secret[str]


SECRET_PLACES = [
    ({"api_key": "s3cret-x"}, None, ("args.api_key",)),
    ({"a": [{"headers": {"X-Api-Key": "s3cret-x"}}]}, None, ("args.a[0].headers.X-Api-Key",)),
    ({1: {"token": "s3cret-x"}}, None, ("args[…].token",)),
    ({"$a": 1, "token": "s3cret-x"}, None, ("args.token",)),
    ({Name("token"): "s3cret-x"}, dict[Name, str], ("args.token",)),
    ((1, {"cookies": {"a": "s3cret-x"}}), None, ("args[1].cookies",)),
    (Login("u", "s3cret-x", "s3cret-y"), None, ("args.password", "args.pin")),
    ([Login("u", "s3cret-x", "s3cret-y")], list[Login], ("args[0].password", "args[0].pin")),
    (Wire("s3cret-x", {"a": "s3cret-y"}), None, ("args.value", "args.inner")),
    (types.SimpleNamespace(token="s3cret-x"), None, ("args.token",)),
    ("s3cret-x", Secret[str], ("args",)),
    (["s3cret-x"], list[Secret[str]], ("args[0]",)),
    ({"a": "s3cret-x"}, dict[str, Secret[str]], ("args.a",)),
    ({"s3cret-x": 1}, dict[Secret[str], int], ("args",)),
    (("u", "s3cret-x"), tuple[str, Secret[str]], ("args[1]",)),
    (("u", "s3cret-x"), tuple[Secret[str], ...], ("args[0]", "args[1]")),
    ("s3cret-x", Secret[str] | None, ("args",)),
    ("s3cret-x", int | Secret[str], ("args",)),
    ({"pin": "s3cret-x"}, Keyed, ("args.pin",)),
    (Box("s3cret-x"), Box[Secret[str]], ("args.content",)),
    (pydantic.SecretStr("s3cret-x"), None, ("args",)),
    ([pydantic.SecretBytes(b"s3cret-x")], None, ("args[0]",)),
    (Wrapped[Secret[str]](inner="s3cret-x"), None, ("args.inner",)),
]  # fmt: skip


@pytest.mark.parametrize(("value", "hint", "where"), SECRET_PLACES, ids=lambda value: type(value).__name__)
def test_secrets_are_redacted_wherever_they_stand(value: Any, hint: Any, where: tuple[str, ...]) -> None:
    encoded = encode(value, hint=hint)
    assert encoded.redacted == where
    raw = msgspec.json.encode(encoded.data)
    assert b"s3cret" not in raw and b"s3cret" not in msgspec.json.encode(display(encoded.data))
    assert "s3cret" not in repr(encoded)
    assert any("s3cret-x" in secret for secret in encoded.secrets) or hint == dict[Secret[str], int]
    with pytest.raises(RedactedValue) as caught:
        decode(stored(encoded.data), hint or type(value))
    assert caught.value.path.removeprefix("value") == where[0].removeprefix("args")
    decode(stored(encoded.data), hint or type(value), strict=False)


def test_models_redact_by_name_alias_mark_and_type() -> None:
    encoded = encode(Pay(), where="result")
    assert encoded.redacted == ("result.key", "result.marked", "result.strict", "result.raw", "result.many[0]")
    assert b"k-secret" not in msgspec.json.encode(encoded.data)
    assert {f"k-secret-{n}" for n in range(1, 6)} <= set(encoded.secrets)
    back = decode(stored(encoded.data), Pay, strict=False)
    assert type(back) is Pay and back.key == Redacted() and str(back.marked) == "[redacted]"


def test_arguments_are_redacted_by_annotation() -> None:
    encoded = encode_args({"a": "x1", "b": ["x2"], "token": None, "n": 1}, {"a": Secret[str], "b": list[Secret[str]]})
    assert encoded.redacted == ("args.a", "args.b[0]")
    assert encoded.data["token"] is None and encoded.data["n"] == 1
    assert decode_args(encoded.data, {}, strict=False)["a"] == Redacted()
    with pytest.raises(RedactedValue):
        decode_args(encoded.data, {})


def test_a_mark_in_an_annotation_that_cannot_be_resolved_still_counts() -> None:
    @dataclasses.dataclass
    class Unresolvable:
        pin: Secret[MissingName]  # type: ignore[name-defined]  # noqa: F821
        name: str

    encoded = encode(Unresolvable("s3cret", "n"))
    assert encoded.redacted == ("args.pin",) and encoded.data["$dataclass"][1]["name"] == "n"


@pytest.mark.parametrize(
    "hint", ["Secret[str]", list["Secret[str]"], Box[typing.Annotated[str, [], Secret[str].__metadata__[0]]]]
)
def test_marks_are_seen_in_odd_annotations(hint: Any) -> None:
    value: Any = {str: "s3cret", type(list[int]): ["s3cret"]}.get(type(hint), Box("s3cret"))
    assert b"s3cret" not in msgspec.json.encode(encode(value, hint=hint).data)


def test_a_secret_that_cannot_be_looked_into_is_redacted() -> None:
    class Broken(collections.UserDict[str, str]):
        def values(self) -> Any:
            raise RuntimeError("no")

    assert encode({"token": Broken()}).redacted == ("args.token",)


def test_the_tool_gets_the_plain_type() -> None:
    assert typing.get_args(Secret[str])[0] is str


def test_a_placeholder_is_written_as_a_marker_again() -> None:
    encoded = encode({"a": Redacted()})
    assert encoded.redacted == ("args.a",) and encoded.data == {"a": {"$redacted": True}}


def test_secrets_that_contain_themselves_or_cannot_be_stored_are_redacted() -> None:
    assert encode({"token": cyclic()}).redacted == ("args.token",)
    assert encode({"token": len}).redacted == ("args.token",)
    assert encode({"token": 1 << 100_000}).redacted == ("args.token",)


def test_an_encoding_cannot_be_pickled() -> None:
    with pytest.raises(TypeError):
        pickle.dumps(encode({"token": "x"}))


# --- texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "secrets", "clean"),
    [
        ("key sk_live_123 is bad", ["sk_live_123"], "key [redacted] is bad"),
        ("abcd", ["abc", "bcd"], "[redacted]"),
        ("a b", [], "a b"),
        ("nothing", ["", " ", "other"], "nothing"),
        ("code 7 wrong", ["7"], "[redacted]"),
        ("code 8 wrong", ["7"], "code 8 wrong"),
        ("bad: 'it\\'s\\n\"x\"'", ["it's\n\"x\""], "bad: '[redacted]'"),
        ("url?k=a%2Fb%20c", ["a/b c"], "url?k=[redacted]"),
        ("no sk-123456 here", ["Bearer sk-123456"], "no [redacted] here"),
        ("got 'abcdefghijklmnop...' and '...ijklmnopqrstuvwx'", ["abcdefghijklmnopqrstuvwx"],
         "got '[redacted]...' and '...[redacted]'"),
        ("xyxyxy", ["xyxy"], "[redacted]"),
        ("one two", ["one", "two"], "[redacted] [redacted]"),
        ("onetwo!", ["one", "two"], "[redacted]!"),
    ],
)  # fmt: skip
def test_scrub(text: str, secrets: list[str], clean: str) -> None:
    assert scrub(text, secrets) == clean


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=6), max_size=4), st.text(max_size=20))
def test_no_secret_survives_scrubbing(before: str, secrets: list[str], after: str) -> None:
    for secret in secrets:
        if secret.strip() and secret not in "[redacted]":
            assert secret not in scrub(before + secret + after, secrets)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


def test_describe_error() -> None:
    assert describe_error(ValueError("bad key s3cret"), ["s3cret"]) == "ValueError: bad key [redacted]"
    assert describe_error(ValueError()) == "ValueError"
    assert describe_error(Unprintable("s3cret")) == "Unprintable (its message cannot be read)"
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"
    long = describe_error(ValueError("x" * 495 + "s3cret" + "y" * 1000), ["s3cret"])
    assert len(long) == 500 and "s3c" not in long
    assert describe_error(ValueError("a\nb\ud800")) == "ValueError: a b\\ud800"


def test_a_validation_error_does_not_quote_its_input() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        Model(displayName=["s3cret" * 20], item=Item("a"))  # type: ignore[arg-type]
    told = describe_error(caught.value)
    assert "s3cret" not in told and "displayName" in told


# --- digests, credentials, small things --------------------------------------------------------------------------


def test_a_digest_stands_for_a_value() -> None:
    data = digested(b"abc", reason="larger than 2 bytes")
    assert data["$digest"]["length"] == 3 and len(data["$digest"]["sha256"]) == 64
    with pytest.raises(DigestedValue, match="larger than 2 bytes"):
        decode({"a": data})
    assert display(data) == "[not stored: 3 bytes, larger than 2 bytes]"
    assert digested(None, length=5, reason="x")["$digest"] == {"sha256": None, "length": 5, "reason": "x"}


@pytest.fixture
def no_resolver() -> Iterator[None]:
    yield
    set_credential_resolver(None)


def test_credentials_are_references(no_resolver: None) -> None:
    encoded = encode_args({"api_key": credential("payments"), "x": [credential("a")]}, {"x": Secret[list[Any]]})
    assert encoded.redacted == ("args.x",)
    assert encoded.data["api_key"] == {"$credential": "payments"}
    args = decode_args({"api_key": encoded.data["api_key"], "n": (1)}, {})
    assert args["api_key"] == credential("payments")
    with pytest.raises(DeclarationError, match="'payments'.*set_credential_resolver"):
        resolve_credentials(args)
    set_credential_resolver(lambda name: f"value-of-{name}")
    secrets: list[str] = []
    nested_args = {"a": [args["api_key"], (args["api_key"],)], "n": 1}
    assert resolve_credentials(nested_args, secrets) == {"a": ["value-of-payments", ("value-of-payments",)], "n": 1}
    assert nested_args["a"][0] == credential("payments") and set(secrets) == {"value-of-payments"}
    for wrong in ("", " ", 5):
        with pytest.raises(DeclarationError):
            credential(wrong)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError):
        set_credential_resolver("no")  # type: ignore[arg-type]


@given(plain)
def test_is_small_never_lies(data: Any) -> None:
    encoded = encode(data).data
    for limit in (5, 30, 200):
        if values.is_small(encoded, limit):
            assert len(msgspec.json.encode(encoded)) <= limit


def test_display_reads_well() -> None:
    value = {"a": (1, b"xyz"), "when": dt.datetime(2024, 1, 1), "o": Item("a", decimal.Decimal("1.10")),
             5: {"token": "x"},
             "c": credential("p"), "s": Status.OK, "n": math.nan, "big": 2**70, "e": Color.RED}  # fmt: skip
    assert display(encode(value).data) == {
        "a": [1, "[3 bytes]"], "when": "2024-01-01T00:00:00", "o": {"sku": "a", "price": "1.10"},
        "5": {"token": "[redacted]"}, "c": "[credential p]", "s": "ok", "n": "nan", "big": 2**70, "e": "red",
    }  # fmt: skip


def test_lenient_reading_gives_what_a_value_holds() -> None:
    data = encode({"o": ORDER, "s": Status.OK, "e": Color.RED, "d": 1, "m": MODEL}).data
    data["bad"] = {"$unknown": 1}
    args = decode_args(data, {}, strict=False)
    assert args["o"]["items"] == [{"sku": "a", "price": decimal.Decimal("1.10")}]
    assert args["s"] == "ok" and args["d"] == 1 and args["bad"] == Redacted()
    assert decode_args(data, {"o": Order}, strict=False)["o"] == ORDER
    assert decode_args([], {}, strict=False) == {} and decode_args({"$redacted": True}, {}, strict=False) == {}
    with pytest.raises(Undecodable):
        decode_args([], {})
