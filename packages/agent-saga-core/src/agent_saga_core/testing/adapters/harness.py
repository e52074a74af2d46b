"""What one adapter tells the suite about its framework: how to make a tool, and how to run an agent on a script.

A harness decides nothing and checks nothing. It makes the framework's real objects, with a model that plays a script
instead of thinking; everything between that model and the tool's function is the framework's own.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

__all__ = ["AdapterHarness", "Call", "Deferred", "Entry", "Ran", "Script", "Turn"]


@dataclass(frozen=True)
class Deferred:
    """A test that an adapter does not pass, and why not. Made from `AdapterHarness.deferred`, shown by pytest."""

    test: str
    reason: str

    def __str__(self) -> str:
        return f"{self.test}: {self.reason}"


@dataclass(frozen=True)
class Call:
    """One tool call of the model. `Script.play` gives every call an `id`."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    id: str = ""


Turn: TypeAlias = tuple[Call, ...] | str
"""One answer of the model: calls (made in parallel if there are several), or its final text."""


class Script:
    """What the model will say, turn by turn, and what it has heard.

    Shared by every copy that a framework makes of its model; any thread may play. Behind the last turn, the model
    says "done".

    Attributes:
        heard: What the model had been told of its calls when it was last asked: the texts of the tool results in its
            conversation, in their order there.
        played: How many times the model was asked.
    """

    def __init__(self, turns: Iterable[Turn | Call]) -> None:
        """Turns in order; one call alone may stand for a turn. May be endless."""
        self._turns = iter(turns)
        self._lock = threading.Lock()
        self.heard: list[str] = []
        self.played = 0

    def play(self, heard: Sequence[str]) -> Turn:
        """What the model says next. The harness's model calls this once each time the framework asks it.

        A call that the script gives no id gets one that no other call of this script has.

        Args:
            heard: The texts of all tool results in the conversation that the framework hands to the model.
        """
        with self._lock:
            self.heard = list(heard)
            turn = next(self._turns, "done")
            number, self.played = self.played, self.played + 1
        if isinstance(turn, str):
            return turn
        calls = (turn,) if isinstance(turn, Call) else turn
        return tuple(call if call.id else replace(call, id=f"call_{number}_{n}") for n, call in enumerate(calls))

    def __copy__(self) -> Script:
        return self

    def __deepcopy__(self, memo: object) -> Script:
        return self


