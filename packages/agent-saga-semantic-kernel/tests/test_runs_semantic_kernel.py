"""Runs that are one saga: which call is which, what a failure comes to, and what the kernel is left with.

No `from __future__ import annotations` here: `kernel_function` reads annotations as they are.
"""

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import semantic_kernel_fakes as fakes
from semantic_kernel import Kernel
from semantic_kernel.agents import ConcurrentOrchestration, SequentialOrchestration
from semantic_kernel.agents.runtime import InProcessRuntime
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import AuthorRole, ChatHistory
from semantic_kernel.exceptions import KernelInvokeException
from semantic_kernel.filters import FilterTypes
from semantic_kernel.functions import FunctionResult, KernelArguments, KernelFunctionFromMethod, kernel_function

from agent_saga_core import (
    BoundaryRequired,
    DeclarationError,
    IdempotencyConflict,
    RollbackIncomplete,
    SagaAborted,
    SagaStatus,
    StepRequest,
    current_step,
    read_saga,
    saga_scope,
)
from agent_saga_core.log.file import FileLog
from agent_saga_core.wrapping import REFUSALS
from agent_saga_semantic_kernel import asaga_invoke, asaga_run, asaga_stream, bind, saga_run, wrap_tool
from agent_saga_semantic_kernel.sites import hand_over

BOUND = 30.0


def booking(world: Any, declaration: dict[str, Any], name: str = "book") -> KernelFunctionFromMethod:
    async def book(item: str) -> dict[str, str]:
        """Book an item."""
        return world.book(item)

    return wrap_tool(kernel_function(book, name=name), **declaration)


def plain(fn: Callable[..., Any]) -> KernelFunctionFromMethod:
    return KernelFunctionFromMethod(method=kernel_function(fn))


def identities(log: Any, saga_id: str = "s") -> list[list[str]]:
    return [json.loads(record.data["identity"]) for record in log.read(saga_id) if record.type == "INTENT"]


def raw_identities(log: Any) -> set[str]:
    return {record.data["identity"] for record in log.read("s") if record.type == "INTENT"}


def book(item: str, id: str = "call_0") -> list[tuple[str, str, dict[str, Any]]]:
    return [(id, "book", {"item": item})]


# --- which call is which


@pytest.mark.promise("replay-not-rerun")
async def test_a_call_is_named_by_run_conversation_message_and_id(world: Any, log: Any, by_result: Any) -> None:
    agent = fakes.agent(booking(world, by_result), service=fakes.playing(book("a"), book("a")), instructions="Book.")
    await asaga_run(agent, "go", log=log, saga_id="s")
    assert identities(log) == [
        ["call", "semantic-kernel", "1/clerk#1/0", "book", "call_0"],
        ["call", "semantic-kernel", "1/clerk#1/1", "book", "call_0"],
    ]
    assert world.standing == ["a", "a"]


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("named", [True, False])
async def test_agents_whose_ids_begin_alike_do_not_meet(named: bool, world: Any, log: Any, by_result: Any) -> None:
    async def body() -> None:
        tool = booking(world, by_result)
        more = {"instructions": "Book."} if named else {}
        agents = [fakes.agent(tool, service=fakes.playing(book("a")), name=name, **more) for name in ("one", "two")]
        async with saga_scope("s", log=log):
            for agent in agents:
                await asaga_run(agent, "go")
            await asaga_run(fakes.agent(tool, service=fakes.playing(book("a"))), "go")
            await asaga_run(Kernel(), tool, item="a")
            await asaga_run(Kernel(), tool, item="a")

    await body()
    assert world.booked == ["a"] * 5 and len(raw_identities(log)) == 5
    await body()  # made again, everything is what it was
    assert world.booked == ["a"] * 5 and len(raw_identities(log)) == 5


@pytest.mark.promise("replay-not-rerun")
async def test_an_agent_called_as_a_function_does_not_meet_the_one_that_calls_it(
    world: Any, log: Any, by_result: Any
) -> None:
    def team() -> Any:
        tool = booking(world, by_result)
        service = fakes.ScriptedChat(ai_model_id="s", answer=lambda heard: "booked" if heard else book("a"))
        inner = fakes.agent(tool, service=service, name="inner")
        calls: list[Any] = [
            ("call_0", "team-inner", {"messages": "go", "instructions_override": ""}),
            ("call_1", "team-inner", {"messages": "go", "instructions_override": ""}),
            ("call_2", "book", {"item": "a"}),
        ]
        outer = fakes.agent(tool, service=fakes.playing(calls), name="outer")
        outer.kernel.add_plugin(fakes.team(inner))
        return outer

    for _ in range(2):
        outer = team()
        await asaga_run(outer, "go", log=log, saga_id="s")
        assert world.booked == ["a"] * 3
        scopes = sorted((scope, id) for _, _, scope, _, id in identities(log))
        assert scopes == [("1/#1/0", "call_2"), ("1/#1/0/call_0/#1/0", "call_0"), ("1/#1/0/call_1/#1/0", "call_0")]
        assert _filters(outer.kernel) == []


