"""The address of a NATS log: what of it is for the client, what is for us, and what may be shown."""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from agent_saga_core.log.lease import LEASE
from agent_saga_core.log.options import flag, result_bytes, seconds, unknown

__all__ = ["Address", "address_of", "left_out"]

_FILES: Final = ("creds", "tls_ca", "tls_cert", "tls_key")
_OPTIONS: Final = frozenset(
    {"max_result_bytes", "lease", "timeout", "replicas", "require_sync", "monitor", "tls", "token", *_FILES}
)
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
# What stands between commas: a name, an IPv4 address or an IPv6 address in brackets, and a port.
_HOST: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_ESCAPED: Final = re.compile(r"(?:[^%]|%[0-9A-Fa-f]{2})*")
_HOW: Final = (
    "write nats://user:password@host:port,host:port/name?option=value, with every special character of a name or "
    "password as % and two digits (%40 for @); the options are max_result_bytes=N, lease=SECONDS, timeout=SECONDS, "
    "replicas=N, require_sync=1, monitor=HOST:PORT, creds=FILE, tls=1, tls_ca=FILE, tls_cert=FILE and tls_key=FILE"
)


class Address(NamedTuple):
    """An address, taken apart."""

    servers: tuple[str, ...]
    """`nats://host:port` of each."""
    user: str | None
    password: str | None
    token: str | None
    creds: str | None
    tls: bool
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    url: str
    """Without credentials: what is shown, and opens the same log where the environment has them."""
    secrets: tuple[str, ...]
    """What must not be in any message."""
    name: str
    """The name of the log: of its stream, and the first token of its subjects."""
    replicas: int
    """How many servers `init` asks to hold it."""
    require_sync: bool
    monitor: tuple[str, ...]
    """Where the servers tell their configuration."""
    lease: float
    timeout: float
    max_result_bytes: int


def address_of(url: str) -> Address:
    """Take an address apart.

    Raises:
        ValueError: It is none. The message never repeats it, because it may hold a password.
    """
    if not url.startswith("nats://"):
        raise ValueError(f"this is no address of a NATS log: {_HOW}")
    base, _, query = url.removeprefix("nats://").partition("?")
    own = _options(query)
    place, _, path = base.partition("/")
    login, at, hosts = place.rpartition("@")
    given = (hosts or "localhost").split(",")
    name = path or "agent_saga"
    if not all(_HOST.fullmatch(host) for host in given) or not _ESCAPED.fullmatch(login):
        raise ValueError(f"this address cannot be understood: {_HOW}")
    if _NAME.fullmatch(name) is None:
        raise ValueError("the name of a NATS log has letters, digits, '_' and '-', at most 64")
    user, password, token = _login(login if at else None, own)
    replicas = own.get("replicas", "1")
    if replicas not in ("1", "3", "5"):
        raise ValueError("the option replicas is 1, 3 or 5")
    files = {option: own.get(option) or None for option in _FILES}
    tls = flag(own, "tls") or any(files[option] for option in _FILES if option.startswith("tls"))
    secrets = [quoted for secret in (password, token) if secret for quoted in (secret, quote(secret, safe=""))]
    return Address(
        servers=tuple(f"nats://{_with_port(host)}" for host in given),
        user=user,
        password=password,
        token=token,
        creds=files["creds"] or os.environ.get("NATS_CREDS") or None,
        tls=tls or bool(os.environ.get("NATS_CA")),
        tls_ca=files["tls_ca"] or os.environ.get("NATS_CA") or None,
        tls_cert=files["tls_cert"] or os.environ.get("NATS_CERT") or None,
        tls_key=files["tls_key"] or os.environ.get("NATS_KEY") or None,
        url=_shown(",".join(given), user if at and ":" in login else None, path, own),
        secrets=tuple(sorted(set(secrets), key=len, reverse=True)),
        name=name,
        replicas=int(replicas),
        require_sync=flag(own, "require_sync"),
        monitor=tuple(part for part in own.get("monitor", "").split(",") if part),
        lease=seconds(own, "lease", LEASE, least=0.5),
        timeout=seconds(own, "timeout", LEASE, least=0.0),
        max_result_bytes=result_bytes(own),
    )


def left_out(url: str) -> str:
    """What supplies the credentials that this address gives and that are not shown; empty if it gives none.

    Raises:
        ValueError: It is none.
    """
    address_of(url)
    base, _, query = url.removeprefix("nats://").partition("?")
    user, colon, password = base.partition("/")[0].rpartition("@")[0].partition(":")
    if colon:
        return "NATS_PASSWORD supplies the password" if password else ""
    if user and os.environ.get("NATS_PASSWORD"):  # then it is no token
        return "NATS_USER supplies the user"
    return "NATS_TOKEN supplies the token" if user or _options(query).get("token") else ""


def _login(login: str | None, own: dict[str, str]) -> tuple[str | None, str | None, str | None]:
    """User, password and token: what the address leaves out comes from the environment.

    A name alone is a token, as everywhere with NATS, unless the environment has the password that belongs to it.
    """
    user, colon, password = (login or "").partition(":")
    user, password = unquote(user), unquote(password)
    known = os.environ.get("NATS_PASSWORD") or None
    token = own.get("token") or os.environ.get("NATS_TOKEN") or None
    if colon:
        return user or None, password or known, None
    if user:
        return (user, known, None) if known else (None, None, user)
    return os.environ.get("NATS_USER") or None, known, token


def _options(query: str) -> dict[str, str]:
    own: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, equals, value = part.partition("=")
        if name not in _OPTIONS or not equals:
            raise ValueError(f"{unknown(name, query)}: {_HOW}")
        if not _ESCAPED.fullmatch(value):
            raise ValueError(f"this address cannot be understood: {_HOW}")
        own[name] = unquote(value)
    if not all(_HOST.fullmatch(part) for part in own.get("monitor", "").split(",") if part):
        raise ValueError("the option monitor is HOST:PORT of the servers' monitoring, with commas between several")
    return own


def _with_port(host: str) -> str:
    return host if re.search(r":[0-9]+$", host) else f"{host}:4222"


def _shown(hosts: str, user: str | None, path: str, own: dict[str, str]) -> str:
    # With the colon it stays a user, whatever the environment has.
    login = f"{quote(user, safe='')}:@" if user else ""
    options = "&".join(f"{name}={quote(value, safe='/:,')}" for name, value in own.items() if name != "token")
    return f"nats://{login}{hosts}" + (f"/{path}" if path else "") + (f"?{options}" if options else "")
