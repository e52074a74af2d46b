"""Semantic Kernel without a network, and a world whose bookings stand in a list."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Spans go nowhere, and nothing looks for a place to send them.
os.environ["OTEL_SDK_DISABLED"] = "true"
sys.path.insert(0, str(Path(__file__).parent))

from agent_saga_core import MemoryLog, compensator, undo
from agent_saga_core.registry import isolated_registry


class World:
    """What the functions of a test have done."""

    def __init__(self) -> None:
        self.acts: list[tuple[str, str]] = []

    def book(self, item: str) -> dict[str, str]:
        self.acts.append(("book", item))
        return {"id": item}

    def unbook(self, id: str) -> None:
        self.acts.append(("undo", id))

    @property
    def booked(self) -> list[str]:
        return [item for act, item in self.acts if act == "book"]

    @property
    def standing(self) -> list[str]:
        left = self.booked
        for act, item in self.acts:
            if act == "undo":
                left.remove(item)
        return sorted(left)


@pytest.fixture
def world() -> Iterator[World]:
    """A world whose compensator is registered."""
    world = World()
    with isolated_registry():
        compensator("test.unbook")(world.unbook)
        yield world


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def by_result() -> dict[str, Any]:
    """Undone by what the call returned: nothing is known of one that failed."""
    return {"semantics": "COMPENSABLE", "compensate": undo("test.unbook", id="result.id")}


@pytest.fixture
def by_item() -> dict[str, Any]:
    """Undone by what the call was given, landed or not."""
    return {"semantics": "COMPENSABLE", "compensate": undo("test.unbook", if_absent="forbids", id="args.item")}
