"""Where one test of the adapter suite happens: a desk, a file log, and the harness under one entry and tool kind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import pytest

from agent_saga_core.errors import SagaNotFound
from agent_saga_core.log.base import Log
from agent_saga_core.log.file import FileLog
from agent_saga_core.recovery import read_saga
from agent_saga_core.registry import isolated_registry
from agent_saga_core.state import SagaState, SagaStatus, StepState, StepStatus
from agent_saga_core.testing.adapters.desk import BY_ITEM, Desk
from agent_saga_core.testing.adapters.harness import AdapterHarness, Call, Deferred, Entry, Ran, Script, Turn

__all__ = ["Outcome", "Stage", "Staged", "Stages", "caused_by", "chain"]

DEFERRED = "agent_saga_deferred"
"""The property of a test's report that the pytest plugin prints."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run came to."""

    way: str
    script: Script = field(repr=False)
    ran: Ran | None = None
    error: BaseException | None = None
    state: SagaState | None = field(default=None, repr=False)

    @property
    def heard(self) -> list[str]:
        """What the model was told of its calls."""
        return self.script.heard

    @property
    def status(self) -> SagaStatus | None:
        """How the saga ended, by its log; None if there is none."""
        return self.state.status if self.state is not None else None

    @property
    def steps(self) -> tuple[StepState, ...]:
        """Its steps, by its log."""
        return self.state.steps if self.state is not None else ()

    @property
    def statuses(self) -> list[tuple[str, StepStatus]]:
        """Tool and status of each step."""
        return [(step.tool, step.status) for step in self.steps]

    def finished(self) -> Ran:
        """What the caller got; the run's own exception comes out if there was one."""
        if self.error is not None:
            raise self.error
        assert self.ran is not None
        return self.ran


