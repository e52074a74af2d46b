"""CrewAI phones home, asks questions and keeps a store unless its environment says otherwise, before it is imported.

It takes seconds to import, so nothing here does, and the test files do it when their first test runs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

os.environ.update(
    CREWAI_DISABLE_TELEMETRY="true",
    CREWAI_DISABLE_TRACKING="true",
    CREWAI_DISABLE_VERSION_CHECK="true",
    CREWAI_TRACING_ENABLED="false",
    CREWAI_TESTING="true",  # no question whether to look at traces
    OTEL_SDK_DISABLED="true",
    CREWAI_STORAGE_DIR=tempfile.mkdtemp(prefix="agent-saga-crewai-"),
)


@pytest.fixture(scope="session")
def crews() -> ModuleType:
    """`crews.py` beside this file: CrewAI with a model that plays a script."""
    spec = importlib.util.spec_from_file_location("agent_saga_crewai_crews", Path(__file__).with_name("crews.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

HERE = Path(__file__).parent
WARNINGS = (
    # CrewAI reads its own deprecated fields when it copies and serialises agents.
    "ignore:function_calling_llm is deprecated:DeprecationWarning",
    "ignore:deprecated$:DeprecationWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