class Entry(NamedTuple):
    """One way into the framework: its name, and how it is taken."""

    name: str
    is_async: bool = False
    streams: bool = False


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a run gave its caller.

    Attributes:
        text: The agent's final answer.
        raw: What the framework's entry point returned; of a stream, everything it yielded, as a list.
    """

    text: str
    raw: Any = None


class AdapterHarness:
    """One adapter, as the suite sees it. Subclass it, and give it to `AdapterConformance` in the fixture `harness`.

    The class stands at the top level of its file and is made without arguments: the test that kills a process loads
    that file in a child and makes another one. It keeps nothing between two runs.

    To supply: `entries`, `tool`, `wrap`, `agent`, `run` and/or `arun`, `call`, `face`, `shown`, `coverage`. What stands
    below "where the framework can" has a default that makes its test fail, so that an adapter either overrides it or
    lists the test in `deferred`, with the reason.

    Attributes:
        entries: The framework's ways in, each of which `saga_run` and its kin follow. All of them are tested.
        swallows: Whether the framework tells the model of a tool's exception and goes on. False: it ends the run.
        cancels_async_tools: Whether cancelling an async entry's task cancels an async tool that it is running. False:
            the tool runs on, elsewhere, and is waited for.
        sync_tools_block: Whether an async entry runs a sync tool on its own loop, so that nothing else happens
            meanwhile.
        parallel: Whether the calls of one turn run at the same time (for async tools of async entries).
        shares_tools: Whether two sagas that run at once may use the same tool objects. False: such a call is refused.
        acknowledge: Paths of opaque places that `coverage` of this harness's own agent cannot help reporting.
        deferred: Tests that this adapter does not pass, each with the reason, in words for its users. Such a test is
            run all the same, and one that passes is an error.
        hangs: Those of the deferred tests that would never end, and are not run for that reason.
    """

    entries: ClassVar[tuple[Entry, ...]] = ()
    swallows: ClassVar[bool] = True
    cancels_async_tools: ClassVar[bool] = True
    sync_tools_block: ClassVar[bool] = False
    parallel: ClassVar[bool] = True
    shares_tools: ClassVar[bool] = True
    acknowledge: ClassVar[tuple[str, ...]] = ()
    deferred: ClassVar[Mapping[str, str]] = {}
    hangs: ClassVar[frozenset[str]] = frozenset()

    def runs(self, entry: Entry, is_async: bool) -> bool:
        """Whether `entry` can run tools made from async (or from sync) functions. Default: all of them."""
        return True

    def tool(self, fn: Callable[..., Any], *, pauses: bool = False) -> Any:
        """The framework's own tool, made from a function with a name, a docstring and typed parameters.

        Args:
            fn: A plain sync or async function.
            pauses: Make it wait for a person before each call, by the framework's own means. Asked for only by the
                tests that use `pause` and `resume`.
        """
        raise NotImplementedError("Override tool().")

    def wrap(self, tool: Any, **declaration: Any) -> Any:
        """The adapter's `wrap_tool`."""
        raise NotImplementedError("Override wrap(): return wrap_tool(tool, **declaration).")

    def agent(self, tools: Sequence[Any], script: Script) -> Any:
        """The framework's agent (graph, crew, kernel, ...) with these tools and a model that plays the script."""
        raise NotImplementedError("Override agent().")

    def run(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        """Run `agent(tools, script)` through a sync entry, to its end, and let every exception out.

        The model must hear the result of each call before it is asked again, and be asked until it gives a text.

        Args:
            entry: One of `entries` that is not async.
            tools: The framework's tools, wrapped or not.
            script: What the model says.
            saga: False: through the framework's own entry, with nothing of the adapter involved.
            **scope: What `saga_run` (or the stream) takes for its scope: `saga_id=`, `log=`, `drain_timeout=`,
                `approve=`.
        """
        raise NotImplementedError("Override run(), or leave sync entries out of `entries`.")

    async def arun(self, entry: Entry, tools: Sequence[Any], script: Script, *, saga: bool = True, **scope: Any) -> Ran:
        """The same through an async entry, on the running loop; cancelling it must reach the framework's own call."""
        raise NotImplementedError("Override arun(), or leave async entries out of `entries`.")

    def call(self, tool: Any, args: Mapping[str, Any]) -> Any:
        """Call the tool with no agent, as a user of the framework would on a thread of their own; nobody's loop runs.

        Raises what the tool raised where the framework lets it out; otherwise returns the text that it makes of it.
        """
        raise NotImplementedError("Override call().")

    def face(self, tool: Any) -> Mapping[str, object]:
        """Every public field of the tool, and what the model is shown of it.

        Compared between original and wrapped with `is`, else `==`; leave out only the function that makes the call.
        """
        raise NotImplementedError("Override face().")

    def shown(self, tool: Any) -> set[str]:
        """The names of the arguments in the schema that the model is shown."""
        raise NotImplementedError("Override shown().")

    def coverage(self, agent: Any) -> Any:
        """The adapter's `coverage`."""
        raise NotImplementedError("Override coverage(): return coverage(agent).")

    # --- with a default that holds for most

    def results(self, ran: Ran) -> Sequence[object]:
        """What the run's result holds of each tool call beyond the text (artifacts, error flags), comparable by `==`.

        No ids that are new in each run. Default: nothing.
        """
        return ()

    def rich_tools(self) -> Sequence[tuple[Any, Mapping[str, Any]]]:
        """Further unwrapped tools, each with arguments, whose results only this framework has (artifacts, images).

        Each is run wrapped and not wrapped, and what the model hears and `results` must be equal. Default: none.
        """
        return ()

    def copies(self) -> Mapping[str, Callable[[Any], Any]]:
        """Ways to copy a tool. One that the original does not survive is not asked of the wrapped one."""
        return {
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "pickle": lambda tool: pickle.loads(pickle.dumps(tool)),
        }

    # --- where the framework can

    def injected(self, seen: Callable[[object], object]) -> Any:
        """A tool `injected(item: str, <what the framework injects>) -> str`, not wrapped.

        It calls `seen` with what it was injected, and returns its item.
        """
        raise NotImplementedError("Override injected(), or defer this test with the reason.")

    def leave(self, entry: Entry, tools: Sequence[Any], script: Script, **scope: Any) -> None:
        """Read the stream of `entry` until the result of its first tool call is in it, then close it.

        Asked for only if an entry has `streams=True`; of an async one, `asyncio.run` it.
        """
        raise NotImplementedError("Override leave(), or defer this test with the reason.")

    @property
    def retrying(self) -> Entry:
        """An entry (not one of `entries`) under which the framework calls a failed sync tool again by itself."""
        raise NotImplementedError("Override retrying, or defer this test with the reason.")

    def pause(self, tools: Sequence[Any], script: Script, **scope: Any) -> Any:
        """Run until the framework pauses at the call of a tool made with `pauses=True`; what is needed to go on."""
        raise NotImplementedError("Override pause(), or defer this test with the reason.")

    def resume(
        self, paused: Any, tools: Sequence[Any], script: Script, *, args: Mapping[str, Any] | None = None, **scope: Any
    ) -> Ran:
        """Let the paused call go on, and run to the end. May be called again with the same `paused`.

        Args:
            paused: What `pause` returned.
            tools: The same tools.
            script: The same script, which goes on.
            args: The person approved other arguments; None: those of the model.
            **scope: As in `run`; `saga_id` is left out: the adapter finds the saga.
        """
        raise NotImplementedError("Override resume(), or defer this test with the reason.")
