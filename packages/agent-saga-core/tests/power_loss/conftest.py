"""Where the logs of these tests are."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# There, files are synced by an fcntl that the recording does not see.
collect_ignore_glob = ["test_*.py"] if sys.platform == "darwin" else []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: thousands of logs are opened here."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    directory = memory / f"agent-saga-power-{os.getpid()}-{tmp_path.name}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)
