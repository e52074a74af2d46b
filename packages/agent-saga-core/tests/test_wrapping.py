"""Everything that Python lets one call is declared as a tool: partials, callable objects, methods, odd signatures."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable
from dataclasses import dataclass

import pytest

from agent_saga_core import (
    ActionSemantics,
    Compensation,
    DeclarationError,
    MemoryLog,
    Observation,
    Secret,
    compensator,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.log.memory import MemoryStore
from agent_saga_core.registry import isolated_registry

C, R, IRREVERSIBLE = ActionSemantics.COMPENSABLE, ActionSemantics.READ_ONLY, ActionSemantics.IRREVERSIBLE


@pytest.fixture(autouse=True)
def names():
    with isolated_registry():
        yield


@pytest.fixture
def log():
    return MemoryLog()


class Till:
    """A tool class: an object that the log cannot carry, and a compensator of its own."""

    def __init__(self) -> None:
        self.charges: list[str] = []
        self.lock = object()

    @saga_tool(semantics=R)
    def count(self, currency: str = "EUR", *, idempotency_key: str) -> str:
        return f"{len(self.charges)} {currency} {len(idempotency_key)}"

    @saga_tool(semantics=R)
    def first(self, *prefixes: str) -> str:
        return "".join((*prefixes, *self.charges[:1]))

    def charge(self, name: str, *, idempotency_key: str) -> str:
        self.charges.append(name)
        return name

    def refund(self, name: str, *, idempotency_key: str) -> None:
        self.charges.remove(name)


class Doubler:
    def __call__(self, x: int, *, idempotency_key: str) -> tuple[int, int]:
        return 2 * x, len(idempotency_key)


@dataclass
class Unhashable:
    factor: int = 3

    async def __call__(self, x: int) -> int:
        await asyncio.sleep(0)
        return self.factor * x


def test_a_tool_declared_in_a_class_does_not_record_its_instance(log):
    till = Till()
    with saga_scope("till", log=log) as saga:
        assert till.count("USD") == "0 USD 40"
        assert till.first("a", "b") == "ab"
        saga.suspend("later")
    assert list(inspect.signature(till.count).parameters) == ["currency"]
    records = [record.data for record in log.read("till") if record.type == "INTENT"]
    assert [record["args"] for record in records] == [{"currency": "USD"}, {"prefixes": {"$tuple": ["a", "b"]}}]
    with saga_scope("till", log=log):
        assert Till().count("USD") == "0 USD 40"  # replayed: another instance makes it no other call


def test_a_function_that_merely_has_a_parameter_self_keeps_it(log):
    @saga_tool(semantics=R)
    def greet(self: str) -> str:
        return self

    with saga_scope("s", log=log):
        assert greet("hello") == "hello"
    assert next(r.data for r in log.read("s") if r.type == "INTENT")["args"] == {"self": "hello"}


def test_bound_methods_are_tools_and_compensators(log):
    till = Till()
    compensator("till.refund")(till.refund)
    compensator("till.refund")(till.refund)  # each access gives a new object, equal to the last
    with pytest.raises(DeclarationError, match=r"till\.refund"):
        compensator("till.refund")(Till().refund)
    charge = saga_tool(semantics=C, compensate=undo(till.refund, name="args.name"))(till.charge)
    with pytest.raises(KeyError), saga_scope(log=log) as saga:
        charge("a")
        assert till.charges == ["a"]
        raise KeyError
    assert till.charges == []
    assert saga.report is not None
    assert saga.report.clean


def test_callable_objects_and_partials_are_tools(log):
    double = saga_tool(semantics=R, name="double")(Doubler())
    six = saga_tool(semantics=R, name="six")(functools.partial(Doubler(), 3))
    assert double.__name__ == "double"
    assert list(inspect.signature(double).parameters) == ["x"]
    assert "idempotency_key" not in double.__annotations__
    with saga_scope(log=log) as saga:
        assert double(2) == (4, 40)
        assert six() == (6, 40)
    assert [step.tool for step in saga.steps] == ["double", "six"]


def test_an_object_with_an_async_call_is_an_async_tool_even_without_a_hash(log):
    triple = saga_tool(semantics=R, name="triple")(Unhashable())

    async def body() -> int:
        async with saga_scope(log=log):
            return await triple(5)

    assert asyncio.run(body()) == 15


def test_outside_a_saga_a_key_that_nobody_can_see_is_drawn():
    @saga_tool(semantics=R)
    def pay(amount: int, idempotency_key: str) -> str:
        return idempotency_key

    @saga_tool(semantics=R)
    def look(amount: int, idempotency_key: str | None = None) -> str | None:
        return idempotency_key

    assert len({pay(1), pay(1)}) == 2
    assert pay(1, "mine") == "mine"
    assert pay(1, idempotency_key="mine") == "mine"
    assert look(1) is None


def test_in_a_compensation_a_hidden_key_is_not_drawn(log):
    @saga_tool(semantics=R)
    def cancel(*, idempotency_key: str) -> None: ...

    tries: list[str] = []

    @compensator("undo")
    def give_back() -> None:
        with pytest.raises(TypeError, match="idempotency_key"):
            cancel()
        tries.append("tried")

    make = saga_tool(semantics=C, compensate=undo(give_back), name="make")(lambda: None)
    with pytest.raises(KeyError), saga_scope(log=log):
        make()
        raise KeyError
    assert tries == ["tried"]


def test_a_key_that_the_model_gives_by_position_is_replaced(log):
    @saga_tool(semantics=R)
    def pay(amount: int, idempotency_key: str, *notes: str) -> str:
        return idempotency_key

    with saga_scope(log=log) as saga:
        assert pay(1, "from the model", "note") == saga.steps[0].forward_key


def test_a_positional_only_name_and_the_same_keyword_stay_apart(log):
    @saga_tool(semantics=R, key=lambda args: str(args["x"]))
    def put(x: int, /, **more: int) -> tuple[int, dict[str, int]]:
        return x, more

    with saga_scope(log=log):
        assert put(1, x=9) == (1, {"x": 9})
        assert put(2, x=9) == (2, {"x": 9})


@dataclass
class Card:
    pin: Secret[str]
    name: str


def _card() -> Card: ...
def _pin() -> Secret[str]: ...
def _taking(card: Card, cards: list[Card], code: Secret[str], plain: str) -> None: ...


@pytest.mark.parametrize(
    ("tool", "path"),
    [
        (_card, "result.pin"),
        (_pin, "result"),
        (_taking, "args.code"),
        (_taking, "args.card.pin"),
        (_taking, "args.cards[0].pin"),
        (_taking, "args.cards[-1].pin"),
    ],
)
def test_an_undo_through_a_mark_of_secrecy_is_refused_at_declaration(tool, path):
    @compensator("undo")
    def give_back(value: str) -> None: ...

    with pytest.raises(DeclarationError, match="Secret"):
        saga_tool(semantics=C, compensate=undo(give_back, value=path))(tool)


@pytest.mark.parametrize(
    ("tool", "path"), [(_card, "result.name"), (_taking, "args.plain"), (_taking, "args.cards[0].name")]
)
def test_what_stands_beside_a_secret_is_none(tool, path):
    @compensator("undo")
    def give_back(value: str) -> None: ...

    saga_tool(semantics=C, compensate=undo(give_back, value=path))(tool)


def test_a_factory_gets_the_arguments_by_its_second_parameters_name(log):
    seen: list[int] = []

    @compensator("undo")
    def give_back(amount: int) -> None:
        seen.append(amount)

    def by_name(result, args=None):
        return Compensation(handler="undo", kwargs={"amount": args["amount"]})

    pay = saga_tool(semantics=C, compensate=by_name, name="pay")(lambda amount: None)
    with pytest.raises(KeyError), saga_scope(log=log):
        pay(7)
        raise KeyError
    assert seen == [7]


@dataclass
class Charge:
    id: str


def _charging() -> Awaitable[Charge]:
    async def charge() -> Charge:
        return Charge("ch_1")

    return charge()


def test_a_result_is_rebuilt_through_what_an_awaitable_annotation_gives():
    store = MemoryStore()
    with saga_scope("s", log=MemoryLog(store=store), approve=lambda request: True) as saga:
        first = saga.execute("charge", _charging, semantics=IRREVERSIBLE)
        saga.suspend("later")
    with saga_scope("s", log=MemoryLog(store=store)) as saga:
        assert saga.execute("charge", _charging, semantics=IRREVERSIBLE) == first == Charge("ch_1")


def test_an_observation_is_made_by_position_as_well():
    assert Observation(True, 5, False, "seen") == Observation(landed=True, result=5, final=False, detail="seen")
