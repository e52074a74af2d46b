"""The log in NATS JetStream: several machines, one server or a cluster. `docs/log-nats.md` describes it."""

from agent_saga_core.log.nats.log import NatsLog
from agent_saga_core.log.nats.schema import init, migrate

__all__ = ["NatsLog", "init", "migrate"]
