"""What importing an adapter costs beyond its framework and the core."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.tables import Row

PACKAGES = Path(__file__).parent.parent / "packages"
NAMES = "wrap_tool, saga_run, asaga_run, coverage"

# What the adapter brought in, less itself: imported before the clock starts.
_BEFORE = """
import sys, json, warnings
warnings.simplefilter("ignore")
from {module} import {names}
print(json.dumps([name for name in sys.modules if not name.startswith("{module}")]))
"""
_TIMED = """
import sys, json, time, warnings
warnings.simplefilter("ignore")
for name in json.load(sys.stdin):
    try:
        __import__(name)
    except Exception:
        pass
began = time.perf_counter()
from {module} import {names}
print(time.perf_counter() - began)
"""


def adapters() -> list[str]:
    """The import names of the adapters that are installed here."""
    found = sorted(
        path.name.replace("-", "_") for path in PACKAGES.glob("agent-saga-*") if path.name != "agent-saga-core"
    )
    return [module for module in found if importlib.util.find_spec(module) is not None]


def seconds(module: str, tries: int = 5) -> float:
    """Seconds that importing an adapter's four names takes when everything else of it is there; the best of some."""
    env = {**os.environ, "CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "PYTHONDONTWRITEBYTECODE": ""}

    def run(code: str, given: str = "") -> str:
        filled = code.format(module=module, names=NAMES)
        ran = subprocess.run(
            [sys.executable, "-c", filled], input=given, capture_output=True, text=True, check=True, env=env
        )
        return ran.stdout.splitlines()[-1]

    others = run(_BEFORE)
    assert isinstance(json.loads(others), list)
    return min(float(run(_TIMED, others)) for _ in range(tries))


def run(directory: Path) -> list[Row]:
    """One row for each adapter."""
    rows: list[Row] = []
    for module in adapters():
        took = seconds(module)
        rows.append(
            Row(
                what=f"`import {module}` beyond its framework and the core",
                measured=f"{took * 1e3:.0f} ms",
                goal="<= 20 ms",
                met=took <= 0.02,
                floor="-",
            )
        )
    return rows
