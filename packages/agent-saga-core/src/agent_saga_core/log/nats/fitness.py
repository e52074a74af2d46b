"""Whether the servers of a NATS log keep what they acknowledge, as far as they tell.

A client is not told how a server syncs: neither the greeting nor the JetStream API says it. Only the server's
monitoring does (`/varz`), whose address the user gives.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any, Final, cast

from agent_saga_core.log.nats.address import Address
from agent_saga_core.log.nats.connection import Refused, Server

__all__ = ["check_streams", "look"]

_WITHIN: Final = 3.0
_TELL: Final = "name the monitoring of every server (monitor=HOST:PORT,...) to have this checked"
_REMEDY: Final = 'set "sync_interval: always" in the jetstream section of its configuration'


async def look(server: Server, replicas: int) -> tuple[str, ...]:
    """What is to be known about how the servers sync, a sentence each.

    Args:
        server: The servers.
        replicas: How many of them hold the log.

    Raises:
        Refused: `require_sync` was asked for, and they do not sync, or do not tell.
    """
    address = server.address
    if not address.monitor:
        if address.require_sync:
            raise Refused(f"require_sync is set, and whether the servers sync cannot be seen; {_TELL}")
        return (
            f"whether the servers sync what they acknowledge cannot be seen: {_lost('2 minutes', replicas)}; {_TELL}",
        )
    answers = await asyncio.gather(*(asyncio.to_thread(_varz, place, address) for place in address.monitor))
    said = [
        said for place, found in zip(address.monitor, answers, strict=True) if (said := _said(place, found, replicas))
    ]
    if replicas > len(address.monitor):
        said.append(f"the log is on {replicas} servers, and the address names the monitoring of {len(address.monitor)}")
    if said and address.require_sync:
        raise Refused(f"require_sync is set, and {'; '.join(said)}")
    return tuple(said)


def _said(place: str, found: dict[str, Any] | str, replicas: int) -> str | None:
    if isinstance(found, str):
        return f"the server at {place} does not say whether it syncs ({found})"
    jetstream: dict[str, Any] = found.get("jetstream") or {}
    config: dict[str, Any] = jetstream.get("config") or {}
    if not config:
        return f"the server at {place} has no JetStream"
    if config.get("sync_always"):
        return None
    seconds = float(config.get("sync_interval", 120e9)) / 1e9
    return (
        f"the server at {place} syncs every {seconds:g} seconds: {_lost(f'{seconds:g} seconds', replicas)}; {_REMEDY}"
    )


def _lost(period: str, replicas: int) -> str:
    if replicas > 1:
        return (
            f"if so many of the {replicas} machines that hold the log lose power at once that no majority is left, "
            f"what was acknowledged in the last {period} may be lost"
        )
    return (
        "if the machine of the server crashes or loses power (not if only the server or this process dies), what was "
        f"acknowledged in the last {period} may be lost"
    )


def _varz(place: str, address: Address) -> dict[str, Any] | str:
    host, _, port = place.rpartition(":") if ":" in place.rpartition("]")[2] else (place, "", "8222")
    try:
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=_WITHIN)
        try:
            connection.request("GET", "/varz")
            answer = connection.getresponse()
            if answer.status != 200:
                return f"HTTP status {answer.status}"
            found: Any = json.loads(answer.read(2**22))
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return cast("dict[str, Any]", found) if isinstance(found, dict) else "it answers something else"


def check_streams(log: dict[str, Any], index: dict[str, Any]) -> int:
    """How many servers hold the log, given the configurations of its streams.

    Raises:
        Refused: Somebody has changed them so that records would vanish.
    """
    faults: list[str] = []
    for name, config, most in (("log", log, -1), ("index", index, 1)):
        expected = {
            "storage": "file",
            "retention": "limits",
            "max_age": 0,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_msgs_per_subject": most,
            "allow_direct": True,
            "deny_delete": False,
            "deny_purge": False,
            "sealed": False,
        }
        faults += [
            f"{option} of its {name} stream is {config.get(option)!r}"
            for option, value in expected.items()
            if config.get(option, value) != value
        ]
        if config.get("persist_mode", "default") not in ("default", ""):
            faults.append(f"persist_mode of its {name} stream is {config['persist_mode']!r}")
    if faults:
        raise Refused(f"it would lose records, because it is not as it was made: {', '.join(faults)}")
    return int(log.get("num_replicas", 1))
