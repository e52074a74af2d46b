"""The address of a PostgreSQL log: what of it is for the server, what is for us, and what may be shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from agent_saga_core.log.lease import LEASE
from agent_saga_core.log.options import flag, result_bytes, seconds, unknown

__all__ = ["Address", "address_of", "left_out"]

_OWN: Final = frozenset({"max_result_bytes", "schema", "lease", "timeout", "force"})
_SCHEMA_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_HOW: Final = (
    "write postgresql://user@host:port/database?option=value, with every special character of a name or password as "
    "% and two digits (%40 for @); the options are those of libpq and max_result_bytes=N, schema=NAME, lease=SECONDS, "
    "timeout=SECONDS and force=1"
)

# What a server or a network that went away must not hold up for ever, unless the address or the environment says else.
_DEFAULTS: Final = (
    ("connect_timeout", "PGCONNECT_TIMEOUT", "10"),
    ("keepalives_idle", "", "10"),
    ("keepalives_interval", "", "5"),
    ("keepalives_count", "", "3"),
    ("application_name", "PGAPPNAME", "agent-saga"),
)


class Address(NamedTuple):
    """An address, taken apart."""

    parameters: dict[str, str]
    """For libpq; the environment supplies what is not here."""
    url: str
    """Without credentials: what is shown, and opens the same log where the environment has the password."""
    secrets: tuple[str, ...]
    """What must not be in any message."""
    schema: str
    lease: float
    timeout: float
    max_result_bytes: int
    force: bool


def address_of(url: str) -> Address:
    """Take an address apart.

    Raises:
        ValueError: It is none. The message never repeats it, because it may hold a password.
    """
    base, _, query = url.partition("?")
    if not base.startswith(("postgresql://", "postgres://")):
        raise ValueError(f"this is no address of a PostgreSQL log: {_HOW}")
    own: dict[str, str] = {}
    rest: list[str] = []
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name in _OWN:
            own[name] = unquote(value)
        else:
            rest.append(part)
    found: Mapping[str, object] | None = None
    with suppress(psycopg.Error):
        found = conninfo_to_dict("?".join([base, "&".join(rest)]) if rest else base)
    if found is None:  # raised here, it is not chained to what repeats the address
        names = (part.partition("=")[0] for part in rest)
        stranger = next((name for name in names if unquote(name) not in _libpq_options()), None)
        said = "this address cannot be understood" if stranger is None else unknown(stranger, query)
        raise ValueError(f"{said}: {_HOW}")
    given = {name: str(value) for name, value in found.items() if value is not None}
    if not given.get("port", "").strip(","):  # as many as there are hosts, and none is said
        given.pop("port", None)
    if not all(port.isascii() and (port.isdigit() or not port) for port in given.get("port", "").split(",")):
        raise ValueError(f"this address cannot be understood: {_HOW}")
    schema = own.get("schema", "agent_saga")
    if _SCHEMA_NAME.fullmatch(schema) is None:
        raise ValueError("the option schema is a name of a to z, 0 to 9 and _, at most 63 long")
    timeout = seconds(own, "timeout", LEASE, least=0.0)
    secret = _secret_names()
    secrets = [given[name] for name in secret if given.get(name)]
    if os.environ.get("PGPASSWORD"):
        secrets.append(os.environ["PGPASSWORD"])
    return Address(
        parameters=_with_defaults(given, timeout),
        url=_shown(given, own, secret),
        secrets=tuple(sorted(secrets, key=len, reverse=True)),
        schema=schema,
        lease=seconds(own, "lease", LEASE, least=0.5),
        timeout=timeout,
        max_result_bytes=result_bytes(own),
        force=flag(own, "force"),
    )


def left_out(url: str) -> str:
    """What supplies the credentials that this address gives and that are not shown; empty if it gives none.

    Raises:
        ValueError: It is none.
    """
    given = address_of(url).parameters
    names = sorted(name for name in _secret_names() if given.get(name))
    return "; ".join(
        "PGPASSWORD supplies the password" if name == "password" else f"{name} is left out" for name in names
    )


def _libpq_options() -> frozenset[str]:
    # `ssl=true` is what JDBC writes, and libpq takes it for sslmode=require.
    return frozenset(option.keyword.decode() for option in Conninfo.get_defaults()) | {"ssl"}


def _secret_names() -> frozenset[str]:
    marked = {
        option.keyword.decode()
        for option in Conninfo.get_defaults()
        if option.dispchar and (option.dispchar == b"*" or option.keyword.startswith(b"scram_"))
    }
    return frozenset(marked | {"password", "sslpassword"})


def _with_defaults(given: dict[str, str], timeout: float) -> dict[str, str]:
    parameters = dict(given)
    for name, variable, value in _DEFAULTS:
        if not (variable and os.environ.get(variable)):
            parameters.setdefault(name, value)
    parameters.setdefault("tcp_user_timeout", str(int(max(timeout, 5.0) * 1000)))
    parameters["client_encoding"] = "UTF8"
    return parameters


def _shown(given: dict[str, str], own: dict[str, str], secret: frozenset[str]) -> str:
    left = {name: value for name, value in given.items() if name not in secret}
    user = left.pop("user", "")
    name = left.pop("dbname", "")
    host, port = left.get("host", ""), left.get("port", "")
    place = f"{quote(user, safe='')}@" if user else ""
    if re.fullmatch(r"[A-Za-z0-9._-]+", host) and port.isdigit() | (port == ""):
        place += host + (f":{port}" if port else "")
        left.pop("host")
        left.pop("port", None)
    options = "&".join(f"{key}={quote(value, safe='/:,')}" for key, value in [*left.items(), *own.items()])
    return f"postgresql://{place}/{quote(name, safe='')}" + (f"?{options}" if options else "")
