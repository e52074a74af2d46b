"""The log on a Redis or Valkey server; experimental. `docs/log-redis.md` describes it."""

from agent_saga_core.log.redis.log import RedisLog
from agent_saga_core.log.redis.schema import init, migrate

__all__ = ["RedisLog", "init", "migrate"]