@pytest.mark.promise("replay-not-rerun")
async def test_a_service_asked_by_hand_tells_its_conversations_apart(world: Any, log: Any, by_result: Any) -> None:
    kernel = fakes.kernel(booking(world, by_result))
    settings = PromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())
    async with saga_scope("s", log=log) as saga:
        with bind(saga, kernel):
            for _ in range(2):  # the same settings and the same history, cut back as a reducer would
                history = ChatHistory()
                history.add_user_message("go")
                await fakes.playing(book("a")).get_chat_message_contents(history, settings, kernel=kernel)
    assert world.standing == ["a", "a"]


@pytest.mark.promise("replay-not-rerun")
async def test_agents_that_hand_over_no_settings_have_their_calls_counted(world: Any, log: Any, by_result: Any) -> None:
    """Agents that run at a provider: they name neither their settings nor the message."""

    async def body() -> None:
        kernel = fakes.kernel(booking(world, by_result))
        async with saga_scope("s", log=log) as saga:
            with bind(saga, kernel):
                for id in ("call_0", "call_0", None, None):
                    await kernel.invoke_function_call(fakes.call(id, "book", {"item": "a"}), ChatHistory())

    await body()
    await body()
    assert world.booked == ["a"] * 4
    assert [id for *_, id in identities(log)] == ["call_0", "call_0#2", "-", "-#2"]


@pytest.mark.promise("replay-not-rerun")
async def test_without_the_filter_calls_are_counted(world: Any, log: Any, by_result: Any) -> None:
    async def body(*items: str) -> None:
        kernel = fakes.kernel(tool := booking(world, by_result))
        async with saga_scope("s", log=log):
            for item in items:
                await kernel.invoke(tool, item=item)

    await body("a", "b")
    await body("a", "b")
    assert world.booked == ["a", "b"]
    assert [identity.rpartition("#")[2] for *_, identity in [_counted(log, n) for n in (0, 1)]] == ["0", "1"]
    with pytest.raises(KernelInvokeException) as raised:
        await body("b", "a")
    assert isinstance(raised.value.__cause__, IdempotencyConflict)


def _counted(log: Any, n: int) -> tuple[str]:
    intents = [record for record in log.read("s") if record.type == "INTENT"]
    return (intents[n].data["identity"],)


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("wrapped", [True, False])
async def test_what_a_function_calls_itself_is_counted_within_its_call(
    wrapped: bool, world: Any, log: Any, by_result: Any
) -> None:
    tool = booking(world, by_result)

    async def twice(item: str) -> str:
        """Book twice."""
        await kernel.invoke(tool, item=item)
        await kernel.invoke(tool, item=item)
        return item

    outer = wrap_tool(kernel_function(twice), semantics="READ_ONLY") if wrapped else plain(twice)
    agent = fakes.agent(tool, outer, service=fakes.playing([("call_0", "twice", {"item": "a"}), *book("a")]))
    kernel = agent.kernel
    await asaga_run(agent, "go", log=log, saga_id="s")
    assert sorted(world.booked) == ["a"] * 3 and len(raw_identities(log)) == (4 if wrapped else 3)


@pytest.mark.promise("replay-not-rerun")
@pytest.mark.parametrize("kind", [FilterTypes.AUTO_FUNCTION_INVOCATION, FilterTypes.FUNCTION_INVOCATION])
async def test_a_filter_that_calls_again_makes_no_second_call(kind: Any, world: Any, log: Any, by_result: Any) -> None:
    async def again(context: Any, next: Any) -> None:
        await next(context)
        await next(context)

    agent = fakes.agent(booking(world, by_result), service=fakes.playing(book("a"), book("a")))
    agent.kernel.add_filter(kind, again)
    await asaga_run(agent, "go", log=log, saga_id="s")
    assert world.standing == ["a", "a"] and len(read_saga(log, "s").steps) == 2


