"""The write-ahead log: where the sagas' records live, who may write them, and when they are durable."""

from agent_saga_core.log.base import Compaction, Damage, Log, Unfinished, Verification
from agent_saga_core.log.file import FileLog
from agent_saga_core.log.memory import MemoryLog, MemoryStore
from agent_saga_core.log.open import open_log

__all__ = [
    "Compaction",
    "Damage",
    "FileLog",
    "Log",
    "MemoryLog",
    "MemoryStore",
    "Unfinished",
    "Verification",
    "open_log",
]
