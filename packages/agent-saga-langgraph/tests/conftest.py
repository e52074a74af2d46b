"""Nothing of these tests phones home."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["LANGSMITH_TRACING"] = "false"
os.environ["LANGCHAIN_TRACING_V2"] = "false"

sys.path.insert(0, str(Path(__file__).parent))  # for langgraph_fakes, which child processes import as well

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph_fakes import Till

from agent_saga_core import Log, open_log
from agent_saga_core.registry import isolated_registry


@pytest.fixture
def till() -> Iterator[Till]:
    """A world of its own, its compensators registered."""
    made = Till()
    with isolated_registry():
        made.register()
        yield made


@pytest.fixture
def log() -> Iterator[Log]:
    """A log of its own."""
    made = open_log("memory:")
    yield made
    made.close()


@pytest.fixture(params=["memory", "sqlite"])
def saver(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each of LangGraph's checkpointers."""
    if request.param == "memory":
        yield InMemorySaver()
        return
    with SqliteSaver.from_conn_string(":memory:") as made:
        yield made
