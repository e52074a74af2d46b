"""What is secret: by name, by the mark `Secret[T]`, by reference. And keeping it out of texts."""

# Values here are anything at all, and `type()` of them is unknown to the checker by nature.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec

from agent_saga_core.errors import DeclarationError

__all__ = [
    "DEFAULT_NAMES",
    "MASK",
    "Credential",
    "Redacted",
    "Redaction",
    "Secret",
    "SecretMark",
    "credential",
    "current_redaction",
    "describe_error",
    "is_secret_type",
    "legible",
    "resolve_credentials",
    "scrub",
    "secret_forms",
    "set_credential_resolver",
    "set_redaction",
]

T = TypeVar("T")

MASK: Final = "[redacted]"
"""What people see in place of a secret."""

DEFAULT_NAMES: Final = frozenset({
    "password", "passwd", "passphrase", "secret", "token", "authorization", "cookie", "cvv", "cvc",
    "api_key", "apikey", "private_key", "access_key", "card_number",
    # Plurals are names of their own. "tokens" is missing on purpose: `max_tokens` counts, it does not hide.
    "passwords", "passphrases", "secrets", "cookies",
    "api_keys", "apikeys", "private_keys", "access_keys", "card_numbers",
})  # fmt: skip
"""The names whose values are redacted unless `set_redaction` says otherwise."""

_SEPARATORS: Final = re.compile(r"[\W_]+")
_HUMPS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_REMEMBERED: Final = 4096  # names per Redaction: keys of user dicts are not bounded, memory must be


class SecretMark:
    """The mark inside `Secret[T]`. There is one, but a copy made by pickling means the same."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret"


Secret = Annotated[T, SecretMark()]
"""`Secret[str]` in an annotation: the tool gets the plain `str`, and logs, reports and views get a marker."""


class Redaction:
    """A rule that tells from a name whether its value is secret. Immutable.

    A name is split into words at everything that is not a letter or digit and at camelCase humps; case and
    trailing digits of a word do not count. It matches if one word, or some neighbouring words joined, are one
    of `names`: `X-Api-Key`, `openaiApiKey` and `api_key_2` match "api_key", `max_tokens` does not match
    "token".
    """

    __slots__ = ("_joined", "_longest", "_seen", "names")

    names: frozenset[str]

    def __init__(self, names: Iterable[str] = DEFAULT_NAMES) -> None:
        checked = _names(names)
        joined = frozenset(_SEPARATORS.sub("", name).casefold() for name in checked)
        object.__setattr__(self, "names", checked)
        object.__setattr__(self, "_joined", joined)
        object.__setattr__(self, "_longest", max(map(len, joined), default=0))
        object.__setattr__(self, "_seen", {})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Redaction cannot be changed ({name!r}); make another one")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Redaction) and other.names == self.names

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return f"Redaction({sorted(self.names)!r})"

    def matches(self, name: str) -> bool:
        """Whether a value of this name is secret."""
        seen: dict[str, bool] = self._seen
        found = seen.get(name)
        if found is None:
            found = self._match(name)
            if len(seen) < _REMEMBERED and len(name) <= 256:
                seen[name] = found
        return found

    def _match(self, name: str) -> bool:
        joined: frozenset[str] = self._joined
        words = [
            word.casefold().rstrip("0123456789") or word
            for part in _SEPARATORS.split(name)
            for word in _HUMPS.split(part)
            if word
        ]
        for start in range(len(words)):
            run = ""
            for word in words[start:]:
                run += word
                if len(run) > self._longest:
                    break
                if run in joined:
                    return True
        return False


def _names(names: Iterable[str]) -> frozenset[str]:
    checked = frozenset(cast("Iterable[Any]", () if isinstance(names, str) else names))
    if isinstance(names, str) or not all(isinstance(name, str) and _SEPARATORS.sub("", name) for name in checked):
        raise DeclarationError(
            'redaction takes names, each with a letter or digit in it. Write a collection: add={"iban"}.'
        )
    return checked


_current = Redaction()


def set_redaction(*, names: Iterable[str] | None = None, add: Iterable[str] = ()) -> None:
    """Set which names are secret, for this process, from the next encoding on.

    What is marked `Secret[T]` or is a pydantic secret stays redacted whatever the names are. Records that are
    already written do not change.

    Args:
        names: The names to take instead of the present ones; None keeps those. `()` redacts by mark only.
        add: Further names.

    Raises:
        DeclarationError: Something that is no name. Nothing has changed.
    """
    global _current
    _current = Redaction((_current.names if names is None else _names(names)) | _names(add))


def current_redaction() -> Redaction:
    """The rule that `set_redaction` has set, or the default one."""
    return _current


class Redacted(msgspec.Struct, frozen=True):
    """Stands where a redacted value was, in a reader that can do without the value, such as a probe."""

    def __repr__(self) -> str:
        return MASK

    def __str__(self) -> str:
        return MASK


def is_secret_type(kind: type) -> bool:
    """Whether values of this class are secret by themselves: pydantic's `SecretStr` and its kin."""
    if "pydantic.types" not in sys.modules:
        return False
    return any(base.__module__ == "pydantic.types" and base.__name__ == "_SecretBase" for base in kind.__mro__)


