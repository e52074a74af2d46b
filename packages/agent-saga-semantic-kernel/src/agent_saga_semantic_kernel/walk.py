"""`coverage`: the functions of kernels, agents and plugins, and the places in them that cannot be seen into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

from semantic_kernel import Kernel
from semantic_kernel.agents import Agent, ChatCompletionAgent
from semantic_kernel.functions import KernelFunction, KernelPlugin

from agent_saga_core.coverage import CoverageEntry, CoverageManifest, entry_for, opaque, reach
from agent_saga_core.wrapping import ToolRunner, runner_of
from agent_saga_semantic_kernel.adapter import NAME
from agent_saga_semantic_kernel.sites import hand_over
from agent_saga_semantic_kernel.tools import agent_in, method_of

__all__ = ["coverage", "kernels_in", "runners_in"]

_FILTERS: Final = ("auto_function_invocation_filters", "function_invocation_filters", "prompt_rendering_filters")


def coverage(found: object) -> CoverageManifest:
    """Which functions of a kernel, an agent, a plugin, a function or a list of these are wrapped.

    An agent among the functions is looked into, each once. A prompt is an opaque entry: its model may call whatever the
    kernel has when it is run; so is each filter of yours, which may call anything, and an agent that runs at a provider
    with tools of its own. Functions that are added to a kernel later are not in a manifest made before.

    Args:
        found: A `Kernel`, an agent, a `KernelPlugin`, a kernel function, or a list, tuple or dict of them.
    """
    entries = (place.entry() for place in _Walk().look(found, ""))
    return CoverageManifest(framework=NAME, entries=tuple(entry for entry in entries if entry is not None))


def runners_in(found: object) -> list[ToolRunner]:
    """The runners of all wrapped functions that can be seen."""
    runners: list[ToolRunner] = []
    for place in _Walk().look(found, ""):
        runner = runner_of(_wrapped_in(place.found))
        if runner is not None and runner not in runners:
            runners.append(runner)
    return runners


def kernels_in(found: object) -> list[Kernel]:
    """The kernels that can be seen, those of agents among the functions too."""
    return [place.found for place in _Walk().look(found, "") if isinstance(place.found, Kernel)]


class _Place(NamedTuple):
    """Something that was found: a kernel, a function, or what cannot be seen into."""

    found: Any
    path: str
    why: str = ""
    inferred: bool = False

    def entry(self) -> CoverageEntry | None:
        if self.why:
            return opaque(self.path, self.why, framework=NAME)
        if isinstance(self.found, Kernel):
            return None
        tool = _wrapped_in(self.found)
        name = getattr(self.found, "name", None)
        return entry_for(
            tool,
            path=self.path,
            framework=NAME,
            # A method that is a saga tool by itself does not hear which of the model's calls it is made for.
            identity="call-id" if runner_of(self.found) is not None else "occurrence",
            visibility="inferred" if self.inferred else "declared",
            name=name if isinstance(name, str) else None,
        )


class _Walk:
    def __init__(self) -> None:
        self._seen: dict[int, object] = {}

    def look(self, found: Any, path: str) -> Iterator[_Place]:
        if isinstance(found, Kernel):
            yield from self._once(found, path, self._kernel)
        elif isinstance(found, Agent):
            yield from self._once(found, path, self._agent)
        elif isinstance(found, KernelPlugin):
            for function in found.functions.values():
                yield from self._function(function, f"{path}plugin:{found.name}/{function.name}")
        elif isinstance(found, KernelFunction):
            yield from self._function(found, f"{path}function:{found.name}")
        elif isinstance(found, Mapping):
            for key, one in cast("Mapping[object, Any]", found).items():
                yield from self.look(one, f"{path}{key}/")
        elif isinstance(found, list | tuple | set | frozenset):
            for one in cast("Iterable[Any]", found):
                yield from self.look(one, path)
        elif found is not None:
            name = getattr(found, "__name__", type(found).__name__)
            if callable(found) and (runner_of(found) is not None or getattr(found, "__kernel_function__", None)):
                yield _Place(found, f"{path}function:{name}")
            else:
                yield _Place(found, f"{path}{name}", "it is no kernel, agent, plugin or function of Semantic Kernel")

    def _once(self, found: Any, path: str, into: Any) -> Iterator[_Place]:
        if id(found) not in self._seen:
            self._seen[id(found)] = found
            yield from into(found, path)

    def _kernel(self, kernel: Kernel, path: str) -> Iterator[_Place]:
        yield _Place(kernel, path)
        for plugin in kernel.plugins.values():
            yield from self.look(plugin, path)
        for kind in _FILTERS:
            for _, one in getattr(kernel, kind, ()):
                if one is not hand_over:
                    name = getattr(one, "__name__", type(one).__name__)
                    yield from self._code(one, f"{path}filter:{name}", "a filter calls what it likes")

    def _agent(self, agent: Agent, path: str) -> Iterator[_Place]:
        path = f"{path}agent:{agent.name}/"
        yield from self.look(agent.kernel, path)
        if not isinstance(agent, ChatCompletionAgent):
            yield _Place(
                agent, f"{path}{type(agent).__name__}", "it may have tools that its provider or its class runs"
            )
        elif not type(agent).__module__.startswith("semantic_kernel."):
            yield _Place(agent, f"{path}class:{type(agent).__name__}", "what it overrides may call tools itself")

    def _function(self, function: KernelFunction, path: str) -> Iterator[_Place]:
        method = method_of(function)
        agent = agent_in(method)
        if agent is not None:
            yield from self.look(agent, "")
        elif getattr(method, "__name__", "") == "_as_kernel_function":
            yield _Place(function, path, "it runs an agent that it does not show")
        elif function.is_prompt:
            yield _Place(function, path, "its model may call whatever its kernel has when it is run")
        else:
            yield _Place(function, path)

    def _code(self, code: Any, path: str, why: str) -> Iterator[_Place]:
        for way, found in reach(code):
            if isinstance(found, KernelFunction) or (callable(found) and runner_of(found) is not None):
                yield _Place(found, f"{path}/{way}", inferred=True)
        yield _Place(code, path, why)


def _wrapped_in(found: object) -> object:
    """What carries the declaration: the function, or its method if that is a saga tool by itself."""
    method = method_of(found)
    return method if runner_of(found) is None and runner_of(method) is not None else found
