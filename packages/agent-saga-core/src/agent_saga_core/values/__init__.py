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
from collections.abc import Mapping
from typing import Any, cast

from agent_saga_core.values.hints import Fields, shape_of
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
    "describe_error",
    "digested",
    "display",
    "encode",
    "encode_args",
    "fingerprint",
    "json_bytes",
    "resolve_credentials",
    "scrub",
    "set_credential_resolver",
    "set_redaction",
]


def encode(
    value: object, *, where: str = "args", redaction: Redaction | None = None, hint: Any = None
) -> Encoded:
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


def encode_args(
    args: Mapping[str, object], hints: Mapping[str, Any], redaction: Redaction | None = None
) -> Encoded:
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


def decode(data: Any, hint: Any = None, *, where: str = "value", placeholders: bool = False) -> Any:
    """Turn plain JSON data back into the value.

    Nothing that the data names is imported, resolved or called. The classes of pydantic models, dataclasses,
    msgspec Structs, named tuples, Enums, URLs and subclasses of builtins come from `hint` alone; their own
    `__init__`, validators and `__post_init__` do not run (a Struct's `__post_init__` does, and its changes
    are overwritten). Fields that the class has gained since take their defaults.

    Values are those that were written; they are not checked against the annotations of the fields.

    Args:
        data: What `encode` gave, or anything: it may be hostile.
        hint: The type annotation of the value, strings resolved.
        where: The name of its place, for messages.
        placeholders: Give `Redacted()` for a redacted value instead of raising, as a probe can do without it.

    Raises:
        RedactedValue: A redacted value stands in the data.
        DigestedValue: Only a digest was stored.
        Undecodable: `hint` does not give a class that is needed, or the data is not what this version writes.
    """
    try:
        return Reader(placeholders).value(data, shape_of(hint), (None, where, None), 0)
    except RecursionError:
        raise Undecodable(where, "no stack is left for its depth") from None


def digested(data: bytes | None, *, length: int | None = None, reason: str) -> dict[str, Any]:
    """What is stored in place of a value: digest and length. `decode` raises `DigestedValue` on it.

    Args:
        data: The encoded value, if there is an encoding.
        length: Its length in bytes, if it is known otherwise.
        reason: "oversize" or "unstorable".
    """
    return {
        "$digest": {
            "sha256": None if data is None else hashlib.sha256(data).hexdigest(),
            "length": len(data) if data is not None else length,
            "reason": reason,
        }
    }


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
