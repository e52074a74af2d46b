"""From an address to a log."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent_saga_core.clock import SYSTEM_CLOCK, Clock
from agent_saga_core.log.base import Log
from agent_saga_core.log.file import FileLog
from agent_saga_core.log.memory import MemoryLog
from agent_saga_core.log.options import unknown

if TYPE_CHECKING:
    from agent_saga_core.log.sql import Prepared

__all__ = ["ADDRESSES", "init_log", "migrate_log", "open_log", "shown_address"]

ADDRESSES: Final = "file:./directory, sqlite:///file.db, postgresql://host/database, nats://host/name or redis://host/0"
"""What to write, by example: a log of each kind that outlives its process."""


class _Server(NamedTuple):
    """A store that is a server: its name in messages, its module, its class, its extra and what that brings."""

    called: str
    module: str
    kind: str
    extra: str
    needs: tuple[str, ...]


_POSTGRES: Final = _Server("postgresql", "postgres", "PostgresLog", "postgres", ("psycopg", "psycopg_pool"))
_NATS: Final = _Server("nats", "nats", "NatsLog", "nats", ("nats",))
_REDIS: Final = _Server("redis", "redis", "RedisLog", "redis", ("redis",))
_SERVERS: Final = {
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "nats": _NATS,
    "redis": _REDIS,
    "rediss": _REDIS,
}
_SCHEMES: Final = ("file", "memory", "sqlite", *_SERVERS)


def open_log(url: str, *, create: bool = True, clock: Clock = SYSTEM_CLOCK) -> Log:
    """Open the log at an address.

    - `file:./relative/directory` or `file:///absolute/directory`
    - `sqlite:///relative.db` or `sqlite:////absolute.db`
    - `postgresql://user@host/database`, with the extra `postgres`; made by `agent-saga log init` only
    - `nats://host:4222`, with the extra `nats`; made by `agent-saga log init` only
    - `redis://host:6379/0` (`rediss://` for TLS), with the extra `redis`; experimental; by `log init` only
    - `memory:` for tests, a new and empty log each time

    All take the option `?max_result_bytes=N`; `file:` and `sqlite:` take `?force=1`, `sqlite:` takes
    `?busy_timeout=SECONDS`. The same address may be opened more than once, also in one process: the logs then exclude
    each other, saga by saga.

    Args:
        url: The address.
        create: Whether to make a log where there is none.
        clock: What the log, and everything on it, stamps and waits with.

    Raises:
        ValueError: It is no address; the message says what to write.
        ModuleNotFoundError: It needs an extra that is not installed; the message says which.
        LogUnavailable: There is no log and none may or can be made.
        LogCorrupted: What is there is no log any more.
    """
    scheme = _scheme_of(url)
    if scheme in _SERVERS:
        server = _SERVERS[scheme]
        return getattr(_module_of(server), server.kind)(url, clock=clock)
    if scheme == "sqlite":
        place = _sqlite_place(url)
        return _sqlite().SqliteLog(
            place.path,
            create=create,
            clock=clock,
            max_result_bytes=place.max_result_bytes,
            force=place.force,
            **place.others,
        )
    if scheme == "memory":
        return _memory(url, clock)
    place = _file_place(url)
    return FileLog(place.path, create=create, clock=clock, max_result_bytes=place.max_result_bytes, force=place.force)


def init_log(url: str) -> Prepared:
    """Make the log at an address, or find it made.

    Raises:
        ValueError: It is no address of a log that can be made.
        ModuleNotFoundError: It needs an extra that is not installed; the message says which.
        SagaError: It cannot be made.
    """
    return _prepare(url, "init")


def migrate_log(url: str) -> Prepared:
    """Bring the log at an address to the schema of this version.

    Raises:
        ValueError: It is no address of a log that has a schema.
        ModuleNotFoundError: It needs an extra that is not installed; the message says which.
        SagaError: There is none, or it cannot be changed.
    """
    return _prepare(url, "migrate")


def shown_address(url: str) -> tuple[str, str]:
    """An address without its credentials, and in words what supplies them to who opens it so; empty if it had none.

    Raises:
        ValueError: It is no address.
        ModuleNotFoundError: It needs an extra that is not installed; the message says which.
    """
    scheme = _scheme_of(url)
    if scheme not in _SERVERS:
        return url, ""
    _module_of(_SERVERS[scheme])
    address = import_module(f"agent_saga_core.log.{_SERVERS[scheme].module}.address")
    return address.address_of(url).url, address.left_out(url)


def _prepare(url: str, verb: str) -> Prepared:
    scheme = _scheme_of(url)
    if scheme in _SERVERS:
        return getattr(_module_of(_SERVERS[scheme]), verb)(url)
    if scheme == "sqlite":
        place = _sqlite_place(url)
        return getattr(_sqlite(), verb)(place.path, force=place.force)
    if scheme == "memory":
        raise ValueError("a memory log ends with its process; name one that does not")
    return _file(url, make=verb == "init")


def _file(url: str, *, make: bool) -> Prepared:
    """The file log: its format has had no second version, so there is nothing to migrate."""
    import os

    from agent_saga_core.log.file import META
    from agent_saga_core.log.sql import Prepared
    from agent_saga_core.records import FORMAT_VERSION

    place = _file_place(url)
    made = not os.path.exists(os.path.join(place.path, META))
    log = FileLog(place.path, create=make, force=place.force)
    log.close()
    return Prepared(url=log.url, version=str(FORMAT_VERSION), made=made)


# --- stores whose modules or extras may be missing


def _sqlite() -> Any:
    try:
        return import_module("agent_saga_core.log.sqlite")
    except ModuleNotFoundError as error:
        if error.name not in ("sqlite3", "_sqlite3"):
            raise
        raise ModuleNotFoundError(
            "sqlite: logs need the module sqlite3, which this Python was built without; use another build, or file:",
            name=error.name,
        ) from None


def _module_of(server: _Server) -> Any:
    try:
        for needed in server.needs:
            import_module(needed)
    except ImportError:  # also what psycopg itself raises where it finds no libpq
        raise ModuleNotFoundError(
            f"{server.called}: logs need an extra; pip install 'agent-saga-core[{server.extra}]'", name=server.needs[0]
        ) from None
    return import_module(f"agent_saga_core.log.{server.module}")


# --- addresses


class _Place(NamedTuple):
    path: str
    max_result_bytes: int
    force: bool
    others: dict[str, Any]


def _scheme_of(url: str) -> str:
    scheme, colon, _ = url.partition(":")
    if not colon or "/" in scheme or scheme not in _SCHEMES:
        if colon and "://" in url and "@" not in scheme:  # it may hold a password, so it is not repeated
            raise ValueError(f"there are no {scheme}: logs; write {ADDRESSES}")
        if "@" in url:  # so may this
            raise ValueError(f"this is no address of a log; write {ADDRESSES}")
        raise ValueError(f"{url!r} is no address of a log; for a directory write {'file:' + url!r}")
    return scheme


def _memory(url: str, clock: Clock) -> MemoryLog:
    rest, _, query = url.partition(":")[2].partition("?")
    rule = "write memory: and nothing else but ?max_result_bytes=N"
    options = _options(url, query, rule)
    max_result_bytes = _number(url, options)
    if options:
        raise ValueError(f"{_shown(url)}: {unknown(next(iter(options)), query)}; {rule}")
    if rest:
        raise ValueError(f"{_shown(url)}: {rule}")
    return MemoryLog(clock, max_result_bytes=max_result_bytes)


def _file_place(url: str) -> _Place:
    path, _, query = url.partition(":")[2].partition("?")
    if path.startswith("//"):
        if not path.startswith("///"):
            raise ValueError(f"{_shown(url)}: write file:./relative or file:///absolute")
        path = path[2:]
    if not path:
        raise ValueError(f"{_shown(url)} names no directory; write file:./directory")
    return _place(url, path, query, "the options of a file log are ?max_result_bytes=N and ?force=1")


def _sqlite_place(url: str) -> _Place:
    path, _, query = url.partition(":")[2].partition("?")
    if not path.startswith("///"):
        # It may hold a password meant for a server, so it is not repeated.
        raise ValueError("a SQLite log is a file: write sqlite:///relative.db or sqlite:////absolute.db")
    path = path[3:]
    if path in ("", ":memory:"):
        raise ValueError(f"{_shown(url)} names no file; write sqlite:///file.db, or memory: for a test")
    rule = "the options of a SQLite log are ?max_result_bytes=N, ?force=1 and ?busy_timeout=SECONDS"
    return _place(url, path, query, rule, "busy_timeout")


def _place(url: str, path: str, query: str, rule: str, *seconds: str) -> _Place:
    from urllib.parse import unquote  # 3 ms that the import of the core does not need

    options = _options(url, query, rule)
    max_result_bytes = _number(url, options)
    force = options.pop("force", "0")
    others = {name: float(_digits(url, name, options.pop(name))) for name in seconds if name in options}
    if options:
        raise ValueError(f"{_shown(url)}: {unknown(next(iter(options)), query)}; {rule}")
    if force not in ("0", "1"):
        raise ValueError(f"{_shown(url)}: {rule}")
    return _Place(unquote(path), max_result_bytes, force == "1", others)


def _shown(url: str) -> str:
    """An address that is none, for a message; without what may be a password meant for a server."""
    return "this address" if "@" in url else repr(url.partition("?")[0])


def _options(url: str, query: str, rule: str) -> dict[str, str]:
    from urllib.parse import parse_qsl

    try:
        return dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError:
        raise ValueError(f"{_shown(url)}: options are written ?name=value&name=value; {rule}") from None


def _number(url: str, options: dict[str, str]) -> int:
    return _digits(url, "max_result_bytes", options.pop("max_result_bytes", "1048576"))


def _digits(url: str, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ValueError(f"{_shown(url)}: {name} is a number of {'bytes' if name.endswith('bytes') else 'seconds'}")
    return int(text)
