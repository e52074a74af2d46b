"""What a log says, to somebody who owns nothing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from agent_saga_core import Log, SagaState, open_log, read_saga


def segment_of(directory: Path) -> Path:
    """The only segment of a file log that one process wrote."""
    (segment,) = directory.glob("w-*/*.jsonl")
    return segment


class Reader:
    """What the log at an address says; of a file log, the directory will do."""

    def __init__(self, log: str | Path) -> None:
        self.url = log if isinstance(log, str) else f"file:{log}"

    @contextmanager
    def opened(self) -> Generator[Log]:
        log = open_log(self.url, create=False)
        try:
            yield log
        finally:
            log.close()

    def state(self, saga: str = "order-7") -> SagaState:
        return read_saga(self.url, saga)

    def types(self, saga: str = "order-7") -> list[str]:
        return [entry["type"] for entry in self.state(saga).timeline]

    def intact(self) -> bool:
        with self.opened() as log:
            return log.verify().intact
