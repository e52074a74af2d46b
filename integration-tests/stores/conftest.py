"""The processes, the world and the stores of the crash matrix, for what several processes do on one store."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))  # the workers import their modules by name

from crash_fixtures import (  # noqa: F401
    fresh_log,
    in_log,
    in_memory,
    log_dir,
    log_url,
    recovered,
    service,
    start,
    store,
    stores,
    who,
    world,
    zygote,
)
