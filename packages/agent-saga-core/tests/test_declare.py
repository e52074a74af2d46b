"""Declarations: what is refused before anything can happen, and what a declared tool still is."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from agent_saga_core import (
    ActionSemantics,
    Compensation,
    DeclarationError,
    MemoryLog,
    call_with,
    compensator,
    credential,
    delete_by,
    http_client_error,
    inverse_of,
    probe,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.declare import StepSpec
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing import ManualClock

C, R, V, IRREVERSIBLE = (
    ActionSemantics.COMPENSABLE,
    ActionSemantics.READ_ONLY,
    ActionSemantics.REVERSIBLE,
    ActionSemantics.IRREVERSIBLE,
)


@pytest.fixture(autouse=True)
def names():
    with isolated_registry():
        yield


@pytest.fixture
def refund():
    @compensator("refund")
    def refund(charge_id: str, *, idempotency_key: str) -> None: ...

    return refund


@pytest.fixture
def log():
    return MemoryLog(ManualClock(auto=True))


def _declared(**more):
    return StepSpec.declared("t", **{"semantics": C, **more})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "has no inverse"),
        ({"semantics": V}, "has no inverse"),
        ({"semantics": R, "compensate": lambda r: None}, "nothing to undo"),
        ({"semantics": IRREVERSIBLE, "compensate": lambda r: None}, "has an inverse"),
        ({"semantics": "SOMETIMES"}, "unknown semantics"),
        ({"semantics": R, "timeout": 0}, "timeout"),
        ({"semantics": R, "timeout": -1.0}, "timeout"),
        ({"semantics": R, "timeout": True}, "timeout"),
        ({"semantics": R, "timeout": float("nan")}, "timeout"),
        ({"semantics": R, "timeout": float("inf")}, "timeout"),
        ({"semantics": R, "in_doubt": float("inf")}, "in_doubt"),
        ({"semantics": R, "in_doubt": 10**400}, "in_doubt"),
        ({"semantics": R, "in_doubt": -0.1}, "in_doubt"),
        ({"semantics": R, "in_doubt": "soon"}, "in_doubt"),
        ({"semantics": R, "not_applied": (int,)}, "not_applied"),
        ({"semantics": R, "not_applied": ("x",)}, "not_applied"),
        ({"semantics": R, "probe": 5}, "probe"),
        ({"semantics": R, "key": "no path"}, "path"),
        ({"compensate": 5}, "compensate="),
        ({"compensate": lambda: None}, "factory takes"),
        ({"compensate": lambda a, b, c: None}, "factory takes"),
    ],
)
def test_a_declaration_that_could_not_keep_the_promises_is_refused(more, says):
    with pytest.raises(DeclarationError, match=says) as raised:
        _declared(**more)
    assert str(raised.value).endswith(".")


def test_the_inverse_is_checked_against_its_compensator(refund):
    for wrong in ({}, {"charge": "result.id"}, {"charge_id": "result.id", "more": "args.x"}):
        with pytest.raises(DeclarationError):
            undo(refund, **wrong)
        with pytest.raises(DeclarationError):
            undo("refund", **wrong)
    for wrong in ("id", "results.id", "", "result..id", 5):
        with pytest.raises(DeclarationError):
            undo(refund, charge_id=wrong)
    with pytest.raises(DeclarationError):
        undo(refund, if_absent="perhaps", charge_id="result.id")
    with pytest.raises(DeclarationError):
        undo("", charge_id="result.id")
    assert undo("not yet registered", anything="result.id").handler == "not yet registered"


def test_what_covers_an_unknown_outcome_is_known_statically(refund):
    assert not undo(refund, charge_id="args.id").covers_unknown
    assert undo(refund, if_absent="noop", charge_id="args.id").covers_unknown
    assert undo(refund, if_absent="forbids", charge_id="step.forward_key").covers_unknown
    assert not undo(refund, if_absent="noop", charge_id="result.id").covers_unknown
    assert delete_by(refund, charge_id="args.id").covers_unknown
    assert call_with(refund, charge_id="x", if_absent="noop").covers_unknown


def test_an_inverse_that_would_need_a_secret_is_refused():
    @compensator("logout")
    def logout(token: str) -> None: ...

    @compensator("out")
    def out(session: str) -> None: ...

    with pytest.raises(DeclarationError, match="credential"):
        undo(logout, token="result.session")
    with pytest.raises(DeclarationError, match="credential"):
        undo(out, session="result.access_token")
    with pytest.raises(DeclarationError, match="credential"):
        call_with(logout, token="plain")
    assert call_with(logout, token=credential("session")).handler == "logout"
    with pytest.raises(DeclarationError):
        call_with(out, session=object())


def test_a_compensator_name_is_taken_once(refund):
    with pytest.raises(DeclarationError, match="already registered"):
        compensator("refund")(lambda: None)
    assert compensator("refund")(refund) is refund
    with pytest.raises(DeclarationError):
        compensator("")
    probe("look")(lambda args, key: None)
    with pytest.raises(DeclarationError, match="already registered"):
        probe("look")(lambda args, key: None)


@pytest.mark.parametrize("key_ttl", [float("nan"), -1.0, "a day", True, None])
def test_a_keys_life_is_a_number_of_seconds(key_ttl):
    """NaN would never be over, and a started compensation be repeated under a key that is long forgotten."""
    with pytest.raises(DeclarationError, match="key_ttl"):
        compensator("refund", key_ttl=key_ttl)
    compensator("refund", key_ttl=float("inf"))(lambda: None)


def test_a_compensation_is_a_handler_or_a_function():
    for wrong in ({}, {"handler": "a", "fn": print}):
        with pytest.raises(DeclarationError):
            Compensation(**wrong)


def test_inverse_of_pairs_by_name(log):
    undone = []

    def book(room: str, nights: int) -> dict:
        return {"id": 7}

    @inverse_of(book, if_absent="noop")
    @compensator("unbook")
    def unbook(room: str, *, idempotency_key: str) -> None:
        undone.append(room)

    tool = saga_tool(semantics=C)(book)
    with pytest.raises(RuntimeError, match="enough"):
        with saga_scope(log=log):
            tool("r1", nights=2)
            raise RuntimeError("enough")
    assert undone == ["r1"]
    with pytest.raises(RuntimeError, match="enough"):
        with saga_scope(log=log) as saga:
            saga.execute("book", book, args={"room": "r2", "nights": 1}, semantics=C)
            raise RuntimeError("enough")
    assert undone == ["r1", "r2"]
    with pytest.raises(DeclarationError, match="already has an inverse"):
        inverse_of(book)(unbook)


def test_an_inverse_that_is_registered_after_it_was_declared_is_found_by_name(log):
    """Whatever the order of the two decorators, another process can finish it."""

    def book(room: str) -> dict:
        return {"id": 7}

    @compensator("unbook")
    @inverse_of(book)
    def unbook(room: str) -> None: ...

    def cancel(room: str) -> None: ...

    early = undo(cancel, room="args.room")
    compensator("cancel")(cancel)
    for tool in (
        saga_tool(semantics=C, name="book")(book),
        saga_tool(semantics=C, compensate=early, name="stay")(book),
    ):
        with saga_scope(log=log) as saga:
            tool("r1")
        handler = {"book": "unbook", "stay": "cancel"}[saga.steps[0].tool]
        assert log.read(saga.id)[1].data["undo"]["handler"] == handler

    def leave(token: str) -> None: ...

    secret = undo(leave, token="args.token")
    compensator("leave")(leave)
    with pytest.raises(DeclarationError, match="credential"):
        _declared(compensate=secret)


def test_inverse_of_needs_every_argument(log):
    def book(room: str) -> dict:
        return {"id": 7}

    with pytest.raises(DeclarationError, match="maps="):

        @inverse_of(book)
        def cancel(booking_id: int) -> None: ...

    undone = []

    @inverse_of(book, maps={"booking_id": "result.id"})
    @compensator("cancel")
    def cancel(booking_id: int) -> None:
        undone.append(booking_id)

    tool = saga_tool(semantics=C)(book)
    with pytest.raises(RuntimeError, match="enough"):
        with saga_scope(log=log):
            tool("r1")
            raise RuntimeError("enough")
    assert undone == [7]


def test_a_declared_tool_keeps_its_face(refund):
    def charge(customer: str, amount: int = 5, *, idempotency_key: str) -> dict:
        """Charge somebody."""
        return {}

    tool = saga_tool(semantics=C, compensate=undo(refund, charge_id="result.id"))(charge)
    assert (tool.__name__, tool.__doc__) == ("charge", "Charge somebody.")
    assert list(inspect.signature(tool).parameters) == ["customer", "amount"]
    assert "idempotency_key" not in tool.__annotations__
    assert list(inspect.signature(charge).parameters) == ["customer", "amount", "idempotency_key"]


def test_generator_functions_are_refused(refund):
    how = saga_tool(semantics=C, compensate=undo(refund, charge_id="result.id"))

    def lazily():
        yield 1

    async def alazily():
        yield 1

    for wrong in (lazily, alazily):
        with pytest.raises(DeclarationError, match="generator"):
            how(wrong)


def test_a_factory_may_take_the_arguments(log):
    seen = []

    def factory(result, args):
        return Compensation(fn=lambda: seen.append((result, args)))

    with pytest.raises(RuntimeError):
        with saga_scope(log=log) as saga:
            saga.execute("t", lambda x: x + 1, args={"x": 1}, semantics=C, compensate=factory)
            raise RuntimeError
    assert seen == [(2, {"x": 1})]


def test_paths_into_the_saga_and_the_step(log):
    seen = {}

    @compensator("back")
    def back(**kwargs) -> None:
        seen.update(kwargs)

    with pytest.raises(RuntimeError):
        with saga_scope("s", log=log, name="order") as saga:
            saga.execute(
                "t",
                lambda items: SimpleNamespace(ids=[7, 8]).__dict__,
                args={"items": [{"sku": "x"}]},
                semantics=C,
                compensate=undo(
                    back,
                    saga="saga.id",
                    key="step.forward_key",
                    own="step.compensation_key",
                    sku="args.items[0].sku",
                    last="result.ids[1]",
                ),
            )
            state = saga.steps[0]
            raise RuntimeError
    assert seen == {
        "saga": "s", "key": state.forward_key, "own": state.compensation_key, "sku": "x", "last": 8,
    }  # fmt: skip


@pytest.mark.parametrize(("status", "refused"), [(400, True), (404, True), (422, True), (408, False), (409, False)])
@pytest.mark.parametrize("more", [(423, False), (425, False), (499, False), (500, False), (200, False)])
def test_http_client_errors(status, refused, more):
    for code, expected in ((status, refused), more):
        error = RuntimeError()
        error.response = SimpleNamespace(status_code=code)
        assert http_client_error(error) is expected
    assert http_client_error(RuntimeError()) is False


def test_a_broken_predicate_says_nothing():
    def broken(error):
        raise KeyError

    spec = _declared(semantics=R, not_applied=(broken, ValueError))
    assert spec.says_not_applied(ValueError()) is True
    assert spec.says_not_applied(RuntimeError()) is False


def test_in_doubt_defaults_to_the_timeout_else_half_a_minute():
    assert _declared(semantics=R).in_doubt == 30.0
    assert _declared(semantics=R, timeout=5.0).in_doubt == 5.0
    assert _declared(semantics=R, timeout=5.0, in_doubt=0.0).in_doubt == 0.0
