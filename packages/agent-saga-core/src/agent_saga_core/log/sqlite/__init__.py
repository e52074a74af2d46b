"""The log in a SQLite database: one machine, several processes, no server. `docs/log-sqlite.md` describes it."""

from agent_saga_core.log.sqlite.log import SqliteLog
from agent_saga_core.log.sqlite.schema import AFFECTED, init, migrate

__all__ = ["AFFECTED", "SqliteLog", "init", "migrate"]