# --- credentials --------------------------------------------------------------------------------------------


class Credential(msgspec.Struct, frozen=True):
    """A reference to a secret. It is stored as its name, and resolved in the process that uses it."""

    name: str


def credential(name: str) -> Credential:
    """Name a secret that a compensation needs, without storing it.

    Whichever process runs the compensation resolves it through `set_credential_resolver`.

    Raises:
        DeclarationError: The name is empty or no string.
    """
    if not isinstance(cast("object", name), str) or not name.strip():
        raise DeclarationError('a credential has a name. Write credential("payments").')
    return Credential(name)


_resolver: Callable[[str], object] | None = None


def set_credential_resolver(resolver: Callable[[str], object] | None) -> None:
    """Set what turns a credential's name into its value, for this process; None takes it away.

    Raises:
        DeclarationError: It cannot be called.
    """
    global _resolver
    if resolver is not None and not callable(cast("object", resolver)):
        raise DeclarationError("a credential resolver is a function of the name. Pass a callable.")
    _resolver = resolver


def resolve_credentials(value: Any, secrets: list[str] | None = None) -> Any:
    """Return `value` with every `Credential` in it replaced by what it stands for.

    Found are those inside dict, list and tuple, at any depth. `value` itself is not changed. What the
    resolver raises comes through.

    Args:
        value: Arguments of a compensation, as decoded.
        secrets: If given, the text forms of the resolved values are added to it, for `scrub`.

    Raises:
        DeclarationError: There is a credential and no resolver in this process.
    """
    kind: type[Any] = type(value)
    if kind is Credential:
        if _resolver is None:
            raise DeclarationError(
                f"credential {value.name!r} is needed here and nothing resolves it. "
                "Call set_credential_resolver(function_of_the_name) before running or recovering sagas."
            )
        resolved = _resolver(value.name)
        if secrets is not None:
            secrets.extend(secret_forms(resolved))
        return resolved
    if kind is dict:
        return {key: resolve_credentials(item, secrets) for key, item in value.items()}
    if kind is list:
        return [resolve_credentials(item, secrets) for item in value]
    if kind is tuple:
        return tuple([resolve_credentials(item, secrets) for item in value])
    return value


# --- texts --------------------------------------------------------------------------------------------------

_CONTAINERS: Final = 10_000  # per secret value; one that is larger is no secret but a mistake
_PRINTABLE: Final = frozenset({"decimal", "uuid", "datetime", "pydantic.networks", "pydantic_core._pydantic_core"})
_WHOLE: Final = 3  # shorter secrets: masking single places would spell them out by what is left around them
_CUT: Final = 12  # a longer secret is also found when something else cut it, at its first or last so many characters


def secret_forms(value: object) -> tuple[str, ...]:
    """The texts by which a secret would show in a message: each string and number in it, without keys."""
    found: list[str] = []
    try:
        _collect(value, found, set())
    except Exception:  # a mapping or property of the secret's own; it is redacted all the same
        pass
    return tuple(dict.fromkeys(found))


def _collect(value: Any, found: list[str], met: set[int]) -> None:
    kind: type[Any] = type(value)
    if value is None or kind is bool or kind is Credential:
        return
    if isinstance(value, str):
        found.append(str.__str__(value))
    elif isinstance(value, (bytes, bytearray)):
        raw = bytes(value)
        found.extend((raw.decode("utf-8", "replace"), repr(raw)[2:-1]))
    elif isinstance(value, (int, float)) or kind.__module__ in _PRINTABLE:
        found.append(_printed(value))
    elif id(value) not in met and len(met) < _CONTAINERS:
        met.add(id(value))
        for part in _parts(value):
            _collect(part, found, met)


