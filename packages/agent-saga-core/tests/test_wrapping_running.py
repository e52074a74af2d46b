"""What the runs of all frameworks share: a run that blocks, and the arguments and executions that are the same."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, get_type_hints

import pytest

from agent_saga_core import DeclarationError, MemoryLog, SagaAborted, saga_scope, saga_tool
from agent_saga_core.wrapping import (
    REFUSALS,
    Binding,
    Same,
    ScopeOptions,
    equal_args,
    on_a_loop,
    refuse_generator,
    refused_too_often,
    run_blocking,
    runner_of,
    runner_under,
)


def test_a_run_that_blocks_is_refused_on_a_loop_before_anything_of_it_is_made() -> None:
    made: list[str] = []

    async def run() -> str:
        made.append("run")
        assert on_a_loop()
        return "done"

    async def on_loop() -> None:
        with pytest.raises(RuntimeError, match="await asaga_run"):
            run_blocking(run)

    assert not on_a_loop() and run_blocking(run) == "done" and made == ["run"]
    asyncio.run(on_loop())
    assert made == ["run"]


def test_the_options_of_a_run_are_those_of_a_scope() -> None:
    scope, options = get_type_hints(saga_scope), get_type_hints(ScopeOptions)
    assert {name: scope[name] for name in options} == options


def test_a_run_is_ended_after_so_many_refusals_and_not_before() -> None:
    @saga_tool(semantics="READ_ONLY")
    def look() -> None: ...

    told: list[bool] = []
    with pytest.raises(SagaAborted), saga_scope(log=MemoryLog()) as saga:
        saga.abort("enough")
        for _ in range(REFUSALS):
            told.append(refused_too_often(saga))
            with pytest.raises(SagaAborted):
                look()
        told.append(refused_too_often(saga))
    assert told == [False] * REFUSALS + [True]


def test_an_object_as_a_key_equals_itself_alone() -> None:
    one: list[int] = []
    assert {Same(one): 1}[Same(one)] == 1 and Same(one) != Same([]) and Same(one) != one


class Array:
    """Compares element by element, as arrays do, and is no truth."""

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


def test_arguments_that_cannot_be_compared_are_not_equal() -> None:
    assert equal_args({"n": 1}, {"n": 1.0}) and not equal_args({"n": 1}, {"n": 2})
    assert not equal_args({"n": Array()}, {"n": Array()})


def test_a_saga_tool_is_found_in_a_partial_of_it() -> None:
    @saga_tool(semantics="READ_ONLY")
    def look(a: int, b: int) -> None: ...

    inner = functools.partial(functools.partial(look, 1), b=2)
    assert runner_under(inner) is runner_under(look) is runner_of(look) is not None
    assert runner_of(inner) is None and runner_under(functools.partial(len)) is None and runner_under(None) is None


def pieces() -> Iterator[int]:
    yield 1


async def apieces() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("fn", [pieces, apieces])
def test_a_generator_function_is_no_tool(fn: Callable[..., Any]) -> None:
    with pytest.raises(DeclarationError, match="'buy' is a generator function"):
        refuse_generator("buy", fn)
    refuse_generator("buy", len)


def test_the_key_is_not_shown() -> None:
    def keyed(item: str, *, idempotency_key: str, note: str = "") -> None: ...
    def plain(item: str, **idempotency_key: str) -> None: ...

    assert list(Binding(keyed).shown.parameters) == ["item", "note"]
    assert list(Binding(plain).shown.parameters) == ["item", "idempotency_key"]
