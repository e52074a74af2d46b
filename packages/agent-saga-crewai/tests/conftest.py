"""CrewAI phones home, asks questions and keeps a store unless its environment says otherwise, before it is imported.

It takes seconds to import, so nothing here does, and the test files do it when their first test runs.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agent_saga_core import FileLog, compensator
from agent_saga_core.registry import isolated_registry

HERE = Path(__file__).parent
WARNINGS = (
    # CrewAI reads its own deprecated fields when it copies and serialises agents.
    "ignore:function_calling_llm is deprecated:DeprecationWarning",
    "ignore:deprecated$:DeprecationWarning",
)

if "CREWAI_STORAGE_DIR" not in os.environ:  # a process of a test has its parent's
    os.environ["CREWAI_STORAGE_DIR"] = tempfile.mkdtemp(prefix="agent-saga-crewai-")
    atexit.register(shutil.rmtree, os.environ["CREWAI_STORAGE_DIR"], ignore_errors=True)
os.environ.update(
    CREWAI_DISABLE_TELEMETRY="true",
    CREWAI_DISABLE_TRACKING="true",
    CREWAI_DISABLE_VERSION_CHECK="true",
    CREWAI_TRACING_ENABLED="false",
    CREWAI_TESTING="true",  # no question whether to look at traces
    OTEL_SDK_DISABLED="true",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def crews() -> ModuleType:
    """`crews.py` beside this file: CrewAI with a model that plays a script."""
    name = "agent_saga_crewai_crews"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / "crews.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def done() -> Iterator[list[tuple[str, Any]]]:
    """What has happened, with a compensator `unpay` that takes it back."""
    acts: list[tuple[str, Any]] = []
    with isolated_registry():

        @compensator("unpay")
        def unpay(amount: int) -> None:
            acts.append(("unpay", amount))

        yield acts


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FileLog]:
    log = FileLog(tmp_path / "log")
    yield log
    log.close()
