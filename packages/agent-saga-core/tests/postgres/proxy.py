"""What stands between a PostgreSQL log and its server."""

from __future__ import annotations

import socket

from psycopg.conninfo import conninfo_to_dict

from ..servers.line import Line


class Proxy(Line):
    """Leads to the server of an address, on a port or at a socket of this machine."""

    def __init__(self, uri: str) -> None:
        self._target = {name: str(value) for name, value in conninfo_to_dict(uri).items() if value is not None}
        super().__init__()

    def address(self, url: str) -> str:
        user, name = self._target.get("user", "postgres"), self._target.get("dbname", "postgres")
        own = "&".join(part for part in url.partition("?")[2].split("&") if not part.startswith("host="))
        return f"postgresql://{user}@127.0.0.1:{self.port}/{name}?{own}"

    def connect(self) -> socket.socket:
        host, port = self._target.get("host", "localhost"), self._target.get("port") or "5432"
        if not host.startswith("/"):
            return socket.create_connection((host, int(port)))
        made = socket.socket(socket.AF_UNIX)
        try:
            made.connect(f"{host}/.s.PGSQL.{port}")
        except OSError:
            made.close()
            raise
        return made
