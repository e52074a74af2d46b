"""The log in a PostgreSQL database: several machines, one server. `docs/log-postgres.md` describes it."""

from agent_saga_core.log.postgres.log import PostgresLog
from agent_saga_core.log.postgres.schema import init, migrate

__all__ = ["PostgresLog", "init", "migrate"]
