"""What stands between a Redis log and its server."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from ..servers.line import Line


class Proxy(Line):
    """Leads to the server of an address.

    Attributes:
        server_port: Of the server that new connections lead to; may be changed.
    """

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        self._login = parts.netloc.rpartition("@")[0]
        self._database = parts.path
        self._host, self.server_port = parts.hostname or "127.0.0.1", parts.port or 6379
        super().__init__()

    def address(self, url: str) -> str:
        login = f"{self._login}@" if self._login else ""
        return f"redis://{login}127.0.0.1:{self.port}{self._database}?{url.partition('?')[2]}"

    def connect(self) -> socket.socket:
        return socket.create_connection((self._host, self.server_port))