@pytest.mark.promise("replay-not-rerun", "in-flight-is-unknown")
async def test_a_run_that_died_in_mid_call_is_made_again(world: Any, by_item: Any, tmp_path: Path) -> None:
    inside, for_ever = asyncio.Event(), asyncio.Event()
    holds = [True]

    async def hold(item: str) -> dict[str, str]:
        """Book an item, and do not come back the first time."""
        booked = world.book(item)
        if holds.pop() if holds else False:
            inside.set()
            await for_ever.wait()
        return booked

    def clerk() -> Any:
        turns: list[Any] = [book("a"), [("call_0", "hold", {"item": "b"})], book("a")]
        tools = booking(world, by_item), wrap_tool(kernel_function(hold), **by_item)
        return fakes.agent(*tools, service=fakes.playing(*turns), instructions="Book.")

    with closing(FileLog(tmp_path / "log")) as dying:
        first = asyncio.create_task(asaga_run(clerk(), "go", log=dying, saga_id="s"))
        try:
            await asyncio.wait_for(inside.wait(), BOUND)
            shutil.copytree(tmp_path / "log", tmp_path / "survivor")  # what a dead process would have left
            with closing(FileLog(tmp_path / "survivor")) as log:
                await asaga_run(clerk(), "go", log=log, saga_id="s")
                assert world.acts == [
                    (act, item) for act, item in zip(["book", "book", "undo", "book", "book"], "abbba", strict=True)
                ]
                state = read_saga(log, "s")
        finally:
            first.cancel()
            await asyncio.wait({first}, timeout=BOUND)
    assert state.status is SagaStatus.COMMITTED
    assert [(step.tool, step.attempts) for step in state.steps] == [("book", 1), ("hold", 2), ("book", 1)]


async def test_a_filter_that_answers_itself_leaves_no_step(world: Any, log: Any, by_result: Any) -> None:
    async def answer(context: Any, next: Any) -> None:
        context.function_result = FunctionResult(function=context.function.metadata, value="cached")

    heard: list[list[str]] = []
    agent = fakes.agent(booking(world, by_result), service=fakes.playing(book("a"), heard=heard))
    agent.kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, answer)
    await asaga_run(agent, "go", log=log, saga_id="s")
    assert heard[-1] == ["cached"] and world.acts == []


# --- what the identity rests on, in the framework


async def test_fact_each_conversation_copies_its_settings_and_numbers_its_messages() -> None:
    seen: list[Any] = []

    async def look(context: Any, next: Any) -> None:
        seen.append((context.execution_settings, context.request_sequence_index, context.function_call_content.id))
        await next(context)

    async def find(item: str) -> str:
        """Find."""
        return item

    kernel = fakes.kernel(plain(find))
    kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, look)
    settings = PromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())
    calls = [[(str(n), "find", {"item": "x"}), (f"{n}'", "find", {"item": "y"})] for n in (0, 1)]
    for stream in (False, True):
        service = fakes.playing(*calls)
        history = ChatHistory()
        history.add_user_message("go")
        if stream:
            async for _ in service.get_streaming_chat_message_contents(history, settings, kernel=kernel):
                pass
        else:
            await service.get_chat_message_contents(history, settings, kernel=kernel)
    assert [(index, id) for _, index, id in seen] == [(0, "0"), (0, "0'"), (1, "1"), (1, "1'")] * 2
    first, second = {id(one) for one, _, _ in seen[:4]}, {id(one) for one, _, _ in seen[4:]}
    assert len(first) == len(second) == 1 and first != second and id(settings) not in first | second


async def test_fact_the_first_filter_of_the_list_is_the_innermost() -> None:
    order: list[str] = []

    def filter(name: str) -> Any:
        async def look(context: Any, next: Any) -> None:
            order.append(name)
            await next(context)

        return look

    async def find(item: str) -> str:
        """Find."""
        return item

    kernel = fakes.kernel(plain(find))
    for name in ("added first", "added second"):
        kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, filter(name))
    await kernel.invoke_function_call(fakes.call("1", "find", {"item": "x"}), ChatHistory())
    assert order == ["added first", "added second"]


async def test_fact_a_filters_second_parameter_is_passed_by_the_name_next() -> None:
    async def find(item: str) -> str:
        """Find."""
        return item

    async def other(context: Any, then: Any) -> None:
        await then(context)

    kernel = fakes.kernel(plain(find))
    kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, other)
    with pytest.raises(TypeError, match="next"):
        await kernel.invoke_function_call(fakes.call("1", "find", {"item": "x"}), ChatHistory())


