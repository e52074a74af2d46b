"""From an address to a log."""

from __future__ import annotations

from agent_saga_core.clock import SYSTEM_CLOCK, Clock
from agent_saga_core.errors import LogUnavailable
from agent_saga_core.log.base import Log
from agent_saga_core.log.file import FileLog
from agent_saga_core.log.memory import MemoryLog

__all__ = ["open_log"]

_LATER = ("sqlite", "postgresql", "postgres", "redis", "rediss", "nats")


def open_log(url: str, *, create: bool = True, clock: Clock = SYSTEM_CLOCK) -> Log:
    """Open the log at an address.

    `file:./relative/directory` or `file:///absolute/directory`, with the options `?max_result_bytes=N` and
    `?force=1`; `memory:` for tests, a new and empty log each time. The same address may be opened more than once,
    also in one process: the logs then exclude each other, saga by saga.

    Args:
        url: The address.
        create: Whether to make a log where there is none.
        clock: What the log, and everything on it, stamps and waits with.

    Raises:
        ValueError: It is no address; the message says what to write.
        LogUnavailable: There is no log and none may or can be made.
        LogCorrupted: What is there is no log any more.
    """
    from urllib.parse import unquote  # 3 ms that the import of the core does not need

    scheme, colon, rest = url.partition(":")
    if not colon or "/" in scheme or scheme not in ("file", "memory", *_LATER):
        raise ValueError(f"{url!r} is no address of a log; for a directory write {'file:' + url!r}")
    if scheme in _LATER:
        # The address may hold a password, so it is not repeated.
        raise LogUnavailable(f"{scheme}: logs are not available in this version; use file:./directory")
    path, _, query = rest.partition("?")
    options = _options(url, query)
    max_result_bytes = _number(url, options.pop("max_result_bytes", "1048576"))
    if scheme == "memory":
        if path or options:
            raise ValueError(f"{url!r}: write memory: and nothing else but ?max_result_bytes=N")
        return MemoryLog(clock, max_result_bytes=max_result_bytes)
    force = options.pop("force", "0")
    if options or force not in ("0", "1"):
        raise ValueError(f"{url!r}: the options of a file log are ?max_result_bytes=N and ?force=1")
    if path.startswith("//"):
        if not path.startswith("///"):
            raise ValueError(f"{url!r}: write file:./relative or file:///absolute")
        path = path[2:]
    if not path:
        raise ValueError(f"{url!r} names no directory; write file:./directory")
    return FileLog(unquote(path), create=create, clock=clock, max_result_bytes=max_result_bytes, force=force == "1")


def _options(url: str, query: str) -> dict[str, str]:
    from urllib.parse import parse_qsl

    try:
        return dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError:
        raise ValueError(f"{url!r}: options are written ?name=value&name=value") from None


def _number(url: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ValueError(f"{url!r}: max_result_bytes is a number of bytes")
    return int(text)
