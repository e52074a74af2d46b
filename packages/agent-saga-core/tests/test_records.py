"""The line codec: what goes in comes back equal, and nothing else is a line."""

from __future__ import annotations

import math
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_saga_core.records import (
    MAX_DEPTH,
    RECORD_LINE,
    Record,
    RecordType,
    critical_unknown,
    decode_data,
    encode,
    finish_line,
    record_of,
)

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def record(**fields: Any) -> Record:
    return Record(**{"saga": "order-1", "n": 2, "epoch": 1, "type": "INTENT", "time": 12.5, "data": {}, **fields})


def line_of(given: Record, chain: bytes = b"w", place: bytes = b"") -> bytes:
    return finish_line(encode(given), chain, place)[0]


def read_back(line: bytes, saga: str) -> Record | None:
    match = RECORD_LINE.fullmatch(line.removesuffix(b"\n"))
    return None if match is None else record_of(match, saga)


@given(
    saga=st.text(min_size=1),
    n=st.integers(1, 10**15 - 1),
    epoch=st.integers(1, 10**15 - 1),
    kind=st.sampled_from(list(RecordType)),
    time=st.floats(0, 10**11, exclude_max=True),
    critical=st.booleans(),
    data=st.dictionaries(st.text(), plain, max_size=4),
)
def test_what_is_encoded_comes_back_equal(
    saga: str, n: int, epoch: int, kind: str, time: float, critical: bool, data: dict[str, Any]
) -> None:
    given = Record(saga=saga, n=n, epoch=epoch, type=kind, time=time, critical=critical, data=data)
    line = line_of(given, place=b',"synced":7,"prev":["\xc3\xa9",3]')
    assert line.count(b"\n") == 1
    assert read_back(line, saga) == given


def test_default_fields_are_left_out_and_the_layout_is_fixed() -> None:
    line, own = finish_line(encode(record(data={"a": 1})), b"w-1", b"")
    header = line[75 : line.index(b',"salt"')]
    assert header.startswith(b'"saga":"order-1","n":2,"type":"INTENT","time":12.5,"digest":"')
    assert own == sha256(b"w-1" + header).hexdigest().encode() == line[9:73]
    full = line_of(record(epoch=4, critical=False))
    assert b'"n":2,"epoch":4,"type":"INTENT","critical":false,"time":12.5,"digest"' in full


def test_equal_records_have_different_salts_and_digests() -> None:
    first, second = encode(record()), encode(record())
    assert first.same_content(second)
    assert first.digest != second.digest
    assert first.rest != second.rest
    assert not first.same_content(encode(record(data={"a": 1})))
    assert not first.same_content(encode(record(n=3)))


class Odd:
    def __repr__(self) -> str:
        raise AssertionError("a refusal never shows the value")


@pytest.mark.parametrize(
    "data",
    [
        {"a": math.nan},
        {"a": [math.inf]},
        {"a": (1, 2)},
        {"a": b"x"},
        {"a": {1: 2}},
        {"a": Odd()},
        {"a": "\ud800"},
        {"a": {1, 2}},
        [],
        "text",
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_equal_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="cannot be encoded"):
        encode(record(data=data))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": -1},
        {"n": 10**15},
        {"epoch": 0},
        {"time": math.nan},
        {"time": math.inf},
        {"time": -1.0},
        {"time": 1e11},
        {"type": "intent"},
        {"type": ""},
        {"type": "A" * 65},
        {"saga": "\ud800"},
    ],
    ids=str,
)
def test_a_header_that_no_reader_would_take_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        encode(record(**fields))


def test_a_refusal_does_not_tell_the_value() -> None:
    with pytest.raises(ValueError) as caught:
        encode(record(data={"card": "4111-secret\ud800"}))
    assert "4111" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def test_nesting_is_limited_where_it_is_written_and_where_it_is_read() -> None:
    deep = record(data=nested(MAX_DEPTH))
    assert read_back(line_of(deep), "order-1") == deep
    with pytest.raises(ValueError, match="nested deeper"):
        encode(record(data=nested(MAX_DEPTH + 1)))
    assert decode_data(b'{"a":' * 100_000 + b"1" + b"}" * 100_000) is None
    # Brackets in strings are no nesting.
    assert decode_data(b'{"a":"' + b"[" * 1000 + b'\\"' + b"{" * 1000 + b'"}') is not None


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"{]}",
        b'{"a":1e999}',
        b'{"a":' + b"1" * 5000 + b"}",
        b'{"a":"\xff"}',
        b'{"a":"\\ud800"}',
        b"[1]",
        b"1",
        b"",
    ],
)
def test_data_that_are_no_json_object_are_not_read(data: bytes) -> None:
    assert decode_data(data) is None


GOOD = line_of(record(data={"a": 1}), place=b',"synced":7,"prev":["x",3]')


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"n":2', b'"n":-2'),
        (b'"n":2', b'"n":0'),
        (b'"n":2', b'"n":02'),
        (b'"n":2', b'"n":2.0'),
        (b'"n":2', b'"n":2e1'),
        (b'"n":2', b'"n":' + b"9" * 400),
        (b'"n":2', b'"n":2,"n":2'),
        (b'"n":2', b'"n":"2"'),
        (b'"n":2', b'"n":null'),
        (b'"n":2', b'"n": 2'),
        (b'"saga":"order-1","n":2', b'"n":2,"saga":"order-1"'),
        (b'"saga":"order-1"', b'"saga":["order-1"]'),
        (b'"saga":"order-1"', b'"saga":"order\n1"'),
        (b'"time":12.5', b'"time":NaN'),
        (b'"time":12.5', b'"time":1e400'),
        (b'"time":12.5', b'"time":-1'),
        (b'"time":12.5', b'"time":' + b"9" * 40),
        (b'"synced":7', b'"synced":-7'),
        (b'"prev":["x",3]', b'"prev":["x",3,4]'),
        (b'"prev":["x",3]', b'"prev":' + b"[" * 5000),
        (b'"data":{', b'"data":['),
        (b'"type":"INTENT"', b'"type":"\xff"'),
        (b'"salt":', b'"salt":"","salt":'),
    ],
)
def test_a_line_of_any_other_shape_is_no_line(old: bytes, new: bytes) -> None:
    assert read_back(GOOD, "order-1") is not None
    bad = GOOD.replace(old, new, 1)
    assert bad != GOOD
    assert read_back(bad, "order-1") is None


@given(st.binary(max_size=200))
def test_no_bytes_make_a_reader_raise(data: bytes) -> None:
    read_back(data, "x")
    decode_data(data)
    read_back(GOOD[:75] + data + GOOD[75:], "x")


def test_unknown_types_matter_only_if_they_are_critical() -> None:
    assert critical_unknown("SOMETHING_NEW", optional=False)
    assert not critical_unknown("SOMETHING_NEW", optional=True)
    assert not critical_unknown("INTENT", optional=False)
    for reserved in ("PREPARED", "JOIN", "COMMITTING"):
        assert critical_unknown(reserved, optional=True)