# --- the kernel's filters


def _filters(kernel: Kernel) -> list[Any]:
    return [one for _, one in kernel.auto_function_invocation_filters]


async def test_the_filter_is_there_once_while_runs_last_and_gone_after(world: Any, log: Any, by_result: Any) -> None:
    during: list[int] = []
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def users(context: Any, next: Any) -> None:
        during.append(_filters(context.kernel).count(hand_over))
        clones.append(context.kernel.clone())
        if len(during) == 1:
            inside.set()
            await go_on.wait()
        await next(context)

    clones: list[Kernel] = []
    agent = fakes.agent(booking(world, by_result), service=fakes.playing(book("a"), book("b"), "one", "two"))
    agent.kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, users)
    first = asyncio.create_task(asaga_run(agent, "go", log=log, saga_id="one"))
    await asyncio.wait_for(inside.wait(), BOUND)
    await asaga_run(agent, "go", log=log, saga_id="two")
    assert _filters(agent.kernel) == [hand_over, users], "the other run still needs it"
    go_on.set()
    await asyncio.wait_for(first, BOUND)
    assert _filters(agent.kernel) == [users] and during == [1, 1]
    assert [[step.tool for step in read_saga(log, id).steps] for id in ("one", "two")] == [["book"], ["book"]]
    assert sorted(args["item"] for id in ("one", "two") for args in _args(log, id)) == ["a", "b"]

    async with saga_scope("clone", log=log) as saga:
        with bind(saga, clones[0]):
            assert _filters(clones[0]).count(hand_over) == 1
    assert hand_over not in _filters(clones[0])


def _args(log: Any, saga_id: str) -> list[Any]:
    return [record.data["args"] for record in log.read(saga_id) if record.type == "INTENT"]


async def test_a_kernel_given_for_the_run_is_the_one_that_is_bound(world: Any, log: Any, by_result: Any) -> None:
    service = fakes.playing(book("a"))
    other = fakes.kernel(booking(world, by_result), service=service)
    agent = fakes.agent(service=fakes.playing())
    await asaga_run(agent, "go", kernel=other, log=log, saga_id="s")
    assert identities(log) == [["call", "semantic-kernel", "1/#1/0", "book", "call_0"]]
    assert _filters(other) == []


# --- failures


@pytest.mark.promise("closed-means-closed", "no-silent-commit")
async def test_the_sibling_of_a_failed_call_is_waited_for_and_undone(world: Any, log: Any, by_item: Any) -> None:
    inside, failed = asyncio.Event(), asyncio.Event()

    async def pay(item: str) -> dict[str, str]:
        """Pay."""
        await inside.wait()
        world.book(item)
        failed.set()
        raise ZeroDivisionError(item)

    async def hold(item: str) -> dict[str, str]:
        """Hold."""
        inside.set()
        await failed.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        return world.book(item)

    tools = [wrap_tool(kernel_function(fn), **by_item) for fn in (pay, hold)]
    calls = [("1", "pay", {"item": "a"}), ("2", "hold", {"item": "b"})]
    agent = fakes.agent(*tools, service=fakes.playing(calls))
    with pytest.raises(SagaAborted):
        await asaga_run(agent, "go", log=log, saga_id="s", on_failure="abort")
    assert sorted(world.booked) == ["a", "b"] and world.standing == []
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


@pytest.mark.promise("closed-means-closed", "no-false-clean")
async def test_a_sibling_that_outlives_the_run_is_waited_for_and_undone(world: Any, log: Any, by_result: Any) -> None:
    """A filter that raises ends the run at once, and the framework leaves the other calls running."""
    inside, ended = asyncio.Event(), asyncio.Event()

    async def hold(item: str) -> dict[str, str]:
        """Hold."""
        inside.set()
        await ended.wait()
        return world.book(item)

    async def refuse(context: Any, next: Any) -> None:
        if context.arguments["item"] == "bad":
            await inside.wait()
            asyncio.get_running_loop().call_later(0, ended.set)
            raise ZeroDivisionError("a filter's own")
        await next(context)

    agent = fakes.agent(
        wrap_tool(kernel_function(hold), **by_result),
        service=fakes.playing([("1", "hold", {"item": "bad"}), ("2", "hold", {"item": "b"})]),
    )
    agent.kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, refuse)
    with pytest.raises(ZeroDivisionError, match="a filter's own"):
        await asaga_run(agent, "go", log=log, saga_id="s")
    assert world.acts == [("book", "b"), ("undo", "b")]
    assert read_saga(log, "s").status is SagaStatus.ROLLED_BACK