class Stage:
    """A desk, a log, and one way to run an agent on them."""

    def __init__(self, harness: AdapterHarness, entry: Entry, is_async: bool, directory: Path) -> None:
        directory.mkdir()
        self.harness = harness
        self.entry = entry
        self.is_async = is_async
        self.directory = directory
        self.desk = Desk(directory / "desk")
        self.log: Log = FileLog(directory / "log")

    @property
    def way(self) -> str:
        """The entry and the kind of the tools, for people."""
        return f"{self.entry.name} with {'async' if self.is_async else 'sync'} tools"

    def tool(self, name: str, declaration: dict[str, Any] | None = None, **more: Any) -> Any:
        """A wrapped tool that books its item at the desk; undone by its item unless declared otherwise."""
        return self.wrap(self.plain(name), declaration, **more)

    def plain(self, name: str) -> Any:
        """The same tool, not wrapped."""
        return self.harness.tool(self.desk.function(name, self.is_async))

    def wrap(self, tool: Any, declaration: dict[str, Any] | None = None, **more: Any) -> Any:
        """`wrap_tool`, undone by item unless declared otherwise."""
        return self.harness.wrap(tool, **{**(BY_ITEM if declaration is None else declaration), **more})

    def run(self, tools: Sequence[Any], *turns: Turn | Call, **scope: Any) -> Outcome:
        """Run an agent with these tools on these turns, in a saga of this stage's log."""
        return self.play(tools, Script(turns), **scope)

    def play(self, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Outcome:
        """`run` on a script of its own; without a saga if told so. An `Exception` becomes part of the outcome."""
        if saga:
            scope = {"log": self.log, "saga_id": "s", **scope}
        ran: Ran | None = None
        error: Exception | None = None
        try:
            ran = self._run(tools, script, saga, scope)
        except Exception as raised:
            error = raised
        return self.outcome(script, ran, error, scope.get("saga_id"))

    def outcome(
        self, script: Script, ran: Ran | None = None, error: BaseException | None = None, saga_id: str | None = "s"
    ) -> Outcome:
        """What has become of a saga of this stage's log by now."""
        state: SagaState | None = None
        if saga_id is not None:
            try:
                state = self.seen(saga_id)
            except SagaNotFound:
                state = None
        return Outcome(way=self.way, script=script, ran=ran, error=error, state=state)

    def seen(self, saga_id: str = "s") -> SagaState:
        """The saga as another process would read it now."""
        with closing(FileLog(self.directory / "log", create=False)) as reader:
            return read_saga(reader, saga_id)

    def intents(self, saga_id: str = "s") -> list[dict[str, Any]]:
        """What the log holds of the calls that were about to be made."""
        return [record.data for record in self.log.read(saga_id) if record.type == "INTENT"]

    def call_straight(self, tool: Any, **args: Any) -> tuple[Any, Exception | None]:
        """Call a tool with no agent; what it returned, and what it raised."""
        try:
            return self.harness.call(tool, args), None
        except Exception as error:
            return None, error

    def close(self) -> None:
        """Close the log."""
        self.log.close()

    def _run(self, tools: Sequence[Any], script: Script, saga: bool, scope: dict[str, Any]) -> Ran:
        if not self.entry.is_async:
            return self.harness.run(self.entry, tools, script, saga=saga, **scope)
        run: Coroutine[Any, Any, Ran] = self.harness.arun(self.entry, tools, script, saga=saga, **scope)
        return asyncio.run(run)


class Stages(Protocol):
    """The fixture `stages`."""

    def __call__(self, where: Callable[[Entry, bool], bool] = ...) -> Iterable[Stage]:
        """Every way to run an agent, each on a stage of its own; those of which `where` says False are left out."""
        ...


class Staged:
    """The fixtures of the suite."""

    @pytest.fixture
    def harness(self) -> AdapterHarness:
        """The adapter under test."""
        raise NotImplementedError("Override the fixture harness: an AdapterHarness of this adapter.")

    @pytest.fixture(autouse=True)
    def _deferral(self, request: pytest.FixtureRequest, harness: AdapterHarness) -> None:
        """A deferred test is run and must fail: one that passes is an error, and so is one that is never run."""
        name = cast(str, getattr(request.node, "originalname", None) or request.node.name)
        if name not in harness.deferred or name == "test_every_deferral_names_a_test":
            return
        deferral = Deferred(name, harness.deferred[name])
        request.node.user_properties.append((DEFERRED, str(deferral)))
        if name in harness.hangs:
            pytest.xfail(f"deferred, and not run: {deferral.reason}")
        request.node.add_marker(pytest.mark.xfail(reason=f"deferred: {deferral.reason}", strict=True))

    @pytest.fixture
    def stages(self, harness: AdapterHarness, tmp_path: Path) -> Iterator[Stages]:
        """Every way to run an agent, one after the other.

        The compensators of a stage are registered while its turn lasts.
        """
        running: list[Generator[Stage]] = []

        def stages(where: Callable[[Entry, bool], bool] = lambda _entry, _is_async: True) -> Iterable[Stage]:
            assert not running, "one loop over the stages for each test"
            running.append(_stages(harness, tmp_path, where))
            return running[0]

        yield stages
        for one in running:
            one.close()


def _stages(harness: AdapterHarness, directory: Path, where: Callable[[Entry, bool], bool]) -> Generator[Stage]:
    assert harness.entries, "a harness names its framework's ways in: entries"
    ways = [
        (entry, is_async) for entry in harness.entries for is_async in (False, True) if harness.runs(entry, is_async)
    ]
    assert {entry for entry, _ in ways} == set(harness.entries), "an entry that runs no kind of tool at all"
    chosen = [way for way in ways if where(*way)]
    assert chosen, "this test asks for an entry and a kind of tools that the harness does not have"
    for number, (entry, is_async) in enumerate(chosen):
        stage = Stage(harness, entry, is_async, directory / f"stage{number}")
        sys.stdout.write(f"--- {stage.way}\n")  # pytest shows it with a failure
        with isolated_registry(), closing(stage):
            stage.desk.register()
            yield stage


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, what is in it if it is a group, and what it came from."""
    seen: set[int] = set()
    left = [error]
    while left:
        one = left.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            left += cast("BaseExceptionGroup[BaseException]", one).exceptions
        left += [one.__cause__, one.__context__]


def caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Whether an exception of this type is what the error is, or came from."""
    return any(isinstance(one, kind) for one in chain(error))
