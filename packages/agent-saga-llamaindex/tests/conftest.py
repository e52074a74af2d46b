"""Nothing of these tests phones home, and nothing is downloaded: token counting uses what LlamaIndex ships."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_saga_core import MemoryLog, compensator
from agent_saga_core.registry import isolated_registry

sys.path.insert(0, str(Path(__file__).parent))
from llamaindex_fakes import Till

os.environ["TRANSFORMERS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    # To find the steps of an agent, workflows ask it for every one of its attributes, pydantic's old ones among them.
    for name in ("__fields__", "__fields_set__", "model_computed_fields", "model_fields"):
        config.addinivalue_line("filterwarnings", f"ignore:.*{name}.*:pydantic.warnings.PydanticDeprecationWarning")
    # Its agents ask in their own steps whether their run is running.
    config.addinivalue_line("filterwarnings", "ignore:is_running called from within a step:DeprecationWarning")


@pytest.fixture
def till() -> Iterator[Till]:
    """A till, whose refunds are registered while the test lasts."""
    with isolated_registry():
        made = Till()
        compensator("till.refund")(made.refund)
        yield made


@pytest.fixture
def log() -> Iterator[MemoryLog]:
    """A log."""
    with closing(MemoryLog()) as made:
        yield made
