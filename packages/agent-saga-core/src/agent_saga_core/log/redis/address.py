"""The address of a Redis log: what of it is for the server, what is for us, and what may be shown."""

from __future__ import annotations

import os
import re
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit

from agent_saga_core.log.lease import LEASE
from agent_saga_core.log.options import flag, result_bytes, seconds, unknown

__all__ = ["Address", "address_of", "left_out"]

_TLS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_OPTIONS: Final = frozenset(
    {"max_result_bytes", "prefix", "lease", "timeout", "accept_data_loss", "socket", "ssl_check_hostname", *_TLS}
)
# No colon, so that no key of one log can be a key of another, and nothing that means something in a pattern.
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PASSWORDS: Final = ("REDISCLI_AUTH", "VALKEYCLI_AUTH")
_HOW: Final = (
    "write redis://user@host:port/database?option=value, or rediss:// for TLS, with every special character of a name "
    "or password as % and two digits (%40 for @); the options are max_result_bytes=N, prefix=NAME, lease=SECONDS, "
    "timeout=SECONDS, accept_data_loss=1, socket=PATH, ssl_ca_certs=FILE, ssl_certfile=FILE, ssl_keyfile=FILE and "
    "ssl_check_hostname=0"
)


class Address(NamedTuple):
    """An address, taken apart."""

    parameters: dict[str, Any]
    """For the client."""
    tls: bool
    url: str
    """Without credentials: what is shown, and opens the same log where the environment has the password."""
    secrets: tuple[str, ...]
    """What must not be in any message."""
    prefix: str
    lease: float
    timeout: float
    max_result_bytes: int
    accept_data_loss: bool

    def key(self, *parts: str | bytes) -> bytes:
        """The key of that name."""
        return b":".join(
            [self.prefix.encode(), *(part if isinstance(part, bytes) else part.encode() for part in parts)]
        )


def address_of(url: str) -> Address:
    """Take an address apart.

    Raises:
        ValueError: It is none. The message never repeats it, because it may hold a password.
    """
    if not url.startswith(("redis://", "rediss://")):
        raise ValueError(f"this is no address of a Redis log: {_HOW}")
    base, _, query = url.partition("?")
    own = _options(query)
    try:
        parts = urlsplit(base)
        port = 6379 if parts.port is None else parts.port
        user, password, host = (_plain(part) for part in (parts.username, parts.password, parts.hostname))
    except ValueError:
        raise ValueError(f"this address cannot be understood: {_HOW}") from None
    database = parts.path.strip("/") or "0"
    if parts.fragment or not (database.isascii() and database.isdigit() and len(database) < 6) or "/" in (host or ""):
        raise ValueError(f"this address cannot be understood: {_HOW}")
    timeout = seconds(own, "timeout", LEASE, least=0.0)
    tls = parts.scheme == "rediss"
    secret = password or next((found for name in _PASSWORDS if (found := os.environ.get(name))), None)
    parameters: dict[str, Any] = {"db": int(database), "username": user or None, "password": secret}
    if "socket" in own:
        if tls or host:
            raise ValueError("the option socket stands in place of a host: write redis:///0?socket=/path")
        parameters["path"] = own["socket"]
    else:
        parameters |= {"host": host or "localhost", "port": port, "socket_keepalive": True}
    if tls:
        parameters |= {"ssl_cert_reqs": "required", "ssl_check_hostname": flag(own, "ssl_check_hostname", "1")}
        parameters |= {name: own[name] for name in _TLS if name in own}
    elif own.keys() & {*_TLS, "ssl_check_hostname"}:
        raise ValueError("the options of TLS are for addresses that begin with rediss://")
    return Address(
        parameters=parameters,
        tls=tls,
        url=_shown(parts, user, database, own),
        secrets=tuple({quote(secret, safe=""): None, secret: None}) if secret else (),
        prefix=_prefix(own),
        lease=seconds(own, "lease", LEASE, least=0.5),
        timeout=timeout,
        max_result_bytes=result_bytes(own),
        accept_data_loss=flag(own, "accept_data_loss", "0"),
    )


def left_out(url: str) -> str:
    """What supplies the password that this address gives and that is not shown; empty if it gives none.

    Raises:
        ValueError: It is none.
    """
    address_of(url)
    return f"{_PASSWORDS[0]} supplies the password" if urlsplit(url.partition("?")[0]).password else ""


def _options(query: str) -> dict[str, str]:
    own: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, equals, value = part.partition("=")
        if name not in _OPTIONS or not equals:
            raise ValueError(f"{unknown(name, query)}: {_HOW}")
        own[name] = unquote(value)
    return own


def _plain(part: str | None) -> str | None:
    if part is None:
        return None
    if re.search(r"%(?![0-9A-Fa-f]{2})", part):
        raise ValueError("not quoted")
    return unquote(part, errors="strict")


def _prefix(own: dict[str, str]) -> str:
    prefix = own.get("prefix", "agent-saga")
    if _PREFIX.fullmatch(prefix) is None:
        raise ValueError("the option prefix is a name of letters, digits, '.', '_' and '-', at most 64 long")
    return prefix


def _shown(parts: SplitResult, user: str | None, database: str, own: dict[str, str]) -> str:
    place = parts.netloc.rpartition("@")[2]
    login = f"{quote(user, safe='')}@" if user else ""
    options = "&".join(f"{name}={quote(value, safe='/:,')}" for name, value in own.items())
    return f"{parts.scheme}://{login}{place}/{database}" + (f"?{options}" if options else "")
