"""What the log on disk says."""

from __future__ import annotations

from pathlib import Path

from agent_saga_core import FileLog, SagaState, read_saga


def segment_of(directory: Path) -> Path:
    """The only segment of a log that one process wrote."""
    (segment,) = directory.glob("w-*/*.jsonl")
    return segment


class Reader:
    """What the log on disk says, read by a process that owns nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def state(self, saga: str = "order-7") -> SagaState:
        return read_saga(f"file:{self.directory}", saga)

    def types(self, saga: str = "order-7") -> list[str]:
        return [entry["type"] for entry in self.state(saga).timeline]

    def intact(self) -> bool:
        log = FileLog(self.directory, create=False)
        try:
            return log.verify().intact
        finally:
            log.close()