@pytest.mark.promise("no-silent-commit")
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_model_that_never_stops_is_not_asked_after_three_refusals(
    at_once: bool, world: Any, log: Any, by_result: Any
) -> None:
    async def pay(item: str) -> dict[str, str]:
        """Pay."""
        raise ZeroDivisionError(item)

    again = [(str(n), "book", {"item": "x"}) for n in range(REFUSALS)]
    turns: list[Any] = [[("0", "pay", {"item": "a"})], *([again] if at_once else [[one] for one in again])]
    asked: list[list[str]] = []
    agent = fakes.agent(
        wrap_tool(kernel_function(pay), **by_result),
        booking(world, by_result),
        service=fakes.playing(*turns, *[book("more")] * 100, heard=asked),
    )
    with pytest.raises(RollbackIncomplete):
        await asaga_run(agent, "go", log=log, saga_id="s")
    assert len(asked) == (2 if at_once else 1 + REFUSALS)
    assert world.booked == []


async def test_a_saga_that_has_refused_enough_ends_every_further_run_at_its_first_call(
    world: Any, log: Any, by_result: Any
) -> None:
    asked: list[list[str]] = []
    agent = fakes.agent(booking(world, by_result), service=fakes.playing(*[book("more")] * 100, heard=asked))
    with pytest.raises(SagaAborted):
        async with saga_scope("s", log=log) as saga:
            saga.abort("over")
            with bind(saga, agent):
                for _ in range(REFUSALS):
                    with pytest.raises(KernelInvokeException):
                        await agent.kernel.invoke(plugin_name="desk", function_name="book", item="x")
                answer = await agent.get_response("go")
            assert answer.message.role is AuthorRole.TOOL and len(asked) == 1, "one question, not six"
    assert world.booked == []


async def test_a_kernels_function_raises_what_the_framework_makes_of_it(world: Any, log: Any, by_item: Any) -> None:
    async def pay(item: str) -> None:
        """Pay."""
        world.book(item)
        raise ZeroDivisionError(item)

    tool = wrap_tool(kernel_function(pay), **by_item)
    with pytest.raises(KernelInvokeException) as raised:
        await asaga_run(Kernel(), function=tool, arguments=KernelArguments(item="a"), log=log, saga_id="s")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert world.booked == ["a"] and world.standing == []


async def test_what_the_application_stops_is_undone(world: Any, log: Any, by_result: Any) -> None:
    async def stop(context: Any, next: Any) -> None:
        await next(context)
        context.terminate = True

    agent = fakes.agent(booking(world, by_result), service=fakes.playing(book("a"), book("b")))
    agent.kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, stop)
    response = await asaga_run(agent, "go", log=log, saga_id="s")
    assert response.message.role is AuthorRole.TOOL and world.standing == ["a"], "stopped by the user's own filter"
    assert read_saga(log, "s").status is SagaStatus.COMMITTED


# --- approval


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_person_is_asked_before_what_cannot_be_undone(is_async: bool, world: Any, log: Any) -> None:
    asked: list[StepRequest] = []

    def answer(request: StepRequest) -> bool:
        asked.append(request)
        return request.args["item"] == "fine"

    async def aanswer(request: StepRequest) -> bool:
        return answer(request)

    tool = booking(world, {"semantics": "IRREVERSIBLE"}, "mail")
    calls = [[("1", "mail", {"item": "bad"})], [("2", "mail", {"item": "fine"})]]
    heard: list[list[str]] = []
    for _ in range(2):
        agent = fakes.agent(tool, service=fakes.playing(*calls, heard=heard))
        await asaga_run(agent, "go", approve=aanswer if is_async else answer, log=log, saga_id=None)
    assert world.booked == ["fine", "fine"]
    assert [request.tool for request in asked] == ["mail"] * 4
    no, yes = heard[2]
    assert "mail" in no and "approv" in no.lower() and yes == str({"id": "fine"})


async def test_nobody_to_ask_is_a_no(world: Any, log: Any) -> None:
    heard: list[list[str]] = []
    tool = booking(world, {"semantics": "IRREVERSIBLE"})
    await asaga_run(fakes.agent(tool, service=fakes.playing(book("a"), heard=heard)), "go", log=log, saga_id="s")
    assert world.acts == [] and "approv" in heard[-1][0].lower()
    assert read_saga(log, "s").status is SagaStatus.COMMITTED


