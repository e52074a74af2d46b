"""What stands between a NATS log and its server."""

from __future__ import annotations

import socket

from ..servers.line import Line
from .server import through


class Proxy(Line):
    """Leads to the server of an address."""

    def __init__(self, uri: str) -> None:
        host, _, port = uri.removeprefix("nats://").partition("?")[0].partition("/")[0].rpartition(":")
        self._target = host.rpartition("@")[2], int(port)
        super().__init__()

    def address(self, url: str) -> str:
        return through(url, self.port)

    def connect(self) -> socket.socket:
        return socket.create_connection(self._target)