def _printed(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # an int beyond Python's limit of decimal digits
        return ""


def _parts(value: Any) -> Iterable[Any]:
    kind: type[Any] = type(value)
    if is_secret_type(kind):
        return (value.get_secret_value(),)
    if isinstance(value, Mapping):
        return cast("Mapping[Any, Any]", value).values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return cast("Iterable[Any]", value)
    if isinstance(value, msgspec.Struct):
        return [getattr(value, name, None) for name in value.__struct_fields__]
    if hasattr(kind, "__dataclass_fields__"):
        return [getattr(value, name, None) for name in kind.__dataclass_fields__]
    if hasattr(kind, "__pydantic_validator__"):
        return [*vars(value).values(), *(value.__pydantic_extra__ or {}).values()]
    return ()


def _spellings(secret: str) -> set[str]:
    """A secret, its words, and how messages quote them."""
    plain = {secret, secret.strip()}
    plain.update(word for word in secret.split() if len(word) >= 6)  # the key of "Bearer <key>" also comes alone
    forms = set(plain)
    for text in plain:
        if text.isascii() and text.isalnum():
            continue
        import json  # here, and not above: the core must be quick to import
        from urllib.parse import quote, quote_plus

        forms.update((repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]))
        readable = text.encode("utf-8", "replace")
        forms.update((quote(readable), quote(readable, safe=""), quote_plus(readable)))
    return {form for form in forms if form.strip()}


def _places(text: str, form: str) -> Iterable[tuple[int, int]]:
    """Where `form`, or its beginning or end if it is long, stands in `text`."""
    size = len(form)
    whole = size < _CUT + 4
    head = form if whole else form[:_CUT]
    at = text.find(head)
    while at >= 0:
        end = at + len(head)
        while end < len(text) and end - at < size and text[end] == form[end - at]:
            end += 1
        yield at, end
        at = text.find(head, at + 1)
    if whole:
        return
    tail = form[-_CUT:]
    at = text.find(tail)
    while at >= 0:
        start, rest = at, size - _CUT
        while start > 0 and rest > 0 and text[start - 1] == form[rest - 1]:
            start, rest = start - 1, rest - 1
        yield start, at + _CUT
        at = text.find(tail, at + 1)


def scrub(text: str, secrets: Iterable[str]) -> str:
    """Return `text` with every occurrence of a secret masked.

    Found are the secrets as they are, their longer words, as `repr`, JSON and URLs quote them, and longer
    ones also where they were cut short. If a secret of one or two characters occurs, the whole text is
    masked, since what remained around it would tell. Not found: a secret that something has encoded or hashed
    in another way.
    """
    spans: list[tuple[int, int]] = []
    for secret in secrets:
        for form in _spellings(secret):
            if len(form) >= _WHOLE:
                spans.extend(_places(text, form))
            elif form in text:
                return MASK
    if not spans:
        return text
    pieces: list[str] = []
    position = 0
    for start, end in sorted(spans):
        if start > position or not pieces:
            pieces.extend((text[position:start], MASK))
        position = max(position, end)
    pieces.append(text[position:])
    return "".join(pieces)


def legible(text: object) -> str:
    """Free text of people and programs as the log can hold it: lone surrogates are spelled out."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def describe_error(exc: BaseException, secrets: Iterable[str] = (), *, limit: int = 500) -> str:
    """One line, "TypeName: message", for logs and reports: scrubbed, at most `limit` characters, valid UTF-8.

    Never raises, also if the exception cannot be printed. A pydantic validation error is told without the
    input values that it would otherwise quote.
    """
    kind = type(exc).__name__
    try:
        message = scrub(_message(exc), secrets)
        message = " ".join(message.split()).encode("utf-8", "backslashreplace").decode()
    except Exception:  # `str(exc)` is anybody's code
        return f"{kind} (its message cannot be read)"[:limit]
    text = f"{kind}: {message}" if message else kind
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _message(exc: BaseException) -> str:
    if type(exc).__module__.startswith("pydantic_core") and type(exc).__name__ == "ValidationError":
        wrong: list[dict[str, Any]] = cast("Any", exc).errors(
            include_url=False, include_context=False, include_input=False
        )
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in wrong)
    return str(exc)
