"""What kind of server a log is on, and whether it keeps what it acknowledges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from redis.exceptions import NoPermissionError, ResponseError

from agent_saga_core.errors import LogUnavailable

if TYPE_CHECKING:
    from agent_saga_core.log.redis.address import Address
    from agent_saga_core.log.redis.connection import Connection

__all__ = ["Facts", "facts_of", "unfit", "weaknesses"]

_OLDEST: Final = (7, 0)
"""Of Redis, as Valkey says it too: from here on a script that lacks memory fails before it writes, not in between."""

_SECTIONS: Final = ("server", "replication", "persistence", "memory", "cluster")
_SETTINGS: Final = ("appendonly", "appendfsync", "no-appendfsync-on-rewrite")
_REPLAYED: Final = (
    "DEL KEY",
    "HINCRBY KEY f 1",
    "HSET KEY f v",
    "PERSIST KEY",
    "PEXPIREAT KEY 1",
    "RENAME KEY KEY",
    "RPUSH KEY v",
    "SELECT 0",
    "UNLINK KEY",
    "ZADD KEY 1 v",
    "ZREM KEY v",
)
"""What the scripts of a log put into the append-only file. What one script wrote is a transaction there, and when many
servers read it, they leave out those commands of it that their user `default` may not give, whoever gave them
(valkey-io/valkey#3983, redis/redis#14541)."""


class Facts(NamedTuple):
    """What a server says of itself."""

    run_id: str
    replication_id: str
    replication_id_before: str
    """Of the server whose replica this one was."""
    version: tuple[int, int]
    follows: bool
    """Whether it is a replica."""
    clustered: bool
    evicts: str | None
    """The policy by which it drops keys of its own accord; None if it does not."""
    rewriting: bool
    """Whether it is writing its append-only file anew, or for the first time."""
    settings: dict[str, str] | None
    """None if it does not let them be seen."""
    dropped: tuple[str, ...] | None
    """Which of a log's commands it may leave out when it starts again; None if it does not let that be seen."""


def facts_of(connection: Connection, address: Address) -> Facts:
    """Ask a server what it is.

    Raises:
        LogUnavailable: It does not say.
    """
    # Each section in a command of its own: servers before 7 take one, and are to be told that they are too old.
    asked = [("INFO", section) for section in _SECTIONS]
    others = address.parameters["username"] not in (None, "default")  # the user default would show what it may not do
    tried = [_tried(command, address) for command in _REPLAYED] if others else []
    found = connection.calls([*asked, ("CONFIG", "GET", *_SETTINGS), *tried])
    answers, config, allowed = found[: len(asked)], found[len(asked)], found[len(asked) + 1 :]
    info: dict[str, str] = {}
    for answer in answers:
        if isinstance(answer, NoPermissionError):
            raise LogUnavailable(f"the log {address.url} may not be used by this user: it needs the command INFO")
        if isinstance(answer, Exception):
            raise answer
        for line in answer.decode("utf-8", "replace").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                info[name] = value
    major, _, rest = info.get("redis_version", "0.0").partition(".")
    policy = info.get("maxmemory_policy", "noeviction")
    rewriting = info.get("aof_rewrite_in_progress") == "1" or info.get("aof_rewrite_scheduled") == "1"
    return Facts(
        run_id=info.get("run_id", ""),
        replication_id=info.get("master_replid", ""),
        replication_id_before=info.get("master_replid2", ""),
        version=(_number(major), _number(rest.partition(".")[0])),
        follows=info.get("role") != "master",
        clustered=info.get("cluster_enabled") == "1",
        evicts=policy if policy.startswith("allkeys") else None,
        rewriting=rewriting,
        settings=_settings(config),
        dropped=_dropped(allowed),
    )


def _tried(command: str, address: Address) -> list[str | bytes]:
    key = address.key("saga", "x")
    return ["ACL", "DRYRUN", "default", *(key if word == "KEY" else word for word in command.split())]


def _dropped(answers: list[Any]) -> tuple[str, ...] | None:
    if any(isinstance(answer, ResponseError) for answer in answers):
        return None
    return tuple(
        command.partition(" ")[0] for command, answer in zip(_REPLAYED, answers, strict=False) if answer != b"OK"
    )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _settings(answer: object) -> dict[str, str] | None:
    if isinstance(answer, ResponseError):
        return None
    flat: list[Any] = cast("list[Any]", answer) if isinstance(answer, list) else []
    text = [part.decode("utf-8", "replace") if isinstance(part, bytes) else str(part) for part in flat]
    return dict(zip(text[::2], text[1::2], strict=False)) or None


def weaknesses(facts: Facts) -> list[str]:
    """How this server may lose what it acknowledges."""
    settings = facts.settings
    wanted = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}
    if settings is None:
        found = ["it does not let its configuration be seen (CONFIG GET)"]
    else:
        found = [f"{name} {settings[name]}" for name, good in wanted.items() if settings.get(name, good) != good]
        if not settings.keys() >= {"appendonly", "appendfsync"}:
            found.append("it does not say what appendonly and appendfsync are")
    if facts.dropped is None:
        found.append("it does not let be seen what its user default may do (ACL DRYRUN)")
    elif facts.dropped:
        found.append(f"when it starts again it may drop what its user default may not do: {', '.join(facts.dropped)}")
    return found


def unfit(facts: Facts, address: Address) -> str | None:
    """Why a log cannot be on this server; None if it can."""
    url = address.url
    if facts.version < _OLDEST:
        return f"the server of {url} is too old; a log needs Redis 7, or Valkey"
    if facts.clustered:
        return f"the server of {url} is part of a Redis Cluster; a log needs a server of its own"
    if facts.follows:
        return f"the server of {url} is a replica; name the server that it follows"
    if facts.evicts is not None:
        return (
            f"the server of {url} drops keys when memory is short (maxmemory-policy {facts.evicts}); a log needs "
            "maxmemory-policy noeviction"
        )
    weak = weaknesses(facts)
    if weak and not address.accept_data_loss:
        return (
            f"the server of {url} acknowledges what is not durable ({', '.join(weak)}); set appendonly yes, "
            "appendfsync always and no-appendfsync-on-rewrite no, give its user default, which may stay off, "
            f"~{address.prefix}:* +@write +select, and this user +config|get +acl|dryrun; or add accept_data_loss=1 "
            "to the address where losing the log does not matter"
        )
    return None
