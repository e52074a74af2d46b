"""Tool values to plain JSON data and back: lossless, redacting, never looking up what the data names.

Plain values (`str`, finite `float`, `bool`, None, `int` within 2**53, `list`, `dict` with ordinary string
keys) stand for themselves. Everything else is an object with one key that begins with "$", a tag. A dict of
the user that has such a key, or one that is no ordinary string, is written as the tag `$map`, so user data
cannot imitate a tag, a redaction marker or a digest.

Values of the program's own classes carry the class's name. Reading compares that name with the classes that
the caller's type annotation gives, and uses those; the name itself is never imported, resolved or called.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any, cast

from agent_saga_core.values.hints import Fields, marks_secret, shape_of
from agent_saga_core.values.plain import (
    MAX_DEPTH,
    DigestedValue,
    RedactedValue,
    Undecodable,
    Unstorable,
    json_bytes,
)
from agent_saga_core.values.reading import Reader
from agent_saga_core.values.redaction import (
    Credential,
    Redacted,
    Redaction,
    Secret,
    credential,
    current_redaction,
    describe_error,
    legible,
    resolve_credentials,
    scrub,
    set_credential_resolver,
    set_redaction,
)
from agent_saga_core.values.showing import display
from agent_saga_core.values.writing import Encoded, Writer

__all__ = [
    "MAX_DEPTH",
    "Credential",
    "DigestedValue",
    "Encoded",
    "Redacted",
    "RedactedValue",
    "Redaction",
    "Secret",
    "Undecodable",
    "Unstorable",
    "credential",
    "current_redaction",
    "decode",
    "decode_args",
    "describe_error",
    "digested",
    "display",
    "encode",
    "encode_args",
    "fingerprint",
    "is_small",
    "json_bytes",
    "legible",
    "marks_secret",
    "resolve_credentials",
    "scrub",
    "set_credential_resolver",
    "set_redaction",
]


def encode(value: object, *, where: str = "args", redaction: Redaction | None = None, hint: Any = None) -> Encoded:
    """Turn a value into plain JSON data.

    Redacted are: what stands under a name that `redaction` matches, at every depth (dict keys, fields, by
    name or alias); what is annotated `Secret[...]`, in `hint` or in the class of a value inside; pydantic
    secrets. None and credential references are stored even there. Positions in lists and texts are not names:
    a secret inside a URL or in `["Authorization", "..."]` is not seen.

    `decode` of the data gives an equal value of the same types, if nothing was redacted and it is given the
    program's own classes.

    Args:
        value: Any value. It is not changed, and must not be changed by another thread meanwhile.
        where: The name of its place, for messages and `redacted`.
        redaction: Default: `current_redaction()`.
        hint: Its type annotation, strings resolved.

    Raises:
        Unstorable: It, or something in it, has no plain-data form, or it is nested deeper than `MAX_DEPTH`.
    """
    writer = Writer(redaction or current_redaction())
    try:
        data = writer.value(value, shape_of(hint), (None, where, None), 0)
    except RecursionError:
        raise Unstorable(where, type(value).__name__, "no stack is left for its depth") from None
    return writer.finish(data)


def encode_args(args: Mapping[str, object], hints: Mapping[str, Any], redaction: Redaction | None = None) -> Encoded:
    """Turn the arguments of a call into plain JSON data, like `encode`, with a type annotation per name.

    Args:
        args: Arguments by name.
        hints: Annotations by name, strings resolved; names may be missing.
        redaction: Default: `current_redaction()`.

    Raises:
        Unstorable: An argument has no plain-data form.
    """
    writer = Writer(redaction or current_redaction())
    try:
        data = writer.mapping(args, Fields(hints) if hints else None, (None, "args", None), 0)
    except RecursionError:
        raise Unstorable("args", "dict", "no stack is left for its depth") from None
    return writer.finish(data)


def decode(data: Any, hint: Any = None, *, where: str = "value", strict: bool = True) -> Any:
    """Turn plain JSON data back into the value.

    Nothing that the data names is imported, resolved or called. The classes of pydantic models, dataclasses,
    msgspec Structs, named tuples, Enums, URLs and subclasses of builtins come from `hint` alone. Their
    `__init__` and validators do not run (a Struct's `__post_init__` does, and its changes are overwritten).
    Fields that the class has gained since take their defaults.

    Values are those that were written; they are not checked against the annotations of the fields.

    Args:
        data: What `encode` gave, or anything: it may be hostile.
        hint: The type annotation of the value, strings resolved.
        where: The name of its place, for messages.
        strict: False for readers that can do without: `Redacted()` stands for what was not stored, and a
            value whose class `hint` does not give comes as what it holds (a dict of fields, an Enum's value).

    Raises:
        RedactedValue: A redacted value stands in the data.
        DigestedValue: Only a digest was stored.
        Undecodable: `hint` does not give a class that is needed, or the data is not what this version writes.
    """
    try:
        return Reader(strict).value(data, shape_of(hint), (None, where, None), 0)
    except RecursionError:
        raise Undecodable(where, "no stack is left for its depth") from None


def decode_args(data: Any, hints: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """Turn encoded arguments back into a dict by name, like `decode`, with a type annotation per name.

    Raises:
        Undecodable: As from `decode`. With `strict=False` nothing raises: `Redacted()` stands for an argument
            that cannot be read, and data that holds no arguments at all gives an empty dict.
    """
    reader = Reader(strict)
    shape = Fields(hints) if hints else None
    try:
        if type(data) is dict and "$redacted" not in data:
            return reader.mapping(data, shape, (None, "args", None), 0)
        raise Undecodable("args", "they are no dict of arguments")
    except (Undecodable, ValueError, RecursionError) as error:
        if strict:
            raise (error if isinstance(error, Undecodable) else Undecodable("args", "they are no dict")) from None
    members: dict[str, Any] = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    return {name: _leniently(item, hints.get(name)) for name, item in members.items() if name[:1] != "$"}


def _leniently(data: Any, hint: Any) -> Any:
    try:
        return decode(data, hint, strict=False)
    except Undecodable:
        return Redacted()


def digested(data: bytes | None, *, length: int | None = None, reason: str) -> dict[str, Any]:
    """What is stored in place of a value: digest and length. `decode` raises `DigestedValue` on it.

    Args:
        data: The encoded value, if there is an encoding.
        length: Its length in bytes, if it is known otherwise.
        reason: Why, in words without values; `decode` and `display` repeat them.
    """
    return {
        "$digest": {
            "sha256": None if data is None else hashlib.sha256(data).hexdigest(),
            "length": len(data) if data is not None else length,
            "reason": reason,
        }
    }


def is_small(data: Any, limit: int = 1024) -> bool:
    """Whether encoded data is surely at most `limit` bytes long; False says only that it must be measured."""
    if type(data) is not dict:
        return _length(data) <= limit
    members = cast("dict[str, Any]", data)
    if len(members) > 16:
        return False
    return 2 + sum(6 * len(name) + 4 + _length(item) for name, item in members.items()) <= limit


def _length(item: Any) -> int:
    if type(item) is str:
        return 6 * len(item) + 2  # the longest escape of a character, and the quotes
    return 24 if item is None or isinstance(item, (bool, int, float)) else sys.maxsize


def fingerprint(tool: str, data: Any) -> str:
    """Return the algorithm's version and a SHA-256 over a tool's name and its encoded, redacted arguments.

    Equal for equal arguments, whatever the order of their keys; different for values of different types (1,
    1.0 and True). Calls that differ in secrets alone have the same one.
    """
    raw = json_bytes([tool, data])
    if b'"$map"' in raw:
        raw = json_bytes([tool, _sorted_pairs(data)])
    return "1:" + hashlib.sha256(raw).hexdigest()


def _sorted_pairs(data: Any) -> Any:
    if type(data) is list:
        return [_sorted_pairs(item) for item in cast("list[Any]", data)]
    if type(data) is not dict:
        return data
    found = {key: _sorted_pairs(item) for key, item in cast("dict[str, Any]", data).items()}
    for tag in ("$map", "$set", "$frozenset"):
        if tag in found:
            found[tag].sort(key=json_bytes)
    return found
