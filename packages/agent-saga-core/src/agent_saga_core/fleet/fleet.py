"""`SagaFleet`: the tools of several frameworks under one name, and the transactions over them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast, overload

import msgspec

from agent_saga_core.coverage import CoverageManifest
from agent_saga_core.declare import StepSpec, Undo
from agent_saga_core.errors import DeclarationError
from agent_saga_core.fleet.adapters import adapter_for, described
from agent_saga_core.fleet.survey import coverage_of
from agent_saga_core.fleet.transaction import Transaction
from agent_saga_core.log.base import Log
from agent_saga_core.saga import saga_scope
from agent_saga_core.wrapping import Declaration, ToolRunner, runner_of, saga_tool
from agent_saga_core.wrapping import ScopeOptions as OptionsOfARun

if TYPE_CHECKING:
    from concurrent.futures import Executor

__all__ = ["SagaFleet", "ScopeOptions"]

T = TypeVar("T")
A = TypeVar("A")


class ScopeOptions(OptionsOfARun, total=False):
    """The keyword arguments of `saga_scope`."""

    independent: bool


class SagaFleet:
    """Tools of several frameworks, and sagas over all of them.

    While a transaction of the fleet is open, each of its tools refuses with `BoundaryRequired` where no saga can be
    told: on a thread that a tool or a framework started without its context. `bind` and `carry` bring the saga there.
    Transactions may be open at once, on any threads and loops: each call belongs to the one whose context, binding or
    carrying it came with, never to another.

    Args:
        name: What the fleet does, for people; the name of its sagas.
        log: The log of its sagas. Default: that of `saga_scope`.
    """

    def __init__(self, name: str, *, log: Log | str | None = None) -> None:
        self.name = name
        self._log = log
        self._lock = threading.RLock()
        self._tools: list[Any] = []
        self._declared: dict[str, StepSpec] = {}
        self._observed: dict[str, object] = {}
        self._open: list[Transaction] = []

    @property
    def tools(self) -> tuple[Any, ...]:
        """The wrapped tools, in the order in which they were registered."""
        with self._lock:
            return tuple(self._tools)

    @overload
    def register(self, tool: T, **declaration: Unpack[Declaration]) -> T: ...
    @overload
    def register(self, tool: T) -> T: ...
    def register(self, tool: T, **declaration: Any) -> T:
        """Wrap a tool with its framework's adapter, a function with `saga_tool`, and return the wrapped one.

        Give this one to the agent: the tool that was passed is untouched, and stays unprotected. A tool that is wrapped
        already is registered as it is, without a declaration.

        Raises:
            DeclarationError: No adapter knows the tool, it is wrapped already and declared again, the name is taken by
                another declaration, or the declaration could not keep the promises.
        """
        wrapped = self._taken(tool, declaration) if runner_of(tool) is not None else _wrapped(tool, declaration)
        spec = _runner(wrapped).spec
        with self._lock:
            known = self._declared.setdefault(spec.tool, spec)
            if not _declared_alike(known, spec):
                raise DeclarationError(
                    f"The fleet {self.name!r} already has a tool {spec.tool!r} with another declaration. "
                    "Give each tool a name of its own."
                )
            if not any(wrapped is other for other in self._tools):
                self._tools.append(wrapped)
                for transaction in self._open:
                    transaction.cover([wrapped])
        return wrapped

    def transaction(self, saga_id: str | None = None, **options: Unpack[ScopeOptions]) -> Transaction:
        """A saga over the fleet's tools; `with` or `async with` opens it and gives the `Saga`.

        The arguments are those of `saga_scope`; `name` and `log` default to the fleet's. Until its rollback or commit
        is complete no tool of the fleet, registered before or meanwhile, runs where no saga can be told. Inside an open
        saga it is a savepoint of it.
        """
        given: ScopeOptions = {"name": self.name, "log": self._log, **options}
        return Transaction(saga_scope(saga_id, **given), opened=self._opened, closed=self._closed)

    def bind(self, executor: Executor) -> Executor:
        """An executor that submits to this one, each call in the saga that is current where it is submitted.

        Raises:
            DeclarationError: Its workers are other processes.
        """
        from agent_saga_core.fleet.executor import BoundExecutor  # concurrent.futures, for those who use it

        return BoundExecutor(executor)

    def observe(self, agent: A, *, name: str | None = None) -> A:
        """Have an agent looked into by `coverage`; returns it.

        Args:
            agent: Anything that an installed adapter knows, or a list of tools.
            name: What stands before its paths. Default: `agents/0`, `agents/1`, and so on.

        Raises:
            DeclarationError: No adapter knows it, or the name is taken.
        """
        coverage_of(agent)
        with self._lock:
            if name is None and any(agent is other for other in self._observed.values()):
                return agent
            path = name if name is not None else f"agents/{len(self._observed)}"
            if self._observed.setdefault(path, agent) is not agent:
                raise DeclarationError(
                    f"The fleet {self.name!r} already observes another {path!r}. Give it a new name."
                )
        return agent

    def coverage(self) -> CoverageManifest:
        """What can be seen now: the registered tools, under `tools/`, and the observed agents."""
        with self._lock:
            tools, observed = tuple(self._tools), dict(self._observed)
        return CoverageManifest.merged(
            [*(_registered(tool) for tool in tools), *(coverage_of(it).under(path) for path, it in observed.items())]
        )

    def assert_fully_covered(self, acknowledge: Iterable[str] = ()) -> None:
        """`CoverageManifest.assert_fully_covered` of `coverage()`.

        Raises:
            AssertionError: See there.
        """
        self.coverage().assert_fully_covered(acknowledge)

    def _taken(self, tool: T, declaration: Mapping[str, Any]) -> T:
        if declaration:
            raise DeclarationError(
                f"{_runner(tool).spec.tool!r} is wrapped already, with a declaration of its own. "
                "Register it without one, or register the plain tool."
            )
        return tool

    def _opened(self, transaction: Transaction) -> None:
        with self._lock:
            transaction.cover(self._tools)
            self._open.append(transaction)

    def _closed(self, transaction: Transaction) -> None:
        with self._lock:
            if transaction in self._open:
                self._open.remove(transaction)
            transaction.uncover()


def _wrapped(tool: T, declaration: Mapping[str, Any]) -> T:
    adapter = adapter_for(tool)
    if adapter is not None:
        return cast(T, adapter.load().wrap_tool(tool, **declaration))
    if not callable(tool) or isinstance(tool, type):
        raise DeclarationError(
            f"No adapter knows {described(tool)}, and it is no function. Install the adapter of its framework."
        )
    if "semantics" not in declaration:
        raise DeclarationError("A tool is registered with what its effect means. Write semantics=ActionSemantics....")
    declare: Callable[..., Any] = saga_tool(**declaration)
    return cast(T, declare(tool))


def _runner(tool: object) -> ToolRunner:
    runner = runner_of(tool)
    if runner is None:
        raise DeclarationError(f"The adapter returned {described(tool)} that is not wrapped. Report it to the adapter.")
    return runner


def _registered(tool: object) -> CoverageManifest:
    """The manifest of one registered tool, under a path that is the same whatever its adapter calls it."""
    manifest = coverage_of(tool)
    path = f"tools/{_runner(tool).spec.tool}"
    if len(manifest.entries) != 1:
        return manifest.under(path)
    return CoverageManifest(
        framework=manifest.framework, entries=(msgspec.structs.replace(manifest.entries[0], path=path),)
    )


def _declared_alike(one: StepSpec, other: StepSpec) -> bool:
    """Whether two declarations promise the same; types and annotations are each framework's own."""
    return _promised(one) == _promised(other)


def _promised(spec: StepSpec) -> tuple[Any, ...]:
    key = str(spec.key) if spec.key is not None and not callable(spec.key) else spec.key
    return (
        spec.semantics,
        _undone_by(spec.undo),
        spec.factory,
        key,
        spec.timeout,
        spec.not_applied,
        spec.probe_name or spec.probe,
        spec.in_doubt,
        spec.doubt_declared,
        spec.require_saga,
    )


def _undone_by(undo: Undo | None) -> tuple[Any, ...] | None:
    if undo is None:
        return None
    return (undo.handler, undo.fn, undo.if_absent, undo.stored_paths, dict(undo.literals))