# --- faces


async def test_what_comes_back_is_what_the_framework_returns(world: Any, log: Any, by_result: Any) -> None:
    tool = booking(world, by_result)
    response = await asaga_run(fakes.agent(tool, service=fakes.playing(book("a"), "booked")), messages="go", log=log)
    assert str(response) == "booked" and response.thread is not None
    result = await asaga_run(fakes.kernel(tool), plugin_name="desk", function_name="book", item="b", log=log)
    assert isinstance(result, FunctionResult) and result.value == {"id": "b"}
    messages = [
        message
        async for message in asaga_invoke(fakes.agent(tool, service=fakes.playing("hello")), messages="go", log=log)
    ]
    assert [str(message) for message in messages] == ["hello"]


async def test_a_run_in_a_saga_is_told_in_its_calls(log: Any) -> None:
    steps: list[Any] = []

    async def look(item: str) -> str:
        """Look."""
        steps.append(current_step())
        return item

    agent = fakes.agent(
        wrap_tool(kernel_function(look), semantics="READ_ONLY"), service=fakes.playing([("1", "look", {"item": "x"})])
    )
    await asaga_run(agent, "go", log=log, saga_id="s", metadata={"order": 7})
    state = read_saga(log, "s")
    assert (state.name, state.metadata) == ("clerk", {"order": 7})
    assert steps[0].saga_id == "s" and steps[0].tool == "look"


@pytest.mark.promise("no-unprotected-call", "closed-means-closed")
@pytest.mark.parametrize("started", ["inside", "before", "in another saga"])
@pytest.mark.parametrize("kind", [SequentialOrchestration, ConcurrentOrchestration])
async def test_agents_that_a_runtime_runs(kind: Any, started: str, world: Any, log: Any, by_result: Any) -> None:
    tool = booking(world, by_result)
    agents = [
        fakes.agent(tool, service=fakes.playing(book(name)), name=name, instructions="Book.", description="Books.")
        for name in ("one", "two")
    ]
    runtime = InProcessRuntime()

    async def body() -> None:
        async with saga_scope("s", log=log, independent=True) as saga:
            if started == "inside":
                runtime.start()
            with bind(saga, *agents, by_binding=started != "inside"):
                running = await kind(members=agents).invoke("go", runtime=runtime)
                await running.get(timeout=BOUND)
            raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            if started == "in another saga":
                async with saga_scope("other", log=log) as other:
                    runtime.start()
                    await body()
                assert other.steps == ()
            else:
                if started == "before":
                    runtime.start()
                await body()
    finally:
        await runtime.stop_when_idle()
    assert world.booked == ["one", "two"] and world.standing == []
    assert [scope for _, _, scope, _, _ in identities(log)] == ["/one#1/0", "/two#1/0"]


@pytest.mark.promise("no-unprotected-call")
async def test_a_runtime_started_before_the_saga_runs_no_bound_function(world: Any, log: Any, by_result: Any) -> None:
    agent = fakes.agent(booking(world, by_result), service=fakes.playing(book("a")), description="Books.")
    runtime = InProcessRuntime()
    runtime.start()
    async with saga_scope("s", log=log) as saga:
        with bind(saga, agent):
            running = await SequentialOrchestration(members=[agent]).invoke("go", runtime=runtime)
            await running.get(timeout=BOUND)
    await runtime.stop_when_idle()
    assert world.acts == []


async def test_only_agents_and_kernels_are_run() -> None:
    for given in (object(), fakes.playing(), "go"):
        with pytest.raises(DeclarationError, match="bind"):
            await asaga_run(given, "go")
    with pytest.raises(DeclarationError, match="bind"):
        asaga_invoke(Kernel())
    with pytest.raises(DeclarationError, match="bind"):
        asaga_stream(object())
    with pytest.raises(RuntimeError, match="asaga_run"):
        saga_run(Kernel())


@pytest.mark.promise("no-unprotected-call")
async def test_a_bound_function_refuses_where_no_saga_can_be_told(world: Any, log: Any, by_result: Any) -> None:
    import contextvars

    kernel = fakes.kernel(tool := booking(world, by_result))
    async with saga_scope("s", log=log) as saga:
        with bind(saga, [kernel]):
            stray = asyncio.create_task(kernel.invoke(tool, item="a"), context=contextvars.Context())
            with pytest.raises(KernelInvokeException) as raised:
                await stray
    assert isinstance(raised.value.__cause__, BoundaryRequired) and world.acts == []
