"""Real processes, real kills, a log of whatever store, and the demo service as the world."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the workers import their modules by name, and so do the tests

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
