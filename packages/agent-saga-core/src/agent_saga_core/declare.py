"""Declarations: what a tool's effect means, how it is undone, and how its outcome can be looked up."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args, get_origin

from agent_saga_core import paths, registry, values
from agent_saga_core.errors import DeclarationError, NotApplied

__all__ = [
    "ActionSemantics",
    "Compensation",
    "IfAbsent",
    "Observation",
    "StepSpec",
    "Undo",
    "call_with",
    "delete_by",
    "http_client_error",
    "inverse_of",
    "undo",
]

F = TypeVar("F", bound=Callable[..., Any])
IfAbsent = Literal["noop", "forbids", "unsafe"]


class ActionSemantics(StrEnum):
    """What a tool's effect means for a rollback."""

    READ_ONLY = "READ_ONLY"
    """No effect; nothing to undo."""
    REVERSIBLE = "REVERSIBLE"
    """State private to this process, restored exactly; gone when the process is."""
    COMPENSABLE = "COMPENSABLE"
    """An effect outside, offset by an inverse; a trace remains."""
    IRREVERSIBLE = "IRREVERSIBLE"
    """No undo: gated before it starts."""

    @property
    def durable(self) -> bool:
        """Whether the intent must be durable before the effect."""
        return self is ActionSemantics.COMPENSABLE or self is ActionSemantics.IRREVERSIBLE


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Compensation:
    """One inverse, ready to run: a registered handler's name, or a callable, with its keyword arguments.

    With `handler` it survives the process: any process that registers the name can run it. With `fn` it lives and
    dies with this process, and reports say so.
    """

    handler: str | None = None
    fn: Callable[..., Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    description: str = ""

    def __post_init__(self) -> None:
        if (self.handler is None) == (self.fn is None):
            raise DeclarationError(
                "A Compensation has exactly one of handler and fn. "
                'Write Compensation(handler="payments.refund", kwargs={...}).'
            )
        if self.handler is not None and not (self.handler and _is_utf8(self.handler)):
            raise DeclarationError("A Compensation's handler is a registered name. Name a registered compensator.")


@dataclass(frozen=True)
class Observation:
    """What a probe saw.

    Attributes:
        landed: True if the effect exists, False if it does not, None if the probe cannot tell.
        result: What the call would have returned, if the probe knows it.
        final: With `landed=False`: it can also never land any more, so that nothing has to be waited for.
        detail: A word for people.
    """

    landed: bool | None
    result: Any = None
    final: bool = False
    detail: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Undo:
    """A declared inverse: a compensator and where each of its arguments comes from. Made by `undo` and its kin."""

    handler: str | None
    fn: Callable[..., Any] | None
    if_absent: IfAbsent
    paths: Mapping[str, paths.Path]
    literals: Mapping[str, Any]

    @cached_property
    def from_arguments(self) -> bool:
        """Whether it can be derived before the call, without the result."""
        return all(path.root != "result" for path in self.paths.values())

    @property
    def covers_unknown(self) -> bool:
        """Whether it may be run although nobody knows whether the effect happened."""
        return self.from_arguments and self.if_absent != "unsafe"

    @cached_property
    def mixed(self) -> bool:
        """Whether it needs the result and the arguments."""
        return not self.from_arguments and any(path.root == "args" for path in self.paths.values())

    @cached_property
    def stored_paths(self) -> dict[str, str]:
        """The paths as the log holds them."""
        return {name: str(path) for name, path in self.paths.items()}

    def kwargs(self, roots: Mapping[str, object]) -> dict[str, Any]:
        """The compensator's arguments; raises `paths.PathMissing`."""
        derived: dict[str, Any] = dict(self.literals)
        for name, path in self.paths.items():
            derived[name] = path.get(roots)
        return derived


Factory: TypeAlias = Callable[..., Compensation]
Inverse: TypeAlias = Undo | Callable[..., Compensation] | None


def _target(fn_or_name: Callable[..., Any] | str, where: str) -> tuple[str | None, Callable[..., Any] | None]:
    if isinstance(fn_or_name, str):
        if not fn_or_name:
            raise DeclarationError(f"{where} got an empty compensator name. Name a registered compensator.")
        return fn_or_name, None
    if not callable(fn_or_name):
        raise DeclarationError(
            f'{where} got a {type(fn_or_name).__name__}. Give it a function decorated with @compensator("name"), '
            "or that name."
        )
    found = registry.compensator_of(fn_or_name)
    return (found.name, None) if found is not None else (None, fn_or_name)


def _parameters(fn_or_name: Callable[..., Any] | str) -> inspect.Signature | None:
    fn: Callable[..., Any] | None
    if isinstance(fn_or_name, str):
        found = registry.compensator_named(fn_or_name)
        fn = found.fn if found else None
    else:
        fn = fn_or_name
    if fn is None:
        return None
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def _check_names(fn_or_name: Callable[..., Any] | str, names: Iterable[str], where: str) -> None:
    signature = _parameters(fn_or_name)
    if signature is None:
        return
    given: dict[str, Any] = dict.fromkeys(names)
    if "idempotency_key" in signature.parameters:
        given.setdefault("idempotency_key", None)
    try:
        signature.bind(**given)
    except TypeError as error:
        raise DeclarationError(
            f"{where}: these arguments do not fit {signature} ({error}). Give one path for each parameter."
        ) from None


def _check_if_absent(if_absent: str, where: str) -> None:
    if if_absent not in ("noop", "forbids", "unsafe"):
        raise DeclarationError(
            f'{where}: if_absent is one of "noop", "forbids" and "unsafe". Write if_absent="unsafe" if in doubt.'
        )


def _declared(
    where: str,
    fn_or_name: Callable[..., Any] | str,
    if_absent: IfAbsent,
    sources: Mapping[str, object],
    literals: Mapping[str, Any],
) -> Undo:
    _check_if_absent(if_absent, where)
    handler, fn = _target(fn_or_name, where)
    parsed = {name: paths.parse(cast(str, source)) for name, source in sources.items()}
    _check_names(fn_or_name, [*parsed, *literals], where)
    if handler is not None:
        _refuse_secrets(where, parsed, literals)
    return Undo(handler=handler, fn=fn, if_absent=if_absent, paths=parsed, literals=dict(literals))


def _refuse_secrets(where: str, parsed: Mapping[str, paths.Path], literals: Mapping[str, Any]) -> None:
    """A stored compensation can only carry what may stand in the log."""
    redaction = values.current_redaction()
    for name, path in parsed.items():
        if redaction.matches(name) or path.names_secret(redaction):
            raise DeclarationError(
                f"{where}: {name}={str(path)!r} would need a secret, which the log never holds, so no other process "
                'could run it. Let the compensator take credential("...") instead.'
            )
    for name, value in literals.items():
        if redaction.matches(name) and not isinstance(value, values.Credential):
            raise DeclarationError(
                f'{where}: {name}= is named as a secret, and the log never holds one. Write credential("...") instead.'
            )


def undo(fn_or_name: Callable[..., Any] | str, /, *, if_absent: IfAbsent = "unsafe", **paths: str) -> Undo:
    """Declare the inverse: call this compensator with arguments taken from the call and its result.

    Args:
        fn_or_name: A function registered with `@compensator`, or its name. Any other callable works too, but lives
            and dies with this process.
        if_absent: What running it does when the effect never happened. `"noop"`: nothing. `"forbids"`: it also stops
            a late landing (a tombstone by the forward key). `"unsafe"`: harm, so it is never run on an UNKNOWN step.
        **paths: For each parameter where its value comes from: `"result.id"`, `"args.items[0].sku"`, `"saga.id"`,
            `"step.forward_key"`.

    Raises:
        DeclarationError: A value is no path, the names do not fit the compensator, or a secret would be needed.
    """
    return _declared("undo()", fn_or_name, if_absent, paths, {})


def delete_by(fn: Callable[..., Any] | str, /, **paths: str) -> Undo:
    """`undo` for an inverse that does nothing when the effect is absent, such as deleting by id."""
    return _declared("delete_by()", fn, "noop", paths, {})


def call_with(fn: Callable[..., Any] | str, /, *, if_absent: IfAbsent = "unsafe", **literals: Any) -> Undo:
    """Declare the inverse: call this compensator with exactly these values.

    Raises:
        DeclarationError: A value cannot be stored, the names do not fit, or a value is named as a secret.
    """
    declared = _declared("call_with()", fn, if_absent, {}, literals)
    if declared.handler is not None:
        try:
            values.encode_args(dict(literals), {})
        except values.Unstorable as error:
            raise DeclarationError(f"call_with(): {error}. Pass plain data.") from None
    return declared


def inverse_of(
    fn: Callable[..., Any], /, *, if_absent: IfAbsent = "unsafe", maps: Mapping[str, str] | None = None
) -> Callable[[F], F]:
    """Pair the decorated compensator with the tool function `fn`, so that its declaration may leave `compensate=` out.

    Without `maps`, every parameter of the compensator is taken from the equally named argument of `fn`.

    Args:
        fn: The plain function, before it is declared with `saga_tool`.
        if_absent: As in `undo`.
        maps: Parameter to path, for those that are not equally named arguments.

    Raises:
        DeclarationError: A parameter has no equally named argument and no path, or `fn` already has an inverse.
    """

    def pair(inverse: F) -> F:
        arguments = inspect.signature(fn).parameters
        sources = dict(maps or {})
        for name, parameter in inspect.signature(inverse).parameters.items():
            if (
                name in sources
                or name == "idempotency_key"
                or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            ):
                continue
            if name in arguments:
                sources[name] = f"args.{name}"
            elif parameter.default is parameter.empty:
                raise DeclarationError(
                    f"inverse_of(): {fn.__qualname__!r} has no argument {name!r} for {inverse.__qualname__!r}. "
                    f'Write maps={{"{name}": "result...."}}.'
                )
        registry.pair_inverse(fn, _declared("inverse_of()", inverse, if_absent, sources, {}))
        return inverse

    return pair


_IN_TRANSIT_STATUS = frozenset({408, 409, 423, 425, 499})


def http_client_error(error: BaseException) -> bool:
    """Whether `error` is an HTTP answer of httpx or requests that says the request was refused without effect.

    True for 4xx except 408, 409, 423, 425 and 499, where the effect may exist. For `not_applied=`.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in _IN_TRANSIT_STATUS


NotAppliedRule: TypeAlias = type[BaseException] | Callable[[BaseException], bool]


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What is declared about one tool; checked when it is made.

    Attributes:
        tool: The tool's name.
        semantics: What its effect means.
        undo: The declared inverse, if it is one made by `undo` or its kin.
        factory: The inverse as a function of the result (and the arguments), if it is one.
        factory_takes_args: Whether the factory has a second parameter.
        key: A path or a function that gives the call's identity from its arguments.
        timeout: Seconds after which the call is given up as UNKNOWN.
        not_applied: Exception types and predicates that say "nothing happened".
        probe_name: The registered name of the probe, if it has one.
        probe: The probe.
        in_doubt: Seconds for which a call that was given up may still land.
        doubt_declared: Whether that was said (by `in_doubt` or `timeout`): then a failed call waits it out itself.
        result_type: The type that a recorded result is rebuilt through.
        hints: The annotations of the tool's parameters.
        offload: Whether an async caller runs it in a worker thread.
        require_saga: Whether calling it without a saga is refused.
        interrupts: The exceptions by which the tool's framework pauses a call, to make it again later.
    """

    tool: str
    semantics: ActionSemantics
    undo: Undo | None = None
    factory: Factory | None = None
    factory_takes_args: bool = False
    key: paths.Path | Callable[[dict[str, Any]], str] | None = None
    timeout: float | None = None
    not_applied: tuple[NotAppliedRule, ...] = ()
    probe_name: str | None = None
    probe: Callable[[dict[str, Any], str], Any] | None = None
    in_doubt: float = 30.0
    doubt_declared: bool = False
    result_type: Any = None
    hints: Mapping[str, Any] = field(default_factory=dict[str, Any])
    offload: bool = False
    require_saga: bool = False
    interrupts: tuple[type[BaseException], ...] = ()

    @classmethod
    def declared(
        cls,
        tool: str,
        *,
        semantics: ActionSemantics | str,
        compensate: Inverse = None,
        key: str | Callable[[dict[str, Any]], str] | None = None,
        timeout: float | None = None,
        not_applied: NotAppliedRule | Iterable[NotAppliedRule] = (),
        probe: Callable[[dict[str, Any], str], Any] | str | None = None,
        in_doubt: float | None = None,
        result_type: Any = None,
        hints: Mapping[str, Any] | None = None,
        offload: bool = False,
        require_saga: bool = False,
        interrupts: tuple[type[BaseException], ...] = (),
    ) -> StepSpec:
        """Check a declaration and give its parts their final form.

        Raises:
            DeclarationError: It could not keep the promises; the last sentence says what to write.
        """
        if not isinstance(tool, str) or not tool or not _is_utf8(tool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError("A tool needs a name. Pass the tool's name as a non-empty string.")
        semantics = _semantics(tool, semantics)
        _check_seconds(tool, "timeout", timeout, positive=True)
        _check_seconds(tool, "in_doubt", in_doubt, positive=False)
        result_type = _awaited(result_type)
        declared, factory = _inverse(tool, semantics, compensate)
        if declared is not None and declared.handler is not None:
            _refuse_marked(tool, declared, hints or {}, result_type)
        probe_name, probe_fn = _probe(tool, probe)
        return cls(
            tool=tool,
            semantics=semantics,
            undo=declared,
            factory=factory,
            factory_takes_args=factory is not None and _takes_two(factory),
            key=paths.parse(key) if isinstance(key, str) else key,
            timeout=timeout,
            not_applied=_rules(tool, not_applied),
            probe_name=probe_name,
            probe=probe_fn,
            in_doubt=in_doubt if in_doubt is not None else timeout if timeout is not None else 30.0,
            doubt_declared=in_doubt is not None or timeout is not None,
            result_type=result_type,
            hints=hints or {},
            offload=offload,
            require_saga=require_saga,
            interrupts=interrupts,
        )

    @property
    def reads_args_later(self) -> bool:
        """Whether deriving the inverse reads the arguments after the call, which may have consumed them."""
        return self.factory_takes_args or (self.undo is not None and self.undo.mixed)

    def says_not_applied(self, error: BaseException) -> bool:
        """Whether the tool, or its declaration, says that `error` means nothing happened.

        A predicate that itself fails says nothing: the outcome stays UNKNOWN.
        """
        if isinstance(error, NotApplied):
            return True
        for rule in self.not_applied:
            try:
                if isinstance(error, rule) if isinstance(rule, type) else rule(error):
                    return True
            except Exception:  # the safe reading of a broken predicate
                continue
        return False


def _semantics(tool: str, semantics: ActionSemantics | str) -> ActionSemantics:
    try:
        return ActionSemantics(semantics)
    except ValueError:
        raise DeclarationError(
            f"{tool!r}: unknown semantics. Write one of ActionSemantics.{', '.join(ActionSemantics)}."
        ) from None


def _check_seconds(tool: str, name: str, seconds: float | None, *, positive: bool) -> None:
    if seconds is None:
        return
    given: object = seconds
    if not registry.is_duration(given) or (positive and given == 0):
        raise DeclarationError(f"{tool!r}: {name} is a number of seconds. Write for example {name}=10.0.")


def _inverse(tool: str, semantics: ActionSemantics, compensate: Inverse) -> tuple[Undo | None, Factory | None]:
    if compensate is None:
        if semantics in (ActionSemantics.COMPENSABLE, ActionSemantics.REVERSIBLE):
            raise DeclarationError(
                f"{tool!r} is {semantics} and has no inverse. Write compensate=undo(...), or declare it IRREVERSIBLE."
            )
        return None, None
    if semantics is ActionSemantics.READ_ONLY:
        raise DeclarationError(f"{tool!r} is READ_ONLY, so there is nothing to undo. Leave compensate= out.")
    if semantics is ActionSemantics.IRREVERSIBLE:
        raise DeclarationError(
            f"{tool!r} is IRREVERSIBLE and has an inverse. Declare it COMPENSABLE, or leave compensate= out."
        )
    if isinstance(compensate, Undo):
        return _named(tool, compensate), None
    if callable(compensate):
        _takes_two(compensate)
        return None, compensate
    raise DeclarationError(
        f"{tool!r}: compensate= got a {type(compensate).__name__}. "
        'Write undo(refund, charge_id="result.id") or a function result -> Compensation.'
    )


def _named(tool: str, undo: Undo) -> Undo:
    """The inverse under its compensator's name, if that was registered only after the inverse was declared.

    As in `@compensator("...")` above `@inverse_of(...)`: else it would live and die with this process, unasked.
    """
    entry = registry.compensator_of(undo.fn) if undo.fn is not None else None
    if entry is None:
        return undo
    _refuse_secrets(f"{tool!r}: compensate=", undo.paths, undo.literals)
    return replace(undo, handler=entry.name, fn=None)


def _awaited(hint: Any) -> Any:
    """What awaiting gives: a function that hands out a coroutine is annotated with the coroutine's type."""
    return get_args(hint)[-1] if get_origin(hint) in (Awaitable, Coroutine) else hint


def _refuse_marked(tool: str, undo: Undo, hints: Mapping[str, Any], result_type: Any) -> None:
    """Like a secret's name, a `Secret[...]` on the way of a path tells that no other process could run it."""
    for name, path in undo.paths.items():
        if path.root == "args":
            marked = values.marks_secret(hints, path.segments)
        else:
            marked = path.root == "result" and values.marks_secret({"": result_type}, ("", *path.segments))
        if marked:
            raise DeclarationError(
                f"{tool!r}: {name}={str(path)!r} is marked Secret, which the log never holds, so no other process "
                'could undo it. Let the compensator take credential("...") instead.'
            )


def _takes_two(factory: Factory) -> bool:
    try:
        parameters = [
            p
            for p in inspect.signature(factory).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.default is p.empty]
    if not parameters or len(required) > 2:
        raise DeclarationError(
            "A compensate= factory takes the result, or the result and the arguments. "
            "Write lambda result: Compensation(...)."
        )
    # A default is how Python code binds a loop variable; only a required second parameter, or one of the documented
    # name, asks for the arguments.
    return len(required) == 2 or (len(parameters) > 1 and parameters[1].name == "args")


def _probe(tool: str, probe: object) -> tuple[str | None, Callable[[dict[str, Any], str], Any] | None]:
    if probe is None:
        return None, None
    if isinstance(probe, str):
        found = registry.probe_named(probe)
        return probe, found.fn if found else None
    if not callable(probe):
        raise DeclarationError(f'{tool!r}: probe= takes a function or the name of one registered by @probe("name").')
    registered = registry.probe_of(probe)
    return (registered.name if registered else None), probe


def _rules(tool: str, given: NotAppliedRule | Iterable[NotAppliedRule]) -> tuple[NotAppliedRule, ...]:
    rules: tuple[Any, ...] = (given,) if callable(given) else tuple(given)
    for rule in rules:
        if not callable(rule) or (isinstance(rule, type) and not issubclass(rule, BaseException)):
            raise DeclarationError(
                f"{tool!r}: not_applied= takes exception types and predicates. Write not_applied=(ValueError,)."
            )
    return rules
